"""The event loop that a role runs on, and what its HTTP clients do not know about it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop
from httpcore._backends.anyio import AnyIOStream  # httpx and httpcore both talk through it, and no name leads there

STARTS_PROCESSES = frozenset({"sandbox"})
"""Roles that fork as another user, which uvloop cannot."""
HOLD_MUCH = frozenset({"gateway"})
"""Roles that hold many objects for long and leave few cycles behind: by Python's own thresholds each look for those at
all that is held, a tenth of a second long, comes ten times as often, and takes a sixth of their processor time (T4)."""
COLLECTIONS = (10_000, 10, 10)
LARGE = 16 * 1024
"""Bytes of a request from which on it is read in a thread. A prompt of this length is tokenised within milliseconds,
and a thread costs a tenth of one."""
_ask = AnyIOStream.get_extra_info
T = TypeVar("T")


def run(name: str, main: Coroutine[Any, Any, None]) -> None:
    """Run a role's coroutine to its end. A turn is mostly small socket reads and writes, where uvloop is leaner."""
    if name in HOLD_MUCH:
        gc.set_threshold(*COLLECTIONS)
    if name in STARTS_PROCESSES:
        asyncio.run(main)
        return
    AnyIOStream.get_extra_info = _of_a_reset_one_too  # type: ignore[method-assign, assignment]
    uvloop.run(main)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` makes of a request of `size` bytes. A large one is worked on in a thread, so that the loop goes on
    answering everybody else: `work` may read what the loop writes, and write only what it returns."""
    return work() if size < LARGE else await asyncio.to_thread(work)


def _of_a_reset_one_too(stream: AnyIOStream, info: str) -> Any:
    """Of a connection that the peer has reset, asyncio still has the socket and uvloop has None, which anyio asks for
    its peer's address: AttributeError instead of the NetworkError of the next read. Seen with anyio 4.16."""
    try:
        return _ask(stream, info)
    except AttributeError:
        return info == "is_readable" or None  # what a closed socket answers
