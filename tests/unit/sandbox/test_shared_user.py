"""Where calls run as the worker's own user, their number of processes is bounded by the kernel all the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator

import pytest

from turnlog.infra.sandbox_root import cache_directory
from turnlog.sandbox_workers.backends.bubblewrap import init_command
from turnlog.sandbox_workers.backends.connection import InitSandbox, own_account, start_sandbox
from turnlog.sandbox_workers.backends.roots import init_program, interpreter
from turnlog.sandbox_workers.inside.child import SPARE_PIDS
from turnlog.sandbox_workers.inside.processes import processes_of
from turnlog.sandbox_workers.protocol import Command, Kind, SandboxUnavailable
from turnlog.schemas.events import SandboxLimits, ToolStatus

LIMITS = SandboxLimits(pids=8, wall_s=20.0)
FORKS = "import os, time\nfor _ in range(6): os.fork()\ntime.sleep(15)"
"""Asks for 64 processes: more than the limit, fewer than the room for others, so that looking on must end it."""


def python(source: str) -> Command:
    """Code in a fresh interpreter."""
    return Command(kind=Kind.python, source=source)


@pytest.fixture
async def sandbox() -> AsyncIterator[InitSandbox]:
    """A plain sandbox that takes its user for one whom it shares with others."""
    cache = cache_directory()
    found, init = interpreter(cache), init_program(cache)
    account = own_account(260_000, 0)
    binary = str(found.root / "bin" / found.python)
    with tempfile.TemporaryDirectory(prefix="turnlog-sandbox-", ignore_cleanup_errors=True) as folder:
        if account.uid is not None:
            os.chown(folder, account.uid, account.uid)
        sandbox = await start_sandbox(
            lambda control: init_command([binary], control, "plain", "shared", "none", folder),
            account=account,
            env={"PYTHONPATH": str(init), "LD_LIBRARY_PATH": str(found.root / "lib")},
            exit_s=2.0,
        )
        yield sandbox
        await sandbox.close()


async def test_the_kernel_bounds_the_processes_of_a_shared_user(sandbox: InitSandbox) -> None:
    source = "import os, resource; print(os.getuid(), resource.getrlimit(resource.RLIMIT_NPROC)[1])"
    uid, bound = map(int, (await sandbox.exec(python(source), LIMITS)).output.split())
    assert bound <= LIMITS.pids + 2 + SPARE_PIDS + processes_of(uid) + 64


async def test_a_tree_that_grows_beyond_its_limit_is_ended(sandbox: InitSandbox) -> None:
    answer = await sandbox.exec(python(FORKS), LIMITS)
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "pids")
    assert await sandbox.reset()


async def test_an_init_refuses_to_empty_what_is_not_its_own() -> None:
    cache = cache_directory()
    found, init = interpreter(cache), init_program(cache)
    binary = str(found.root / "bin" / found.python)
    with pytest.raises(SandboxUnavailable, match="belong to somebody else"):
        await start_sandbox(
            lambda control: init_command([binary], control, "plain", "own", "none", "/"),
            account=own_account(260_000, 0),
            env={"PYTHONPATH": str(init), "LD_LIBRARY_PATH": str(found.root / "lib")},
        )
