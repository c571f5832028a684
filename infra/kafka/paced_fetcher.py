"""A fetcher that may pause between two fetches, so that one request brings what was written meanwhile.

aiokafka fetches again as soon as the last records are taken. Under load each fetch then returns a record or two, and
the broker does the same work for each of them. A pause batches them, as `linger_ms` does for a producer. It delays only
records that follow others: a fetch without an answer waits at the broker, which sends the first record at once.

A broker answers the requests of a connection one after another, so a fetch that waits there for records of a former
assignment would hold up those of the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiokafka.client import ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.consumer.fetcher import Fetcher, FetchResult

FULL_BYTES = 1 << 20
"""Bytes of records, read and not taken yet, after which no pause follows: a reader of the past is never held up."""


class PacedFetcher(Fetcher):  # type: ignore[misc]
    """Fetcher that pauses for `pause_s` seconds after each fetch that returned records, and that abandons fetches of a
    former assignment."""

    pause_s = 0.0

    async def _proc_fetch_request(self, assignment: Any, node_id: int, request: Any) -> bool:
        """Fetch, and pause. The broker counts as in flight meanwhile, so the next request has the positions after the
        pause. The records can be taken at once. Cancelling ends the pause, as it ends a fetch of aiokafka."""
        arrived: bool = await super()._proc_fetch_request(assignment, node_id, request)
        if not assignment.active:
            self._close_useless(node_id)
        if not arrived or not self.pause_s or self._unread_bytes() >= FULL_BYTES:
            return arrived
        for waiter in self._fetch_waiters:
            self._notify(waiter)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(self.pause_s)
        return False

    def _close_useless(self, node_id: int) -> None:
        """Close the connection to a broker if nobody waits for the answers that are due on it."""
        connection = self._client._conns.get((node_id, ConnectionGroup.DEFAULT))
        if connection is not None and all(answer.done() for *_, answer in connection._requests):
            connection.close(reason=CloseReason.SHUTDOWN)

    def _unread_bytes(self) -> int:
        found = (result for result in self._records.values() if isinstance(result, FetchResult) and result.has_more())
        return sum(result._partition_records._records.size_in_bytes() for result in found)
