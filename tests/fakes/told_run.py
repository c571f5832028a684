"""A whole run of stories: folded by the real assembler, drawn by the real batcher, with steps, token files, weights and
an engine, as a trainer and a loader would leave them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import numpy as np

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName
from tests.fakes.stories import Story, repair, tokenizer
from tests.unit.consumers.conftest import SETTINGS, TrainedRun
from turnlog.consumers.index.indexer import build
from turnlog.infra.batch_files import PARQUET, read_rows, write_tokens
from turnlog.infra.log import Partition, partition_of
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineRegistered,
    EngineWeightsLoaded,
    Event,
    Outcome,
    RunPlanned,
    SampleBatchFormed,
    StepCompleted,
    WeightFile,
    WeightVersionPublished,
)
from turnlog.schemas.ids import digest
from turnlog.settings import IndexSettings, ModelSettings, RunSettings, Settings

SINCE_MS = 1_795_500_000_000
SIZE = 4
"""Rollouts of a group."""
PER_VERSION = 4
"""Groups that one weight version samples."""
OF_KINDS = {"logprob_gap_max/sglang": 2e-4, "logprob_gap_max/vllm": 0.5}
"""Gaps of a fleet of two kinds of engines."""
LOADED_S = {"join": 0.05, "pause": 0.01, "load": 0.3, "check": 0.03, "resume": 0.01}
"""Phases of a load of weights that training ranks send."""


class ToldRun:
    """A run, its index and what serves need of it."""

    def __init__(self, folder: Path, *, direct: bool = False) -> None:
        """`folder` is the run's directory. `direct`: training ranks send the weights to the engine, and every second
        version is stored."""
        self.folder, self._direct = folder, direct
        self.words = tokenizer(folder / "model")
        settings = dataclasses.replace(SETTINGS, batcher=dataclasses.replace(SETTINGS.batcher, max_tokens=480))
        self.run = TrainedRun(settings, MemoryBroker(SINCE_MS, every_ms=350))
        self.settings: Settings = dataclasses.replace(
            settings, run=RunSettings(id="run", directory=str(folder)), model=ModelSettings(path=str(folder / "model")),
            index=IndexSettings(path=str(folder / "index.sqlite")),
        )  # fmt: skip

    @property
    def index(self) -> Path:
        """The file."""
        return self.folder / "index.sqlite"

    def connect(self) -> Callable[[], AbstractAsyncContextManager[Role]]:
        """What opens the log in memory."""

        @asynccontextmanager
        async def opened() -> AsyncIterator[Role]:
            log = MemoryLog(self.run.broker)
            async with log.appender() as appender:
                yield self.run.role("dashboard", log, appender)

        return opened

    async def tell(self, groups: int, *, more: Callable[[Story], Iterator[Event]] | None = None) -> None:
        """All of it, indexed. `more`: the one session of a group of its own, last."""
        await self.run.configure()
        await self.run.append([RunPlanned(
            event_id="plan", run_id="run", draws=groups, publish_every=1, groups=2, rollouts=1, phase="running",
        )])  # fmt: skip
        for number in range(groups):
            await self.run.append(self._group(number))
        if more is not None:
            name = self.named(groups, 1)
            await self.run.append(more(Story(name, 0, np.random.default_rng(99), self.words)))
        await self.run.fold()
        await self.run.draw()
        await self.stepped()
        await self.indexed()

    async def indexed(self) -> None:
        """Everything that is on the log now."""
        await build(self.run.role("index"), self.index)

    def named(self, number: int, size: int) -> GroupName:
        """A group that begins here."""
        unit = partition_of(f"group-{number}".encode(), self.settings.kafka.groups)
        floor = self.run.broker.log_of(Partition(topics.SESSIONS.name, unit)).end
        return GroupName("run", f"group-{number}", floor, size)

    def _group(self, number: int) -> Iterator[Event]:
        rng = np.random.default_rng(number)
        group, version = self.named(number, SIZE), number // PER_VERSION
        for index in range(SIZE):
            good = rng.random() < 0.3 + 0.04 * number
            reward = round(float(np.clip((0.7 if good else 0.1) + 0.2 * rng.random(), 0, 1)), 2)
            story = Story(group, index, rng, self.words, version=version)
            lost = Outcome.infra_failure if number % 5 == 2 and index == 3 else Outcome.completed
            yield from repair(story, self.folder / "model", reward=0.5 if number % 6 == 4 else reward,
                              whole=good or index == 0, outcome=lost,
                              later=version + 1 if index == 1 else None)  # fmt: skip

    async def stepped(self) -> None:
        """A step, a version and its acknowledgement for each batch that has none."""
        done = {step.batch_index for step in await self.run.read(topics.STEPS) if isinstance(step, StepCompleted)}
        rng = np.random.default_rng(7)
        for batch in await self.run.read(topics.BATCHES):
            if isinstance(batch, SampleBatchFormed) and batch.batch_index not in done:
                await self.run.append(await self._step(batch, rng))

    async def _step(self, batch: SampleBatchFormed, rng: np.random.Generator) -> list[Event]:
        rows, step = read_rows(await self.run.objects.get(batch.file)), batch.batch_index + 1
        gap = rng.normal(0, 2e-4, len(rows.logprobs)).astype("<f4")
        figures = {
            "logprob": rows.logprobs + gap, "entropy": rng.exponential(0.4, len(gap)).astype("<f4"),
            "ratio": np.exp(gap * 40), "advantage": rows.advantages,
        }  # fmt: skip
        file = await self.run.objects.put(write_tokens(rows, figures), media_type=PARQUET)
        tokens, trained = len(rows.trained), int(rows.trained.sum())
        return [
            StepCompleted(
                event_id=f"step-{step}", run_id="run", batch_index=batch.batch_index, draw_index=batch.draw_index,
                incarnation=0, step=step, loss=0.4 * 0.9**step + 0.02 * float(rng.normal()),
                grad_norm=1.0 + float(rng.random()), learning_rate=1e-5, lag_max=int(rng.integers(0, 2)), tokens=tokens,
                trained_tokens=trained, masked={}, skipped=False, reward_mean=float(np.mean(rows.rewards)),
                logprob_gap_max=float(np.abs(gap).max()), logprob_gap_mean=float(np.abs(gap).mean()),
                entropy=0.9 * 0.96**step, clip_fraction=0.01,
                seconds={"wait": 0.2, "read": 0.05, "step": 0.3 + 0.2 * rng.random(), "export": 0.2, "checkpoint": 0.0},
                world_size=1, metrics={"kl": 0.002 * step, **OF_KINDS}, token_file=file,
            ),
            self._published(step, batch),
            *([EngineRegistered(event_id="engine", run_id="run", engine_id="engine-0", url="http://127.0.0.1:30000",
                                state="serving", version=0, model="policy")] if step == 1 else []),
            EngineWeightsLoaded(event_id=f"loaded-{step}", run_id="run", engine_id="engine-0", version=step,
                                url="http://127.0.0.1:30000", state="serving", superseded=(),
                                seconds=LOADED_S if self._direct else {"load": 0.4}),
            *([await self._stored(step, batch)] if self._direct and step % 2 == 0 else []),
        ]  # fmt: skip

    def _published(self, step: int, batch: SampleBatchFormed) -> WeightVersionPublished:
        """The only record of a version, or the first of two."""
        event = WeightVersionPublished(
            event_id=digest("WeightVersionPublished", "run", step), run_id="run", version=step, step=step,
            batch_index=batch.batch_index, incarnation=0, kind="full", base_version=None, files=(), dtype="float32",
            checksums={}, checkpoint="",
        )  # fmt: skip
        if not self._direct:
            return event
        return dataclasses.replace(event, state="announced", transport="direct", digests={"w": f"{step:016x}:2x3"})

    async def _stored(self, step: int, batch: SampleBatchFormed) -> WeightVersionPublished:
        """The second record."""
        file = WeightFile("model.safetensors", await self.run.objects.put(f"weights {step}".encode()))
        return dataclasses.replace(
            self._published(step, batch), event_id=digest("WeightVersionPublished", "run", step, "durable"),
            state="durable", files=(file,), digests={}, checksums={"w": f"{step:064x}:2x3"},
        )  # fmt: skip
