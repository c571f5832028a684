"""verl's batch, its agent-loop output and its actor loss on the rows of a turnlog batch. For an environment of
trainers.lock; tests/integration/test_trainers.py runs it there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from turnlog_losses import drifted, rows_at_one_temperature, same_gradient, step_loss
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.utils.losses import ppo_loss
from verl_batches import agent_loop_outputs, data_proto, response_starts, worker_batch

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.tokens import Clip, clipped_surrogate

CLIP = Clip(0.2, 0.28, 3.0)


def actor_config() -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_mini_batch_size=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="token-sum",
        clip_ratio=0.2,
        clip_ratio_low=CLIP.low,
        clip_ratio_high=CLIP.high,
        clip_ratio_c=CLIP.dual,
    )


def verl_loss(rows: BatchRows, logprobs: torch.Tensor, which: slice, *, ranks: int, added: int) -> torch.Tensor:
    """The loss that one rank's actor computes for some rows, from log-probs in verl's own layout (nested, by row)."""
    batch: Any = worker_batch(data_proto(rows, divisible_by=added).slice(which.start, which.stop))
    tensordict_utils.assign_non_tensor(batch, dp_size=ranks, batch_num_tokens=int(rows.trained.sum()))
    by_row = [*logprobs.split(rows.lengths.tolist()), *[torch.zeros(2)] * (-len(rows) % added)]
    # verl's model returns at position t the log-prob of token t + 1.
    shifted = [torch.cat([each[1:], each[:1]]) for each in by_row][which]
    nested = torch.nested.as_nested_tensor(shifted, layout=torch.jagged)
    loss, _ = ppo_loss(actor_config(), {"log_probs": nested}, batch)
    return torch.as_tensor(loss)


def test_the_loss_of_verls_actor_is_that_of_turnlogs_trainer() -> None:
    rows = rows_at_one_temperature()
    logprobs = drifted(rows).requires_grad_()
    ours, gradient = step_loss(rows, logprobs.detach(), clipped_surrogate, CLIP)
    theirs = verl_loss(rows, logprobs, slice(None), ranks=1, added=1)
    assert theirs.item() == pytest.approx(ours, rel=1e-5)
    assert same_gradient(torch.autograd.grad(theirs, logprobs)[0], gradient)


def test_ranks_and_added_rows_do_not_change_the_loss() -> None:
    rows = rows_at_one_temperature()
    logprobs = drifted(rows)
    ranks, whole = 3, 18
    shares = [slice(rank * whole // ranks, (rank + 1) * whole // ranks) for rank in range(ranks)]
    parts = [verl_loss(rows, logprobs, share, ranks=ranks, added=ranks).item() for share in shares]
    # verl averages gradients over ranks.
    assert sum(parts) / ranks == pytest.approx(step_loss(rows, logprobs, clipped_surrogate, CLIP)[0], rel=1e-5)


def test_every_column_of_the_rows_is_in_the_batch() -> None:
    rows = rows_at_one_temperature()
    proto = data_proto(rows)
    proto.check_consistency()
    prompt = proto.batch["prompts"].shape[1]
    whole = torch.cat([proto.batch["prompts"], proto.batch["responses"]], 1)
    assert torch.equal(whole, proto.batch["input_ids"])
    for row, start in enumerate(rows.starts.tolist()):
        own = slice(start, start + int(rows.lengths[row]))
        attended = proto.batch["attention_mask"][row].bool()
        assert proto.batch["input_ids"][row][attended].tolist() == rows.token_ids[own].tolist()
        assert proto.batch["position_ids"][row][attended].tolist() == list(range(int(rows.lengths[row])))
        answer = attended[prompt:]
        before = int(response_starts(rows)[row])
        for name, column in (
            ("response_mask", rows.trained),
            ("rollout_log_probs", rows.logprobs),
            ("old_log_probs", rows.logprobs),
            ("advantages", rows.advantages),
        ):
            np.testing.assert_array_equal(proto.batch[name][row][answer].numpy(), column[own][before:], name)
            assert not column[own][:before].any() or name.endswith("log_probs")
        assert float(proto.batch["token_level_rewards"][row].sum()) == rows.rewards[row]
    assert proto.non_tensor_batch["uid"].tolist() == list(rows.group_ids)
    assert proto.non_tensor_batch["sample_id"].tolist() == list(rows.sample_ids)
    assert proto.meta_info["temperature"] == 1.0


def test_an_agent_loop_output_has_the_row_and_its_weight_versions() -> None:
    rows = rows_at_one_temperature()
    outputs = agent_loop_outputs(rows)
    assert len(outputs) == len(rows)
    for row, (start, output) in enumerate(zip(rows.starts.tolist(), outputs, strict=True)):
        own = slice(start, start + int(rows.lengths[row]))
        told = output.as_dict()
        assert torch.cat([told["prompts"], told["responses"]]).tolist() == rows.token_ids[own].tolist()
        assert int(told["response_mask"].sum()) == int(rows.trained[own].sum())
        assert float(told["rm_scores"].sum()) == rows.rewards[row]
        assert told["extra_fields"]["max_global_steps"] == int(rows.version_max[row])
        assert len(told["rollout_log_probs"]) == len(told["responses"])


def test_rows_of_several_temperatures_are_refused() -> None:
    rows = rows_at_one_temperature()
    mixed = dataclasses.replace(rows, temperature=np.linspace(0.5, 1, len(rows)).astype("<f4"))
    with pytest.raises(ValueError, match=r"\[feeder\] temperature"):
        data_proto(mixed)
