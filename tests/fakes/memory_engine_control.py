"""The fake of infra.engine_control: an engine that behaves as SGLang was seen to, death by truncated file included."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.engines.protocol import (
    LOADING,
    RELEASED,
    RELEASING,
    CannotReceive,
    EngineDead,
    EngineError,
    EngineRefused,
    EngineUnreachable,
    ModelInfo,
    TransferFailed,
)
from turnlog.infra.engines.sglang import CACHE, NO_PLUGIN, WEIGHTS
from turnlog.infra.tensors.adapters import CONFIG


class MemoryEngineControl:
    """One engine in memory. `paused`, `alive`, `loads` and `memory` (what it holds) are for tests to look at; `silent`:
    of how many calls the connection is dropped. It dies of every step that is out of turn."""

    def __init__(self, model: Path) -> None:
        self._info = ModelInfo("default", str(model))
        self.paused = False
        self.alive = True
        self.silent = 0
        self.answers = asyncio.Event()
        """Cleared, it is as SIGSTOP leaves it."""
        self.answers.set()
        self.loads: list[int] = []
        self.requests = 0
        """That run or wait."""
        self.counts = True
        """Whether it says how many: vLLM with --disable-log-stats does not."""
        self.aborts = 0
        self.aborted = asyncio.Event()
        self.adapters: dict[int, Path] = {}
        self.takes_adapters = True
        """Started with --enable-lora."""
        self.memory = {CACHE, WEIGHTS}
        self.ranks = 1
        """That can receive from training ranks."""
        self.digests: dict[str, str] = {}
        """That it reports of every version that it receives."""
        self.failures: list[EngineError] = []
        """Of the next transfers, in order: EngineRefused leaves the old weights, TransferFailed does not, and of
        EngineDead it dies."""
        self.take: Callable[[Transfer, float], Awaitable[dict[str, str]]] | None = None
        """Receives in earnest and returns the digests, or raises one of these errors."""
        self.transfers: list[Transfer] = []

    def restart(self, label: str = "default") -> None:
        """Come back with the model folder's own weights, or with those of a version that it is started from."""
        self._info = ModelInfo(label, self._info.model_path)
        self.adapters.clear()
        self.memory = {CACHE, WEIGHTS}
        self.paused, self.alive = False, True

    async def model_info(self) -> ModelInfo:
        await self.answers.wait()
        self._alive()
        return replace(self._info, adapters=tuple(sorted(self.adapters)))

    async def pause(self) -> None:
        self._alive()
        self.paused = True

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        """See EngineControl. Like SGLang: no folder is refused, a short file kills, wrong tensors are not noticed."""
        self._alive()
        if released:
            await self.label(f"{LOADING}{version}")
            await self._take(WEIGHTS)
        if not _exists(folder):
            raise EngineDead("no weights") if released else EngineRefused(f"no folder {folder}")
        self._needs(_whole(folder) and WEIGHTS in self.memory)
        self.loads.append(version)
        if released:
            await self._take(CACHE)
        await self.label(str(version))

    async def direct_ranks(self) -> int:
        self._alive()
        if not self.ranks:
            raise CannotReceive(NO_PLUGIN)
        return self.ranks

    async def receive(self, transfer: Transfer, *, timeout_s: float, released: bool = False) -> dict[str, str]:
        """See EngineControl."""
        before = (await self.model_info()).weight_version
        await self.label(f"{LOADING}{transfer.version}")
        if released:
            await self._take(WEIGHTS)
        self.transfers.append(transfer)
        try:
            found = await self._received(transfer, timeout_s)
        except EngineRefused as error:
            if not released and not before.startswith(LOADING):
                await self.label(before)
                raise
            raise TransferFailed(f"{error}: it has no whole version") from error
        except EngineDead:
            self.alive = False
            raise
        finally:
            if released and self.alive:
                await self._take(CACHE)
        return found

    async def _received(self, transfer: Transfer, timeout_s: float) -> dict[str, str]:
        await self._step()
        if self.failures:
            raise self.failures.pop(0)
        return dict(self.digests) if self.take is None else await self.take(transfer, timeout_s)

    async def release(self) -> None:
        """See EngineControl."""
        await self.label(RELEASING)
        self._needs(self.paused and self.memory == {CACHE, WEIGHTS})
        self.memory = set()
        await self.label(RELEASED)

    async def retake(self) -> None:
        """See EngineControl."""
        for one in (WEIGHTS, CACHE):
            await self._take(one)

    async def _take(self, one: str) -> None:
        await self._step()
        self._needs(one not in self.memory)
        self.memory.add(one)

    async def label(self, text: str) -> None:
        """See SGLangControl."""
        await self._step()
        self._info = ModelInfo(text, self._info.model_path)

    async def load_adapter(self, folder: Path, version: int, *, timeout_s: float) -> None:
        """See EngineControl. Like SGLang: what it has, and no folder, is refused; what tensors hold is not noticed."""
        self._alive()
        if not self.takes_adapters or version in self.adapters or not (folder / CONFIG).is_file():
            raise EngineRefused(f"adapter {version} of {folder}")
        self.loads.append(version)
        self.adapters[version] = folder

    async def unload_adapter(self, version: int, *, patience_s: float) -> None:
        self._alive()
        if self.adapters.pop(version, None) is None:
            raise EngineRefused(f"no adapter {version}")

    async def _step(self) -> None:
        """Between two of its calls to SGLang: whoever asks may be killed here."""
        self._alive()

    def _needs(self, fits: bool) -> None:
        self.alive = self.alive and fits
        self._alive()

    async def resume(self) -> None:
        self._alive()
        self._needs(self.memory == {CACHE, WEIGHTS})
        self.paused = False

    async def under_way(self) -> int:
        self._alive()
        if not self.counts:
            raise EngineRefused("it counts no requests")
        return self.requests

    async def abort_all(self) -> None:
        self._alive()
        self.requests, self.aborts = 0, self.aborts + 1
        self.aborted.set()

    async def close(self) -> None:
        """See EngineControl."""

    def _alive(self) -> None:
        if not self.alive:
            raise EngineUnreachable("memory engine: nobody listens")
        if self.silent:
            self.silent -= 1
            raise EngineDead("memory engine: ReadError, and before that a ConnectError")


def _exists(folder: Path) -> bool:
    return folder.is_dir()


def _whole(folder: Path) -> bool:
    """Does every file go on behind its header?"""
    contents = [file.read_bytes() for file in folder.glob("*.safetensors")]
    return all(len(content) > 8 and len(content) > 8 + struct.unpack_from("<Q", content)[0] for content in contents)
