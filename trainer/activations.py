"""Activations of a training step: what autograd keeps for the gradient, and the largest intermediate results beside it.

Each method of LayerCounts counts the tensors of one module, in bytes per token. Whoever changes the module changes the
method. A tensor
that two modules keep is counted by one of them. tests/unit/trainer/test_memory.py compares the sum with torch's own
record of a step.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.parameters import WIDE, MemoryOptions, tensor_groups, width

CHUNK_BYTES = 2**28
"""Size of a chunk's logits in float32. models.output computes them chunk by chunk, with at most three such tensors in
memory."""
WINDOW_BLOCK = 512
"""Smallest number of queries that attend to a sliding window in one call, and number of those that attend under a mask
that is in memory (models.attention)."""
DELTA_CHUNK = 64
"""Number of positions that a gated delta net computes at once (models.gated_delta); it changes only rounding."""
LAYER_NORMS = ("input_layernorm", "pre_mlp_layernorm", "post_attention_norm", "post_mlp_norm")
"""Names of the norms of hidden states that a layer may have."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that keep less for the gradient than the elementwise operations of their formula would."""

    fused_norm: bool
    """RMSNorm keeps only its input and one number per row, as torch has it on CUDA."""
    fused: bool
    """Heads and SwiGLU keep only their input (models.fused)."""
    compiled: bool
    """Whether their backward passes are one kernel each."""

    @classmethod
    def of(cls, device: str, options: Any) -> Kernels:
        """Return the kernels of a device (cuda or cpu) with the settings `fused` and `compiled`."""
        cuda = device == "cuda"
        compiled = cuda and options.fused and options.compiled != "off"
        return cls(fused_norm=cuda, fused=options.fused and (compiled or width(options) == WIDE), compiled=compiled)


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of activations, per token or of a whole microbatch."""

    kept: float
    """Bytes kept for the gradient."""
    backward: float = 0.0
    """The largest intermediate results of the backward pass, beside what is kept."""

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.kept + other.kept, max(self.backward, other.backward))


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """Counts of a rank's modules in bytes per token, for one shape, layout and set of kernels."""

    shape: ModelShape
    options: MemoryOptions
    kernels: Kernels

    @property
    def w(self) -> int:
        """Bytes of a value."""
        return width(self.options)

    @property
    def tensor(self) -> int:
        """Number of ranks that share heads and intermediate sizes."""
        return self.options.tensor_parallel

    @property
    def sequence(self) -> int:
        """Number of ranks that share the tokens between matrices."""
        return self.options.tensor_parallel if self.options.sequence_parallel else 1

    @property
    def trains_norms(self) -> bool:
        """Whether norms have gradients."""
        return not self.options.lora_rank

    def norm(self, size: float, *, input_: bool = True, output: bool = True) -> float:
        """Return the bytes of an RMSNorm over `size` values. `input_` and `output`: whether its input and its output
        are counted here; otherwise another module, which keeps the same tensor, counts it.
        """
        kept = size * self.w if output else 0.0
        if self.kernels.fused_norm or self.w == WIDE:
            kept += size * self.w if input_ else 0.0
        else:
            kept += size * WIDE  # the input in float32
        if not self.kernels.fused_norm and self.trains_norms:
            kept += size * WIDE  # the normalised input, for the gradient of the weight
        return kept

    def hidden_norm(self) -> float:
        """Return the bytes of the norm before attention or the feed-forward layer, and of its input, the residual
        stream.
        """
        return self.norm(self.shape.hidden / self.sequence)

    def attention(self) -> Kept:
        """Count grouped-query attention behind its norm: projections, norms of heads, rotary positions, core."""
        shape, w = self.shape, self.w
        q, kv = (heads * shape.head_dim / self.tensor for heads in (shape.heads, shape.groups))
        found = (q + 2 * kv) * w  # of the projection: values are a view of it
        if not self.kernels.fused:
            if shape.qk_norm:
                found += self.norm(q, output=False) + self.norm(kv, input_=False, output=False)
            found += 2 * shape.head_dim * shape.rope.fraction * w  # the table of rotations in the model's dtype
        found += (q + kv) * w  # rotated
        return Kept(found + self.core(q), 2 * q * w)

    def core(self, values: float) -> float:
        """Return the bytes of attention itself: its output, which the output projection takes, and a sum per head."""
        return values * self.w + self.shape.heads / self.tensor * WIDE

    def window_mask(self) -> float:
        """Return the bytes of a sliding window's mask, which is made for a block of queries at a time."""
        sliding = self.shape.sliding
        assert sliding is not None
        return (max(sliding.size, WINDOW_BLOCK) + sliding.size - 1) * self.w

    def latent(self) -> Kept:
        """Count multi-head latent attention behind its norm."""
        shape, w, latent = self.shape, self.w, self.shape.latent
        assert latent is not None
        heads = shape.heads / self.tensor
        query, value = shape.head_dim + latent.unrotated, latent.value
        found = (latent.kv_rank + shape.head_dim) * w + self.norm(latent.kv_rank)
        if latent.q_rank:
            found += latent.q_rank * w + self.norm(latent.q_rank)
        found += heads * (latent.unrotated + value) * w  # expanded keys and values, of which values are kept
        found += 2 * heads * query * w + 4 * shape.head_dim * w  # queries and keys
        return Kept(found + self.core(heads * value), 2 * heads * query * w)

    def linear(self) -> Kept:
        """Count a gated delta net behind its norm, by torch's operations, which keep more than fused kernels do."""
        linear = self.shape.linear
        assert linear is not None
        heads, key, value = linear.value_heads, linear.key_dim, linear.value_dim
        channels = 2 * linear.key_heads * key + heads * value
        pairs = 6 * heads * DELTA_CHUNK  # of positions of a chunk
        wide = pairs + heads * (11 * key + 9 * value + key * value / DELTA_CHUNK)
        found = 2 * channels * self.w + wide * WIDE
        return Kept(found / self.tensor, 2 * heads * value * WIDE / self.tensor)

    def swiglu(self, size: float) -> Kept:
        """Count SwiGLU of intermediate size `size`: both halves and the product; if it is not fused, also silu and the
        other factor.
        """
        if self.kernels.fused:
            return Kept(3 * size * self.w, (2 if self.kernels.compiled else 4) * size * self.w)
        return Kept(5 * size * self.w, 2 * size * self.w)

    def experts(self) -> Kept:
        """Count a mixture: router, dispatch, experts and the shared expert, which every token passes."""
        mixture = self.shape.mixture
        assert mixture is not None
        k, hidden, w = mixture.experts_per_token, self.shape.hidden / self.sequence, self.w
        inner = k * mixture.expert_ffn / self.sequence
        given = 0 if self.options.lora_rank else 1  # frozen matrices keep no input
        # The experts' inputs are kept. On the way out there are three such tensors, and two more among ranks. The
        # product is weighted by the router.
        ways = 5 if self.options.expert_parallel > 1 else 3
        found = Kept(given * k * hidden * w, ways * k * hidden * w)
        # The gradient of the product is weighted in float32, as the router's numbers are.
        found += Kept((4 + given) * inner * w, 3 * inner * WIDE if w < WIDE else (3 - given) * inner * w)
        found += Kept(4 * mixture.experts / self.sequence * WIDE)
        if mixture.shared_ffn:
            found += Kept(self.swiglu(mixture.shared_ffn / self.tensor).kept + hidden * w)
        return found

    def adapters(self, matrices: int) -> float:
        """Return the bytes of the results between the two factors of low-rank adapters."""
        return matrices * self.options.lora_rank * self.w

    def mixer(self, layer: int) -> Kept:
        """Count the part of a layer that mixes tokens."""
        if self.shape.layer_type(layer) == "linear_attention":
            return self.linear()
        found = self.latent() if self.shape.latent else self.attention()
        windowed = self.shape.layer_type(layer) == "sliding_attention"
        return found + Kept(self.window_mask()) if windowed else found

    def feed_forward(self, layer: int) -> Kept:
        """Count the feed-forward layer."""
        return self.experts() if self.shape.is_mixture(layer) else self.swiglu(self.shape.ffn / self.tensor)

    def boundary(self) -> float:
        """Return the bytes of the residual stream at one place."""
        return self.shape.hidden / self.sequence * self.w

    def layer(self, layer: int) -> Kept:
        """Count what remains of a whole layer under `recompute`, its output included and its input not."""
        mixer, feed_forward, norm = self.mixer(layer), self.feed_forward(layer), self.hidden_norm()
        norms = sum(f".{name}." in group.name for group in tensor_groups(self.shape) for name in LAYER_NORMS)
        whole = Kept(norms * norm + self.adapters(4)) + mixer + feed_forward
        if self.options.recompute == "full":
            return Kept(self.boundary(), whole.kept + whole.backward - self.boundary())
        if self.options.recompute != "selective":
            return whole
        again = set(self.options.recompute_modules)
        spared, most = 0.0, whole.backward
        for module, part in self._spared_parts(layer, mixer, feed_forward).items():
            if module in again:
                spared, most = spared + part.kept, max(most, part.kept + part.backward)
        return Kept(whole.kept - spared, most)

    def _spared_parts(self, layer: int, mixer: Kept, feed_forward: Kept) -> dict[str, Kept]:
        """Return what need not be kept if a module is recomputed, by Megatron's name of the module."""
        name = "moe" if self.shape.is_mixture(layer) else "mlp"
        values = self.shape.heads * self.shape.head_dim / self.tensor
        found = {name: feed_forward}
        if name == "moe" and self.shape.mixture and "moe" not in self.options.recompute_modules:
            found["shared_experts"] = self.swiglu(self.shape.mixture.shared_ffn / self.tensor)
        if self.shape.layer_type(layer) != "linear_attention":
            found["core_attn"] = Kept(self.core(values) - values * self.w)  # the projection keeps the output
        return found


