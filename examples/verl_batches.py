"""verl's workers on the batches of a turnlog run: in place of `RayPPOTrainer.fit`, once `init_workers` has returned,

    fit(trainer, turnlog.client.connect("runs/mine"))

with `actor_rollout_ref.actor.loss_agg_mode=token-sum`, `entropy_coeff=0` and `use_kl_loss=false`, and with `hf_model`
among `checkpoint.save_contents`. turnlog samples, rewards and compares, so verl's rollout, reward and advantage are not
used. docs/trainers.md describes what must agree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.utils import tensordict_utils
from verl.workers.utils.padding import left_right_2_no_padding

from turnlog.processors.core.batches.rows import BatchRows


def response_starts(rows: BatchRows) -> np.ndarray:
    """Return [n] the number of prompt tokens of each row: those before its first trained token, at least one.

    A row that trains nothing has a response of one token.
    """
    starts, ends = rows.starts, rows.starts + rows.lengths
    found = [int(rows.trained[start:end].argmax()) for start, end in zip(starts, ends, strict=True)]
    return np.where(rows.trained_per_row() > 0, found, rows.lengths - 1)


def data_proto(rows: BatchRows, *, pad_token_id: int = 0, divisible_by: int = 1) -> DataProto:
    """Return the rows as verl's batch, in their order: prompts padded left to P tokens, responses right to R.

    verl takes an optimizer step for every mini-batch, of a number of rows that its data-parallel ranks share evenly.
    Rows without a trained token are added up to a multiple of `divisible_by`; their uid is empty.

    | tensor | shape | |
    |---|---|---|
    | `prompts`, `responses` | [n, P], [n, R] int64 | |
    | `input_ids`, `attention_mask`, `position_ids` | [n, P + R] int64 | |
    | `response_mask` | [n, R] int64 | 1 where the token has a loss |
    | `rollout_log_probs`, `old_log_probs` | [n, R] float32 | the engine's log-probs |
    | `advantages`, `returns` | [n, R] float32 | |
    | `token_level_scores`, `token_level_rewards` | [n, R] float32 | the session's reward at the last token |
    | `rollout_is_weights` | [n, R] float32 | 1 / weight_divisor where trained |

    verl multiplies a token's loss by `rollout_is_weights`, and `token-sum` adds the tokens up. The sum is the loss that
    turnlog defines. verl has one temperature for all rows: others raise ValueError.
    """
    if len(set(rows.temperature.tolist())) > 1 or (rows.temperature <= 0).any():
        raise ValueError(
            "verl divides the logits of all rows by one positive temperature, and these rows were sampled at "
            f"{sorted(set(rows.temperature.tolist()))}: set [feeder] temperature above 0, and sample all turns at it"
        )
    n = -(-len(rows) // divisible_by) * divisible_by
    before = response_starts(rows)
    prompt, response = int(before.max()), int((rows.lengths - before).max())
    ids = np.full((n, prompt + response), pad_token_id, np.int64)
    attended = np.zeros((n, prompt + response), np.int64)
    masks = np.zeros((n, response), np.int64)
    floats = {name: np.zeros((n, response), np.float32) for name in ("logprobs", "advantages", "weights", "rewards")}
    attended[len(rows) :, [prompt - 1, prompt]] = 1  # the rows that are added have a prompt and a response of one token
    for row, start in enumerate(rows.starts.tolist()):
        own = slice(start, start + int(rows.lengths[row]))
        answer = slice(start + int(before[row]), own.stop)
        taken, whole = slice(0, answer.stop - answer.start), slice(prompt - int(before[row]), None)
        ids[row, whole][: own.stop - own.start] = rows.token_ids[own]
        attended[row, whole][: own.stop - own.start] = 1
        masks[row, taken] = rows.trained[answer]
        floats["logprobs"][row, taken] = rows.logprobs[answer]
        floats["advantages"][row, taken] = rows.advantages[answer]
        floats["weights"][row, taken] = rows.trained[answer] / rows.weight_divisor[row]
        floats["rewards"][row, taken.stop - 1] = rows.rewards[row]
    columns = {name: torch.from_numpy(values) for name, values in floats.items()}
    added = [""] * (n - len(rows))
    proto = DataProto.from_dict(
        tensors={
            "prompts": torch.from_numpy(ids[:, :prompt].copy()),
            "responses": torch.from_numpy(ids[:, prompt:].copy()),
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(attended),
            "position_ids": torch.from_numpy(np.maximum(np.cumsum(attended, 1) - 1, 0)),
            "response_mask": torch.from_numpy(masks),
            "rollout_log_probs": columns["logprobs"],
            "old_log_probs": columns["logprobs"].clone(),
            "advantages": columns["advantages"],
            "returns": columns["advantages"].clone(),
            "token_level_scores": columns["rewards"],
            "token_level_rewards": columns["rewards"].clone(),
            "rollout_is_weights": columns["weights"],
        },
        non_tensors={
            "uid": np.array([*rows.group_ids, *added], dtype=object),
            "session_id": np.array([*rows.session_ids, *added], dtype=object),
            "sample_id": np.array([*rows.sample_ids, *added], dtype=object),
        },
    )
    proto.meta_info["temperature"] = float(rows.temperature[0])
    return proto


def agent_loop_outputs(rows: BatchRows) -> list[Any]:
    """Return one verl AgentLoopOutput per row, for those who have an agent loop read turnlog's samples.

    `min_global_steps` and `max_global_steps` are the oldest and newest weight version of the row. Advantages and
    weights have no field: verl computes its own from `reward_score`, with the uid of the prompt as group.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    outputs = []
    for row, (start, before) in enumerate(zip(rows.starts.tolist(), response_starts(rows).tolist(), strict=True)):
        prompt, answer = slice(start, start + before), slice(start + before, start + int(rows.lengths[row]))
        outputs.append(
            AgentLoopOutput(
                prompt_ids=rows.token_ids[prompt].tolist(),
                response_ids=rows.token_ids[answer].tolist(),
                response_mask=rows.trained[answer].tolist(),
                response_logprobs=rows.logprobs[answer].tolist(),
                reward_score=float(rows.rewards[row]),
                metrics=AgentLoopMetrics(),
                extra_fields={
                    "min_global_steps": int(rows.version_min[row]),
                    "max_global_steps": int(rows.version_max[row]),
                },
            )
        )
    return outputs


