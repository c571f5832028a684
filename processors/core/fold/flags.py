"""Flags of a settled session: which detectors of cheating found something in it, from its own records alone."""

from __future__ import annotations

from collections.abc import Mapping

from turnlog.processors.core.cheating.actions import TurnText, trace
from turnlog.processors.core.cheating.detectors import findings
from turnlog.processors.core.fold.session import SessionTree
from turnlog.processors.core.fold.trajectories import own_reward
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.core.turns import TurnKey, key_of


def flags(tree: SessionTree, texts: Mapping[TurnKey, TurnText], rules: FoldRules) -> tuple[str, ...]:
    """Return the names of the detectors of [fold] exclude_flagged that flag a session, sorted.

    `texts` holds the messages of its turns. Only turns that its finish names are looked at. A session without a reward
    above [fold] flagged_above has no success to be suspicious of. Raises BrokenMethod.
    """
    session = tree.session
    rewards = [reward for role in tree.roles if (reward := own_reward(tree, rules, role)) is not None]
    reward = max(rewards, default=None)
    if reward is None or reward <= rules.flagged_above:
        return ()
    assert session.started is not None
    turns = [texts[key] for turn in tree.turns if (key := key_of(turn.id)) in texts]
    looked_at = trace(
        turns, session_id=session.session_id, task_id=session.started.task_id, recipe=session.started.recipe,
        hidden=session.started.environment.hidden, reward=reward,
    )  # fmt: skip
    return tuple(sorted({found.detector for found in findings(looked_at, rules.detectors)}))
