"""`turnlog log eval`: estimators against what they estimate, and the fold of a log that has every kind of session."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.fakes.sessions import GroupName, SessionStory, Shape
from tests.unit.consumers.conftest import TrainedRun
from tests.unit.producers.test_admission import emitted, requested
from turnlog.consumers.figures import read_evaluations
from turnlog.infra.roles.terminal import Terminal
from turnlog.processors.core.evaluation import EvalGroups, VersionRewards, mean, pass_at, wilson
from turnlog.processors.core.views.progress import EvaluationRounds
from turnlog.producers.admission import DueGroup, RowVisit
from turnlog.schemas.events import (
    Event,
    Expects,
    GroupScored,
    GroupStatus,
    Outcome,
    Purpose,
    SampleBatchFormed,
    WeightVersionPublished,
)
from turnlog.schemas.topics import BATCHES, SAMPLES, TREES, WEIGHTS
from turnlog.verbs.models import body, table


@pytest.mark.parametrize(("samples", "passed"), [(1, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_one_that_passed(
    samples: int, passed: int
) -> None:
    rewards = [1] * passed + [0] * (samples - passed)
    for k in range(1, samples + 1):
        choices = list(itertools.combinations(rewards, k))
        assert pass_at(k, samples, passed) == pytest.approx(float(Fraction(sum(map(any, choices)), len(choices))))


def test_an_interval_is_where_the_score_test_would_not_reject() -> None:
    for share, count in ((0.0, 10), (0.3, 20), (1.0, 3)):
        found = wilson(share, count)
        for end in (found.low, found.high):
            if 0 < end < 1:
                assert abs(share - end) / math.sqrt(end * (1 - end) / count) == pytest.approx(1.96, abs=1e-3)
        assert found.low <= share <= found.high
    assert wilson(0.0, 10).high > 0.2
    assert mean([1.0, 2.0, 3.0]).high == pytest.approx(2 + 1.96 / math.sqrt(3), abs=1e-3)


def test_a_version_with_few_tasks_does_not_lead_by_luck() -> None:
    lucky, steady = VersionRewards(7), VersionRewards(3)
    lucky.rewards["t"] = [1.0]
    for task in range(40):
        steady.rewards[str(task)] = [1.0, 1.0, 1.0, float(task > 3)]
    assert lucky.reward.value > steady.reward.value
    assert steady.rank > lucky.rank


def session(group: GroupName, index: int, versions: tuple[int, ...], reward: float, outcome: Outcome) -> list[Event]:
    story = SessionStory(group, index, np.random.default_rng([index]), purpose=Purpose.eval)
    events: list[Event] = [story.started()]
    for version in versions:
        events += story.turn(Shape(), version=version)
    finished = story.finished(outcome)
    if outcome is not Outcome.completed:  # nobody judges it
        return [*events, dataclasses.replace(finished, expects=Expects(reward=False))]
    return [*events, story.rewarded(reward), finished]


@pytest.fixture
async def evaluated(trained_run: Callable[..., TrainedRun]) -> TrainedRun:
    """Three eval tasks, sampled by versions 0 and 1, one session by both, one that failed for reasons of ours."""
    run = trained_run()
    await run.configure()
    groups = [GroupName("run", f"eval {number}", 0, 4) for number in range(3)]
    stories = [
        session(groups[0], 0, (0, 0), 1.0, Outcome.completed), session(groups[0], 1, (0,), 0.0, Outcome.completed),
        session(groups[0], 2, (0, 1), 1.0, Outcome.completed), session(groups[0], 3, (0,), 0.0, Outcome.infra_failure),
        *(session(groups[1], index, (1,), float(index < 3), Outcome.completed) for index in range(4)),
        *(session(groups[2], index, (1,), 1.0, Outcome.completed) for index in range(4)),
    ]  # fmt: skip
    published = (await run.read(WEIGHTS))[0]
    assert isinstance(published, WeightVersionPublished)
    newer = dataclasses.replace(published, event_id="v1", version=1, step=5, checkpoint="checkpoints/step-00000005-i0")
    await run.append([newer, *itertools.chain(*stories)])
    await run.fold()
    return run


async def test_versions_are_told_apart_and_failures_of_ours_count_for_none(evaluated: TrainedRun) -> None:
    scored = [event for event in await evaluated.read(SAMPLES) if isinstance(event, GroupScored)]
    assert {(event.status.value, event.reason) for event in scored} == {("not_training", "purpose")}
    found = await read_evaluations(evaluated.role())
    assert dict(found.left_out) == {"mixed": 1, "excluded": 1}
    zero, one = found.versions[0], found.versions[1]
    assert (zero.sessions, one.sessions) == (2, 8)
    assert (zero.reward.value, one.reward.value) == (0.5, 0.875)
    first, second = one.passing(1), one.passing(4)
    assert first is not None
    assert second is not None
    assert (first.value, second.value) == (0.875, 1.0)
    assert zero.passing(4) is None
    assert found.best is one
    assert not [event for event in await evaluated.read(BATCHES) if isinstance(event, SampleBatchFormed)]


async def test_the_answer_names_the_best_version_and_its_checkpoint(evaluated: TrainedRun) -> None:
    found = await read_evaluations(evaluated.role())
    told = body("run", found, found.ks())
    assert [version["version"] for version in told["versions"]] == [0, 1]
    assert told["versions"][1]["checkpoint"] == "checkpoints/step-00000005-i0"
    assert told["versions"][1]["pass"]["4"]["low"] == pytest.approx(0.342, abs=1e-3)  # two of two tasks
    assert (told["best"], told["groups"]["scored"]) == (1, 3)
    console = Terminal(width=160, file=io.StringIO())
    console.print(table("run", found, found.ks()))
    shown = console.file.getvalue()
    assert "best: version 1 (checkpoints/step-00000005-i0); left out: excluded 1, mixed 1" in shown


async def test_a_version_that_is_only_announced_is_evaluated_and_has_no_files_to_export(evaluated: TrainedRun) -> None:
    newest = (await evaluated.read(WEIGHTS))[-1]
    assert isinstance(newest, WeightVersionPublished)
    announced = dataclasses.replace(newest, state="announced", transport="direct", checkpoint=None)
    groups = EvalGroups()
    for events in (await evaluated.read(SAMPLES), await evaluated.read(TREES), [announced]):
        for event in events:
            groups.apply(event)
    found = groups.evaluations()
    assert (found.versions[1].state, found.versions[1].checkpoint, found.versions[1].step) == ("announced", None, 5)
    console = Terminal(width=160, file=io.StringIO())
    console.print(table("run", found, found.ks()))
    assert "best: version 1, announced only: no files to export" in console.file.getvalue()
    groups.apply(newest)
    groups.apply(announced)
    assert groups.evaluations().versions[1].state == "durable", "whatever is read again"


def test_a_run_waits_for_its_last_round() -> None:
    picture = EvaluationRounds()
    assert not picture.is_evaluated(1)
    for group in ("a", "b"):
        picture.apply(dataclasses.replace(requested(DueGroup(RowVisit(1, 0), 0), Purpose.eval), group_id=group))
        picture.apply(dataclasses.replace(emitted("t"), group_id=group))
    assert not picture.is_evaluated(1)
    for group in ("a", "b"):
        assert not picture.is_evaluated(1)
        picture.apply(
            dataclasses.replace(emitted("e", status=GroupStatus.not_training), group_id=group, purpose=Purpose.eval)
        )
    assert picture.is_evaluated(1)
    assert not picture.is_evaluated(2)
