"""The weight loader against a real SGLang, log and store: what it loads is what the trainer exported."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest
import torch

from tests.fakes.batches import synthetic_rows
from tests.fakes.weights import Publications, upload, version
from turnlog.consumers.loader import EngineSwapFailed
from turnlog.consumers.loader.role import main
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.protocol import Adapter, Generate, OutputChunk
from turnlog.infra.engines.sglang import SGLang
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.tensors.served import ServedNote
from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
)
from turnlog.schemas.events.weights import WeightFile
from turnlog.schemas.topics import ENGINES
from turnlog.settings import EngineSettings, LoaderSettings, Settings
from turnlog.trainer.export import ExportedWeights
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.plan import LearnerOptions, imitation
from turnlog.trainer.weight_records import version_event
from turnlog.trainer.weights import read_weights

pytestmark = [pytest.mark.kafka, pytest.mark.engine]
PROMPT = [5, 6, 7, 8, 9]
SCORE = """
import json, sys
import numpy as np
from pathlib import Path
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.plan import PolicyGradient
from turnlog.trainer.weights import read_weights
from turnlog.trainer.launch import process_group
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.warm_start import demonstration_rows
import dataclasses
if __name__ == "__main__":
    folder, prompt, answers = json.load(sys.stdin)
    with process_group():
        for weights, output, logprobs, temperature in answers:
            mask = [0] * len(prompt) + [1] * len(output)
            rows = demonstration_rows([(prompt + output, mask)])
            recorded = np.array([0.0] * len(prompt) + logprobs, "<f4")
            rows = dataclasses.replace(rows, logprobs=recorded, temperature=np.array([temperature], "<f4"))
            learner = Learner(read_shape(Path(folder)), read_weights(Path(weights)), LearnerOptions())
            print(learner.measure(rows, PolicyGradient(0.2, 0.2)).logprob_gap_max)
"""


def loader_settings(settings: Settings, model: Path, url: str) -> Settings:
    """Of one who is asked for every report, which an engine that is starved here for a while would add to."""
    return dataclasses.replace(
        settings,
        engine=dataclasses.replace(settings.engine, urls=(url,)),
        model=dataclasses.replace(settings.model, path=str(model)),
        loader=dataclasses.replace(settings.loader, silent_s=25.0),
    )


@pytest.fixture
async def role(live_settings: Settings, tiny_model: Path, engine_url: str) -> AsyncIterator[Role]:
    async with open_role("loader", loader_settings(live_settings, tiny_model, engine_url)) as role:
        yield role


async def publish(role: Role, number: int, *, factor: float, truncated: bool = False) -> None:
    """The engine's own weights with matrices times `factor`, as version `number`."""
    model = Path(role.settings.model.path)
    tensors = {
        name: tensor.float() * (factor if tensor.dim() > 1 else 1.0) for name, tensor in read_weights(model).items()
    }
    event = await version(tensors, number, role.blobs, model, run_id=role.settings.run.id)
    if truncated:
        content = await role.blobs.get(next(file.blob for file in event.files if file.name == "model.safetensors"))
        short = WeightFile("model.safetensors", await role.blobs.put(content[:-100]))
        event = dataclasses.replace(event, files=(short,))
    await role.events.append(event)


async def greedy(url: str) -> tuple[list[float], str]:
    """(log-probs, weight version) of the likeliest answer."""
    _, logprobs, label = await generate(url, 0.0)
    return logprobs, label


