"""Advantages of a group's trajectories: pure functions registered by name and version.

An estimator receives the valid trajectories of one group in order of rollout_index. Its result is broadcast: every
segment of a trajectory carries the trajectory's advantage, or each turn its own. The number of segments plays no role.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GRPO_EPSILON = 1e-6
"""Added to the standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1, as in its implementations)."""


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A turn of a trajectory that the agent acted on."""

    reward: float = 0.0
    """Step reward of the turn; 0 if the verifier assigned none."""
    main: bool = True
    """Whether it belongs to the main lineage."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An estimator's view of one valid rollout; rewards are already transformed."""

    reward: float
    """The verifier's reward, or the sum of the step rewards if the session expected none."""
    final: float = 0.0
    """The verifier's reward, or 0 if the session expected none. Only the estimator `step` distinguishes it from
    `reward`.
    """
    turns: tuple[TurnReward, ...] = ()
    """Turns in order of (epoch, index), without aborted and undelivered ones."""


@dataclass(frozen=True, slots=True)
class EstimatorOptions:
    """The settings that estimators read."""

    std_ddof: int = 1
    """Delta degrees of freedom of the group's standard deviation: 1 for the sample's, 0 for the population's."""
    discount: float = 1.0
    """Discount factor of rewards to go, per main turn."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The result of an estimator: one scalar per trajectory, in the order of the trajectories."""

    values: tuple[float, ...]
    baseline: float
    std: float | None
    """Standard deviation of the rewards; None for estimators that do not divide by it."""
    per_turn: tuple[tuple[float, ...], ...] | None = None
    """Advantages per turn of each trajectory; None if the scalar holds for every turn."""


Estimate = Callable[[Sequence[Trajectory], EstimatorOptions], Advantages]


@dataclass(frozen=True, slots=True)
class Estimator:
    """A named estimator. `estimate(trajectories, options)` is a pure function of at least one trajectory."""

    name: str
    version: int
    """Must be raised whenever the same rewards would give other advantages."""
    estimate: Estimate
    min_valid: int = 1
    """Minimum number of valid trajectories: 2 if the group itself is the baseline."""
    by_steps: bool = False
    """Whether it reads step rewards. If so, a session that expects no verifier's reward is valid by its step rewards
    alone.
    """
    whiten: bool = False
    """Whether the batcher whitens the advantages over the trained tokens of each batch."""

    @property
    def label(self) -> str:
        """Label in GroupScored: name/version."""
        return f"{self.name}/{self.version}"

    @property
    def is_group_relative(self) -> bool:
        """Whether it compares trajectories of one group, so that equal rewards give no learning signal."""
        return self.min_valid > 1


def grpo(rewards: Sequence[float], ddof: int) -> Advantages:
    """Return (r - mean) / (std + 1e-6), std with `ddof` delta degrees of freedom; exactly 0 if all rewards are
    equal.
    """
    mean = mean_of(rewards)
    if min(rewards) == max(rewards):
        return Advantages((0.0,) * len(rewards), mean, 0.0)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof))
    return Advantages(tuple((reward - mean) / (std + GRPO_EPSILON) for reward in rewards), mean, std)


def dr_grpo(rewards: Sequence[float]) -> Advantages:
    """Return r - mean (Dr. GRPO, arXiv 2503.20783)."""
    mean = mean_of(rewards)
    return Advantages(tuple(reward - mean for reward in rewards), mean, None)


def rloo(rewards: Sequence[float]) -> Advantages:
    """Return r - mean of the others = n / (n - 1) x (r - mean) (RLOO, arXiv 2402.14740); 0 for a single trajectory."""
    mean, count = mean_of(rewards), len(rewards)
    return Advantages(tuple(count * (reward - mean) / max(count - 1, 1) for reward in rewards), mean, None)


def reinforce(rewards: Sequence[float]) -> Advantages:
    """Return r, without a baseline (Williams 1992)."""
    return Advantages(tuple(rewards), 0.0, None)


