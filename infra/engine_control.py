"""Client of SGLang's control endpoints: what weights an engine serves, and how to swap them under live requests.

Errors are those of infra.engine: EngineDead (no answer; SGLang dies without a 5xx), EngineUnreachable where nobody
listens, and EngineRefused (4xx).
A swap is bracketed: pause(retract) moves running requests to the waiting queue and drops their KV, so that they go on
under the new weights; without it an update under load kills the engine or waits for every request. SGLang checks
almost nothing of what it loads, and a truncated file kills it: verify files first (consumers/engine_weights.py).

Source: sglang 0.5.21 `entrypoints/http_server.py` (model_info, pause_generation, update_weights_from_disk,
continue_generation).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from turnlog.infra.engine import EngineDead, EngineRefused, EngineUnreachable

QUICK_S = 10.0
"""For everything but the load itself."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine says of its model."""

    weight_version: str
    """The label of the last update; "default" before the first."""
    model_path: str

    @property
    def version(self) -> int:
        """The label as a weight version; -1 when it is none."""
        return int(self.weight_version) if self.weight_version.isdecimal() else -1


class EngineControl(Protocol):
    """Weights of one engine."""

    async def model_info(self) -> ModelInfo:
        """Answers while paused, too. Raises EngineDead, EngineRefused."""
        ...

    async def pause(self) -> None:
        """Retract running requests; new ones wait without an answer until `resume`."""
        ...

    async def load(self, folder: Path, version: int, *, timeout_s: float) -> None:
        """Load the folder's weights and label them. Raises EngineRefused with the old weights in place, EngineDead."""
        ...

    async def resume(self) -> None:
        """Serve; harmless when not paused."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class SGLangControl:
    """The real one."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(base_url=self.url, timeout=QUICK_S, trust_env=False)

    async def model_info(self) -> ModelInfo:
        info = await self._call("GET", "/model_info", None, QUICK_S)
        return ModelInfo(str(info.get("weight_version")), str(info.get("model_path")))

    async def pause(self) -> None:
        await self._call("POST", "/pause_generation", {"mode": "retract"}, QUICK_S)

    async def load(self, folder: Path, version: int, *, timeout_s: float) -> None:
        body = {"model_path": str(folder), "weight_version": str(version)}
        answer = await self._call("POST", "/update_weights_from_disk", body, timeout_s)
        if not answer.get("success"):
            raise EngineRefused(f"{self.url}: {answer.get('message')}")

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {}, QUICK_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: object, timeout_s: float) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout_s)
            if answer.status_code < httpx.codes.BAD_REQUEST:
                found: dict[str, Any] = answer.json()
                return found
        except httpx.ConnectError as error:
            raise EngineUnreachable(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        except (httpx.TransportError, ValueError) as error:
            raise EngineDead(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        text = f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}"
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise EngineDead(text)
        raise EngineRefused(text)
