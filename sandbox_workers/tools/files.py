"""Tools for text files of the workspace: read_file, write_file, edit_file.

They go through Sandbox.read and write, so they work alike on every backend, also where no program can be started.
"""

from __future__ import annotations

import hashlib
import posixpath

from turnlog.sandbox_workers.protocol import Execution, FileKind, FileRefused
from turnlog.sandbox_workers.tools.programs import in_workspace
from turnlog.sandbox_workers.tools.tool import Call, ToolFailed

LONGEST = 64 * 2**20
"""Bytes of a file that is read, whatever the limit of the workspace."""
NOTE = 300
"""Bytes of an answer kept free for the note that more is to come."""
LINKS = 40
"""Followed from one path, as by Linux (path_resolution(7))."""
NAMED = 10
"""Places of an ambiguous text that are named."""


async def read_file(call: Call) -> Execution:
    """The lines asked for, as they are; a note at the end when they are not the whole file."""
    path = in_workspace(call.arguments["path"])
    content = _text(path, await _content(call, path))
    lines = content.split(b"\n")
    if lines[-1] == b"":
        lines.pop()  # what stands behind the last line's end is no line
    first = call.arguments.get("offset", 1)
    if first > max(1, len(lines)):
        raise ToolFailed(f"{path} has {len(lines)} lines, none is number {first}")
    wanted = lines[first - 1 :][: call.arguments.get("lines")]
    taken, room = 0, call.limits.output_bytes - NOTE
    for line in wanted:
        room -= len(line) + 1
        if room < 0:
            break
        taken += 1
    last = first + taken - 1
    if last == len(lines):
        return call.answer(b"\n".join(wanted) + (b"\n" if content.endswith(b"\n") else b""))
    if not taken:
        raise ToolFailed(f"line {first} of {path} is longer than an answer may be ({call.limits.output_bytes} bytes)")
    note = f'[{path}: lines {first} to {last} of {len(lines)}; read on with "offset": {last + 1}]\n'
    return call.answer(b"\n".join(wanted[:taken]) + b"\n" + note.encode(errors="replace"))


async def write_file(call: Call) -> Execution:
    """Replace the file, or make it."""
    path, content = in_workspace(call.arguments["path"]), call.arguments["content"].encode()
    await _replace(call, path, content)
    return call.answer(f"wrote {len(content)} bytes to {path}\n")


async def edit_file(call: Call) -> Execution:
    """Replace one occurrence, or every one."""
    path, every = in_workspace(call.arguments["path"]), call.arguments.get("all", False)
    old, new = (call.arguments[name].encode() for name in ("old", "new"))
    content = _text(path, await _content(call, path))
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
    await _replace(call, path, content.replace(old, new))
    where = f"at line {lines[0]}" if count == 1 else f"{count} times"
    return call.answer(f"replaced the text {where} in {path}\n")


async def _content(call: Call, path: str) -> bytes:
    return await call.sandbox.read(path, most=min(LONGEST, max(call.limits.disk_bytes, 1)))


def _text(path: str, content: bytes) -> bytes:
    try:
        content.decode()
        if b"\0" not in content:
            return content
    except UnicodeDecodeError:
        pass  # said below
    begins, sha256 = content[:16].hex(" "), hashlib.sha256(content).hexdigest()
    raise ToolFailed(f"{path} is no UTF-8 text: {len(content)} bytes that begin with {begins}; sha256 {sha256}")


def _first_places(content: bytes, old: bytes) -> list[int]:
    """Lines of the first NAMED occurrences, overlapping ones included: which of two was meant nobody knows."""
    lines: list[int] = []
    place, line, counted = content.find(old), 1, 0
    while place >= 0 and len(lines) < NAMED:
        line += content.count(b"\n", counted, place)
        counted = place
        lines.append(line)
        place = content.find(old, place + 1)
    return lines


def _nearly(content: bytes, old: bytes) -> str:
    """Where its first line stands but for white space around it; what follows differs then."""
    if b"\r\n" in content and old.replace(b"\n", b"\r\n") in content:
        return '; it would with "\\r\\n" as line ends'
    begins = next((line.strip() for line in old.split(b"\n") if line.strip()), b"")
    lines = [line.strip() for line in content.split(b"\n")]
    if begins and begins in lines:
        return f"; its first line stands at line {lines.index(begins) + 1}, so white space or a later line differs"
    return ""


async def _replace(call: Call, path: str, content: bytes) -> None:
    """Write where the path leads, links within the workspace followed; a file keeps its mode: scripts stay
    executable. Raises FileRefused, ToolFailed."""
    try:
        entries = {entry.path: entry for entry in await call.sandbox.index()}
    except FileRefused:  # too many files to list: links and mode of one are no reason not to write it
        entries = {}
    place = posixpath.normpath(path)
    for _ in range(LINKS):
        entry = entries.get(place)
        if entry is None or entry.kind is not FileKind.link:
            break
        place = posixpath.normpath(posixpath.join(posixpath.dirname(place), in_workspace(entry.target)))
        if place.startswith(("/", "../")):
            raise ToolFailed(f"{path}: a link leads out of the workspace")
    else:
        raise ToolFailed(f"{path}: too many links lead to one another")
    mode = entry.mode if entry is not None and entry.kind is FileKind.file else 0o644
    await call.sandbox.write(path if place == posixpath.normpath(path) else place, content, mode=mode)
