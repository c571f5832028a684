"""What a step reads beside its rows, on Megatron's model: passes, trajectories, masks, divergence, entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.each import each
from tests.fakes.batches import synthetic_rows, with_random_experts
from tests.reference.layouts import OBJECTIVES, Theirs, learner_of, ours
from tests.reference.plain import PlainLearner, of_row
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.batches.weighting import Whitening, whitening
from turnlog.trainer.algorithms.covariance import BatchTokens
from turnlog.trainer.algorithms.objective import ForwardPassResults, Objective
from turnlog.trainer.algorithms.tokens import (
    BUILT_IN,
    Algorithm,
    Auxiliary,
    Clip,
    CriticRules,
    TokenLoss,
    Tokens,
    chosen_auxiliary,
)
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner, StepResult
from turnlog.trainer.models.experts import RoutedRows
from turnlog.trainer.plan import LearnerOptions, PolicyGradient, imitation
from turnlog.trainer.warm_start import random_weights

ONE = LearnerOptions(threads=1, microbatch_tokens=200)
DECOUPLED = PolicyGradient(0.2, 0.2, logprobs="recomputed", importance="truncated", importance_high=1.05)


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def learner(reference: int | None = None, **options: Any) -> Learner:
    frozen = None if reference is None else random_weights(TINY, reference)
    return Learner(TINY, random_weights(TINY, 1), dataclasses.replace(ONE, **options), frozen)


def segments(seed: int) -> BatchRows:
    """Rows of which every two are segments of one trajectory."""
    return synthetic_rows(seed, segments=2)


def test_a_pass_gives_what_transformers_gives_and_nothing_where_nothing_trains() -> None:
    rows = synthetic_rows(0)
    found = learner(vocabulary_multiple=256).logprobs(rows)
    wanted = PlainLearner(TINY, random_weights(TINY, 1), ONE).columns(rows)
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        trained = rows.trained[start + 1 : start + length]
        np.testing.assert_allclose(found[start + 1 : start + length], wanted[row].numpy() * trained, atol=1e-5)
    assert not found[rows.trained == 0].any()


def test_a_pass_says_bit_for_bit_what_the_step_behind_it_says() -> None:
    rows, one = segments(0), learner()
    told = dataclasses.replace(rows, logprobs=one.logprobs(rows))
    assert one.step(told, PolicyGradient(), 1e-3).logprob_gap_max == 0.0


def test_the_reference_is_swapped_in_for_its_pass_alone() -> None:
    rows, one = synthetic_rows(0), learner(reference=2)
    one.step(rows, PolicyGradient(), 1e-3)
    before = one.export()
    found = one.reference_logprobs(rows)
    assert all(torch.equal(tensor, before[name]) for name, tensor in one.export().items())
    np.testing.assert_array_equal(found, Learner(TINY, random_weights(TINY, 2), ONE).logprobs(rows))
    other = learner()
    other.step(rows, PolicyGradient(), 1e-3)
    assert one.step(synthetic_rows(1), PolicyGradient(), 1e-3) == other.step(synthetic_rows(1), PolicyGradient(), 1e-3)


def test_a_gspo_step_is_that_of_transformers_over_trajectories_of_several_segments() -> None:
    objective = PolicyGradient(0.01, 0.01, algorithm=BUILT_IN["gspo"])
    one, plain = learner(), PlainLearner(TINY, random_weights(TINY, 1), ONE)
    for seed in range(3):
        ours, theirs = one.step(segments(seed), objective, 1e-3), plain.step(segments(seed), objective, 1e-3)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert 0 < ours.clip_fraction < 1
    after = plain.export()
    assert max(float((tensor - after[name]).abs().max()) for name, tensor in one.export().items()) < 1e-4


def test_decoupled_steps_of_a_draw_are_those_of_transformers_against_the_weights_before_its_first() -> None:
    one, plain = learner(), PlainLearner(TINY, random_weights(TINY, 1), ONE)
    parts = [segments(seed) for seed in range(3)]
    ours_old = [ForwardPassResults(proximal=one.logprobs(rows)) for rows in parts]
    theirs_old = [plain.columns(rows) for rows in parts]
    for rows, numbers, old in zip(parts, ours_old, theirs_old, strict=True):
        ours, theirs = one.step(rows, DECOUPLED, 1e-3, numbers), plain.step(rows, DECOUPLED, 1e-3, old)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-5)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        assert ours.metrics["importance_max"] > 1.05
    assert ours.metrics["ratio_max"] > 1.0


@pytest.mark.parametrize(
    "name",
    ["sapo", "cispo", "dual", "kl", "penalty", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "normalized"],
)
def test_steps_of_a_draw_are_those_of_transformers_by_each_loss(name: str) -> None:
    objective, batches = OBJECTIVES[name], [segments(seed) for seed in range(3)]
    one, plain = learner_of(TINY, ONE, objective), Theirs(TINY, ONE, objective)
    for (loss, norm), (wanted_loss, wanted_norm) in zip(
        ours(one, objective, batches), plain.draw(batches), strict=True
    ):
        assert loss == pytest.approx(wanted_loss, abs=1e-5)
        assert norm == pytest.approx(wanted_norm, rel=1e-5)


def test_the_one_update_of_a_draw_needs_no_pass_for_what_its_forward_says() -> None:
    rows = segments(0)
    assert DECOUPLED.passes(1) == frozenset()
    assert DECOUPLED.passes(2) == {"proximal"}
    without, one = learner().step(rows, DECOUPLED, 1e-3), learner()
    assert one.step(rows, DECOUPLED, 1e-3, ForwardPassResults(proximal=one.logprobs(rows))) == without
    assert without.metrics["ratio"] == 1.0


@pytest.mark.parametrize(
    ("level", "low", "high"), [("token", 0.97, 1.03), ("product", 0.5, 1.5), ("geometric", 0.97, 1.0)]
)
def test_masked_tokens_are_counted_and_no_divisor_changes(level: str, low: float, high: float) -> None:
    objective = dataclasses.replace(
        DECOUPLED, importance="masked", importance_level=level, importance_low=low, importance_high=high
    )
    rows, one = segments(0), learner()
    proximal = one.logprobs(rows)
    found = one.measure(rows, objective, ForwardPassResults(proximal=proximal))
    session = np.repeat([int(name.split("-")[2]) for name in rows.session_ids], rows.lengths)
    gap = np.where(rows.trained, proximal.astype("f8") - rows.logprobs, 0.0)
    sums, counts = (np.bincount(session, weights=column)[session] for column in (gap, rows.trained))
    weight = np.exp({"token": gap, "product": sums, "geometric": sums / counts}[level])
    kept = (weight >= low) & (weight <= high)
    divisor = np.repeat(rows.weight_divisor, rows.lengths)
    assert found.loss == pytest.approx(-float((weight * rows.advantages / divisor)[kept].sum()), abs=1e-6)
    assert found.masked == int(rows.trained[~kept].sum())
    assert found.trained_tokens == int(rows.trained.sum())
    assert 0 < found.masked < found.trained_tokens


def test_a_trajectory_whose_tokens_are_all_masked_moves_nothing() -> None:
    objective = dataclasses.replace(DECOUPLED, importance="masked", importance_level="product", importance_high=1.5)
    rows, one = segments(0), learner()
    far = dataclasses.replace(rows, logprobs=rows.logprobs - np.where(rows.trained, np.float32(1), np.float32(0)))
    found = one.step(far, objective, 1e-3, ForwardPassResults(proximal=one.logprobs(rows)))
    assert (found.loss, found.grad_norm, found.skipped) == (0.0, 0.0, False)
    assert found.masked == found.trained_tokens


def test_greedy_rows_are_masked_since_their_log_probs_are_of_no_temperature() -> None:
    rows = synthetic_rows(0)
    greedy = rows.temperature.copy()
    greedy[3] = 0.0
    mixed, one = dataclasses.replace(rows, temperature=greedy), learner()
    found = one.step(mixed, PolicyGradient(), 1e-3)
    start, length = int(rows.starts[3]), int(rows.lengths[3])
    silent = rows.advantages.copy()
    silent[start : start + length] = 0.0
    other = learner()
    wanted = other.step(dataclasses.replace(rows, advantages=silent), PolicyGradient(), 1e-3)
    assert (found.loss, found.skipped) == (pytest.approx(wanted.loss), False)
    assert found.grad_norm == pytest.approx(wanted.grad_norm)
    assert found.masked == int(rows.trained_per_row()[3])


def far(rows: BatchRows, row: int, gap: float, advantage: float) -> tuple[BatchRows, BatchRows]:
    """The rows with one trained token of a row that its engine found `gap` nats less likely, and with that advantage;
    the same with an advantage of 0 there, which no gradient comes of."""
    start, length = int(rows.starts[row]), int(rows.lengths[row])
    place = start + int(np.flatnonzero(rows.trained[start : start + length])[0])
    logprobs, advantages = rows.logprobs.copy(), rows.advantages.copy()
    logprobs[place] -= gap
    silent = advantages.copy()
    advantages[place], silent[place] = advantage, 0.0
    return (
        dataclasses.replace(rows, logprobs=logprobs, advantages=advantages),
        dataclasses.replace(rows, advantages=silent),
    )


@each("gap", [30.0, 120.0, -120.0])
@each("advantage", [1.0, 0.0, -1.0])
@each("name", BUILT_IN)
def test_a_token_that_its_engine_found_far_less_likely_does_not_take_the_step_over(
    name: str, advantage: float, gap: float
) -> None:
    algorithm = BUILT_IN[name]
    dual = 3.0 if algorithm.by_trajectory else 0.0  # the bound on a trajectory's mean is e^10
    objective = PolicyGradient(algorithm=algorithm, numbers=tuple(algorithm.arguments.values()), dual_clip=dual)
    rows, same = far(synthetic_rows(0), 2, gap, advantage)
    found, wanted = stepped(objective, rows), stepped(objective, same)
    assert not found.skipped
    assert all(np.isfinite(list(found.metrics.values())))
    if name not in ("gspo", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"):
        # It has no gradient, whatever it adds to the loss. Others bound its weight, or the mean over the batch has it.
        assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert found.grad_norm < 100


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"])
def test_a_masked_token_stays_out_of_the_gradient_however_far_its_log_probs_are(name: str) -> None:
    algorithm = BUILT_IN[name]
    objective = PolicyGradient(
        algorithm=algorithm, numbers=tuple(algorithm.arguments.values()), kl="k3", kl_coefficient=0.1
    )
    rows = synthetic_rows(0)
    greedy = rows.temperature.copy()
    greedy[3] = 0.0
    near = dataclasses.replace(rows, temperature=greedy)
    distant, _ = far(near, 3, 120.0, 1.0)
    one = learner(reference=2)
    reference = one.reference_logprobs(near)
    beyond = reference - np.where(np.repeat(greedy == 0.0, rows.lengths), np.float32(200), np.float32(0))
    found = one.step(distant, objective, 0.0, ForwardPassResults(reference=beyond))
    wanted = one.step(near, objective, 0.0, ForwardPassResults(reference=reference))
    assert not found.skipped
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-5)
    assert found.masked == int(rows.trained_per_row()[3])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_divergence_of_hundreds_of_nats_is_finite(kind: str) -> None:
    rows, one = synthetic_rows(0), learner(reference=2)
    away = one.reference_logprobs(rows) + np.where(rows.trained, np.float32(200), np.float32(0))
    found = one.step(rows, PolicyGradient(kl=kind, kl_coefficient=0.1), 0.0, ForwardPassResults(reference=away))
    assert not found.skipped


def stepped(objective: Objective, rows: BatchRows, **options: Any) -> StepResult:
    return learner(**options).step(rows, objective, 1e-3)


def test_entropy_and_divergence_in_the_loss_have_the_gradient_of_torch() -> None:
    rows = segments(1)
    one = learner(reference=2, vocabulary_multiple=256)
    numbers = ForwardPassResults(reference=one.reference_logprobs(rows))
    objective = PolicyGradient(kl="k3", kl_coefficient=0.5, entropy_coefficient=0.1)
    ours = one.step(rows, objective, 1e-3, numbers)
    plain = PlainLearner(TINY, random_weights(TINY, 1), ONE)
    frozen = PlainLearner(TINY, random_weights(TINY, 2), ONE).columns(rows)
    total = torch.zeros(())
    for row in range(len(rows)):
        recorded, advantages, mask = (of_row(rows, x, row) for x in (rows.logprobs, rows.advantages, rows.trained))
        logprobs = plain.logprobs(rows, row)
        ratio = (logprobs - recorded).exp()
        value = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        gap = logprobs - frozen[row]
        whole = plain.distribution(rows, row)
        value = value + 0.5 * ((-gap).exp() - 1 + gap) + 0.1 * (whole.exp() * whole).sum(-1)
        total = total + (value * mask).sum() / float(rows.weight_divisor[row])
    gradients = torch.autograd.grad(total, list(plain.parameters()))
    norm = float(torch.stack([one.square().sum() for one in gradients]).sum().sqrt())
    assert ours.loss == pytest.approx(float(total.detach()), abs=1e-5)
    assert ours.grad_norm == pytest.approx(norm, rel=1e-5)
    assert ours.metrics["kl"] > 0


def test_a_divergence_in_the_reward_is_taken_off_the_advantages_from_the_token_to_the_end_of_its_segment() -> None:
    rows, one = segments(2), learner(reference=2)
    objective = PolicyGradient(kl="k1", kl_coefficient=0.2, kl_in="reward")
    assert objective.passes(1) == {"proximal", "reference"}
    numbers = ForwardPassResults(one.logprobs(rows), one.reference_logprobs(rows))
    assert numbers.proximal is not None
    assert numbers.reference is not None
    wanted = rows.advantages.astype("f8")
    for start, length in zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True):
        for place in range(start, start + length):
            rest = slice(place, start + length)
            to_go = (numbers.proximal - numbers.reference).astype("f8")[rest] * rows.trained[rest]
            wanted[place] = (wanted[place] - 0.2 * to_go.sum()) * rows.trained[place]
    found, _ = objective.prepare(rows, numbers, None)
    np.testing.assert_allclose(found.advantages, wanted, rtol=1e-5, atol=1e-6)
    penalised = dataclasses.replace(rows, advantages=wanted.astype("f4"))
    ours, theirs = one.step(rows, objective, 1e-3, numbers), stepped(PolicyGradient(), penalised)
    assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)


def of_one_token(rewards: list[float], whitening: Whitening | None) -> BatchRows:
    """A row of one trained token for each reward, which stands in its advantage as the batcher whitens it."""
    rows = synthetic_rows(0, rows=len(rewards))
    trained = np.zeros_like(rows.trained)
    trained[rows.starts + 1] = 1
    told = np.array(rewards) if whitening is None else whitening.apply(np.array(rewards))
    advantages = np.zeros(len(rows.token_ids), "<f4")
    advantages[rows.starts + 1] = told
    return dataclasses.replace(rows, trained=trained, advantages=advantages)


@pytest.mark.parametrize(
    ("rewards", "gaps"),
    [([1.0, 0.0], [1.0, 0.0]), ([1.0, 0.0, 1.0, 0.5], [3.0, -1.0, 0.5, 0.0]), ([1.0, 1.0], [2.0, 1.0])],
)
def test_whitened_advantages_are_whitened_with_the_divergence_in_the_reward(
    rewards: list[float], gaps: list[float]
) -> None:
    objective = PolicyGradient(kl="k1", kl_coefficient=0.1, kl_in="reward")
    white = whitening([np.array(rewards)])
    rows = of_one_token(rewards, white)
    proximal = np.zeros(len(rows.token_ids), "<f4")
    proximal[rows.starts + 1] = gaps
    numbers = ForwardPassResults(proximal, np.zeros_like(proximal), whitening_std=white.std)
    found, _ = objective.prepare(rows, numbers, None)
    earned = np.array(rewards) - 0.1 * np.array(gaps)
    wanted = (earned - earned.mean()) / (earned.std() + 1e-6)
    np.testing.assert_allclose(found.advantages[rows.starts + 1], wanted, rtol=1e-4, atol=1e-5)
    plain = dataclasses.replace(numbers, whitening_std=None)
    unwhitened, _ = objective.prepare(of_one_token(rewards, None), plain, None)
    np.testing.assert_allclose(unwhitened.advantages[rows.starts + 1], earned, rtol=1e-5)


@pytest.mark.parametrize("importance", ["truncated", "masked"])
@pytest.mark.parametrize("level", ["token", "product", "geometric"])
def test_weights_of_tokens_that_their_engine_found_far_less_likely_are_finite(importance: str, level: str) -> None:
    objective = dataclasses.replace(DECOUPLED, importance=importance, importance_level=level, normalize_importance=True)
    one = learner()
    rows, _ = far(segments(0), 2, 120.0, -1.0)
    found = one.step(rows, objective, 1e-3, ForwardPassResults(proximal=one.logprobs(rows)))
    assert not found.skipped
    assert all(np.isfinite(list(found.metrics.values())))
    assert found.metrics["importance_max"] > 1.05


@pytest.mark.parametrize("name", ["gspo", "sapo", "cispo", "clip_cov", "kl_cov", "dppo_tv"])
def test_microbatches_do_not_change_a_step(name: str) -> None:
    objective = PolicyGradient(0.05, 0.05, algorithm=BUILT_IN[name], numbers=tuple(BUILT_IN[name].arguments.values()))
    few, many = (stepped(objective, segments(3), microbatch_tokens=limit) for limit in (10_000, 80))
    assert few.loss == pytest.approx(many.loss, abs=1e-6)
    assert few.grad_norm == pytest.approx(many.grad_norm, rel=1e-5)
    assert few.metrics == pytest.approx(many.metrics, rel=1e-5)


def test_a_trajectory_of_no_trained_token_adds_nothing_under_a_sequence_ratio() -> None:
    rows = synthetic_rows(0)
    trained, start, length = rows.trained.copy(), int(rows.starts[0]), int(rows.lengths[0])
    trained[start : start + length] = 0
    silent = dataclasses.replace(rows, trained=trained, advantages=rows.advantages * trained)
    found = stepped(PolicyGradient(algorithm=BUILT_IN["gspo"]), silent)
    assert not found.skipped
    assert np.isfinite(found.loss)
    assert found.trained_tokens == int(trained.sum())


def test_imitation_measures_nothing() -> None:
    assert stepped(imitation, synthetic_rows(0)).metrics == {}


def test_an_auxiliary_loss_has_a_divisor_of_its_own_and_a_step_is_that_of_transformers() -> None:
    auxiliary, numbers = chosen_auxiliary("imitate:1")
    objective = PolicyGradient(auxiliary=auxiliary, auxiliary_numbers=numbers, auxiliary_coefficient=0.3)
    rows, one = segments(1), learner()
    plain = PlainLearner(TINY, random_weights(TINY, 1), ONE)
    result = one.step(rows, objective, 1e-3)
    good = np.repeat(rows.rewards >= 1, rows.lengths) & (rows.trained == 1)
    total = torch.zeros(())
    for row in range(len(rows)):
        recorded, advantages, mask = (of_row(rows, x, row) for x in (rows.logprobs, rows.advantages, rows.trained))
        logprobs = plain.logprobs(rows, row)
        ratio = (logprobs - recorded).exp()
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        own = -(surrogate * mask).sum() / float(rows.weight_divisor[row])
        beside = -(logprobs * of_row(rows, good, row)).sum() / float(good.sum())
        loss = own + 0.3 * beside
        torch.autograd.backward(loss)
        total = total + loss.detach()
    gradients = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    assert result.loss == pytest.approx(float(total), abs=1e-5)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    without = learner().step(rows, PolicyGradient(), 1e-3)
    assert result.metrics["auxiliary_loss"] == pytest.approx(result.loss - without.loss, abs=1e-5)


def test_an_auxiliary_loss_may_train_tokens_that_nothing_else_trains_and_no_masked_ones() -> None:
    everything = Auxiliary("all", lambda tokens: -tokens.logprobs, lambda rows: np.ones(len(rows.token_ids)))
    nothing = dataclasses.replace(segments(1), advantages=np.zeros_like(segments(1).advantages))
    objective = PolicyGradient(auxiliary=everything, auxiliary_coefficient=1.0)
    found = learner().measure(nothing, objective)
    plain = PlainLearner(TINY, random_weights(TINY, 1), ONE)
    wanted = -sum(float(column.sum()) for column in plain.columns(nothing))
    assert found.loss == pytest.approx(wanted, rel=1e-5)
    assert found.loss == found.metrics["auxiliary_loss"]
    greedy = dataclasses.replace(nothing, temperature=np.zeros_like(nothing.temperature))
    assert learner().measure(greedy, objective).loss == 0.0


def without_two_groups(rows: BatchRows) -> BatchRows:
    """The rows with advantages of 0 in the first and the third of their groups."""
    still = np.isin(rows.group_ids, sorted(set(rows.group_ids))[::2])
    return dataclasses.replace(
        rows, advantages=np.where(np.repeat(still, rows.lengths), np.float32(0), rows.advantages)
    )


def gradients(objective: PolicyGradient, rows: BatchRows) -> tuple[dict[str, torch.Tensor], int, StepResult]:
    """(gradient by parameter, positions that the model was run on, what the step said) of a step that moves nothing."""
    one, ran = learner(), []
    one.policy.model.register_forward_pre_hook(lambda _, given: ran.append(given[0].numel()))
    proximal = one.logprobs(rows) if "proximal" in objective.passes(2) else None
    result = one.step(rows, objective, 0.0, ForwardPassResults(proximal=proximal))
    found: dict[str, Any] = {name: one.main_grad.clone() for name, one in one.policy.model.named_parameters()}
    return found, sum(ran), result


GEOMETRIC = dataclasses.replace(DECOUPLED, importance_level="geometric")


@pytest.mark.parametrize(
    "objective", [PolicyGradient(), GEOMETRIC, PolicyGradient(0.01, 0.01, algorithm=BUILT_IN["gspo"])]
)
def test_groups_without_an_advantage_are_not_computed_and_the_gradient_is_the_same(objective: PolicyGradient) -> None:
    rows = without_two_groups(segments(0))
    computed = objective.rows_to_compute(rows)
    (wanted, all_positions, whole), (found, positions, result) = (gradients(objective, one) for one in (rows, computed))
    assert set(computed.group_ids) == set(sorted(set(rows.group_ids))[1::2])
    assert max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-7
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-3
    assert positions < 0.7 * all_positions
    assert result.loss == pytest.approx(whole.loss, abs=1e-7)
    assert result.trained_tokens == int(computed.trained.sum()) < whole.trained_tokens


OF_REWARD, NUMBERS = chosen_auxiliary("imitate:1")


@pytest.mark.parametrize(
    "more",
    [
        {"kl": "k3"},
        {"entropy_coefficient": 0.1},
        {"auxiliary": OF_REWARD, "auxiliary_numbers": NUMBERS, "auxiliary_coefficient": 1.0},
        {"teacher": 1.0},
        {"critic": CriticRules()},
        {"algorithm": Algorithm("own", BUILT_IN["grpo"].loss)},
    ],
    ids=lambda more: next(iter(more)),
)
def test_where_anything_else_may_train_a_token_its_group_is_computed(more: dict[str, Any]) -> None:
    rows = without_two_groups(segments(0))
    assert PolicyGradient(**more).rows_to_compute(rows) is rows
    assert len(PolicyGradient().rows_to_compute(rows)) == len(rows) // 2


def test_a_batch_without_any_advantage_computes_one_group_and_greedy_rows_are_computed_to_be_masked() -> None:
    rows = segments(0)
    nothing = dataclasses.replace(rows, advantages=np.zeros_like(rows.advantages))
    assert set(PolicyGradient().rows_to_compute(nothing).group_ids) == {rows.group_ids[0]}
    greedy = dataclasses.replace(nothing, temperature=np.where(np.arange(len(rows)) == 5, 0.0, 1.0).astype("<f4"))
    assert set(PolicyGradient().rows_to_compute(greedy).group_ids) == {rows.group_ids[5]}
    routed = with_random_experts(rows, TINY_MIXTURE, 0)
    kept = PolicyGradient().rows_to_compute(dataclasses.replace(routed, advantages=without_two_groups(rows).advantages))
    assert isinstance(kept, RoutedRows)
    assert len(kept.experts) == len(kept.token_ids) < len(routed.experts)


@pytest.mark.parametrize("unrouted_train", [True, False])
def test_a_choice_over_the_batch_counts_no_row_that_the_step_masks(unrouted_train: bool) -> None:
    rows = with_random_experts(synthetic_rows(0), TINY_MIXTURE, 0, some=True)
    greedy = rows.temperature.copy()
    greedy[1] = 0.0
    rows, seen = dataclasses.replace(rows, temperature=greedy), list[Any]()

    def choose(tokens: BatchTokens) -> Any:
        seen.append(tokens.counted)
        return tokens.counted

    algorithm = dataclasses.replace(BUILT_IN["grpo"], choose=choose)
    options = dataclasses.replace(ONE, unrouted_train=unrouted_train)
    one = Learner(TINY_MIXTURE, random_weights(TINY_MIXTURE, 1), options)
    found = one.measure(rows, PolicyGradient(algorithm=algorithm))
    assert int(seen[0].sum()) == found.trained_tokens - found.masked
    assert found.masked > 0


@pytest.mark.parametrize("reported", [True, False])
def test_the_entropy_is_computed_only_where_something_asks_for_it(reported: bool) -> None:
    """A figure of every token asks for it, too."""
    seen = list[torch.Tensor | None]()

    def observe(tokens: Tokens, clip: Clip) -> TokenLoss:
        seen.append(tokens.entropy)
        return BUILT_IN["grpo"].loss(tokens, clip)

    rows, own = synthetic_rows(0), PolicyGradient(0.2, 0.2, algorithm=Algorithm("observe", observe))
    learner = Learner(TINY, random_weights(TINY, 1), LearnerOptions(entropy=reported))
    found = learner.measure(rows, own)
    assert (found.entropy is not None) is reported
    assert (seen[-1] is not None) is reported
    assert not any(one.requires_grad for one in seen if one is not None)
    told = learner.step(rows, own, 0.0, tell_tokens=True)
    assert told.entropy is not None
    assert told.tokens is not None
    assert told.tokens["entropy"].any()


def test_an_algorithm_that_wants_the_entropy_trains_it() -> None:
    def entropy_alone(tokens: Tokens, clip: Clip) -> TokenLoss:
        assert tokens.entropy is not None
        return TokenLoss(-tokens.entropy, torch.zeros_like(tokens.trained))

    own = PolicyGradient(0.2, 0.2, algorithm=Algorithm("entropy_alone", entropy_alone, wants_entropy=True))
    assert own.trains_entropy
    learner = Learner(TINY, random_weights(TINY, 1), LearnerOptions(entropy=False))
    steps = [learner.step(synthetic_rows(0), own, 1e-2) for _ in range(3)]
    assert steps[-1].grad_norm > 0
    assert steps[0].entropy is not None
    assert all(one.loss < 0 for one in steps)
