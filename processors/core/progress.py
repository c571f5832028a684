"""Where a run stands: draws formed, batches trained, versions published. A fold of manifests, steps and versions."""

from __future__ import annotations

from turnlog.schemas.events import BatchSkipped, Event, SampleBatchFormed, StepCompleted, WeightVersionPublished


class Progress:
    """Fed in any order of the three topics, each in its own order; repeats change nothing."""

    def __init__(self, *, publish_every: int) -> None:
        self._publish_every = publish_every
        self._draw_ends: dict[int, int] = {}
        """Draws that train -> their last batch index."""
        self._batches: set[int] = set()
        self._stepped = -1
        self._published_batch = -1
        self._positions: dict[int, int] = {}
        self.next_batch = 0
        self.next_draw = 0
        self.version: int | None = None
        """The newest published weight version; None before the first."""
        self.consumed: set[str] = set()
        """Groups that a draw has taken."""

    def apply(self, event: Event) -> None:
        """Fold one record of the run."""
        if isinstance(event, SampleBatchFormed | BatchSkipped):
            self._formed(event)
        elif isinstance(event, StepCompleted):
            self._stepped = max(self._stepped, event.batch_index)
        elif isinstance(event, WeightVersionPublished) and (self.version is None or event.version > self.version):
            self.version, self._published_batch = event.version, event.batch_index

    def _formed(self, event: SampleBatchFormed | BatchSkipped) -> None:
        self.next_batch = max(self.next_batch, event.batch_index + 1)
        self.next_draw = max(self.next_draw, event.draw_index + 1)
        self.consumed.update(event.groups)
        self._positions.update({position.partition: position.offset for position in event.positions})
        if isinstance(event, SampleBatchFormed):
            self._batches.add(event.batch_index)
            last = max(self._draw_ends.get(event.draw_index, -1), event.batch_index)
            self._draw_ends[event.draw_index] = last

    @property
    def trained_draws_formed(self) -> int:
        """Draws that have at least one batch."""
        return len(self._draw_ends)

    @property
    def batches_ahead(self) -> int:
        """Batches formed that no step has eaten."""
        return sum(index > self._stepped for index in self._batches)

    def room_for(self, batches: int, ready: int) -> bool:
        """Whether a draw of so many batches keeps within `ready` batches ahead; one draw is always let through."""
        return self.batches_ahead == 0 or self.batches_ahead + batches <= ready

    def position(self, partition: int) -> int:
        """Where a new batcher starts to read segment-samples."""
        return self._positions.get(partition, 0)

    def version_at_next_draw(self) -> int:
        """The version that the trainer will hold when it trains the next draw: the newest one published, plus one for
        every draw between that publishes, which is every publish_every-th of those that train. Raises ValueError before
        the first version."""
        if self.version is None:
            raise ValueError("no weight version is published yet")
        ends = [self._draw_ends[draw] for draw in sorted(self._draw_ends)]
        publishing = ends[self._publish_every - 1 :: self._publish_every]
        return self.version + sum(last > self._published_batch for last in publishing)
