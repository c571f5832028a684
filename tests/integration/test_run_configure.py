"""`turnlog run configure` and a feeder that runs by itself, as processes on real servers: what a cluster does."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import Awaitable, Callable
from uuid import uuid4

import pytest

from tests.addresses import variables
from turnlog.infra.blobs import Owner, key
from turnlog.infra.history import all_events
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import Configured, claim_log, recorded_configuration
from turnlog.infra.topics_admin import check, specs
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas.events import (
    EngineWeightsLoaded,
    Event,
    RolloutRequested,
    RunConfigured,
    RunPlanned,
    WeightVersionPublished,
)
from turnlog.schemas.topics import RUNS, TASKS
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka
PATIENCE_S = 60.0


@pytest.fixture
def fresh(live_settings: Settings) -> Settings:
    """A prefix on which there is nothing yet."""
    prefix = f"t{uuid4().hex[:8]}-"
    return dataclasses.replace(live_settings, kafka=dataclasses.replace(live_settings.kafka, prefix=prefix))


async def started(settings: Settings, *verb: str, **more: str) -> asyncio.subprocess.Process:
    env = {
        **variables(settings),
        "TURNLOG_FEEDER_DRAWS": "3",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "turnlog.cli", *verb, env={**os.environ, **env, **more},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def done(settings: Settings, *verb: str, **more: str) -> tuple[int | None, str, str]:
    """Exit status, what it said, and the last line of what it said aside."""
    process = await started(settings, *verb, **more)
    try:
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode(), err.decode().strip().rpartition("\n")[2]


async def test_a_run_is_configured_once_from_nothing_and_a_second_call_says_so(fresh: Settings) -> None:
    status, said, _ = await done(fresh, "run", "configure")
    assert status == 0
    assert f"created {len(specs(fresh))} topics: " in said
    assert f"run {fresh.run.id!r} is configured: fold version {FOLD_VERSION}, settings " in said
    assert "draws 3\n" in said
    assert await done(fresh, "run", "configure") == (
        0, f"nothing to do: run {fresh.run.id!r} is configured with these settings, and its topics exist\n", "",
    )  # fmt: skip
    async with open_role("test", fresh) as role:
        assert await check(role.log, fresh) == []
        kinds = [type(event) for event in await all_events(role, RUNS)]
        assert kinds == [RunConfigured, RunPlanned]
        owner = Owner(await role.log.cluster(), fresh.kafka.prefix, fresh.run.id)
        assert Owner.parse(owner.name, await role.blobs.get_named(owner.name)) == owner
        async with claim_log(role):
            blob = await role.blobs.put(fresh.run.id.encode())
        assert await role.blobs.names(owner.folder) == [key(blob.sha256, owner.folder)]
        assert await recorded_configuration(role) == Configured.today(fresh), "replay finds the run"


async def test_other_settings_are_refused_key_by_key_and_a_new_plan_is_noted(fresh: Settings) -> None:
    await done(fresh, "run", "configure")
    status, said, why = await done(
        fresh, "run", "configure", TURNLOG_FOLD_ESTIMATOR="rloo", TURNLOG_BATCHER_MAX_LAG="7"
    )
    assert (status, said) == (2, "")
    assert "OtherSettings" in why
    assert "fold.estimator was recorded as 'grpo' and is 'rloo' here" in why
    assert "batcher.max_lag was recorded as 0 and is 7 here" in why
    status, said, why = await done(fresh, "run", "configure", TURNLOG_KAFKA_GROUPS="5")
    assert (status, said) == (2, "")
    assert "TopicMismatch" in why
    assert "kafka.groups" in why
    assert await done(fresh, "run", "configure", TURNLOG_FEEDER_DRAWS="4") == (0, "draws 3 becomes 4\n", "")
    status, _, why = await done(fresh, "run", "configure", TURNLOG_RUN_ID="another")
    assert status == 2
    assert "OtherRun" in why


async def test_a_feeder_by_itself_waits_until_somebody_has_configured_its_run_and_feeds_it(
    live_settings: Settings,
) -> None:
    feeder = await started(live_settings, "role", "feeder")
    try:
        assert feeder.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while b"is not configured: waiting" not in await feeder.stderr.readline():
                assert feeder.returncode is None
        status, said, _ = await done(live_settings, "run", "configure")
        assert status == 0
        assert "created" not in said
        async with open_role("test", live_settings) as role:
            await serve_weights(role.events.append, live_settings)
            requests: list[RolloutRequested] = []
            async with asyncio.timeout(PATIENCE_S), role.log.reader() as reader:
                reader.assign({Partition(TASKS.name, number): 0 for number in range(live_settings.kafka.rollouts)})
                while len(requests) < live_settings.feeder.group_size:
                    requests += [await role.events.decode(record) for record in await reader.poll()]
            assert {request.run_id for request in requests} == {live_settings.run.id}
            assert await recorded_configuration(role) == Configured.today(live_settings)
        feeder.terminate()
        assert await asyncio.wait_for(feeder.wait(), PATIENCE_S) == 0
    finally:
        if feeder.returncode is None:
            feeder.kill()
        await feeder.communicate()


async def serve_weights(append: Callable[[Event], Awaitable[object]], settings: Settings) -> None:
    """Version 0 is published, and an engine has it."""
    published = WeightVersionPublished(
        event_id="w0", run_id=settings.run.id, version=0, step=0, batch_index=-1, incarnation=0, kind="full",
        base_version=None, files=(), dtype="float32", checksums={}, checkpoint=None,
    )  # fmt: skip
    await append(published)
    loaded = EngineWeightsLoaded(
        event_id="e0", run_id=settings.run.id, engine_id="engine-0", url="http://engine", state="serving", version=0,
        superseded=(), seconds={},
    )  # fmt: skip
    await append(loaded)
