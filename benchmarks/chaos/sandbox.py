"""Kill sandbox workers, again and again, under load: `python benchmarks/chaos/sandbox.py [--kills 30]`.

200 sessions call tools in bubblewrap sandboxes while two, then three, then two workers are killed by SIGKILL at random
moments and started again, and the broker is restarted in between. In the end every call must have an answer, the first
answer of every call must be what a run without deaths gives, no call may have been started again after its answer, and
60 s later nothing of the dead workers may be left on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import sandbox_load
from sandbox_left import left
from sandbox_load import Load, Session, until
from servers import TURNLOG, environment, say, servers, told

from turnlog.infra.embedded.broker import Broker
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.names import ExitStatus
from turnlog.schemas.events import ToolCallCompleted, ToolCallStarted
from turnlog.schemas.topics import TOOL_RESULTS
from turnlog.settings import Settings

FIRST_UID, UIDS_PER_WORKER = 700_000, 100
WORKERS, MOST_WORKERS = 2, 3
SLOTS = 4
PATIENCE_S = 600.0
GONE_S = 60.0
"""When nothing may be left any more."""
SHOWN = 5


@dataclass(slots=True)
class Story:
    """What happened."""

    kills: int = 0
    deaths: int = 0
    """Ends that nobody asked for."""
    without_log: int = 0
    """Ends since the broker was away, as they must be: a supervisor starts the worker again."""
    restarts: int = 0
    """Of the broker."""
    rebalances: int = 0
    """Workers that came or went alive."""
    pids: set[int] = field(default_factory=set)
    answered: list[int] = field(default_factory=list)
    """Calls answered when each kill struck."""


class Workers:
    """Real `turnlog role sandbox` processes."""

    def __init__(self, settings: Settings, load: Load, story: Story) -> None:
        self._settings = settings
        self._load = load
        self._story = story
        self.alive: dict[int, Child] = {}

    def start(self, number: int) -> None:
        """One more, or one again."""
        name = f"sandbox-{number}"
        env = environment(self._settings, name) | {
            "TURNLOG_SANDBOX_FIRST_UID": str(FIRST_UID + number * UIDS_PER_WORKER),
            "TURNLOG_SANDBOX_SLOTS": str(SLOTS),
            "TURNLOG_SANDBOX_PREWARM": str(SLOTS),
            "TURNLOG_SANDBOX_MAX_ATTEMPTS": "20",
            "OMP_NUM_THREADS": "1",
        }
        log = Path(self._settings.run.directory) / f"{name}.log"
        child = Child(Launch(name=name, argv=(*TURNLOG, "role", "sandbox"), log=log, env=env)).start()
        self._story.pids.add(child.pid)
        self.alive[number] = child

    async def kill(self, number: int) -> None:
        """SIGKILL to the worker alone: what it leaves is what is looked at. Then start it again."""
        child = self.alive.pop(number)
        if child.returncode is None:
            os.kill(child.pid, signal.SIGKILL)
            self._story.kills += 1
            self._story.answered.append(len(self._load.first))
            await asyncio.to_thread(child.wait, 10.0)
        else:
            self._ended(child)
        self.start(number)

    async def stop(self, number: int) -> None:
        """SIGTERM: it drains, and its partitions go to the others."""
        child = self.alive.pop(number)
        if child.returncode is None:
            os.kill(child.pid, signal.SIGTERM)
        if not await asyncio.to_thread(child.wait, 30.0):
            say(f"{child.launch.name} did not stop in 30 s: {child.tail(8)}")
            self._story.deaths += 1
            os.kill(child.pid, signal.SIGKILL)

    async def supervise(self) -> None:
        """Start again what ended by itself, until cancelled."""
        while True:
            for number, child in list(self.alive.items()):
                if child.returncode is not None:
                    self._ended(child)
                    self.start(number)
            await asyncio.sleep(0.5)

    def _ended(self, child: Child) -> None:
        if child.returncode == ExitStatus.UNREACHABLE:
            self._story.without_log += 1
        else:
            self._story.deaths += 1
            say(f"{child.launch.name} ended by itself: {child.tail(12)}")

    async def works(self, number: int) -> None:
        """It has started a call, or it ended."""
        child = self.alive[number]
        name = child.launch.name
        before = self._load.started.get(name, 0)
        await until(lambda: self._load.started.get(name, 0) > before or child.returncode is not None, 60.0)


async def torment(workers: Workers, broker: Broker | None, story: Story, *, kills: int, rng: random.Random) -> None:
    """Kill until it is enough; in the middle a third worker and a restart of the broker."""
    for number in range(WORKERS):
        workers.start(number)
    while story.kills < kills:
        number = rng.choice(sorted(workers.alive))
        await workers.works(number)
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        await workers.kill(number)
        if story.kills == kills // 3 and MOST_WORKERS - 1 not in workers.alive:
            workers.start(MOST_WORKERS - 1)
            story.rebalances += 1
        if story.kills == kills // 2 and broker is not None and not story.restarts:
            say("the broker is restarted")
            await asyncio.to_thread(broker.stop)
            await asyncio.to_thread(broker.start)
            story.restarts += 1
        if story.kills == 2 * kills // 3 and MOST_WORKERS - 1 in workers.alive and len(workers.alive) > WORKERS:
            await workers.stop(MOST_WORKERS - 1)
            story.rebalances += 1


async def history(role: Role) -> dict[str, list[tuple[int, object]]]:
    """Every record of the results by call, in log order; a call's lie in one partition."""
    places = [Partition(TOOL_RESULTS.name, number) for number in range(role.settings.kafka.rollouts)]
    ends = await role.log.end_offsets(places)
    calls: dict[str, list[tuple[int, object]]] = {}
    async with role.log.reader() as reader:
        reader.assign(dict.fromkeys(places, 0))
        while any(reader.position(place) < ends[place] for place in places):
            for record in await reader.poll():
                event = await role.events.decode(record)
                if isinstance(event, ToolCallStarted | ToolCallCompleted):
                    calls.setdefault(event.call_id, []).append((record.offset, event))
    return calls


