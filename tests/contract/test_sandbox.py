"""One contract for every sandbox backend: what a run answers, what a limit does, what is left behind."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import psutil
import pytest

from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.connection import InitSandbox
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Provider, SandboxDied
from turnlog.schemas.events import SandboxLimits, ToolStatus

FIRST_UID = 210_000
DISK = 8 << 20
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=10.0, memory_bytes=128 << 20, pids=16, disk_bytes=DISK, output_bytes=4096)
SHELL_BOMB = "b() { if [ $1 -gt 0 ]; then b $(($1 - 1)) & b $(($1 - 1)) & fi; sleep 9; }; b 7"
"""Asks for 256 processes: far above the limit, harmless where nothing would stop it."""


def limited(**changes: float) -> SandboxLimits:
    """LIMITS with some of them changed."""
    return dataclasses.replace(LIMITS, **changes)  # type: ignore[arg-type]


@pytest.fixture(params=["bubblewrap", "subprocess"])
async def provider(request: pytest.FixtureRequest) -> Provider:
    """Each backend in turn."""
    if request.param == "bubblewrap":
        return await Bubblewrap.open(first_uid=FIRST_UID)
    return await Subprocess.open(first_uid=FIRST_UID)


@pytest.fixture
async def sandbox(provider: Provider) -> AsyncIterator[InitSandbox]:
    """A new sandbox."""
    sandbox = await provider.start(0, DISK)
    assert isinstance(sandbox, InitSandbox)
    yield sandbox
    await sandbox.close()


def left_over(sandbox: InitSandbox) -> list[str]:
    """Commands of processes inside, the init aside."""
    below = psutil.Process(sandbox.process.pid).children(recursive=True)
    return [name for process in below if "inside.init" not in (name := " ".join(process.cmdline()))]


async def begun(sandbox: InitSandbox) -> None:
    """A call of it has a process."""
    while not left_over(sandbox):  # noqa: ASYNC110 - the kernel offers no event for this
        await asyncio.sleep(0.01)


async def test_python_prints_and_succeeds(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("python", "print(3 + 5)", LIMITS)
    assert (answer.status, answer.reason, answer.exit_code, answer.output) == (ToolStatus.ok, "", 0, b"8\n")
    assert 0 < answer.cpu_s < 5
    assert answer.duration_s > 0


async def test_shell_answers_stdout_then_stderr(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("shell", "echo late >&2; echo early", LIMITS)
    assert (answer.status, answer.output) == (ToolStatus.ok, b"early\nlate\n")


@pytest.mark.parametrize(
    ("tool", "source", "code"),
    [("shell", "exit 7", 7), ("python", "raise SystemExit(7)", 7), ("shell", "kill -9 $$", 137)],
)
async def test_a_failing_tool_is_a_tool_error_with_its_exit_code(
    sandbox: InitSandbox, tool: str, source: str, code: int
) -> None:
    answer = await sandbox.run(tool, source, LIMITS)
    assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, code)


async def test_an_exception_shows_the_agents_lines_and_none_of_ours(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("python", "x = 1\nprint(undefined)\n", LIMITS)
    assert answer.status is ToolStatus.tool_error
    text = answer.output.decode()
    assert "print(undefined)" in text
    assert "NameError" in text
    assert "inside" not in text


async def test_a_syntax_error_is_the_tools(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("python", "print(", LIMITS)
    assert answer.status is ToolStatus.tool_error
    assert b"SyntaxError" in answer.output


async def test_python_ends_as_python_does(sandbox: InitSandbox) -> None:
    source = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("main", __name__)
"""
    answer = await sandbox.run("python", source, LIMITS)
    assert answer.output == b"main __main__\nthread\nlast\n"


async def test_calls_share_no_memory(sandbox: InitSandbox) -> None:
    await sandbox.run("python", "import builtins, json; builtins.left = 1; json.loads = None", LIMITS)
    answer = await sandbox.run(
        "python", "import builtins, json; print(hasattr(builtins, 'left'), json.loads('2'))", LIMITS
    )
    assert answer.output == b"False 2\n"


async def test_files_stay_between_calls_and_go_with_a_reset(sandbox: InitSandbox) -> None:
    await sandbox.run("shell", "mkdir -p a/b; echo hi > a/b/c; chmod 000 a; touch -- -rf .hidden", LIMITS)
    there = await sandbox.run("shell", "chmod 700 a; cat a/b/c; ls -A", LIMITS)
    assert there.output == b"hi\n-rf\n.hidden\na\n"
    assert await sandbox.reset()
    empty = await sandbox.run("shell", "ls -A", LIMITS)
    assert empty.output == b""


async def test_a_time_out_answers_at_once_with_the_whole_tree_dead(sandbox: InitSandbox) -> None:
    source = (
        "echo before; trap '' TERM INT HUP; (setsid sh -c 'trap \"\" TERM; while :; do sleep 60; done' &) ; sleep 60"
    )
    answer = await sandbox.run("shell", source, limited(wall_s=0.5))
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.timeout, "wall_s", None)
    assert answer.output == b"before\n"
    assert answer.duration_s < 5  # the sleeps are of 60 s
    assert left_over(sandbox) == []


