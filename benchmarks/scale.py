"""SCALE: what a session, a turn and a thousand tokens cost each role in core-milliseconds and bytes, and how well those
costs foretell other runs.

A run writes sessions as gateways do, folds them as assemblers do, forms and seals batches as a batcher does, each in
processes of their own; counted are their CPU time, the broker's, and what lies on the log and in batch files after. The
costs are fitted to CALIBRATION (non-negative least squares of relative errors) and must foretell HELD_OUT, which have
other lengths, two processes of a kind, four partitions, within 20 %: first bytes, by FEATURES, then core-milliseconds,
by WORK, since runs tell more of bytes than of tokens of two kinds. Only of what they foretell so well does the line say
how much of it so many tokens per second need. CPU time is counted, so a busy machine does less harm than to rates; it
does some. Not in it: gateway and agents around the log (T2, T4, P1), sandboxes (G15), weights
(W1).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import uvloop
from g11_bytes import session
from log_server import LogServer, broker
from row import say, size, told
from scipy.optimize import nnls

from tests.fakes.sessions import GroupName, Shape
from turnlog.infra.batch_files import build_batch_file
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Log, Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.runs import Configured
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.batches.draws import PlacedSample, ReadableGroup, draw_rules, form_draw
from turnlog.processors.core.fold_versions import FOLD_VERSION, INPUTS, outputs_of
from turnlog.processors.core.views.progress import HeldVersion
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.processors.runtime.unit import records_between
from turnlog.schemas.events import GroupScored, SegmentSample
from turnlog.schemas.topics import SAMPLES
from turnlog.settings import Settings

GROUP_SIZE, PROMPTS = 8, 8
GOAL = 0.2
SCALED, ROUNDS = size((2.0, 7), smallest=(0.02, 1))
DRAWN = size(3, smallest=1)
AT_ONCE = 128
"""Sessions under way in a writer."""
FEATURES = ("session", "turn", "kilotoken given", "kilotoken sampled")
"""What bytes are counted by."""
WORK = ("session", "turn", "megabyte moved", "turn and partition")
"""What core-milliseconds are counted by: the more partitions, the more batches do the records of a turn lie in."""


@dataclass(frozen=True, slots=True)
class Load:
    """One run."""

    groups: int
    turns: int
    """Of a session."""
    delta: int
    output: int
    """Tokens of a turn: given and sampled."""
    partitions: int = 2
    processes: int = 1
    """Writers, and assemblers."""

    @property
    def features(self) -> tuple[float, ...]:
        """FEATURES, counted."""
        sessions = self.groups * GROUP_SIZE
        turns = sessions * self.turns
        return sessions, turns, turns * self.delta / 1000, turns * self.output / 1000

    @property
    def settings(self) -> Settings:
        """Of every role."""
        usual = Settings()
        return dataclasses.replace(
            usual,
            kafka=dataclasses.replace(usual.kafka, groups=self.partitions),
            batcher=dataclasses.replace(usual.batcher, prompts_per_draw=PROMPTS, max_tokens=1 << 20),
        )


def load(groups: int, *rest: int, **more: int) -> Load:
    """At the size of this run: at least two groups, so that each process has one."""
    return Load(max(2, round(groups * SCALED)), *rest, **more)


CALIBRATION = (
    load(96, 8, 64, 64), load(48, 8, 512, 512), load(160, 2, 416, 96), load(40, 16, 96, 416), load(160, 4, 16, 16),
    load(32, 4, 1536, 1536), load(128, 4, 64, 192, partitions=8), load(40, 16, 192, 96, partitions=8),
)  # fmt: skip
HELD_OUT = {
    "two processes": load(64, 8, 256, 256, processes=2),
    "four partitions": load(64, 8, 256, 256, partitions=4),
    "long turns": load(40, 4, 1024, 1024),
    "long sessions": load(32, 32, 128, 128),
    "all of it": load(128, 3, 40, 200, partitions=4, processes=2),
}
Spent = Mapping[str, float]
"""Core-milliseconds of each role and the broker, kilobytes of `on log: ...` and `batch files`."""
ON_LOG = {"agents": INPUTS, "folded": outputs_of(FOLD_VERSION), "samples": (SAMPLES.name,)}
"""Of `on log: ...` -> topics."""
MOVED = {
    "writer": ("on log: agents",), "assembler": ("on log: agents", "on log: folded"), "batcher": ("on log: samples",),
    "broker": ("on log: agents", "on log: folded"),
}  # fmt: skip
"""By whose bytes core-milliseconds are counted: of what a role reads or writes the most."""


@dataclass(frozen=True, slots=True)
class Job:
    """A process's part of a run."""

    load: Load
    number: int
    """Of the processes of its kind."""
    log: Log
    events: EventLog
    line: Callable[[], Awaitable[object]]
    """The next one of stdin."""


