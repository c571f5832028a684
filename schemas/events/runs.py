"""Records of a run itself, and of what could not be processed."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.types import Json


@dataclass(frozen=True, slots=True)
class RunPlace:
    """One visit of one row of a dataset."""

    epoch: int
    """Passes through the dataset before this one."""
    row: int
    """From 0."""


@dataclass(frozen=True, slots=True)
class RunParent:
    """The checkpoint of another run that a run begins from, and what its feeder finds behind it."""

    run_id: str
    """Of the parent."""
    checkpoint: str
    """Name of its folder."""
    step: int
    """Optimizer steps behind it; those of the run go on from there."""
    draws: int
    """Draws of the parent that it has seen; the run's own begin at 0."""
    dataset: str
    """Of the parent's tasks, as in RolloutRequested; the rest is about no other. Empty: it asked for none."""
    places: int
    """Places of the dataset that were passed, in the feeder's order: the first fresh one of the run is behind them."""
    left: tuple[RunPlace, ...]
    """Of them, those that the checkpoint has not seen: the run's feeder asks for them first."""
    last: RunPlace | None = None
    """The last of them, which says where the feeder goes on when its parent passed tasks over. Null before v5."""


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
    parent: RunParent | None = None
    """Null of a run that begins with first weights."""
    blob_folder: str = ""
    """Of the bucket: below it lie the blobs that roles of the run put. Empty of runs that an earlier release began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlanned:
    """What lag and admission are counted by, beside the recorded settings. Written when the run is configured and at
    each later `turnlog run` with other values; the latest counts. `turnlog run pause`, `resume` and `close` write it,
    too: a phase holds until a later record names another."""

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
    phase: str = ""
    """running | paused | closed, which is the last; empty leaves it as it was, running at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFailed:
    """A process of the run died again and again: its supervisor's restarts did not help."""

    event_id: str
    run_id: str
    role: str
    """Name of the process, as `turnlog status` shows it."""
    cause: str
    """Of its last death, in a line."""
    remedy: str
    """run_restarted | given_up | retried, of a role that training does not need"""
    restart: int
    """How often the supervisor has started the run again since it began, this time included."""
    host: str
    """Of the supervisor."""


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
