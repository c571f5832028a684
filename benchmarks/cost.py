"""COST: core-milliseconds of a session of two turns and a tool call, over every process of a run, at the worst of 16,
128 and 1,024 sessions in flight.

A whole run is up (cost_stack.py): broker, registry, store, gateway, runner, sandbox worker, assembler, batcher, feeder,
archiver, indexer, dashboard and views; the engine and the trainer are scripted, and not counted. At each load there is
a warm-up and then a measurement: the CPU time of each process and its children, divided by the sessions, turns and tool
calls that finished meanwhile. A second measurement at the same load tells which kind of work a role does: samples of
its stack, and requests to the broker (cost_probe/sitecustomize.py). Sampling has a cost of its own, so only the shares
of the kinds are taken from it.

CPU time is counted and not clock time, but caches and clock rates suffer on a busy machine, so the same work takes
more of it. Instructions do not depend on that: by role where perf can count them (few virtual machines), and those of a
session in gateway and runner by valgrind, where it is installed (cost_walk.py).

    python benchmarks/cost.py [--loads 16,128] [--keep FOLDER] [--no-walk]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cost_kinds
import uvloop
from cost_meter import (
    adopt_orphans,
    by_thread_kind,
    counted_instructions,
    forks,
    lacks_counters,
    processes,
    reap_orphans,
    thread_seconds,
    tree_seconds,
)
from cost_stack import BEGIN, END, Stack, stack, trained
from cost_walk import TURNS, instructions_of_a_session
from row import say, size, told

from turnlog.infra.history import events, partitions
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import Event, SessionFinished, SessionStarted, ToolCallCompleted, TurnCompleted

LOADS = size((16, 128, 1024), smallest=(8,))
LEAST = size(512, smallest=16)
"""Sessions of a measurement, at least."""
WARM = 1.5
"""Sessions before the measurement, per requested one: the first are requested all at once, so that their groups are
finished late and all at once, and no others are requested meanwhile."""
LEAST_WARM = size(2048, smallest=16)
"""Sessions before the measurement, at least: the broker's JVM compiles what it often runs, which takes 7 core-s."""
WALKS = size(True, smallest=False)
GOAL = 20.0
PATIENCE_S = 900.0
"""Seconds that a part of a measurement may take at most."""
BROKER, ENGINE, HERE, HOTTEST, SHOWN = "kafka", "engine", "benchmark", 5, 0.05
ORPHANING = "sandbox-0"
"""The only process of a run whose descendants outlive their parents. Their new parent is the benchmark."""
PER = ("session", "turn", "call")
GROUPS = {
    "produce": ("Produce",), "fetch": ("Fetch",), "offsets": ("Offset",), "commit": ("OffsetCommit",),
    "transaction": ("AddPartitionsToTxn", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn", "InitProducerId"),
}  # fmt: skip
"""Column of the table -> requests of the Kafka protocol, as aiokafka names them."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Core-milliseconds that some roles may take together, per `per`."""

    roles: tuple[str, ...]
    per: str
    most: float


GOALS = {
    "broker": Goal((BROKER,), "session", 5.0),
    "gateway and runner": Goal(("gateway", "runner"), "session", 7.0),
    "sandbox worker": Goal(("sandbox",), "call", 6.0),
    "views, index, dashboard and archive": Goal(("views", "index", "dashboard", "archive"), "session", 3.0),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment of a run."""

    at: float
    """Seconds since 1970, as the records of the log count them."""
    cpu_s: dict[str, tuple[float, float]]
    """Process -> CPU seconds of it, and of those that it started."""
    threads: dict[tuple[int, str], float]
    """CPU seconds of the broker's threads."""
    forks: int

    @classmethod
    def taken(cls, stack: Stack) -> Mark:
        roots = stack.roots()
        spent = tree_seconds(roots | {ENGINE: stack.engine_pid, HERE: os.getpid()}, processes())
        del spent[ENGINE]
        orphans_s = spent.pop(HERE)[1]
        own_s, started_s = spent[ORPHANING]
        spent[ORPHANING] = own_s, started_s + orphans_s
        return cls(time.time(), spent, thread_seconds(roots[BROKER]), forks())


@dataclass(slots=True)
class Work:
    """When what was done, by the log, in seconds since 1970."""

    started: dict[str, float] = field(default_factory=dict)
    """Session -> its start."""
    finished: dict[str, float] = field(default_factory=dict)
    turns: list[float] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)

    @classmethod
    async def read(cls, role: Role) -> Work:
        """Read the topics from their beginning."""
        work = cls()
        for topic in (topics.SESSIONS, topics.TURNS, topics.TOOL_RESULTS):
            async for record, event in events(role, topic):
                work.take(event, record.timestamp_ms / 1000)
        return work

    def take(self, event: Event, at: float) -> None:
        """Note an event of that time; other kinds are ignored."""
        match event:
            case SessionStarted():
                self.started[event.session_id] = at
            case SessionFinished():
                self.finished[event.session_id] = at
            case TurnCompleted():
                self.turns.append(at)
            case ToolCallCompleted():
                self.calls.append(at)

    def between(self, first: Mark, last: Mark) -> dict[str, float]:
        """Return sessions, turns and calls that finished between two marks, and how many sessions were in flight in the
        mean."""
        done = {"session": self.finished.values(), "turn": self.turns, "call": self.calls}
        overlaps = (
            min(last.at, self.finished.get(session, last.at)) - max(first.at, began)
            for session, began in self.started.items()
        )
        in_flight = sum(max(0.0, overlap) for overlap in overlaps) / (last.at - first.at)
        counts = {name: sum(first.at <= at < last.at for at in times) for name, times in done.items()}
        return {"in_flight": in_flight, **counts}


async def turns_written(stack: Stack, role: Role, count: int) -> None:
    """Wait until so many turns are on the log. Raises SystemExit after PATIENCE_S, or if a process has ended."""
    places, deadline = partitions(role, topics.TURNS), time.monotonic() + PATIENCE_S
    while sum((await role.log.end_offsets(places)).values()) < count:
        if time.monotonic() > deadline or (stack.feeder is not None and stack.feeder.returncode is not None):
            raise SystemExit(f"turns stopped before {count}: see the logs in {stack.settings.run.directory}")
        reap_orphans({stack.engine_pid, *stack.roots().values()})
        await asyncio.sleep(0.1)  # other processes write: there is nothing here to wait on


async def measured(stack: Stack, count: int) -> dict[str, Any]:
    """Return the ledger of a run, of so many sessions for each of its two measurements."""
    async with trained(stack) as role:
        stack.feed()
        until = TURNS * round(max(LEAST_WARM, WARM * stack.requested))
        await turns_written(stack, role, until)
        marks = [Mark.taken(stack)]
        with counted_instructions(stack.roots()) as instructions:
            await turns_written(stack, role, until := until + TURNS * count)
            marks.append(Mark.taken(stack))
        stack.probed(BEGIN)
        marks.append(Mark.taken(stack))
        await turns_written(stack, role, until + TURNS * count)
        marks.append(Mark.taken(stack))
        probes = await recorded(stack)
        work = await Work.read(role)
    return ledger(marks, work, instructions, probes)


async def recorded(stack: Stack) -> dict[str, dict[str, Any]]:
    """Return process -> what its probe has recorded."""
    files = {name: stack.probe_file(name) for name in stack.probed(END)}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while not all(file.exists() for file in files.values()):  # noqa: ASYNC110 - other processes write them
                await asyncio.sleep(0.1)
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def ledger(
    marks: Sequence[Mark], work: Work, instructions: Mapping[str, int | None], probes: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the figures of one load. The first two of four marks enclose the measurement, the others that of the
    kinds."""
    first, second, third, fourth = marks
    done, probed = work.between(first, second), work.between(third, fourth)
    own, others = (
        {role_of(name): 1000 * (spent[part] - first.cpu_s.get(name, (0.0, 0.0))[part])
         for name, spent in second.cpu_s.items()} for part in (0, 1)
    )  # fmt: skip
    core_ms = {role: {per: (own[role] + others[role]) / done[per] for per in PER} for role in own}
    kinds = {BROKER: {kind: 1000 * spent for kind, spent in by_thread_kind(first.threads, second.threads).items()}}
    asked, hottest = {}, {}
    for name, probe in probes.items():  # there is one process of each role
        role = role_of(name)
        kinds[role] = kinds_of(probe, own[role], others[role])
        asked[role] = {
            kind: [each / probed["session"] for each in counts] for kind, counts in probe["requests"].items()
        }
        hottest[role] = cost_kinds.hottest(probe["samples"], HOTTEST)
    counted = {role_of(name): count for name, count in instructions.items() if count is not None}
    return {
        **done, "seconds": second.at - first.at, "core_ms": core_ms,
        "core_ms_per_session": sum(one["session"] for one in core_ms.values()),
        "kinds_per_session": {role: divided(one, done["session"]) for role, one in kinds.items()},
        "requests_per_session": asked, "forks_per_call": (second.forks - first.forks) / done["call"],
        "instructions_per_session": divided(counted, done["session"]) or None, "hottest": hottest,
    }  # fmt: skip


def divided(figures: Mapping[str, float], by: float) -> dict[str, float]:
    """Return each figure per one of `by`."""
    return {name: figure / by for name, figure in figures.items()}


def role_of(process: str) -> str:
    """Return the role of a process: gateway-0 -> gateway."""
    role, _, number = process.rpartition("-")
    return role if number.isdigit() else process


def kinds_of(probe: Mapping[str, Any], own_ms: float, started_ms: float) -> dict[str, float]:
    """Return kind of work -> core-milliseconds, of those that a role and the processes that it started have used."""
    shares = cost_kinds.shares(probe["samples"], main_s=probe["main_s"], process_s=probe["process_s"])
    return {kind: share * own_ms for kind, share in shares.items()} | {cost_kinds.STARTED: started_ms}


def missed(loads: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Return what takes more than its goal, and how much."""
    found = {}
    for load, one in loads.items():
        for what, goal in GOALS.items():
            spent = sum(one["core_ms"].get(role, {}).get(goal.per, 0.0) for role in goal.roles)
            if spent > goal.most:
                found[f"{what} at {load}, of {goal.most:g} per {goal.per}"] = spent
    return found


def table(load: int, one: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a ledger: core-milliseconds by role and kind of work, and requests to the broker."""
    yield ""
    done = f"{one['session']} sessions, {one['turn']} turns, {one['call']} calls in {one['seconds']:.0f} s"
    yield f"{load} sessions in flight ({one['in_flight']:.0f} counted): {done}"
    yield f"{'core-ms per':12}" + "".join(f"{per:>9}" for per in PER) + "   kinds of work, core-ms per session"
    for role, figures in sorted(one["core_ms"].items(), key=lambda item: -item[1]["session"]):
        kinds = sorted(one["kinds_per_session"].get(role, {}).items(), key=lambda item: -item[1])
        shown = ", ".join(f"{kind} {ms:.2f}" for kind, ms in kinds if ms >= SHOWN)
        yield f"{role:12}" + "".join(f"{figures[per]:9.2f}" for per in PER) + f"   {shown}"
    yield f"{'all':12}{one['core_ms_per_session']:9.2f}"
    yield ""
    yield f"{'requests per session':20}" + "".join(f"{name:>12}" for name in (*GROUPS, "other", "KB out", "KB in"))
    rows = {role: grouped(asked) for role, asked in one["requests_per_session"].items()}
    rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    for role, row in rows.items():
        yield f"{role:20}" + "".join(f"{figure:12.2f}" for figure in row)
    yield f"processes and threads that the machine has started per call: {one['forks_per_call']:.2f}"


def grouped(asked: Mapping[str, Sequence[float]]) -> list[float]:
    """Return how many requests there are of each of GROUPS and of others, and the kilobytes of all of them and of their
    answers."""
    counts = [sum(asked[name][0] for name in names if name in asked) for names in GROUPS.values()]
    sizes = [sum(each[at] for each in asked.values()) / 1000 for at in (1, 2)]
    return [*counts, sum(each[0] for each in asked.values()) - sum(counts), *sizes]


def rounded(value: Any, digits: int = 3) -> Any:
    """Return figures as a line tells them."""
    match value:
        case float():
            return round(value, digits)
        case Mapping():
            return {str(key): rounded(each, digits) for key, each in value.items()}
        case list() | tuple():
            return [rounded(each, digits) for each in value]
    return value


def report(loads: Mapping[int, Mapping[str, Any]], walk: Callable[[], tuple[float | None, str]]) -> int:
    """Print the line; return the exit status."""
    millions, why = walk()
    say(f"instructions of a session in gateway and runner: {f'{millions:.1f} million' if millions else why}")
    value, over = max(one["core_ms_per_session"] for one in loads.values()), missed(loads)
    return told(
        id="COST", value=value, unit="core-ms/session", goal=GOAL, met=value <= GOAL and not over,
        detail={
            "loads": rounded(loads), "missed": rounded(over),
            "goals": {what: f"{goal.most:g} per {goal.per}" for what, goal in GOALS.items()},
            "instructions_by_role": lacks_counters() or "in loads",
            "instructions": rounded(millions and 1e6 * millions), "reason": why,
        },
    )  # fmt: skip


def main() -> int:
    """Measure every load on a run of its own."""
    parser = argparse.ArgumentParser(description="Measure what a session costs each role.")
    parser.add_argument("--loads", default=",".join(map(str, LOADS)), help="sessions in flight")
    parser.add_argument(
        "--sessions", type=int, help=f"of each measurement (default: those in flight, {LEAST} at least)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave logs and probes there")
    parser.add_argument("--no-walk", action="store_true", help="count no instructions by valgrind")
    arguments = parser.parse_args()
    loads = {}
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="turnlog-cost-") as folder:
        for load in map(int, arguments.loads.split(",")):
            with stack((arguments.keep or Path(folder)).resolve() / str(load), load) as started:
                loads[load] = uvloop.run(measured(started, arguments.sessions or max(LEAST, load)))
            say("\n".join(table(load, loads[load])))
    walks = WALKS and not arguments.no_walk
    return report(loads, instructions_of_a_session if walks else lambda: (None, "it was left out"))


if __name__ == "__main__":
    raise SystemExit(main())
