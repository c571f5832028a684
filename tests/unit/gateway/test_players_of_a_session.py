"""Players of one session: which agent a request says it is, what each has said, and who answers in whose place."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import pytest

from tests.each import each
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.profiles import PATH_HEADER, harness
from turnlog.producers.gateway.requests import finish_request

QUESTION = {"role": "user", "content": "your move"}


async def move(rig: Any, session: Any, path: str, *messages: Any, **body: Any) -> httpx.Response:
    """One request of a player; the answer."""
    asked = {"model": rig.settings.model.name, "messages": messages or (QUESTION,)} | body
    headers = {PATH_HEADER: path, "authorization": f"Bearer {session['agent_token']}"}
    answer: httpx.Response = await rig.http.post("/v1/chat/completions", json=asked, headers=headers)
    return answer


def said(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


async def state(rig: Any, session: Any) -> Any:
    headers = {"authorization": f"Bearer {session['token']}"}
    return (await rig.http.get(f"/sessions/{session['session_id']}", headers=headers)).json()


async def test_two_players_in_one_position_have_a_conversation_each_also_at_the_next_gateway(rig: Any) -> None:
    session = await rig.open()
    rig.script.says("a")
    rig.script.says("a")
    first, second = said(await move(rig, session, "player/x")), said(await move(rig, session, "player/o"))
    assert (first["content"], second["content"]) == ("a", "a"), "equal bodies of two players are two turns"
    for path in ("player/o", "player/x"):
        await move(rig, session, path, QUESTION, first, {"role": "user", "content": f"on, {path}"})
    turns = await rig.written("TurnCompleted")
    assert [turn.agent_path for turn in turns] == ["player/x", "player/o", "player/o", "player/x"]
    assert [turns[2].base_turn, turns[3].base_turn] == [turns[1].turn, turns[0].turn], "each continues its own"
    told = await state(rig, session)
    await rig.start("gateway-2")
    for found in (told, await state(rig, session)):
        assert [one["agent_path"] for one in found["players"]] == ["player/x", "player/o"]
        for one in found["players"]:
            assert one["messages"][:3] == [QUESTION, first, {"role": "user", "content": f"on, {one['agent_path']}"}]
            assert (len(one["messages"]), one["finish_reason"]) == (4, "stop")
    assert [one["last_turn"]["index"] for one in told["players"]] == [3, 2]


async def test_the_header_takes_precedence_over_what_the_harness_says(rig: Any) -> None:
    found = harness("auto")
    about = ("opencode", {"user-agent": "opencode/1", PATH_HEADER: "main/compaction"}, [QUESTION], None, ())
    assert found.agent_path(*about) == harness("none").agent_path(*about) == "main/compaction"


@each("path", ["", "/", "player/", "player//x", "player/a b", "player/ä", "/".join(["x" * 60] * 5), "x" * 65])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(BadRequest, match="x-turnlog-agent-path must be names joined by"):
        harness("auto").agent_path("a", {PATH_HEADER: path}, [], None, ())


async def test_a_bad_path_is_a_400_and_no_turn(rig: Any) -> None:
    answer = await move(rig, await rig.open(), "player/a b")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, PATH_HEADER)
    assert await rig.written("TurnCompleted") == []


async def test_the_policy_never_answers_for_a_model_that_nobody_serves(rig: Any) -> None:
    session = await rig.open()
    for path in ("player/o", "side/player/user"):
        answer = await move(rig, session, path, model="big")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_side_engine")
        assert "which no pattern of [gateway] side_engines matches" in answer.json()["error"]["message"]
    assert await rig.written("TurnCompleted") == []
    assert (await move(rig, session, "agent/helper", model="big")).status_code == 200, "other agents mean the policy"


async def test_a_side_engine_plays_an_opponent(rig: Any) -> None:
    side = rig.engines["side"] = rig.new_engine("http://side")
    side.script, side.version = lambda _: [*rig.tokens.encode("mine"), 2], "default"
    rig.settings = dataclasses.replace(
        rig.settings, gateway=dataclasses.replace(rig.settings.gateway, side_engines=("big=http://side",))
    )
    await rig.start("gateway-1")
    session = await rig.open()
    assert said(await move(rig, session, "player/o", model="big"))["content"] == "mine"
    [turn], [snapshot] = await rig.written("TurnCompleted"), await rig.written("TokenSnapshot")
    assert (turn.engine_id, turn.agent_path, turn.output_tokens, snapshot.output_ids) == (
        "side/http://side", "player/o", 5, b"",
    )  # fmt: skip


async def test_each_player_is_rewarded_once_and_only_if_the_finish_expects_it(rig: Any) -> None:
    session = await rig.open()
    lasts = [(await move(rig, session, f"player/{name}")).json()["turnlog"] for name in ("x", "o", "gone")]
    url, headers = f"/sessions/{session['session_id']}", {"authorization": f"Bearer {session['token']}"}
    x = {"value": 1.0, "player": "x"}
    assert (await rig.http.post(f"{url}/reward", json=x, headers=headers)).status_code == 201
    judged = [{"epoch": turn["epoch"], "index": turn["index"]} for turn in lasts[:2]]
    finish = {"outcome": "completed", "expects": {"reward": False, "players": ["x", "o"]}, "judged": judged}
    assert (await rig.http.post(f"{url}/finish", json=finish, headers=headers)).status_code == 200
    for value, status in (
        ({"value": 0.5, "player": "o"}, 201),
        ({"value": 1.0, "player": "z"}, 400),
        ({"value": 1.0}, 400),
    ):
        answer = await rig.http.post(f"{url}/reward", json=value, headers=headers)
        assert (answer.status_code, value) == (status, value)
    rewards = await rig.written("RewardAssigned")
    assert [(reward.player, reward.value) for reward in rewards] == [("x", 1.0), ("o", 0.5)]
    assert len({reward.event_id for reward in rewards}) == 2
    [finished] = await rig.written("SessionFinished")
    assert (finished.expects.players, finished.expects.reward) == (("x", "o"), False)


@each(
    ("body", "param"),
    [
        ({"expects": {"players": ["a/b"]}}, "player"),
        ({"expects": {"players": [7]}}, "player"),
        ({"expects": {"players": "x"}}, "players"),
        ({"judged": ["x"]}, "judged"),
        ({"judged": 3}, "judged"),
        ({"judged": [{"epoch": "e"}]}, "judged"),
        ({"reward": {"value": 1.0, "player": "a/b"}}, "player"),
        ({"reward": {"value": 1.0, "player": 7}}, "player"),
    ],
)
def test_a_finish_that_names_no_player_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        finish_request(json.dumps({"outcome": "completed", **body}).encode())
    assert refused.value.param == param


async def test_what_a_game_quotes_of_another_player_is_no_summary(rig: Any) -> None:
    session = await rig.open()
    text = "I take the seventh cell of the board."
    rig.script.says(text)
    await move(rig, session, "player/x")
    for path in ("player/o", "main", "side/player/user"):
        await move(rig, session, path, {"role": "user", "content": f"{path}, x said: {text}"})
    await move(rig, session, "player/x", {"role": "user", "content": f"Compacted: {text}"})
    turns = await rig.written("TurnCompleted")
    assert [turn.summary_turn for turn in turns] == [None, None, None, None, turns[0].turn]
