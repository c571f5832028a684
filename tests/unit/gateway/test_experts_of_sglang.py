"""Routed experts of a real SGLang on CPU, through the gateway, against transformers' router of the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import make_tiny_moe
from turnlog.infra.blobs import expert_rows
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.protocol import Generate, OutputChunk
from turnlog.infra.engines.sglang import SGLang
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import RewardAssigned, SegmentSample, Verifier
from turnlog.schemas.topics import TOPIC_OF
from turnlog.schemas.types import int32s
from turnlog.settings import EngineSettings, Settings

RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
pytestmark = pytest.mark.long  # the suite has rows of experts as an engine answers them (test_gateway_experts.py)
QUESTION = {"role": "user", "content": "3 + 5 = ?"}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3 mixture of experts."""
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def moe_url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an SGLang that serves it and returns routed experts."""
    settings = EngineSettings(extra_args=("--enable-return-routed-experts", "--weight-version", "0"))
    with EngineServer(model_folder, settings, log=tmp_path_factory.mktemp("engine") / "engine.log") as engine:
        yield engine.url


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """The rig's, with a gateway that insists on routed experts."""
    return dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, routed_experts="on"))


def chosen(folder: Path, ids: list[int]) -> list[list[set[int]]]:
    """The experts by position and layer that the router of transformers chooses."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    network: Any = Qwen3MoeForCausalLM
    model = network.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
    layers = [layer.topk(2, dim=-1).indices.tolist() for layer in logits]
    return [[set(layer[at]) for layer in layers] for at in range(len(ids))]


class Seen(SGLang):
    """The client, which remembers what it asked."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requests: list[Generate] = []

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        """See EngineServer."""
        self.requests.append(request)
        async for piece in super().generate(request, stream=stream, timeout_s=timeout_s):
            yield piece


@pytest.fixture
async def real(rig: Any, moe_url: str) -> Any:
    """The rig on the real engine alone."""
    rig.engines["e1"] = Seen(moe_url)
    await rig.engine_says("e0", state="gone")
    await rig.engine_says("e1")
    return rig


async def checked(rig: Any, session: Any, folder: Path) -> int:
    """How many samples the finished session has, after a look at every row of each."""
    await rig.finish(session)
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=b"{}",
        )
    )  # fmt: skip
    group, outputs = GroupFold("group-0", 0, RULES), []
    names = ("SessionStarted", "TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    for offset, event in enumerate(await rig.written(*names)):
        outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
    samples = [out for out in outputs if isinstance(out, SegmentSample)]
    for sample in samples:
        ids = int32s(sample.token_ids).tolist()
        rows = await expert_rows(sample, rig.blobs)
        assert [[set(layer) for layer in row] for row in rows.tolist()] == chosen(folder, ids)[:-1]
    return len(samples)


@pytest.mark.engine
async def test_the_rows_of_a_session_are_those_that_the_models_router_chooses(real: Any, model_folder: Path) -> None:
    session = await real.open(group_size=1)
    messages: list[Any] = [QUESTION]
    for stream in (False, True, False):
        answer = await real.chat(session, messages, max_tokens=6, stream=stream)
        assert answer.status_code == 200, answer.text
        said = (await real.describe(session))["messages"][-1]
        messages += [said, {"role": "user", "content": "and then?"}]
    await real.chat(session, [*messages[:2], {"role": "user", "content": "or else?"}], max_tokens=6)
    assert await checked(real, session, model_folder) == 2


@pytest.mark.engine
async def test_the_rows_of_a_turn_that_the_engine_aborted_are_stitched(real: Any, model_folder: Path) -> None:
    engine = real.engines["e1"]
    session = await real.open(group_size=1, sampling={"temperature": 1.0, "max_new_tokens": 300})
    for attempt in range(8):  # a natural stop may win the race
        engine.requests.clear()
        body = {"messages": [{"role": "user", "content": f"count from {attempt}"}], "stream": True}
        headers = {"authorization": f"Bearer {session['token']}"}
        async with real.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if '"content":"' in line and '"content":""' not in line:
                    await engine.abort(engine.requests[-1].rid)
                    break
            async for _ in lines:
                pass
        if len(engine.requests) > 1:
            break
    first, second = engine.requests[:2]
    assert second.experts_from == len(second.input_ids) - 1 > first.experts_from
    assert await checked(real, session, model_folder) == attempt + 1
