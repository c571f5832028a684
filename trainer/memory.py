"""Memory of a rank at the peak of a training step, from the shape of its model and the layout, without torch.

Weights, gradients and the optimizer's state are exact (`parameters`), activations are counted module by module
(`activations`). Where a family's layers are neither counted nor near to those that are, its activations are an
approximation, which `approximations` names. tests/unit/trainer/test_memory.py compares all of it with torch's own
record of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnlog.trainer.activations import Kernels, activation_bytes
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.parameters import WIDE, MemoryOptions, Parameters, parameters, width


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the peak of a training step."""

    weights: float
    gradients: float
    optimizer: float
    logits: float
    """Tensors of the loss beside activations: chunks of logits, and the gradient of the output layer. 0 if the peak is
    not at the loss.
    """
    activations: float
    """Results that the layers keep for the gradient, and the largest intermediate results of their backward pass."""
    host: float = 0.0
    """Bytes in host memory: the offloaded part of the optimizer, and frozen weights of the reference."""

    @property
    def resident(self) -> float:
        """Bytes on the device that are taken between steps, too."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Bytes on the device at the peak."""
        return self.resident + self.logits + self.activations


def rank_memory(
    shape: ModelShape,
    options: MemoryOptions,
    *,
    tokens: int,
    world_size: int,
    scored: int | None = None,
    critic: bool = False,
    reference: bool = False,
    teacher: ModelShape | None = None,
    device: str = "cuda",
) -> RankMemory:
    """Return the memory of the rank that takes the most.

    `tokens` is the number of tokens of the largest microbatch, `scored` of those whose log-probs are computed (None:
    all). `world_size` is the number of ranks, `device` the kind of device, cuda or cpu.
    `critic` adds a second model with its optimizer, `reference` frozen weights in host memory. `teacher` is a frozen
    model that is on the device while it computes log-probs.
    """
    stages = range(options.pipeline_parallel)
    found = [
        _stage_memory(shape, options, stage, tokens, world_size, tokens if scored is None else scored, critic, device)
        for stage in stages
    ]
    most = max(found, key=lambda one: one.total)
    if teacher is not None:
        frozen = max(
            _total(parameters(teacher, options, stage, lora_rank=0), lambda one: one.weight_bytes(options))
            for stage in stages
        )
        most = dataclasses.replace(most, activations=max(most.activations, frozen), host=most.host + frozen)
    # While the reference computes, the policy's own weights wait beside it.
    return dataclasses.replace(most, host=most.host + 2 * most.weights) if reference else most


def predicted_peak(
    shape: ModelShape, options: MemoryOptions, tokens: int, *, world_size: int = 1, device: str = "cuda"
) -> int:
    """Return the bytes that torch should have allocated at the peak of a training step of the policy alone.

    Compare with torch.cuda.max_memory_allocated; `tokens` is the number of tokens of the largest microbatch.
    """
    return round(rank_memory(shape, options, tokens=tokens, world_size=world_size, device=device).total)


def _stage_memory(
    shape: ModelShape, options: MemoryOptions, stage: int, tokens: int, world_size: int, scored: int, critic: bool,
    device: str,
) -> RankMemory:  # fmt: skip
    """Return the memory of a rank of a pipeline stage."""
    last = stage == options.pipeline_parallel - 1
    held = parameters(shape, options, stage)
    if critic:
        held = [*held, *(one for one in held if not one.output)]
    weights = _total(held, lambda one: one.weight_bytes(options))
    gradients = _total(held, lambda one: one.trained * (WIDE if options.grad_reduce_in_fp32 else width(options)))
    optimizer = _total(held, lambda one: one.optimizer_bytes(options, world_size))
    offloaded = options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0
    layers, loss = activation_bytes(shape, options, stage, tokens, scored if last else 0, Kernels.of(device, options))
    adam = _step_bytes(held, options, world_size, device)
    summed = gradients if device == "cpu" else 0.0  # gloo sums a copy of them
    backward, at_loss = layers.kept + layers.backward, layers.kept + loss
    peak = max(backward, at_loss, adam, summed)
    logits = min(loss, peak - layers.kept) if peak == at_loss else 0.0
    return RankMemory(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer * (1.0 - offloaded),
        logits=logits,
        activations=peak - logits,
        host=offloaded * _total(held, lambda one: one.trained * (3 * WIDE + WIDE) / one.sharers(options, world_size)),
    )


def _step_bytes(held: Sequence[Parameters], options: MemoryOptions, world_size: int, device: str) -> float:
    """Return the bytes of an optimizer step's intermediate results, while no activations are kept: Adam's for one
    tensor, unless one kernel updates all, and float32 copies of gradients in another dtype.
    """
    copied = 0.0
    if not options.grad_reduce_in_fp32 and width(options) < WIDE:
        copied = _total(held, lambda one: one.trained * WIDE / one.sharers(options, world_size))
    if device == "cuda" and options.fused and not options.optimizer_cpu_offload:
        return copied
    return copied + max((2 * WIDE * one.largest / one.sharers(options, world_size) for one in held), default=0.0)


def _total(held: Sequence[Parameters], each: Callable[[Parameters], float]) -> float:
    return float(sum(map(each, held)))
