"""Bytes to events as folds take them: what is refused comes back as a value, what is away is retried."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnlog.infra.blobs import BlobMissing, Blobs, StoreUnavailable
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Record
from turnlog.infra.payloads import inlined
from turnlog.infra.registry import RegistryUnavailable
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import Event, TokenSnapshot
from turnlog.schemas.types import BlobRef

PAUSES_S = (0.1, 0.5, 2.0)
"""Between attempts: a blob may be young, a server away. After the last the process ends uncommitted."""

Decoded = Event | UndecodableRecord


async def decoded(
    records: Sequence[Record], events: EventLog, blobs: Blobs, pauses_s: Sequence[float] = PAUSES_S
) -> list[Decoded]:
    """Per record its event, or why it must be parked. Payloads of snapshots come as bytes; messages, tools and evidence
    stay references: only people and dashboards read them. Raises RegistryUnavailable, BlobError."""
    found = [await _decoded(record, events, pauses_s) for record in records]
    away = [at for at, event in enumerate(found) if isinstance(event, TokenSnapshot) and _refers(event)]
    for at, event in zip(
        away, await asyncio.gather(*(_inlined(found[at], blobs, pauses_s) for at in away)), strict=True
    ):
        found[at] = event
    return found


async def _decoded(record: Record, events: EventLog, pauses_s: Sequence[float]) -> Decoded:
    try:
        for pause_s in pauses_s:
            try:
                return await events.decode(record)
            except RegistryUnavailable:
                await asyncio.sleep(pause_s)
        return await events.decode(record)
    except UndecodableRecord as refusal:
        return refusal


def _refers(event: TokenSnapshot) -> bool:
    return any(isinstance(value, BlobRef) for value in (event.delta_ids, event.output_ids, event.output_logprobs))


async def _inlined(event: Event, blobs: Blobs, pauses_s: Sequence[float]) -> Event:
    for pause_s in pauses_s:
        try:
            return await inlined(event, blobs)
        except (BlobMissing, StoreUnavailable):
            await asyncio.sleep(pause_s)
    return await inlined(event, blobs)
