"""Layouts: how ranks share a model, which of them fit the model and the memory of a device, and which one to take.

Nothing here imports torch, so that `turnlog trainer plan` answers at once.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnlog.settings import SettingsError, TrainerSettings
from turnlog.trainer import LayoutUnfit
from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.memory import RankMemory, rank_memory
from turnlog.trainer.parameters import MemoryOptions, tensor_groups


class LayoutOptions(MemoryOptions, Protocol):
    """The settings that decide whether ranks can share a model."""

    @property
    def overlap_grad_reduce(self) -> bool:
        """See docs/settings.md."""
        ...

    @property
    def moe_aux_loss_coeff(self) -> float:
        """See docs/settings.md."""
        ...


OFF: dict[str, tuple[str, ...]] = {"packing": ("auto", "off")}
"""Values of an option that leave a feature off which a family may not support; for all others, the default."""


def check_layout(shape: ModelShape, options: LayoutOptions) -> None:
    """Raises LayoutUnfit for a model that the ranks cannot share equally, or that Megatron cannot train in this
    layout.
    """
    tensor, pipeline, expert = options.tensor_parallel, options.pipeline_parallel, options.expert_parallel
    shares = [
        ("tensor_parallel", tensor, "attention heads", shape.heads),
        ("tensor_parallel", tensor, "key-value heads", shape.groups),
        ("tensor_parallel", tensor, "key heads of linear attention", shape.linear.key_heads if shape.linear else 0),
        ("pipeline_parallel", pipeline, "layers", shape.layers),
        ("expert_parallel", expert, "experts", shape.experts),
    ]
    if not shape.mixture or shape.mixture.dense_layers:
        shares.append(("tensor_parallel", tensor, "intermediate size", shape.ffn))
    if shape.mixture:
        shares.append(("tensor_parallel", tensor, "intermediate size of shared experts", shape.mixture.shared_ffn))
    for setting, ranks, what, count in shares:
        if count % ranks:
            raise LayoutUnfit(f"trainer.{setting} = {ranks} does not divide the model's {what} ({count})")
    for setting, reason in family(shape.kind).without.items():
        value, off = getattr(options, setting), OFF.get(setting, (getattr(TrainerSettings(), setting),))
        if value not in off:
            raise LayoutUnfit(f"trainer.{setting} = {value} is not supported for {shape.kind}, because {reason}")
    if pipeline > 1 and shape.vision and len(shape.vision.deep) > shape.layers // pipeline:
        raise LayoutUnfit(
            f"trainer.pipeline_parallel = {pipeline} is not supported for a {shape.kind} of {shape.layers} layers: the "
            f"first stage must have the {len(shape.vision.deep)} layers that deepstack_visual_indexes reaches"
        )
    if expert > 1 and not shape.experts:
        raise LayoutUnfit(
            f"trainer.expert_parallel = {expert} is not supported for a model without experts ({shape.kind})"
        )
    if options.moe_aux_loss_coeff and not shape.experts:
        raise LayoutUnfit(
            f"trainer.moe_aux_loss_coeff = {options.moe_aux_loss_coeff:g} is not supported for a model without experts "
            f"({shape.kind}): set it to 0"
        )
    _check_savings(shape, options)
    if shape.experts and tensor > 1 and not (options.sequence_parallel and expert > 1):
        # If no ranks share experts, Megatron does not sum their gradients over the tensor-parallel ranks.
        raise LayoutUnfit(
            "trainer.tensor_parallel of a mixture of experts needs trainer.sequence_parallel = true and "
            "trainer.expert_parallel above 1"
        )


def _check_savings(shape: ModelShape, options: LayoutOptions) -> None:
    """Raises LayoutUnfit for ways to save memory or time that Megatron does not have for this model."""
    if options.recompute == "selective":
        _check_recomputed(shape, options.recompute_modules)
    if options.optimizer_cpu_offload:
        wide = sorted({group.name for group in tensor_groups(shape) if group.wide and not group.never_trains})
        if options.dtype == "float32" or wide:
            what = (
                f"parameters of {shape.kind} that stay in float32 ({', '.join(wide)})"
                if wide
                else "trainer.dtype = float32"
            )
            raise LayoutUnfit(
                f"trainer.optimizer_cpu_offload is not supported for {what}, because Megatron offloads only the "
                'float32 copies of bfloat16 parameters: set trainer.dtype = "bfloat16", or '
                "trainer.optimizer_cpu_offload = false"
            )
    if options.overlap_grad_reduce and shape.vision:
        raise LayoutUnfit(
            f"trainer.overlap_grad_reduce is not supported for {shape.kind}, because ranks would wait for gradients of "
            "its vision tower in a microbatch without images: set it to false"
        )


def _check_recomputed(shape: ModelShape, modules: Sequence[str]) -> None:
    """Raises LayoutUnfit for modules that the model does not have, or that Megatron does not recompute in it."""
    layers = range(shape.layers)
    there = {
        "core_attn": not shape.latent and any(shape.layer_type(layer) != "linear_attention" for layer in layers),
        "mlp": not all(map(shape.is_mixture, layers)),
        "moe": any(map(shape.is_mixture, layers)),
        "shared_experts": bool(shape.mixture and shape.mixture.shared_ffn),
    }
    for module in modules:
        if not there.get(module, False):
            possible = ", ".join(name for name, found in there.items() if found) or "none of them"
            raise LayoutUnfit(
                f"trainer.recompute_modules has {module}, which recomputes nothing in {shape.kind}; it may have: "
                f"{possible}"
            )


def check_options(trainer: TrainerSettings, *, on_device: bool) -> None:
    """Check settings that need each other, a GPU or a package; `on_device`: whether ranks have a GPU. Raises
    SettingsError.
    """
    if trainer.recompute == "selective" and not trainer.recompute_modules:
        raise SettingsError(
            'trainer.recompute = "selective" needs trainer.recompute_modules: name at least one, e.g. mlp or moe'
        )
    if trainer.overlap_param_gather and not trainer.overlap_grad_reduce:
        raise SettingsError("trainer.overlap_param_gather needs trainer.overlap_grad_reduce = true")
    if trainer.optimizer_cpu_offload and not on_device:
        raise SettingsError(
            "trainer.optimizer_cpu_offload needs a GPU: without one, the optimizer's state is in host memory already; "
            "set it to false"
        )
    if not trainer.use_precision_aware_optimizer:
        return
    if trainer.optimizer_cpu_offload:
        raise SettingsError(
            "trainer.use_precision_aware_optimizer and trainer.optimizer_cpu_offload exclude each other, because the "
            "CPU's Adam has float32 moments: set one of them to false"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise SettingsError(
            "trainer.use_precision_aware_optimizer needs the Adam of TransformerEngine 2.1 or later: "
            "pip install transformer_engine[pytorch]"
        )
    if trainer.dtype == "float32" or not on_device:
        raise SettingsError('trainer.use_precision_aware_optimizer needs a GPU and trainer.dtype = "bfloat16"')


GB = 1e9
USABLE = 0.95
"""Share of a device's memory that a plan fills; the rest is for CUDA's context, communication buffers and gaps between
allocations. An estimate.
"""
SLOWER = {
    "tensor_parallel": 0.10,
    "context_parallel": 0.15,
    "pipeline_parallel": 0.12,
    "expert_parallel": 0.04,
    "selective": 0.15,
    "full": 0.33,
    "optimizer_cpu_offload": 0.5,
}
"""Share by which a step takes longer: for each doubling of the ranks that share something, and for other settings.
Nothing here was measured; the numbers only put layouts in order. Recomputing all layers adds a third of a step's
arithmetic (a second forward pass beside one forward and one backward pass, which costs two).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModels:
    """Models that ranks train and compute besides the policy, and the tokens of their largest microbatch."""

    tokens: int
    critic: bool = False
    reference: bool = False
    teacher: ModelShape | None = None

    def memory(self, shape: ModelShape, options: MemoryOptions, world_size: int) -> RankMemory:
        """Return the memory of the rank that takes the most."""
        return rank_memory(
            shape,
            options,
            tokens=self.tokens,
            world_size=world_size,
            critic=self.critic,
            reference=self.reference,
            teacher=self.teacher,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A layout that the model can take."""

    changes: Mapping[str, Any]
    """[trainer] settings that differ from those with which the search began."""
    memory: RankMemory
    """Memory of the rank that takes the most."""
    slowdown: float
    """Estimated time of a step, where 1 is that of a rank alone with everything in its memory."""

    def fits(self, device_bytes: float) -> bool:
        """Return whether a device of this memory holds it and leaves some free (USABLE)."""
        return self.memory.total <= USABLE * device_bytes


def find_layouts(
    shape: ModelShape, options: Any, models: TrainedModels, *, world_size: int, node_size: int
) -> list[LayoutChoice]:
    """Return the layouts of `world_size` devices, `node_size` on a node, the fastest by estimate first.

    `options` are the settings of [trainer] or LearnerOptions; the search changes how ranks share the model, recompute
    and optimizer_cpu_offload. Ranks that share tensors or experts are on one node.
    """
    found = []
    for changes, slowdown in _changes(shape, world_size, node_size):
        changed = dataclasses.replace(options, **changes)
        try:
            check_layout(shape, changed)
        except LayoutUnfit:
            continue
        memory = models.memory(shape, changed, world_size)
        own = {name: value for name, value in changes.items() if value != getattr(options, name)}
        found.append(LayoutChoice(changes=own, memory=memory, slowdown=slowdown))
    return sorted(found, key=lambda one: (one.slowdown, one.memory.total))


def _changes(shape: ModelShape, world_size: int, node_size: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield settings of layouts that this many ranks could take if the model allows it, and the estimated time of a
    step.
    """
    layers = range(shape.layers)
    modules = tuple(
        name
        for name, there in (
            ("mlp", not all(map(shape.is_mixture, layers))),
            ("moe", any(map(shape.is_mixture, layers))),
        )
        if there
    )
    powers = [2**power for power in range(world_size.bit_length())]
    shared = [one for one in powers if one <= node_size]
    experts = shared if shape.experts else [1]
    for tensor, pipeline, context, expert in itertools.product(shared, powers, powers[:4], experts):
        if world_size % (tensor * pipeline * context) or world_size % (expert * pipeline):
            continue
        ranks = {
            "tensor_parallel": tensor,
            "pipeline_parallel": pipeline,
            "context_parallel": context,
            "expert_parallel": expert,
        }
        shares = sum(SLOWER[name] * math.log2(count) for name, count in ranks.items())
        for recompute, offload in itertools.product(("none", "selective", "full"), (False, True)):
            yield (
                {
                    **ranks,
                    "sequence_parallel": tensor > 1,
                    "recompute": recompute,
                    "recompute_modules": modules if recompute == "selective" else ("core_attn",),
                    "optimizer_cpu_offload": offload,
                },
                (1 + shares) * (1 + SLOWER.get(recompute, 0.0)) + offload * SLOWER["optimizer_cpu_offload"],
            )


def check_memory(
    shape: ModelShape, options: Any, models: TrainedModels, *, world_size: int, node_size: int, device_bytes: float
) -> None:
    """Check that a device of `device_bytes` holds what its rank needs. Raises SettingsError with settings that fit."""
    needed = models.memory(shape, options, world_size)
    if needed.total <= device_bytes:
        return
    found = find_layouts(shape, options, models, world_size=world_size, node_size=node_size)
    fitting = next((one for one in found if one.fits(device_bytes)), None)
    way_out = (
        "no layout of this many ranks fits: add ranks, lower trainer.microbatch_tokens, or train adapters "
        "(trainer.lora_rank)"
        if fitting is None
        else "this fits: " + ", ".join(f"trainer.{name} = {toml(value)}" for name, value in fitting.changes.items())
    )
    raise SettingsError(
        f"the trainer does not fit: a rank needs about {needed.total / GB:.1f} GB and its device has "
        f"{device_bytes / GB:.1f} GB (weights "
        f"{needed.weights / GB:.1f}, gradients {needed.gradients / GB:.1f}, optimizer {needed.optimizer / GB:.1f}, "
        f"logits {needed.logits / GB:.1f}, activations of {models.tokens:,} tokens {needed.activations / GB:.1f}); "
        f"{way_out}. `turnlog trainer plan` compares layouts, and trainer.device_memory_gb replaces the device's memory"
    )


def toml(value: Any) -> str:
    """Return a setting's value as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
