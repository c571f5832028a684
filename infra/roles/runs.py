"""Whose log this is, and what it recorded for the run's life: the first RunConfigured on topic `runs` decides.

One run per (cluster, prefix): two would score each other's groups and run each other's calls. So whoever configures a
run reads back which record came first, and every role reads the topic for its whole life (`claimed`): it ends where
another run has configured the log, and obeys when its own is paused, resumed or closed.

RunError
├── OtherRun         the log belongs to another run
├── OtherSettings    the run was configured with other keys of [fold], [batcher] or [assembler]
├── RunUnreadable    the run is recorded there, and the record cannot be read
├── NotConfigured    nobody has configured the run, and the role does not wait for it
└── RunClosed        the run is over: nothing starts for it, resumes it or changes its plan
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
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
from turnlog.infra.history import all_events
from turnlog.infra.log import Partition
from turnlog.infra.offers import installed
from turnlog.infra.roles import event_loop
from turnlog.infra.roles.health import Health, serve_health
from turnlog.infra.roles.probe import health_address
from turnlog.infra.roles.role import Role, RunPhase, opened
from turnlog.infra.roles.starting import asked, lived, servers_of, watched
from turnlog.infra.run_folder import resolved
from turnlog.processors.core.batches.draws import DrawRules, draw_rules
from turnlog.processors.core.fold.low_water import FoldName
from turnlog.processors.core.fold_versions import FOLD_VERSION, fold_version
from turnlog.processors.core.methods.rules import FoldRules, fold_rules, recorded_settings
from turnlog.schemas import OtherRegistry, UndecodableRecord, ids, topics
from turnlog.schemas.events import Event, RunConfigured, RunParent, RunPlanned
from turnlog.settings import (
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
"""In the directory of a run that `turnlog run fork` made: what its RunConfigured says of its parent."""
OUTLIVES = frozenset({"alerts", "archive", "index", "trace", "track", "views"})
"""Roles with work to do when the run is closed: what its last records say is copied and shown, too."""


class RunError(Exception):
    """Base of the tree above."""


class OtherRun(RunError):
    """One run per (cluster, prefix). Remedy: the id of the run that is there, or a [kafka] prefix of one's own."""


class OtherSettings(RunError):
    """A run keeps what it recorded of these sections for life. Remedy: those values, or another run."""


class NotConfigured(RunError):
    """The log does not say what the run's records mean. Remedy: `turnlog run configure`."""


class RunClosed(RunError):
    """Somebody closed the run. Remedy: `turnlog run fork` goes on from its checkpoint under another id."""


class RunUnreadable(RunError):
    """The record of a run is damaged, which is not as if there were none. Remedy: restore it."""


@dataclass(frozen=True, slots=True)
class Configured:
    """What RunConfigured recorded."""

    run_id: str
    fold: FoldSettings
    batcher: BatcherSettings
    assembler: AssemblerSettings
    """Operational keys of both are today's defaults: a role takes those from its own settings."""
    settings_sha256: str
    """As recorded: never computed again, since later releases record other keys."""
    fold_version: str
    parent: RunParent | None = None

    @classmethod
    def of(cls, event: RunConfigured, own: Settings) -> Configured:
        """`own`: of the role that asks, for what old runs did not record. Raises RecordedSettingsError."""
        sections = recorded_settings(event.settings, own)
        return cls(event.run_id, *sections, event.settings_sha256, event.fold_version, event.parent)

    @classmethod
    def today(cls, settings: Settings) -> Configured:
        """What a run with these settings records when it begins today."""
        return cls.of(configuration(settings), settings)

    @property
    def name(self) -> FoldName:
        """What marks and derived records carry."""
        return FoldName(self.fold_version, self.settings_sha256)

    def rules(self) -> FoldRules:
        """Of the recorded fold. Raises UnknownFoldVersion, SettingsError for a name that nobody offers."""
        return fold_rules(
            self.fold, run_id=self.run_id, settings_sha256=self.settings_sha256, version=self.fold_version,
            methods=installed(self.fold), horizon_records=self.assembler.horizon_records,
        )  # fmt: skip

    def draw_rules(self) -> DrawRules:
        """Of the recorded draws. Raises SettingsError."""
        return draw_rules(self.fold, self.batcher, installed(self.fold))

    def check(self, settings: Settings) -> None:
        """Raises OtherSettings, which names every key whose value differs from the recorded one."""
        differ = []
        for section, kind in FOLD_SECTIONS.items():
            recorded, ours = getattr(self, section), getattr(settings, section)
            for key in recorded_keys(kind):
                was, now = getattr(recorded, key), getattr(ours, key)
                if was != now:
                    differ.append(f"{section}.{key} was recorded as {was!r} and is {now!r} here")
        if differ:
            raise OtherSettings(
                f"run {self.run_id!r}: {'; '.join(differ)}: use what it recorded, or start another run "
                "([run] id, and on a shared cluster [kafka] prefix)"
            )


