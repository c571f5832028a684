"""The pool: what is reused, what is replaced, who waits, and what happens where bubblewrap cannot run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers import pool as pools
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.pool import Pool
from turnlog.sandbox_workers.protocol import NoBubblewrap, Sandbox, SandboxUnavailable, WorkspaceLost
from turnlog.schemas.events import SandboxLimits, ToolStatus

FIRST_UID = 230_000
DISK = 8 << 20
LIMITS = SandboxLimits(wall_s=10.0, disk_bytes=DISK)


class Counting:
    """A backend that counts its sandboxes, and may refuse to start more."""

    name = "counting"

    def __init__(self, real: Subprocess) -> None:
        self.real = real
        self.started: list[int] = []
        self.refuses = False

    async def start(self, slot: int, disk_bytes: int) -> InitSandbox:
        """See Provider."""
        if self.refuses:
            raise SandboxUnavailable("no more")
        self.started.append(slot)
        return await self.real.start(slot, disk_bytes)


@pytest.fixture
async def provider() -> Counting:
    """Over the subprocess backend: the pool does not care."""
    return Counting(await Subprocess.open(first_uid=FIRST_UID))


@pytest.fixture
async def pool(provider: Counting) -> AsyncIterator[Pool]:
    """Two slots, one of them warm."""
    pool = Pool(provider, slots=2)
    await pool.warm(1, DISK)
    yield pool
    await pool.close()


def lease(pool: Pool, *, session: str | None = None, begun: bool = False, fresh: bool = False) -> pools.Lease:
    """With this file's disk size."""
    return pool.lease(disk_bytes=DISK, session=session, begun=begun, fresh=fresh)


async def files(sandbox: Sandbox) -> bytes:
    """What is in the workspace."""
    return (await sandbox.run("shell", "ls -A", LIMITS)).output


async def touch(sandbox: Sandbox, name: str) -> None:
    """Leave a file."""
    assert (await sandbox.run("shell", f"touch {name}", LIMITS)).status is ToolStatus.ok


async def test_the_next_lease_gets_the_warm_sandbox_empty(pool: Pool, provider: Counting) -> None:
    for _ in range(3):
        async with lease(pool) as sandbox:
            assert await files(sandbox) == b""
            await touch(sandbox, "left")
    assert provider.started == [0]


async def test_a_fresh_lease_gets_a_sandbox_that_never_ran(pool: Pool, provider: Counting) -> None:
    async with lease(pool, fresh=True) as sandbox:
        assert await files(sandbox) == b""
    assert provider.started == [0, 0]


async def test_another_disk_size_needs_another_sandbox(pool: Pool, provider: Counting) -> None:
    async with pool.lease(disk_bytes=2 * DISK, session=None, begun=False, fresh=False):
        pass
    assert len(provider.started) == 2


async def test_a_session_finds_its_files_again_and_nobody_else_does(pool: Pool) -> None:
    async with lease(pool, session="s") as sandbox:
        await touch(sandbox, "mine")
    async with lease(pool, session="other") as sandbox:
        assert await files(sandbox) == b""
    async with lease(pool, session="s", begun=True) as sandbox:
        assert await files(sandbox) == b"mine\n"


async def test_a_session_that_made_room_has_lost_its_workspace(pool: Pool) -> None:
    for session in ("a", "b", "c"):
        async with lease(pool, session=session) as sandbox:
            assert await files(sandbox) == b""
            await touch(sandbox, session)
    with pytest.raises(WorkspaceLost, match="session a"):
        async with lease(pool, session="a", begun=True):
            pass
    async with lease(pool, session="b", begun=True) as sandbox:
        assert await files(sandbox) == b"b\n"


async def test_a_lease_that_ends_in_an_error_is_not_reused(pool: Pool, provider: Counting) -> None:
    with pytest.raises(ZeroDivisionError):
        async with lease(pool):
            raise ZeroDivisionError
    async with lease(pool) as sandbox:
        assert await files(sandbox) == b""
    assert provider.started == [0, 0] or provider.started == [0, 1]


