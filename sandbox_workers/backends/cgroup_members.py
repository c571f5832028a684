"""Who is in a control group, and how it ends: everything in it killed, then the group removed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from turnlog.sandbox_workers.backends.cgroup_tree import put

KILL_ROUNDS = 100
PAUSE_S = 0.002


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
    """Pids; none when it is gone."""
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
