"""Arithmetic of a model's forward pass, from its tensors and its attention."""

from __future__ import annotations

import functools
import math

from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import LayerType, ModelShape
from turnlog.trainer.families.tensors import EMBEDDING, EXPERT, OUTPUT, VISION


def row_flops(shape: ModelShape, tokens: int) -> int:
    """Return the FLOPs of a row's forward pass: two per parameter and token, without the embedding, and causal
    attention's two products, within a sliding window where a layer has one.
    """
    near = min(tokens, shape.sliding.size) if shape.sliding else 0
    pairs = _layers(shape, "full_attention") * tokens * tokens
    pairs += _layers(shape, "sliding_attention") * near * (2 * tokens - near)
    query, value = shape.head_dim, shape.head_dim
    if shape.latent:
        query, value = query + shape.latent.unrotated, shape.latent.value
    return 2 * tokens * _parameters(shape) + shape.heads * (query + value) * pairs


@functools.lru_cache(maxsize=32)
def _parameters(shape: ModelShape) -> int:
    """Count the values of the matrices that multiply a token."""
    whole = shape.hidden * shape.vocabulary
    experts = 0
    for tensor in family(shape.kind).tensors(shape):
        if len(tensor.size) < 2 or tensor.megatron in (EMBEDDING, OUTPUT) or tensor.megatron.startswith(VISION):
            continue
        if EXPERT in tensor.megatron:
            experts += math.prod(tensor.size)
        else:
            whole += math.prod(tensor.size)
    share = (shape.mixture.experts_per_token, shape.mixture.experts) if shape.mixture else (0, 1)
    return whole + experts * share[0] // share[1]


@functools.lru_cache(maxsize=32)
def _layers(shape: ModelShape, kind: LayerType) -> int:
    """Count the layers of a kind."""
    return sum(shape.layer_type(layer) == kind for layer in range(shape.layers))
