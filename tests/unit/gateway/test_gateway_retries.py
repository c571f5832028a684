"""What a repeated request gets, and which turns a finish names: whole turns are answers, parts are sampled anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.fakes.memory_engine import MemoryEngine
from tests.unit.gateway.conftest import until
from turnlog.infra.engines.protocol import Generate, OutputChunk
from turnlog.infra.roles.health import QuietServer, listening, uvicorn_config
from turnlog.producers.gateway_client import GatewayClient, OpenSession
from turnlog.schemas.events import Boundary, FinishReason
from turnlog.schemas.types import TurnId, int32s
from turnlog.settings import GatewaySettings, Settings

QUESTION = {"role": "user", "content": "3 + 5 = ?"}


class SlowToAbort(MemoryEngine):
    """Hears of an abort when the test says so; until then it samples on."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.asked_to_abort = asyncio.Event()
        self.aborts = asyncio.Event()

    async def abort(self, rid: str) -> None:
        """See Engine."""
        self.asked_to_abort.set()
        await self.aborts.wait()
        await super().abort(rid)


class AbortedAtTheStop(MemoryEngine):
    """Calls `abort` what its last token had stopped already."""

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        """See Engine."""
        async for piece in super().generate(request, stream=stream, timeout_s=timeout_s):
            finish = "abort" if piece.finish == "stop" else piece.finish
            yield OutputChunk(ids=piece.ids, logprobs=piece.logprobs, finish=finish, versions=piece.versions)


async def with_engine(rig: Any, kind: type[MemoryEngine]) -> Any:
    """The rig's script, played by an engine of that kind alone."""
    engine = kind(vocabulary=rig.tokens.vocabulary, context=512, script=rig.script)
    rig.engines["e1"] = engine
    await rig.engine_says("e0", state="draining")
    await rig.engine_says("e1")
    return engine


def held(rig: Any, session: Any) -> Any:
    """The session as the gateway knows it."""
    return rig.gateway.sessions.held[session["session_id"]]


async def left(rig: Any, session: Any, engine: Any, *, at: int, **more: Any) -> None:
    """Ask, and leave when the engine stands at the n-th token."""
    engine.holds_after = at
    headers = {
        "authorization": f"Bearer {session['token']}",
        **({"idempotency-key": "k"} if more.pop("key", 0) else {}),
    }
    async with httpx.AsyncClient(base_url=rig.url) as client:
        body = {"messages": [QUESTION], **more}
        ask = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=headers))
        await engine.reached.wait()
        ask.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ask


def named(*turns: Any) -> list[dict[str, Any]]:
    """As a finish names them."""
    return [{"epoch": epoch, "index": index} for epoch, index in turns]


async def finished_without_a_client(rig: Any, session: Any) -> None:
    """A turn that the engine ended although its client had left."""
    engine = await with_engine(rig, SlowToAbort)
    rig.script.says("12")
    await left(rig, session, engine, at=1)
    await engine.asked_to_abort.wait()
    engine.released.set()
    await until(lambda: held(rig, session).conversation.turns)
    engine.aborts.set()
    [turn] = await rig.written("TurnCompleted")
    assert (turn.aborted, turn.finish_reason) == (True, FinishReason.stop)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", [False, True])
async def test_a_part_of_a_turn_is_no_answer_the_retry_is_sampled_anew(rig: Any, stream: bool, key: bool) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    sampled = rig.script.says("123456")
    await left(rig, session, engine, at=3, stream=stream, key=key)
    await until(lambda: held(rig, session).conversation.turns)
    assert engine.aborted == [engine.requests[0].rid]
    [part] = await rig.written("TurnCompleted")
    assert (part.aborted, part.finish_reason) == (True, FinishReason.abort)
    [snapshot] = await rig.written("TokenSnapshot")
    assert int32s(snapshot.output_ids).tolist() == sampled[:3]
    engine.holds_after = None
    rig.script.says("77")
    retry = await rig.chat(session, [QUESTION], key="k" if key else None, stream=stream)
    assert "77" in retry.text.replace('"content":"7"', "77")
    assert (await rig.describe(session))["messages"][-1]["content"] == "77"
    answer = (await rig.finish(session)).json()
    assert (answer["turns"], answer["undelivered"]) == (
        named((session["epoch"], 1)),
        named((session["epoch"], 0)),
    )
    assert [each.boundary_reason for each in await rig.written("TokenSnapshot")] == ["first", "first"]


