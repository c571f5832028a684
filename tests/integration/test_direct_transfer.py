"""Weights from training ranks straight into real engines (docs/decisions/0050): two SGLang on CPU, real gloo, real
shared memory."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_model import make_tiny_model
from tests.training_side import TrainingSide, digests_of
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.protocol import LOADING, EngineDead, EngineRefused, Generate, TransferFailed
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.tensors.files import METADATA
from turnlog.infra.tensors.transfer import TransferBroken
from turnlog.settings import EngineSettings
from turnlog.trainer.weights import read_weights

pytestmark = pytest.mark.engine
HALF = 4 << 20
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=256, intermediate_size=4096, num_hidden_layers=4
    )


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    logs = tmp_path_factory.mktemp("logs")
    found = [
        EngineServer(model, EngineSettings(), log=logs / f"{name}.log", name=name) for name in ("engine-0", "engine-1")
    ]
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            list(pool.map(stack.enter_context, found))
        yield found


@pytest.fixture
async def controls(engines: list[EngineServer]) -> AsyncIterator[list[SGLangControl]]:
    """Both engines, paused."""
    found = [SGLangControl(engine.url) for engine in engines]
    for control in found:
        await control.pause()
    yield found
    for control in found:
        await control.close()


def changed(model: Path, seed: int) -> Weights:
    """Other weights of the same names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.2 if tensor.dim() > 1 else tensor.float()
        for name, tensor in read_weights(model).items()
    }


async def test_a_paused_engine_takes_no_core_from_those_that_send(
    engines: list[EngineServer], controls: list[SGLangControl]
) -> None:
    """SGLang's own loop spins while it is paused, also with --sleep-on-idle."""
    below = [each for engine in engines for each in psutil.Process(engine.pid).children(recursive=True)]
    found = [each for each in below if each.name().startswith("sglang::sched")]
    assert len(found) == len(engines)

    def cpu_s() -> float:
        return sum(each.cpu_times().user + each.cpu_times().system for each in found)

    before, began = cpu_s(), time.monotonic()
    while time.monotonic() - began < 2.0:
        await controls[0].model_info()  # its HTTP server answers, so the scheduler is not woken
    assert cpu_s() - before < 0.5 * (time.monotonic() - began), "two that spin take both cores of a small machine"


async def logprobs(url: str) -> list[float]:
    engine = SGLang(url)
    request = Generate(rid=uuid.uuid4().hex, input_ids=[10, 20, 30], temperature=0.0, max_new_tokens=12)
    (piece,) = [piece async for piece in engine.generate(request, stream=False, timeout_s=120)]
    await engine.close()
    return piece.logprobs


async def served(control: SGLangControl, version: int) -> list[float]:
    """Log-probs of the version that was loaded last."""
    await control.label(str(version))
    await control.resume()
    found = await logprobs(control.url)
    await control.pause()
    return found


async def from_disk(control: SGLangControl, weights: Weights, version: int, model: Path) -> list[float]:
    """Log-probs of the same weights, read by the engine itself."""
    folder = model.parent / f"disk-{uuid.uuid4().hex}"
    shutil.copytree(model, folder)
    save_file(weights, folder / "model.safetensors", METADATA)
    await control.load(folder, version, timeout_s=120)
    return await served(control, version)


@pytest.mark.parametrize(("backend", "senders"), [("gloo", 1), ("gloo", 2), ("shared", 1), ("shared", 2)])
async def test_both_engines_serve_what_the_ranks_sent_and_join_once_for_two_versions(
    controls: list[SGLangControl], model: Path, backend: str, senders: int
) -> None:
    with TrainingSide(2, backend=backend, senders=senders, half_bytes=HALF) as side:
        for version in (1, 2):
            weights = changed(model, seed=version)
            found = await asyncio.gather(
                *(one.receive(side.transfer(version, 0, rank), timeout_s=120) for rank, one in enumerate(controls, 1)),
                side.sends(weights, version),
            )
            assert found[:2] == [digests_of(weights)] * 2
            assert len(side.plan(weights, version).buckets) > 3
        assert len(side.groups) == senders
    direct = [await served(control, 2) for control in controls]
    read = await from_disk(controls[0], weights, 3, model)
    assert direct == [pytest.approx(read, abs=1e-5)] * 2
    assert read != await from_disk(controls[0], changed(model, seed=1), 4, model)


async def test_a_byte_that_changed_on_the_way_is_seen_in_the_digests(
    controls: list[SGLangControl], model: Path
) -> None:
    weights = changed(model, seed=3)

    def spoil(number: int, bucket: torch.Tensor) -> None:
        if number == 1:
            bucket[5] ^= 1

    with TrainingSide(1, half_bytes=HALF) as side:
        plan = side.plan(weights, 5)
        found, _ = await asyncio.gather(
            controls[0].receive(side.transfer(5), timeout_s=60), asyncio.to_thread(side.send, plan, weights, spoil)
        )
    wanted = digests_of(weights)
    assert [name for name in wanted if found[name] != wanted[name]] == [plan.planned_buckets()[1].specs[0].name]


async def test_a_tensor_that_the_model_does_not_have_is_not_called_loaded(
    controls: list[SGLangControl], model: Path
) -> None:
    """SGLang answers 200 to it."""
    weights = changed(model, seed=4) | {"model.layers.0.attention.weight": torch.ones(8, 8)}
    with TrainingSide(1, half_bytes=HALF) as side:
        receiving = asyncio.create_task(controls[0].receive(side.transfer(6), timeout_s=60))
        await side.sends(weights, 6)
        with pytest.raises(TransferFailed, match=r"loaded 1 tensors nowhere, as model\.layers\.0\.attention\.weight"):
            await receiving
    assert (await controls[0].model_info()).weight_version == f"{LOADING}6"


