"""Counts the requests that the Kafka clients of an event loop send to a real broker."""

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


class _CountedTransport:
    """The transport, which counts what is written to it."""

    def __init__(self, transport: Any, sent: Counter[int]) -> None:
        self._transport, self._sent = transport, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._sent[struct.unpack_from(">h", data, 4)[0]] += 1
        self._transport.write(data)