async def test_what_was_printed_before_a_time_out_is_seen(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("python", "print('here')\nwhile True: pass", limited(wall_s=0.5))
    assert (answer.status, answer.output) == (ToolStatus.timeout, b"here\n")


async def test_a_background_process_ends_with_its_call(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("shell", "sleep 60 & echo done", LIMITS)
    assert (answer.status, answer.output) == (ToolStatus.ok, b"done\n")
    assert answer.duration_s < 10
    assert left_over(sandbox) == []


@pytest.mark.parametrize(
    ("tool", "source", "changes", "reason"),
    [
        ("python", "while True: pass", {"cpu_s": 1.0}, "cpu_s"),
        ("shell", "for i in 1 2 3 4; do (while :; do :; done) & done; wait", {"cpu_s": 1.0}, "cpu_s"),
        ("python", "x = bytearray(10**10)", {}, "memory_bytes"),
        ("python", "x = []\nwhile True: x.append(bytearray(1 << 20))", {}, "memory_bytes"),
        ("shell", "python3 -c 'x = bytearray(200 << 20); import time; time.sleep(9)'", {}, "memory_bytes"),
        ("python", "import os, time\nfor _ in range(8): os.fork()\ntime.sleep(9)", {}, "pids"),
        ("shell", SHELL_BOMB, {}, "pids"),
        ("shell", "head -c 100000000 /dev/zero > full; sleep 9", {}, "disk_bytes"),
        ("python", "open('full', 'wb').write(bytes(20 << 20))", {}, "disk_bytes"),
        ("shell", "yes", {}, "output_bytes"),
        ("python", "print('x' * 100_000)", {}, "output_bytes"),
    ],
)
async def test_every_limit_is_enforced_and_named(
    sandbox: InitSandbox, tool: str, source: str, changes: dict[str, float], reason: str
) -> None:
    answer = await sandbox.run(tool, source, limited(**changes))
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, reason)
    assert len(answer.output) <= LIMITS.output_bytes
    assert left_over(sandbox) == []
    assert await sandbox.reset()
    assert (await sandbox.run("python", "print(1)", LIMITS)).output == b"1\n"


async def test_output_of_exactly_the_limit_is_no_offence(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("python", f"print('x' * {LIMITS.output_bytes - 1})", LIMITS)
    assert (answer.status, len(answer.output)) == (ToolStatus.ok, LIMITS.output_bytes)


async def test_a_cancelled_call_answers_so_and_leaves_a_usable_sandbox(sandbox: InitSandbox) -> None:
    running = asyncio.create_task(sandbox.run("shell", "sleep 60", LIMITS))
    await begun(sandbox)
    await sandbox.cancel()
    assert (await running).status is ToolStatus.cancelled
    assert left_over(sandbox) == []
    assert (await sandbox.run("python", "print(1)", LIMITS)).output == b"1\n"


async def test_abandoning_a_call_kills_the_sandbox(sandbox: InitSandbox) -> None:
    running = asyncio.create_task(sandbox.run("shell", "sleep 60", LIMITS))
    await begun(sandbox)
    inside = psutil.Process(sandbox.process.pid).children(recursive=True)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    _, alive = psutil.wait_procs(inside, timeout=5)
    assert alive == []


async def test_a_sandbox_that_dies_in_a_call_says_so(sandbox: InitSandbox) -> None:
    running = asyncio.create_task(sandbox.run("shell", "sleep 60", LIMITS))
    await begun(sandbox)
    inside = psutil.Process(sandbox.process.pid).children(recursive=True)
    sandbox.process.kill()
    with pytest.raises(SandboxDied, match="before it answered"):
        await running
    for process in inside:  # a plain init cannot take its tree with it when it is killed itself
        if process.is_running():
            process.kill()


async def test_input_is_empty_and_the_environment_is_clean(
    sandbox: InitSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await sandbox.run("shell", "cat; env | cut -d= -f1 | sort", LIMITS)
    names = set(answer.output.decode().split())
    assert {"PATH", "HOME"} <= names
    allowed = {"PATH", "HOME", "USER", "LANG", "LD_LIBRARY_PATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "TMPDIR"}
    assert names <= allowed | {"PWD", "OLDPWD", "SHLVL", "_"}


async def test_bytes_that_are_no_text_pass_through(sandbox: InitSandbox) -> None:
    answer = await sandbox.run("shell", r"printf '\xff\x00\n'", LIMITS)
    assert answer.output == b"\xff\x00\n"
    answer = await sandbox.run("python", "print('für \N{SNOWMAN}')", LIMITS)
    assert answer.output.decode() == "für \N{SNOWMAN}\n"


async def test_a_source_that_cannot_be_run_is_a_tool_error(sandbox: InitSandbox) -> None:
    for tool in ("shell", "python"):
        answer = await sandbox.run(tool, "a\0b", LIMITS)
        assert answer.status is ToolStatus.tool_error
