"""Parts of examples/trl_trainer.py that need no log: learning rates, microbatches, and whose checkpoint counts."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers.trainer_utils import rotate_checkpoints

from tests.fakes.batches import synthetic_model, synthetic_rows
from turnlog.settings import from_tables
from turnlog.trainer.plan import learning_plan

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/trl_trainer.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trl_trainer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rates_are_those_of_the_megatron_trainer(example: ModuleType, schedule: str, warmup: int) -> None:
    learning = {"learning_rate": 1e-3, "learning_rate_schedule": schedule, "warmup_steps": warmup}
    settings = from_tables({"trainer": learning, "feeder": {"draws": 8}}, {}, source="test")
    plan = learning_plan(settings, cuda=False)
    found = [1e-3 * example.share_of_rate(settings, step) for step in range(12)]
    assert found == pytest.approx([plan.learning_rate(step) for step in range(12)])


def test_microbatches_have_one_temperature_and_all_rows(example: ModuleType) -> None:
    rows = synthetic_rows(3, rows=5, lengths=np.array([5, 9, 2, 7, 3], "<i4"))
    rows = dataclasses.replace(rows, temperature=np.array([1.0, 0.5, 1.0, 0.5, 1.0], "<f4"))
    found = list(example.microbatches(rows, 14))
    assert [part for part, _ in found] == [[3], [1], [2, 4], [0]]
    for part, tensors in found:
        ids = np.concatenate([tensors["prompt_ids"], tensors["completion_ids"]], 1)
        for one, row in zip(ids, part, strict=True):
            start, length = rows.starts[row], rows.lengths[row]
            assert one[:length].tolist() == rows.token_ids[start : start + length].tolist()
        assert (tensors["completion_mask"].sum(1) + 1).tolist() == rows.lengths[part].tolist()
        assert tensors["tool_mask"].sum(1).tolist() == rows.trained_per_row()[part].tolist()


def test_a_generation_takes_the_newest_whole_checkpoint_and_leaves_its_predecessors_none(
    example: ModuleType, tmp_path: Path
) -> None:
    def checkpoint(generation: int, step: int, *, whole: bool = True) -> Path:
        folder = tmp_path / f"generation-{generation}/checkpoint-{step}"
        folder.mkdir(parents=True)
        if whole:
            (folder / example.CURSOR).write_text("{}")
        return folder

    assert example.newest_checkpoint(tmp_path) is None
    checkpoint(0, 2)
    newest = checkpoint(0, 10)
    checkpoint(0, 12, whole=False)  # a kill came before its cursor
    (tmp_path / "generation-1").mkdir()  # that one died before it took over
    assert example.newest_checkpoint(tmp_path) == newest
    own = example.take_over(tmp_path, 2, newest)
    assert own == tmp_path / "generation-2"
    checkpoint(1, 14)  # of a predecessor that is not dead yet
    assert example.newest_checkpoint(tmp_path) == own / "checkpoint-10"
    example.take_over(tmp_path, 1, None)  # that predecessor, which has not seen yet that it is fenced
    assert example.newest_checkpoint(tmp_path) == own / "checkpoint-10", "it removes nothing of its successor"


def test_a_whole_checkpoint_is_there_while_the_next_one_is_written(example: ModuleType, tmp_path: Path) -> None:
    settings = from_tables({"trainer": {"checkpoints_kept": 1}}, {}, source="test")
    own = tmp_path / "generation-0"
    for name in ("checkpoint-2", "checkpoint-4"):
        (own / name).mkdir(parents=True)
    (own / "checkpoint-2" / example.CURSOR).write_text("{}")
    rotate_checkpoints(str(own), example.grpo_config(settings, own).save_total_limit)
    assert example.newest_checkpoint(tmp_path) == own / "checkpoint-2"


def test_a_restart_keeps_the_moments_and_takes_the_settings_of_today(example: ModuleType, tmp_path: Path) -> None:
    def trainer(**learning: Any) -> Any:
        settings = from_tables({"trainer": learning, "feeder": {"draws": 8}}, {}, source="test")
        made = example.TurnlogTrainer(model, tmp_path / "out", None, settings)
        made.create_optimizer_and_scheduler(8)
        return made

    model = synthetic_model(tmp_path / "model")
    first = trainer(learning_rate=1e-3)
    for _ in range(3):
        for parameter in first.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        first.optimizer.step()
        first.lr_scheduler.step()
    first._save_optimizer_and_scheduler(str(tmp_path))
    changed = trainer(learning_rate=1e-4, learning_rate_schedule="cosine", weight_decay=0.3, beta1=0.8)
    fresh = [group["weight_decay"] for group in changed.optimizer.param_groups]
    changed._load_optimizer_and_scheduler(str(tmp_path))
    share = example.share_of_rate(changed._settings, 3)
    assert changed.lr_scheduler.get_last_lr() == pytest.approx([1e-4 * share] * len(fresh))
    for group, decay in zip(changed.optimizer.param_groups, fresh, strict=True):
        assert (group["lr"], group["betas"], group["weight_decay"]) == (pytest.approx(1e-4 * share), (0.8, 0.95), decay)
    assert 0.3 in fresh
    assert {int(state["step"]) for state in changed.optimizer.state.values()} == {3}


def test_the_dtype_is_that_of_the_settings(example: ModuleType, tmp_path: Path) -> None:
    for dtype, mixed in (("float32", False), ("bfloat16", True)):
        settings = from_tables({"trainer": {"dtype": dtype}}, {}, source="test")
        assert example.grpo_config(settings, tmp_path).bf16 is mixed


def test_a_loss_that_is_not_finite_is_logged_as_it_is(example: ModuleType, tmp_path: Path) -> None:
    assert not example.grpo_config(from_tables({}, {}, source="test"), tmp_path).logging_nan_inf_filter


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("algorithm", "sapo"),
        ("kl", "k3"),
        ("logprobs", "recomputed"),
        ("entropy_coefficient", 0.01),
        ("teacher", "m"),
        ("moe_aux_loss_coeff", 0.1),
        ("lora_rank", 8),
    ],
)
def test_a_loss_that_it_does_not_have_is_refused(example: ModuleType, tmp_path: Path, name: str, value: object) -> None:
    settings = from_tables({"trainer": {name: value}}, {}, source="test")
    with pytest.raises(ValueError, match=rf"\[trainer\] {name} is {value!r}"):
        example.grpo_config(settings, tmp_path)
