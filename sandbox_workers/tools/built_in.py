"""The built-in tools, and the table of every tool by name: the built-in ones, and those that packages offer.

Single commands (python, python_session, shell), a step of an environment that lives in the persistent interpreter
(env_step), text files of the workspace (read_file, write_file, edit_file), and a program that is the whole agent."""

from __future__ import annotations

import asyncio
import codecs
import dataclasses
import hashlib
import json
import re
import socket
from collections.abc import AsyncIterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from turnlog.infra.environments.tools import (
    AGENT,
    BUILT_IN,
    GATEWAY_INSIDE,
    KEY_INSIDE,
    BrokenTool,
    describe_tool,
    find_tools,
    load_tool,
)
from turnlog.sandbox_workers.protocol import Command, Execution, Kind, OutputStream, QuotaExceeded, Sandbox
from turnlog.sandbox_workers.tools.tool import Call, Tool, ToolFailed, always
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolStatus

DRIVER: Final = Path(__file__).with_name("environment_driver.py").read_text()
NAME: Final = "turnlog_environment"
CALL: Final = """\
import sys as _sys
if {name!r} not in _sys.modules:
    import types as _types
    _module = _sys.modules[{name!r}] = _types.ModuleType({name!r})
    exec(compile({driver!r}, {file!r}, "exec"), _module.__dict__)
    del _types, _module
_sys.modules[{name!r}].answer({arguments!r}, _sys.modules[{name!r}].STAGE)
del _sys
"""


async def python(call: Call) -> Execution:
    """Run code in a fresh interpreter."""
    return await call.exec(Command(kind=Kind.python, source=call.arguments["code"]))


async def python_session(call: Call) -> Execution:
    """Run code in the sandbox's one persistent interpreter."""
    return await call.exec(Command(kind=Kind.session, source=call.arguments["code"]))


async def shell(call: Call) -> Execution:
    """Run a command by `bash -c`, or `sh -c` where there is no bash."""
    given = call.arguments
    wall_s = min(given.get("timeout_s", call.limits.wall_s), call.limits.wall_s)
    command = Command(
        kind=Kind.shell,
        source=given["command"],
        stdin=given.get("stdin", "").encode(),
        cwd=in_workspace(given.get("cwd", "")),
    )
    return await call.exec(command, limits=dataclasses.replace(call.limits, wall_s=wall_s))