async def write(job: Job) -> Spent:
    """Its share of the groups, AT_ONCE sessions at a time, each of which waits for its turns: so many records lie in a
    request then, however long sessions are. They are made before anything is counted."""
    asked, rng = job.load, np.random.default_rng(job.number)
    shape, run = Shape(asked.delta, asked.output), asked.settings.run.id
    sessions = [
        list(session(GroupName(run, f"group-{number}", 0, GROUP_SIZE), index, asked.turns, rng, shape))
        for number in range(job.number, asked.groups, asked.processes) for index in range(GROUP_SIZE)
    ]  # fmt: skip
    left = iter(sessions)

    async def connection() -> None:
        for events in left:
            for event in events:
                await job.events.append(event)

    began = time.process_time()
    await asyncio.gather(*[connection() for _ in range(AT_ONCE)])
    return {"writer": 1000 * (time.process_time() - began)}


async def assemble(job: Job) -> Spent:
    """Say when it has its partitions, and fold from the next line to the one behind it."""
    asked, settings = job.load, job.load.settings
    plan = assembler_plan(Configured.today(settings), settings.assembler)
    runner = AssemblerRunner(plan, job.log, job.events, MemoryBlobs(), Health("assembler"), clock=time.monotonic)
    reader = job.log.group_reader(
        plan.group, INPUTS, assigned=runner._on_assigned, revoked=runner._on_revoked, instance=f"bench-{job.number}"
    )
    async with reader as member:
        while len(runner.units) != asked.partitions // asked.processes:
            await runner.turn(member)
        answer({})
        await job.line()
        began, over = time.process_time(), asyncio.ensure_future(job.line())
        while not over.done():
            await runner.turn(member)
    return {"assembler": 1000 * (time.process_time() - began)}


async def draw(job: Job) -> Spent:
    """Read what was folded, form and seal every batch: the least of DRAWN times, since a draw is soon done."""
    spent, written = [], 0
    for _ in range(DRAWN):
        began = time.process_time()
        written = await drawn(job)
        spent.append(1000 * (time.process_time() - began))
        gc.collect()
    return {"batcher": min(spent), "batch files": written / 1000}


async def drawn(job: Job) -> int:
    """Bytes of the files."""
    settings, written = job.load.settings, 0
    places, rules = partitions(SAMPLES.name, job.load), draw_rules(settings.fold, settings.batcher)
    ends = await job.log.end_offsets(places)
    samples: defaultdict[str, list[PlacedSample]] = defaultdict(list)
    scores: list[GroupScored] = []
    for place in places:
        async for record in records_between(job.log, place, 0, ends[place]):
            event = await job.events.decode(record)
            if isinstance(event, SegmentSample):
                samples[event.group_id].append(PlacedSample(event, record.partition, record.offset))
            elif isinstance(event, GroupScored):
                scores.append(event)
    for at in range(0, len(scores), PROMPTS):
        groups = [ReadableGroup(score, tuple(samples[score.group_id])) for score in scores[at : at + PROMPTS]]
        for batch in form_draw(groups, HeldVersion(0), rules).batches:
            written += len(build_batch_file(batch, rules.weighting)[0])
    return written


ROLES: Mapping[str, Callable[[Job], Awaitable[Spent]]] = {"writer": write, "assembler": assemble, "batcher": draw}


CORES = sorted(os.sched_getaffinity(0))
"""Roles are kept on the first and the broker on the others, since who works beside a role slows it down."""


async def serve(role: str, number: int, bootstrap: str) -> None:
    """One job a line of stdin, one answer a line; an assembler's job is three of one and two of the other."""
    os.sched_setaffinity(0, CORES[:1])
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        prefix, asked = json.loads(line)
        log = KafkaLog(bootstrap, prefix=prefix)
        async with EventLog.open(log, MemoryRegistry(), writer=f"bench-{number}") as events:
            spent = await ROLES[role](Job(Load(**asked), number, log, events, lines.readline))
        await log.close()
        answer(spent)


def answer(spent: Spent) -> None:
    """A line to who asked."""
    print(json.dumps(spent), flush=True)


class Process:
    """One of them."""

    def __init__(self, role: str, child: asyncio.subprocess.Process) -> None:
        self._role, self._child = role, child

    @classmethod
    async def started(cls, role: str, number: int, bootstrap: str) -> Process:
        """It begins to import."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, role, str(number), bootstrap,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        return cls(role, child)

    def tell(self, line: str) -> None:
        """A job, or nothing: it is to go on."""
        assert self._child.stdin is not None
        self._child.stdin.write(line.encode() + b"\n")

    async def spent(self) -> Spent:
        """What it answers. Raises ChildProcessError."""
        assert self._child.stdout is not None
        if not (line := await self._child.stdout.readline()):
            raise ChildProcessError(f"the {self._role} ended with {await self._child.wait()}")
        found: Spent = json.loads(line)
        return found

    async def end(self) -> None:
        """There are no more jobs."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        await self._child.wait()


