"""Verbs that make the topics, with the ACLs that `turnlog topics acls` prints for them: `topics apply`, and `turnlog
run` with its feeder, which `run close` ends. Those of all others: tests/integration/test_acls.py."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.test_acls import (
    APART,
    check_used,
    done,
    environment,
    garbage,
    live_settings,
    of,
    process,
)
from tests.integration.test_run_life import requested
from tests.integration.test_runner_live import GROUP, publish_first_weights, read
from tests.secured import SUPER, Secured
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import load_configuration
from turnlog.infra.run_folder import SETTINGS, write_settings
from turnlog.infra.topics_admin import acls
from turnlog.names import ExitStatus
from turnlog.schemas import topics
from turnlog.schemas.events import DeadLetter
from turnlog.settings import Settings

__all__ = ["live_settings"]
pytestmark = pytest.mark.kafka


async def test_the_loop_makes_feeds_watches_and_obeys_with_its_printed_acls_and_needs_each_of_them(
    secured: Secured, live_settings: Settings, tmp_path: Path
) -> None:
    settings = dataclasses.replace(live_settings, feeder=dataclasses.replace(live_settings.feeder, group_size=GROUP))
    applied = dataclasses.replace(
        settings, kafka=dataclasses.replace(settings.kafka, prefix=f"{settings.kafka.prefix}apply-")
    )
    printed = {role: acls(applied if role == "apply" else settings, role) for role in APART}
    secured.grant(acl for found in (*printed.values(), acls(settings, "pause")) for acl in found)
    since, folder = secured.log.stat().st_size, Path(settings.run.directory)
    registry = environment(SUPER, secured, settings)
    async with process("registry", "registry", f"{settings.registry.url}/subjects", registry, tmp_path):
        await done("apply", "topics apply", secured, applied, {})
        write_settings(folder, of("run", secured, settings))
        async with looping(folder) as first:
            await fed(secured, settings)
            first.send_signal(signal.SIGINT)
            assert await first.wait() == ExitStatus.INTERRUPTED
        async with looping(folder) as second:
            async with open_role("test", of(SUPER, secured, settings)) as test:
                await garbage(test, topics.STEPS.name)
                assert (await read(test, DeadLetter, 1))[0].role == "feeder"
            await done("pause", "run close", secured, settings, {})
            assert await second.wait() == ExitStatus.FAILED
    assert "RunClosed" in (folder / "run.log").read_text()
    check_used(secured, since, printed, settings)


@contextlib.asynccontextmanager
async def looping(folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """`turnlog run` of the run in that folder."""
    argv = ("-m", "turnlog.cli", "--settings", str(folder / SETTINGS), "run")
    with (folder / "run.log").open("a") as log:
        loop = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=log, stderr=log)
    try:
        yield loop
    finally:
        if loop.returncode is None:
            loop.kill()
        await loop.wait()


async def fed(secured: Secured, settings: Settings) -> None:
    """Let the run's feeder find weights that are served, and wait for what it asks for."""
    async with open_role("test", of(SUPER, secured, settings)) as test, asyncio.timeout(120):
        while topics.RUNS.name not in await test.log.topics():  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # nothing tells of a topic that is made
        assert await load_configuration(test) is not None
        await publish_first_weights(test)
        await requested(test)
