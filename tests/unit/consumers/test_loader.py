"""The weight loader over a log, a store and an engine in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from safetensors.torch import save, save_file
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.contract.test_https import served
from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.fakes.memory_log import MemoryLog
from tests.fakes.weights import adapter, version
from tests.secured import Authority
from turnlog.consumers.lag import by_role, lag_of
from turnlog.consumers.loader import EngineSwapFailed, NoSuchEngine
from turnlog.consumers.loader.role import Loader, NamedEngine, engine_of, main, update_of
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.engines.protocol import LOADING
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Fenced, Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.fleet import read
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.tls import serving
from turnlog.infra.topics_admin import apply
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
    SampleBatchFormed,
)
from turnlog.schemas.events.weights import WeightFile
from turnlog.schemas.releases import example
from turnlog.schemas.topics import ENGINES
from turnlog.schemas.types import BlobRef
from turnlog.settings import EngineSettings, GatewaySettings, ModelSettings, RunSettings, Settings

URL = "http://engine"


@pytest.fixture
async def role(tmp_path: Path) -> AsyncIterator[Role]:
    model = tmp_path / "model"
    model.mkdir()
    save_file(tensors(0), str(model / "model.safetensors"))
    (model / "config.json").write_text("{}")
    settings = Settings(
        run=RunSettings(id="run", directory=str(tmp_path / "run")), model=ModelSettings(path=str(model))
    )
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield Role("loader", "loader-0", settings, log, events, MemoryBlobs(), Health("loader"))


def tensors(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2, 3), float(number)), "b": torch.ones(4)}


async def publish(role: Role, number: int, *, content: bytes | None = None, **of: int) -> None:
    """Version `number`; `content` stands in for its file, `of` for its step and incarnation."""
    event = await version(tensors(number), number, role.blobs, Path(role.settings.model.path))
    if content is not None:
        event = dataclasses.replace(event, files=(WeightFile("model.safetensors", await role.blobs.put(content)),))
    await role.events.append(dataclasses.replace(event, **of))


async def said(role: Role, count: int) -> list[Event]:
    """The first `count` events of engine-status, once they are there."""
    events: list[Event] = []
    async with asyncio.timeout(20), role.log.reader() as reader:
        reader.assign({Partition(ENGINES.name, 0): 0})
        while len(events) < count:
            events += [await role.events.decode(record) for record in await reader.poll()]
    return events


@pytest.fixture
async def control(role: Role) -> MemoryEngineControl:
    return MemoryEngineControl(Path(role.settings.model.path))


@pytest.fixture
async def running(role: Role, control: MemoryEngineControl) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    yield task
    role.stopping.set()
    if not task.done():
        await task


async def test_registers_and_acknowledges_each_version(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    registered, loaded = await said(role, 2)
    assert isinstance(registered, EngineRegistered)
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (registered.version, registered.state, registered.url) == (-1, "starting", URL)
    assert (loaded.version, loaded.state) == (0, "serving")
    assert set(loaded.seconds) == {"fetch", "verify", "pause", "load", "check", "resume"}
    for phase in loaded.seconds:
        labels = {"role": "loader", "stage": phase}
        assert (REGISTRY.get_sample_value("turnlog_stage_seconds_count", labels) or 0) >= 1
    assert control.loads == [0]
    assert not control.paused


async def test_of_several_waiting_versions_only_the_newest_is_loaded(role: Role, control: MemoryEngineControl) -> None:
    for number in range(4):
        await publish(role, number)
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    loaded = (await said(role, 2))[1]
    role.stopping.set()
    await task
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (loaded.version, loaded.superseded) == (3, (0, 1, 2))
    assert control.loads == [3]


async def test_an_engine_does_not_go_back_to_the_older_weights_of_a_trainer_that_restarted(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    """It serves what the trainer will make again, and is given that under its new number."""
    for number in range(2):
        await publish(role, number)
        await said(role, 2 + number)
    await publish(role, 2, step=0, incarnation=1)
    await publish(role, 3, step=1, incarnation=1)
    loaded = (await said(role, 4))[3]
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (loaded.version, loaded.superseded) == (3, (2,))
    assert control.loads == [0, 1, 3]


async def test_versions_that_the_engine_has_are_no_lag_of_its_loader(role: Role, running: asyncio.Task[None]) -> None:
    await publish(role, 0)
    await publish(role, 1)
    settings = dataclasses.replace(role.settings, engine=EngineSettings(urls=(URL,)))
    async with asyncio.timeout(20):
        assert isinstance(role.log, MemoryLog)
        while by_role(await lag_of(role.log, settings))["loader"]:
            await role.log.broker.changed(0.02)
    role.stopping.set()
    await running
    await publish(role, 2)
    assert by_role(await lag_of(role.log, settings))["loader"] == 1


@pytest.mark.parametrize(("drains", "waits"), [(True, 0), (False, 1)], ids=["with its engine", "alone"])
async def test_nothing_waits_for_a_loader_that_went_with_its_engine_until_it_is_back(
    role: Role, control: MemoryEngineControl, drains: bool, waits: int
) -> None:
    await publish(role, 0)
    task = asyncio.create_task(Loader(role, control, "sglang-4", URL, drains=drains).run())
    await said(role, 2)
    role.stopping.set()
    await task
    await publish(role, 1)
    assert by_role(await lag_of(role.log, role.settings))["loader"] == waits
    role.stopping.clear()
    task = asyncio.create_task(Loader(role, control, "sglang-4", URL).run())
    await said(role, 5 if drains else 4)
    role.stopping.set()
    await task
    await publish(role, 2)
    assert by_role(await lag_of(role.log, role.settings))["loader"] == 1


@pytest.mark.parametrize(
    ("update", "experts", "routed", "chosen"),
    [
        ("auto", 8, "auto", "abort"),
        ("auto", 8, "on", "abort"),
        ("auto", 8, "off", "retract"),
        ("auto", 0, "auto", "retract"),
        ("retract", 8, "auto", "retract"),
        ("in_place", 0, "auto", "in_place"),
    ],
)
def test_requests_whose_experts_are_recorded_do_not_go_on_over_two_versions(
    role: Role, update: Any, experts: int, routed: Any, chosen: str
) -> None:
    config = {"num_hidden_layers": 2, "num_experts": experts, "num_experts_per_tok": 2}
    (Path(role.settings.model.path) / "config.json").write_text(json.dumps(config))
    settings = dataclasses.replace(
        role.settings, engine=EngineSettings(update=update), gateway=GatewaySettings(routed_experts=routed)
    )
    assert update_of(settings) == chosen


async def test_an_engine_over_tls_is_loaded_by_a_loader_that_knows_its_authority(
    role: Role, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(_: Request) -> Response:
        return JSONResponse({"weight_version": "default", "model_path": "/m"})

    authority = Authority(tmp_path)
    async with served(answer, tls=serving(str(authority.issue("engine")), "", "engine")) as url:
        monkeypatch.setenv("TURNLOG_ENGINE_URL", url)
        role.settings = dataclasses.replace(role.settings, engine=EngineSettings(ca_file=str(authority.file)))
        loading = asyncio.create_task(main(role))
        (registered,) = await said(role, 1)
        assert isinstance(registered, EngineRegistered)
        assert (registered.url, registered.version) == (url, -1)
        role.stopping.set()
        await loading


def test_an_engine_is_named_by_its_url_and_its_pod_or_by_an_index() -> None:
    two = Settings(engine=EngineSettings(urls=("http://a", "http://b")))
    assert engine_of(two, {}) == NamedEngine("engine-0", "http://a", alone=False)
    assert engine_of(two, {"TURNLOG_ENGINE_INDEX": "1", "TURNLOG_INSTANCE": "x"}).id == "engine-1"
    pod = {"TURNLOG_ENGINE_URL": "http://10.0.0.7:30000/", "TURNLOG_INSTANCE": "sglang-4"}
    assert (
        engine_of(two, pod)
        == engine_of(Settings(), pod)
        == NamedEngine("sglang-4", "http://10.0.0.7:30000", alone=True)
    )
    watched = pod | {"TURNLOG_ENGINE_ID": "engine-7"}
    assert engine_of(Settings(), watched) == NamedEngine("engine-7", "http://10.0.0.7:30000", alone=False)
    del pod["TURNLOG_INSTANCE"]
    assert engine_of(Settings(), pod).id == socket.gethostname()


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({}, "name 0; TURNLOG_ENGINE_INDEX chooses"),
        ({"TURNLOG_ENGINE_INDEX": "-1"}, "there is no engine -1"),
        ({"TURNLOG_ENGINE_URL": "10.0.0.7:30000"}, "must be http://host:port"),
        ({"TURNLOG_ENGINE_URL": "http://e", "TURNLOG_ENGINE_INDEX": "0"}, "two engines"),
    ],
)
def test_a_loader_without_an_engine_of_its_own_says_how_to_name_one(env: dict[str, str], why: str) -> None:
    with pytest.raises(NoSuchEngine, match=why):
        engine_of(Settings(), env)


async def test_an_engine_that_goes_with_its_loader_takes_no_more_turns_and_comes_back_under_its_name(
    role: Role, control: MemoryEngineControl
) -> None:
    await publish(role, 0)
    for there in (2, 4):
        task = asyncio.create_task(Loader(role, control, "sglang-4", URL, drains=True).run())
        await said(role, there)
        role.stopping.set()
        await task
        role.stopping.clear()
    events = await said(role, 5)
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["EngineRegistered", "EngineWeightsLoaded", "EngineDraining", "EngineRegistered", "EngineDraining"]
    assert [event.state for event in events] == ["starting", "serving", "draining", "serving", "draining"]
    assert {event.engine_id for event in events} == {"sglang-4"}


async def test_of_one_that_shares_its_trainers_device_it_is_said_that_it_holds_nothing_any_more(
    role: Role, control: MemoryEngineControl
) -> None:
    role.settings = dataclasses.replace(role.settings, engine=EngineSettings(colocate=True))
    await publish(role, 0)
    task = asyncio.create_task(Loader(role, control, "sglang-4", URL, drains=True).run())
    await said(role, 2)
    role.stopping.set()
    await task
    assert told(await said(role, 3))[-1] == ("Gone", "gone")


async def asked(role: Role, wanted: str) -> None:
    """What an operator says of engine-0."""
    fleet = await read(role)
    await role.events.append(fleet.request("engine-0", wanted, run_id="run", by="operator"))


def told(events: list[Event]) -> list[tuple[str, str]]:
    return [(type(event).__name__.removeprefix("Engine"), event.state) for event in events]


async def test_an_engine_that_is_to_go_ends_what_it_has_and_comes_back_with_the_newest_weights(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    await said(role, 2)
    control.requests = 3
    await asked(role, "gone")
    assert told(await said(role, 3))[-1] == ("Draining", "draining")
    await publish(role, 1)
    control.requests = 0
    gone = (await said(role, 4))[-1]
    assert isinstance(gone, EngineGone)
    assert (gone.cause, control.aborts, control.loads) == ("drained", 0, [0])
    async with asyncio.timeout(20):
        assert isinstance(role.log, MemoryLog)
        while by_role(await lag_of(role.log, role.settings))["loader"]:
            await role.log.broker.changed(0.02)
    await asked(role, "serving")
    assert told((await said(role, 6))[4:]) == [("Registered", "starting"), ("WeightsLoaded", "serving")]
    assert control.loads == [0, 1], "a newcomer serves nothing before it has the newest weights"


async def test_what_does_not_end_in_time_is_aborted_also_by_the_loader_after_one_that_was_stopped_meanwhile(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    await said(role, 2)
    control.requests = 3
    await asked(role, "gone")
    await said(role, 3)
    role.stopping.set()
    await running
    assert (control.aborts, control.requests) == (0, 3)
    role.stopping.clear()
    role.settings = dataclasses.replace(role.settings, engine=EngineSettings(drain_s=0.3))
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    assert told((await said(role, 5))[3:]) == [("Draining", "draining"), ("Gone", "gone")]
    assert control.aborts == 1
    role.stopping.set()
    await task


async def test_an_engine_that_does_not_count_its_requests_lets_them_end_before_it_goes(
    role: Role, control: MemoryEngineControl
) -> None:
    role.settings = dataclasses.replace(role.settings, engine=EngineSettings(drain_s=0.3))
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await publish(role, 0)
    await said(role, 2)
    control.counts = False
    await asked(role, "gone")
    async with asyncio.timeout(20):
        await control.aborted.wait()
    control.counts = True
    gone = (await said(role, 4))[-1]
    assert isinstance(gone, EngineGone)
    assert gone.cause == "aborted what ran after 0.3 s: [engine] drain_s"
    role.stopping.set()
    await task


async def test_an_engine_that_is_to_go_while_the_trainer_has_its_device_is_not_woken_and_has_left_without_memory(
    role: Role, control: MemoryEngineControl
) -> None:
    role.settings = dataclasses.replace(role.settings, engine=EngineSettings(colocate=True))
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await publish(role, 0)
    await said(role, 2)
    await role.events.append(dataclasses.replace(example(SampleBatchFormed), run_id="run", batch_index=0))
    assert told(await said(role, 3))[-1] == ("Draining", "released")
    control.requests = 1
    await asked(role, "gone")
    gone = (await said(role, 5))[-1]
    assert isinstance(gone, EngineGone)
    assert (gone.cause, control.aborts) == ("aborted what ran with weights 'released'", 1)
    assert (control.alive, control.paused, control.memory) == (True, True, set())
    await asked(role, "serving")
    assert told((await said(role, 7))[5:]) == [("Registered", "released"), ("Draining", "released")]
    await publish(role, 1)
    assert told(await said(role, 8))[-1] == ("WeightsLoaded", "serving")
    await asked(role, "gone")
    assert told((await said(role, 10))[8:]) == [("Draining", "draining"), ("Gone", "gone")]
    assert (control.alive, control.memory) == (True, set())
    role.stopping.set()
    await task


async def test_an_engine_that_is_to_go_and_never_came_is_gone_at_once(role: Role, control: MemoryEngineControl) -> None:
    control.alive = False
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await asked(role, "gone")
    assert told(await said(role, 1)) == [("Gone", "gone")]
    role.stopping.set()
    await task


async def test_a_truncated_file_is_refused_before_the_engine_sees_it(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    await said(role, 2)
    await publish(role, 1, content=save(tensors(1))[:-8])
    await publish_after(role, 3, 2)
    _, _, refused, loaded = await said(role, 4)
    assert isinstance(refused, EngineWeightsRefused)
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (refused.cause, refused.refused_version, refused.version) == ("TruncatedSafetensors", 1, 0)
    assert refused.state == "serving"
    assert (loaded.version, control.loads) == (2, [0, 2])


async def publish_after(role: Role, count: int, number: int) -> None:
    """Publish version `number` once `count` status events are there."""
    await said(role, count)
    await publish(role, number)


async def test_when_the_newest_is_bad_the_next_newest_is_loaded(role: Role, control: MemoryEngineControl) -> None:
    await publish(role, 0)
    await publish(role, 1)
    await publish(role, 2, content=b"short")
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    _, refused, loaded = await said(role, 3)
    role.stopping.set()
    await task
    assert isinstance(refused, EngineWeightsRefused)
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (refused.refused_version, loaded.version, loaded.superseded) == (2, 1, (0,))


async def test_an_engine_left_paused_is_resumed(role: Role, control: MemoryEngineControl) -> None:
    await control.pause()
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await said(role, 1)
    assert not control.paused
    role.stopping.set()
    await task


async def test_an_engine_that_came_back_empty_is_loaded_again(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    await said(role, 2)
    control.restart()
    _, _, registered, loaded = await said(role, 4)
    assert isinstance(registered, EngineRegistered)
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (registered.version, loaded.version) == (-1, 0)


async def test_an_engine_that_a_killed_loader_left_with_half_of_a_version_serves_the_next_whole_one_and_not_before(
    role: Role, control: MemoryEngineControl
) -> None:
    await control.pause()
    await control.label(f"{LOADING}0")
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    (registered,) = await said(role, 1)
    assert (registered.version, registered.state) == (-1, "starting")
    assert control.paused
    await publish(role, 1)
    loaded = (await said(role, 2))[1]
    assert (loaded.version, loaded.state, control.paused) == (1, "serving", False)
    role.stopping.set()
    await task


async def test_an_engine_with_the_weights_of_another_run_serves_none_before_it_is_given_those_of_this(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await control.label("7")
    assert reported(await said(role, 1)) == [("EngineRegistered", -1, None, "starting")]
    await publish_after(role, 1, 0)
    assert reported(await said(role, 2))[1] == ("EngineWeightsLoaded", 0, None, "serving")
    assert (control.loads, (await control.model_info()).version) == ([0], 0)


class Unsaid(MemoryEngineControl):
    """A loader stops when it has loaded, and before it goes on."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.gate = Gate()

    async def resume(self) -> None:
        if self.loads:
            await self.gate.pass_through()
        await super().resume()


