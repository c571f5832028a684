"""One contract for every sandbox backend: what a call answers, what a limit does, what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from turnlog.sandbox_workers.protocol import (
    Command,
    FileMissing,
    FileRefused,
    Kind,
    OutputStream,
    Sandbox,
    SandboxDied,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

Limited = Callable[..., SandboxLimits]
SHELL_BOMB = "exec 2>/dev/null; b() { if [ $1 -gt 0 ]; then b $(($1 - 1)) & b $(($1 - 1)) & fi; sleep 9; }; b 7"
"""Quiet: what a shell says of each fork that fails may reach the limit of output first."""
"""Asks for 256 processes: far above the limit, harmless where nothing would stop it."""


def python(source: str, **more: Any) -> Command:
    """In a fresh interpreter."""
    return Command(kind=Kind.python, source=source, **more)


def shell(source: str, **more: Any) -> Command:
    """By a shell."""
    return Command(kind=Kind.shell, source=source, **more)


class Running:
    """A call that has begun: it has printed something."""

    def __init__(self, sandbox: Sandbox, command: Command, limits: SandboxLimits) -> None:
        self.parts: list[tuple[OutputStream, bytes]] = []
        self.printed = asyncio.Event()
        self.answer = asyncio.create_task(sandbox.exec(command, limits, on_output=self.take))

    def take(self, stream: OutputStream, part: bytes) -> None:
        """Of the call's output."""
        self.parts.append((stream, part))
        self.printed.set()


async def works(sandbox: Sandbox, limits: SandboxLimits) -> bool:
    """It runs the next call. Raises AssertionError with what became of it."""
    answer = await sandbox.exec(python("print(3 + 5)"), limits)
    assert answer.output == b"8\n", answer
    return True


async def test_python_prints_and_succeeds(sandbox: Sandbox, limits: SandboxLimits) -> None:
    answer = await sandbox.exec(python("print(3 + 5)"), limits)
    assert (answer.status, answer.reason, answer.exit_code, answer.output) == (ToolStatus.ok, "", 0, b"8\n")
    assert answer.cpu_s > 0
    assert answer.duration_s > 0


@pytest.mark.needs("shell")
async def test_the_answer_has_stdout_then_stderr(sandbox: Sandbox, limits: SandboxLimits) -> None:
    answer = await sandbox.exec(shell("echo late >&2; echo early"), limits)
    assert (answer.status, answer.output) == (ToolStatus.ok, b"early\nlate\n")


@pytest.mark.needs("shell")
async def test_a_program_gets_its_arguments_as_they_are(sandbox: Sandbox, limits: SandboxLimits) -> None:
    answer = await sandbox.exec(Command(kind=Kind.program, argv=("printf", "%s|", "a b", "", "$HOME", "ü\n")), limits)
    assert answer.output.decode() == "a b||$HOME|ü\n|"


@pytest.mark.needs("shell")
async def test_a_program_that_is_not_there_is_a_tool_error_as_in_a_shell(
    sandbox: Sandbox, limits: SandboxLimits
) -> None:
    answer = await sandbox.exec(Command(kind=Kind.program, argv=("no-such-program",)), limits)
    assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, 127)
    assert b"no-such-program" in answer.output


async def test_an_exit_code_other_than_zero_is_a_tool_error(sandbox: Sandbox, limits: SandboxLimits) -> None:
    answer = await sandbox.exec(python("raise SystemExit(7)"), limits)
    assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, 7)


@pytest.mark.needs("shell")
async def test_a_failing_command_is_a_tool_error_with_its_exit_code(sandbox: Sandbox, limits: SandboxLimits) -> None:
    for source, code in (("exit 7", 7), ("kill -9 $$", 137)):
        answer = await sandbox.exec(shell(source), limits)
        assert (answer.status, answer.exit_code) == (ToolStatus.tool_error, code)


async def test_an_exception_shows_the_agents_lines_and_none_of_ours(sandbox: Sandbox, limits: SandboxLimits) -> None:
    answer = await sandbox.exec(python("x = 1\nprint(undefined)\n"), limits)
    assert answer.status is ToolStatus.tool_error
    text = answer.output.decode()
    assert "line 2" in text
    assert "NameError" in text
    assert "inside" not in text


async def test_a_source_that_cannot_be_run_is_a_tool_error(sandbox: Sandbox, limits: SandboxLimits) -> None:
    for source in ("print(", "a\0b"):
        answer = await sandbox.exec(python(source), limits)
        assert answer.status is ToolStatus.tool_error
    assert await works(sandbox, limits)


@pytest.mark.needs("shell")
async def test_python_ends_as_python_does(sandbox: Sandbox, limits: SandboxLimits) -> None:
    source = """
import atexit, threading, time
atexit.register(print, "last")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("main", __name__)
"""
    answer = await sandbox.exec(python(source), limits)
    assert answer.output == b"main __main__\nthread\nlast\n"


