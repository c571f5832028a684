"""Ways to take more than was granted, and to stay: bombs of processes, memory, disk and output, and what will not die.

Every bomb has a size of its own that is harmless where nothing would stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.cgroups import SOCKET_BYTES
from turnlog.sandbox_workers.inside.child import MOST_SIGNALS
from turnlog.sandbox_workers.inside.zygote import TERMINALS, USER_LIMITS
from turnlog.sandbox_workers.protocol import Shape
from turnlog.schemas.events import SandboxLimits, ToolStatus

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("lab", ["installed"], indirect=True, scope="module"),
]

FIRST_UID = 220_000
DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=128 << 20, pids=32, disk_bytes=DISK, output_bytes=8192)
BOMBS = {
    "forks of a shell, 512 at most": (
        "shell", "b() { if [ $1 -gt 0 ]; then b $(($1 - 1)) & b $(($1 - 1)) & fi; sleep 9; }; b 8", "pids",
    ),
    "forks that take no for an answer, 400 at most": ("python", """
        import time
        for _ in range(400):
            try:
                if not os.fork():
                    time.sleep(9)
                    os._exit(0)
            except OSError:
                time.sleep(0.001)
        time.sleep(9)
    """, "pids"),
    "zombies, 400 at most": ("python", """
        for _ in range(400):
            if not os.fork():
                os._exit(0)
    """, "pids"),
    "threads, 400 at most": ("python", """
        import threading, time
        for _ in range(400):
            threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
    """, "pids"),
    "memory of one process, 300 MiB": (
        "python", "import time; hoard = bytearray(300 << 20); time.sleep(9)", "memory_bytes",
    ),
    "memory of six processes, 300 MiB": ("python", """
        import time
        for _ in range(6):
            if not os.fork():
                hoard = bytearray(50 << 20)
                time.sleep(9)
                os._exit(0)
        time.sleep(9)
    """, "memory_bytes"),
    "memory that a child lets go of and takes again": ("python", """
        import time
        for _ in range(3):
            if not os.fork():
                hoard = bytearray(300 << 20)
                os._exit(0)
            os.wait()
        time.sleep(9)
    """, "memory_bytes"),
    "more memory than can be addressed": ("python", "hoard = bytearray(1 << 40)", "memory_bytes"),
    "the workspace": ("shell", "head -c 100000000 /dev/zero > x; sleep 9", "disk_bytes"),
    "/tmp": ("shell", "head -c 100000000 /dev/zero > /tmp/x; sleep 9", "disk_bytes"),
    "/dev/shm": ("shell", "head -c 100000000 /dev/zero > /dev/shm/x; sleep 9", "disk_bytes"),
    "a bit of all three": (
        "shell", "for d in /workspace /tmp /dev/shm; do head -c 4000000 /dev/zero > $d/x; done; sleep 9", "disk_bytes",
    ),
    "100,000 empty files": ("python", "for n in range(100_000): open(str(n), 'w').close()", "disk_bytes"),
    "100,000 empty folders in /tmp": ("python", "for n in range(100_000): os.mkdir(f'/tmp/{n}')", "disk_bytes"),
    "a file of holes": ("python", "open('x', 'w').truncate(1 << 40)", "disk_bytes"),
    "a file in memory": ("python", "os.truncate(os.memfd_create('x'), 1 << 29)", "disk_bytes"),
    "output without an end": ("shell", "yes", "output_bytes"),
    "errors without an end": ("shell", "yes >&2", "output_bytes"),
    "output by a child in the background": ("shell", "(yes &) ; sleep 9", "output_bytes"),
    "one line of a gigabyte": ("python", "for _ in range(1 << 14): os.write(1, bytes(1 << 16))", "output_bytes"),
    "CPU of four processes": ("python", "[os.fork() for _ in range(2)]\nwhile True: pass", "cpu_s"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_meets_its_limit_and_the_next_call_works(lab: Any, name: str) -> None:
    kind, source, limit = BOMBS[name]
    limits = {
        "cpu_s": dataclasses.replace(LIMITS, cpu_s=0.5),
        "pids": dataclasses.replace(LIMITS, memory_bytes=512 << 20),  # looking counts what forks share for each
    }.get(limit, LIMITS)
    answer = await getattr(lab, kind)(source, limits)
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, limit), answer
    assert len(answer.output) <= LIMITS.output_bytes
    sandbox = await lab.alive()
    assert await sandbox.reset()
    assert await lab.words("print(1)") == ["1"]
    assert left_over(lab) == []


def left_over(lab: Any) -> list[str]:
    """Processes of the sandbox beside bwrap, the zygote and the init, as the host sees them."""
    below = psutil.Process(lab.sandbox.process.pid).children(recursive=True)
    return [name for process in below if "inside.zygote" not in (name := " ".join(process.cmdline()))]


async def test_memory_that_is_shared_counts_where_there_are_control_groups(lab: Any) -> None:
    """Looking at private pages does not see it; the kernel's own count does."""
    if lab.backend.cgroups is None:
        pytest.skip("cgroups cannot be written")
    answer = await lab.python("""
        import mmap, time
        shared = mmap.mmap(-1, 300 << 20)
        for offset in range(0, 300 << 20, 4096):
            shared[offset] = 1
        time.sleep(9)
    """)
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "memory_bytes")
    assert await lab.words("print(1)") == ["1"]


