"""The assembler as a real process on a real Apache Kafka: killed, poisoned, restarted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan
from turnlog.processors.runtime.unit import records_between
from turnlog.schemas.events import DeadLetter, Event, GroupScored
from turnlog.settings import Settings

CHAOS = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos" / "assembler.py"


@pytest.mark.kafka
@pytest.mark.chaos
def test_outputs_of_a_killed_assembler_equal_the_offline_fold(live_settings: Settings) -> None:
    addresses = {
        "TURNLOG_KAFKA_BOOTSTRAP": live_settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": live_settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": live_settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": live_settings.store.endpoint,
        "TURNLOG_STORE_SECRET_KEY": live_settings.store.secret_key,
    }
    ran = subprocess.run(
        [sys.executable, str(CHAOS), "--kills", "1"],
        env={**os.environ, **addresses}, stdout=subprocess.PIPE, check=False, timeout=250,
    )  # fmt: skip
    line = json.loads(ran.stdout)
    assert line["kills"] == 1
    assert (line["lost"], line["twice"], line["skipped"], line["identical"]) == (0, 0, 0, True)
    assert line["detail"]["exit_status"] == 0
    assert line["ok"]


@asynccontextmanager
async def assembler(settings: Settings, events: EventLog) -> AsyncIterator[AssemblerRunner]:
    """A runner in this process that has folded all that is on the log."""
    plan = assembler_plan(Configured.today(settings), settings.assembler)
    runner = AssemblerRunner(plan, events.log, events, MemoryBlobs(), Health("assembler"), clock=lambda: 0.0)
    names = [Partition(topic, unit) for topic in INPUTS for unit in range(settings.kafka.groups)]
    async with runner.join_group("assembler-0") as reader:
        ends = await events.log.end_offsets(names)
        while not runner.units or any(
            runner.units[name.number].position[name.topic] < ends[name] for name in names if name.number in runner.units
        ):
            await runner.turn(reader)
        for unit in runner.units.values():
            await unit.commit()
        yield runner


async def read(events: EventLog, topic: str, units: int) -> list[Event]:
    names = [Partition(topic, unit) for unit in range(units)]
    ends = await events.log.end_offsets(names)
    return [
        await events.decode(record)
        for name in names
        async for record in records_between(events.log, name, 0, ends[name])
    ]


@pytest.mark.kafka
async def test_poison_on_the_log_is_parked_once_and_the_rest_goes_on(live_settings: Settings) -> None:
    async with open_role("test", live_settings) as tool:
        unit = partition_of(b"group", live_settings.kafka.groups)
        async with tool.log.appender() as appender:
            await appender.append("agent.turns", b"group", b"\x00poison")
        group = GroupName(live_settings.run.id, "group", 0, 2)
        for event in whole_group(group, np.random.default_rng(0), turns=2, shape=Shape()):
            await tool.events.append(event)
        for _ in range(2):
            async with assembler(tool.settings, tool.events) as runner:
                assert not runner.stopped
        (letter,) = await read(tool.events, "dead-letters", 1)
        assert isinstance(letter, DeadLetter)
        assert (letter.topic, letter.partition, letter.offset) == ("agent.turns", unit, 0)
        assert (letter.cause, letter.value) == ("UndecodableRecord", b"\x00poison")
        samples = await read(tool.events, "segment-samples", live_settings.kafka.groups)
        assert [event.group_id for event in samples if isinstance(event, GroupScored)] == ["group"]