async def test_what_a_loader_had_loaded_when_it_was_killed_is_acknowledged_with_all_that_it_superseded(
    role: Role,
) -> None:
    control = Unsaid(Path(role.settings.model.path))
    await publish(role, 0)
    await publish(role, 1)
    killed = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await control.gate.reached.wait()
    killed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killed
    assert (await control.model_info()).version == 1
    successor = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    loaded = (await said(role, 3))[2]
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (loaded.version, loaded.superseded, control.paused) == (1, (0,), False)
    role.stopping.set()
    await successor


async def test_a_dead_engine_is_reported_and_ends_the_process(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await said(role, 1)
    control.alive = False
    gone = (await said(role, 2))[1]
    assert isinstance(gone, EngineGone)
    assert gone.state == "gone"
    with pytest.raises(EngineSwapFailed):
        await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - an engine in memory tells nobody
            await asyncio.sleep(0.01)


async def publish_adapter(role: Role, number: int, *, adapts: int = 0, **matrices: torch.Tensor) -> None:
    matrices = matrices or {"a": tensors(0)["a"]}
    await role.events.append(await adapter(matrices, number, role.blobs, adapts=adapts, seed=number))


def reported(events: list[Event]) -> list[tuple[str, int, int | None, str]]:
    """(record, version, base version, state)"""
    return [
        (type(event).__name__, event.version, getattr(event, "base_version", None), event.state) for event in events
    ]


async def test_an_adapter_is_loaded_beside_what_serves_and_those_behind_the_last_two_go(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    for number in range(1, 5):
        await said(role, number + 1)
        await publish_adapter(role, number)
    events = await said(role, 6)
    assert reported(events)[1:] == [
        ("EngineWeightsLoaded", 0, None, "serving"),
        *(("EngineWeightsLoaded", number, 0, "serving") for number in range(1, 5)),
    ]
    assert set(events[2].seconds) == {"fetch", "verify", "load", "check"}  # type: ignore[attr-defined]
    assert control.loads == [0, 1, 2, 3, 4]
    await until(lambda: [*control.adapters] == [3, 4])
    await publish(role, 5)
    assert reported(await said(role, 7))[-1] == ("EngineWeightsLoaded", 5, None, "serving")
    await until(lambda: not control.adapters)


async def test_an_engine_that_restarted_without_adapters_is_given_what_they_rest_on_first(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    await said(role, 2)
    await publish_adapter(role, 2)
    await said(role, 3)
    control.restart()
    assert reported(await said(role, 6))[3:] == [
        ("EngineRegistered", -1, None, "starting"),
        ("EngineWeightsLoaded", 0, None, "starting"),
        ("EngineWeightsLoaded", 2, 0, "serving"),
    ]


async def test_a_loader_that_restarts_finds_the_adapter_that_its_engine_serves(
    role: Role, control: MemoryEngineControl
) -> None:
    await publish(role, 0)
    await publish_adapter(role, 1)
    for there in (3, 4):
        task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
        events = await said(role, there)
        role.stopping.set()
        await task
        role.stopping.clear()
    assert reported(events)[-1] == ("EngineRegistered", 1, 0, "serving")
    assert control.loads == [0, 1]


@pytest.mark.parametrize(
    ("adapts", "matrices", "cause"),
    [
        (7, {"a": torch.ones(2, 3)}, "BaseMissing"),
        (1, {"a": torch.ones(2, 3)}, "BaseMissing"),
        (0, {"b": torch.ones(4, 4)}, "TensorsMismatch"),
        (0, {"c": torch.ones(2, 3)}, "TensorsMismatch"),
        (0, {"a": torch.ones(2, 4)}, "ShapeMismatch"),
    ],
    ids=["of a version that is not there", "of an adapter", "of a vector", "of another model", "of another size"],
)
async def test_an_adapter_that_does_not_fit_is_refused_by_name_and_the_one_before_it_serves(
    role: Role,
    control: MemoryEngineControl,
    running: asyncio.Task[None],
    adapts: int,
    matrices: dict[str, torch.Tensor],
    cause: str,
) -> None:
    await publish(role, 0)
    await said(role, 2)
    await publish_adapter(role, 1)
    await said(role, 3)
    await publish_adapter(role, 2, adapts=adapts, **matrices)
    refused = (await said(role, 4))[3]
    assert isinstance(refused, EngineWeightsRefused)
    assert (refused.refused_version, refused.version, refused.cause) == (2, 1, cause)
    assert (await control.model_info()).version == 1


async def test_an_adapter_file_that_was_altered_is_refused(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    await said(role, 2)
    event = await adapter({"a": tensors(0)["a"]}, 1, role.blobs, adapts=0)
    other = await adapter({"a": tensors(0)["a"]}, 1, role.blobs, adapts=0, seed=9)
    await role.events.append(dataclasses.replace(event, files=other.files))
    refused = (await said(role, 3))[2]
    assert isinstance(refused, EngineWeightsRefused)
    assert (refused.refused_version, refused.cause) == (1, "ChecksumMismatch")
    assert not control.adapters


async def test_an_engine_that_takes_no_adapters_refuses_them_and_serves_what_they_rest_on(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    control.takes_adapters = False
    await publish(role, 0)
    await said(role, 2)
    await publish_adapter(role, 1)
    refused = (await said(role, 3))[2]
    assert isinstance(refused, EngineWeightsRefused)
    assert (refused.refused_version, refused.version, refused.state) == (1, 0, "serving")


async def test_an_engine_that_starts_late_is_waited_for_by_name_and_said_to_be_gone_once(
    role: Role, control: MemoryEngineControl
) -> None:
    control.alive = False
    role.settings = dataclasses.replace(role.settings, engine=EngineSettings(start_timeout_s=0.1))
    loading = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    (gone,) = await said(role, 1)
    assert isinstance(gone, EngineGone)
    assert f"engine at {URL} has not answered since " in role.health.waiting["engine"]
    assert "TURNLOG_ENGINE_URLS" in role.health.waiting["engine"]
    assert not loading.done()
    control.restart()
    _, registered = await said(role, 2)
    assert isinstance(registered, EngineRegistered)
    role.stopping.set()
    await asyncio.wait_for(loading, 20)
    assert "engine" not in role.health.waiting


async def test_what_an_engine_is_to_be_given_is_fetched_while_it_starts(
    role: Role, control: MemoryEngineControl
) -> None:
    control.alive = False
    for number in range(2):
        await publish(role, number)
    loading = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    folders = Path(role.settings.run.directory) / "weights"
    await until(lambda: any(not folder.suffix for folder in folders.glob("1-*")))
    assert isinstance(role.blobs, MemoryBlobs)
    role.blobs.objects.clear()
    control.restart()
    _, loaded = await said(role, 2)
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (loaded.version, loaded.superseded) == (1, (0,))
    role.stopping.set()
    await asyncio.wait_for(loading, 20)


async def test_a_silent_engine_takes_no_turns_until_it_answers_and_is_gone_after_a_longer_silence(
    role: Role, control: MemoryEngineControl
) -> None:
    patience = dataclasses.replace(role.settings.loader, silent_s=0.1, gone_s=5.0)
    role.settings = dataclasses.replace(role.settings, loader=patience)
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await publish(role, 0)
    await said(role, 2)
    control.answers.clear()
    await publish_after(role, 3, 1)
    control.answers.set()
    await said(role, 5)
    assert control.loads == [0, 1]
    control.answers.clear()
    with pytest.raises(EngineSwapFailed, match="is silent"):
        await task
    events = await said(role, 7)
    kinds = [(type(event).__name__, event.state, event.version) for event in events]
    assert kinds == [
        ("EngineRegistered", "starting", -1),
        ("EngineWeightsLoaded", "serving", 0),
        ("EngineDraining", "silent", 0),
        ("EngineRegistered", "serving", 0),
        ("EngineWeightsLoaded", "serving", 1),
        ("EngineDraining", "silent", 1),
        ("EngineGone", "gone", 1),
    ]


async def test_an_engine_that_drops_one_connection_is_not_gone(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await said(role, 1)
    control.silent = 1
    while control.silent and not running.done():  # noqa: ASYNC110 - the loader asks once a second
        await asyncio.sleep(0.01)
    await publish(role, 0)
    assert isinstance((await said(role, 2))[1], EngineWeightsLoaded)


async def test_event_ids_differ_between_reports(
    role: Role, control: MemoryEngineControl, running: asyncio.Task[None]
) -> None:
    await publish(role, 0)
    await said(role, 2)
    control.restart()
    events = await said(role, 4)
    assert len({event.event_id for event in events}) == len(events)
    assert all(dataclasses.is_dataclass(event) for event in events)


class Gate:
    """Stops whoever comes to it first, as SIGSTOP would, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def pass_through(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            await self.open.wait()


class GatedBlobs(MemoryBlobs):
    """A loader that stops before it has touched its engine."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    async def get_file(self, ref: BlobRef, path: Path) -> None:
        await self.gate.pass_through()
        await super().get_file(ref, path)


class GatedControl(MemoryEngineControl):
    """A loader that stops in the middle of its swap."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.gate = Gate()

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        await self.gate.pass_through()
        await super().load(folder, version, timeout_s=timeout_s, released=released)


async def test_a_loader_that_wakes_up_behind_its_successor_does_not_touch_the_engine(
    role: Role, control: MemoryEngineControl, tmp_path: Path
) -> None:
    elsewhere = dataclasses.replace(role.settings, run=RunSettings(id="run", directory=str(tmp_path / "elsewhere")))
    zombies = dataclasses.replace(role, blobs=GatedBlobs(), settings=elsewhere)
    await publish(zombies, 0)
    zombie = asyncio.create_task(Loader(zombies, control, "engine-0", URL).run())
    await zombies.blobs.gate.reached.wait()  # type: ignore[attr-defined]
    successor = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await publish(role, 1)
    reports = await said(role, 3)
    zombies.blobs.gate.open.set()  # type: ignore[attr-defined]
    with pytest.raises(Fenced):
        await zombie
    assert control.loads == [1]
    assert isinstance(reports[2], EngineWeightsLoaded)
    assert (reports[2].version, reports[2].superseded) == (1, (0,))
    role.stopping.set()
    await successor
    assert await said(role, 3) == reports


async def test_old_weights_that_a_zombie_was_putting_back_are_not_acknowledged_and_do_not_stay(role: Role) -> None:
    control = GatedControl(Path(role.settings.model.path))
    await publish(role, 0)
    zombie = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await control.gate.reached.wait()
    successor = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    await publish(role, 1)
    await said(role, 3)
    assert control.loads == [1]
    control.gate.open.set()
    with pytest.raises(Fenced):
        await zombie
    assert control.loads[:2] == [1, 0]
    reports = (await said(role, 5))[3:]
    assert isinstance(reports[1], EngineWeightsLoaded)
    assert [report.version for report in reports if isinstance(report, EngineRegistered)] == [-1]
    assert reports[1].version == control.loads[2] == 1
    role.stopping.set()
    await successor
