"""One contract for every sandbox backend with a persistent interpreter: what stays between calls, what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from turnlog.sandbox_workers.protocol import Command, Execution, Kind, OutputStream, Sandbox
from turnlog.schemas.events import SandboxLimits, ToolStatus

Limited = Callable[..., SandboxLimits]
pytestmark = pytest.mark.needs("sessions")


def source(text: str, **more: Any) -> Command:
    """For the persistent interpreter."""
    return Command(kind=Kind.session, source=text, **more)


async def said(sandbox: Sandbox, limits: SandboxLimits, text: str, **more: Any) -> str:
    """Output of a call that succeeds."""
    answer = await sandbox.exec(source(text, **more), limits)
    assert answer.status is ToolStatus.ok, answer
    return answer.output.decode()


async def test_names_stay_from_call_to_call(sandbox: Sandbox, limits: SandboxLimits) -> None:
    assert not sandbox.interpreter
    await said(sandbox, limits, "import math\nx = 3\ndef half():\n    return x / 2\n")
    assert sandbox.interpreter
    assert await said(sandbox, limits, "x += 1; half() + math.floor(1.5)") == "3.0\n"
    assert await said(sandbox, limits, "__name__") == "'__main__'\n"
    fresh = await sandbox.exec(Command(kind=Kind.python, source="print('x' in globals())"), limits)
    assert fresh.output == b"False\n"
    assert sandbox.interpreter


WORTH = {
    "3 + 5": "8\n",
    "x = 3 + 5": "",
    "None": "",
    "print(1)": "1\n",
    "1\n2\n'a'": "'a'\n",
    "for i in range(2): i": "",
    "if True:\n    7": "",
    "2;": "2\n",
    "": "",
    "# nothing": "",
}


async def test_what_the_last_expression_is_worth_is_printed(sandbox: Sandbox, limits: SandboxLimits) -> None:
    assert {text: await said(sandbox, limits, text) for text in WORTH} == WORTH


async def test_an_exception_ends_the_call_alone_and_shows_the_agents_lines(
    sandbox: Sandbox, limits: SandboxLimits
) -> None:
    await said(sandbox, limits, "kept = 1\ndef f(x):\n    return 1 / x\n")
    answer = await sandbox.exec(source("y = 2\nf(0)"), limits)
    assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, 1)
    text = answer.output.decode()
    assert "return 1 / x" in text
    assert "ZeroDivisionError" in text
    assert "inside" not in text
    syntax = await sandbox.exec(source("kept +"), limits)
    assert b"SyntaxError" in syntax.output
    assert await said(sandbox, limits, "kept + y") == "3\n"


async def test_an_interpreter_that_exits_says_so_and_the_next_call_has_a_new_one(
    sandbox: Sandbox, limits: SandboxLimits
) -> None:
    for text, code in (("import sys; sys.exit(3)", 3), ("exit()", 0), ("import os; os._exit(4)", 4)):
        await said(sandbox, limits, "x = 1")
        answer = await sandbox.exec(source(text), limits)
        assert answer.status is (ToolStatus.tool_error if code else ToolStatus.ok)
        assert answer.exit_code == code
        assert b"the interpreter has ended" in answer.output
        assert not sandbox.interpreter
        again = await sandbox.exec(source("x"), limits)
        assert b"NameError" in again.output


async def test_each_call_has_its_own_streams_environment_and_folder(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await sandbox.write("sub/file", b"found")
    assert await said(sandbox, limits, "import sys, os; sys.stdin.read()", stdin=b"first") == "'first'\n"
    assert await said(sandbox, limits, "sys.stdin.read()") == "''\n"
    assert await said(sandbox, limits, "input()", stdin=b"line\n") == "'line'\n"
    assert await said(sandbox, limits, "os.environ['COLOUR']", env={"COLOUR": "blue"}) == "'blue'\n"
    assert await said(sandbox, limits, "open('file').read()", cwd="sub") == "'found'\n"
    answer = await sandbox.exec(source("print('late', file=sys.stderr); print('early')"), limits)
    assert answer.output == b"early\nlate\n"


async def test_output_of_a_session_is_seen_while_it_runs(sandbox: Sandbox, limits: SandboxLimits) -> None:
    printed = asyncio.Event()

    def take(stream: OutputStream, part: bytes) -> None:
        printed.set()

    text = "import time\nprint('begun')\nwhile True: time.sleep(0.05)"
    running = asyncio.create_task(sandbox.exec(source(text), limits, on_output=take))
    async with asyncio.timeout(limits.wall_s):
        await printed.wait()
    await sandbox.cancel()
    answer = await running
    assert (answer.status, answer.output) == (ToolStatus.cancelled, b"begun\n")
    assert not sandbox.interpreter


async def test_between_calls_the_interpreter_stands_still_and_its_children_are_dead(
    sandbox: Sandbox, limits: SandboxLimits, mark: Any
) -> None:
    text = """
