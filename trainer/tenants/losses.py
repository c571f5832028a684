"""Losses by the names of the Tinker API, from the trainer's own formulas where these agree.

A loss is the sum over all positions of all datums of what it assigns to each, divided by nothing. With p the current
log-prob of the target, q = `logprobs`, A = `advantages`, r = exp(p - q):

    cross_entropy          -weights p
    importance_sampling    -r A
    ppo                    -min(r A, clamp(r) A)
    cispo                  -clamp(r) A p, without a gradient through r
    dro                    -(p A - beta / 2 (p - q)^2)

Where a datum of the last four has `weights` too, they multiply each position's loss. Ratios are bounded as everywhere
in the trainer (LOG_RATIO). Source of formulas and thresholds: https://tinker-docs.thinkingmachines.ai/tinker/losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real

import torch

from turnlog.trainer.algorithms.tokens import Clip, TokenLoss, Tokens, bounded_ratio, cispo_loss, clipped_surrogate
from turnlog.trainer.tenants.errors import InvalidArgument, UnknownLoss

LOW, HIGH = "clip_low_threshold", "clip_high_threshold"


@dataclass(frozen=True, slots=True)
class TenantLoss:
    """A loss that a call can name."""

    inputs: tuple[str, ...]
    """Fields that every datum must have."""
    compute: Callable[[Tokens, Mapping[str, float]], TokenLoss]
    """(tokens, arguments) -> what each position adds, before `weights`."""
    arguments: Mapping[str, float] = field(default_factory=dict)
    """Arguments with their defaults."""

    def complete(self, config: Mapping[str, float]) -> dict[str, float]:
        """Return all arguments, with `config` in place of defaults. Raises InvalidArgument."""
        for name, value in config.items():
            if name not in self.arguments:
                known = ", ".join(self.arguments) or "none"
                raise InvalidArgument(f"the loss has no argument {name}; it has: {known}")
            if not is_number(value) or not 0 <= value < math.inf:
                raise InvalidArgument(f"{name} is {value!r}, it must be a finite number that is not negative")
        found = {**self.arguments, **{name: float(value) for name, value in config.items()}}
        if LOW in found and found[LOW] > found[HIGH]:
            raise InvalidArgument(f"{LOW} {found[LOW]:g} is above {HIGH} {found[HIGH]:g}")
        return found


def is_number(value: object) -> bool:
    """Return whether a value is a real number, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def find_loss(name: str) -> TenantLoss:
    """Return the loss of this name. Raises UnknownLoss."""
    if name not in LOSSES:
        raise UnknownLoss(f"there is no loss {name!r}; there are {', '.join(LOSSES)}")
    return LOSSES[name]


def _without_clip(value: torch.Tensor) -> TokenLoss:
    return TokenLoss(value, torch.zeros_like(value, dtype=torch.bool))


def _cross_entropy(tokens: Tokens, _: Mapping[str, float]) -> TokenLoss:
    return _without_clip(-tokens.logprobs)


def _importance_sampling(tokens: Tokens, _: Mapping[str, float]) -> TokenLoss:
    return _without_clip(-bounded_ratio(tokens.logprobs, tokens.old) * tokens.advantages)


def _clip(arguments: Mapping[str, float]) -> Clip:
    return Clip(1.0 - arguments[LOW], arguments[HIGH] - 1.0)


def _ppo(tokens: Tokens, arguments: Mapping[str, float]) -> TokenLoss:
    return clipped_surrogate(tokens, _clip(arguments))


def _cispo(tokens: Tokens, arguments: Mapping[str, float]) -> TokenLoss:
    return cispo_loss(tokens, _clip(arguments))


def _dro(tokens: Tokens, arguments: Mapping[str, float]) -> TokenLoss:
    penalty = arguments["beta"] / 2 * (tokens.logprobs - tokens.old).square()
    return _without_clip(penalty - tokens.logprobs * tokens.advantages)


RATIO = ("logprobs", "advantages")
LOSSES: dict[str, TenantLoss] = {
    "cross_entropy": TenantLoss(("weights",), _cross_entropy),
    "importance_sampling": TenantLoss(RATIO, _importance_sampling),
    "ppo": TenantLoss(RATIO, _ppo, {LOW: 0.8, HIGH: 1.2}),
    "cispo": TenantLoss(RATIO, _cispo, {LOW: 0.0, HIGH: 4.0}),
    "dro": TenantLoss(RATIO, _dro, {"beta": 0.05}),
}
"""Name -> loss."""
