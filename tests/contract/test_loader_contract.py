"""What a loader makes of an engine that fails: the fake and real SGLang alike."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.fakes.memory_log import MemoryLog
from tests.fakes.weights import version
from turnlog.consumers.loader import EngineSwapFailed
from turnlog.consumers.loader.role import Loader
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.protocol import UNLABELLED, EngineControl, Generate, ModelInfo
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.schemas.events import EngineWeightsLoaded, EngineWeightsRefused, Event
from turnlog.schemas.topics import ENGINES
from turnlog.settings import EngineSettings, LoaderSettings, ModelSettings, RunSettings, Settings
from turnlog.trainer.weights import read_weights

IN_FLIGHT_S = 0.5


class Struck(EngineControl, Protocol):
    """An engine, and what befalls it."""

    url: str
    dies: bool
    """In its next load."""
    forgets: bool
    """Its label, behind its next load."""
    answers: asyncio.Event
    """Cleared, its loader is as if stopped: it hears nothing of it."""

    def slow(self) -> None:
        """Do nothing until `go_on`."""
        ...

    def go_on(self) -> None: ...

    async def come_back(self) -> None:
        """Die, if it has not, and start with the weights of the model's folder."""
        ...

    async def label(self, text: str) -> None: ...

    async def says(self) -> tuple[str, list[float]]:
        """Its label, and what tells the weights apart that it really has."""
        ...


class FakeStruck(MemoryEngineControl):
    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.url, self.dies, self.forgets = "http://memory", False, False
        self._going = asyncio.Event()
        self._going.set()
        self._holds = -1.0

    def slow(self) -> None:
        self._going.clear()

    def go_on(self) -> None:
        self._going.set()

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        await self._going.wait()
        self.alive = not self.dies
        await super().load(folder, version, timeout_s=timeout_s, released=released)
        self._holds = float(version)
        if self.forgets:
            self.forgets = False
            await self.label(UNLABELLED)

    async def come_back(self) -> None:
        self.dies, self._holds = False, -1.0
        self.restart()

    async def says(self) -> tuple[str, list[float]]:
        return self._info.weight_version, [self._holds]


class RealStruck(SGLangControl):
    def __init__(self, url: str, engine: EngineServer | None = None) -> None:
        """`engine`: one that may die."""
        super().__init__(url)
        self.dies = self.forgets = False
        self.answers = asyncio.Event()
        self.answers.set()
        self._engine = engine

    def _family(self) -> list[psutil.Process]:
        port = self.url.rpartition(":")[2]
        (leader,) = (one for one in psutil.process_iter(["cmdline"]) if _serves(one, port))
        return [leader, *leader.children(recursive=True)]

    def slow(self) -> None:
        for process in self._family():
            process.suspend()

    def go_on(self) -> None:
        for process in self._family():
            process.resume()

    async def model_info(self) -> ModelInfo:
        await self.answers.wait()
        return await super().model_info()

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        killing = [asyncio.create_task(self._killed())] if self.dies else []
        try:
            await super().load(folder, version, timeout_s=timeout_s, released=released)
        finally:
            await asyncio.gather(*killing)
        if self.forgets:
            self.forgets = False
            await self.label(UNLABELLED)

    async def _killed(self) -> None:
        """While a load is under way: what is stopped does not tell that it was sent one."""
        self.slow()
        await asyncio.sleep(IN_FLIGHT_S)
        await self._end()

    async def _end(self) -> None:
        assert self._engine is not None, "it is everybody's"
        await asyncio.to_thread(self._engine.kill)

    async def come_back(self) -> None:
        await self._end()
        self.dies = False
        await asyncio.to_thread(self._engine.start)

    async def says(self) -> tuple[str, list[float]]:
        asked = SGLang(self.url)
        request = Generate(rid=uuid.uuid4().hex, input_ids=[5, 6, 7], temperature=0.0, max_new_tokens=8)
        (piece,) = [piece async for piece in asked.generate(request, stream=False, timeout_s=60)]
        await asked.close()
        return piece.versions[-1][0], piece.logprobs


def _serves(process: psutil.Process, port: str) -> bool:
    argv = process.info["cmdline"] or []
    return "sglang.launch_server" in argv and port in argv


@pytest.fixture
async def role(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Role]:
    settings = Settings(
        run=RunSettings(id="run", directory=str(tmp_path / "run")),
        model=ModelSettings(path=str(tiny_model)),
        loader=LoaderSettings(silent_s=600.0),  # a slow engine is not a silent one
    )
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("loader", "loader-0", settings, log, events, MemoryBlobs(), Health("loader"))


@pytest.fixture(scope="module")
def mortal(tiny_model: Path, servers: Path) -> Iterator[EngineServer]:
    """An engine that tests may kill."""
    with EngineServer(tiny_model, EngineSettings(), log=servers / "mortal-engine.log") as engine:
        yield engine


BOTH = ["memory", pytest.param("sglang", marks=pytest.mark.engine)]
LONG = [pytest.mark.engine, pytest.mark.long]
MORTAL = ["memory", pytest.param("sglang", marks=LONG)]


@pytest.fixture
async def engine(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Struck]:
    """The one of the session, which goes on living."""
    if request.param == "memory":
        yield FakeStruck(tiny_model)
        return
    found = RealStruck(request.getfixturevalue("engine_url"))
    yield found
    await found.close()


