"""What an engine's control endpoints promise: the fake and real SGLang alike."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.memory_engine_control import MemoryEngineControl
from turnlog.infra.embedded.tiny_model import make_tiny_model
from turnlog.infra.engine import (
    EngineControl,
    EngineDead,
    EngineRefused,
    EngineUnreachable,
    Generate,
    Piece,
    SGLang,
    SGLangControl,
)


@pytest.fixture(params=["memory", pytest.param("sglang", marks=pytest.mark.engine)])
async def control(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineControl]:
    if request.param == "memory":
        yield MemoryEngineControl(tmp_path)
        return
    real = SGLangControl(request.getfixturevalue("engine_url"))
    yield real
    await real.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


async def test_a_load_changes_the_label(control: EngineControl, model: Path) -> None:
    await control.pause()
    await control.load(model, 7, timeout_s=60)
    assert (await control.model_info()).version == 7
    await control.resume()
    assert (await control.model_info()).version == 7


@pytest.mark.engine
@pytest.mark.parametrize("update", ["retract", "in_place", "abort"])
async def test_a_running_request_meets_new_weights_as_the_setting_says(
    engine_url: str, model: Path, update: str
) -> None:
    engine, control = SGLang(engine_url), SGLangControl(engine_url, update=update)
    before = (await control.model_info()).version
    for version in itertools.count(before + 1):
        pieces = [piece async for piece in under_an_update(engine, control, model, version)]
        labels = [label for label, _ in pieces[-1].versions]
        if (pieces[-1].finish, labels) != ("stop", [str(version - 1)]):  # it did not end of itself before the update
            break
    if update == "abort":
        assert (pieces[-1].finish, labels) == ("abort", [str(version - 1)])
    else:
        assert pieces[-1].finish in ("length", "stop")
        assert labels == [str(version - 1), str(version)]
    assert (await control.model_info()).version == version
    await engine.close()
    await control.close()


async def under_an_update(engine: SGLang, control: SGLangControl, model: Path, version: int) -> AsyncIterator[Piece]:
    # A name of its own: SGLang aborts whatever has the name of a stream that ended two seconds ago.
    request = Generate(rid=uuid.uuid4().hex, input_ids=[10, 20, 30], temperature=1.0, max_new_tokens=500, cache_key="k")
    answer = engine.generate(request, stream=True, timeout_s=60)
    yield await anext(answer)
    await control.pause()
    await control.load(model, version, timeout_s=60)
    await control.resume()
    async for piece in answer:
        yield piece


async def test_a_missing_folder_is_refused_and_the_label_stays(control: EngineControl, tmp_path: Path) -> None:
    before = await control.model_info()
    await control.pause()
    with pytest.raises(EngineRefused):
        await control.load(tmp_path / "absent", 8, timeout_s=60)
    await control.resume()
    assert (await control.model_info()).weight_version == before.weight_version


async def test_resume_is_harmless_when_not_paused(control: EngineControl) -> None:
    await control.resume()
    await control.resume()
    assert await control.model_info()


async def test_an_engine_that_is_not_there_is_unreachable_and_one_that_hangs_up_is_dead() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    control = SGLangControl(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(EngineDead) as dead:
        await control.model_info()
    assert not isinstance(dead.value, EngineUnreachable)
    server.close()
    await server.wait_closed()
    with pytest.raises(EngineUnreachable):
        await control.model_info()
    await control.close()
