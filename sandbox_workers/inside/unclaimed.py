"""CPU time of processes that ended without anybody waiting for them, as far as they lived until they were looked at.

The kernel adds a dead process's time to its parent's only when the parent waits; one that ignores SIGCHLD never does
(wait(2), notes). A control group counts all of it, where there is one; elsewhere this is what can be known.
"""

from __future__ import annotations

from turnlog.sandbox_workers.inside.processes import TICKS, Task

ROUNDING_S = 2 / TICKS
"""proc(5) counts user and system time in whole ticks."""


class Unclaimed:
    """Compares looks at a tree of processes."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._before: dict[int, Task] = {}
        self._children_s = 0.0

    def look(self, found: list[Task], children_s: float) -> None:
        """`found`: every process but ours; `children_s`: CPU time of the children that we have waited for."""
        now = {task.pid: task for task in found}
        owed: dict[int, float] = {}
        for task in self._before.values():
            if task.pid not in now:
                heir = self._heir(task, now)
                owed[heir] = owed.get(heir, 0.0) + task.cpu_s + task.reaped_s
        for heir, used in owed.items():
            claimed = children_s - self._children_s
            if heir in now:
                before = self._before.get(heir)
                claimed = now[heir].reaped_s - (before.reaped_s if before else 0.0)
            self.cpu_s += max(0.0, used - claimed - ROUNDING_S)
        self._before, self._children_s = now, children_s

    def _heir(self, task: Task, now: dict[int, Task]) -> int:
        """Its nearest ancestor that is left, to whom its time and that of all between has gone if anybody waited."""
        heir, steps = task.parent, len(self._before)
        while heir not in now and heir in self._before and steps:
            heir, steps = self._before[heir].parent, steps - 1
        return heir
