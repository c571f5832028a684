"""The end of a call: nothing of it lives on, the interpreter that stands still aside."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time

from turnlog.sandbox_workers.inside.interpreter import Interpreter
from turnlog.sandbox_workers.inside.processes import Place, tasks

MOST_ROUNDS = 2000
"""Of ending all but one; then that one is ended, too."""
PAUSE_S = 0.0005


class Reaped:
    """What the kernel has told us of our children that ended."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.peak_bytes: dict[int, int] = {}

    def look(self, options: int = os.WNOHANG) -> None:
        """Reap what has ended; with 0, until there is no child."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, options)
                if not pid:
                    return
                self.statuses[pid] = status
                self.peak_bytes[pid] = usage.ru_maxrss * 1024


def end_all(place: Place, reaped: Reaped) -> None:
    """Kill and reap every process but ours."""
    if place.namespace:
        assert os.getpid() == 1  # anywhere else kill(-1) would end the machine
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        reaped.look(0)
        return
    reaped.look()  # without a child left, none of the host's processes have to be looked through
    while found := _living(place, None):
        _kill(place, found, None, reaped)
    reaped.look()


def end_others(place: Place, spared: Interpreter, reaped: Reaped) -> bool:
    """Kill every process but ours and `spared`, which stands still then; False when it is dead, too."""
    for _ in range(MOST_ROUNDS):
        if not (found := _living(place, spared.pid)):
            reaped.look()
            return spared.hold()
        with contextlib.suppress(ProcessLookupError):
            os.kill(spared.pid, signal.SIGSTOP)
        _kill(place, found, spared.pid, reaped)
    end_all(place, reaped)
    return False


def _kill(place: Place, found: set[int], spared: int | None, reaped: Reaped) -> None:
    """One round: what stands still does not fork, so rounds end even for a fork bomb."""
    if place.namespace:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        found = _living(place, spared)
    else:
        stopped: set[int] = set()
        while new := found - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
            found = _living(place, spared)
    _signal(found, signal.SIGKILL)
    reaped.look()
    time.sleep(PAUSE_S)
    reaped.look()


def _living(place: Place, spared: int | None) -> set[int]:
    return {task.pid for task in tasks(place) if task.pid != spared and not task.ended}


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def children_cpu() -> float:
    """Seconds of all children that we have reaped, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
