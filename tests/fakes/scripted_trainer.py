"""An external trainer with one weight, whose losses depend on every batch before: settings on stdin, its own checkpoint
and exports in the folder that is its argument. It is killed at any time and started again.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import turnlog.client
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.settings import Settings, from_tables

RATE = 0.01


def loss_of(weight: float, rows: BatchRows) -> float:
    per_token = (rows.logprobs + np.float32(weight)) * rows.advantages * rows.trained
    return float(per_token.astype("f8").sum() / rows.weight_divisor[0])


def read_checkpoint(folder: Path) -> tuple[float, dict[str, Any] | None]:
    try:
        held = json.loads((folder / "checkpoint.json").read_text())
    except FileNotFoundError:
        return 1.0, None
    return held["weight"], held["cursor"]


def write_checkpoint(folder: Path, weight: float, cursor: dict[str, Any]) -> None:
    part = folder / f"checkpoint.{os.getpid()}.part"
    part.write_text(json.dumps({"weight": weight, "cursor": cursor}))
    part.replace(folder / "checkpoint.json")


def export(folder: Path, weight: float) -> Path:
    """Write a model folder of one tensor, and return it."""
    folder.mkdir(exist_ok=True)
    save_file({"w": np.array([weight], "f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def train(settings: Settings, folder: Path, *, checkpoint_every: int = 3) -> None:
    weight, cursor = read_checkpoint(folder)
    ready = turnlog.client.connect(settings).trainer(cursor)
    print("opening", flush=True)
    with ready as trainer:
        print("began", trainer.generation, flush=True)
        if trainer.publication_is_due:
            trainer.publish(export(folder / f"export-{os.getpid()}", weight))
        for batch in trainer:
            loss = loss_of(weight, batch.rows)
            weight -= RATE * loss
            cursor = trainer.step_completed(batch, loss=loss, grad_norm=abs(loss), learning_rate=RATE)
            print("step", batch.manifest.batch_index, flush=True)
            if trainer.publication_is_due:
                trainer.publish(export(folder / f"export-{os.getpid()}", weight))
            if trainer.steps % checkpoint_every == 0:
                trainer.check_owner()
                write_checkpoint(folder, weight, cursor)
                print("saved", trainer.steps, flush=True)


if __name__ == "__main__":
    train(from_tables(json.load(sys.stdin), {}, source="test"), Path(sys.argv[1]))
