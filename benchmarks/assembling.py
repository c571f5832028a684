"""Invented groups on a log, and one assembler that folds all of them: what several benchmarks measure around."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import row  # noqa: F401 - finds tests.fakes

from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition, partition_of
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.settings import Settings


async def write_groups(
    events: EventLog, settings: Settings, *, groups: int, size: int, turns: int, shape: Shape
) -> None:
    """Append `groups` groups of `size` sessions, session after session."""
    rng = np.random.default_rng(0)
    units = settings.kafka.groups
    ends = [0] * units
    for number in range(groups):
        name = f"group-{number}"
        unit = partition_of(name.encode(), units)
        group = GroupName(settings.run.id, name, ends[unit], size)
        acks = [await events.submit(event) for event in whole_group(group, rng, turns=turns, shape=shape)]
        await asyncio.gather(*acks)
        ends[unit] += 3 * size


async def assemble(log: Log, events: EventLog, settings: Settings) -> float:
    """Seconds from the assignment of the units until everything is folded and committed."""
    plan, units = assembler_plan(Configured.today(settings), settings.assembler), range(settings.kafka.groups)
    runner = AssemblerRunner(plan, log, events, MemoryBlobs(), Health("assembler"), clock=time.monotonic)
    ends = await log.end_offsets([Partition(topic, unit) for topic in INPUTS for unit in units])
    member = log.group_reader(
        plan.group, INPUTS, assigned=runner._on_assigned, revoked=runner._on_revoked, instance="bench"
    )
    async with member as reader:
        while len(runner.units) < len(units):
            await runner.turn(reader)
        started = time.perf_counter()
        while any(runner.units[name.number].position[name.topic] < end for name, end in ends.items()):
            await runner.turn(reader)
        await asyncio.gather(*(unit.commit() for unit in runner.units.values()))
        return time.perf_counter() - started
