"""What killed sandbox workers have left on the machine: processes, control groups, mounts, temporary folders."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

OURS = re.compile(r"turnlog-sandbox-\d+-(\d+)-")
"""Names carry the pid of the worker that made the thing."""


def left(workers: Iterable[int], uids: range) -> dict[str, list[str]]:
    """Of workers with these pids and sandboxes of these host users, by kind."""
    pids = set(workers)
    return {
        "processes": _processes(uids),
        "cgroups": [str(path) for path in _groups() if _of(path.name, pids)],
        "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if _of(line, pids)],
        "folders": [name for name in os.listdir(tempfile.gettempdir()) if _of(name, pids)],
    }


def _processes(uids: range) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if folder.stat().st_uid in uids or _real_uid(folder) in uids:
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()[:80]!r}")
    return found


def _real_uid(folder: Path) -> int:
    lines = (folder / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Uid:")).split()[1])


def _groups() -> list[Path]:
    top = Path("/sys/fs/cgroup")
    return [Path(parent) / name for parent, names, _ in os.walk(top) for name in names if OURS.match(name)]


def _of(text: str, pids: set[int]) -> bool:
    return any(int(match) in pids for match in OURS.findall(text))
