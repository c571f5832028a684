"""Log-probs and entropy of the output layer, by chunks of tokens.

The logits of a microbatch would be its largest tensor by far: 32,768 tokens and 151,936 columns take 20 GB in float32,
several times over with what a softmax and an entropy keep for the gradient. Here one chunk of them is in memory at a
time, and the backward pass computes it again. Chunks of the output layer's product are also how verl and Liger Kernel
keep logits out of memory; the gradients follow from the definitions of log-softmax and entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from turnlog.trainer import mcore

CHUNK_BYTES = 2**28
"""Size of a chunk's logits in float32. At most three such tensors are in memory, with temporaries."""
LOWEST = -1e4
"""Replaces the log-prob of a column without mass, so that it contributes 0 times a finite number."""


class HiddenOutput(mcore.ColumnParallelLinear):  # type: ignore[misc]
    """Output layer that returns the hidden states whose product with its weight `logprobs_and_entropy` takes."""

    def forward(self, input_: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Map [s, b, h], or a tensor-parallel rank's part of s, to all of [s, b, h], as GPTModel calls an output layer.
        Every tensor-parallel rank has the whole gradient of the result.
        """
        if self.sequence_parallel:
            return mcore.gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=False), None
        return input_, None

    @classmethod
    def put_on(cls, model: Any) -> None:
        """Turn the output layer of a model's last pipeline stage into one that returns hidden states."""
        if model.post_process:
            # The same object stays, because it may hold the weight, and Megatron's checkpoints ask it for its shards.
            model.output_layer.__class__ = cls


def output_weight(model: Any) -> torch.Tensor:
    """Return the weight [columns of this rank, h] of the output layer on the last pipeline stage. The model may be
    wrapped in what sums its gradients over ranks."""
    model = getattr(model, "module", model)
    if model.share_embeddings_and_output_weights:
        shared: torch.Tensor = model.shared_embedding_or_output_weight()
        return shared
    own: torch.Tensor = model.output_layer.weight
    return own


def logprobs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocabulary: int,
    entropy: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of n targets and the entropies over the vocabulary in nats, [n] float32 each.

    `hidden` is [n, h], `weight` [columns of this rank, h]; `targets` [n] are token ids; logits are divided by
    `temperature` [n]. Columns from `vocabulary` on only pad the weight. Both results have gradients with respect to
    `hidden` and `weight`; without `entropy` the second is 0. Collective over tensor-parallel ranks.
    """
    first = mcore.parallel_state.get_tensor_model_parallel_rank() * len(weight)
    own = targets - first
    masked = (own < 0) | (own >= len(weight))
    chunk = max(1, chunk_bytes // (4 * len(weight)))
    padding = max(0, min(len(weight), first + len(weight) - vocabulary))
    found: tuple[torch.Tensor, torch.Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, own.masked_fill(masked, 0), ~masked, temperature[:, None], padding, entropy, chunk
    )
    return found


class _Scores(torch.autograd.Function):
    """Let p be the softmax of x = logits / temperature. Then d log p_t / d x = onehot(t) - p, and the entropy H has
    d H / d x = -p (log p + H)."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        own: torch.Tensor,
        here: torch.Tensor,
        temperature: torch.Tensor,
        padding: int,
        entropy: bool,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context.set_materialize_grads(False)
        logprobs = torch.empty(len(hidden), device=hidden.device)
        norms, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for part in _parts(len(hidden), chunk):
            x = _compute_logits(hidden[part], weight, temperature[part], padding)
            top = _all_reduce(x.max(-1).values, dist.ReduceOp.MAX)
            x -= top[:, None]
            target = x.gather(-1, own[part, None])[:, 0] * here[part]
            mass = x.exp()
            sums = [target, mass.sum(-1)]
            if entropy:
                sums.append(mass.mul_(x.clamp_(min=LOWEST)).sum(-1))
            target, total, *weighed = _all_reduce(torch.stack(sums))
            logprobs[part] = target - total.log()
            norms[part] = top + total.log()
            if entropy:
                entropies[part] = total.log() - weighed[0] / total
        context.save_for_backward(hidden, weight, own, here, temperature, norms, entropies)
        context.padding, context.chunk = padding, chunk
        return logprobs, entropies

    @staticmethod
    def backward(context: Any, for_logprobs: torch.Tensor | None, for_entropies: torch.Tensor | None) -> Any:
        hidden, weight, own, here, temperature, norms, entropies = context.saved_tensors
        wanted = torch.zeros_like(norms) if for_logprobs is None else for_logprobs
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if context.needs_input_grad[1] else None
        for part in _parts(len(hidden), context.chunk):
            logprobs = _compute_logits(hidden[part], weight, temperature[part], context.padding).sub_(norms[part, None])
            slope = logprobs.exp()
            if for_entropies is None:
                slope *= -wanted[part, None]
            else:
                drawn = logprobs.clamp_(min=LOWEST).add_(entropies[part, None]).mul_(for_entropies[part, None])
                slope *= drawn.add_(wanted[part, None]).neg_()
            del logprobs
            slope.scatter_add_(-1, own[part, None], (wanted[part] * here[part])[:, None])
            products = slope.div_(temperature[part]).to(weight.dtype)
            to_hidden[part] = products @ weight
            if to_weight is not None and weight.dtype is torch.float32:
                to_weight.addmm_(products.T, hidden[part])
            elif to_weight is not None:
                to_weight += products.T @ hidden[part]
        # Each tensor-parallel rank has only its columns' part of the gradient. Megatron would sum it later, into a copy
        # of a tensor that is not contiguous, and so lose the sum.
        return _all_reduce(to_hidden), None if to_weight is None else to_weight.to(weight.dtype), *[None] * 6


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


def _compute_logits(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: torch.Tensor, padding: int
) -> torch.Tensor:
    """Return a chunk's logits / temperature in float32, with the last `padding` columns masked out of every softmax."""
    x = (hidden @ weight.T).float().div_(temperature)
    if padding:
        x[:, -padding:] = torch.finfo(torch.float32).min
    return x


def _all_reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce over tensor-parallel ranks in place."""
    if mcore.parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(values, op=op, group=mcore.parallel_state.get_tensor_model_parallel_group())
    return values
