"""Records of weight versions (integers, +1 per publication, never reused) and of the status of engines.

Weight loaders write the engine records, each of which repeats url, state and version. Requests to engines are
EngineRequested, on a topic of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from turnlog.schemas.types import BlobRef, EngineEvent, RunEvent


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of an exported model folder."""

    name: str
    """Name of the file in the model folder."""
    blob: BlobRef
    """Contents of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersionPublished(RunEvent):
    """A set of weights that engines can load. A version that training ranks send to engines directly has two records:
    the first announces it, the second names the files of its durable copy, if one is written."""

    version: int
    """0 for the initial weights, then +1 with each publication, never reused."""
    step: int
    """Number of optimizer steps before these weights."""
    batch_index: int
    """Last batch trained; -1 for the initial weights."""
    incarnation: int
    """Generation of the trainer: 0, then higher with each start, by more than 1 if a trainer died before it published.
    Each generation publishes the weights that it starts from."""
    kind: str
    """full, delta or adapter."""
    base_version: int | None
    """Version that a delta changes, or the full version that an adapter rests on; null for full."""
    files: tuple[WeightFile, ...]
    """Files of a Hugging Face model folder. In a delta, NAME.delta holds the changes to the base's file NAME. An
    adapter has the files that PEFT writes. Empty while the version is only announced."""
    dtype: str
    """Data type of the tensors; several types are joined by +."""
    checksums: dict[str, str]
    """Tensor name -> "HEX:SHAPE": sha256 of its little-endian bytes in row order, and its shape in the form 2x3 (empty
    for a scalar). Empty while the version is only announced."""
    checkpoint: str | None
    """Path or URI of the checkpoint that holds the same weights, if one was written."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Tensor name -> data type, if `dtype` names several."""
    unchanged: dict[str, float] = field(default_factory=dict)
    """Share of the values that equal those of the previous version bit for bit: "published" compares them as published,
    "bfloat16" compares float32 values rounded to bfloat16. Empty for the first weights of a generation of the trainer,
    and without delta_chain."""
    state: str = "durable"
    """announced: engines get the weights from the training ranks alone, and no file holds them yet. durable: `files`
    hold them."""
    transport: str = "store"
    """store: engines load the files. direct: training ranks send the tensors to the engines
    (WeightTransferBegun)."""
    digests: dict[str, str] = field(default_factory=dict)
    """Tensor name -> "HEX:SHAPE": 64-bit digest of its bytes (infra/tensors/digests.py), which engines compute after
    they have loaded it, and its shape. Empty for adapters, and in the second record of a version."""
    started_from: str = ""
    """Model folder that holds the weights before the first optimizer step; empty for weights after one, and in older
    records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransferBegun(RunEvent):
    """Training ranks are ready to send an announced version to these engines. The last record of a version counts."""

    version: int
    incarnation: int
    """Generation of the trainer, as in WeightVersionPublished."""
    attempt: int
    """0, then +1 each time the transfer begins again without the engines at which it failed."""
    group: str
    """Name of the process groups. Engines that have joined groups of this name use them again."""
    address: str
    """Host at which the group members meet (a TCPStore of torch), as engines reach it."""
    port: int
    """Port at that host."""
    world_size: int
    """Members of each group: one training rank, which has rank 0, and all ranks of the engines."""
    senders: int
    """Number of groups, one for each training rank that sends."""
    members: dict[str, int]
    """Engine -> rank of its first rank in each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequested(RunEvent):
    """An engine is to serve, or to leave; of one engine the last request counts."""

    engine_id: str
    url: str
    """URL of the engine; empty for an engine that the run's supervisor starts itself."""
    wanted: str
    """serving or gone."""
    by: str
    """settings, operator or autoscale."""
    reason: str
    """Reason as text; empty if none was given."""
    kind: str = ""
    """Kind of the engine that is to serve, sglang or vllm; empty if the settings tell it by the engine's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRegistered(EngineEvent):
    """An engine joined with the weights that it holds."""

    state: str
    """starting, serving, released, draining, silent or gone."""
    version: int
    """Weight version served; -1 before the first."""
    model: str
    """Name of the model that it serves."""
    base_version: int | None = None
    """Version of the engine's own weights, as in EngineWeightsLoaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeightsAwaited(EngineEvent):
    """The loader has read the announcement of a version, or has seen its transfer fail, and the engine can take part in
    the next attempt."""

    state: str
    """State of the engine: starting, serving or released."""
    version: int
    """Weight version that is still served."""
    awaited_version: int
    """Weight version that was announced."""
    attempt: int
    """Attempt in which the engine can take part."""
    ranks: int
    """Number of the engine's ranks that join a transfer; 0 if the engine cannot take weights from training ranks and
    waits for the durable copy."""
    cause: str = ""
    """Why the last attempt failed, or why the engine waits for the durable copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeightsLoaded(EngineEvent):
    """The acknowledgement of a weight version."""

    state: str
    """State of the engine: starting, serving or released."""
    version: int
    """Weight version served from here on."""
    superseded: tuple[int, ...]
    """Versions that were skipped because this newer one was already available."""
    seconds: dict[str, float]
    """Duration by phase: fetch, verify, pause, load, check, resume; for an adapter, which pauses nothing: fetch,
    verify, load, check; for weights sent by training ranks: join, pause, load, check, resume."""
    base_version: int | None = None
    """Version of the engine's own weights if `version` is an adapter. A request selects the adapter by its name
    (lora_path, the decimal digits of `version`). null: the engine's own weights are `version`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWeightsRefused(EngineEvent):
    """The old weights go on serving."""

    state: str
    """State of the engine: starting, serving or released."""
    version: int
    """Weight version that is still served."""
    refused_version: int
    """Weight version that was not loaded."""
    cause: str
    """Class name of the error."""
    message: str
    """Error message: what, where, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDraining(EngineEvent):
    """No turns, please: the engine is about to leave (draining), has given its memory back until the next version
    (released), or does not answer for now (silent)."""

    state: str
    """draining, released or silent."""
    version: int
    published: int = -1
    """Newest version on the log when the loader of a released engine saw that the device is lent to the trainer; the
    engine stays released until a later version is published. -1 for other states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGone(EngineEvent):
    """The engine died or left."""

    state: str
    """Always gone."""
    version: int
    """Weight version served last."""
    cause: str
    """Cause, as text."""
