"""Whether the weights that new rollouts must be sampled with are there: a fold of weight-versions and engine-status."""

from __future__ import annotations

from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
    WeightVersionPublished,
)


class Readiness:
    """Repeats change nothing; each topic is read in its own order."""

    def __init__(self, *, publish_every: int) -> None:
        self._publish_every = publish_every
        self._published_batch = -1
        self._engines: dict[str, int] = {}
        """Live engine -> weight version it serves."""
        self.version = -1
        """The newest published weight version; -1 before the first."""

    def apply(self, event: Event) -> None:
        """Fold one record; others are passed over."""
        match event:
            case WeightVersionPublished() if event.version > self.version:
                self.version, self._published_batch = event.version, event.batch_index
            case EngineRegistered() | EngineWeightsLoaded() | EngineWeightsRefused():
                self._engines[event.engine_id] = event.version
            case EngineDraining() | EngineGone():
                self._engines.pop(event.engine_id, None)

    def waits_for(self, *, trained_batch: int, first: bool) -> str:
        """What stands in the way of asking for groups; empty when nothing does. `trained_batch`: last batch of the
        draws trained so far, -1 before any; `first`: nothing was asked for yet.

        A step and its weights are one transaction of the trainer over two topics, so a reader may meet the step first;
        and a trainer that went back to a checkpoint publishes older weights under a new number until it has caught up.
        With publish_every > 1 not every step brings weights, and the newest published ones are right.
        """
        if self.version < 0:
            return "no weights are published yet: is the trainer running?"
        if self._publish_every == 1 and self._published_batch < trained_batch:
            return f"the weights after batch {trained_batch} are not published yet"
        if first:
            return self._first_acknowledgements()
        return ""

    def _first_acknowledgements(self) -> str:
        """Before the very first task every registered engine serves the first weights."""
        if not self._engines:
            return "no engine is registered yet: is a weight loader running?"
        behind = sorted(engine for engine, version in self._engines.items() if version < self.version)
        return f"weight version {self.version} is not loaded yet by {', '.join(behind)}" if behind else ""