async def test_calls_share_no_memory(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await sandbox.exec(python("import builtins, json; builtins.left = 1; json.loads = None"), limits)
    answer = await sandbox.exec(
        python("import builtins, json; print(hasattr(builtins, 'left'), json.loads('2'))"), limits
    )
    assert answer.output == b"False 2\n"


async def test_input_is_what_was_given_and_else_empty(sandbox: Sandbox, limits: SandboxLimits) -> None:
    source = "import sys; print(len(sys.stdin.buffer.read()))"
    assert (await sandbox.exec(python(source), limits)).output == b"0\n"
    assert (await sandbox.exec(python(source, stdin=bytes(300_000)), limits)).output == b"300000\n"


async def test_input_that_nobody_reads_holds_nothing_up(sandbox: Sandbox, limits: SandboxLimits) -> None:
    answer = await sandbox.exec(python("print(1)", stdin=bytes(3_000_000)), limits)
    assert (answer.status, answer.output) == (ToolStatus.ok, b"1\n")


async def test_a_call_has_its_environment_and_the_next_one_not(sandbox: Sandbox, limits: SandboxLimits) -> None:
    source = "import os; print(os.environ.get('COLOUR'), 'HOME' in os.environ)"
    assert (await sandbox.exec(python(source, env={"COLOUR": "blau ü"}), limits)).output.decode() == "blau ü True\n"
    assert (await sandbox.exec(python(source), limits)).output == b"None True\n"


async def test_a_call_runs_in_the_folder_that_it_names(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await sandbox.write("a/b/file", b"found")
    assert (await sandbox.exec(python("print(open('file').read())", cwd="a/b"), limits)).output == b"found\n"
    with pytest.raises(FileMissing):
        await sandbox.exec(python("pass", cwd="a/c"), limits)
    with pytest.raises(FileRefused):
        await sandbox.exec(python("pass", cwd="../.."), limits)
    assert await works(sandbox, limits)


async def test_output_is_seen_while_the_call_runs(sandbox: Sandbox, limits: SandboxLimits) -> None:
    source = "import time; print('begun', flush=True)\nwhile True: time.sleep(0.05)"
    running = Running(sandbox, python(source), limits)
    async with asyncio.timeout(limits.wall_s):
        await running.printed.wait()
    assert not running.answer.done()
    await sandbox.cancel()
    assert (await running.answer).output == b"begun\n"
    assert running.parts == [(OutputStream.stdout, b"begun\n")]


async def test_bytes_that_are_no_text_pass_through(sandbox: Sandbox, limits: SandboxLimits) -> None:
    source = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 8); print('für \N{SNOWMAN}', file=sys.stderr)"
    answer = await sandbox.exec(python(source), limits)
    assert answer.output == bytes(range(256)) * 8 + "für \N{SNOWMAN}\n".encode()


async def test_output_of_exactly_the_limit_is_no_offence(sandbox: Sandbox, limits: SandboxLimits) -> None:
    answer = await sandbox.exec(python(f"print('x' * {limits.output_bytes - 1})"), limits)
    assert (answer.status, len(answer.output)) == (ToolStatus.ok, limits.output_bytes)


@pytest.mark.needs("shell")
async def test_files_stay_between_calls_and_go_with_a_reset(sandbox: Sandbox, limits: SandboxLimits) -> None:
    await sandbox.exec(shell("mkdir -p a/b; echo hi > a/b/c; chmod 000 a; touch -- -rf .hidden"), limits)
    there = await sandbox.exec(shell("chmod 700 a; cat a/b/c; ls -A"), limits)
    assert there.output == b"hi\n-rf\n.hidden\na\n"
    assert await sandbox.reset()
    assert (await sandbox.exec(shell("ls -A"), limits)).output == b""


@pytest.mark.needs("shell")
async def test_a_time_out_answers_at_once_with_the_whole_tree_dead(
    sandbox: Sandbox, limited: Limited, mark: Any
) -> None:
    source = (
        "echo before; trap '' TERM INT HUP; (setsid sh -c 'trap \"\" TERM; while :; do sleep 60; done' &) ; sleep 60"
    )
    answer = await sandbox.exec(shell(source, env=mark.env), limited(wall_s=0.5))
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.timeout, "wall_s", None)
    assert answer.output == b"before\n"
    assert answer.duration_s < 5  # the sleeps are of 60 s
    assert mark.gone()


async def test_what_was_printed_before_a_time_out_is_seen(sandbox: Sandbox, limited: Limited) -> None:
    answer = await sandbox.exec(python("print('here', flush=True)\nwhile True: pass"), limited(wall_s=1.0))
    assert (answer.status, answer.output) == (ToolStatus.timeout, b"here\n")


