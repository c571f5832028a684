"""A process that kills itself in the middle of a call of its own choice: what a chaos run starts in place of a role."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from turnlog.infra.embedded.process import Child


def die() -> None:
    """As if somebody had killed us."""
    os.kill(os.getpid(), signal.SIGKILL)


def doom(owner: Any, name: str, call: int, share: float) -> None:
    """From now on that call ends the process after `share` of the time that the one before took, or at its own end."""
    plain = getattr(owner, name)
    calls, lasted = itertools.count(1), [0.05]

    @contextmanager
    def watched() -> Iterator[None]:
        doomed, mark = next(calls) == call, time.monotonic()
        if doomed:
            threading.Timer(share * lasted[0], die).start()
        yield
        if doomed:
            die()
        lasted[0] = time.monotonic() - mark

    async def later(*arguments: Any, **named: Any) -> Any:
        with watched():
            return await plain(*arguments, **named)

    def now(*arguments: Any, **named: Any) -> Any:
        with watched():
            return plain(*arguments, **named)

    setattr(owner, name, later if inspect.iscoroutinefunction(plain) else now)


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait for `condition`, at most so long."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - a child process sets no event
        await asyncio.sleep(0.1)


def ended(child: Child) -> bool:
    """Whether it is dead."""
    return child.returncode is not None
