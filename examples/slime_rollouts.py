"""slime's trainer on the batches of a turnlog run. The options of slime's `train.py` that belong to it:

    --data-source-path slime_rollouts.SealedBatches
    --rollout-function-path slime_rollouts.generate_rollout
    --custom-convert-samples-to-train-data-path slime_rollouts.convert_samples_to_train_data
    --global-batch-size 1 --rollout-batch-size 1 --n-samples-per-prompt 1 --advantage-estimator grpo
    --colocate --rollout-num-gpus 0 --num-rollout STEPS --rollout-temperature TEMPERATURE
    --update-weight-transport disk --update-weight-disk-dir WEIGHTS --update-weight-disk-keep-files
    --custom-update-weight-post-write-path slime_rollouts.flush_metrics --use-tensorboard

with this folder in PYTHONPATH, and TURNLOG_RUN_DIRECTORY and TENSORBOARD_DIR in the environment. STEPS is one more than
the optimizer steps of the run: [feeder] draws x [batcher] updates_per_draw + 1. In the last one slime asks for a batch
after all, so that the last step is reported and its weights are published, and ends with EOFError. turnlog's engines
sample, so slime starts none. docs/trainers.md describes what must agree.
"""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import DataSource
from slime.utils.types import Sample

from turnlog.processors.core.batches.rows import BatchRows

LOSS, GRAD_NORM, RATE = "train/loss", "train/grad_norm", "train/lr-pg_0"
"""Names under which slime's Megatron actor reports a step to TensorBoard."""
BUFFER_S = 150.0
"""TensorBoard's writer holds values for two minutes at most. Only a checkpoint waits for it (`flush_metrics`)."""


def samples_of(rows: BatchRows, rollout_id: int, temperature: float) -> list[Sample]:
    """Return one slime Sample per row, in the order of the rows.

    The response of a sample begins with the first trained token of its row; `tokens` is the whole row. All samples have
    the rollout id `rollout_id`, because slime takes an optimizer step for every `--global-batch-size` rollouts: so a
    sealed batch is one step. The trajectory of a row is in `session_id`, and what slime has no field for in `metadata`.
    `temperature` is slime's `--rollout-temperature`. Raises ValueError for a row that was sampled at another one, and
    for a row whose advantages differ from token to token.
    """
    if (other := rows.temperature[rows.temperature != np.float32(temperature)]).size:
        raise ValueError(
            f"slime trains all rows at --rollout-temperature {temperature:g}, and a row was sampled at {other[0]:g}: "
            "set --rollout-temperature and [feeder] temperature to the same positive value, and sample all turns at it"
        )
    groups = {group: index for index, group in enumerate(dict.fromkeys(rows.group_ids))}
    samples = []
    for row, start in enumerate(rows.starts.tolist()):
        own = slice(start, start + int(rows.lengths[row]))
        trained = rows.trained[own]
        advantages = np.unique(rows.advantages[own][trained > 0])
        if len(advantages) > 1:
            raise ValueError(f"row {row}: slime has one advantage per sample, and the row has {len(advantages)}")
        response = slice(start + int(trained.argmax()) if trained.any() else own.stop - 1, own.stop)
        versions = sorted({int(rows.version_min[row]), int(rows.version_max[row])} - {-1})
        samples.append(
            Sample(
                group_index=groups[rows.group_ids[row]],
                index=row,
                rollout_id=rollout_id,
                tokens=rows.token_ids[own].tolist(),
                response_length=response.stop - response.start,
                reward=float(rows.rewards[row]),
                loss_mask=rows.trained[response].tolist(),
                rollout_log_probs=rows.logprobs[response].tolist(),
                weight_versions=[str(version) for version in versions],
                status=Sample.Status.COMPLETED,
                session_id=rows.session_ids[row],
                metadata={
                    "sample_id": rows.sample_ids[row],
                    "advantage": float(advantages[0]) if len(advantages) else 0.0,
                    "weight_divisor": int(rows.weight_divisor[row]),
                },
            )
        )
    return samples


