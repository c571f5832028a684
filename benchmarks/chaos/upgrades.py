"""Upgrade a run and go back, role by role, under load: `python benchmarks/chaos/upgrades.py [--kills 6]
[--lean | --processors]`.

Roles of the release before the last work on a run that it configured: a feeder, two runners at two gateways, sandboxes,
two assemblers, a batcher, an archiver and the views, beside an engine and a trainer that are scripted
(upgrades_trainer.py has real ones). One after another they are replaced by this release's, room by room in each of as
many of the six orders of rooms as --kills says, and after each order they go back: all at once as `helm rollback` does,
after the last of several one by one. Beside them other gateways write histories as bad days leave them: of the old
release before the first upgrade, then of both, with the schemas of one or other. In the end every rollout must have
been asked for once and have come to its end, every call have been run once and no verdict be about a part of a turn;
the topics must hold every tree, sample and score once, as an offline fold under the run's fold version gives them,
every scored group must be in one batch, the archive must hold each record of the log once and the views' tables what a
fold of the topics gives, and `turnlog replay --verify` must find the same batches in topics and archive.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import fastavro
import httpx
from answers import inline, with_model
from assembler import committed, compared, drained, folded
from deployed import ENGINE, stepped, weights
from kept import files, shown, unlike_log, unlike_topics
from previous import previous
from servers import TURNLOG, environment, say, servers, told

from tests.fakes.sessions import bad_days
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Appender, Partition
from turnlog.infra.registry import HttpRegistry
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import Configured
from turnlog.processors.runtime.assembler import assembler_plan
from turnlog.processors.runtime.unit import AssemblerPlan
from turnlog.schemas import topics
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, Codec, plain
from turnlog.schemas.events import (
    BatchSkipped,
    EngineRegistered,
    Event,
    GroupScored,
    GroupStatus,
    RewardAssigned,
    RunConfigured,
    SampleBatchFormed,
    SessionFinished,
    ToolCallCompleted,
    ToolCallRequested,
    TurnCompleted,
    WeightVersionPublished,
)
from turnlog.schemas.events.turns import CUT_OFF
from turnlog.schemas.ids import session_id
from turnlog.schemas.releases import as_of, releases
from turnlog.settings import Settings

Rooms = tuple[tuple[str, ...], ...]
ROOMS: Rooms = (
    ("feeder-0", "gateway-0", "runner-0", "gateway-1", "runner-1"),
    ("assembler-0", "batcher-0", "assembler-1", "archive-0", "views-0"),
    ("sandbox-0",),
)
LEAN: Rooms = tuple(tuple(member for member in room if member not in ("gateway-1", "runner-1")) for room in ROOMS)
PROCESSORS: Rooms = (("assembler-0", "batcher-0"),)
"""What gets on with histories alone, though nobody asks for rollouts."""
KEPT = ("archive-0", "views-0")
"""What they keep is looked at in the end, whoever is replaced: where they are not, they are this release's."""
EVENTS_PER_S = 40
STEP_S = 0.5
"""What a step takes: it paces the whole loop."""
PATIENCE_S = 240.0
PER_DRAW = 4
LOST = ("left", "endless", "unscored", "unanswered", "partly_judged", "unarchived", "unshown")
TWICE = ("again", "asked_again", "called_again", "archived_again")
FROM_ARCHIVE = ("--from", "archive")
RUN = {
    "TURNLOG_BATCHER_PROMPTS_PER_DRAW": str(PER_DRAW), "TURNLOG_BATCHER_MAX_LAG": "2",
    "TURNLOG_FEEDER_DRAWS": "5000", "TURNLOG_FEEDER_GROUP_SIZE": "2", "TURNLOG_FEEDER_MAX_NEW_TOKENS": "128",
    "TURNLOG_FOLD_MIN_VALID": "2", "TURNLOG_SANDBOX_BACKEND": "subprocess", "TURNLOG_ARCHIVE_MAX_AGE_S": "5",
}  # fmt: skip
"""Settings of both releases: the feeder asks for ever. What comes of bad days is too old once weights were published:
draws of it alone are skipped by name."""


