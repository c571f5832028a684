"""What may be deleted from topics: what is archived, old, and read again by no role."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from turnlog.consumers.pruning import prunable
from turnlog.consumers.replay.verify import run
from turnlog.infra.archive import ArchiveIndex
from turnlog.infra.log import Commit, Partition, partition_of
from turnlog.schemas import topics
from turnlog.schemas.events import GroupRequested, Limits, Purpose, RolloutRequested, Sampling, SkipRequested
from turnlog.schemas.topics import CONTROL

Make = Callable[..., Any]
EVER = 1 << 60
TASKS, CALLS, RESULTS = (Partition(name, 0) for name in ("tasks", "agent.tool-calls", "agent.tool-results"))


def noted(group: str) -> GroupRequested:
    return GroupRequested(
        event_id=group, run_id="run", group_id=group, draw=0, dataset="d", dataset_epoch=0, index=0,
        purpose=Purpose.train, group_size=1,
    )  # fmt: skip


def requested(group: str, floor: int) -> RolloutRequested:
    return RolloutRequested(
        event_id=group, run_id="run", group_id=group, floor=floor, task_id="t", rollout_id=group, rollout_index=0,
        group_size=1, draw=0, dataset="d", dataset_epoch=0, index=0, recipe="calc", purpose=Purpose.train, task=b"{}",
        sampling=Sampling(), limits=Limits(), min_weight_version=0,
    )  # fmt: skip


async def found(made: Any, before_ms: int = EVER) -> dict[Partition, int]:
    role = made.role()
    index = ArchiveIndex(role.blobs, "run")
    await index.load()
    return await prunable(role, index, before_ms)


async def commit(made: Any, group: str, commits: dict[Partition, Commit]) -> None:
    async with made.role().log.transactor("test") as transactor:
        await transactor.begin()
        await transactor.offsets(group, commits)
        await transactor.commit()


async def test_everything_but_control_topics_goes_that_no_role_reads_again(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=8)
    await made.append([requested("over", 0), requested("open", 5)])
    spare = Partition(topics.SESSIONS.name, partition_of(b"open", 2))
    await made.archive()
    early = await found(made)
    assert not {"tasks", "segment-samples"} & {place.topic for place in early}  # a feeder would read them
    await made.append([noted("over"), noted("open")])
    await commit(made, "run.runner", {TASKS: Commit(1)})
    limits = await found(made)
    names = {place.topic for place in limits}
    assert names >= {"agent.sessions", "agent.turns", "agent.token-snapshots", "segment-samples", "tasks"}
    assert not names & {topic.name for topic in CONTROL}
    assert limits[TASKS] == 1
    assert limits[spare] == 5  # a gateway reads back to the open rollout's floor
    manifest = (await made.read(topics.BATCHES))[-1]
    for position in manifest.positions:
        assert limits.get(Partition(topics.SAMPLES.name, position.partition), 0) == position.offset
    assert await found(made, before_ms=0) == {}


async def test_roles_go_on_after_all_of_that_was_deleted_and_replay_reads_the_archive(trained_run: Make) -> None:
    made = trained_run()
    await made.good_days(groups=6)
    await made.append([noted("g")])
    await made.archive()
    limits = await found(made)
    assert any(place.topic == "segment-samples" for place in limits)
    await made.role().log.delete_before(limits)
    drawn = len(await made.read(topics.BATCHES))
    await made.good_groups(groups=12, first=6)
    await made.fold()
    assert await made.draw() > drawn
    await made.archive()
    verdict = await run(await made.archived())
    assert verdict.identical, verdict.divergence


async def test_calls_and_results_go_below_what_workers_and_runners_read_again(trained_run: Make) -> None:
    made = trained_run()
    skip = SkipRequested(
        event_id="e", run_id="run", group_id="g", floor=0, topic="agent.turns", partition=0, offset=7, reason=""
    )
    role = made.role()
    async with role.log.appender() as appender:
        for place in (CALLS, RESULTS):
            for _ in range(6):
                await appender.append(place.topic, b"k", role.events.codec.encode(skip))
    await made.archive()
    assert await found(made) == {}
    await commit(made, "run.sandbox", {CALLS: Commit(4, json.dumps({"results": 3}))})
    assert await found(made) == {CALLS: 4}
    await commit(made, "run.runner", {RESULTS: Commit(5)})
    assert await found(made) == {CALLS: 4, RESULTS: 3}
