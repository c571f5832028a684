"""A role is one process with its settings and the clients opened for it.

`turnlog ROLE` calls `runs.serve(role, main, settings)`; `main(role)` runs until `role.stopping` is set.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog, dead_letter, where
from turnlog.infra.log import Log, Record
from turnlog.infra.redaction.redactor import Redactor
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.log_lines import instance_of
from turnlog.infra.run_folder import resolve_endpoints
from turnlog.infra.session_keys import MasterKeys, SessionKeys
from turnlog.schemas import LaterKind
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import Event
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import Settings

log = logging.getLogger(__name__)
GROUPED = frozenset(topic.name for topic in CATALOGUE if topic.key == "group_id")
"""Topics whose keys are group ids."""


class RunPhase(StrEnum):
    """Phase of a run, as recorded in RunPlanned."""

    RUNNING = "running"
    PAUSED = "paused"
    """Nothing new is admitted; running work is completed."""
    CLOSED = "closed"
    """The run is over for good."""


@dataclass(slots=True)
class Role:
    """Settings, clients and state that a role's `main` receives."""

    name: str
    instance: str
    """Unique among live processes of the role; stable over restarts if the supervisor sets TURNLOG_INSTANCE."""
    settings: Settings
    log: Log
    events: EventLog
    blobs: Blobs
    health: Health
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    phase: RunPhase = RunPhase.RUNNING
    """Phase of the run according to the records that `runs.claimed` has read."""

    async def run_events(self, records: Iterable[Record]) -> AsyncIterator[tuple[Record, Event]]:
        """Decode the records of a topic that another role owns, one by one, and yield those that are events of this
        run; others are passed over as by `EventLog.decode_known`. Raises RegistryUnavailable."""
        for record in records:
            event = await self.events.decode_known(record)
            if event is not None and event.run_id == self.settings.run.id:
                yield record, event

    async def park(self, record: Record, cause: Exception) -> None:
        """Append a dead letter for the record, and wait until it is in the log. Raises LogUnavailable.

        A record of a later release is not dead-lettered: it can wait until the role is upgraded."""
        if isinstance(cause, LaterKind):
            return
        about = {"group_id": record.key.decode(errors="replace")} if record.topic in GROUPED else {}
        log.warning("dead-lettered %s: %s: %s", where(record), type(cause).__name__, cause, extra=about)
        await self.events.append(dead_letter(record, cause, run_id=self.settings.run.id, role=self.name))


@asynccontextmanager
async def open_role(
    name: str,
    settings: Settings,
    *,
    archive: bool = False,
    health: Health | None = None,
    stopping: asyncio.Event | None = None,
) -> AsyncIterator[Role]:
    """Open a role with its clients on real servers and all addresses resolved. Tools and tests use it to access the
    log, too.

    With `archive`, the log is the archive in the object store: neither Kafka nor a registry is needed, nothing can be
    written, and NoArchive is raised if there is none. Only if the run encrypts content, the keys of sessions are read
    from Kafka, because they are never archived."""
    from turnlog.infra.s3 import S3Blobs  # clients of real servers are imported where they are opened

    if not (archive and settings.store.endpoint) or settings.erasure.master_keys:
        settings = resolve_endpoints(settings)
    instance = instance_of(name)
    async with AsyncExitStack() as stack:
        blobs = S3Blobs(settings.store)
        stack.push_async_callback(blobs.close)
        log, events = await (_open_archive if archive else _live)(stack, settings, blobs, name, instance)
        health = health or Health(name, work_s=settings.liveness.work_s)
        yield Role(name, instance, settings, log, events, blobs, health, stopping or asyncio.Event())


async def _live(
    stack: AsyncExitStack, settings: Settings, blobs: Blobs, name: str, instance: str
) -> tuple[Log, EventLog]:
    from turnlog.infra.kafka import KafkaLog
    from turnlog.infra.registry import HttpRegistry

    kafka = KafkaLog.of(settings.kafka, role=name)
    stack.push_async_callback(kafka.close)
    registry = HttpRegistry(settings.registry)
    stack.push_async_callback(registry.close)
    opened = EventLog.open(
        kafka, registry, writer=instance, blobs=blobs, keys=session_keys(settings), redactor=Redactor.of(settings)
    )
    return kafka, await stack.enter_async_context(opened)


async def _open_archive(
    stack: AsyncExitStack, settings: Settings, blobs: Blobs, name: str, instance: str
) -> tuple[Log, EventLog]:
    from turnlog.infra.archive import ArchiveLog, archive_name

    log, keys = await ArchiveLog.open(blobs, archive_name(settings)), session_keys(settings)
    if keys is not None:
        from turnlog.infra.kafka import KafkaLog
        from turnlog.infra.registry import HttpRegistry

        kafka, registry = KafkaLog.of(settings.kafka, role=name), HttpRegistry(settings.registry)
        stack.push_async_callback(kafka.close)
        stack.push_async_callback(registry.close)
        stack.push_async_callback(keys.close)
        keys.attach(EventLog(kafka, registry, Codec({}), instance))
    return log, log.events(writer=instance, keys=keys)


def session_keys(settings: Settings) -> SessionKeys | None:
    """Return the keys of the run's sessions, or None if its settings do not encrypt content."""
    configured = settings.erasure.master_keys
    return SessionKeys(MasterKeys(configured), settings.run.id) if configured else None
