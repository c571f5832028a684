"""The Megatron trainer's loop: manifest -> step -> transaction -> checkpoint, and weights beside the next step.

`generation` says which rules keep a kill at any instruction from repeating or skipping a batch in the effective history
(readers take the highest trainer generation, `incarnation`, per batch_index). Order of effects here:

  1. The transactor is entered. The newest checkpoint is loaded (or the model folder), its marker claims the generation
     number, and its weights are published under a new version number.
  2. Per batch: read and check the file, which was begun during the previous step (`ReadAhead`), step, export weights
     if the rollout batch publishes, then StepCompleted in a transaction. A checkpoint is written while the next steps
     run (`Saves`), and so are weights published, in a later transaction (`Publications`): lags count them from their
     step on, and a checkpoint may cover a version that is not out yet. With [engine] colocate a step waits until every
     engine has released its memory (`SharedDevice`).
  3. If the trainer is killed after the commit, the batches since the last checkpoint are stepped again from the same
     weights under the next generation. With the same layout and threads on CPU their losses are bitwise equal.

`rerun` trains again over the manifests of a run and publishes nothing: its losses must be those of train-steps.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client import Counter, Gauge

from turnlog.infra.batch_files import PARQUET, write_tokens
from turnlog.infra.history import caught_up
from turnlog.infra.log import Transactor
from turnlog.infra.roles.health import count_tokens
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role, open_role
from turnlog.names import TransactionalId
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.processors.core.views.progress import ANNOUNCED
from turnlog.schemas.events import (
    BatchSkipped,
    MaskReason,
    SampleBatchFormed,
    StepCompleted,
    WeightVersionPublished,
)
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings, SettingsError
from turnlog.trainer import CheckpointDamaged, Diverged, launch
from turnlog.trainer.algorithms.draws import Call, DrawPasses, ForwardPass, Kept
from turnlog.trainer.algorithms.objective import Floats, Objective
from turnlog.trainer.batches import SharedDevice, read_truncation_flags, trained_rows
from turnlog.trainer.calls import R, Ranks
from turnlog.trainer.checkpoints.cursor import Checkpoints, bring, check_not_stored, cursor_of, cursor_values
from turnlog.trainer.checkpoints.places import CACHE, FolderPlace, RunBlobs, checkpoints_directory, store_place
from turnlog.trainer.checkpoints.publications import VERSION, Publications
from turnlog.trainer.checkpoints.saves import NeededByEvaluations, Saves
from turnlog.trainer.checkpoints.state import read_common
from turnlog.trainer.export import ExportedWeights, bucket_memory
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.generation import Generation, StepFigures, mean_reward
from turnlog.trainer.launch import LearnerThread, ranks
from turnlog.trainer.learner import Learner, StepResult
from turnlog.trainer.manifests import PARTITION, POLL_S, Cursor, Fetch, Manifests, ReadAhead, Tokenizers
from turnlog.trainer.models.experts import unrouted_rows
from turnlog.trainer.plan import LearningPlan, add_weight_hashes, check_unchanged, learning_plan
from turnlog.trainer.tiny_policy import initial_weights
from turnlog.trainer.transfers import Transfers
from turnlog.trainer.weight_records import version_event


def draw_passes(
    objective: Objective, call: Call, manifests: Manifests, fetch: Fetch, role: Role, kept: Kept
) -> DrawPasses:
    """Return the passes of rollout batches, whose further parts are read ahead."""

    async def rest(manifest: SampleBatchFormed) -> list[BatchRows]:
        return [await fetch(one) for one in await manifests.ahead(manifest.parts - 1)]

    return DrawPasses(
        objective, call, rest, functools.partial(read_truncation_flags, log=role.log, events=role.events), kept
    )


log = logging.getLogger(__name__)
STEPS = Counter("turnlog_trainer_steps", "Optimizer steps")
TOKENS = Counter("turnlog_trainer_tokens", "Tokens of the rows that were trained on")
LOSS = Gauge("turnlog_trainer_loss", "Loss of the last step")
REWARD = Gauge("turnlog_trainer_reward", "Mean reward of the last batch")
MEASURED = Gauge("turnlog_trainer_measure", "Measurements of the algorithm at the last step", ["name"])


async def main(role: Role) -> None:
    """Train until feeder.draws rollout batches are trained or the role stops. Raises TrainerError, CorruptBatch,
    LogError, SettingsError.
    """
    if role.settings.trainer.kind != "megatron":
        raise SettingsError(
            f"trainer.kind is {role.settings.trainer.kind}, and this role is the Megatron trainer, which would fence "
            "yours: start your own (docs/client.md), or set trainer.kind to megatron"
        )
    plan = learning_plan(role.settings)
    if role.settings.trainer.checkpoints == "s3":
        place = await store_place(role, checkpoints_directory(role.settings) / CACHE, owned=True)
        plan = dataclasses.replace(plan, place=place)
    plan = dataclasses.replace(plan, blobs=RunBlobs(role.settings.store))
    rank = launch.torchrun_rank(os.environ)
    if rank:
        await asyncio.to_thread(_follow, plan, rank)
        return
    await asyncio.to_thread(initial_weights, role.settings, functools.partial(_warming, role))
    async with (
        role.log.transactor(TransactionalId.TRAINER.format(run=role.settings.run.id)) as transactor,
        LearnerThread(plan, functools.partial(_rank_beats, role)) as learner,
    ):
        trainer = Trainer(role, transactor, plan, learner)
        async with trainer.publications:
            await trainer.run()


def _beat(role: Role) -> None:
    role.health.beat(within_s=role.settings.liveness.step_s)


def _rank_beats(role: Role, rank: int) -> None:
    role.health.beat(f"rank {rank}", within_s=role.settings.liveness.role_s)


def _warming(role: Role, step: int, steps: int, loss: float) -> None:
    _beat(role)
    role.health.unmet("start", f"warm start {step}/{steps}, loss {loss:.3f}")


def _follow(plan: LearningPlan, rank: int) -> None:
    layout = launch.layout_of(plan.options)
    launch.serve_rank(
        rank=rank,
        world_size=plan.world_size,
        layout=layout,
        port=0,
        place=plan.place,
        blobs=plan.blobs,
        join_s=plan.join_s,
    )


class Trainer:
    """A generation of the trainer."""

    def __init__(self, role: Role, transactor: Transactor, plan: LearningPlan, learner: LearnerThread) -> None:
        settings = role.settings
        self._role, self._transactor, self._plan, self._learner = role, transactor, plan, learner
        self._run_id, self._draws = settings.run.id, settings.feeder.draws
        self._directory = checkpoints_directory(settings)
        place = plan.place or FolderPlace(self._directory)
        self._checkpoints = Checkpoints(place, keep=settings.trainer.checkpoints_kept)
        exports, call = self._directory.with_name("exports"), learner.call
        self.publications = Publications(
            exports, plan.model, role.blobs, call, learner.call_beside, self._record_version
        )
        self._shape = read_shape(plan.model)
        self._tokenizers = Tokenizers(role, plan.model)
        self._generation = Generation(role, transactor)
        self._saves = Saves(
            self._checkpoints, learner.call, self._generation.check_owner, NeededByEvaluations(role, self._checkpoints)
        )
        self._of: ExportedWeights = "adapter" if settings.trainer.publish == "adapter" else "merged"
        self._kept: Kept = {}
        self._passes: DrawPasses
        self._shared = SharedDevice(role) if settings.engine.colocate else None
        self._is_direct = settings.trainer.publish == "direct"
        self._transfers: Transfers | None = None

    async def run(self) -> None:
        """Train as described in the module docstring."""
        await self._take_over()
        if self._generation.is_start_due:
            await self._publish_start()
        async with AsyncExitStack() as stack:
            if self._is_direct:
                self._transfers = await stack.enter_async_context(self._open_transfers())
            await self._train_all()
            if self._transfers is not None:
                await self._transfers.store_last(self._generation.cursor)
        await self.publications.settle()
        await self._generation.say_reached(last=True)
        await self._saves.settle()
        cursor = self._generation.cursor
        if self._saves.saved is None or cursor.step > self._saves.saved.step:  # skipped draws are read again
            await self._save()
            await self._saves.settle()
        log.info("trained %d of %d draws, %d steps", cursor.draws, self._draws, cursor.step)

    def _open_transfers(self) -> Transfers:
        beat, own = functools.partial(_beat, self._role), self._generation
        return Transfers(self._role, own.number, self._learner.call, self.publications, own.versions, own.record, beat)

    async def _train_all(self) -> None:
        """Train until all rollout batches are trained or the role stops."""
        async with AsyncExitStack() as stack:
            reader = await stack.enter_async_context(self._role.log.reader())
            start = (await self._role.log.start_offsets([PARTITION]))[PARTITION]
            manifests = Manifests(reader, self._role.events, self._run_id, self._generation.cursor, start=start)
            self._passes = draw_passes(self._plan.objective, self._call, manifests, self._rows, self._role, self._kept)
            self._role.health.mark_started()
            if self._shared is not None:
                await self._shared.follow(await stack.enter_async_context(self._role.log.reader()))
            async with ReadAhead(manifests, self._rows) as ahead:
                await self._train_batches(ahead)

    async def _train_batches(self, ahead: ReadAhead) -> None:
        free = time.monotonic()
        while not self._role.stopping.is_set() and not self._generation.is_done:
            _beat(self._role)
            batch = await ahead.next(timeout_s=POLL_S)
            if batch is None:
                await self._generation.say_reached()
                await self._saves.look()
                await self.publications.look()
                if self._transfers is not None:
                    await self._transfers.look(self._generation.cursor)
            elif isinstance(batch.manifest, BatchSkipped):
                self._generation.pass_over(batch.manifest, batch.offset)
            else:
                assert batch.rows is not None
                there = max(free, batch.known_at)
                seconds = {"wait": there - free, "read": time.monotonic() - there}
                if await self._device_is_free(seconds):
                    await self._train(batch.manifest, batch.rows, batch.offset, ahead, seconds)
                free = time.monotonic()

    async def _take_over(self) -> None:
        """Take the generation number, then restore the state to resume from."""
        if self._plan.place is None:
            check_not_stored(self._directory)
        else:
            await asyncio.to_thread(bring, self._directory, self._plan.place)
        self._plan = await asyncio.to_thread(add_weight_hashes, self._plan)
        while (held := await asyncio.to_thread(self._checkpoints.newest)) is not None:
            try:
                said = read_common(held)
            except CheckpointDamaged as damage:
                self._checkpoints.pass_over(held.name, damage)
            else:  # rejected before anything is claimed
                check_unchanged(said.get("learning", {}), self._plan, held.name)
                break
        own = self._generation
        await own.begin()
        own.number = await asyncio.to_thread(self._checkpoints.claim, own.least_number)
        folder = await self._restore_newest()
        if folder is not None:
            common = read_common(folder)
            self._saves.saved = own.cursor = cursor_of(common, critic=self._plan.objective.critic is not None)
            self._saves.name = folder.name
            self._kept = common.get("draw", {})
            self._plan = self._plan.behind(own.cursor.inherited, own.cursor.critic_from)
        elif own.number:
            log.warning(
                "none of the %d earlier trainer generations left a checkpoint: training starts over", own.number
            )
        log.info("incarnation %d starts at batch %d", own.number, own.cursor.next_batch)

    async def _restore_newest(self) -> Path | None:
        """Restore the newest checkpoint in which no rank finds a damaged file, and return its folder; None if there is
        none.
        """
        while (folder := await asyncio.to_thread(self._checkpoints.newest)) is not None:
            try:
                await self._learner.call(Learner.restore, folder)
            except CheckpointDamaged as damage:
                await asyncio.to_thread(self._checkpoints.condemn, folder.name, damage)
            else:
                return folder
        return None

    async def _publish_start(self) -> None:
        """Publish the weights that this generation starts from; they always lie in a checkpoint.

        The base weights of adapters are published before the first adapter; in a new run the two are the same.
        """
        begins = self._saves.saved is None
        if begins:
            await self._save()
            await self._saves.settle()
        checkpoint = self._checkpoints.checkpoint_address(self._saves.name)
        whole = self._generation.whole
        if self._of == "adapter" and not (whole and await self.publications.holds(whole.checksums)):
            await self._go_out(checkpoint if begins else None, "base")
            if begins:
                return
        await self._go_out(checkpoint, self._of)

    async def _go_out(self, checkpoint: str | None, of: ExportedWeights) -> None:
        """Publish the current weights and wait for it. Lags are counted in steps: base weights have the step at which
        adapters begin.
        """
        digests: Mapping[str, str] | None = None
        if self._is_direct:  # with the plan by which versions are sent
            limit = bucket_memory(self._role.settings.weights.bucket_mb)
            found = await self._learner.call(Learner.digests, limit)
            digests = None if found is None else found[1]
        due = await self._due(self._generation.cursor, checkpoint, of, digests)
        self._generation.count_version(due)
        await self.publications.settle()

    async def _train(
        self, manifest: SampleBatchFormed, rows: BatchRows, offset: int, ahead: ReadAhead, seconds: dict[str, float]
    ) -> None:
        """Train on one batch. `seconds` holds the time of the phases before the step."""
        waited_s = self.publications.waited_s() + (self._transfers.waited_s() if self._transfers else 0.0)
        seconds |= {"checkpoint": self._saves.waited_s(), "publish": waited_s}
        mark = time.monotonic()
        rate = self._plan.learning_rate(self._generation.cursor.step)
        computed = self._plan.objective.rows_to_compute(rows)
        result = await self._step(manifest, computed, ahead, rate)
        seconds["step"] = time.monotonic() - mark
        _beat(self._role)
        cursor = self._generation.after(manifest, offset, skipped=result.skipped)
        mark = time.monotonic()
        told = result.tokens
        file = None
        if told is not None:
            content = await asyncio.to_thread(write_tokens, computed, told, self._role.events.keys)
            file = await self._role.blobs.put(content, media_type=PARQUET)
        due = await self._make_due(cursor) if self._generation.is_publication_due(manifest, cursor) else None
        seconds["export"] = time.monotonic() - mark
        completed = self._build_step_record(manifest, rows, computed, result, rate, seconds, file)
        announced = [due] if due is not None and due.state == ANNOUNCED else []
        await self._generation.record_step(completed, cursor, announced)
        if due is not None:  # lags count this version from here on
            self._generation.count_version(due)
        self._observe(rows, completed)
        if self._transfers is not None and due is not None:
            await self._transfers.publish(due, cursor, last=self._generation.is_done)
        self._check_converges(manifest)
        await self._saves.look()
        if cursor.step % self._role.settings.trainer.checkpoint_every == 0 or self._is_evaluation_due(manifest, cursor):
            await self._save()

    async def _step(self, manifest: SampleBatchFormed, rows: BatchRows, ahead: ReadAhead, rate: float) -> StepResult:
        """Step on those rows of the batch that are computed; include per-token figures if the step leaves a token
        file.
        """
        numbers = await self._passes.numbers(manifest, rows)
        ahead.begin()
        every = self._role.settings.trainer.token_files_every
        tells = every > 0 and self._generation.cursor.step % every == 0
        held = self._generation.versions.of_step(self._generation.cursor.step)
        step = self._learner.call(Learner.step, rows, self._plan.objective, rate, numbers, tells, held)
        result = await self._beside(step)
        self._passes.release_batch(rows)
        return result

    async def _device_is_free(self, seconds: dict[str, float]) -> bool:
        """Wait until no engine holds memory on shared devices; `seconds` counts this as waiting. False if the role
        stops first.
        """
        if self._shared is None:
            return True
        mark = time.monotonic()
        await self.publications.settle()  # then the records that engines follow are on the log
        free = await self._shared.free(self._generation.versions.newest, functools.partial(_beat, self._role))
        seconds["wait"] += time.monotonic() - mark
        return free

    async def _rows(self, manifest: SampleBatchFormed) -> BatchRows:
        await self._tokenizers.check(manifest)
        return await trained_rows(manifest, self._role, self._shape, self._plan.model)

    async def _call(self, method: ForwardPass, rows: BatchRows) -> Floats:
        _beat(self._role)
        return await self._learner.call(method, rows)

    def _check_converges(self, manifest: SampleBatchFormed) -> None:
        """Raises Diverged after [trainer] max_skipped steps in a row without a finite gradient."""
        skipped, limit = self._generation.cursor.skipped, self._role.settings.trainer.max_skipped
        if limit and skipped >= limit:
            raise Diverged(
                f"{skipped} steps in a row had no finite gradient and changed no weights, the last one on batch "
                f"{manifest.batch_index} of rollout batch {manifest.draw_index} (object {manifest.file.sha256}): look "
                "for extreme advantages or log-probs in its file; if the weights are the cause, go back to an "
                "earlier checkpoint and lower trainer.learning_rate; trainer.max_skipped = 0 continues regardless"
            )

    def _is_evaluation_due(self, manifest: SampleBatchFormed, after: Cursor) -> bool:
        """Whether the feeder requests an evaluation round of the weights after this batch."""
        every = self._role.settings.eval.every
        return every > 0 and manifest.part == manifest.parts - 1 and after.draws % every == 0

    async def _make_due(self, cursor: Cursor) -> WeightVersionPublished:
        """Make the ranks' weights the next version: one that is stored concurrently, or one to announce."""
        if self._transfers is None:
            return await self._due(cursor, None, self._of)
        return await self._transfers.announcement(self._generation.next_version, cursor)

    async def _due(
        self, cursor: Cursor, checkpoint: str | None, of: ExportedWeights, digests: Mapping[str, str] | None = None
    ) -> WeightVersionPublished:
        """Make the ranks' weights the next version, which is published concurrently."""
        version = self._generation.next_version
        said = functools.partial(
            version_event,
            run_id=self._run_id,
            version=version,
            incarnation=self._generation.number,
            cursor=cursor,
            checkpoint=checkpoint,
            adapts=self._generation.whole.version if of == "adapter" and self._generation.whole else None,
            digests=digests,
        )
        due = await self.publications.begin(version, said, of)
        if self._shared is not None:
            await self._learner.call(Learner.free_cache)
        _beat(self._role)
        return due

    async def _record_version(self, event: WeightVersionPublished) -> None:
        """Write the record of a version that is stored."""
        await self._generation.record(event)
        VERSION.set(self._generation.versions.version if event.transport == "direct" else event.version)

    async def _beside(self, work: Awaitable[R]) -> R:
        """Return the result of `work`. Meanwhile commit the position reached, and publish weights that are stored."""
        working = asyncio.ensure_future(work)
        try:
            await self._generation.say_reached()
            await self.publications.beside(working)
        finally:
            await asyncio.wait([working])
        return working.result()

    async def _save(self) -> None:
        _beat(self._role)
        held = {"draw": self._kept} if any(self._kept.values()) else {}
        said = {"cursor": cursor_values(self._generation.cursor), "learning": dict(self._plan.recorded)}
        await self._saves.begin(self._generation.cursor, {**said, **held})

    def _build_step_record(
        self,
        manifest: SampleBatchFormed,
        rows: BatchRows,
        computed: BatchRows,
        result: StepResult,
        rate: float,
        seconds: dict[str, float],
        token_file: BlobRef | None,
    ) -> StepCompleted:
        """Build the record of a step. `computed` holds the rows that the step computed."""
        unrouted_tokens = self._unrouted_tokens(computed)
        only = self._role.settings.trainer.router_replay == "only"
        figures = StepFigures(
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            skipped=result.skipped,
            masked=_masked_tokens(manifest, rows, result, sum(unrouted_tokens.values()) if only else 0),
            logprob_gap_max=result.logprob_gap_max,
            logprob_gap_mean=result.logprob_gap_mean,
            old_cache_gap_max=result.old_cache_gap_max,
            old_cache_gap_mean=result.old_cache_gap_mean,
            entropy=result.entropy,
            clip_fraction=result.clip_fraction,
            seconds=seconds,
            world_size=self._plan.world_size,
            metrics={
                **result.metrics,
                **unrouted_tokens,
                "zero_advantage_tokens": float(manifest.trained_tokens - result.trained_tokens),
            },
            token_file=token_file,
        )
        return self._generation.step_record(manifest, rows, figures)

    def _unrouted_tokens(self, rows: BatchRows) -> dict[str, int]:
        """Count trained tokens of computed rows without recorded experts, if routers replay those of the others."""
        if not self._shape.mixture or self._role.settings.trainer.router_replay == "off":
            return {}
        return {"unrouted_tokens": int(rows.trained_per_row()[unrouted_rows(rows)].sum())}

    def _observe(self, rows: BatchRows, result: StepCompleted) -> None:
        STEPS.inc()
        for phase, took_s in result.seconds.items():
            STAGE_S.labels("trainer", phase).observe(took_s)
        TOKENS.inc(len(rows.token_ids))
        LOSS.set(result.loss)
        REWARD.set(mean_reward(rows))
        for name, figure in result.metrics.items():
            MEASURED.labels(name).set(figure)
        trained = result.trained_tokens - sum(result.masked.values())
        count_tokens("step", sampled=int(rows.trained.sum()), trained=trained, masked=result.masked)
        log.info(
            "step %d: loss %.5f, gradient %.3f, gap %.1e%s",
            self._generation.cursor.step,
            result.loss,
            result.grad_norm,
            result.logprob_gap_max,
            " SKIPPED: the gradient is not finite" if result.skipped else "",
        )


