"""Settings with which nothing could be trained are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from turnlog.producers.tasks import BadSampling, checked_sampling
from turnlog.settings import FeederSettings, FoldSettings, Settings, SettingsError, from_tables


def test_the_defaults_are_legal() -> None:
    sampling, limits = checked_sampling(Settings())
    assert (sampling.temperature, sampling.max_new_tokens, limits.max_turns) == (1.0, 24, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", 1),
        ("max_context_tokens", 513),
        ("oversample", 2),
    ],
)
def test_what_could_not_be_trained_is_refused_by_name(key: str, value: Any) -> None:
    settings = Settings()
    settings = dataclasses.replace(settings, feeder=dataclasses.replace(settings.feeder, **{key: value}))
    with pytest.raises(BadSampling, match=f"feeder.{key} = "):
        checked_sampling(settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("draws", 0),
        ("max_new_tokens", 0),
        ("max_turns", 0),
        ("deadline_s", 0.0),
    ],
)
def test_what_could_never_be_sampled_is_no_setting(key: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=rf"feeder\.{key} must be a .*number (from|above) "):
        from_tables({"feeder": {key: value}}, {}, source="settings.toml")


def test_more_may_be_asked_for_than_is_needed_where_stragglers_are_cut() -> None:
    cutting = dataclasses.replace(Settings().assembler, stragglers="cut")
    assert checked_sampling(Settings(feeder=FeederSettings(oversample=2), assembler=cutting))


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_pp", "none"])
def test_a_group_of_one_is_legal_where_the_group_is_no_baseline(estimator: str) -> None:
    settings = Settings(feeder=FeederSettings(group_size=1), fold=FoldSettings(estimator=estimator))
    assert checked_sampling(settings)