class Writers:
    """Gateways and trainers of both releases, as one appender."""

    def __init__(self, appender: Appender, events: EventLog, registry: HttpRegistry, rng: random.Random) -> None:
        self._appender, self._events, self._registry, self._rng = appender, events, registry, rng
        self._schemas = {
            "old": as_of(releases()[-2].name, releases()),
            "new": {name: stored_schema(name) for name in as_of(releases()[-1].name, releases())},
        }
        self._ids: dict[tuple[str, str], int] = {}
        self.of = ["old"]
        """Whose releases may write now."""
        self.wrote: Counter[str] = Counter()

    async def append(self, event: Event) -> None:
        """By one of them. What a release has no field for, it does not write."""
        name, release = type(event).__name__, self._rng.choice(self.of)
        schema, body = self._schemas[release][name], io.BytesIO()
        if (release, name) not in self._ids:
            self._ids[release, name] = await self._registry.register(name, schema)
        body.write(HEADER.pack(0, self._ids[release, name]))
        fastavro.schemaless_writer(body, fastavro.parse_schema(dict(schema)), plain(event))
        topic = topics.TOPIC_OF[name]
        await self._appender.append(
            topic.name, topic.key_of(event), body.getvalue(), headers=self._events.headers(event)
        )
        self.wrote[release] += 1


@dataclass(slots=True)
class Upgrades:
    """The processes, and what became of them."""

    settings: Settings
    old: Path
    run: Mapping[str, str] = field(default_factory=lambda: RUN)
    engine: Child = field(init=False)
    roles: dict[str, Child] = field(default_factory=dict)
    ports: defaultdict[str, int] = field(default_factory=lambda: defaultdict(lambda: free_ports(1)[0]))
    """Of each role's pages."""
    gateways: list[int] = field(default_factory=lambda: free_ports(2))
    """Their ports: whoever comes up takes the address of the one before it."""
    faults: list[str] = field(default_factory=list)
    beside: list[asyncio.Task[None]] = field(default_factory=list)
    """Writers and trainer: without them nothing that is seen says anything."""
    swaps: int = 0

    def start(self, member: str, release: str) -> None:
        """Start it, of one of the two releases."""
        name, _, number = member.partition("-")
        health, gateway = self.ports[member], self.gateways[int(number)]
        env = {
            **environment(self.settings, member), **self.run,
            "TURNLOG_MODEL_PATH": self.settings.model.path, "TURNLOG_HEALTH_PORT": str(health),
            "TURNLOG_GATEWAY_PORT": str(gateway), "TURNLOG_GATEWAY_URL": f"http://{HOST}:{gateway}",
            "TURNLOG_GATEWAY_OWN_URL": f"http://{HOST}:{gateway}",
        }  # fmt: skip
        if release == "old":
            env["PYTHONPATH"] = str(self.old)
        log = Path(self.settings.run.directory) / f"{member}.{release}.log"
        argv, url = (*TURNLOG, name), f"http://{HOST}:{health}"
        launch = Launch(
            name=member, argv=argv, log=log, env=env, ready=lambda: ready(f"{url}/readyz"), ready_timeout_s=PATIENCE_S,
            stop_timeout_s=PATIENCE_S,  # a gateway waits for its turns
        )  # fmt: skip
        self.roles[member] = Child(launch).start()

    def start_engine(self) -> None:
        """It outlives every role."""
        script, url = Path(__file__).with_name("scripted_engine.py"), self.settings.engine.urls[0]
        argv = (sys.executable, str(script), url.rpartition(":")[2], self.settings.model.path, "--right", "0.5")
        log = Path(self.settings.run.directory) / "engine.log"
        self.engine = Child(Launch(name="engine", argv=argv, log=log, ready=lambda: ready(f"{url}/ready"))).start()
        self.engine.wait_ready()

    async def swap(self, member: str, release: str) -> None:
        """End the one that is there, in order; its successor takes up its place."""
        await self.end(member)
        self.start(member, release)
        await asyncio.to_thread(self.roles[member].wait_ready)
        self.swaps += 1
        say(f"{member} is {release}")

    async def end_all(self, *but: str) -> None:
        """In order."""
        for member in [member for member in self.roles if member not in but]:
            await self.end(member)

    async def close(self) -> None:
        """Roles, engine and whoever writes; what those died of is a fault."""
        await self.end_all()
        self.engine.stop()
        for task in self.beside:
            task.cancel()
        for fault in await asyncio.gather(*self.beside, return_exceptions=True):
            if isinstance(fault, Exception):
                self.faults.append(f"{type(fault).__name__}: {fault}")

    async def end(self, member: str) -> None:
        """SIGTERM; anything but a clean end is a fault."""
        child = self.roles.pop(member)
        died = child.returncode
        status = await asyncio.to_thread(child.stop)
        if died is not None or status != 0:
            self.faults.append(f"{member} ended with {status}{'' if died is None else ' by itself'}: {child.tail()}")


def ready(url: str) -> bool:
    """Whether a role says that it works."""
    try:
        return httpx.get(url, timeout=0.5).is_success
    except httpx.TransportError:
        return False