async def test_buffers_of_sockets_are_bounded_where_there_are_control_groups(lab: Any) -> None:
    """Version 1 counts them beside memory, TCP and UDP together; on version 2 they are memory."""
    if lab.backend.cgroups is None:
        pytest.skip("cgroups cannot be written")
    answer = await lab.python("""
        held, kept = [], 0
        for _ in range(60):
            reader, writer = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
            held += [reader, writer]
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
            reader.bind(("127.0.0.1", 0))
            reader.setblocking(False)
            for _ in range(100):
                writer.sendto(bytes(60000), reader.getsockname())
        for reader in held[::2]:
            try:
                while True:
                    kept += len(reader.recv(65536))
            except BlockingIOError:
                pass
        for _ in range(30):
            server = socket.create_server(("127.0.0.1", 0))
            held += [server, client := socket.create_connection(server.getsockname()), server.accept()[0]]
            client.setblocking(False)
            try:
                while True:
                    kept += client.send(bytes(65536))
            except BlockingIOError:
                pass
        print(kept)
    """)
    if lab.backend.cgroups.tree.version == 1:
        assert answer.status is ToolStatus.ok
        assert 0 < int(answer.output) < 3 * SOCKET_BYTES, "some of it had gone out again"
    else:
        assert answer.reason == "memory_bytes" or int(answer.output) < LIMITS.memory_bytes


IGNORED = """
    import time
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ends = time.monotonic() + {wall}
    while time.monotonic() < ends:
        if not os.fork():
            while time.process_time() < {each}:
                pass
            os._exit(0)
        try:
            os.wait()
        except ChildProcessError:
            pass
"""


@pytest.mark.parametrize(("each", "cgroups"), [(0.01, "auto"), (0.3, "off")])
async def test_children_that_nobody_waits_for_count_against_the_cpu_time(lab: Any, each: float, cgroups: str) -> None:
    """Without control groups as far as they live until they are looked at."""
    backend = await Bubblewrap.open(SandboxSettings(first_uid=FIRST_UID + 50, cgroups=cgroups))
    if backend.cgroups is None and cgroups == "auto":
        pytest.skip("cgroups cannot be written")
    sandbox = await backend.start(0, Shape(disk_bytes=DISK))
    async with contextlib.AsyncExitStack() as ends:
        ends.push_async_callback(sandbox.close)
        # On a busy machine the children get a tenth of a core.
        source = textwrap.dedent(IGNORED).format(wall=40, each=each)
        limits = dataclasses.replace(LIMITS, cpu_s=0.8, wall_s=60)
        answer = await lab.python(source, limits, sandbox=sandbox)
        assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "cpu_s"), answer
        assert backend.cgroups is None or answer.cpu_s >= 0.8, "those of nobody are in the count"
        assert await sandbox.healthy()


async def test_terminals_of_one_call_leave_those_of_others(lab: Any) -> None:
    said = await lab.words("""
        held = []
        try:
            while len(held) < 400:
                held += os.openpty()
        except OSError as error:
            print(errno.errorcode[error.errno], len(held) // 2)
    """)
    assert said == ["ENOSPC", str(TERMINALS)]
    other = await lab.another(1)
    assert (await lab.python("os.openpty(); print('open')", sandbox=other)).output == b"open\n"
    await other.close()


