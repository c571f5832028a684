"""Gated delta net: linear attention whose state forgets and is corrected by a delta rule (Gated Delta Networks, Yang,
Kautz and Hatamizadeh 2024, arXiv 2412.06464).

For each head, with keys and queries of length 1 and state S [d_k, d_v], which is 0 before a row:

    S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T,   o_t = S_t^T q_t / sqrt(d_k)

It is computed in chunks: within a chunk the corrections are the solution of a triangular system (Parallelizing Linear
Transformers with the Delta Rule, Yang et al. 2024, arXiv 2406.06484, 3.2), and only the state passes from one chunk to
the next. On CUDA with flash-linear-attention installed its kernels compute the same.

Megatron's own module requires flash-linear-attention and takes no packed rows. Its parameters lie as all queries, all
keys and so on; here they lie by key head, as Megatron arranges q, k and v, so that tensor-parallel ranks take equal
slices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional

from turnlog.trainer import mcore
from turnlog.trainer.activations import DELTA_CHUNK


def gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor
) -> torch.Tensor:
    """Map [s, b, h, d_k] x 2, [s, b, h, d_v] and [s, b, h] x 2 to [s, b, h, d_v] in float32.

    `decay` is g, at most 0, and `rate` is beta. Queries and keys are normalised here, with the 1e-6 of transformers.
    """
    length = query.size(0)
    chunk = min(DELTA_CHUNK, length)
    filled = -length % chunk
    query, key = (_normalise(x.float()) for x in (query, key))
    query, key, value, decay, rate = (
        _chunks(functional.pad(x.float().movedim(0, 2), (0, 0, 0, filled)), chunk)
        for x in (query * query.size(-1) ** -0.5, key, value, decay[..., None], rate[..., None])
    )
    decay = decay.cumsum(3)  # [b, h, chunks, c, 1], from the beginning of the chunk
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).triu(1)
    between = (decay - decay.mT).masked_fill(later, -torch.inf).exp()
    kept, left = decay.exp(), (decay[:, :, :, -1:] - decay).exp()
    system = rate * (key @ key.mT) * between  # only what lies below the diagonal is read
    wanted = torch.cat([rate * value, rate * kept * key], -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    corrections, seen = solved.split([value.size(-1), key.size(-1)], -1)
    local, query, key = (query @ key.mT) * between, query * kept, key * left
    state = value.new_zeros(*value.shape[:2], key.size(-1), value.size(-1))
    found = []
    for at in range(query.size(2)):
        correction = corrections[:, :, at] - seen[:, :, at] @ state
        found.append(query[:, :, at] @ state + local[:, :, at] @ correction)
        state = state * kept[:, :, at, -1:] + key[:, :, at].mT @ correction
    return torch.cat(found, 2)[:, :, :length].movedim(2, 0)


def _chunks(x: torch.Tensor, chunk: int) -> torch.Tensor:
    """Map [b, h, s, d] to [b, h, chunks, c, d]."""
    return x.reshape(*x.shape[:2], -1, chunk, x.size(-1))


def _normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def causal_convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Map [s, b, c] to silu of the causal convolution of each channel; `weight` is [c, 1, kernel]."""
    channels, _, kernel = weight.shape
    filled = functional.pad(x.permute(1, 2, 0), (kernel - 1, 0))
    return functional.silu(functional.conv1d(filled, weight, groups=channels)).permute(2, 0, 1)


@dataclass(frozen=True, slots=True)
class DeltaKernels:
    """Functions of flash-linear-attention, which take rows one after the other: [1, t, ...] and their `cu_seqlens`."""

    convolution: Callable[..., Any]
    rule: Callable[..., Any]


@functools.cache
def delta_kernels(device: str) -> DeltaKernels | None:
    """Return the kernels for CUDA, None elsewhere and where flash-linear-attention is not installed."""
    if device != "cuda":
        return None
    try:
        from fla.modules.convolution import causal_conv1d  # type: ignore[import-not-found]
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # type: ignore[import-not-found]
    except ImportError:
        return None
    return DeltaKernels(causal_conv1d, chunk_gated_delta_rule)


@dataclass
class DeltaSubmodules:
    """Specs of the matrices, under the names that attention has for its own."""

    linear_qkv: Any = mcore.ColumnParallelLinear
    linear_proj: Any = mcore.RowParallelLinear


