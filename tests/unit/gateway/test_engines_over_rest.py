"""Engines are asked for over REST by who has the gateway's key, and by nobody else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from turnlog.infra.roles.fleet import BadKind, register
from turnlog.processors.core.views.fleet import SETTINGS
from turnlog.schemas.events import EngineRequested
from turnlog.settings import GatewaySettings


def key(rig: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {rig.gateway.keys.first.decode()}"}


async def hosted(rig: Any) -> None:
    """As a supervisor says at its start."""
    await rig.events.append(
        EngineRequested(
            event_id="0", run_id="r", engine_id="engine-0", url="", wanted="serving", by=SETTINGS, reason=""
        )
    )


async def test_engines_are_listed_scaled_registered_and_drained(rig: Any) -> None:
    await hosted(rig)

    async def asked(path: str, **body: Any) -> dict[str, Any]:
        answer = await rig.http.post(f"/engines/{path}", json=body, headers=key(rig))
        assert answer.status_code == 202, answer.text
        return {engine["id"]: engine["wanted"] for engine in answer.json()["engines"]}

    assert await asked("scale", count=3, reason="many wait") == {"engine-1": "serving", "engine-2": "serving"}
    assert await asked("scale", count=1) == {"engine-2": "gone", "engine-1": "gone"}
    assert await asked("register", url="http://sglang-7:30000/") == {"sglang-7:30000": "serving"}
    assert await asked("register", url="http://vllm-7:8000", kind="vllm") == {"vllm-7:8000": "serving"}
    assert await asked("register", url="http://vllm-7:8000") == {"vllm-7:8000": "serving"}
    assert await asked("drain", engine="http://e0") == {"e0": "gone"}
    listed = (await rig.http.get("/engines", headers=key(rig))).json()["engines"]
    assert {engine["id"]: (engine["wanted"], engine["state"]) for engine in listed} == {
        "engine-0": ("serving", ""), "engine-1": ("gone", ""), "engine-2": ("gone", ""),
        "sglang-7:30000": ("serving", ""), "vllm-7:8000": ("serving", ""), "e0": ("gone", "serving"),
    }  # fmt: skip
    requests = await rig.written("EngineRequested")
    assert "many wait" in {event.reason for event in requests}
    assert [event.kind for event in requests if event.engine_id == "vllm-7:8000"] == ["vllm", "vllm"]


async def test_a_kind_is_refused_for_a_hosted_engine_and_if_it_lacks_what_the_settings_need(rig: Any) -> None:
    await hosted(rig)
    await rig.engine_says("engine-0")
    body = {"url": "http://engine-0", "kind": "vllm"}
    answer = await rig.http.post("/engines/register", json=body, headers=key(rig))
    assert (answer.status_code, "is hosted" in answer.json()["error"]["message"]) == (400, True)
    role = rig.gateway.role
    role.settings = dataclasses.replace(role.settings, gateway=GatewaySettings(routed_experts="on"))
    with pytest.raises(BadKind, match=r"routed experts.*gateway\.routed_experts"):
        await register(role, "http://vllm-7:8000", kind="vllm")
    assert len(await rig.written("EngineRequested")) == 1


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("scale", {"count": 2}, "hosts no engines"),
        ("scale", {"count": 0}, "count must be from 1"),
        ("scale", {}, "count must be given"),
        *(
            ("register", {"url": url}, "http://host:port")
            for url in (
                "sglang-7:30000",
                "http://[::1",
                "http://a:99999",
                "http://a:0",
                "http://",
                "http://a b",
                "http://a/x",
                "http://u@a",
                "http://<script>",
                "http://a\n",
            )
        ),
        *(
            ("register", {"url": "http://new:1", "name": name}, "letters, digits and . _ : -")
            for name in ("a\nb", "../x", "<script>", "x" * 5000, " ")
        ),
        ("register", {"url": "http://new:1", "kind": "tpu"}, "kind must be sglang or vllm, got 'tpu'"),
        ("register", {"url": "http://new:1", "name": "e0"}, "engine 'e0' is at http://e0: register http://new:1 under"),
        ("drain", {"engine": "nobody"}, "no engine 'nobody'; it has e0"),
    ],
)
async def test_what_cannot_be_is_refused_and_says_why(rig: Any, path: str, body: dict[str, Any], why: str) -> None:
    answer = await rig.http.post(f"/engines/{path}", json=body, headers=key(rig))
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert not await rig.written("EngineRequested")


async def test_a_name_is_free_for_another_address_once_its_engine_was_asked_to_go(rig: Any) -> None:
    for path, body in (("drain", {"engine": "e0"}), ("register", {"url": "http://[::1]:30000/", "name": "e0"})):
        answer = await rig.http.post(f"/engines/{path}", json=body, headers=key(rig))
        assert answer.status_code == 202, answer.text
    assert [(one["id"], one["url"]) for one in answer.json()["engines"]] == [("e0", "http://[::1]:30000")]


@pytest.mark.parametrize("path", ["", "/scale", "/register", "/drain"])
async def test_a_session_is_entitled_to_none_of_it(rig: Any, path: str) -> None:
    session = await rig.open()
    for headers in ({}, {"authorization": f"Bearer {session['token']}"}):
        method = rig.http.post if path else rig.http.get
        assert (await method(f"/engines{path}", headers=headers)).status_code == 401
