"""A generation of a run's trainer: its number, its position, and the records that it writes under the fence.

Every trainer follows these rules, Megatron's (`loop`) and those that are connected by `turnlog.client`. Nothing here
imports torch.

  1. The transactor is entered: the previous owner is fenced, its open transaction aborted. Only then are the published
     versions read (`begin`): by then no record of the previous owner can appear any more. Generation number and next
     version number follow from them.
  2. The generation publishes the weights that it starts from before its first step (`is_start_due`).
  3. Only after the transaction of a StepCompleted does the cursor move (`record_step`), and only a checkpoint written
     afterwards may have that cursor. So a checkpoint never covers a step that is not on the log, and steps that the
     newest checkpoint lacks are taken again, by a generation whose records are effective.
  4. Weights are published after the steps that `is_publication_due` names, since batcher and feeder count lags by them.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turnlog.infra.log import Commit, Reached, Transactor
from turnlog.infra.roles.role import Role
from turnlog.names import ConsumerGroup
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas.events import BatchSkipped, Event, SampleBatchFormed, StepCompleted, WeightVersionPublished
from turnlog.schemas.ids import digest
from turnlog.schemas.types import BlobRef
from turnlog.trainer.manifests import PARTITION, Cursor
from turnlog.trainer.weight_records import read_past

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Measurements of a step, as in the fields of StepCompleted."""

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool = False
    masked: Mapping[str, int] = field(default_factory=dict)
    logprob_gap_max: float = 0.0
    logprob_gap_mean: float = 0.0
    old_cache_gap_max: float = 0.0
    old_cache_gap_mean: float = 0.0
    entropy: float | None = None
    clip_fraction: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    world_size: int = 1
    metrics: Mapping[str, float] = field(default_factory=dict)
    token_file: BlobRef | None = None