class GatedDeltaNet(mcore.MegatronModule):  # type: ignore[misc]
    """A gated delta net in the place of attention. Tensor-parallel ranks share its key heads.

    Rows of `linear_qkv` lie by key head: q, k, then v, output gate, rate and decay of the value heads that share it.
    Channels of `convolution` lie in the same way: q, k, v.
    """

    kernels = staticmethod(delta_kernels)

    def __init__(
        self,
        config: Any,
        submodules: DeltaSubmodules,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """`key_heads` and `value_heads` count heads over all ranks, `key_dim` and `value_dim` are the sizes of one."""
        super().__init__(config=config)
        self._tensor_group = pg_collection.tp
        ranks = self._tensor_group.size()
        self._groups, self._shared = key_heads // ranks, value_heads // key_heads
        self._key_dim, self._value_dim = key_dim, value_dim
        self._sizes = [
            key_dim, key_dim, *(self._shared * each for each in (value_dim, value_dim, 1, 1)),
        ]  # fmt: skip
        named = {"config": config, "init_method": config.init_method, "bias": False, "tp_group": self._tensor_group}
        self.linear_qkv = mcore.build_module(
            submodules.linear_qkv, config.hidden_size, key_heads * sum(self._sizes), gather_output=False, **named
        )
        self.linear_proj = mcore.build_module(
            submodules.linear_proj,
            value_heads * value_dim,
            config.hidden_size,
            input_is_parallel=True,
            skip_bias_add=True,
            **named,
        )
        channels = self._groups * sum(self._sizes[:3])
        self.convolution = self._share(torch.zeros(channels, 1, kernel))
        self.rate_bias = self._share(torch.ones(self._groups * self._shared))
        self.decay_log = self._share(torch.zeros(self._groups * self._shared))
        self.norm = torch.nn.Parameter(torch.ones(value_dim, dtype=config.params_dtype))

    def _share(self, initial: torch.Tensor) -> torch.nn.Parameter:
        """Return a parameter whose first dimension tensor-parallel ranks share."""
        parameter = torch.nn.Parameter(initial.to(self.config.params_dtype))
        mcore.tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GatedDeltaNet:
        """Keep two vectors in float32 if the model becomes bfloat16, as Qwen3.5's files have them."""
        super()._apply(fn, recurse)
        for parameter in (self.decay_log, self.norm):
            parameter.data = parameter.data.float()
        return self

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Map [s, b, h] to [s, b, h]; packed rows [t, 1, h] do not see each other.

        Padding lies behind a row, where nothing reads it. Sequence-parallel ranks give and take their share of s.
        """
        mixed, _ = self.linear_qkv(hidden_states)
        ends = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        kernels = self.kernels(mixed.device.type)
        if kernels is not None:
            found = self._by_kernels(kernels, mixed, ends)
        elif ends is None:
            found = self._by_torch(mixed)
        else:
            lengths = [end - start for start, end in itertools.pairwise(packed_seq_params.edges)]
            padded = torch.nn.utils.rnn.pad_sequence(mixed[:, 0].split(lengths))
            of_rows = self._by_torch(padded).unbind(1)
            found = torch.cat([row[:length] for row, length in zip(of_rows, lengths, strict=True)])[:, None]
        output, _ = self.linear_proj(found)
        return output, None

    def _by_torch(self, mixed: torch.Tensor) -> torch.Tensor:
        """Map this rank's projections [s, b, x] to [s, b, value heads d_v], before the last matrix."""
        channels, gate, rate, decay = self._split(mixed)
        query, key, value = self._heads(causal_convolution(channels, self.convolution))
        return self._gate(gated_delta_rule(query, key, value, decay, rate), gate, mixed.dtype)

    def _by_kernels(self, kernels: DeltaKernels, mixed: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        """Compute the same by kernels, whose layout is [b, s, ...]."""
        channels, gate, rate, decay = self._split(mixed)
        ends = None if ends is None else ends.long()
        convolved, _ = kernels.convolution(
            channels.transpose(0, 1).contiguous(), self.convolution[:, 0], activation="silu", cu_seqlens=ends
        )
        heads = (x.contiguous() for x in self._heads(convolved))
        found, _ = kernels.rule(
            *heads,
            g=decay.transpose(0, 1).contiguous(),
            beta=rate.transpose(0, 1).contiguous(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=ends,
        )
        return self._gate(found.transpose(0, 1), gate, mixed.dtype)

    def _split(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the channels to convolve [s, b, c], and per value head the output gate [s, b, h, d_v], beta and g
        [s, b, h].
        """
        parts = torch.split(self._by_group(mixed), [sum(self._sizes[:3]), *self._sizes[3:]], -1)
        channels, gate, rate, decay = (part.flatten(2) for part in parts)
        slope = functional.softplus(decay.float() + self.rate_bias.float())
        return (
            channels,
            gate.reshape(*gate.shape[:2], -1, self._value_dim),
            rate.sigmoid(),
            -self.decay_log.float().exp() * slope,
        )

    def _heads(self, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v per value head: [..., h, d]."""
        query, key, value = torch.split(self._by_group(channels), self._sizes[:3], -1)
        query, key = (x.repeat_interleave(self._shared, -2) for x in (query, key))
        return query, key, value.reshape(*channels.shape[:2], -1, self._value_dim)

    def _by_group(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self._groups, -1)

    def _gate(self, found: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Normalise each head, then multiply it by silu of its gate: [s, b, h, d_v] x 2 -> [s, b, h d_v]."""
        # Ranks have different heads, so that the gradient of the common weight is the sum over them.
        weight = mcore.tensor_parallel.copy_to_tensor_model_parallel_region(self.norm, self._tensor_group)
        normal = functional.rms_norm(found.float(), (self._value_dim,), weight.float(), self.config.layernorm_epsilon)
        return (normal * functional.silu(gate.float())).flatten(2).to(dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the tensors for a checkpoint, and how ranks share them."""
        found: dict[str, Any] = mcore.make_sharded_tensors_for_checkpoint(
            dict(self.named_parameters(recurse=False)),
            prefix,
            dict.fromkeys(("convolution", "rate_bias", "decay_log"), 0),
            sharded_offsets,
            tp_group=self._tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            found |= module.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found


def delta_spec(**sizes: int) -> Any:
    """Return a new spec of a gated delta net; `sizes` are the arguments of GatedDeltaNet."""
    return mcore.ModuleSpec(GatedDeltaNet, params=sizes, submodules=DeltaSubmodules())
