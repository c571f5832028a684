"""What a pool counts: for Prometheus, labelled by backend, and for the table of `turnlog sandbox pool`."""

from __future__ import annotations

import functools
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable

from prometheus_client import Counter, Gauge, Histogram

from turnlog.sandbox_workers.pooling.slots import SlotState

HITS = Counter("turnlog_sandbox_pool_hits", "Leases that found their sandbox ready", ["backend"])
MISSES = Counter("turnlog_sandbox_pool_misses", "Leases that waited for a slot or a start", ["backend"])
WAIT = Histogram(
    "turnlog_sandbox_pool_wait_seconds", "From asking for a sandbox to having it", ["backend"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
)  # fmt: skip
WAITING = Gauge("turnlog_sandbox_pool_waiting", "Callers that wait", ["backend"])
RENEWALS = Counter(
    "turnlog_sandbox_pool_renewals",
    "Sandboxes replaced: died | unclean | error | max_uses | shape",
    ["backend", "reason"],
)
FAILURES = Counter("turnlog_sandbox_pool_failures", "Starts that failed", ["backend"])
LEAKS = Counter("turnlog_sandbox_pool_leaks", "Leftovers found: by a reset, or by the sweep", ["backend"])
SLOTS = Gauge("turnlog_sandbox_pool_slots", "Slots, by what they do", ["backend", "state"])
REASONS = ("died", "unclean", "error", "max_uses", "shape")
"""Why a sandbox is replaced: it was gone; its reset was not proved clean; its call ended in an exception; it was used
enough; its slot was needed for another shape."""
KEPT = 1000
"""Waits from which the table's percentiles come."""


class PoolMetrics:
    """What one pool counts."""

    def __init__(self, backend: str, slots: Callable[[SlotState], int], waiting: Callable[[], int]) -> None:
        """`slots` counts those in a state, `waiting` the callers; asked whenever somebody looks."""
        self._renewal = {reason: RENEWALS.labels(backend, reason) for reason in REASONS}
        self._wait = WAIT.labels(backend)
        self._counters = {
            name: counter.labels(backend)
            for name, counter in (("hits", HITS), ("misses", MISSES), ("leaks", LEAKS), ("failures", FAILURES))
        }
        for state in SlotState:
            SLOTS.labels(backend, state).set_function(functools.partial(slots, state))
        WAITING.labels(backend).set_function(waiting)
        self._counts: Tally[str] = Tally()
        self._renewals: Tally[str] = Tally()
        self._waits: deque[float] = deque(maxlen=KEPT)

    def leased(self, wait_s: float, *, hit: bool) -> None:
        """A caller has its sandbox."""
        self._add("hits" if hit else "misses", 1)
        self._wait.observe(wait_s)
        self._waits.append(wait_s)

    def renewed(self, reason: str) -> None:
        """A sandbox is replaced, for one of REASONS. `unclean` is a leak that was caught."""
        self._renewal[reason].inc()
        self._renewals[reason] += 1
        if reason == "unclean":
            self.leaked(1)

    def leaked(self, count: int) -> None:
        """So many leftovers were found."""
        self._add("leaks", count)

    def failed(self) -> None:
        """A start failed."""
        self._add("failures", 1)

    def snapshot(self) -> dict[str, object]:
        """For people."""
        waits = sorted(self._waits)
        shares = {"p50": 0.5, "p99": 0.99}
        return {
            **{name: self._counts[name] for name in self._counters},
            "renewals": dict(self._renewals),
            "wait_ms": {name: round(_at(waits, share) * 1e3, 3) for name, share in shares.items()},
        }

    def _add(self, name: str, count: int) -> None:
        self._counters[name].inc(count)
        self._counts[name] += count


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