@functools.lru_cache(maxsize=1024)
def layer_kinds(shape: ModelShape, stages: int, stage: int) -> tuple[tuple[int, int], ...]:
    """Return a layer of each kind that a pipeline stage has, and how many there are."""
    own = [layer for layer in range(shape.layers) if layer * stages // shape.layers == stage]
    kinds = {layer: (shape.layer_type(layer), shape.is_mixture(layer)) for layer in own}
    counts, first = Counter(kinds.values()), {kind: layer for layer, kind in reversed(kinds.items())}
    return tuple((first[kind], count) for kind, count in counts.items())


def activation_bytes(
    shape: ModelShape, options: MemoryOptions, stage: int, tokens: int, scored: int, kernels: Kernels
) -> tuple[Kept, float]:
    """Return the bytes of the activations of a pipeline stage's layers, and those that the loss takes beside them.

    Earlier stages keep those of several microbatches: one for each stage from them to the last (1F1B, Narayanan et al.
    2021, arXiv 2104.04473).
    """
    counts = LayerCounts(shape, options, kernels)
    per_token = Kept(0.0)
    for layer, alike in layer_kinds(shape, options.pipeline_parallel, stage):
        one = counts.layer(layer)
        per_token += Kept(one.kept * alike, one.backward)
    tokens = -(-tokens // options.context_parallel)
    table = 3 * shape.head_dim * shape.rope.fraction * WIDE  # angles and rotations of a microbatch, for all layers
    flying = options.pipeline_parallel - stage
    gradient = counts.boundary()
    kept = (per_token.kept + table) * tokens * flying
    backward = (per_token.backward + gradient) * tokens
    loss = 0.0
    if stage == options.pipeline_parallel - 1:
        kept += counts.norm(shape.hidden / counts.sequence, output=False) * tokens
        loss = _loss_bytes(shape, options, scored, tokens, counts)
        if shape.tied and not options.lora_rank:
            # The gradient of the weight waits for that of the embedding, which comes last.
            backward += -(-shape.vocabulary // options.tensor_parallel) * shape.hidden * width(options)
    return Kept(kept, backward), loss


def _loss_bytes(shape: ModelShape, options: MemoryOptions, scored: int, tokens: int, counts: LayerCounts) -> float:
    """Return the bytes that models.output takes at its peak, in the backward pass of the last chunk."""
    columns, w = -(-shape.vocabulary // options.tensor_parallel), width(options)
    scored = -(-scored // options.context_parallel)
    chunk = min(scored, max(1, CHUNK_BYTES // (WIDE * columns))) * columns
    found = 2 * scored * shape.hidden * w  # hidden states and their gradient
    if options.lora_rank:
        return found + 2 * WIDE * chunk
    weight = columns * shape.hidden
    # Logits and their gradient in float32, beside bfloat16 each in the model's dtype, too; at last the gradient in it.
    grown = 2 * (WIDE + w) * chunk if w < WIDE else 2 * WIDE * chunk
    return found + weight * WIDE + max(grown, weight * w if w < WIDE else 0)


def approximations(shape: ModelShape) -> Iterator[str]:
    """Yield the parts of a model whose activations are only approximated, in words."""
    if shape.linear:
        yield "gated delta nets (layers of kind linear_attention)"
    if shape.latent:
        yield "latent attention"
    if shape.mixture:
        yield "mixtures of experts, whose routers are assumed to send equally many tokens to all ranks"
    if shape.vision:
        yield "the vision tower, whose activations depend on the images and are not counted"
