"""The backend in memory keeps what it claims of the contract, so that tests over it mean something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.fakes.memory_backend import Memory, MemorySandbox
from turnlog.infra.environments.workspaces import FileEntry, FileKind
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.protocol import (
    Command,
    Execution,
    FileMissing,
    FileRefused,
    Kind,
    OutputStream,
    Provider,
    QuotaExceeded,
    SandboxDied,
    Shape,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

DISK = 100


@pytest.fixture
async def provider() -> Provider:
    """Opened as a worker opens one."""
    return await Memory.open(SandboxSettings())


@pytest.fixture
async def sandbox(provider: Memory) -> AsyncIterator[MemorySandbox]:
    """A new one."""
    sandbox = await provider.start(0, Shape(disk_bytes=DISK))
    yield sandbox
    await sandbox.close()
    assert provider.alive == set()


async def shell(sandbox: MemorySandbox, source: str, **limits: float) -> Execution:
    """Run it."""
    return await sandbox.exec(Command(kind=Kind.shell, source=source), SandboxLimits(**limits))  # type: ignore[arg-type]


async def test_commands_answer_as_their_namesakes_do(sandbox: MemorySandbox) -> None:
    await sandbox.write("a/b", b"text")
    seen: list[tuple[OutputStream, bytes]] = []
    command = Command(kind=Kind.program, argv=("cat", "a/b"))
    answer = await sandbox.exec(command, SandboxLimits(), on_output=lambda stream, chunk: seen.append((stream, chunk)))
    assert (answer.status, answer.output, seen) == (ToolStatus.ok, b"text", [(OutputStream.stdout, b"text")])
    assert (await shell(sandbox, "cat nothing")).exit_code == 1
    assert (await shell(sandbox, "nonsense")).exit_code == 127
    assert (await shell(sandbox, "ls")).output == b"a\na/b\n"


async def test_limits_and_cancelling_are_typed(sandbox: MemorySandbox) -> None:
    late = await shell(sandbox, "sleep 60", wall_s=0.01)
    long = await shell(sandbox, "echo 123456789", output_bytes=4)
    assert (late.status, late.reason) == (ToolStatus.timeout, "wall_s")
    assert (long.status, long.reason, long.output) == (ToolStatus.resource_limit, "output_bytes", b"1234")
    running = asyncio.create_task(shell(sandbox, "sleep 60"))
    await asyncio.sleep(0)
    await sandbox.cancel()
    assert (await running).status is ToolStatus.cancelled


async def test_files_go_in_and_out_within_the_quota(sandbox: MemorySandbox) -> None:
    await sandbox.write("kept", b"1")
    with pytest.raises(QuotaExceeded):
        await sandbox.write("big", b"x" * DISK)
    with pytest.raises(FileMissing):
        await sandbox.read("big", most=10)
    for path in ("/etc/passwd", "../x", "a/../b", "", "a\0"):
        with pytest.raises(FileRefused):
            await sandbox.write(path, b"")
    entries = await sandbox.index()
    contents = await sandbox.read_files([entry.path for entry in entries], most=10)
    assert await sandbox.reset()
    assert await sandbox.index() == ()
    await sandbox.restore(entries, dict(zip(("kept",), contents, strict=True)))
    assert await sandbox.index() == entries
    too_big = FileEntry(path="big", kind=FileKind.file, mode=0o644, size=2 * DISK)
    with pytest.raises(QuotaExceeded):
        await sandbox.restore([too_big], {"big": b"x" * 2 * DISK})


async def test_death_and_cancellation_end_the_sandbox(provider: Memory) -> None:
    dead = await provider.start(0, Shape(disk_bytes=DISK))
    running = asyncio.create_task(shell(dead, "sleep 60"))
    await asyncio.sleep(0)
    dead.die()
    with pytest.raises(SandboxDied):
        await running
    assert (await dead.healthy(), await dead.reset()) == (False, False)
    cut = await provider.start(1, Shape(disk_bytes=DISK))
    running = asyncio.create_task(shell(cut, "sleep 60"))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(SandboxDied):
        await cut.index()
