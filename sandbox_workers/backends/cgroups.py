"""A control group per sandbox: the kernel's hard limits on its memory, processes and cores, in addition to the rlimits.

Pages of a sandbox's tmpfs are charged to its control group too, so the memory limit leaves room for the disk that it
may use.

The module detects where control groups can be made: version 1 (a folder per controller) or version 2 (one for all).
Source: cgroups(7), the kernel's admin-guide/cgroup-v1 and cgroup-v2; proc(5) for mountinfo and /proc/self/cgroup. On
version 1 memory is limited below our own control group, so that our own limits still apply. On version 2 a control
group with processes cannot hand its controllers down (no internal processes), so we move ourselves to a leaf first."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.roots import owned_prefix, ownerless, record_removal, sweep_folders
from turnlog.sandbox_workers.inside.processes import SOCKET_BYTES
from turnlog.sandbox_workers.protocol import BackendUnavailable, SandboxUnavailable
from turnlog.schemas.events import SandboxLimits

log = logging.getLogger(__name__)
WANTED = ("memory", "pids", "cpu")
KILL = "kill"
"""Key in `Tree.folders` of the version 2 group that `cgroup.kill` ends and whose `cpu.stat` counts; it may exist beside
version 1 controllers."""
CPU_TIME = "cpuacct"
"""Controller that counts CPU time where no version 2 group does."""
LEAF = "turnlog-worker"
"""Name of the control group below our own into which we move ourselves."""
ENDS = ["memory", "pids"]
"""Controllers without which control groups are of no use."""
KILL_ROUNDS = 100
PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class CgroupFolders:
    """Folders below which control groups are made, by controller; also by KILL."""

    version: int
    folders: Mapping[str, Path]

    def places(self) -> tuple[Path, ...]:
        """Return each folder once."""
        return tuple(dict.fromkeys(self.folders.values()))


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo: which part of a hierarchy is mounted where."""

    root: str
    point: Path
    kind: str
    options: frozenset[str]


def find(proc: Path = Path("/proc"), top: Path = Path("/")) -> CgroupFolders | None:
    """Return the usable hierarchies, without changing anything; None if there are none. Tests pass other values for
    `proc` and `top` (a prefix of mount points)."""
    try:
        own = dict(_own_groups((proc / "self/cgroup").read_text()))
    except FileNotFoundError:  # a kernel without control groups
        return None
    mounts = [
        Mount(mount.root, top / str(mount.point).lstrip("/"), mount.kind, mount.options)
        for mount in _mounts((proc / "self/mountinfo").read_text())
    ]
    second = _second(own, mounts)
    if second and set(ENDS) <= set(words(second / "cgroup.controllers")):
        usable = [name for name in WANTED if name in words(second / "cgroup.controllers")]
        return CgroupFolders(2, dict.fromkeys((KILL, *usable), second))
    folders = dict(_first(own, mounts, WANTED if second else (*WANTED, CPU_TIME)))
    if second and folders:
        folders = {KILL: second, **folders}
    return CgroupFolders(1, folders) if set(ENDS) & set(folders) else None


def hand_down(base: Path, wanted: tuple[str, ...]) -> None:
    """Make these controllers available below `base` (version 2), moving ourselves to a leaf if necessary. Raises
    OSError: EBUSY if other processes live in `base` as well."""
    control = base / "cgroup.subtree_control"
    missing = [name for name in wanted if name not in words(control)]
    if not missing:
        return
    text = " ".join(f"+{name}" for name in missing)
    try:
        put(control, text)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        leaf = base / LEAF
        leaf.mkdir(exist_ok=True)
        put(leaf / "cgroup.procs", str(os.getpid()))
        log.info("moved this worker to control group %s", leaf)
        put(control, text)


def words(path: Path) -> list[str]:
    """Return the words of a file; empty if it does not exist."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def put(path: Path, text: str) -> None:
    """Write the text by one write(2), which the kernel takes as one command."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _own_groups(text: str) -> Iterator[tuple[str, str]]:
    """Yield (controller, path of our control group); "" stands for version 2."""
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            yield name, path


def _mounts(text: str) -> Iterator[Mount]:
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        if kind in ("cgroup", "cgroup2"):
            point = fields[4].encode().decode("unicode_escape")
            yield Mount(fields[3], Path(point), kind, frozenset(options.split(",")))


def _second(own: Mapping[str, str], mounts: list[Mount]) -> Path | None:
    """Return our own version 2 group, or its parent if we have moved to its leaf before."""
    for mount in mounts:
        if mount.kind == "cgroup2" and (folder := _inside(mount, own.get("", "/"))):
            folder = folder.parent if folder.name == LEAF else folder
            if _writable(folder):
                return folder
    return None


