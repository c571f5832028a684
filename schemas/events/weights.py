"""Weight versions (integers, +1 per published weights, never reused), and what weight loaders say of their engine: each
such record repeats url, state and version. What is asked of engines is EngineRequested, on a topic of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnlog.schemas.types import BlobRef


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of an exported model folder."""

    name: str
    """In the model folder."""
    blob: BlobRef
    """Its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersionPublished:
    """A Hugging Face model folder that engines can load."""

    event_id: str
    run_id: str
    version: int
    """0 for the initial weights, then +1 with each publication, never reused."""
    step: int
    """Optimizer steps behind these weights."""
    batch_index: int
    """Last batch trained; -1 for the initial weights."""
    incarnation: int
    """Of the trainer: 0, then higher with each start, by more than 1 where one died before it published; each publishes
    the weights that it starts from."""
    kind: str
    """full | delta | adapter"""
    base_version: int | None
    """Of a delta: the version that its tensors are told apart from; of an adapter: the full one that it rests on; null
    for full."""
    files: tuple[WeightFile, ...]
    """The folder; of a delta a file NAME.delta stands for what it makes of the base's file NAME; of an adapter as PEFT
    writes it."""
    dtype: str
    """Of the tensors; several joined by +."""
    checksums: dict[str, str]
    """Tensor name -> "HEX:SHAPE": sha256 of its little-endian bytes in row order, and its shape as 2x3 (empty of a
    scalar)."""
    checkpoint: str | None
    """Path or URI of the checkpoint that holds the same weights, if one was written."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Tensor name -> its type, where `dtype` names several."""
    unchanged: dict[str, float] = field(default_factory=dict)
    """Share of the values that are, bit for bit, those of the version before: "published" as they are, "bfloat16" of
    float32 values were they rounded to that. Empty of the first weights of an incarnation, and without delta_chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequested:
    """An engine is to serve, or to leave; of one engine the last request counts."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    """Where it runs; empty of one that the run's supervisor starts itself."""
    wanted: str
    """serving | gone"""
    by: str
    """settings | operator | autoscale"""
    reason: str
    """In words; empty of who gave none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRegistered:
    """An engine joined with the weights that it holds."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    state: str
    """starting | serving | released | draining | silent | gone"""
    version: int
    """Weight version served; -1 before the first."""
    model: str
    """Name of the model that it serves."""
    base_version: int | None = None
    """As in EngineWeightsLoaded."""


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
    """By phase: fetch, verify, pause, load, check, resume; of an adapter, which pauses nothing: fetch, verify, load,
    check."""
    base_version: int | None = None
    """Of the engine's own weights, where `version` is an adapter: a request names it (lora_path, its decimal digits)
    and is answered by it. null: they are `version`."""


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
    """No turns, please: the engine is about to leave (draining), has given its memory back until the next version
    (released), or does not answer for now (silent)."""

    event_id: str
    run_id: str
    engine_id: str
    url: str
    state: str
    version: int
    published: int = -1
    """Of a released one: the newest version on the log when its loader saw that the device is the trainer's; it stays
    so until a later one is published."""


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
