"""What the kernel counts of one sandbox's control group. Read before and after every call, so files stay open."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from turnlog.sandbox_workers.backends.cgroup_tree import KILL

EVENT_FILES = {
    1: {"memory": ("memory.oom_control", "oom_kill"), "pids": ("pids.events", "max")},
    2: {"memory": ("memory.events", "oom_kill"), "pids": ("pids.events", "max")},
}
"""Where it counts that a bound was enforced: processes killed, forks refused."""
READ_BYTES = 8192
"""memory.stat, the longest, has about 1,500."""


class Figures:
    """Of the group in `folders`, by controller."""

    def __init__(self, version: int, folders: Mapping[str, Path]) -> None:
        self._events = {
            name: (folders[name] / file, key) for name, (file, key) in EVENT_FILES[version].items() if name in folders
        }
        self._current = folders["pids"] / "pids.current" if "pids" in folders else None
        self._stat = folders["memory"] / "memory.stat" if "memory" in folders else None
        self._cpu = folders["cpuacct"] / "cpuacct.usage" if "cpuacct" in folders else None
        self._cpu_stat = folders[KILL] / "cpu.stat" if KILL in folders else None
        self._files: dict[Path, int] = {}

    def enforced(self, controller: str) -> int:
        """How often the kernel has enforced its bound so far."""
        return self._figure(*self._events[controller]) if controller in self._events else 0

    def standing(self) -> int | None:
        """Processes and threads in the group now; None when the kernel does not say."""
        text = self._text(self._current)
        return int(text) if text else None

    def shared_bytes(self) -> int:
        """Pages of its tmpfs and of memory that it shares."""
        return self._figure(self._stat, "shmem")

    def cpu_s(self) -> float:
        """CPU time of all that ever ran in it, waited for or not; 0 when the kernel does not say."""
        if self._cpu_stat is not None:
            return self._figure(self._cpu_stat, "usage_usec") / 1e6
        text = self._text(self._cpu)
        return int(text) / 1e9 if text else 0.0

    def close(self) -> None:
        """Let the files go."""
        while self._files:
            os.close(self._files.popitem()[1])

    def _figure(self, file: Path | None, key: str) -> int:
        """Of a file of `key value` lines; 0 when either is missing."""
        for line in self._text(file).splitlines():
            name, _, value = line.partition(b" ")
            if name.decode() == key:
                return int(value)
        return 0

    def _text(self, file: Path | None) -> bytes:
        if file is None:
            return b""
        with contextlib.suppress(OSError):  # this kernel does not have it
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._files[file], READ_BYTES, 0)
        return b""
