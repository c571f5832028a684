"""A run that an earlier release configured: it opens, goes on under what it recorded, and replays.

The goldens are what `turnlog run` of that release wrote for its default settings; the first one lacks keys that came
later, both hold operational keys, and no release since computes their hashes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest

from tests.unit.consumers.conftest import SETTINGS, TrainedRun
from turnlog.consumers.replay.verify import run as replay
from turnlog.fold_settings import FOLD_SECTIONS, Since
from turnlog.infra.roles.runs import Configured
from turnlog.schemas import topics
from turnlog.schemas.events import BatchSkipped, RunConfigured, SampleBatchFormed
from turnlog.settings import BatcherSettings, FoldSettings, Settings

GOLDEN = Path(__file__).parents[2] / "golden"
RELEASES = {"v1": {"min_valid": 2}, "v2": {"min_valid": 0}}
"""Release -> its defaults that are others than today's."""


def recorded(release: str) -> RunConfigured:
    """As the release wrote it, under the run's id of these tests."""
    golden = json.loads((GOLDEN / f"run-configured-{release}.json").read_text())
    return RunConfigured(event_id="configured", run_id="run", **{**golden, "settings": golden["settings"].encode()})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fold(FoldSettings):
    """Of a later release: a default that does something else than the releases before did."""

    discount: Annotated[float, Since("v2", before=1.0)] = 0.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draws(BatcherSettings):
    """Of a later release: with a key of its own."""

    fresh: Annotated[int, Since("v3", before=1)] = 2


def settings_of(release: str, fold: Callable[..., Any], draws: Callable[..., Any]) -> Settings:
    """The values that the release recorded, but for operational ones, in a settings file of today or tomorrow."""
    return dataclasses.replace(
        SETTINGS, fold=fold(**RELEASES[release]), batcher=draws(ready_batches=1000, order="freshest")
    )


@pytest.mark.parametrize("release", RELEASES)
async def test_a_run_of_an_earlier_release_opens_goes_on_and_replays(release: str) -> None:
    await _goes_on(recorded(release), settings_of(release, FoldSettings, BatcherSettings))


@pytest.mark.parametrize("release", RELEASES)
async def test_it_does_so_after_each_section_has_got_another_key_with_another_default(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FOLD_SECTIONS, "fold", Fold)
    monkeypatch.setitem(FOLD_SECTIONS, "batcher", Draws)
    await _goes_on(recorded(release), settings_of(release, partial(Fold, discount=1.0), partial(Draws, fresh=1)))


async def _goes_on(configured: RunConfigured, settings: Settings) -> None:
    made = TrainedRun(settings=settings)
    await made.configure(configured)
    await made.good_groups(first=0, groups=16)
    await made.fold()
    await made.draw()
    await made.good_groups(first=16, groups=16)  # the roles start anew, on their own marks and manifests
    await made.fold()
    await made.draw()
    formed = [type(event) for event in await made.read(topics.BATCHES)]
    assert formed == [SampleBatchFormed, BatchSkipped], "on-policy, as recorded: the second draw is stale"
    assert Configured.today(settings).settings_sha256 != configured.settings_sha256
    for topic in (topics.TREES, topics.SAMPLES, topics.BATCHES):
        derived = [event for event in await made.read(topic) if hasattr(event, "settings_sha256")]
        assert {event.settings_sha256 for event in derived} == {configured.settings_sha256}
        assert {event.fold_version for event in derived if hasattr(event, "fold_version")} <= {"1"}
    verdict = await replay(made.role("replay"))
    assert verdict.identical, verdict.divergence
    assert (verdict.batches_compared, verdict.samples_compared) == (1, 64)
