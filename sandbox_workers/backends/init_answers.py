"""What an init is sent; what it answers, made into what a worker knows; what no init would answer is SandboxDied."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from turnlog.sandbox_workers.backends.heartbeat import SILENCE_S
from turnlog.sandbox_workers.inside.interpreter import ENDED
from turnlog.sandbox_workers.inside.workspace import LONGEST_PATH, MOST_ENTRIES, PathRefused, exact
from turnlog.sandbox_workers.protocol import (
    Command,
    Execution,
    FileEntry,
    FileKind,
    FileRefused,
    Kind,
    SandboxDied,
    Stream,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

INDEX_BYTES = 32 << 20
"""Longest index: MOST_ENTRIES entries, and workspace.NAME_BYTES of names at six bytes each."""
OBSERVED_BYTES = 1 << 16
"""Longest answer to `observed`."""
STAMP_LENGTH = 128
SAID = frozenset({ToolStatus.ok, ToolStatus.tool_error, ToolStatus.timeout, ToolStatus.resource_limit})
"""An init's verdicts. That it was ours, or that somebody cancelled the call, is not for a sandbox to say."""
LOST = Execution(ToolStatus.tool_error, "interpreter_ended", None, ENDED, 0.0, 0.0)
"""Nothing was run: the interpreter that the call was to go on in has ended between calls, which only a call before it
can have prepared."""
TEXT_FIELDS = ("path", "kind", "target", "stamp")


def execution(head: dict[str, Any], output: bytes, *, cancelled: bool) -> Execution:
    """Of the answer to `exec`; `cancelled`: that was asked for. Raises SandboxDied."""
    try:
        status, reason, code = ToolStatus(head["status"]), str(head["reason"])[:64], head["exit_code"]
        duration, cpu = float(head["duration_s"]), float(head["cpu_s"])
        if not (code is None or type(code) is int) or not math.isfinite(duration + cpu) or min(duration, cpu) < 0:
            raise ValueError(head)
        if status not in SAID and not (cancelled and status is ToolStatus.cancelled):
            raise ValueError(head)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise SandboxDied(f"the init answered nonsense: {str(error)[:200]}") from error
    return Execution(status, reason, code, output, duration, cpu)


def observed(body: bytes) -> dict[str, Any]:
    """Of the answer to `observed`, by name. Raises SandboxDied."""
    try:
        return dict(json.loads(body))
    except (ValueError, TypeError, RecursionError) as error:
        raise SandboxDied(f"what the init has found is no JSON object: {type(error).__name__}") from error


def joined(parts: Mapping[Stream, list[bytes]]) -> bytes:
    """What a call has printed: all of stdout, then stderr."""
    return b"".join(parts[Stream.stdout] + parts[Stream.stderr])


def listed(body: bytes, disk_bytes: int) -> tuple[FileEntry, ...]:
    """Of the answer to `index`. Raises SandboxDied."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SandboxDied(f"the init's index is no JSON: {type(error).__name__}") from error
    if not isinstance(found, list) or len(found) > MOST_ENTRIES:
        raise SandboxDied(f"the init's index is no list of at most {MOST_ENTRIES} entries")
    folders, entries = {""}, []
    before = ""
    for about in found:
        entry = _entry(about)
        if entry.path <= before or entry.path.rpartition("/")[0] not in folders:
            raise SandboxDied("the init's index is in no order of folders and what is in them")
        before = entry.path
        if entry.kind is FileKind.folder:
            folders.add(entry.path)
        entries.append(entry)
    if sum(entry.size for entry in entries) > disk_bytes:
        raise SandboxDied("the init's index holds more than the workspace can")
    return tuple(entries)


def _entry(about: object) -> FileEntry:
    if not isinstance(about, dict) or not all(type(about.get(name)) is str for name in TEXT_FIELDS):
        raise SandboxDied("the init's index holds something else than entries")
    mode, size, target, stamp = about.get("mode"), about.get("size"), about["target"], about["stamp"]
    if type(mode) is not int or not 0 <= mode <= 0o777 or type(size) is not int or size < 0:
        raise SandboxDied("the init's index holds a mode or a size that no file has")
    try:
        exact(about["path"])
        kind = FileKind(about["kind"])
    except (PathRefused, ValueError) as error:
        raise SandboxDied(f"the init's index holds a path that no file has: {error}") from error
    fits = (kind is FileKind.link) == bool(target) and (kind is FileKind.file or not size)
    if not fits or "\0" in target or len(target) > LONGEST_PATH or len(stamp) > STAMP_LENGTH:
        raise SandboxDied("the init's index holds a link or a stamp that no file has")
    return FileEntry(path=about["path"], kind=kind, mode=mode, size=size, target=target, stamp=stamp)


def names(paths: Sequence[str]) -> bytes:
    """What `read_files` sends."""
    return json.dumps(list(paths)).encode()


def divided(body: bytes, count: int) -> tuple[bytes, ...]:
    """Of the answer to `read_files`. Raises SandboxDied."""
    if len(body) < 4 * count:
        raise SandboxDied(f"the init answered {len(body)} bytes for {count} files")
    found, start = [], 4 * count
    for size in struct.unpack_from(f">{count}I", body):
        found.append(body[start : start + size])
        start += size
    if start != len(body):
        raise SandboxDied("the init answered files of other sizes than it said")
    return tuple(found)


def described(entries: Sequence[FileEntry], contents: Mapping[str, bytes]) -> tuple[bytes, list[bytes]]:
    """What `restore` sends: entries as JSON, and the files' bytes in their order. Raises FileRefused."""
    if len(entries) > MOST_ENTRIES:
        raise FileRefused(f"{len(entries)} entries, more than the {MOST_ENTRIES} of a workspace")
    files = []
    for entry in entries:
        if entry.kind is FileKind.file:
            content = contents.get(entry.path)
            if content is None or len(content) != entry.size:
                raise FileRefused(f"{entry.path!r}: its {entry.size} bytes are not given")
            files.append(content)
    names = [field.name for field in dataclasses.fields(FileEntry)]
    return json.dumps([{name: getattr(entry, name) for name in names} for entry in entries]).encode(), files


def call(command: Command, limits: SandboxLimits, *, alive: bool, prompt: bool) -> tuple[dict[str, Any], bytes, bytes]:
    """What `exec` sends: head, and body in two parts. `prompt`: somebody looks at the output while it is written."""
    if command.kind is Kind.program and not command.argv:
        raise ValueError("a program's argv names at least the program")
    source = command.source.encode(errors="replace")
    head: dict[str, Any] = {
        "op": "exec",
        "kind": command.kind,
        "argv": command.argv,
        "env": dict(command.env),
        "cwd": command.cwd,
        "silence_s": SILENCE_S,
    }
    head |= {"limits": dataclasses.asdict(limits), "source": len(source), "alive": alive, "prompt": prompt}
    return head, source, command.stdin
