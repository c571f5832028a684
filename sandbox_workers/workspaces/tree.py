"""What a tree of files may look like, wherever its list comes from: a sandbox, or a manifest that somebody stored."""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnlog.sandbox_workers.protocol import FileEntry, FileKind

MOST_ENTRIES = 100_000
MOST_PATH_BYTES = 4096
"""PATH_MAX of Linux (limits.h)."""
MOST_NAME_BYTES = 255
"""NAME_MAX of Linux."""
SHA256 = re.compile(r"[0-9a-f]{64}\Z")


def flaw(entries: Sequence[FileEntry]) -> str:
    """Why these are no tree: a path out of it or below something that is no folder, the same twice, a wrong order,
    more than a snapshot holds. Empty when they are one."""
    if len(entries) > MOST_ENTRIES:
        return f"{len(entries)} files and folders; a workspace holds {MOST_ENTRIES}"
    folders = {""}
    last = ""
    for entry in entries:
        if said := path_flaw(entry.path) or _entry_flaw(entry):
            return f"{entry.path[:200]!r}: {said}"
        if entry.path <= last:
            return f"{entry.path[:200]!r} does not come after {last[:200]!r}"
        if entry.path.rpartition("/")[0] not in folders:
            return f"{entry.path[:200]!r} lies in no folder of the workspace"
        if entry.kind is FileKind.folder:
            folders.add(entry.path)
        last = entry.path
    return ""


def path_flaw(path: str) -> str:
    """Why this is no path of a workspace; empty when it is one."""
    parts = path.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "a path is relative and has no empty part, no . and no .."
    if "\0" in path:
        return "a path holds no NUL"
    try:
        sizes = [len(part.encode(errors="surrogateescape")) for part in parts]
    except UnicodeEncodeError:
        return "a path is text that a file system could have"
    if max(sizes) > MOST_NAME_BYTES or sum(sizes) + len(parts) > MOST_PATH_BYTES:
        return f"a name has at most {MOST_NAME_BYTES} bytes, a path {MOST_PATH_BYTES}"
    return ""


def _entry_flaw(entry: FileEntry) -> str:
    if not 0 <= entry.mode <= 0o777:
        return f"mode {entry.mode:o}; permission bits are 0 to 777"
    if entry.size < 0 or (entry.size and entry.kind is not FileKind.file):
        return f"a {entry.kind} of {entry.size} bytes"
    if bool(entry.target) != (entry.kind is FileKind.link) or "\0" in entry.target:
        return f"a {entry.kind} with target {entry.target[:200]!r}"
    try:
        target = entry.target.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return "a target is text that a file system could have"
    return f"a target has at most {MOST_PATH_BYTES} bytes" if len(target) >= MOST_PATH_BYTES else ""
