"""slime's own classes and loss on the rows of a turnlog batch. For an environment with torch, Megatron, Ray and SGLang,
and a checkout of slime in PYTHONPATH; tests/integration/test_trainers.py runs it there."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.batches import synthetic_rows
from megatron.core import parallel_state
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean
from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training, validate_rollout_id_annotated
from slime.ray.rollout import RolloutManager
from slime.rollout.base_types import call_rollout_fn
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.ppo_utils import compute_policy_loss, get_grpo_returns
from slime.utils.types import Sample
from slime_rollouts import SealedBatches, convert_samples_to_train_data, generate_rollout, measured, samples_of
from torch.utils.tensorboard import SummaryWriter
from turnlog_losses import drifted, rows_at_one_temperature, same_gradient, step_loss

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.algorithms.tokens import Clip, clipped_surrogate

ARGS = Namespace(
    global_batch_size=1,
    advantage_estimator="grpo",
    normalize_advantages=False,
    calculate_per_token_loss=False,
    use_kl_loss=False,
    kl_coef=0.0,
    entropy_coef=0.0,
    rollout_temperature=1.0,
    use_dynamic_batch_size=True,
    max_tokens_per_gpu=96,
    balance_by_flops=False,
    balance_data=False,
    micro_batch_size=None,
    load_debug_rollout_data=None,
    rollout_top_p=1.0,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process groups of Megatron, of one rank, which slime's reducer asks for its share of a context."""
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def manager(data_source: Any = None) -> Any:
    """slime's RolloutManager without its engines, with the functions of slime_rollouts in the places of the options."""
    cls = RolloutManager.__ray_metadata__.modified_class
    made = object.__new__(cls)
    made.args, made.data_source = ARGS, data_source
    made.generate_rollout = generate_rollout
    made.custom_convert_samples_to_train_data_func = convert_samples_to_train_data
    return made


class OneBatch(SealedBatches):
    """A data source with one batch, of no run."""

    def __init__(self, rows: BatchRows) -> None:
        super().__init__(ARGS)
        self.rows = rows

    def take(self, rollout_id: int) -> Any:
        return Namespace(rows=self.rows)


def train_data(rows: BatchRows) -> dict[str, Any]:
    """What slime's manager hands to training, after its own checks of the samples."""
    made = manager(OneBatch(rows))
    samples, _ = made._get_rollout_data(rollout_id=7)
    assert all(type(sample) is Sample for sample in samples)
    data: dict[str, Any] = made._convert_samples_to_train_data(samples)
    return data


def slime_loss(rows: BatchRows, logprobs: torch.Tensor, *, ranks: int) -> torch.Tensor:
    """The loss of a step as slime's actor computes it over its micro batches, and adds it up over ranks."""
    data = train_data(rows)
    lengths = [len(tokens) for tokens in data["tokens"]]
    parallel = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    partitions, micro_batches, counts, sizes = build_dp_schedule(
        ARGS, parallel, lengths, global_batch_size=ARGS.global_batch_size, rollout_indices=data["rollout_ids"]
    )
    assert (len(counts), sizes) == (1, [1]), "a sealed batch is one optimizer step"
    assert sorted(row for rank in partitions for row in rank) == list(range(len(rows)))
    current = logprobs.split(rows.lengths.tolist())
    total = torch.zeros(())
    for partition, of_rank in zip(partitions, micro_batches, strict=True):
        own = {name: [values[row] for row in partition] for name, values in data.items()}
        tensorize_rollout_data_for_training(own)
        kl = [torch.zeros(length) for length in own["response_lengths"]]
        advantages = get_grpo_returns(torch.tensor(own["rewards"], dtype=torch.float32), kl)
        for members in of_rank:
            responses = [own["response_lengths"][each] for each in members]
            new = torch.cat([current[partition[each]][-own["response_lengths"][each] :] for each in members])
            old = torch.cat([own["rollout_log_probs"][each] for each in members])
            loss, _ = compute_policy_loss(old - new, torch.cat([advantages[each] for each in members]), 0.2, 0.28)
            reduce = get_sum_of_sample_mean(
                [len(own["tokens"][each]) for each in members],
                responses,
                [own["loss_masks"][each] for each in members],
                own["rollout_mask_sums"][list(members)],
            )
            total = total + reduce(loss)
    return total / ARGS.global_batch_size


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_of_slimes_actor_is_that_of_turnlogs_trainer(ranks: int) -> None:
    rows = rows_at_one_temperature()
    logprobs = drifted(rows).requires_grad_()
    ours, gradient = step_loss(rows, logprobs.detach(), clipped_surrogate, Clip(0.2, 0.28))
    theirs = slime_loss(rows, logprobs, ranks=ranks)
    assert theirs.item() == pytest.approx(ours, rel=1e-5)
    assert same_gradient(torch.autograd.grad(theirs, logprobs)[0], gradient)


