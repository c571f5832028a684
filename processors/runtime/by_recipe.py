"""Metrics per recipe: outcomes, rewards and lengths of its sessions, and the staleness of the rows that train.

A session is counted once, when its tree is committed; a row when a rollout batch takes it.
"""

from __future__ import annotations

from prometheus_client import Counter, Summary

from turnlog.processors.core.fold.settlement import PASS
from turnlog.processors.core.views.weights import HeldVersion
from turnlog.schemas.events import Event, SegmentSample, SessionStarted, TurnTreeAssembled

SESSIONS = Counter("turnlog_recipe_sessions", "Sessions that settled", ["recipe", "outcome"])
REWARD = Summary("turnlog_recipe_reward", "Rewards of sessions that settled", ["recipe"])
PASSED = Counter("turnlog_recipe_passed", "Sessions that settled with a reward of at least 1", ["recipe"])
OUTPUT = Summary("turnlog_recipe_output_tokens", "Output tokens of sessions that settled", ["recipe"])
LAG = Summary("turnlog_recipe_lag_versions", "Lag of the oldest token of rows that a rollout batch took", ["recipe"])


class SettledSessions:
    """The recipes of sessions whose trees are not committed yet, since a tree does not name its recipe."""

    def __init__(self) -> None:
        self._recipes: dict[str, str] = {}

    def remember_tree(self, tree: TurnTreeAssembled, started: SessionStarted | None) -> None:
        """Remember the recipe of a tree that will be committed."""
        if started is not None:
            self._recipes[tree.session_id] = started.recipe

    def count_committed(self, event: Event) -> None:
        """Count a committed event, if it is a tree."""
        recipe = self._recipes.pop(event.session_id, None) if isinstance(event, TurnTreeAssembled) else None
        if recipe is None or not isinstance(event, TurnTreeAssembled):
            return
        SESSIONS.labels(recipe, event.outcome.value).inc()
        OUTPUT.labels(recipe).observe(event.books.sampled)
        if event.reward is not None:
            REWARD.labels(recipe).observe(event.reward)
            PASSED.labels(recipe).inc(event.reward >= PASS)


def count_row(sample: SegmentSample, held: HeldVersion) -> None:
    """Count a row of a rollout batch that is formed while the trainer holds version `held`."""
    LAG.labels(sample.recipe).observe(held.lag(sample.weight_version_min))
