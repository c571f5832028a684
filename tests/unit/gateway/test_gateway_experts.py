"""Routed experts through the gateway: each turn's own rows in the store, all rows of every segment after the fold."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_engine import experts_of
from turnlog.infra.blobs import expert_rows
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.producers.gateway.expert_rows import NoRouting, routing_of
from turnlog.schemas.events import RewardAssigned, SegmentSample, Verifier
from turnlog.schemas.topics import TOPIC_OF
from turnlog.schemas.types import int32s
from turnlog.settings import Settings

ROUTING = (2, 3, 8)
"""Layers, experts per token, experts."""
RULES = FoldRules(run_id="r", settings_sha256="s" * 64, min_valid=1)
QUESTION = {"role": "user", "content": "3 + 5 = ?"}


@pytest.fixture
def settings(settings: Settings, model_folder: Path, tmp_path: Path) -> Settings:
    """The rig's, with a mixture of experts as its model."""
    folder = tmp_path / "moe"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    layers, top_k, experts = ROUTING
    config |= {"num_hidden_layers": layers, "num_experts_per_tok": top_k, "num_experts": experts}
    (folder / "config.json").write_text(json.dumps(config))
    return dataclasses.replace(settings, model=dataclasses.replace(settings.model, path=str(folder)))


@pytest.fixture
def routed(rig: Any) -> Any:
    """The rig, whose engine returns routed experts."""
    rig.engines["e0"].routing = ROUTING
    return rig


