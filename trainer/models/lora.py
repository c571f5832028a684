"""Low-rank adapters: y = W x + alpha / rank B A x, with W frozen, A random and B 0 initially (LoRA, Hu et al. 2021).

The matrices of attention, of dense feed-forward layers and of shared experts have them; embedding, output layer, norms,
routers and the other experts are unchanged. Tensor-parallel ranks cut the factor on the side where they cut W, and each
holds the other one whole: its gradient is the same on all ranks, since what lies between the factors is summed over
them. q, k and v share an A, as gate and up do.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional

from turnlog.infra.tensors.adapters import factors_of
from turnlog.trainer import mcore
from turnlog.trainer.families.tensors import OUTPUT, Tensor
from turnlog.trainer.models.latent import WholeLinear

ADAPTERS = (".lora_a", ".lora_b")
"""Parameter suffixes of the factors [rank, in] and [out, rank]."""


class LoraColumnLinear(mcore.ColumnParallelLinear):  # type: ignore[misc]
    """Adapted matrix whose output dimension is cut among the ranks."""

    def __init__(self, *sizes: int, rank: int, scale: float, gated: bool = False, **named: Any) -> None:
        """`gated`: gate and up are stacked, which a checkpoint that loads on another layout must distinguish."""
        super().__init__(*sizes, **named)
        self.scale, self._gated = scale, gated
        self.lora_a = _factor(self.weight, rank, self.input_size)
        self.lora_b = _factor(self.weight, self.output_size_per_partition, rank)
        mcore.tensor_parallel.set_tensor_model_parallel_attributes(self.lora_b, True, 0, 1)
        self.lora_a.sequence_parallel = self.sequence_parallel

    def forward(self, input_: torch.Tensor, *arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, b, in] to [s, b, this rank's share of out], like Megatron's own."""
        output, bias = super().forward(input_, *arguments, **named)
        between = functional.linear(input_, self.lora_a)
        if self.sequence_parallel:
            between = mcore.gather_from_sequence_parallel_region(between)
        else:
            between = mcore.tensor_parallel.copy_to_tensor_model_parallel_region(between)
        return output + self.scale * functional.linear(between, self.lora_b), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the tensors for a checkpoint, and how ranks cut them."""
        axes = {"weight": 0, "bias": 0, "lora_b": 0}
        found = _shard_tensors(self, prefix, axes, sharded_offsets, metadata)
        if self._gated:
            name = f"{prefix}lora_b"
            found[name] = mcore.apply_swiglu_sharded_factory(found[name], sharded_offsets)
        return found


class LoraRowLinear(mcore.RowParallelLinear):  # type: ignore[misc]
    """Adapted matrix whose input dimension is cut among the ranks."""

    def __init__(self, *sizes: int, rank: int, scale: float, **named: Any) -> None:
        super().__init__(*sizes, **named)
        self.scale = scale
        self.lora_a = _factor(self.weight, rank, self.input_size_per_partition)
        self.lora_b = _factor(self.weight, self.output_size, rank)
        mcore.tensor_parallel.set_tensor_model_parallel_attributes(self.lora_a, True, 1, 1)
        self.lora_b.sequence_parallel = self.sequence_parallel

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map [s, b, this rank's share of in] to [s, b, out], like Megatron's own."""
        output, bias = super().forward(input_)
        between = functional.linear(input_, self.lora_a)
        if self.sequence_parallel:
            between = mcore.tensor_parallel.reduce_scatter_to_sequence_parallel_region(between)
        else:
            between = mcore.tensor_parallel.reduce_from_tensor_model_parallel_region(between)
        return output + self.scale * functional.linear(between, self.lora_b), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the tensors for a checkpoint, and how ranks cut them."""
        return _shard_tensors(self, prefix, {"weight": 1, "lora_a": 1}, sharded_offsets, metadata)


class LoraWholeLinear(WholeLinear):
    """Adapted matrix that every rank has whole."""

    def __init__(self, *sizes: int, rank: int, scale: float, **named: Any) -> None:
        super().__init__(*sizes, **named)
        self.scale = scale
        self.lora_a = _factor(self.weight, rank, self.input_size)
        self.lora_b = _factor(self.weight, self.output_size, rank)
        self.lora_a.sequence_parallel = self.lora_b.sequence_parallel = self.sequence_parallel

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Map [s, b, in] to [s, b, out]."""
        added = functional.linear(functional.linear(input_, self.lora_a), self.lora_b)
        return super().forward(input_) + self.scale * added


