"""A loop that somebody else deploys and strikes: `python benchmarks/chaos/deployed.py train` beside it stands in for
trainer and loader on a scripted engine (ENGINE_URL), `judge` says afterwards what came of it.

`train` registers the engine, publishes weights that nobody reads after each draw and hands them over, at a pace that
leaves the rest of the loop work to do. `judge` expects that nobody asks for more (the feeder is gone): every group that
was asked for must come to its score and every rollout to its end, no group be in two draws, no draw trained twice, no
manifest or input be passed over, and the outputs be those of an offline fold, byte for byte.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass

import httpx
from assembler import Story, drained, verdict
from servers import say

from turnlog.infra.event_log import where
from turnlog.infra.history import all_events, events
from turnlog.infra.log import Commit, Partition, Reached, Transactor, own_ends
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import load_configuration
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.processors.runtime.assembler import assembler_plan
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineRegistered,
    EngineWeightsLoaded,
    Event,
    SampleBatchFormed,
    SessionFinished,
    StepCompleted,
    WeightVersionPublished,
)
from turnlog.schemas.ids import digest, session_id
from turnlog.settings import load

ENGINE = "engine-0"
STEP_S = 2.0
PATIENCE_S = 240.0
MANIFESTS = Partition(topics.BATCHES.name, 0)


def weights(run_id: str, version: int, batch_index: int, incarnation: int) -> WeightVersionPublished:
    """A version of no files."""
    return WeightVersionPublished(
        event_id=digest("WeightVersionPublished", run_id, version), run_id=run_id, version=version,
        step=batch_index + 1, batch_index=batch_index, incarnation=incarnation, kind="full", base_version=None,
        files=(), dtype="float32", checksums={}, checkpoint=None,
    )  # fmt: skip


def stepped(manifest: SampleBatchFormed, step: int, incarnation: int) -> StepCompleted:
    """Of a step that changed nothing."""
    return StepCompleted(
        event_id=digest("StepCompleted", manifest.run_id, manifest.batch_index, incarnation), run_id=manifest.run_id,
        batch_index=manifest.batch_index, draw_index=manifest.draw_index, incarnation=incarnation, step=step, loss=0.0,
        grad_norm=0.0, learning_rate=0.0, lag_max=manifest.max_lag, tokens=sum(one.tokens for one in manifest.samples),
        trained_tokens=manifest.trained_tokens, masked={}, skipped=False, reward_mean=0.0, logprob_gap_max=0.0,
        logprob_gap_mean=0.0, entropy=None, clip_fraction=0.0, seconds={}, world_size=1,
    )  # fmt: skip


async def hand_over(role: Role, url: str, version: int, *, first: bool = False) -> None:
    """The engine samples with it from now on, and says so on the log."""
    async with httpx.AsyncClient() as client:
        (await client.post(f"{url}/version", params={"of": version})).raise_for_status()
    of = {"run_id": role.settings.run.id, "engine_id": ENGINE, "url": url, "state": "serving", "version": version}
    name = digest("EngineWeightsLoaded", ENGINE, version)
    event: Event = EngineWeightsLoaded(event_id=name, superseded=(), seconds={}, **of)  # type: ignore[arg-type]
    if first:
        event = EngineRegistered(event_id=f"{ENGINE}-{version}", model="scripted", **of)  # type: ignore[arg-type]
    await role.events.append(event)


@dataclass(slots=True)
class Past:
    """What the log says of the trainers before, read after the last one was fenced: nothing is stepped on twice."""

    stepped: set[int]
    version: int
    incarnation: int

    @classmethod
    async def read(cls, role: Role) -> Past:
        """Of the role's run. Raises TransactionHanging."""
        await own_ends(role.log, [Partition(topic.name, 0) for topic in (topics.STEPS, topics.WEIGHTS)])
        steps = await all_events(role, topics.STEPS)
        versions = await all_events(role, topics.WEIGHTS)
        newest = max((one.version for one in versions), default=-1)
        incarnation = max((one.incarnation for one in (*steps, *versions)), default=-1) + 1
        return cls({step.batch_index for step in steps}, newest, incarnation)


