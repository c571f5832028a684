"""The weight loader. Each engine has one, so that every published version is acknowledged or refused by name.

NoSuchEngine       no setting identifies the engine of this loader
EngineSwapFailed   the engine died or cannot be resumed: EngineGone is on the log, the process ends, the supervisor
                   restarts engine and loader
Fenced             another loader of this engine has started: the process ends, and reports nothing more of the engine

With [engine] colocate, engine and trainer alternate on a device, in the order that the log prescribes (DeviceTurn):
pause -> release its memory -> report that, and with the next version load it (swap.py). If a loader is killed
halfway, its successor detects this from the engine's label and repairs it. A label that no report on the log confirms
is ignored, and the newest version is loaded: the engine belongs to another run, or its loader was killed before it
could report.

An engine that is requested to go (EngineRequested) takes no new requests once EngineDraining is on the log. Running
requests finish, or are aborted after [engine] drain_s and submitted elsewhere by the gateways. Then the loader reports
EngineGone and waits until the engine is requested again, or until it is stopped itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from turnlog.consumers.loader import EngineSwapFailed, NoSuchEngine
from turnlog.consumers.loader.engine_status import PARTITION, REQUESTED, SAID, TRANSFERRED, EngineStatus
from turnlog.consumers.loader.swap import Swap
from turnlog.infra.engines.kinds import control_engine
from turnlog.infra.engines.protocol import (
    EngineControl,
    EngineDead,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    ModelInfo,
)
from turnlog.infra.history import assign_from_start, caught_up
from turnlog.infra.log import Commit, Partition, Reader
from turnlog.infra.roles.role import Role
from turnlog.processors.core.experts import routing_of_model
from turnlog.processors.core.views.fleet import DRAINING, GONE
from turnlog.processors.core.views.progress import DeviceTurn
from turnlog.schemas.events import EngineDraining, EngineGone, WeightTransferBegun, WeightVersionPublished
from turnlog.schemas.topics import BATCHES
from turnlog.settings import Settings

log = logging.getLogger(__name__)

MANIFESTS = Partition(BATCHES.name, 0)
LAST_TRANSFERS = 1000
"""Number of records of weight-transfers that are read at the start: those of unanswered versions are among the last."""
START_LOOK_S = 0.2
"""Seconds between two checks of an engine that is starting."""
PROBE_S = 1.0
LONGEST_PROBE_S = 5.0
DROPPED_PROBES = 3
"""An engine that drops the connection of this many probes in a row is gone. One that refuses the connection is gone at
once."""
DRAIN_LOOK_S = 0.1
IDLE_LOOKS = 2
"""Number of consecutive checks without a request: one may have been on its way when the engine was reported as
draining."""
ABORTED_S = 5.0
"""Seconds to wait for answers to aborted requests."""


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """The engine whose weights a loader manages."""

    id: str
    url: str
    """Address at which the loader and every gateway reach the engine."""
    alone: bool
    """True if the engine runs beside its loader and stops together with it; False if another process supervises it."""
    kind: str = "sglang"
    """sglang | vllm"""


def engine_of(settings: Settings, env: Mapping[str, str]) -> NamedEngine:
    """Return the loader's engine: the one at TURNLOG_ENGINE_URL, else the one of [engine] urls with the index
    TURNLOG_ENGINE_INDEX (default 0).

    The engine at TURNLOG_ENGINE_URL is named by TURNLOG_ENGINE_ID if a process supervises it, else by TURNLOG_INSTANCE
    or the host name (in Kubernetes, the pod's name). Raises NoSuchEngine.
    """
    url, index = env.get("TURNLOG_ENGINE_URL", "").rstrip("/"), env.get("TURNLOG_ENGINE_INDEX", "")
    if url and index:
        raise NoSuchEngine("TURNLOG_ENGINE_URL and TURNLOG_ENGINE_INDEX name two engines: set one of them")
    if url:
        if not url.startswith(("http://", "https://")):
            raise NoSuchEngine(f"TURNLOG_ENGINE_URL must be http://host:port as gateways reach it, got {url!r}")
        watched = env.get("TURNLOG_ENGINE_ID", "")
        name = watched or env.get("TURNLOG_INSTANCE") or socket.gethostname()
        return NamedEngine(name, url, alone=not watched, kind=settings.engine.kind_of(name))
    urls, number = settings.engine.urls, index or "0"
    if not (number.isascii() and number.isdecimal() and int(number) < len(urls)):
        raise NoSuchEngine(
            f"there is no engine {number}: [engine] urls and endpoints.json name {len(urls)}; TURNLOG_ENGINE_INDEX "
            "chooses one of them, TURNLOG_ENGINE_URL names one that is in neither"
        )
    name = f"engine-{int(number)}"
    return NamedEngine(name, urls[int(number)], alone=False, kind=settings.engine.kind_of(name))


def update_of(settings: Settings) -> str:
    """Return the update mode, retract | in_place | abort: the value of [engine] update, or what "auto" selects for the
    model in [model] path."""
    if settings.engine.update != "auto":
        return settings.engine.update
    config = json.loads((Path(settings.model.path) / "config.json").read_bytes())
    recorded = settings.gateway.routed_experts != "off" and min(routing_of_model(config)) > 0
    return "abort" if recorded else "retract"


async def main(role: Role) -> None:
    """Keep one engine on the newest weight version until the role stops. Raises NoSuchEngine, EngineSwapFailed,
    LogError, BlobError."""
    engine = engine_of(role.settings, os.environ)
    update = update_of(role.settings)
    log.info("running requests switch to new weights by %s", update)
    adapters = role.settings.trainer.publish == "adapter"
    ca_file = role.settings.engine.ca_file
    control = control_engine(engine.url, engine.kind, ca_file=ca_file, update=update, adapters=adapters)
    try:
        await Loader(role, control, engine.id, engine.url, kind=engine.kind, drains=engine.alone).run()
    finally:
        await control.close()


class Loader:
    """Keeps one engine on the newest weights while the engine is wanted."""

    _swap: Swap

    def __init__(
        self,
        role: Role,
        control: EngineControl,
        engine_id: str,
        url: str,
        *,
        kind: str = "sglang",
        drains: bool = False,
    ) -> None:
        """`drains`: whether the engine stops taking turns when the loader stops."""
        self._role, self._control, self._url = role, control, url
        self._status = EngineStatus(role, engine_id, url, kind)
        self._dropped = 0
        self._heard = time.monotonic()
        """Monotonic time of the engine's last answer."""
        self._drains = drains
        self._turn = DeviceTurn()
        """Device lease; always the engine's without [engine] colocate."""
        self._gave_way = -2
        """Newest version at the last report that the engine is released."""

    async def run(self) -> None:
        """Run until the role stops, as the module describes."""
        self._swap = Swap(self._role, self._control, self._status, self._beat)
        try:
            async with self._status.take_ownership():
                await self._run()
        finally:
            await self._swap.close()

    async def _run(self) -> None:
        async with self._role.log.reader() as requests, self._role.log.reader() as reader:
            ends = await assign_from_start(self._role.log, requests, [REQUESTED, SAID])
            while not caught_up(requests, ends):
                self._beat()
                await self._status.hear(requests)
            reader.assign(await self._starts())
            while not self._role.stopping.is_set():
                if self._status.own.leaving:
                    await self._leave(requests)
                else:
                    await self._serve(requests, reader)
        if self._drains and not self._status.own.leaving:
            if self._role.settings.engine.colocate:  # no later report says that it holds no memory
                await self._status.say(EngineGone, state=GONE, cause="stopped with its loader")
            else:
                await self._status.say(EngineDraining, state=DRAINING)
            await self._status.reached.leave()

    async def _serve(self, requests: Reader, reader: Reader) -> None:
        """Serve until the role stops or the engine is requested to go."""
        await self._wait_for_engine(requests, reader)
        if self._over:
            return
        await self._catch_up(reader)
        await self._register(await self._control.model_info())
        self._role.health.mark_started()
        probed = time.monotonic()
        while not self._over:
            self._beat()
            if not self._status.silent:
                await self._take_turn()
            if not self._swap.waiting:
                await self._status.reached.say({PARTITION: Commit(reader.position(PARTITION))})
            await self._take(reader, timeout_s=0.2)
            await self._status.hear(requests, timeout_s=0.0)
            if time.monotonic() - probed >= PROBE_S:
                await self._probe()
                probed = time.monotonic()
        if not self._swap.waiting:
            await self._status.reached.say({PARTITION: Commit(reader.position(PARTITION))}, last=True)

    @property
    def _over(self) -> bool:
        return self._role.stopping.is_set() or self._status.own.leaving

    async def _leave(self, requests: Reader) -> None:
        """Drain the engine, report it as gone, and wait until it is requested again or the role stops."""
        if self._status.own.state != GONE:
            await self._drain()
        if self._status.own.state == GONE:
            await self._status.reached.leave()
        self._role.health.mark_started()
        log.info("%s has left: waiting until it is requested again", self._status.engine_id)
        while self._status.own.leaving and not self._role.stopping.is_set():
            self._beat()
            await self._status.hear(requests)

    async def _drain(self) -> None:
        """Wait for running requests, abort the rest, and report the engine as gone. Raises Fenced."""
        drain_s = self._role.settings.engine.drain_s
        cause = "drained"
        try:
            info = self._status.drop_unrecorded(await self._control.model_info())
            self._status.version, usable = info.version, not (info.is_incomplete or info.is_released)
            await self._status.say(EngineDraining, state=DRAINING)
            if usable:
                await self._control.resume()
            idle = await self._idle(drain_s if usable else 0.0)
            if self._role.stopping.is_set():  # its successor continues
                return
            if not idle:
                after = f"after {drain_s:g} s: [engine] drain_s" if usable else f"with weights {info.weight_version!r}"
                cause = f"aborted what ran {after}"
                await self._control.abort_all()
                await self._idle(ABORTED_S)
            if usable and self._role.settings.engine.colocate:  # an engine that has left holds no memory
                await self._release()
        except EngineError as error:
            cause = f"died before it had drained: {error}"
        log.info("%s: %s", self._status.engine_id, cause)
        await self._status.say(EngineGone, state=GONE, cause=cause)

    async def _idle(self, within_s: float) -> bool:
        """Wait at most `within_s` until nothing runs on the engine. Return whether that was reached."""
        looks, refused, deadline = 0, False, time.monotonic() + within_s
        while looks < IDLE_LOOKS and time.monotonic() < deadline:
            self._beat()
            try:
                looks = 0 if await self._control.under_way() else looks + 1
            except EngineRefused as error:  # it counts as busy, so that what may run gets its time
                if not refused:
                    log.warning("%s", error)
                refused = True
            if self._role.stopping.is_set():
                return False
            await asyncio.sleep(DRAIN_LOOK_S)
        return looks >= IDLE_LOOKS

    @property
    def _topics(self) -> list[Partition]:
        return [PARTITION, TRANSFERRED, *([MANIFESTS] if self._role.settings.engine.colocate else [])]

    async def _starts(self) -> dict[Partition, int]:
        starts = await self._role.log.start_offsets(self._topics)
        ends = await self._role.log.end_offsets([TRANSFERRED])
        return starts | {TRANSFERRED: max(starts[TRANSFERRED], ends[TRANSFERRED] - LAST_TRANSFERS)}

    def _beat(self) -> None:
        settings = self._role.settings
        self._role.health.beat(within_s=settings.liveness.work_s + settings.loader.timeout_s)

    async def _wait_for_engine(self, requests: Reader, reader: Reader) -> None:
        """Wait until the engine answers, and fetch its first version meanwhile."""
        began, since, told = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds"), False
        while not self._over:
            self._beat()
            await self._status.hear(requests, timeout_s=0.0)
            try:
                info = await self._control.model_info()
                if not (
                    info.is_incomplete or info.is_released
                ):  # a loader that was killed while loading leaves it paused
                    await self._control.resume()
            except EngineError as error:
                self._role.health.unmet(
                    "engine",
                    f"engine at {self._url} has not answered since {since} ({error}); start it, or set [engine] urls "
                    "(TURNLOG_ENGINE_URLS) to its address",
                )
                if not told and time.monotonic() - began > self._role.settings.engine.start_timeout_s:
                    told = True
                    log.warning("%s did not start within [engine] start_timeout_s: %s", self._url, error)
                    await self._status.report_gone(error)
                if not await self._take(reader, timeout_s=START_LOOK_S):
                    await self._swap.fetch_ahead()
            else:
                self._role.health.mark_ready("engine")
                return

    async def _register(self, info: ModelInfo) -> None:
        if info.is_incomplete and self._role.settings.engine.colocate:  # unknown whether it has its memory
            async with self._status.lives(f"took its memory back: it was left {info.weight_version!r}"):
                await self._control.retake()
        self._heard, self._gave_way = time.monotonic(), -2
        given = self._status.drop_unrecorded(info)
        if given != info:
            log.warning("%s reports %s, which was not loaded into it: loading again", self._url, info.weight_version)
        await self._status.report_registered(given, waits=bool(self._swap.news_after(given.version)))
        self._swap.direct.begin_anew()
        self._swap.recall()

    async def _take_turn(self) -> None:
        """Do what the log asks for next: release the device, or get a waiting version."""
        if self._turn.trainers:
            await self._give_way()
        elif (self._swap.waiting or self._status.released) and await self._swap.step():
            self._heard = time.monotonic()
            self._beat()

    async def _give_way(self) -> None:
        """Leave the device to the trainer until the next version. Reported again for each version that does not end
        that."""
        if not self._status.released:
            await self._release()
        if self._gave_way != self._turn.weights.version:
            await self._status.say(EngineDraining, published=self._turn.weights.version)
            self._gave_way = self._turn.weights.version

    async def _release(self) -> None:
        """Release the engine's memory. Raises EngineSwapFailed, Fenced."""
        await self._status.reached.check_owner()
        async with self._status.lives("gave its memory back"):
            await self._control.pause()
            await self._control.release()
        self._status.released, self._status.incomplete, self._heard = True, False, time.monotonic()

    async def _catch_up(self, reader: Reader) -> None:
        ends = await self._role.log.end_offsets(self._topics)
        while not caught_up(reader, ends):
            self._beat()
            await self._take(reader, timeout_s=0.2)

    async def _take(self, reader: Reader, *, timeout_s: float) -> bool:
        """Read records. Return whether there were any."""
        records = await reader.poll(timeout_s=timeout_s)
        async for _, event in self._role.run_events(records):
            if self._role.settings.engine.colocate:
                self._turn.apply(event)
            if isinstance(event, WeightVersionPublished):
                self._swap.remember(event)
            elif isinstance(event, WeightTransferBegun):
                self._swap.direct.note_begun(event)
        return bool(records)

    async def _probe(self) -> None:
        """Check that the engine answers and has the weights that were loaded. A restarted engine is registered and
        loaded again; one that was silent is registered."""
        left = self._heard + self._bound_s - time.monotonic()
        patience_s = min(max(left, PROBE_S), LONGEST_PROBE_S)
        try:
            async with asyncio.timeout(patience_s):
                info = await self._control.model_info()
        except TimeoutError:
            if patience_s >= left:
                await self._unheard()
            return
        except EngineRefused as error:
            await self._status.report_gone(error)
            raise EngineSwapFailed(f"{self._url} refuses to name its weights") from error
        except EngineDead as error:
            self._dropped += 1
            if self._dropped >= DROPPED_PROBES or isinstance(error, EngineUnreachable):
                await self._status.report_gone(error)
                raise EngineSwapFailed(str(error)) from error
            return
        self._heard, self._dropped = time.monotonic(), 0
        restarted = not self._status.has(self._status.drop_unrecorded(info))
        if restarted:
            log.warning("%s serves %s, not %d: it restarted", self._url, info.weight_version, self._status.version)
        if restarted or self._status.silent:
            await self._register(info)

    @property
    def _bound_s(self) -> float:
        """Seconds without an answer after which the engine is reported as silent, or as gone if it is silent
        already."""
        return self._role.settings.loader.gone_s if self._status.silent else self._role.settings.loader.silent_s

    async def _unheard(self) -> None:
        """Report the engine as silent, and the next time as gone. Raises EngineSwapFailed when it is gone."""
        error = EngineDead(f"{self._url} is silent: no answer in {self._bound_s:g} s")
        if self._status.silent:
            await self._status.report_gone(error)
            raise EngineSwapFailed(str(error))
        log.warning("%s", error)
        await self._status.unheard()