def configuration(settings: Settings) -> RunConfigured:
    """The record with which a run begins."""
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
    """What `turnlog run fork` left in the run's directory, if it made the run."""
    try:
        return msgspec.json.decode((Path(settings.run.directory) / PARENT_FILE).read_bytes(), type=RunParent)
    except FileNotFoundError:
        return None


def serve(name: str, main: Callable[[Role], Awaitable[None]], settings: Settings) -> int:
    """Run a role until SIGTERM or SIGINT; 0 after a clean drain. It waits for its servers as long as it takes; one that
    goes away later ends it uncommitted, and it waits in its next start. An error comes out: the supervisor restarts.
    Raises OtherRun for the log of another run, NoEndpoints, CannotListen."""

    async def run() -> None:
        stopping, health = asked(), Health(name, work_s=settings.liveness.work_s)
        async with serve_health(health, health_address(os.environ)):
            await lived(_life(name, main, resolved(settings), health, stopping), stopping, health)

    event_loop.run(name, run())
    return 0


async def _life(
    name: str, main: Callable[[Role], Awaitable[None]], settings: Settings, health: Health, stopping: asyncio.Event
) -> None:
    async with servers_of(name, settings, health) as servers:
        await servers.there()
        async with (
            opened(name, settings, health=health, stopping=stopping) as role,
            claimed(role),  # raises OtherRun
            watched(servers),
        ):
            await servers.there(later=True)
            log.info("%s started", role.instance)
            await main(role)
            log.info("%s stopped", role.instance)


@dataclass(frozen=True, slots=True)
class Begun:
    """A run that is configured, and what of that was news."""

    run: Configured
    recorded: bool
    """There was no RunConfigured."""
    planned: Mapping[str, tuple[int | None, int]]
    """What RunPlanned says otherwise than before: key -> (was, is)."""


@dataclass(slots=True)
class Life:
    """The fold of topic `runs` for one run."""

    run_id: str
    configured: RunConfigured | None = None
    """Whose log it is: the first one, of whatever run."""
    plan: RunPlanned | None = None
    """The run's latest."""
    plans: int = 0
    phase: RunPhase = RunPhase.RUNNING

    @property
    def parent(self) -> RunParent | None:
        return None if self.configured is None else self.configured.parent

    def apply(self, event: Event) -> None:
        """Fold one record. A phase that this release does not know admits nothing: that is safe in every one."""
        if isinstance(event, RunConfigured) and self.configured is None:
            self.configured = event
        elif isinstance(event, RunPlanned) and event.run_id == self.run_id:
            self.plan, self.plans = event, self.plans + 1
            if event.phase and self.phase is not RunPhase.CLOSED:
                known = event.phase in set(RunPhase)
                self.phase = RunPhase(event.phase) if known else RunPhase.PAUSED

    def check_open(self) -> None:
        """Raises RunClosed."""
        if self.phase is RunPhase.CLOSED:
            raise RunClosed(
                f"run {self.run_id!r} is closed: nothing starts for it any more, what it recorded can be read; "
                "`turnlog run fork --from` goes on from one of its checkpoints as another run"
            )