def within_limits(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Refuse a time-out that is longer than the call's wall limit."""
    asked = arguments.get("timeout_s", 0)
    return f'"timeout_s" must be at most {limits.wall_s:g}, got {asked}' if asked > limits.wall_s else ""


def kept_interpreter(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Refuse a sandbox that is emptied after the call: the interpreter would lose the variables that it promises to
    retain."""
    return "" if spec.durable_workspace else "it needs a sandbox with durable_workspace, which this session has not"


def in_workspace(path: str) -> str:
    """Make a path relative to the workspace: models write /workspace/x as often as x."""
    return path.removeprefix("/workspace/") if path != "/workspace" else ""


async def env_step(call: Call) -> Execution:
    """Reset or step the environment. The answer is one JSON object of observation, reward, terminated, truncated,
    info."""
    arguments = json.dumps(dict(call.arguments))
    source = CALL.format(name=NAME, driver=DRIVER, file=f"<{NAME}>", arguments=arguments)
    printed = bytearray()

    def listen(stream: OutputStream, part: bytes) -> None:
        if stream is OutputStream.stdout:
            printed.extend(part)
        if call.on_output is not None:
            call.on_output(stream, part)

    execution = await call.exec(Command(kind=Kind.session, source=source), on_output=listen)
    if execution.status is not ToolStatus.ok:
        return execution
    text = _answer(bytes(printed).strip().rpartition(b"\n")[2])
    return dataclasses.replace(execution, output=text.encode(errors="replace") + b"\n")


def needs(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Refuse a call that is neither a reset nor an action, mixes both, or has a sandbox that does not retain the
    environment."""
    reset = arguments.get("reset", False)
    if reset and "action" in arguments:
        return '"reset" begins an episode and takes no "action"'
    if not reset and "action" not in arguments:
        return 'missing: "action", or "reset": true'
    if not reset and (spare := [name for name in ("seed", "options") if name in arguments]):
        return f'"{spare[0]}" goes with "reset": true alone'
    return kept_interpreter(arguments, spec, limits)


def _answer(line: bytes) -> str:
    """Parse the driver's last line. Code of the environment may have printed before it, past Python's own stdout, and
    the agent's code may have replaced it, so nothing in it is trusted. Raises ToolFailed with the environment's
    error."""
    try:
        said = json.loads(line)
        error = said.get("error")
        answer = json.dumps(said["answer"], ensure_ascii=False, allow_nan=False) if error is None else ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ToolFailed("the environment's process ended its answer early or printed behind it") from None
    if error is not None:
        raise ToolFailed(str(error).rstrip("\n"))
    return answer


SPOKEN_TO: Final = {
    "OPENAI_BASE_URL": f"{GATEWAY_INSIDE}/v1",
    "OPENAI_API_KEY": KEY_INSIDE,
    "ANTHROPIC_BASE_URL": GATEWAY_INSIDE,
    "ANTHROPIC_AUTH_TOKEN": KEY_INSIDE,
}
"""Environment variables that clients of the gateway's API adapters read, for a program that has no other
configuration."""


async def agent(call: Call) -> Execution:
    """Write the agent's files and run it; the program is the whole agent."""
    given, gateway = call.arguments, gateway_address(call.sandbox)
    for path, content in given["files"].items():
        await call.sandbox.write(in_workspace(path), content.replace(GATEWAY_INSIDE, gateway).encode())
    argv = tuple(word.replace(GATEWAY_INSIDE, gateway) for word in given["argv"])
    env = {name: value.replace(GATEWAY_INSIDE, gateway) for name, value in {**SPOKEN_TO, **given["env"]}.items()}
    return await call.exec(Command(kind=Kind.program, argv=argv, env=env, agent=True))


def gateway_address(sandbox: Sandbox) -> str:
    """Return the base URL at which programs in the sandbox find the gateway: GATEWAY_INSIDE, except in a subprocess,
    whose proxy listens on any free port of the host's loopback."""
    if sandbox.proxy is None or sandbox.proxy.family != socket.AF_INET:
        return GATEWAY_INSIDE
    host, port = sandbox.proxy.getsockname()
    return f"http://{host}:{port}"


def at_the_gateway(arguments: Mapping[str, Any], spec: SandboxSpec, limits: SandboxLimits) -> str:
    """Refuse a sandbox unsuitable for an agent: it needs the network, to reach the gateway through the proxy, and a
    durable workspace, since its files are judged."""
    serves = spec.network == "allowlist" and spec.durable_workspace
    return "" if serves else "an agent needs a sandbox with the network allowlist and durable_workspace"


LONGEST = 64 * 2**20
"""Maximum size in bytes of a file to read, whatever the limit of the workspace; it is read in parts."""
EDITED = 16 * 2**20
"""Maximum size in bytes of a file to edit, since it is held in memory."""
PART = 256 * 2**10
"""Bytes of a file that are processed at once before the event loop continues."""
NOTE = 300
"""Bytes of an answer reserved for the note that more is to come."""
NAMED = 10
"""Maximum number of places of an ambiguous text that are listed."""


async def read_file(call: Call) -> Execution:
    """Return the requested lines verbatim, with a note at the end if they are not the whole file."""
    path, first = in_workspace(call.arguments["path"]), call.arguments.get("offset", 1)
    lines = Lines(first, call.arguments.get("lines"), call.limits.output_bytes - NOTE)
    text = codecs.getincrementaldecoder("utf-8")()
    try:
        async for part in _parts(call, path):
            _check_text(text, part)
            lines.feed(part)
        text.decode(b"", final=True)
    except UnicodeError:
        raise ToolFailed(await _describe_binary(call, path)) from None
    lines.finish()
    if first > max(1, lines.count):
        raise ToolFailed(f"{path} has {lines.count} lines, none is number {first}")
    last = first + len(lines.taken) - 1
    if last == lines.count:
        return call.answer(b"\n".join(lines.taken) + (b"\n" if lines.has_final_newline else b""))
    if not lines.taken:
        raise ToolFailed(f"line {first} of {path} is longer than an answer may be ({call.limits.output_bytes} bytes)")
    note = f'[{path}: lines {first} to {last} of {lines.count}; read on with "offset": {last + 1}]\n'
    return call.answer(b"\n".join(lines.taken) + b"\n" + note.encode(errors="replace"))


async def write_file(call: Call) -> Execution:
    """Replace or create the file."""
    path, content = in_workspace(call.arguments["path"]), call.arguments["content"].encode()
    await call.sandbox.write(path, content, follow=True)
    return call.answer(f"wrote {len(content)} bytes to {path}\n")


async def edit_file(call: Call) -> Execution:
    """Replace one occurrence of a text, or every one."""
    path, every = in_workspace(call.arguments["path"]), call.arguments.get("all", False)
    old, new = (call.arguments[name].encode() for name in ("old", "new"))
    content = await call.sandbox.read(path, most=min(EDITED, max(call.limits.disk_bytes, 1)))
    try:
        count, lines = await asyncio.to_thread(_find_occurrences, path, content, old, new, every=every)
    except UnicodeError:
        raise ToolFailed(await _describe_binary(call, path)) from None
    size = len(content) + content.count(old) * (len(new) - len(old))
    if size > call.limits.disk_bytes:
        raise QuotaExceeded(f"{path}: {size} bytes do not fit the workspace's {call.limits.disk_bytes}")
    await call.sandbox.write(path, await asyncio.to_thread(content.replace, old, new), follow=True)
    where = f"at line {lines[0]}" if count == 1 else f"{count} times"
    return call.answer(f"replaced the text {where} in {path}\n")


async def _parts(call: Call, path: str) -> AsyncIterator[bytes]:
    """Yield the file's bytes, PART at a time."""
    most, offset = min(LONGEST, max(call.limits.disk_bytes, 1)), 0
    while part := await call.sandbox.read_part(path, offset=offset, size=PART, most=most):
        yield part
        offset += len(part)


def _check_text(decoder: codecs.IncrementalDecoder, part: bytes) -> None:
    """Raise UnicodeError if the part is not text."""
    decoder.decode(part)
    if b"\0" in part:
        raise UnicodeError("a NUL byte")


async def _describe_binary(call: Call, path: str) -> str:
    digest, size, begins = hashlib.sha256(), 0, b""
    async for part in _parts(call, path):
        digest.update(part)
        size, begins = size + len(part), begins or part[:16]
    return f"{path} is no UTF-8 text: {size} bytes that begin with {begins.hex(' ')}; sha256 {digest.hexdigest()}"


def _find_occurrences(path: str, content: bytes, old: bytes, new: bytes, *, every: bool) -> tuple[int, list[int]]:
    """Return how often the old text occurs, and the lines of its first occurrences. Raises ToolFailed if the edit is
    not legal, UnicodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), PART):
        _check_text(decoder, content[start : start + PART])
    decoder.decode(b"", final=True)
    lines = _first_places(content, old)
    count = max(content.count(old), len(lines))
    if not count:
        raise ToolFailed(f"{path}: the old text does not occur in it{_nearly(content, old)}")
    if old == new:
        raise ToolFailed(f"{path}: the old and the new text are the same; nothing was changed")
    if count > 1 and not every:
        places = ", ".join(map(str, lines)) + (" ..." if count > len(lines) else "")
        raise ToolFailed(
            f"{path}: the old text occurs {count} times, at lines {places}; nothing was changed. Give more of what "
            'stands around it, or "all": true'
        )
    return count, lines


def _first_places(content: bytes, old: bytes) -> list[int]:
    """Return the lines of the first NAMED occurrences. Overlapping ones are included, since either may be meant."""
    lines: list[int] = []
    place, line, counted = content.find(old), 1, 0
    while place >= 0 and len(lines) < NAMED:
        line += content.count(b"\n", counted, place)
        counted = place
        lines.append(line)
        place = content.find(old, place + 1)
    return lines


def _nearly(content: bytes, old: bytes) -> str:
    """Tell where the first line of the old text occurs but for white space around it; then white space or what follows
    differs."""
    if b"\r\n" in content and old.replace(b"\n", b"\r\n") in content:
        return '; it would with "\\r\\n" as line ends'
    begins = next((line.strip() for line in old.split(b"\n") if line.strip()), b"")
    if begins and (
        found := re.search(rb"^[ \t\r\v\f]*" + re.escape(begins) + rb"[ \t\r\v\f]*$", content, re.MULTILINE)
    ):
        line = content.count(b"\n", 0, found.start()) + 1
        return f"; its first line stands at line {line}, so white space or a later line differs"
    return ""


class Lines:
    """Collects lines from number `first` on, at most `most` of them, and as many as fit `room` bytes with a line end
    each."""

    def __init__(self, first: int, most: int | None, room: int) -> None:
        self.first = first
        self.taken: list[bytes] = []
        self.count = 0
        """Number of lines in the whole text; what follows the last line end is not counted if it is empty."""
        self._most = most
        self._room = room
        self._over = False
        self._begun = b""
        self._open = False

    @property
    def has_final_newline(self) -> bool:
        """True if the text ends with a line end."""
        return self.count > 0 and not self._open

    def feed(self, part: bytes) -> None:
        """Take the next bytes of the text, at least one."""
        ends = part.count(b"\n")
        skipped = self.first - 1 - self.count
        start = 0 if skipped <= 0 else len(part) if ends < skipped else _after(part, skipped)
        while start < len(part) and not self._over:
            end = part.find(b"\n", start)
            self._begun += part[start : end if end >= 0 else len(part)]
            start = end + 1 if end >= 0 else len(part)
            if end >= 0:
                self._take()
            self._over = self._over or len(self._begun) > self._room
        self.count += ends
        self._open = not part.endswith(b"\n")

    def finish(self) -> None:
        """Finish the last line; no more parts follow."""
        if self._begun and not self._over:
            self._take()
        self.count += self._open

    def _take(self) -> None:
        self._room -= len(self._begun) + 1
        if self._room >= 0:
            self.taken.append(self._begun)
        self._over = self._room < 0 or len(self.taken) == self._most
        self._begun = b""


def _after(part: bytes, ends: int) -> int:
    """Return the position after `ends` line ends, which `part` must contain."""
    low, high = 0, len(part)
    while high - low > 1:
        middle = (low + high) // 2
        if (found := part.count(b"\n", low, middle)) >= ends:
            high = middle
        else:
            ends -= found
            low = middle
    return high


RUN = {
    "python": (python, {Kind.python}, always),
    "shell": (shell, {Kind.shell}, within_limits),
    "python_session": (python_session, {Kind.session}, kept_interpreter),
    "read_file": (read_file, (), always),
    "write_file": (write_file, (), always),
    "edit_file": (edit_file, (), always),
    "env_step": (env_step, {Kind.session}, needs),
    AGENT.name: (agent, {Kind.program}, at_the_gateway),
}
OURS = {**BUILT_IN, AGENT.name: AGENT}


@cache
def tools() -> Mapping[str, Tool]:
    """Return every tool by name, the built-in ones first; looked up once. Raises ToolOfferError."""
    found = {name: _built_in(name) for name in OURS}
    for name, point in find_tools().items():
        tool = load_tool(point)
        if not isinstance(tool, Tool):
            raise BrokenTool(f"{describe_tool(point)}: must be a turnlog.sandbox_workers.tools.Tool, got {tool!r:.200}")
        found[name] = tool
    return found


def _built_in(name: str) -> Tool:
    known, (run, kinds, legal) = OURS[name], RUN[name]
    return Tool(
        name=name, version=known.version, about=known.about, schema=known.arguments,
        run=run, kinds=frozenset(kinds), legal=legal, once=known is AGENT,
    )  # fmt: skip
