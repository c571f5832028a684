"""What an engine's control endpoints promise: the fake and real SGLang alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnlog.infra.embedded.tiny_model import make_tiny_model
from turnlog.infra.engine import EngineDead, EngineRefused
from turnlog.infra.engine_control import EngineControl, SGLangControl
from turnlog.infra.memory_engine_control import MemoryEngineControl


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


async def test_an_engine_that_is_not_there_is_dead() -> None:
    absent = SGLangControl("http://127.0.0.1:9")
    with pytest.raises(EngineDead, match="ConnectError"):
        await absent.model_info()
    await absent.close()
