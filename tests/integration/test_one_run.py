"""One run per cluster and prefix, on a real Kafka: whoever comes second is refused by name, whatever role it is."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys

import pytest

from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import OtherRun, configure
from turnlog.settings import RunSettings, Settings

pytestmark = pytest.mark.kafka
ROLES = ("assembler", "batcher", "gateway", "runner", "sandbox", "loader", "archive", "views")


async def refused(settings: Settings, verb: str) -> str:
    """The last line of a role that is started for another run."""
    env = {
        **os.environ,
        "TURNLOG_RUN_ID": "another",
        "TURNLOG_RUN_DIRECTORY": settings.run.directory,
        "TURNLOG_KAFKA_BOOTSTRAP": settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": settings.store.endpoint,
        "TURNLOG_STORE_ACCESS_KEY": settings.store.access_key,
        "TURNLOG_STORE_SECRET_KEY": settings.store.secret_key,
        "TURNLOG_ENGINE_URLS": settings.engine.urls[0],
    }
    role = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "turnlog.cli", "role", verb, env=env, stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(role.communicate(), 200)
    assert role.returncode == 2, said.decode()
    return said.decode().strip().splitlines()[-1]


async def test_no_role_starts_on_the_log_of_another_run(live_settings: Settings) -> None:
    async with open_role("test", live_settings) as role:
        await configure(role)
    other = dataclasses.replace(live_settings, run=RunSettings(id="another"))
    async with open_role("test", other) as role:
        with pytest.raises(OtherRun):
            await configure(role)
    said = await asyncio.gather(*(refused(live_settings, verb) for verb in ROLES))
    for verb, line in zip(ROLES, said, strict=True):
        assert line.startswith(f"turnlog {verb}: OtherRun: runs of "), line
        assert f"prefix {live_settings.kafka.prefix!r}, belongs to run {live_settings.run.id!r}" in line
        assert "this is run 'another'" in line
        assert "[kafka] prefix" in line
