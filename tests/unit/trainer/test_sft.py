"""`turnlog sft`: what a dataset gives to imitate, and that training on it repeats, resumes and loads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.batches import synthetic_model
from tests.fakes.pictures import encoded, painted
from tests.tiny_model import make_tiny_vision
from turnlog.infra.environments.sources import task_source
from turnlog.plugins.offline.export import ExportRefused
from turnlog.plugins.offline.sft import (
    BadDataset,
    BadNumber,
    Fetch,
    OtherSft,
    SftHyperparameters,
    SftRow,
    Split,
    Tuning,
    rows_of,
    split_rows,
)
from turnlog.plugins.recipes.warm_start import make_row_converter
from turnlog.schemas.events.turns import ImageRef
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import TINY, TINY_VISION
from turnlog.trainer.warm_start import random_weights
from turnlog.trainer.weights import read_weights, write_folder

NUMBERS = SftHyperparameters(epochs=3, rate=5e-3, rows=4, held_out=0.25, max_tokens=0, seed=1)
ASKED = {"role": "user", "content": "2 + 3 = ?"}
CALL = {"id": "c", "type": "function", "function": {"name": "python", "arguments": '{"code":"2+3"}'}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return synthetic_model(tmp_path / "policy")


@pytest.fixture
def split() -> Split:
    """Twelve tasks that all say the same after their own first token."""
    rows = [SftRow(f"t{task}", np.array([1, 20 + task, 7, 8, 9, 2], "<i4"), np.array([0, 0, 1, 1, 1, 1], "u1"))
            for task in range(12)]  # fmt: skip
    return split_rows(rows, TINY, NUMBERS)


def dataset(folder: Path, view: str, rows: list[dict[str, Any]]) -> Any:
    (folder / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "data/train-00000-of-00001.parquet")
    return SimpleNamespace(view=view, format="parquet", rows_sha256="0" * 64)


def unused(messages: Sequence[Mapping[str, Any]], tools: Any, ended: bool) -> list[Any]:
    raise AssertionError("recorded tokens are rendered by nobody")


def tuning(
    model: Path,
    out: Path,
    numbers: SftHyperparameters = NUMBERS,
    say: Callable[[str], None] | None = None,
    fetch: Fetch | None = None,
) -> tuple[Tuning, list[str]]:
    said: list[str] = []
    return Tuning(Settings(), model, out, numbers, "0" * 64, say or said.append, fetch or unread), said


def unread(refs: Sequence[BlobRef]) -> list[bytes]:
    raise AssertionError("text is fetched from nowhere")


def test_epochs_learn_and_say_the_loss_of_tasks_that_they_never_saw(model: Path, split: Split, tmp_path: Path) -> None:
    made, said = tuning(model, tmp_path / "better")
    made.run(split)
    before, *after = made.epochs
    assert len(split.held_out) == 3
    assert {row.task for row in split.held_out}.isdisjoint(row.task for row in split.train)
    assert after[-1].loss is not None
    assert before.held_out is not None
    assert after[-1].held_out is not None
    assert after[-1].held_out < 0.8 * before.held_out
    assert after[-1].tokens == 9 * 4
    assert any("held out" in line for line in said)
    written = json.loads((tmp_path / "better/sft.json").read_text())
    assert [each["held_out"] for each in written["losses"]] == [each.held_out for each in made.epochs]
    network: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "better").eval()
    batch = torch.from_numpy(np.stack([row.token_ids for row in split.held_out])).long()
    with torch.no_grad():
        logprobs = network(batch).logits[:, 1:-1].log_softmax(-1)
    loss = -logprobs.gather(-1, batch[:, 2:, None]).mean()
    assert float(loss) == pytest.approx(after[-1].held_out, abs=1e-5)
    assert not list(tmp_path.glob(".better*"))


@pytest.mark.long  # the suite kills a trainer in a step and between two updates
def test_a_killed_run_goes_on_after_its_last_epoch_to_the_same_bits(model: Path, split: Split, tmp_path: Path) -> None:
    whole, _ = tuning(model, tmp_path / "whole")
    whole.run(split)

    def dies(line: str) -> None:
        if line.startswith("epoch 2/3  step"):
            raise KeyboardInterrupt

    cut, _ = tuning(model, tmp_path / "cut", say=dies)
    with pytest.raises(KeyboardInterrupt):
        cut.run(split)
    assert not (tmp_path / "cut").exists()
    with pytest.raises(OtherSft, match=r"rate 0\.005, now 0\.1"):
        tuning(model, tmp_path / "cut", dataclasses.replace(NUMBERS, rate=0.1))[0].run(split)
    again, said = tuning(model, tmp_path / "cut")
    again.run(split)
    assert said[0].startswith("goes on after epoch 1")
    assert again.epochs == whole.epochs
    wanted = read_weights(tmp_path / "whole")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read_weights(tmp_path / "cut").items())
    with pytest.raises(ExportRefused):
        tuning(model, tmp_path / "cut")[0].run(split)


def test_recorded_tokens_are_imitated_where_they_trained(tmp_path: Path) -> None:
    recorded = {"task_id": "t", "sample_id": "s", "token_ids": [1, 5, 6, 2], "trained": [0, 0, 1, 1]}
    (row,) = rows_of(tmp_path, dataset(tmp_path, "rl", [recorded]), unused)
    assert (row.task, row.token_ids.tolist(), row.mask.tolist()) == ("t", [1, 5, 6, 2], [0, 0, 1, 1])
    assert row.images is None, "the dataset is of a release that named none"


def test_recorded_answers_to_images_are_imitated_with_the_images_before_them(tmp_path: Path) -> None:
    """The loss of tasks that are held out is transformers' of the model that was written."""
    from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

    model = make_tiny_vision(tmp_path / "policy")
    shape, processor = read_shape(model), cast(Any, AutoImageProcessor).from_pretrained(model)
    assert shape.vision is not None
    stored, rows, seen = dict[str, bytes](), list[dict[str, Any]](), list[Any]()
    for task in range(4):
        content = encoded(painted(60, 90, 60 * task))
        seen.append(processor(images=[painted(60, 90, 60 * task)], return_tensors="pt"))
        ref = BlobRef(hashlib.sha256(content).hexdigest(), len(content), "image/png")
        stored[ref.sha256] = content
        tokens = int(seen[-1]["image_grid_thw"].prod()) // shape.vision.merge**2
        image = dataclasses.asdict(ref) | {"position": 2, "tokens": tokens}
        ids = [7, 8, *[shape.vision.token] * tokens, 9, 20 + task, 30, 31]
        rows.append({"task_id": f"t{task}", "sample_id": f"s{task}", "token_ids": ids,
                     "trained": [0] * (len(ids) - 3) + [1, 1, 1], "images": [image]})  # fmt: skip
    numbers = dataclasses.replace(NUMBERS, epochs=1)
    split = split_rows(list(rows_of(tmp_path, dataset(tmp_path, "rl", rows), unused)), shape, numbers)
    made, _ = tuning(model, tmp_path / "better", numbers, fetch=lambda refs: [stored[ref.sha256] for ref in refs])
    made.run(split)
    network: Any = Qwen2_5_VLForConditionalGeneration
    written = network.from_pretrained(tmp_path / "better", dtype=torch.float32).eval()
    (row,) = split.held_out
    batch = torch.from_numpy(row.token_ids).long()[None]
    kinds = (batch == shape.vision.token).int()

    def loss(**shown: Any) -> float:
        with torch.no_grad():
            logits = written(input_ids=batch, **shown).logits[0, :-1]
        return -float(logits.log_softmax(-1).gather(-1, batch[0, 1:, None])[-3:].mean())

    wanted = loss(mm_token_type_ids=kinds, **seen[int(row.task[1:])])
    assert made.epochs[-1].held_out == pytest.approx(wanted, abs=1e-5)
    assert abs(loss() - wanted) > 1e-3, "what is seen is in every number"


