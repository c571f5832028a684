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
from turnlog.trainer.activations import CHUNK_BYTES
from turnlog.trainer.models.fused import Compiled

COMPILED_CHUNKS = 3
"""Factor of the rows of a chunk if its passes are compiled: logits and their gradient are then in memory only in the
dtype of the weights, 2 bytes each in bfloat16."""
EVEN_ROWS = 128
"""A chunk of more rows than these has a multiple of them, the tile of a matrix product."""
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


class AdaptedOutput(HiddenOutput):
    """Output layer with an adapter that `output_low_rank` applies. It returns hidden states too."""

    lora_a: torch.nn.Parameter
    """[rank, h], whole on each tensor-parallel rank."""
    lora_b: torch.nn.Parameter
    """[columns of this rank, rank]."""
    scale: float
    """Factor of what the adapter adds; 0 leaves it out."""

    @classmethod
    def add_to(cls, model: Any, rank: int) -> None:
        """Turn the output layer of a network's model into an adapted one, with factors of 0."""
        if model.post_process:
            layer, weight = model.output_layer, output_weight(model)
            layer.__class__, layer.scale = cls, 0.0
            for name, size in (("lora_a", (rank, weight.size(1))), ("lora_b", (weight.size(0), rank))):
                zeros = torch.zeros(size, dtype=weight.dtype, device=weight.device)
                setattr(layer, name, torch.nn.Parameter(zeros))
            mcore.tensor_parallel.set_tensor_model_parallel_attributes(layer.lora_b, True, 0, 1)


def output_low_rank(model: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the factors [n, rank] and [columns of this rank, rank] of what the output layer's adapter adds to the
    logits of hidden states [n, h]; None if it adds nothing. The model may be wrapped."""
    layer = getattr(model, "module", model).output_layer
    if not isinstance(layer, AdaptedOutput) or not layer.scale:
        return None
    return layer.scale * torch.nn.functional.linear(hidden, layer.lora_a), layer.lora_b


def logprobs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocabulary: int,
    entropy: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
    compiled: bool = False,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs of n targets and the entropies over the vocabulary in nats, [n] float32 each.

    `hidden` is [n, h], `weight` [columns of this rank, h]; `targets` [n] are token ids; logits are divided by
    `temperature` [n]. Columns from `vocabulary` on only pad the weight. Both results have gradients with respect to
    `hidden` and `weight`; without `entropy` the second is 0. `compiled`: whether the passes over a chunk are compiled.
    `low_rank` holds the factors [n, r] and [columns of this rank, r] of what an adapter adds to the logits; both have
    gradients. Collective over tensor-parallel ranks.
    """
    first = mcore.parallel_state.get_tensor_model_parallel_rank() * len(weight)
    own = targets - first
    masked = (own < 0) | (own >= len(weight))
    compiled = compiled and not (softmax_sums.failed or logit_slopes.failed)
    chunk = chunk_rows(len(weight), chunk_bytes, compiled=compiled)
    padding = max(0, min(len(weight), first + len(weight) - vocabulary))
    found: tuple[torch.Tensor, torch.Tensor] = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        own.masked_fill(masked, 0)[:, None],
        ~masked[:, None],
        temperature[:, None],
        padding,
        entropy,
        chunk,
        compiled,
        *(low_rank or (None, None)),
    )
    return found


