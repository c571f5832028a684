"""Ownership of a log by a run, and what the log records about the run: the first RunConfigured on topic `runs` decides.

There is one run per (cluster, prefix); two would score each other's groups and execute each other's calls. Whoever
configures a run therefore reads back which record came first, and every role reads the topic as long as it lives
(`claim_log`). The role ends if another run has configured the log, and follows when its own run is paused, resumed or
closed.

RunError
├── OtherRun         the log belongs to another run
├── OtherSettings    the run was configured with other keys of [fold], [batcher] or [assembler]
├── RunUnreadable    the run is recorded in the log, and the record cannot be read
├── NotConfigured    the run is not configured, and the role does not wait for it
└── RunClosed        the run is over: nothing starts for it, resumes it or changes its plan
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from turnlog.fold_settings import FOLD_SECTIONS
from turnlog.infra.blobs import BlobMissing, Owner
from turnlog.infra.event_log import is_configuration, where
from turnlog.infra.history import all_events, assign_from_start, caught_up
from turnlog.infra.log import Partition
from turnlog.infra.offers import load_methods
from turnlog.infra.roles import event_loop
from turnlog.infra.roles.health import Health, serve_health
from turnlog.infra.roles.probe import health_address
from turnlog.infra.roles.role import Role, RunPhase, open_role
from turnlog.infra.roles.starting import run_until_stopped, servers_of, stop_on_signals, watch_servers
from turnlog.infra.run_folder import resolve_endpoints
from turnlog.processors.core.batches.draws import DrawRules, draw_rules
from turnlog.processors.core.fold.unit import FoldName
from turnlog.processors.core.fold_versions import FOLD_VERSION, fold_version
from turnlog.processors.core.methods.rules import FoldRules, fold_rules, recorded_settings
from turnlog.schemas import OtherRegistry, UndecodableRecord, ids, topics
from turnlog.schemas.events import Event, RunConfigured, RunParent, RunPlanned
from turnlog.settings import (
    ERASURE,
    AssemblerSettings,
    BatcherSettings,
    FoldSettings,
    Settings,
    fold_settings_json,
    recorded_keys,
    settings_sha256,
)

log = logging.getLogger(__name__)
PLACE = Partition(topics.RUNS.name, 0)
POLL_S = 0.5
PARENT_FILE = "parent.json"
"""File in the directory of a run created by `turnlog run fork`: the parent that its RunConfigured records."""
WITHOUT_CONTENT = frozenset({"archive", "lag", "loader", "views"})
"""Roles that decode no content of sessions, and so need no master key."""
OUTLIVES = frozenset({"alerts", "archive", "index", "trace", "track", "views"})
"""Roles that still have work when the run is closed: they copy or show its last records, too."""


class RunError(Exception):
    """Base class of the errors above."""


class OtherRun(RunError):
    """There is one run per (cluster, prefix). Remedy: the id of the run that owns the log, or another [kafka]
    prefix."""


class OtherSettings(RunError):
    """A run keeps its recorded values of these sections for life. Remedy: those values, or another run."""


class NotConfigured(RunError):
    """The log does not say what the run's records mean. Remedy: `turnlog run configure`."""


class RunClosed(RunError):
    """The run was closed. Remedy: `turnlog run fork` continues from its checkpoint under another id."""


class RunUnreadable(RunError):
    """The record of a run is damaged, which is not the same as a missing one. Remedy: restore it."""


