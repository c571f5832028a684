"""A policy to start from: a folder that transformers loads, and supervised steps that learn."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.batches import synthetic_model
from turnlog.trainer.checkpoints.places import file_sha256
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.warm_start import demonstration_rows, make_base, random_weights, warm_start
from turnlog.trainer.weights import read_weights, write_tensors

DEMONSTRATIONS = [([1, 5, 6, 7, 8, 2], [0, 0, 1, 1, 1, 1]), ([1, 9, 8, 7, 2], [0, 0, 1, 1, 1])]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return synthetic_model(tmp_path / "tokenizer")


def test_transformers_loads_a_base(tmp_path: Path, tokenizer: Path) -> None:
    make_base(TINY, tokenizer, tmp_path / "base", seed=4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert (model.config.eos_token_id, model.config.vocab_size) == (2, 384)
    wanted = random_weights(TINY, 4)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    assert read_shape(tmp_path / "base") == TINY
    assert (tmp_path / "base" / "tokenizer.json").exists()


def test_supervised_steps_learn_and_repeat_exactly(tmp_path: Path, tokenizer: Path) -> None:
    losses: list[list[float]] = []
    for name in ("one", "two"):
        losses.append([])
        warm_start(
            TINY,
            tokenizer,
            itertools.cycle(DEMONSTRATIONS),
            steps=25,
            learning_rate=3e-3,
            seed=0,
            folder=tmp_path / name,
            progress=lambda step, loss: losses[-1].append(loss),
            threads=1,
        )
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.8 * losses[0][0]
    one, two = read_weights(tmp_path / "one"), read_weights(tmp_path / "two")
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_imitated_tokens_weigh_equally_and_the_first_token_never_trains() -> None:
    rows = demonstration_rows([([1, 2, 3], [1, 1, 0]), ([4, 5], [0, 1])])
    assert rows.trained.tolist() == [0, 1, 0, 0, 1]
    assert rows.weight_divisor.tolist() == [2, 2]


def test_large_models_are_sharded_with_an_index(tmp_path: Path) -> None:
    tensors = random_weights(TINY, 0)
    written = write_tensors(tmp_path, tensors, shard_bytes=60_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == {name for name in written.sha256 if name.endswith(".safetensors")}
    assert {path.name for path in tmp_path.iterdir()} == set(written.sha256)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_weights(tmp_path).items())


def test_the_same_weights_give_the_same_bytes_whose_hashes_are_said(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (write_tensors(folder, random_weights(TINY, 0)) for folder in folders)
    assert one == two
    assert one.sha256 == {path.name: file_sha256(path) for path in folders[0].iterdir()}


def test_narrow_values_lie_behind_wide_ones_so_that_both_load(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.arange(5.0), "c": torch.tensor(2.5)}
    assert write_tensors(tmp_path, tensors).dtypes == {"float32", "bfloat16"}
    found = read_weights(tmp_path)
    assert {name: tensor.dtype for name, tensor in found.items()} == {name: t.dtype for name, t in tensors.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
