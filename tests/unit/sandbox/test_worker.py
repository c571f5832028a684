"""The worker on the log in memory: order of effects, repeats, restarts, refusals, poison."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from turnlog.infra.event_log import EventLog
from turnlog.infra.health import Health
from turnlog.infra.log import Partition
from turnlog.infra.memory import MemoryLog
from turnlog.infra.memory_blobs import MemoryBlobs
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.pool import Pool
from turnlog.sandbox_workers.protocol import Execution, SandboxDied
from turnlog.sandbox_workers.worker import Worker
from turnlog.schemas.events import (
    DeadLetter,
    Event,
    SandboxLimits,
    SandboxSpec,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import BY_NAME, DEAD_LETTERS, TOOL_CALLS, TOOL_RESULTS
from turnlog.settings import KafkaSettings, RunSettings, Settings

SETTINGS = Settings(
    run=RunSettings(id="run"),
    kafka=KafkaSettings(rollouts=2),
    sandbox=SandboxSettings(backend="subprocess", slots=2, prewarm=1, wall_s=10.0, first_uid=240_000),
)
LOG_EPOCH = 1_700_000_001.0
"""Seconds; the log in memory counts its milliseconds from just before."""
E = TypeVar("E", bound=Event)


def call(name: str, seq: int = 0, *, session: str = "s", **changes: object) -> ToolCallRequested:
    """A call that prints its own name."""
    request = ToolCallRequested(
        event_id=digest(name),
        run_id="run",
        group_id="g",
        session_id=session,
        floor=3,
        rollout_id=session,
        call_id=name,
        call_seq=seq,
        tool="python",
        arguments=json.dumps({"code": f"print({name!r})"}).encode(),
        sandbox=SandboxSpec(backend="subprocess"),
        workspace=None,
        deadline_s=3600.0,
    )
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def shell(command: str) -> dict[str, object]:
    """Fields of a shell call."""
    return {"tool": "shell", "arguments": json.dumps({"command": command}).encode()}


class Dying:
    """The subprocess backend, whose sandboxes go away in the middle of their first `deaths` calls."""

    name = "subprocess"

    def __init__(self, real: Subprocess, deaths: int) -> None:
        self.real = real
        self.deaths = deaths

    async def start(self, slot: int, disk_bytes: int) -> InitSandbox:
        """See Provider."""
        sandbox = await self.real.start(slot, disk_bytes)
        alive = sandbox.run

        async def run(tool: str, source: str, limits: SandboxLimits) -> Execution:
            if self.deaths:
                self.deaths -= 1
                sandbox.process.kill()
                await sandbox.process.wait()
                raise SandboxDied("killed by the test")
            return await alive(tool, source, limits)

        sandbox.run = run  # type: ignore[method-assign]
        return sandbox


@dataclass
class House:
    """A log with the catalogue's topics, and workers on it."""

    log: MemoryLog
    events: EventLog
    settings: Settings = SETTINGS
    deaths: int = 0
    workers: list[asyncio.Task[None]] = field(default_factory=list)

    @asynccontextmanager
    async def worker(self, *, fallback: bool = False, slots: int = 2) -> AsyncIterator[Role]:
        """A live worker; drained at the end."""
        log = MemoryLog(self.log.broker)
        async with EventLog.open(log, self.registry, writer="worker") as events:
            role = Role("sandbox", "sandbox-0", self.settings, log, events, MemoryBlobs(), Health("sandbox"))
            provider = Dying(await Subprocess.open(first_uid=240_000), self.deaths)
            pool = Pool(provider, slots=slots, fallback=fallback)
            running = asyncio.create_task(Worker(role, pool, clock=lambda: LOG_EPOCH).run())
            try:
                yield role
            finally:
                role.stopping.set()
                try:
                    await running
                finally:
                    await pool.close()

    registry: MemoryRegistry = field(default_factory=MemoryRegistry)

    async def read(self, topic: str, kind: type[E]) -> list[E]:
        """Every event of a class in a topic, by partition and offset."""
        specs = await self.log.topics()
        places = [Partition(topic, number) for number in range(specs[topic].partitions)]
        ends = await self.log.end_offsets(places)
        found: list[E] = []
        async with self.log.reader() as reader:
            reader.assign(dict.fromkeys(places, 0))
            while any(reader.position(place) < ends[place] for place in places):
                decoded = [await self.events.decode(record) for record in await reader.poll()]
                found += [event for event in decoded if isinstance(event, kind)]
        return found

    async def completed(self, count: int) -> list[ToolCallCompleted]:
        """The answers, once there are `count`."""
        return await self._once(lambda: self.read(TOOL_RESULTS.name, ToolCallCompleted), count)

    async def parked(self, count: int) -> list[DeadLetter]:
        """The dead letters, once there are `count`."""
        return await self._once(lambda: self.read(DEAD_LETTERS.name, DeadLetter), count)

    async def _once(self, read: Callable[[], object], count: int) -> list[E]:
        deadline = time.monotonic() + 30
        while len(found := await read()) < count:  # type: ignore[misc, var-annotated]
            assert time.monotonic() < deadline, f"{len(found)} of {count}"
            await self.log.broker.changed(0.05)
        return found

    async def committed(self) -> dict[int, int]:
        """Committed offsets by partition."""
        places = [Partition(TOOL_CALLS.name, number) for number in range(2)]
        return {
            place.number: commit.offset for place, commit in (await self.log.commits("run.sandbox", places)).items()
        }


