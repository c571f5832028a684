"""What comes from outside: any body is answered with a 4xx that names it, nothing is read before its token, nothing is
held beyond its limit, and an image is shown to the session that brought it alone."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import re
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as fuzzing
from hypothesis import strategies as st

from tests.fakes.pictures import encoded, painted
from tests.unit.gateway.conftest import until
from turnlog.infra.environments.tools import GATEWAY_INSIDE
from turnlog.producers.gateway.dialects.openai_chat import FIELDS
from turnlog.producers.gateway.errors import BadRequest
from turnlog.producers.gateway.images import ImageTokens, picture
from turnlog.producers.gateway_client import EnginesBusy, HttpResponse, refusal
from turnlog.schemas.events import Outcome
from turnlog.settings import Settings

LIMIT = 64 * 1024
QUESTION = {"role": "user", "content": "3 + 5 = ?"}
ROLLOUTS = itertools.count()
FUZZED = fuzzing(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@pytest.fixture
def settings(settings: Settings) -> Settings:
    """A small limit."""
    return dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, max_body_bytes=LIMIT))


# Arbitrary JSON, with the words of the API often in the places where the API has them.
WORDS = sorted({
    *FIELDS, "role", "content", "user", "assistant", "tool", "system", "tool_calls", "function", "name",
    "arguments", "id", "tool_call_id", "type", "text", "image_url", "url", "reasoning", "outcome", "reason", "final",
    "expects", "reward", "step_rewards", "judged", "epoch", "index", "rollout_id", "group_id", "run_id", "floor",
    "purpose", "agent", "environment", "sampling", "limits", "max_context_tokens", "stop_token_ids", "version", "image",
    "group_size", "attempt", "rollout_index", "min_weight_version", "pin_weight_version", "task_id", "max_new_tokens",
    "players", "player",
    *Outcome, "data:image/png;base64,AAAA", "data:image/png;base64,\u00e9", f"blob:{'0' * 64};9;image/png",
    f"blob:{'0' * 64};{'9' * 5000};image/png", "train", "{}", "[", "a\nb\x1b[2J", "",
})  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.sampled_from([-1, 0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1e308, 0.5]),
    st.sampled_from(WORDS), st.text(max_size=5),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
CALL = st.fixed_dictionaries({}, optional={"id": VALUES, "function": st.fixed_dictionaries(
    {}, optional={"name": SCALARS, "arguments": VALUES}) | VALUES})  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | VALUES},
    optional={"content": VALUES, "tool_calls": st.lists(CALL, max_size=2) | VALUES, "name": VALUES,
              "tool_call_id": VALUES, "reasoning": VALUES},
)  # fmt: skip
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=3) | VALUES},
    optional={"tools": st.lists(VALUES, max_size=2) | VALUES, "max_tokens": VALUES, "stream": VALUES,
              "stream_options": VALUES, "temperature": VALUES},
)  # fmt: skip
NAMES = ["rollout_id", "group_id", "attempt", "purpose", "floor", "agent", "environment", "sampling", "limits", "seed",
         "group_size", "rollout_index", "min_weight_version", "pin_weight_version", "run_id", "task_id"]  # fmt: skip
OPEN = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES))
FINISH = st.fixed_dictionaries({"outcome": st.sampled_from(["completed", "agent_error"]) | VALUES}, optional={
    "reason": VALUES, "final": VALUES, "expects": VALUES, "judged": VALUES})  # fmt: skip
BODIES = (VALUES | CHAT | OPEN | FINISH).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40)


@FUZZED
@given(CHAT.map(lambda value: json.dumps(value).encode()) | BODIES)
async def test_no_chat_request_is_our_failure(rig: Any, body: bytes) -> None:
    session = await rig.open(f"rollout-{next(ROLLOUTS)}")
    answer = await rig.http.post("/v1/chat/completions", content=body, headers=bearer(session))
    assert answer.status_code in (200, 400), (body, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await rig.describe(session))["session_id"] == session["session_id"]


@FUZZED
@given((OPEN | FINISH).map(lambda value: json.dumps(value).encode()) | BODIES)
async def test_no_request_to_open_or_finish_a_session_is_our_failure(rig: Any, body: bytes) -> None:
    key = {"authorization": f"Bearer {rig.gateway.keys.first.decode()}"}
    opened = await rig.http.post("/sessions", content=body, headers=key)
    assert opened.status_code in (201, 400), (body, opened.text)
    session = await rig.open(f"rollout-{next(ROLLOUTS)}")
    path = f"/sessions/{session['session_id']}/finish"
    finished = await rig.http.post(path, content=body, headers=bearer(session))
    assert finished.status_code in (200, 400), (body, finished.text)


def bearer(session: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {session['token']}"}


class Slow:
    """A body that counts how much of it was taken."""

    def __init__(self, parts: int) -> None:
        self.parts, self.sent = parts, 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(self.parts):
            self.sent += 1
            yield b'"' + b"x" * 1022 + b'"'


@pytest.mark.parametrize("door", ["/v1/chat/completions", "/sessions", "finish"])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_is_refused_while_it_comes(rig: Any, door: str, declared: bool) -> None:
    session = await rig.open()
    headers = {"authorization": f"Bearer {rig.gateway.keys.first.decode()}"} if door == "/sessions" else bearer(session)
    path = f"/sessions/{session['session_id']}/finish" if door == "finish" else door
    content: Any = b" " * (LIMIT + 1) if declared else Slow(2 * LIMIT // 1024)
    answer = await rig.http.post(path, content=content, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (413, "request_too_large", "invalid_request_error")
    assert "max_body_bytes" in error["message"]
    assert (await rig.chat(session, [QUESTION])).status_code == 200


@pytest.mark.parametrize("door", ["/v1/chat/completions", "/sessions", "finish"])
async def test_no_byte_of_a_body_is_awaited_before_its_token_is_good(rig: Any, door: str) -> None:
    session = await rig.open()
    path = f"/sessions/{session['session_id']}/finish" if door == "finish" else door
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rpartition(":")[2]))
    head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer no\r\ncontent-length: 1000\r\n\r\n"
    writer.write(head.encode())
    assert b" 401 " in await reader.readline()  # the body never comes
    writer.close()
    await writer.wait_closed()


@pytest.fixture
async def impatient(rig: Any) -> Any:
    """A gateway that waits a moment for a request, lets a session live as long, and run two turns, three a minute."""
    rig.settings = dataclasses.replace(
        rig.settings,
        gateway=dataclasses.replace(rig.settings.gateway, session_s=2.0, session_turns=2, session_turns_per_minute=3),
    )
    rig.request_s = 0.3
    await rig.start("gateway-1")
    return rig


@pytest.mark.parametrize("part", [b"POST /v1/chat/compl", b"POST / HTTP/1.1\r\nhost: x\r\n", b""])
async def test_a_client_that_does_not_finish_its_head_is_dropped(impatient: Any, part: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(impatient.url.rpartition(":")[2]))
    writer.write(part)
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()


async def test_a_body_that_does_not_come_is_refused(impatient: Any) -> None:
    session = await impatient.open()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(impatient.url.rpartition(":")[2]))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {session['token']}\r\n"
    writer.write(head.encode() + b"content-length: 100\r\n\r\n{")
    async with asyncio.timeout(20):
        assert b" 408 " in await reader.readline()
    writer.close()


async def test_a_token_opens_nothing_when_its_session_is_too_old(impatient: Any) -> None:
    session = await impatient.open()
    assert (await impatient.chat(session, [QUESTION])).status_code == 200
    for instance in ("", "gateway-2"):
        if instance:
            await impatient.start(instance)
        async with asyncio.timeout(20):
            while (answer := await impatient.chat(session, [QUESTION])).status_code != 401:
                assert answer.status_code in (200, 429)
                await asyncio.sleep(0.1)  # until the clock has moved on
        assert "session_s" in answer.json()["error"]["message"]
    assert not await impatient.written("SessionAdopted")


async def test_a_session_has_so_many_turns_at_a_time_and_in_a_minute(impatient: Any) -> None:
    session, engine = await impatient.open(), impatient.engines["e0"]
    engine.holds_after = 1
    asks = [asyncio.create_task(impatient.chat(session, [QUESTION])) for _ in range(2)]
    await until(lambda: len(engine.live) == 2)
    third = await impatient.chat(session, [QUESTION])
    assert (third.status_code, third.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert third.json()["error"]["message"].endswith("[gateway] session_turns")
    assert third.headers["x-should-retry"] == "true"
    engine.released.set()
    assert {(await ask).status_code for ask in asks} == {200}
    assert (await impatient.chat(session, [QUESTION])).status_code == 200
    fourth = await impatient.chat(session, [QUESTION])
    assert (fourth.status_code, "session_turns_per_minute" in fourth.text) == (429, True)
    assert isinstance(refusal(HttpResponse("u", 429, fourth.content)), EnginesBusy)
    assert (await impatient.chat(await impatient.open("rollout-1"), [QUESTION])).status_code == 200


def png_head(width: int, height: int) -> bytes:
    """The beginning of a PNG that says it is so large: 70 bytes."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = b"IDAT" + zlib.compress(b"\0" * 9)
    parts = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (head, body)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


