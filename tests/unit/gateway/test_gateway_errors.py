"""Bad requests, engines that fail, weights that are not there: each a typed error that names the thing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.contract.test_https import served
from tests.fakes.memory_engine import MemoryEngine
from tests.secured import Authority
from tests.unit.gateway.conftest import WINDOW, rigged, until
from tests.unit.producers.test_admission import published
from turnlog.infra.engines.protocol import EngineDead, Generate, OutputChunk
from turnlog.infra.roles import tls
from turnlog.infra.run_folder import GATEWAY_KEY
from turnlog.producers.gateway.engines import SILENCE_S, EnginePool, WeightRequirement
from turnlog.producers.gateway.errors import NoEngine, Unauthorized
from turnlog.producers.gateway.requests import Claims, SigningKeys, sign, verify
from turnlog.producers.gateway_client import GatewayFailed, HttpResponse, SessionOver, refusal
from turnlog.schemas.events import EngineRegistered, FinishReason
from turnlog.schemas.types import int32s
from turnlog.settings import ErasureSettings, GatewaySettings, Settings

QUESTION = {"role": "user", "content": "3 + 5 = ?"}


async def test_clients_are_told_whether_to_ask_again_and_after_how_long(rig: Any) -> None:
    session = await rig.open()
    refused = await rig.chat(session, [{"role": "user", "content": "3" * 2 * WINDOW}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (refused.headers["x-should-retry"], refused.headers.get("retry-after-ms")) == ("false", None)
    rig.held.down = True
    away = await rig.chat(session, [QUESTION])
    rig.held.down = False
    assert (away.status_code, away.json()["error"]["code"]) == (503, "log_unavailable")
    assert (away.headers["x-should-retry"], int(away.headers["retry-after-ms"]) > 0) == ("true", True)
    await rig.finish(session)
    over = await rig.chat(session, [QUESTION])
    assert (over.status_code, over.headers["x-should-retry"]) == (400, "false")


async def test_an_engine_over_tls_is_sampled_of_by_a_gateway_that_knows_its_authority(rig: Any, tmp_path: Path) -> None:
    meta = {"completion_tokens": 2, "finish_reason": {"type": "length"}, "weight_version": "0"}
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in (3, 2)]

    async def answer(_: Request) -> Response:
        return JSONResponse({"output_ids": [3, 2], "meta_info": meta})

    authority = Authority(tmp_path)
    async with served(answer, tls=tls.serving(str(authority.issue("engine")), "", "engine")) as url:
        replace = dataclasses.replace
        rig.settings = replace(rig.settings, engine=replace(rig.settings.engine, ca_file=str(authority.file)))
        rig.connect = None
        await rig.engine_says(state="draining")
        await rig.start("gateway-1")
        await rig.events.append(
            EngineRegistered(event_id="t", run_id="r", engine_id="t", url=url, state="serving", version=0, model="m")
        )
        said = await rig.chat(await rig.open(), [QUESTION])
        assert said.status_code == 200, said.text
        assert said.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (b"{", "JSON"),
        (b"[]", "JSON object"),
        (b"{}", "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "wizard", "content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', "messages[0]"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 18446744073709551615}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "image_url"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": "9"}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}', "tools"),
        (b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}', "tool_calls[0]"),
    ],
)
async def test_a_bad_body_is_refused_by_name_and_writes_nothing(rig: Any, body: bytes, names: str) -> None:
    session = await rig.open()
    headers = {"authorization": f"Bearer {session['token']}"}
    answer = await rig.http.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert names in error["message"]
    assert await rig.written("TurnCompleted") == []


async def test_a_prompt_that_leaves_no_room_is_a_context_overflow(rig: Any) -> None:
    session = await rig.open(limits={"max_context_tokens": 40})
    answer = await rig.chat(session, [{"role": "user", "content": "x y " * 60}])
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "40 tokens" in answer.json()["error"]["message"]
    assert await rig.written("TurnCompleted") == []
    rig.script.says("123456789012345678901234567890", end=False)
    assert (await rig.chat(session, [QUESTION])).json()["usage"]["total_tokens"] == 39


async def test_only_the_right_key_opens_each_door(rig: Any) -> None:
    session, other = await rig.open("a"), await rig.open("b")
    assert (await rig.http.post("/sessions", json={})).status_code == 401
    assert (await rig.http.post("/sessions", json={}, headers={"authorization": "Bearer wrong"})).status_code == 401
    forged = {**session, "agent_token": session["agent_token"][:-2] + "xx"}
    answer = await rig.chat(forged, [QUESTION])
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert forged["agent_token"] not in answer.text
    assert (await rig.finish({**session, "token": other["token"]})).status_code == 401


async def test_a_token_of_a_session_that_was_never_started_is_not_found(rig: Any) -> None:
    token = sign(Claims(session_id="nobody", group_id="g", floor=0), rig.gateway.keys.first)
    answer = await rig.chat({"agent_token": token}, [QUESTION])
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_a_dead_engine_is_left_for_another(rig: Any) -> None:
    rig.engines["e1"] = rig.new_engine("http://e1")
    await rig.engine_says("e1")
    rig.engines["e0"].kill()
    answers = [await rig.chat(await rig.open(f"rollout-{number}"), [QUESTION]) for number in range(6)]
    assert {answer.status_code for answer in answers} == {200}
    assert {turn.engine_id for turn in await rig.written("TurnCompleted")} == {"e1"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_requests_that_fail_together_are_one_outage_and_a_rest_grows_with_each_in_vain() -> None:
    clock = Clock()
    engines = EnginePool(connect=lambda *_: MemoryEngine(vocabulary=8, context=8), clock=clock)
    engines.apply(
        EngineRegistered(event_id="e", run_id="r", engine_id="e0", url="u", state="serving", version=0, model="m")
    )
    engine = engines.live["e0"]

    def rest(requests: int, lasting: float) -> float:
        began, clock.now = clock.now, clock.now + lasting
        for _ in range(requests):
            engines.record_failure(engine, began, EngineDead("refused"))
        return engine.rests_until - clock.now

    assert rest(64, 3.0) == 0.5
    late = clock.now - 1.0  # began before the outage, ended long after it
    for expected in (1.0, 2.0, 4.0, 8.0, 15.0, 15.0):
        clock.now = engine.rests_until
        engines.record_failure(engine, late, EngineDead("silent"))
        assert engine.rests_until == clock.now
        assert rest(64, 0.1) == expected
    engines.record_success(engine)
    assert await engines.choose("s", WeightRequirement(), timeout_s=0.0) is engine
    clock.now += 1
    assert rest(64, 0.1) == 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_gives_more_tokens_than_asked_is_refused_by_name(rig: Any, stream: bool) -> None:
    class Unbounded(MemoryEngine):
        """Samples on, whatever it was asked."""

        def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
            more = dataclasses.replace(request, max_new_tokens=request.max_new_tokens + 3)
            return super().generate(more, stream=stream, timeout_s=timeout_s)

    rig.engines["e1"] = Unbounded(vocabulary=rig.tokens.vocabulary, context=1000, script=rig.script)
    await rig.engine_says("e0", state="draining")
    await rig.engine_says("e1")
    session = await rig.open(sampling={"temperature": 1.0, "max_new_tokens": 5})
    rig.script.says("1234567890")
    answer = await rig.chat(session, [QUESTION], stream=stream)
    said = answer.text if stream else answer.json()["error"]["message"]
    assert "engine_failed" in answer.text
    assert "more than the 5 tokens" in said
    assert "http://e1" in said
    turns = await rig.written("TurnCompleted")
    assert [(turn.finish_reason, turn.output_tokens) for turn in turns] == [(FinishReason.error, 5)] * stream
    assert {turn.aborted for turn in turns} <= {True}


async def test_an_engine_that_samples_what_the_model_has_not_is_refused_by_name(rig: Any) -> None:
    session = await rig.open()
    rig.script.answers.append([400, 2])
    answer = await rig.chat(session, [QUESTION])
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    assert "token 400 is outside the vocabulary of 384" in answer.json()["error"]["message"]
    assert not await rig.written("TokenSnapshot")


async def test_a_turn_waits_for_its_weights_and_says_so_when_they_do_not_come(rig: Any) -> None:
    session = await rig.open(min_weight_version=3)
    with pytest.raises(NoEngine, match="weight version >= 3"):
        await rig.gateway.engines.choose("s", WeightRequirement(3), timeout_s=0.2)
    ask = asyncio.create_task(rig.chat(session, [QUESTION]))
    await rig.engine_says(version=2)
    await rig.engine_says(version=3)
    answer = await ask
    assert answer.json()["turnlog"]["weight_version_first"] == 0  # what the engine itself says of its tokens wins
    assert rig.gateway.engines.live["e0"].version == 3


async def test_a_turn_waits_for_weights_of_its_step_or_a_later_one_whatever_their_number(rig: Any) -> None:
    """A trainer that went back to a checkpoint publishes older weights under a higher number."""
    for version, step in enumerate([0, 1, 2, 3, 4, 5]):
        await rig.events.append(published(version, step))
    await rig.events.append(published(6, 4, incarnation=1))
    await rig.engine_says(version=6)
    choosing = asyncio.create_task(rig.gateway.engines.choose("s", WeightRequirement(5), timeout_s=20.0))
    await until(lambda: rig.gateway.engines.live["e0"].version == 6)
    assert (await rig.gateway.engines.choose("s", WeightRequirement(4), timeout_s=0.0)).version == 6
    with pytest.raises(NoEngine):
        await rig.gateway.engines.choose("s", WeightRequirement(5), timeout_s=0.0)
    assert not choosing.done()
    await rig.events.append(published(7, 5, incarnation=1))
    await rig.engine_says(version=7)
    assert (await choosing).version == 7
    await rig.engine_says(version=5)
    await until(lambda: rig.gateway.engines.live["e0"].version == 5)
    assert (await rig.gateway.engines.choose("s", WeightRequirement(6), timeout_s=0.0)).version == 5


async def test_a_turn_waits_for_as_long_as_the_trainer_has_the_engines_device(rig: Any) -> None:
    await rig.engine_says("e0", state="released")
    choosing = asyncio.create_task(rig.gateway.engines.choose("s", WeightRequirement(), timeout_s=0.0))
    await asyncio.sleep(0)
    assert not choosing.done()
    await rig.engine_says("e0", version=1)
    assert (await choosing).version == 1


async def test_an_engine_that_is_not_serving_is_passed_over(rig: Any) -> None:
    rig.engines["e1"] = rig.new_engine("http://e1")
    await rig.engine_says("e0", state="draining")
    await rig.engine_says("e1")
    for number in range(4):
        await rig.chat(await rig.open(f"rollout-{number}"), [QUESTION])
    assert rig.engines["e0"].requests == []


async def test_an_abort_by_a_weight_update_is_continued_and_shows_both_versions(rig: Any) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    first, rest = rig.script.says("123456"), [*rig.tokens.encode("456"), 2]
    rig.script.answers.append(rest)
    engine.holds_after = 3
    ask = asyncio.create_task(rig.chat(session, [QUESTION]))
    await engine.reached.wait()
    engine.version, engine.holds_after = "1", None
    engine.abort_all()
    answer = (await ask).json()
    assert answer["choices"][0]["message"]["content"] == "123456"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert engine.requests[1].input_ids == engine.requests[0].input_ids + first[:3]
    assert engine.requests[1].max_new_tokens == engine.requests[0].max_new_tokens - 3
    [snapshot] = await rig.written("TokenSnapshot")
    assert [(span.version, span.length) for span in snapshot.version_spans] == [(0, 3), (1, 4)]
    assert int32s(snapshot.output_ids).tolist() == first[:3] + rest


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_dies_in_mid_turn_is_continued_elsewhere(rig: Any, stream: bool) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    rig.script.says("123")
    rig.script.says("3" if stream else "123")
    engine.holds_after = 2
    ask = asyncio.create_task(rig.chat(session, [QUESTION], stream=stream))
    await engine.reached.wait()
    rig.engines["e1"] = rig.new_engine("http://e1")
    await rig.engine_says("e1", version=1)
    engine.kill()
    assert (await ask).status_code == 200
    [turn] = await rig.written("TurnCompleted")
    assert (turn.finish_reason, turn.engine_id) == (FinishReason.stop, "e1")
    [snapshot] = await rig.written("TokenSnapshot")
    assert int32s(snapshot.output_ids).tolist() == [*rig.tokens.encode("123"), 2]
    spans = [(span.version, span.length) for span in snapshot.version_spans]
    assert spans == [(0, 4)]  # the fake e1 labels its weights 0


async def test_an_engine_that_restarted_gives_no_turn_until_its_weights_are_the_published_ones(rig: Any) -> None:
    """It serves the weights of its model folder, registered as it still is with those that it lost."""
    rig.engines["e1"] = rig.new_engine("http://e1")
    rig.engines["e1"].version = "5"
    for name in ("e0", "e1"):
        await rig.engine_says(name, version=5)
    rig.engines["e0"].version = "default"
    answers = [await rig.chat(await rig.open(f"rollout-{number}"), [QUESTION]) for number in range(6)]
    assert {answer.status_code for answer in answers} == {200}
    assert rig.engines["e0"].requests
    assert {turn.engine_id for turn in await rig.written("TurnCompleted")} == {"e1"}
    spans = {span.version for snapshot in await rig.written("TokenSnapshot") for span in snapshot.version_spans}
    assert spans == {5}


async def test_weights_without_a_version_are_refused_where_none_was_ever_published(rig: Any) -> None:
    session = await rig.open(min_weight_version=-1)
    rig.engines["e0"].version = "default"
    await rig.engine_says(version=-1)
    answer = await rig.chat(session, [QUESTION])
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
    assert "--weight-version" in answer.json()["error"]["message"]


async def test_a_turn_that_an_engine_samples_for_too_long_fails_and_is_not_waited_for(
    settings: Settings, model_folder: Path
) -> None:
    """The agent would be told to ask again, for ever: what it waits costs its deadline nothing."""
    short = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, request_timeout_s=0.3))
    async with rigged(short, model_folder) as rig:
        engine = rig.engines["e0"]
        engine.holds_after = 0
        answer = await rig.chat(await rig.open(), [QUESTION])
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_failed")
        assert "[engine] request_timeout_s (0.3 s)" in answer.json()["error"]["message"]
        assert isinstance(refusal(HttpResponse("u", answer.status_code, answer.content)), GatewayFailed)


async def test_a_pinned_session_is_sampled_by_that_version_alone(rig: Any) -> None:
    rig.engines["e1"] = rig.new_engine("http://e1")
    rig.engines["e1"].version = "4"
    await rig.engine_says("e1", version=4)
    session = await rig.open(pin_weight_version=4)
    await rig.chat(session, [QUESTION])
    assert [turn.engine_id for turn in await rig.written("TurnCompleted")] == ["e1"]


async def test_a_version_that_every_engine_has_left_is_refused_at_once(rig: Any) -> None:
    session = await rig.open(pin_weight_version=4)
    await rig.engine_says(version=5)
    rig.engines["e1"] = rig.new_engine("http://e1")
    await rig.engine_says("e1", state="gone", version=3)
    began = asyncio.get_running_loop().time()
    answer = await rig.chat(session, [QUESTION])
    assert asyncio.get_running_loop().time() - began < rig.settings.engine.request_timeout_s
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "weight_version_gone")
    assert answer.headers["x-should-retry"] == "false"
    assert isinstance(refusal(HttpResponse("u", 503, answer.content)), GatewayFailed)


@pytest.mark.parametrize("stream", [False, True])
async def test_weights_that_change_under_a_pinned_turn_end_it(rig: Any, stream: bool) -> None:
    session = await rig.open(pin_weight_version=0)
    engine = rig.engines["e0"]
    rig.script.says("1234567")
    engine.holds_after = 3
    asked = asyncio.create_task(rig.chat(session, [QUESTION], stream=stream))
    await engine.reached.wait()
    engine.version = "1"
    engine.released.set()
    answer = await asked
    assert "weight_version_gone" in answer.text
    assert [turn.output_tokens for turn in await rig.written("TurnCompleted")] == ([3] if stream else [])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_goes_silent_in_mid_turn_is_left_within_seconds(rig: Any, stream: bool) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    rig.script.says("123")
    rig.script.says("3" if stream else "123")
    engine.holds_after, engine.silent = 2, True
    ask = asyncio.create_task(rig.chat(session, [QUESTION], stream=stream))
    await engine.reached.wait()
    rig.engines["e1"] = rig.new_engine("http://e1")
    await rig.engine_says("e1")
    assert (await ask).status_code == 200
    assert engine.looked_at == 1
    assert [turn.engine_id for turn in await rig.written("TurnCompleted")] == ["e1"]
    assert SILENCE_S * 2 < 5


async def test_an_engine_that_is_slow_and_alive_is_waited_for(rig: Any) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    rig.script.says("123")
    engine.holds_after = 2
    ask = asyncio.create_task(rig.chat(session, [QUESTION]))
    await until(lambda: engine.looked_at == 2)
    engine.released.set()
    assert (await ask).status_code == 200
    assert [turn.engine_id for turn in await rig.written("TurnCompleted")] == ["e0"]
    assert engine.looked_at == 2


async def test_after_200_clients_have_left_nothing_of_them_is_left(rig: Any) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    await rig.chat(session, [QUESTION])
    before = len(asyncio.all_tasks())
    engine.holds_after = 1
    path, headers = "/v1/chat/completions", {"authorization": f"Bearer {session['token']}"}
    async with httpx.AsyncClient(base_url=rig.url, limits=httpx.Limits(max_connections=None)) as http:
        asks = [
            asyncio.create_task(http.post(path, json={"messages": [QUESTION], "stream": bool(n % 2)}, headers=headers))
            for n in range(200)
        ]
        await until(lambda: len(engine.live) == 200)
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
    async with asyncio.timeout(10):
        await until(lambda: not engine.live and len(asyncio.all_tasks()) <= before)
    held = await rig.gateway.sessions.find(verify(session["token"], *rig.gateway.keys.accepted_keys))
    assert not held.running
    assert rig.gateway.engines.live["e0"].in_flight == 0
    assert len(engine.aborted) == 200
    assert {turn.aborted for turn in (await rig.written("TurnCompleted"))[1:]} == {True}


def test_a_token_is_good_for_its_claims_and_its_key_alone() -> None:
    claims = Claims(session_id="s", group_id="g", floor=3, min_weight_version=1, pin_weight_version=2)
    token = sign(claims, b"key")
    assert verify(token, b"key") == claims
    for wrong in (token[:-1] + ("A" if token[-1] != "A" else "B"), "x" + token, token.split(".")[0], "", "a.b.c"):
        with pytest.raises(Unauthorized):
            verify(wrong, b"key")
    with pytest.raises(Unauthorized):
        verify(token, b"other")


def test_the_signing_key_is_made_once_and_private(tmp_path: Any) -> None:
    key = SigningKeys(GatewaySettings(), tmp_path).first
    assert SigningKeys(GatewaySettings(), tmp_path).accepted_keys == (key,)
    assert (tmp_path / GATEWAY_KEY).stat().st_mode & 0o777 == 0o600
    assert SigningKeys(GatewaySettings(signing_key="mine"), tmp_path).first == b"mine"


async def test_a_model_of_text_refuses_images_in_the_clients_shape(rig: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = await rig.chat(await rig.open(), [{"role": "user", "content": [image]}])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "images_not_served", "messages")
    assert "takes no images" in error["message"]
    assert await rig.written("TurnCompleted") == []


async def test_what_is_written_for_an_erased_session_is_refused_as_gone(settings: Settings, model_folder: Path) -> None:
    sealed = dataclasses.replace(settings, erasure=ErasureSettings(master_keys="0123456789abcdef"))
    async with rigged(sealed, model_folder) as rig:
        session = await rig.open()
        assert (await rig.chat(session, [QUESTION])).status_code == 200
        assert rig.events.keys is not None
        await rig.events.keys.erase(session["session_id"], "an operator")
        turn = await rig.chat(session, [QUESTION, {"role": "user", "content": "and 4 + 4?"}])
        streamed = await rig.chat(session, [QUESTION, {"role": "user", "content": "or 5 + 4?"}], stream=True)
        finished = await rig.finish(session, outcome="agent_error", reason="it has lost its way")
        headers = {"authorization": f"Bearer {session['token']}"}
        reward = {"value": 1.0, "evidence": {"seen": "it"}, "verifier": {"name": "v", "version": "1"}}
        judged = await rig.http.post(f"/sessions/{session['session_id']}/reward", json=reward, headers=headers)
        for answer in (turn, finished, judged):
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_erased"), answer.text
            assert answer.headers["x-should-retry"] == "false"
            told = refusal(HttpResponse(str(answer.url), answer.status_code, answer.content))
            assert isinstance(told, SessionOver)
        assert "session_erased" in streamed.text
        assert [len(await rig.written(name)) for name in ("TurnCompleted", "RewardAssigned")] == [1, 0]
