"""Samples: what is refused before an engine sees it, and the adapters that engines and the folder hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.unit.tinker.conftest import BASE, ApiClient, TinkerWorld
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.engines.protocol import Generate
from turnlog.infra.tensors.adapters import CONFIG
from turnlog.plugins.tinker.engines import AdapterEngine, AdapterFleet, SampledAdapter
from turnlog.schemas.events import WeightFile


@pytest.mark.parametrize(
    ("tokens", "params", "words"),
    [
        ([5, 384], {"max_tokens": 1}, "'384' at position 1: the model has tokens 0 to 383"),
        ([5, -1], {"max_tokens": 1}, "'-1' at position 1"),
        ([5, True], {"max_tokens": 1}, "'True' at position 1"),
        ([], {"max_tokens": 1}, "no tokens"),
        ([5], {"max_tokens": 0}, "max_tokens is '0'"),
        ([5], {"max_tokens": 1 << 20}, "max_tokens"),
    ],
)
async def test_a_sample_that_no_engine_should_see_is_refused(
    tinker_world: TinkerWorld, api: ApiClient, tokens: list[int], params: dict[str, int], words: str
) -> None:
    async with tinker_world.life():
        opened = {"session_id": await api.session(), "sampling_session_seq_id": 0, "base_model": BASE}
        sampler = (await api.post("create_sampling_session", opened))["sampling_session_id"]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        body = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 1, "prompt": prompt}
        answer = await api.once("POST", "asample", json=body | {"sampling_params": params})
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


class _Engines:
    """Engines in memory that have the adapters which their control loads."""

    def __init__(self, model: Path, count: int) -> None:
        self.clients = [MemoryEngine(vocabulary=384, context=64, version="default") for _ in range(count)]
        self.controls = [MemoryEngineControl(model) for _ in range(count)]

    def fleet(self, blobs: MemoryBlobs, folder: Path, most: int) -> AdapterFleet:
        both = zip(self.clients, self.controls, strict=True)
        engines = [AdapterEngine(client, control, "memory") for client, control in both]
        for client, control in zip(self.clients, self.controls, strict=True):
            client.adapters = _Names(control)
        return AdapterFleet(engines, blobs, folder, most=most, timeout_s=5, request_timeout_s=5)


class _Names(set[str]):
    """The names of the adapters that a control has loaded."""

    def __init__(self, control: MemoryEngineControl) -> None:
        super().__init__()
        self._control = control

    def __contains__(self, name: object) -> bool:
        return name in {str(number) for number in self._control.adapters}


async def _adapter(blobs: MemoryBlobs, number: int) -> SampledAdapter:
    """Return an adapter in the store; engines in memory do not read it."""
    return SampledAdapter(number, (WeightFile(CONFIG, await blobs.put(str(number).encode())),))


async def test_the_folder_has_the_adapters_that_engines_hold_and_no_others(model_folder: Path, tmp_path: Path) -> None:
    blobs, engines, folder = MemoryBlobs(), _Engines(model_folder, 1), tmp_path / "adapters"
    (folder / "77").mkdir(parents=True)
    fleet = engines.fleet(blobs, folder, most=2)
    adapters = [await _adapter(blobs, number) for number in range(1, 5)]
    for turn, adapter in enumerate([*adapters, adapters[0]]):
        request = Generate(rid=f"r{turn}", input_ids=[5, 6], temperature=1.0, max_new_tokens=3)
        assert (await fleet.generate(request, adapter)).finish is not None
    held = set(engines.controls[0].adapters)
    assert held == {4, 1}
    assert {int(path.name) for path in folder.iterdir()} == held
    assert engines.controls[0].loads == [1, 2, 3, 4, 1]


async def test_an_engine_that_restarted_between_two_samples_loads_the_adapter_again(
    model_folder: Path, tmp_path: Path
) -> None:
    blobs, engines = MemoryBlobs(), _Engines(model_folder, 1)
    fleet = engines.fleet(blobs, tmp_path / "adapters", most=2)
    adapter = await _adapter(blobs, 1)
    request = Generate(rid="r", input_ids=[5, 6], temperature=1.0, max_new_tokens=3)
    before = await fleet.generate(request, adapter)
    engines.controls[0].restart()
    assert await fleet.generate(request, adapter) == before
    assert engines.controls[0].loads == [1, 1]
