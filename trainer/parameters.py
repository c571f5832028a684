"""Numbers of parameters on a rank, counted from the family's tensors: exact for every family, without torch."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.families.tensors import EMBEDDING, EXPERT, LAYER, OUTPUT, VISION, Tensor

WIDE = 4
"""Bytes of a float32."""
WIDE_TENSORS = (".expert_bias", ".decay_log", ".self_attention.norm.weight", ".self_attention.norm")
"""Suffixes of the parameters that stay in float32 in a bfloat16 model."""
FROZEN_TENSORS = (".expert_bias",)
"""Suffixes of the parameters that never train."""


class MemoryOptions(Protocol):
    """The settings that memory depends on; those of [trainer] and LearnerOptions have them under these names."""

    @property
    def tensor_parallel(self) -> int:
        """See docs/settings.md."""
        ...

    @property
    def pipeline_parallel(self) -> int:
        """See docs/settings.md."""
        ...

    @property
    def context_parallel(self) -> int:
        """See docs/settings.md."""
        ...

    @property
    def expert_parallel(self) -> int:
        """See docs/settings.md."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """See docs/settings.md."""
        ...

    @property
    def recompute(self) -> str:
        """See docs/settings.md."""
        ...

    @property
    def recompute_modules(self) -> Sequence[str]:
        """See docs/settings.md."""
        ...

    @property
    def dtype(self) -> str:
        """See docs/settings.md."""
        ...

    @property
    def lora_rank(self) -> int:
        """See docs/settings.md."""
        ...

    @property
    def grad_reduce_in_fp32(self) -> bool:
        """See docs/settings.md."""
        ...

    @property
    def optimizer_cpu_offload(self) -> bool:
        """See docs/settings.md."""
        ...

    @property
    def optimizer_offload_fraction(self) -> float:
        """See docs/settings.md."""
        ...

    @property
    def fused(self) -> bool:
        """See docs/settings.md."""
        ...

    @property
    def use_precision_aware_optimizer(self) -> bool:
        """See docs/settings.md."""
        ...


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a rank that are shared among ranks and trained in the same way."""

    count: int
    """Number of parameters on the rank."""
    trained: int
    """Number of them that train."""
    expert: bool = False
    """Whether they are those of experts, whose optimizer is shared by other ranks than that of the rest."""
    wide: bool = False
    """Whether they are float32 in a bfloat16 model."""
    output: bool = False
    """Whether they are the output layer's."""
    largest: int = 0
    """Number of parameters of the largest trained tensor."""

    def weight_bytes(self, options: MemoryOptions) -> float:
        """Return the bytes of the weights."""
        return self.count * (WIDE if self.wide else width(options))

    def sharers(self, options: MemoryOptions, world_size: int) -> int:
        """Return the number of ranks that share the optimizer's state of these parameters."""
        own = options.expert_parallel if self.expert else options.tensor_parallel
        return max(1, world_size // (own * options.pipeline_parallel))

    def optimizer_bytes(self, options: MemoryOptions, world_size: int) -> float:
        """Return the bytes of Adam's moments, and of the float32 weights beside bfloat16 ones."""
        narrow = not self.wide and width(options) < WIDE
        each = 2 * WIDE + (WIDE if narrow else 0)
        if options.use_precision_aware_optimizer and not options.optimizer_cpu_offload:
            each = 2 * 2 + (2 if narrow else 0)  # moments in bfloat16, and the half of the weights that is not in them
        return self.trained * each / self.sharers(options, world_size)


def width(options: MemoryOptions) -> int:
    """Return the bytes of a value of a model's dtype."""
    return 2 if options.dtype == "bfloat16" else WIDE


def parameters(
    shape: ModelShape, options: MemoryOptions, stage: int, *, lora_rank: int | None = None
) -> list[Parameters]:
    """Return the parameters that a rank of a pipeline stage holds, numbered from 0. `lora_rank` replaces that of the
    options.
    """
    rank = options.lora_rank if lora_rank is None else lora_rank
    found = list[Parameters]()
    for group in tensor_groups(shape):
        ranks = options.expert_parallel if group.expert else options.tensor_parallel if group.cut is not None else 1
        copies = group.copies(shape, options.pipeline_parallel, stage)
        size = group.size
        if group.vocabulary:
            rows = -(-shape.vocabulary // options.tensor_parallel) * options.tensor_parallel
            size = size // shape.vocabulary * rows
        count = copies * size // ranks
        if not count:
            continue
        trained = 0 if rank or group.never_trains else count
        found.append(
            Parameters(
                count, trained, group.expert, group.wide, group.name == OUTPUT, trained and group.largest // ranks
            )
        )
        if rank and group.has_adapters:
            a, b = copies * rank * group.inputs, copies * rank * group.outputs
            a, b = (a // ranks if group.cut == 1 else a), (b // ranks if group.cut == 0 else b)
            found.append(Parameters(a + b, a + b, largest=max(a, b) // copies))
    return found


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one name and size, one or several in each of some layers, or one tensor outside of layers."""

    name: str
    """Name without the numbers of layer and expert."""
    layers: tuple[int, ...]
    """Layers that have one; empty outside of layers."""
    size: int
    """Number of parameters of one layer."""
    cut: int | None
    """Dimension along which tensor-parallel ranks cut it; None if each holds it whole."""
    inputs: int
    """Columns of the matrix; 0 if it is none."""
    outputs: int
    """Rows of the matrix; 0 if it is none."""
    largest: int
    """Number of parameters of one tensor of the model, in which the experts of all ranks are one."""

    @property
    def expert(self) -> bool:
        """Whether expert-parallel ranks share them."""
        return EXPERT in self.name

    @property
    def vocabulary(self) -> bool:
        """Whether there is a row for each token id."""
        return self.name in (EMBEDDING, OUTPUT)

    @property
    def wide(self) -> bool:
        """Whether they stay in float32."""
        return self.name.endswith(WIDE_TENSORS)

    @property
    def never_trains(self) -> bool:
        """Whether they never train."""
        return self.name.endswith(FROZEN_TENSORS) or self.name.startswith(VISION)

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are added to them."""
        return bool(self.layers and self.inputs and ".linear_" in self.name and not self.expert)

    def copies(self, shape: ModelShape, stages: int, stage: int) -> int:
        """Return how many layers' tensors a pipeline stage has."""
        if self.layers:
            return _layers_of_stage(self.layers, shape.layers, stages, stage)
        first, last = stage == 0, stage == stages - 1
        if self.name == EMBEDDING:
            return int(first or (last and shape.tied))
        return int(first if self.name.startswith(VISION) else last)


@functools.lru_cache(maxsize=4096)
def _layers_of_stage(layers: tuple[int, ...], total: int, stages: int, stage: int) -> int:
    return sum(layer * stages // total == stage for layer in layers)


@functools.lru_cache(maxsize=32)
def tensor_groups(shape: ModelShape) -> tuple[TensorGroup, ...]:
    """Return the model's tensors in groups. They are kept, because a search for a layout looks at them often."""
    layers: dict[tuple[str, tuple[int, ...]], dict[int, list[Tensor]]] = {}
    for tensor in family(shape.kind).tensors(shape):
        name, layer = _without_numbers(tensor.megatron)
        layers.setdefault((name, tensor.size), {}).setdefault(layer, []).append(tensor)
    return tuple(_make_group(name, found) for (name, _), found in layers.items())


def _make_group(name: str, layers: dict[int, list[Tensor]]) -> TensorGroup:
    of_layer = next(iter(layers.values()))
    first = of_layer[0]
    size = sum(math.prod(tensor.size) for tensor in of_layer)
    matrix = len(first.size) == 2
    inputs, outputs = (first.size[1], first.size[0]) if matrix else (0, 0)
    largest = size if EXPERT in name else math.prod(first.size)  # a layer's experts are stacked (models.mixture)
    numbered = tuple(sorted(layer for layer in layers if layer >= 0))
    return TensorGroup(name, numbered, size, first.cut, inputs, outputs, largest)


def _without_numbers(name: str) -> tuple[str, int]:
    """Return a name without the numbers of layer and expert, and the layer, -1 outside of layers."""
    if not name.startswith(LAYER):
        return name, -1
    layer, rest = name[len(LAYER) :].split(".", 1)
    if EXPERT in f".{rest}":
        head, _, tail = f".{rest}".partition(EXPERT)
        rest = f"{head}{EXPERT}{tail.split('.', 1)[1]}"
    return f".{rest}", int(layer)