import os, subprocess, threading, time
count, pauses = 0, []
def counting():
    global count
    while True:
        pauses.append(time.monotonic())
        count += 1
        time.sleep(0.001)
threading.Thread(target=counting, daemon=True).start()
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
while count < 3: time.sleep(0.001)
"""
    await said(sandbox, limits, text, env=mark.env)
    other = Command(kind=Kind.python, source="import time; time.sleep(0.5)")
    assert (await sandbox.exec(other, limits)).status is ToolStatus.ok
    text = "max(after - before for before, after in zip(pauses, pauses[1:])) >= 0.5 or time.sleep(0.1) or " * 20
    assert await said(sandbox, limits, f"bool({text} False)") == "True\n"
    assert await said(sandbox, limits, "child.wait()") == "-9\n"


FORKS = "import os, time\nfor _ in range(40):\n    if not os.fork():\n        time.sleep(9)\n        os._exit(0)"
TOO_MUCH = (
    ("while True: pass", {"wall_s": 0.3}, ToolStatus.timeout, "wall_s"),
    ("while True: pass", {"cpu_s": 0.3}, ToolStatus.resource_limit, "cpu_s"),
    ("x = []\nwhile len(x) < 500: x.append(bytearray(1 << 20))", {}, ToolStatus.resource_limit, "memory_bytes"),
    ("while True: print('x' * 1000)", {}, ToolStatus.resource_limit, "output_bytes"),
    (FORKS, {}, ToolStatus.resource_limit, "pids"),
    ("print('x' * 5000)", {}, ToolStatus.resource_limit, "output_bytes"),  # it has ended when the limit is seen
)


async def test_a_limit_ends_the_interpreter(sandbox: Sandbox, limited: Limited) -> None:
    for text, changes, status, reason in TOO_MUCH:
        await said(sandbox, limited(), "x = 1")
        answer = await sandbox.exec(source(text), limited(**changes))
        assert (answer.status, answer.reason, answer.exit_code) == (status, reason, None)
        assert not sandbox.interpreter
        again = await sandbox.exec(source("x"), limited())
        assert b"NameError" in again.output


async def test_cpu_time_is_counted_per_call(sandbox: Sandbox, limited: Limited) -> None:
    text = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    for _ in range(3):
        answer: Execution = await sandbox.exec(source(text), limited(cpu_s=0.6))
        assert (answer.status, answer.reason) == (ToolStatus.ok, "")
        assert 0.25 < answer.cpu_s < 0.6
    assert (await sandbox.exec(source("1"), limited(cpu_s=0.6))).cpu_s < 0.25


async def test_a_reset_and_a_restore_end_the_interpreter(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await said(sandbox, limits, "x = 1")
    assert await sandbox.reset()
    assert not sandbox.interpreter
    assert b"NameError" in (await sandbox.exec(source("x"), limits)).output
    assert sandbox.interpreter
    await sandbox.restore((), {})
    assert not sandbox.interpreter
    assert await sandbox.healthy()


async def test_a_child_that_the_source_forks_is_not_the_interpreter(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await said(sandbox, limits, "import os\nx = 1\npid = os.fork()\nif not pid: x = 2\nelse: os.waitpid(pid, 0)")
    assert await said(sandbox, limits, "x") == "1\n"
    assert sandbox.interpreter


async def test_an_interpreter_that_closes_everything_harms_itself_alone(
    sandbox: Sandbox, limits: SandboxLimits
) -> None:
    answer = await sandbox.exec(source("import os; os.closerange(0, 1024); os.kill(os.getpid(), 9)"), limits)
    assert answer.status is ToolStatus.tool_error
    assert not sandbox.interpreter
    assert await said(sandbox, limits, "1") == "1\n"
