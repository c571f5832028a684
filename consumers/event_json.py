"""An event and its position on the log as JSON, for people and programs that read single records."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import orjson

from turnlog.infra.log import Record
from turnlog.schemas.events import Event


def as_json(record: Record, event: Event) -> dict[str, Any]:
    """Return an event and its position as a JSON object."""
    return {
        "topic": record.topic, "partition": record.partition, "offset": record.offset, "time_ms": record.timestamp_ms,
        "kind": type(event).__name__, "event": {field.name: _plain(getattr(event, field.name))
                                                for field in dataclasses.fields(event)},
    }  # fmt: skip


def _plain(value: object) -> Any:
    if isinstance(value, bytes):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value.hex() if len(value) <= 256 else f"{len(value)} bytes"
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value
