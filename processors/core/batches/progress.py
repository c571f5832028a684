"""Where a run stands: draws formed, batches trained, versions published. A fold of manifests, steps and versions."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from turnlog.processors.core.batches.weight_chain import HeldVersion, WeightChain
from turnlog.schemas.events import (
    BatchSample,
    BatchSkipped,
    DroppedSample,
    Event,
    SampleBatchFormed,
    StepCompleted,
    WeightVersionPublished,
)


class Progress:
    """Fed in any order of the three topics, each in its own order; repeats change nothing.

    It holds one number per published draw, and of each weight version what WeightChain does; everything else that it
    keeps is of draws under way. A record costs O(groups and samples that it names), a question O(log draws).
    """

    def __init__(self, *, publish_every: int) -> None:
        self._publish_every = publish_every
        self._publishing: list[int] = []
        """Last batch of every publish_every-th draw that trains, ascending."""
        self._last_draw = -1
        """The newest draw that trains."""
        self._ahead: deque[int] = deque()
        """Batches that no step has eaten, ascending."""
        self._stepped = -1
        self._published_batch = -1
        self._published_ever = -1
        """The same of any incarnation: the last batch whose weights were out."""
        self._positions: dict[int, int] = {}
        self.next_batch = 0
        self.next_draw = 0
        self._chain = WeightChain()
        self._behind: dict[int, int] = {}
        """Incarnation of the trainer -> the last batch that it stepped, or that its weights had behind them."""
        self.trained_draws_formed = 0
        """Draws that have at least one batch."""
        self._taken: dict[str, tuple[int, int] | None] = {}
        """Group that a draw has taken and that may be read again -> where its last sample stands, if it has any."""

    def apply(self, event: Event) -> None:
        """Fold one record of the run."""
        if isinstance(event, SampleBatchFormed | BatchSkipped):
            if event.batch_index >= self.next_batch:
                self._formed(event)
        elif isinstance(event, StepCompleted):
            self._stepped = max(self._stepped, event.batch_index)
            self._note(event.incarnation, event.batch_index)
            while self._ahead and self._ahead[0] <= self._stepped:
                self._ahead.popleft()
        elif isinstance(event, WeightVersionPublished) and (self.version is None or event.version > self.version):
            self._note(event.incarnation, event.batch_index)
            self._chain.apply(event)
            self._published_batch = event.batch_index
            self._published_ever = max(self._published_ever, event.batch_index)

    def _note(self, incarnation: int, batch: int) -> None:
        self._behind[incarnation] = max(self._behind.get(incarnation, -1), batch)

    def _formed(self, event: SampleBatchFormed | BatchSkipped) -> None:
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
        """A group's samples stand together and its score right behind them: the last one tells whether a position is
        behind all of them. Part 0 names what every part of the draw dropped."""
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

    def taken(self, group_id: str) -> bool:
        """Whether a draw has taken a group whose records stand at or behind the positions."""
        return group_id in self._taken

    def forget(self, group_id: str) -> None:
        """Nothing of the group will be read again."""
        self._taken.pop(group_id, None)

    def forget_taken(self) -> None:
        """Nothing of any group taken so far will be read again. (Where the score of an empty group stands, no manifest
        says.)"""
        self._taken.clear()

    @property
    def batches_ahead(self) -> int:
        """Batches formed that no step has eaten."""
        return len(self._ahead)

    def room_for(self, batches: int, ready: int) -> bool:
        """Whether a draw of so many batches keeps within `ready` batches ahead; one draw is always let through."""
        return self.batches_ahead == 0 or self.batches_ahead + batches <= ready

    def position(self, partition: int) -> int:
        """Where a new batcher starts to read segment-samples."""
        return self._positions.get(partition, 0)

    @property
    def version(self) -> int | None:
        """The newest published weight version; None before the first."""
        return self._chain.newest

    @property
    def repeats(self) -> bool:
        """The trainer was killed and steps once more on batches that it stepped on before. Nothing needs to be formed,
        and which of the dead incarnation's weights come out again is not known until they are: a step and its weights
        are one transaction over two topics, so a reader may meet either first."""
        if not self._behind:
            return False
        due = bisect_right(self._publishing, self._published_ever)
        weights_due = due > 0 and self._published_batch < self._publishing[due - 1]
        return weights_due or self._behind[max(self._behind)] < self._stepped

    def held_at_next_draw(self, versions: Iterable[int] = ()) -> HeldVersion:
        """The version that the trainer will hold when it trains the next draw: the newest one published, plus one for
        every draw between that publishes, which is every publish_every-th of those that train; with the lags of
        `versions`. Raises ValueError before the first version."""
        ahead = len(self._publishing) - bisect_right(self._publishing, self._published_batch)
        return self._chain.held(ahead, versions)
