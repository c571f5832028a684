"""When a run is over, and which evaluation round is due."""

from __future__ import annotations

import dataclasses

import pytest

from turnlog.processors.core.views.progress import EvaluationRounds, RunView
from turnlog.schemas.events import (
    EngineDraining,
    EngineRegistered,
    EngineWeightsLoaded,
    Event,
    GroupEmitted,
    GroupRequested,
    Purpose,
    RunPlanned,
    StepCompleted,
    WeightVersionPublished,
)
from turnlog.schemas.releases import example


def step(draw: int, batch: int) -> Event:
    return dataclasses.replace(example(StepCompleted), draw_index=draw, batch_index=batch)


def weights(version: int, batch: int) -> Event:
    return dataclasses.replace(example(WeightVersionPublished), version=version, batch_index=batch, step=batch + 1)


def loaded(version: int) -> Event:
    return dataclasses.replace(example(EngineWeightsLoaded), engine_id="e", version=version, state="serving")


def requested(group: str, number: int, purpose: Purpose = Purpose.eval) -> Event:
    return dataclasses.replace(example(GroupRequested), group_id=group, dataset_epoch=number, purpose=purpose)


def scored(group: str) -> Event:
    return dataclasses.replace(example(GroupEmitted), group_id=group, purpose=Purpose.eval)


DONE = [weights(0, -1), loaded(0), step(0, 0), step(0, 1), step(1, 2), weights(1, 2), loaded(1)]
SILENT = dataclasses.replace(example(EngineDraining), engine_id="e", version=1, state="silent")
BEHIND = dataclasses.replace(example(EngineRegistered), engine_id="f", version=0, state="starting")


@pytest.mark.parametrize(
    ("events", "over"),
    [
        (DONE, True),
        ([*DONE, SILENT], True),
        (DONE[:-1], False),
        (DONE[:-2], False),
        ([one for one in DONE if one != step(1, 2)], False),
        ([*DONE, BEHIND], False),
    ],
)
def test_a_run_is_over_once_its_last_weights_are_published_and_acknowledged(events: list[Event], over: bool) -> None:
    run = RunView()
    for event in events:
        run.apply(event)
    assert run.is_over(2, 0) is over
    assert not run.is_over(3, 0)


def test_a_run_is_not_over_while_its_last_weights_are_only_announced() -> None:
    run, last = RunView(), dataclasses.replace(example(WeightVersionPublished), version=9, batch_index=9, step=10)
    announced = dataclasses.replace(last, state="announced", transport="direct")
    for event in (*DONE, announced, loaded(9)):
        run.apply(event)
    assert (run.weights.newest_state, run.is_over(2, 0)) == ("announced", False)
    run.apply(dataclasses.replace(last, event_id="stored", transport="direct"))
    assert (run.weights.newest_state, run.is_over(2, 0)) == ("durable", True)


def test_a_run_with_evaluation_is_over_once_its_last_round_is_scored() -> None:
    run = RunView()
    for event in (*DONE, requested("a", 1), requested("b", 1), scored("a")):
        run.apply(event)
    assert run.is_over(2, 0)
    assert not run.is_over(2, 2)
    run.apply(scored("b"))
    assert run.is_over(2, 2)


def test_a_phase_holds_until_a_later_plan_names_another() -> None:
    run = RunView()
    phases = []
    for phase in ("", "paused", "", "closed"):
        run.apply(dataclasses.replace(example(RunPlanned), phase=phase))
        phases.append(run.phase)
    assert phases == ["", "paused", "paused", "closed"]


def test_a_round_is_due_until_it_is_requested_and_a_missed_one_is_skipped() -> None:
    rounds = EvaluationRounds()
    assert [rounds.due(trained, 2) for trained in (0, 1, 2, 5)] == [0, 0, 1, 2]
    rounds.apply(requested("a", 0))
    rounds.apply(requested("t", 1, Purpose.train))
    assert [rounds.due(trained, 2) for trained in (0, 1, 2, 5)] == [None, None, 1, 2]
    assert rounds.due(0, 0) is None
    assert (rounds.knows("a"), rounds.knows("t")) == (True, False)
