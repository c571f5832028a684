"""verl_batches.fit on a real run: settings as JSON in the file that SETTINGS names. The workers are one process without
GPUs, whose loss is that of verl's actor. tests/integration/test_trainers.py runs it in an environment of trainers.lock.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from test_verl import actor_config
from verl.utils import tensordict_utils
from verl.workers.utils.losses import ppo_loss
from verl_batches import fit

import turnlog.client
from turnlog.settings import from_tables


class Workers:
    """A worker group of verl: one worker, whose policy gives the tokens the engine's log-probs, a little lower."""

    world_size = 1

    def __init__(self, last: int) -> None:
        """`last`: number of updates after which the worker is gone."""
        self.last = last
        self.losses: list[float] = []

    def update_actor(self, batch: Any) -> Any:
        if len(self.losses) == self.last:
            raise RuntimeError("the worker is gone")
        tensordict_utils.assign_non_tensor(batch, dp_size=1, batch_num_tokens=1)
        lengths = batch["input_ids"].offsets().diff().tolist()
        answers = batch["response_mask"].shape[1]
        old, padded = batch["rollout_log_probs"], batch["attention_mask"]
        rows = []
        for row, length in enumerate(lengths):
            taken = int(padded[row, -answers:].sum())
            rows.append(torch.cat([torch.zeros(length - taken), old[row, :taken] - 0.05]).roll(-1))
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        loss, _ = ppo_loss(actor_config(), {"log_probs": nested}, batch)
        self.losses.append(float(loss))
        found = {"loss": float(loss), "grad_norm": [1.0], "lr": [1e-6], "actor/pg_loss": [float(loss)]}
        return tensordict_utils.get_tensordict({}, {"metrics": found})


class Trainer:
    """What fit uses of a RayPPOTrainer: settings, steps, workers, and checkpoints with weights in them."""

    def __init__(self, folder: Path, last: int = 1000) -> None:
        self.folder, self.global_steps, self.actor_rollout_wg = folder, 0, Workers(last)
        self.saved: list[int] = []
        actor = Namespace(loss_agg_mode="token-sum", entropy_coeff=0, use_kl_loss=False)
        kept = Namespace(default_local_dir=str(folder))
        self.config = Namespace(trainer=kept, actor_rollout_ref=Namespace(actor=actor))

    def _load_checkpoint(self) -> None:
        newest = self.folder / "latest_checkpointed_iteration.txt"
        self.global_steps = int(newest.read_text()) if newest.exists() else 0

    def _save_checkpoint(self) -> None:
        self.saved.append(self.global_steps)
        weights = self.folder / f"global_step_{self.global_steps}/actor/huggingface"
        weights.mkdir(parents=True, exist_ok=True)
        save_file({"w": np.array([self.global_steps], "f4")}, weights / "model.safetensors")
        (weights / "config.json").write_text("{}")
        (self.folder / "latest_checkpointed_iteration.txt").write_text(str(self.global_steps))


def test_fit_trains_the_batches_of_a_run_and_continues_behind_its_checkpoint(tmp_path: Path) -> None:
    settings = from_tables(json.loads(Path(os.environ["SETTINGS"]).read_text()), {}, source="test")
    run = turnlog.client.connect(settings)
    first, second = Trainer(tmp_path, last=2), Trainer(tmp_path)
    with pytest.raises(RuntimeError, match="the worker is gone"):
        fit(first, run)
    fit(second, run)
    assert first.saved == [0, 1, 2]
    assert second.saved == [3, 4], "the checkpoint that it loaded is the only one, and stays as it is"
    assert not list(tmp_path.rglob("*.part"))
    assert second.global_steps == settings.feeder.draws
    told = [*first.actor_rollout_wg.losses, *second.actor_rollout_wg.losses]
    Path(os.environ["SETTINGS"]).with_name("losses.json").write_text(json.dumps(told))


def test_a_checkpoint_without_a_cursor_is_refused_before_any_batch_is_trained_again(tmp_path: Path) -> None:
    foreign = Trainer(tmp_path)
    foreign.global_steps = 7
    foreign._save_checkpoint()
    with pytest.raises(FileNotFoundError, match=r"global_step_7/turnlog\.json.*step 7"):
        fit(Trainer(tmp_path), run=None)