@dataclass(frozen=True, slots=True)
class Configured:
    """The configuration that RunConfigured recorded."""

    run_id: str
    fold: FoldSettings
    batcher: BatcherSettings
    assembler: AssemblerSettings
    """Operational keys of `batcher` and `assembler` have today's defaults: a role takes those from its own settings."""
    settings_sha256: str
    """Hash as recorded; never recomputed, since later releases record other keys."""
    fold_version: str
    parent: RunParent | None = None

    @classmethod
    def of(cls, event: RunConfigured, own: Settings) -> Configured:
        """Read a RunConfigured; keys that old runs did not record come from `own`, the settings of the role. Raises
        RecordedSettingsError."""
        sections = recorded_settings(event.settings, own)
        return cls(event.run_id, *sections, event.settings_sha256, event.fold_version, event.parent)

    @classmethod
    def today(cls, settings: Settings) -> Configured:
        """Return the configuration that a run with these settings would record today."""
        return cls.of(configuration(settings), settings)

    @property
    def name(self) -> FoldName:
        """Fold name carried by marks and derived records."""
        return FoldName(self.fold_version, self.settings_sha256)

    def rules(self) -> FoldRules:
        """Return the rules of the recorded fold. Raises UnknownFoldVersion; SettingsError if no plugin has a name in
        it."""
        return fold_rules(
            self.fold, run_id=self.run_id, settings_sha256=self.settings_sha256, version=self.fold_version,
            methods=load_methods(self.fold), horizon_records=self.assembler.horizon_records,
        )  # fmt: skip

    def draw_rules(self) -> DrawRules:
        """Return the rules of the recorded rollout batches. Raises SettingsError."""
        return draw_rules(self.fold, self.batcher, load_methods(self.fold))

    def check(self, settings: Settings) -> None:
        """Raise OtherSettings, naming every key whose value differs from the recorded one."""
        differ = []
        for section, kind in FOLD_SECTIONS.items():
            recorded, ours = getattr(self, section), getattr(settings, section)
            for key in recorded_keys(kind):
                was, now = getattr(recorded, key), getattr(ours, key)
                if was != now:
                    differ.append(f"{section}.{key} was recorded as {was!r} and is {now!r} here")
        if differ:
            raise OtherSettings(
                f"run {self.run_id!r}: {'; '.join(differ)}: use the recorded values, or start another run (set [run] "
                "id and, on a shared cluster, [kafka] prefix)"
            )


def configuration(settings: Settings) -> RunConfigured:
    """Return the record with which a run begins."""
    body = fold_settings_json(settings)
    return RunConfigured(
        event_id=ids.digest("RunConfigured", settings.run.id),
        run_id=settings.run.id,
        settings=body,
        settings_sha256=settings_sha256(body),
        fold_version=FOLD_VERSION,
        parent=parent_of(settings),
    )


def parent_of(settings: Settings) -> RunParent | None:
    """Return the parent that `turnlog run fork` wrote to the run's directory, or None if the run was not forked."""
    try:
        return msgspec.json.decode((Path(settings.run.directory) / PARENT_FILE).read_bytes(), type=RunParent)
    except FileNotFoundError:
        return None


def serve(name: str, main: Callable[[Role], Awaitable[None]], settings: Settings) -> int:
    """Run a role until SIGTERM or SIGINT; return 0 after a clean drain.

    It waits for its servers as long as necessary. A server that goes away later ends the role uncommitted, and the next
    start waits for it. Errors propagate: the supervisor restarts the role. Raises OtherRun for the log of another run,
    NoEndpoints, CannotListen."""

    async def run() -> None:
        stopping, health = stop_on_signals(), Health(name, work_s=settings.liveness.work_s)
        async with serve_health(health, health_address(os.environ)):
            await run_until_stopped(_life(name, main, resolve_endpoints(settings), health, stopping), stopping, health)

    event_loop.run(name, run())
    return 0


async def _life(
    name: str, main: Callable[[Role], Awaitable[None]], settings: Settings, health: Health, stopping: asyncio.Event
) -> None:
    async with servers_of(name, settings, health) as servers:
        await servers.there()
        async with (
            open_role(name, settings, health=health, stopping=stopping) as role,
            claim_log(role),  # raises OtherRun
            watch_servers(servers),
        ):
            await servers.there(later=True)
            log.info("%s started", role.instance)
            await main(role)
            log.info("%s stopped", role.instance)


@dataclass(frozen=True, slots=True)
class Begun:
    """A configured run, and what `begin` has newly recorded."""

    run: Configured
    recorded: bool
    """True if the log had no RunConfigured."""
    planned: Mapping[str, tuple[int | None, int]]
    """Keys whose values the new RunPlanned changes: key -> (old, new)."""


