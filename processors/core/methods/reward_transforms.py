"""What may be done to a reward before advantages are estimated: pure functions of one number, by name and version.

They see each verdict and each step reward alone, in the order of the setting. What the verifier said stays in
RolloutScore and in the samples; only advantages and group filters see the transformed value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardTransform:
    """`transform(reward, *arguments)`; `arguments` names what a setting must give: `clip:LOW:HIGH`."""

    name: str
    version: int
    transform: Callable[..., float]
    arguments: tuple[str, ...] = ()


def scale(reward: float, factor: float) -> float:
    """reward x factor."""
    return reward * factor


def shift(reward: float, offset: float) -> float:
    """reward + offset: changes nothing under a centred estimator."""
    return reward + offset


def clip(reward: float, low: float, high: float) -> float:
    """The nearest value in [low, high]."""
    return min(max(reward, low), high)


def threshold(reward: float, least: float) -> float:
    """1 where the reward is at least `least`, else 0."""
    return 1.0 if reward >= least else 0.0


TRANSFORMS = (
    RewardTransform("scale", 1, scale, ("factor",)),
    RewardTransform("shift", 1, shift, ("offset",)),
    RewardTransform("clip", 1, clip, ("low", "high")),
    RewardTransform("threshold", 1, threshold, ("least",)),
)
