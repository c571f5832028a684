"""Ways out of a bubblewrap sandbox, each tried. None may reach the host."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator

import psutil
import pytest

from turnlog.sandbox_workers.backends import seccomp
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.protocol import Execution
from turnlog.schemas.events import SandboxLimits, ToolStatus

FIRST_UID = 220_000
DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=128 << 20, pids=32, disk_bytes=DISK)


@pytest.fixture
async def sandbox(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InitSandbox]:
    """A sandbox of a worker whose environment holds a secret."""
    monkeypatch.setenv("TURNLOG_STORE_SECRET_KEY", "the-secret")
    provider = await Bubblewrap.open(first_uid=FIRST_UID)
    sandbox = await provider.start(0, DISK)
    yield sandbox
    await sandbox.close()


async def python(sandbox: InitSandbox, source: str) -> Execution:
    """Run dedented code."""
    return await sandbox.run("python", textwrap.dedent(source), LIMITS)


async def shell(sandbox: InitSandbox, command: str) -> str:
    """Output of a command."""
    return (await sandbox.run("shell", command, LIMITS)).output.decode()


async def test_the_workers_environment_is_not_inside(sandbox: InitSandbox) -> None:
    said = await shell(sandbox, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'")
    assert "the-secret" not in said
    assert "HOME=/workspace" in said


async def test_passwords_and_homes_of_the_host_are_not_inside(sandbox: InitSandbox) -> None:
    said = await shell(sandbox, "cat /etc/shadow /etc/passwd; ls -d /root /home /var /proc/1/root/root; id")
    assert "root:" not in said
    assert "uid=1000(sandbox)" in said
    assert said.count("No such file") + said.count("denied") >= 5


async def test_on_the_host_a_slot_is_a_user_of_its_own(sandbox: InitSandbox) -> None:
    inside = psutil.Process(sandbox.process.pid)
    expected = FIRST_UID if os.geteuid() == 0 else os.geteuid()
    assert {process.uids().real for process in (inside, *inside.children(recursive=True))} == {expected}


async def test_processes_of_the_host_cannot_be_seen_or_signalled(sandbox: InitSandbox) -> None:
    with subprocess.Popen(  # noqa: ASYNC220 - it only waits
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as bystander:
        answer = await python(
            sandbox,
            f"""
            import os
            print(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()) == [1, os.getpid()])
            try:
                os.kill({bystander.pid}, 9)
            except ProcessLookupError:
                print("no such process")
            """,
        )
        assert answer.output == b"True\nno such process\n"
        assert bystander.poll() is None
        bystander.communicate(b"\n")


async def test_the_init_cannot_be_killed_or_read(sandbox: InitSandbox) -> None:
    answer = await python(
        sandbox,
        """
        import os, signal
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGSEGV):
            os.kill(1, number)
        for name in ("mem", "environ", "fd", "root"):
            try:
                print(os.listdir(f"/proc/1/{name}") if name in ("fd", "root") else open(f"/proc/1/{name}", "r+b"))
            except PermissionError:
                print("denied")
        """,
    )
    assert answer.output == b"denied\n" * 4
    assert (await python(sandbox, "print(1)")).output == b"1\n"


async def test_tcp_of_the_host_is_out_of_reach(sandbox: InitSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answer = await python(
            sandbox,
            f"""
            import socket
            for address in ("127.0.0.1", "10.0.0.1"):
                try:
                    socket.create_connection((address, {port}), timeout=1)
                except OSError as error:
                    print(type(error).__name__)
            print(socket.if_nameindex())
            """,
        )
    assert answer.output == b"ConnectionRefusedError\nOSError\n[(1, 'lo')]\n"


async def test_abstract_unix_sockets_of_the_host_are_out_of_reach(sandbox: InitSandbox) -> None:
    name = f"\0turnlog-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        answer = await python(
            sandbox,
            f"""
            import socket
            try:
                socket.socket(socket.AF_UNIX).connect({name!r})
            except ConnectionRefusedError:
                print("refused")
            """,
        )
    assert answer.output == b"refused\n"


async def test_no_capabilities_no_new_privileges_no_user_namespaces(sandbox: InitSandbox) -> None:
    said = await shell(sandbox, "grep -E 'Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs' /proc/self/status; unshare -Ur id; sudo id")
    lines = dict(line.split(":\t") for line in said.splitlines() if line.startswith(("Cap", "NoNew")))
    assert lines == {"CapPrm": "0" * 16, "CapEff": "0" * 16, "CapBnd": "0" * 16, "CapAmb": "0" * 16, "NoNewPrivs": "1"}
    assert "uid=0" not in said


async def test_nothing_can_be_mounted(sandbox: InitSandbox) -> None:
    answer = await python(
        sandbox,
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for result in (
            libc.mount(b"none", b"/workspace", b"tmpfs", 0, None),
            libc.mount(None, b"/usr", None, 32 | 4096, None),
            libc.umount2(b"/usr", 2),
            libc.unshare(0x10000000),
            libc.chroot(b"/workspace"),
        ):
            print(result, os.strerror(ctypes.get_errno()))
        """,
    )
    assert answer.output == b"-1 Operation not permitted\n" * 5