@pytest.mark.needs("shell")
async def test_a_background_process_ends_with_its_call(sandbox: Sandbox, limits: SandboxLimits, mark: Any) -> None:
    answer = await sandbox.exec(shell("sleep 60 & echo done", env=mark.env), limits)
    assert (answer.status, answer.output) == (ToolStatus.ok, b"done\n")
    assert answer.duration_s < 10
    assert mark.gone()


@pytest.mark.parametrize(
    ("source", "changes", "reason"),
    [
        ("while True: pass", {"cpu_s": 0.5, "wall_s": 60.0}, "cpu_s"),
        ("x = []\nwhile len(x) < 500: x.append(bytearray(1 << 20))", {}, "memory_bytes"),
        ("open('full', 'wb').write(bytes(20 << 20))", {}, "disk_bytes"),
        ("print('x' * 100_000)", {}, "output_bytes"),
    ],
)
async def test_every_limit_is_enforced_and_named(
    sandbox: Sandbox, limited: Limited, source: str, changes: dict[str, float], reason: str
) -> None:
    answer = await sandbox.exec(python(source), limited(**changes))
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, reason)
    assert len(answer.output) <= limited().output_bytes
    assert await works(sandbox, limited())


async def test_who_finds_the_disk_full_may_look_and_tidy_up_and_is_stopped_only_for_more(
    sandbox: Sandbox, limited: Limited
) -> None:
    await sandbox.exec(python("open('full', 'wb').write(bytes(20 << 20))"), limited())
    slowly = "import os, time; time.sleep(0.2); print(os.path.getsize('full') > 0, flush=True)"
    answer = await sandbox.exec(python(slowly), limited())
    assert (answer.status, answer.output) == (ToolStatus.ok, b"True\n")
    more = "for n in range(99): open(f'{n}', 'w').close()"
    assert (await sandbox.exec(python(more), limited())).reason == "disk_bytes"
    tidied = await sandbox.exec(python(slowly + "; os.remove('full'); open('new', 'wb').write(bytes(4096))"), limited())
    assert tidied.status is ToolStatus.ok


@pytest.mark.needs("shell")
@pytest.mark.parametrize(
    ("source", "changes", "reason"),
    [
        ("for i in 1 2 3 4; do (while :; do :; done) & done; wait", {"cpu_s": 0.5}, "cpu_s"),
        ("python3 -c 'x = bytearray(200 << 20); import time; time.sleep(9)'", {}, "memory_bytes"),
        (SHELL_BOMB, {}, "pids"),
        ("head -c 100000000 /dev/zero > full; sleep 9", {}, "disk_bytes"),
        ("yes | head -c 1000000000", {}, "output_bytes"),
    ],
)
async def test_a_limit_holds_for_the_whole_tree(
    sandbox: Sandbox, limited: Limited, mark: Any, source: str, changes: dict[str, float], reason: str
) -> None:
    answer = await sandbox.exec(shell(source, env=mark.env), limited(**changes))
    assert (answer.status, answer.reason) == (ToolStatus.resource_limit, reason)
    assert len(answer.output) <= limited().output_bytes
    assert mark.gone()
    assert await sandbox.reset()
    assert await works(sandbox, limited())


async def test_a_cancelled_call_answers_so_and_leaves_a_usable_sandbox(sandbox: Sandbox, limits: SandboxLimits) -> None:
    running = Running(sandbox, python("import time; print(1, flush=True)\nwhile True: time.sleep(0.05)"), limits)
    await running.printed.wait()
    await sandbox.cancel()
    assert (await running.answer).status is ToolStatus.cancelled
    assert await works(sandbox, limits)


@pytest.mark.needs("shell")
async def test_abandoning_a_call_kills_the_sandbox(sandbox: Sandbox, limits: SandboxLimits, mark: Any) -> None:
    running = Running(sandbox, shell("echo begun; sleep 60 & sleep 60", env=mark.env), limits)
    await running.printed.wait()
    running.answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.answer
    assert not await sandbox.healthy()
    assert mark.gone()


@pytest.mark.needs("shell")
async def test_a_sandbox_that_is_closed_in_a_call_says_so(sandbox: Sandbox, limits: SandboxLimits, mark: Any) -> None:
    running = Running(sandbox, shell("echo begun; sleep 60", env=mark.env), limits)
    await running.printed.wait()
    await sandbox.close()
    with pytest.raises(SandboxDied):
        await running.answer
    assert mark.gone()


async def test_a_sandbox_is_healthy_until_it_is_closed(sandbox: Sandbox, limits: SandboxLimits) -> None:
    assert await sandbox.healthy()
    assert await works(sandbox, limits)
    assert await sandbox.reset()
    assert await sandbox.healthy()
    await sandbox.close()
    await sandbox.close()
    assert not await sandbox.healthy()
    with pytest.raises(SandboxDied):
        await sandbox.exec(python("print(1)"), limits)
