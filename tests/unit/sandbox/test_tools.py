"""Each built-in tool in a real sandbox, and what a tool makes of a sandbox that refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn, cast

import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Execution, OutputStream, Sandbox, SandboxDied, Shape
from turnlog.sandbox_workers.tools import Prepared, prepared
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

LIMITS = SandboxLimits(wall_s=20.0, disk_bytes=8 << 20)
SPEC = SandboxSpec(backend="subprocess", durable_workspace=True)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A new one."""
    provider = await Subprocess.open(SandboxSettings(backend="subprocess", first_uid=282_000, cgroups="off"))
    sandbox = await provider.start(0, Shape(disk_bytes=8 << 20))
    yield sandbox
    await sandbox.close()
    await provider.close()


async def run(
    sandbox: Sandbox,
    tool: str,
    limits: SandboxLimits = LIMITS,
    env: Mapping[str, str] | None = None,
    **arguments: object,
) -> Execution:
    """One call."""
    call = prepared(tool, json.dumps(arguments).encode(), SPEC, limits)
    assert isinstance(call, Prepared), call
    return await call.run(sandbox, limits, env or {})


async def answered(sandbox: Sandbox, tool: str, **arguments: object) -> str:
    """Of a call that succeeds."""
    execution = await run(sandbox, tool, **arguments)
    assert (execution.status, execution.reason, execution.exit_code) == (ToolStatus.ok, "", 0), execution
    return execution.output.decode()


async def failed(sandbox: Sandbox, tool: str, **arguments: object) -> str:
    """Of a call that is a tool error."""
    execution = await run(sandbox, tool, **arguments)
    assert (execution.status, execution.reason, execution.exit_code) == (ToolStatus.tool_error, "", 1), execution
    return execution.output.decode()


async def test_python_knows_nothing_of_earlier_calls(sandbox: Sandbox) -> None:
    assert await answered(sandbox, "python", code="x = 3\nprint(x + 5)") == "8\n"
    assert "NameError" in await failed(sandbox, "python", code="print(x)")


async def test_python_session_keeps_what_was_defined_and_shows_the_last_value(sandbox: Sandbox) -> None:
    assert await answered(sandbox, "python_session", code="import math\ndef half(x): return x / 2") == ""
    assert await answered(sandbox, "python_session", code="print('a')\nhalf(math.floor(9.5))") == "a\n4.5\n"
    assert "ZeroDivisionError" in await failed(sandbox, "python_session", code="half(1) / 0")
    assert await answered(sandbox, "python_session", code="half(3)") == "1.5\n"


async def test_shell_takes_stdin_a_folder_and_the_environment(sandbox: Sandbox) -> None:
    assert await answered(sandbox, "shell", command="mkdir -p a/b; echo hi > a/b/c; cat", stdin="né\n") == "né\n"
    assert await answered(sandbox, "shell", command="cat c", cwd="a/b") == "hi\n"
    assert await answered(sandbox, "shell", command="cat c", cwd="/workspace/a/b") == "hi\n"
    execution = await run(sandbox, "shell", env={"LEVEL": "7"}, command="echo $LEVEL")
    assert execution.output == b"7\n"
    assert "nowhere" in await failed(sandbox, "shell", command="ls", cwd="nowhere")
    await failed(sandbox, "shell", command="ls", cwd="../..")


async def test_shell_ends_at_its_own_time_out(sandbox: Sandbox) -> None:
    execution = await run(sandbox, "shell", command="sleep 60", timeout_s=0.3)
    assert (execution.status, execution.reason, execution.exit_code) == (ToolStatus.timeout, "wall_s", None)


async def test_output_streams_while_a_program_runs(sandbox: Sandbox) -> None:
    heard: list[tuple[OutputStream, bytes]] = []
    call = prepared("shell", b'{"command": "echo out; echo err >&2"}', SPEC, LIMITS)
    assert isinstance(call, Prepared)
    await call.run(sandbox, LIMITS, {}, lambda stream, part: heard.append((stream, part)))
    assert sorted(heard) == [(OutputStream.stderr, b"err\n"), (OutputStream.stdout, b"out\n")]


