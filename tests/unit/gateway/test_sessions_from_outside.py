"""Services that open sessions over REST, report what came of them, and find both described."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import re
from pathlib import Path
from typing import Any

import orjson
import pytest
from prometheus_client import REGISTRY

import turnlog.client
from turnlog.processors.core.fold.group import offline
from turnlog.processors.core.methods.rules import fold_rules
from turnlog.producers.gateway.app import build
from turnlog.producers.gateway.openapi import FINISH, OPEN, REWARD, document
from turnlog.producers.gateway.requests import Claims, finish_request, open_request, reward_request, sign, verify
from turnlog.schemas.events import GroupScored, SegmentSample
from turnlog.schemas.events.tasks import Sampling
from turnlog.schemas.topics import TOPIC_OF
from turnlog.settings import GatewaySettings, Settings

ROOT = Path(__file__).parents[3]
QUESTION = {"role": "user", "content": "3 + 5 = ?"}
BY_JUDGES = "turnlog_gateway_turns_by_judges_total"


def key(rig: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {rig.gateway.keys.first.decode()}"}


def token(session: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {session['token']}"}


async def opened(rig: Any, **body: Any) -> Any:
    answer = await rig.http.post("/sessions", json=body, headers=key(rig))
    assert answer.status_code == 201, answer.text
    return answer.json()


async def test_a_session_that_names_no_group_trains_where_the_estimator_needs_none(rig: Any) -> None:
    session = await opened(rig, purpose="train")
    await rig.chat(session, [QUESTION])
    ended = {"outcome": "completed", "reward": {"value": 0.5, "evidence": {"said": "8"}}}
    assert (await rig.finish(session, **ended)).status_code == 200
    rules = fold_rules(rig.settings.fold, run_id="r", settings_sha256="")
    names = ("SessionStarted", "SessionFinished", "RewardAssigned", "TurnCompleted", "TokenSnapshot")
    records = await rig.written(*names)
    [score] = [event for event in folded(records, rules) if isinstance(event, GroupScored)]
    [sample] = [event for event in folded(records, rules) if isinstance(event, SegmentSample)]
    assert (score.status.value, sample.reward) == ("trained", 0.5)


def folded(records: list[Any], rules: Any) -> list[Any]:
    placed = ((TOPIC_OF[type(event).__name__].name, 0, offset, event) for offset, event in enumerate(records))
    return list(offline(placed, rules))


class TestCompared:
    @pytest.fixture
    def settings(self, settings: Settings) -> Settings:
        """An estimator that compares the rollouts of a group."""
        return dataclasses.replace(settings, fold=dataclasses.replace(settings.fold, estimator="grpo"))

    async def test_a_group_that_is_too_small_for_the_estimator_is_refused_at_the_door(self, rig: Any) -> None:
        for body in ({"purpose": "train"}, {"purpose": "train", "group_id": "g", "rollout_id": "r", "group_size": 1}):
            answer = await rig.http.post("/sessions", json=body, headers=key(rig))
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "group_too_small", "group_size")
            assert "grpo" in error["message"]
        assert not await rig.written("SessionStarted")
        await opened(rig)
        await opened(rig, purpose="train", group_id="g", rollout_id="r", group_size=2)


async def test_a_verdict_may_come_before_the_end_after_it_or_with_it(rig: Any) -> None:
    early, late, at_once = [await opened(rig) for _ in range(3)]
    paths = [f"/sessions/{session['session_id']}" for session in (early, late, at_once)]
    said = {"value": 1, "components": {"tests": 0.5}, "evidence": [1], "verifier": {"name": "ci", "version": "7"}}
    assert (await rig.http.post(f"{paths[0]}/reward", json=said, headers=token(early))).status_code == 201
    await rig.finish(early)
    await rig.finish(late)
    await rig.start("gateway-1")
    assert (await rig.http.post(f"{paths[1]}/reward", json=said, headers=token(late))).status_code == 201
    await rig.finish(at_once, expects={}, reward=said)
    rewards = await rig.written("RewardAssigned")
    assert {reward.session_id for reward in rewards} == {each["session_id"] for each in (early, late, at_once)}
    assert {(one.value, orjson.loads(one.evidence)[0], one.verifier.name) for one in rewards} == {(1.0, 1, "ci")}
    assert all(finish.expects.reward for finish in await rig.written("SessionFinished"))


async def test_an_agent_gives_no_verdict_and_no_end_by_its_own_token(rig: Any) -> None:
    session = await opened(rig)
    agent = {"authorization": f"Bearer {session['agent_token']}"}
    path = f"/sessions/{session['session_id']}"
    for door, body in (("reward", {"value": 1e9}), ("finish", {"outcome": "completed", "reward": {"value": 1e9}})):
        refused = await rig.http.post(f"{path}/{door}", json=body, headers=agent)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "agent_token_refused")
        assert "send `token`" in refused.json()["error"]["message"]
    assert not await rig.written("RewardAssigned", "SessionFinished")
    before = REGISTRY.get_sample_value(BY_JUDGES) or 0
    assert (await rig.chat(session, [QUESTION])).status_code == 200
    assert (await rig.http.get(path, headers=agent)).json()["session_id"] == session["session_id"]
    assert REGISTRY.get_sample_value(BY_JUDGES) == before
    asked = {"messages": [QUESTION, {"role": "user", "content": "and 4 + 4?"}]}
    assert (await rig.http.post("/v1/chat/completions", json=asked, headers=token(session))).status_code == 200
    assert REGISTRY.get_sample_value(BY_JUDGES) == before + 1
    assert (await rig.finish(session, reward={"value": 0.5})).status_code == 200
    assert [one.value for one in await rig.written("RewardAssigned")] == [0.5]


def test_gateways_of_the_release_before_read_both_tokens() -> None:
    """They add up what stands behind the sixth value, while an upgrade is under way."""
    for turns in (0, 7):
        claims = Claims(session_id="s", group_id="g", floor=3, max_context_tokens=9, max_turns=turns)
        for one in (claims, claims._replace(agent=True)):
            payload = sign(one, b"k").partition(".")[0]
            *six, told = orjson.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))[:7]
            more = orjson.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))[7:]
            assert (six, told + sum(more)) == (["s", "g", 3, -1, None, 9], turns)
            assert verify(sign(one, b"k"), b"k") == one


async def test_the_page_shows_how_a_rollout_from_outside_is_opened_and_judged(rig: Any) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/outside.md").read_text(), re.DOTALL)
    shown: dict[str, Any] = {}
    exec(block, shown)
    rig.script.says("8")
    keys = GatewaySettings(url=rig.url, signing_key=rig.gateway.keys.first.decode())
    run = turnlog.client.connect(Settings(gateway=keys))
    right, wrong = [
        await asyncio.to_thread(shown["rollout"], run, "sum-1", 2, index, "3 + 5 = ?", answer)
        for index, answer in ((0, "8"), (1, "no"))
    ]
    assert (right, wrong) == (1.0, 0.0)
    assert {one.value for one in await rig.written("RewardAssigned")} == {0.0, 1.0}
    assert {(one.group_id, one.group_size) for one in await rig.written("SessionStarted")} == {("sum-1", 2)}


async def test_a_reward_that_nobody_waits_for_or_that_is_no_number_is_refused(rig: Any) -> None:
    session = await opened(rig)
    path = f"/sessions/{session['session_id']}/reward"
    for wrong in ({}, {"value": "1"}, {"value": True}, {"value": 1, "components": {"a": None}}, {"value": None}):
        answer = await rig.http.post(path, json=wrong, headers=token(session))
        assert answer.status_code == 400, wrong
    answer = await rig.http.post(path, content=b'{"value": NaN}', headers=token(session))
    assert answer.status_code == 400
    await rig.finish(session, expects={})
    answer = await rig.http.post(path, json={"value": 1}, headers=token(session))
    assert (answer.status_code, "without expecting" in answer.text) == (400, True)
    assert not await rig.written("RewardAssigned")


async def test_what_is_described_is_what_is_read(rig: Any) -> None:
    found = (await rig.http.get("/openapi.json")).json()
    assert found == orjson.loads(orjson.dumps(document()))
    served = {(route.path, method.lower()) for route in routes(rig) for method in route.methods}
    told = {(path, verb) for path, one in found["paths"].items() for verb in one if verb != "parameters"}
    assert told <= served
    assert {path for path, _ in served if path.startswith(("/sessions", "/engines"))} == set(found["paths"])
    for schema, read in ((OPEN, lambda body: open_request(body, run_id="r", fallback=Sampling(), fresh="f")),
                         (FINISH, finish_request), (REWARD, reward_request)):  # fmt: skip
        valid = example(schema)
        read(orjson.dumps(valid))
        for name in schema["properties"]:
            if name == "evidence":
                continue  # any JSON
            with pytest.raises(Exception, match=r"must|needs"):
                read(orjson.dumps({**valid, name: [[]]}))
        for name in schema["required"]:
            with pytest.raises(Exception, match="must"):
                read(orjson.dumps({key: value for key, value in valid.items() if key != name}))


def routes(rig: Any) -> list[Any]:
    return [route for route in build(rig.gateway).routes if route.methods]


def example(schema: dict[str, Any]) -> Any:
    """A value that fits."""
    if "enum" in schema:
        return schema["enum"][-1]
    match schema.get("type"):
        case "object":
            return {name: example(one) for name, one in schema.get("properties", {}).items()}
        case "array":
            return [example(schema.get("items", {}))]
        case "string":
            return "x"
        case "boolean":
            return True
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
    return None
