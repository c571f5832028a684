"""Records of a run itself, and of records that could not be processed."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.schemas.types import Json, RunEvent


@dataclass(frozen=True, slots=True)
class RunPlace:
    """One visit of one row of a dataset."""

    epoch: int
    """Passes through the dataset before this one."""
    row: int
    """Row of the dataset, from 0."""


@dataclass(frozen=True, slots=True)
class RunParent:
    """The checkpoint of another run that a run begins from, and what its feeder finds behind it."""

    run_id: str
    """Id of the parent run."""
    checkpoint: str
    """Name of the checkpoint's folder."""
    step: int
    """Optimizer steps before the checkpoint; the steps of the run continue from there."""
    draws: int
    """Draws of the parent that the checkpoint has seen; the run's own draws begin at 0."""
    dataset: str
    """Dataset of the parent's tasks, as in RolloutRequested; the fields below concern no other dataset. Empty if the
    parent requested no task."""
    places: int
    """Number of places of the dataset that the parent has passed, in the feeder's order; the run's first fresh place
    follows them."""
    left: tuple[RunPlace, ...]
    """Places among them that the checkpoint has not seen; the run's feeder requests them first."""
    last: RunPlace | None = None
    """The last of them, from which the feeder continues if its parent skipped tasks. Null before v5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfigured(RunEvent):
    """The settings that folds depend on, as canonical JSON, and their hash, which stands in every derived record.

    The first RunConfigured on the topic determines which run owns the log: there is one run per cluster and prefix.
    """

    settings: Json
    """Canonical JSON with sorted keys and no spaces."""
    settings_sha256: str
    """Hex sha256 of `settings`."""
    fold_version: str
    """Version of the rules by which every role and every reader folds this run."""
    parent: RunParent | None = None
    """Parent of a forked run; null if the run begins with initial weights."""
    blob_folder: str = ""
    """Folder in the bucket below which the run's roles store blobs. Empty for runs that an earlier release began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlanned(RunEvent):
    """What lag and admission are counted by, beside the recorded settings. Written when the run is configured and at
    each later `turnlog run` with other values; the latest record counts. `turnlog run pause`, `resume` and `close`
    write it as well: a phase holds until a later record names another."""

    draws: int
    """Number of draws to train before the run ends ([feeder] draws)."""
    publish_every: int
    """Number of draws between published weights ([trainer] publish_every)."""
    groups: int
    """Number of partitions of the topics keyed by group_id ([kafka] groups)."""
    rollouts: int
    """Number of partitions of the topics keyed by rollout_id ([kafka] rollouts)."""
    phase: str = ""
    """running, paused or closed; closed is final. Empty leaves the phase unchanged; a run starts as running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFailed(RunEvent):
    """A process of the run died again and again: its supervisor's restarts did not help."""

    role: str
    """Name of the process, as `turnlog status` shows it."""
    cause: str
    """Cause of its last death, in one line."""
    remedy: str
    """run_restarted, given_up, or retried (for a role that training does not need)."""
    restart: int
    """Number of times that the supervisor has restarted the run since it began, including this time."""
    host: str
    """Host of the supervisor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessAudited(RunEvent):
    """Somebody looked at a run, exported from it, acted on it or logged in, or was denied that. It is written before
    the content is shown, and holds neither content nor secrets."""

    subject: str
    """Identifier: the subject of the id token, the name of a fixed token, `link:USER` with the user who printed the
    login link, or the user of the operating system. Empty for a visitor without a login."""
    name: str
    """E-mail address or user name that the provider gave, for people; else empty."""
    login: str
    """Kind of login: oidc, link, token, os_user, or none."""
    role: str
    """reader, operator or owner. Empty if the subject has no role, and for a command."""
    action: str
    """look, export, act or login."""
    kind: str
    """What was accessed: session, group, batch, record, dataset, run, audit or the name of another page or command."""
    about: tuple[str, ...]
    """Ids of what was accessed: sessions, a group, a batch, a record's place."""
    form: str
    """Format of an export; else empty."""
    address: str
    """Network address of the client, or the host of a command."""
    allowed: bool
    """False if access was denied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter(RunEvent):
    """A record that was refused: where it stands, its raw bytes, and the typed cause."""

    topic: str
    """Topic of the dead-lettered record."""
    partition: int
    """Partition of the dead-lettered record."""
    offset: int
    """Offset of the dead-lettered record."""
    key: bytes
    """Key of the record, unchanged."""
    value: bytes
    """Value of the record, unchanged and with its schema id; cut to 1 MiB."""
    role: str
    """Role that dead-lettered the record."""
    cause: str
    """Class name of the error, for example `UndecodableRecord` or `PromptHashMismatch`."""
    message: str
    """Error message: what, where, and what to do."""