def chunk_rows(columns: int, chunk_bytes: int, *, compiled: bool) -> int:
    """Return the number of tokens of a chunk whose logits have `columns` columns on this rank."""
    rows = max(1, chunk_bytes * (COMPILED_CHUNKS if compiled else 1) // (4 * columns))
    return rows - (rows % EVEN_ROWS if rows > EVEN_ROWS else 0)


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
        compiled: bool,
        low: torch.Tensor | None,
        low_weight: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context.set_materialize_grads(False)
        logprobs = torch.empty((len(hidden), 1), device=hidden.device)
        norms, entropies = torch.empty_like(logprobs), torch.zeros_like(logprobs)
        for part in _parts(len(hidden), chunk):
            logits = _logits(hidden, weight, low, low_weight, part)
            top, *sums = softmax_sums(
                logits, own[part], temperature[part], padding=padding, entropy=entropy, compiled=compiled
            )
            top, (target, total, *weighed) = _over_ranks(top, sums, here[part])
            logprobs[part] = target - total.log()
            norms[part] = top + total.log()
            if entropy:
                entropies[part] = total.log() - weighed[0] / total
        context.save_for_backward(hidden, weight, own, here, temperature, norms, entropies, low, low_weight)
        context.chunk, context.constants = chunk, {"padding": padding, "compiled": compiled}
        return logprobs[:, 0], entropies[:, 0]

    @staticmethod
    def backward(context: Any, for_logprobs: torch.Tensor | None, for_entropies: torch.Tensor | None) -> Any:
        hidden, weight, own, here, temperature, norms, entropies, low, low_weight = context.saved_tensors
        wanted = torch.zeros_like(norms) if for_logprobs is None else for_logprobs[:, None].contiguous()
        drawn = None if for_entropies is None else for_entropies[:, None].contiguous()
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if context.needs_input_grad[1] else None
        to_low = None if low is None else torch.empty_like(low)
        to_low_weight = None if low_weight is None else torch.zeros_like(low_weight, dtype=torch.float32)
        for part in _parts(len(hidden), context.chunk):
            logits = _logits(hidden, weight, low, low_weight, part)
            of_tokens = [
                None if one is None else one[part] for one in (own, here, temperature, norms, wanted, drawn, entropies)
            ]
            products, at_target = logit_slopes(logits, *of_tokens, **context.constants)
            products.scatter_(-1, own[part], at_target)
            to_hidden[part] = products @ weight
            if to_weight is not None:
                _add_product(to_weight, products.T, hidden[part])
            if to_low is not None and to_low_weight is not None:
                to_low[part] = products @ low_weight
                _add_product(to_low_weight, products.T, low[part])
        # Each tensor-parallel rank has only its columns' part of the gradient. Megatron would sum it later, into a copy
        # of a tensor that is not contiguous, and so lose the sum.
        return (
            _all_reduce(to_hidden),
            None if to_weight is None else to_weight.to(weight.dtype),
            *[None] * 7,
            None if to_low is None else _all_reduce(to_low),
            None if to_low_weight is None else to_low_weight.to(low_weight.dtype),
        )


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    low: torch.Tensor | None,
    low_weight: torch.Tensor | None,
    part: slice,
) -> torch.Tensor:
    """Return the logits of a chunk, with what an adapter adds."""
    logits = hidden[part] @ weight.T
    return logits if low is None or low_weight is None else logits.addmm_(low[part], low_weight.T)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product to a float32 sum, in place."""
    if right.dtype is torch.float32:
        total.addmm_(left, right)
    else:
        total += left @ right


def _parts(count: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


def _scale(logits: torch.Tensor, temperature: torch.Tensor, padding: int) -> torch.Tensor:
    """Return logits / temperature in float32, in place of float32 logits, with the last `padding` columns masked out of
    every softmax."""
    x = logits.float().div_(temperature)
    if padding:
        x[:, -padding:] = torch.finfo(torch.float32).min
    return x


def _softmax_sums(
    logits: torch.Tensor, own: torch.Tensor, temperature: torch.Tensor, *, padding: int, entropy: bool
) -> tuple[torch.Tensor, ...]:
    """Return the maximum m of x = logits / temperature over a rank's columns, x - m of the target, the sum of
    exp(x - m) and, with `entropy`, that of exp(x - m) (x - m): [c, 1] each."""
    x = _scale(logits, temperature, padding)
    top = x.amax(-1, keepdim=True)
    x = x.sub_(top)
    target, mass = x.gather(-1, own), x.exp()
    total = mass.sum(-1, keepdim=True)
    if not entropy:
        return top, target, total
    return top, target, total, mass.mul_(x.clamp_(min=LOWEST)).sum(-1, keepdim=True)


def _logit_slopes(
    logits: torch.Tensor,
    own: torch.Tensor,
    here: torch.Tensor,
    temperature: torch.Tensor,
    norms: torch.Tensor,
    wanted: torch.Tensor,
    drawn: torch.Tensor | None,
    entropies: torch.Tensor,
    *,
    padding: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the logits without that of the target's own log-prob, and all of it at the targets
    [c, 1]."""
    logprobs = _scale(logits, temperature, padding).sub_(norms)
    slope = logprobs.exp()
    if drawn is None:
        slope = slope.mul_(-wanted)
    else:
        slope = slope.mul_(logprobs.clamp_(min=LOWEST).add_(entropies).mul_(drawn).add_(wanted).neg_())
    slope = slope.div_(temperature)
    at_target = slope.gather(-1, own) + wanted * here / temperature
    return slope.to(logits.dtype), at_target.to(logits.dtype)


softmax_sums, logit_slopes = Compiled(_softmax_sums), Compiled(_logit_slopes)


def _over_ranks(
    top: torch.Tensor, sums: list[torch.Tensor], here: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return maximum and sums over the columns of all tensor-parallel ranks, from those of one."""
    target, total, *weighed = sums
    if mcore.parallel_state.get_tensor_model_parallel_world_size() == 1:
        return top, sums
    most = _all_reduce(top.clone(), dist.ReduceOp.MAX)
    shift = (top - most).clamp_(min=LOWEST)
    weighed = [shift.exp() * (one + shift * total) for one in weighed]
    return most, list(_all_reduce(torch.stack([(target + top - most) * here, shift.exp() * total, *weighed])))


def _all_reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce over tensor-parallel ranks in place."""
    if mcore.parallel_state.get_tensor_model_parallel_world_size() > 1:
        dist.all_reduce(values, op=op, group=mcore.parallel_state.get_tensor_model_parallel_group())
    return values