def _masked_tokens(
    manifest: SampleBatchFormed, rows: BatchRows, result: StepResult, unrouted_tokens: int
) -> dict[str, int]:
    """Return the number of the manifest's trained tokens that a step did not train, by reason.

    Tokens that the step did not have to compute count as trained: their gradient is 0.
    """
    if result.skipped:
        return {MaskReason.step_skipped.value: manifest.trained_tokens}
    erased = manifest.trained_tokens - int(rows.trained.sum())
    found = {
        MaskReason.unrouted: unrouted_tokens,
        MaskReason.trainer_mask: result.masked - unrouted_tokens,
        MaskReason.erased: erased,
    }
    return {reason.value: tokens for reason, tokens in found.items() if tokens}


def rerun(settings: Settings, checkpoint: Path | None, until: int) -> list[float]:
    """Return the losses of the batches from the checkpoint's cursor (None: batch 0, from the model folder) up to, not
    including, batch_index `until`, or to the end of sample-batches.

    Do not call this within an event loop or a process that trains. Raises CheckpointUnusable, CorruptBatch, BatchGap.
    """

    async def run() -> list[float]:
        async with open_role("rerun", settings) as role:
            with ranks(learning_plan(settings)) as everyone:
                return await _losses(role, everyone, checkpoint, until)

    return asyncio.run(run())


