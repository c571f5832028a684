"""A sandbox to break out of, for a module's attempts together: with the distribution's bwrap and with the wheel's.

An attempt is code that prints what came of it; its words are compared with those that a boundary that holds leaves.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import pytest
import pytest_asyncio

from turnlog.infra.sandbox_root import cache_directory
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap, find
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.protocol import Command, Execution, Kind, OnOutput, Shape
from turnlog.schemas.events import SandboxLimits

FIRST_UID = 220_000
DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=128 << 20, pids=32, disk_bytes=DISK)
SECRET = "the-secret-of-the-worker"
CALLS = (
    "mount", "umount2", "pivot_root", "chroot", "move_mount", "fsopen", "fsmount", "fsconfig", "fspick", "open_tree",
    "mount_setattr", "unshare", "setns", "clone", "clone3", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp",
    "pidfd_open", "pidfd_getfd", "process_madvise", "add_key", "request_key", "keyctl", "bpf", "perf_event_open",
    "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "init_module", "finit_module",
    "delete_module", "kexec_load", "reboot", "swapon", "swapoff", "settimeofday", "clock_settime", "adjtimex",
    "clock_adjtime", "sethostname", "setdomainname", "syslog", "open_by_handle_at", "name_to_handle_at", "personality",
    "quotactl", "acct", "fanotify_init", "shmget", "msgget", "semget", "mq_open", "setuid", "setgid", "setgroups",
    "vhangup", "io_setup", "socket", "mbind", "set_mempolicy", "move_pages", "migrate_pages",
)  # fmt: skip
PRELUDE = """
import ctypes, errno, os, signal, socket, sys
SYS = {numbers}
libc = ctypes.CDLL(None, use_errno=True)

def answer(result):
    print("done" if result >= 0 else errno.errorcode[ctypes.get_errno()], flush=True)

def call(name, *arguments):
    ctypes.set_errno(0)
    given = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    answer(libc.syscall(ctypes.c_long(SYS[name]), *given))

def tried(act, *arguments):
    try:
        act(*arguments)
    except OSError as error:
        print(errno.errorcode.get(error.errno, type(error).__name__), flush=True)
    else:
        print("done", flush=True)

"""
EACH = """
import json
results = {}
for name, source in SOURCES.items():
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.dup2(writing, 1)
        try:
            exec(source, globals())
        except BaseException as error:
            os.write(1, f"{type(error).__name__}: {error}".encode())
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with open(reading) as said:
        results[name] = said.read().split()
    os.waitpid(child, 0)
print(json.dumps(results))
"""
"""Each attempt in a process of its own, all in one call."""


@dataclass
class Lab:
    """A sandbox of a worker whose environment holds a secret."""

    backend: Bubblewrap
    sandbox: InitSandbox
    numbers: Mapping[str, int]

    async def python(
        self,
        source: str,
        limits: SandboxLimits = LIMITS,
        *,
        sandbox: InitSandbox | None = None,
        on_output: OnOutput | None = None,
    ) -> Execution:
        """Run dedented code with `call` and `tried` at hand."""
        code = PRELUDE.replace("{numbers}", repr(dict(self.numbers))) + textwrap.dedent(source)
        command = Command(kind=Kind.python, source=code)
        return await (sandbox or await self.alive()).exec(command, limits, on_output=on_output)

    async def words(self, source: str) -> list[str]:
        """What code prints."""
        return (await self.python(source)).output.decode().split()

    async def each(self, sources: Mapping[str, str]) -> dict[str, list[str]]:
        """What each of many pieces of code prints."""
        answer = await self.python(f"SOURCES = {dict(sources)!r}\n{EACH}")
        found: dict[str, list[str]] = json.loads(answer.output)
        return found

    async def shell(
        self, source: str, limits: SandboxLimits = LIMITS, *, sandbox: InitSandbox | None = None
    ) -> Execution:
        """Run a shell's command."""
        return await (sandbox or await self.alive()).exec(Command(kind=Kind.shell, source=source), limits)

    async def alive(self) -> InitSandbox:
        """The sandbox, or a new one after an attempt that took it down."""
        if not await self.sandbox.healthy():
            await self.sandbox.close()
            self.sandbox = await self.another(0)
        return self.sandbox

    async def another(self, slot: int, network: str = "none") -> InitSandbox:
        """A sandbox in another slot."""
        return await self.backend.start(slot, Shape(disk_bytes=DISK, network=network))


@pytest.fixture(scope="session")
def numbers() -> Mapping[str, int]:
    """System calls of this machine, by name."""
    import pyseccomp

    return {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in CALLS}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["installed", "wheel"] if shutil.which("bwrap") else ["wheel"]
)
async def lab(request: pytest.FixtureRequest, numbers: Mapping[str, int]) -> AsyncIterator[Lab]:
    """See Lab. Its worker's bwrap is the distribution's, or the wheel's as where there is no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TURNLOG_STORE_SECRET_KEY", SECRET)
        wheel = find(cache_directory(), oldest=(99,)) if request.param == "wheel" else None
        backend = await Bubblewrap.open(SandboxSettings(first_uid=FIRST_UID), bwrap=wheel)
        lab = Lab(backend, await backend.start(0, Shape(disk_bytes=DISK)), numbers)
        yield lab
        await lab.sandbox.close()
        await backend.close()
