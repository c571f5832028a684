"""Elementwise work of a layer in few passes over memory: heads with norm and rotary positions, SwiGLU, and norms whose
stored scale is around zero.

Each is an autograd function whose forward and backward pass are plain functions of tensors that compute in float32.
They keep only their input for the gradient. On CUDA torch.compile makes one kernel of each (`Compiled`); elsewhere, and
where that fails, they run as they are written.

Formulas: RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional

log = logging.getLogger(__name__)

Function = Callable[..., Any]


class Compiled:
    """A function of tensors that torch.compile translates when it is first called compiled.

    Tensors of two or more dimensions have an entry for each token along the first, whose number may differ from call to
    call. Everything else is constant in a translation: other sizes, and what is given by name.
    """

    def __init__(self, function: Function, backend: Any = "inductor") -> None:
        """`backend` is that of torch.compile."""
        self.function, self._backend = function, backend
        self._translated: Function | None = None
        self.failed = False

    def __call__(self, *tensors: torch.Tensor | None, compiled: bool, **constants: Any) -> Any:
        """Call the function, translated if `compiled` is set. A translation that fails is warned of once; from then on
        the function runs as it is written."""
        if not compiled or self.failed:
            return self.function(*tensors, **constants)
        try:
            if self._translated is None:
                self._translated = torch.compile(self.function, dynamic=False, fullgraph=True, backend=self._backend)
            for tensor in tensors:
                if tensor is not None and tensor.dim() > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return self._translated(*tensors, **constants)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            self.failed = True
            log.warning(
                "torch.compile failed for %s, which now runs uncompiled and slower; set trainer.compiled to off to "
                "skip the attempt",
                self.function.__name__,
                exc_info=True,
            )
            return self.function(*tensors, **constants)


NAMES = ("heads", "swiglu", "norms", "logprobs")
"""Names of the parts that can be compiled, for LearnerOptions.compiled."""


def compiled_parts(setting: str, device: str) -> frozenset[str]:
    """Return which of NAMES are compiled on a device of this type. `setting` is auto (all of them on CUDA), off, or
    names separated by commas, which are compiled on any device. Raises ValueError for another name."""
    if setting in ("auto", "off"):
        return frozenset(NAMES if setting == "auto" and device == "cuda" else ())
    names = frozenset(setting.split(","))
    if not names <= set(NAMES):
        raise ValueError(f"compiled = {setting!r} must be auto, off, or some of {','.join(NAMES)}")
    return names


def is_fused(config: Any, name: str, dtype: torch.dtype) -> bool:
    """Return whether layers of this TransformerConfig do the work called `name` by this module: its attribute `fused`
    is set, and the work is compiled or the dtype is float32. In another dtype and uncompiled, each operator here would
    convert to float32 first."""
    return getattr(config, "fused", True) and (is_compiled(config, name) or dtype is torch.float32)


def is_compiled(config: Any, name: str) -> bool:
    """Return whether one of NAMES is compiled: the TransformerConfig's attribute `compiled` has those that are."""
    return name in getattr(config, "compiled", ())


def rotary_table(angles: torch.Tensor, factor: float = 1.0, *, interleaved: bool = False) -> torch.Tensor:
    """Return the table that `rotate` multiplies by, [..., 2 d] float32, from angles [..., d] in radians. The two
    dimensions that rotate together have the same angle: neighbours if `interleaved`, else those half of d apart.

    The first d are factor x cos, the others factor x sin, with the sign of the dimension that they are added to.
    """
    cos, sin = angles.cos() * factor, angles.sin() * factor
    pairs = (-1, 2) if interleaved else (2, -1)
    first, second = sin.reshape(*sin.shape[:-1], *pairs).unbind(-1 if interleaved else -2)
    return torch.cat([cos, torch.stack([-first, second], -1 if interleaved else -2).flatten(-2)], -1)