@dataclass(slots=True)
class Life:
    """Fold of topic `runs` for one run."""

    run_id: str
    configured: RunConfigured | None = None
    """The first RunConfigured, of whatever run: that run owns the log."""
    plan: RunPlanned | None = None
    """The latest plan of the run."""
    plans: int = 0
    phase: RunPhase = RunPhase.RUNNING

    @property
    def parent(self) -> RunParent | None:
        return None if self.configured is None else self.configured.parent

    def apply(self, event: Event) -> None:
        """Apply one record. A phase that this release does not know is taken as PAUSED, which is always safe: nothing
        is admitted."""
        if isinstance(event, RunConfigured) and self.configured is None:
            self.configured = event
        elif isinstance(event, RunPlanned) and event.run_id == self.run_id:
            self.plan, self.plans = event, self.plans + 1
            if event.phase and self.phase is not RunPhase.CLOSED:
                known = event.phase in set(RunPhase)
                self.phase = RunPhase(event.phase) if known else RunPhase.PAUSED

    def check_open(self) -> None:
        """Raise RunClosed if the run is closed."""
        if self.phase is RunPhase.CLOSED:
            raise RunClosed(
                f"run {self.run_id!r} is closed: no role starts for it any more, but its records can still be read; "
                "`turnlog run fork --from` continues from one of its checkpoints as another run"
            )


async def life(role: Role) -> Life:
    """Return the current fold of topic `runs`. Raises LogUnavailable."""
    found = Life(role.settings.run.id)
    async for event in _events(role):
        found.apply(event)
    return found


async def set_phase(role: Role, wanted: RunPhase) -> RunPhase:
    """Record the run's phase unless it is current already; return the previous phase.

    Every role of the run follows within a second or two: see `claim_log`. Raises NotConfigured, OtherRun, RunClosed."""
    found = await life(role)
    if found.configured is None:
        raise _not_configured(role)
    _same_run(found.configured, role)
    if found.phase is wanted:
        return wanted
    found.check_open()
    plan = found.plan
    values = _planned_settings(role.settings) if plan is None else {name: getattr(plan, name) for name in PLANNED}
    await _append_plan(role, found.plans, values, wanted)
    return found.phase


async def begin(role: Role) -> Begun:
    """Record the run's configuration, once for its life, and the changes of its plan since the last start.

    If two processes configure a log at once, the first record counts. The store records the owner of the blob folder.
    Raises OtherRun, OtherSettings, RunClosed, StoreUnavailable."""
    found = await life(role)
    news = found.configured is None
    if found.configured is not None:
        _same_run(found.configured, role)
    folder = await _owned_folder(role)
    if news:
        await role.events.append(dataclasses.replace(configuration(role.settings), blob_folder=folder))
        found = await life(role)
    assert found.configured is not None, "an acknowledged record is on the log"
    run = _ours(found.configured, role)
    found.check_open()
    run.check(role.settings)
    return Begun(run, news, await _plan(role, found))


async def folder_of(role: Role, *, owned: bool = False) -> str:
    """Return the store folder for what belongs to the run alone, even if its blobs are in another folder. `owned`:
    record the owner in the store. Raises LogUnavailable, StoreUnavailable, ReadOnlyArchive."""
    found = (await life(role)).configured
    if found is not None and found.blob_folder:
        return found.blob_folder
    return await _owned_folder(role) if owned else (await _owner(role)).folder


async def _owner(role: Role) -> Owner:
    settings = role.settings
    return Owner(await role.log.cluster(), settings.kafka.prefix, settings.run.id)


async def _owned_folder(role: Role) -> str:
    """Return the folder that the run's blobs would have if it began now, and record its owner in the store.

    This includes runs whose blobs are elsewhere, because `turnlog gc` must know every log that it would have to
    read."""
    owner = await _owner(role)
    try:
        Owner.parse(owner.name, await role.blobs.get_named(owner.name))
    except BlobMissing:
        await role.blobs.put_named(owner.name, owner.json(), media_type="application/json")
    return owner.folder


