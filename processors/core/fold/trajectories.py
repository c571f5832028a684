"""Trajectories of a settled session as estimators see them, one per role: turns, rewards and validity."""

from __future__ import annotations

import math
from collections.abc import Sequence

from turnlog.processors.core.fold.session import WHOLE, SessionTree
from turnlog.processors.core.methods.estimators import Trajectory, TurnReward
from turnlog.processors.core.methods.rules import ChosenTransform, FoldRules
from turnlog.schemas.events import MaskReason, Outcome

VALID = frozenset({Outcome.completed, Outcome.truncated, Outcome.agent_error})
"""Outcomes of an agent that ran to its end. Any other outcome is an infrastructure failure, not a reward of 0."""
NEVER_ACTED_ON = frozenset({MaskReason.aborted, MaskReason.undelivered})


def exclusion_reason(tree: SessionTree, rules: FoldRules, role: str) -> str | None:
    """Return why a member's trajectory in a role is not valid; None if it is."""
    if (reason := session_exclusion(tree, rules)) is not None:
        return reason
    return "verifier_failure" if own_reward(tree, rules, role) is None else None


def session_exclusion(tree: SessionTree, rules: FoldRules) -> str | None:
    """Return why no trajectory of a session is valid; None if that depends on the role."""
    finish = tree.session.finish
    assert finish is not None
    if tree.session.erased:
        return MaskReason.erased.value
    if tree.refused:
        return MaskReason.refused.value
    if finish.outcome not in VALID or (finish.outcome is Outcome.truncated and rules.truncated == "exclude"):
        return finish.outcome.value
    return MaskReason.flagged.value if tree.flags else None


def own_reward(tree: SessionTree, rules: FoldRules, role: str) -> float | None:
    """Return the reward of a session in a role, or None.

    It is the verifier's reward for the player; for the role "", that for the session. If the session expects none and
    the estimator works by steps, it is the sum of its turns' step rewards. If the verifier failed, there is no reward,
    whatever the steps earned.
    """
    session = tree.session
    assert session.finish is not None
    verdict, expected = session.reward_of(role), bool(role) or session.finish.expects.reward
    if expected or not rules.formula.by_steps or (session.verdict is not None and not role):
        return verdict
    steps = session.steps
    if rules.version.steps_need_named_turns:
        steps = {
            turn: steps[turn] for turn in (tree.turns[order].id for order in acted_on(tree, role)) if turn in steps
        }
    given = [value for value in steps.values() if value is not None]
    return math.fsum(given) if given else None


def acted_on(tree: SessionTree, role: str) -> tuple[int, ...]:
    """Return the orders of a role's turns that the agent acted on: aborted and undelivered turns earn nothing and cost
    nothing.
    """
    mine = [order for order in range(len(tree.turns)) if tree.masked.get(order) not in NEVER_ACTED_ON]
    return tuple(mine) if tree.roles == WHOLE else tuple(order for order in mine if tree.role_of(order) == role)


def trajectory(tree: SessionTree, transforms: Sequence[ChosenTransform], role: str) -> Trajectory:
    """Return a valid session in a role as its estimator sees it. A turn without a step reward has 0. Raises
    BrokenMethod.
    """
    session, main, of = tree.session, tree.lineages.main, tree.lineages.of
    steps, orders = session.steps, acted_on(tree, role)
    lengths = [len(tree.turns[order].tokens.output) for order in orders]
    turns = tuple(
        TurnReward(
            _transform_reward(steps.get(tree.turns[order].id), length, transforms) if steps else 0.0,
            tree.lineages.leads(order) if role else of[order] == main,
        )
        for order, length in zip(orders, lengths, strict=True)
    )
    verdict = session.reward_of(role)
    if verdict is None:
        return Trajectory(math.fsum(turn.reward for turn in turns), 0.0, turns)
    final = _transform_reward(verdict, sum(lengths), transforms)
    return Trajectory(final, final, turns)


def _transform_reward(reward: float | None, tokens: int, transforms: Sequence[ChosenTransform]) -> float:
    """Return the transformed reward of a turn or trajectory of so many sampled tokens; 0 without one."""
    if reward is None:
        return 0.0
    for transform in transforms:
        reward = transform(reward, tokens)
    return reward
