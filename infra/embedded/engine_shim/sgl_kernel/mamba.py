"""SGLang's CPU operators of gated delta nets and gated attention, in torch, so that it serves Qwen3.5 on a CPU.

SGLang 0.5.21 has no torch code of its own for them. They compute token by token what turnlog's trainer/models has in
chunks, and read and write SGLang's pools in place: convolutions [slots, c, kernel - 1], states [slots, h, d_v, d_k].
Rows of a batch lie one after the other, as `cu_seqlens` says. A negative slot belongs to padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiply `x` by the sigmoid of its gate, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_gate_sigmoid_mul_add(
    hidden: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, found: torch.Tensor
) -> None:
    """Add the shared expert's output [t, d], times the sigmoid of its gate, to `found` in place."""
    found.addcmul_(shared, (hidden @ weight).sigmoid()[:, None].to(shared.dtype))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, size: int) -> torch.Tensor:
    heads = x.reshape(-1, size).float()
    return functional.rms_norm(heads, (size,), 1.0 + weight.float(), eps).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise each head of q and k [t, h d]: two tensors [t h, d]."""
    return _norm(q, q_weight, eps, size), _norm(k, k_weight, eps, size)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    size: int,
    heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [t, h 2 d] into queries and their gates, and normalise each head of q and k: three tensors [t h, d]."""
    q, gate = q_gate.reshape(-1, heads, 2, size).unbind(2)
    return _norm(q, q_weight, eps, size), _norm(k, k_weight, eps, size), gate.reshape(-1, size).contiguous()


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: torch.Tensor, ba: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split projections into the channels to convolve [t, c], the output gate [t, h, d_v], and b and a [t, h]."""
    channels, gate = torch.split(qkvz, [2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim], -1)
    b, a = ba.chunk(2, -1)
    return channels.contiguous(), gate.reshape(-1, value_heads, value_dim), b.contiguous(), a.contiguous()


def fused_gdn_gating_cpu(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g and beta, [1, t, h] each."""
    g = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return g[None], b.float().sigmoid()[None]


def _convolve(x: torch.Tensor, state: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolve [c, t] behind what `state` [c, kernel - 1] holds, which then holds the last of both."""
    whole = torch.cat([state.to(x.dtype), x], 1)
    state.copy_(whole[:, -state.size(1) :])
    found: torch.Tensor = functional.silu(functional.conv1d(whole[None], weight[:, None], bias, groups=len(weight))[0])
    return found


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Map [c, t] to silu of its causal convolution, row by row."""
    found = torch.zeros_like(x)
    ends = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        if slot < 0:
            continue
        if not has_initial_state[row]:
            conv_states[slot].zero_()
        own = slice(ends[row], ends[row + 1])
        found[:, own] = _convolve(x[:, own], conv_states[slot], weight, bias)
    return found


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Map [b, c], a token of each row, to silu of its causal convolution."""
    found = torch.zeros_like(x)
    for row, slot in enumerate(conv_state_indices.tolist()):
        if slot >= 0:
            found[row] = _convolve(x[row][:, None], conv_states[slot], weight, bias)[:, 0]
    return found


def _recur(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """Map [t, h, d] x 3 and [t, h] x 2 to [t, h, d_v], and update `state` [h, d_v, d_k]."""
    shared = v.size(1) // q.size(1)
    q, k = (x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(shared, 1) for x in (q * q.size(-1) ** -0.5, k))
    held, found = state.float(), []
    for at in range(len(q)):
        held = held * g[at].exp()[:, None, None]
        seen = torch.einsum("hvk,hk->hv", held, k[at])
        held = held + torch.einsum("hv,hk->hvk", beta[at][:, None] * (v[at].float() - seen), k[at])
        found.append(torch.einsum("hvk,hk->hv", held, q[at]))
    state.copy_(held)
    return torch.stack(found).to(v.dtype) if found else v


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None, None]:
    """Map [1, t, h, d] x 3 to [1, t, h, d_v], row by row."""
    found = torch.zeros_like(v)
    ends = cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices.tolist()):
        if slot >= 0:
            own = slice(ends[row], ends[row + 1])
            found[0, own] = _recur(initial_state[slot], *(x[0, own] for x in (q, k, v, g, beta)))
    return found, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Map a token of each row, [1, b, h, d] x 3, to [1, b, h, d_v]."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    found, _none, _none = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
    )
    return found


def layernorm_fn(
    x: torch.Tensor, weight: torch.Tensor, bias: None, z: torch.Tensor | None = None, eps: float = 1e-6, **_: Any
) -> torch.Tensor:
    """Normalise the last dimension, then multiply it by silu of its gate `z`."""
    assert bias is None
    assert z is not None
    normal = functional.rms_norm(x.float(), (x.size(-1),), weight.float(), eps)
    return (normal * functional.silu(z.float())).to(x.dtype)
