"""What an objective computes from the columns of a whole batch: tokens by covariance, the mean of weights, and
advantages of rewards less their divergence."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.each import each
from tests.fakes.batches import synthetic_rows
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.batches.weighting import Whitening, whitening
from turnlog.settings import SettingsError, from_tables
from turnlog.trainer.algorithms.covariance import BatchTokens, choose_between_bounds, choose_greatest
from turnlog.trainer.algorithms.objective import ForwardPassResults, PolicyGradient
from turnlog.trainer.algorithms.tokens import BUILT_IN
from turnlog.trainer.plan import learning_plan

ADVANTAGES = np.array([2.0, 2.0, 2.0, -2.0, -2.0, -2.0, 9.0])
CURRENT = np.array([-1.0, -2.0, -3.0, -1.0, -2.0, -3.0, 9.0])
COUNTED = np.array([True] * 6 + [False])
COVARIANCES = [2.0, 0.0, -2.0, -2.0, 0.0, 2.0]
"""(A - 0) (p + 2) of the six tokens that count, by hand."""


def tokens(**other: Any) -> BatchTokens:
    given: dict[str, Any] = {"current": CURRENT, "old": CURRENT, "advantages": ADVANTAGES, "counted": COUNTED}
    return BatchTokens(**{**given, "low": 0.2, "high": 0.2, "seed": 0, "batch": 0, **other})


def places(mask: Any) -> list[int]:
    return np.flatnonzero(mask).tolist()


def test_kl_cov_takes_the_tokens_of_the_greatest_covariance() -> None:
    ranked = sorted(range(6), key=lambda place: -COVARIANCES[place])
    for count in range(1, 7):
        assert places(choose_greatest(tokens(), count / 6 + 1e-9, 1.0)) == sorted(ranked[:count])
    assert places(choose_greatest(tokens(), 0.0002, 1.0)) == [0]


def test_clip_cov_takes_tokens_between_its_bounds_that_the_ratio_leaves_in() -> None:
    assert places(choose_between_bounds(tokens(), 1.0, 1.0, 5.0)) == [0, 5]
    assert places(choose_between_bounds(tokens(), 1.0, -1.0, 1.0)) == [1, 4]
    assert places(choose_between_bounds(tokens(), 1.0, 2.0, 5.0)) == []
    # Token 0 is likelier than before and gains from it, beyond the clip; token 5 is less likely, and loses from it.
    moved = CURRENT + np.array([-0.3, 0, 0, 0, 0, 0, 0])
    assert places(choose_between_bounds(tokens(old=moved), 1.0, 1.0, 5.0)) == [5]
    moved = CURRENT + np.array([0.3, 0, 0, 0, 0, 0, 0])
    assert places(choose_between_bounds(tokens(old=moved), 1.0, 1.0, 5.0)) == [0, 5]


def test_clip_cov_draws_among_them_by_seed_and_batch_alone() -> None:
    many: dict[str, Any] = {
        "current": np.tile(CURRENT, 100),
        "old": np.tile(CURRENT, 100),
        "advantages": np.tile(ADVANTAGES, 100),
        "counted": np.tile(COUNTED, 100),
    }
    first = choose_between_bounds(tokens(**many), 0.1, 1.0, 5.0)
    assert first.sum() == 60
    assert set(np.flatnonzero(first) % 7) == {0, 5}
    assert np.array_equal(first, choose_between_bounds(tokens(**many), 0.1, 1.0, 5.0))
    for other in ({"seed": 1}, {"batch": 1}):
        assert 0 < (first & choose_between_bounds(tokens(**many, **other), 0.1, 1.0, 5.0)).sum() < 60
    # One token more between the bounds changes at most one choice.
    many["advantages"] = many["advantages"].copy()
    many["advantages"][1] = 2.0001
    many["current"] = many["current"].copy()
    many["current"][1] = -1.0
    second = choose_between_bounds(tokens(**many), 0.1, 1.0, 5.0)
    assert (first ^ second).sum() <= 2


def test_a_batch_without_a_token_that_counts_has_none_to_choose() -> None:
    none = tokens(counted=np.zeros(7, bool))
    assert not choose_between_bounds(none, 1.0, -5.0, 5.0).any()
    assert not choose_greatest(none, 1.0, 1.0).any()


def chosen(objective: PolicyGradient, rows: BatchRows, batch: int = 0, masked: Any = None) -> Any:
    current = rows.logprobs + np.float32(0.01)
    _, columns = objective.prepare(rows, ForwardPassResults(batch=batch, masked=masked), current)
    assert columns.chosen is not None
    assert columns.trajectory_gap is None
    return columns.chosen.numpy()


@pytest.mark.parametrize("spec", ["clip_cov:0.2:-9:9", "kl_cov:0.2:1"])
def test_masked_and_untrained_tokens_are_never_chosen(spec: str) -> None:
    objective = learning_plan(from_tables({"trainer": {"algorithm": spec}}, {}, source="test")).objective
    rows = synthetic_rows(0)
    found = chosen(objective, rows)
    assert objective.reads_current
    assert found.sum() == int(0.2 * rows.trained.sum())
    assert not found[rows.trained == 0].any()
    row = int(np.repeat(np.arange(len(rows)), rows.lengths)[found][0])
    masked = np.arange(len(rows)) == row
    without = chosen(objective, rows, masked=masked)
    start, length = int(rows.starts[row]), int(rows.lengths[row])
    assert not without[start : start + length].any()


def test_the_settings_and_the_number_of_the_batch_decide_what_is_drawn() -> None:
    rows = synthetic_rows(0)

    def of(seed: int) -> PolicyGradient:
        tables = {"trainer": {"algorithm": "clip_cov:0.2:-9:9", "seed": seed}}
        return learning_plan(from_tables(tables, {}, source="test")).objective

    first = chosen(of(1), rows, 3)
    assert np.array_equal(first, chosen(of(1), rows, 3))
    assert not np.array_equal(first, chosen(of(2), rows, 3))
    assert not np.array_equal(first, chosen(of(1), rows, 4))


@each("name", ["clip_cov", "kl_cov"])
def test_no_group_is_left_out_of_the_means(name: str) -> None:
    algorithm = BUILT_IN[name]
    objective = PolicyGradient(algorithm=algorithm, numbers=tuple(algorithm.arguments.values()))
    rows = synthetic_rows(0)
    still = dataclasses.replace(rows, advantages=np.zeros_like(rows.advantages))
    assert objective.rows_to_compute(still) is still
    assert len(PolicyGradient().rows_to_compute(still)) < len(still)


LOW, HIGH = 0.9, 1.1


def normalized(**options: Any) -> PolicyGradient:
    return PolicyGradient(
        logprobs="recomputed", importance_low=LOW, importance_high=HIGH, normalize_importance=True, **options
    )


@each("importance", ["truncated", "masked"])
@each(("level", "spread"), [("token", 0.1), ("product", 0.02), ("geometric", 0.7)])
def test_the_mean_of_weights_is_over_the_batch(importance: str, level: str, spread: float) -> None:
    objective = normalized(importance=importance, importance_level=level)
    rows = synthetic_rows(0, segments=2)
    masked = np.arange(len(rows)) == len(rows) - 1
    gaps = np.random.default_rng(1).normal(0.0, spread, len(rows.token_ids)).astype("f4")
    proximal = (rows.logprobs + gaps) * rows.trained
    _, columns = objective.prepare(rows, ForwardPassResults(proximal=proximal, masked=masked), None)
    sessions = np.repeat(np.asarray(rows.session_ids), rows.lengths)
    live = np.repeat(~masked, rows.lengths)
    weights = []
    for session in sorted(set(sessions)):
        own = (sessions == session) & (rows.trained == 1)
        gap = (proximal.astype("f8") - rows.logprobs)[own]
        whole = {"product": gap.sum(), "geometric": gap.mean()}.get(level)
        if whole is None:
            weights += np.exp(gap[live[own]]).tolist()
        elif live[own].any():
            weights.append(float(np.exp(whole)))
    within = [min(max(one, LOW), HIGH) for one in weights if importance == "truncated" or LOW <= one <= HIGH]
    assert any(not LOW <= one <= HIGH for one in weights)
    assert columns.importance_mean == pytest.approx(sum(within) / len(within), rel=1e-6)
    assert columns.importance_mean != 1.0


def test_normalized_weights_need_their_pass_and_all_groups_and_change_nothing_else() -> None:
    objective = normalized(importance="truncated")
    assert objective.passes(1) == {"proximal"}
    assert dataclasses.replace(objective, normalize_importance=False).passes(1) == frozenset()
    rows = synthetic_rows(0)
    still = dataclasses.replace(rows, advantages=np.zeros_like(rows.advantages))
    assert objective.rows_to_compute(still) is still
    everything = np.ones(len(rows), bool)
    _, columns = objective.prepare(rows, ForwardPassResults(proximal=rows.logprobs, masked=everything), None)
    assert columns.importance_mean == 1.0


def reference_advantages(estimator: str, rewards: list[float]) -> list[float]:
    """What an estimator makes of the rewards of one group, before any whitening."""
    count, mean = len(rewards), sum(rewards) / len(rewards)
    if estimator == "rloo":
        return [reward - (sum(rewards) - reward) / (count - 1) for reward in rewards]
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / (count - 1)) ** 0.5 + 1e-6
    return [(reward - mean) / (deviation if estimator == "grpo" else 1.0) for reward in rewards]


@pytest.mark.parametrize(("estimator", "wanted"), [("grpo", 0.7071057), ("rloo", 0.9), ("dr_grpo", 0.45)])
def test_a_divergence_in_the_reward_is_part_of_what_a_group_compares(estimator: str, wanted: float) -> None:
    """Rewards 1 and 0, one token each with log p/q of 1 and 0, beta 0.1: the rewards become 0.9 and 0."""
    tables: dict[str, Any] = {"kl": "k1", "kl_coefficient": 0.1, "kl_in": "reward"}
    algorithm = {"rloo": "rloo"}.get(estimator, "grpo")
    settings = from_tables(
        {"trainer": tables | {"algorithm": algorithm}, "fold": {"estimator": estimator}}, {}, source=""
    )
    objective = learning_plan(settings).objective
    rows = synthetic_rows(0, rows=2)
    trained = np.zeros_like(rows.trained)
    trained[rows.starts + 1] = 1
    before = np.zeros(len(rows.token_ids), "<f4")
    before[rows.starts + 1] = reference_advantages(estimator, [1.0, 0.0])
    rows = dataclasses.replace(
        rows, trained=trained, advantages=before, rewards=np.array([1.0, 0.0], "<f4"), group_ids=("g", "g")
    )
    proximal = np.zeros(len(rows.token_ids), "<f4")
    proximal[rows.starts[0] + 1] = 1.0
    found, _ = objective.prepare(rows, ForwardPassResults(proximal, np.zeros_like(proximal)), None)
    np.testing.assert_allclose(found.advantages[rows.starts + 1], [wanted, -wanted], rtol=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "dr_grpo", "reinforce_pp_baseline"])
def test_the_divergence_of_a_trajectory_is_that_of_all_its_segments(estimator: str) -> None:
    objective = PolicyGradient(kl="k2", kl_coefficient=0.3, kl_in="reward", estimator=estimator)
    rows, random = synthetic_rows(4, segments=2), np.random.default_rng(4)
    rows = dataclasses.replace(rows, group_ids=tuple(f"g{row * 2 // len(rows)}" for row in range(len(rows))))
    noise = random.normal(0.0, 0.4, len(rows.token_ids)).astype("f4") * rows.trained
    sessions, groups = np.asarray(rows.session_ids), np.asarray(rows.group_ids)
    earned = {session: float(random.integers(0, 3)) for session in sorted(set(sessions))}
    rows = dataclasses.replace(rows, rewards=np.array([earned[session] for session in sessions], "<f4"))

    def of(rewards: dict[str, float]) -> np.ndarray[Any, Any]:
        made: dict[str, float] = {}
        for group in sorted(set(groups)):
            members = sorted(set(sessions[groups == group]))
            numbers = reference_advantages(estimator, [rewards[member] for member in members])
            made |= dict(zip(members, numbers, strict=True))
        return np.repeat([made[session] for session in sessions], rows.lengths) * rows.trained

    def white(advantages: np.ndarray[Any, Any]) -> Whitening | None:
        return whitening([advantages[rows.trained == 1]]) if estimator == "reinforce_pp_baseline" else None

    before, mark = of(earned), rows.trained == 1
    told = white(before)
    given = before if told is None else np.where(mark, told.apply(before), 0.0)
    numbers = ForwardPassResults(noise, np.zeros_like(noise), whitening_std=None if told is None else told.std)
    found, _ = objective.prepare(dataclasses.replace(rows, advantages=given.astype("<f4")), numbers, None)
    costs = {
        session: 0.15 * float((noise[np.repeat(sessions == session, rows.lengths)] ** 2).sum()) for session in earned
    }
    shaped = of({session: earned[session] - costs[session] for session in earned})
    after = white(shaped)
    wanted = shaped if after is None else np.where(mark, after.apply(shaped), 0.0)
    np.testing.assert_allclose(found.advantages, wanted, rtol=2e-4, atol=2e-5)
    assert np.abs(wanted - given).max() > 0.05


def test_grpo_refuses_a_divergence_in_the_reward_of_players() -> None:
    objective = PolicyGradient(kl="k1", kl_coefficient=0.1, kl_in="reward", estimator="grpo")
    rows = synthetic_rows(0, segments=2)
    rewards = np.arange(len(rows)).astype("<f4")
    nothing = np.zeros(len(rows.token_ids), "<f4")
    with pytest.raises(
        SettingsError, match=r"session .* has players .* set trainer\.kl_in to loss, or fold\.estimator"
    ):
        objective.prepare(dataclasses.replace(rows, rewards=rewards), ForwardPassResults(nothing, nothing), None)