def mean_of(rewards: Sequence[float]) -> float:
    """Return the mean, rounded once and therefore bitwise equal in any order; the reward itself if all are equal."""
    return rewards[0] if min(rewards) == max(rewards) else math.fsum(rewards) / len(rewards)


def of_rewards(function: Callable[[Sequence[float]], Advantages]) -> Estimate:
    """Return an estimator that reads only the trajectories' rewards."""
    return lambda trajectories, _: function([trajectory.reward for trajectory in trajectories])


def _grpo(trajectories: Sequence[Trajectory], options: EstimatorOptions) -> Advantages:
    return grpo([trajectory.reward for trajectory in trajectories], options.std_ddof)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A turn with its place and its reward to go."""

    place: int
    main: bool
    to_go: float


def step(trajectories: Sequence[Trajectory], options: EstimatorOptions) -> Advantages:
    """Return discounted rewards to go per turn, relative to the group's turns at the same place.

    A turn's place is the number of main turns before it: the k-th main turn, and every sub-agent or side call whose
    answer that turn reads (those after the last main turn share its place). Rewards to go run over all turns in order
    and are discounted per place, so a sub-agent is credited with its own step rewards and with everything that main
    earns after it. The verifier's reward, if there is one, is earned after the last turn.

    The baseline of place k is the mean over the k-th main turns of the trajectories that have one; with fewer than two,
    the mean over all main turns of the group. A trajectory's scalar is the number of its first main turn, 0 without
    turns.
    """
    placed = [_place_turns(trajectory, options.discount) for trajectory in trajectories]
    at: defaultdict[int, list[float]] = defaultdict(list)
    for turns in placed:
        for turn in turns:
            if turn.main:
                at[turn.place].append(turn.to_go)
    everything = [value for values in at.values() for value in values]
    overall = mean_of(everything) if everything else 0.0
    means = {place: mean_of(values) if len(values) > 1 else overall for place, values in at.items()}
    per_turn = tuple(tuple(turn.to_go - means[turn.place] for turn in turns) for turns in placed)
    firsts = tuple(
        next((value for turn, value in zip(turns, values, strict=True) if turn.main), 0.0)
        for turns, values in zip(placed, per_turn, strict=True)
    )
    return Advantages(firsts, means.get(0, 0.0), None, per_turn)


def _place_turns(trajectory: Trajectory, discount: float) -> list[_Placed]:
    """Return the turns in order, with place and reward to go. Without a main lineage every turn counts as main."""
    mains = [turn.main for turn in trajectory.turns]
    if not any(mains):
        mains = [True] * len(mains)
    last = sum(mains) - 1
    before, places = 0, []
    for main in mains:
        places.append(min(before, last))
        before += main
    found: list[_Placed] = []
    to_go, place = trajectory.final, last
    for turn, main, here in zip(reversed(trajectory.turns), reversed(mains), reversed(places), strict=True):
        to_go = turn.reward + to_go * (discount if place > here else 1.0)
        place = here
        found.append(_Placed(here, main, to_go))
    return found[::-1]


ESTIMATORS = (
    Estimator("grpo", 1, _grpo, min_valid=2),
    Estimator("dr_grpo", 1, of_rewards(dr_grpo), min_valid=2),
    Estimator("rloo", 1, of_rewards(rloo), min_valid=2),
    Estimator("reinforce", 1, of_rewards(reinforce)),
    # REINFORCE++ (arXiv 2501.03262): whitened over the batch, without and with the group's mean subtracted first.
    Estimator("reinforce_pp", 1, of_rewards(reinforce), whiten=True),
    Estimator("reinforce_pp_baseline", 1, of_rewards(dr_grpo), min_valid=2, whiten=True),
    # For a critic: the trainer computes advantages from the rewards (GAE); a group may be a single rollout.
    Estimator("none", 1, of_rewards(reinforce)),
    Estimator("step", 1, step, min_valid=2, by_steps=True),
)
