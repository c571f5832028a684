"""Each loss against an independent statement of its formula in NumPy's float64, values and derivatives."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.each import each
from tests.fakes.batches import synthetic_rows
from turnlog.learning_settings import WANTS
from turnlog.names import EntryPointGroup
from turnlog.setting_types import find_offered
from turnlog.settings import SettingsError, TrainerSettings, declarations, from_tables
from turnlog.trainer.algorithms.objective import ForwardPassResults as Passes
from turnlog.trainer.algorithms.objective import PolicyGradient, estimate
from turnlog.trainer.algorithms.tokens import BUILT_IN, Clip, Tokens, choose_algorithm
from turnlog.trainer.plan import learning_plan

LOW, HIGH, DUAL = 0.2, 0.28, 1.5
TRAJECTORIES = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3])


@dataclass(frozen=True)
class Numbers:
    """Twelve trained tokens of four trajectories, far enough off-policy that every bound decides somewhere."""

    current: Any
    old: Any
    recorded: Any
    reference: Any
    advantages: Any


def numbers(seed: int = 0) -> Numbers:
    random = np.random.default_rng(seed)
    old = random.normal(-2.0, 0.5, 12)
    return Numbers(
        current=np.minimum(old + random.normal(0.0, 0.6, 12), -0.05),
        old=old,
        recorded=old + random.normal(0.0, 0.5, 12),
        reference=old + random.normal(0.0, 0.3, 12),
        advantages=np.array([1.0, -0.5, 2.0, -1.5])[TRAJECTORIES],
    )


def summed(values: Any) -> Any:
    return np.bincount(TRAJECTORIES, weights=values)[TRAJECTORIES]


COUNTS = summed(np.ones(12))


def surrogate(ratio: Any, advantages: Any, dual: float) -> tuple[Any, Any]:
    """(value, derivative by the log-prob) of -min(r A, clip(r) A), at least dual x A where A < 0."""
    value, slope = [], []
    for r, a in zip(ratio, advantages, strict=True):
        bound = min(max(r, 1 - LOW), 1 + HIGH)
        least, inside = (r * a, True) if r * a <= bound * a else (bound * a, False)
        if dual and a < 0 and dual * a > least:
            least, inside = dual * a, False
        value.append(-least)
        slope.append(-r * a if inside else 0.0)
    return np.array(value), np.array(slope)


CHOSEN = np.arange(12) % 4 == 1
"""Tokens that a choice over the batch returned."""


def restated(name: str, given: Numbers, dual: float) -> tuple[Any, Any]:
    """(value, derivative) of a built-in loss."""
    ratio = np.exp(given.current - given.old)
    if name == "clip_cov":
        value, slope = surrogate(ratio, given.advantages, dual)
        return np.where(CHOSEN, 0.0, value), np.where(CHOSEN, 0.0, slope)
    if name == "kl_cov":
        gap, plain = given.current - given.old, -ratio * given.advantages
        return plain + CHOSEN * np.abs(gap), plain + CHOSEN * np.sign(gap)
    if name.startswith("dppo"):
        columns = given.current, given.old, given.advantages
        inside = np.array([not beyond(name, *one) for one in zip(*columns, strict=True)])
        weight = -np.minimum(ratio, 20.0) * given.advantages * inside
        return weight * given.current, weight
    if name == "gspo":
        return surrogate(np.exp(summed(given.current - given.old) / COUNTS), given.advantages, dual)
    if name == "sapo":
        sharpness = np.where(given.advantages > 0, 1.0, 1.05)
        gate = 1 / (1 + np.exp(-sharpness * (ratio - 1)))
        value = -4 / sharpness * gate * given.advantages
        return value, -4 * gate * (1 - gate) * ratio * given.advantages
    if name == "cispo":
        weight = np.minimum(np.maximum(ratio, 1 - LOW), 1 + HIGH)
        return -weight * given.advantages * given.current, -weight * given.advantages
    return surrogate(ratio, given.advantages, dual)


def beyond(name: str, current: float, old: float, advantage: float) -> bool:
    """Whether DPPO leaves a token out: its divergence is beyond the bound, on the side that a step moves it to."""
    p, q = math.exp(current), math.exp(old)
    if name == "dppo_tv":
        return p - q > 0.2 if advantage > 0 else q - p > 0.2
    divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    return divergence > 0.05 and (p > q if advantage > 0 else p < q)


def found(objective: PolicyGradient, given: Numbers, *, entropy: float = 0.0) -> tuple[Any, Any, Any, Any]:
    """(values, derivatives, masked, measures) of the product."""
    current = torch.tensor(given.current, requires_grad=True)
    importance = None
    if objective.importance != "none" and objective.importance_level != "token":
        sums = summed(given.old - given.recorded)
        importance = torch.from_numpy(sums / COUNTS if objective.importance_level == "geometric" else sums)
    result = objective(
        Tokens(
            logprobs=current,
            old=torch.from_numpy(given.old),
            recorded=torch.from_numpy(given.recorded),
            reference=None if objective.kl == "none" else torch.from_numpy(given.reference),
            advantages=torch.from_numpy(given.advantages),
            trained=torch.ones(12, dtype=torch.bool),
            entropy=torch.full((12,), entropy, dtype=torch.float64),
            trajectory_gap=torch.from_numpy(summed(given.current - given.old)),
            trajectory_tokens=torch.from_numpy(COUNTS),
            importance=importance,
            chosen=torch.from_numpy(CHOSEN),
        )
    )
    result.value.sum().backward()
    assert current.grad is not None
    masked = np.zeros(12, bool) if result.masked is None else result.masked.numpy()
    return result.value.detach().numpy(), current.grad.numpy(), masked, result.measures


def gradient(name: str, **options: Any) -> PolicyGradient:
    algorithm, its = choose_algorithm(name)
    return PolicyGradient(LOW, HIGH, algorithm=algorithm, numbers=its, **options)


BOUNDED = [name for name in BUILT_IN if name not in ("sapo", "cispo", "kl_cov", "dppo_tv", "dppo_kl")]


@each(("name", "dual"), [*((name, 0.0) for name in BUILT_IN), *((name, DUAL) for name in BOUNDED)])
def test_a_loss_and_its_derivative_are_those_of_the_formula(name: str, dual: float) -> None:
    for seed in range(20):
        given = numbers(seed)
        value, slope, masked, _ = found(gradient(name, dual_clip=dual), given)
        wanted, wanted_slope = restated(name, given, dual)
        np.testing.assert_allclose(value, wanted, rtol=1e-12)
        np.testing.assert_allclose(slope, wanted_slope, rtol=1e-12, atol=1e-15)
        assert not masked.any()


def one_token(name: str, current: float, old: float, advantage: float) -> tuple[float, float, bool]:
    """(loss, its derivative, whether it is clipped) of one token."""
    algorithm, its = choose_algorithm(name)
    logprobs = torch.tensor([math.log(current)], dtype=torch.float64, requires_grad=True)
    old_logprobs, advantages = torch.tensor([math.log(old)]).double(), torch.tensor([advantage]).double()
    mask = torch.ones(1, dtype=torch.bool)
    tokens = Tokens(
        logprobs=logprobs,
        old=old_logprobs,
        recorded=old_logprobs,
        reference=None,
        advantages=advantages,
        trained=mask,
        entropy=torch.zeros(1),
    )
    result = algorithm.loss(tokens, Clip(LOW, HIGH), *its)
    result.value.sum().backward()
    assert logprobs.grad is not None
    return float(result.value.detach()), float(logprobs.grad), bool(result.clipped)


@each(
    ("name", "current", "old", "advantage", "slope"),
    [
        # An unlikely token may grow twentyfold, where a ratio of 1.28 would be the end.
        ("dppo_tv", 0.02, 0.001, 1.0, -20.0),
        ("dppo_kl", 0.02, 0.001, 1.0, -20.0),
        # verl truncates the ratio at 20, prime-rl nowhere.
        ("dppo_tv", 0.04, 0.001, 1.0, -20.0),
        ("dppo_tv:0.2:0.2:100", 0.04, 0.001, 1.0, -40.0),
        # A likely token may not, whose ratio of 1.6 PPO would cut only with a positive advantage.
        ("dppo_tv", 0.8, 0.5, 1.0, 0.0),
        ("dppo_kl", 0.8, 0.5, 1.0, 0.0),
        ("dppo_tv", 0.8, 0.5, -1.0, 1.6),
        ("dppo_kl", 0.8, 0.5, -1.0, 1.6),
        ("dppo_tv", 0.25, 0.5, -1.0, 0.0),
        ("dppo_kl", 0.25, 0.5, -1.0, 0.0),
        ("dppo_tv", 0.25, 0.5, 1.0, -0.5),
        # Bounds of each side.
        ("dppo_tv:0.3:0.1:20", 0.25, 0.5, -1.0, 0.5),
        ("dppo_tv:0.1:0.4:20", 0.8, 0.5, 1.0, -1.6),
        # Certain tokens have no other one to compare.
        ("dppo_kl", 1.0, 0.5, 1.0, 0.0),
        ("dppo_kl", 1.0, 1.0, 1.0, -1.0),
        ("dppo_kl", 0.5, 1.0, -1.0, 0.0),
    ],
)
def test_dppo_leaves_out_what_moved_too_far_and_would_move_further(
    name: str, current: float, old: float, advantage: float, slope: float
) -> None:
    value, found, clipped = one_token(name, current, old, advantage)
    assert found == pytest.approx(slope, rel=1e-6)
    assert value == pytest.approx(slope * math.log(current), rel=1e-6)
    assert clipped == (slope == 0.0)


@pytest.mark.parametrize("name", [name for name, one in BUILT_IN.items() if one.zero_at_zero])
def test_a_token_without_an_advantage_loses_nothing_and_has_no_gradient(name: str) -> None:
    still = dataclasses.replace(numbers(6), advantages=np.zeros(12))
    value, slope, _, _ = found(gradient(name), still)
    assert not value.any()
    assert not slope.any()


def test_the_default_is_the_clipped_surrogate_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    current, recorded, advantages = (torch.randn(1000, generator=generator) for _ in range(3))
    ratio = (current - recorded).exp()
    least = torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.2) * advantages)
    wanted = -torch.where(advantages < 0, least.maximum(3.0 * advantages), least)
    plan = learning_plan(from_tables({}, {}, source="test"))
    result = plan.objective(
        Tokens(
            logprobs=current,
            old=recorded,
            recorded=recorded,
            reference=None,
            advantages=advantages,
            trained=torch.ones(1000, dtype=torch.bool),
            entropy=torch.zeros(1000),
        )
    )
    assert torch.equal(result.value, wanted)
    assert result.masked is None
    assert plan.objective.passes(4) == frozenset()


def importances(given: Numbers, level: str) -> Any:
    gap = given.old - given.recorded
    return np.exp({"token": gap, "product": summed(gap), "geometric": summed(gap) / COUNTS}[level])


@pytest.mark.parametrize("level", ["token", "product", "geometric"])
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_truncated_weights_stay_within_their_bounds_and_mask_nothing(name: str, level: str) -> None:
    given = numbers(1)
    options = {"logprobs": "recomputed", "importance_level": level, "importance_low": 0.7, "importance_high": 1.2}
    value, slope, masked, measures = found(gradient(name, importance="truncated", **options), given)
    plain, plain_slope = restated(name, given, 0.0)
    raw = importances(given, level)
    weight = np.minimum(np.maximum(raw, 0.7), 1.2)
    np.testing.assert_allclose(value, weight * plain, rtol=1e-12)
    np.testing.assert_allclose(slope, weight * plain_slope, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(measures["importance"].values.numpy(), raw, rtol=1e-12)
    assert (weight != raw).any()
    assert not masked.any()


@pytest.mark.parametrize("level", ["token", "product", "geometric"])
def test_masked_weights_leave_tokens_out_and_others_as_they_are(level: str) -> None:
    given = numbers(1)
    options = {"logprobs": "recomputed", "importance_level": level, "importance_low": 0.7, "importance_high": 1.2}
    value, _, masked, _ = found(gradient("grpo", importance="masked", **options), given)
    raw, (plain, _) = importances(given, level), restated("grpo", given, 0.0)
    assert masked.tolist() == [not 0.7 <= one <= 1.2 for one in raw]
    np.testing.assert_allclose(value[~masked], (raw * plain)[~masked], rtol=1e-12)
    assert 0 < masked.sum() < 12


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_divergence_in_the_loss_is_of_current_log_probs_and_has_its_derivative(kind: str) -> None:
    given, plain = numbers(2), gradient("grpo")
    value, slope, _, measures = found(dataclasses.replace(plain, kl=kind, kl_coefficient=0.3), given)
    gap = given.current - given.reference
    wanted = {"k1": gap, "k2": gap**2 / 2, "k3": np.exp(-gap) - 1 + gap}[kind]
    wanted_slope = {"k1": np.ones(12), "k2": gap, "k3": 1 - np.exp(-gap)}[kind]
    before, before_slope, _, _ = found(plain, given)
    np.testing.assert_allclose(value - before, 0.3 * wanted, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(slope - before_slope, 0.3 * wanted_slope, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(measures["kl"].values.numpy(), wanted, rtol=1e-9, atol=1e-12)


def test_a_divergence_without_a_coefficient_is_measured_alone() -> None:
    given, plain = numbers(2), gradient("grpo")
    value, _, _, measures = found(dataclasses.replace(plain, kl="k3"), given)
    assert np.array_equal(value, found(plain, given)[0])
    assert float(measures["kl"].values.min()) >= 0


def test_on_average_each_estimate_is_the_divergence() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    exact = float((policy * (policy / reference).log()).sum())
    assert float((policy * estimate("k1", policy.log(), reference.log())).sum()) == pytest.approx(exact)
    assert float((policy * estimate("k3", policy.log(), reference.log())).sum()) == pytest.approx(exact)
    assert float((policy * estimate("k2", policy.log(), reference.log())).sum()) == pytest.approx(exact, rel=0.1)


def test_entropy_is_taken_off_the_loss() -> None:
    given, plain = numbers(3), gradient("grpo")
    value, _, _, _ = found(dataclasses.replace(plain, entropy_coefficient=0.01), given, entropy=2.0)
    np.testing.assert_allclose(value, found(plain, given)[0] - 0.02, rtol=1e-12)


def test_measures_are_those_of_the_ratios() -> None:
    given = numbers(4)
    measures = found(gradient("grpo", logprobs="recomputed", importance="truncated"), given)[3]
    ratio, engine = np.exp(given.current - given.old), np.exp(given.current - given.recorded)
    np.testing.assert_allclose(measures["ratio"].values.numpy(), ratio, rtol=1e-12)
    np.testing.assert_allclose(measures["effective_sample_size"].values.numpy(), engine, rtol=1e-12)
    share = measures["effective_sample_size"].figure(engine.sum(), (engine**2).sum(), engine.max(), 12)
    assert share == pytest.approx(engine.sum() ** 2 / (12 * (engine**2).sum()))
    assert measures["ratio_max"].figure(0.0, 0.0, ratio.max(), 12) == ratio.max()
    assert measures["ratio"].figure(ratio.sum(), 0.0, 0.0, 12) == pytest.approx(ratio.mean())


def test_the_settings_list_what_is_built_in() -> None:
    own = find_offered(declarations(TrainerSettings)["algorithm"])
    assert own is not None
    assert own.group == EntryPointGroup.ALGORITHMS
    assert set(own.built_in) == set(BUILT_IN) == set(WANTS)


def test_an_objective_can_be_sent_to_other_ranks() -> None:
    plan = learning_plan(from_tables({"trainer": {"algorithm": "sapo:0.5:2"}}, {}, source="test"))
    assert plan.objective.numbers == (0.5, 2.0)
    assert pickle.loads(pickle.dumps(plan.objective)) == plan.objective
    assert math.isclose(choose_algorithm("sapo")[1][1], 1.05)


REFUSED = [
    ({"trainer": {"algorithm": "gprpo"}}, r"trainer\.algorithm must be one of grpo, .*turnlog\.algorithms"),
    ({"trainer": {"algorithm": "sapo:1"}}, r"'sapo:1' must be sapo or sapo:POSITIVE:NEGATIVE"),
    ({"trainer": {"algorithm": "grpo:1"}}, r"'grpo:1' must be grpo"),
    ({"trainer": {"algorithm": "sapo:0:1"}}, r"'sapo:0:1': POSITIVE and NEGATIVE must be above 0"),
    ({"trainer": {"algorithm": "clip_cov:2:1:5"}}, r"'clip_cov:2:1:5': SHARE must be above 0 and at most 1"),
    (
        {"trainer": {"algorithm": "clip_cov:0.1:5:1"}},
        r"trainer\.algorithm: 'clip_cov:0\.1:5:1': LOW must be below HIGH \(clip_cov:SHARE:LOW:HIGH\)",
    ),
    ({"trainer": {"algorithm": "kl_cov:0:1"}}, r"'kl_cov:0:1': SHARE must be above 0"),
    ({"trainer": {"algorithm": "kl_cov:1:-1"}}, r"'kl_cov:1:-1': COEFFICIENT must not be negative"),
    ({"trainer": {"algorithm": "dppo_tv:0:1:20"}}, r"'dppo_tv:0:1:20': LOW and HIGH must be above 0"),
    ({"trainer": {"algorithm": "dppo_kl:1:1:0.5"}}, r"'dppo_kl:1:1:0\.5': MOST must be at least 1"),
    (
        {"trainer": {"normalize_importance": True}},
        r"normalize_importance is true and trainer\.importance is none: .* set trainer\.importance to truncated or",
    ),
    ({"trainer": {"algorithm": "gspo"}}, r"algorithm is gspo and batcher\.weighting is prompt: set .* to trajectory"),
    ({"trainer": {"algorithm": "dr_grpo"}}, r"algorithm is dr_grpo and fold\.estimator is grpo: set .* to dr_grpo"),
    (
        {"trainer": {"algorithm": "dr_grpo"}, "fold": {"estimator": "dr_grpo"}},
        r"dr_grpo and batcher\.weighting is prompt: set batcher\.weighting to constant",
    ),
    ({"trainer": {"algorithm": "rloo"}}, r"rloo and fold\.estimator is grpo: set fold\.estimator to rloo"),
    ({"trainer": {"algorithm": "ppo"}}, r"ppo and fold\.estimator is grpo: set fold\.estimator to none"),
    ({"trainer": {"algorithm": "opd"}}, r"opd and fold\.estimator is grpo: set fold\.estimator to none"),
    (
        {"trainer": {"algorithm": "opd"}, "fold": {"estimator": "none"}},
        r"trainer\.algorithm is opd and trainer\.teacher is empty: set trainer\.teacher to the Hugging Face folder",
    ),
    ({"trainer": {"algorithm": "reinforce_pp"}}, r"set fold\.estimator to reinforce_pp or reinforce_pp_baseline"),
    ({"trainer": {"algorithm": "dapo"}, "batcher": {"weighting": "token"}}, r"dapo and trainer\.clip_high 0\.2"),
    (
        {"trainer": {"algorithm": "gspo"}, "batcher": {"weighting": "trajectory"}},
        r"gspo and its bounds are trainer\.clip_low 0\.2 and trainer\.clip_high 0\.2: .*clip_low to 0\.0003",
    ),
    (
        {"trainer": {"algorithm": "gspo", "clip_low": 3e-4}, "batcher": {"weighting": "trajectory"}},
        r"gspo and its bounds are trainer\.clip_low 0\.0003 and trainer\.clip_high 0\.2",
    ),
    ({"trainer": {"algorithm": "cispo"}}, r"cispo and trainer\.clip_low is 0\.2: .* set trainer\.clip_low to 1"),
    ({"trainer": {"dual_clip": 0.5}}, r"trainer\.dual_clip must be 0 or above 1, got 0\.5"),
    ({"trainer": {"importance": "truncated"}}, r"set trainer\.logprobs to recomputed, or trainer\.importance to none"),
    (
        {"trainer": {"importance": "masked", "logprobs": "recomputed", "importance_low": 2.0}},
        r"trainer\.importance_low 2 must be below trainer\.importance_high 2",
    ),
    (
        {
            "trainer": {"kl": "k1", "kl_in": "reward", "kl_coefficient": 0.1},
            "fold": {"reward_transforms": ["clip:0:1"]},
        },
        r"kl_in is reward, fold\.estimator is grpo and fold\.reward_transforms is clip:0:1: .* set",
    ),
    ({"trainer": {"kl_coefficient": 0.1}}, r"trainer\.kl_coefficient is set and trainer\.kl is none"),
    ({"trainer": {"reference": "base"}}, r"trainer\.reference is set and trainer\.kl is none: set trainer\.kl to k1"),
]


@each(("tables", "said"), REFUSED)
def test_settings_that_contradict_each_other_are_refused_with_what_to_change(tables: Any, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        learning_plan(from_tables(tables, {}, source="test"))


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("dr_grpo", {"fold": {"estimator": "dr_grpo"}, "batcher": {"weighting": "constant"}}),
        ("dapo", {"batcher": {"weighting": "token"}, "trainer": {"clip_high": 0.28}}),
        ("rloo", {"fold": {"estimator": "rloo"}}),
        ("reinforce_pp", {"fold": {"estimator": "reinforce_pp_baseline"}}),
        ("gspo", {"batcher": {"weighting": "trajectory"}, "trainer": {"clip_low": 3e-4, "clip_high": 4e-4}}),
        ("cispo", {"trainer": {"clip_low": 1.0, "clip_high": 4.0}}),
    ],
)
def test_an_algorithm_is_taken_with_the_settings_that_it_is_defined_with(name: str, others: Any) -> None:
    tables = {**others, "trainer": {**others.get("trainer", {}), "algorithm": name}}
    assert learning_plan(from_tables(tables, {}, source="test")).objective.algorithm.name == name


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """The package of the guide that offers something under `group`."""
    page = (Path(__file__).parents[3] / "docs/algorithms.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (point,) = re.findall(rf'entry-points\."{re.escape(group)}"\] (.*) = "(.*):(.*)"$', page, re.MULTILINE)
    name, module, value = point
    (code,) = [block for block in blocks if f"{value} = " in block]
    (tmp_path / f"{module}.py").write_text(code)
    info = tmp_path / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_algorithm_of_a_package_is_added_as_the_guide_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, "turnlog.algorithms")
    tables = {"trainer": {"algorithm": "leave_out:0.25", "kl": "k3", "kl_coefficient": 0.1}}
    objective = learning_plan(from_tables(tables, {}, source="test")).objective
    given = numbers(5)
    value, _, masked, measures = found(objective, given)
    gap, drift = given.current - given.old, given.current - given.reference
    wanted = -np.exp(gap) * given.advantages + 0.1 * (np.exp(-drift) - 1 + drift)
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    assert masked.tolist() == (np.abs(gap) > 0.25).tolist()
    assert {"ratio", "kl", "distance_max"} <= measures.keys()
    with pytest.raises(
        SettingsError, match=r"leave_out and batcher\.weighting is trajectory: set .* to prompt or token"
    ):
        learning_plan(from_tables({**tables, "batcher": {"weighting": "trajectory"}}, {}, source="test"))
    with pytest.raises(SettingsError, match=r"'leave_out:1:2' must be leave_out or leave_out:DISTANCE"):
        learning_plan(from_tables({"trainer": {"algorithm": "leave_out:1:2"}}, {}, source="test"))


def test_an_auxiliary_loss_of_a_package_is_added_as_the_guide_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, monkeypatch, "turnlog.auxiliary_losses")
    tables = {"trainer": {"auxiliary": "foresee", "auxiliary_coefficient": 0.01}}
    objective = learning_plan(from_tables(tables, {}, source="test")).objective
    rows = synthetic_rows(0)
    _, columns = objective.prepare(rows, Passes(), None)
    assert columns.auxiliary is not None
    context = rows.trained == 0
    wanted = 0.01 * context / context.sum()
    wanted[rows.starts] = 0.0
    np.testing.assert_allclose(columns.auxiliary, wanted, rtol=1e-6)
    assert not objective.trains_entropy
    with pytest.raises(SettingsError, match=r"'foresee:1' must be foresee"):
        learning_plan(from_tables({"trainer": {"auxiliary": "foresee:1"}}, {}, source="test"))


def test_an_auxiliary_loss_that_nobody_offers_is_refused_by_name() -> None:
    with pytest.raises(
        SettingsError, match=r"trainer\.auxiliary must be one of none, imitate.*turnlog\.auxiliary_losses"
    ):
        learning_plan(from_tables({"trainer": {"auxiliary": "imitates"}}, {}, source="test"))
