"""Advantages of a group's trajectories: pure functions registered by name and version.

An estimator sees the valid trajectories of one group in order of rollout_index. What it gives is broadcast: every
segment of a trajectory carries its number, or each turn its own. Nothing here knows how many segments there are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GRPO_EPSILON = 1e-6
"""Added to the standard deviation (DeepSeekMath, arXiv 2402.03300, section 4.1, as its implementations do)."""


@dataclass(frozen=True, slots=True)
class TurnReward:
    """One turn of a trajectory that the agent acted on."""

    reward: float = 0.0
    """Its step reward; 0 where the verifier gave none."""
    main: bool = True
    """Whether it belongs to the main lineage."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What an estimator sees of one valid rollout; rewards are transformed already."""

    reward: float
    """The verdict; the sum of the step rewards where the session expected no verdict."""
    final: float = 0.0
    """The verdict; 0 where the session expected none. Only `step` tells it from `reward`."""
    turns: tuple[TurnReward, ...] = ()
    """In order of (epoch, index), without aborted and undelivered ones."""


@dataclass(frozen=True, slots=True)
class EstimatorOptions:
    """The settings that estimators read."""

    std_ddof: int = 1
    """Delta degrees of freedom of the group's standard deviation: 1 sample, 0 population."""
    discount: float = 1.0
    """Of rewards to go, per main turn."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """One scalar per trajectory, in the order of the trajectories."""

    values: tuple[float, ...]
    baseline: float
    std: float | None
    """None for estimators that do not divide by it."""
    per_turn: tuple[tuple[float, ...], ...] | None = None
    """One number per turn of each trajectory; None: the scalar holds for every turn."""


Estimate = Callable[[Sequence[Trajectory], EstimatorOptions], Advantages]


@dataclass(frozen=True, slots=True)
class Estimator:
    """`estimate(trajectories, options)`: a pure function of at least one trajectory."""

    name: str
    version: int
    """Changes whenever the same rewards would give other numbers."""
    estimate: Estimate
    min_valid: int = 1
    """Trajectories that it needs at least: 2 where the group itself is the baseline."""
    by_steps: bool = False
    """Whether it reads step rewards; then a session that expects no verdict is valid by them alone."""
    whiten: bool = False
    """Whether the batcher whitens the advantages over the trained tokens of each batch."""

    @property
    def label(self) -> str:
        """As it stands in GroupScored."""
        return f"{self.name}/{self.version}"

    @property
    def centred(self) -> bool:
        """Whether it compares trajectories of one group, so that equal rewards teach nothing."""
        return self.min_valid > 1


def grpo(rewards: Sequence[float], ddof: int) -> Advantages:
    """(r - mean) / (std + 1e-6), std with `ddof` delta degrees of freedom; exactly 0 when all rewards are equal."""
    mean = mean_of(rewards)
    if min(rewards) == max(rewards):
        return Advantages((0.0,) * len(rewards), mean, 0.0)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof))
    return Advantages(tuple((reward - mean) / (std + GRPO_EPSILON) for reward in rewards), mean, std)


def dr_grpo(rewards: Sequence[float]) -> Advantages:
    """r - mean (Dr. GRPO, arXiv 2503.20783)."""
    mean = mean_of(rewards)
    return Advantages(tuple(reward - mean for reward in rewards), mean, None)


def rloo(rewards: Sequence[float]) -> Advantages:
    """r - mean of the others = n / (n - 1) x (r - mean) (RLOO, arXiv 2402.14740); 0 for one alone."""
    mean, count = mean_of(rewards), len(rewards)
    return Advantages(tuple(count * (reward - mean) / max(count - 1, 1) for reward in rewards), mean, None)


def reinforce(rewards: Sequence[float]) -> Advantages:
    """r (Williams 1992): no baseline."""
    return Advantages(tuple(rewards), 0.0, None)


def mean_of(rewards: Sequence[float]) -> float:
    """Rounded once, so bitwise the same in any order; the reward itself when all are equal."""
    return rewards[0] if min(rewards) == max(rewards) else math.fsum(rewards) / len(rewards)


def of_rewards(function: Callable[[Sequence[float]], Advantages]) -> Estimate:
    """The estimator that reads nothing but the trajectories' rewards."""
    return lambda trajectories, _: function([trajectory.reward for trajectory in trajectories])


def _grpo(trajectories: Sequence[Trajectory], options: EstimatorOptions) -> Advantages:
    return grpo([trajectory.reward for trajectory in trajectories], options.std_ddof)


@dataclass(frozen=True, slots=True)
class _Placed:
    """One turn: where it stands, what it earns from here on."""

    place: int
    main: bool
    to_go: float


def step(trajectories: Sequence[Trajectory], options: EstimatorOptions) -> Advantages:
    """Discounted rewards to go per turn, against the turns of the group at the same place.

    A turn's place is the number of main turns before it: the k-th main turn, and every sub-agent or side call whose
    answer that turn reads (those behind the last main turn share its place). Rewards to go run over all turns in order
    and are discounted per place, so a sub-agent is credited with its own step rewards and with all that main earns
    after it. The verdict, where there is one, stands behind the last turn.

    The baseline of place k is the mean over the k-th main turns of the trajectories that have one; with fewer than two,
    the mean over all main turns of the group. A trajectory's scalar is its first main turn's number, 0 without turns.
    """
    placed = [_placed(trajectory, options.discount) for trajectory in trajectories]
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


def _placed(trajectory: Trajectory, discount: float) -> list[_Placed]:
    """The turns in order. Without a main lineage every turn counts as main."""
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
    # REINFORCE++ (arXiv 2501.03262): whitened over the batch, without and with the group's mean taken off first.
    Estimator("reinforce_pp", 1, of_rewards(reinforce), whiten=True),
    Estimator("reinforce_pp_baseline", 1, of_rewards(dr_grpo), min_valid=2, whiten=True),
    # For a critic: the trainer makes advantages of the rewards (GAE); a group may be a single rollout.
    Estimator("none", 1, of_rewards(reinforce)),
    Estimator("step", 1, step, min_valid=2, by_steps=True),
)
