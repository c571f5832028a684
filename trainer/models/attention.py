"""Core attention by torch's scaled_dot_product_attention, over rows that context-parallel ranks share.

It is selected by the layer spec. It runs on CPU and CUDA without TransformerEngine, and supports grouped queries,
explicit masks, packed rows and context parallelism, which Megatron's own does not.

Context parallelism: each of n ranks takes two of a row's 2 n equal chunks, the r-th from either end, so that each has
as many causal pairs as any other (`zigzag`; Megatron cuts its rotary positions in the same way). Keys and values are
gathered over the group; a rank's queries attend to those before them. The gradient of keys and values is summed and
scattered back.

Packed rows take one call of torch's kernel for rows of varying length if available (`varlen_kernel`), else one call
each.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from turnlog.trainer import mcore


def zigzag(positions: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the positions of a row that a context-parallel rank has, in its order; `positions` is a multiple of 2 x
    ranks.
    """
    chunks = torch.arange(positions).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


@functools.lru_cache(maxsize=64)
def _natural(edges: tuple[int, ...], ranks: int) -> torch.Tensor:
    """Return the permutation to row-by-row order of positions that lie rank by rank, and on each rank row by row."""
    held = torch.cat(
        [
            start + zigzag(end - start, rank, ranks)
            for rank in range(ranks)
            for start, end in itertools.pairwise(edges)
            if end > start
        ]
    )
    return held.argsort()


Kernel = Callable[..., Any]
"""torch.nn.attention.varlen.varlen_attn, or a function with the same arguments and results."""


@functools.lru_cache(maxsize=8)
def varlen_kernel(device: str, dtype: torch.dtype, head: int) -> Kernel | None:
    """Return FlashAttention over rows of varying length for head size `head`, or None: needs torch 2.12 or later, CUDA,
    bfloat16.
    """
    if device != "cuda" or dtype is not torch.bfloat16 or head > 256 or head % 8:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else None


class SdpaAttention(mcore.MegatronModule):  # type: ignore[misc]
    """softmax(q k^T / sqrt(d)) v, causal unless a mask is given. It has no parameters."""

    varlen_kernel = staticmethod(varlen_kernel)

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        """Accept the arguments with which Megatron builds a `core_attention` submodule."""
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        """Map [s, b, h, d] x 3 to [s, b, h d], or packed [t, h, d] x 3 to [t, h d]; s and t count the positions of this
        rank.

        The mask is True where masked out. Rows that context-parallel ranks share take no mask.
        """
        packed = packed_seq_params is not None
        ranks = self.config.context_parallel_size
        if packed and ranks == 1 and not self.dropout:
            kernel = self.varlen_kernel(query.device.type, query.dtype, query.size(-1))
            if kernel is not None:
                return self._in_one_call(kernel, query, key, value, packed_seq_params)
        edges = packed_seq_params.cu_seqlens_q.tolist() if packed else [0, query.size(0) * ranks]
        if ranks > 1:
            if attention_mask is not None:
                raise ValueError("rows that context-parallel ranks share take no attention mask")
            key, value = (self._gather_ranks(x, edges) for x in (key, value))
        if packed:
            parts = self._rows(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), edges)
            return torch.cat(parts).squeeze(1).flatten(1)
        if attention_mask is not None:
            return self._attend(query, key, value, ~attention_mask).flatten(2)
        return torch.cat(self._rows(query, key, value, edges)).flatten(2)

    def _in_one_call(
        self, kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Any
    ) -> torch.Tensor:
        """Map [t, h, d] x 3 to [t, h d]. Nothing is read from the device, whereas one call per row would wait for
        it.
        """
        ends, longest = packing.cu_seqlens_q, packing.max_seqlen_q
        causal, grouped = (-1, 0), query.size(1) != key.size(1)
        found: torch.Tensor = kernel(
            query, key, value, ends, ends, longest, longest, scale=self.scale, window_size=causal, enable_gqa=grouped
        )
        return found.flatten(1)

    def _rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: Sequence[int]
    ) -> list[torch.Tensor]:
        """Attend row by row; return this rank's part of each row."""
        ranks = self.config.context_parallel_size
        rank = mcore.parallel_state.get_context_parallel_rank()
        parts: list[torch.Tensor] = []
        for start, end in itertools.pairwise(edges):
            own = query[start // ranks : end // ranks]
            if ranks == 1 and end > start:
                parts.append(self._attend(own, key[start:end], value[start:end]))
            elif end > start:
                chunk = (end - start) // (2 * ranks)
                for queries, at in ((own[:chunk], rank), (own[chunk:], 2 * ranks - 1 - rank)):
                    before = slice(start, start + (at + 1) * chunk)
                    parts.append(self._attend(queries, key[before], value[before]))
        return parts

    def _gather_ranks(self, x: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
        """Gather keys or values of all ranks, in row-by-row order."""
        group = mcore.parallel_state.get_context_parallel_group()
        order = _natural(tuple(edges), self.config.context_parallel_size).to(x.device)
        return mcore.gather_from_sequence_parallel_region(x.contiguous(), group=group)[order]  # type: ignore[no-any-return]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """Map [s, b, h, d] x 3 to [s, b, h, d]; without a mask the last query is aligned with the last key."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        square = q.size(2) == k.size(2)
        if mask is None and not square:
            from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, a second of a rank's start

            mask = causal_lower_right(q.size(2), k.size(2))
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and q.size(2) > 1,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor.

    Sequence-parallel ranks see different tokens, so that the gradient of the weight is the sum over ranks: Megatron's
    wrapper of the same class does not support that.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Accept the arguments with which Megatron builds a norm."""
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
