"""A user's own estimators, filters and transforms come by entry point; what is wrong with one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnlog.infra.offers import load_methods
from turnlog.processors.core.batches.draws import draw_rules
from turnlog.processors.core.methods.estimators import Trajectory
from turnlog.processors.core.methods.rules import BUILT_IN, estimate, fold_rules
from turnlog.settings import BatcherSettings, FoldSettings, SettingsError, from_tables

MODULE = '''
from turnlog.processors.core.methods.estimators import Advantages, Estimator, mean_of, of_rewards
from turnlog.processors.core.methods.group_filters import GroupFilter
from turnlog.processors.core.methods.reward_transforms import RewardTransform


def best_of(rewards):
    """1 for the best trajectories, else 0."""
    best = max(rewards)
    return Advantages(tuple(float(reward == best) for reward in rewards), best, None)


BEST = Estimator("best", 3, of_rewards(best_of), min_valid=4, whiten=True)
LOUD = GroupFilter("loud", 1, lambda trajectories, advantages, most: len(trajectories) > most, ("most",))
SQUARE = RewardTransform("square", 2, lambda reward: reward * reward)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that offers one of each."""
    (tmp_path / "own_methods_of_a_user.py").write_text(MODULE)
    info = tmp_path / "own-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[turnlog.estimators]\nbest = own_methods_of_a_user:BEST\ngone = no_such_module:BEST\n"
        "other = own_methods_of_a_user:BEST\nhalf = json:dumps\nlost = json:nothing\n"
        "wrong = wrong_methods_of_a_user:BEST\n"
        "[turnlog.group_filters]\nloud = own_methods_of_a_user:LOUD\n"
        "[turnlog.reward_transforms]\nsquare = own_methods_of_a_user:SQUARE\n"
    )
    (tmp_path / "wrong_methods_of_a_user.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("package")
def test_a_users_methods_are_chosen_by_the_settings_that_name_them() -> None:
    tables = {"fold": {"estimator": "best", "group_filters": ["loud:3"], "reward_transforms": ["square", "clip:0:9"]}}
    fold = from_tables(tables, {}, source="settings.toml").fold
    methods = load_methods(fold)
    rules = fold_rules(fold, run_id="r", settings_sha256="", methods=methods)
    assert (rules.formula.label, rules.least_valid) == ("best/3", 4)
    assert [chosen.label for chosen in rules.filters] == ["loud/1:3"]
    assert [chosen.label for chosen in rules.transforms] == ["square/2", "clip/1:0:9"]
    assert rules.transforms[0](3.0, 0) == 9.0
    group = [Trajectory(1.0), Trajectory(2.0), Trajectory(2.0), Trajectory(0.0)]
    found = estimate(rules.formula, group, rules.options)
    assert found.values == (0.0, 1.0, 1.0, 0.0)
    assert rules.filters[0].discards(group, found)
    draws = draw_rules(fold, BatcherSettings(), methods)
    assert (draws.min_valid, draws.whiten) == (4, True)


def test_built_in_methods_need_no_package() -> None:
    assert load_methods(FoldSettings()).estimators == BUILT_IN.estimators


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("fold", "said"),
    [
        (FoldSettings(estimator="nobody"), r"fold.estimator must be one of best, dr_grpo, gone.*turnlog.estimators"),
        (FoldSettings(group_filters=("nobody:1",)), r"fold.group_filters must be one of all_failed.*loud"),
        (FoldSettings(reward_transforms=("nobody",)), r"fold.reward_transforms must be one of clip.*square"),
        (FoldSettings(estimator="gone"), r"fold.estimator 'gone', entry point no_such_module:BEST .* does not import"),
        (FoldSettings(estimator="lost"), r"fold.estimator 'lost', entry point json:nothing .* does not import"),
        (FoldSettings(estimator="wrong"), r"fold.estimator 'wrong', .* does not import: ZeroDivisionError: division"),
        (
            FoldSettings(estimator="half"),
            r"fold.estimator 'half', entry point json:dumps .* must be the Estimator named",
        ),
        (FoldSettings(estimator="other"), r"fold.estimator 'other', .* must be the Estimator named 'other'"),
    ],
)
def test_a_method_that_cannot_be_had_is_named_with_what_exists(fold: FoldSettings, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_methods(fold)


@pytest.mark.usefixtures("package")
def test_two_packages_that_offer_one_name_are_named(tmp_path: Path) -> None:
    info = tmp_path / "rival-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[turnlog.estimators]\nbest = rival:BEST\n")
    with pytest.raises(
        SettingsError, match=r"own_methods_of_a_user:BEST and rival:BEST .* two packages offer the name"
    ):
        load_methods(FoldSettings(estimator="best"))


@pytest.mark.usefixtures("package")
def test_a_policy_that_two_packages_offer_is_refused_alike(tmp_path: Path) -> None:
    for name in ("first", "second"):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[turnlog.policies]\nours = {name}:POLICY\n")
    with pytest.raises(SettingsError, match=r"fold.policy 'ours', .* two packages offer the name"):
        load_methods(FoldSettings(policy="ours"))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("key", "value"), [("estimator", "nobody"), ("group_filters", ["nobody:1"]), ("reward_transforms", ["nobody"])]
)
def test_a_typing_mistake_is_found_when_the_settings_are_read(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"fold.{key} must be one of .*\(or what a package offers"):
        from_tables({"fold": {key: value}}, {}, source="settings.toml")
