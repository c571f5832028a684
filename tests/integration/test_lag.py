"""Lag on a real Kafka: a fact of the log, there when nobody of a role is, right when somebody comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.addresses import variables
from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.consumers.lag import ROLES, lag_of
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Commit, Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.names import ConsumerGroup
from turnlog.settings import ArchiveSettings, RegistrySettings, Settings, StoreSettings

pytestmark = pytest.mark.kafka
PATIENCE_S = 60.0
Gauges = dict[tuple[str, ...], float]


def environment(settings: Settings, **more: str) -> dict[str, str]:
    """What a role needs to find its servers."""
    return {
        **os.environ,
        **variables(settings),
        "TURNLOG_ENGINE_URLS": ",".join(settings.engine.urls),
        "TURNLOG_VIEWS_ENABLED": "false",
    } | more


@asynccontextmanager
async def process(verb: str, env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """A role that ends by SIGTERM, in order."""
    started = await asyncio.create_subprocess_exec(sys.executable, "-m", "turnlog.cli", "role", verb, env=env)
    try:
        yield started
        started.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(started.wait(), PATIENCE_S) == 0
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


async def gauges(url: str) -> Gauges:
    """(name, label values in the order of their names) -> value, of our gauges."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(url)).text
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("turnlog_")
    }


async def seen(url: str, wanted: Callable[[Gauges], bool]) -> Gauges:
    """The gauges as soon as they are as wanted."""
    found: Gauges = {}
    async with asyncio.timeout(PATIENCE_S):
        while not wanted(found):
            await asyncio.sleep(0.05)  # a scrape is a look: there is nothing to await
            try:
                found = await gauges(url)
            except httpx.TransportError:
                continue
    return found


async def written(role: Role, group: str) -> int:
    """Append a whole group of rollouts; the number of records."""
    name = GroupName(role.settings.run.id, group, 0, 2)
    events = list(whole_group(name, np.random.default_rng(0), turns=2, shape=Shape()))
    for event in events:
        await role.events.append(event)
    return len(events)


async def test_the_lag_of_an_assembler_is_there_without_it_and_falls_when_it_comes_back(
    live_settings: Settings,
) -> None:
    port = free_ports(1)[0]
    url = f"http://{HOST}:{port}/metrics"
    # The exporter is told of no registry and no store that exist.
    nowhere = f"http://{HOST}:{free_ports(1)[0]}"
    bare = {"TURNLOG_REGISTRY_URL": nowhere, "TURNLOG_STORE_ENDPOINT": nowhere}
    looks = environment(live_settings, TURNLOG_LAG_PORT=str(port), TURNLOG_LAG_EVERY_S="0.1", **bare)
    role_records = ("turnlog_role_lag_records", "assembler")
    group = ConsumerGroup.ASSEMBLER.format(run=live_settings.run.id)
    async with process("lag", looks), open_role("test", live_settings) as tool:
        await configure(tool)
        assert (await seen(url, lambda now: role_records in now))[role_records] == 0
        first = await written(tool, "first")
        await seen(url, lambda now: now.get(role_records) == first)  # nobody has ever committed: all that is there
        async with process("assembler", environment(live_settings)):
            await seen(url, lambda now: now.get(role_records) == 0)
        more = await written(tool, "second")
        stopped = await seen(url, lambda now: now.get(role_records) == more)
        by_partition = {key: value for key, value in stopped.items() if key[:2] == ("turnlog_lag_records", group)}
        assert sum(by_partition.values()) == more
        assert len(by_partition) == 3 * live_settings.kafka.groups, "three topics, each partition once"
        aged = await seen(url, lambda now: now.get(("turnlog_role_lag_seconds", "assembler"), 0) > 0.3)
        assert aged[role_records] == more
        async with process("assembler", environment(live_settings)):
            caught_up = await seen(url, lambda now: now.get(role_records) == 0)
        assert caught_up["turnlog_role_lag_seconds", "assembler"] == 0
        assert caught_up["turnlog_role_lag_records", "runner"] == 0
        assert ("turnlog_role_lag_records", "archive") not in caught_up, "nobody has switched it on"


