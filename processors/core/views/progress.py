"""Progress of a run: rollout batches formed, batches trained, versions published, and who may use a shared device.

Folds of manifests, steps and versions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from turnlog.processors.core.views.weights import HeldVersion, WeightChain
from turnlog.schemas.events import (
    BatchSample,
    BatchSkipped,
    DroppedSample,
    Event,
    SampleBatchFormed,
    StepCompleted,
    WeightVersionPublished,
)


@dataclass(slots=True)
class DeviceTurn:
    """The current user of devices that engines and trainer share ([engine] colocate).

    The trainer owns them from the time a batch is formed; the engines own them again once weights are published that
    include every batch. A fold of manifests and versions, which may be interleaved in any order.
    """

    formed: int = -1
    """Index of the newest batch formed; -1 before the first."""
    weights: WeightChain = field(default_factory=WeightChain)

    def apply(self, event: Event) -> None:
        """Fold one record; ignore records of other types."""
        self.weights.apply(event)
        if isinstance(event, SampleBatchFormed):
            self.formed = max(self.formed, event.batch_index)

    @property
    def trainers(self) -> bool:
        """Whether engines must release the devices to the trainer."""
        return self.formed > self.weights.batch


class BatchProgress:
    """Fold of three topics, each in offset order and interleaved in any order; repeated records change nothing.

    It retains one number per rollout batch that publishes weights, and of each weight version what WeightChain does;
    everything else concerns unfinished rollout batches. A record costs O(groups and samples that it names), a query
    O(log rollout batches).
    """

    def __init__(self, *, publish_every: int) -> None:
        self._publish_every = publish_every
        self._publishing: list[int] = []
        """Last batch of every publish_every-th rollout batch that trains, ascending."""
        self._last_draw = -1
        """The newest rollout batch that trains."""
        self._ahead: deque[int] = deque()
        """Batches without a step, ascending."""
        self._stepped = -1
        self._published_ever = -1
        """Like `batch` of the chain, but over all trainer generations: the last batch whose weights were published."""
        self._positions: dict[int, int] = {}
        self.next_batch = 0
        self.next_draw = 0
        self._chain = WeightChain()
        self._behind: dict[int, int] = {}
        """Trainer generation -> the last batch that it stepped on, or that its published weights include."""
        self.trained_draws_formed = 0
        """Number of rollout batches with at least one batch."""
        self._taken: dict[str, tuple[int, int] | None] = {}
        """Group that a rollout batch has taken and that may be read again -> (partition, offset) of its last sample, or
        None.
        """

    def apply(self, event: Event) -> None:
        """Fold one record of the run."""
        if isinstance(event, SampleBatchFormed | BatchSkipped):
            if event.batch_index >= self.next_batch:
                self._apply_formed(event)
        elif isinstance(event, StepCompleted):
            self._stepped = max(self._stepped, event.batch_index)
            self._note(event.incarnation, event.batch_index)
            while self._ahead and self._ahead[0] <= self._stepped:
                self._ahead.popleft()
        elif isinstance(event, WeightVersionPublished) and (self.version is None or event.version > self.version):
            self._note(event.incarnation, event.batch_index)
            self._chain.apply(event)
            self._published_ever = max(self._published_ever, event.batch_index)

    def _note(self, incarnation: int, batch: int) -> None:
        self._behind[incarnation] = max(self._behind.get(incarnation, -1), batch)

    def _apply_formed(self, event: SampleBatchFormed | BatchSkipped) -> None:
        self.next_batch = event.batch_index + 1
        self.next_draw = max(self.next_draw, event.draw_index + 1)
        self._positions.update({position.partition: position.offset for position in event.positions})
        self._take(event)
        if not isinstance(event, SampleBatchFormed):
            return
        if event.batch_index > self._stepped:
            self._ahead.append(event.batch_index)
        if event.draw_index != self._last_draw:
            self._last_draw = event.draw_index
            self.trained_draws_formed += 1
            if self.trained_draws_formed % self._publish_every == 0:
                self._publishing.append(event.batch_index)
        elif self.trained_draws_formed % self._publish_every == 0:
            self._publishing[-1] = event.batch_index

    def _take(self, event: SampleBatchFormed | BatchSkipped) -> None:
        """Record the groups that a rollout batch takes, and drop those that will not be read again.

        A group's samples are adjacent and its score follows directly: the place of the last sample shows whether a
        position is beyond all of them. Part 0 names what every part of the rollout batch dropped.
        """
        for group in event.groups:
            self._taken.setdefault(group, None)
        rows: list[BatchSample | DroppedSample] = list(event.dropped)
        if isinstance(event, SampleBatchFormed):
            rows += event.samples
        for row in rows:
            place = row.partition, row.offset
            self._taken[row.group_id] = max(self._taken.get(row.group_id) or place, place)
        self._taken = {
            group: place
            for group, place in self._taken.items()
            if place is None or place[1] + 1 >= self._positions.get(place[0], 0)
        }

    def is_taken(self, group_id: str) -> bool:
        """Whether a rollout batch has taken this group, whose records may lie at or after the current positions."""
        return group_id in self._taken

    def forget(self, group_id: str) -> None:
        """Forget a group of which nothing will be read again."""
        self._taken.pop(group_id, None)

    def forget_taken(self) -> None:
        """Forget all groups taken so far, because nothing of them will be read again. No manifest states where the
        score of an empty group lies.
        """
        self._taken.clear()

    @property
    def batches_ahead(self) -> int:
        """Number of batches formed that have no step yet."""
        return len(self._ahead)

    def room_for(self, batches: int, ready: int) -> bool:
        """Whether a rollout batch of `batches` batches keeps within `ready` batches ahead; one is always admitted if
        none is ahead.
        """
        return self.batches_ahead == 0 or self.batches_ahead + batches <= ready

    def position(self, partition: int) -> int:
        """Return the offset of segment-samples from which a new batcher reads a partition."""
        return self._positions.get(partition, 0)

    @property
    def version(self) -> int | None:
        """The newest published weight version; None before the first."""
        return self._chain.newest

    @property
    def repeats(self) -> bool:
        """Whether the trainer was killed and is repeating steps on earlier batches.

        No batch needs to be formed meanwhile. Which weights of the dead generation are published again is not known
        until they are: a step and its weights are one transaction over two topics, so a reader may meet either first.
        """
        if not self._behind:
            return False
        due = bisect_right(self._publishing, self._published_ever)
        weights_due = due > 0 and self._chain.batch < self._publishing[due - 1]
        return weights_due or self._behind[max(self._behind)] < self._stepped

    def held_at_next_draw(self, versions: Iterable[int] = ()) -> HeldVersion:
        """Return the version that the trainer will hold when it trains the next rollout batch, with the lags of
        `versions`.

        It is the newest published version plus one for every pending rollout batch that publishes: every
        publish_every-th of those that train. Raises ValueError before the first version.
        """
        ahead = len(self._publishing) - bisect_right(self._publishing, self._chain.batch)
        return self._chain.expected_version(ahead, versions)