async def said(rig: Any, session: Any, messages: Any, **more: Any) -> Any:
    """The message that a request is answered with."""
    answer = await rig.chat(session, messages, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def samples(rig: Any, session: Any) -> list[SegmentSample]:
    """The session finished, rewarded and folded."""
    await rig.finish(session)
    await rig.events.append(
        RewardAssigned(
            event_id="reward", run_id="r", group_id="group-0", session_id=session["session_id"], floor=0, value=1.0,
            components={}, verifier=Verifier("exact", "1"), evidence=b"{}",
        )
    )  # fmt: skip
    names = ("SessionStarted", "SessionAdopted", "TurnCompleted", "TokenSnapshot", "SessionFinished", "RewardAssigned")
    group, outputs = GroupFold("group-0", 0, RULES), []
    for offset, event in enumerate(await rig.written(*names)):
        outputs += group.apply(TOPIC_OF[type(event).__name__].name, offset, event)
    return [out for out in outputs if isinstance(out, SegmentSample)]


async def right(rig: Any, sample: SegmentSample) -> bool:
    """Whether a sample's rows are those that the engine computed for its tokens."""
    ids = int32s(sample.token_ids).tolist()
    rows = await expert_rows(sample, rig.blobs)
    wanted = [int32s(experts_of(ids[: at + 1], *ROUTING)).reshape(2, 3).tolist() for at in range(len(ids) - 1)]
    return rows.tolist() == wanted


async def test_a_session_that_appends_branches_and_is_compacted_has_every_row_once(routed: Any) -> None:
    session = await routed.open(group_size=1)
    messages = [QUESTION, await said(routed, session, [QUESTION]), {"role": "user", "content": "and 4?"}]
    await said(routed, session, messages)
    await said(routed, session, [*messages[:2], {"role": "user", "content": "and 5?"}])
    await said(routed, session, [{"role": "user", "content": "compacted"}])
    snapshots = await routed.written("TokenSnapshot")
    for snapshot, request in zip(snapshots, routed.engines["e0"].requests, strict=True):
        length = len(request.input_ids) + len(int32s(snapshot.output_ids))
        assert request.experts_from == max(snapshot.base_len - 1, 0)
        assert snapshot.experts_layout.rows == length - 1 - request.experts_from
        assert (snapshot.experts_layout.dtype, snapshot.experts.media_type) == ("uint8", "application/x-npy")
    found = await samples(routed, session)
    assert len(found) == 3
    assert [await right(routed, sample) for sample in found] == [True] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_weight_updates_cut_is_stitched(routed: Any, stream: bool) -> None:
    engine = routed.engines["e0"]
    session = await routed.open(group_size=1)
    routed.script.says("12345")
    routed.script.says("67")
    engine.holds_after = 3
    ask = asyncio.create_task(routed.chat(session, [QUESTION], stream=stream))
    await engine.reached.wait()
    engine.holds_after, engine.version = None, "1"
    engine.abort_all()
    assert (await ask).status_code == 200
    (snapshot,) = await routed.written("TokenSnapshot")
    assert [(span.version, span.length) for span in snapshot.version_spans] == [(0, 3), (1, 3)]
    first, second = engine.requests
    assert (first.experts_from, second.experts_from) == (0, len(second.input_ids) - 1)
    assert await right(routed, (await samples(routed, session))[0])


async def test_what_a_dead_engine_did_not_give_the_next_one_gives(routed: Any) -> None:
    routed.engines["e1"] = routed.new_engine("http://e1")
    routed.engines["e1"].routing = ROUTING
    await routed.engine_says("e1")
    session = await routed.open(group_size=1)
    routed.script.says("12345")
    routed.script.says("67")
    for engine in routed.engines.values():
        engine.holds_after = 3
    ask = asyncio.create_task(routed.chat(session, [QUESTION], stream=True))
    waits = {name: asyncio.create_task(engine.reached.wait()) for name, engine in routed.engines.items()}
    await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
    chosen = next(name for name, wait in waits.items() if wait.done())
    other = routed.engines["e1" if chosen == "e0" else "e0"]
    other.holds_after = None
    routed.engines[chosen].kill()
    assert (await ask).status_code == 200
    assert other.requests[0].experts_from == 0
    assert await right(routed, (await samples(routed, session))[0])
    for wait in waits.values():
        wait.cancel()


async def test_a_turn_whose_rows_are_missing_leaves_no_gap_in_those_after_it(routed: Any) -> None:
    engine = routed.engines["e0"]
    session = await routed.open(group_size=1)
    first = await said(routed, session, [QUESTION])
    messages = [QUESTION, first, {"role": "user", "content": "go on"}]
    engine.routing = None
    await said(routed, session, messages)
    engine.routing = ROUTING
    await said(routed, session, messages)  # the same prompt again, of which the turn before has the tokens
    a, b, c = await routed.written("TokenSnapshot")
    assert [each.experts is not None for each in (a, b, c)] == [True, False, True]
    assert b.parent_turn == c.parent_turn == a.turn
    by_output = {sample.spans[-1].turn.index: sample for sample in await samples(routed, session)}
    assert await right(routed, by_output[2])


async def test_an_engine_that_returns_none_is_accepted_by_auto_and_refused_by_on(rig: Any) -> None:
    session = await rig.open(group_size=1)
    await said(rig, session, [QUESTION])
    (snapshot,) = await rig.written("TokenSnapshot")
    assert (snapshot.experts, snapshot.experts_layout) == (None, None)
    gateway = dataclasses.replace(rig.settings.gateway, routed_experts="on")
    rig.settings = dataclasses.replace(rig.settings, gateway=gateway)
    await rig.start("gateway-on")
    answer = await rig.chat(await rig.open("other"), [QUESTION])
    assert answer.status_code == 502
    assert "--enable-return-routed-experts" in answer.json()["error"]["message"]


async def test_rows_of_another_model_are_refused(routed: Any) -> None:
    routed.engines["e0"].routing = (4, 2, 8)
    answer = await routed.chat(await routed.open(), [QUESTION])
    assert answer.status_code == 502
    assert "2 layers x 3" in answer.json()["error"]["message"]


async def test_a_gateway_that_takes_over_asks_for_its_own_rows_alone(routed: Any) -> None:
    session = await routed.open(group_size=1)
    messages = [QUESTION, await said(routed, session, [QUESTION]), {"role": "user", "content": "and 4?"}]
    await routed.start("gateway-1")
    await said(routed, session, messages)
    a, b = await routed.written("TokenSnapshot")
    assert (b.parent_turn, routed.engines["e0"].requests[1].experts_from) == (a.turn, b.base_len - 1)
    (sample,) = await samples(routed, session)
    assert await right(routed, sample)


def test_the_routing_is_read_from_the_configurations_of_several_families() -> None:
    qwen = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
    deepseek = {"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8}
    mixtral = {"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}
    dense = {"num_hidden_layers": 28}
    shapes = []
    for config in (qwen, deepseek, mixtral, {"text_config": qwen}):
        routing = routing_of(config, "auto", "auto")
        assert routing is not None
        shapes.append((routing.layers, routing.top_k, routing.required))
    assert shapes == [(48, 8, False), (61, 8, False), (32, 2, False), (48, 8, False)]
    assert routing_of(dense, "auto", "auto") is routing_of(qwen, "off", "auto") is None
    assert routing_of(qwen, "auto", "abort") is not None
    assert routing_of(qwen, "auto", "retract") is routing_of(qwen, "auto", "in_place") is None, (
        "experts of both weights"
    )
    with pytest.raises(NoRouting, match="0 experts"):
        routing_of(dense, "on", "auto")