async def write(writers: Writers, settings: Settings, enough: asyncio.Event, seed: int) -> None:
    """Append sessions of bad days, and finish what was begun."""
    started, written = time.monotonic(), 0
    ends = [0] * settings.kafka.groups
    for number in itertools.count():
        for event in bad_days(
            random.Random(seed + number), groups=8, partitions=settings.kafka.groups, run_id=settings.run.id,
            name=f"day-{number}", ends=ends,
        ):  # fmt: skip
            await writers.append(event)
            written += 1
            await asyncio.sleep(max(0.0, started + written / EVENTS_PER_S - time.monotonic()))
        if enough.is_set():
            return


async def train(writers: Writers, events: EventLog, settings: Settings, over: asyncio.Event) -> None:
    """A trainer that takes its time for every batch, and a loader that hands what it published to the engine."""
    run, versions = settings.run.id, itertools.count()
    await publish(writers, settings, weights(run, next(versions), -1, 0))
    place = Partition(topics.BATCHES.name, 0)
    async with events.log.reader() as reader:
        reader.assign({place: 0})
        while not over.is_set():
            for record in await reader.poll(timeout_s=0.2):
                batch = await events.decode(record)
                if isinstance(batch, SampleBatchFormed):
                    await asyncio.sleep(STEP_S)
                    await writers.append(stepped(batch, batch.batch_index + 1, 0))
                    await publish(writers, settings, weights(run, next(versions), batch.batch_index, 0))


async def publish(writers: Writers, settings: Settings, published: WeightVersionPublished) -> None:
    """On the log, then in the engine, which says so."""
    await writers.append(published)
    url, version = settings.engine.urls[0], published.version
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        (await client.post(f"{url}/version", params={"of": version})).raise_for_status()
    engine = EngineRegistered(
        event_id=f"{ENGINE}-{version}", run_id=settings.run.id, engine_id=ENGINE, url=url, state="serving",
        version=version, model="scripted",
    )  # fmt: skip
    await writers.append(engine)


async def batches(events: EventLog) -> list[SampleBatchFormed | BatchSkipped]:
    """Every draw, in order of offset, those that left nothing to train among them."""
    found = await committed(events, topics.BATCHES.name, 1)
    return [event for _, event, _ in found if isinstance(event, SampleBatchFormed | BatchSkipped)]


async def asked_for(events: EventLog, settings: Settings) -> dict[str, int]:
    """Of the rollouts that feeders asked for: those without an end, those asked for twice, groups without a score,
    calls without an answer or with two, once there are none without or after a while; and verdicts about a part of a
    turn."""
    kafka, deadline = settings.kafka, time.monotonic() + PATIENCE_S
    while True:
        tasks = [one for _, one, _ in await committed(events, topics.TASKS.name, kafka.rollouts)]
        rollouts = Counter(one.rollout_id for one in tasks)
        sessions = [one for _, one, _ in await committed(events, topics.SESSIONS.name, kafka.groups)]
        ends = {one.session_id for one in sessions if isinstance(one, SessionFinished) and one.final}
        ended = {one for one in rollouts for attempt in range(settings.runner.max_attempts)
                 if session_id(one, attempt) in ends}  # fmt: skip
        scores = await committed(events, topics.SAMPLES.name, kafka.groups)
        scored = {one.group_id for _, one, _ in scores if isinstance(one, GroupScored)}
        calls = [one for _, one, _ in await committed(events, topics.TOOL_CALLS.name, kafka.rollouts)]
        results = [one for _, one, _ in await committed(events, topics.TOOL_RESULTS.name, kafka.rollouts)]
        called = {one.call_id for one in calls if isinstance(one, ToolCallRequested)}
        answered = Counter(one.call_id for one in results if isinstance(one, ToolCallCompleted) and not one.cached)
        found = {
            "rollouts": len(rollouts), "endless": len(rollouts.keys() - ended),
            "unscored": len({one.group_id for one in tasks} - scored), "calls": len(called),
            "unanswered": len(called - answered.keys()), "asked_again": rollouts.total() - len(rollouts),
            "called_again": answered.total() - len(answered),
        }  # fmt: skip
        if not (found["endless"] or found["unscored"] or found["unanswered"]) or time.monotonic() > deadline:
            turns = [one for _, one, _ in await committed(events, topics.TURNS.name, kafka.groups)]
            ours = {session_id(one, attempt) for one in rollouts for attempt in range(settings.runner.max_attempts)}
            return found | partly_judged([one for one in (*sessions, *turns) if getattr(one, "session_id", "") in ours])
        await asyncio.sleep(1.0)