async def configure(role: Role) -> Configured:
    """Call `begin` and return only the configuration."""
    return (await begin(role)).run


async def load_configuration(role: Role, *, wait: bool = True) -> Configured | None:
    """Return the recorded configuration of this log's run as soon as there is one, or None if the role is stopped
    before.

    Raises OtherRun, OtherSettings, RecordedSettingsError; without `wait`, NotConfigured."""
    found = await _first(role)
    if found is None and not wait:
        raise _not_configured(role)
    if found is None:
        log.info("run %s is not configured: waiting for `turnlog run configure`", role.settings.run.id)
        role.health.mark_started()
        found = await _first(role, wait=True)
    if found is None:
        return None
    run = _ours(found, role)
    run.check(role.settings)
    return run


@asynccontextmanager
async def claim_log(role: Role) -> AsyncIterator[None]:
    """Ensure while the block runs that the log is this run's or nobody's, and keep the role's phase current; stop the
    role when the run is closed.

    Raises OtherRun, UnknownFoldVersion and RunClosed at the start. The first two are also raised later, cancelling the
    block, as soon as such a run is configured."""
    read = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_follow_run(role, read))
            await read.wait()
            yield
            watch.cancel()
    except BaseExceptionGroup as errors:  # report a single error as itself, with its cause
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


async def _follow_run(role: Role, read: asyncio.Event) -> None:
    """Follow topic `runs` until the role is stopped; `read` is set once all records that are there now are applied."""
    found = Life(role.settings.run.id)
    async for event in _events(role, wait=True, read=read):
        found.apply(event)
        if found.configured is not None:
            _same_run(found.configured, role)
            role.blobs.folder = found.configured.blob_folder
        if found.phase is not role.phase:
            log.info("run %s is %s", found.run_id, found.phase)
            role.phase = found.phase
        if found.phase is RunPhase.CLOSED and role.name not in OUTLIVES:
            if not read.is_set():
                found.check_open()
            role.stopping.set()


async def recorded_configuration(role: Role) -> Configured | None:
    """Return the recorded configuration of the role's run, for readers of the past, whose log may hold other runs as
    well: the run's first record counts. Raises RecordedSettingsError."""
    own = await all_events(role, topics.RUNS)
    return next((Configured.of(event, role.settings) for event in own if isinstance(event, RunConfigured)), None)


async def nothing_recorded(role: Role) -> str:
    """Return a message that a reader found nothing of the role's run, and whose log it has read."""
    run_id, found = role.settings.run.id, await _first(role)
    if found is None:
        return f"nothing recorded: no run is configured on this log, so nothing is known of run {run_id!r}"
    if found.run_id != run_id:
        return (
            f"nothing recorded for run {run_id!r}: this log belongs to run {found.run_id!r}; select that run with "
            f"--run {found.run_id} or TURNLOG_RUN_ID"
        )
    return f"nothing recorded: run {run_id!r} is configured but has not sampled a token yet"


PLANNED = ("draws", "publish_every", "groups", "rollouts")


def _planned_settings(settings: Settings) -> dict[str, int]:
    """Return the settings that lag and admission are computed from."""
    kafka = settings.kafka
    values = (settings.feeder.draws, settings.trainer.publish_every, kafka.groups, kafka.rollouts)
    return dict(zip(PLANNED, values, strict=True))


async def _plan(role: Role, found: Life) -> dict[str, tuple[int | None, int]]:
    """Append the plan unless the latest record has the same values; return what changed."""
    values = _planned_settings(role.settings)
    said = {name: getattr(found.plan, name, None) for name in PLANNED}
    if said != values:
        await _append_plan(role, found.plans, values)
    return {key: (said[key], value) for key, value in values.items() if said[key] != value}


