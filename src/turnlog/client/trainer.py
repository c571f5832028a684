"""The trainer of a run whose [trainer] kind is external: your own loop, in your own process.

It follows the rules of `turnlog.trainer.generation`, as the Megatron trainer does. What is left to you is to keep
`cursor` in your own checkpoint, with the weights and the optimizer: after a kill you give it back, and what your
checkpoint lacks is trained again by the next generation, whose records are effective.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from turnlog.client.batch import TrainingBatch
from turnlog.client.errors import CursorUnusable, NotExternal, OutOfTurn
from turnlog.client.loop_thread import LoopThread
from turnlog.client.weights import publish_folder
from turnlog.infra.log import Fenced
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import claim_log
from turnlog.names import TransactionalId
from turnlog.processors.core.batches.gaps import LogprobGaps, logprob_gaps
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.events import BatchSkipped, MaskReason, SampleBatchFormed
from turnlog.settings import Settings
from turnlog.trainer import Superseded
from turnlog.trainer.generation import Generation, StepFigures
from turnlog.trainer.manifests import PARTITION, POLL_S, Batch, Cursor, Manifests, ReadAhead, Tokenizers, fetch_rows

log = logging.getLogger(__name__)
RUN_ID = "run_id"
"""Key of a cursor beside the fields of Cursor."""


class ExternalTrainer:
    """A generation of a run's trainer, as a context manager and an iterator over batches. Not thread-safe.

    Every method raises Superseded once another trainer has begun, and LogError and StoreUnavailable if a server fails.
    After an error, leave the context; a new one continues from the cursor of your checkpoint.
    """

    def __init__(self, settings: Settings, cursor: Mapping[str, Any] | None = None) -> None:
        """See `ClientRun.trainer`."""
        if settings.trainer.kind != "external":
            raise NotExternal(
                f"[trainer] kind of run {settings.run.id!r} is {settings.trainer.kind}: `turnlog up` starts a trainer "
                'of its own, which this one would fence; set [trainer] kind = "external"'
            )
        self._settings = settings
        self._start = cursor_of(cursor, settings.run.id)
        self._thread = LoopThread("turnlog trainer")
        self._open: _TrainerCalls
        self._clock = _Clock()
        self._fenced: tuple[Fenced, ...] = ()

    def __enter__(self) -> Self:
        self._thread.__enter__()
        try:
            with self._fence():
                self._open = self._thread.enter(_open_generation(self._settings, self._start))
        except BaseException:
            self._thread.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.__exit__()

    @property
    def generation(self) -> int:
        """Number of this generation; higher than that of every trainer that has published before it. One that ends
        before its first `publish` shares its number with its successor.
        """
        return self._open.generation.number

    @property
    def generation_is_new(self) -> bool:
        """Whether this generation has yet to publish the weights that it starts from, before it gets a batch."""
        return self._open.due and self._open.generation.cursor == self._start

    @property
    def publication_is_due(self) -> bool:
        """Whether the current weights must be published before the next batch: at the start of a generation, after
        every [trainer] publish_every-th rollout batch, and after the last one.
        """
        return self._open.due

    @property
    def cursor(self) -> dict[str, Any]:
        """The position after the last step that is on the log, as plain values for your checkpoint."""
        return {RUN_ID: self._settings.run.id, **dataclasses.asdict(self._open.generation.cursor)}

    @property
    def steps(self) -> int:
        """Number of optimizer steps before the next one."""
        return self._open.generation.cursor.step

    @property
    def version(self) -> int | None:
        """The newest published weight version; None before the first."""
        return self._open.generation.versions.newest

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self

    def __next__(self) -> TrainingBatch:
        """Return the next batch; wait for it as long as necessary. Ends when [feeder] draws rollout batches are
        trained, or when the run is closed.

        Raises OutOfTurn while a step is not reported or a publication is due. Raises BatchGap, CorruptBatch, and
        TokensUnfit if [model] path has another tokenizer than the sessions.
        """
        own = self._open
        if own.batch is not None and own.handed_out:
            raise OutOfTurn(
                f"batch {own.batch.manifest.batch_index} was handed out, and its step is not on the log: call "
                "step_completed for it before you take the next batch"
            )
        if own.adapter_due:
            raise OutOfTurn("the adapter on these weights is not published: call publish(folder, 'adapter')")
        if own.due:
            what = "weights that this generation starts from" if self.generation_is_new else "current weights"
            raise OutOfTurn(f"the {what} are not published: call publish before you take the next batch")
        with self._clock.phase("wait"), self._fence():
            while own.batch is None and not own.is_over:
                self._thread.finish(own.generation.say_reached)
                self._thread.wait(own.look)
            if own.batch is None:
                self._thread.finish(own.generation.say_reached, last=True)
                raise StopIteration
        self._clock.begin_step()
        own.handed_out = True
        return own.batch

    def step_completed(
        self,
        batch: TrainingBatch,
        *,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        skipped: bool = False,
        masked_tokens: int = 0,
        logprob_gap_max: float = 0.0,
        logprob_gap_mean: float = 0.0,
        logprobs: NDArray[np.floating] | None = None,
        entropy: float | None = None,
        clip_fraction: float = 0.0,
        world_size: int = 1,
        metrics: Mapping[str, float] | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Write StepCompleted for the last batch in a transaction, and return the new cursor.

        Save a checkpoint only afterwards, with that cursor. For the figures see StepCompleted (docs/events.md):
        `loss` is the sum over trained tokens of token loss / weight_divisor, `grad_norm` is before clipping, and
        `logprob_gap_*` compare your log-probs with the engine's, in nats. Better pass your `logprobs`: [T] as
        `batch.rows.token_ids`, or [rows, tokens] as `batch.pad` pads, of the weights before the step at the row's
        temperature, NaN where you computed none. Then all gaps are computed here, those of each kind of engine
        included. `masked_tokens` counts trained tokens of the batch that you left out of the loss. `skipped`: the
        gradient was not finite, and the weights are unchanged. `seconds` replaces or adds phases to those that are
        measured here. Raises OutOfTurn; ValueError if `logprobs` does not have one value per token, comes with
        `logprob_gap_*`, or is NaN for all trained tokens of a step that neither skipped nor masked them.
        """
        if batch is not self._open.batch:
            raise OutOfTurn(
                f"batch {batch.manifest.batch_index} is not the last batch that was handed out, or its step is on the "
                "log already: take the next batch"
            )
        gaps = LogprobGaps(float(logprob_gap_max), float(logprob_gap_mean), 0.0, 0.0, {})
        if logprobs is not None:
            if logprob_gap_max or logprob_gap_mean:
                raise ValueError("logprob_gap_max and logprob_gap_mean are computed from logprobs: leave them out")
            gaps = logprob_gaps(batch.rows, flat := batch.flatten(logprobs), self._open.held)
            of_trained = flat[batch.rows.trained == 1]
            if not skipped and masked_tokens < len(of_trained) and np.isnan(of_trained).all():
                raise ValueError(f"the log-probs of all {len(of_trained)} trained tokens are NaN: pass skipped=True")
        self._clock.end_step()
        masked = {MaskReason.trainer_mask.value: masked_tokens} if masked_tokens else {}
        figures = StepFigures(
            loss=float(loss),
            grad_norm=float(grad_norm),
            learning_rate=float(learning_rate),
            skipped=skipped,
            masked={MaskReason.step_skipped.value: batch.manifest.trained_tokens} if skipped else masked,
            logprob_gap_max=gaps.logprob_gap_max,
            logprob_gap_mean=gaps.logprob_gap_mean,
            old_cache_gap_max=gaps.old_cache_gap_max,
            old_cache_gap_mean=gaps.old_cache_gap_mean,
            entropy=None if entropy is None else float(entropy),
            clip_fraction=float(clip_fraction),
            world_size=world_size,
            metrics={**gaps.metrics, **{name: float(value) for name, value in (metrics or {}).items()}},
            seconds={**self._clock.seconds(), **(seconds or {})},
        )
        with self._fence():
            self._thread.finish(self._open.record_step, batch, figures)
        return self.cursor

    def publish(self, folder: str | Path, kind: Literal["full", "adapter"] = "full") -> int:
        """Publish the current weights, which lie in a folder, and return the number of the version. Engines load it.

        full: safetensors files of the whole model, with an index if there are several, as `save_pretrained` of
        transformers writes them. A config.json beside them is published, too; without one, that of [model] path.
        adapter: adapter_model.safetensors and adapter_config.json, as PEFT writes them; it needs [trainer] publish =
        "adapter", and a full version before the first adapter. Files are uploaded before the version is announced, and
        may be removed when this returns. Raises OutOfTurn if no publication is due, WeightsUnusable.
        """
        if not self._open.due:
            raise OutOfTurn(
                "no publication is due: publish only when publication_is_due is true, which is after every [trainer] "
                f"publish_every = {self._settings.trainer.publish_every} rollout batches; batcher and feeder count "
                "lags by these versions"
            )
        with self._clock.phase("publish"), self._fence():
            return self._thread.finish(self._open.publish, Path(folder), kind)

    def check_owner(self) -> None:
        """Raise Superseded if another trainer has begun: call it just before you replace the checkpoint that the next
        trainer would load.
        """
        with self._fence():
            self._thread.finish(self._open.generation.check_owner)

    @contextmanager
    def _fence(self) -> Iterator[None]:
        """Raises Superseded for Fenced, and from then on always."""
        try:
            if self._fenced:
                raise self._fenced[0]
            yield
        except Fenced as fenced:
            self._fenced = (fenced,)
            raise Superseded(
                f"another trainer of this run has begun ({fenced}): nothing of this one appears on the log any more; "
                "end this process, and keep its checkpoint out of the way of the other's"
            ) from fenced


