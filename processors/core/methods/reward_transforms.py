"""Transforms of rewards before advantages are estimated: pure functions of one number, by name and version.

They are applied to each verifier's reward and each step reward separately, in the order of the setting. RolloutScore
and samples keep the original reward; only advantages and group filters see the transformed value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardTransform:
    """A named transform `transform(reward, *arguments)`. `arguments` names what a setting must give:
    `clip:LOW:HIGH`.
    """

    name: str
    version: int
    transform: Callable[..., float]
    arguments: tuple[str, ...] = ()


def scale(reward: float, factor: float) -> float:
    """Return reward x factor."""
    return reward * factor


def shift(reward: float, offset: float) -> float:
    """Return reward + offset; it changes nothing under a centred estimator."""
    return reward + offset


def clip(reward: float, low: float, high: float) -> float:
    """Return the nearest value in [low, high]."""
    return min(max(reward, low), high)


def threshold(reward: float, least: float) -> float:
    """Return 1 if the reward is at least `least`, else 0."""
    return 1.0 if reward >= least else 0.0


TRANSFORMS = (
    RewardTransform("scale", 1, scale, ("factor",)),
    RewardTransform("shift", 1, shift, ("offset",)),
    RewardTransform("clip", 1, clip, ("low", "high")),
    RewardTransform("threshold", 1, threshold, ("least",)),
)