class Generation:
    """A generation of the trainer; see the module's docstring."""

    def __init__(self, role: Role, transactor: Transactor) -> None:
        self._role, self._transactor = role, transactor
        self._run_id = role.settings.run.id
        self._reached: Reached
        self.number = -1
        """Number of the generation; the caller takes it after `begin`, at least `least_number`."""
        self.cursor = Cursor()
        self.versions = WeightChain()
        self.whole: WeightVersionPublished | None = None
        """The last full version, which needs no other version; adapters are based on it."""

    async def begin(self) -> None:
        """Read what previous generations published. Raises Fenced, TransactionHanging, LogUnavailable."""
        group = ConsumerGroup.TRAINER.format(run=self._run_id)
        self._reached = await Reached.from_log(self._role.log, self._transactor, group, [PARTITION])
        self.versions, self.whole = await read_past(self._role.log, self._role.events, self._run_id)
        await self.check_owner()

    @property
    def least_number(self) -> int:
        """The lowest number that no record of an earlier generation has."""
        return self.versions.incarnation + 1

    @property
    def is_done(self) -> bool:
        """Whether all rollout batches of [feeder] draws are trained."""
        return self.cursor.draws >= self._role.settings.feeder.draws

    @property
    def is_start_due(self) -> bool:
        """Whether a generation at this position must publish the weights that it starts from. Only one with nothing to
        train need not, if they are published already.
        """
        return not self.is_done or self.versions.of_step(self.cursor.step) is None

    @property
    def next_version(self) -> int:
        """Number of the version that is published next."""
        return 0 if self.versions.newest is None else self.versions.newest + 1

    def is_publication_due(self, manifest: SampleBatchFormed, after: Cursor) -> bool:
        """Whether to publish the weights after this batch: after the last part of every publish_every-th trained
        rollout batch, and after the run's last step. `after` is the cursor after the batch.
        """
        settings = self._role.settings
        due = after.draws % settings.trainer.publish_every == 0
        return manifest.part == manifest.parts - 1 and (due or after.draws >= settings.feeder.draws)

    def after(self, manifest: SampleBatchFormed, offset: int, *, skipped: bool) -> Cursor:
        """Return the cursor after a step on the batch. `offset`: after its manifest."""
        assert manifest.batch_index == self.cursor.next_batch, "batches are trained in order, each once"
        return dataclasses.replace(
            self.cursor,
            next_batch=manifest.batch_index + 1,
            offset=offset,
            step=self.cursor.step + 1,
            draws=self.cursor.draws + (manifest.part == manifest.parts - 1),
            skipped=self.cursor.skipped + 1 if skipped else 0,
        )

    def pass_over(self, manifest: BatchSkipped, offset: int) -> None:
        """Move the cursor past a rollout batch without rows."""
        self.cursor = dataclasses.replace(self.cursor, next_batch=manifest.batch_index + 1, offset=offset)

    def step_record(self, manifest: SampleBatchFormed, rows: BatchRows, figures: StepFigures) -> StepCompleted:
        """Return the record of the step on a batch that the cursor has not passed yet."""
        lag = self._lag(manifest, rows)
        return StepCompleted(
            event_id=digest("StepCompleted", self._run_id, manifest.batch_index, self.number),
            run_id=self._run_id,
            batch_index=manifest.batch_index,
            draw_index=manifest.draw_index,
            incarnation=self.number,
            step=self.cursor.step + 1,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            learning_rate=figures.learning_rate,
            lag_max=lag,
            lag_excess=max(0, lag - self._role.settings.batcher.max_lag),
            tokens=len(rows.token_ids),
            trained_tokens=manifest.trained_tokens,
            masked=dict(figures.masked),
            skipped=figures.skipped,
            reward_mean=mean_reward(rows),
            logprob_gap_max=figures.logprob_gap_max,
            logprob_gap_mean=figures.logprob_gap_mean,
            old_cache_tokens=0 if rows.old_cache is None else int((rows.old_cache & rows.trained).sum()),
            old_cache_gap_max=figures.old_cache_gap_max,
            old_cache_gap_mean=figures.old_cache_gap_mean,
            entropy=figures.entropy,
            clip_fraction=figures.clip_fraction,
            seconds=dict(figures.seconds),
            world_size=figures.world_size,
            metrics={**figures.metrics, "updates_since_sampling": self._updates_since_sampling(rows)},
            token_file=figures.token_file,
        )

    async def record_step(
        self, completed: StepCompleted, cursor: Cursor, announced: Sequence[WeightVersionPublished] = ()
    ) -> None:
        """Write the record of a step, with what is announced along with it, in one transaction; then move the cursor.

        Raises Fenced, TransactionFailed, LogUnavailable. An error ends the process; nothing is repaired in place.
        """
        await self._role.events.transact(self._transactor, [completed, *map(self._with_start, announced)])
        self.cursor = cursor

    async def record(self, event: Event) -> None:
        """Write a record in a transaction. Raises as `record_step`."""
        await self._role.events.transact(self._transactor, [self._with_start(event)])

    def _with_start(self, event: Event) -> Event:
        """Return the record of initial weights with the folder that they come from, and any other record unchanged."""
        if not isinstance(event, WeightVersionPublished) or event.step:
            return event
        settings = self._role.settings
        return dataclasses.replace(event, started_from=settings.trainer.initial_weights or settings.model.path)

    def count_version(self, event: WeightVersionPublished) -> None:
        """Count a version from now on in lags, and as the base of adapters if it is full."""
        self.versions.apply(event)
        self.whole = event if event.kind == "full" else self.whole

    async def check_owner(self) -> None:
        """Check that no later generation has begun. Raises Fenced, TransactionFailed, LogUnavailable."""
        await self._reached.check_owner()

    async def say_reached(self, *, last: bool = False) -> None:
        """Commit the position from time to time, or now if it is the `last`, so that the trainer's lag can be
        measured.
        """
        if self.cursor.offset is not None:
            await self._reached.say({PARTITION: Commit(self.cursor.offset)}, last=last)

    def _updates_since_sampling(self, rows: BatchRows) -> float:
        """Return the number of optimizer steps between the weights that sampled the oldest trained token and the
        current ones.

        With several updates per rollout batch, or rollout batches per publication, samples of lag 0 are older than
        that.
        """
        oldest = map(self.versions.step_of, rows.version_min[rows.trained_per_row() > 0].tolist())
        return float(max((self.cursor.step - step for step in oldest if step is not None), default=0))

    def _lag(self, manifest: SampleBatchFormed, rows: BatchRows) -> int:
        """Return how far the rows lag the current weights: after a crash it can differ from the manifest's lag."""
        lag = self.versions.largest_lag(rows.sampled_by(map(int, manifest.lags)))
        if lag > manifest.max_lag:
            log.warning(
                "batch %d was formed for version %d with lag %d; the trainer now has version %s, so the lag is %d",
                manifest.batch_index, manifest.trainer_version, manifest.max_lag, self.versions.newest, lag,
            )  # fmt: skip
        return lag


def mean_reward(rows: BatchRows) -> float:
    """Return the mean reward over trajectories: each session has the same weight, however many segments it has."""
    _, first = np.unique(np.asarray(rows.session_ids), return_index=True)
    return float(rows.rewards[first].mean()) if len(first) else 0.0
