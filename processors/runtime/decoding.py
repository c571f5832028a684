"""Bytes to events as folds take them: what cannot be used comes back as a value, what is away is retried."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from turnlog.infra.blobs import BlobCorrupt, BlobMissing, Blobs, StoreUnavailable, inlined
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Record
from turnlog.infra.registry import RegistryUnavailable
from turnlog.processors.core.fold.unit import payloads_read
from turnlog.schemas import UndecodableRecord, UnknownSchemaId
from turnlog.schemas.events import Event
from turnlog.schemas.types import BlobRef

PAUSES_S = (0.1, 0.5, 2.0)
"""Between attempts: a blob may be young, a server away. After the last the process ends uncommitted."""

LostPayload = BlobMissing | BlobCorrupt
"""The store answers, and has not what the record names."""
Decoded = Event | UndecodableRecord | LostPayload


async def decoded(
    records: Sequence[Record],
    events: EventLog,
    blobs: Blobs,
    pauses_s: Sequence[float] = PAUSES_S,
    *,
    run_id: str,
    messages: bool = False,
) -> list[Decoded]:
    """Per record its event, why it must be parked, or why it stops its unit.

    Payloads of the run's snapshots come as bytes, those of turns where the fold's policy needs `messages`; else
    messages, like tools and evidence, stay references: only people and dashboards read them. Raises
    RegistryUnavailable, StoreUnavailable.
    """
    found: list[Decoded] = []
    for record in records:
        try:
            found.append(events.codec.decode(record.value))
        except UnknownSchemaId:  # the registry has to be asked; no record of an id that we hold waits for anything
            found.append(await _decoded(record, events, pauses_s))
        except UndecodableRecord as refusal:
            found.append(refusal)
    away = [at for at, event in enumerate(found) if _refers(event, run_id, messages)]
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


def _refers(event: Decoded, run_id: str, messages: bool) -> bool:
    return BlobRef in map(type, payloads_read(event, run_id, messages=messages))


async def _inlined(event: Event, blobs: Blobs, pauses_s: Sequence[float]) -> Event | LostPayload:
    for pause_s in pauses_s:
        try:
            return await inlined(event, blobs)
        except (BlobMissing, StoreUnavailable):
            await asyncio.sleep(pause_s)
        except BlobCorrupt as lost:
            return lost
    try:
        return await inlined(event, blobs)
    except (BlobMissing, BlobCorrupt) as lost:
        return lost