async def test_a_sandbox_that_died_between_calls_is_replaced_after_the_call_that_meets_it(
    pool: Pool, provider: Counting
) -> None:
    async with lease(pool) as sandbox:
        assert isinstance(sandbox, InitSandbox)
        sandbox.process.kill()
        await sandbox.process.wait()
    async with lease(pool) as sandbox:
        assert await files(sandbox) == b""
    assert provider.started == [0, 0]


async def test_callers_wait_for_a_slot_and_all_get_one(pool: Pool) -> None:
    inside = most = 0

    async def one() -> bytes:
        nonlocal inside, most
        async with lease(pool) as sandbox:
            inside += 1
            most = max(most, inside)
            answer = await sandbox.run("python", "print(3 + 5)", LIMITS)
            inside -= 1
            return answer.output

    assert await asyncio.gather(*(one() for _ in range(20))) == [b"8\n"] * 20
    assert most == 2


async def test_a_cancelled_caller_leaves_its_slot_to_others(pool: Pool) -> None:
    entered = asyncio.Event()

    async def endless() -> None:
        async with lease(pool) as sandbox:
            entered.set()
            await sandbox.run("shell", "sleep 60", LIMITS)

    callers = [asyncio.create_task(endless()) for _ in range(4)]
    await entered.wait()
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    async with lease(pool) as first, lease(pool) as second:
        assert (await files(first), await files(second)) == (b"", b"")


async def test_a_slot_that_cannot_start_is_free_for_the_next_try(provider: Counting) -> None:
    pool = Pool(provider, slots=1)
    provider.refuses = True
    with pytest.raises(SandboxUnavailable):
        async with lease(pool):
            pass
    provider.refuses = False
    async with lease(pool) as sandbox:
        assert await files(sandbox) == b""
    await pool.close()


async def test_no_slots_is_refused(provider: Counting) -> None:
    with pytest.raises(ValueError, match="slots"):
        Pool(provider, slots=0)


def broken_bwrap(folder: Path) -> Path:
    """A bwrap that fails as one does where user namespaces are off."""
    script = folder / "bwrap"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo bubblewrap 0.11.0 && exit\n"
        "echo 'bwrap: No permissions to create new namespace' >&2\nexit 1\n"
    )
    for path in (folder, *folder.parents):
        if path.owner() == "root" and path != path.parent and path.stat().st_mode & 0o001 == 0:
            path.chmod(path.stat().st_mode | 0o001)  # pytest's folders are private; the slot's user must get there
        if path.name.startswith("pytest-of-"):
            break
    script.chmod(0o755)
    return script


async def test_no_bubblewrap_names_the_setting_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoBubblewrap) as caught:
        await Bubblewrap.open(first_uid=FIRST_UID, bwrap=broken_bwrap(tmp_path))
    for part in ("No permissions to create new namespace", "[sandbox] backend", "user.max_user_namespaces"):
        assert part in str(caught.value)


async def test_a_missing_bwrap_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoBubblewrap, match="nowhere"):
        await Bubblewrap.open(first_uid=FIRST_UID, bwrap=tmp_path / "nowhere")


async def test_without_bubblewrap_the_pool_falls_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", f"{broken_bwrap(tmp_path).parent}:/usr/bin:/bin")
    settings = SandboxSettings(slots=1, prewarm=1, first_uid=FIRST_UID, disk_bytes=DISK)
    with caplog.at_level(logging.WARNING):
        async with pools.opened(settings) as pool:
            assert (pool.provider.name, pool.fallback) == ("subprocess", True)
            async with lease(pool) as sandbox:
                assert (await sandbox.run("python", "print(3 + 5)", LIMITS)).output == b"8\n"
    assert "WITHOUT ISOLATION" in caplog.text
    assert "[sandbox] backend" in caplog.text


async def test_subprocess_by_choice_is_no_fallback() -> None:
    settings = SandboxSettings(backend="subprocess", slots=1, prewarm=0, first_uid=FIRST_UID)
    async with pools.opened(settings) as pool:
        assert (pool.provider.name, pool.fallback) == ("subprocess", False)
