"""What weight loaders say of their engine; every record repeats url, state and version."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRegistered:
    """An engine joined with the weights that it holds."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    state: str
    """starting | serving | draining | gone"""
    version: int
    """Weight version served; -1 before the first."""
    model: str
    """Name of the model that it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeightsLoaded:
    """The acknowledgement of a weight version."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    state: str
    version: int
    """Served from here on."""
    superseded: tuple[int, ...]
    """Versions that were skipped because this newer one was there already."""
    seconds: dict[str, float]
    """By phase: fetch, verify, pause, load, check, resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeightsRefused:
    """The old weights go on serving."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    state: str
    version: int
    """Still served."""
    refused_version: int
    """Which was not loaded."""
    cause: str
    """Class name of the error."""
    message: str
    """What, where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDraining:
    """No new sessions, please."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    state: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGone:
    """The engine died or left."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    state: str
    version: int
    """Served last."""
    cause: str
    """In words."""