async def test_a_turn_that_the_engine_ended_all_the_same_is_what_a_repeat_gets(rig: Any) -> None:
    session = await rig.open()
    await finished_without_a_client(rig, session)
    retry = (await rig.chat(session, [QUESTION])).json()
    assert (retry["choices"][0]["message"]["content"], retry["turnlog"]["index"]) == ("12", 0)
    assert (await rig.chat(session, [QUESTION])).json()["turnlog"]["index"] == 1  # delivered once: this is another
    answer = (await rig.finish(session)).json()
    assert (answer["turns"], answer["undelivered"]) == (named((session["epoch"], 0), (session["epoch"], 1)), [])


async def test_a_turn_that_nobody_came_back_for_is_named_undelivered(rig: Any) -> None:
    session = await rig.open()
    await finished_without_a_client(rig, session)
    one = (await rig.chat(session, [{"role": "user", "content": "another"}])).json()
    answer = (await rig.finish(session)).json()
    assert answer["undelivered"] == named((session["epoch"], 0))
    assert answer["turns"] == named((session["epoch"], one["turnlog"]["index"]))


@pytest.mark.parametrize("killed", [False, True], ids=["the same gateway", "a gateway that took over"])
async def test_the_turn_that_was_judged_is_named_whatever_became_of_its_client(rig: Any, killed: bool) -> None:
    session = await rig.open()
    await finished_without_a_client(rig, session)
    described = await rig.describe(session)
    assert described["messages"][-1]["content"] == "12"
    if killed:
        await rig.start("gateway-1")
    answer = (await rig.finish(session, judged=described["last_turn"])).json()
    assert (answer["turns"], answer["undelivered"]) == (named((session["epoch"], 0)), [])


async def test_a_judged_turn_that_a_lost_gateway_recorded_after_the_takeover_is_found_on_the_log(rig: Any) -> None:
    session = await rig.open()
    engine, zombie = rig.engines["e0"], rig.http
    engine.holds_after = 0
    headers = {"authorization": f"Bearer {session['token']}"}
    ask = asyncio.create_task(zombie.post("/v1/chat/completions", json={"messages": [QUESTION]}, headers=headers))
    await engine.reached.wait()
    await rig.start("gateway-1")
    assert (await rig.describe(session))["turns"] == []
    engine.released.set()
    turn = (await ask).json()["turnlog"]
    answer = (await rig.finish(session, judged={"epoch": turn["epoch"], "index": turn["index"]})).json()
    assert (answer["turns"], answer["undelivered"]) == (named((session["epoch"], 0)), [])


@pytest.mark.parametrize(
    ("judged", "code"),
    [({"epoch": "e", "index": 7}, "no such turn"), ({"index": 0}, "epoch and index"), ([], "dict")],
)
async def test_a_finish_that_judges_what_is_not_there_is_refused(rig: Any, judged: Any, code: str) -> None:
    session = await rig.open()
    await rig.chat(session, [QUESTION])
    answer = await rig.finish(session, judged=judged)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "judged")
    assert code in answer.json()["error"]["message"]
    assert (await rig.finish(session)).status_code == 200