@pytest.fixture
async def victim(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[Struck]:
    if request.param == "memory":
        yield FakeStruck(tiny_model)
        return
    mortal = request.getfixturevalue("mortal")
    found = RealStruck(mortal.url, mortal)
    yield found
    await found.close()


async def publish(role: Role, number: int, *, factor: float = 1.0, fits: bool = True) -> None:
    """The model's own weights, their matrices times `factor`; or such that do not fit."""
    model = Path(role.settings.model.path)
    weights = {
        name: tensor.float() * (factor if tensor.dim() > 1 else 1.0) for name, tensor in read_weights(model).items()
    }
    if not fits:
        weights.popitem()
    await role.events.append(await version(weights, number, role.blobs, model))


async def said(role: Role, engine_id: str, count: int) -> list[Event]:
    """The first `count` events of an engine, once they are there."""
    events: list[Event] = []
    async with asyncio.timeout(120), role.log.reader() as reader:
        reader.assign({Partition(ENGINES.name, 0): 0})
        while len(events) < count:
            found = [await role.events.decode(record) for record in await reader.poll()]
            events += [event for event in found if event.engine_id == engine_id]  # type: ignore[attr-defined]
    return events


def told(events: list[Event]) -> list[tuple[str, int, str]]:
    """(record, version, state)"""
    return [(type(event).__name__.removeprefix("Engine"), event.version, event.state) for event in events]  # type: ignore[attr-defined]


def loading(role: Role, engine: Struck, engine_id: str) -> asyncio.Task[None]:
    return asyncio.create_task(Loader(role, engine, engine_id, engine.url).run())


async def stopped(role: Role, *loaders: asyncio.Task[None]) -> None:
    role.stopping.set()
    await asyncio.gather(*loaders)


@pytest.mark.parametrize("engine", BOTH, indirect=True)
async def test_an_engine_that_loses_its_label_is_given_its_weights_again(role: Role, engine: Struck) -> None:
    loader = loading(role, engine, "a")
    await publish(role, 0)
    await said(role, "a", 2)
    before = await engine.says()
    await engine.label(UNLABELLED)
    assert told(await said(role, "a", 4))[2:] == [("Registered", -1, "starting"), ("WeightsLoaded", 0, "serving")]
    assert await engine.says() == ("0", pytest.approx(before[1], abs=1e-4))
    await stopped(role, loader)


@pytest.mark.parametrize("engine", BOTH, indirect=True)
async def test_a_version_whose_label_gets_lost_is_refused_by_name_and_the_one_before_it_is_loaded_again(
    role: Role, engine: Struck
) -> None:
    loader = loading(role, engine, "a")
    await publish(role, 0)
    await said(role, "a", 2)
    before = await engine.says()
    engine.forgets = True
    await publish(role, 1, factor=1.5)
    events = (await said(role, "a", 5))[2:]
    assert isinstance(events[0], EngineWeightsRefused)
    assert (events[0].refused_version, events[0].cause) == (1, "EngineRefused")
    assert "reports 'default' after loading 1" in events[0].message
    assert told(events)[1:] == [("Registered", -1, "starting"), ("WeightsLoaded", 0, "serving")]
    assert await engine.says() == ("0", pytest.approx(before[1], abs=1e-4))
    await stopped(role, loader)


async def answered(role: Role, engine_id: str, count: int) -> tuple[set[int], set[int]]:
    """Versions that were loaded or superseded, and refused, once there are so many."""
    taken, refused, seen = set[int](), set[int](), 0
    while len(taken | refused) < count:
        seen += 1
        event = (await said(role, engine_id, seen))[seen - 1]
        if isinstance(event, EngineWeightsLoaded):
            taken |= {event.version, *event.superseded}
        elif isinstance(event, EngineWeightsRefused):
            refused.add(event.refused_version)
    return taken, refused


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "victim"), [("memory",) * 2, pytest.param(*("sglang",) * 2, marks=LONG)], indirect=True
)
async def test_of_two_engines_one_is_slow_and_one_dies_in_a_load_and_each_answers_for_every_version(
    role: Role, engine: Struck, victim: Struck
) -> None:
    slow, dying = loading(role, engine, "slow"), loading(role, victim, "dying")
    await publish(role, 0)
    for name in ("slow", "dying"):
        assert isinstance((await said(role, name, 2))[1], EngineWeightsLoaded)
    engine.slow()
    victim.dies = True
    await publish(role, 1, factor=1.5)
    with pytest.raises(EngineSwapFailed, match="died while it loaded version 1"):
        await dying
    assert told(await said(role, "dying", 3))[2] == ("Gone", 0, "gone")
    engine.go_on()
    await publish(role, 2)
    await publish(role, 3, fits=False)
    await victim.come_back()
    again = loading(role, victim, "dying")
    for name, of in {"slow": engine, "dying": victim}.items():
        assert await answered(role, name, 4) == ({0, 1, 2}, {3})
        assert (await of.says())[0] == "2"
    await stopped(role, slow, again)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", MORTAL, indirect=True)
async def test_an_engine_that_comes_back_with_the_weights_of_its_start_while_its_loader_stands_is_loaded_again(
    role: Role, victim: Struck
) -> None:
    loader = loading(role, victim, "a")
    for number in range(2):
        await publish(role, number, factor=1.5 - number)
        await said(role, "a", 2 + number)
    before = await victim.says()
    victim.answers.clear()
    await victim.come_back()
    label, weights = await victim.says()
    assert label == UNLABELLED
    assert weights != pytest.approx(before[1], abs=1e-3)
    victim.answers.set()
    assert told(await said(role, "a", 5))[3:] == [("Registered", -1, "starting"), ("WeightsLoaded", 1, "serving")]
    assert await victim.says() == ("1", pytest.approx(before[1], abs=1e-4))
    await stopped(role, loader)