async def life(role: Role) -> Life:
    """What topic `runs` says now. Raises LogUnavailable."""
    found = Life(role.settings.run.id)
    async for event in _events(role):
        found.apply(event)
    return found


async def set_phase(role: Role, wanted: RunPhase) -> RunPhase:
    """Say the run's phase, unless it is that already; the one before. Every role of the run obeys within a second or
    two: see `claimed`. Raises NotConfigured, OtherRun, RunClosed."""
    found = await life(role)
    if found.configured is None:
        raise _not_configured(role)
    _same_run(found.configured, role)
    if found.phase is wanted:
        return wanted
    found.check_open()
    plan = found.plan
    values = _planned(role.settings) if plan is None else {name: getattr(plan, name) for name in PLANNED}
    await _append_plan(role, found.plans, values, wanted)
    return found.phase


async def begin(role: Role) -> Begun:
    """Record what the run's records mean, once for its life, and what of its plan changed since the last start. Of two
    that configure a log at once, the one whose record came first stays. The store is told whose folder the blobs lie
    in. Raises OtherRun, OtherSettings, RunClosed, StoreUnavailable."""
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
    """What belongs to the run alone lies there in the store, also where its blobs lie elsewhere. `owned`: the store is
    told whose that is. Raises LogUnavailable, StoreUnavailable, ReadOnlyArchive."""
    found = (await life(role)).configured
    if found is not None and found.blob_folder:
        return found.blob_folder
    return await _owned_folder(role) if owned else (await _owner(role)).folder


async def _owner(role: Role) -> Owner:
    settings = role.settings
    return Owner(await role.log.cluster(), settings.kafka.prefix, settings.run.id)


async def _owned_folder(role: Role) -> str:
    """Where the run's blobs would lie if it began now; the store says whose that is, also of a run whose blobs lie
    elsewhere: `turnlog gc` must know every log that it would have to read."""
    owner = await _owner(role)
    try:
        Owner.parsed(owner.name, await role.blobs.get_named(owner.name))
    except BlobMissing:
        await role.blobs.put_named(owner.name, owner.json(), media_type="application/json")
    return owner.folder


async def configure(role: Role) -> Configured:
    """`begin`, for who does not ask what was news."""
    return (await begin(role)).run


async def configured(role: Role, *, wait: bool = True) -> Configured | None:
    """What this log's run recorded, as soon as somebody has configured it; None when the role is asked to stop before.
    Raises OtherRun, OtherSettings, RecordedSettingsError; without `wait` NotConfigured."""
    found = await _first(role)
    if found is None and not wait:
        raise _not_configured(role)
    if found is None:
        log.info("run %s is not configured: waiting for `turnlog run configure`", role.settings.run.id)
        role.health.started()
        found = await _first(role, wait=True)
    if found is None:
        return None
    run = _ours(found, role)
    run.check(role.settings)
    return run


@asynccontextmanager
async def claimed(role: Role) -> AsyncIterator[None]:
    """While the block runs, the log is this run's or nobody's, and the role knows the run's phase; when the run is
    closed, it is asked to stop. Raises OtherRun, UnknownFoldVersion and RunClosed at its start, the first two also
    later, cancelling the block, as soon as such a run is configured."""
    read = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(_obeyed(role, read))
            await read.wait()
            yield
            watch.cancel()
    except BaseExceptionGroup as errors:  # one is reported as itself, with what it was raised from
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


async def _obeyed(role: Role, read: asyncio.Event) -> None:
    """Follow topic `runs` until the role is asked to stop; `read` is set when all that stands there now was folded."""
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


