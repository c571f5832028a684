"""Core attention by torch's scaled_dot_product_attention, over rows that context-parallel ranks share.

It is selected by the layer spec. It runs on CPU and CUDA without TransformerEngine, and supports grouped queries,
explicit masks, sliding windows, sinks, packed rows and context parallelism, which Megatron's own does not.

Context parallelism: each of n ranks takes two of a row's 2 n equal chunks, the r-th from either end, so that each has
as many causal pairs as any other (`zigzag`; Megatron cuts its rotary positions in the same way). Keys and values are
gathered over the group; a rank's queries attend to those before them. The gradient of keys and values is summed and
scattered back.

Packed rows take one call of torch's kernel for rows of varying length if available (`varlen_kernel`), else one call
each.

Sliding windows are attended to block by block, so that the cost of a row is linear. Sinks are a learned score per head
beside those of the keys (Xiao et al. 2023). They are computed as the score of one more key, whose value is 0, so that
each of torch's kernels gives their gradient. The kernel for rows of varying length takes windows, but no sinks.

Rows that share prefixes lie as a tree (models.tree).
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
from turnlog.trainer.activations import WINDOW_BLOCK
from turnlog.trainer.models.fused import is_compiled, is_fused, norm_around_zero
from turnlog.trainer.models.tree import PrefixTree, tree_kernel


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


class PackedRows(mcore.PackedSeqParams):  # type: ignore[misc]
    """The ends of packed rows, for the device and for the host, which must not read them from there."""

    def __init__(self, edges: Sequence[int], device: torch.device | str, tree: PrefixTree | None = None) -> None:
        """`edges` are the start of each row and the end of the last one, over all context-parallel ranks; of rows that
        share prefixes, those of their `tree`.
        """
        ends = torch.tensor(edges, dtype=torch.int32, device=device)
        longest = max(end - start for start, end in itertools.pairwise(edges))
        super().__init__("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        self.edges, self.tree = tuple(edges), tree


Kernel = Callable[..., Any]
"""torch.nn.attention.varlen.varlen_attn, or a function with the same arguments and results."""


@functools.lru_cache(maxsize=8)
def varlen_kernel(device: str, dtype: torch.dtype, head: int) -> Kernel | None:
    """Return FlashAttention over rows of varying length for head size `head`, or None: needs torch 2.10 or later, CUDA,
    bfloat16.
    """
    if device != "cuda" or dtype is not torch.bfloat16 or head > 256 or head % 8:
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):  # FlashAttention 2 would raise
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn if "enable_gqa" in inspect.signature(varlen_attn).parameters else flash_rows


def flash_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """Return what torch 2.12's varlen_attn does, by the operator under it, which takes grouped queries before."""
    behind, ahead = window_size
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, query_ends, key_ends, longest_query, longest_key, 0.0, behind < 0, False,
        scale=scale, window_size_left=behind, window_size_right=ahead,
    )[0]  # fmt: skip
    return found


LONG_ROW = 2048
"""Mean length in tokens from which packed rows are a call each: torch's choice for one row, cuDNN's kernel on Hopper,
is faster than the FlashAttention 2 of the kernel for rows of varying length."""


def layer_window(config: Any, layer_number: int) -> int:
    """Return the number of positions that a layer attends to, its own among them; 0 if it attends to all before it.

    `layer_number` counts from 1. In `config.window_attn_skip_freq` a 1 stands for a layer with `config.window_size`.
    """
    if config.window_size is None or not mcore.is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return 0
    return int(config.window_size[0]) + 1