def _first(own: Mapping[str, str], mounts: list[Mount], wanted: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for name in wanted:
        for mount in mounts:
            if mount.kind != "cgroup" or name not in mount.options:
                continue
            below = _inside(mount, own.get(name, "/"))
            if below is None and name != "memory":
                below = mount.point
            if below is not None and _writable(below):
                yield name, below


def _inside(mount: Mount, path: str) -> Path | None:
    """Return the folder of a control group, or None if this mount does not show it."""
    with contextlib.suppress(ValueError):
        folder = mount.point / Path(path).relative_to(mount.root)
        if folder.is_dir():
            return folder
    return None


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def remove_cgroups(places: tuple[Path, ...], wait_s: float = 0.0) -> list[Path]:
    """Kill all processes in these control groups and remove them, waiting up to `wait_s` for dying processes. Return
    those that are left."""
    for place in places:
        with contextlib.suppress(OSError):
            _kill(place)
    ends = time.monotonic() + wait_s
    left = [place for place in places if not _rmdir(place)]
    while left and time.monotonic() < ends:
        time.sleep(PAUSE_S)
        left = [place for place in left if not _rmdir(place)]
    return left


def _rmdir(place: Path) -> bool:
    """Remove the folder. Return whether it is gone."""
    try:
        place.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _kill(place: Path) -> None:
    if not processes(place):
        return
    if (place / "cgroup.kill").exists():
        put(place / "cgroup.kill", "1")
        return
    if (place / "pids.max").exists():
        put(place / "pids.max", "0")  # no process in it can fork any more, so that killing ends
    for _ in range(KILL_ROUNDS):
        pids = [pid for pid in processes(place) if pid != os.getpid()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return


def processes(place: Path) -> list[int]:
    """Return the pids in a control group; empty if it is gone."""
    try:
        return [int(word) for word in (place / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def below(pid: int) -> list[int]:
    """Return the descendants of a process, parents first. Source: proc(5), children."""
    found, ahead = [], [pid]
    while ahead:
        parent = ahead.pop()
        try:
            words = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or the process is gone
            words = _with_parent(parent)
        children = [int(word) for word in words]
        found += children
        ahead += children
    return found


def _with_parent(pid: int) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_bytes().rpartition(b")")[2].split()[1]) == pid:
                found.append(path.parent.name)
    return found


MODES = ("auto", "required", "off")
BASELINE_BYTES = 48 << 20
"""Bytes for the init, bwrap and the kernel's own (stacks, page tables, inodes), beside what a call may use."""
SOCKETS_END = 2 * SOCKET_BYTES
"""Bytes of socket buffers beyond which a call ends. Version 1 counts buffers of TCP and UDP separately. What exceeds
SOCKET_BYTES waits or is dropped, as on a network; but each socket may still fill a minimum of its own, and thousands of
them hold 70 KiB each (measured on Linux 6.18). On version 2 they are memory like any other."""
BASELINE_PIDS = 3
"""Number of processes between calls (bwrap, the zygote and the init), where the kernel does not report it."""
CONTROLLERS = ("memory", "pids")
"""Controllers that count what they enforce."""
PERIOD_US = 100_000
DYING_S = 1.0
"""Seconds to wait for dying processes. Those with namespaces of their own take milliseconds to end."""
LIMIT_FILES: dict[int, dict[str, tuple[str, ...]]] = {
    1: {"memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"), "pids": ("pids.max",)},
    2: {"memory": ("memory.max",), "pids": ("pids.max",)},
}
"""Files that `begin` writes. The first of version 1 limits memory alone, the second memory and swap: no swap."""
SOCKET_USAGE = "memory.kmem.tcp.usage_in_bytes"
SOCKET_FILE = "memory.kmem.tcp.limit_in_bytes"
"""File of version 1. It limits UDP, too, once it is set (measured on Linux 6.18)."""
OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max", SOCKET_FILE)
"""Files that are missing in kernels that do not count these."""
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
"""Files and keys that count enforced limits: processes killed, forks refused."""
READ_BYTES = 8192
"""Bytes read from a file; memory.stat, the longest, has about 1,500."""

_numbers = itertools.count()
_abandoned: set[Path] = set()
"""Control groups of this process that could not be removed yet: their last processes were still dying."""


class Cgroups:
    """Factory of control groups, one for each sandbox, each with the same number of cores."""

    def __init__(self, tree: CgroupFolders, cpus: float) -> None:
        self.tree = tree
        self._cpus = cpus

    @classmethod
    def open(cls, settings: SandboxSettings, *, tree: CgroupFolders | None = None) -> Cgroups | None:
        """Open control groups as [sandbox] cgroups asks. Return None for `off`, and for `auto` if they cannot be
        written (which is logged). Removes what dead workers left. Raises BackendUnavailable (`required`, or an unknown
        value)."""
        if settings.cgroups not in MODES:
            raise BackendUnavailable(f"[sandbox] cgroups = {settings.cgroups!r} must be one of {', '.join(MODES)}")
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
            log.warning("control groups cannot be written, so limits are enforced by rlimits and polling only: %s", why)
            return None
        return found

    def group(self) -> ControlGroup:
        """Create a new, empty control group. Raises OSError."""
        return ControlGroup(self.tree, f"{owned_prefix()}{next(_numbers)}", self._cpus)


def bounds_of(cgroups: Cgroups | None) -> ControlGroup | None:
    """Create a new control group, or return None where there are none. Raises SandboxUnavailable."""
    try:
        return None if cgroups is None else cgroups.group()
    except OSError as error:
        raise SandboxUnavailable(f"its control group cannot be made: {error}") from error


class ControlGroup:
    """Limits of one sandbox: a control group; on version 1, one folder per controller."""

    def __init__(self, tree: CgroupFolders, name: str, cpus: float) -> None:
        self.version = tree.version
        self.folders = {controller: folder / name for controller, folder in tree.folders.items()}
        self._written: dict[Path, str] = {}
        self._before: dict[str, int] = {}
        self._cpu_before = 0.0
        self._disk_bytes = 0
        self.places = tuple(dict.fromkeys(self.folders.values()))
        self._figures = Figures(tree.version, self.folders)
        try:
            for place in self.places:
                place.mkdir()
            self._cores(cpus)
        except OSError:
            self.close()
            raise

    def adopt(self, pid: int) -> None:
        """Move a process and all its descendants in; processes that they start later follow by themselves. This takes
        about 10 ms (the kernel waits for all cores), or 0.2 ms if all are in already, so a caller may call it while the
        sandbox comes up, and again when it is up. Raises OSError (ESRCH: the process is gone)."""
        family = (pid, *below(pid))
        for place in self.places:
            inside = processes(place)
            for number in family:
                if number not in inside:
                    try:
                        put(place / "cgroup.procs", str(number))
                    except ProcessLookupError:  # a call that a zygote rehearses may have ended
                        if number == pid:
                            raise

    def begin(self, limits: SandboxLimits) -> None:
        """Set the limits of a call, writing only what changes, and note the counters."""
        self._disk_bytes = limits.disk_bytes
        self._set_limit("memory", limits.memory_bytes + limits.disk_bytes + BASELINE_BYTES)
        standing = self._figures.standing()
        # One more than the limit, so that the init sees it exceeded. Further forks are refused and counted here, before
        # the rlimit, which counts nothing.
        self._set_limit("pids", limits.pids + 1 + (BASELINE_PIDS if standing is None else standing))
        if "memory" in self.folders:
            name, most = ("memory.swap.max", 0) if self.version == 2 else (SOCKET_FILE, SOCKET_BYTES)
            self._write(self.folders["memory"] / name, str(most))
        self._before = {controller: self._figures.count_enforcements(controller) for controller in CONTROLLERS}
        self._cpu_before = self._figures.cpu_s()

    def cpu_s(self) -> float:
        return max(0.0, self._figures.cpu_s() - self._cpu_before)

    def overdrawn(self) -> str | None:
        """See Bounds. Checks socket buffers on version 1."""
        return "memory_bytes" if self._figures.socket_bytes() > SOCKETS_END else None

    def exceeded_limit(self) -> str | None:
        """Return the limit that the kernel enforced since `begin`, by its name in SandboxLimits, or None."""
        memory, pids = (self._figures.count_enforcements(name) > self._before.get(name, 0) for name in CONTROLLERS)
        if memory:
            return "disk_bytes" if self._figures.shared_bytes() >= self._disk_bytes > 0 else "memory_bytes"
        return "pids" if pids else None

    def close(self) -> None:
        """Kill what is left and remove the control group. Processes that take longer than DYING_S to die are left to a
        later `sweep`."""
        self._figures.close()
        for place in remove_cgroups(self.places, DYING_S):
            _abandoned.add(place)

    def _cores(self, cpus: float) -> None:
        folder = self.folders.get("cpu")
        if folder is None or cpus <= 0:
            return
        quota = max(1000, int(cpus * PERIOD_US))
        if self.version == 2:
            put(folder / "cpu.max", f"{quota} {PERIOD_US}")
        else:
            put(folder / "cpu.cfs_period_us", str(PERIOD_US))
            put(folder / "cpu.cfs_quota_us", str(quota))

    def _set_limit(self, controller: str, value: int) -> None:
        folder = self.folders.get(controller)
        if folder is None:
            return
        files = [folder / name for name in LIMIT_FILES[self.version][controller]]
        if value > int(self._written.get(files[0], value)):
            files.reverse()  # the limit of memory alone may never be above that of memory and swap
        for file in files:
            if not self._write(file, str(value)):
                return

    def _write(self, file: Path, text: str) -> bool:
        """Write a limit unless it is unchanged. Return False if more is in use than a new limit allows: then the old
        one stays. Raises OSError."""
        if self._written.get(file) == text:
            return True
        try:
            put(file, text)
        except OSError as error:
            if error.errno == errno.EBUSY:
                log.debug("%s keeps its old limit: %s", file, error)
                return False
            if file.name not in OPTIONAL:
                raise
        self._written[file] = text
        return True


def sweep(tree: CgroupFolders | None = None) -> dict[str, int]:
    """Kill and remove what dead workers left on this machine, and our own control groups that were still dying. Return
    the numbers by kind. Costs about a millisecond if there is nothing. Never raises for what another worker removes at
    the same time."""
    found = {"process": 0, "group": 0, "folder": sweep_folders()}
    for place in list(_abandoned):
        if not remove_cgroups((place,)):
            _abandoned.discard(place)
    tree = tree or find()
    for parent in tree.places() if tree else ():
        for path in _orphans(parent):
            alive = len(processes(path))
            if remove_cgroups((path,)):
                continue  # still dying: next time
            record_removal("group", str(path))
            found["group"] += 1
            if alive:
                record_removal("process", str(path), alive)
                found["process"] += alive
    return found


def _orphans(parent: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        yield from [parent / entry.name for entry in entries if ownerless(entry.name)]


class Figures:
    """The kernel's counters of the control group in `folders`. They are read before and after every call, so the files
    stay open."""

    def __init__(self, version: int, folders: Mapping[str, Path]) -> None:
        self._events = {
            name: (folders[name] / file, key) for name, (file, key) in EVENT_FILES[version].items() if name in folders
        }
        self._current = folders["pids"] / "pids.current" if "pids" in folders else None
        self._stat = folders["memory"] / "memory.stat" if "memory" in folders else None
        self._sockets = folders["memory"] / SOCKET_USAGE if "memory" in folders and version == 1 else None
        self._cpu = folders["cpuacct"] / "cpuacct.usage" if "cpuacct" in folders else None
        self._cpu_stat = folders[KILL] / "cpu.stat" if KILL in folders else None
        self._files: dict[Path, int] = {}

    def count_enforcements(self, controller: str) -> int:
        """Return how often the kernel has enforced the controller's limit so far."""
        return self._figure(*self._events[controller]) if controller in self._events else 0

    def standing(self) -> int | None:
        """Return the processes and threads in the control group now, or None if the kernel does not report it."""
        text = self._text(self._current)
        return int(text) if text else None

    def shared_bytes(self) -> int:
        """Return the bytes of its tmpfs and of shared memory."""
        return self._figure(self._stat, "shmem")

    def socket_bytes(self) -> int:
        """Return the bytes in TCP and UDP buffers that are not counted as memory; 0 if they are, or if the kernel does
        not report it."""
        text = self._text(self._sockets)
        return int(text) if text else 0

    def cpu_s(self) -> float:
        """Return the CPU seconds of all that ever ran in it, waited for or not; 0 if the kernel does not report it."""
        if self._cpu_stat is not None:
            return self._figure(self._cpu_stat, "usage_usec") / 1e6
        text = self._text(self._cpu)
        return int(text) / 1e9 if text else 0.0

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _figure(self, file: Path | None, key: str) -> int:
        """Return the value of a key in a file of `key value` lines; 0 if either is missing."""
        for line in self._text(file).splitlines():
            name, _, value = line.partition(b" ")
            if name.decode() == key:
                return int(value)
        return 0

    def _text(self, file: Path | None) -> bytes:
        if file is None:
            return b""
        with contextlib.suppress(OSError):  # the kernel lacks this file
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._files[file], READ_BYTES, 0)
        return b""