async def test_a_shape_that_the_model_does_not_have_fails_the_transfer_and_not_the_engine(
    controls: list[SGLangControl], model: Path
) -> None:
    weights = changed(model, seed=5)
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    with TrainingSide(1, half_bytes=HALF) as side:
        failed, told = await asyncio.gather(
            controls[0].receive(side.transfer(7), timeout_s=60),
            side.sends(weights | {name: weights[name].T.contiguous()}, 7),
            return_exceptions=True,
        )
    assert isinstance(failed, TransferFailed)
    assert "Failed to update parameter online" in str(failed)
    assert told is None or isinstance(told, TransferBroken)  # the engine leaves as soon as it sees that
    await from_disk(controls[0], weights, 8, model)


async def test_a_plan_that_cannot_be_followed_leaves_the_old_weights(
    controls: list[SGLangControl], model: Path
) -> None:
    weights = changed(model, seed=6)
    before = await from_disk(controls[0], weights, 9, model)
    with TrainingSide(1, half_bytes=HALF) as side:
        receiving = asyncio.create_task(controls[0].receive(side.transfer(10), timeout_s=60))
        plan = side.plan(weights, 10)
        side.host.put_plan(side.group, type(plan)(10, 0, plan.tensors, plan.buckets[:-1], False, plan.bucket_bytes))
        await asyncio.to_thread(side.join)
        with pytest.raises(EngineRefused, match="buckets have"):
            await receiving
    assert (await controls[0].model_info()).version == 9
    assert await served(controls[0], 9) == pytest.approx(before, abs=1e-5)


@pytest.mark.parametrize("backend", ["gloo", "shared"])
@pytest.mark.parametrize("count", [0, 1, -1])
async def test_an_engine_outlives_a_sender_that_ends_in_any_phase(
    controls: list[SGLangControl], model: Path, backend: str, count: int
) -> None:
    """Before the first bucket, between two, and before the last."""
    weights = changed(model, seed=7)
    await from_disk(controls[0], weights, 11, model)
    with pytest.raises(EngineRefused if count == 0 else TransferFailed):
        await broken_off(controls[0], backend, weights, count)
    assert (await controls[0].model_info()).weight_version == ("11" if count == 0 else f"{LOADING}12")
    with TrainingSide(1, backend=backend, half_bytes=HALF) as side:
        found, _ = await asyncio.gather(
            controls[0].receive(side.transfer(12, attempt=1), timeout_s=60), side.sends(weights, 12, attempt=1)
        )
    assert found == digests_of(weights)


async def broken_off(control: SGLangControl, backend: str, weights: Weights, count: int) -> None:
    """Receive of a sender that leaves after `count` buckets."""
    with TrainingSide(1, backend=backend, half_bytes=HALF) as side:
        receiving = asyncio.create_task(control.receive(side.transfer(12), timeout_s=8.0))
        if count == 0:
            side.host.put_plan(side.group, side.plan(weights, 12))
            await asyncio.to_thread(side.join)
        else:
            await asyncio.to_thread(side.send, side.plan(weights, 12), weights, count=count)
        await receiving


async def test_an_engine_needs_no_more_memory_than_a_bucket(
    controls: list[SGLangControl], engines: list[EngineServer], model: Path
) -> None:
    weights = changed(model, seed=8)
    total = sum(tensor.nbytes for tensor in weights.values())
    with TrainingSide(1, half_bytes=HALF) as side:
        before = peak(engines[0])
        await asyncio.gather(controls[0].receive(side.transfer(13), timeout_s=60), side.sends(weights, 13))
    assert total > 48 << 20
    assert peak(engines[0]) - before <= 2 * HALF + (4 << 20)


def peak(engine: EngineServer) -> int:
    """Largest resident memory so far of the engine's scheduler, in bytes."""
    (scheduler,) = [
        one for one in psutil.Process(engine.pid).children(recursive=True) if "scheduler" in " ".join(one.cmdline())
    ]
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{scheduler.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


async def test_a_sender_is_told_of_an_engine_that_hangs_and_of_one_that_is_killed(
    controls: list[SGLangControl], engines: list[EngineServer], model: Path
) -> None:
    """The last test of this file: it kills an engine."""
    big = changed(model, seed=9) | {"filler": torch.zeros(8 << 20)}  # more than the buffers of a connection hold
    family = [psutil.Process(engines[1].pid), *psutil.Process(engines[1].pid).children(recursive=True)]
    with TrainingSide(1, half_bytes=HALF) as side:
        receiving = asyncio.create_task(controls[1].receive(side.transfer(15), timeout_s=20))
        plan = side.plan(big, 15)
        side.host.put_plan(side.group, plan)
        await asyncio.to_thread(side.join)
        for process in family:
            process.send_signal(signal.SIGSTOP)
        side.timeout_s, began = 3.0, time.monotonic()
        with pytest.raises(TransferBroken, match="an engine in"):
            await asyncio.to_thread(side.send, plan, big)
        assert time.monotonic() - began < 60
        for process in family:
            process.kill()
        with pytest.raises(EngineDead):
            await receiving