@pytest.fixture
async def house() -> AsyncIterator[House]:
    """An empty log."""
    log = MemoryLog()
    await apply(log, SETTINGS)
    registry = MemoryRegistry()
    async with EventLog.open(log, registry, writer="test") as events:
        yield House(log, events, registry=registry)


async def test_a_call_is_announced_run_and_answered(house: House) -> None:
    async with house.worker():
        await house.events.append(call("a"))
        (answer,) = await house.completed(1)
    (started,) = await house.read(TOOL_RESULTS.name, ToolCallStarted)
    assert (started.call_id, started.attempt, started.worker) == ("a", 1, "sandbox-0")
    assert (answer.status, answer.reason, answer.exit_code, answer.output) == (ToolStatus.ok, "", 0, b"a\n")
    assert (answer.call_id, answer.group_id, answer.floor, answer.attempt, answer.cached) == ("a", "g", 3, 1, False)
    order = [type(event).__name__ for event in await house.read(TOOL_RESULTS.name, object)]  # type: ignore[type-var]
    assert order == ["ToolCallStarted", "ToolCallCompleted"]


async def test_the_calls_of_a_session_run_in_call_seq_order(house: House) -> None:
    for seq in (2, 0, 1, 3):
        await house.events.append(call(f"c{seq}", seq))
    async with house.worker():
        answers = await house.completed(4)
    assert [answer.call_seq for answer in answers] == [0, 1, 2, 3]


async def test_sessions_run_at_once_up_to_the_slots(house: House) -> None:
    """Each of two calls waits for the other's file: they end only if both run."""
    meet = "import os, pathlib, sys, time\nd = pathlib.Path('/tmp/{0}')\nd.mkdir(exist_ok=True, mode=0o777)\n"
    meet += "os.path.exists(d) and d.stat().st_uid == os.getuid() and d.chmod(0o777)\n(d / '{1}').touch()\n"
    meet += "while not (d / '{2}').exists(): time.sleep(0.01)\n"
    place = f"turnlog-test-{digest(time.time_ns())}"
    async with house.worker():
        for me, other in (("x", "y"), ("y", "x")):
            code = json.dumps({"code": meet.format(place, me, other)}).encode()
            await house.events.append(call(me, session=me, arguments=code))
        answers = await house.completed(2)
        await house.events.append(call("rm", session="z", **shell(f"rm -rf /tmp/{place}")))
        await house.completed(3)
    assert [answer.status for answer in answers] == [ToolStatus.ok, ToolStatus.ok]


async def test_calls_share_no_files_unless_the_workspace_is_durable(house: House) -> None:
    durable = SandboxSpec(backend="subprocess", durable_workspace=True)
    async with house.worker():
        await house.events.append(call("a0", 0, **shell("echo kept > f")))
        await house.events.append(call("a1", 1, **shell("cat f")))
        await house.events.append(call("b0", 0, session="d", sandbox=durable, **shell("echo kept > f")))
        await house.events.append(call("b1", 1, session="d", sandbox=durable, **shell("cat f")))
        answers = {answer.call_id: answer for answer in await house.completed(4)}
    assert answers["a1"].status is ToolStatus.tool_error
    assert answers["b1"].output == b"kept\n"


async def test_a_durable_session_without_its_sandbox_has_lost_its_workspace(house: House) -> None:
    durable = SandboxSpec(backend="subprocess", durable_workspace=True)
    async with house.worker():
        await house.events.append(call("a", 1, sandbox=durable))
        (answer,) = await house.completed(1)
    assert (answer.status, answer.reason) == (ToolStatus.infra_error, "workspace_lost")
    assert await house.read(TOOL_RESULTS.name, ToolCallStarted) == []


