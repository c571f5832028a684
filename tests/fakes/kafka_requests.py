"""Counts what the Kafka clients of an event loop do: requests that they send to a real broker, timers that they set."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FETCH, API_VERSIONS = 1, 18
"""API keys of the Kafka protocol. ApiVersions is the first request of a connection."""


@contextmanager
def counted_requests(loop: asyncio.AbstractEventLoop) -> Iterator[Counter[int]]:
    """Count, by API key, what is sent over connections that `loop` makes in the block. aiokafka writes each request as
    a whole: its length, then the API key."""
    sent, connect = Counter[int](), loop.create_connection

    async def create_connection(factory: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        transport, protocol = await connect(factory, *args, **options)
        return _CountedTransport(transport, sent), protocol

    loop.create_connection = create_connection  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        del loop.create_connection


@contextmanager
def counted_timers(loop: asyncio.AbstractEventLoop) -> Iterator[list[float]]:
    """List the delays, in seconds, of the timers that are set in the block."""
    delays, call_later = list[float](), loop.call_later

    def counted(delay: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return call_later(delay, *args, **options)

    loop.call_later = counted  # type: ignore[method-assign]
    try:
        yield delays
    finally:
        del loop.call_later


class _CountedTransport:
    """The transport, which counts what is written to it."""

    def __init__(self, transport: Any, sent: Counter[int]) -> None:
        self._transport, self._sent = transport, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._sent[struct.unpack_from(">h", data, 4)[0]] += 1
        self._transport.write(data)
