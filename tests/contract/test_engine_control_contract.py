"""What an engine's control endpoints promise: the fake, real SGLang and real vLLM alike."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.fakes.weights import adapter
from tests.tiny_model import make_tiny_model
from tests.training_side import CPU, TrainingSide, digests_of
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engine_plugin.order import UNSUITED, Transfer
from turnlog.infra.engines.kinds import connect_engine, control_engine
from turnlog.infra.engines.protocol import (
    LOADING,
    Adapter,
    CannotReceive,
    Engine,
    EngineControl,
    EngineDead,
    EngineRefused,
    EngineUnreachable,
    Generate,
    OutputChunk,
    TransferFailed,
)
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.engines.vllm import VLLMControl
from turnlog.infra.tensors.digests import bucket_digests
from turnlog.infra.tensors.transfer import Receiver, TransferBroken
from turnlog.infra.tensors.versions import fetch
from turnlog.settings import EngineSettings
from turnlog.trainer.weights import read_weights

REAL = [pytest.param(kind, marks=pytest.mark.engine) for kind in ("sglang", "vllm")]
URLS = {"sglang": "engine_url", "vllm": "vllm_engine_url"}


@pytest.fixture(params=["memory", *REAL])
async def control(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineControl]:
    if request.param == "memory":
        yield MemoryEngineControl(tmp_path)
        return
    async with real(request.getfixturevalue(URLS[request.param]), kind=request.param) as found:
        yield found


@pytest.fixture(params=REAL)
def kind(request: pytest.FixtureRequest) -> str:
    """Kind of a real engine."""
    found: str = request.param
    return found


@asynccontextmanager
async def real(url: str, update: str = "retract", *, kind: str = "sglang") -> AsyncIterator[EngineControl]:
    found = control_engine(url, kind, update=update)
    yield found
    await found.close()


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """New weights for the engine of the test."""
    of_vllm = "vllm" in request.node.callspec.params.values() if hasattr(request.node, "callspec") else False
    return make_tiny_model(tmp_path / "model", **({"head_dim": 32} if of_vllm else {}))


async def test_a_load_changes_the_label(control: EngineControl, model: Path) -> None:
    await control.pause()
    await control.load(model, 7, timeout_s=60)
    assert (await control.model_info()).version == 7
    await control.resume()
    assert (await control.model_info()).version == 7


@pytest.mark.engine
@pytest.mark.parametrize("update", ["retract", "in_place", "abort"])
async def test_a_running_request_meets_new_weights_as_the_setting_says(
    request: pytest.FixtureRequest, kind: str, model: Path, update: str
) -> None:
    url = request.getfixturevalue(URLS[kind])
    engine = connect_engine(url, kind)
    async with real(url, update, kind=kind) as control:
        before = await loaded(control, model)
        for version in itertools.count(before + 1):
            pieces = [piece async for piece in under_an_update(engine, control, model, version)]
            labels = [label for label, _ in pieces[-1].versions]
            if (pieces[-1].finish, labels) != ("stop", [str(version - 1)]):  # it did not end before the update
                break
        assert (await control.model_info()).version == version
    await engine.close()
    if update == "abort":
        assert (pieces[-1].finish, labels) == ("abort", [str(version - 1)])
    else:
        assert pieces[-1].finish in ("length", "stop")
        assert labels == [str(version - 1), str(version)]


async def test_an_engine_that_gave_its_memory_back_says_so_and_serves_the_next_version(
    control: EngineControl, model: Path
) -> None:
    if isinstance(control, VLLMControl):
        with pytest.raises(EngineRefused, match="colocate"):
            await control.release()
        return
    version = await loaded(control, model)
    await control.pause()
    await control.release()
    info = await control.model_info()
    assert (info.is_released, info.is_incomplete, info.version) == (True, False, -1)
    await control.load(model, version + 1, timeout_s=60, released=True)
    await control.resume()
    info = await control.model_info()
    assert (info.is_released, info.version) == (False, version + 1)


@pytest.mark.engine
async def test_a_request_that_runs_when_its_engine_gives_its_memory_back_ends_on_the_next_weights(
    engine_url: str, model: Path
) -> None:
    engine = SGLang(engine_url)
    async with real(engine_url) as control:
        before = await loaded(control, model)
        for version in itertools.count(before + 1):
            pieces = [piece async for piece in under_an_update(engine, control, model, version, released=True)]
            labels = [label for label, _ in pieces[-1].versions]
            if (pieces[-1].finish, labels) != ("stop", [str(version - 1)]):  # it did not end before
                break
    await engine.close()
    assert pieces[-1].finish in ("length", "stop")
    assert labels == [str(version - 1), str(version)]


async def loaded(control: EngineControl, folder: Path) -> int:
    """Under the next number."""
    version = (await control.model_info()).version + 1
    await control.pause()
    await control.load(folder, version, timeout_s=60)
    await control.resume()
    return version


@pytest.mark.long
@pytest.mark.engine
async def test_an_engine_that_takes_back_what_it_has_dies_and_what_it_gave_is_taken_once(
    model: Path, tmp_path: Path
) -> None:
    with EngineServer(model, EngineSettings(), log=tmp_path / "engine.log") as engine:
        async with real(engine.url) as control:
            await control.pause()
            await control.release()
            await control.retake()
            with pytest.raises(EngineDead):
                await control.retake()


async def under_an_update(
    engine: Engine, control: EngineControl, model: Path, version: int, *, released: bool = False
) -> AsyncIterator[OutputChunk]:
    # A name of its own: SGLang aborts whatever has the name of a stream that ended two seconds ago.
    request = Generate(rid=uuid.uuid4().hex, input_ids=[10, 20, 30], temperature=1.0, max_new_tokens=500, cache_key="k")
    answer = engine.generate(request, stream=True, timeout_s=60)
    yield await anext(answer)
    await control.pause()
    if released:
        await control.release()
    await control.load(model, version, timeout_s=60, released=released)
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


@pytest.fixture(params=["memory", pytest.param("sglang", marks=pytest.mark.engine)])
async def adapting(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineControl]:
    """An engine that takes adapters, and has none."""
    if request.param == "memory":
        yield MemoryEngineControl(tmp_path)
        return
    real = SGLangControl(request.getfixturevalue("lora_engine_url"), adapters=True)
    yield real
    for version in (await real.model_info()).adapters:
        await real.unload_adapter(version, patience_s=60)
    await real.close()


@pytest.fixture
async def adapters(tiny_model: Path, tmp_path: Path) -> list[Path]:
    """Folders of two."""
    blobs, matrices = MemoryBlobs(), {name: one for name, one in read_weights(tiny_model).items() if "_proj" in name}
    folders = [tmp_path / "1", tmp_path / "2"]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        await fetch(await adapter(matrices, seed, blobs, adapts=0, seed=seed), blobs, folder)
    return folders


async def test_adapters_are_loaded_beside_the_weights_and_forgotten(
    adapting: EngineControl, adapters: list[Path]
) -> None:
    before = await adapting.model_info()
    own = before.label
    for left in before.adapters:  # by whoever had the engine before
        await adapting.unload_adapter(left, patience_s=60)
    for version, folder in enumerate(adapters, start=own + 1):
        await adapting.load_adapter(folder, version, timeout_s=60)
    info = await adapting.model_info()
    assert (info.adapters, info.label) == ((own + 1, own + 2), own)
    await adapting.unload_adapter(own + 1, patience_s=60)
    assert (await adapting.model_info()).adapters == (own + 2,)


async def test_an_adapter_that_is_there_or_has_no_folder_is_refused_and_those_there_stay(
    adapting: EngineControl, adapters: list[Path], tmp_path: Path
) -> None:
    await adapting.load_adapter(adapters[0], 70, timeout_s=60)
    for folder, version in ((adapters[1], 70), (tmp_path / "absent", 71)):
        with pytest.raises(EngineRefused):
            await adapting.load_adapter(folder, version, timeout_s=60)
    with pytest.raises(EngineRefused):
        await adapting.unload_adapter(71, patience_s=60)
    assert (await adapting.model_info()).adapters == (70,)


@pytest.mark.engine
async def test_an_adapter_goes_once_its_requests_have_ended_or_are_ended(
    lora_engine_url: str, adapters: list[Path]
) -> None:
    engine, control = SGLang(lora_engine_url), SGLangControl(lora_engine_url, adapters=True)
    base = (await control.model_info()).weight_version
    finishes: list[str] = []
    while "abort" not in finishes:  # a request may end by itself before its adapter's patience does
        version, patience_s = 80 + len(finishes), 0.05 if finishes else 60.0
        await control.load_adapter(adapters[0], version, timeout_s=60)
        request = Generate(
            rid=uuid.uuid4().hex, input_ids=[10, 20], temperature=1.0, max_new_tokens=500, stop_token_ids=(),
            adapter=Adapter(str(version), base),
        )  # fmt: skip
        answer = engine.generate(request, stream=True, timeout_s=60)
        pieces = [await anext(answer)]
        await asyncio.gather(control.unload_adapter(version, patience_s=patience_s), rest_of(answer, pieces))
        finishes.append(pieces[-1].finish)
        assert [label for label, _ in pieces[-1].versions] == [str(version)]
        assert version not in (await control.model_info()).adapters
    assert finishes[0] in ("length", "stop")
    await engine.close()
    await control.close()


async def rest_of(answer: AsyncIterator[OutputChunk], pieces: list[OutputChunk]) -> None:
    async for piece in answer:
        pieces.append(piece)


@pytest.fixture(params=["memory", pytest.param("sglang", marks=pytest.mark.engine)])
async def direct(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[EngineControl]:
    """An engine that receives from training ranks."""
    if request.param == "memory":
        memory = MemoryEngineControl(tmp_path)
        memory.take = take_part
        yield memory
        return
    real = SGLangControl(request.getfixturevalue("engine_url"))
    yield real
    await real.resume()
    await real.close()


async def take_part(transfer: Transfer, timeout_s: float) -> dict[str, str]:
    """Receive a version and load it nowhere."""
    digests = dict[str, str]()

    def receive() -> None:
        member = Receiver(transfer, device=CPU, timeout_s=timeout_s)
        try:
            for specs, bucket in member.receive(member.plan(transfer.version, transfer.attempt, timeout_s), timeout_s):
                digests.update(zip((spec.name for spec in specs), bucket_digests(specs, bucket), strict=True))
        finally:
            member.close()

    try:
        await asyncio.to_thread(receive)
    except TransferBroken as error:
        raise (TransferFailed if digests else EngineRefused)(str(error)) from error
    return digests


async def test_a_version_of_training_ranks_is_received_and_its_digests_are_told(
    direct: EngineControl, model: Path
) -> None:
    weights, version = read_weights(model), await loaded(direct, model) + 1
    assert await direct.direct_ranks() == 1
    await direct.pause()
    with TrainingSide(1) as side:
        found, _ = await asyncio.gather(
            direct.receive(side.transfer(version), timeout_s=60), side.sends(weights, version)
        )
    assert found == digests_of(weights)
    assert (await direct.model_info()).weight_version == f"{LOADING}{version}"
    await direct.label(str(version))
    await direct.resume()
    assert (await direct.model_info()).version == version


async def test_an_engine_that_gave_its_memory_back_receives_the_next_version(
    direct: EngineControl, model: Path
) -> None:
    weights, version = read_weights(model), await loaded(direct, model) + 1
    await direct.pause()
    await direct.release()
    with TrainingSide(1) as side:
        found, _ = await asyncio.gather(
            direct.receive(side.transfer(version), timeout_s=60, released=True), side.sends(weights, version)
        )
    assert found == digests_of(weights)
    await direct.label(str(version))
    await direct.resume()
    assert (await direct.model_info()).version == version


@pytest.mark.parametrize("released", [False, True])
async def test_a_transfer_that_never_begins_leaves_what_the_engine_had(
    direct: EngineControl, model: Path, released: bool
) -> None:
    """Its old weights, or memory without any."""
    version = await loaded(direct, model)
    await direct.pause()
    if released:
        await direct.release()
    with TrainingSide(1) as side, pytest.raises(TransferFailed if released else EngineRefused):
        await direct.receive(side.transfer(version + 1), timeout_s=1.0, released=released)
    label = f"{LOADING}{version + 1}" if released else str(version)
    assert (await direct.model_info()).weight_version == label
    await direct.load(model, version + 2, timeout_s=60)  # also after a release: it has taken its memory back
    await direct.resume()


async def test_an_engine_whose_transfer_ends_early_says_so_until_it_has_a_whole_version(
    direct: EngineControl, model: Path
) -> None:
    weights, version = read_weights(model), await loaded(direct, model) + 1
    await direct.pause()
    with TrainingSide(1, half_bytes=64 << 10) as side:
        receiving = asyncio.create_task(direct.receive(side.transfer(version), timeout_s=10.0))
        await asyncio.to_thread(side.send, side.plan(weights, version), weights, count=2)
        with pytest.raises(TransferFailed):
            await receiving
    assert (await direct.model_info()).weight_version == f"{LOADING}{version}"
    with TrainingSide(1) as side:  # the next attempt, in another group
        await asyncio.gather(
            direct.receive(side.transfer(version, attempt=1), timeout_s=60), side.sends(weights, version, attempt=1)
        )
    await direct.label(str(version))
    await direct.resume()
    assert (await direct.model_info()).version == version


async def test_resume_is_harmless_when_not_paused(control: EngineControl) -> None:
    await control.resume()
    await control.resume()
    assert await control.model_info()


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (f"{UNSUITED}engines with several pipeline stages get weights through the store", "several pipeline stages"),
        ("Input should be 'snapshot', 'reset_tensors' or 'checksum'", "pip install turnlog"),
    ],
)
async def test_an_engine_that_receives_no_weights_from_training_ranks_says_why(message: str, cause: str) -> None:
    """Answers as SGLang gives them, with the plugin and without it."""
    body = orjson.dumps({"success": False, "message": message, "ranks": None})

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    control = SGLangControl(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(CannotReceive, match=cause):
        await control.direct_ranks()
    await control.close()
    server.close()
    await server.wait_closed()


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
