"""The data source of slime_rollouts on a real run, which the environment names. slime's actor is played by writing what
it writes: TensorBoard's values and folders of weights. tests/integration/test_trainers.py runs it."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from slime.rollout.base_types import call_rollout_fn
from slime_rollouts import SealedBatches, convert_samples_to_train_data, generate_rollout
from torch.utils.tensorboard import SummaryWriter


def write_weights(folder: Path, update: int) -> None:
    made = folder / f"weight_v{update:06d}"
    made.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.array([update], "f4")}, made / "model.safetensors")
    (made / "config.json").write_text("{}")


def test_slime_trains_the_batches_of_a_run_and_continues_behind_its_checkpoint(tmp_path: Path) -> None:
    draws, losses = int(os.environ["TURNLOG_FEEDER_DRAWS"]), []
    args = Namespace(
        update_weight_disk_dir=str(tmp_path / "weights"),
        save=str(tmp_path / "save"),
        load=str(tmp_path / "save"),
        num_rollout=draws + 1,
        global_batch_size=1,
        advantage_estimator="grpo",
        normalize_advantages=False,
        calculate_per_token_loss=False,
        use_kl_loss=False,
        kl_coef=0.0,
        entropy_coef=0.0,
        rollout_temperature=1.0,
    )
    with SummaryWriter(os.environ["TENSORBOARD_DIR"]) as board:
        for begin, end in ((0, 2), (2, args.num_rollout)):  # slime dies behind a checkpoint, and is started again
            source = SealedBatches(args)
            source.load(begin - 1)
            write_weights(tmp_path / "weights", 1)
            for rollout in range(begin, end):
                if rollout == draws:  # the error ends train.py
                    with pytest.raises(EOFError, match="all batches"):
                        call_rollout_fn(generate_rollout, args, rollout, source, evaluation=False)
                    break
                told = call_rollout_fn(generate_rollout, args, rollout, source, evaluation=False)
                data = convert_samples_to_train_data(args, told.samples[0])
                losses.append(float(np.mean(data["rewards"])))
                for name, value in (("loss", losses[-1]), ("grad_norm", 1.0), ("lr-pg_0", 1e-6)):
                    board.add_scalar(f"train/{name}", value, rollout)
                board.flush()
                write_weights(tmp_path / "weights", rollout - begin + 2)
                source.save(rollout)
    Path(os.environ["LOSSES"]).write_text(json.dumps(losses))
