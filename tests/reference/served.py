"""Tiny random models for a real SGLang: their folders, samples of them, and new weights for a running engine."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.fakes.batches import synthetic_rows
from tests.fakes.weights import version
from tests.reference.parity import loaded_model, nontrivial_weights
from tests.reference.plain import PlainLearner
from tests.tiny_model import tiny_tokenizer
from tests.training_side import TrainingSide, digests_of
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.engines.protocol import Generate
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.tensors.fits import check_fits, model_shapes
from turnlog.infra.tensors.versions import Timer, WeightFolders
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.export import export_weights
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.models.experts import attach_experts
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.weights import Tensors, write_folder

OUTPUT = 8
"""Tokens of each sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer of an engine."""

    ids: list[int]
    """Prompt and output."""
    logprobs: list[float]
    """Of the output."""
    experts: bytes | None


def weights_of(shape: ModelShape, seed: int) -> Tensors:
    """Return random weights large enough that the output varies with the input. Sinks are exact in bfloat16, in which
    SGLang holds them."""
    return {
        name: (4.0 * tensor if tensor.dim() > 1 else tensor).bfloat16().float()
        for name, tensor in nontrivial_weights(shape, seed).items()
    }


def write_model(folder: Path, shape: ModelShape, state: Tensors) -> Path:
    """Write a model and its tokenizer into `folder`."""
    tiny_tokenizer().save_pretrained(folder)
    write_folder(folder, shape, state, folder)
    return folder


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[SGLang]:
    """Yield a client of the engine at `url`."""
    engine = SGLang(url)
    try:
        yield engine
    finally:
        await engine.close()


async def sample(engine: SGLang, ids: Sequence[int], *, experts: bool = False) -> Sample:
    """Sample OUTPUT tokens behind `ids`; `experts`: with the routed experts of all positions."""
    request = Generate(
        rid=uuid.uuid4().hex, input_ids=ids, temperature=1.0, max_new_tokens=OUTPUT, cache_key="k",
        experts_from=0 if experts else None,
    )  # fmt: skip
    (piece,) = [piece async for piece in engine.generate(request, stream=False, timeout_s=240)]
    return Sample([*ids, *piece.ids], piece.logprobs, piece.experts)


async def samples(engine: SGLang, prompts: Sequence[Sequence[int]]) -> list[Sample]:
    """Sample behind all prompts at once, then behind each of these once more, where the engine has a cache."""
    first = await asyncio.gather(*(sample(engine, prompt) for prompt in prompts))
    return [*first, *await asyncio.gather(*(sample(engine, one.ids) for one in first))]


def check_logprobs(shape: ModelShape, state: Tensors, found: Sequence[Sample], *, within: float) -> None:
    """Check that the log-probs of samples are those of transformers with these weights, on recorded experts where a
    sample has some."""
    plain = PlainLearner(shape, state, LearnerOptions())
    for one in found:
        with torch.no_grad():
            wanted = plain.logprobs(_row(shape, one), 0)[-len(one.logprobs) :]
        np.testing.assert_allclose(one.logprobs, wanted, rtol=0, atol=within)


def _row(shape: ModelShape, one: Sample) -> BatchRows:
    length = len(one.ids)
    row = dataclasses.replace(
        synthetic_rows(0, rows=1, lengths=np.array([length], "<i4")),
        token_ids=np.array(one.ids, "<i4"),
        temperature=np.ones(1, "<f4"),
    )
    if one.experts is None:
        return row
    recorded = np.zeros((length, shape.layers, shape.experts_per_token), np.int32)
    recorded[:-1] = np.frombuffer(one.experts, "<i4").reshape(length - 1, *recorded.shape[1:])
    assert not any(recorded[:, layer].any() for layer in range(shape.layers) if not shape.is_mixture(layer))
    return attach_experts(row, recorded, shape)


def exported_by_trainer(model: Path, state: Tensors) -> Tensors:
    """Load weights into the trainer's model, and return what it exports."""
    from turnlog.trainer.families.family import read_shape
    from turnlog.trainer.launch import process_group

    shape = read_shape(model)
    with process_group():
        return export_weights(loaded_model(shape, state, LearnerOptions()), shape)


async def publish(url: str, model: Path, state: Tensors, number: int) -> None:
    """Publish weights that the trainer exports as version `number`, and load that into a running engine as a weight
    loader does."""
    blobs = MemoryBlobs()
    event = await version(exported_by_trainer(model, state), number, blobs, model)
    check_fits(event, model_shapes(model))
    held = await WeightFolders(model / "versions", blobs).obtain_folder([event], Timer())
    control = SGLangControl(url)
    try:
        await control.pause()
        await control.load(held.path, number, timeout_s=120)
        await control.resume()
        assert (await control.model_info()).version == number
    finally:
        await control.close()
        held.release()


async def send(url: str, model: Path, state: Tensors, number: int) -> None:
    """Send the same to the engine directly, as version `number`, in buckets of a few tensors."""
    weights = exported_by_trainer(model, state)
    control = SGLangControl(url)
    try:
        await control.pause()
        with TrainingSide(1, half_bytes=64 << 10) as side:
            found, _ = await asyncio.gather(
                control.receive(side.transfer(number), timeout_s=120), side.sends(weights, number)
            )
        assert found == digests_of(weights)
        await control.label(str(number))
        await control.resume()
    finally:
        await control.close()