async def test_a_repeated_answered_call_gets_the_stored_answer_and_does_not_run(house: House) -> None:
    random_call = call("a", arguments=json.dumps({"code": "import os; print(os.urandom(8).hex())"}).encode())
    async with house.worker():
        await house.events.append(random_call)
        await house.completed(1)
        await house.events.append(random_call)
        first, again = await house.completed(2)
    assert again == dataclasses.replace(first, cached=True)
    async with house.worker():  # also after a restart
        await house.events.append(random_call)
        *_, after = await house.completed(3)
    assert after == again
    assert len(await house.read(TOOL_RESULTS.name, ToolCallStarted)) == 1


async def test_a_call_repeated_while_it_runs_is_answered_once(house: House) -> None:
    slow = call("a", **shell("sleep 0.3; echo done"))
    async with house.worker():
        await house.events.append(slow)
        await house.events.append(slow)
        await house.events.append(call("b", 1))
        answers = await house.completed(2)
    assert [answer.call_id for answer in answers] == ["a", "b"]
    assert sum((await house.committed()).values()) == 3


async def test_everything_answered_is_committed_and_not_read_again(house: House) -> None:
    async with house.worker():
        for number in range(6):
            await house.events.append(call(f"c{number}", session=f"s{number}"))
        await house.completed(6)
    assert sum((await house.committed()).values()) == 6
    async with house.worker():
        await house.events.append(call("last", session="s0"))
        await house.completed(7)
    assert len(await house.read(TOOL_RESULTS.name, ToolCallStarted)) == 7


async def test_the_committed_offset_waits_for_the_oldest_unanswered_call(house: House) -> None:
    async with house.worker():
        await house.events.append(call("slow", session="s", **shell("sleep 60")))
        await house.events.append(call("quick", session="s2", rollout_id="s"))
        await house.completed(1)
        while not await house.committed():
            await house.log.broker.changed(0.05)
        assert sum((await house.committed()).values()) == 0
        await house.events.append(cancelled("slow"))
        await house.completed(2)
    assert sum((await house.committed()).values()) == 3


def cancelled(name: str, *, session: str = "s") -> ToolCallCancelled:
    """Nobody waits for call `name`."""
    return ToolCallCancelled(
        event_id=digest("cancel", name),
        run_id="run",
        group_id="g",
        session_id=session,
        floor=3,
        rollout_id=session,
        call_id=name,
        reason="session over",
    )


async def test_a_cancelled_call_ends_and_one_that_waits_never_runs(house: House) -> None:
    async with house.worker():
        await house.events.append(call("runs", 0, **shell("sleep 60")))
        await house.events.append(call("waits", 1))
        while not await house.read(TOOL_RESULTS.name, ToolCallStarted):
            await house.log.broker.changed(0.05)
        await house.events.append(cancelled("waits"))
        await house.events.append(cancelled("runs"))
        answers = await house.completed(2)
    assert [(answer.call_id, answer.status) for answer in answers] == [
        ("runs", ToolStatus.cancelled),
        ("waits", ToolStatus.cancelled),
    ]
    assert len(await house.read(TOOL_RESULTS.name, ToolCallStarted)) == 1


async def test_a_call_whose_worker_died_runs_again_as_the_next_attempt(house: House) -> None:
    await house.events.append(call("a"))
    await house.events.append(started("a", 1))
    async with house.worker():
        (answer,) = await house.completed(1)
    assert (answer.status, answer.attempt) == (ToolStatus.ok, 2)
    assert [event.attempt for event in await house.read(TOOL_RESULTS.name, ToolCallStarted)] == [1, 2]


def started(name: str, attempt: int) -> ToolCallStarted:
    """What a worker that died had written."""
    return ToolCallStarted(
        event_id=digest(name, attempt),
        run_id="run",
        group_id="g",
        session_id="s",
        floor=3,
        rollout_id="s",
        call_id=name,
        attempt=attempt,
        worker="dead",
    )


async def test_a_call_that_kills_every_worker_is_given_up_and_parked(house: House) -> None:
    await house.events.append(call("a"))
    for attempt in (1, 2, 3):
        await house.events.append(started("a", attempt))
    async with house.worker():
        (answer,) = await house.completed(1)
        (letter,) = await house.parked(1)
    assert (answer.status, answer.reason, answer.attempt) == (ToolStatus.infra_error, "attempts", 3)
    assert (letter.cause, letter.topic, letter.offset) == ("AttemptsExhausted", TOOL_CALLS.name, 0)
    assert "max_attempts" in letter.message


