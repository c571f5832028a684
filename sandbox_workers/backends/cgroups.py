"""A control group per sandbox: the kernel's hard bounds on its memory, processes and cores, beside the rlimits.

Pages of a sandbox's tmpfs are charged to its group too, so the memory bound leaves room for the disk that it may use.
Source: the kernel's admin-guide/cgroup-v1 (memory, pids, cpu) and cgroup-v2.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.cgroup_tree import (
    KILL,
    WANTED,
    Tree,
    below,
    find,
    hand_down,
    processes,
    put,
    removed,
)
from turnlog.sandbox_workers.backends.leftovers import noted, owned_prefix, ownerless, sweep_folders
from turnlog.sandbox_workers.protocol import BackendUnavailable, SandboxUnavailable
from turnlog.schemas.events import SandboxLimits

log = logging.getLogger(__name__)

MODES = ("auto", "required", "off")
BASELINE_BYTES = 48 << 20
"""The init, bwrap and the kernel's own (stacks, page tables, inodes) beside what a call may use."""
SOCKET_BYTES = 16 << 20
"""Buffers of its TCP and UDP sockets, which version 1 counts by themselves; what is beyond waits or is dropped, as on a
network. On version 2 they are memory like any other."""
BASELINE_PIDS = 3
"""bwrap, the zygote and the init, where the kernel does not say how many processes stand between calls."""
CONTROLLERS = ("memory", "pids")
"""That count what they enforce."""
PERIOD_US = 100_000
DYING_S = 1.0
"""Processes with namespaces of their own take milliseconds to end."""
LIMIT_FILES: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "pids": ("pids.max",)},
    2: {"memory": ("memory.max",), "pids": ("pids.max",)},
}
"""What `begin` writes. The first of version 1 bounds memory alone, the second memory and swap: no swap."""
SOCKET_FILE = "memory.kmem.tcp.limit_in_bytes"
"""Of version 1: bounds UDP, too, once it is set (measured on Linux 6.18)."""
OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max", SOCKET_FILE)
"""Left out by kernels that do not count these."""
REMEDY = {
    None: "no writable cgroup hierarchy with memory and pids: start the worker as root, or by "
    "`systemd-run --user --scope -p Delegate=yes`; in a container, mount /sys/fs/cgroup writable",
    1: "the hierarchy of memory or pids cannot be written: start the worker as root",
    2: "other processes live in the worker's control group, so it cannot hand controllers down: start the worker by "
    "`systemd-run --user --scope -p Delegate=yes`, or as the only process of its container",
}
EVENT_FILES = {
    1: {"memory": ("memory.oom_control", "oom_kill"), "pids": ("pids.events", "max")},
    2: {"memory": ("memory.events", "oom_kill"), "pids": ("pids.events", "max")},
}
"""Where it counts that a bound was enforced: processes killed, forks refused."""
READ_BYTES = 8192
"""memory.stat, the longest, has about 1,500."""

_numbers = itertools.count()
_abandoned: set[Path] = set()
"""Groups of this process that could not be removed yet: their last processes were still dying."""


class Cgroups:
    """Where groups are made, one for each sandbox, each of so many cores."""

    def __init__(self, tree: Tree, cpus: float) -> None:
        self.tree = tree
        self._cpus = cpus

    @classmethod
    def open(cls, settings: SandboxSettings, *, tree: Tree | None = None) -> Cgroups | None:
        """What [sandbox] cgroups asks for; None: off, or `auto` where they cannot be written (said in the log).
        Removes what dead workers left. Raises BackendUnavailable (`required`, or a word that is none of the three)."""
        if settings.cgroups not in MODES:
            raise BackendUnavailable(f"[sandbox] cgroups = {settings.cgroups!r} is none of {', '.join(MODES)}")
        tree = tree or find()
        sweep(tree)
        if settings.cgroups == "off":
            return None
        try:
            if tree is None or not {"memory", "pids"} <= set(tree.folders):
                raise FileNotFoundError(REMEDY[None if tree is None else tree.version])
            if tree.version == 2:
                hand_down(tree.folders["memory"], tuple(name for name in WANTED if name in tree.folders))
            found = cls(tree, settings.cpus)
            probe = found.group()
            try:
                probe.begin(SandboxLimits())
            finally:
                probe.close()
        except OSError as error:
            why = REMEDY[2] if error.errno == errno.EBUSY else str(error)
            if settings.cgroups == "required":
                raise BackendUnavailable(
                    f'[sandbox] cgroups = "required", but control groups cannot be written: {why}'
                ) from error
            log.warning("control groups cannot be written, rlimits and looking hold alone: %s", why)
            return None
        return found

    def group(self) -> Group:
        """A new one, empty. Raises OSError."""
        return Group(self.tree, f"{owned_prefix()}{next(_numbers)}", self._cpus)


def bounds_of(cgroups: Cgroups | None) -> Group | None:
    """A new group, where there are any. Raises SandboxUnavailable."""
    try:
        return None if cgroups is None else cgroups.group()
    except OSError as error:
        raise SandboxUnavailable(f"its control group cannot be made: {error}") from error


