"""Weights are loaded in the middle of a generation: no client notices, in any dialect, and the record says it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import orjson
import pytest

from tests.unit.gateway.conftest import until
from turnlog.infra.engines.protocol import Adapter
from turnlog.schemas.events import VersionSpan
from turnlog.schemas.types import int32s
from turnlog.settings import Settings

QUESTION = {"role": "user", "content": "3 + 5 = ?"}
SAID = "12é45"
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def body(dialect: str, *, stream: bool) -> dict[str, Any]:
    if dialect == "responses":
        return {"model": "m", "input": [QUESTION], "stream": stream}
    return {"model": "m", "messages": [QUESTION], "stream": stream, "max_tokens": 40}


def text_of(dialect: str, answer: Any, *, stream: bool) -> str:
    """What the client is shown."""
    if not stream:
        found = answer.json()
        if dialect == "chat":
            return str(found["choices"][0]["message"]["content"])
        block = found["content"][0] if dialect == "messages" else found["output"][0]["content"][0]
        return str(block["text"])
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [orjson.loads(line[6:]) for line in lines]
    if dialect == "chat":
        return "".join(one["choices"][0]["delta"].get("content") or "" for one in events if one["choices"])
    if dialect == "messages":
        return "".join(one["delta"]["text"] for one in events if one["type"] == "content_block_delta")
    return "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("resubmitted", [False, True], ids=["retracted", "aborted"])
async def test_an_update_within_a_character_is_invisible_and_on_the_log(
    rig: Any, dialect: str, stream: bool, resubmitted: bool
) -> None:
    session, engine = await rig.open(), rig.engines["e0"]
    ids = rig.script.says(SAID)
    cut = next(at for at in range(len(ids)) if rig.tokens.decode(ids[:at]).endswith("�"))
    engine.holds_after = cut
    headers = {"authorization": f"Bearer {session['token']}"}
    asked = asyncio.create_task(rig.http.post(PATHS[dialect], json=body(dialect, stream=stream), headers=headers))
    await engine.reached.wait()
    engine.version = "1"
    if resubmitted:  # the engine's own abort; else it goes on by itself with the new weights
        rig.script.answers.append(ids[cut:])
        engine.holds_after = None
        engine.abort_all()
    engine.released.set()
    answer = await asked
    assert answer.status_code == 200, answer.text
    assert text_of(dialect, answer, stream=stream) == SAID
    [snapshot] = await rig.written("TokenSnapshot")
    assert int32s(snapshot.output_ids).tolist() == ids
    assert [(span.version, span.length) for span in snapshot.version_spans] == [(0, cut), (1, len(ids) - cut)]
    assert len(engine.requests) == 1 + resubmitted
    [turn] = await rig.written("TurnCompleted")
    assert (turn.api, turn.weight_version_first, turn.weight_version_last) == (dialect, 0, 1)


async def test_a_turn_names_its_adapter_and_ends_on_it_when_another_one_is_loaded(rig: Any) -> None:
    session, engine = await rig.open(), rig.engines["e0"]
    engine.adapters = {"1", "2"}
    await rig.engine_says(version=1, base_version=0)
    await until(lambda: rig.gateway.engines.live["e0"].version == 1)
    ids = rig.script.says("12345")
    engine.holds_after = 2
    asked = asyncio.create_task(rig.chat(session, [QUESTION]))
    await engine.reached.wait()
    await rig.engine_says(version=2, base_version=0)
    await until(lambda: rig.gateway.engines.live["e0"].version == 2)
    engine.released.set()
    assert (await asked).status_code == 200
    await rig.chat(session, [{"role": "user", "content": "more"}])
    assert [request.adapter for request in engine.requests] == [Adapter("1", "0"), Adapter("2", "0")]
    first, second = await rig.written("TokenSnapshot")
    assert first.version_spans == (VersionSpan(1, len(ids)),)
    assert [span.version for span in second.version_spans] == [2]


async def test_an_engine_that_restarted_without_its_adapter_is_passed_over_until_its_loader_comes(rig: Any) -> None:
    rig.engines["e1"] = other = rig.new_engine("http://e1")
    session, engine = await rig.open(), rig.engines["e0"]
    other.adapters = {"1"}
    await rig.engine_says(version=1, base_version=0)
    await until(lambda: rig.gateway.engines.live["e0"].version == 1)
    asked = asyncio.create_task(rig.chat(session, [QUESTION]))
    await until(lambda: rig.gateway.engines.live["e0"].failures > 0)
    await rig.engine_says("e1", version=1, base_version=0)
    assert (await asked).status_code == 200
    assert (len(engine.requests), len(other.requests)) == (0, 1)


async def test_spans_name_the_kind_of_engine_once_the_fleet_is_mixed_also_where_a_turn_continues(rig: Any) -> None:
    session, engine = await rig.open(), rig.engines["e0"]
    ids = rig.script.says("12345")
    await rig.chat(session, [QUESTION])
    rig.script.says("12345")
    engine.holds_after = 2
    asked = asyncio.create_task(rig.chat(session, [{"role": "user", "content": "more"}]))
    await engine.reached.wait()
    rig.engines["e1"] = rig.new_engine("http://e1")
    await rig.engine_says("e1", kind="vllm")
    await rig.engine_says("e0", state="draining")
    await until(lambda: rig.gateway.engines.live["e0"].state == "draining")
    rig.script.says(rig.tokens.decode(ids[2:-1]))
    engine.abort_all()
    assert (await asked).status_code == 200
    first, second = await rig.written("TokenSnapshot")
    assert first.version_spans == (VersionSpan(0, len(ids)),)
    assert second.version_spans == (
        VersionSpan(0, 2, engine_kind="sglang"), VersionSpan(0, len(ids) - 2, engine_kind="vllm"),
    )  # fmt: skip


class TestInPlace:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        """Engines keep the cache of old weights."""
        return dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, update="in_place"))

    async def test_spans_say_whose_cache_was_kept_and_later_turns_share_none_of_it(self, rig: Any) -> None:
        session, engine = await rig.open(), rig.engines["e0"]
        ids = rig.script.says("12345")
        engine.holds_after = 2
        asked = asyncio.create_task(rig.chat(session, [QUESTION]))
        await engine.reached.wait()
        engine.version = "1"
        engine.released.set()
        assert (await asked).status_code == 200
        await rig.engine_says(version=1)
        await until(lambda: rig.gateway.engines.live["e0"].version == 1)
        await rig.chat(session, [{"role": "user", "content": "more"}])
        first, second = await rig.written("TokenSnapshot")
        assert first.version_spans == (VersionSpan(0, 2), VersionSpan(1, len(ids) - 2, kv_version=0))
        assert [span.kv_version for span in second.version_spans] == [None]
        assert [request.cache_key for request in engine.requests] == ["0", "1"]
