"""Choice of a loader's engine, update mode and transport, from settings and environment."""

from __future__ import annotations

import importlib.util
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from turnlog.consumers.loader import NoSuchEngine
from turnlog.infra.embedded import NotInstalled
from turnlog.infra.engine import DiskWeightTransport, Transport
from turnlog.processors.core.experts import routing_of_model
from turnlog.settings import LoaderSettings, Settings


@dataclass(frozen=True, slots=True)
class NamedEngine:
    """The engine whose weights a loader manages."""

    id: str
    url: str
    """Address at which the loader and every gateway reach the engine."""
    alone: bool
    """True if the engine runs beside its loader and stops together with it; False if another process supervises it."""


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
        return NamedEngine(watched or env.get("TURNLOG_INSTANCE") or socket.gethostname(), url, alone=not watched)
    urls, number = settings.engine.urls, index or "0"
    if not (number.isascii() and number.isdecimal() and int(number) < len(urls)):
        raise NoSuchEngine(
            f"there is no engine {number}: [engine] urls and endpoints.json name {len(urls)}; TURNLOG_ENGINE_INDEX "
            "chooses one of them, TURNLOG_ENGINE_URL names one that is in neither"
        )
    return NamedEngine(f"engine-{int(number)}", urls[int(number)], alone=False)


def update_of(settings: Settings) -> str:
    """Return the update mode, retract | in_place | abort: the value of [engine] update, or what "auto" selects for the
    model in [model] path."""
    if settings.engine.update != "auto":
        return settings.engine.update
    config = json.loads((Path(settings.model.path) / "config.json").read_bytes())
    recorded = settings.gateway.routed_experts != "off" and min(routing_of_model(config)) > 0
    return "abort" if recorded else "retract"


def transport_of(settings: LoaderSettings) -> Transport:
    """Return the transport that [loader] transport names. Raises NotInstalled if it needs torch, which is missing."""
    if settings.transport == "disk":
        return DiskWeightTransport()
    if importlib.util.find_spec("torch") is None:
        raise NotInstalled(
            f'[loader] transport is "{settings.transport}", and torch is not installed: install the `train` extra (or '
            'run the loader from the image of the trainer), or set "disk"'
        )
    from turnlog.infra.tensors.transports import Broadcast, SharedMemory  # torch takes seconds to import

    return SharedMemory() if settings.transport == "tensor" else Broadcast(settings.group_backend)
