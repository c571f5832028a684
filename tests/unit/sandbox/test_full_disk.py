"""Calls on a disk that others have filled: they say nothing of the agent, wait for room, and run again."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.small_disk import fill, mounted
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import DiskLacksRoom, Shape
from turnlog.schemas.events import SandboxLimits, ToolStatus
from turnlog.schemas.topics import TOOL_RESULTS

WRITES = "head -c 20000000 /dev/zero > big || exit 3; stat -c %s big"


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """Where workspaces lie (tempfile.tempdir); their users may pass."""
    before, folder = tempfile.tempdir, Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        with mounted(folder):
            tempfile.tempdir = str(folder)
            yield folder
    finally:
        tempfile.tempdir = before
        folder.rmdir()


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not there():  # noqa: ASYNC110 - a condition of /readyz is no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("files", ["written", "restored"])
async def test_a_call_on_a_full_disk_waits_for_room_and_is_answered_as_if_there_had_been(
    house: Any, small_disk: Path, files: str
) -> None:
    """Whether the call meets the full disk, or the files of its session that are put there before it."""
    async with house.worker(slots=1) as role:
        first = await house.answer(house.durable("a", WRITES, 0, None))
        assert (first.status, first.output) == (ToolStatus.ok, b"20000000\n")
        if files == "restored":
            await house.answer(house.call("b", session="another"))  # which takes the slot
        filler = fill(small_disk, but=2**22)
        again = WRITES.replace("big", "another")
        await house.ask(house.durable("c", again, 1, first.workspace))
        await until(lambda: "disk" in role.health.waiting)
        assert f"the disk of {small_disk} is full" in role.health.waiting["disk"]
        assert "c" not in [event.call_id for event in await house.read(TOOL_RESULTS.name, type(first))]
        filler.unlink()
        answer = next(one for one in await house.completed(3 if files == "restored" else 2) if one.call_id == "c")
        assert "disk" not in role.health.waiting
    assert (answer.status, answer.reason, answer.output) == (ToolStatus.ok, "", b"20000000\n")


async def test_a_call_that_fills_its_own_share_is_its_own_doing(house: Any, small_disk: Path) -> None:
    """Also where that is all that the disk had."""
    fill(small_disk, but=2**23)
    sandbox = dataclasses.replace(house.settings.sandbox, disk_bytes=2**22)
    house.settings = dataclasses.replace(house.settings, sandbox=sandbox)
    async with house.worker(slots=1):
        answer = await house.answer(house.shell("a", "for n in 1 2 3; do head -c 4000000 /dev/zero > $n; done"))
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "disk_bytes")


async def test_no_sandbox_is_begun_on_a_disk_without_room_for_its_workspace(small_disk: Path, house: Any) -> None:
    fill(small_disk)
    provider = await Subprocess.open(house.settings.sandbox)
    with pytest.raises(DiskLacksRoom, match=rf"the disk of {small_disk} is full: .* 64 MiB are needed"):
        await provider.start(0, Shape(disk_bytes=SandboxLimits().disk_bytes))
    assert os.listdir(small_disk) == ["filler"]
