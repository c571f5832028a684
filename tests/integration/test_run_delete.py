"""`turnlog run delete` as people run it: a process, a real log and a real store that other runs use, too."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path
from uuid import uuid4

import pytest

from tests.integration.test_run_life import turnlog
from turnlog.infra.blobs import Owner
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Commit, Partition
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import claim_log, configure
from turnlog.infra.run_folder import write_settings
from turnlog.infra.topics_admin import apply
from turnlog.schemas import topics
from turnlog.settings import RunSettings, Settings

pytestmark = pytest.mark.kafka
TASKS = Partition(topics.TASKS.name, 0)


@pytest.fixture
async def run(live_settings: Settings, tmp_path: Path) -> Settings:
    """Configured, with a blob, what a group has committed, and a directory; the bucket is its own."""
    settings = dataclasses.replace(
        live_settings,
        store=dataclasses.replace(live_settings.store, bucket=f"delete-{uuid4().hex[:8]}"),
        run=RunSettings(id=live_settings.run.id, directory=str(tmp_path / live_settings.run.id)),
    )
    (directory := tmp_path / settings.run.id).mkdir()
    write_settings(directory, settings)
    async with open_role("test", settings) as role:
        await configure(role)
        async with claim_log(role):
            await role.blobs.put(b"a blob")
        async with role.log.transactor(f"{settings.run.id}.assembler.0") as transactor:
            await transactor.begin()
            await transactor.offsets(f"{settings.run.id}.assembler", {TASKS: Commit(0)})
            await transactor.commit()
    return settings


async def test_a_run_is_shown_and_goes_for_good_and_its_neighbour_stays(run: Settings, tmp_path: Path) -> None:
    name, prefix = run.run.id, run.kafka.prefix
    beside = dataclasses.replace(run, kafka=dataclasses.replace(run.kafka, prefix=f"{prefix}b."))
    log, neighbour = KafkaLog.of(run.kafka), KafkaLog.of(beside.kafka)
    try:
        await apply(neighbour, beside)
        status, said, why = await turnlog(run, "run", "delete", name, "--json")
        assert status == 0, why
        items = {(item["what"], item["name"]): item for item in json.loads(said)["items"]}
        kept = items["topic", f"{prefix}runs"]
        assert kept["count"] == 2, "RunConfigured and RunPlanned"
        assert kept["bytes"] > 0
        assert ("group", f"{prefix}{name}.assembler") in items
        assert f"transactional ids {prefix}{name}.assembler.0: Kafka expires" in said
        folder = Owner(await log.cluster(), prefix, name).folder
        assert items["blobs", f"{folder}/"]["bytes"] == len(b"a blob")
        status, _, why = await turnlog(run, "run", "delete", name, "--delete")
        assert (status, "NotConfirmed: there is no terminal to ask for the run's id on" in why) == (2, True)
        status, said, why = await turnlog(run, "run", "delete", name, "--delete", "--yes")
        assert (status, said.splitlines()[-1:]) == (0, [f"run {name!r} was deleted"]), why
        assert set(await neighbour.topics()) == {topic.name for topic in topics.CATALOGUE}
        assert {one for one in await log.topics() if not one.startswith("b.")} == set()
        assert f"{name}.assembler" not in await log.groups()
        assert await asyncio.to_thread(os.listdir, tmp_path) == []
        status, said, _ = await turnlog(run, "run", "delete", name, "--delete", "--yes")
        assert (status, said.splitlines()[-1]) == (0, f"nothing of run {name!r} was found")
    finally:
        await log.close()
        await neighbour.close()


async def test_a_run_with_a_member_at_work_is_refused_by_name(run: Settings) -> None:
    held = asyncio.Event()

    async def assigned(_: frozenset[int]) -> None:
        held.set()

    async def none(_: frozenset[int]) -> None: ...

    group = f"{run.run.id}.runner"
    async with (
        open_role("test", run) as role,
        role.log.group_reader(group, [TASKS.topic], assigned=assigned, revoked=none, instance="runner-7") as member,
    ):
        while not held.is_set():
            await member.poll(timeout_s=0.2)
        deleting = asyncio.ensure_future(turnlog(run, "run", "delete", run.run.id, "--delete", "--yes"))
        while not deleting.done():
            await member.poll(timeout_s=0.2)
        status, _, why = await deleting
        assert status == 2
        assert f"RunIsUp: group {run.kafka.prefix}{group} has 1 members" in why
        assert topics.RUNS.name in await role.log.topics()