def prepend_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prepend a key of value 0, whose score `scale` q k is `sinks` [h].

    Map [s, b, h, d] x 3 to [s, b, h, d + x] and [s + 1, b, h, d + x] x 2. The heads of a group share its keys,
    therefore a query gets one more dimension for each of them, which is 1 at its own. x is a multiple of 8, as kernels
    need.
    """
    heads, groups = query.size(2), key.size(2)
    each = heads // groups
    more = -(-each // 8) * 8
    own = torch.eye(each, more, dtype=query.dtype, device=query.device).repeat(groups, 1)
    first = functional.pad((sinks / scale).view(groups, each), (key.size(3), more - each))
    pad = functools.partial(functional.pad, pad=(0, more))
    return (
        torch.cat([query, own.expand(*query.shape[:2], -1, -1)], -1),
        torch.cat([first.to(key.dtype).expand(1, key.size(1), -1, -1), pad(key)]),
        functional.pad(pad(value), (0, 0, 0, 0, 0, 0, 1, 0)),
    )


class SdpaAttention(mcore.MegatronModule):  # type: ignore[misc]
    """softmax(q k^T scale) v, causal unless a mask is given, within the layer's sliding window if it has one.

    Its only parameter is `softmax_offset`, the sinks of this rank's heads, if the softmax is learnable.
    """

    varlen_kernel = staticmethod(varlen_kernel)
    tree_kernel = staticmethod(tree_kernel)

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
        self.window = layer_window(config, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            mcore.tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: PackedRows | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Map [s, b, h, d] x 3 to [s, b, h d], or packed [t, h, d] x 3 to [t, h d]; s and t count the positions of this
        rank.

        The mask is True where masked out. Rows that context-parallel ranks share take no mask.
        """
        if packed_seq_params is not None and packed_seq_params.tree is not None:
            return self._attend_tree(query, key, value, packed_seq_params.tree)
        packed = packed_seq_params is not None
        ranks = self.config.context_parallel_size
        short = packed_seq_params is not None and query.size(0) < LONG_ROW * (len(packed_seq_params.edges) - 1)
        if short and ranks == 1 and not self.dropout and self.softmax_offset is None:
            kernel = self.varlen_kernel(query.device.type, query.dtype, query.size(-1))
            if kernel is not None:
                return self._in_one_call(kernel, query, key, value, packed_seq_params)
        edges = packed_seq_params.edges if packed_seq_params is not None else [0, query.size(0) * ranks]
        if ranks > 1:
            if attention_mask is not None:
                raise ValueError("rows that context-parallel ranks share take no attention mask")
            key, value = (self._gather_ranks(x, edges) for x in (key, value))
        if packed:
            found = self._rows(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), edges)
            return found.squeeze(1).flatten(1)
        if attention_mask is not None:
            return self._attend(query, key, value, ~attention_mask).flatten(2)
        return self._rows(query, key, value, edges).flatten(2)

    def _in_one_call(
        self, kernel: Kernel, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Any
    ) -> torch.Tensor:
        """Map [t, h, d] x 3 to [t, h d]. Nothing is read from the device, whereas one call per row would wait for
        it.

        The kernel takes heads of one size: shorter values are padded with zeros.
        """
        ends, longest = packing.cu_seqlens_q, packing.max_seqlen_q
        behind, grouped = (self.window - 1, 0), query.size(1) != key.size(1)  # -1: all before it
        size = value.size(-1)
        value = functional.pad(value, (0, query.size(-1) - size))
        found: torch.Tensor = kernel(
            query, key, value, ends, ends, longest, longest, scale=self.scale, window_size=behind, enable_gqa=grouped
        )
        return found[..., :size].flatten(1)

    def _attend_tree(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: PrefixTree
    ) -> torch.Tensor:
        """Map [t, h, d] x 3 to [t, h d]: in one call, or in one for the own tokens of each row."""
        if not self.dropout and self.softmax_offset is None:
            kernel = self.tree_kernel(query.device.type, query.dtype, query.size(-1), value.size(-1))
            if kernel is not None:
                return kernel(query, key, value, tree, self.window, self.scale).flatten(1)
        found = list[torch.Tensor]()
        masked = query.device.type == "cpu"  # where torch's kernel for such queries takes a mask in memory
        for own, keys, values in tree.branch_tensors(query, key, value):
            seen = before = len(keys) - len(own)
            for queries in torch.split(own, WINDOW_BLOCK if masked and before else len(own)):
                seen += len(queries)
                windowed = 0 < self.window < seen
                mask = _near(len(queries), seen, seen, query.device) if masked and before and not windowed else None
                found.append(self._attend(queries[:, None], keys[:seen, None], values[:seen, None], mask))
        return torch.cat(found).squeeze(1).flatten(1)

    def _rows(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
        """Attend row by row; return this rank's part of each row, one after the other."""
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
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather_ranks(self, x: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
        """Gather keys or values of all ranks, in row-by-row order."""
        group = mcore.parallel_state.get_context_parallel_group()
        order = _natural(tuple(edges), self.config.context_parallel_size).to(x.device)
        return mcore.gather_from_sequence_parallel_region(x.contiguous(), group=group)[order]  # type: ignore[no-any-return]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """Map [s, b, h, d] x 3 to [s, b, h, d], within the window; the last query is aligned with the last key."""
        queries, keys, window = query.size(0), key.size(0), self.window
        if not 0 < window < keys:
            return self._attend_all(query, key, value, mask)
        if mask is not None:
            return self._attend_all(query, key, value, mask & _near(queries, keys, window, query.device))
        parts, block = list[torch.Tensor](), max(window, WINDOW_BLOCK)
        for start in range(0, queries, block):
            own = query[start : start + block]
            last = keys - queries + start + len(own)
            held = slice(max(0, last - len(own) + 1 - window), last)
            near = _near(len(own), held.stop - held.start, window, query.device)
            parts.append(self._attend_all(own, key[held], value[held], near))
        return torch.cat(parts)

    def _attend_all(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any) -> torch.Tensor:
        """Map [s, b, h, d] x 3 to [s, b, h, d]; `mask` is True where a query attends, None if causal."""
        width = value.size(3)
        if self.softmax_offset is not None:
            query, key, value = prepend_sinks(query, key, value, self.softmax_offset, self.scale)
            mask = None if mask is None else functional.pad(mask, (1, 0), value=True)
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
        return out[..., :width].permute(2, 0, 1, 3)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sinks for a checkpoint, and how tensor-parallel ranks cut them."""
        found: dict[str, Any] = mcore.make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=mcore.parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )
        return found


class GrowingQueryAttention(SdpaAttention):
    """Attention whose queries grow with their position in the row (families.shape.QueryGrowth)."""

    def __init__(self, *arguments: Any, beta: float, original: int, **named: Any) -> None:
        """`beta` and `original` are those of QueryGrowth."""
        super().__init__(*arguments, **named)
        self._beta, self._original = beta, original

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
        """See SdpaAttention."""
        positions = torch.arange(len(query), device=query.device)
        if packed_seq_params is not None and packed_seq_params.tree is not None:
            positions = packed_seq_params.tree.depths
        elif packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q
            positions = positions - ends[:-1].repeat_interleave(ends.diff(), output_size=len(query))
        growth = 1 + self._beta * torch.log(1 + torch.floor(positions / self._original))
        grown = query * growth.to(query.dtype).view(-1, *[1] * (query.dim() - 1))
        return super().forward(grown, key, value, attention_mask, packed_seq_params=packed_seq_params)


def _near(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Return [queries, keys] whether a key is among the last `window` up to a query's own position; the last query is
    aligned with the last key.
    """
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < window)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor; with `layernorm_zero_centered_gamma`, x is scaled by 1 + weight.

    Sequence-parallel ranks see different tokens, so that the gradient of the weight is the sum over ranks: Megatron's
    wrapper of the same class does not support that.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        """Accept the arguments with which Megatron builds a norm."""
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.config, self.zero_centered = config, config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        """Normalise the last dimension. 1 + weight is computed in float32, because bfloat16 would round it.

        Without `x` return the weight, for work that is fused with the norm: Megatron waits for weights that other ranks
        update (overlap_param_gather) in a hook of this call.
        """
        if x is None:
            return self.weight
        if not self.zero_centered:
            return super().forward(x)
        if is_fused(self.config, "norms", x.dtype):
            return norm_around_zero(x, self.weight, float(self.eps or 0.0), compiled=is_compiled(self.config, "norms"))
        scale = 1.0 + self.weight.float()
        return functional.rms_norm(x.float(), self.normalized_shape, scale, self.eps).type_as(x)
