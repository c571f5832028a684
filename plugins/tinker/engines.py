"""The engines of the server: each loads the adapters that its requests name, several side by side, and drops those that
were not used for longest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import shutil
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from turnlog.infra.blobs import Blobs
from turnlog.infra.engines.kinds import connect_engine, control_engine
from turnlog.infra.engines.protocol import Adapter, Engine, EngineControl, EngineDead, Generate, OutputChunk
from turnlog.plugins.tinker import BadSetup
from turnlog.plugins.tinker.executor import fetch_files
from turnlog.schemas.events import WeightFile
from turnlog.settings import EngineSettings

log = logging.getLogger(__name__)
PAUSES_S = (0.2, 5.0)
"""First and longest pause in seconds before another attempt while no engine answers."""
UNLOAD_S = 30.0
"""Seconds for which the requests of an adapter that is to be dropped may go on."""


@dataclass(frozen=True, slots=True)
class SampledAdapter:
    """Weights to sample from."""

    number: int
    """The adapter's name at the engines."""
    files: tuple[WeightFile, ...]


@dataclass(slots=True)
class AdapterEngine:
    """An engine, and the adapters that it has."""

    client: Engine
    control: EngineControl
    url: str
    base: str | None = None
    """Label of its own weights; None while its adapters are unknown."""
    loaded: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Adapters, the one that was used last at the end."""
    users: dict[int, int] = field(default_factory=dict)
    """Adapter -> running requests."""
    running: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AdapterFleet:
    """Generates with the base model or an adapter, at the engine with the fewest running requests."""

    def __init__(
        self, engines: Sequence[AdapterEngine], blobs: Blobs, folder: Path, *, most: int, timeout_s: float,
        request_timeout_s: float,
    ) -> None:  # fmt: skip
        """`folder`: where adapters are put for engines to read, which must see it under the same path. It is emptied
        now, and has no other files than adapters that engines hold. `most`: adapters that an engine has at once, unless
        more are in use. `timeout_s`: seconds of a load."""
        self._engines, self._blobs, self._folder, self._most = engines, blobs, folder, most
        self._timeout_s, self._request_s = timeout_s, request_timeout_s
        self._files = asyncio.Lock()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)

    @classmethod
    def connect(
        cls, settings: EngineSettings, blobs: Blobs, folder: Path, *, most: int, timeout_s: float
    ) -> AdapterFleet:
        """Return the fleet of a run's engines. Connections are opened by the first request. Raises BadSetup."""
        if settings.kind == "vllm" or "vllm" in settings.kinds:
            raise BadSetup(
                "the Tinker server loads adapters into engines, which vLLM's cannot: set [engine] kind = sglang"
            )
        if not settings.urls:
            raise BadSetup(
                "the Tinker server has no engine to sample from: set [engine] urls, or start it by `turnlog up`"
            )
        engines = [
            AdapterEngine(
                connect_engine(url, settings.kind, ca_file=settings.ca_file),
                control_engine(url, settings.kind, ca_file=settings.ca_file, adapters=True),
                url,
            )
            for url in settings.urls
        ]
        return cls(engines, blobs, folder, most=most, timeout_s=timeout_s, request_timeout_s=settings.request_timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        for engine in self._engines:
            await engine.client.close()
            await engine.control.close()

    async def generate(self, request: Generate, adapter: SampledAdapter | None) -> OutputChunk:
        """Generate, at another engine if one dies. While none answers, try again for ever. Raises EngineRefused,
        BlobMissing, StoreUnavailable."""
        pause_s = PAUSES_S[0]
        while True:
            engine = min(self._engines, key=lambda one: (one.base is None and one.running > 0, one.running))
            try:
                async with self._using(engine, adapter) as named:
                    async for piece in engine.client.generate(
                        replace(request, adapter=named), stream=False, timeout_s=self._request_s
                    ):
                        if piece.finish == "abort":
                            raise EngineDead(f"{engine.url} aborted the request")
                        return piece
            except EngineDead as error:
                log.warning("a sample is tried again: %s", error)
                engine.base = None
                await asyncio.sleep(pause_s * random.uniform(0.5, 1))
                pause_s = min(2 * pause_s, PAUSES_S[1])

    @asynccontextmanager
    async def _using(self, engine: AdapterEngine, adapter: SampledAdapter | None) -> AsyncIterator[Adapter | None]:
        """Have the adapter loaded while the block runs. Raises EngineDead, EngineRefused, BlobMissing."""
        engine.running += 1
        number = -1 if adapter is None else adapter.number
        engine.users[number] = engine.users.get(number, 0) + 1
        try:
            if adapter is None:
                yield None
                return
            async with engine.lock:
                await self._load(engine, adapter)
                engine.loaded.move_to_end(number)
                base = engine.base or ""
            yield Adapter(str(number), base)
        finally:
            engine.running -= 1
            engine.users[number] -= 1
            if not engine.users[number]:
                del engine.users[number]

    async def _load(self, engine: AdapterEngine, adapter: SampledAdapter) -> None:
        if engine.base is None:
            info = await engine.control.model_info()
            engine.loaded = OrderedDict.fromkeys(info.adapters)
            engine.base = info.weight_version
        if adapter.number in engine.loaded:
            return
        unused = [number for number in engine.loaded if number not in engine.users]
        while len(engine.loaded) >= self._most and unused:
            number = unused.pop(0)
            await engine.control.unload_adapter(number, patience_s=UNLOAD_S)
            engine.loaded.pop(number, None)
            await self._remove_folder(number)
        folder = await self._folder_of(adapter)
        await engine.control.load_adapter(folder, adapter.number, timeout_s=self._timeout_s)
        engine.loaded[adapter.number] = None

    async def _folder_of(self, adapter: SampledAdapter) -> Path:
        """Return a local folder with the adapter's files."""
        folder = self._folder / str(adapter.number)
        async with self._files:
            if not folder.is_dir():
                part = _part_of(folder)
                part.mkdir(parents=True)
                await fetch_files(self._blobs, adapter.files, part)
                part.rename(folder)
        return folder

    async def _remove_folder(self, number: int) -> None:
        """Remove the files of an adapter that no engine has; an engine that is to load it again fetches them again."""
        async with self._files:
            if any(number in engine.loaded or number in engine.users for engine in self._engines):
                return
            folder = self._folder / str(number)
            if folder.is_dir():
                part = _part_of(folder)
                folder.rename(part)
                await asyncio.to_thread(shutil.rmtree, part)


def _part_of(folder: Path) -> Path:
    """Return the name of a folder that is not whole, after removing what an interrupted fetch left under it."""
    part = folder.with_name(f"{folder.name}.part")
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(part)
    return part
