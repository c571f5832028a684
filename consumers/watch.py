"""A run as it happens, folded from its topics: what the live display shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    Event,
    SampleBatchFormed,
    SessionFinished,
    SessionStarted,
    StepCompleted,
    ToolCallCompleted,
    TurnCompleted,
    WeightVersionPublished,
)

WATCHED = (topics.SESSIONS, topics.TURNS, topics.TOOL_RESULTS, topics.BATCHES, topics.STEPS, topics.WEIGHTS,
           topics.ENGINES)  # fmt: skip


@dataclass(slots=True)
class Picture:
    """Counts so far. A repeated record counts once where that matters (steps, calls)."""

    steps: dict[int, StepCompleted] = field(default_factory=dict)
    sessions_started: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    output_tokens: int = 0
    tool_calls: dict[str, str] = field(default_factory=dict)
    batches: int = 0
    lag: int = 0
    version: int = -1
    version_batch: int = -2
    """Last batch behind the newest version."""
    engines: dict[str, int] = field(default_factory=dict)
    """Engine -> version served; -2 when it is gone."""

    def apply(self, event: Event) -> None:
        """Fold one event."""
        match event:
            case SessionStarted():
                self.sessions_started += 1
            case SessionFinished():
                self.outcomes[event.outcome.value] += 1
            case TurnCompleted():
                self.turns += 1
                self.output_tokens += event.output_tokens
            case ToolCallCompleted():
                self.tool_calls.setdefault(event.call_id, event.status.value)
            case SampleBatchFormed():
                self.batches, self.lag = event.batch_index + 1, event.max_lag
            case StepCompleted():
                self.steps[event.batch_index] = event
            case WeightVersionPublished():
                if event.version > self.version:
                    self.version, self.version_batch = event.version, event.batch_index
            case EngineRegistered() | EngineWeightsLoaded():
                self.engines[event.engine_id] = event.version
            case EngineGone():
                self.engines[event.engine_id] = -2
            case _:
                pass  # other records of these topics are not shown

    def published_after(self, batch: int) -> bool:
        """Whether the newest weights have seen `batch`."""
        return self.version_batch >= batch

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each trained batch, in order."""
        return [self.steps[index].reward_mean for index in sorted(self.steps)]
