"""Weight updates of an engine: loads the newest of the waiting versions, as full weights or as an adapter.

Files are fetched and verified before the engine is touched. Then: pause ([engine] update) -> load ([loader] transport)
-> check the label -> resume. The engine is resumed after every failure except its death. If several versions wait, the
newest valid one is loaded and the others are superseded. A refused version is not tried again; the old weights serve
until the next version.

An adapter is loaded beside the weights that serve, without a pause, because each request names the adapter that must
answer it. Adapters older than the last two are unloaded once their requests have ended. If the engine has other base
weights than the adapter needs, those are loaded first, as above.

An engine that has released its memory takes back the memory of the weights -> loads -> takes back the memory of the
cache. If a version is refused, it stays released, since it has nothing to resume with.

BadWeights is in infra/tensors/versions.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from turnlog.consumers.loader.engine_status import EngineStatus
from turnlog.infra.blobs import BlobError
from turnlog.infra.engine import EngineControl, EngineDead, EngineRefused
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.infra.tensors.fits import check_fits, model_shapes
from turnlog.infra.tensors.served import ServedNote, weight_folders
from turnlog.infra.tensors.versions import (
    BadWeights,
    Chain,
    Held,
    Timer,
    WeightFolders,
    chain_of,
)
from turnlog.processors.core.views.fleet import STARTING
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas.events import EngineWeightsLoaded, EngineWeightsRefused, WeightVersionPublished

log = logging.getLogger(__name__)
LOADED = Counter("turnlog_loader_loaded", "Weight versions loaded")
REFUSED = Counter("turnlog_loader_refused", "Weight versions refused", ["cause"])

ATTEMPTS = 3
"""Attempts to fetch the files of a version, beyond the retries of each request to the store. A new process is the next
one: its connections are new, too."""
RETRY_S = 0.5
RECENT = 8
ADAPTERS = 2
"""Number of adapters that stay loaded: requests of the previous one finish while the newest one serves."""
PATIENCE_S = 5.0
"""Seconds to wait for the requests of an adapter that is to be unloaded. After that, all running requests are aborted,
and gateways submit them again."""


class Swap:
    """Updates the weights of one engine."""

    def __init__(self, role: Role, control: EngineControl, standing: EngineStatus, beat: Callable[[], None]) -> None:
        """Raises what `model_shapes` raises."""
        self._role, self._control, self._standing, self._beat = role, control, standing, beat
        run = role.settings.run
        self._folders = WeightFolders(weight_folders(run.directory), role.blobs, beat=beat)
        self._note = ServedNote.of(run.directory, run.id, standing.engine_id)
        self._folder: Held | None = None
        """Folder of the weights that serve, or of the base weights of adapters."""
        self._adapters: dict[int, Held] = {}
        """Folders of the loaded adapters."""
        self._expected = model_shapes(Path(role.settings.model.path))
        self._recent: dict[int, WeightVersionPublished] = {}
        """The newest versions on the log, and those that they build on; needed for an engine that comes back without
        weights."""
        self.waiting: list[int] = []
        """Queue of versions to load, in ascending order."""
        self._refused: set[int] = set()
        self._unanswered: set[int] = set()
        """Versions that the log reports neither as loaded, nor as refused, nor as superseded."""
        self._chain = WeightChain()
        """All published versions."""
        self._ahead = -1
        """Version that was fetched before the engine answered; -1 if none."""

    def remember(self, event: WeightVersionPublished) -> None:
        """Add a version that was published on the log."""
        if not self._standing.versions.is_answered(event.version):
            self._unanswered.add(event.version)
        self._chain.apply(event)
        if self._chain.is_news(event.version, self._standing.version):
            self.waiting.append(event.version)
        self._recent[event.version] = event
        needed = set(sorted(self._recent)[-RECENT:])
        for version in sorted(needed, reverse=True):
            base = self._recent[version].base_version
            while base in self._recent and base not in needed:
                needed.add(base)
                base = self._recent[base].base_version
        self._recent = {version: one for version, one in self._recent.items() if version in needed}

    def begin_after(self, version: int) -> None:
        """Queue all newer versions, given that the engine has `version`."""
        known = {*self.waiting, *self._recent} - self._refused
        self.waiting = sorted(one for one in known if self._chain.is_news(one, version))

    def begin_again(self) -> None:
        """Queue the newest version that was not refused, because the engine has lost its weights."""
        self.waiting = [version for version in sorted(self._recent) if version not in self._refused][-1:]

    async def fetch_ahead(self) -> None:
        """Fetch and verify the version to load first, while the engine is starting. Raises BlobError."""
        if not self.waiting or self.waiting[-1] == self._ahead:
            return
        event, began = self._recent[self.waiting[-1]], time.monotonic()
        self._ahead = event.version
        try:
            check_fits(event, self._expected)
            chain = chain_of(event, self._recent)
            for part in (chain[:-1], chain[-1:]) if event.kind == "adapter" else (chain,):
                (await self._fetch_folder(part, Timer())).release()  # the newest folders stay without a hold
        except BadWeights as error:
            log.warning("version %d will be refused: %s", event.version, error)
        else:
            log.info("version %d is here before its engine, after %.2f s", event.version, time.monotonic() - began)

    async def newest(self) -> None:
        """Load the newest waiting version. If it is refused, the next call tries the next newest."""
        newest = self.waiting.pop()
        event = self._recent.get(newest)
        if event is None:  # every recent version was refused
            self.waiting = []
            return
        try:
            check_fits(event, self._expected)
            chain = chain_of(event, self._recent)
            seconds = await (self._load_beside if event.kind == "adapter" else self._load_instead)(chain)
        except (BadWeights, EngineRefused) as error:
            self._refused.add(event.version)
            await self._refuse(event, error)
        else:
            self.waiting = []
            await self._report_loaded(event, seconds)
            await self._unload()

    async def _load_instead(self, chain: Chain) -> dict[str, float]:
        """Replace the engine's own weights, and return the seconds of each phase. Raises what `_load` raises,
        BadWeights, BlobError."""
        timer = Timer()
        held = await self._fetch_folder(chain, timer)
        try:
            await self._load(chain[-1], held.path, timer)
        except BaseException:
            held.release()
            raise
        self._keep(chain[-1], held)
        self._standing.base_version = None
        return timer.seconds

    def recall(self) -> None:
        """Keep the folder of the weights that the engine is known to have, as if they had been loaded by this
        process."""
        event = self._recent.get(self._standing.whole)
        held = None if event is None else self._folders.find_folder(event)
        if event is not None and held is not None:
            self._keep(event, held)

    def _keep(self, event: WeightVersionPublished, held: Held) -> None:
        """Keep the folder, because the engine has these weights, and let the engine's next start use it."""
        if self._folder is not None:
            self._folder.release()
        self._folder = held
        self._note.write(event, held.path)

    async def _load_beside(self, chain: Chain) -> dict[str, float]:
        """Load the adapter, after its base weights if necessary, and return the seconds of each phase for the adapter
        alone. Raises the same errors."""
        base, event = chain
        if base.version != self._standing.whole:
            check_fits(base, self._expected)
            seconds = await self._load_instead(chain[:-1])
            self.waiting = [version for version in self.waiting if version != base.version]
            await self._report_loaded(base, seconds, state=STARTING)  # turns wait for the adapter
        timer = Timer()
        held = await self._fetch_folder(chain[-1:], timer)
        try:
            async with self._standing.lives(f"loaded adapter {event.version}"):
                await self._load_adapter(event.version, base.version, held.path, timer)
        except BaseException:
            held.release()
            raise
        self._adapters[event.version], self._standing.base_version = held, base.version
        return timer.seconds

    async def _load_adapter(self, version: int, base: int, folder: Path, timer: Timer) -> None:
        """Load and check an adapter. Raises EngineRefused, EngineDead, Fenced."""
        await self._standing.reached.check_owner()
        for found in (await self._control.model_info()).adapters:
            if found == version or found not in self._standing.versions.loaded:
                await self._control.unload_adapter(found, patience_s=PATIENCE_S)
        with timer.phase("load"):
            await self._control.load_adapter(folder, version, timeout_s=self._role.settings.loader.timeout_s)
        with timer.phase("check"):
            info = await self._control.model_info()
        if (info.version, info.base_version) != (version, base):
            raise EngineRefused(
                f"{self._standing.url} reports weights {info.weight_version!r} with adapters {info.adapters} after "
                f"loading adapter {version} of {base}"
            )

    async def _unload(self) -> None:
        """Unload old adapters once the requests that name them have ended."""
        if self._standing.base_version is None and not self._adapters:
            return
        async with self._standing.lives("unloaded an adapter"):
            found = (await self._control.model_info()).adapters
            for version in found[: -ADAPTERS if self._standing.base_version is not None else None]:
                self._beat()
                await self._standing.reached.check_owner()
                await self._control.unload_adapter(version, patience_s=PATIENCE_S)
        for version in self._adapters.keys() - (await self._control.model_info()).adapters:
            self._adapters.pop(version).release()

    async def _fetch_folder(self, chain: Chain, timer: Timer) -> Held:
        """Fetch the folder. A store that does not answer is tried ATTEMPTS times; then BlobError ends the
        process."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._folders.obtain_folder(chain, timer)
            except BlobError as error:
                if attempt == ATTEMPTS:
                    raise
                log.warning("version %d: %s; attempt %d", chain[-1].version, error, attempt)
                await asyncio.sleep(RETRY_S * attempt)
        raise AssertionError("unreachable")

    async def _load(self, event: WeightVersionPublished, folder: Path, timer: Timer) -> None:
        """Pause, load, check, resume. Raises EngineRefused (the old weights serve), EngineSwapFailed, Fenced."""
        control, timeout_s = self._control, self._role.settings.loader.timeout_s
        async with self._standing.lives(f"loaded version {event.version}"):
            await self._standing.reached.check_owner()
            try:
                with timer.phase("pause"):
                    await control.pause()
                with timer.phase("load"):
                    await control.load(folder, event.version, timeout_s=timeout_s, released=self._standing.released)
                with timer.phase("check"):
                    info = await control.model_info()
                if info.label != event.version:
                    raise EngineRefused(
                        f"{self._standing.url} reports {info.weight_version!r} after loading {event.version}"
                    )
            except EngineDead:  # it may still answer, but its weights are those of no version
                raise
            except BaseException:
                if not self._standing.released:
                    await self._resume(timer)
                raise
            self._standing.released = False
            await self._resume(timer)

    async def _resume(self, timer: Timer) -> None:
        with timer.phase("resume"):
            await self._standing.reached.check_owner()
            await self._control.resume()

    async def _report_loaded(self, event: WeightVersionPublished, seconds: dict[str, float], **more: Any) -> None:
        self._standing.serves(event.version)
        LOADED.inc()
        for phase, took_s in seconds.items():
            STAGE_S.labels("loader", phase).observe(took_s)
        superseded = tuple(sorted(one for one in self._unanswered if one < event.version))
        of = {"superseded": superseded, "seconds": seconds, "base_version": self._standing.base_version}
        await self._standing.say(EngineWeightsLoaded, **of, **more)
        self._unanswered -= {*superseded, event.version}

    async def _refuse(self, event: WeightVersionPublished, error: Exception) -> None:
        log.error("version %d refused, %d stays: %s", event.version, self._standing.version, error)
        REFUSED.labels(type(error).__name__).inc()
        cause = type(error).__name__
        self._standing.newcomer = self._standing.newcomer and bool(self.waiting)
        await self._standing.say(EngineWeightsRefused, refused_version=event.version, cause=cause, message=str(error))
        self._unanswered.discard(event.version)
