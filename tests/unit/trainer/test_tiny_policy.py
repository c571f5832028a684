"""A model's folder is made once, and whole, whoever asks and whoever died in it."""

from __future__ import annotations

import threading
from pathlib import Path

from turnlog.settings import from_tables
from turnlog.trainer.tiny_policy import copy_model, prepare_model


def test_a_recipes_tiny_model_learns_by_steps_of_its_own_unless_the_user_says_other_ones(tmp_path: Path) -> None:
    for said, rate, dtype in (({}, 8e-4, "float32"), ({"learning_rate": 1e-6, "dtype": "bfloat16"}, 1e-6, "bfloat16")):
        tiny = prepare_model(from_tables({"trainer": said}, {}, source="test"), {"XDG_CACHE_HOME": str(tmp_path)})
        assert (tiny.trainer.learning_rate, tiny.trainer.dtype) == (rate, dtype)
    own = prepare_model(from_tables({"model": {"path": tiny.model.path}}, {}, source="test"), {}).trainer
    assert (own.learning_rate, own.dtype) == (0.0, "auto")


def test_sources_of_one_name_have_tokenizers_of_their_own_demonstrations(tmp_path: Path) -> None:
    words = []
    for tool in ("", " tool=calculator"):
        text = f"reasoning-gym tasks=chain_sum max_terms=2 max_digits=1 format=line{tool}"
        settings = from_tables({"feeder": {"recipe": text}}, {}, source="test")
        model = Path(prepare_model(settings, {"XDG_CACHE_HOME": str(tmp_path)}).model.path)
        words.append((model / "tokenizer.json").read_text())
    assert words[0] != words[1]


def test_what_a_killed_one_left_is_no_part_of_it_and_goes(tmp_path: Path) -> None:
    model, left = tmp_path / "model", tmp_path / "copy.part"
    for folder, name in ((model, "config.json"), (left, "half")):
        folder.mkdir()
        (folder / name).write_text(name)
    assert [file.name for file in copy_model(model, tmp_path / "copy").iterdir()] == ["config.json"]
    assert not left.exists()


def test_two_at_once_find_one_whole_folder(tmp_path: Path) -> None:
    model, found = tmp_path / "model", list[list[str]]()
    model.mkdir()
    for number in range(50):
        (model / f"{number:02}").write_text("weights")

    def ask() -> None:
        found.append(sorted(file.name for file in copy_model(model, tmp_path / "copy").iterdir()))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[f"{number:02}" for number in range(50)]] * 4