def worker_batch(proto: DataProto) -> Any:
    """Return the TensorDict that verl's actor workers take for one optimizer step over all rows."""
    batch = left_right_2_no_padding(proto.to_tensordict())
    tensordict_utils.assign_non_tensor(
        batch,
        calculate_entropy=False,
        distillation_use_topk=False,
        distillation_only=False,
        global_batch_size=len(proto),
        mini_batch_size=len(proto),
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        compute_loss=True,
    )
    return batch


def last(value: Any) -> float:
    """Return a worker's metric, which is a number or a list of one number per mini-batch."""
    return float(value[-1] if isinstance(value, list) else value)


def cursor_file(folder: str, step: int) -> Path:
    """Return the file with turnlog's cursor behind `step`, in the folder of verl's checkpoint."""
    return Path(folder) / f"global_step_{step}" / "turnlog.json"


def loaded_cursor(folder: str, step: int) -> dict[str, Any] | None:
    """Return turnlog's cursor of the checkpoint that verl has loaded; None at step 0. Raises FileNotFoundError."""
    if not step:
        return None
    file = cursor_file(folder, step)
    if not file.exists():
        raise FileNotFoundError(
            f"{file}: verl loaded a checkpoint of step {step} that fit did not write, so every batch would be trained "
            "again; load one of fit's in trainer.default_local_dir, or set trainer.resume_mode=disable"
        )
    cursor: dict[str, Any] = json.loads(file.read_text())
    return cursor


def keep(file: Path, cursor: dict[str, Any]) -> None:
    """Write the cursor, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(cursor))
    part.rename(file)


def fit(trainer: Any, run: Any) -> None:
    """Have the workers of a verl RayPPOTrainer train every batch of the run (turnlog.client), one step for each.

    verl writes a checkpoint after each step, because turnlog's engines take the weights from its `huggingface` folder.
    Started again, it goes on behind the newest checkpoint, whose weights it publishes as they lie there. Raises
    ValueError for settings that would change the loss, and FileNotFoundError if verl has loaded a checkpoint without
    turnlog's cursor.
    """
    config, folder = trainer.config, trainer.config.trainer.default_local_dir
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode != "token-sum" or actor.entropy_coeff or actor.use_kl_loss:
        raise ValueError("set actor.loss_agg_mode=token-sum, actor.entropy_coeff=0 and actor.use_kl_loss=false")
    trainer.global_steps = 0
    trainer._load_checkpoint()
    cursor = loaded_cursor(folder, trainer.global_steps)
    with run.trainer(cursor=cursor) as sealed:
        if sealed.publication_is_due:
            step = trainer.global_steps
            sealed.publish(weights_folder(folder, step) if step else weights_of(trainer, folder))
        for batch in sealed:
            trainer.global_steps += 1
            proto = data_proto(batch.rows, divisible_by=trainer.actor_rollout_wg.world_size)
            output = trainer.actor_rollout_wg.update_actor(worker_batch(proto))
            found = {name: last(value) for name, value in tensordict_utils.get(output, "metrics").items()}
            cursor = sealed.step_completed(
                batch,
                loss=found["loss"],
                grad_norm=found["grad_norm"],
                learning_rate=found["lr"],
                metrics={f"verl/{name}": value for name, value in found.items()},
            )
            sealed.check_owner()
            keep(cursor_file(folder, trainer.global_steps), cursor)
            weights = weights_of(trainer, folder)
            if sealed.publication_is_due:
                sealed.publish(weights)


def weights_of(trainer: Any, folder: str) -> Path:
    """Write verl's checkpoint and return the folder with the weights in Hugging Face's format."""
    trainer._save_checkpoint()
    return weights_folder(folder, trainer.global_steps)


def weights_folder(folder: str, step: int) -> Path:
    """Return where verl's checkpoint of `step` has the weights in Hugging Face's format."""
    return Path(folder) / f"global_step_{step}" / "actor" / "huggingface"
