"""Schemas of the log: event records, ids, topic catalogue, codec, evolution rules.

SchemaError
├── UndecodableRecord    the bytes do not decode under a known schema; the record is dead-lettered
│   └── LaterKind        a newer release writes records of this kind; they are skipped and counted, not dead-lettered
├── NotHeldYet           this process lacks something that is needed to decode; fetch it and try again
│   ├── UnknownSchemaId  it has not seen the schema id yet: ask the registry
│   └── UnknownSessionKey  it has not read the session's key yet: read `session-keys`
├── ContentKeyError      the content of a record can be neither read nor written here
│   ├── MasterKeyMissing  the run encrypts content, and [erasure] master_keys is empty here
│   ├── WrongMasterKey   no key of [erasure] master_keys unwraps the session's key
│   ├── SessionKeyLost   the session's key is not on the log, and was not erased either
│   └── SessionIsErased  the session was erased: nothing is written for it any more
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


class NotHeldYet(SchemaError):
    """Something that is needed to decode or encode is not held in this process yet. Remedy: EventLog.decode fetches
    it."""


class UnknownSchemaId(NotHeldYet):
    """No schema is known for `schema_id`."""

    def __init__(self, schema_id: int) -> None:
        super().__init__(f"no schema is held for id {schema_id}: fetch it from the registry and decode again")
        self.schema_id = schema_id


class UnknownSessionKey(NotHeldYet):
    """The key of a session is not held here yet."""


class ContentKeyError(SchemaError):
    """Base of the errors about keys of content."""


class MasterKeyMissing(ContentKeyError):
    """The run encrypts content, and this process has no key. `what` says which content it cannot read or write."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: set [erasure] master_keys to the keys of the run (TURNLOG_ERASURE_MASTER_KEYS_FILE names a file "
            "with them)"
        )


class WrongMasterKey(ContentKeyError):
    """[erasure] master_keys has other keys than the run. Remedy: use the file of the run's other roles."""


class SessionKeyLost(ContentKeyError):
    """The key of a session is nowhere. Remedy: restore topic `session-keys` from a backup."""


class SessionIsErased(ContentKeyError):
    """The session was erased by `turnlog erase`. Remedy: none, this is what erasing is for."""


class UnknownRecord(SchemaError):
    """The class is not an event record."""


class WrittenTooSoon(SchemaError):
    """The previous release cannot read the event. Remedy: remove its kind from `UNWRITTEN` in the next release."""
