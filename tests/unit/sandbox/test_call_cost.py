"""What a call in a new sandbox makes the kernel do: processes, and page faults in proportion to a bare fork's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.init_wire import running_after
from turnlog.sandbox_workers.protocol import Command, Kind, Shape
from turnlog.schemas.events import SandboxLimits

DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=256 << 20, pids=16, disk_bytes=DISK)
LEASES = 20
FAULTS_PER_BARE_FORK = """
import ctypes, gc, os, resource
import turnlog.sandbox_workers.inside.zygote
def faults():
    return sum(resource.getrusage(who).ru_minflt for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
fork, leave = ctypes.PyDLL(None).fork, ctypes.PyDLL(None)._exit
gc.collect()
gc.freeze()
for number in range(120):
    if number == 20:
        before = faults()
    pid = fork()
    if not pid:
        leave(0)
    os.waitpid(pid, 0)
print((faults() - before) / 100)
"""
HOOKS = """
import os
found = []
os.register_at_fork = lambda **hooks: found.extend(hook.__qualname__ for hook in hooks.values())
import turnlog.sandbox_workers.inside.zygote
print(*sorted(found))
"""


@pytest.fixture
async def sandbox() -> AsyncIterator[InitSandbox]:
    """A new one."""
    provider = await Bubblewrap.open(SandboxSettings(first_uid=228_200))
    sandbox = await provider.start(0, Shape(disk_bytes=DISK))
    yield sandbox
    await sandbox.close()


async def lease(sandbox: InitSandbox, source: str = "print(3 + 5)") -> str:
    """Output of one call, after which the sandbox is replaced."""
    answer = await sandbox.exec(Command(kind=Kind.python, source=source), LIMITS)
    assert await sandbox.reset()
    return answer.output.decode()


def processes(sandbox: InitSandbox) -> tuple[psutil.Process, psutil.Process]:
    """The slot's zygote and its init."""
    (zygote,) = psutil.Process(sandbox.process.pid).children()
    (init,) = zygote.children()
    return zygote, init


def number_below_the_zygote(init: psutil.Process) -> int:
    """The init's pid in the zygote's pid namespace, where every process of the slot gets the next one."""
    status = Path(f"/proc/{init.pid}/status").read_text()
    numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
    return int(numbers[-2])


def faults(zygote: psutil.Process) -> int:
    """Page faults of a zygote and of all that it has waited for (proc_pid_stat(5))."""
    fields = Path(f"/proc/{zygote.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]) + int(fields[8])


def python(source: str) -> str:
    """Output of a new interpreter."""
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout


async def test_a_call_in_a_new_sandbox_takes_two_processes(sandbox: InitSandbox) -> None:
    before = number_below_the_zygote(processes(sandbox)[1])
    for _ in range(LEASES):
        assert await lease(sandbox) == "8\n"
    assert number_below_the_zygote(processes(sandbox)[1]) - before == 2 * LEASES, "an init, and the call"


async def test_a_call_copies_few_pages(sandbox: InitSandbox) -> None:
    zygote, _ = processes(sandbox)
    await lease(sandbox)
    before = faults(zygote)
    for _ in range(LEASES):
        await lease(sandbox)
    a_call, a_fork = (faults(zygote) - before) / LEASES, float(python(FAULTS_PER_BARE_FORK))
    assert a_call < 18 * a_fork, "23 times as many before inits were rehearsed and calls forked without hooks"


def test_no_module_of_an_init_has_a_hook_that_a_call_would_miss() -> None:
    assert python(HOOKS).split() == ["Random.seed", "_after_fork"], "see child.repair"


async def test_a_call_finds_what_the_hooks_of_a_fork_would_have_left(sandbox: InitSandbox) -> None:
    source = """
import os, random, threading
print(random.random(), threading.main_thread().native_id == os.getpid() == threading.get_native_id())
"""
    said = [(await lease(sandbox, source)).split() for _ in range(2)]
    assert said[0][0] != said[1][0], "no two calls draw the same numbers"
    assert [right for _, right in said] == ["True", "True"]


async def test_work_that_is_not_due_yet_takes_no_asyncio_task() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    tasks = asyncio.all_tasks()
    async with running_after(3600.0, work):
        assert asyncio.all_tasks() == tasks
    async with running_after(0.0, work):
        await begun.wait()
        assert not ended.is_set()
    assert ended.is_set()


async def test_the_loader_settings_of_an_init_are_in_no_environment(sandbox: InitSandbox) -> None:
    assert await lease(sandbox, "import os; print('LD_BIND_NOW' in os.environ)") == "False\n"
    answer = await sandbox.exec(Command(kind=Kind.shell, source="echo ${LD_BIND_NOW-none}"), LIMITS)
    assert answer.output == b"none\n"