def cursor_of(values: Mapping[str, Any] | None, run_id: str) -> Cursor:
    """Return a cursor of this run. Raises CursorUnusable."""
    if values is None:
        return Cursor()
    if values.get(RUN_ID) != run_id:
        raise CursorUnusable(
            f"the cursor belongs to run {values.get(RUN_ID)!r}, but this is run {run_id!r}: load a checkpoint of this "
            "run, or pass None to train from its first batch"
        )
    try:
        return Cursor(**{name: value for name, value in values.items() if name != RUN_ID})
    except TypeError as error:
        raise CursorUnusable(f"the cursor has other fields than this release knows: {error}") from error


class _Clock:
    """Seconds of the phases since the last step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._began = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        mark = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - mark

    def begin_step(self) -> None:
        self._began = time.monotonic()

    def end_step(self) -> None:
        self._seconds["step"] = time.monotonic() - self._began

    def seconds(self) -> dict[str, float]:
        """Return the phases, and begin anew."""
        found, self._seconds = self._seconds, {}
        return found


class _TrainerCalls:
    """Asynchronous part of a trainer, on the event loop. Its state changes together with the log, also if the caller is
    interrupted before the result reaches it.
    """

    def __init__(self, role: Role, generation: Generation, ahead: ReadAhead) -> None:
        self.role, self.generation, self._ahead = role, generation, ahead
        self.batch: TrainingBatch | None = None
        """The batch that was read and whose step is not on the log."""
        self.handed_out = False
        """Whether the caller has this batch."""
        self.due = generation.is_start_due
        """Whether a publication is due."""
        self.adapter_due = False
        """Whether this publication is the adapter that follows its base weights."""

    @property
    def held(self) -> int | None:
        """Number of the version of the current weights; None if they are not published."""
        return self.generation.versions.of_step(self.generation.cursor.step)

    @property
    def is_over(self) -> bool:
        """Whether no batch will come."""
        return self.role.stopping.is_set() or self.generation.is_done

    async def look(self) -> None:
        """Wait for a while for the next batch that has rows, and begin to read the one after it. A cancelled call has
        taken nothing.
        """
        found = await self._ahead.next(timeout_s=POLL_S)
        if found is None:
            return
        if isinstance(found.manifest, BatchSkipped):
            self.generation.pass_over(found.manifest, found.offset)
            return
        self._ahead.begin()
        self.batch = _training_batch(found, found.manifest)

    async def record_step(self, batch: TrainingBatch, figures: StepFigures) -> None:
        """Write the step and move the cursor."""
        own = self.generation
        cursor = own.after(batch.manifest, batch.offset, skipped=figures.skipped)
        await own.record_step(own.step_record(batch.manifest, batch.rows, figures), cursor)
        self.batch, self.handed_out = None, False
        self.due = own.is_publication_due(batch.manifest, cursor)

    async def publish(self, folder: Path, kind: Literal["full", "adapter"]) -> int:
        """Publish a folder, and return the number of the version."""
        version = await publish_folder(self.role, self.generation, folder, kind)
        publishes_adapters = self.role.settings.trainer.publish == "adapter"
        # The adapter of a later generation follows its base weights.
        self.due = self.adapter_due = kind == "full" and publishes_adapters and self.generation.cursor.step > 0
        return version


def _training_batch(found: Batch, manifest: SampleBatchFormed) -> TrainingBatch:
    assert found.rows is not None
    return TrainingBatch(manifest, found.rows, found.offset)


@asynccontextmanager
async def _open_generation(settings: Settings, start: Cursor) -> AsyncIterator[_TrainerCalls]:
    """Begin a generation at `start`."""
    run_id = settings.run.id
    async with (
        open_role("trainer", settings) as role,
        claim_log(role),
        role.log.transactor(TransactionalId.TRAINER.format(run=run_id)) as transactor,
        role.log.reader() as reader,
    ):
        generation = Generation(role, transactor)
        await generation.begin()
        generation.number, generation.cursor = generation.least_number, start
        first = (await role.log.start_offsets([PARTITION]))[PARTITION]
        manifests = Manifests(reader, role.events, run_id, start, start=first)
        model = Path(settings.model.path or os.devnull)
        tokenizers = Tokenizers(role, model) if (model / "tokenizer.json").is_file() else None
        if settings.model.path and tokenizers is None:
            log.warning(
                "[model] path = %s has no tokenizer.json here: batches are not checked to have its tokens", model
            )

        async def fetch(manifest: SampleBatchFormed) -> BatchRows:
            if tokenizers is not None:
                await tokenizers.check(manifest)
            return await fetch_rows(manifest, role.blobs, role.events.keys)

        async with ReadAhead(manifests, fetch) as ahead:
            yield _TrainerCalls(role, generation, ahead)
