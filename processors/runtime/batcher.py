"""The batcher: scored groups become rollout batches, then batch files and manifests. The manifest is its commit.

Only one batcher is active: it is fenced by `<run>.batcher` and restarts from its own manifests. It stays at most
`ready_batches` ahead of the last completed step and measures lag against the version that the trainer will hold.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Sequence

from prometheus_client import Counter, Gauge, Summary

from turnlog.infra.batch_files import MEDIA_TYPE, build_batch_file
from turnlog.infra.blobs import inlined
from turnlog.infra.event_log import where
from turnlog.infra.history import caught_up
from turnlog.infra.log import Commit, Partition, Reader, Record, Transactor
from turnlog.infra.roles.health import count_tokens
from turnlog.infra.roles.loop import OwnerRole
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.processors.core.batches.draws import (
    DrawRules,
    FormedBatch,
    FormedDraw,
    PlacedSample,
    ReadableGroup,
    form_draw,
    overtaken,
)
from turnlog.processors.core.fold.unit import WrongTopic
from turnlog.processors.core.views.progress import BatchProgress, HeldVersion
from turnlog.schemas import UndecodableRecord, ids, topics
from turnlog.schemas.events import (
    BatchSkipped,
    Event,
    GroupScored,
    GroupStatus,
    SampleBatchFormed,
    SegmentSample,
    SourcePosition,
    Weighting,
)
from turnlog.schemas.types import BlobRef

log = logging.getLogger(__name__)
BATCHES = Counter("turnlog_batches_formed", "Batches formed")
DROPPED = Counter("turnlog_samples_dropped", "Samples that no batch trains", ["reason"])
WAITING = Gauge("turnlog_groups_waiting", "Scored groups that wait for a rollout batch")
LAG = Summary("turnlog_recipe_lag_versions", "Lag of the oldest token of rows that a rollout batch took", ["recipe"])
READ_S, DRAW_S, SEAL_S, COMMIT_S = (STAGE_S.labels("batcher", stage) for stage in ("read", "draw", "seal", "commit"))


ROLE = OwnerRole(owner=TransactionalId.BATCHER, group=ConsumerGroup.BATCHER, writes=(topics.BATCHES,))
FOLLOWED = (topics.BATCHES, topics.STEPS, topics.WEIGHTS)


async def main(role: Role) -> None:
    """Form batches until the role stops.

    Order of effects: that of OwnerRole. The batcher follows manifests, steps and versions, and reads samples from the
    last manifest's positions. Per rollout batch it uploads the files, then writes the manifests in one transaction.
    Raises OtherRun, OtherSettings.
    """
    await ROLE.run(role, control_places, lambda run, transactor: Batcher(role, run, transactor))


async def control_places(_: Configured) -> dict[Partition, int]:
    """Return the followed partitions, which are never pruned, and their first offset."""
    return {Partition(topic.name, 0): 0 for topic in FOLLOWED}


Form = Callable[[Sequence[ReadableGroup], HeldVersion, DrawRules], FormedDraw]
Seal = Callable[[FormedBatch, Weighting], tuple[bytes, str]]


class Batcher:
    """The waiting groups, and the progress of rollout batches, steps and versions according to the log."""

    def __init__(
        self,
        role: Role,
        run: Configured,
        transactor: Transactor,
        *,
        form: Form = form_draw,
        seal: Seal = build_batch_file,
    ) -> None:
        """`form` forms a rollout batch from groups; `seal` returns a batch's file and the hash of its rows."""
        self.progress = BatchProgress(publish_every=role.settings.trainer.publish_every)
        self._form_draw, self._seal = form, seal
        self._role = role
        self._transactor = transactor
        self._rules = run.draw_rules()
        self._hash = run.settings_sha256
        self._ready: deque[ReadableGroup] = deque()
        self._open: dict[str, list[PlacedSample]] = {}
        self._starts: dict[str, tuple[int, int]] = {}
        """Group that is open or waiting -> partition and offset of its first record."""
        self._next: dict[int, int] = {}
        self._repeated: dict[Partition, int] = {}
        """Ends below which samples may lie that the last batcher put into rollout batches; empty once they are read."""

    async def begin(self) -> dict[Partition, int]:
        """Return the positions of the last manifest, from which samples are read."""
        groups = range(self._role.settings.kafka.groups)
        starts = {Partition(topics.SAMPLES.name, number): self.progress.position(number) for number in groups}
        self._next = {partition.number: offset for partition, offset in starts.items()}
        self._repeated = await self._role.log.end_offsets(list(starts))
        return starts

    async def act(self, reader: Reader) -> None:
        """Form every rollout batch that may be formed."""
        if self._repeated and caught_up(reader, self._repeated):
            self.progress.forget_taken()
            self._repeated = {}
        while self._may_form():
            await self._form()
            self._role.health.beat()

    async def take(self, records: list[Record]) -> None:
        """Fold records of the followed topics, and collect samples by group."""
        if records:
            with READ_S.time():
                await self._fold(records)

    async def _fold(self, records: list[Record]) -> None:
        for record in records:
            if record.topic == topics.SAMPLES.name:
                await self._own(record)
            else:
                event = await self._role.events.decode_known(record)
                if event is not None and event.run_id == self._role.settings.run.id:
                    self.progress.apply(event)

    async def _own(self, record: Record) -> None:
        """Process a record of segment-samples, which this role owns: dead-letter it if it is not an event that belongs
        there.
        """
        try:
            event = await self._role.events.decode(record)
        except UndecodableRecord as broken:
            await self._role.park(record, broken)
            return
        if isinstance(event, SegmentSample | GroupScored):
            await self._sample(record, event)
        else:
            await self._role.park(
                record, WrongTopic(f"{where(record)}: a {type(event).__name__} does not belong there")
            )

    async def _sample(self, record: Record, event: SegmentSample | GroupScored) -> None:
        taken = self.progress.is_taken(event.group_id)
        if taken and not isinstance(event, GroupScored):
            return  # no position may lie among its records: a successor would form the group again from the rest
        self._next[record.partition] = record.offset + 1
        if taken:
            self.progress.forget(event.group_id)
        if taken or event.run_id != self._role.settings.run.id:
            return
        self._starts.setdefault(event.group_id, (record.partition, record.offset))
        if isinstance(event, SegmentSample):
            placed = PlacedSample(await inlined(event, self._role.blobs), record.partition, record.offset)
            self._open.setdefault(event.group_id, []).append(placed)
        else:
            samples = tuple(self._open.pop(event.group_id, ()))
            if event.status is GroupStatus.trained:
                self._ready.append(ReadableGroup(event, samples))
                WAITING.set(len(self._ready))
            else:
                self._starts.pop(event.group_id, None)

    def _build(self, batch: FormedBatch) -> tuple[bytes, str]:
        """Return the batch's file and the hash of its rows. Raises SessionIsErased if a session was erased meanwhile:
        a restarted batcher drops its samples."""
        keys = self._role.events.keys
        if keys is None:
            return self._seal(batch, self._rules.weighting)
        return build_batch_file(batch, self._rules.weighting, cipher=keys)

    async def _without_erased(self, groups: Sequence[ReadableGroup]) -> list[ReadableGroup]:
        """Return the groups with the samples of erased sessions marked, which the draw drops."""
        keys = self._role.events.keys
        if keys is None:
            return list(groups)
        await keys.refresh()
        return [
            dataclasses.replace(
                group,
                samples=tuple(
                    dataclasses.replace(placed, erased=keys.is_erased(placed.sample.session_id))
                    for placed in group.samples
                ),
            )
            for group in groups
        ]

    def _may_form(self) -> bool:
        settings, progress = self._role.settings, self.progress
        return (
            len(self._ready) >= self._rules.prompts_per_draw
            and progress.trained_draws_formed < settings.feeder.draws
            and progress.room_for(self._rules.updates_per_draw, settings.batcher.ready_batches)
            and progress.version is not None
            and not progress.repeats
        )

    async def _form(self) -> None:
        held = self.progress.held_at_next_draw({version for group in self._ready for version in group.versions})
        groups = await self._without_erased(self._take_groups(held))
        for group in groups:
            self._starts.pop(group.score.group_id, None)
        # Rows of a large rollout batch take seconds of arithmetic: keep the heartbeats of the clients alive.
        with DRAW_S.time():
            draw = await asyncio.to_thread(self._form_draw, groups, held, self._rules)
        with SEAL_S.time():
            events = await self._events(draw, groups, held)
        with COMMIT_S.time():
            await self._role.events.transact(self._transactor, events)
        for event in events:
            self.progress.apply(event)
        for group in groups:
            self.progress.forget(group.score.group_id)
        self._report(draw, held.number)
        for placed in (placed for group in groups for placed in group.samples):
            LAG.labels(placed.sample.recipe).observe(held.lag(placed.sample.weight_version_min))
        _count(draw, groups)

    def _take_groups(self, held: HeldVersion) -> list[ReadableGroup]:
        """Take the groups of the next rollout batch from those that wait.

        Under `freshest`, overtaken groups are added and dropped as stale. Otherwise a group that is never taken would
        occupy its slot and hold back the positions forever.
        """
        freshest = self._role.settings.batcher.order == "freshest"
        take = self._ready.pop if freshest else self._ready.popleft
        groups = [take() for _ in range(self._rules.prompts_per_draw)]
        if freshest:
            left = list(self._ready)
            groups += [group for group in left if overtaken(group, held, self._rules)]
            self._ready = deque(group for group in left if not overtaken(group, held, self._rules))
        return groups

    async def _events(self, draw: FormedDraw, taken: Sequence[ReadableGroup], held: HeldVersion) -> list[Event]:
        """Upload each batch's file, then create its manifest. The positions already exclude the groups of this rollout
        batch.
        """
        first, index = self.progress.next_batch, self.progress.next_draw
        groups = tuple(sorted(group.score.group_id for group in taken))
        lags = held.recorded_lags({version for group in taken for version in group.versions})
        positions = self._positions()
        run_id = self._role.settings.run.id
        if not draw.batches:
            return [
                BatchSkipped(
                    event_id=ids.digest("BatchSkipped", run_id, first),
                    run_id=run_id,
                    batch_index=first,
                    draw_index=index,
                    reason="nothing left to train",
                    groups=groups,
                    masked=draw.masked,
                    dropped=draw.dropped,
                    positions=positions,
                    settings_sha256=self._hash,
                )
            ]
        fallen = set(groups) - {name for batch in draw.batches for name in batch.groups}
        manifests: list[Event] = []
        for part, batch in enumerate(draw.batches):
            content, sha256 = await asyncio.to_thread(self._build, batch)
            file = await self._role.blobs.put(content, media_type=MEDIA_TYPE)
            manifest = self._manifest(
                batch, file, sha256, held.number, first + part, part, len(draw.batches), positions
            )
            manifest = dataclasses.replace(manifest, lags=lags)
            if part == 0:
                masked = {reason: batch.masked.get(reason, 0) + draw.masked.get(reason, 0) for reason in
                          sorted({*batch.masked, *draw.masked})}  # fmt: skip
                manifest = dataclasses.replace(
                    manifest, dropped=draw.dropped, masked=masked, groups=tuple(sorted({*manifest.groups, *fallen}))
                )
            manifests.append(manifest)
        return manifests

    def _manifest(
        self,
        batch: FormedBatch,
        file: BlobRef,
        sha256: str,
        version: int,
        index: int,
        part: int,
        parts: int,
        positions: tuple[SourcePosition, ...],
    ) -> SampleBatchFormed:
        run_id, weights = self._role.settings.run.id, batch.weights
        return SampleBatchFormed(
            event_id=ids.digest("SampleBatchFormed", run_id, index),
            run_id=run_id,
            batch_index=index,
            draw_index=self.progress.next_draw,
            part=part,
            parts=parts,
            file=file,
            rows_sha256=sha256,
            rows_version=batch.rows.version,
            samples=batch.samples,
            groups=batch.groups,
            weighting=self._rules.weighting,
            prompts=weights.prompts,
            trajectories=weights.trajectories,
            trained_tokens=weights.trained_tokens,
            constant_length=weights.constant_length,
            masked=batch.masked,
            trainer_version=version,
            max_lag=batch.max_lag,
            dropped=(),
            whitening_mean=batch.whitening.mean if batch.whitening else None,
            whitening_std=batch.whitening.std if batch.whitening else None,
            positions=positions,
            settings_sha256=self._hash,
        )

    def _positions(self) -> tuple[SourcePosition, ...]:
        """Return, per partition, the first offset that a group not yet taken needs, or the next offset to read."""
        low = dict(self._next)
        for partition, offset in self._starts.values():
            low[partition] = min(low[partition], offset)
        return tuple(SourcePosition(number, low[number]) for number in sorted(low))

    def commits(self, reader: Reader, places: Sequence[Partition]) -> dict[Partition, Commit]:
        """Return the positions as a consumer group would commit them."""
        low = {place.partition: place.offset for place in self._positions()}
        return {place: Commit.low_water(low[place.number], high=reader.position(place)) for place in places}

    def _report(self, draw: FormedDraw, version: int) -> None:
        BATCHES.inc(len(draw.batches))
        WAITING.set(len(self._ready))
        for row in draw.dropped:
            DROPPED.labels(row.reason).inc()
        lag = max((batch.max_lag for batch in draw.batches), default=0)
        rows = sum(len(batch.rows) for batch in draw.batches)
        log.info("draw %d: %d rows, %d dropped, lag %d at version %d", self.progress.next_draw - 1, rows,
                 len(draw.dropped), lag, version)  # fmt: skip


def _count(draw: FormedDraw, groups: Sequence[ReadableGroup]) -> None:
    """Count the tokens of a rollout batch. Sampled tokens are counted over the samples of its groups, independently of
    their dispositions.
    """
    spans = [span for group in groups for placed in group.samples for span in placed.sample.spans if span.trained]
    masked = Tally(draw.masked)
    for batch in draw.batches:
        masked.update(batch.masked)
    for row in draw.dropped:
        masked[row.reason] += row.sampled_tokens
    trained = sum(batch.weights.trained_tokens for batch in draw.batches)
    count_tokens("draw", sampled=sum(span.length for span in spans), trained=trained, masked=masked)
