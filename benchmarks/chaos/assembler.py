"""Kill the assembler, again and again, under load: `python benchmarks/chaos/assembler.py [--kills 20]`; or, with
`--seconds 60`, only write and judge, while somebody else strikes assemblers on the servers that the environment names.

A writer appends histories as bad days leave them (repeats however late, zombies, racing closes) while a real
`turnlog role assembler` is killed by SIGKILL at random moments and started again. In the end a read_committed reader
must find every tree, sample and score exactly once, with the bytes of an offline fold that read the topics one after
another, in two orders.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from servers import role, say, servers, told

from tests.fakes.sessions import bad_days
from turnlog.infra.embedded.process import Child
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.settlement import with_figures
from turnlog.processors.core.fold.unit import Fold, decode_marks
from turnlog.processors.core.fold_versions import INPUTS, outputs_of
from turnlog.processors.runtime.assembler import assembler_plan
from turnlog.processors.runtime.unit import AssemblerPlan, records_between
from turnlog.schemas.events import Event
from turnlog.settings import Settings, load

EVENTS_PER_S = 250
PATIENCE_S = 180.0


@dataclass(slots=True)
class Story:
    """What happened."""

    kills: int = 0
    deaths: int = 0
    """Ends that nobody asked for: a fenced process, for example."""
    events: int = 0
    written: bool = False
    exit_status: int | None = None
    between: list[int] = field(default_factory=list)
    """Input records folded when each kill struck."""
    longest_s: float = 0.0
    """Between two acknowledgements."""


async def write(
    events: EventLog, settings: Settings, story: Story, *, enough: Callable[[Story], bool], seed: int
) -> None:
    """Append until it is enough, and finish what was begun."""
    started = time.monotonic()
    days = (
        bad_days(random.Random(seed + n), groups=60, partitions=settings.kafka.groups, run_id=settings.run.id,
                 name=f"day-{n}", ends=ends)
        for ends in ([0] * settings.kafka.groups,)
        for n in itertools.count()
    )  # fmt: skip
    for day in days:
        for event in day:
            began = time.monotonic()
            await events.append(event)
            story.longest_s = max(story.longest_s, time.monotonic() - began)
            story.events += 1
            await asyncio.sleep(max(0.0, started + story.events / EVENTS_PER_S - time.monotonic()))
        if enough(story):
            break
    story.written = True


async def kill(
    settings: Settings, log: Log, plan: AssemblerPlan, story: Story, *, kills: int, rng: random.Random
) -> Child:
    """Kill at random moments once the process has begun to work; the process that is left alive."""
    child = role("assembler", settings, instance="assembler-0")
    while story.kills < kills:
        await works(log, plan, settings, child)
        await asyncio.sleep(rng.uniform(0.0, 1.5))
        if child.returncode is None:
            child.kill()
            story.kills += 1
            story.between.append(await folded(log, plan, settings))
        else:
            story.deaths += 1
            say(child.tail())
        child = role("assembler", settings, instance="assembler-0")
    return child


async def works(log: Log, plan: AssemblerPlan, settings: Settings, child: Child) -> None:
    """Return when the process has folded something, or ended."""
    before = await folded(log, plan, settings)
    deadline = time.monotonic() + PATIENCE_S
    while child.returncode is None and time.monotonic() < deadline:
        if await folded(log, plan, settings) > before:
            return
        await asyncio.sleep(0.05)


async def progress(log: Log, plan: AssemblerPlan, settings: Settings) -> None:
    """Return when something more has been folded. Raises TimeoutError after PATIENCE_S."""
    before = await folded(log, plan, settings)
    async with asyncio.timeout(PATIENCE_S):
        while await folded(log, plan, settings) <= before:  # noqa: ASYNC110 - commits can only be asked for
            await asyncio.sleep(0.1)


async def folded(log: Log, plan: AssemblerPlan, settings: Settings) -> int:
    """Input records that committed transactions have folded."""
    total = 0
    for unit in range(settings.kafka.groups):
        commits = await log.commits(plan.group, [Partition(topic, unit) for topic in INPUTS])
        marks = decode_marks({name.topic: (at.offset, at.metadata) for name, at in commits.items()}, INPUTS, plan.fold)
        total += 0 if marks is None else sum(marks.high.values())
    return total


async def drained(log: Log, plan: AssemblerPlan, settings: Settings, child: Child | None) -> Child | None:
    """Wait until everything that was written is folded; a process of ours that ended is started again."""
    names = [Partition(topic, unit) for topic in INPUTS for unit in range(settings.kafka.groups)]
    end = sum((await log.end_offsets(names)).values())
    deadline = time.monotonic() + PATIENCE_S
    while await folded(log, plan, settings) < end and time.monotonic() < deadline:
        if child is not None and child.returncode is not None:
            child = role("assembler", settings, instance="assembler-0")
        await asyncio.sleep(0.1)
    return child


async def committed(events: EventLog, topic: str, units: int) -> list[tuple[int, Event, bytes]]:
    """(offset, event, bytes) of every committed record, unit after unit."""
    names = [Partition(topic, unit) for unit in range(units)]
    ends = await events.log.end_offsets(names)
    return [
        (record.offset, await events.decode(record), record.value)
        for name in names
        async for record in records_between(events.log, name, 0, ends[name])
    ]


def offline(records: Iterable[tuple[str, int, Event]], plan: AssemblerPlan) -> list[Event]:
    """Outputs of folding whole topics one after the other."""
    groups: dict[str, Fold] = {}
    outputs: list[Event] = []
    for topic, offset, event in records:
        if event.group_id not in groups:
            groups[event.group_id] = plan.factory(event.group_id, event.floor)
        try:
            outputs += groups[event.group_id].apply(topic, offset, event)
        except FoldError as refusal:
            outputs += refusal.outputs
    return outputs


async def compared(events: EventLog, plan: AssemblerPlan, settings: Settings) -> dict[str, Any]:
    """What is on the log against the offline fold."""
    units = settings.kafka.groups
    topics = outputs_of(plan.fold.version)
    found = [events.codec.encode(event) for topic in topics for _, event, _ in await committed(events, topic, units)]
    inputs = {topic: await committed(events, topic, units) for topic in INPUTS}
    wanted: list[set[bytes]] = []
    for order in (INPUTS, INPUTS[::-1]):
        records = ((topic, offset, event) for topic in order for offset, event, _ in inputs[topic])
        wanted.append({events.codec.encode(event) for event in with_figures(offline(records, plan))})
    twice = sum(count - 1 for count in Counter(found).values())
    lost = len(wanted[0] - set(found))
    strange = len(set(found) - wanted[0])
    total = sum(len(records) for records in inputs.values())
    skipped = total - await folded(events.log, plan, settings)
    identical = not lost and not strange and wanted[0] == wanted[1]
    detail = {"input_records": total, "outputs": len(found), "strange": strange}
    return {"lost": lost, "twice": twice, "skipped": skipped, "identical": identical, "detail": detail}


async def verdict(
    events: EventLog, plan: AssemblerPlan, settings: Settings, story: Story, *, id: str = "assembler", **more: object
) -> int:
    """Say what was compared, and what happened; `more` is told beside."""
    found = await compared(events, plan, settings)
    ok = found["identical"] and not found["twice"] and not found["skipped"] and story.exit_status == 0
    happened = {"deaths": story.deaths, "exit_status": story.exit_status, "folded_at_kill": story.between}
    found["detail"] |= happened | more
    return told(id=id, kills=story.kills, ok=ok, **found)


async def torture(settings: Settings, *, kills: int, seed: int) -> int:
    """The whole run; the exit status."""
    async with open_role("chaos", settings) as tool:
        plan, story, rng = assembler_plan(await configure(tool), settings.assembler), Story(), random.Random(seed)
        writing = asyncio.create_task(
            write(tool.events, settings, story, enough=lambda story: story.kills >= kills, seed=seed)
        )
        child: Child | None = await kill(settings, tool.log, plan, story, kills=kills, rng=rng)
        await writing
        say(f"{story.kills} kills, {story.events} events written; waiting for the rest to be folded")
        child = await drained(tool.log, plan, settings, child)
        assert child is not None
        story.exit_status = child.stop()
        return await verdict(tool.events, plan, settings, story)


async def beside(settings: Settings, *, seconds: float, seed: int) -> int:
    """Write beside assemblers that run already, then judge; the exit status."""
    async with open_role("chaos", settings) as tool:
        plan, story = assembler_plan(await configure(tool), settings.assembler), Story(exit_status=0)
        end = time.monotonic() + seconds
        say("writing")
        await write(tool.events, settings, story, enough=lambda _: time.monotonic() > end, seed=seed)
        say(f"{story.events} events written; waiting for the rest to be folded")
        await drained(tool.log, plan, settings, None)
        return await verdict(tool.events, plan, settings, story)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill the assembler under load.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="start and strike nothing, write for so long")
    arguments = parser.parse_args()
    if arguments.seconds:
        return asyncio.run(beside(load(None, os.environ), seconds=arguments.seconds, seed=arguments.seed))
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        return asyncio.run(torture(settings, kills=arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