async def train(url: str) -> int:
    """Until it is told to stop."""
    async with open_role("trainer", load(None, os.environ)) as role:
        run_id = role.settings.run.id
        while topics.RUNS.name not in await role.log.topics():  # noqa: ASYNC110
            await asyncio.sleep(0.5)  # somebody else makes topics
        await load_configuration(role)
        async with (
            role.log.transactor(TransactionalId.TRAINER.format(run=run_id)) as transactor,
            role.log.reader() as reader,
        ):
            past = await Past.read(role)
            say(f"trainer {past.incarnation}: {len(past.stepped)} steps, up to batch {max(past.stepped, default=-1)}")
            past.version += 1
            published = weights(run_id, past.version, max(past.stepped, default=-1), past.incarnation)
            await role.events.transact(transactor, [published])
            await hand_over(role, url, past.version, first=True)
            group = ConsumerGroup.TRAINER.format(run=run_id)
            reached = await Reached.from_log(role.log, transactor, group, [MANIFESTS])
            reader.assign(await role.log.start_offsets([MANIFESTS]))
            while not role.stopping.is_set():
                await reached.say({MANIFESTS: Commit(reader.position(MANIFESTS))})
                for record in await reader.poll(max_records=1, timeout_s=0.2):
                    manifest = await role.events.decode(record)
                    if isinstance(manifest, SampleBatchFormed):
                        await step(role, transactor, past, manifest, url)
    return 0


async def step(role: Role, transactor: Transactor, past: Past, manifest: SampleBatchFormed, url: str) -> None:
    """On a manifest that nobody has stepped on; the last one of a draw publishes weights."""
    if manifest.batch_index not in past.stepped:
        await asyncio.sleep(STEP_S)  # what a step takes
        past.stepped.add(manifest.batch_index)
        events: list[Event] = [stepped(manifest, len(past.stepped), past.incarnation)]
        last = manifest.part == manifest.parts - 1
        if last:
            past.version += 1
            events.append(weights(role.settings.run.id, past.version, manifest.batch_index, past.incarnation))
        await role.events.transact(transactor, events)
        if last:
            await hand_over(role, url, past.version)
    say(f"draw {manifest.draw_index} is trained")


async def settled(role: Role) -> tuple[int, int, int]:
    """Groups and rollouts without an end and batches without a step, once there is none, or after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        asked = {event.group_id for event in await all_events(role, topics.GROUP_REQUESTS)}
        scored = {event.group_id for event in await all_events(role, topics.GROUP_SCORES)}
        requested = {event.rollout_id for event in await all_events(role, topics.TASKS)}
        sessions = await all_events(role, topics.SESSIONS)
        over = {event.session_id for event in sessions if isinstance(event, SessionFinished) and event.final}
        attempts = range(role.settings.runner.max_attempts)
        ended = {one for one in requested if any(session_id(one, attempt) in over for attempt in attempts)}
        batches = [one for one in await all_events(role, topics.BATCHES) if isinstance(one, SampleBatchFormed)]
        formed = {one.batch_index for one in batches}
        trained = {step.batch_index for step in await all_events(role, topics.STEPS)}
        left = len(asked - scored), len(requested - ended), len(formed - trained)
        if not any(left) or time.monotonic() > deadline:
            return left
        await asyncio.sleep(1.0)


async def judge() -> int:
    """Print two lines, of the loop and of the fold; the exit status."""
    async with open_role("chaos", load(None, os.environ)) as role:
        run = await load_configuration(role, wait=False)
        assert run is not None, "it does not wait"
        groups, rollouts, untrained = await settled(role)
        formed = [one for one in await all_events(role, topics.BATCHES) if isinstance(one, SampleBatchFormed)]
        placed = [(record, step) async for record, step in events(role, topics.STEPS)]
        steps = [step for _, step in placed if isinstance(step, StepCompleted)]
        used = Counter(group for batch in formed for group in batch.groups)
        trained = Counter(step.batch_index for step in steps)
        twice = sum(count - 1 for many in (used, trained) for count in many.values())
        for record, event in placed:
            if isinstance(event, StepCompleted) and trained[event.batch_index] > 1:
                say(f"{where(record)} at {record.timestamp_ms} ms: step on {event.batch_index}, {event.incarnation}")
        line = {"id": "loop", "groups_lost": groups, "rollouts_lost": rollouts, "twice": twice, "untrained": untrained,
                "batches": len(formed), "steps": len(steps), "groups": len(used)}  # fmt: skip
        print(json.dumps(line), flush=True)
        plan, story = assembler_plan(run, role.settings.assembler), Story(exit_status=0)
        await drained(role.log, plan, role.settings, None)
        return await verdict(role.events, plan, role.settings, story)


if __name__ == "__main__":
    sys.exit(asyncio.run(train(os.environ["ENGINE_URL"]) if sys.argv[1] == "train" else judge()))