async def test_a_file_is_read_whole_or_by_lines_with_a_note_of_what_is_left(sandbox: Sandbox) -> None:
    text = "".join(f"line {number}\n" for number in range(1, 11))
    assert await answered(sandbox, "write_file", path="notes/a.txt", content=text) == "wrote 71 bytes to notes/a.txt\n"
    assert await answered(sandbox, "read_file", path="/workspace/notes/a.txt") == text
    assert await answered(sandbox, "read_file", path="notes/a.txt", offset=9) == "line 9\nline 10\n"
    some = await answered(sandbox, "read_file", path="notes/a.txt", offset=2, lines=2)
    assert some == 'line 2\nline 3\n[notes/a.txt: lines 2 to 3 of 10; read on with "offset": 4]\n'
    assert "has 10 lines, none is number 11" in await failed(sandbox, "read_file", path="notes/a.txt", offset=11)
    assert await answered(sandbox, "write_file", path="empty", content="") == "wrote 0 bytes to empty\n"
    assert await answered(sandbox, "read_file", path="empty") == ""
    await answered(sandbox, "write_file", path="open", content="no line end")
    assert await answered(sandbox, "read_file", path="open") == "no line end"


async def test_a_long_file_is_read_in_parts_that_fit_an_answer(sandbox: Sandbox) -> None:
    text = "".join(f"{number:099d}\n" for number in range(100))
    await answered(sandbox, "write_file", path="long", content=text)
    small = dataclasses.replace(LIMITS, output_bytes=4096)
    execution = await run(sandbox, "read_file", small, path="long")
    assert execution.status is ToolStatus.ok
    assert len(execution.output) <= 4096
    lines = execution.output.decode().splitlines(keepends=True)
    assert "".join(lines[:-1]) == text[: len("".join(lines[:-1]))]
    assert lines[-1] == f'[long: lines 1 to {len(lines) - 1} of 100; read on with "offset": {len(lines)}]\n'
    await answered(sandbox, "write_file", path="wide", content="x" * 5000)
    wide = await run(sandbox, "read_file", small, path="wide")
    assert b"line 1 of wide is longer than an answer may be (4096 bytes)" in wide.output


async def test_a_file_that_is_no_text_is_described(sandbox: Sandbox) -> None:
    await sandbox.write("image", b"\x89PNG\0\xff")
    said = await failed(sandbox, "read_file", path="image")
    assert said.startswith("image is no UTF-8 text: 6 bytes that begin with 89 50 4e 47 00 ff; sha256 ")
    assert "is no UTF-8 text" in await failed(sandbox, "edit_file", path="image", old="P", new="Q")


@pytest.mark.parametrize("path", ["missing", "a/../../etc/passwd", "/etc/passwd", "folder", "out", "nul\0"])
@pytest.mark.parametrize("tool", ["read_file", "edit_file"])
async def test_a_path_that_names_no_file_of_the_workspace_is_a_tool_error(
    sandbox: Sandbox, tool: str, path: str
) -> None:
    await answered(sandbox, "shell", command="mkdir folder; ln -s /etc/passwd out")
    more = {"old": "root", "new": "toor"} if tool == "edit_file" else {}
    said = await failed(sandbox, tool, path=path, **more)
    assert "root" not in said
    assert len(said) < 300


async def test_an_edit_replaces_exactly_one_place_and_keeps_the_mode(sandbox: Sandbox) -> None:
    await answered(sandbox, "write_file", path="run.sh", content="#!/bin/sh\necho one\necho two\necho one\n")
    await answered(sandbox, "shell", command="chmod 750 run.sh")
    assert (
        await answered(sandbox, "edit_file", path="run.sh", old="echo two\n", new="echo 2\n")
        == "replaced the text at line 3 in run.sh\n"
    )
    twice = await failed(sandbox, "edit_file", path="run.sh", old="echo one", new="echo 1")
    assert twice.startswith("run.sh: the old text occurs 2 times, at lines 2, 4; nothing was changed.")
    everywhere = await answered(sandbox, "edit_file", path="run.sh", old="one", new="1", all=True)
    assert everywhere == "replaced the text 2 times in run.sh\n"
    assert await answered(sandbox, "shell", command="./run.sh; stat -c %a run.sh") == "1\n2\n1\n750\n"


