"""Weight updates of an engine: loads the newest of the waiting versions, as full weights or as an adapter.

A version that training ranks send is received from them (direct.py). Every other version, and one that the engine
missed, is loaded from the store. Its files are fetched and verified before the engine is touched; while they are being
fetched, training ranks may send a newer version. Then: pause ([engine] update) -> load -> check the label -> resume.
After a failure the engine is resumed, unless it has died or has tensors of two versions. If several versions wait, the
newest one that is available is loaded, and the older ones are superseded. A refused version is not tried again; the old
weights serve until the next version.

An adapter is loaded beside the weights that serve, without a pause, because each request names the adapter that must
answer it. Adapters older than the last two are unloaded once their requests have ended. If the engine has other base
weights than the adapter needs, those are loaded first, as above.

An engine that has released its memory takes back the memory of the weights -> loads -> takes back the memory of the
cache. If a version is refused, it stays released, since it has nothing to resume with.

BadWeights is in infra/tensors/versions.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client import Counter

from turnlog.consumers.loader.direct import DirectLoads
from turnlog.consumers.loader.engine_status import EngineStatus
from turnlog.infra.blobs import BlobError
from turnlog.infra.engines.protocol import EngineControl, EngineDead, EngineRefused, TransferFailed
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
from turnlog.processors.core.views.progress import DURABLE, WeightChain
from turnlog.schemas.events import EngineWeightsLoaded, EngineWeightsRefused, WeightVersionPublished

log = logging.getLogger(__name__)
LOADED = Counter("turnlog_loader_loaded", "Weight versions loaded")
REFUSED = Counter("turnlog_loader_refused", "Weight versions refused", ["cause"])

ATTEMPTS = 3
"""Attempts to fetch the files of a version, beyond the retries of each request to the store. A new process is the next
one: its connections are new, too."""
RETRY_S = 0.5
LOOK_S = 0.2
"""Maximum seconds that one step waits for files, because training ranks may send a newer version meanwhile."""
RECENT = 8
DURABLE_KEPT = 2
"""Number of the newest versions with files that are remembered, however many were announced since."""
ADAPTERS = 2
"""Number of adapters that stay loaded: requests of the previous one finish while the newest one serves."""
PATIENCE_S = 5.0
"""Seconds to wait for the requests of an adapter that is to be unloaded. After that, all running requests are aborted,
and gateways submit them again."""


class Fetched(NamedTuple):
    """A version on disk."""

    event: WeightVersionPublished
    held: Held
    timer: Timer
    """Seconds of fetch and verify."""


@dataclass(slots=True)
class Fetching:
    """A version that is being fetched."""

    version: int
    task: asyncio.Task[list[Fetched]]
    """Returns the version, and before it the base weights of an adapter if the engine does not have them."""


class Swap:
    """Updates the weights of one engine."""

    def __init__(self, role: Role, control: EngineControl, status: EngineStatus, beat: Callable[[], None]) -> None:
        """Raises what `model_shapes` raises."""
        self._role, self._control, self._status, self._beat = role, control, status, beat
        run = role.settings.run
        self._folders = WeightFolders(weight_folders(run.directory), role.blobs, beat=beat)
        self._note = ServedNote.of(run.directory, run.id, status.engine_id)
        self._folder: Held | None = None
        """Folder of the weights that were loaded last from files, which serve or are the base weights of adapters."""
        self._adapters: dict[int, Held] = {}
        """Folders of the loaded adapters."""
        self._expected = model_shapes(Path(role.settings.model.path))
        self._recent: dict[int, WeightVersionPublished] = {}
        """The newest versions on the log, and those that they build on; needed for an engine that comes back without
        weights."""
        self._refused: set[int] = set()
        self._unanswered: set[int] = set()
        """Versions that the log reports neither as loaded, nor as refused, nor as superseded."""
        self._chain = WeightChain()
        """All published versions."""
        self.direct = DirectLoads(role, control, status)
        self._mismatched = -1
        """Version whose digests differed when it was sent last; -1 if none."""
        self._fetching: Fetching | None = None

    def remember(self, event: WeightVersionPublished) -> None:
        """Add a record of a version: its publication or announcement, or that of its durable copy."""
        known = self._recent.get(event.version)
        if known is not None and not event.digests:
            event = dataclasses.replace(event, digests=known.digests)
        if not self._status.versions.is_answered(event.version):
            self._unanswered.add(event.version)
        self._chain.apply(event)
        self._recent[event.version] = event
        stored = sorted(filter(self._is_durable, self._recent))
        needed = {*sorted(self._recent)[-RECENT:], *stored[-DURABLE_KEPT:]}
        for version in sorted(needed, reverse=True):
            base = self._recent[version].base_version
            while base in self._recent and base not in needed:
                needed.add(base)
                base = self._recent[base].base_version
        self._recent = {version: one for version, one in self._recent.items() if version in needed}

    def _is_durable(self, version: int) -> bool:
        return self._recent[version].state == DURABLE

    @property
    def waiting(self) -> list[int]:
        """Versions to load, in ascending order."""
        return self.news_after(self._status.version)

    def news_after(self, served: int) -> list[int]:
        """Return the versions to load, in ascending order, given that the engine has `served`.

        Training ranks send a version once, so a version that was acknowledged or refused can only be loaded from files.
        A version that an earlier process refused is tried again if the engine has no weights and there is no other
        version: the engine may have been repaired.
        """
        answered = self._status.versions
        news = sorted(
            version
            for version in self._recent.keys() - self._refused
            if self._chain.is_news(version, served) and (self._is_durable(version) or not answered.is_answered(version))
        )
        return [version for version in news if version not in answered.refused] or (news if served < 0 else [])

    def _newest_durable(self) -> int | None:
        """Return the newest version that can be loaded from files. An engine that has released its memory needs one
        even if it had it before."""
        found = [version for version in self.waiting if self._is_durable(version)]
        if not found and self._status.released:
            found = [version for version in self.news_after(-1) if self._is_durable(version)]
        return found[-1] if found else None

    async def step(self) -> bool:
        """Take the next step towards the newest version that is available: receive it, report that the engine is ready
        to receive it, wait for its files for a short while, or load them. Return whether the engine was changed. Raises
        BlobError, EngineSwapFailed, Fenced."""
        waiting = self.waiting
        if waiting:
            event = self._recent[waiting[-1]]
            if self.direct.has_begun(event.version):
                await self._receive(event)
                return True
            if not self._is_durable(event.version) and await self._await_transfer(event):
                return False
        if self._newest_durable() is None:
            await self._status.settle()
            return False
        fetched = await self._fetch()
        return fetched is not None and await self._load_fetched(fetched)

    async def _await_transfer(self, event: WeightVersionPublished) -> bool:
        """Return whether to wait for training ranks to send the version. A version that does not fit is refused."""
        try:
            check_fits(event, self._expected)
        except BadWeights as error:
            await self._refuse(event, error)
            return True
        if event.incarnation < self._chain.incarnation:  # its trainer has died
            return False
        return not await self._ask(event) or self.direct.is_expected(event.version)

    async def _ask(self, event: WeightVersionPublished, cause: str = "") -> bool:
        """Return whether the engine answered. If not, the next step asks again, and probes find out if it is gone."""
        try:
            await self.direct.ask(event, cause=cause)
        except EngineDead as error:
            log.warning("version %d: %s", event.version, error)
            return False
        return True

    async def _receive(self, event: WeightVersionPublished) -> None:
        """Let the engine receive the version from training ranks. If that fails, report that it is ready for the next
        attempt."""
        try:
            seconds = await self.direct.load(event)
        except (EngineRefused, TransferFailed, BadWeights) as error:
            log.warning("version %d: %s: %s", event.version, type(error).__name__, error)
            await self.direct.report_incomplete()
            again = isinstance(error, BadWeights) and self._mismatched == event.version
            self._mismatched = event.version if isinstance(error, BadWeights) else -1
            if self._is_durable(event.version):
                return
            if again:
                await self._refuse(event, error)
            else:
                await self._ask(event, f"{type(error).__name__}: {error}")
        else:
            self._status.base_version = None
            await self._report_loaded(event, seconds)

    async def fetch_ahead(self) -> None:
        """Fetch and verify the version to load first, for a short while, because the engine is starting. Raises
        BlobError."""
        newest = self._newest_durable()
        if newest is None:
            return
        if self._fetching is not None and self._fetching.version != newest and self._fetching.task.done():
            self._drop_fetched()
        self._begin_fetch(newest)
        if self._fetching is not None:
            await asyncio.wait({self._fetching.task}, timeout=LOOK_S)

    def _begin_fetch(self, version: int) -> None:
        """Begin to fetch the version, unless something is being fetched."""
        if self._fetching is None:
            event = self._recent[version]
            self._fetching = Fetching(version, asyncio.create_task(self._obtain(event), name=f"fetch {version}"))

    async def _fetch(self) -> Fetching | None:
        """Return the version that was fetched, or None while files are being fetched. Versions that need not be loaded
        any more are dropped."""
        newest = self._newest_durable()
        wanted = {*self.waiting, newest}
        if self._fetching is not None and self._fetching.task.done() and self._fetching.version not in wanted:
            self._drop_fetched()
        if newest is not None:
            self._begin_fetch(newest)
        if self._fetching is None:
            return None
        await asyncio.wait({self._fetching.task}, timeout=LOOK_S)
        if not self._fetching.task.done() or self._fetching.version not in wanted:
            return None
        fetched, self._fetching = self._fetching, None
        return fetched

    def _drop_fetched(self) -> None:
        """Release the folders that were fetched: the newest ones stay on the disk, but may be removed."""
        fetching, self._fetching = self._fetching, None
        assert fetching is not None
        assert fetching.task.done()
        error = None if fetching.task.cancelled() else fetching.task.exception()
        if error is not None:
            log.warning("version %d, which is not needed any more: %s", fetching.version, error)
        elif not fetching.task.cancelled():
            for one in fetching.task.result():
                one.held.release()

    async def close(self) -> None:
        """Cancel the fetch that is under way."""
        if self._fetching is not None:
            self._fetching.task.cancel()
            await asyncio.wait({self._fetching.task})
            self._drop_fetched()

    async def _obtain(self, event: WeightVersionPublished) -> list[Fetched]:
        """Fetch and verify a version, and before it the base weights of an adapter if the engine does not have them.
        Raises BadWeights, BlobError."""
        check_fits(event, self._expected)
        chain = chain_of(event, self._recent)
        parts = [chain]
        if event.kind == "adapter":
            check_fits(chain[0], self._expected)
            parts = [chain[1:]] if chain[0].version == self._status.whole else [chain[:1], chain[1:]]
        found: list[Fetched] = []
        try:
            for part in parts:
                timer = Timer()
                found.append(Fetched(part[-1], await self._fetch_folder(part, timer), timer))
        except BaseException:
            for one in found:
                one.held.release()
            raise
        return found

    async def _load_fetched(self, fetched: Fetching) -> bool:
        """Load what was fetched and report it. Return whether the engine was changed. Raises BlobError."""
        event = self._recent[fetched.version]
        folders: list[Fetched] = []
        try:
            folders = fetched.task.result()
            *below, newest = folders
            if event.kind != "adapter":
                seconds = await self._load_instead(newest)
            elif below or event.base_version == self._status.whole:
                seconds = await self._load_beside(newest, below)
            else:  # the engine lost its base weights while the adapter was fetched
                newest.held.release()
                return False
        except (BadWeights, EngineRefused) as error:
            await self._refuse(event, error)
        else:
            await self._report_loaded(event, seconds)
            await self._unload()
        return True

    async def _load_instead(self, fetched: Fetched) -> dict[str, float]:
        """Replace the engine's own weights, and return the seconds of each phase. Raises what `_load` raises."""
        try:
            await self._load(fetched.event, fetched.held.path, fetched.timer)
        except BaseException:
            fetched.held.release()
            raise
        self._keep(fetched.event, fetched.held)
        self._status.base_version = None
        return fetched.timer.seconds

    def recall(self) -> None:
        """Keep the folder of the weights that the engine is known to have, as if they had been loaded by this
        process."""
        event = self._recent.get(self._status.whole)
        held = None if event is None else self._folders.find_folder(event)
        if event is not None and held is not None:
            self._keep(event, held)

    def _keep(self, event: WeightVersionPublished, held: Held) -> None:
        """Keep the folder, because the engine has these weights, and let the engine's next start use it."""
        if self._folder is not None:
            self._folder.release()
        self._folder = held
        self._note.write(event, held.path)

    async def _load_beside(self, adapter: Fetched, below: list[Fetched]) -> dict[str, float]:
        """Load the adapter, after its base weights if the engine does not have them, and return the seconds of each
        phase for the adapter alone. Raises the same errors."""
        event, held, timer = adapter
        try:
            for base in below:
                if base.event.version == self._status.whole:
                    base.held.release()
                    continue
                seconds = await self._load_instead(base)
                await self._report_loaded(base.event, seconds, state=STARTING)  # turns wait for the adapter
            async with self._status.lives(f"loaded adapter {event.version}"):
                await self._load_adapter(event.version, self._status.whole, held.path, timer)
        except BaseException:
            held.release()
            raise
        self._adapters[event.version], self._status.base_version = held, event.base_version
        return timer.seconds

    async def _load_adapter(self, version: int, base: int, folder: Path, timer: Timer) -> None:
        """Load and check an adapter. Raises EngineRefused, EngineDead, Fenced."""
        await self._status.reached.check_owner()
        for found in (await self._control.model_info()).adapters:
            if found == version or found not in self._status.versions.loaded:
                await self._control.unload_adapter(found, patience_s=PATIENCE_S)
        with timer.phase("load"):
            await self._control.load_adapter(folder, version, timeout_s=self._role.settings.loader.timeout_s)
        with timer.phase("check"):
            info = await self._control.model_info()
        if (info.version, info.base_version) != (version, base):
            raise EngineRefused(
                f"{self._status.url} reports weights {info.weight_version!r} with adapters {info.adapters} after "
                f"loading adapter {version} of {base}"
            )

    async def _unload(self) -> None:
        """Unload old adapters once the requests that name them have ended."""
        if self._status.base_version is None and not self._adapters:
            return
        async with self._status.lives("unloaded an adapter"):
            found = (await self._control.model_info()).adapters
            for version in found[: -ADAPTERS if self._status.base_version is not None else None]:
                self._beat()
                await self._status.reached.check_owner()
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
        async with self._status.lives(f"loaded version {event.version}"):
            await self._status.reached.check_owner()
            try:
                with timer.phase("pause"):
                    await control.pause()
                with timer.phase("load"):
                    await control.load(folder, event.version, timeout_s=timeout_s, released=self._status.released)
                with timer.phase("check"):
                    info = await control.model_info()
                if info.label != event.version:
                    raise EngineRefused(
                        f"{self._status.url} reports {info.weight_version!r} after loading {event.version}"
                    )
            except EngineDead:  # it may still answer, but its weights are those of no version
                raise
            except BaseException:
                if not (self._status.released or self._status.incomplete):
                    await self._resume(timer)
                raise
            self._status.released = False
            await self._resume(timer)

    async def _resume(self, timer: Timer) -> None:
        with timer.phase("resume"):
            await self._status.reached.check_owner()
            await self._control.resume()

    async def _report_loaded(self, event: WeightVersionPublished, seconds: dict[str, float], **more: Any) -> None:
        self._status.serves(event.version)
        LOADED.inc()
        for phase, took_s in seconds.items():
            STAGE_S.labels("loader", phase).observe(took_s)
        superseded = tuple(sorted(one for one in self._unanswered if one < event.version))
        of = {"superseded": superseded, "seconds": seconds, "base_version": self._status.base_version}
        await self._status.say(EngineWeightsLoaded, **of, **more)
        self._unanswered -= {*superseded, event.version}

    async def _refuse(self, event: WeightVersionPublished, error: Exception) -> None:
        log.error("version %d refused, %d stays: %s", event.version, self._status.version, error)
        REFUSED.labels(type(error).__name__).inc()
        cause = type(error).__name__
        self._refused.add(event.version)
        self._status.newcomer = self._status.newcomer and bool(self.waiting)
        await self._status.say(EngineWeightsRefused, refused_version=event.version, cause=cause, message=str(error))
        self._unanswered.discard(event.version)
