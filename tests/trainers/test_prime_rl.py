"""prime-rl's micro batches and loss on the rows of a turnlog batch. For an environment of trainers.lock with a checkout
of prime-rl in PYTHONPATH; tests/integration/test_trainers.py runs it there."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.batches import synthetic_rows
from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.transports.rollouts import FileSystemMicroBatchReceiver, MicroBatch
from prime_rl_batches import Steps, micro_batches, step_metrics
from prime_rl_losses import losses_of
from turnlog_losses import drifted, same_gradient, step_loss

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.tokens import Clip, within_total_variation

DPPO = functools.partial(within_total_variation, low=0.2, high=0.2, most=1e6)
"""`[trainer] algorithm` that is prime-rl's default loss without its divergence (kl_tau = 0)."""


def prime_rl_loss(rows: BatchRows, logprobs: torch.Tensor, grid: list[list[MicroBatch]]) -> torch.Tensor:
    """The loss of a step of prime-rl's trainer that gives the tokens of `rows` these log-probs."""
    of_row = logprobs.split(rows.lengths.tolist())
    which = {tuple(ids.tolist()): of_row[row] for row, ids in enumerate(np.split(rows.token_ids, rows.starts[1:]))}

    def current(batch: MicroBatch) -> list[torch.Tensor]:
        return [which[tuple(ids.tolist())] for ids in torch.tensor(batch.input_ids).split(batch.sequence_lengths)]

    batches = [batch for rank in grid for batch in rank]
    return torch.stack(losses_of(batches, current, DefaultLossConfig(kl_tau=0.0))).sum()


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_gradient_of_prime_rls_loss_is_that_of_turnlogs_trainer(ranks: int) -> None:
    """The values differ: prime-rl writes -r A, turnlog -r A log p without a gradient through r."""
    rows = synthetic_rows(5)
    logprobs = drifted(rows).requires_grad_()
    grid = micro_batches(rows, seq_len=64, ranks=ranks)
    assert len(grid) == ranks
    theirs = prime_rl_loss(rows, logprobs, grid)
    _, gradient = step_loss(rows, logprobs.detach(), DPPO, Clip(0.2, 0.2))
    assert same_gradient(torch.autograd.grad(theirs, logprobs)[0], gradient)
    weights = rows.trained / np.repeat(rows.weight_divisor, rows.lengths)
    ratio = np.exp(logprobs.detach().numpy() - rows.logprobs)
    moved = np.exp(logprobs.detach().numpy()) - np.exp(rows.logprobs)
    kept = np.where(rows.advantages > 0, moved <= 0.2, moved >= -0.2)
    assert theirs.item() == pytest.approx(float(-(weights * kept * ratio * rows.advantages).sum()), rel=1e-5)


def test_a_receiver_reads_what_the_program_sends(tmp_path: Path) -> None:
    rows = synthetic_rows(5)
    grid = micro_batches(rows, seq_len=128, ranks=2)
    steps = Steps(tmp_path, ranks=2)
    stale = tmp_path / "broadcasts/step_1"
    stale.mkdir(parents=True)
    (stale / "STABLE").touch()
    steps.send(1, grid)
    assert not (stale / "STABLE").exists(), "weights of an earlier trainer are not those of this step"
    for rank in range(2):
        receiver = FileSystemMicroBatchReceiver(tmp_path, rank, 1)
        assert receiver.can_receive()
        assert receiver.receive() == grid[rank]
    trained = sum(sum(batch.loss_mask) for rank in grid for batch in rank)
    assert trained == int(rows.trained.sum())
    temperatures = {
        t for rank in grid for batch in rank for t, m in zip(batch.temperatures, batch.loss_mask, strict=True) if m
    }
    assert temperatures == set(rows.temperature.tolist())


def test_a_row_that_prime_rl_would_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens"):
        micro_batches(synthetic_rows(5), seq_len=16, ranks=1)


def test_a_greedy_row_is_refused() -> None:
    rows = synthetic_rows(5)
    with pytest.raises(ValueError, match="greedily"):
        micro_batches(dataclasses.replace(rows, temperature=np.zeros(len(rows), "<f4")), seq_len=128, ranks=1)


def test_the_figures_of_a_step_come_from_the_file_monitor(tmp_path: Path) -> None:
    grid = micro_batches(synthetic_rows(5), seq_len=64, ranks=2)
    lines = [
        {"step": 1, "loss/mean": 9.0, "optim/lr": 1.0},
        {"step": 2, "optim/lr": 1e-6, "optim/grad_norm": 0.5},
        {"step": 2, "loss/mean": 0.25, "entropy/all/mean": 2.0, "mismatch_kl/all/mean": 0.01},
        {"step": 2, "time/forward_backward": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "opt')
    told = Steps(tmp_path, ranks=2).report(2, grid)
    assert told["loss"] == 0.25 * sum(map(len, grid))
    assert (told["grad_norm"], told["learning_rate"], told["entropy"]) == (0.5, 1e-6, 2.0)
    assert told["seconds"] == {"step": 3.0}
    assert step_metrics(tmp_path / "metrics.jsonl", 7) == {}


def test_the_figures_of_an_earlier_attempt_at_a_step_do_not_count(tmp_path: Path) -> None:
    grid = micro_batches(synthetic_rows(5), seq_len=64, ranks=1)
    metrics, steps = tmp_path / "metrics.jsonl", Steps(tmp_path, ranks=1, timeout_s=0)
    metrics.write_text('{"step": 1, "loss/mean": 9.0, "optim/lr": 1.0}\n{"step": 1, "opt')
    steps.send(1, grid)
    with pytest.raises(TimeoutError, match=r"start this program first, then the trainer"):
        steps.report(1, grid)
    with metrics.open("a") as file:
        file.write('{"step": 1, "loss/mean": 0.25, "optim/lr": 0.5}\n')
    assert steps.report(1, grid)["learning_rate"] == 0.5


def test_a_restart_waits_for_the_weights_that_the_trainer_writes_at_its_own_start(tmp_path: Path) -> None:
    for folder in ("checkpoints/step_3", "broadcasts/step_3"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "broadcasts/step_3/STABLE").touch()
    steps = Steps(tmp_path, ranks=1, timeout_s=0)
    with pytest.raises(TimeoutError, match="STABLE"):
        steps.weights(3)
    (tmp_path / "broadcasts/step_3/STABLE").touch()
    assert steps.weights(3) == tmp_path / "broadcasts/step_3"


def test_a_restart_continues_behind_the_newest_step_that_both_sides_know(tmp_path: Path) -> None:
    steps = Steps(tmp_path, ranks=1)
    assert (steps.held, steps.reported()) == (0, (0, None))
    for step in (1, 2, 4):
        steps.keep(step, {"behind": step})
    (tmp_path / "checkpoints/step_3").mkdir(parents=True)
    steps = Steps(tmp_path, ranks=1)
    assert steps.held == 3
    (tmp_path / "checkpoints/step_4").mkdir()
    assert steps.reported() == (2, {"behind": 2}), "the trainer repeats step 4, and step 3 is only reported"
    assert math.isnan(steps.report(3, [], over=True)["loss"])


def test_the_folders_are_those_that_prime_rl_names() -> None:
    """Steps names folders that prime-rl's helpers name."""
    from prime_rl.utils.pathing import get_broadcast_dir, get_ckpt_dir, get_step_path

    root = Path("outputs")
    assert get_step_path(get_broadcast_dir(root), 3) == root / "broadcasts/step_3"
    assert get_ckpt_dir(root) == root / "checkpoints"
