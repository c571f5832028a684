"""Names in [fold] become functions: what is unknown, miscounted or broken is named."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

from turnlog.fold_settings import Since
from turnlog.processors.core.batches.draws import draw_rules
from turnlog.processors.core.errors import BrokenMethod
from turnlog.processors.core.fold.settlement import settle
from turnlog.processors.core.methods.estimators import Advantages, Estimator, Trajectory, TurnReward, of_rewards
from turnlog.processors.core.methods.reward_transforms import RewardTransform, clip, scale, shift, threshold
from turnlog.processors.core.methods.rules import (
    BUILT_IN,
    Methods,
    RecordedSettingsError,
    fold_rules,
    recorded_settings,
)
from turnlog.schemas.events import Purpose
from turnlog.setting_types import find_offered, notes
from turnlog.settings import (
    FOLD_SECTIONS,
    BatcherSettings,
    FoldSettings,
    Settings,
    SettingsError,
    declarations,
    fold_settings_json,
    recorded_keys,
)


def rules(methods=BUILT_IN, **fold):
    return fold_rules(FoldSettings(**fold), run_id="r", settings_sha256="", methods=methods)


def test_the_settings_list_what_is_built_in():
    listed = {key: own.built_in for key, hint in declarations(FoldSettings).items() if (own := find_offered(hint))}
    assert set(listed.pop("policy")) == set(BUILT_IN.policies.named)
    assert set(listed.pop("estimator")) == set(BUILT_IN.estimators)
    assert set(listed.pop("group_filters")) == set(BUILT_IN.group_filters)
    assert set(listed.pop("reward_transforms")) == set(BUILT_IN.reward_transforms)
    assert set(listed.pop("exclude_flagged")) == set(BUILT_IN.cheat_detectors)
    assert not listed


@pytest.mark.parametrize(
    ("fold", "said"),
    [
        ({"estimator": "gpro"}, r"fold.estimator must be one of dr_grpo, grpo, none.*turnlog.estimators, got 'gpro'"),
        ({"group_filters": ("easy",)}, r"fold.group_filters must be one of all_failed.*turnlog.group_filters"),
        ({"reward_transforms": ("clamp",)}, r"fold.reward_transforms must be one of clip.*turnlog.reward_transforms"),
        ({"reward_transforms": ("clip:1",)}, r"fold.reward_transforms: 'clip:1' must be clip:LOW:HIGH"),
        ({"group_filters": ("zero_variance:1",)}, r"'zero_variance:1' must be zero_variance, "),
        ({"reward_transforms": ("scale:half",)}, r"'scale:half' must be a name and its numbers"),
        ({"reward_transforms": ("scale:nan",)}, r"'scale:nan' must be a name and its numbers"),
        (
            {"reward_transforms": ("overlong:20480:4096",)},
            r"fold.reward_transforms: 'overlong:20480:4096' must be overlong:LONGEST:BUFFER:PENALTY",
        ),
        (
            {"reward_transforms": ("overlong:8:9:1",)},
            r"fold.reward_transforms: 'overlong:8:9:1': BUFFER must be above 0 and at most LONGEST \(overlong:LONGEST:",
        ),
        ({"reward_transforms": ("overlong:8:0:1",)}, r"'overlong:8:0:1': BUFFER must be above 0"),
        ({"reward_transforms": ("overlong:8:4:-1",)}, r"'overlong:8:4:-1': PENALTY must not be negative"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name_with_what_is_legal(fold, said):
    with pytest.raises(SettingsError, match=said):
        rules(**fold)


@pytest.mark.parametrize(("estimator", "least", "whiten"), [("rloo", 2, False), ("reinforce_pp", 1, True)])
def test_a_draw_drops_groups_and_whitens_as_the_estimator_asks(estimator, least, whiten):
    made = draw_rules(FoldSettings(estimator=estimator), BatcherSettings())
    assert (made.min_valid, made.whiten) == (least, whiten)


def test_transforms_are_what_they_say():
    assert [scale(3.0, 0.5), shift(3.0, -1.0), clip(3.0, 0, 1), clip(-3.0, 0, 1), clip(0.5, 0, 1)] == [
        1.5,
        2,
        1,
        0,
        0.5,
    ]
    assert [threshold(0.5, 0.5), threshold(0.4, 0.5)] == [1.0, 0.0]


def own(estimate, **more):
    estimators = {**BUILT_IN.estimators, "mine": Estimator("mine", 7, estimate, **more)}
    return rules(Methods(estimators=estimators), estimator="mine")


def settled(made, *rewards):
    trajectories = [Trajectory(reward, reward, (TurnReward(),)) for reward in rewards]
    return settle(Purpose.train, trajectories, made)


def test_a_users_estimator_is_used_under_its_name_and_version():
    made = own(of_rewards(lambda rewards: Advantages(tuple(-reward for reward in rewards), 0.0, None)))
    assert made.formula.label == "mine/7"
    assert settled(made, 1.0, 2.0).advantages.values == (-1.0, -2.0)


def test_what_a_users_estimator_gives_as_numpy_numbers_is_recorded_as_floats():
    made = own(lambda given, _: Advantages(np.array([t.reward for t in given], "f4"), np.float32(0.5), np.float32(1)))
    found = settled(made, 1.0, 0.0).advantages
    assert found == Advantages((1.0, 0.0), 0.5, 1.0)
    assert {type(value) for value in (*found.values, found.baseline, found.std)} == {float}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Advantages((1.0,), 0.0, None), "mine/7 gives 1 advantages for 2 trajectories"),
        (Advantages((1.0, math.nan), 0.0, None), r"mine/7 gives nan for rewards \[1.0, 0.0\]"),
        (Advantages((1.0, 0.0), math.inf, None), "mine/7 gives inf"),
        (Advantages((1.0, 0.0), 0.0, math.nan), "mine/7 gives nan"),
        (
            Advantages((1.0, 0.0), 0.0, None, ((1.0,), ())),
            r"gives \[1, 0\] advantages for trajectories of \[1, 1\] turns",
        ),
        (Advantages((1.0, 0.0), 0.0, None, ((1.0,), (math.nan,))), "mine/7 gives nan"),
    ],
)
def test_an_estimator_that_gives_what_is_no_advantage_is_a_defect_that_names_it(given, said):
    with pytest.raises(BrokenMethod, match=said):
        settled(own(lambda *_: given), 1.0, 0.0)


def test_a_transform_that_gives_what_is_no_reward_is_a_defect_that_names_it(story):
    broken = RewardTransform("log", 2, lambda reward: math.log(reward) if reward else -math.inf)
    made = rules(Methods(reward_transforms={"log": broken}), reward_transforms=("log",), min_valid=1)
    s = story()
    s.turn("a", 0, "q", "A")
    s.end("a", reward=0.0)
    with pytest.raises(BrokenMethod, match=r"reward transform log/2 makes -inf of the reward 0.0"):
        s.fold(made)


def recorded(fold=None, batcher=None, **sections):
    """A RunConfigured body with other values in it; None takes a key out."""
    body = json.loads(fold_settings_json(Settings()))
    for name, changes in (("fold", fold or {}), ("batcher", batcher or {})):
        body[name] = {key: value for key, value in {**body[name], **changes}.items() if value is not None}
    return json.dumps({**body, **sections}).encode()


def test_settings_are_read_as_they_were_recorded():
    settings = Settings(
        fold=FoldSettings(
            estimator="step", discount=0.5, reward_transforms=("clip:0:1",), group_filters=("all_failed:0",)
        ),
        batcher=BatcherSettings(max_lag=3),
    )
    assert recorded_settings(fold_settings_json(settings)) == (settings.fold, settings.batcher, settings.assembler)


V1 = json.loads((Path(__file__).parents[2] / "golden" / "run-configured-v1.json").read_text())["settings"].encode()
"""What the first release recorded of its defaults: operational keys too, and none of those that came later."""


def test_the_first_releases_recorded_settings_mean_what_it_did():
    fold, batcher, _ = recorded_settings(V1)
    assert fold == FoldSettings(min_valid=2)
    assert batcher == BatcherSettings()


def test_a_key_that_a_release_did_not_have_means_what_that_release_did_and_not_todays_default():
    """Every key that came since: with another default than the value before it, the recorded run keeps the latter."""
    later = {
        (name, key): since[0]
        for name, kind in FOLD_SECTIONS.items()
        for key, hint in declarations(kind).items()
        if (since := [note for note in notes(hint) if isinstance(note, Since)])
    }
    assert {key for _, key in later} >= {"discount", "group_filters", "reward_transforms", "fork_threshold_tokens"}
    of_v1 = {name: set(table) for name, table in json.loads(V1).items()}
    for name, kind in FOLD_SECTIONS.items():
        assert of_v1.get(name, set()) | {key for section, key in later if section == name} >= set(
            recorded_keys(kind)
        ), "a key that release v1 did not record must be marked Since"

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Tomorrow(FoldSettings):
        discount: Annotated[float, Since("v2", before=1.0)] = 0.5
        fresh: Annotated[int, Since("v3", before=7)] = 8

    kinds = FOLD_SECTIONS | {"fold": Tomorrow}
    assert recorded_settings(V1, kinds=kinds)[0] == Tomorrow(min_valid=2, discount=1.0, fresh=7)


def test_recorded_settings_do_not_look_at_the_environment(monkeypatch):
    monkeypatch.setenv("TURNLOG_FOLD_ESTIMATOR", "rloo")
    assert recorded_settings(recorded())[0].estimator == "grpo"


def test_bounds_that_a_later_release_draws_do_not_close_a_recorded_run():
    assert recorded_settings(recorded(fold={"min_valid": -1}))[0].min_valid == -1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (recorded(fold={"estimatr": "grpo"}), r"unknown key fold.estimatr.*use the turnlog version that recorded it"),
        (recorded(fold={"estimator": "of_tomorrow"}), "fold.estimator must be one of"),
        (recorded(fold={"min_valid": "2"}), "fold.min_valid must be a whole number"),
        (recorded(fold={"estimator": None}), "fold.estimator, which every release records, is missing"),
        (b'{"fold": {}}', "missing"),
        (b'{"fold": 3}', r"section \[fold\] is missing"),
        (recorded(trees={}), r"unknown section \[trees\]"),
        (b"{", "cannot be read"),
        (b"3", "cannot be read"),
    ],
)
def test_recorded_settings_that_this_version_does_not_know_are_refused(body, said):
    with pytest.raises(RecordedSettingsError, match=said):
        recorded_settings(body)