def test_a_sample_has_its_row_and_passes_slimes_checks() -> None:
    rows = rows_at_one_temperature()
    samples = samples_of(rows, 4, 1.0)
    validate_rollout_id_annotated([[samples]])
    for row, (start, sample) in enumerate(zip(rows.starts.tolist(), samples, strict=True)):
        own = slice(start, start + int(rows.lengths[row]))
        sample._validate_response_metadata_lengths()
        assert sample.tokens == rows.token_ids[own].tolist()
        assert sample.loss_mask == rows.trained[own].tolist()[-sample.response_length :]
        assert sum(sample.loss_mask) == int(rows.trained[own].sum())
        assert sample.rollout_log_probs == rows.logprobs[own].tolist()[-sample.response_length :]
        assert (sample.reward, sample.session_id) == (rows.rewards[row], rows.session_ids[row])
        assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample, "slime can dump and load it"
    groups = [[sample.group_index for sample in samples if rows.group_ids[sample.index] == g] for g in rows.group_ids]
    assert all(len(set(group)) == 1 for group in groups)


def test_an_evaluation_of_slime_is_empty() -> None:
    told = call_rollout_fn(generate_rollout, ARGS, 0, OneBatch(synthetic_rows(1)), evaluation=True)
    assert told.data == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch_size": 8}, "--global-batch-size 1"),
        ({"normalize_advantages": True}, "--normalize-advantages"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss"),
        ({"use_kl_loss": True}, "--use-kl-loss"),
        ({"kl_coef": 0.1}, "--kl-coef"),
        ({"entropy_coef": 0.1}, "--entropy-coef"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo"),
    ],
)
def test_options_that_would_change_the_loss_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert_samples_to_train_data(
            Namespace(**{**vars(ARGS), **change}), samples_of(rows_at_one_temperature(), 0, 1.0)
        )


def test_rows_that_slime_cannot_express_are_refused() -> None:
    rows = rows_at_one_temperature()
    with pytest.raises(ValueError, match="one advantage per sample"):
        samples_of(
            dataclasses.replace(rows, advantages=rows.advantages * np.arange(len(rows.advantages), dtype="<f4")), 0, 1.0
        )
    with pytest.raises(ValueError, match=r"rollout-temperature.*\[feeder\] temperature"):
        samples_of(synthetic_rows(3), 0, 1.0)


def test_rows_at_another_temperature_than_that_of_slime_are_refused() -> None:
    rows = rows_at_one_temperature()
    cooler = dataclasses.replace(rows, temperature=np.full(len(rows), 0.7, "<f4"))
    args = Namespace(**{**vars(ARGS), "rollout_temperature": 0.7})
    told = call_rollout_fn(generate_rollout, args, 0, OneBatch(cooler), evaluation=False)
    assert len(told.samples[0]) == len(rows)
    with pytest.raises(ValueError, match=r"--rollout-temperature 0\.7, and a row was sampled at 1"):
        call_rollout_fn(generate_rollout, args, 0, OneBatch(rows), evaluation=False)


def test_the_figures_of_a_step_come_from_tensorboard(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step, loss in ((0, 0.5), (1, 0.25)):
            writer.add_scalar("train/loss", loss, step)
        writer.add_scalar("train/grad_norm", 2.0, 1)
    assert measured(str(tmp_path), 1) == {"train/loss": 0.25, "train/grad_norm": 2.0}
    assert measured(str(tmp_path), 2) == {}


def test_a_cursor_is_saved_and_loaded_beside_slimes_checkpoint(tmp_path: Path) -> None:
    args = Namespace(save=str(tmp_path), load=str(tmp_path), num_rollout=3)
    kept = SealedBatches(args)
    kept.cursor = {"offset": 5}
    kept.save(2)
    again = SealedBatches(args)
    again.load(2)
    assert again.cursor == {"offset": 5}
    assert not list(tmp_path.rglob("*.part"))
    fresh = SealedBatches(args)
    fresh.load(-1)
    assert fresh.cursor is None
