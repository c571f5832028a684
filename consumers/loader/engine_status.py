"""Status of one engine on the log: what was requested of it, and what its loader reports.

Every report is a transaction under the engine's own id. The fence is checked before the engine is changed and before it
is resumed. So a loader that wakes up after its successor has started neither restores old weights nor acknowledges
them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from prometheus_client import Gauge

from turnlog.consumers.loader import EngineSwapFailed
from turnlog.infra.engines.protocol import UNLABELLED, EngineDead, ModelInfo
from turnlog.infra.log import Partition, Reached, Reader, Transactor
from turnlog.infra.roles.role import Role
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.processors.core.views.fleet import (
    GONE,
    RELEASED,
    SERVING,
    SILENT,
    STARTING,
    AnsweredVersions,
    Fleet,
    FleetEngine,
)
from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    Event,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import ENGINE_REQUESTS, ENGINES, TRANSFERS, WEIGHTS

VERSION = Gauge("turnlog_loader_version", "Weight version served; -1 before the first")
SILENCE = Gauge("turnlog_loader_silent", "1 while the engine does not answer")

PARTITION = Partition(WEIGHTS.name, 0)
REQUESTED, SAID = Partition(ENGINE_REQUESTS.name, 0), Partition(ENGINES.name, 0)
TRANSFERRED = Partition(TRANSFERS.name, 0)


class EngineStatus:
    """Status of one engine."""

    reached: Reached
    """Committed position up to which the engine's weights are known to be loaded."""
    _transactor: Transactor

    def __init__(self, role: Role, engine_id: str, url: str, kind: str = "sglang") -> None:
        self._role, self.engine_id, self.url, self.kind = role, engine_id, url, kind
        self.version = -1
        self.base_version: int | None = None
        """Version of the engine's own weights if `version` is an adapter, else None."""
        self.newcomer = False
        """True while the engine takes no requests because it does not have the newest possible weights yet."""
        self.silent = False
        self.released = False
        """True if the engine has released its memory ([engine] colocate)."""
        self.incomplete = False
        """True if the engine may have tensors of two versions: it stays paused until it has a whole one."""
        self.versions = AnsweredVersions()
        """Fold of the same records: the versions that the log records as loaded into this engine, refused, or
        superseded."""
        self._fleet = Fleet()
        """Fold of the records about this engine only."""
        self._said = 0

    @asynccontextmanager
    async def take_ownership(self) -> AsyncIterator[None]:
        """Own the engine while the block runs: reports of earlier loaders are fenced off. Raises LogError."""
        names = {"run": self._role.settings.run.id, "engine": self.engine_id}
        async with self._role.log.transactor(TransactionalId.LOADER.format(**names)) as self._transactor:
            group = ConsumerGroup.LOADER.format(**names)
            self.reached = await Reached.from_log(self._role.log, self._transactor, group, [PARTITION])
            self._said = sum((await self._role.log.end_offsets([SAID, TRANSFERRED])).values())
            yield

    @property
    def own(self) -> FleetEngine:
        """State of the engine according to the log."""
        return self._fleet.engines.get(self.engine_id, FleetEngine(self.engine_id))

    async def hear(self, requests: Reader, *, timeout_s: float = 0.2) -> None:
        """Fold new requests for and reports of this engine."""
        records, own = await requests.poll(timeout_s=timeout_s), self.engine_id.encode()
        async for _, event in self._role.run_events(record for record in records if record.key == own):
            self._apply(event)

    def _apply(self, event: Event) -> None:
        self._fleet.apply(event)
        self.versions.apply(event)

    @property
    def whole(self) -> int:
        """Version of the engine's own weights, without adapters."""
        return self.version if self.base_version is None else self.base_version

    def drop_unrecorded(self, info: ModelInfo) -> ModelInfo:
        """Drop versions from `info` that the log does not record as loaded here: they belong to another run, or their
        loader died before reporting them."""
        known = info.version in self.versions.loaded or info.version < 0
        return info if known else replace(info, weight_version=UNLABELLED, adapters=())

    def has(self, info: ModelInfo) -> bool:
        """Return whether `info` matches what was loaded into the engine. If not, another engine has taken its place."""
        if info.is_released or self.released:
            return info.is_released == self.released
        return (info.version, info.base_version) == (self.version, self.base_version)

    async def report_registered(self, info: ModelInfo, *, waits: bool) -> None:
        """Report that the engine answers with these weights. `waits`: whether newer ones are to be loaded."""
        self.silent = False
        SILENCE.set(0)
        self.version, self.base_version, self.released = info.version, info.base_version, info.is_released
        self.incomplete = info.is_incomplete
        VERSION.set(self.version)
        self.newcomer = waits and (self.newcomer or self.own.state not in (SERVING, SILENT))
        await self._say_registered()

    async def _say_registered(self) -> None:
        await self.say(EngineRegistered, model=self._role.settings.model.name, base_version=self.base_version)

    def serves(self, version: int) -> None:
        """Note that the engine has loaded this version."""
        self.version, self.newcomer, self.incomplete = version, False, False
        VERSION.set(version)

    async def settle(self) -> None:
        """Let an engine that waited for newer weights serve those that it has, because none will come for now."""
        if self.newcomer and self.version >= 0 and not self.released:
            self.newcomer = False
            await self._say_registered()

    async def unheard(self) -> None:
        """Report the engine as silent: it takes no turns until it answers."""
        self.silent = True
        SILENCE.set(1)
        await self.say(EngineDraining, state=SILENT)

    async def report_gone(self, error: Exception) -> None:
        """Report that the engine has died."""
        await self.say(EngineGone, state=GONE, cause=str(error))

    @asynccontextmanager
    async def lives(self, did: str) -> AsyncIterator[None]:
        """Report the engine as gone and raise EngineSwapFailed if it dies within the block. `did` completes the
        message."""
        try:
            yield
        except EngineDead as error:
            await self.report_gone(error)
            raise EngineSwapFailed(f"{self.url} died while it {did}: {error}") from error

    async def say(self, record: type[Event], **more: Any) -> None:
        """Write one report in one transaction. Raises Fenced."""
        self._said += 1
        report = record(
            # Reports of an engine may be equal but for their place in time, so the offsets are part of the id.
            event_id=digest(
                record.__name__, self._role.settings.run.id, self.engine_id, self._role.instance, self._said
            ),
            run_id=self._role.settings.run.id,
            engine_id=self.engine_id,
            url=self.url,
            kind=self.kind,
            version=self.version,
            **{"state": self._state} | more,
        )
        await self._role.events.transact(self._transactor, [report])
        self._apply(report)

    @property
    def _state(self) -> str:
        if self.released:
            return RELEASED
        return SERVING if self.version >= 0 and not self.newcomer else STARTING
