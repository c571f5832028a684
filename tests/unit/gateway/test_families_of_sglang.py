"""A real SGLang on CPU that serves each model family, against transformers with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs import each_family
from tests.reference.served import check_logprobs, connected, publish, sample, samples, send, weights_of, write_model
from turnlog.infra.embedded.servers import EngineServer
from turnlog.settings import EngineSettings
from turnlog.trainer.families.shape import ModelShape

pytestmark = pytest.mark.long  # the suite has the models against transformers (test_models.py and its neighbours)
PROMPTS = [list(range(20, 20 + length)) for length in (3, 1, 90)]


@pytest.mark.engine
@pytest.mark.timeout(1200)  # an engine starts in 20 s, and in many minutes where others are at work
@each_family("served on CPU", apart=True)
async def test_log_probs_are_those_of_transformers_also_with_the_next_weights(
    tmp_path: Path, shape: ModelShape
) -> None:
    state = weights_of(shape, 1)
    model = write_model(tmp_path / "model", shape, state)
    routed = ("--enable-return-routed-experts",) if shape.mixture else ()
    settings = EngineSettings(extra_args=("--weight-version", "0", *routed), start_timeout_s=900.0)
    with EngineServer(model, settings, log=tmp_path / "engine.log") as server:
        async with connected(server.url) as engine:
            check_logprobs(shape, state, await samples(engine, PROMPTS), within=1e-4)
            if shape.mixture:
                one = await sample(engine, [7, *PROMPTS[2]], experts=True)
                assert one.experts is not None
                check_logprobs(shape, state, [one], within=1e-4)
            for number, give in ((1, publish), (2, send)):  # by the store, and from the training ranks
                state = weights_of(shape, 1 + number)
                await give(server.url, model, state, number)
                check_logprobs(shape, state, await samples(engine, PROMPTS), within=1e-4)
