"""A reset leaves nothing of a call, in files, in memory or in the network, or says that it is in doubt."""

from __future__ import annotations

import signal
import textwrap
from collections.abc import AsyncIterator

import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.protocol import Command, Kind, Shape
from turnlog.schemas.events import SandboxLimits

SETTINGS = SandboxSettings(first_uid=228_000)
DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=256 << 20, pids=16, disk_bytes=DISK)
SECRET = "of-an-earlier-call"
SCAN = """
import re
needle = bytes(reversed(b"llac-reilrae-na-fo"))
found = set()
for line in open("/proc/self/maps"):
    span, rights, *_, name = line.split()
    if not rights.startswith("rw") or name.startswith("[v"):
        continue
    low, high = (int(end, 16) for end in span.split("-"))
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(low)
        found |= set(re.findall(re.escape(needle) + rb"=[a-z]+", memory.read(high - low)))
print(sorted(found))
"""


@pytest.fixture
async def sandbox() -> AsyncIterator[InitSandbox]:
    """A new one with a way to a proxy."""
    provider = await Bubblewrap.open(SETTINGS)
    sandbox = await provider.start(0, Shape(disk_bytes=DISK, network="allowlist"))
    yield sandbox
    await sandbox.close()


async def python(sandbox: InitSandbox, source: str, kind: Kind = Kind.python) -> str:
    """Output of dedented code."""
    answer = await sandbox.exec(Command(kind=kind, source=textwrap.dedent(source)), LIMITS)
    return answer.output.decode()


async def test_what_earlier_calls_were_about_is_in_no_memory(sandbox: InitSandbox) -> None:
    def secret(where: str, size: int = 0) -> bytes:
        return f"{SECRET}={where}".encode() + bytes(size)

    await sandbox.write("short", secret("written"))
    await sandbox.write(f"{SECRET}=name", secret("written", 50_000))
    for name in ("short", f"{SECRET}=name"):
        await sandbox.read(name, most=1 << 20)
    entries = await sandbox.index()
    for size in (0, 50_000):
        for kind in (Kind.python, Kind.session):
            source = f"'{SECRET}=source'; import sys; print(sys.stdin.read())" + " " * size
            command = Command(kind=kind, source=source, stdin=secret("input", size), env={"A": f"{SECRET}=env"})
            await sandbox.exec(command, LIMITS)
    await sandbox.exec(Command(kind=Kind.program, argv=("echo", f"{SECRET}=argument")), LIMITS)
    contents = await sandbox.read_files([entry.path for entry in entries], most=1 << 20)
    await sandbox.restore(entries, {entry.path: kept for entry, kept in zip(entries, contents, strict=True)})
    assert await sandbox.reset()
    assert await python(sandbox, SCAN) == "[]\n"


@pytest.mark.parametrize(
    "source",
    [
        "import os; os.setxattr('.', 'user.note', b'kept')",
        "import os; os.chmod('.', 0o500)",
        "open('/dev/shm/note', 'w').write('kept'); open('/tmp/note', 'w').write('kept')",
        "import os; os.environ['NOTE'] = 'kept'; os.umask(0); os.nice(5); os.chdir('/tmp')",
        "import socket; socket.socket(socket.AF_UNIX).bind('\\0note')",
        "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('127.0.0.1', 9999))",
    ],
    ids=["attribute", "rights", "shared memory", "own state", "abstract socket", "bound socket"],
)
async def test_what_a_call_leaves_goes_with_a_reset(sandbox: InitSandbox, source: str) -> None:
    for kind in (Kind.python, Kind.session):
        await python(sandbox, source, kind)
    assert await sandbox.reset()
    state = "import os; print(os.listxattr('.'), oct(os.stat('.').st_mode), os.listdir('/tmp'), os.listdir('/dev/shm'))"
    assert await python(sandbox, state) == "[] 0o40700 [] []\n"


async def test_a_socket_that_outlives_its_process_goes_with_its_network(sandbox: InitSandbox) -> None:
    said = await python(
        sandbox,
        """
        import socket
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        accepted = server.accept()[0]
        accepted.close()
        client.close()
        print("closed")
        """,
    )
    assert said == "closed\n"
    waiting = "print(int('tw 0' not in open('/proc/net/sockstat').read()))"
    assert await python(sandbox, waiting) == "1\n", "one end waits in TIME_WAIT"
    assert await sandbox.reset()
    assert await python(sandbox, waiting) == "0\n"


async def test_a_connection_to_the_proxy_that_nobody_took_goes_with_its_listener(sandbox: InitSandbox) -> None:
    source = "import socket; s = socket.create_connection(('127.0.0.1', 3128)); s.send(b'kept'); print('sent')"
    assert await python(sandbox, source) == "sent\n"
    before = sandbox.proxy
    assert await sandbox.reset()
    assert sandbox.proxy is not None
    assert sandbox.proxy is not before
    with pytest.raises(BlockingIOError):
        sandbox.proxy.accept()


async def test_the_worker_accepts_what_a_call_asks_of_its_proxy(sandbox: InitSandbox) -> None:
    assert sandbox.proxy is not None
    assert sandbox.proxy.getsockname() == ("127.0.0.1", 3128)
    source = "import socket; s = socket.create_connection(('127.0.0.1', 3128)); s.send(b'asked'); print('sent')"
    assert await python(sandbox, source) == "sent\n"
    accepted, _ = sandbox.proxy.accept()
    with accepted:
        assert accepted.recv(10) == b"asked"


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGKILL])
async def test_an_interpreter_whose_timer_acts_between_calls_is_ended(sandbox: InitSandbox, number: int) -> None:
    source = """
    import ctypes
    class Event(ctypes.Structure):
        _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("rest", ctypes.c_char * 52)]
    timer = ctypes.c_void_p()
    event = Event(signal=NUMBER)
    print(ctypes.CDLL(None).timer_create(1, ctypes.byref(event), ctypes.byref(timer)))
    """
    said = await python(sandbox, source.replace("NUMBER", str(int(number))), Kind.session)
    assert said.startswith("0\n")
    assert "the interpreter has ended" in said
    assert not sandbox.interpreter


async def test_a_descriptor_that_signals_neither_wakes_nor_ends_a_standing_interpreter(sandbox: InitSandbox) -> None:
    source = """
    import ctypes, fcntl, os, signal
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    watch = ctypes.CDLL(None).inotify_init()
    ctypes.CDLL(None).inotify_add_watch(watch, b"/workspace", 0xfff)
    refused = []
    for number in (9, 18):
        try:
            fcntl.fcntl(watch, 10, number)
        except PermissionError:
            refused.append(number)
    fcntl.fcntl(watch, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(watch, fcntl.F_SETFL, os.O_ASYNC)
    kept = 1
    refused
    """
    assert await python(sandbox, source, Kind.session) == "[9, 18]\n"
    await sandbox.write("seen", b"by the watch")
    assert await sandbox.healthy()
    assert sandbox.interpreter
    assert await python(sandbox, "kept", Kind.session) == "1\n"