async def test_what_the_kernel_counts_by_user_is_counted_by_sandbox(lab: Any) -> None:
    source = """
        held = 0
        try:
            while held < 4000:
                answer = libc.inotify_init()
                if answer < 0:
                    raise OSError(ctypes.get_errno(), "inotify")
                held += 1
        except OSError as error:
            print(errno.errorcode[error.errno], held)
        timer, held = ctypes.c_void_p(), 0
        while held < 100_000 and not libc.timer_create(0, None, ctypes.byref(timer)):
            held += 1
        print(errno.errorcode[ctypes.get_errno()], held, flush=True)
        import time
        time.sleep(1)
    """
    other = await lab.another(1)
    answers = await asyncio.gather(lab.python(source), lab.python(source, sandbox=other))
    await other.close()
    for answer in answers:
        said = answer.output.decode().split()
        assert said[:2] == ["EMFILE", str(USER_LIMITS["max_inotify_instances"])]
        assert said[2] == "EAGAIN"
        assert 0 < int(said[3]) <= MOST_SIGNALS


async def test_every_process_is_in_the_sandboxes_control_group(lab: Any) -> None:
    if lab.backend.cgroups is None:
        pytest.skip("cgroups cannot be written")
    source = """
        import time
        if not os.fork():
            os.setsid()
            if not os.fork():
                print("up", flush=True)
                time.sleep(9)
        time.sleep(9)
    """
    up = asyncio.Event()
    running = asyncio.create_task(lab.python(source, LIMITS, on_output=lambda stream, part: up.set()))
    await asyncio.wait_for(up.wait(), 8)
    sandbox = lab.sandbox
    outer = psutil.Process(sandbox.process.pid)
    inside = {process.pid for process in (outer, *outer.children(recursive=True))}
    for place in sandbox.bounds.places:
        assert set(map(int, Path(place / "cgroup.procs").read_text().split())) == inside  # noqa: ASYNC240 - kernel's
    assert len(inside) >= 5
    await sandbox.cancel()
    assert (await running).status is ToolStatus.cancelled


async def test_a_group_is_gone_with_its_sandbox(lab: Any) -> None:
    sandbox = await lab.another(1)
    places = sandbox.bounds.places if sandbox.bounds is not None else ()
    assert all(os.path.isdir(place) for place in places)  # noqa: ASYNC240 - the kernel's
    await sandbox.close()
    assert not any(os.path.isdir(place) for place in places)  # noqa: ASYNC240 - the kernel's


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("shell", "trap '' TERM INT HUP QUIT USR1 ALRM XCPU; while :; do :; done"),
        ("python", "for n in signal.valid_signals() - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass"),
        ("shell", "kill -STOP $$; sleep 60"),
        ("shell", "sleep 60 & sleep 60"),
        ("shell", "(setsid sh -c 'trap \"\" TERM; sleep 60' &) ; sleep 60"),
        ("python", "import time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\ntime.sleep(60)"),
    ],
    ids=["deaf to signals", "deaf python", "stopped", "a child in the background", "another session", "a daemon"],
)
async def test_what_will_not_die_is_dead_at_its_time_out(lab: Any, kind: str, source: str) -> None:
    sandbox = await lab.alive()
    began = time.monotonic()
    answer = await getattr(lab, kind)(source, dataclasses.replace(LIMITS, wall_s=0.3))
    assert time.monotonic() - began < 5, "back long before any of it would have ended"
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.timeout, "wall_s", None)
    assert lab.sandbox is sandbox
    assert left_over(lab) == []


async def test_a_child_that_holds_the_output_open_does_not_hold_the_answer(lab: Any) -> None:
    began = time.monotonic()
    answer = await lab.shell("(setsid sh -c 'trap \"\" TERM HUP; sleep 60; echo late' &) ; echo early")
    assert (answer.status, answer.output) == (ToolStatus.ok, b"early\n")
    assert time.monotonic() - began < 30
    assert left_over(lab) == []


async def test_descriptors_run_out_for_the_call_alone(lab: Any) -> None:
    said = await lab.words("""
        held = []
        try:
            while len(held) < 5000:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            print(errno.errorcode[error.errno], len(held) < 1024)
    """)
    assert said == ["EMFILE", "True"]
    assert await lab.words("print(1)") == ["1"]


async def test_a_folder_too_deep_to_remove_is_removed_or_the_sandbox_is_not_as_new(lab: Any) -> None:
    answer = await lab.python("for _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')")
    assert answer.status is ToolStatus.ok
    if await lab.sandbox.reset():
        assert (await lab.shell("ls -A /workspace")).output == b""
    else:
        await lab.sandbox.close()
