"""The fake of infra.engine_control: an engine that behaves as SGLang was seen to, death by truncated file included."""

from __future__ import annotations

import struct
from pathlib import Path

from turnlog.infra.engine import EngineDead, EngineRefused, EngineUnreachable, ModelInfo


class MemoryEngineControl:
    """One engine in memory. `paused`, `alive` and `loads` are for tests to look at; `silent`: of how many calls the
    connection is dropped."""

    def __init__(self, model: Path) -> None:
        self._info = ModelInfo("default", str(model))
        self.paused = False
        self.alive = True
        self.silent = 0
        self.loads: list[int] = []
        self.requests = 0
        """That run or wait."""
        self.aborts = 0

    def restart(self) -> None:
        """Come back with the model folder's own weights."""
        self._info = ModelInfo("default", self._info.model_path)
        self.paused, self.alive = False, True

    async def model_info(self) -> ModelInfo:
        self._alive()
        return self._info

    async def pause(self) -> None:
        self._alive()
        self.paused = True

    async def load(self, folder: Path, version: int, *, timeout_s: float) -> None:
        """See EngineControl. Like SGLang: no folder is refused, a short file kills, wrong tensors are not noticed."""
        self._alive()
        if not _exists(folder):
            raise EngineRefused(f"no folder {folder}")
        if not _whole(folder):
            self.alive = False
            self._alive()
        self.loads.append(version)
        await self.label(str(version))

    async def label(self, text: str) -> None:
        """See SGLangControl."""
        self._alive()
        self._info = ModelInfo(text, self._info.model_path)

    async def resume(self) -> None:
        self._alive()
        self.paused = False

    async def under_way(self) -> int:
        self._alive()
        return self.requests

    async def abort_all(self) -> None:
        self._alive()
        self.requests, self.aborts = 0, self.aborts + 1

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