async def test_what_sglang_would_call_a_success_is_refused_by_name_and_the_old_weights_serve(
    role: Role, engine_url: str
) -> None:
    """A missing tensor, another shape, another architecture, and a version whose files are not what it says."""
    model, run = Path(role.settings.model.path), role.settings.run.id
    loader = asyncio.create_task(main(role))
    (registered,) = await said(role, 1, loader)
    first = 1000 + registered.version
    await publish(role, first, factor=1.0)
    await said(role, 2, loader)
    before = await greedy(engine_url)
    weights = {name: tensor.float() for name, tensor in read_weights(model).items()}
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    bad = [
        {key: tensor for key, tensor in weights.items() if key != name},
        {**weights, name: weights[name].T.contiguous()},
        {key.replace("self_attn", "attention"): tensor for key, tensor in weights.items()},
    ]
    events = [
        await version(tensors, number, role.blobs, model, run_id=run)
        for number, tensors in enumerate([*bad, weights], start=first + 1)
    ]
    events[3] = dataclasses.replace(events[3], files=events[0].files)
    for count, event in enumerate(events, start=3):
        await role.events.append(event)
        refused = (await said(role, count, loader))[-1]
        assert isinstance(refused, EngineWeightsRefused)
        assert (refused.version, refused.refused_version) == (first, event.version)
        assert refused.cause == ("ShapeMismatch" if count == 4 else "TensorsMismatch")
    assert await greedy(engine_url) == (pytest.approx(before[0], abs=1e-4), str(first))
    role.stopping.set()
    await loader


@pytest.mark.proves("served on CPU", "qwen3")
async def test_an_engine_serves_the_whole_of_what_was_published_as_what_changed(
    role: Role, engine_url: str, tmp_path: Path
) -> None:
    model = Path(role.settings.model.path)
    trainer = Publications(role.blobs, model, tmp_path / "exports", chain=4, run_id=role.settings.run.id)
    loader = asyncio.create_task(main(role))
    (registered,) = await said(role, 1, loader)
    first = 1000 + registered.version
    weights = {name: tensor.float() for name, tensor in read_weights(model).items()}
    await role.events.append(await trainer.version(weights, first))
    await said(role, 2, loader)
    before = await greedy(engine_url)
    changed = {name: tensor * (1.5 if tensor.dim() > 1 else 1.0) for name, tensor in weights.items()}
    delta = await trainer.version(changed, first + 1)
    assert (delta.kind, delta.base_version) == ("delta", first)
    await role.events.append(delta)
    assert isinstance((await said(role, 3, loader))[2], EngineWeightsLoaded)
    (folder,) = (Path(role.settings.run.directory) / "weights").glob(f"{first + 1}-*")
    assert all(torch.equal(tensor, changed[name]) for name, tensor in read_weights(folder).items())
    logprobs, label = await greedy(engine_url)
    assert label == str(first + 1)
    assert logprobs != pytest.approx(before[0], abs=1e-2)
    role.stopping.set()
    await loader


@pytest.mark.long
async def test_an_engine_that_starts_again_has_what_it_served_and_says_so(
    role: Role, engine_url: str, tmp_path: Path
) -> None:
    """It is another process, for the one before serves other tests, too. The suite has the note and the engine in
    memory (test_served_note.py)."""
    run, model = role.settings.run, Path(role.settings.model.path)
    loader = asyncio.create_task(main(role))
    (registered,) = await said(role, 1, loader)
    first = 1000 + registered.version
    await publish(role, first, factor=1.5)
    await said(role, 2, loader)
    before = await greedy(engine_url)
    role.stopping.set()
    await loader
    role.stopping.clear()
    note = ServedNote.of(run.directory, run.id, "engine-0")
    with EngineServer(model, EngineSettings(), log=tmp_path / "again.log", served=note) as again:
        assert await greedy(again.url) == (pytest.approx(before[0], abs=1e-4), str(first))
        role.settings = dataclasses.replace(role.settings, engine=EngineSettings(urls=(again.url,)))
        loader = asyncio.create_task(main(role))
        back = (await said(role, 3, loader))[2]
        assert isinstance(back, EngineRegistered)
        assert (back.version, back.state, back.url) == (first, "serving", again.url)
        await publish(role, first + 1, factor=1.0)
        loaded = (await said(role, 4, loader))[3]
        assert isinstance(loaded, EngineWeightsLoaded)
        logprobs, label = await greedy(again.url)
        assert label == str(first + 1)
        assert logprobs != pytest.approx(before[0], abs=1e-2)
        role.stopping.set()
        await loader


