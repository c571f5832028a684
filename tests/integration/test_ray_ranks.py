"""Ranks on two nodes of a real Ray, under a trainer whose log is in memory; one of them dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.fakes.batches import append_batches
from tests.ray_nodes import actors, two_nodes
from tests.unit.trainer.test_draws import Run
from turnlog.trainer import LayoutUnfit, RankLost
from turnlog.trainer.launch import ranks
from turnlog.trainer.plan import learning_plan

RANKS, DRAWS = 2, 4
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.long,  # the suite has ranks as processes (test_trainer_layouts.py)
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as cluster:
        yield cluster


def run_of(folder: Path, **trainer: Any) -> Run:
    run = Run(folder, **trainer)
    run.settings = dataclasses.replace(run.settings, feeder=dataclasses.replace(run.settings.feeder, draws=DRAWS))
    return run


async def formed(run: Run, batches: int) -> None:
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", batches)


async def test_a_rank_that_dies_ends_the_gang_which_goes_on_from_its_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    placed = {"launcher": "ray", "ray_address": cluster.address, "ray_placement": "STRICT_SPREAD"}
    run = run_of(tmp_path / "ray", world_size=RANKS, **placed)
    await run.begin()
    await formed(run, 2)
    first = asyncio.create_task(run.train())
    stepped = asyncio.create_task(run.steps(2))
    await asyncio.wait([first, stepped], return_when=asyncio.FIRST_COMPLETED)
    assert not first.done(), first.exception()
    gang = actors("Rank")
    assert len({one.ppid() for one in gang}) == RANKS  # a node each
    os.kill(gang[1].pid, signal.SIGKILL)
    await formed(run, DRAWS)
    with pytest.raises(RankLost, match=r"rank \d on Ray is gone"):
        await first
    _, alive = await asyncio.to_thread(psutil.wait_procs, gang, 60)
    assert not alive
    await run.train()
    steps = {step.batch_index: step for step in await run.steps(DRAWS)}
    assert {index: step.incarnation for index, step in steps.items() if index > 1} == {2: 1, 3: 1}

    alone = run_of(tmp_path / "alone")
    await alone.begin()
    await formed(alone, DRAWS)
    await alone.train()
    for step in await alone.steps(DRAWS):
        assert steps[step.batch_index].loss == pytest.approx(step.loss, abs=1e-5)


def test_what_the_cluster_cannot_hold_is_said(cluster: Cluster, tmp_path: Path) -> None:
    settings = run_of(tmp_path, launcher="ray", ray_address=cluster.address, world_size=RANKS + 1).settings
    plan = dataclasses.replace(learning_plan(settings), join_s=1.0)
    with pytest.raises(RankLost, match="did not place 3 bundles"), ranks(plan):
        pytest.fail("there is no room for a third rank")
    nowhere = dataclasses.replace(plan, ray_address="127.0.0.1:1")
    with pytest.raises(LayoutUnfit, match=r"no Ray cluster at 127.0.0.1:1.*ray_address"), ranks(nowhere):
        pytest.fail("nobody listens there")
