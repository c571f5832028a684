"""The event loop that a role runs on, and what its HTTP clients do not know about it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import uvloop
from httpcore._backends.anyio import AnyIOStream  # httpx and httpcore both talk through it, and no name leads there

STARTS_PROCESSES = frozenset({"sandbox"})
"""Roles that fork as another user, which uvloop cannot."""
_ask = AnyIOStream.get_extra_info


def run(name: str, main: Coroutine[Any, Any, None]) -> None:
    """Run a role's coroutine to its end. A turn is mostly small socket reads and writes, where uvloop is leaner."""
    if name in STARTS_PROCESSES:
        asyncio.run(main)
        return
    AnyIOStream.get_extra_info = _of_a_reset_one_too  # type: ignore[method-assign, assignment]
    uvloop.run(main)


def _of_a_reset_one_too(stream: AnyIOStream, info: str) -> Any:
    """Of a connection that the peer has reset, asyncio still has the socket and uvloop has None, which anyio asks for
    its peer's address: AttributeError instead of the NetworkError of the next read. Seen with anyio 4.16."""
    try:
        return _ask(stream, info)
    except AttributeError:
        return info == "is_readable" or None  # what a closed socket answers