async def _append_plan(role: Role, plans: int, values: Mapping[str, int], phase: str = "") -> None:
    run_id = role.settings.run.id
    event_id = ids.digest("RunPlanned", run_id, plans, *values.values(), *([phase] if phase else ()))
    await role.events.append(RunPlanned(event_id=event_id, run_id=run_id, phase=phase, **values))


def _not_configured(role: Role) -> NotConfigured:
    return NotConfigured(
        f"run {role.settings.run.id!r} is not configured on this log (prefix {role.settings.kafka.prefix!r}): run "
        "`turnlog run configure` with the settings that every role uses"
    )


def _ours(found: RunConfigured, role: Role) -> Configured:
    _same_run(found, role)
    role.blobs.folder = found.blob_folder
    return Configured.of(found, role.settings)


def _same_run(found: RunConfigured, role: Role) -> None:
    """Raise OtherRun, or UnknownFoldVersion for a run that a later release began: whatever differs between two fold
    versions differs in every role."""
    ours, kafka = role.settings.run.id, role.settings.kafka
    if found.run_id != ours:
        raise OtherRun(
            f"{PLACE.topic} of {kafka.bootstrap or 'the log'}, prefix {kafka.prefix!r}, belongs to run "
            f"{found.run_id!r}, but this is run {ours!r}: a cluster and prefix hold one run; set [run] id to "
            f"{found.run_id!r} to continue that run, or set another [kafka] prefix to have a run of your own"
        )
    fold_version(found.fold_version)
    _check_encryption(found, role)


def _check_encryption(found: RunConfigured, role: Role) -> None:
    """Raise OtherSettings if the run encrypts content and this role would not, or the other way round."""
    encrypts, configured = is_encrypted(found), bool(role.settings.erasure.master_keys)
    if encrypts and not configured and role.name not in WITHOUT_CONTENT:
        raise OtherSettings(
            f"run {found.run_id!r} encrypts the content of its sessions, and [erasure] master_keys is empty here: name "
            "the file with the run's master keys by TURNLOG_ERASURE_MASTER_KEYS_FILE"
        )
    if configured and not encrypts:
        raise OtherSettings(
            f"[erasure] master_keys is set, but run {found.run_id!r} was configured without it, and so it has sessions "
            "that cannot be erased: unset it, or start another run"
        )


def is_encrypted(found: RunConfigured) -> bool:
    """Return whether the run encrypts the content of its sessions."""
    return ERASURE in json.loads(found.settings)


async def _first(role: Role, *, wait: bool = False) -> RunConfigured | None:
    """Return the first RunConfigured of the log; with `wait`, wait for one until the role is stopped."""
    async with contextlib.aclosing(_events(role, wait=wait)) as events:
        async for event in events:
            if isinstance(event, RunConfigured):
                return event
    return None


async def _events(role: Role, *, wait: bool = False, read: asyncio.Event | None = None) -> AsyncGenerator[Event, None]:
    """Yield topic `runs` from its beginning; `read` is set once the records that were there at the start have been
    yielded.

    Undecodable records are skipped: a dead letter would help nobody. Before the first RunConfigured, however,
    OtherRegistry and RunUnreadable are raised, because the record may be the run's configuration; later records cannot
    be."""
    known = False
    async with role.log.reader(patient=wait) as reader:
        ends = await assign_from_start(role.log, reader, [PLACE])
        while True:
            if caught_up(reader, ends):
                if read is not None:
                    read.set()
                if not wait or role.stopping.is_set():
                    return
            for record in await reader.poll(timeout_s=POLL_S):
                try:
                    event = await role.events.decode(record)
                except UndecodableRecord as broken:
                    if known:
                        continue
                    if isinstance(broken, OtherRegistry):
                        raise  # this record may be the run's configuration, which must not be recorded anew
                    if is_configuration(record):
                        raise RunUnreadable(
                            f"{where(record)} holds the run's configuration and cannot be read ({broken}): restore "
                            f"topic {PLACE.topic} from the archive; nothing is recorded in its place"
                        ) from broken
                    continue
                known = known or isinstance(event, RunConfigured)
                yield event
