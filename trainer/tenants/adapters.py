"""The adapters of tenants, in the memory of a rank, and the network that runs with any one of them.

The network's adapters have `max_rank`. An adapter of a smaller rank has zeros in the remaining rows of each A and
columns of each B. Their gradients are products with each other's zeros, and Adam leaves a 0 with a gradient of 0 as it
is, so the result is that of the smaller rank. So it is with the matrices that a tenant does not train.

Each rank holds an adapter's numbers as one float32 vector, in the order of the model's parameters; so do its gradients
and moments. The numbers of a rank's own share of the model alone: data-parallel ranks hold the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from turnlog.trainer import mcore
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.models.lora import ADAPTERS, LoraLinear, LoraRowLinear, first_factor
from turnlog.trainer.models.output import AdaptedOutput
from turnlog.trainer.network import GradientNetwork
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.weights import global_name

OUTPUT_LAYER = "output_layer"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The parts of the model that a tenant trains."""

    rank: int
    seed: int
    """Seed of the initial A of each matrix."""
    attention: bool = True
    """Whether the matrices of attention have adapters."""
    mlp: bool = True
    """Whether those of dense feed-forward layers and shared experts have."""
    unembedding: bool = False
    """Whether the output layer has one."""

    def trains(self, name: str) -> bool:
        """Return whether a matrix has an adapter, by Megatron's name of its module."""
        if name == OUTPUT_LAYER:
            return self.unembedding
        return self.mlp if ".mlp." in name else self.attention


@dataclass(slots=True, eq=False)
class TenantState:
    """An adapter in training. A vector is [P] float32 on the rank's device; it is replaced, never changed in place."""

    spec: AdapterSpec
    weights: torch.Tensor
    gradients: torch.Tensor | None = None
    """Sum over the calls since the last step; None if there were none."""
    first_moment: torch.Tensor | None = None
    """Adam's moments; None before the first step."""
    second_moment: torch.Tensor | None = None
    steps: int = 0
    """Number of Adam's steps."""

    def vectors(self) -> dict[str, torch.Tensor]:
        """Return the vectors that there are, by name."""
        found = {name: getattr(self, name) for name in VECTORS}
        return {name: vector for name, vector in found.items() if vector is not None}


VECTORS = ("weights", "gradients", "first_moment", "second_moment")
OPTIMIZER_VECTORS = VECTORS[2:]


@dataclass(frozen=True, slots=True)
class AdapterParameter:
    """A factor of a matrix, and its place in the vectors."""

    name: str
    """Megatron's name of the parameter, with layers counted over all ranks."""
    module: str
    """The same of its module."""
    parameter: torch.nn.Parameter
    begin: int
    copied: bool
    """Whether the other tensor-parallel ranks hold the same numbers."""

    def view(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the parameter's numbers in a vector."""
        return vector[self.begin : self.begin + self.parameter.numel()].view(self.parameter.shape)

    def trim(self, values: torch.Tensor, rank: int) -> torch.Tensor:
        """Return the view of an adapter's numbers of this rank, without the zeros."""
        return values[:rank] if self.name.endswith(ADAPTERS[0]) else values[:, :rank]


class AdapterNetwork(GradientNetwork):
    """The base model with one set of adapters, into which any tenant's numbers are copied."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, torch.Tensor], options: LearnerOptions) -> None:
        """`options.lora_rank` is the largest rank of an adapter. Raises WeightsMismatch."""
        super().__init__(shape, weights, options)
        self._alpha, self.max_rank = options.lora_alpha, options.lora_rank
        whole, begin = global_name(self.model, shape), 0
        self.modules: dict[str, Any] = {
            whole(name): module
            for name, module in self.model.named_modules()
            if isinstance(module, (*LoraLinear.__args__, AdaptedOutput))
        }
        self.parameters: list[AdapterParameter] = []
        for name, parameter in self.model.named_parameters():
            if name.endswith(ADAPTERS):
                copied = not getattr(parameter, "tensor_model_parallel", False)
                module = whole(name.removesuffix(ADAPTERS[0]).removesuffix(ADAPTERS[1]))
                self.parameters.append(AdapterParameter(whole(name), module, parameter, begin, copied))
                begin += parameter.numel()
        self.size = begin
        """Length of the vectors."""
        self._placed: torch.Tensor | None = None

    def _add_parameters(self) -> None:
        AdaptedOutput.add_to(self.model, self._options.lora_rank)

    def start_weights(self, spec: AdapterSpec) -> torch.Tensor:
        """Return the initial numbers of an adapter: each A random, each B 0; the same in every layout."""
        vector = torch.zeros(self.size)
        for one in self.trained_parameters(spec):
            if one.name.endswith(ADAPTERS[0]):
                module, columns = self.modules[one.module], one.parameter.size(1)
                whole = first_factor(one.module, spec.seed, spec.rank, module.input_size)
                at = mcore.parallel_state.get_tensor_model_parallel_rank() * columns
                at = at if isinstance(module, LoraRowLinear) else 0
                one.trim(one.view(vector), spec.rank).copy_(whole[:, at : at + columns])
        return vector.to(mcore.DEVICE)

    def trained_parameters(self, spec: AdapterSpec) -> Iterator[AdapterParameter]:
        """Yield the parameters that a tenant trains."""
        return (one for one in self.parameters if spec.trains(one.module))

    @torch.no_grad()
    def place(self, tenant: TenantState) -> None:
        """Copy a tenant's numbers into the model, unless they are there."""
        if self._placed is tenant.weights:
            return
        self._placed = None
        into: list[torch.Tensor] = [one.parameter for one in self.parameters]
        torch._foreach_copy_(into, [one.view(tenant.weights) for one in self.parameters])
        for name, module in self.modules.items():
            module.scale = self._alpha / tenant.spec.rank if tenant.spec.trains(name) else 0.0
        self._placed = tenant.weights

    def summed_gradients(self) -> torch.Tensor:
        """Return the gradients of the last pass [P] float32."""
        found = torch.empty(self.size, device=mcore.DEVICE)
        gradients = [one.parameter.main_grad for one in self.parameters]  # type: ignore[attr-defined]  # by Megatron's DDP
        if gradients:
            torch._foreach_copy_([one.view(found) for one in self.parameters], gradients)
        return found

    def norm(self, vector: torch.Tensor) -> float:
        """Return the norm of a whole vector over all ranks. Collective."""
        state = mcore.parallel_state
        first = state.get_tensor_model_parallel_rank() == 0
        counted = [one.view(vector) for one in self.parameters if first or not one.copied]
        norms = torch.stack(torch._foreach_norm(counted)) if counted else torch.zeros(1, device=mcore.DEVICE)
        total = norms.double().square().sum()
        for group, ranks in (
            (state.get_tensor_model_parallel_group(), state.get_tensor_model_parallel_world_size()),
            (state.get_pipeline_model_parallel_group(), state.get_pipeline_model_parallel_world_size()),
        ):
            if ranks > 1:
                dist.all_reduce(total, group=group)
        return math.sqrt(float(total))