LoraLinear = LoraColumnLinear | LoraRowLinear | LoraWholeLinear


def _factor(weight: torch.Tensor, *size: int) -> Any:
    return torch.nn.Parameter(torch.zeros(size, dtype=weight.dtype, device=weight.device))


def _shard_tensors(module: Any, prefix: str, axes: dict[str, int], offsets: Any, metadata: Any) -> dict[str, Any]:
    found: dict[str, Any] = mcore.make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
    return found


def adapt(layer: Any, rank: int, alpha: float) -> None:
    """Add adapters to the matrices of a layer's spec."""
    own = {"rank": rank, "scale": alpha / rank}
    feed_forward = layer.submodules.mlp.submodules
    parts = [layer.submodules.self_attention.submodules, feed_forward]
    if hasattr(feed_forward, "shared_experts"):
        parts.append(feed_forward.shared_experts.submodules)
    for part in parts:
        for name, module in vars(part).items():
            if module is mcore.ColumnParallelLinear:
                arguments = {**own, "gated": True} if name == "linear_fc1" else own
                setattr(part, name, mcore.ModuleSpec(LoraColumnLinear, params=arguments))
            elif module is mcore.RowParallelLinear:
                setattr(part, name, mcore.ModuleSpec(LoraRowLinear, params=own))
            elif module is WholeLinear:
                setattr(part, name, mcore.ModuleSpec(LoraWholeLinear, params=own))


@torch.no_grad()
def start(model: Any, seed: int, global_name: Callable[[str], str]) -> None:
    """Freeze everything except the adapters and initialise each A, identically in every layout. Call before Megatron's
    DDP wraps the model.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith(ADAPTERS))
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            whole = first_factor(global_name(name), seed, len(module.lora_a), module.input_size)
            columns = module.lora_a.size(1)
            at = (
                mcore.parallel_state.get_tensor_model_parallel_rank() * columns
                if isinstance(module, LoraRowLinear)
                else 0
            )
            module.lora_a.copy_(whole[:, at : at + columns])
    if model.pre_process:
        # Recomputed layers compute a gradient only if their input has one.
        model.embedding.register_forward_hook(lambda _module, _arguments, output: output.requires_grad_())


def first_factor(name: str, seed: int, rank: int, columns: int) -> torch.Tensor:
    """Return the initial A, uniform within 1 / sqrt(columns). `name` is Megatron's name of the matrix, over all
    ranks.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    uniform = torch.rand(rank, columns, generator=generator)
    return (2.0 * uniform - 1.0) / math.sqrt(columns)


def adapted_modules(model: Any) -> dict[str, LoraLinear]:
    """Return the modules with adapters, by the name of their weight."""
    return {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def factors(model: Any, tensors: Iterable[Tensor], held: Container[str]) -> Iterator[Tensor]:
    """Yield the factors of a decoder's matrices with adapters, under Megatron's and PEFT's names; `held` has the
    parameters of all pipeline stages.
    """
    rank = len(next(iter(adapted_modules(model).values())).lora_a)
    for tensor in tensors:
        a, b = (tensor.megatron.removesuffix(".weight") + factor for factor in ADAPTERS)
        if a in held and tensor.megatron != OUTPUT:
            named = [(factors_of(name), size) for name, size in tensor.parts]
            yield Tensor(a, tuple((of_a, (rank, size[1])) for (of_a, _), size in named), joined="shared")
            yield dataclasses.replace(
                tensor, megatron=b, parts=tuple((of_b, (size[0], rank)) for (_, of_b), size in named)
            )


def merge_adapter(weight: torch.Tensor, module: LoraLinear | None) -> torch.Tensor:
    """Return the weight plus what its module's adapter adds."""
    return (
        weight if module is None else add_low_rank(weight, module.lora_a.detach(), module.lora_b.detach(), module.scale)
    )


def add_low_rank(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale B A, summed in float32, in W's dtype."""
    whole: torch.Tensor = (weight.float() + scale * b.float() @ a.float()).to(weight.dtype)
    return whole
