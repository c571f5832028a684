"""Transforms of rewards before advantages are estimated: pure functions of a reward, by name and version.

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
    reads_tokens: bool = False
    """Whether it is called as `transform(reward, tokens, *arguments)`, with the number of tokens that the policy
    sampled in what the reward judges: in the turn for a step reward, else in all turns of the trajectory that the agent
    acted on.
    """
    fault: Callable[..., str] | None = None
    """Check `fault(*arguments)` of the setting: why these numbers cannot be used, or an empty string."""


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


def overlong(reward: float, tokens: int, longest: float, buffer: float, penalty: float) -> float:
    """Return the reward less the soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    The punishment rises from 0 to `penalty` in the last `buffer` tokens before `longest`, and stays there. The paper
    has a penalty of 1.
    """
    return reward - penalty * min(1.0, max(0.0, (tokens - (longest - buffer)) / buffer))


def fault_of_overlong(longest: float, buffer: float, penalty: float) -> str:
    """Return why `overlong` cannot use its arguments."""
    if not 0 < buffer <= longest:
        return "BUFFER must be above 0 and at most LONGEST"
    return "" if penalty >= 0 else "PENALTY must not be negative"


TRANSFORMS = (
    RewardTransform("scale", 1, scale, ("factor",)),
    RewardTransform("shift", 1, shift, ("offset",)),
    RewardTransform("clip", 1, clip, ("low", "high")),
    RewardTransform("threshold", 1, threshold, ("least",)),
    RewardTransform("overlong", 1, overlong, ("longest", "buffer", "penalty"), True, fault_of_overlong),
)