def partly_judged(records: list[Event]) -> dict[str, int]:
    """Turns that a gateway cut off since its client had left, and verdicts about nothing more than one of them."""
    turns = [one for one in records if isinstance(one, TurnCompleted)]
    said = {True: set[tuple[str, str]](), False: set[tuple[str, str]]()}
    for turn in turns:
        said[turn.finish_reason in CUT_OFF].add((turn.session_id, inline(turn.response)["content"]))
    verdicts = {(one.session_id, inline(one.evidence)["said"]) for one in records if isinstance(one, RewardAssigned)}
    parts = sum(turn.finish_reason in CUT_OFF for turn in turns)
    return {"parts": parts, "partly_judged": len(verdicts & (said[True] - said[False]))}


async def further(upgrades: Upgrades, events: EventLog, plan: AssemblerPlan, *swapped: str) -> None:
    """Return when records were folded and a batch was formed after now, by whoever is there; archiver and views must
    have got on with theirs only where they were swapped."""
    settings = upgrades.settings

    async def formed() -> int:
        return len(await batches(events))

    watched: list[Callable[[], Awaitable[int]]] = [lambda: folded(events.log, plan, settings), formed]
    if "archive-0" in swapped:
        watched.append(lambda: files(settings))
    if "views-0" in swapped:
        watched.append(lambda: shown(upgrades.ports["views-0"]))
    waiting, deadline = [(count, await count()) for count in watched], time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for task in upgrades.beside:
            if task.done():
                task.result()
        waiting = [(count, was) for count, was in waiting if await count() <= was]
        if not waiting:
            return
        await asyncio.sleep(0.2)
    upgrades.faults.append(f"nothing went on for {PATIENCE_S:g} s after swap {upgrades.swaps}")


