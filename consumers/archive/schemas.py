"""The schemas that records were written with: asked for once, kept in the archive before any file that needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnlog.infra.archive.index import ArchiveIndex
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Record
from turnlog.schemas.codec import HEADER, MAGIC
from turnlog.schemas.events import ALL


class WrittenSchemas:
    """Schema id -> schema, of records of the catalogue."""

    def __init__(self, events: EventLog, index: ArchiveIndex) -> None:
        self._events = events
        self._index = index
        self._known: dict[int, Mapping[str, Any]] = {}
        self._unknown: set[int] = set()
        """Ids that the registry does not have, or of no record of the catalogue: such values stay raw."""

    async def of(self, record: Record) -> Mapping[int, Mapping[str, Any]]:
        """Every schema known, the record's own among them if anybody has it. Raises RegistryUnavailable,
        StoreUnavailable."""
        value = record.value
        if len(value) >= HEADER.size and value[0] == MAGIC:
            schema_id = HEADER.unpack_from(value)[1]
            if schema_id not in self._known and schema_id not in self._unknown:
                await self._learn(schema_id)
        return self._known

    async def _learn(self, schema_id: int) -> None:
        try:
            schema = await self._events.schema(schema_id)
        except KeyError:
            self._unknown.add(schema_id)
            return
        if str(schema.get("name", "")).rpartition(".")[2] not in ALL:
            self._unknown.add(schema_id)
            return
        await self._index.put_schema(schema_id, schema)
        self._known[schema_id] = schema