RULE = ImageTokens(7, lambda height, width: 1, most_pixels=1_000_000)


async def admitted(rig: Any, content: bytes) -> None:
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    await RULE.admit_all([picture({"image_url": {"url": url}}, "messages[0]")], {}, rig.blobs)


@pytest.mark.parametrize(("width", "height"), [(1001, 1000), (12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2**30)])
async def test_an_image_is_bounded_by_what_its_head_says(rig: Any, width: int, height: int) -> None:
    await admitted(rig, encoded(painted(1000, 1000)))
    before = dict(rig.blobs.objects)
    with pytest.raises(BadRequest, match="pixels"):
        await admitted(rig, png_head(width, height))
    assert rig.blobs.objects == before


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
async def test_an_image_of_a_served_format_is_read_and_any_broken_one_refused(rig: Any, kind: str) -> None:
    content = encoded(painted(9, 7), kind)
    await admitted(rig, content)
    for at, value in itertools.product(range(min(len(content), 120)), (0, 0x7F, 0xFF)):
        for broken in (content[:at] + bytes([value]) + content[at + 1 :], content[:at]):
            try:
                await admitted(rig, broken)
            except BadRequest:
                continue


@pytest.mark.parametrize("kind", ["BMP", "TIFF", "EPS", "PPM"])
async def test_formats_that_pillow_reads_by_other_means_are_not_served(rig: Any, kind: str) -> None:
    with pytest.raises(BadRequest, match="PNG, JPEG, WEBP, GIF"):
        await admitted(rig, encoded(painted(9, 7), kind))


