"""Live engines, folded from engine-status: who may serve a turn, and which of them does.

A session stays on the engine that rendezvous hashing gives it, so that its prefix stays in that engine's cache; an
overloaded one is passed over for the least loaded, one that failed rests behind a breaker (half open after a while).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from turnlog.infra.engine import Engine, EngineDead, SGLang
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition
from turnlog.producers.gateway.errors import NoEngine
from turnlog.schemas import ids
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import Event
from turnlog.schemas.topics import ENGINES

log = logging.getLogger(__name__)

REST_S, LONGEST_REST_S = 0.5, 15.0
OVERLOAD = 32
"""Requests in flight beyond the least loaded engine's at which a session leaves its own engine."""


@dataclass(slots=True)
class LiveEngine:
    """One engine as the log and our own requests know it."""

    id: str
    url: str
    state: str
    version: int
    client: Engine
    in_flight: int = 0
    failures: int = 0
    failed_at: float = float("-inf")
    """When the breaker opened last, by the clock of Engines; requests that began before are of that outage."""
    rests_until: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which weights a turn may be sampled from."""

    least: int = -1
    pinned: int | None = None

    def accepts(self, engine: LiveEngine) -> bool:
        """Whether the engine serves, with weights that fit."""
        fits = engine.version >= self.least if self.pinned is None else engine.version == self.pinned
        return engine.state == "serving" and fits

    def __str__(self) -> str:
        return f"weight version >= {self.least}" if self.pinned is None else f"weight version {self.pinned} exactly"


@dataclass(slots=True)
class Engines:
    """All engines of the run. `connect` makes a client of a URL; `clock` counts seconds."""

    connect: Callable[[str], Engine] = SGLang
    clock: Callable[[], float] = time.monotonic
    live: dict[str, LiveEngine] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def apply(self, event: Event) -> None:
        """Fold one record of engine-status; every one repeats url, state and version."""
        engine = self.live.get(event.engine_id)
        if engine is None:
            engine = LiveEngine(event.engine_id, event.url, event.state, event.version, self.connect(event.url))
            self.live[event.engine_id] = engine
        elif engine.url != event.url:
            engine.url, engine.client = event.url, self.connect(event.url)
        engine.state, engine.version = event.state, event.version
        engine.failures, engine.rests_until = 0, float("-inf")
        self._wake()

    async def choose(self, session_id: str, wanted: Wanted, *, timeout_s: float) -> LiveEngine:
        """The engine for a turn, waiting for one that may serve it. Raises NoEngine."""
        deadline = self.clock() + timeout_s
        while True:
            now = self.clock()
            able = [engine for engine in self.live.values() if wanted.accepts(engine)]
            awake = [engine for engine in able if engine.rests_until <= now]
            if awake:
                return self._preferred(session_id, awake)
            if now >= deadline:
                raise NoEngine(self._why(wanted, timeout_s))
            rest = min((engine.rests_until for engine in able), default=deadline)
            await self._change(min(rest, deadline) - now)

    def failed(self, engine: LiveEngine, began: float, error: EngineDead) -> None:
        """Open the breaker for a request that began then: the engine rests, longer each time that it is found dead
        after a rest. Requests that were in flight when it died are one outage, however many they are."""
        if began <= engine.failed_at:
            return
        rest = min(REST_S * 2**engine.failures, LONGEST_REST_S)
        engine.failures += 1
        engine.failed_at = self.clock()
        engine.rests_until = engine.failed_at + rest
        log.warning("engine %s rests for %.1f s: %s", engine.id, rest, error)

    def served(self, engine: LiveEngine) -> None:
        """Close the breaker: it is alive."""
        engine.failures, engine.rests_until = 0, float("-inf")

    async def close(self) -> None:
        """Release every client."""
        for engine in self.live.values():
            await engine.client.close()

    def _preferred(self, session_id: str, engines: list[LiveEngine]) -> LiveEngine:
        own = max(engines, key=lambda engine: ids.digest(session_id, engine.id)) if len(engines) > 1 else engines[0]
        idlest = min(engines, key=lambda engine: engine.in_flight)
        return idlest if own.in_flight > idlest.in_flight + OVERLOAD else own

    def _why(self, wanted: Wanted, timeout_s: float) -> str:
        known = ", ".join(f"{each.id} is {each.state} with {each.version}" for each in self.live.values())
        return f"no engine with {wanted} within {timeout_s:g} s ({known or 'none is registered'}); see `turnlog status`"

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return


async def follow(engines: Engines, log_: Log, events: EventLog, *, current: asyncio.Event) -> None:
    """Fold engine-status from its start, for ever; sets `current` when what was there is folded."""
    partition = Partition(ENGINES.name, 0)
    starts = await log_.start_offsets([partition])
    end = (await log_.end_offsets([partition]))[partition]
    async with log_.reader() as reader:
        reader.assign(starts)
        while True:
            if reader.position(partition) >= end:
                current.set()
            for record in await reader.poll(timeout_s=1.0):
                try:
                    engines.apply(await events.decode(record))
                except UndecodableRecord as error:
                    log.warning("passed over %s[%d]@%d: %s", record.topic, record.partition, record.offset, error)
