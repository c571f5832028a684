"""Attention with sinks in torch, so that SGLang serves gpt-oss on a CPU: its backend torch_native has none."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch.nn import functional


def attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    sinks: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **named: Any,
) -> torch.Tensor:
    """Attend from [1, h, q, d] to [1, groups, k, d] and, in head i, to one more key of score `sinks[i]` and value 0.

    `attn_mask`: bool [q, k], True where a query sees a key. `named`: further arguments of torch's
    scaled_dot_product_attention. The formula is that of transformers' modeling_gpt_oss.
    """
    queries, keys = query.size(-2), key.size(-2)
    seen = torch.ones(queries, keys, dtype=torch.bool) if attn_mask is None else attn_mask
    scores = query.new_zeros(query.size(1), queries, keys).masked_fill(~(seen.tril() if is_causal else seen), -inf)
    mask = torch.cat([scores, sinks.to(query.dtype)[:, None, None].expand(-1, queries, 1)], -1)
    key, value = (functional.pad(each, (0, 0, 0, 1)) for each in (key, value))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[None], **named)
