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

    def __init__(self) -> None:
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

    def waits_for(self, *, batch_to_publish: int, first: bool) -> str:
        """What stands in the way of asking for groups; empty when nothing does. `batch_to_publish`: the batch whose
        weights must be out by now (Admission), -1 before any; `first`: nothing was asked for yet.

        A step and its weights are one transaction of the trainer over two topics, so a reader may meet the step first;
        and a trainer that went back to a checkpoint publishes older weights under a new number until it has caught up.
        """
        if self.version < 0:
            return "no weights are published yet: is the trainer running?"
        if self._published_batch < batch_to_publish:
            return f"the weights after batch {batch_to_publish} are not published yet"
        if first:
            return self._first_acknowledgements()
        return ""

    def version_for(self, *, versions_ahead: int, max_lag: int) -> int:
        """The oldest version that a group may be sampled with to be at most `max_lag` behind in the draw that it has a
        slot in, `versions_ahead` versions from now; the newest one at most."""
        return max(min(self.version, self.version + versions_ahead - max_lag), 0)

    def _first_acknowledgements(self) -> str:
        """Before the very first task every registered engine serves the first weights."""
        if not self._engines:
            return "no engine is registered yet: is a weight loader running?"
        behind = sorted(engine for engine, version in self._engines.items() if version < self.version)
        return f"weight version {self.version} is not loaded yet by {', '.join(behind)}" if behind else ""
