"""Process shutdown on SIGTERM or SIGINT, handled from the first instruction on and within a grace period that follows
from the settings.

The kernel delivers no signal without a handler to pid 1 of a container: SIGTERM would be ignored until the grace period
is over and SIGKILL arrives.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

from turnlog.settings import Settings

CLOSE_S = 15.0
"""Seconds for a last commit, leaving the consumer group and closing clients."""
ROUND_S = 30.0
"""Seconds for one iteration of a role's work: its objects and its transaction or append."""
UNWATCHED_STEP_S = 1800.0
"""Assumed maximum duration in seconds of a trainer step when no watchdog limits it ([liveness] step_s = 0)."""
_terminated = threading.Event()
_T = TypeVar("_T")


def obey() -> None:
    """Make SIGTERM do what Ctrl-C does: cancel what runs, or raise KeyboardInterrupt.

    Has an effect only in the main thread. Roles drain instead (`starting.asked`)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def run_verb(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a verb's coroutine to its end; the first Ctrl-C or SIGTERM cancels it, the second one interrupts at once.
    Raises KeyboardInterrupt if it was cancelled by a signal.

    asyncio.run alone cancels from within the signal handler, in the middle of whatever callback is running. A callback
    that has just found a waiter for its result then fails with InvalidStateError because the waiter is gone."""
    import asyncio  # 60 ms that a probe does not need

    asked = threading.Event()
    try:
        return asyncio.run(_cancelled_between_callbacks(main, asked))
    except asyncio.CancelledError:
        if asked.is_set():
            raise KeyboardInterrupt from None
        raise


async def _cancelled_between_callbacks(main: Coroutine[Any, Any, _T], asked: threading.Event) -> _T:
    import asyncio

    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    here = threading.current_thread() is threading.main_thread()
    known = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if here}
    heard = [number for number, handler in known.items() if callable(handler)]  # a background job ignores SIGINT

    def ask(number: int) -> None:
        asked.set()
        if number == signal.SIGTERM:
            _terminated.set()
        for each in heard:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.default_int_handler)
        task.cancel()

    for number in heard:
        loop.add_signal_handler(number, ask, number)
    try:
        return await main
    finally:
        for number in heard:
            loop.remove_signal_handler(number)
            signal.signal(number, known[number])


def was_terminated() -> bool:
    """Whether this process was interrupted by SIGTERM."""
    return _terminated.is_set()


def _interrupt(_: int, frame: FrameType | None) -> None:
    _terminated.set()
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:  # SIGINT is ignored: a background job of a shell
        raise KeyboardInterrupt


def drain_s(role: str, settings: Settings) -> float:
    """Return how many seconds a role may continue after SIGTERM with the work it has begun: the longest that this work
    can take. Raises KeyError if `role` is no role."""
    return {
        "gateway": settings.engine.request_timeout_s + ROUND_S,  # a turn, and its records
        "sandbox": settings.sandbox.wall_s + ROUND_S,  # a call, its workspace and its answer
        "trainer": 2 * (settings.liveness.step_s or UNWATCHED_STEP_S),  # the rest of a step, then a checkpoint
        "tinker": 2 * ROUND_S,  # a command, and its result; what is left is executed after the restart
        "loader": settings.loader.timeout_s + ROUND_S,  # a weight update, and its report
        "assembler": ROUND_S,
        "batcher": ROUND_S,
        "feeder": ROUND_S,
        "archive": ROUND_S,
        "index": ROUND_S,
        "trace": settings.trace.timeout_s + ROUND_S,  # a request, and its mark
        "track": ROUND_S,
        "alerts": ROUND_S,
        "runner": 0.0,  # rollouts continue at the next owner
        "views": 0.0,
        "dashboard": 0.0,
        "registry": 0.0,
        "lag": 0.0,
        "egress": settings.egress.timeout_s,
    }[role]


def grace_s(role: str, settings: Settings) -> float:
    """Return the seconds after SIGTERM at which a role that still runs may be killed: terminationGracePeriodSeconds in
    Kubernetes, stop_grace_period in Compose.

    An earlier kill loses work, but no data. Raises KeyError if `role` is no role."""
    return drain_s(role, settings) + CLOSE_S
