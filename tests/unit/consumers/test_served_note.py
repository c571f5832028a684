"""An engine starts again from the weights that it served, and from its model's own where these are not at hand."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.unit.consumers.test_loader import URL, control, publish, role, said
from turnlog.consumers.loader.role import Loader
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.roles.role import Role
from turnlog.infra.tensors.served import ServedNote, weight_folders
from turnlog.schemas.events import EngineRegistered, EngineWeightsLoaded
from turnlog.settings import EngineSettings

__all__ = ["control", "role"]


@asynccontextmanager
async def loading(role: Role, control: MemoryEngineControl) -> AsyncIterator[None]:
    """A loader of engine-0, while the block runs."""
    role.stopping.clear()
    task = asyncio.create_task(Loader(role, control, "engine-0", URL).run())
    yield
    role.stopping.set()
    await task


def engine_of(role: Role, tiny_model: Path, *extra_args: str) -> EngineServer:
    """Engine-0 of the run, as it is started."""
    run = role.settings.run
    settings = EngineSettings(extra_args=extra_args)
    note = ServedNote.of(run.directory, run.id, "engine-0")
    return EngineServer(tiny_model, settings, log=Path(run.directory) / "engine.log", served=note)


async def serve(role: Role, control: MemoryEngineControl) -> None:
    """Return once the engine has loaded version 0, and its loader has ended."""
    async with loading(role, control):
        await publish(role, 0)
        await said(role, 2)


def options(arguments: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(arguments[::2], arguments[1::2], strict=True))


async def test_a_restarted_engine_begins_with_what_it_served_and_is_given_nothing_a_second_time(
    role: Role, control: MemoryEngineControl, tiny_model: Path
) -> None:
    engine = engine_of(role, tiny_model)
    assert engine.launch().arguments() == (), "a first start is from the model's own folder"
    async with loading(role, control):
        await publish(role, 0)
        await said(role, 2)
        await publish(role, 1)
        await said(role, 3)
    for start in (1, 2):
        begun = options(engine.launch().arguments())
        (folder,) = weight_folders(role.settings.run.directory).glob("1-*")
        assert begun == {"--model-path": str(folder), "--tokenizer-path": str(tiny_model), "--weight-version": "1"}
        control.restart(label=begun["--weight-version"])
        async with loading(role, control):
            registered = (await said(role, 3 + start))[-1]
        assert isinstance(registered, EngineRegistered)
        assert (registered.version, registered.state) == (1, "serving")
    assert control.loads == [0, 1]


async def test_weights_that_came_while_an_engine_was_away_are_loaded_before_it_takes_turns(
    role: Role, control: MemoryEngineControl, tiny_model: Path
) -> None:
    await serve(role, control)
    begun = options(engine_of(role, tiny_model).launch().arguments())
    control.restart(label=begun["--weight-version"])
    await publish(role, 1)
    async with loading(role, control):
        registered, loaded = (await said(role, 4))[2:]
    assert isinstance(registered, EngineRegistered)
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (registered.version, loaded.version, loaded.state) == (0, 1, "serving")
    assert control.loads == [0, 1]


async def test_a_start_that_fails_is_followed_by_one_from_the_models_own_folder(
    role: Role, control: MemoryEngineControl, tiny_model: Path
) -> None:
    await serve(role, control)
    engine = engine_of(role, tiny_model)
    assert engine.launch().arguments()
    assert engine.launch().arguments() == ()


def alter(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def remove(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def tear(folder: Path) -> None:
    (folder.parent / ".served-engine-0").write_text('{"run_id": "run", "ver')


@pytest.mark.parametrize("harm", [alter, remove, tear])
async def test_weights_that_are_not_what_was_verified_are_not_started_from(
    role: Role, control: MemoryEngineControl, tiny_model: Path, harm: Callable[[Path], None]
) -> None:
    await serve(role, control)
    (folder,) = weight_folders(role.settings.run.directory).glob("0-*")
    harm(folder)
    assert engine_of(role, tiny_model).launch().arguments() == ()


async def test_a_note_of_another_run_or_engine_is_not_this_ones(
    role: Role, control: MemoryEngineControl, tiny_model: Path
) -> None:
    await serve(role, control)
    directory = role.settings.run.directory
    assert ServedNote.of(directory, "run", "engine-1").take() is None
    assert ServedNote.of(directory, "another", "engine-0").take() is None


@pytest.mark.parametrize("argument", ["--load-format=dummy", "--quantization", "--weight-version"])
async def test_an_engine_whose_arguments_change_its_weights_is_never_labelled_at_its_start(
    role: Role, control: MemoryEngineControl, tiny_model: Path, argument: str
) -> None:
    await serve(role, control)
    assert engine_of(role, tiny_model, argument).launch().arguments() == ()


async def test_the_folder_that_an_engine_reads_stays_until_it_answers(
    role: Role, control: MemoryEngineControl, tiny_model: Path
) -> None:
    await serve(role, control)
    folder = options(engine_of(role, tiny_model).launch().arguments())["--model-path"]
    control.restart()
    async with loading(role, control):
        for number in range(1, 5):
            await publish(role, number)
            await said(role, 3 + number)
    assert "model.safetensors" in os.listdir(folder)
