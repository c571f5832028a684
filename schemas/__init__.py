"""Schemas of the log: event records, ids, topic catalogue, codec, evolution rules.

SchemaError
├── UndecodableRecord    the bytes do not decode under a known schema; the record is dead-lettered
│   └── LaterKind        a newer release writes records of this kind; they are skipped and counted, not dead-lettered
├── UnknownSchemaId      this process has not seen the id yet; fetch the schema from the registry and try again
├── UnknownRecord        the class is not in the catalogue; a bug of the caller
└── WrittenTooSoon       this release reads the event's kind and does not write it yet; a bug of the caller
"""

from __future__ import annotations

if __name__ == "schemas":
    raise ImportError("import turnlog.schemas, not schemas: a twin import copies every class")


class SchemaError(Exception):
    """Base class of the errors above."""


class UndecodableRecord(SchemaError):
    """The bytes are not a record of the catalogue. Remedy: inspect the dead letter and fix its producer."""


class OtherRegistry(UndecodableRecord):
    """The record was written by turnlog, but the registry has another schema, or none, under its id. Remedy: use the
    registry that the run was written with, or restore its schemas under their ids."""


class LaterKind(UndecodableRecord):
    """The record is of a kind that this release does not know, or does not act on yet. Remedy: none during an upgrade;
    afterwards, stop the roles of the older release."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is a record of a newer release of turnlog, which this one passes over")
        self.name = name


class UnknownSchemaId(SchemaError):
    """No schema is known for `schema_id`."""

    def __init__(self, schema_id: int) -> None:
        super().__init__(f"no schema is held for id {schema_id}: fetch it from the registry and decode again")
        self.schema_id = schema_id


class UnknownRecord(SchemaError):
    """The class is not an event record."""


class WrittenTooSoon(SchemaError):
    """The previous release cannot read the event. Remedy: remove its kind from `UNWRITTEN` in the next release."""
