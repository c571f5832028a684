"""Estimator `step`: discounted rewards to go per turn, against the turns of the group at the same place.

A turn's place is the number of main turns before it: the k-th main turn, and every sub-agent or side call whose answer
that turn reads (those behind the last main turn share its place). Rewards to go run over all turns in order and are
discounted per place, so a sub-agent is credited with its own step rewards and with all that main earns after it. The
verdict, where there is one, stands behind the last turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from turnlog.processors.core.estimators import Advantages, Estimator, EstimatorOptions, Trajectory, mean_of


@dataclass(frozen=True, slots=True)
class _Placed:
    """One turn: where it stands, what it earns from here on."""

    place: int
    main: bool
    to_go: float


def step(trajectories: Sequence[Trajectory], options: EstimatorOptions) -> Advantages:
    """Reward to go minus the baseline of its place, per turn.

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


STEP = Estimator("step", 1, step, min_valid=2, by_steps=True)
