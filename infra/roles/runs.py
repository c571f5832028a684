"""Whose log this is, and what it recorded for the run's life: the first RunConfigured on topic `runs` decides.

One run per (cluster, prefix): two would score each other's groups and run each other's calls. So whoever configures a
run reads back which record came first, and every role looks at its start, and until there is one (`claimed`).

RunError
├── OtherRun         the log belongs to another run
├── OtherSettings    the run was configured with other keys of [fold], [batcher] or [assembler]
└── NotConfigured    nobody has configured the run, and the role does not wait for it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvloop

from turnlog.fold_settings import FOLD_SECTIONS
from turnlog.infra.history import all_events
from turnlog.infra.log import Partition
from turnlog.infra.offers import installed
from turnlog.infra.roles.health import Health, serve_health
from turnlog.infra.roles.probe import health_address
from turnlog.infra.roles.role import Role, opened
from turnlog.infra.roles.starting import asked, lived, servers_of, watched
from turnlog.infra.run_folder import resolved
from turnlog.processors.core.batches.draws import DrawRules, draw_rules
from turnlog.processors.core.fold.low_water import FoldName
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.processors.core.methods.rules import FoldRules, fold_rules, recorded_settings
from turnlog.schemas import UndecodableRecord, ids, topics
from turnlog.schemas.events import Event, RunConfigured, RunPlanned
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
STARTS_PROCESSES = frozenset({"sandbox"})


class RunError(Exception):
    """Base of the tree above."""


class OtherRun(RunError):
    """One run per (cluster, prefix). Remedy: the id of the run that is there, or a [kafka] prefix of one's own."""


class OtherSettings(RunError):
    """A run keeps what it recorded of these sections for life. Remedy: those values, or another run."""


class NotConfigured(RunError):
    """The log does not say what the run's records mean. Remedy: `turnlog run configure`."""


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

    @classmethod
    def of(cls, event: RunConfigured, own: Settings) -> Configured:
        """`own`: of the role that asks, for what old runs did not record. Raises RecordedSettingsError."""
        return cls(event.run_id, *recorded_settings(event.settings, own), event.settings_sha256, event.fold_version)

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
    )


def serve(name: str, main: Callable[[Role], Awaitable[None]], settings: Settings) -> int:
    """Run a role until SIGTERM or SIGINT; 0 after a clean drain. It waits for its servers as long as it takes; one that
    goes away later ends it uncommitted, and it waits in its next start. An error comes out: the supervisor restarts.
    Raises OtherRun for the log of another run, NoEndpoints, CannotListen."""

    async def run() -> None:
        stopping, health = asked(), Health(name, work_s=settings.liveness.work_s)
        async with serve_health(health, health_address(os.environ)):
            await lived(_life(name, main, resolved(settings), health, stopping), stopping, health)

    # A turn is mostly small socket reads and writes, where uvloop is leaner; its subprocesses cannot change their user.
    drive = asyncio.run if name in STARTS_PROCESSES else uvloop.run
    drive(run())
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


async def begin(role: Role) -> Begun:
    """Record what the run's records mean, once for its life, and what of its plan changed since the last start. Of two
    that configure a log at once, the one whose record came first stays. Raises OtherRun, OtherSettings."""
    found = await _first(role)
    news = found is None
    if found is None:
        await role.events.append(configuration(role.settings))
        found = await _first(role)
        assert found is not None, "an acknowledged record is on the log"
    run = _ours(found, role)
    run.check(role.settings)
    return Begun(run, news, await _plan(role))


async def configure(role: Role) -> Configured:
    """`begin`, for who does not ask what was news."""
    return (await begin(role)).run


async def configured(role: Role, *, wait: bool = True) -> Configured | None:
    """What this log's run recorded, as soon as somebody has configured it; None when the role is asked to stop before.
    Raises OtherRun, OtherSettings, RecordedSettingsError; without `wait` NotConfigured."""
    found = await _first(role)
    if found is None and not wait:
        raise NotConfigured(
            f"run {role.settings.run.id!r} is not configured on this log (prefix {role.settings.kafka.prefix!r}): "
            "`turnlog run configure`, with the settings that every role has, records what it means"
        )
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
    """While the block runs, the log is this run's or nobody's. Raises OtherRun, at its start or, cancelling the block,
    as soon as another run is configured."""

    async def watched() -> None:
        if (found := await _first(role, wait=True)) is not None:
            _same_run(found, role)

    try:
        async with asyncio.TaskGroup() as group:
            found = await _first(role)
            if found is not None:
                _same_run(found, role)
            watch = group.create_task(watched()) if found is None else None
            yield
            if watch is not None:
                watch.cancel()
    except BaseExceptionGroup as errors:  # one is reported as itself, with what it was raised from
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


async def recorded(role: Role) -> Configured | None:
    """What the role's run recorded, for readers of its past, which may hold other runs too: the run's first record
    counts. Raises RecordedSettingsError."""
    own = await all_events(role, topics.RUNS)
    return next((Configured.of(event, role.settings) for event in own if isinstance(event, RunConfigured)), None)


async def _plan(role: Role) -> dict[str, tuple[int | None, int]]:
    """Append what lag and admission are counted by, unless the latest record says the same; what it said otherwise."""
    settings, plans = role.settings, 0
    values = {
        "draws": settings.feeder.draws,
        "publish_every": settings.trainer.publish_every,
        "groups": settings.kafka.groups,
        "rollouts": settings.kafka.rollouts,
    }
    said: dict[str, int] = {}
    async for event in _events(role):
        if isinstance(event, RunPlanned) and event.run_id == settings.run.id:
            said, plans = {name: getattr(event, name) for name in values}, plans + 1
    if said != values:
        event_id = ids.digest("RunPlanned", settings.run.id, plans, *values.values())
        await role.events.append(RunPlanned(event_id=event_id, run_id=settings.run.id, **values))
    return {key: (said.get(key), value) for key, value in values.items() if said.get(key) != value}


def _ours(found: RunConfigured, role: Role) -> Configured:
    _same_run(found, role)
    return Configured.of(found, role.settings)


def _same_run(found: RunConfigured, role: Role) -> None:
    """Raises OtherRun."""
    ours, kafka = role.settings.run.id, role.settings.kafka
    if found.run_id != ours:
        raise OtherRun(
            f"{PLACE.topic} of {kafka.bootstrap or 'the log'}, prefix {kafka.prefix!r}, belongs to run "
            f"{found.run_id!r}, this is {ours!r}: one run per cluster and prefix; set [run] id to {found.run_id!r} to "
            "go on with it, or [kafka] prefix to another for a run of your own"
        )


async def _first(role: Role, *, wait: bool = False) -> RunConfigured | None:
    """The record that says whose log this is; `wait`: until there is one or the role is asked to stop."""
    async with contextlib.aclosing(_events(role, wait=wait)) as events:
        async for event in events:
            if isinstance(event, RunConfigured):
                return event
    return None


async def _events(role: Role, *, wait: bool = False) -> AsyncGenerator[Event, None]:
    """Topic `runs` from its beginning. What does not decode is passed over: a dead letter of it would help nobody."""
    end = (await role.log.end_offsets([PLACE]))[PLACE]
    async with role.log.reader(patient=wait) as reader:
        reader.assign(await role.log.start_offsets([PLACE]))
        while reader.position(PLACE) < end or (wait and not role.stopping.is_set()):
            for record in await reader.poll(timeout_s=POLL_S):
                try:
                    event = await role.events.decode(record)
                except UndecodableRecord:
                    continue
                yield event