async def test_nothing_outside_the_workspace_can_be_written(sandbox: InitSandbox) -> None:
    said = await shell(
        sandbox, "for f in / /usr /etc /opt /opt/python /dev /proc /sys; do touch $f/x 2>&1; done; ls -d /sys"
    )
    assert said.count("Read-only") + said.count("denied") + said.count("No such file") >= 8
    assert len(said.splitlines()) == 9


async def test_ptrace_is_denied(sandbox: InitSandbox) -> None:
    assert seccomp.program(), "this machine has no libseccomp"
    answer = await python(
        sandbox,
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for call in (lambda: libc.ptrace(0, 0, 0, 0), lambda: libc.ptrace(16, 1, 0, 0), lambda: libc.setns(0, 0)):
            print(call(), os.strerror(ctypes.get_errno()))
        """,
    )
    assert answer.output == b"-1 Operation not permitted\n" * 3


async def test_a_fork_bomb_ends_and_the_next_call_works(sandbox: InitSandbox) -> None:
    bomb = "b() { if [ $1 -gt 0 ]; then b $(($1 - 1)) & b $(($1 - 1)) & fi; sleep 9; }; b 8"  # 512 at most
    answer = await sandbox.run("shell", bomb, LIMITS)
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "pids")
    assert (await python(sandbox, "print(1)")).output == b"1\n"


async def test_shared_memory_and_empty_files_count_as_disk(sandbox: InitSandbox) -> None:
    for folder in ("/dev/shm", "/tmp"):
        answer = await sandbox.run("shell", f"head -c 100000000 /dev/zero > {folder}/x; sleep 9", LIMITS)
        assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "disk_bytes")
        assert await sandbox.reset()
    answer = await python(sandbox, "for n in range(10**6): open(str(n), 'w').close()")
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "disk_bytes")


async def test_a_sandbox_whose_init_was_touched_is_not_as_new(sandbox: InitSandbox) -> None:
    answer = await python(
        sandbox, "import resource; resource.prlimit(1, resource.RLIMIT_NPROC, (5, 5)); print(resource.prlimit(1, 6))"
    )
    assert answer.output == b"(5, 5)\n"
    assert not await sandbox.reset()


async def test_a_folder_too_deep_to_remove_is_not_as_new_or_gone(sandbox: InitSandbox) -> None:
    source = "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
    assert (await python(sandbox, source)).status is ToolStatus.ok
    if await sandbox.reset():
        assert (await shell(sandbox, "ls -A /workspace")) == ""


async def test_killing_bwrap_leaves_no_process(sandbox: InitSandbox) -> None:
    running = asyncio.create_task(sandbox.run("shell", "setsid sleep 60 & sleep 60", LIMITS))
    outer = psutil.Process(sandbox.process.pid)
    while len(outer.children(recursive=True)) < 3:  # noqa: ASYNC110 - the kernel offers no event for this
        await asyncio.sleep(0.01)
    inside = outer.children(recursive=True)
    await sandbox.close()
    await asyncio.gather(running, return_exceptions=True)
    _, alive = psutil.wait_procs(inside, timeout=5)
    assert alive == []
