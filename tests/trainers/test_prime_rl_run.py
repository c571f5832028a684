"""The program of prime_rl_batches on a real run, whose settings are JSON in the file that SETTINGS names. The trainer
beside it is a thread without GPUs that reads, computes and writes by prime-rl's own code and in its files.
tests/integration/test_trainers.py runs it."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prime_rl.configs.trainer import DefaultLossConfig
from prime_rl.transports.rollouts import FileSystemMicroBatchReceiver, MicroBatch
from prime_rl_batches import Steps, train
from prime_rl_losses import losses_of
from safetensors.numpy import save_file

import turnlog.client
from turnlog.settings import from_tables

RANKS = 2


def write_weights(output: Path, step: int) -> None:
    folder = output / f"broadcasts/step_{step}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.array([step], "f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "STABLE").touch()


def lower(batch: MicroBatch) -> list[torch.Tensor]:
    """A policy that gives each token a little less than the engine did."""
    return list(torch.tensor(batch.inference_logprobs).sub(0.05).split(batch.sequence_lengths))


def take_steps(output: Path, first: int, last: int, losses: list[float]) -> None:
    """Take steps as prime-rl's trainer does."""
    write_weights(output, first - 1)
    receivers = [FileSystemMicroBatchReceiver(output, rank, first) for rank in range(RANKS)]
    for step in range(first, last + 1):
        batches = []
        for receiver in receivers:
            receiver.wait()
            batches += receiver.receive()
        found = [float(loss) for loss in losses_of(batches, lower, DefaultLossConfig())]
        losses.append(sum(found))
        write_weights(output, step)
        line = {"step": step, "loss/mean": sum(found) / len(found), "optim/lr": 1e-6, "optim/grad_norm": 1.0}
        with (output / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")


class Some:
    """A trainer of turnlog.client that gets some of the batches."""

    def __init__(self, trainer: Any, count: int) -> None:
        self.trainer, self.count = trainer, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.trainer, self.count)


def test_prime_rl_trains_the_batches_of_a_run_and_continues_behind_its_checkpoint(tmp_path: Path) -> None:
    settings = from_tables(json.loads(Path(os.environ["SETTINGS"]).read_text()), {}, source="test")
    run, losses, last = turnlog.client.connect(settings), list[float](), settings.feeder.draws
    for until in (2, last):  # a trainer that ends early, and the one that continues
        steps = Steps(tmp_path, ranks=RANKS, timeout_s=200.0)
        step, cursor = steps.reported()
        first = steps.held + 1
        trainer = threading.Thread(target=take_steps, args=(tmp_path, first, until, losses), daemon=True)
        trainer.start()
        with run.trainer(cursor=cursor) as sealed:
            train(Some(sealed, until + 1 - first), steps, step=step, seq_len=128)
        trainer.join()
        (tmp_path / f"checkpoints/step_{until}").mkdir(parents=True)
    Path(os.environ["SETTINGS"]).with_name("losses.json").write_text(json.dumps(losses))
