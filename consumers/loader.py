"""The weight loader: one per engine, so that every published version is acknowledged or refused by name.

NoSuchEngine       nobody says which engine is this loader's
EngineSwapFailed   the engine died or cannot be resumed: EngineGone is on the log, the process ends, the supervisor
                   restarts engine and loader
Fenced             another loader of this engine has started: the process ends, and says nothing more of the engine
NotInstalled       [loader] transport wants torch

Files are fetched and verified before the engine hears of them; then pause ([engine] update) -> load ([loader]
transport) -> check the label -> resume, resumed whatever happens but the engine's death. When several wait, the
newest that is good is loaded and the others are superseded. A refused version is not tried again: the old weights serve
until the next one.

An adapter is loaded beside what serves, and pauses nothing: each request names the one that is to answer it. Those
behind the last two are unloaded once their requests have ended. What it rests on is loaded first, as above, where the
engine has other weights.

With [engine] colocate the engine and the trainer take turns on a device, as the log says (DeviceTurn): pause -> release
its memory -> say so; and with the next version: take that of the weights -> load -> take that of the cache -> resume.

Every report is a transaction under the engine's own id, and the fence is asked before the engine is touched and before
it is resumed: a loader that wakes up behind its successor neither puts old weights back nor acknowledges them. What it
had begun before that, the successor's next look at the engine's label finds and mends.

An engine that is asked to go (EngineRequested) takes no new requests once EngineDraining is on the log. What runs ends,
or is aborted after [engine] drain_s, and gateways submit it elsewhere. Then EngineGone is said, and the loader waits
until the engine is asked for again, or is stopped itself.

BadWeights is in infra/tensors/versions.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Gauge

from turnlog.infra.blobs import BlobError
from turnlog.infra.embedded import NotInstalled
from turnlog.infra.engine import (
    Disk,
    EngineControl,
    EngineDead,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    ModelInfo,
    SGLangControl,
    Transport,
)
from turnlog.infra.log import Commit, Partition, Reached, Reader, Transactor
from turnlog.infra.roles.role import Role
from turnlog.infra.tensors.versions import (
    BadWeights,
    Chain,
    Held,
    Shapes,
    Timer,
    WeightFolders,
    chain_of,
    check_fits,
    model_shapes,
)
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.processors.core.batches.progress import DeviceTurn
from turnlog.processors.core.experts import routing_of_model
from turnlog.processors.core.fleet import DRAINING, GONE, RELEASED, SERVING, SILENT, STARTING, Fleet
from turnlog.processors.core.fleet import Engine as Known
from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
    WeightVersionPublished,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import BATCHES, ENGINE_REQUESTS, ENGINES, WEIGHTS
from turnlog.settings import LoaderSettings, Settings

log = logging.getLogger(__name__)
LOADED = Counter("turnlog_loader_loaded", "Weight versions loaded")
REFUSED = Counter("turnlog_loader_refused", "Weight versions refused", ["cause"])
VERSION = Gauge("turnlog_loader_version", "Weight version served; -1 before the first")
SILENCE = Gauge("turnlog_loader_silent", "1 while the engine gives no answer")

PARTITION = Partition(WEIGHTS.name, 0)
MANIFESTS = Partition(BATCHES.name, 0)
REQUESTED, SAID = Partition(ENGINE_REQUESTS.name, 0), Partition(ENGINES.name, 0)
PROBE_S = 1.0
LONGEST_PROBE_S = 5.0
DROPPED_PROBES = 3
"""An engine that drops the connection of this many probes in a row is gone; one that refuses it is gone at once."""
RETRY_S = 0.5
RECENT = 8
DRAIN_LOOK_S = 0.1
IDLE_LOOKS = 2
"""Looks in a row without a request: one may have been on its way when the engine was said to drain."""
ABORTED_S = 5.0
"""For what was aborted to be answered."""
ADAPTERS = 2
"""Which stay loaded: requests of the last but one end while the last one is served."""
PATIENCE_S = 5.0
"""For requests of an adapter that is to be unloaded; then all that run are submitted again."""


class NoSuchEngine(Exception):
    """The loader is not told which engine is its own. Remedy: TURNLOG_ENGINE_URL, or an index into [engine] urls."""


class EngineSwapFailed(Exception):
    """The engine is gone or left paused; the supervisor restarts both."""


async def main(role: Role) -> None:
    """Keep one engine on the newest weight version until the role stops. Raises NoSuchEngine, EngineSwapFailed,
    NotInstalled, LogError, BlobError."""
    engine = engine_of(role.settings, os.environ)
    update = update_of(role.settings)
    log.info("running requests meet new weights by %s", update)
    adapters = role.settings.trainer.publish == "adapter"
    transport = await asyncio.to_thread(transport_of, role.settings.loader)
    ca_file = role.settings.engine.ca_file
    control = SGLangControl(engine.url, ca_file=ca_file, update=update, transport=transport, adapters=adapters)
    try:
        await Loader(role, control, engine.id, engine.url, drains=engine.alone).run()
    finally:
        await control.close()


def update_of(settings: Settings) -> str:
    """retract | in_place | abort: [engine] update, and what that is by itself of the model in [model] path."""
    if settings.engine.update != "auto":
        return settings.engine.update
    config = json.loads((Path(settings.model.path) / "config.json").read_bytes())
    recorded = settings.gateway.routed_experts != "off" and min(routing_of_model(config)) > 0
    return "abort" if recorded else "retract"


def transport_of(settings: LoaderSettings) -> Transport:
    """What [loader] transport names. Raises NotInstalled."""
    if settings.transport == "disk":
        return Disk()
    if importlib.util.find_spec("torch") is None:
        raise NotInstalled(
            f'[loader] transport is "{settings.transport}", and torch is not installed: install the `train` extra (or '
            'run the loader from the image of the trainer), or set "disk"'
        )
    from turnlog.infra.tensors.transports import Broadcast, SharedMemory  # torch takes seconds to import

    return SharedMemory() if settings.transport == "tensor" else Broadcast(settings.group_backend)


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """Whose weights a loader keeps."""

    id: str
    url: str
    """Where the loader and every gateway reach it."""
    alone: bool
    """It stands beside its loader and goes when that goes; else somebody watches over it."""


def engine_of(settings: Settings, env: Mapping[str, str]) -> NamedEngine:
    """The engine at TURNLOG_ENGINE_URL, named by TURNLOG_ENGINE_ID where somebody watches over it, else by
    TURNLOG_INSTANCE or the host (a pod's name); or the one of [engine] urls that TURNLOG_ENGINE_INDEX (default 0) says.
    Raises NoSuchEngine."""
    url, index = env.get("TURNLOG_ENGINE_URL", "").rstrip("/"), env.get("TURNLOG_ENGINE_INDEX", "")
    if url and index:
        raise NoSuchEngine("TURNLOG_ENGINE_URL and TURNLOG_ENGINE_INDEX name two engines: set one of them")
    if url:
        if not url.startswith(("http://", "https://")):
            raise NoSuchEngine(f"TURNLOG_ENGINE_URL must be http://host:port as gateways reach it, got {url!r}")
        watched = env.get("TURNLOG_ENGINE_ID", "")
        return NamedEngine(watched or env.get("TURNLOG_INSTANCE") or socket.gethostname(), url, alone=not watched)
    urls, number = settings.engine.urls, index or "0"
    if not (number.isascii() and number.isdecimal() and int(number) < len(urls)):
        raise NoSuchEngine(
            f"there is no engine {number}: [engine] urls and endpoints.json name {len(urls)}; TURNLOG_ENGINE_INDEX "
            "chooses one of them, TURNLOG_ENGINE_URL names one that is in neither"
        )
    return NamedEngine(f"engine-{int(number)}", urls[int(number)], alone=False)


@dataclass(slots=True)
class Device:
    """Where an engine runs; the trainer's, too, with [engine] colocate."""

    turn: DeviceTurn = field(default_factory=DeviceTurn)
    """The engine's, always, without that."""
    released: bool = False
    """Whether the engine holds no memory there."""
    gave_way: int = -2
    """`turn.published` when it was said last that the engine is released."""


class Loader:
    """One engine's weights."""

    _transactor: Transactor
    _reached: Reached

    def __init__(self, role: Role, control: EngineControl, engine_id: str, url: str, *, drains: bool = False) -> None:
        """`drains`: the engine takes no more turns when the loader stops."""
        settings = role.settings
        self._role, self._control, self._engine_id, self._url = role, control, engine_id, url
        self._folders = WeightFolders(
            Path(settings.run.directory).resolve() / "weights",
            role.blobs,
            beat=self._beat,
        )
        self._folder: Held | None = None
        """That of the weights served, or of those that adapters rest on."""
        self._adapters: dict[int, Held] = {}
        """Folders of those that are loaded."""
        self._model = Path(settings.model.path)
        self._expected: Shapes = {}
        self._owner = TransactionalId.LOADER.format(run=settings.run.id, engine=engine_id)
        self._version = -1
        self._base_version: int | None = None
        """Of the engine's own weights, where `_version` is an adapter."""
        self._recent: dict[int, WeightVersionPublished] = {}
        """The newest versions on the log, for an engine that comes back without weights, and what they rest on."""
        self._waiting: list[int] = []
        """Versions neither loaded, refused nor superseded, ascending."""
        self._refused: set[int] = set()
        self._said = self._dropped = 0
        self._heard = time.monotonic()
        """When the engine answered last."""
        self._silent = False
        self._drains = drains
        self._fleet = Fleet()
        """Of this engine alone."""
        self._newcomer = False
        """It takes no requests before it has the newest weights that it can have."""
        self._device = Device()

    async def run(self) -> None:
        """See the module."""
        self._expected = model_shapes(self._model)
        group = ConsumerGroup.LOADER.format(run=self._role.settings.run.id, engine=self._engine_id)
        async with self._role.log.transactor(self._owner) as self._transactor:
            self._reached = await Reached.recalled(self._role.log, self._transactor, group, [PARTITION])
            await self._run()

    async def _run(self) -> None:
        self._said = (await self._role.log.end_offsets([SAID]))[SAID]
        async with self._role.log.reader() as requests, self._role.log.reader() as reader:
            requests.assign(await self._role.log.start_offsets([REQUESTED, SAID]))
            ends = await self._role.log.end_offsets([REQUESTED, SAID])
            while any(requests.position(place) < end for place, end in ends.items()):
                self._beat()
                await self._hear(requests)
            reader.assign(await self._role.log.start_offsets(self._topics))
            while not self._role.stopping.is_set():
                if self._own.leaving:
                    await self._leave(requests)
                else:
                    await self._serve(requests, reader)
        if self._drains and not self._own.leaving:
            await self._say(EngineDraining, state=DRAINING)

    async def _serve(self, requests: Reader, reader: Reader) -> None:
        """Until the role stops or the engine is asked to go."""
        await self._wait_for_engine(requests)
        if self._over:
            return
        await self._catch_up(reader)
        await self._register(await self._control.model_info())
        self._role.health.started()
        probed = time.monotonic()
        while not self._over:
            self._beat()
            if not self._silent:
                await self._take_turn()
            if not self._waiting:
                await self._reached.say({PARTITION: Commit(reader.position(PARTITION))})
            await self._take(reader, timeout_s=0.2)
            await self._hear(requests, timeout_s=0.0)
            if time.monotonic() - probed >= PROBE_S:
                await self._probe()
                probed = time.monotonic()
        if not self._waiting:
            await self._reached.say({PARTITION: Commit(reader.position(PARTITION))}, last=True)

    @property
    def _over(self) -> bool:
        return self._role.stopping.is_set() or self._own.leaving

    @property
    def _own(self) -> Known:
        return self._fleet.engines.get(self._engine_id, Known(self._engine_id))

    async def _hear(self, requests: Reader, *, timeout_s: float = 0.2) -> None:
        """Fold what was asked and said of this engine."""
        for record in await requests.poll(timeout_s=timeout_s):
            event = await self._role.events.known(record) if record.key == self._engine_id.encode() else None
            if event is not None and event.run_id == self._role.settings.run.id:
                self._fleet.apply(event)

    async def _leave(self, requests: Reader) -> None:
        """Let the engine drain, say that it is gone, and wait until it is asked for again or the role stops."""
        if self._own.state != GONE:
            await self._drain()
        self._role.health.started()
        log.info("%s has left: waiting until it is asked for again", self._engine_id)
        while self._own.leaving and not self._role.stopping.is_set():
            self._beat()
            await self._hear(requests)

    async def _drain(self) -> None:
        """Raises Fenced."""
        drain_s = self._role.settings.engine.drain_s
        cause = "drained"
        try:
            info = await self._control.model_info()
            self._version, usable = info.version, not (info.mixed or info.released)
            await self._say(EngineDraining, state=DRAINING)
            if usable:
                await self._control.resume()
            idle = await self._idle(drain_s if usable else 0.0)
            if self._role.stopping.is_set():  # its successor goes on
                return
            if not idle:
                after = f"after {drain_s:g} s: [engine] drain_s" if usable else f"with weights {info.weight_version!r}"
                cause = f"aborted what ran {after}"
                await self._control.abort_all()
                await self._idle(ABORTED_S)
            if usable and self._role.settings.engine.colocate:  # whoever has left holds nothing
                await self._release()
        except EngineError as error:
            cause = f"died before it had drained: {error}"
        log.info("%s: %s", self._engine_id, cause)
        await self._say(EngineGone, state=GONE, cause=cause)

    async def _idle(self, within_s: float) -> bool:
        """Whether nothing runs at the engine, waiting for that at most so long."""
        looks, deadline = 0, time.monotonic() + within_s
        while looks < IDLE_LOOKS and time.monotonic() < deadline:
            self._beat()
            looks = 0 if await self._control.under_way() else looks + 1
            if self._role.stopping.is_set():
                return False
            await asyncio.sleep(DRAIN_LOOK_S)
        return looks >= IDLE_LOOKS

    @property
    def _topics(self) -> list[Partition]:
        return [PARTITION, *([MANIFESTS] if self._role.settings.engine.colocate else [])]

    def _beat(self) -> None:
        settings = self._role.settings
        self._role.health.beat(within_s=settings.liveness.work_s + settings.loader.timeout_s)

    async def _wait_for_engine(self, requests: Reader) -> None:
        began, since, told = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds"), False
        while not self._over:
            self._beat()
            await self._hear(requests, timeout_s=0.0)
            try:
                info = await self._control.model_info()
                if not (info.mixed or info.released):  # a loader that was killed in a swap leaves its engine paused
                    await self._control.resume()
            except EngineError as error:
                self._role.health.unmet(
                    "engine",
                    f"engine at {self._url} does not answer since {since} ({error}); start it, or set [engine] urls "
                    "(TURNLOG_ENGINE_URLS) to where it is",
                )
                if not told and time.monotonic() - began > self._role.settings.engine.start_timeout_s:
                    told = True
                    log.warning("%s did not start within [engine] start_timeout_s: %s", self._url, error)
                    await self._gone(error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._role.stopping.wait()
            else:
                self._role.health.met("engine")
                return

    async def _register(self, info: ModelInfo) -> None:
        if info.mixed and self._role.settings.engine.colocate:  # nobody knows whether it has its memory
            async with self._lives(f"took its memory back: it was left {info.weight_version!r}"):
                await self._control.retake()
        self._heard, self._silent = time.monotonic(), False
        SILENCE.set(0)
        self._version, self._base_version = info.version, info.base_version
        self._device.released, self._device.gave_way = info.released, -2
        VERSION.set(self._version)
        known = {*self._waiting, *self._recent} - self._refused
        self._waiting = sorted(version for version in known if version > self._version)
        self._newcomer = bool(self._waiting) and self._own.state != SERVING
        await self._say(EngineRegistered, model=self._role.settings.model.name, base_version=self._base_version)

    async def _take_turn(self) -> None:
        """What the log asks for next: the engine gives way, or loads what waits."""
        if self._device.turn.trainers:
            await self._give_way()
            return
        if self._device.released and not self._waiting:  # what it waited for was refused, and what it had is lost
            self._waiting = [version for version in sorted(self._recent) if version not in self._refused][-1:]
        if self._waiting:
            await self._swap()
            self._heard = time.monotonic()
            self._beat()

    async def _give_way(self) -> None:
        """The device is the trainer's until the next version; said for each version that does not change that."""
        if not self._device.released:
            await self._release()
        if self._device.gave_way != self._device.turn.published:
            await self._say(EngineDraining, published=self._device.turn.published)
            self._device.gave_way = self._device.turn.published

    async def _release(self) -> None:
        """Raises EngineSwapFailed, Fenced."""
        await self._reached.check_owner()
        async with self._lives("gave its memory back"):
            await self._control.pause()
            await self._control.release()
        self._device.released, self._heard = True, time.monotonic()

    async def _catch_up(self, reader: Reader) -> None:
        ends = await self._role.log.end_offsets(self._topics)
        while any(reader.position(partition) < end for partition, end in ends.items()):
            self._beat()
            await self._take(reader, timeout_s=0.2)

    async def _take(self, reader: Reader, *, timeout_s: float) -> None:
        for record in await reader.poll(timeout_s=timeout_s):
            event = await self._role.events.known(record)
            if event is None or event.run_id != self._role.settings.run.id:
                continue
            if self._role.settings.engine.colocate:
                self._device.turn.apply(event)
            if isinstance(event, WeightVersionPublished):
                self._remember(event)
                if event.version > self._version:
                    self._waiting.append(event.version)

    def _remember(self, event: WeightVersionPublished) -> None:
        self._recent[event.version] = event
        needed = set(sorted(self._recent)[-RECENT:])
        for version in sorted(needed, reverse=True):
            base = self._recent[version].base_version
            while base in self._recent and base not in needed:
                needed.add(base)
                base = self._recent[base].base_version
        self._recent = {version: one for version, one in self._recent.items() if version in needed}

    async def _probe(self) -> None:
        """Is the engine there, with the weights that we gave it? One that restarted is registered and loaded anew; one
        that was silent is registered."""
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
            await self._gone(error)
            raise EngineSwapFailed(f"{self._url} refuses /model_info") from error
        except EngineDead as error:
            self._dropped += 1
            if self._dropped >= DROPPED_PROBES or isinstance(error, EngineUnreachable):
                await self._gone(error)
                raise EngineSwapFailed(str(error)) from error
            return
        self._heard, self._dropped = time.monotonic(), 0
        other = not info.released and (info.version, info.base_version) != (self._version, self._base_version)
        restarted = other or info.released != self._device.released
        if restarted:
            log.warning("%s serves %s, not %d: it restarted", self._url, info.weight_version, self._version)
        if restarted or self._silent:
            await self._register(info)

    @property
    def _bound_s(self) -> float:
        """Of silence."""
        return self._role.settings.loader.gone_s if self._silent else self._role.settings.loader.silent_s

    async def _unheard(self) -> None:
        """First it takes no turns until it answers, then it is gone. Raises EngineSwapFailed."""
        error = EngineDead(f"{self._url} is silent: no answer to GET /model_info in {self._bound_s:g} s")
        if self._silent:
            await self._gone(error)
            raise EngineSwapFailed(str(error))
        log.warning("%s", error)
        self._silent = True
        SILENCE.set(1)
        await self._say(EngineDraining, state=SILENT)

    async def _swap(self) -> None:
        """Load the newest of the waiting versions; refused, the next newest is tried in the next round."""
        newest = self._waiting.pop()
        event = self._recent.get(newest)
        if event is None:  # every recent version was refused
            self._waiting = []
            return
        try:
            check_fits(event, self._expected)
            chain = chain_of(event, self._recent)
            seconds = await (self._load_beside if event.kind == "adapter" else self._load_instead)(chain)
        except (BadWeights, EngineRefused) as error:
            self._refused.add(event.version)
            await self._refuse(event, error)
        else:
            superseded, self._waiting = tuple(self._waiting), []
            await self._loaded(event, superseded, seconds)
            await self._unload()

    async def _load_instead(self, chain: Chain) -> dict[str, float]:
        """The engine's own weights become those; the seconds that it took. Raises as `_load`, BadWeights, BlobError."""
        timer = Timer()
        held = await self._fetched(chain, timer)
        try:
            await self._load(chain[-1], held.path, timer)
        except BaseException:
            held.release()
            raise
        if self._folder is not None:
            self._folder.release()
        self._folder, self._base_version = held, None
        return timer.seconds

    async def _load_beside(self, chain: Chain) -> dict[str, float]:
        """The adapter, with the weights that it rests on below it; the seconds that it took alone. Raises the same."""
        base, event = chain
        if base.version != (self._version if self._base_version is None else self._base_version):
            check_fits(base, self._expected)
            seconds = await self._load_instead(chain[:-1])
            self._waiting = [version for version in self._waiting if version != base.version]
            await self._loaded(base, (), seconds, state=STARTING)  # turns wait for the adapter
        timer = Timer()
        held = await self._fetched(chain[-1:], timer)
        try:
            async with self._lives(f"loaded adapter {event.version}"):
                await self._load_adapter(event.version, base.version, held.path, timer)
        except BaseException:
            held.release()
            raise
        self._adapters[event.version], self._base_version = held, base.version
        return timer.seconds

    async def _load_adapter(self, version: int, base: int, folder: Path, timer: Timer) -> None:
        """load -> check. Raises EngineRefused, EngineDead, Fenced."""
        await self._reached.check_owner()
        if version in (await self._control.model_info()).adapters:  # of a loader that was killed before it said so
            await self._control.unload_adapter(version, patience_s=PATIENCE_S)
        with timer.phase("load"):
            await self._control.load_adapter(folder, version, timeout_s=self._role.settings.loader.timeout_s)
        with timer.phase("check"):
            info = await self._control.model_info()
        if (info.version, info.base_version) != (version, base):
            raise EngineRefused(
                f"{self._url} reports weights {info.weight_version!r} with adapters {info.adapters} after loading "
                f"adapter {version} of {base}"
            )

    async def _unload(self) -> None:
        """Adapters that are behind, once the requests that name them have ended."""
        if self._base_version is None and not self._adapters:
            return
        async with self._lives("unloaded an adapter"):
            found = (await self._control.model_info()).adapters
            for version in found[: -ADAPTERS if self._base_version is not None else None]:
                self._beat()
                await self._reached.check_owner()
                await self._control.unload_adapter(version, patience_s=PATIENCE_S)
        for version in self._adapters.keys() - (await self._control.model_info()).adapters:
            self._adapters.pop(version).release()

    @asynccontextmanager
    async def _lives(self, did: str) -> AsyncIterator[None]:
        """Raises EngineSwapFailed where the engine dies within."""
        try:
            yield
        except EngineDead as error:
            await self._gone(error)
            raise EngineSwapFailed(f"{self._url} died while it {did}: {error}") from error

    async def _fetched(self, chain: Chain, timer: Timer) -> Held:
        """The folder; a store that does not answer is asked [loader] attempts times, then the process ends."""
        for attempt in range(1, self._role.settings.loader.attempts + 1):
            try:
                return await self._folders.held(chain, timer)
            except BlobError as error:
                if attempt == self._role.settings.loader.attempts:
                    raise
                log.warning("version %d: %s; attempt %d", chain[-1].version, error, attempt)
                await asyncio.sleep(RETRY_S * attempt)
        raise AssertionError("unreachable")

    async def _load(self, event: WeightVersionPublished, folder: Path, timer: Timer) -> None:
        """pause -> load -> check -> resume. Raises EngineRefused (old weights serve), EngineSwapFailed, Fenced."""
        control, timeout_s = self._control, self._role.settings.loader.timeout_s
        async with self._lives(f"loaded version {event.version}"):
            await self._reached.check_owner()
            try:
                with timer.phase("pause"):
                    await control.pause()
                with timer.phase("load"):
                    await control.load(folder, event.version, timeout_s=timeout_s, released=self._device.released)
                with timer.phase("check"):
                    info = await control.model_info()
                if info.label != event.version:
                    raise EngineRefused(f"{self._url} reports {info.weight_version!r} after loading {event.version}")
            except EngineDead:  # it may answer all the same, and holds what no version is
                raise
            except BaseException:
                if not self._device.released:
                    await self._resume(timer)
                raise
            self._device.released = False
            await self._resume(timer)

    async def _resume(self, timer: Timer) -> None:
        with timer.phase("resume"):
            await self._reached.check_owner()
            await self._control.resume()

    async def _loaded(
        self, event: WeightVersionPublished, superseded: tuple[int, ...], seconds: dict[str, float], **more: Any
    ) -> None:
        self._version, self._newcomer = event.version, False
        LOADED.inc()
        VERSION.set(event.version)
        of = {"superseded": superseded, "seconds": seconds, "base_version": self._base_version}
        await self._say(EngineWeightsLoaded, **of, **more)

    async def _refuse(self, event: WeightVersionPublished, error: Exception) -> None:
        log.error("version %d refused, %d stays: %s", event.version, self._version, error)
        REFUSED.labels(type(error).__name__).inc()
        cause = type(error).__name__
        self._newcomer = self._newcomer and bool(self._waiting)
        await self._say(EngineWeightsRefused, refused_version=event.version, cause=cause, message=str(error))

    async def _gone(self, error: Exception) -> None:
        await self._say(EngineGone, state=GONE, cause=str(error))

    @property
    def _state(self) -> str:
        if self._device.released:
            return RELEASED
        return SERVING if self._version >= 0 and not self._newcomer else STARTING

    def _event_id(self, record: str) -> str:
        """Nothing but its place in time sets one report of an engine apart from the next."""
        self._said += 1
        return digest(record, self._role.settings.run.id, self._engine_id, self._role.instance, self._said)

    async def _say(self, record: type[Event], **more: Any) -> None:
        """One report in one transaction."""
        report = record(
            event_id=self._event_id(record.__name__),
            run_id=self._role.settings.run.id,
            engine_id=self._engine_id,
            url=self._url,
            version=self._version,
            **{"state": self._state} | more,
        )
        await self._role.events.transact(self._transactor, [report])
        self._fleet.apply(report)
