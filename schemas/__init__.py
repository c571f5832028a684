"""The language of the log: event records, ids, topic catalogue, codec, evolution rules.

What the language refuses.

SchemaError
├── UndecodableRecord    bytes that do not decode under a schema we hold: parked
│   └── LaterKind        a record of a kind that a newer release writes: passed over and counted, never parked
├── UnknownSchemaId      an id that this process has not seen: ask the registry, then try again
├── UnknownRecord        a class that is not in the catalogue: a bug of the caller
└── WrittenTooSoon       an event of a kind that this release reads and does not write yet: a bug of the caller
"""

from __future__ import annotations

if __name__ == "schemas":
    raise ImportError("import turnlog.schemas, not schemas: a twin import copies every class")


class SchemaError(Exception):
    """Base of the tree above."""


class UndecodableRecord(SchemaError):
    """The bytes are not a record of the catalogue. Remedy: inspect the dead letter; fix its producer."""


class OtherRegistry(UndecodableRecord):
    """turnlog wrote the record, and the registry holds another schema, or none, under its id. Remedy: the registry that
    the run was written with, its schemas restored with their ids."""


class LaterKind(UndecodableRecord):
    """The record is of a kind that this release knows nothing of, or does not act on yet. Remedy: none is needed during
    an upgrade; afterwards, end the roles of the older release."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is a record of a newer release of turnlog, which this one passes over")
        self.name = name


class UnknownSchemaId(SchemaError):
    """No schema is held for `schema_id`."""

    def __init__(self, schema_id: int) -> None:
        super().__init__(f"no schema is held for id {schema_id}: fetch it from the registry and decode again")
        self.schema_id = schema_id


class UnknownRecord(SchemaError):
    """The class is not an event record."""


class WrittenTooSoon(SchemaError):
    """The last release does not know what the event holds. Remedy: take it out of `UNWRITTEN` in the next release."""