async def said(role: Role, count: int, loader: asyncio.Task[None] | None = None) -> list[Event]:
    """The first `count` events of engine-status. Raises what the loader died of, if it did."""
    events: list[Event] = []
    async with asyncio.timeout(60), role.log.reader() as reader:
        reader.assign({Partition(ENGINES.name, 0): 0})
        while len(events) < count:
            if loader is not None and loader.done():
                loader.result()
            events += [await role.events.decode(record) for record in await reader.poll()]
    return events


async def generate(url: str, temperature: float) -> tuple[list[int], list[float], str]:
    """(output ids, log-probs, weight version) of one sampled answer."""
    sampling = {"temperature": temperature, "max_new_tokens": 12, "ignore_eos": True}
    body = {"rid": uuid4().hex, "input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling}
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        meta = (await http.post(f"{url}/generate", json=body)).json()["meta_info"]
    triples = meta["output_token_logprobs"]
    return [one[1] for one in triples], [one[0] for one in triples], meta["weight_version"]


async def gaps(role: Role, answers: list[tuple[Path, list[int], list[float], float]]) -> list[float]:
    """Return max |trainer - engine| over the output tokens of each answer (weights, output, log-probs, temperature), by
    the trainer's own step code in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", SCORE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    request = [role.settings.model.path, PROMPT, [(str(weights), *answer) for weights, *answer in answers]]
    found, _ = await process.communicate(json.dumps(request).encode())
    return [float(line) for line in found.split()]


async def test_loads_under_load_refuses_a_truncated_file_and_keeps_serving(role: Role, engine_url: str) -> None:
    loader = asyncio.create_task(main(role))
    (registered,) = await said(role, 1, loader)
    assert isinstance(registered, EngineRegistered)
    first = 1000 + registered.version
    busy = [asyncio.create_task(generate(engine_url, 1.0)) for _ in range(8)]
    await publish(role, first, factor=1.5)
    loaded = (await said(role, 2, loader))[1]
    assert isinstance(loaded, EngineWeightsLoaded)
    assert (loaded.version, loaded.state) == (first, "serving")
    assert all(len(output) == 12 for output, _, _ in await asyncio.gather(*busy))

    (folder,) = (Path(role.settings.run.directory) / "weights").glob(f"{first}-*")
    answers = []
    for temperature in (1.0, 0.7):
        output, logprobs, version = await generate(engine_url, temperature)
        assert version == str(first)
        answers.append((folder, output, logprobs, temperature))
    found = await gaps(role, answers)
    assert len(found) == 2
    assert max(found) < 1e-4

    await publish(role, first + 1, factor=2.0, truncated=True)
    refused = (await said(role, 3, loader))[2]
    assert isinstance(refused, EngineWeightsRefused)
    assert (refused.cause, refused.version, refused.refused_version) == ("TruncatedSafetensors", first, first + 1)
    assert (await generate(engine_url, 1.0))[2] == str(first)

    await publish(role, first + 2, factor=1.0)
    again = (await said(role, 4, loader))[3]
    assert isinstance(again, EngineWeightsLoaded)
    assert again.version == first + 2
    role.stopping.set()
    await loader


@pytest.fixture
async def adapting(live_settings: Settings, tiny_model: Path, lora_engine_url: str) -> AsyncIterator[Role]:
    """The role's engine takes adapters."""
    settings = loader_settings(live_settings, tiny_model, lora_engine_url)
    trainer = dataclasses.replace(settings.trainer, publish="adapter", lora_rank=4)
    async with open_role("loader", dataclasses.replace(settings, trainer=trainer)) as role:
        yield role


async def export(
    role: Role, learner: Learner, folder: Path, number: int, of: ExportedWeights, adapts: int | None = None
) -> None:
    """What the learner holds goes out as version `number`; beside it lies what engines would serve of it whole."""
    for what in {of, "merged"}:
        (folder / f"{what}-{number}").mkdir()
        written = learner.export_files(folder / f"{what}-{number}", what)
        assert written is not None
        if what == of:
            model, cursor = Path(role.settings.model.path), Cursor(next_batch=number, step=number)
            files = await upload(folder / f"{of}-{number}", written.sha256, model, role.blobs)
            event = version_event(
                written, files, run_id=role.settings.run.id, version=number, incarnation=0, cursor=cursor,
                checkpoint=None, adapts=adapts,
            )  # fmt: skip
            await role.events.append(event)


@pytest.mark.long  # the suite has adapters of a trainer on a real engine, with equal log-probs, in test_tinker.py
async def test_each_adapter_is_served_under_its_own_name_with_the_log_probs_of_the_whole_model(
    adapting: Role, tmp_path: Path
) -> None:
    role, model = adapting, Path(adapting.settings.model.path)
    engine = SGLang(role.settings.engine.urls[0])
    loader = asyncio.create_task(main(role))
    (registered,) = await said(role, 1, loader)
    base = 1000 + registered.version
    with process_group():
        learner = Learner(read_shape(model), read_weights(model), LearnerOptions(lora_rank=4, lora_alpha=8.0))
        await export(role, learner, tmp_path, base, "base")
        loaded = [(await said(role, 2, loader))[1]]
        greedily = [(await adapted(engine, None, 0.0)).logprobs]
        answers = []
        for seed in (1, 2):
            learner.step(synthetic_rows(seed), imitation, 1e-2)
            await export(role, learner, tmp_path, base + seed, "adapter", adapts=base)
            loaded.append((await said(role, 2 + seed, loader))[1 + seed])
            name = Adapter(str(base + seed), str(base))
            greedily.append((await adapted(engine, name, 0.0)).logprobs)
            answer = await adapted(engine, name, 1.0)
            assert answer.versions == ((name.name, len(answer.ids)),)
            answers.append((tmp_path / f"merged-{base + seed}", answer.ids, answer.logprobs, 1.0))
    found = await gaps(role, answers)
    assert len(found) == 2
    assert max(found) < 1e-4
    assert [(type(one), one.version, one.base_version) for one in loaded] == [
        (EngineWeightsLoaded, base, None),
        *((EngineWeightsLoaded, base + seed, base) for seed in (1, 2)),
    ]
    for one, other in itertools.combinations(greedily, 2):
        assert one != pytest.approx(other, abs=1e-2)
    role.stopping.set()
    await loader
    await engine.close()


async def adapted(engine: SGLang, adapter: Adapter | None, temperature: float) -> OutputChunk:
    request = Generate(rid=uuid4().hex, input_ids=PROMPT, temperature=temperature, max_new_tokens=12, adapter=adapter)
    (answer,) = [piece async for piece in engine.generate(request, stream=False, timeout_s=60)]
    return answer


@pytest.fixture
def struck(role: Role, tiny_model: Path, tmp_path: Path) -> Iterator[EngineServer]:
    """The role's engine, which nobody else needs."""
    with EngineServer(tiny_model, EngineSettings(), log=tmp_path / "engine.log") as engine:
        urls = dataclasses.replace(role.settings.engine, urls=(engine.url,))
        role.settings = dataclasses.replace(role.settings, engine=urls, loader=LoaderSettings())
        yield engine


def family(engine: EngineServer) -> list[psutil.Process]:
    leader = psutil.Process(engine.pid)
    return [leader, *leader.children(recursive=True)]


@pytest.mark.long
async def test_a_silent_engine_takes_no_turns_and_then_is_said_to_be_gone(role: Role, struck: EngineServer) -> None:
    loader = asyncio.create_task(main(role))
    await said(role, 1, loader)
    for process in family(struck):
        process.suspend()
    with pytest.raises(EngineSwapFailed):
        await loader
    silent, gone = (await said(role, 3))[1:]
    assert isinstance(silent, EngineDraining)
    assert (silent.state, silent.version) == ("silent", -1)
    assert isinstance(gone, EngineGone)
    assert "is silent" in gone.cause
