"""What the estimators see of an assembled session, and what they give back to its samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnlog.processors.core.assembly import SessionTree
from turnlog.processors.core.methods.catalogue import ChosenTransform
from turnlog.processors.core.methods.estimators import Trajectory, TurnReward
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import MaskReason

NEVER_ACTED_ON = frozenset({MaskReason.aborted, MaskReason.undelivered})


@dataclass(frozen=True, slots=True)
class Credit:
    """What a valid trajectory is worth, as its samples say it."""

    reward: float
    """As the verifiers said it, before any transform."""
    advantage: float
    per_turn: Mapping[int, float] = field(default_factory=dict)
    """By turn order; the others carry `advantage`."""


def own_reward(tree: SessionTree, rules: FoldRules) -> float | None:
    """The verdict; of an estimator by steps, the sum of what the turns of a session earned that expects no verdict;
    None for neither. A failed verdict is none, whatever the steps earned.
    """
    session = tree.session
    assert session.finish is not None
    if session.verdict is not None or session.finish.expects.reward or not rules.formula.by_steps:
        return session.reward
    steps = session.steps
    if rules.version.steps_need_named_turns:
        steps = {turn: steps[turn] for turn in (tree.turns[order].id for order in acted_on(tree)) if turn in steps}
    given = [value for value in steps.values() if value is not None]
    return math.fsum(given) if given else None


def acted_on(tree: SessionTree) -> tuple[int, ...]:
    """Orders of the turns that the agent acted on: what is aborted or undelivered earns nothing and costs nothing."""
    return tuple(order for order in range(len(tree.turns)) if tree.masked.get(order) not in NEVER_ACTED_ON)


def trajectory(tree: SessionTree, transforms: Sequence[ChosenTransform]) -> Trajectory:
    """A valid session as its estimator sees it. A turn without a step reward has 0. Raises BrokenMethod."""
    session, main = tree.session, tree.lineages.main
    steps = session.steps
    turns = tuple(
        TurnReward(_transformed(steps.get(tree.turns[order].id), transforms), tree.lineages.of[order] == main)
        for order in acted_on(tree)
    )
    verdict = session.reward
    if verdict is None:
        return Trajectory(math.fsum(turn.reward for turn in turns), 0.0, turns)
    final = _transformed(verdict, transforms)
    return Trajectory(final, final, turns)


def _transformed(reward: float | None, transforms: Sequence[ChosenTransform]) -> float:
    if reward is None:
        return 0.0
    for transform in transforms:
        reward = transform(reward)
    return reward
