"""One contract for every sandbox backend with a persistent interpreter: servers that it keeps from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from turnlog.sandbox_workers.protocol import Command, Kind, Sandbox
from turnlog.schemas.events import SandboxLimits, ToolStatus

Limited = Callable[..., SandboxLimits]
pytestmark = pytest.mark.needs("sessions")
START = """
import subprocess
server = subprocess.Popen(["python3", "-uc", '''
import os, sys
child = os.fork()
if not child:
    while True:
        pass
for count, line in enumerate(sys.stdin):
    print(count, child, line.strip())
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def ask(text):
    server.stdin.write(text + chr(10))
    server.stdin.flush()
    return server.stdout.readline().strip()
"""
LOOK = """
def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
"""


def source(text: str, *, keeps: bool = True, **more: Any) -> Command:
    """For the persistent interpreter, which keeps what it has started."""
    return Command(kind=Kind.session, source=text, keeps=keeps, **more)


async def said(sandbox: Sandbox, limits: SandboxLimits, command: Command) -> str:
    """Output of a call that succeeds."""
    answer = await sandbox.exec(command, limits)
    assert answer.status is ToolStatus.ok, answer
    return answer.output.decode()


async def test_a_server_and_its_children_live_from_call_to_call_and_run_in_calls_that_keep_alone(
    sandbox: Sandbox, limits: SandboxLimits
) -> None:
    first = await said(sandbox, limits, source(START + LOOK + "print(server.pid, ask('a'))"))
    pid, count, child, text = first.split()
    assert (count, text) == ("0", "a")
    assert await said(sandbox, limits, source("print(ask('b'))")) == f"1 {child} b\n"
    assert await said(sandbox, limits, source(f"print(state({pid}), state({child}))", keeps=False)) == "T T\n"
    shell = Command(kind=Kind.shell, source=f"cut -d' ' -f3 /proc/{pid}/stat /proc/{child}/stat")
    assert (await sandbox.exec(shell, limits)).output == b"T\nT\n"
    assert await said(sandbox, limits, source("print(ask('c'))")) == f"2 {child} c\n"


async def test_what_a_call_that_does_not_keep_starts_ends_with_it(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await said(sandbox, limits, source(START + "print(ask('a'))"))
    other = await said(
        sandbox, limits, source("other = subprocess.Popen(['sleep', '60']); print(other.pid)", keeps=False)
    )
    assert (
        await said(sandbox, limits, source(f"import os; print(os.path.exists('/proc/{other.strip()}/fd/0'))"))
        == "False\n"
    )
    assert (await said(sandbox, limits, source("print(ask('b'))"))).startswith("1 ")


async def test_a_server_that_a_call_wakes_is_stopped_again(sandbox: Sandbox, limits: SandboxLimits) -> None:
    pid = (await said(sandbox, limits, source(START + LOOK + "print(server.pid)"))).strip()
    await sandbox.exec(Command(kind=Kind.shell, source=f"kill -CONT {pid}"), limits)
    assert await said(sandbox, limits, source(f"print(state({pid}))", keeps=False)) == "T\n"


async def test_servers_end_with_their_interpreter(sandbox: Sandbox, limits: SandboxLimits) -> None:
    pid = (await said(sandbox, limits, source(START + "print(server.pid)"))).strip()
    await sandbox.exec(source("import os; os._exit(3)"), limits)
    assert not sandbox.interpreter
    shell = Command(kind=Kind.shell, source=f"cat /proc/{pid}/cmdline || echo gone")
    assert b"gone" in (await sandbox.exec(shell, limits)).output


async def test_a_server_counts_against_the_limits_of_calls(sandbox: Sandbox, limited: Limited) -> None:
    take = "x = bytearray(600 << 20); import time; time.sleep(9)"
    greedy = f"import subprocess\nsubprocess.run(['python3', '-c', {take!r}])"
    answer = await sandbox.exec(source(greedy), limited(memory_bytes=300 << 20))
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, "memory_bytes")
    assert not sandbox.interpreter