async def test_what_is_written_through_a_link_goes_where_it_leads(sandbox: Sandbox) -> None:
    await answered(sandbox, "shell", command="mkdir d; echo one > d/a; ln -s d/a first; ln -s /workspace/first second")
    await answered(sandbox, "shell", command="ln -s /etc/hosts out; ln -s ../../x up; ln -s loop loop; ln -s d/new new")
    await answered(sandbox, "edit_file", path="first", old="one", new="two")
    await answered(sandbox, "write_file", path="new", content="3")
    assert await answered(sandbox, "shell", command="cat d/a d/new; readlink first") == "two\n3d/a\n"
    await answered(sandbox, "write_file", path="second", content="4")
    assert await answered(sandbox, "read_file", path="d/a") == "4"
    for path in ("out", "up"):
        assert "a link leads out of the workspace" in await failed(sandbox, "write_file", path=path, content="x")
    assert "too many links" in await failed(sandbox, "write_file", path="loop", content="x")
    await answered(sandbox, "shell", command="ln -s d e; ln -s d/a d/b; ln -sf a d/b; chmod 640 d/a")
    await answered(sandbox, "write_file", path="e/b", content="5")
    assert await answered(sandbox, "shell", command="cat d/a; readlink d/b; stat -c %a d/a") == "5a\n640\n"


class Unlisted:
    """A sandbox whose workspace is too large to be listed for one file."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> object:
        return getattr(self._sandbox, name)

    async def index(self) -> NoReturn:
        raise AssertionError("the whole workspace was listed")


async def test_a_file_is_written_and_edited_without_a_look_at_the_others(sandbox: Sandbox) -> None:
    unlisted = cast(Sandbox, Unlisted(sandbox))
    await answered(sandbox, "shell", command="mkdir d; echo one > d/a; ln -s d/a first; chmod 755 d/a")
    await answered(unlisted, "edit_file", path="first", old="one", new="two")
    await answered(unlisted, "write_file", path="new", content="3")
    assert await answered(sandbox, "shell", command="cat d/a new; stat -c %a d/a") == "two\n3755\n"


async def test_an_edit_that_finds_nothing_says_what_is_near(sandbox: Sandbox) -> None:
    await answered(sandbox, "write_file", path="a.py", content="def f():\n    return 1\n")
    assert "does not occur in it\n" in await failed(sandbox, "edit_file", path="a.py", old="class", new="x")
    near = await failed(sandbox, "edit_file", path="a.py", old="  return 1\n  # end", new="x")
    assert "its first line stands at line 2, so white space or a later line differs" in near
    await sandbox.write("dos.txt", b"one\r\ntwo\r\n")
    dos = await failed(sandbox, "edit_file", path="dos.txt", old="one\ntwo", new="x")
    assert r'it would with "\r\n" as line ends' in dos
    assert "the same" in await failed(sandbox, "edit_file", path="a.py", old="def", new="def")
    await answered(sandbox, "write_file", path="aaa", content="aaa")
    assert "occurs 2 times, at lines 1, 1" in await failed(sandbox, "edit_file", path="aaa", old="aa", new="b")


async def test_a_file_that_does_not_fit_the_workspace_is_a_limit_not_an_error(sandbox: Sandbox) -> None:
    for name in "abc":
        execution = await run(sandbox, "write_file", path=name, content="x" * (3 << 20))
    assert (execution.status, execution.reason) == (ToolStatus.resource_limit, "disk_bytes")
    assert execution.output


async def test_a_sandbox_that_died_is_no_answer_of_a_tool(sandbox: Sandbox) -> None:
    await sandbox.close()
    with pytest.raises(SandboxDied):
        await run(sandbox, "read_file", path="a")