class Group:
    """Bounds of one sandbox: a control group, on version 1 one folder per controller."""

    def __init__(self, tree: Tree, name: str, cpus: float) -> None:
        self._version = tree.version
        self._folders = {controller: folder / name for controller, folder in tree.folders.items()}
        self._written: dict[Path, str] = {}
        self._before: dict[str, int] = {}
        self._cpu_before = 0.0
        self._disk_bytes = 0
        self._places = tuple(dict.fromkeys(self._folders.values()))
        self._figures = Figures(tree.version, self._folders)
        try:
            for place in self._places:
                place.mkdir()
            self._cores(cpus)
        except OSError:
            self.close()
            raise

    def adopt(self, pid: int) -> None:
        """Take in a process and all below it; those that they start follow by themselves. Takes about 10 ms (the kernel
        waits for all cores), 0.2 ms when all are in already: a caller may begin while the sandbox comes up, and
        ask again when it is up. Raises OSError (ESRCH: it is gone)."""
        family = (pid, *below(pid))
        for place in self._places:
            inside = processes(place)
            for number in family:
                if number not in inside:
                    put(place / "cgroup.procs", str(number))

    def begin(self, limits: SandboxLimits) -> None:
        """Set the bounds of a call, writing only what changes, and note the counters."""
        self._disk_bytes = limits.disk_bytes
        self._bound("memory", limits.memory_bytes + limits.disk_bytes + BASELINE_BYTES)
        standing = self._figures.standing()
        # One more than its limit, so that looking sees it beyond; what it then tries is refused and counted here,
        # before the rlimit, which keeps no count.
        self._bound("pids", limits.pids + 1 + (BASELINE_PIDS if standing is None else standing))
        if "memory" in self._folders:
            name, most = ("memory.swap.max", 0) if self._version == 2 else (SOCKET_FILE, SOCKET_BYTES)
            self._write(self._folders["memory"] / name, str(most))
        self._before = {controller: self._figures.enforced(controller) for controller in CONTROLLERS}
        self._cpu_before = self._figures.cpu_s()

    def cpu_s(self) -> float:
        return max(0.0, self._figures.cpu_s() - self._cpu_before)

    def exceeded(self) -> str | None:
        """The limit that the kernel enforced since `begin`, by its name in SandboxLimits."""
        memory, pids = (self._figures.enforced(name) > self._before.get(name, 0) for name in CONTROLLERS)
        if memory:
            return "disk_bytes" if self._figures.shared_bytes() >= self._disk_bytes > 0 else "memory_bytes"
        return "pids" if pids else None

    def close(self) -> None:
        """Kill what is left in it and remove it. What takes longer to die than DYING_S is for a later `sweep`."""
        self._figures.close()
        for place in removed(self._places, DYING_S):
            _abandoned.add(place)

    def _cores(self, cpus: float) -> None:
        folder = self._folders.get("cpu")
        if folder is None or cpus <= 0:
            return
        quota = max(1000, int(cpus * PERIOD_US))
        if self._version == 2:
            put(folder / "cpu.max", f"{quota} {PERIOD_US}")
        else:
            put(folder / "cpu.cfs_period_us", str(PERIOD_US))
            put(folder / "cpu.cfs_quota_us", str(quota))

    def _bound(self, controller: str, value: int) -> None:
        folder = self._folders.get(controller)
        if folder is None:
            return
        files = [folder / name for name in LIMIT_FILES[self._version][controller]]
        if value > int(self._written.get(files[0], value)):
            files.reverse()  # memory alone may never be bounded higher than memory and swap
        for file in files:
            if not self._write(file, str(value)):
                return

    def _write(self, file: Path, text: str) -> bool:
        """False when more is in use than a new bound allows: then the old one holds. Raises OSError."""
        if self._written.get(file) == text:
            return True
        try:
            put(file, text)
        except OSError as error:
            if error.errno == errno.EBUSY:
                log.debug("%s stays as it is: %s", file, error)
                return False
            if file.name not in OPTIONAL:
                raise
        self._written[file] = text
        return True


def sweep(tree: Tree | None = None) -> dict[str, int]:
    """Kill and remove what dead workers left on this machine, and what of ours was still dying: how many of each kind.
    Costs about a millisecond when there is nothing. Never raises for what another worker removes at the same time."""
    found = {"process": 0, "group": 0, "folder": sweep_folders()}
    for place in list(_abandoned):
        if not removed((place,)):
            _abandoned.discard(place)
    tree = tree or find()
    for parent in tree.places() if tree else ():
        for path in _orphans(parent):
            alive = len(processes(path))
            if removed((path,)):
                continue  # still dying: next time
            noted("group", str(path))
            found["group"] += 1
            if alive:
                noted("process", str(path), alive)
                found["process"] += alive
    return found


def _orphans(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        yield from [parent / entry.name for entry in entries if ownerless(entry.name)]


class Figures:
    """What the kernel counts of the group in `folders`. Read before and after every call, so files stay open."""

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
