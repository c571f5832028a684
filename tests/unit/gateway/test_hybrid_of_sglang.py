"""A real SGLang with gated delta nets, on CPU: its log-probs are those of the trainer, whatever its cache holds."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.batches import synthetic_rows
from tests.tiny_model import make_tiny_hybrid
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engine import Generate, SGLang
from turnlog.settings import EngineSettings

pytestmark = pytest.mark.long
PROMPTS = [list(range(20, 20 + length)) for length in (3, 1, 90)]


async def sampled(engine: SGLang, ids: list[int]) -> tuple[list[int], list[float]]:
    """Eight tokens behind `ids`, and their log-probs by the engine."""
    request = Generate(rid=uuid.uuid4().hex, input_ids=ids, temperature=1.0, max_new_tokens=8, cache_key="k")
    (piece,) = [piece async for piece in engine.generate(request, stream=False, timeout_s=240)]
    return piece.ids, piece.logprobs


async def conversations(url: str) -> list[tuple[list[int], list[float]]]:
    """Sample behind all prompts at once, then behind each of these once more."""
    engine = SGLang(url)
    first = await asyncio.gather(*(sampled(engine, prompt) for prompt in PROMPTS))
    more = [[*prompt, *ids] for prompt, (ids, _) in zip(PROMPTS, first, strict=True)]
    second = await asyncio.gather(*(sampled(engine, ids) for ids in more))
    await engine.close()
    found = zip([*PROMPTS, *more], [*first, *second], strict=True)
    return [([*prompt, *ids], logprobs) for prompt, (ids, logprobs) in found]


@pytest.mark.engine
async def test_log_probs_of_an_engine_are_those_of_the_trainer(tmp_path: Path) -> None:
    from turnlog.trainer.families.family import read_shape
    from turnlog.trainer.launch import process_group
    from turnlog.trainer.learner import Learner
    from turnlog.trainer.plan import LearnerOptions
    from turnlog.trainer.weights import read_weights

    folder = make_tiny_hybrid(tmp_path / "model")
    with EngineServer(folder, EngineSettings(extra_args=("--weight-version", "0")), log=tmp_path / "engine.log") as one:
        found = await conversations(one.url)
    lengths = np.array([len(ids) for ids, _ in found], "<i4")
    rows = synthetic_rows(0, rows=len(found), group_size=1, lengths=lengths)
    token_ids, trained = rows.token_ids.copy(), np.zeros_like(rows.trained)
    for (ids, logprobs), start in zip(found, rows.starts.tolist(), strict=True):
        token_ids[start : start + len(ids)] = ids
        trained[start + len(ids) - len(logprobs) : start + len(ids)] = 1
    rows.token_ids[:], rows.trained[:], rows.temperature[:] = token_ids, trained, 1.0
    with process_group():
        wanted = Learner(read_shape(folder), read_weights(folder), LearnerOptions()).logprobs(rows)
    np.testing.assert_allclose(np.concatenate([logprobs for _, logprobs in found]), wanted[trained == 1], atol=1e-3)
