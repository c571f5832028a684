"""Draws of several updates, in memory: what their passes gave is kept over a kill; a streak of skipped steps ends."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.fakes.batches import append_batches, synthetic_manifest, synthetic_model, synthetic_rows, with_random_experts
from tests.fakes.memory_log import MemoryLog
from tests.unit.trainer.test_recorded import ROWS, formed
from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.s3 import S3Blobs
from turnlog.infra.topics_admin import specs
from turnlog.names import TransactionalId
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.schemas.events import StepCompleted
from turnlog.schemas.topics import STEPS
from turnlog.settings import Settings, StoreSettings, from_tables
from turnlog.trainer import CheckpointUnusable, Diverged
from turnlog.trainer.algorithms.draws import DrawPasses
from turnlog.trainer.checkpoints.cursor import Checkpoints, find, folder_name
from turnlog.trainer.checkpoints.places import SUMS, FolderPlace, RunBlobs, StorePlace
from turnlog.trainer.families.shape import TINY, TINY_MIXTURE, ModelShape
from turnlog.trainer.launch import Beat, LearnerThread
from turnlog.trainer.loop import Trainer, draw_passes
from turnlog.trainer.manifests import Cursor, Manifests
from turnlog.trainer.plan import LearningPlan, PolicyGradient, learning_plan

PARTS = 3
PPO = {"algorithm": "ppo", "value_updates": 2, "value_warmup_steps": 1, "value_learning_rate": 1e-3}
DECOUPLED = {"logprobs": "recomputed", "importance": "truncated", "kl": "k3", "kl_coefficient": 0.1}


class Run:
    """Topics, a store and a model folder; `train` is one incarnation of the trainer."""

    def __init__(self, folder: Path, shape: ModelShape = TINY, **trainer: Any) -> None:
        model = folder / "model"
        self.settings: Settings = from_tables(
            {
                "run": {"id": "run", "directory": str(folder)},
                "model": {"path": str(model if model.exists() else synthetic_model(model, shape))},
                "feeder": {"draws": 2},
                "fold": {"estimator": "none" if trainer.get("algorithm") == "ppo" else "grpo"},
                "trainer": {
                    "learning_rate": 8e-4,
                    "dtype": "float32",
                    "threads": 1,
                    "checkpoint_every": 1,
                    "checkpoints_kept": 20,
                    **trainer,
                },
            },
            {},
            source="test",
        )
        self.log, self.registry, self.blobs = MemoryLog(), MemoryRegistry(), MemoryBlobs()
        self.place: StorePlace | None = None
        self.store: StoreSettings | None = None
        """Where ranks upload weights; None: they upload none, and versions name no files."""

    async def begin(self) -> None:
        """Make the topics."""
        await self.log.create_topics(specs(self.settings))

    def events(self) -> Any:
        return EventLog.open(MemoryLog(self.log.broker), self.registry, writer="trainer")

    def role(self, events: EventLog) -> Role:
        return Role("trainer", "trainer", self.settings, events.log, events, self.blobs, Health("trainer"))

    async def train(self, ranks: Callable[[LearningPlan, Beat], LearnerThread] = LearnerThread) -> None:
        async with self.events() as events:
            role = self.role(events)
            store = None if self.store is None else RunBlobs(self.store)
            plan = dataclasses.replace(learning_plan(self.settings), place=self.place, blobs=store)
            name = TransactionalId.TRAINER.format(run="run")
            async with events.log.transactor(name) as transactor, ranks(plan, lambda _: None) as learner:
                await Trainer(role, transactor, plan, learner).run()

    async def steps(self, count: int) -> list[StepCompleted]:
        """The first `count` on the log, in its order; waits for them."""
        found: list[StepCompleted] = []
        async with self.events() as events, events.log.reader() as reader:
            reader.assign({Partition(STEPS.name, 0): 0})
            while len(found) < count:
                for record in await reader.poll(timeout_s=0.05):
                    event = await events.decode_known(record)
                    found += [event] if isinstance(event, StepCompleted) else []
        return found


async def struck_and_whole(
    tmp_path: Path, trainer: dict[str, Any]
) -> tuple[dict[int, StepCompleted], dict[int, StepCompleted]]:
    """(the steps of a run, those that count of one that is killed between two updates of a draw)."""
    whole = Run(tmp_path / "whole", **trainer)
    await whole.begin()
    async with whole.events() as events:
        await append_batches(events, whole.blobs, "run", 2 * PARTS, parts=PARTS)
    await whole.train()
    undisturbed = {step.batch_index: step for step in await whole.steps(2 * PARTS)}

    struck = Run(tmp_path / "struck", **trainer)
    await struck.begin()
    async with struck.events() as events:
        await append_batches(events, struck.blobs, "run", 2 * PARTS, parts=PARTS)
    first = asyncio.create_task(struck.train())
    await struck.steps(3)  # by now the checkpoint behind the first one is being written
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    _, cursor = find(FolderPlace(tmp_path / "struck/checkpoints"), None)
    await struck.train()
    steps = await struck.steps(2 * PARTS)
    final = {step.batch_index: step for step in sorted(steps, key=lambda step: step.incarnation)}
    assert (cursor["next_batch"] or 0) % PARTS > 0
    assert {step.incarnation for step in steps} == {0, 1}
    return undisturbed, final


async def test_a_kill_between_two_updates_of_a_draw_gives_the_same_bits(tmp_path: Path) -> None:
    teacher = {"teacher": str(synthetic_model(tmp_path / "teacher"))}  # as the policy begins
    undisturbed, final = await struck_and_whole(tmp_path, DECOUPLED | teacher)
    for index, step in undisturbed.items():
        assert (final[index].loss, final[index].metrics) == (step.loss, step.metrics)
    assert [step.metrics["updates_since_sampling"] for step in undisturbed.values()] == [0, 1, 2, 3, 4, 5]
    assert undisturbed[0].metrics["ratio"] == 1.0
    assert undisturbed[0].metrics["kl"] == undisturbed[0].metrics["teacher_kl"] == 0.0
    assert undisturbed[1].metrics["ratio_max"] > 1.0
    assert undisturbed[3].metrics["ratio"] == 1.0
    assert undisturbed[3].metrics["kl"] > 0.0
    assert undisturbed[3].metrics["teacher_kl"] != 0.0


@pytest.mark.long  # the suite has the same without a critic, above, and a critic that goes on (test_critic.py)
async def test_a_kill_inside_a_draw_gives_the_same_bits_of_a_policy_with_a_critic(tmp_path: Path) -> None:
    undisturbed, final = await struck_and_whole(tmp_path, PPO)
    for index, step in undisturbed.items():
        assert (final[index].loss, final[index].metrics) == (step.loss, step.metrics)
    assert [step.learning_rate > 0 for step in undisturbed.values()] == [False, True, True, True, True, True]
    assert undisturbed[0].metrics["value_loss"] > 0
    assert [step.metrics["value_mean"] != 0 for step in undisturbed.values()] == [False, False, False, True, True, True]


async def test_steps_without_a_finite_gradient_in_a_row_end_the_trainer_and_name_the_batch(tmp_path: Path) -> None:
    run = Run(tmp_path, max_skipped=2)
    await run.begin()
    async with run.events() as events:
        for index in range(4):
            rows = synthetic_rows(index)
            if index > 0:
                rows = dataclasses.replace(rows, advantages=np.where(rows.trained, np.float32(3e38), np.float32(0)))
            file = await run.blobs.put(write_rows(rows), media_type=MEDIA_TYPE)
            await events.append(synthetic_manifest(rows, file, "run", index, part=index, parts=4))
    with pytest.raises(
        Diverged, match=r"2 steps in a row had no finite gradient.* batch 2 of rollout batch 0 .*learning_rate"
    ):
        await run.train()
    steps = await run.steps(3)
    assert [(step.skipped, step.masked) for step in steps] == [
        (False, {}),
        *((True, {"step_skipped": step.trained_tokens}) for step in steps[1:]),
    ]
    with pytest.raises(Diverged, match="batch 2"):  # a restart does not count anew
        await run.train()
    again = [step.batch_index for step in await run.steps(4)]
    assert again[:3] == [0, 1, 2]
    assert again[3] in (1, 2)  # behind the checkpoint before, where the last one was still being written


@pytest.mark.parametrize(
    "file",
    [
        "__0_0.distcp",
        *(pytest.param(one, marks=pytest.mark.long) for one in (".metadata", "common.pt", "metadata.json")),
    ],
)
@pytest.mark.parametrize("cut", [None, 20, *(pytest.param(cut, marks=pytest.mark.long) for cut in (0, 0.5))])
async def test_training_goes_back_from_a_checkpoint_whose_damage_no_sums_show(
    tmp_path: Path, file: str, cut: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    await run.begin()
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", 2)
    await run.train()
    last = tmp_path / "checkpoints/step-00000002-i0"
    (last / SUMS).unlink()
    content = (last / file).read_bytes()
    if cut is None:
        (last / file).unlink()
    else:
        (last / file).write_bytes(content[: int(cut * len(content)) if cut < 1 else int(cut)])
    await run.train()
    first, second, again = await run.steps(3)
    assert [(step.batch_index, step.incarnation) for step in (first, second, again)] == [(0, 0), (1, 0), (1, 1)]
    assert (again.loss, again.grad_norm) == (second.loss, second.grad_norm)
    assert str(last) in caplog.text


async def test_from_a_stored_checkpoint_that_a_rank_finds_damaged_training_goes_back_to_the_one_before(
    tmp_path: Path, store: StoreSettings, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.place = StorePlace(store, f"owned/{uuid4().hex}/checkpoints", tmp_path / "s3")
    await run.begin()
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", 2)
    await run.train()
    blobs = S3Blobs(store)
    shard = f"{run.place.prefix}/step-00000002-i0/__0_0.distcp"
    content = await blobs.get_named(shard)
    await blobs.put_named(shard, bytes(len(content)))
    await blobs.close()
    shutil.rmtree(tmp_path / "s3")  # as on another machine
    await run.train()
    first, second, again = await run.steps(3)
    assert [(step.batch_index, step.incarnation) for step in (first, second, again)] == [(0, 0), (1, 0), (1, 1)]
    assert (again.loss, again.grad_norm) == (second.loss, second.grad_norm)
    assert "__0_0.distcp" in caplog.text
    assert "step-00000002-i0 are repeated" in caplog.text


async def test_manifests_are_read_ahead_without_being_taken() -> None:
    log = MemoryLog()
    await log.create_topics(specs(Settings()))
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        await append_batches(events, MemoryBlobs(), "run", 6, parts=3)
        async with log.reader() as reader:
            manifests = Manifests(reader, events, "run", Cursor(), start=0)
            first = await manifests.next(timeout_s=0.2)
            assert first is not None
            assert [one.batch_index for one in await manifests.ahead(2)] == [1, 2]
            then = [await manifests.next(timeout_s=0.2) for _ in range(5)]
            assert [one[0].batch_index for one in then if one] == [1, 2, 3, 4, 5]


async def test_a_part_whose_draw_was_begun_without_its_passes_is_refused() -> None:
    async def unasked(*_: Any) -> Any:
        raise AssertionError("a part behind the first computes nothing")

    rows = synthetic_rows(1)
    file = await MemoryBlobs().put(write_rows(rows))
    manifest = synthetic_manifest(rows, file, "run", 1, part=1, parts=2)
    passes = DrawPasses(PolicyGradient(logprobs="recomputed"), unasked, unasked, unasked, {})
    with pytest.raises(
        CheckpointUnusable, match=r"batch 1 is part 1 of rollout batch 0, .* no proximal log-probs of sample-1-000"
    ):
        await passes.numbers(manifest, rows)


@pytest.mark.parametrize("std", [None, 0.25])
async def test_an_objective_is_told_its_batch_and_what_its_advantages_were_whitened_with(std: float | None) -> None:
    async def unasked(*_: Any) -> Any:
        raise AssertionError("the objective asks for no pass")

    rows = synthetic_rows(0)
    file = await MemoryBlobs().put(write_rows(rows))
    manifest = dataclasses.replace(synthetic_manifest(rows, file, "run", 3), whitening_std=std)
    passes = DrawPasses(PolicyGradient(), unasked, unasked, unasked, {})
    numbers = await passes.numbers(manifest, rows)
    assert (numbers.batch, numbers.whitening_std) == (3, std)


@pytest.mark.parametrize(("truncated", "told"), [("bootstrap", [False, False, True, False]), ("terminal", None)])
async def test_a_critic_that_bootstraps_is_told_which_trajectories_were_truncated(
    tmp_path: Path, truncated: str, told: list[bool] | None
) -> None:
    async def says_nothing(_: Any, rows: BatchRows) -> Any:
        return np.zeros(len(rows.token_ids) + len(rows), "<f4")

    async def unasked(*_: Any) -> Any:
        raise AssertionError("a draw of one part has no others")

    run = Run(tmp_path, **PPO, truncated=truncated)
    await run.begin()
    async with run.events() as events, events.log.reader() as reader:
        manifests = Manifests(reader, events, "run", Cursor(), start=0)
        objective = learning_plan(run.settings).objective
        passes = draw_passes(objective, says_nothing, manifests, unasked, run.role(events), {})
        numbers = await passes.numbers(await formed(events, run.blobs, cut_short=2), ROWS)
    assert (numbers.truncated if told is None else numbers.truncated.tolist()) == told


async def test_token_files_of_every_nth_step_lie_in_the_store_and_say_what_its_tokens_were(tmp_path: Path) -> None:
    run = Run(tmp_path, token_files_every=2)
    await run.begin()
    async with run.events() as events:
        await append_batches(events, run.blobs, "run", 2, parts=1)
    await run.train()
    first, second = await run.steps(2)
    assert first.token_file is not None
    assert second.token_file is None
    table = parquet.read_table(pa.BufferReader(await run.blobs.get(first.token_file)))
    rows, found = synthetic_rows(0), {name: table[name].to_numpy() for name in table.column_names[1:]}
    at = np.flatnonzero(rows.trained)
    row = np.repeat(np.arange(len(rows)), rows.lengths)[at]
    assert table["sample_id"].to_pylist() == [rows.sample_ids[one] for one in row]
    assert np.array_equal(rows.starts[row] + found["position"], at)
    assert np.array_equal(found["advantage"], rows.advantages[at])
    np.testing.assert_allclose(np.log(found["ratio"]), found["logprob"] - rows.logprobs[at], atol=1e-5)
    assert found["entropy"].mean() == pytest.approx(first.entropy, rel=1e-5)
    assert found["ratio"].mean() == pytest.approx(first.metrics["ratio"], rel=1e-5)
    assert np.abs(found["logprob"] - rows.logprobs[at]).max() == pytest.approx(first.logprob_gap_max, rel=1e-5)


@pytest.mark.parametrize("shape", [TINY, TINY_MIXTURE], ids=lambda shape: shape.kind)
async def test_tokens_that_a_step_masks_are_booked_by_their_reason(tmp_path: Path, shape: ModelShape) -> None:
    """Those of a greedy row and beyond the bounds of importance; of a mixture, those of rows without experts."""
    masks = {"logprobs": "recomputed", "importance": "masked", "importance_low": 0.97, "importance_high": 1.03}
    run = Run(tmp_path, shape, router_replay="only", token_files_every=1, **masks)
    await run.begin()
    batches = []
    async with run.events() as events:
        for index in range(2):
            rows = with_random_experts(synthetic_rows(index), TINY_MIXTURE, index, some=True)
            temperature = np.where(np.arange(len(rows)) == 1, np.float32(0), rows.temperature)
            rows = dataclasses.replace(rows, temperature=temperature)
            file = await run.blobs.put(write_rows(rows), media_type=MEDIA_TYPE)
            await events.append(await formed(events, run.blobs, rows, file, index))
            batches.append(rows)
    await run.train()
    for rows, step in zip(batches, await run.steps(2), strict=True):
        at = np.flatnonzero(rows.trained)
        row = np.repeat(np.arange(len(rows)), rows.lengths)[at]
        assert step.token_file is not None
        table = parquet.read_table(pa.BufferReader(await run.blobs.get(step.token_file)))
        weight = np.exp(table["logprob"].to_numpy() - rows.logprobs[at])
        without = ~rows.has_experts[row] & bool(shape.experts)
        zeroed = ((row == 1) | (weight < 0.97) | (weight > 1.03)) & ~without
        expected = {"unrouted": int(without.sum()), "trainer_mask": int(zeroed.sum())}
        assert step.masked == {reason: tokens for reason, tokens in expected.items() if tokens}
        assert 0 < expected["trainer_mask"] < int(rows.trained.sum()) == step.trained_tokens
        assert (expected["unrouted"] > 0) == bool(shape.experts)


async def test_tokens_that_a_step_does_not_compute_are_trained_and_told(tmp_path: Path) -> None:
    """And weights that a round is asked for have a checkpoint."""
    run = Run(tmp_path, logprobs="recomputed", token_files_every=1, checkpoint_every=100)
    run.settings = dataclasses.replace(run.settings, eval=dataclasses.replace(run.settings.eval, every=1))
    await run.begin()
    batches = []
    async with run.events() as events:
        for index in range(4):
            rows = synthetic_rows(index)
            still = np.repeat(
                np.isin(rows.group_ids, rows.group_ids[:8] if index % 2 else rows.group_ids), rows.lengths
            )
            rows = dataclasses.replace(rows, advantages=np.where(still, np.float32(0), rows.advantages))
            file = await run.blobs.put(write_rows(rows), media_type=MEDIA_TYPE)
            await events.append(synthetic_manifest(rows, file, "run", index, part=index % 2, parts=2))
            batches.append(rows)
    await run.train()
    for rows, step in zip(batches, await run.steps(4), strict=True):
        computed = PolicyGradient().rows_to_compute(rows)
        trained = int(rows.trained.sum())
        assert (step.trained_tokens, step.masked, step.skipped) == (trained, {}, False)
        assert step.metrics["zero_advantage_tokens"] == trained - int(computed.trained.sum()) > 0
        assert (step.grad_norm == 0.0) == (step.loss == 0.0) == (not rows.advantages.any())
        assert step.token_file is not None
        table = parquet.read_table(pa.BufferReader(await run.blobs.get(step.token_file)))
        assert set(table["sample_id"].to_pylist()) == set(computed.sample_ids)
    folders = Checkpoints(FolderPlace(tmp_path / "checkpoints"), keep=1).cursors()
    assert {name: cursor.draws for name, cursor in folders.items()} == {folder_name(2 * n, 0): n for n in range(3)}