async def test_a_log_that_is_away_is_said_at_every_door_and_the_request_may_come_again(rig: Any) -> None:
    session = await rig.open()
    rig.held.down = True
    key = {"authorization": f"Bearer {rig.gateway.keys.first.decode()}"}
    answers = [
        await rig.http.post("/sessions", json={"rollout_id": "new", "group_id": "group-0"}, headers=key),
        await rig.chat(session, [QUESTION]),
        await rig.finish(session),
    ]
    assert [answer.status_code for answer in answers] == [503, 503, 503]
    assert {answer.json()["error"]["code"] for answer in answers} == {"log_unavailable"}
    rig.held.down = False
    assert (await rig.chat(session, [QUESTION])).status_code == 200
    assert (await rig.finish(session)).status_code == 200
    assert (await rig.open("new"))["finished"] is False


@pytest.mark.parametrize("path", ["/v1beta/models/gemini-3-pro:generateContent", "/v1/completions"])
async def test_an_api_that_is_not_served_is_refused_with_those_that_are(rig: Any, path: str) -> None:
    session = await rig.open()
    refused = await rig.http.post(path, json={"contents": []}, headers=bearer(session))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_served")
    message = refused.json()["error"]["message"]
    assert message.startswith(f"{path} is not served.")
    assert all(dialect.path in message for dialect in rig.gateway.dialects)


async def test_a_call_that_must_be_made_is_refused_where_it_trains_with_the_remedy(rig: Any) -> None:
    session = await rig.open()
    asked = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}
    refused = await rig.chat(session, [{"role": "user", "content": "hi"}], **asked)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "constraint_refused")
    assert "omit it or send `auto`" in refused.json()["error"]["message"]


def test_the_page_starts_codex_with_a_model_and_a_provider_of_its_own() -> None:
    """It reads no OPENAI_BASE_URL, and offers the models that it knows tools of another kind."""
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if 'name="codex"' in block]
    shown: dict[str, Any] = {"__name__": "block"}
    exec(compile(blocks[0], "docs/agents.md", "exec"), shown)
    argv = " ".join(shown["RECIPE"].agent.argv({"prompt": "p"}))
    for option in ("model=policy", "model_provider=turnlog", f'base_url="{GATEWAY_INSIDE}/v1"', 'wire_api="responses"'):
        assert option in argv
