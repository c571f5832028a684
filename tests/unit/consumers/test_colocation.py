"""[engine] colocate: a loader and its engine, in turns with a trainer on one device, as the log has them.

Whatever is killed between two of a loader's calls: the trainer never steps while an engine that was there when its turn
began holds memory, the engine never dies of a call out of turn, and in its own turn it serves the newest good version.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from safetensors.torch import save_file

from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.fakes.memory_log import MemoryLog
from tests.fakes.weights import version
from turnlog.consumers.loader import EngineSwapFailed
from turnlog.consumers.loader.role import Loader
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.engines.protocol import EngineDead
from turnlog.infra.engines.sglang import CACHE, WEIGHTS
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.fleet import TakesTurns, scale
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.views.progress import DeviceTurn
from turnlog.schemas.events import EngineDraining, EngineGone, EngineRegistered, Event, SampleBatchFormed
from turnlog.schemas.releases import example
from turnlog.schemas.topics import ENGINES
from turnlog.settings import EngineSettings, ModelSettings, RunSettings, Settings, SettingsError, override_settings
from turnlog.trainer.batches import SharedDevice

URL = "http://engine"


def tensors(number: int, rows: int = 2) -> dict[str, torch.Tensor]:
    return {"a": torch.full((rows, 3), float(number))}


class Killed(BaseException):
    """kill -9 of the loader."""


class Killable(MemoryEngineControl):
    """Kills whoever drives it at the `left`-th of its steps. `misused`: it died of a call out of turn, where its label
    did not say that a call was cut off."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.left: int | None = None
        self.killed = self.misused = False

    @property
    def holds(self) -> int:
        """The version."""
        return self._info.version

    async def _step(self) -> None:
        await super()._step()
        if self.left is not None:
            self.left -= 1
            self.killed = self.left < 0

    def _alive(self) -> None:
        if self.killed:
            raise Killed
        super()._alive()

    def _needs(self, fits: bool) -> None:
        self.misused = self.misused or not (fits or self._info.is_incomplete)
        super()._needs(fits)


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Role]:
    """Of a run in memory whose model lies in the folder."""
    model = folder / "model"
    model.mkdir()
    save_file(tensors(0), str(model / "model.safetensors"))
    (model / "config.json").write_text("{}")
    settings = Settings(
        run=RunSettings(id="run", directory=str(folder / "run")),
        model=ModelSettings(path=str(model)),
        engine=EngineSettings(colocate=True),
    )
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("loader", "loader-0", settings, log, events, MemoryBlobs(), Health("loader"))