def repeated(calls: dict[str, list[tuple[int, object]]]) -> list[str]:
    """Calls that were started again, as a further attempt, after they had been answered."""
    found = []
    for call_id, records in calls.items():
        answers = [(at, event) for at, event in records if isinstance(event, ToolCallCompleted)]
        if not answers:
            continue
        first, answer = answers[0]
        for at, event in records:
            if isinstance(event, ToolCallStarted) and at > first and event.attempt > answer.attempt:
                found.append(f"{call_id}: answered at {first} by {answer.worker} (attempt {answer.attempt}), started "
                             f"again at {at} by {event.worker} (attempt {event.attempt})")  # fmt: skip
    return found


async def verdict(role: Role, load: Load, story: Story, seconds: float) -> int:
    """Compare what is on the log with what must be there, and look at the machine."""
    calls = await history(role)
    lost = [call_id for call_id in load.asked if call_id not in load.first]
    wrong, again = sandbox_load.wrong(load), repeated(calls)
    answers = [event for records in calls.values() for _, event in records if isinstance(event, ToolCallCompleted)]
    uids = range(FIRST_UID, FIRST_UID + MOST_WORKERS * UIDS_PER_WORKER)
    began = time.monotonic()
    await until(lambda: not any(left(story.pids, uids).values()), GONE_S)
    gone_s, remains = time.monotonic() - began, left(story.pids, uids)
    for what, lines in (("LOST", lost), ("WRONG", wrong), ("AGAIN", again), *remains.items()):
        for line in lines[:SHOWN]:
            say(f"{what}: {line}")
    detail = {
        "calls": len(load.asked), "seconds": round(seconds, 1), "broker_restarts": story.restarts,
        "deaths": story.deaths, "without_log": story.without_log, "rebalances": story.rebalances,
        "answered_at_kill": story.answered,
        "attempts": dict(Counter(answer.event.attempt for answer in load.first.values())),
        "statuses": dict(Counter(f"{a.event.status} {a.event.reason}".strip() for a in load.first.values())),
        "answers_twice": sum(not event.cached for event in answers) - len(load.first),
        "answers_repeated": sum(event.cached for event in answers),
        "left": {kind: len(lines) for kind, lines in remains.items()}, "gone_s": round(gone_s, 1),
    }  # fmt: skip
    ok = not (lost or wrong or again or any(remains.values()) or story.deaths)
    return told(id="sandbox", kills=story.kills, lost=len(lost), twice=len(again), skipped=len(wrong),
                identical=not wrong, ok=ok, detail=detail)  # fmt: skip


async def torture(settings: Settings, broker: Broker | None, *, kills: int, sessions: int, seed: int) -> int:
    """The whole run; the exit status."""
    load, story, rng = Load(), Story(), random.Random(seed)
    async with open_role("chaos", settings) as role:
        crowd = [Session(role, load, number, random.Random(f"{seed}.{number}")) for number in range(sessions)]
        began = time.monotonic()
        running = [asyncio.create_task(session.run()) for session in crowd]
        workers = Workers(settings, load, story)
        watching = [asyncio.create_task(sandbox_load.read(role, load)), asyncio.create_task(workers.supervise())]
        try:
            await torment(workers, broker, story, kills=kills, rng=rng)
            load.enough = True
            say(f"{story.kills} kills, {len(load.first)} calls answered; waiting for the sessions to end")
            await asyncio.wait(running, timeout=PATIENCE_S)
            seconds = time.monotonic() - began
            watching[1].cancel()
            for number in list(workers.alive):
                await workers.stop(number)
        finally:
            for child in workers.alive.values():
                child.kill()
            for task in (*watching, *running):
                task.cancel()
            await asyncio.gather(*watching, *running, return_exceptions=True)
        return await verdict(role, load, story, seconds)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill sandbox workers under load.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # it tells at length that the broker is away
    arguments = parser.parse_args()
    brokers: list[Broker] = []
    with servers(f"chaos-{uuid4().hex[:8]}", started=lambda kafka: brokers.extend(kafka.all)) as settings:
        broker = brokers[0] if brokers else None
        torn = torture(settings, broker, kills=arguments.kills, sessions=arguments.sessions, seed=arguments.seed)
        return asyncio.run(torn)


if __name__ == "__main__":
    raise SystemExit(main())
