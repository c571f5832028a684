"""State of a run for its display: sessions, turns, tool calls, batches, steps, weights, engines, evaluations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from turnlog.processors.core.views.fleet import Fleet
from turnlog.processors.core.views.weights import WeightChain
from turnlog.schemas.events import (
    Event,
    GroupEmitted,
    GroupRequested,
    Purpose,
    RunPlanned,
    SampleBatchFormed,
    SessionFinished,
    SessionStarted,
    StepCompleted,
    ToolCallCompleted,
    TurnCompleted,
)


@dataclass(slots=True)
class EvaluationRounds:
    """Fold of group-requests and group-scores: the groups of each evaluation round, and whether they are scored.
    Repeated records change nothing.
    """

    _groups: dict[int, set[str]] = field(default_factory=dict)
    """Round -> its groups."""
    _scored: set[str] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Fold one record; other kinds are ignored."""
        match event:
            case GroupRequested(purpose=Purpose.eval):
                self._groups.setdefault(event.dataset_epoch, set()).add(event.group_id)
            case GroupEmitted(purpose=Purpose.eval):
                self._scored.add(event.group_id)
            case _:
                pass

    def knows(self, group_id: str) -> bool:
        """Return whether the group belongs to a round that was requested."""
        return any(group_id in groups for groups in self._groups.values())

    def is_evaluated(self, number: int) -> bool:
        """Return whether a round was requested and is completely scored."""
        return number in self._groups and self._groups[number] <= self._scored

    def due(self, draws_trained: int, every: int) -> int | None:
        """Return the round to request now, or None. `every`: rollout batches between rounds; 0 for no rounds."""
        if not every:
            return None
        newest = draws_trained // every
        return None if newest in self._groups else newest


@dataclass(slots=True)
class RunView:
    """Fold of the topics of a run. Repeated records are counted once for steps and tool calls, where it matters."""

    steps: dict[int, StepCompleted] = field(default_factory=dict)
    """Batch -> its last step on the log."""
    sessions_started: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    output_tokens: int = 0
    tool_calls: dict[str, str] = field(default_factory=dict)
    batches: int = 0
    phase: str = ""
    """Phase in the last RunPlanned; empty means running."""
    lag: int = 0
    weights: WeightChain = field(default_factory=WeightChain)
    fleet: Fleet = field(default_factory=Fleet)
    rounds: EvaluationRounds = field(default_factory=EvaluationRounds)

    def apply(self, event: Event) -> None:
        """Fold one event."""
        match event:
            case RunPlanned():
                self.phase = event.phase or self.phase
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
            case _:
                self.weights.apply(event)
                self.fleet.apply(event)
                self.rounds.apply(event)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each trained batch, in order."""
        return [self.steps[index].reward_mean for index in sorted(self.steps)]

    @property
    def draws_trained(self) -> int:
        """Number of rollout batches with a step."""
        return len({step.draw_index for step in self.steps.values()})

    def is_over(self, draws: int, eval_every: int) -> bool:
        """Return whether `draws` rollout batches are trained, their weights are published and acknowledged by every
        engine, and the last evaluation round is scored. `eval_every`: rollout batches between rounds; 0 for no rounds.
        """
        loaded = all(version >= self.weights.version for version in self.fleet.acknowledged_versions().values())
        evaluated = not eval_every or self.rounds.is_evaluated(draws // eval_every)
        return self.draws_trained >= draws and self.weights.batch >= max(self.steps) and loaded and evaluated
