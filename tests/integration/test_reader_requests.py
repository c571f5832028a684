"""Requests to the broker of roles that only watch: they follow from the time that passes, not from the records."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.addresses import variables
from tests.integration.test_views_live import finished, seen, started
from turnlog.infra.archive import ArchiveIndex
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.kafka.readers import FETCH_WAIT_MS
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.names import ConsumerGroup
from turnlog.schemas.topics import SESSIONS
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka
PROBE = Path(__file__).parents[2] / "benchmarks/cost_probe"
"""Counts the requests of a process between two signals."""
BEGIN, END = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4
COUNT = 100
"""Sessions, each of two records."""
READERS = 2
"""Readers of a watching process: one of its topics, one of `runs`."""


class WatchingProcess:
    """A role's process and its counts."""

    def __init__(self, settings: Settings, folder: Path, role: str, **more: str) -> None:
        self._folder = folder
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        own = {"COST_PROBE": str(folder), "PYTHONPATH": str(PROBE), "TURNLOG_INSTANCE": f"{role}-0"}
        env = os.environ | variables(settings) | own | {"TURNLOG_HEALTH_PORT": self.url.rpartition(":")[2]} | more
        with (folder / "log").open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "turnlog.cli", "role", role], env=env, stdout=out, stderr=out
            )

    async def ready(self) -> None:
        """Wait until the role works."""
        async with httpx.AsyncClient(base_url=self.url, timeout=2) as http, asyncio.timeout(90):
            while True:
                assert self.process.poll() is None, (self._folder / "log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/readyz")).is_success:
                        return
                await asyncio.sleep(0.1)  # another process starts

    @contextlib.asynccontextmanager
    async def counted(self) -> AsyncIterator[dict[str, float]]:
        """Yield request -> how many of it the process sent during the block, and `seconds` of the block; known at its
        end."""
        counts: dict[str, float] = {}
        self.process.send_signal(BEGIN)
        began = time.monotonic()
        yield counts
        self.process.send_signal(END)
        counts["seconds"] = time.monotonic() - began
        file = self._folder / f"{self.process.pid}.json"
        async with asyncio.timeout(30):
            while not file.exists():  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.05)
        counts |= {name: count for name, (count, *_) in json.loads(file.read_text())["requests"].items()}

    def stop(self) -> int:
        """End the process, and return its exit status."""
        self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def watching(settings: Settings, folder: Path, role: str, **more: str) -> Iterator[WatchingProcess]:
    """A process of a role, which ends by itself as it should."""
    folder.mkdir()
    process = WatchingProcess(settings, folder, role, **more)
    try:
        yield process
        assert process.stop() == 0
    finally:
        process.process.kill()
        process.process.wait(60)


async def write_slowly(role: Role) -> None:
    """Write sessions that start and finish, one after another."""
    for number in range(COUNT):
        start = started(role.settings.run.id, number)
        await role.events.append(start)
        await role.events.append(finished(start))
        await asyncio.sleep(0.02)  # an impatient fetch returns before the next session starts


async def test_the_views_fetch_and_write_changelogs_a_few_times_per_second(
    live_settings: Settings, tmp_path: Path
) -> None:
    async with open_role("test", live_settings) as role:
        with watching(live_settings, tmp_path / "views", "views") as views:
            await views.ready()
            async with views.counted() as requests:
                await write_slowly(role)
                await seen(views.url, {"completed": COUNT}, views.process)
                async with asyncio.timeout(60):
                    while not await committed(role):  # noqa: ASYNC110 - another process commits
                        await asyncio.sleep(0.1)
    assert 0 < requests["Produce"] < COUNT / 4, requests  # 2 per session, if each change is sent by itself
    assert_few_fetches(requests)


async def test_the_archiver_fetches_a_few_times_per_second(live_settings: Settings, tmp_path: Path) -> None:
    async with open_role("test", live_settings) as role:
        with watching(live_settings, tmp_path / "archive", "archive", TURNLOG_ARCHIVE_MAX_AGE_S="1") as archive:
            await archive.ready()
            async with archive.counted() as requests:
                await write_slowly(role)
                async with asyncio.timeout(60):
                    while not await archived(role):  # noqa: ASYNC110 - another process writes
                        await asyncio.sleep(0.1)
    assert_few_fetches(requests)


def assert_few_fetches(requests: dict[str, float]) -> None:
    """Check that there are far fewer than 2 per session, apart from those that bring nothing: at most one per reader
    in FETCH_WAIT_MS."""
    idle = READERS * requests["seconds"] * 1000 / FETCH_WAIT_MS
    assert 0 < requests["Fetch"] < COUNT / 4 + idle, requests


async def ends(role: Role) -> dict[Partition, int]:
    """End offsets of agent.sessions."""
    return await role.log.end_offsets(
        [Partition(SESSIONS.name, number) for number in range(role.settings.kafka.groups)]
    )


async def committed(role: Role) -> bool:
    """Whether the views have committed every record, and so have written what follows from it to their changelogs."""
    wanted = await ends(role)
    commits = await role.log.commits(ConsumerGroup.VIEWS.format(run=role.settings.run.id), list(wanted))
    return all(place in commits and commits[place].offset == end for place, end in wanted.items())


async def archived(role: Role) -> bool:
    """Whether the archive has every record."""
    index = ArchiveIndex(role.blobs, role.settings.run.id)
    await index.load()
    return all(index.end(place) == end for place, end in (await ends(role)).items())
