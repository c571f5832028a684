"""What a runner owes to one unit: partition p of tasks and of agent.tool-results.

A unit's committed offsets are its low-water marks: what the oldest open rollout needs of each topic.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from turnlog.infra.log import Commit, Partition
from turnlog.producers.tool_calls import Results
from turnlog.schemas import topics


@dataclass(slots=True)
class OpenRollout:
    """A task that was taken and is not over."""

    offset: int
    """Of its request in tasks."""
    results_from: int
    """Answers to its calls stand at or after this offset of agent.tool-results."""


@dataclass(slots=True)
class Unit:
    """`tasks_end`, `results_end`: ends of the topics when the unit was assigned. What lies before them may have been
    begun by another owner."""

    number: int
    tasks_end: int
    results_end: int
    tasks_position: int
    """How far tasks was read."""
    results_position: int
    results_from: int = field(init=False)
    """Where this owner began to read agent.tool-results."""
    results: Results = field(default_factory=Results)
    open: dict[str, OpenRollout] = field(default_factory=dict)
    running: set[asyncio.Task[None]] = field(default_factory=set)
    caught_up: asyncio.Event = field(default_factory=asyncio.Event)
    """Every answer that an earlier owner may have received is in `results`."""

    def __post_init__(self) -> None:
        self.results_from = self.results_position
        self.advance(self.tasks_position, self.results_position)

    @property
    def tasks(self) -> Partition:
        """Its partition of tasks."""
        return Partition(topics.TASKS.name, self.number)

    @property
    def tool_results(self) -> Partition:
        """Its partition of agent.tool-results."""
        return Partition(topics.TOOL_RESULTS.name, self.number)

    def take(self, rollout_id: str, offset: int) -> bool:
        """Open the rollout of the request at `offset`; True when another owner may have begun it."""
        begun = offset < self.tasks_end
        self.open[rollout_id] = OpenRollout(offset, self.results_from if begun else self.results_position)
        self.results.expect(rollout_id)
        return begun

    def close(self, rollout_id: str) -> None:
        """The rollout is over."""
        del self.open[rollout_id]
        self.results.forget(rollout_id)

    def advance(self, tasks_position: int, results_position: int) -> None:
        """The reader is this far."""
        self.tasks_position, self.results_position = tasks_position, results_position
        if not self.caught_up.is_set() and tasks_position >= self.tasks_end and results_position >= self.results_end:
            self.results.settle()
            self.caught_up.set()

    def low_water(self) -> dict[Partition, Commit]:
        """What to commit."""
        tasks = min((rollout.offset for rollout in self.open.values()), default=self.tasks_position)
        results = min((rollout.results_from for rollout in self.open.values()), default=self.results_position)
        return {
            self.tasks: Commit.low_water(tasks, high=self.tasks_position, under_way=len(self.open)),
            self.tool_results: Commit.low_water(results, high=self.results_position),
        }
