"""Processes and writable folders of the sandbox as the kernel shows them, and the CPU time of processes that nobody
reaped.

The kernel adds a dead process's time to its parent's only if the parent waits for it; a parent that ignores SIGCHLD
never does (wait(2), notes). A control group counts all of it, where there is one; elsewhere `Unclaimed` estimates
it."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from typing import NamedTuple

INODE_BYTES = 1024
"""Cost of a file even if it is empty, in bytes, so that a million of them meet the disk limit."""
TICKS = os.sysconf("SC_CLK_TCK")
ENDED = (b"Z", b"X")
STOPPED = b"T"
PAGE = os.sysconf("SC_PAGE_SIZE")

SOCKET_BYTES = 16 << 20
"""Bytes that a sandbox may hold in sockets beside its memory."""
FEW_SOCKETS = 16
"""Number of sockets that cannot hold SOCKET_BYTES: one takes 2 * net.core.wmem_max, 416 KiB on most machines."""
NET = "/proc/self/net"

ROUNDING_S = 2 / TICKS
"""Rounding error in seconds: proc(5) counts user and system time in whole ticks."""


class InitEnvironment(NamedTuple):
    """Environment of this sandbox's init: folders, user and namespaces."""

    folders: list[str]
    """Writable folders; the first is the working directory. All are emptied by a reset."""
    own_user: bool
    """True if nobody else has our user id, so that a limit on its number of processes limits only ours."""
    namespace: bool
    """True if we are pid 1 of a pid namespace."""
    roots: tuple[str, ...] = ()
    """Folders that make up the workspace, whose paths are then relative to /; none of them lies in another. Without
    any, the workspace is the first of `folders`."""
    cwd: str = ""
    """Working directory below one of `roots`."""


class ProcessInfo(NamedTuple):
    """A process as /proc shows it."""

    pid: int
    parent: int
    threads: int
    cpu_s: float
    reaped_s: float
    """CPU time of the children that it has waited for, in seconds."""
    memory_bytes: int
    ended: bool
    """True if dead, and not yet reaped by its parent."""


def others(place: InitEnvironment) -> list[int]:
    """Return the pids of all processes of the sandbox but our own."""
    here = os.getpid()
    if not place.namespace:
        return [task.pid for task in tasks(place)]
    return [pid for name in os.listdir("/proc") if name.isdigit() and (pid := int(name)) != here]


def tasks(place: InitEnvironment) -> list[ProcessInfo]:
    """Return every process of the sandbox but our own: all others in the namespace, or our descendants."""
    here = os.getpid()
    if not place.namespace and _childless(here):
        return []
    seen = [one for name in os.listdir("/proc") if name.isdigit() and (one := task(int(name)))]
    if place.namespace:
        return [one for one in seen if one.pid != here]
    children: dict[int, list[ProcessInfo]] = {}
    for one in seen:
        children.setdefault(one.parent, []).append(one)
    found, ahead = [], [here]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += [one.pid for one in below]
    return found


def processes_of(uid: int) -> int:
    """Return the number of processes and threads of a user, anywhere on this machine."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/status") as file:
                lines = dict(line.rstrip().partition(":\t")[::2] for line in file)
                count += int(lines["Threads"]) if int(lines["Uid"].split()[0]) == uid else 0
    return count


def _childless(pid: int) -> bool:
    """Return True if the kernel tells at once that there are no children (CONFIG_PROC_CHILDREN). This avoids a scan of
    the host, which may have thousands of processes."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            return not file.read(1)
    except FileNotFoundError:
        return False


def task(pid: int) -> ProcessInfo | None:
    """Return the process, or None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/statm", "rb") as file:
            memory = file.read().split()
    except OSError:
        return None  # it ended meanwhile
    own, reaped = (sum(map(int, fields[first : first + 2])) / TICKS for first in (11, 13))
    private = (int(memory[1]) - int(memory[2])) * PAGE
    return ProcessInfo(pid, int(fields[1]), int(fields[17]), own, reaped, private, fields[0] in ENDED)


def start_of(pid: int) -> int | None:
    """Return the time at which the process started, in clock ticks since the boot; None if it is gone.

    Together with the pid it names one process: the kernel gives a pid to another process later."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ENDED else int(fields[19])


def below(pid: int, found: list[ProcessInfo]) -> set[int]:
    """Return the pids of the living descendants of a process, among those found."""
    inside: set[int] = {pid}
    while more := {one.pid for one in found if one.parent in inside and not one.ended} - inside:
        inside |= more
    return inside - {pid}


def thread_states(pid: int) -> set[bytes]:
    """Return the states of a process's threads as letters (proc_pid_stat(5)); empty if it is gone."""
    states = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                states.add(file.read().rpartition(b")")[2].split()[0])
    return states


