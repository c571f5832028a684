"""A real SGLang on CPU that serves mixtures with sigmoid routing, against transformers with the same weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes.batches import synthetic_rows
from tests.reference.layouts import weights_of
from tests.reference.plain import PlainLearner
from tests.reference.small_models import LATENT, SIGMOID
from tests.tiny_model import tiny_tokenizer
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engine import Generate, SGLang
from turnlog.settings import EngineSettings
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.models.experts import attach_experts
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.weights import write_folder

pytestmark = pytest.mark.long  # the suite has the models against transformers (test_deepseek_mixtures.py)
PROMPT, OUTPUT = 40, 16


@pytest.mark.engine
@pytest.mark.parametrize("shape", [SIGMOID, LATENT], ids=lambda shape: shape.kind)
async def test_log_probs_are_those_of_transformers_also_on_the_recorded_experts(
    tmp_path: Path, shape: ModelShape
) -> None:
    state, folder = weights_of(shape, 1), tmp_path / "model"
    tiny_tokenizer().save_pretrained(folder)
    write_folder(folder, shape, state, folder)
    prompt = np.random.default_rng(0).integers(5, shape.vocabulary, PROMPT).tolist()
    settings = EngineSettings(extra_args=("--enable-return-routed-experts",))
    with EngineServer(folder, settings, log=tmp_path / "engine.log") as server:
        request = Generate(rid="0" * 32, input_ids=prompt, temperature=1.0, max_new_tokens=OUTPUT, experts_from=0)
        engine = SGLang(server.url)
        (piece,) = [piece async for piece in engine.generate(request, stream=False, timeout_s=300.0)]
        await engine.close()
    length = PROMPT + len(piece.ids)
    rows = dataclasses.replace(
        synthetic_rows(0, rows=1, lengths=np.array([length], "<i4")),
        token_ids=np.array([*prompt, *piece.ids], "<i4"),
        temperature=np.ones(1, "<f4"),
    )
    assert piece.experts is not None
    recorded = np.zeros((length, shape.layers, shape.experts_per_token), np.int32)
    recorded[:-1] = np.frombuffer(piece.experts, "<i4").reshape(length - 1, *recorded.shape[1:])
    assert not recorded[:, 0].any()  # the first layer is dense
    plain = PlainLearner(shape, state, LearnerOptions())
    with torch.no_grad():
        for each in (rows, attach_experts(rows, recorded, shape)):
            found = plain.logprobs(each, 0)[PROMPT - 1 :]
            torch.testing.assert_close(found, torch.tensor(piece.logprobs), rtol=0, atol=1e-5)
