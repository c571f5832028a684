"""What the batcher publishes adds up: a corrupted batch never leaves it. Whitening and order are as settings say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.fakes.memory_log import MemoryLog
from turnlog.consumers.replay.batches import batch_difference
from turnlog.infra.batch_files import build_batch_file, read_rows, write_rows
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import configuration, load_configuration
from turnlog.infra.topics_admin import specs
from turnlog.processors.core.batches.draws import PlacedSample, draw_rules, form_draw, laid_out, reform_batch
from turnlog.processors.core.batches.rows import BatchRows, rows_sha256
from turnlog.processors.core.batches.weighting import Weights, WeightsDoNotAddUp, Whitening, weigh
from turnlog.processors.core.views.progress import HeldVersion
from turnlog.processors.runtime.batcher import ROLE, Batcher, control_places
from turnlog.schemas import topics
from turnlog.schemas.events import (
    BatchSkipped,
    Event,
    GroupScored,
    GroupStatus,
    Outcome,
    Purpose,
    SampleBatchFormed,
    SampleSpan,
    SegmentSample,
    TreeBooks,
    WeightVersionPublished,
)
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s
from turnlog.settings import BatcherSettings, FeederSettings, FoldSettings, KafkaSettings, Settings

SETTINGS = Settings(
    kafka=KafkaSettings(groups=1, rollouts=1),
    fold=FoldSettings(estimator="reinforce_pp"),
    batcher=BatcherSettings(prompts_per_draw=2, ready_batches=100, max_lag=1),
    feeder=FeederSettings(draws=100),
)
VERSION = 5


def sample(group: str, *, advantage: float, tokens: int = 2, version: int = VERSION, trained: bool = True) -> Event:
    return SegmentSample(
        event_id=f"{group}/0",
        run_id="local",
        group_id=group,
        session_id=f"{group}s",
        rollout_id=f"{group}r",
        rollout_index=0,
        task_id="t",
        sample_id=f"{group}/0",
        purpose=Purpose.train,
        segment_index=0,
        segment_count=1,
        is_anchor=True,
        token_ids=pack_int32s(range(1 + tokens)),
        spans=(SampleSpan(1, tokens, TurnId("e", 0), version, trained),),
        logprobs=pack_float32s([-0.5] * tokens),
        temperature=1.0,
        logprob_kind="at_temperature",
        advantage=advantage,
        reward=advantage,
        outcome=Outcome.completed,
        recipe="calc",
        weight_version_min=version,
        weight_version_max=version,
    )


def score(group: str) -> Event:
    return GroupScored(
        event_id=f"{group}/score",
        run_id="local",
        group_id=group,
        floor=0,
        task_id="t",
        purpose=Purpose.train,
        rollouts=(),
        baseline=0.0,
        std=None,
        estimator="reinforce_pp/1",
        status=GroupStatus.trained,
        reason="",
        samples=1,
        books=TreeBooks(2, 2, {}),
        fold_version="1",
        settings_sha256="",
    )


def published() -> Event:
    return WeightVersionPublished(
        event_id="v",
        run_id="local",
        version=VERSION,
        step=0,
        batch_index=-1,
        incarnation=0,
        kind="full",
        base_version=None,
        files=(),
        dtype="float32",
        checksums={},
        checkpoint=None,
    )


@dataclass
class World:
    """A log with some groups on it, and what one life of the batcher makes of them."""

    settings: Settings = SETTINGS
    log: MemoryLog = field(default_factory=MemoryLog)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    blobs: MemoryBlobs = field(default_factory=MemoryBlobs)

    async def batches(self, *samples: Event, expected: int, **pieces: Any) -> list[Event]:
        """Write one group per sample, run a batcher of these pieces until sample-batches has `expected` records."""
        await self.log.create_topics(specs(self.settings))
        async with EventLog.open(self.log, self.registry, writer="test") as events:
            await events.append(configuration(self.settings))
            await events.append(published())
            for one in samples:
                await events.append(one)
                await events.append(score(one.group_id))
            role = Role("batcher", "b", self.settings, MemoryLog(self.log.broker), events, self.blobs, Health("b"))
            running = asyncio.create_task(live(role, **pieces))
            try:
                async with asyncio.timeout(20):
                    while not running.done() and len(await self.manifests(events)) < expected:  # noqa: ASYNC110 - a poll
                        await asyncio.sleep(0)
            finally:
                role.stopping.set()
            await running
            return await self.manifests(events)

    async def manifests(self, events: EventLog) -> list[Event]:
        where = Partition(topics.BATCHES.name, 0)
        end = (await self.log.end_offsets([where]))[where]
        found: list[Event] = []
        async with self.log.reader() as reader:
            reader.assign({where: 0})
            while reader.position(where) < end:
                found += [await events.decode(record) for record in await reader.poll(timeout_s=0.01)]
        return found


async def live(role: Role, **pieces: Any) -> None:
    """One life of a batcher of these pieces."""
    run = await load_configuration(role)
    assert run is not None
    async with role.log.transactor("local.batcher") as transactor:
        await ROLE.serve(role, await control_places(run), Batcher(role, run, transactor, **pieces), transactor)


def never(*_: object) -> tuple[bytes, str]:
    """Where a draw is refused before."""
    pytest.fail("a corrupted batch came to be sealed")


def wrong_divisors(weights: Weights) -> Weights:
    return replace(weights, divisors=tuple(divisor + 1 for divisor in weights.divisors))


def wrong_totals(weights: Weights) -> Weights:
    return replace(weights, trained_tokens=weights.trained_tokens + 1)


@pytest.mark.parametrize("corrupted", [wrong_divisors, wrong_totals])
@pytest.mark.parametrize("weighting", ["prompt", "trajectory", "token", "constant"])
async def test_a_batch_with_a_corrupted_weighting_is_never_published(
    weighting: str, corrupted: Callable[[Weights], Weights]
) -> None:
    form = partial(form_draw, weigh=lambda *arguments: corrupted(weigh(*arguments)))
    here = World(replace(SETTINGS, batcher=replace(SETTINGS.batcher, weighting=weighting)))
    with pytest.raises(WeightsDoNotAddUp, match=f"weighting {weighting}: .* nothing was published"):
        await here.batches(sample("a", advantage=1.0), sample("b", advantage=0.0), expected=1, form=form, seal=never)
    async with EventLog.open(here.log, here.registry, writer="reader") as events:
        assert await here.manifests(events) == []
    assert here.blobs.objects == {}


async def test_columns_that_are_corrupted_on_their_way_into_the_file_are_never_published() -> None:
    def one_token_less(*arguments: Any) -> BatchRows:
        rows = laid_out(*arguments)
        trained = rows.trained.copy()
        trained[-1] = 0
        return replace(rows, trained=trained)

    form, here = partial(form_draw, lay_out=one_token_less), World()
    with pytest.raises(WeightsDoNotAddUp, match="the rows hold"):
        await here.batches(sample("a", advantage=1.0), sample("b", advantage=0.0), expected=1, form=form, seal=never)
    assert here.blobs.objects == {}


async def test_a_file_that_holds_other_columns_than_were_formed_is_never_published() -> None:
    seal = partial(
        build_batch_file, write=lambda rows: write_rows(replace(rows, weight_divisor=rows.weight_divisor * 2))
    )
    here = World()
    with pytest.raises(WeightsDoNotAddUp, match="has divisors"):
        await here.batches(sample("a", advantage=1.0), sample("b", advantage=0.0), expected=1, seal=seal)
    assert here.blobs.objects == {}


async def test_a_whitened_batch_is_formed_again_from_its_manifest() -> None:
    here = World()
    rows = [sample("a", advantage=1.0, tokens=3), sample("b", advantage=5.0, tokens=1)]
    (manifest,) = await here.batches(*rows, expected=1)
    assert isinstance(manifest, SampleBatchFormed)
    assert (manifest.whitening_mean, manifest.whitening_std) == (2.0, pytest.approx(3**0.5))
    held = read_rows(await here.blobs.get(manifest.file))
    tokens = held.advantages[held.trained == 1]
    assert tokens == pytest.approx([-1 / 3**0.5] * 3 + [3**0.5], rel=1e-5)
    assert not np.any(held.advantages[held.trained == 0])
    placed = {row.sample_id: PlacedSample(row, 0, 2 * index) for index, row in enumerate(rows)}
    rules = draw_rules(SETTINGS.fold, SETTINGS.batcher)
    again = reform_batch(manifest.samples, placed, HeldVersion(manifest.trainer_version), rules)
    assert rows_sha256(again.rows) == manifest.rows_sha256 == rows_sha256(held)
    assert again.whitening == Whitening(manifest.whitening_mean, manifest.whitening_std)
    async with EventLog.open(here.log, here.registry, writer="replay") as events:
        role = Role("replay", "r", SETTINGS, here.log, events, here.blobs, Health("replay"))
        assert await batch_difference(role, manifest, placed, rules) is None
        said = await batch_difference(role, replace(manifest, whitening_mean=2.5), placed, rules)
        assert said == "batch 0: whitening_mean is 2.5 in the manifest, 2.0 as formed again"


@pytest.mark.parametrize(
    ("change", "reasons", "masked"),
    [
        ({"version": VERSION - 2}, {"stale"}, {}),
        ({"trained": False}, {"length_cut"}, {}),
    ],
    ids=["all too old", "all masked by the tree"],
)
async def test_a_draw_that_leaves_nothing_to_train_is_skipped_and_uploads_nothing(
    change: dict[str, object], reasons: set[str], masked: dict[str, int]
) -> None:
    here = World()
    rows = [sample(group, advantage=1.0, **change) for group in "ab"]  # type: ignore[arg-type]
    (skipped,) = await here.batches(*rows, expected=1)
    assert isinstance(skipped, BatchSkipped)
    assert skipped.groups == ("a", "b")
    assert {row.reason for row in skipped.dropped} == reasons
    assert skipped.masked == masked
    assert here.blobs.objects == {}


async def test_the_first_batch_of_a_draw_says_what_was_lost_in_rows_that_trained_and_in_rows_that_fell_out() -> None:
    here = World(replace(SETTINGS, batcher=replace(SETTINGS.batcher, max_tokens=4, version_mask="max_lag")))
    turn = TurnId("e", 0)
    old_and_new = (SampleSpan(1, 1, turn, VERSION - 2, True), SampleSpan(2, 1, turn, VERSION, True))
    trains = replace(sample("a", advantage=1.0), spans=old_and_new)
    falls_out = replace(
        sample("b", advantage=0.0), token_ids=pack_int32s(range(6)), spans=(SampleSpan(4, 2, turn, VERSION, True),)
    )
    (manifest,) = await here.batches(trains, falls_out, expected=1)
    assert isinstance(manifest, SampleBatchFormed)
    assert manifest.masked == {"length_cut": 2, "version_mask": 1}
    assert [(row.sample_id, row.reason) for row in manifest.dropped] == [("b/0", "length_cut")]


@pytest.mark.parametrize(("order", "first"), [("oldest", ("a", "b")), ("freshest", ("c", "d"))])
async def test_the_order_of_draws_is_a_setting(order: str, first: tuple[str, ...]) -> None:
    here = World(replace(SETTINGS, batcher=replace(SETTINGS.batcher, order=order)))
    found = await here.batches(*(sample(group, advantage=1.0) for group in "abcd"), expected=2)
    assert isinstance(found[0], SampleBatchFormed)
    assert found[0].groups == first
    assert sorted(name for one in found for name in one.groups) == ["a", "b", "c", "d"]  # type: ignore[attr-defined]