def exact_memory(found: list[ProcessInfo]) -> int:
    """Return the bytes of private memory, counting pages that forks still share once. This takes longer than
    /proc/PID/statm, which counts such pages for every fork; statm stands in for a process that cannot be examined."""
    total = 0
    for one in found:
        own = one.memory_bytes
        with contextlib.suppress(OSError), open(f"/proc/{one.pid}/smaps_rollup", "rb") as file:
            own = sum(int(line.split()[1]) for line in file if line.startswith(b"Pss_Anon:")) * 1024 or own
        total += own
    return total


class DiskUsage(NamedTuple):
    """Usage of the writable folders."""

    used: int
    full: bool
    """True if one of the folders is full, however large a call's own limit is."""

    def has_reached_limit(self, most: int, before: DiskUsage) -> bool:
        """Return whether the limit of `most` bytes is met, and more is used than `before`: a call that found the
        folders full may still remove files."""
        return (self.full or self.used >= most) and (self.used > before.used or self.used == sys.maxsize)


def disk(place: InitEnvironment) -> DiskUsage:
    """Return the usage of the writable folders. Under bubblewrap each is a tmpfs of its own."""
    if not place.namespace:
        return DiskUsage(sum(tree_bytes(folder) for folder in place.folders), full=False)
    used, full = 0, False
    for folder in place.folders:
        if place.roots and os.stat(folder).st_dev == os.stat("/").st_dev:
            used += _layer_bytes(folder)  # part of the root, such as a container's own layer
            continue
        figures = os.statvfs(folder)
        free = figures.f_bavail * figures.f_frsize
        used += figures.f_blocks * figures.f_frsize - free + (figures.f_files - figures.f_ffree) * INODE_BYTES
        full = full or not free
    return DiskUsage(used, full)


_layers: dict[str, tuple[float, int]] = {}
"""Time until which the size of a folder of the root is not counted again, and the size."""
REST = 20
"""Share of the time in which such folders are not being counted, as a multiple of that in which they are."""


def _layer_bytes(folder: str) -> int:
    """Return the bytes used by a folder of the root, as of a moment ago: a large one takes a while to count."""
    until, size = _layers.get(folder, (0.0, 0))
    now = time.monotonic()
    if now >= until:
        size = tree_bytes(folder)
        end = time.monotonic()
        _layers[folder] = end + REST * (end - now), size
    return size


def tree_bytes(folder: str) -> int:
    """Return the bytes used by a folder's files. A path longer than the kernel takes cannot be counted, and returns
    sys.maxsize."""
    total, ahead = 0, [folder]
    while ahead:
        try:
            with os.scandir(ahead.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    else:
                        with contextlib.suppress(OSError):
                            total += entry.stat(follow_symlinks=False).st_blocks * 512 + INODE_BYTES
        except OSError as error:  # it is gone, or we lack the permission
            if error.errno == errno.ENAMETOOLONG:
                return sys.maxsize
    return total


def uncharged_bytes(net: str = NET) -> int:
    """Return the bytes in sockets of our network namespace that the kernel charges to no control group: UDP datagrams
    that wait to be continued (UDP_CORK, MSG_MORE), and netlink answers that nobody reads. With few sockets nothing is
    read, since the table of UDP takes the kernel 0.1 ms."""
    with open(f"{net}/sockstat", "rb") as file:
        if int(file.readline().split()[2]) <= FEW_SOCKETS:
            return 0
    total = 0
    for table, column, base in (("udp", 4, 16), ("udp6", 4, 16), ("netlink", 4, 10)):
        with contextlib.suppress(FileNotFoundError), open(f"{net}/{table}", "rb") as file:  # a kernel without IPv6
            file.readline()
            total += sum(int(line.split()[column].partition(b":")[0], base) for line in file)
    return total


class Unclaimed:
    """Estimates the CPU time of processes that nobody waited for, by comparing successive looks at a tree of
    processes."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.before: dict[int, ProcessInfo] = {}
        """Processes of the last look, by pid."""
        self._children_s = 0.0

    def look(self, found: list[ProcessInfo], children_s: float) -> None:
        """Compare with the previous look. `found` has every process but ours; `children_s` is the CPU time of the
        children that we have waited for."""
        now = {task.pid: task for task in found}
        owed: dict[int, float] = {}
        for task in self.before.values():
            if task.pid not in now:
                heir = self._heir(task, now)
                owed[heir] = owed.get(heir, 0.0) + task.cpu_s + task.reaped_s
        for heir, used in owed.items():
            claimed = children_s - self._children_s
            if heir in now:
                before = self.before.get(heir)
                claimed = now[heir].reaped_s - (before.reaped_s if before else 0.0)
            self.cpu_s += max(0.0, used - claimed - ROUNDING_S)
        self.before, self._children_s = now, children_s

    def _heir(self, task: ProcessInfo, now: dict[int, ProcessInfo]) -> int:
        """Return the nearest remaining ancestor: its time, and that of all processes between, went there if anybody
        waited."""
        heir, steps = task.parent, len(self.before)
        while heir not in now and heir in self.before and steps:
            heir, steps = self.before[heir].parent, steps - 1
        return heir
