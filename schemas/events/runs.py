"""Records of a run itself, and of what could not be processed."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfigured:
    """The settings that folds depend on, as canonical JSON, and their hash, which stands in every derived record."""

    event_id: str
    run_id: str
    settings: Json
    settings_sha256: str
    fold_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that was refused: where it stands, its raw bytes, and the typed cause."""

    event_id: str
    run_id: str
    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    role: str
    cause: str
    """The error's class name, for example `UndecodableRecord` or `PromptHashMismatch`."""
    message: str
    """What, where, and what to do."""