Processes = Mapping[str, Sequence[Process]]
"""By role."""


def broker_process(server: LogServer) -> psutil.Process:
    """By the file that it was started with, kept on its cores, as are the threads that it starts later."""
    file = str(server.data.parent / "server.properties")
    found = next(one for one in psutil.process_iter(["cmdline"]) if file in (one.info["cmdline"] or ()))
    for thread in found.threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread.id, CORES[1:] or CORES)
    return found


async def typical(server: LogServer, kafka: psutil.Process, processes: Processes, loads: Sequence[Load]) -> list[Spent]:
    """The lower quartile of ROUNDS runs of each, there and back by turns: what runs beside them adds for minutes on
    end, and the broker still compiles what it runs often; the least would be the one that a machine's pace favoured."""
    runs: list[list[Spent]] = [[] for _ in loads]
    for again in range(ROUNDS):
        for number in sorted(range(len(loads)), reverse=bool(again % 2)):
            runs[number].append(await measured(server, kafka, processes, f"run{again}-{number}-", loads[number]))
    return [{what: float(np.quantile([one[what] for one in each], 0.25)) for what in each[0]} for each in runs]


async def measured(server: LogServer, kafka: psutil.Process, processes: Processes, part: str, asked: Load) -> Spent:
    """Core-milliseconds by role, and kilobytes by where they lie, of one run on topics of its own."""
    log, found = server.log(part), Counter[str]()
    await apply(log, asked.settings)
    job = json.dumps((server.prefix + part, dataclasses.asdict(asked)))
    writers, assemblers = (processes[role][: asked.processes] for role in ("writer", "assembler"))
    await told_all(assemblers, job)  # each has its partitions: who joins late has what was folded folded again
    busy = sum(kafka.cpu_times()[:2])
    found.update(await told_all(writers, job))
    for process in assemblers:
        process.tell("")
    await folded(log, asked)
    found.update(await told_all(assemblers, ""))
    found["broker"] = 1000 * (sum(kafka.cpu_times()[:2]) - busy)
    found.update(await told_all(processes["batcher"], job))  # reads more than once
    for what, names in ON_LOG.items():
        found[f"on log: {what}"] = server.written(names, part) / 1000
    await log.close()
    return dict(found)


async def told_all(processes: Sequence[Process], line: str) -> Counter[str]:
    """What they answer, together."""
    for process in processes:
        process.tell(line)
    found = Counter[str]()
    for process in processes:
        found.update(await process.spent())
    return found


async def folded(log: Log, asked: Load) -> None:
    """Wait until assemblers have committed the ends of all that they read."""
    group = assembler_plan(Configured.today(asked.settings), asked.settings.assembler).group
    places = [place for topic in INPUTS for place in partitions(topic, asked)]
    ends = await log.end_offsets(places)
    while True:
        commits = await log.commits(group, places)
        if all(not ends[one] or (one in commits and commits[one].read_progress()[0] >= ends[one]) for one in places):
            return
        await asyncio.sleep(0.05)  # other processes commit: there is nothing here to wait on


def partitions(topic: str, asked: Load) -> list[Partition]:
    """Of the run's."""
    return [Partition(topic, number) for number in range(asked.partitions)]


@dataclass(frozen=True, slots=True)
class Costs:
    """What runs cost."""

    kilobytes: dict[str, list[float]] = field(default_factory=dict)
    """Of what -> the same per FEATURES."""
    core_ms: dict[str, list[float]] = field(default_factory=dict)
    """Of a role, or the broker -> per WORK."""

    @classmethod
    def fitted(cls, runs: Sequence[tuple[Load, Spent]]) -> Costs:
        """Those that explain runs best."""
        costs, features = cls(), [asked.features for asked, _ in runs]
        for what in [what for what in runs[0][1] if what not in MOVED]:
            costs.kilobytes[what] = least_squares(features, [found[what] for _, found in runs])
        for role in MOVED:
            work = [costs.work(role, asked.features, asked.partitions) for asked, _ in runs]
            costs.core_ms[role] = least_squares(work, [found[role] for _, found in runs])
        return costs

    def work(self, role: str, features: Sequence[float], partitions: int) -> tuple[float, float, float, float]:
        """WORK, counted."""
        sessions, turns, *_ = features
        moved = sum(float(np.dot(self.kilobytes[what], features)) for what in MOVED[role])
        return sessions, turns, moved / 1000, turns * partitions

    def foretold(self, features: Sequence[float], partitions: int) -> Spent:
        """Of a run, or of a second of one."""
        return {what: float(np.dot(each, features)) for what, each in self.kilobytes.items()} | {
            role: float(np.dot(each, self.work(role, features, partitions))) for role, each in self.core_ms.items()
        }


