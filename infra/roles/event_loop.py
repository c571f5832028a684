"""The event loop that a role runs on, and a work-around for an error of its HTTP clients under uvloop."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import uvloop
from httpcore._backends.anyio import AnyIOStream  # httpx and httpcore both use it; it has no public name

from turnlog.infra.garbage import cheap_collections

STARTS_PROCESSES = frozenset({"sandbox"})
"""Roles that start processes as another user, which uvloop cannot do."""
HOLD_MUCH = frozenset({"gateway", "runner"})
"""Roles that hold many long-lived objects and create few reference cycles.

With Python's default thresholds, a full garbage collection (0.1 s each) runs ten times as often and takes a sixth of
the CPU time of a gateway with long contexts (T4), and 7 % of that of short sessions in gateway and runner."""
COLLECTIONS = (10_000, 10, 10)
LARGE = 16 * 1024
"""Bytes of text from which it is tokenized in a thread, which takes milliseconds; handing it over takes 0.1 ms."""
LARGE_BODY = 4 * LARGE
"""Bytes of a request from which it is parsed, and compared with what is known, in a thread."""
_ask = AnyIOStream.get_extra_info


def run(name: str, main: Coroutine[Any, Any, None]) -> None:
    """Run a role's coroutine to its end, on uvloop unless the role starts processes. A turn consists mostly of small
    socket reads and writes, where uvloop is cheaper."""
    if name in HOLD_MUCH:
        gc.set_threshold(*COLLECTIONS)
    with cheap_collections(collect=False):
        if name in STARTS_PROCESSES:
            asyncio.run(main)
            return
        AnyIOStream.get_extra_info = _of_a_reset_one_too  # type: ignore[method-assign, assignment]
        uvloop.run(main)


def _of_a_reset_one_too(stream: AnyIOStream, info: str) -> Any:
    """Report a connection that the peer has reset as a closed socket, as with asyncio, instead of raising
    AttributeError.

    For such a connection uvloop has no socket, and anyio asks it for the peer address. The AttributeError would replace
    the NetworkError of the next read. Seen with anyio 4.16."""
    try:
        return _ask(stream, info)
    except AttributeError:
        return info == "is_readable" or None  # the answers of a closed socket