async def test_a_transaction_that_hangs_is_seen_for_as_long_as_it_does(live_settings: Settings) -> None:
    port = free_ports(1)[0]
    url = f"http://{HOST}:{port}/metrics"
    hangs = ("turnlog_log_open_transaction_seconds", "agent.tool-calls")
    looks = environment(live_settings, TURNLOG_LAG_PORT=str(port), TURNLOG_LAG_EVERY_S="0.1")
    async with process("lag", looks), open_role("test", live_settings) as tool:
        await seen(url, lambda now: now.get(hangs) == 0)
        async with tool.log.transactor("hangs") as transactor:
            await transactor.begin()
            await (await transactor.send(hangs[1], 0, b"key", b"unseen"))
            await seen(url, lambda now: now.get(hangs, 0) > 0.3)
            await transactor.abort()
        await seen(url, lambda now: now.get(hangs) == 0)


async def test_every_role_is_told_of_and_one_that_never_committed_waits_for_all_that_is_held(
    live_settings: Settings,
) -> None:
    settings = dataclasses.replace(live_settings, archive=ArchiveSettings(enabled=True))
    log = KafkaLog(settings.kafka.bootstrap, prefix=settings.kafka.prefix)
    place, calls = Partition("weight-versions", 0), Partition("agent.tool-calls", 1)
    try:
        async with log.appender() as appender:
            for _ in range(6):
                await appender.append(*place[:1], b"run", b"", partition=place.number)
                await appender.append(*calls[:1], b"rollout", b"", partition=calls.number)
        await log.delete_before({place: 2})
        async with log.transactor("test") as transactor:
            await transactor.begin()
            engine = ConsumerGroup.LOADER.format(run=settings.run.id, engine="engine-pod-7")
            await transactor.offsets(engine, {place: Commit(5)})
            sandbox = ConsumerGroup.SANDBOX.format(run=settings.run.id)
            await transactor.offsets(sandbox, {calls: Commit.low_water(1, high=5, under_way=2, results=0)})
            await transactor.commit()
        found = await lag_of(log, settings)
        assert {one.role for one in found} == ROLES.keys() - {"trace"}  # nothing is expected of it before it begins
        waits = {(one.group.removeprefix(settings.run.id), *one.place): one.records for one in found if one.records}
        assert waits == {
            (".loader.engine-0", "weight-versions", 0): 4,
            (".loader.engine-pod-7", "weight-versions", 0): 1,
            (".feeder", "weight-versions", 0): 4,
            ("-views", "weight-versions", 0): 4,
            (".archive", "weight-versions", 0): 4,
            (".sandbox", "agent.tool-calls", 1): 1 + 2,
            (".archive", "agent.tool-calls", 1): 6,
        }
    finally:
        await log.close()


async def test_a_marker_behind_the_last_record_is_nobodys_lag(live_settings: Settings) -> None:
    log = KafkaLog(live_settings.kafka.bootstrap, prefix=live_settings.kafka.prefix)
    place = Partition("train-steps", 0)
    try:
        async with log.transactor("test") as transactor:
            for value in (b"1", b"2"):
                await transactor.begin()
                await transactor.send(place.topic, place.number, b"run", value)
                group = ConsumerGroup.VIEWS.format(run=live_settings.run.id)
                await transactor.offsets(group, {place: Commit(1 if value == b"1" else 3)})
                await transactor.commit()
                ends = {place: 0}
                async with asyncio.timeout(PATIENCE_S):  # the broker writes markers after it has answered the commit
                    while ends[place] < (2 if value == b"1" else 4):
                        await asyncio.sleep(0.02)
                        ends = await log.end_offsets([place])
                waits = [one.records for one in await lag_of(log, live_settings) if one.group == group]
                assert sum(waits) == 0
    finally:
        await log.close()


def test_the_settings_of_servers_that_it_does_not_need_may_be_absent(live_settings: Settings) -> None:
    from turnlog.infra.run_folder import kafka_of

    alone = dataclasses.replace(live_settings, registry=RegistrySettings(), store=StoreSettings())
    assert kafka_of(alone) == live_settings.kafka