def _swap_pairs(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Swap the dimensions that rotate together."""
    pairs = (-1, 2) if interleaved else (2, -1)
    return x.reshape(*x.shape[:-1], *pairs).flip(-1 if interleaved else -2).flatten(-2)


def turn(x: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first d of the last dimension by a table [..., 2 d]."""
    size = table.size(-1) // 2
    if size < x.size(-1):
        return torch.cat([turn(x[..., :size], table, interleaved=interleaved), x[..., size:]], -1)
    return x * table[..., :size] + _swap_pairs(x, interleaved) * table[..., size:]


def _turn_back(slope: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Return the gradient of x from that of `turn`."""
    size = table.size(-1) // 2
    if size < slope.size(-1):
        return torch.cat([_turn_back(slope[..., :size], table, interleaved=interleaved), slope[..., size:]], -1)
    return slope * table[..., :size] + _swap_pairs(slope * table[..., size:], interleaved)


def _rate(x: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def _norm_slopes(
    slope: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, epsilon: float, to_scale: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of x and, if wanted, of the scale, of y = x rate(x) scale; all in float32."""
    rate = _rate(x, epsilon)
    normal, scaled = x * rate, slope * scale
    to_x = rate * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return to_x, (slope * normal).flatten(0, -2).sum(0) if to_scale else None


def _make_heads(
    mixed: torch.Tensor,
    table: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    *,
    each: int,
    epsilon: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    def make(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        wide = x.float()
        if scale is not None:
            wide = wide * _rate(wide, epsilon) * (scale.float() + offset)
        return turn(wide, table).to(x.dtype)

    return make(mixed[..., :each, :], q_scale), make(mixed[..., -2:-1, :], k_scale)


def _heads_slopes(
    mixed: torch.Tensor,
    table: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    to_query: torch.Tensor,
    to_key: torch.Tensor,
    *others: torch.Tensor,
    each: int,
    epsilon: float,
    offset: float,
    to_scales: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    def back(
        x: torch.Tensor, scale: torch.Tensor | None, slope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        slope = _turn_back(slope.float(), table)
        if scale is None:
            return slope.to(x.dtype), None
        to_x, to_scale = _norm_slopes(slope, x.float(), scale.float() + offset, epsilon, to_scales)
        return to_x.to(x.dtype), None if to_scale is None else to_scale.to(scale.dtype)

    of_query, of_q = back(mixed[..., :each, :], q_scale, to_query)
    of_key, of_k = back(mixed[..., -2:-1, :], k_scale, to_key)
    *gate, value = others
    return torch.cat([of_query, *gate, of_key, value], -2), of_q, of_k


make_heads, heads_slopes = Compiled(_make_heads), Compiled(_heads_slopes)


@dataclass(frozen=True, slots=True)
class HeadRules:
    """Constants of making queries and keys of a projection."""

    each: int
    """Number of queries that share a key."""
    gated: bool = False
    """Whether as many gates stand behind the queries."""
    epsilon: float = 1e-6
    offset: float = 0.0
    """Added to the scales of the norms: 1 for norms around zero."""
    compiled: bool = False


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        mixed: torch.Tensor,
        table: torch.Tensor,
        q_scale: torch.Tensor | None,
        k_scale: torch.Tensor | None,
        rules: HeadRules,
    ) -> tuple[torch.Tensor, ...]:
        context.constants = {
            "each": rules.each, "epsilon": rules.epsilon, "offset": rules.offset, "compiled": rules.compiled,
        }  # fmt: skip
        query, key = make_heads(mixed, table, q_scale, k_scale, **context.constants)
        context.save_for_backward(mixed, table, q_scale, k_scale)
        others = (mixed[..., rules.each : 2 * rules.each, :],) if rules.gated else ()
        return query, key, *others, mixed[..., -1:, :]

    @staticmethod
    def backward(context: Any, *slopes: torch.Tensor) -> Any:
        to_scales = any(context.needs_input_grad[2:4])
        to_mixed, to_q, to_k = heads_slopes(*context.saved_tensors, *slopes, to_scales=to_scales, **context.constants)
        return to_mixed, None, to_q, to_k, None


def heads(
    mixed: torch.Tensor,
    table: torch.Tensor,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    rules: HeadRules,
) -> tuple[torch.Tensor, ...]:
    """Return queries [s, b, groups x each, d], keys and values [s, b, groups, d], and gates like the queries if there
    are any, from a projection [s, b, groups, each (+ each gates) + 2, d] and a table of rotary positions [s, 1 or b, 1,
    2 x rotated] (`rotary_table`).

    Queries and keys are normalised by RMSNorm if there are scales [d], then rotated. Values and gates are views.
    """
    size = mixed.shape[:2]
    found = _Heads.apply(mixed.flatten(0, 1), _by_token(table, size)[:, None], q_scale, k_scale, rules)  # type: ignore[no-untyped-call]
    query, key, *gate, value = (one.unflatten(0, size).flatten(2, 3) for one in found)
    return query, key, value, *gate


def _by_token(table: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """Return a table [s, 1 or b, 1, d] as [s b, 1, d]; a copy only if the rows of the table must be repeated."""
    return table.expand(*size, -1, -1).flatten(0, 1)


def _rotate(x: torch.Tensor, table: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    return turn(x.float(), table, interleaved=interleaved).to(x.dtype)


def _rotate_back(slope: torch.Tensor, table: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    return _turn_back(slope.float(), table, interleaved=interleaved).to(slope.dtype)


rotate_forward, rotate_backward = Compiled(_rotate), Compiled(_rotate_back)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, table: torch.Tensor, interleaved: bool, compiled: bool) -> torch.Tensor:
        context.save_for_backward(table)
        context.constants = {"interleaved": interleaved, "compiled": compiled}
        found: torch.Tensor = rotate_forward(x, table, **context.constants)
        return found

    @staticmethod
    def backward(context: Any, slope: torch.Tensor) -> Any:
        return rotate_backward(slope, *context.saved_tensors, **context.constants), None, None, None


def rotate(x: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False, compiled: bool = False) -> torch.Tensor:
    """Return heads [s, b, n, d] with the first of d rotated by a table [s, 1 or b, 1, 2 x rotated]; keeps no more than
    the table for the gradient."""
    size = x.shape[:2]
    found: torch.Tensor = _Rotation.apply(x.flatten(0, 1), _by_token(table, size), interleaved, compiled)  # type: ignore[no-untyped-call]
    return found.view(*size, *found.shape[1:])


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return (functional.silu(gate.float()) * up.float()).to(x.dtype)


def _swiglu_slopes(slope: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = (half.float() for half in x.chunk(2, -1))
    wide = slope.float()
    to_gate = torch.ops.aten.silu_backward(wide * up, gate)
    return torch.cat([to_gate, wide * functional.silu(gate)], -1).to(x.dtype)


swiglu_forward, swiglu_backward = Compiled(_swiglu), Compiled(_swiglu_slopes)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, compiled: bool) -> torch.Tensor:
        context.save_for_backward(x)
        context.compiled = compiled
        found: torch.Tensor = swiglu_forward(x, compiled=compiled)
        return found

    @staticmethod
    def backward(context: Any, slope: torch.Tensor) -> Any:
        (x,) = context.saved_tensors
        return swiglu_backward(slope, x, compiled=context.compiled), None


def swiglu(x: torch.Tensor, *, compiled: bool = False) -> torch.Tensor:
    """Return silu(gate) up [..., f] of [..., 2 f], gate before up."""
    found: torch.Tensor = _SwiGLU.apply(x.flatten(0, -2), compiled)  # type: ignore[no-untyped-call]
    return found.view(*x.shape[:-1], -1)


def _norm(x: torch.Tensor, scale: torch.Tensor, *, epsilon: float, offset: float) -> torch.Tensor:
    wide = x.float()
    return (wide * _rate(wide, epsilon) * (scale.float() + offset)).to(x.dtype)


def _norm_back(
    slope: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, *, epsilon: float, offset: float, to_scale: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    to_x, of_scale = _norm_slopes(slope.float(), x.float(), scale.float() + offset, epsilon, to_scale)
    return to_x.to(x.dtype), None if of_scale is None else of_scale.to(scale.dtype)


norm_forward, norm_backward = Compiled(_norm), Compiled(_norm_back)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, scale: torch.Tensor, epsilon: float, offset: float, compiled: bool
    ) -> torch.Tensor:
        context.save_for_backward(x, scale)
        context.constants = {"epsilon": epsilon, "offset": offset, "compiled": compiled}
        found: torch.Tensor = norm_forward(x, scale, **context.constants)
        return found

    @staticmethod
    def backward(context: Any, slope: torch.Tensor) -> Any:
        found = norm_backward(slope, *context.saved_tensors, to_scale=context.needs_input_grad[1], **context.constants)
        return *found, None, None, None


def norm_around_zero(x: torch.Tensor, scale: torch.Tensor, epsilon: float, *, compiled: bool = False) -> torch.Tensor:
    """Return RMSNorm of the last dimension with the scale 1 + `scale`, which bfloat16 would round, in float32."""
    found: torch.Tensor = _Norm.apply(x.flatten(0, -2), scale, epsilon, 1.0, compiled)  # type: ignore[no-untyped-call]
    return found.view(x.shape)
