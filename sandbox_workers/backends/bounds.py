"""The kernel's own bounds of a sandbox as its connection uses them, and a call's CPU time by the kernel's count."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from turnlog.schemas.events import SandboxLimits

METER_S = 0.05
"""Shortest pause between looks at a call's CPU time."""
INIT_CPU_S, INIT_CPU_SHARE = 0.1, 0.1
"""What an init may use for a call, and for each second of it: its looks at a tree of 64 processes take up to 5 ms."""


class Bounds(Protocol):
    """The kernel's own bounds of one sandbox (a control group), where there are any."""

    def adopt(self, pid: int) -> None:
        """Take in a process and all below it, before any call. Raises OSError."""
        ...

    def begin(self, limits: SandboxLimits) -> None:
        """Set the bounds of the call that comes. Raises OSError."""
        ...

    def cpu_s(self) -> float:
        """CPU time of all that ran in them since `begin`, waited for or not; 0 where the kernel does not say."""
        ...

    def exceeded(self) -> str | None:
        """The limit, by its name, that was met by the call that ended or whose sandbox died."""
        ...

    def close(self) -> None:
        """Kill what is left and remove them. Never raises."""
        ...


@contextlib.asynccontextmanager
async def metered(
    limits: SandboxLimits, bounds: Bounds | None, spent: Callable[[], Awaitable[None]]
) -> AsyncIterator[None]:
    """Around a call: `spent` ends it at its CPU time as the kernel counts it."""
    if bounds is None:
        yield
        return

    async def watch() -> None:
        await cpu_spent(limits, bounds)
        await spent()

    meter = asyncio.create_task(watch())
    try:
        yield
    finally:
        meter.cancel()
        await asyncio.wait([meter])


async def cpu_spent(limits: SandboxLimits, bounds: Bounds) -> None:
    """Until a call that begins now has used more than its CPU time: no init hears of children that nobody waits for."""
    began = asyncio.get_running_loop().time()
    left, cores = limits.cpu_s, os.cpu_count() or 1
    while left > 0:
        await asyncio.sleep(max(METER_S, left / cores))
        left = cpu_left(limits, bounds, asyncio.get_running_loop().time() - began)


def cpu_left(limits: SandboxLimits, bounds: Bounds, took_s: float) -> float:
    """Seconds; what the init itself may have used aside."""
    return limits.cpu_s + INIT_CPU_S + INIT_CPU_SHARE * took_s - bounds.cpu_s()
