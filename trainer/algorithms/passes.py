"""Utilities for forward passes on Megatron's ranks: frozen weights in place of the trained ones, columns gathered from
all ranks, and the entropy with a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from turnlog.trainer import mcore


class FrozenWeights:
    """A snapshot of this rank's part of a model's weights on the CPU; it takes as many bytes as the rank's
    parameters.
    """

    def __init__(self, model: Any) -> None:
        self._kept = _copies(model)

    @contextmanager
    @torch.no_grad()
    def in_place(self, model: Any) -> Iterator[None]:
        """Put these weights into `model` while the block runs, then restore its own bit for bit.

        The model's own weights wait on the CPU meanwhile. The optimizer's state is not touched.
        """
        own = _copies(model)
        try:
            _put(model, self._kept)
            yield
        finally:
            _put(model, own)


def _copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}


@torch.no_grad()
def _put(model: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def over_ranks(column: torch.Tensor) -> torch.Tensor:
    """Gather a column on every rank's CPU, whole. Collective.

    On input each entry is set on one data-parallel rank of the last pipeline stage and 0 on the others.
    """
    state = mcore.parallel_state
    dist.all_reduce(column, group=state.get_data_parallel_group(with_context_parallel=True))
    if state.get_pipeline_model_parallel_world_size() > 1:
        last, stages = state.get_pipeline_model_parallel_last_rank(), state.get_pipeline_model_parallel_group()
        dist.broadcast(column, last, group=stages)
    return column.cpu()


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the entropy -sum p log p over the whole vocabulary: [b, s, v / tensor parallel] -> [b, s], in nats.

    The result has a gradient if `logits` have one.
    """
    found: torch.Tensor = _Entropy.apply(logits)  # type: ignore[no-untyped-call]
    return found


class _Entropy(torch.autograd.Function):
    """Entropy with d H / d x = -p (log p + H), computed by each rank for its own columns."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor) -> torch.Tensor:
        top, sums = _normaliser(logits)
        found = sums[0].log() - sums[1] / sums[0]
        if context.needs_input_grad[0]:
            context.save_for_backward(logits - (top + sums[0].log())[..., None], found)
        return found

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        logprobs, found = context.saved_tensors
        slope: torch.Tensor = -logprobs.exp() * (logprobs.clamp(min=LOWEST) + found[..., None])
        return gradient[..., None] * slope


LOWEST = -1e4
"""Replaces the log-prob of a column without mass, so that it contributes 0 times a finite number."""


def _normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest logit, and the sums of exp(x) and exp(x) x over the whole vocabulary, for logits x less the
    largest.
    """
    group = mcore.parallel_state.get_tensor_model_parallel_group()
    alone = mcore.parallel_state.get_tensor_model_parallel_world_size() == 1
    top = logits.max(-1).values
    if not alone:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - top[..., None]
    exp = shifted.exp()
    sums = torch.stack([exp.sum(-1), torch.where(exp > 0, exp * shifted, 0.0).sum(-1)])
    if not alone:
        dist.all_reduce(sums, group=group)
    return top, sums