async def _losses(role: Role, everyone: Ranks, checkpoint: Path | None, until: int) -> list[float]:
    plan = learning_plan(role.settings)
    cursor = Cursor()
    kept: Kept = {}
    if checkpoint is not None:
        common = read_common(checkpoint)
        cursor, kept = cursor_of(common, critic=plan.objective.critic is not None), common.get("draw", {})
        plan = plan.behind(cursor.inherited, cursor.critic_from)
        everyone.call(Learner.restore, checkpoint)
    start = (await role.log.start_offsets([PARTITION]))[PARTITION]
    ends = await role.log.end_offsets([PARTITION])
    losses: list[float] = []
    async with role.log.reader() as reader:
        manifests = Manifests(reader, role.events, role.settings.run.id, cursor, start=start)

        async def call(method: ForwardPass, rows: BatchRows) -> Floats:
            return everyone.call(method, rows)

        fetch = functools.partial(trained_rows, role=role, shape=read_shape(plan.model), model=plan.model)
        passes = draw_passes(plan.objective, call, manifests, fetch, role, kept)
        while True:
            found = await manifests.next(timeout_s=POLL_S)
            if found is None and caught_up(reader, ends):
                return losses
            if found is None:
                continue
            manifest, _ = found
            if manifest.batch_index >= until:
                return losses
            if isinstance(manifest, SampleBatchFormed):
                rows = plan.objective.rows_to_compute(await fetch(manifest))
                rate = plan.learning_rate(cursor.step + len(losses))
                numbers = await passes.numbers(manifest, rows)
                losses.append(everyone.call(Learner.step, rows, plan.objective, rate, numbers).loss)
