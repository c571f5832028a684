"""Where control groups can be made, found by looking: version 1 (a folder per controller) or version 2 (one for all);
who is in a group, and how it ends.

Source: cgroups(7), the kernel's admin-guide/cgroup-v1 and cgroup-v2; proc(5) for mountinfo and /proc/self/cgroup.
On version 1 memory is limited below our own group, so that what limits us goes on to hold. On version 2 a group that
holds processes cannot hand its controllers down (no internal processes): then we move ourselves to a leaf first.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)
WANTED = ("memory", "pids", "cpu")
KILL = "kill"
"""Where a version 2 group is that `cgroup.kill` ends and whose `cpu.stat` counts, beside version 1 controllers too."""
CPU_TIME = "cpuacct"
"""What counts CPU time where no version 2 group does."""
LEAF = "turnlog-worker"
"""The group below our own into which we move ourselves."""
ENDS = ["memory", "pids"]
"""Controllers without which there is nothing to gain."""
KILL_ROUNDS = 100
PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class Tree:
    """Folders below which groups are made, by controller; also by KILL."""

    version: int
    folders: Mapping[str, Path]

    def places(self) -> tuple[Path, ...]:
        """Each folder once."""
        return tuple(dict.fromkeys(self.folders.values()))


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo: which part of a hierarchy is mounted where."""

    root: str
    point: Path
    kind: str
    options: frozenset[str]


def find(proc: Path = Path("/proc"), top: Path = Path("/")) -> Tree | None:
    """What is there and can be written; nothing is changed. None: nothing of use. `proc` and `top` (in front of mount
    points) are others in tests."""
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
        return Tree(2, dict.fromkeys((KILL, *usable), second))
    folders = dict(_first(own, mounts, WANTED if second else (*WANTED, CPU_TIME)))
    if second and folders:
        folders = {KILL: second, **folders}
    return Tree(1, folders) if set(ENDS) & set(folders) else None


def hand_down(base: Path, wanted: tuple[str, ...]) -> None:
    """Let groups below `base` (version 2) have these controllers, moving ourselves to a leaf if need be.
    Raises OSError: EBUSY when others live in `base` as well."""
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
    """Of a file; none when it is not there."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def put(path: Path, text: str) -> None:
    """One write(2): the kernel takes each as one command."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _own_groups(text: str) -> Iterator[tuple[str, str]]:
    """(controller, our group's path); "" stands for version 2."""
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
    """Our own version 2 group, or the one above when we have moved to its leaf before."""
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
    """Where a group's folder is; None when this mount does not show it."""
    with contextlib.suppress(ValueError):
        folder = mount.point / Path(path).relative_to(mount.root)
        if folder.is_dir():
            return folder
    return None


def _writable(folder: Path) -> bool:
    return os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)


def removed(places: tuple[Path, ...], wait_s: float = 0.0) -> list[Path]:
    """End everything in these groups and remove them, waiting so long for what is still dying; those that are left."""
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
    """It is gone."""
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
        put(place / "pids.max", "0")  # nobody in it forks any more, so that killing comes to an end
    for _ in range(KILL_ROUNDS):
        pids = [pid for pid in processes(place) if pid != os.getpid()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return


def processes(place: Path) -> list[int]:
    """Pids in a group; none when it is gone."""
    try:
        return [int(word) for word in (place / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def below(pid: int) -> list[int]:
    """Descendants of a process, parents first. Source: proc(5), children."""
    found, ahead = [], [pid]
    while ahead:
        parent = ahead.pop()
        try:
            words = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or nobody there any more
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
