"""How a process of ours ends when it is asked to: by SIGTERM or SIGINT, from its first instruction on, and within a
grace that follows from its settings.

As pid 1 of a container a process is told of no signal that it has no handler for: SIGTERM would do nothing until the
grace is over and SIGKILL comes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

from turnlog.settings import Settings

CLOSE_S = 15.0
"""A last commit, a group that is left, clients that are closed."""
ROUND_S = 30.0
"""One round of a role's work: its objects and its transaction or append."""
UNWATCHED_STEP_S = 1800.0
"""Of a step of the trainer where nobody watches it ([liveness] step_s = 0)."""
_terminated = threading.Event()
_T = TypeVar("_T")


def obey() -> None:
    """From now on SIGTERM does what Ctrl-C does: it cancels what runs, or raises KeyboardInterrupt. Of the main thread
    alone; a role drains instead (`starting.asked`)."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupt)


def run_verb(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a verb's coroutine to its end. The first Ctrl-C or SIGTERM cancels it, the second one interrupts at once.
    Raises KeyboardInterrupt.

    asyncio.run alone cancels from within the signal's handler, amid whatever callback runs, and one that has just
    seen that somebody waits for its result then complains that nobody does (InvalidStateError)."""
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
    heard = [number for number, handler in known.items() if callable(handler)]  # a shell's background job ignores one

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
    """Whether an interrupt of this process was a SIGTERM."""
    return _terminated.is_set()


def _interrupt(_: int, frame: FrameType | None) -> None:
    _terminated.set()
    handler = signal.getsignal(signal.SIGINT)
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:  # ignored: a shell's background job
        raise KeyboardInterrupt


def drain_s(role: str, settings: Settings) -> float:
    """Seconds that a role may go on after SIGTERM with what it holds: the longest that this may take. Raises KeyError
    for what is no role."""
    return {
        "gateway": settings.engine.request_timeout_s + ROUND_S,  # a turn, and its records
        "sandbox": settings.sandbox.wall_s + ROUND_S,  # a call, its workspace and its answer
        "trainer": 2 * (settings.liveness.step_s or UNWATCHED_STEP_S),  # the rest of a step, then a checkpoint
        "loader": settings.loader.timeout_s + ROUND_S,  # a swap, and its report
        "assembler": ROUND_S,
        "batcher": ROUND_S,
        "feeder": ROUND_S,
        "archive": ROUND_S,
        "index": ROUND_S,
        "trace": settings.trace.timeout_s + ROUND_S,  # a request, and its mark
        "track": ROUND_S,
        "alerts": ROUND_S,
        "runner": 0.0,  # rollouts go on with the next owner
        "views": 0.0,
        "dashboard": 0.0,
        "registry": 0.0,
        "lag": 0.0,
        "egress": settings.egress.timeout_s,
    }[role]


def grace_s(role: str, settings: Settings) -> float:
    """Seconds from SIGTERM after which a role that still runs may be killed: Kubernetes' terminationGracePeriodSeconds,
    compose's stop_grace_period. Sooner loses nothing either, but work. Raises KeyError for what is no role."""
    return drain_s(role, settings) + CLOSE_S
