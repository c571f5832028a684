"""Backends by name: which there are, and how one is opened."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup
from turnlog.sandbox_settings import LOCAL, SandboxSettings
from turnlog.sandbox_workers.protocol import BackendUnavailable, Provider

log = logging.getLogger(__name__)

GROUP = EntryPointGroup.SANDBOX_BACKENDS
HERE = {
    "bubblewrap": "turnlog.sandbox_workers.backends.bubblewrap:Bubblewrap",
    "subprocess": "turnlog.sandbox_workers.backends.subprocess_backend:Subprocess",
}
"""Backends of this machine, which no package can replace; all others are found under GROUP."""


async def backend(name: str, settings: SandboxSettings, *, ca: Path | None = None) -> Provider:
    """Open one backend by its name. Raises BackendUnavailable."""
    provider: Provider = await load_backend(name).open(settings, ca=ca)
    return provider


def load_backend(name: str) -> Any:
    """Import and return the class of a backend. Raises BackendUnavailable."""
    points = find_backends()
    if name not in points:
        raise BackendUnavailable(f"there is no backend {name!r}; [sandbox] backends may name {', '.join(points)}")
    point = points[name]
    try:
        return point.load()
    except Exception as error:  # a module may raise anything while it is imported
        if isinstance(error, ModuleNotFoundError) and point.module.startswith("turnlog."):
            extra = "sandbox" if name in LOCAL else name
            raise BackendUnavailable(f"backend {name} needs {error.name}: pip install turnlog[{extra}]") from error
        raise BackendUnavailable(
            f"backend {name} ({point.value}, {GROUP}) does not import: {type(error).__name__}: {error}; fix or "
            "uninstall its package"
        ) from error


def find_backends() -> dict[str, EntryPoint]:
    """Return every backend by its name: those of this machine, then those offered by packages, including ours. Raises
    BackendUnavailable if two packages offer the same name."""
    return find_plugins(GROUP, "backend", BackendUnavailable, HERE)


async def local(settings: SandboxSettings, *, ca: Path | None = None) -> tuple[Provider, bool]:
    """Open the backend of this machine. The second value is True if it replaces bubblewrap, which a setting has to
    allow. Raises BackendUnavailable."""
    if settings.backend not in LOCAL:
        raise BackendUnavailable(
            f"[sandbox] backend = {settings.backend!r} is not one of {', '.join(LOCAL)}; set other backends in "
            "[sandbox] backends"
        )
    try:
        return await backend(settings.backend, settings, ca=ca), False
    except BackendUnavailable as error:
        if settings.backend == "subprocess" or not settings.allow_unisolated:
            raise
        log.warning("TOOLS RUN WITHOUT ISOLATION: subprocess and rlimits stand in for bubblewrap. %s", error)
        return await backend("subprocess", settings, ca=ca), True


async def find_isolation_failure(settings: SandboxSettings) -> str:
    """Return why tools would run as plain processes on this machine although the settings ask for bubblewrap; empty if
    bubblewrap works. Starts a sandbox to find out."""
    if settings.backend != "bubblewrap":
        return ""
    try:
        await (await backend(settings.backend, settings)).close()
    except BackendUnavailable as error:
        return str(error)
    return ""