async def in_batches(events: EventLog, settings: Settings, upgrades: Upgrades) -> dict[str, int]:
    """Of the groups that were scored to train: those in no batch though the batcher could draw them, those in two."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        scores = await committed(events, topics.SAMPLES.name, settings.kafka.groups)
        scored = {e.group_id for _, e, _ in scores if isinstance(e, GroupScored) and e.status is GroupStatus.trained}
        formed = await batches(events)
        drawn = Counter(group for batch in formed for group in batch.groups)
        if len(scored) - len(drawn) < PER_DRAW or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    if [batch.batch_index for batch in formed] != list(range(len(formed))):
        upgrades.faults.append(f"batches {[batch.batch_index for batch in formed]}")
    left = len(scored) - len(drawn)
    return {
        "batches": len(formed), "drawn": len(drawn), "waiting": left, "left": max(0, left - PER_DRAW + 1),
        "again": sum(count - 1 for count in drawn.values()), "strange_groups": len(drawn.keys() - scored),
    }  # fmt: skip


@contextlib.asynccontextmanager
async def begun(upgrades: Upgrades) -> AsyncIterator[tuple[EventLog, HttpRegistry]]:
    """A run that the old release has configured: the registry holds its schemas alone. Registers nothing itself."""
    settings = upgrades.settings
    env = {**os.environ, **environment(settings, "configure"), **upgrades.run, "PYTHONPATH": str(upgrades.old)}
    verb = [sys.executable, "-m", "turnlog.cli", "run", "configure"]
    await asyncio.to_thread(subprocess.run, verb, env=env, check=True, stdout=subprocess.DEVNULL)
    log = KafkaLog(settings.kafka.bootstrap, prefix=settings.kafka.prefix)
    registry = HttpRegistry(settings.registry)
    try:
        yield EventLog(log, registry, Codec({}), "chaos"), registry
    finally:
        await registry.close()
        await log.close()


def verified(settings: Settings, *source: str) -> str:
    """What `turnlog replay --verify` says against the run; empty where it finds everything the same."""
    env = {**os.environ, **environment(settings, "replay"), **RUN}
    ran = subprocess.run([*TURNLOG, "replay", "--verify", *source], env=env, capture_output=True, text=True,
                         check=False)  # fmt: skip
    said = f"{ran.returncode}: {(ran.stdout + ran.stderr)[-2000:]}"
    return "" if ran.returncode == 0 else f"replay --verify {' '.join(source)}: {said}"


async def upgraded(
    upgrades: Upgrades, writers: Writers, events: EventLog, plan: AssemblerPlan, rooms: Rooms, orders: int
) -> None:
    """Up and back in as many orders; within a room, too, each role goes before and after each other one."""
    for number, first_to_last in enumerate(itertools.islice(itertools.permutations(rooms), orders)):
        order = [member for room in first_to_last for member in room[:: -1 if number % 2 else 1]]
        writers.of = ["old", "new"]
        for member in order:
            await upgrades.swap(member, "new")
            await further(upgrades, events, plan, member)
        one_by_one = 0 < number == orders - 1
        for members in [[member] for member in reversed(order)] if one_by_one else [order]:
            await asyncio.gather(*(upgrades.swap(member, "old") for member in members))
            await further(upgrades, events, plan, *members)


async def settled(upgrades: Upgrades, events: EventLog, plan: AssemblerPlan, over: asyncio.Event) -> dict[str, int]:
    """What came of all that was asked for, once nobody does anything any more."""
    settings = upgrades.settings
    found = await asked_for(events, settings)
    await drained(events.log, plan, settings, None)
    found |= await in_batches(events, settings, upgrades)
    over.set()
    await upgrades.beside[1]
    await upgrades.end_all(*KEPT)
    async with open_role("chaos", settings) as tool:
        await upgrades.end("archive-0")
        found |= await unlike_log(tool)
        found |= await unlike_topics(tool, within_s=PATIENCE_S)
        if found["unshown"]:
            say(upgrades.roles["views-0"].tail())
        await upgrades.end("views-0")
    return found


async def run(settings: Settings, *, rooms: Rooms, orders: int, seed: int) -> int:
    """The whole story; the exit status."""
    enough, over = asyncio.Event(), asyncio.Event()
    upgrades = Upgrades(settings, previous())
    async with begun(upgrades) as (events, registry), events.log.appender() as appender:
        writers = Writers(appender, events, registry, random.Random(seed))
        replaced = {*itertools.chain(*rooms)}
        for member in replaced | {*KEPT}:
            upgrades.start(member, "old" if member in replaced else "new")
        upgrades.start_engine()
        upgrades.beside = [
            asyncio.create_task(write(writers, settings, enough, seed)),
            asyncio.create_task(train(writers, events, settings, over)),
        ]
        try:
            for child in upgrades.roles.values():
                await asyncio.to_thread(child.wait_ready)
            runs = [event for _, event, _ in await committed(events, topics.RUNS.name, 1)]
            recorded = next(event for event in runs if isinstance(event, RunConfigured))
            plan = assembler_plan(Configured.of(recorded, settings), settings.assembler)
            await further(upgrades, events, plan)
            await upgraded(upgrades, writers, events, plan, rooms, orders)
            if "feeder-0" in upgrades.roles:
                await upgrades.end("feeder-0")
            enough.set()
            await upgrades.beside[0]
            say(f"{dict(writers.wrote)} written; waiting for the rest to be folded")
            found = await settled(upgrades, events, plan, over)
        finally:
            await upgrades.close()
    return await judged(upgrades, writers, found, plan)


async def judged(upgrades: Upgrades, writers: Writers, groups: dict[str, int], plan: AssemblerPlan) -> int:
    """Say the line."""
    async with open_role("chaos", upgrades.settings) as tool:
        found = await compared(tool.events, plan, upgrades.settings)
    differences = [await asyncio.to_thread(verified, upgrades.settings, *source) for source in ((), FROM_ARCHIVE)]
    upgrades.faults += filter(None, differences)
    for fault in upgrades.faults:
        say(fault)
    detail = {**found["detail"], **groups, "wrote": dict(writers.wrote), "faults": len(upgrades.faults)}
    lost = found["lost"] + sum(groups[name] for name in LOST)
    twice = found["twice"] + sum(groups[name] for name in TWICE)
    ok = not (lost or twice or found["skipped"] or groups["strange_groups"] or upgrades.faults) and found["identical"]
    return told(
        id="upgrades", kills=upgrades.swaps, ok=ok, skipped=found["skipped"], lost=lost, twice=twice,
        identical=found["identical"] and not any(differences), detail=detail,
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Upgrade roles of a run and go back, under load.")
    parser.add_argument("--kills", type=int, default=6, help="orders, of six, in which the roles are replaced")
    few = parser.add_mutually_exclusive_group()
    few.add_argument("--lean", dest="rooms", action="store_const", const=LEAN, help="one gateway and one runner")
    few.add_argument("--processors", dest="rooms", action="store_const", const=PROCESSORS, help="roles that fold")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.update(RUN)
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        return asyncio.run(
            run(
                with_model(settings),
                rooms=arguments.rooms or ROOMS,
                orders=arguments.kills,
                seed=arguments.seed,
            )
        )


if __name__ == "__main__":
    raise SystemExit(main())