class Colocated(RuleBasedStateMachine):
    """The log of a run in which engine and trainer share a device."""

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.open = asyncio.Runner(), AsyncExitStack()
        self.turn, self.good, self.batch, self.anew = DeviceTurn(), -1, -1, False
        self.runner.run(self._opened())

    async def _opened(self) -> None:
        folder = Path(self.open.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-test-")))
        self.role = await self.open.enter_async_context(opened(folder))
        self.model = Path(self.role.settings.model.path)
        self.engine, self.device = Killable(self.model), SharedDevice(self.role)
        await self.device.follow(await self.open.enter_async_context(self.role.log.reader()))
        self._start()

    def _start(self) -> None:
        self.loading = asyncio.ensure_future(Loader(self.role, self.engine, "engine-0", URL).run())

    async def _say(self, event: Event) -> None:
        await self.role.events.append(event)
        self.turn.apply(event)

    async def _publish(self, *, batch: int, good: bool) -> None:
        number = self.turn.weights.version + 1
        event = await version(tensors(number, 2 if good else 3), number, self.role.blobs, self.model)
        await self._say(dataclasses.replace(event, batch_index=batch))
        self.good = number if good else self.good

    @initialize()
    def first_weights(self) -> None:
        self.runner.run(self._publish(batch=-1, good=True))
        self.runner.run(self._settled())

    @precondition(lambda self: not self.turn.trainers)
    @rule()
    def a_draw_is_complete(self) -> None:
        self.batch += 1
        self.runner.run(
            self._say(dataclasses.replace(example(SampleBatchFormed), run_id="run", batch_index=self.batch))
        )
        self.runner.run(self._settled())

    @precondition(lambda self: self.turn.trainers)
    @rule(good=st.booleans())
    def weights_are_published(self, good: bool) -> None:
        self.runner.run(self._publish(batch=self.batch, good=good))
        self.runner.run(self._settled())

    @precondition(lambda self: self.batch >= 0)
    @rule(back=st.integers(1, 2))
    def the_trainer_starts_again_from_an_earlier_batch(self, back: int) -> None:
        self.runner.run(self._publish(batch=max(-1, self.batch - back), good=True))
        self.runner.run(self._settled())

    @rule(after=st.integers(0, 5))
    def the_loader_will_be_killed(self, after: int) -> None:
        self.engine.left = after

    @rule()
    def the_engine_starts_anew(self) -> None:
        self._restart()
        self.runner.run(self._settled())

    async def _settled(self) -> None:
        """Whose turn it is has the device; whoever was killed, or ended, is started again."""
        async with asyncio.timeout(20):
            await self._yielded() if self.turn.trainers else await self._serves()
        assert not self.engine.misused

    async def _yielded(self) -> None:
        free = asyncio.ensure_future(self.device.free(self.turn.weights.version, lambda: None))
        while not free.done():
            await asyncio.wait([free, self.loading], return_when=asyncio.FIRST_COMPLETED)
            self._watch()
        assert await free
        while (
            self.anew and self.engine.memory
        ):  # an engine takes memory when it starts, and its loader has yet to see it
            self._watch()
            await asyncio.wait([self.loading], timeout=0.02)
        self.anew = False
        assert self.engine.memory == set(), "the trainer would step while the engine holds memory"

    async def _serves(self) -> None:
        while (await self._status()) != ("serving", self.good):
            self._watch()
            await asyncio.wait([self.loading], timeout=0.02)
        assert self.engine.memory == {CACHE, WEIGHTS}
        assert (self.engine.loads[-1], self.engine.paused) == (self.good, False)

    async def _status(self) -> tuple[str, int]:
        """What the log says last, once the engine has it; one that started anew says so a second later."""
        last = ("", -1)
        async with self.role.log.reader() as reader:
            end = (await self.role.log.end_offsets([Partition(ENGINES.name, 0)]))[Partition(ENGINES.name, 0)]
            reader.assign({Partition(ENGINES.name, 0): 0})
            while reader.position(Partition(ENGINES.name, 0)) < end:
                for record in await reader.poll(timeout_s=0.1):
                    event = await self.role.events.decode(record)
                    last = (event.state, event.version)
        return last if self.engine.holds == self.good else ("", -1)

    def _watch(self) -> None:
        """A supervisor's work."""
        if not self.loading.done():
            return
        failure = self.loading.exception()
        assert isinstance(failure, Killed | EngineSwapFailed | EngineDead), failure
        self.engine.killed, self.engine.left = False, None
        if not self.engine.alive:
            self._restart()
        self._start()

    def _restart(self) -> None:
        self.engine.restart()
        self.anew = True

    def teardown(self) -> None:
        self.runner.run(self._closed())
        self.runner.close()

    async def _closed(self) -> None:
        self.role.stopping.set()
        await asyncio.wait([self.loading])
        await self.open.aclose()


TestColocated = Colocated.TestCase
TestColocated.settings = hypothesis_settings(max_examples=6, stateful_step_count=8, deadline=None)


@pytest.mark.parametrize("state", ["silent", "draining"])
async def test_an_engine_that_is_silent_or_drains_holds_what_it_held_and_one_that_is_gone_nothing(
    tmp_path: Path, state: str
) -> None:
    said = {"run_id": "run", "engine_id": "e", "url": URL, "version": 0}
    async with opened(tmp_path) as role, role.log.reader() as reader:
        device = SharedDevice(role)
        await device.follow(reader)
        for event in (
            EngineRegistered(event_id="0", state="serving", model="m", **said),  # type: ignore[arg-type]
            EngineDraining(event_id="1", state=state, **said),  # type: ignore[arg-type]
        ):
            await role.events.append(event)
        free = asyncio.create_task(device.free(0, lambda: None))
        while "device" not in role.health.waiting:
            await asyncio.sleep(0)
            assert not free.done()
        await role.events.append(
            EngineGone(event_id="2", state="gone", cause="", **said)  # type: ignore[arg-type]
        )
        assert await free


async def test_a_run_whose_engines_take_turns_is_not_scaled(tmp_path: Path) -> None:
    async with opened(tmp_path) as role:
        with pytest.raises(TakesTurns, match=r"\[engine\] colocate"):
            await scale(role, 2)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"batcher": {"max_lag": 1}}, "batcher.max_lag is 1: set it to 0"),
        ({"trainer": {"publish_every": 2}}, "trainer.publish_every is 2: set it to 1"),
        ({"engine": {"autoscale_max": 4}}, "engine.autoscale_max is 4: set it to 0"),
        ({"engine": {"launcher": "ray"}}, "engine.launcher is ray, which gives each its own: set it to local"),
        ({"trainer": {"publish": "adapter", "lora_rank": 4}}, "trainer.publish is adapter: set it to merged"),
        ({"engine": {"update": "in_place"}}, "engine.update is in_place: set it to retract or abort"),
    ],
)
def test_a_device_of_which_somebody_would_not_let_go_is_refused_by_name(tables: dict[str, Any], why: str) -> None:
    shared = {**tables, "engine": {"colocate": True, **tables.get("engine", {})}}
    with pytest.raises(SettingsError, match=why):
        override_settings(Settings(), shared, {}, source="settings.toml")