async def test_a_sandbox_that_dies_costs_an_attempt_not_the_call(house: House) -> None:
    house.deaths = 2
    async with house.worker():
        await house.events.append(call("a"))
        (answer,) = await house.completed(1)
    assert (answer.status, answer.attempt, answer.output) == (ToolStatus.ok, 3, b"a\n")


async def test_a_stop_lets_the_running_call_end_and_leaves_the_waiting_ones(house: House) -> None:
    await house.events.append(call("runs", 0, **shell("sleep 0.3; echo ended")))
    await house.events.append(call("waits", 1))
    async with house.worker():
        while not await house.read(TOOL_RESULTS.name, ToolCallStarted):
            await house.log.broker.changed(0.05)
    (answer,) = await house.completed(1)
    assert answer.output == b"ended\n"
    assert sum((await house.committed()).values()) == 1
    async with house.worker():
        answers = await house.completed(2)
    assert [answer.call_id for answer in answers] == ["runs", "waits"]


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        ({"tool": "browser"}, "tool", "python, shell"),
        ({"arguments": b"{"}, "arguments", "not JSON"),
        ({"arguments": b'{"command": "ls"}'}, "arguments", '{"code": "..."}'),
        ({"arguments": b'{"code": 3}'}, "arguments", '{"code": "..."}'),
        ({"arguments": b"[]"}, "arguments", '{"code": "..."}'),
        ({"arguments": b"\xff"}, "arguments", "not JSON"),
        ({"sandbox": SandboxSpec(backend="docker")}, "backend", "docker"),
        ({"sandbox": SandboxSpec(network="allowlist")}, "network", "none"),
        ({"sandbox": SandboxSpec(image="debian")}, "image", "debian"),
    ],
)
async def test_what_cannot_be_run_is_refused_with_a_reason(
    house: House, changes: dict[str, object], reason: str, text: str
) -> None:
    async with house.worker():
        await house.events.append(call("a", **changes))
        (answer,) = await house.completed(1)
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.refused, reason, None)
    assert text in answer.output.decode()


async def test_a_call_that_nobody_waits_for_does_not_run(house: House) -> None:
    await house.events.append(call("a", deadline_s=0.0))
    async with house.worker():
        (answer,) = await house.completed(1)
    assert (answer.status, answer.reason) == (ToolStatus.timeout, "deadline_s")
    assert await house.read(TOOL_RESULTS.name, ToolCallStarted) == []


async def test_a_request_gets_no_more_than_the_worker_grants(house: House) -> None:
    house.settings = dataclasses.replace(SETTINGS, sandbox=dataclasses.replace(SETTINGS.sandbox, wall_s=0.3))
    greedy = SandboxSpec(backend="subprocess", limits=SandboxLimits(wall_s=1e6))
    async with house.worker():
        await house.events.append(call("a", sandbox=greedy, **shell("sleep 60")))
        (answer,) = await house.completed(1)
    assert (answer.status, answer.reason) == (ToolStatus.timeout, "wall_s")


async def test_poison_is_parked_and_the_work_goes_on(house: House) -> None:
    stray = started("a", 1)
    async with house.log.appender() as appender:
        await appender.append(TOOL_CALLS.name, b"s", b"poison")
        await appender.append(TOOL_CALLS.name, b"s", house.events.codec.encode(stray))
    await house.events.append(call("a"))
    async with house.worker():
        (answer,) = await house.completed(1)
        letters = await house.parked(2)
    assert answer.output == b"a\n"
    assert {(letter.cause, letter.value) for letter in letters} == {
        ("UndecodableRecord", b"poison"),
        ("UnexpectedRecord", house.events.codec.encode(stray)),
    }
    assert sum((await house.committed()).values()) == 3


async def test_a_fallback_is_named_in_every_answer(house: House) -> None:
    async with house.worker(fallback=True):
        await house.events.append(call("a"))
        (answer,) = await house.completed(1)
    assert answer.worker == "sandbox-0+subprocess"


def test_calls_and_results_are_copartitioned() -> None:
    assert BY_NAME[TOOL_CALLS.name].partitions == BY_NAME[TOOL_RESULTS.name].partitions
    assert TOOL_CALLS.key == TOOL_RESULTS.key