@pytest.fixture(scope="module")
def calc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a chat template."""
    folder = tmp_path_factory.mktemp("calc")
    start = task_source("calc").warm_start
    assert start is not None
    start.write_tokenizer(folder)
    write_folder(folder, TINY, random_weights(TINY, 1), folder)
    return folder


def test_a_conversation_is_cut_where_the_model_speaks(calc: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    answer = {"role": "tool", "content": "5", "tool_call_id": "c"}
    messages = [ASKED, called, answer, {"role": "assistant", "content": "5"}]
    rows = [{"task_id": name, "messages": messages, "tools": "[]", "finish_reason": finish}
            for name, finish in (("ended", "stop"), ("cut", "length"))]  # fmt: skip
    manifest = dataset(tmp_path, "sft", rows)
    ended, cut = rows_of(tmp_path, manifest, make_row_converter(calc))
    tokenizer = Tokenizer.from_file(str(calc / "tokenizer.json"))

    def said(row: SftRow) -> str:
        found: str = tokenizer.decode(row.token_ids[row.mask == 1].tolist(), skip_special_tokens=False)
        return found

    assert said(ended) == '<tool_call>{"name":"python","arguments":{"code":"2+3"}}</tool_call><|im_end|>5<|im_end|>'
    assert said(ended) == f"{said(cut)}<|im_end|>"
    assert "2 + 3 = ?" in tokenizer.decode(ended.token_ids[ended.mask == 0].tolist())


def test_an_answer_that_the_template_writes_otherwise_later_begins_another_row(calc: Path, tmp_path: Path) -> None:
    thinking = tmp_path / "thinking"
    thinking.mkdir()
    for file in calc.iterdir():
        (thinking / file.name).write_bytes(file.read_bytes())
    template = (calc / "chat_template.jinja").read_text()
    thought = "{% if loop.last and message['reasoning_content'] %}{{ message['reasoning_content'] }}{% endif %}"
    text = "{% if message['content'] is string %}"
    (thinking / "chat_template.jinja").write_text(template.replace(text, thought + text))
    said = {"role": "assistant", "content": "5", "reasoning_content": "2+3="}
    rows = make_row_converter(thinking)([ASKED, said, ASKED, said], [], True)
    assert len(rows) == 2
    assert len(make_row_converter(calc)([ASKED, said, ASKED, said], [], True)) == 1


def test_what_cannot_be_imitated_is_refused_or_counted(tmp_path: Path) -> None:
    with pytest.raises(BadDataset, match="has the view preference"):
        list(rows_of(tmp_path, SimpleNamespace(view="preference", format="parquet", rows_sha256=""), unused))
    long, dumb = (SftRow("t", np.arange(tokens, dtype="<i4") % 9, np.zeros(tokens, "u1")) for tokens in (600, 4))
    good = SftRow("t", np.array([1, 2], "<i4"), np.array([0, 1], "u1"))
    assert split_rows([long, dumb, good], TINY, NUMBERS).removed == {"longer than 512 tokens": 1, "no answer": 1}
    with pytest.raises(BadDataset, match="no row is left"):
        split_rows([dumb], TINY, NUMBERS)
    with pytest.raises(BadDataset, match="token 384, the model has 384"):
        split_rows([SftRow("t", np.array([1, 384], "<i4"), np.array([0, 1], "u1"))], TINY, NUMBERS)
    shown = dataclasses.replace(good, images=(ImageRef(BlobRef("0" * 64, 1), 0, 1),))
    with pytest.raises(BadDataset, match=r"a row of task t has images, .* takes none \(qwen3\)"):
        split_rows([shown], TINY, NUMBERS)
    assert TINY_VISION.vision is not None
    old = dataclasses.replace(good, token_ids=np.array([1, TINY_VISION.vision.token], "<i4"), images=None)
    with pytest.raises(BadDataset, match=r"tokens of images, .* build it again"):
        split_rows([old], TINY_VISION, NUMBERS)
    with pytest.raises(BadNumber, match="held-out 1"):
        dataclasses.replace(NUMBERS, held_out=1.0).check()
