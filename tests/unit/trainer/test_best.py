"""The checkpoint of the version that evaluations find best outlives its age, and so does one with a round under way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.sessions import GroupName, SessionStory, Shape
from tests.unit.consumers.conftest import TrainedRun
from turnlog.consumers.figures import read_evaluations
from turnlog.schemas.events import Event, GroupRequested, Outcome, Purpose, WeightVersionPublished
from turnlog.schemas.topics import WEIGHTS
from turnlog.trainer.checkpoints.cursor import Checkpoints, cursor_values
from turnlog.trainer.checkpoints.places import FolderPlace
from turnlog.trainer.checkpoints.saves import NeededByEvaluations
from turnlog.trainer.manifests import Cursor

KEPT = 2
ROUNDS = {1: (1.0, 1.0, 1.0, 0.0), 2: (0.0, 0.0, 1.0, 0.0), 3: (0.0, 0.0, 0.0, 0.0)}
SCORED = {4: 1, 8: 2}
"""Step -> the round that is scored before its checkpoint is sealed."""


@pytest.fixture
def run() -> TrainedRun:
    run = TrainedRun()
    settings = dataclasses.replace(
        run.settings,
        eval=dataclasses.replace(run.settings.eval, every=2),
        trainer=dataclasses.replace(run.settings.trainer, checkpoints_kept=KEPT),
    )
    return TrainedRun(settings)


def round_of(number: int, version: int, rewards: Iterable[float]) -> tuple[list[Event], list[Event]]:
    """(what the feeder asks for, the sessions of the round)."""
    group = GroupName("run", f"eval {number}", 0, 4)
    asked = GroupRequested(
        event_id=group.group_id, run_id="run", group_id=group.group_id, draw=0, dataset="d", dataset_epoch=number,
        index=0, purpose=Purpose.eval, group_size=4,
    )  # fmt: skip
    told: list[Event] = []
    for index, reward in enumerate(rewards):
        story = SessionStory(group, index, np.random.default_rng([number, index]), purpose=Purpose.eval)
        told += [story.started(), *story.turn(Shape(), version=version)]
        told += [story.rewarded(reward), story.finished(Outcome.completed)]
    return [asked], told


def write(part: Path, cursor: Cursor) -> None:
    """A checkpoint without weights."""
    named = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (part / "metadata.json").write_text(
        json.dumps({**named, "sharded_backend_version": 1, "common_backend_version": 1})
    )
    torch.save({"common": {"cursor": cursor_values(cursor)}}, part / "common.pt")


def steps(folder: Path) -> set[int]:
    return {int(path.name.split("-")[1]) for path in folder.glob("step-*-i0")}


async def test_the_best_version_and_rounds_under_way_keep_their_checkpoints(run: TrainedRun, tmp_path: Path) -> None:
    await run.configure()
    first = (await run.read(WEIGHTS))[0]
    assert isinstance(first, WeightVersionPublished)
    versions = [
        dataclasses.replace(first, event_id=f"v{step}", version=step, step=step, checkpoint=None)
        for step in range(1, 9)
    ]
    checkpoints = Checkpoints(FolderPlace(tmp_path), keep=KEPT)
    checkpoints.claim(0)
    needed = NeededByEvaluations(run.role("trainer"), checkpoints)
    there: dict[int, set[int]] = {}
    rounds = {number: round_of(number, 2 * number, rewards) for number, rewards in ROUNDS.items()}
    for step in range(1, 9):
        await run.append([versions[step - 1], *(rounds[step // 2][0] if step % 2 == 0 and step // 2 in rounds else ())])
        if step in SCORED:
            await run.append(rounds[SCORED[step]][1])
            await run.fold()
        part = checkpoints.begin(Cursor(step=step, draws=step))
        write(part, Cursor(step=step, draws=step))
        checkpoints.seal(part, await needed())
        there[step] = steps(tmp_path)
    best = (await read_evaluations(run.role())).best
    assert best is not None
    assert best.number == 2
    assert there == {
        1: {1},
        2: {1, 2},
        3: {2, 3},
        4: {2, 3, 4},
        5: {2, 4, 5},
        6: {2, 4, 5, 6},
        7: {2, 4, 6, 7},
        8: {2, 6, 7, 8},
    }