def convert_samples_to_train_data(args: Namespace, samples: list[Sample]) -> dict[str, Any]:
    """Return slime's training data, with the advantages and weights of the rows in place of those slime computes.

    slime divides the sum of the token losses of a sample by `rollout_mask_sums`, and the sum of a step by
    `--global-batch-size`, which is 1. The estimators grpo, gspo and cispo give every token of a sample its `rewards`.
    Raises ValueError for options that would change the loss.
    """
    if args.global_batch_size != 1 or args.normalize_advantages or args.calculate_per_token_loss:
        raise ValueError(
            "turnlog weighs and scales the rows: set --global-batch-size 1, and leave out --normalize-advantages and "
            "--calculate-per-token-loss"
        )
    if args.use_kl_loss or args.kl_coef or args.entropy_coef:
        raise ValueError("the loss is that of the rows alone: leave out --use-kl-loss, --kl-coef and --entropy-coef")
    if args.advantage_estimator not in ("grpo", "gspo", "cispo"):
        raise ValueError(f"--advantage-estimator {args.advantage_estimator} would replace the advantages; set grpo")
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.metadata["advantage"] for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": [sample.rollout_id for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
        "rollout_mask_sums": [sample.metadata["weight_divisor"] for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def flush_metrics(args: Namespace, folder: str, engines: list[Any]) -> None:
    """Write TensorBoard's buffer to disk where the Megatron actor has one. slime calls this hook in every rank once it
    has written new weights."""
    from slime.observability.tensorboard_utils import _TensorboardAdapter
    from slime.utils.misc import SingletonMeta

    if _TensorboardAdapter in SingletonMeta._instances:
        _TensorboardAdapter(args)._writer.flush()


def measured(folder: str, step: int) -> dict[str, float]:
    """Return what slime reported to TensorBoard about a step (from 0), by name; the newest value of each counts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    found = {name: {each.step: each.value for each in events.Scalars(name)} for name in events.Tags()["scalars"]}
    return {name: values[step] for name, values in found.items() if step in values}


def wait_for_metrics(folder: str, step: int) -> dict[str, float]:
    """Return `measured` once the step's loss is there. Raises TimeoutError after BUFFER_S."""
    deadline = time.monotonic() + BUFFER_S
    while LOSS not in (found := measured(folder, step)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"slime did not report {LOSS} of step {step} in {folder}; set --use-tensorboard")
        time.sleep(1.0)
    return found


class SealedBatches(DataSource):
    """The sealed batches of the run as slime's data source, which slime saves and loads beside its checkpoints.

    slime's `train.py` calls `generate_rollout` for step k only when step k - 1 is trained and its weights are written.
    `train_async.py` does not, so it cannot be used; turnlog's engines sample while slime trains in any case.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.cursor: dict[str, Any] | None = None
        self.trainer: Any = None
        self.batches: Any = None
        self.waiting: tuple[int, Any] | None = None
        """(rollout id, batch) of a batch that slime has, and that is not reported yet."""
        self.updates = 0
        """Weight updates that slime has written since it started: one at its start, then one after each step."""

    def take(self, rollout_id: int) -> Any:
        """Report the step before, publish the newest weights and return the next batch. Raises EOFError behind the last
        one, once the trainer has left the run."""
        if self.trainer is None:
            import turnlog.client

            self.trainer = turnlog.client.connect().trainer(cursor=self.cursor).__enter__()
            self.batches = iter(self.trainer)
        self.report()
        self.updates += 1
        if self.trainer.publication_is_due:
            self.trainer.publish(Path(self.args.update_weight_disk_dir) / f"weight_v{self.updates:06d}")
        batch = next(self.batches, None)
        if batch is None:
            self.trainer.__exit__(None, None, None)
            raise EOFError("turnlog: all batches of the run are trained, and the last weights are published")
        self.waiting = (rollout_id, batch)
        return batch

    def report(self) -> None:
        """Report the batch that slime has trained, if there is one."""
        if self.waiting is None:
            return
        step, batch = self.waiting
        found = wait_for_metrics(os.environ["TENSORBOARD_DIR"], step)
        self.cursor = self.trainer.step_completed(
            batch,
            loss=found[LOSS],
            grad_norm=found[GRAD_NORM],
            learning_rate=found[RATE],
            metrics={f"slime/{name}": value for name, value in found.items() if name.startswith("train/")},
        )
        self.waiting = None

    def save(self, rollout_id: int) -> None:
        """Keep the cursor behind the step of `rollout_id`, which slime has just trained."""
        self.report()
        if self.trainer is not None:
            self.trainer.check_owner()
        file = self._file(self.args.save, rollout_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(self.cursor))
        part.rename(file)

    def load(self, rollout_id: int | None = None) -> None:
        """Continue behind the step of `rollout_id`; -1 or None: at the beginning. Raises FileNotFoundError."""
        if rollout_id is not None and rollout_id >= 0:
            file = self._file(self.args.load, rollout_id)
            if not file.exists():
                raise FileNotFoundError(f"{file}: slime ended while it saved; load the checkpoint before (--ckpt-step)")
            self.cursor = json.loads(file.read_text())

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        raise NotImplementedError("generate_rollout of this module takes whole batches")

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise NotImplementedError("turnlog decides which samples are trained")

    def __len__(self) -> int:
        return int(self.args.num_rollout)

    def _file(self, folder: str, rollout_id: int) -> Path:
        return Path(folder) / f"rollout/turnlog_cursor_{rollout_id}.json"


def generate_rollout(
    args: Namespace, rollout_id: int, data_source: SealedBatches, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the samples of the next sealed batch. turnlog evaluates by itself ([eval]), so an evaluation is empty."""
    if evaluation:
        return RolloutFnEvalOutput(data={})
    batch = data_source.take(rollout_id)
    return RolloutFnTrainOutput(samples=[samples_of(batch.rows, rollout_id, args.rollout_temperature)])
