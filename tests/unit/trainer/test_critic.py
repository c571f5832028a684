"""The critic: advantages and losses against plain statements of their formulas, steps against transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.batches import synthetic_rows
from tests.reference.layouts import OBJECTIVES, RATE, Theirs, ours
from tests.reference.plain import PlainCritic, credits, with_credits
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.settings import SettingsError, from_tables
from turnlog.trainer.algorithms.objective import ForwardPassResults, PolicyGradient
from turnlog.trainer.algorithms.tokens import BUILT_IN, CriticRules, compute_gae, value_loss
from turnlog.trainer.checkpoints.state import Save
from turnlog.trainer.families.family import as_dict
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, learning_plan
from turnlog.trainer.warm_start import random_weights

ONE = LearnerOptions(threads=1, microbatch_tokens=200)
PPO = OBJECTIVES["ppo"]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """One rank for the module."""
    torch.set_num_threads(1)
    with process_group():
        yield


def learner() -> Learner:
    return Learner(TINY, random_weights(TINY, 1), ONE, critic=True)


def ruled(**rules: Any) -> PolicyGradient:
    assert PPO.critic is not None
    return dataclasses.replace(PPO, critic=dataclasses.replace(PPO.critic, **rules))


def told(rows: BatchRows, seed: int) -> tuple[np.ndarray[Any, np.dtype[np.float32]], list[list[float]]]:
    """Values as the critic gives them, and by row behind each token."""
    random = np.random.default_rng(seed)
    behind = [random.normal(size=int(length)).astype("f4") for length in rows.lengths]
    column: list[np.ndarray[Any, np.dtype[np.float32]]] = []
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        trained = rows.trained[start : start + length]
        before = np.concatenate([[0.0], behind[row][:-1]]) * trained
        column.append(np.append(before, behind[row][np.flatnonzero(trained)[-1]]).astype("f4"))
    return np.concatenate(column), [one.astype("f8").tolist() for one in behind]


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_and_returns_are_those_of_the_recursion_token_by_token(whiten: bool, bootstrap: bool) -> None:
    rules = CriticRules(discount=0.97, smoothing=0.8, whiten=whiten, bootstrap=bootstrap)
    for seed in range(5):
        rows = synthetic_rows(seed)
        values, plain = told(rows, seed)
        truncated = np.random.default_rng(seed).random(len(rows)) < 0.5
        advantages, lesson = compute_gae(rows, values, truncated, np.zeros(len(rows.token_ids)), rules)
        wanted = credits(rows, plain, rules, truncated.tolist())
        column = np.concatenate([[0.0, *its] for its, _ in wanted])
        trained = rows.trained == 1
        if whiten:
            column = np.where(trained, (column - column[trained].mean()) / (column[trained].std() + 1e-6), 0.0)
        np.testing.assert_allclose(advantages, column, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(lesson.returns, np.concatenate([[0.0, *its] for _, its in wanted]), rtol=1e-6)
        assert not advantages[~trained].any()


def test_with_lambda_and_discount_1_a_token_is_credited_with_its_reward_less_its_value() -> None:
    rows = synthetic_rows(3)
    values, _ = told(rows, 3)
    rules = CriticRules(whiten=False)
    advantages, lesson = compute_gae(rows, values, np.zeros(16, bool), np.zeros(len(rows.token_ids)), rules)
    np.testing.assert_allclose(lesson.returns, rows.advantages, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(advantages, rows.advantages - lesson.values.numpy(), rtol=1e-5, atol=1e-6)


def test_a_divergence_in_the_reward_costs_its_own_token_and_those_before() -> None:
    rows = synthetic_rows(4)
    values, _ = told(rows, 4)
    random = np.random.default_rng(4)
    proximal, reference = (random.normal(size=len(rows.token_ids)).astype("f4") * rows.trained for _ in range(2))
    objective = dataclasses.replace(ruled(whiten=False), kl="k1", kl_coefficient=0.1, kl_in="reward")
    assert objective.passes(1) == {"values", "proximal", "reference"}
    found, _ = objective.prepare(rows, ForwardPassResults(proximal=proximal, reference=reference, values=values), None)
    plain, _ = ruled(whiten=False).prepare(rows, ForwardPassResults(values=values), None)
    penalty = 0.1 * (proximal.astype("f8") - reference)
    for start, length in zip(rows.starts, rows.lengths, strict=True):
        cost, fall = 0.0, 0.99 * 0.9
        for place in reversed([place for place in range(start, start + length) if rows.trained[place]]):
            cost = penalty[place] + fall * cost
            assert plain.advantages[place] - found.advantages[place] == pytest.approx(cost, abs=1e-5)


def test_the_loss_of_a_value_and_its_derivative_are_those_of_the_formula() -> None:
    random = np.random.default_rng(0)
    before, moved, returns = random.normal(size=200), random.normal(size=200) * 0.4, random.normal(size=200)
    for clip in (0.0, 0.2):
        now = torch.tensor(before + moved, requires_grad=True)
        loss, decided = value_loss(now, torch.from_numpy(before), torch.from_numpy(returns), clip)
        loss.sum().backward()
        value, slope = [], []
        for old, new, wanted in zip(before, before + moved, returns, strict=True):
            held = old + min(max(new - old, -clip), clip) if clip else new
            beyond = (held - wanted) ** 2 > (new - wanted) ** 2
            value.append(max((held - wanted) ** 2, (new - wanted) ** 2) / 2)
            slope.append(0.0 if beyond else new - wanted)
        np.testing.assert_allclose(loss.detach().numpy(), value, rtol=1e-12)
        assert now.grad is not None
        np.testing.assert_allclose(now.grad.numpy(), slope, rtol=1e-12)
        assert decided.any().item() == bool(clip)


def test_values_are_those_of_transformers_before_each_trained_token_and_behind_the_last() -> None:
    rows, one, plain = synthetic_rows(0), learner(), PlainCritic(TINY, random_weights(TINY, 1), ONE)
    assert PPO.critic is not None
    assert not one.values(rows).any()
    one.step(rows, PPO, RATE, ForwardPassResults(values=one.values(rows)))
    plain.step(rows, plain.row_values(rows), PPO.critic)
    found, wanted = one.values(rows), plain.row_values(rows)
    for row, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
        its = found[start + row : start + row + length + 1]
        trained = rows.trained[start : start + length]
        np.testing.assert_allclose(its[:-1], np.array([0.0, *wanted[row][:-1]]) * trained, atol=1e-6)
        assert its[-1] == pytest.approx(wanted[row][int(np.flatnonzero(trained)[-1])], abs=1e-6)
    assert np.abs(found).max() > 1e-3


def test_steps_of_a_draw_are_those_of_transformers_for_policy_and_critic() -> None:
    one, plain = learner(), Theirs(TINY, ONE, PPO)
    for draw in range(2):
        batches = [synthetic_rows(3 * draw + part, segments=2) for part in range(3)]
        found, wanted = ours(one, PPO, batches), plain.draw(batches)
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-5)
    after = plain.policy.export()
    assert max(float((tensor - after[name]).abs().max()) for name, tensor in one.export().items()) < 1e-4


def test_further_updates_of_a_batch_are_the_critics_alone() -> None:
    rows, one, plain = synthetic_rows(0), learner(), PlainCritic(TINY, random_weights(TINY, 1), ONE)
    objective = ruled(updates=3)
    assert objective.critic is not None
    result = one.step(rows, objective, RATE, ForwardPassResults(values=one.values(rows)))
    before = plain.row_values(rows)
    for _ in range(3):
        plain.step(rows, before, objective.critic)
    assert result.metrics["value_updates"] == 3.0
    np.testing.assert_allclose(one.values(rows).max(), max(map(max, plain.row_values(rows))), atol=5e-3)
    once = Learner(TINY, random_weights(TINY, 1), ONE, critic=True)
    once.step(rows, PPO, RATE, ForwardPassResults(values=once.values(rows)))
    assert all(torch.equal(tensor, once.export()[name]) for name, tensor in one.export().items())
    assert not np.array_equal(one.values(rows), once.values(rows))


def test_a_step_of_the_critics_warm_up_leaves_the_policy_and_its_optimizer() -> None:
    rows, one, other = synthetic_rows(0), learner(), learner()
    result = one.step(rows, PPO, 0.0, ForwardPassResults(values=one.values(rows)))
    assert result.grad_norm > 0
    assert not result.skipped
    assert one.values(rows).any()
    grpo = PolicyGradient()
    assert one.step(rows, grpo, RATE) == other.step(rows, grpo, RATE)
    assert all(torch.equal(tensor, other.export()[name]) for name, tensor in one.export().items())


def test_a_gradient_of_either_that_is_not_finite_moves_neither() -> None:
    one, rows = learner(), synthetic_rows(0)
    huge = np.where(rows.trained, np.float32(3e38), np.float32(0))
    broken = dataclasses.replace(rows, advantages=huge)
    result = one.step(broken, PPO, RATE, ForwardPassResults(values=one.values(rows)))
    assert result.skipped
    assert result.metrics["value_updates"] == 0.0
    assert not one.values(rows).any()
    assert all(torch.equal(tensor, random_weights(TINY, 1)[name]) for name, tensor in one.export().items())


@pytest.mark.parametrize("reshardable", [True, False])
def test_a_checkpoint_goes_on_bit_for_bit_with_its_critic(tmp_path: Path, reshardable: bool) -> None:
    one = learner()
    for seed in range(2):
        rows = synthetic_rows(seed)
        one.step(rows, PPO, RATE, ForwardPassResults(values=one.values(rows)))
    Save(*one.states(), tmp_path, {"shape": as_dict(TINY)}, reshardable=reshardable).finish(wait=True)
    rows = synthetic_rows(2)
    wanted = one.step(rows, PPO, RATE, ForwardPassResults(values=one.values(rows)))
    other = Learner(TINY, random_weights(TINY, 9), ONE, critic=True)
    other.restore(tmp_path)
    assert other.step(rows, PPO, RATE, ForwardPassResults(values=other.values(rows))) == wanted
    assert np.array_equal(other.values(rows), one.values(rows))
    assert all(torch.equal(tensor, one.export()[name]) for name, tensor in other.export().items())
    without = Learner(TINY, random_weights(TINY, 9), ONE)
    without.restore_weights(tmp_path)  # as an export does


def test_a_checkpoint_without_a_critic_leaves_it_at_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Learner(TINY, random_weights(TINY, 1), ONE)
    before.step(synthetic_rows(0), PolicyGradient(), RATE)
    before.save(tmp_path, {"cursor": {}})
    one = learner()
    one.restore(tmp_path)
    assert "holds no critic" in caplog.text
    assert not one.values(synthetic_rows(1)).any()
    assert all(torch.equal(tensor, before.export()[name]) for name, tensor in one.export().items())


def test_figures_say_how_well_values_told_returns() -> None:
    rows, one = synthetic_rows(0), learner()
    values, plain = told(rows, 0)
    assert PPO.critic is not None
    metrics = one.step(rows, PPO, RATE, ForwardPassResults(values=values)).metrics
    trained = rows.trained == 1
    returns = np.concatenate([[0.0, *its] for _, its in credits(rows, plain, PPO.critic)])[trained]
    before = np.concatenate([[0.0, *its[:-1]] for its in plain])[trained]
    assert metrics["explained_variance"] == pytest.approx(1 - (returns - before).var() / returns.var(), rel=1e-4)
    assert metrics["return_mean"] == pytest.approx(returns.mean(), rel=1e-4)
    assert metrics["value_mean"] == pytest.approx(before.mean(), rel=1e-4)
    assert 0 < metrics["value_clip_fraction"] <= 1
    assert {"ratio", "effective_sample_size"} <= metrics.keys()
    stepped = with_credits(rows, plain, PPO.critic)
    assert stepped.advantages[trained].mean() == pytest.approx(0.0, abs=1e-6)


def test_settings_become_the_critics_rules_and_hold_the_rate_at_0_while_it_warms_up() -> None:
    trainer = {
        "algorithm": "ppo",
        "discount": 0.9,
        "gae_lambda": 0.8,
        "whiten_advantages": False,
        "truncated": "bootstrap",
        "value_learning_rate": 1e-4,
        "value_clip": 0.0,
        "value_updates": 2,
        "value_warmup_steps": 3,
        "warmup_steps": 1,
        "learning_rate": 0.4,
        "learning_rate_schedule": "constant",
    }
    plan = learning_plan(from_tables({"trainer": trainer, "fold": {"estimator": "none"}}, {}, source="test"))
    assert plan.objective.algorithm is BUILT_IN["ppo"]
    assert plan.objective.critic == CriticRules(
        discount=0.9, smoothing=0.8, whiten=False, bootstrap=True, rate=1e-4, clip=0.0, updates=2
    )
    assert plan.objective.passes(1) == {"values"}
    assert [plan.learning_rate(step) for step in range(6)] == pytest.approx([0.0, 0.0, 0.0, 0.2, 0.4, 0.4])
    forked = plan.behind(40, 40)  # and of a schedule that began without a critic
    assert [forked.learning_rate(step) for step in range(39, 45)] == pytest.approx([0.4, 0.0, 0.0, 0.0, 0.4, 0.4])
    goes_on = plan.behind(40, 0)
    assert goes_on.learning_rate(40) == pytest.approx(0.4)
    other = learning_plan(from_tables({"trainer": {"value_warmup_steps": 3}}, {}, source="test"))
    assert other.objective.critic is None
    assert other.learning_rate(0) > 0
    with pytest.raises(SettingsError, match=r"ppo and fold\.estimator is grpo: set fold\.estimator to none"):
        learning_plan(from_tables({"trainer": {"algorithm": "ppo"}}, {}, source="test"))
