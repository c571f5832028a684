"""Records of a run itself, and of what could not be processed."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfigured:
    """The settings that folds depend on, as canonical JSON, and their hash, which stands in every derived record.

    The first one on the topic says whose log this is: one run per cluster and prefix.
    """

    event_id: str
    run_id: str
    settings: Json
    """Canonical JSON: sorted keys, no spaces."""
    settings_sha256: str
    """Hex sha256 of `settings`."""
    fold_version: str
    """Of the rules by which every role and every reader folds this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlanned:
    """What lag and admission are counted by, beside the recorded settings. Written when the run is configured and at
    each later `turnlog run` with other values; the latest counts."""

    event_id: str
    run_id: str
    draws: int
    """Draws to train before the run ends ([feeder] draws)."""
    publish_every: int
    """Draws between published weights ([trainer] publish_every)."""
    groups: int
    """Partitions of the topics keyed by group_id ([kafka] groups)."""
    rollouts: int
    """Partitions of the topics keyed by rollout_id ([kafka] rollouts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A record that was refused: where it stands, its raw bytes, and the typed cause."""

    event_id: str
    run_id: str
    topic: str
    """Where the refused record stands."""
    partition: int
    """There."""
    offset: int
    """There."""
    key: bytes
    """As it stands there."""
    value: bytes
    """As it stands there, schema id included; cut to 1 MiB."""
    role: str
    """That refused it."""
    cause: str
    """The error's class name, for example `UndecodableRecord` or `PromptHashMismatch`."""
    message: str
    """What, where, and what to do."""