async def test_a_part_cannot_be_judged(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("123456")
    await left(rig, session, rig.engines["e0"], at=3)
    await until(lambda: held(rig, session).conversation.turns)
    answer = await rig.finish(session, judged={"epoch": session["epoch"], "index": 0})
    assert answer.status_code == 400
    assert "only a part" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_is_back_before_the_end_finds_its_turn_going_on(rig: Any, stream: bool) -> None:
    session = await rig.open()
    engine = await with_engine(rig, SlowToAbort)
    first, rest = rig.script.says("123456"), [*rig.tokens.encode("456"), 2]
    rig.script.answers.append(rest)
    await left(rig, session, engine, at=3, stream=stream, key=True)
    await engine.asked_to_abort.wait()
    [running] = held(rig, session).running.values()
    retry = asyncio.create_task(rig.chat(session, [QUESTION], key="k", stream=stream))
    await until(lambda: running.clients == 1)
    engine.holds_after = None
    engine.aborts.set()
    assert (await retry).status_code == 200
    [turn] = await rig.written("TurnCompleted")
    assert (turn.aborted, turn.finish_reason) == (False, FinishReason.stop)
    [snapshot] = await rig.written("TokenSnapshot")
    assert int32s(snapshot.output_ids).tolist() == first[:3] + rest


@pytest.mark.parametrize("stream", [False, True])
async def test_a_natural_stop_that_races_an_abort_is_a_stop(rig: Any, stream: bool) -> None:
    session = await rig.open()
    engine = await with_engine(rig, AbortedAtTheStop)
    sampled = rig.script.says("8")
    assert (await rig.chat(session, [QUESTION], stream=stream)).status_code == 200
    assert len(engine.requests) == 1
    [turn] = await rig.written("TurnCompleted")
    assert turn.finish_reason is FinishReason.stop
    [snapshot] = await rig.written("TokenSnapshot")
    assert int32s(snapshot.output_ids).tolist() == sampled
    assert (await rig.describe(session))["messages"][-1]["content"] == "8"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_whose_session_is_finished_meanwhile_is_told_so_and_not_given_a_part(
    rig: Any, stream: bool
) -> None:
    session = await rig.open()
    engine = rig.engines["e0"]
    rig.script.says("123456")
    engine.holds_after = 3
    ask = asyncio.create_task(rig.chat(session, [QUESTION], stream=stream))
    await engine.reached.wait()
    answer = (await rig.finish(session)).json()
    assert (answer["turns"], answer["undelivered"]) == ([], named((session["epoch"], 0)))
    told = await ask
    assert told.status_code == (200 if stream else 400)
    assert "session_finished" in told.text


async def test_a_first_turn_that_is_asked_again_after_a_takeover_is_still_the_first(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("123456")
    await left(rig, session, rig.engines["e0"], at=3)
    await until(lambda: held(rig, session).conversation.turns)
    rig.engines["e0"].holds_after = None
    await rig.start("gateway-1")
    one = (await rig.chat(session, [QUESTION])).json()["choices"][0]["message"]
    rewritten = [QUESTION, {"role": "assistant", "content": "never said"}, QUESTION]
    await rig.chat(session, rewritten)
    await rig.chat(session, [QUESTION, one, QUESTION])
    snapshots = await rig.written("TokenSnapshot")
    assert [(each.boundary, each.boundary_reason) for each in snapshots] == [
        (Boundary.root, "first"),
        (Boundary.root, "first"),
        (Boundary.root, "history_rewritten"),
        (Boundary.append, "append"),
    ]


async def test_the_runners_client_asks_a_gateway_of_release_v2_for_another_turn_in_place_of_a_part() -> None:
    """That one gives a turn that it cut off to whoever sends its body again, and remembers it under the key."""
    turns: dict[bytes, int] = {}
    keys: dict[str, bytes] = {}

    async def chat(request: Request) -> JSONResponse:
        body = await request.body()
        if keys.setdefault(request.headers["idempotency-key"], body) != body:
            return JSONResponse({"error": {"code": "key_reused"}}, 409)
        index = turns.setdefault(body, len(turns))
        about = {"epoch": "e", "index": index, "finish_reason": ("abort", "error", "stop")[index]}
        said = {"role": "assistant", "content": str(index)}
        return JSONResponse({"choices": [{"message": said, "finish_reason": "stop"}], "turnlog": about})

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    with closing(listening("127.0.0.1", 0, "none")) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        settings = Settings(gateway=GatewaySettings(url=url, signing_key="k"))
        async with QuietServer(uvicorn_config(app)).running(listener), GatewayClient(settings) as client:
            for _ in range(2):
                turn = await client.complete(OpenSession("s", url, "t", "t"), [QUESTION], None, step=0)
                assert (turn.message["content"], turn.turn) == ("2", TurnId("e", 2))
    assert [orjson.loads(body).get("metadata") for body in turns] == [None, {"again": 1}, {"again": 2}]
