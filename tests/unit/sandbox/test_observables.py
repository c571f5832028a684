"""A sandbox that was reset is as new: whatever a call soils of the listed observables is as it was before."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.connection import COMPARED_EVERY, InitSandbox
from turnlog.sandbox_workers.backends.init_wire import InitFiles
from turnlog.sandbox_workers.inside.observables import AROUND, OWN
from turnlog.sandbox_workers.protocol import Command, Kind, Shape
from turnlog.schemas.events import SandboxLimits

DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=256 << 20, pids=16, disk_bytes=DISK)
PRELUDE = """
import ctypes, os, platform, resource, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
NICE = os.getpriority(os.PRIO_PROCESS, 1)

def wrote(path, text):
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        print("refused")
    else:
        print("soiled")

def did(result):
    print("refused" if result < 0 else "soiled")
"""
SOILED = {
    "limits": """
        try:
            resource.prlimit(1, resource.RLIMIT_CORE, (0, 0))
        except PermissionError:
            print("refused")
    """,
    "nice": "os.setpriority(os.PRIO_PROCESS, 1, 1 + NICE); print('soiled')",
    "scheduling": """
        about = ctypes.create_string_buffer(struct.pack("IIQiIQQQII", 56, 0, 0, NICE, 0, 9_000_000, 0, 0, 0, 0))
        did(libc.syscall(314 if X86 else 274, 1, about, 0))
        os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))
    """,
    "I/O priority": "did(libc.syscall(251 if X86 else 30, 1, 1, 3 << 13))",
    "cores": "os.sched_setaffinity(1, {min(os.sched_getaffinity(1))}); print('soiled')",
    "folders": "open('a', 'w').close(); os.setxattr('/tmp', 'user.note', b'x'); print('soiled')",
    "flow labels": """
        address = socket.inet_pton(socket.AF_INET6, "::1")
        request = address + struct.pack(">I", 0x12345) + struct.pack("=BBHHHI", 0, 255, 1, 60, 60, 0)
        stream = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        try:
            stream.setsockopt(socket.IPPROTO_IPV6, 32, request)
        except OSError:
            print("refused")
        else:
            print("soiled")
    """,
    "sockets": """
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        server.accept()[0].close()
        client.close()
        print("soiled")
    """,
    "working directory": "os.chdir('/tmp'); print('soiled')",
    "environment": "os.environ['NOTE'] = 'kept'; print('soiled')",
    "modules": "import wave; print('soiled')",
    "signals, rights, umask, threads": """
        import threading, time
        os.umask(0o777)
        threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        os.kill(1, signal.SIGTERM)
        os.kill(1, signal.SIGSTOP)
        assert libc.syscall(126 if X86 else 91, struct.pack('Ii', 0x20080522, 1), bytes(24)) < 0
        print("soiled")
    """,
    "descriptors": "os.dup2(os.open('a', os.O_CREAT | os.O_RDWR), 900); print('soiled')",
    "processes": "did(os.fork() or [os.setsid(), signal.pause()])",
    "terminals": "held = os.openpty(); print('soiled')",
    "unix sockets": "held = socket.socket(socket.AF_UNIX); held.bind('\\0note'); print('soiled')",
    "multicast groups": """
        held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        group = socket.inet_aton("224.1.1.1") + socket.inet_aton("127.0.0.1")
        held.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        print("soiled")
    """,
    "timer slack": "wrote('/proc/1/timerslack_ns', '1000000')",
    "autogroup": "wrote('/proc/1/autogroup', '5')",
    "out of memory score": "wrote('/proc/1/oom_score_adj', '1000')",
    "core dump filter": "wrote('/proc/1/coredump_filter', '0')",
    "System V objects": "did(libc.shmget(0, 4096, 0o1600))",
    "IPC settings": "wrote('/proc/sys/kernel/msgmax', '1'); wrote('/proc/sys/kernel/shmmax', '1')",
    "network settings": "wrote('/proc/sys/net/ipv4/ip_local_port_range', '2000 3000')",
    "interfaces": "did(libc.ioctl(socket.socket().fileno(), 0x8914, struct.pack('16sh22x', b'lo', 0)))",
    "routes": "did(libc.ioctl(socket.socket().fileno(), 0x890B, bytes(120)))",
    "mounts": "did(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None))",
    "host and domain": "did(libc.sethostname(b'x', 1))",
    "user namespace": "wrote('/proc/sys/user/max_inotify_instances', '100000')",
    "clock offsets": "wrote('/proc/1/timens_offsets', 'monotonic 5 0')",
}
"""Observable -> code that soils it, or is refused."""
OUTLIVES = {"nice", "scheduling", "I/O priority", "cores", "flow labels", "sockets"}
"""What a reset in place cannot undo: it finds it. The rest ends with its process, is emptied, or is refused."""
REFUSED = {
    "limits", "timer slack", "autogroup", "out of memory score", "core dump filter", "System V objects",
    "IPC settings", "network settings", "interfaces", "routes", "mounts", "host and domain", "user namespace",
    "clock offsets",
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[InitSandbox]:
    """One for all: each test leaves it as new."""
    provider = await Bubblewrap.open(SandboxSettings(first_uid=228_100))
    sandbox = await provider.start(0, Shape(disk_bytes=DISK))
    yield sandbox
    await sandbox.close()


async def said(sandbox: InitSandbox, source: str) -> set[str]:
    """Words of what code prints."""
    answer = await sandbox.exec(Command(kind=Kind.python, source=PRELUDE + textwrap.dedent(source)), LIMITS)
    return set(answer.output.decode().split())


def test_every_observable_is_soiled_here() -> None:
    assert set(SOILED) == {*OWN, *AROUND}
    assert len(SOILED) >= 20
    assert set(SOILED) >= OUTLIVES | REFUSED


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SOILED)
async def test_what_a_call_soils_is_as_new_after_a_reset(sandbox: InitSandbox, name: str) -> None:
    await sandbox.matches_first_init()
    assert await said(sandbox, SOILED[name]) == {"refused" if name in REFUSED else "soiled"}
    in_place = await InitFiles.reset(sandbox)
    assert in_place == (name not in OUTLIVES), "a reset in place restores it, or says that it cannot"
    assert await sandbox.reset()
    assert await sandbox.matches_first_init(), "the init that came up finds every observable as the first one did"


@pytest.mark.asyncio(loop_scope="module")
async def test_the_table_sees_what_a_new_init_would_find_changed(sandbox: InitSandbox) -> None:
    assert sandbox.observed is not None
    kept, sandbox.observed = sandbox.observed, {**sandbox.observed, "mounts": "others"}
    resets = [await sandbox.reset() for _ in range(COMPARED_EVERY)]
    assert resets.count(False) == 1, "one of so many compares"
    assert await sandbox.healthy(), "it is replaced as unclean, not as dead"
    sandbox.observed = kept
