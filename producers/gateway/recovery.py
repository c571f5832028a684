"""A session's conversation rebuilt from agent.turns and agent.token-snapshots: the same tokens, on any gateway.

Those topics are not indexed by session, so a scan begins where the session's first record can stand: found by bisection
of the partition on record time. One scan serves all sessions that wait for one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import orjson

from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition, Reader, Record
from turnlog.infra.payloads import inlined
from turnlog.producers.gateway.conversation import Conversation, Turn, continued
from turnlog.producers.gateway.images import within
from turnlog.producers.gateway.messages import message, normalised
from turnlog.producers.gateway.strands import above
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events.turns import TokenSnapshot, TurnCompleted
from turnlog.schemas.topics import SNAPSHOTS, TURNS
from turnlog.schemas.types import TurnId, int32s

log = logging.getLogger(__name__)

CLOCK_SKEW_MS = 60_000
"""How far clocks of gateways may differ."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A session to rebuild."""

    session_id: str
    group_id: str
    since_ms: int


@dataclass(slots=True)
class _Found:
    turns: dict[TurnId, TurnCompleted] = field(default_factory=dict)
    snapshots: dict[TurnId, TokenSnapshot] = field(default_factory=dict)


class Recovery:
    """Reads conversations back. Sessions of one partition that come while a scan runs share the next one."""

    def __init__(self, log_: Log, events: EventLog, blobs: Blobs) -> None:
        self._log = log_
        self._events = events
        self._blobs = blobs
        self._sought: dict[int, list[tuple[Sought, asyncio.Future[_Found]]]] = {}
        self._busy: dict[int, asyncio.Lock] = {}

    async def conversation(self, sought: Sought, partition: int) -> Conversation:
        """Every turn of the session that has both its records on the log now."""
        waiting: asyncio.Future[_Found] = asyncio.get_running_loop().create_future()
        self._sought.setdefault(partition, []).append((sought, waiting))
        async with self._busy.setdefault(partition, asyncio.Lock()):
            if not waiting.done():
                await self._scan(partition, self._sought.pop(partition))
        return _rebuilt(await waiting)

    async def _scan(self, number: int, wanted: list[tuple[Sought, asyncio.Future[_Found]]]) -> None:
        found = {sought.session_id: _Found() for sought, _ in wanted}
        keys = {sought.group_id.encode() for sought, _ in wanted}
        since = min(sought.since_ms for sought, _ in wanted) - CLOCK_SKEW_MS
        for topic in (TURNS.name, SNAPSHOTS.name):
            partition = Partition(topic, number)
            end = (await self._log.end_offsets([partition]))[partition]
            async with self._log.reader() as reader:
                reader.assign({partition: await self._first(reader, partition, end, since)})
                while reader.position(partition) < end:
                    for record in await reader.poll(max_records=500, timeout_s=0.5):
                        if record.key in keys:
                            await self._take(record, found)
        for sought, waiting in wanted:
            if not waiting.done():
                waiting.set_result(found[sought.session_id])

    async def _first(self, reader: Reader, partition: Partition, end: int, since_ms: int) -> int:
        """An offset before which every record is older than `since_ms`, by bisection."""
        low = (await self._log.start_offsets([partition]))[partition]
        high = end
        while high - low > 500:
            middle = (low + high) // 2
            reader.assign({partition: middle})
            records = await reader.poll(max_records=1, timeout_s=2.0)
            if records and records[0].timestamp_ms < since_ms:
                low = middle
            else:
                high = middle
        return low

    async def _take(self, record: Record, found: dict[str, _Found]) -> None:
        try:
            event = await self._events.decode(record)
        except UndecodableRecord as error:
            log.warning("passed over %s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
            return
        mine = found.get(event.session_id)
        if mine is None:
            return
        event = await inlined(event, self._blobs)
        if isinstance(event, TurnCompleted):
            mine.turns.setdefault(event.turn, event)
        else:
            mine.snapshots.setdefault(event.turn, event)


def _rebuilt(found: _Found) -> Conversation:
    conversation = Conversation()
    for turn_id, snapshot in found.snapshots.items():
        completed = found.turns.get(turn_id)
        if completed is not None:
            _restore(conversation, completed, snapshot)
    return conversation


def _restore(conversation: Conversation, completed: TurnCompleted, snapshot: TokenSnapshot) -> None:
    holder = conversation.turns[snapshot.parent_turn] if snapshot.parent_turn else None
    known = conversation.strands.start if holder is None else next(above(holder.place, snapshot.base_len))
    delta = int32s(_bytes(snapshot.delta_ids)).tolist()
    output = int32s(_bytes(snapshot.output_ids)).tolist()
    new_raw = orjson.loads(_bytes(completed.new_messages))
    response_raw = orjson.loads(_bytes(completed.response))
    turn = Turn(
        id=completed.turn,
        base=conversation.turns[completed.base_turn] if completed.base_turn else None,
        request_sha256=completed.request_sha256,
        tools_sha256=completed.tools_sha256,
        system_sha256=completed.system_sha256,
        new_raw=new_raw,
        new=normalised(new_raw) if new_raw else (),
        response_raw=response_raw,
        response=message(response_raw, "response"),
        finish_reason=completed.finish_reason,
        aborted=completed.aborted,
        cached_tokens=completed.cached_tokens,
        output_tokens=len(output),
        versions=(completed.weight_version_first, completed.weight_version_last),
        hashed=continued(conversation.hashed(known), (*delta, *output)),
        boundary_reason=snapshot.boundary_reason,
        total=snapshot.base_len + len(delta) + len(output),
        images=(*within(snapshot.base_len, holder.images if holder else ()), *snapshot.images),
        covered=snapshot.experts is not None and (holder is None or holder.covered),
    )
    conversation.record(turn, delta, output, known)


def _bytes(payload: object) -> bytes:
    assert isinstance(payload, bytes), "payloads are fetched before"
    return payload