async def recorded(role: Role) -> Configured | None:
    """What the role's run recorded, for readers of its past, which may hold other runs too: the run's first record
    counts. Raises RecordedSettingsError."""
    own = await all_events(role, topics.RUNS)
    return next((Configured.of(event, role.settings) for event in own if isinstance(event, RunConfigured)), None)


async def nothing_recorded(role: Role) -> str:
    """Says that a reader found nothing of the role's run, and whose log it has read."""
    run_id, found = role.settings.run.id, await _first(role)
    if found is None:
        return f"nothing recorded: no run is configured on this log, so nothing is known of run {run_id!r}"
    if found.run_id != run_id:
        return (
            f"nothing recorded of run {run_id!r}: this log belongs to run {found.run_id!r}; name that one with --run "
            f"{found.run_id}, or TURNLOG_RUN_ID"
        )
    return f"nothing recorded: run {run_id!r} is configured and has sampled no token yet"


PLANNED = ("draws", "publish_every", "groups", "rollouts")


def _planned(settings: Settings) -> dict[str, int]:
    """What lag and admission are counted by."""
    kafka = settings.kafka
    values = (settings.feeder.draws, settings.trainer.publish_every, kafka.groups, kafka.rollouts)
    return dict(zip(PLANNED, values, strict=True))


async def _plan(role: Role, found: Life) -> dict[str, tuple[int | None, int]]:
    """Append the plan, unless the latest record says the same; what it said otherwise."""
    values = _planned(role.settings)
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
        f"run {role.settings.run.id!r} is not configured on this log (prefix {role.settings.kafka.prefix!r}): "
        "`turnlog run configure`, with the settings that every role has, records what it means"
    )


def _ours(found: RunConfigured, role: Role) -> Configured:
    _same_run(found, role)
    role.blobs.folder = found.blob_folder
    return Configured.of(found, role.settings)


def _same_run(found: RunConfigured, role: Role) -> None:
    """Raises OtherRun, and UnknownFoldVersion for a run that a later release began: whatever it does otherwise from one
    fold version to the next, it does in every role."""
    ours, kafka = role.settings.run.id, role.settings.kafka
    if found.run_id != ours:
        raise OtherRun(
            f"{PLACE.topic} of {kafka.bootstrap or 'the log'}, prefix {kafka.prefix!r}, belongs to run "
            f"{found.run_id!r}, this is {ours!r}: one run per cluster and prefix; set [run] id to {found.run_id!r} to "
            "go on with it, or [kafka] prefix to another for a run of your own"
        )
    fold_version(found.fold_version)


async def _first(role: Role, *, wait: bool = False) -> RunConfigured | None:
    """The record that says whose log this is; `wait`: until there is one or the role is asked to stop."""
    async with contextlib.aclosing(_events(role, wait=wait)) as events:
        async for event in events:
            if isinstance(event, RunConfigured):
                return event
    return None


async def _events(role: Role, *, wait: bool = False, read: asyncio.Event | None = None) -> AsyncGenerator[Event, None]:
    """Topic `runs` from its beginning; `read` is set when what stood there was told. What does not decode is passed
    over: a dead letter of it would help nobody. Raises OtherRegistry and RunUnreadable before the record that says what
    the run is; whatever comes after it says nothing of that."""
    known = False
    end = (await role.log.end_offsets([PLACE]))[PLACE]
    async with role.log.reader(patient=wait) as reader:
        reader.assign(await role.log.start_offsets([PLACE]))
        while True:
            if reader.position(PLACE) >= end:
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
                        raise  # the run may be recorded there: nobody records it anew
                    if is_configuration(record):
                        raise RunUnreadable(
                            f"{where(record)} says what the run is and cannot be read ({broken}): restore topic "
                            f"{PLACE.topic} from the archive; nothing is recorded in its place"
                        ) from broken
                    continue
                known = known or isinstance(event, RunConfigured)
                yield event