def least_squares(features: Sequence[Sequence[float]], spent: Sequence[float]) -> list[float]:
    """What a unit of each feature costs: of relative errors, none below 0 (Lawson and Hanson 1974, 23.3)."""
    return [float(cost) for cost in nnls(np.array(features) / np.array(spent)[:, None], np.ones(len(spent)))[0]]


TOKENS_PER_S = 6_200_000
"""Of samples, half of them sampled: 1,024 GPUs."""
TURNS, PER_TURN, PARTITIONS = 32, 512, 16
REPLICAS, WHOLE = 3, 2
"""Copies of each record; consumers that read all of them: archive and index. Agents' go to assemblers, samples to the
batcher beside that."""
EXPERT_BYTES = 48 * 8
"""A token's routed experts: 48 layers, 8 of each, a byte."""


def needed(costs: Costs, worst: Mapping[str, float]) -> dict[str, Any]:
    """Of TOKENS_PER_S, as far as what it is made of was foretold (`worst`: errors of held-out runs): cores by role,
    megabytes a second by where they go."""
    turns = TOKENS_PER_S / PER_TURN
    second = costs.foretold((turns / TURNS, turns, TOKENS_PER_S / 2000, TOKENS_PER_S / 2000), PARTITIONS)
    known = {what: value / 1000 for what, value in second.items() if worst[what] <= GOAL}
    found: dict[str, Any] = {
        "tokens_per_s": TOKENS_PER_S, "turns_per_s": round(turns), "sessions_per_s": round(turns / TURNS),
        "cores": {what: round(value, 1) for what, value in known.items() if what in MOVED},
        "mb_per_s": {what: round(value, 1) for what, value in known.items() if what not in MOVED},
        "foretold_too_badly": sorted(second.keys() - known.keys()),
        "routed_experts_mb_per_s": round(TOKENS_PER_S * EXPERT_BYTES / 1e6),
    }  # fmt: skip
    agents, folded_, samples = (known.get(f"on log: {what}") for what in ("agents", "folded", "samples"))
    if agents is not None and folded_ is not None and samples is not None:
        written = agents + folded_
        found["into_brokers_mb_per_s"] = round(REPLICAS * written)
        found["out_of_brokers_mb_per_s"] = round((REPLICAS - 1) * written + agents + samples + WHOLE * written)
    return found


async def compared(server: LogServer) -> int:
    """Calibrate, foretell, compare; the exit status."""
    most = {role: 1 if role == "batcher" else 2 for role in ROLES}
    processes = {role: [await Process.started(role, number, server.bootstrap) for number in range(count)]
                 for role, count in most.items()}  # fmt: skip
    loads = (*CALIBRATION, *HELD_OUT.values())
    spent = dict(zip(loads, await typical(server, broker_process(server), processes, loads), strict=True))
    costs, errors = Costs.fitted([(asked, spent[asked]) for asked in CALIBRATION]), dict[str, dict[str, float]]()
    for name, asked in HELD_OUT.items():
        found, wanted = spent[asked], costs.foretold(asked.features, asked.partitions)
        errors[name] = {what: round(wanted[what] / found[what] - 1, 3) for what in found}
        say(f"{name}: { ({what: f'{error:+.0%}' for what, error in errors[name].items()}) }")
    for process in itertools.chain(*processes.values()):
        await process.end()
    worst = {what: max(abs(each[what]) for each in errors.values()) for what in found}
    value = max(worst.values())
    return told(
        id="SCALE", value=value, unit="of what a held-out run costs, at worst", goal=GOAL, met=value <= GOAL,
        detail={
            "kilobytes_are_per": FEATURES, "kilobytes": rounded(costs.kilobytes),
            "core_ms_are_per": WORK, "core_ms": rounded(costs.core_ms),
            "errors": errors, "needs": needed(costs, worst),
        },
    )  # fmt: skip


def rounded(costs: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """As they are told."""
    return {what: [round(cost, 4) for cost in each] for what, each in costs.items()}


def main() -> int:
    """One broker; or one of the processes on it."""
    if sys.argv[1:]:
        role, number, bootstrap = sys.argv[1:]
        uvloop.run(serve(role, int(number), bootstrap))
        return 0
    with broker() as server:
        return uvloop.run(compared(server))


if __name__ == "__main__":
    raise SystemExit(main())
