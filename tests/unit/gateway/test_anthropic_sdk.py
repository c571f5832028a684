"""The official `anthropic` package as a client: what it makes of answers, streams, tools, errors and time-outs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import AsyncAnthropic, beta_async_tool

from tests.unit.gateway.conftest import WINDOW
from tests.unit.gateway.test_anthropic_messages import ASK, CALL, OTHER, ROOM, THINKS, TOOLS, boundaries
from tests.unit.gateway.test_anthropic_messages import settings as settings
from tests.unit.gateway.test_anthropic_messages import template as template
from turnlog.schemas.events import Boundary

MODEL = "claude-haiku-of-some-kind"


@pytest.fixture
async def client(rig: Any) -> AsyncIterator[AsyncAnthropic]:
    """Of a session of its own; it asks once."""
    session = await rig.open(sampling=ROOM)
    async with AsyncAnthropic(base_url=rig.url, api_key=session["token"], max_retries=0) as client:
        yield client


@asynccontextmanager
async def told(client: AsyncAnthropic, hook: Callable[[Any], None], retries: int) -> AsyncIterator[Any]:
    """The client, which asks again; the hook is told of each answer."""

    async def answered(response: Any) -> None:
        hook(response)

    async with anthropic.DefaultAsyncHttpxClient(event_hooks={"response": [answered]}) as http:
        yield client.with_options(max_retries=retries, http_client=http)


async def asked(client: AsyncAnthropic, stream: bool, **more: Any) -> anthropic.types.Message:
    """The message, by either way."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": [ASK], **more}
    if not stream:
        return await client.messages.create(**body)
    async with client.messages.stream(**body) as events:
        texts = "".join([text async for text in events.text_stream])
        message = await events.get_final_message()
    assert texts == "".join(block.text for block in message.content if block.type == "text")
    return message


def answered(message: anthropic.types.Message, texts: dict[str, str]) -> list[Any]:
    """The conversation so far with the results of its calls, by expression: blocks are handed back as they came."""
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": texts[str(block.input["expr"])]}
        for block in message.content
        if block.type == "tool_use"
    ]
    return [ASK, {"role": "assistant", "content": message.content}, {"role": "user", "content": results[::-1]}]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_is_read(rig: Any, client: AsyncAnthropic, stream: bool) -> None:
    rig.script.says("12; 34")
    message = await asked(client, stream, stop_sequences=[";"], system="be brief")
    [turn] = await rig.written("TurnCompleted")
    assert [(block.type, block.text) for block in message.content] == [("text", "12")]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("stop_sequence", ";", "assistant")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (turn.prompt_tokens, turn.output_tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", [THINKS])
async def test_tools_go_round_with_what_was_thought(rig: Any, client: AsyncAnthropic, stream: bool) -> None:
    rig.script.says(f"<think>3 and 5</think>so: {CALL}{OTHER}")
    message = await asked(client, stream, tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message.content[0].thinking, message.content[2].input) == ("3 and 5", {"expr": "3+5"})
    assert message.stop_reason == "tool_use"
    rig.script.says("8 and 2")
    last = await asked(client, stream, tools=TOOLS, messages=answered(message, {"3+5": "8", "1+1": "2"}))
    assert last.content[0].text == "8 and 2"
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_own_loop_calls_a_tool_until_there_is_an_answer(
    rig: Any, client: AsyncAnthropic, stream: bool
) -> None:
    @beta_async_tool
    async def calc(expr: str) -> str:
        """Evaluate an arithmetic expression."""
        return {"3+5": "8"}[expr]

    rig.script.says(CALL)
    rig.script.says("8")
    runner = client.beta.messages.tool_runner(
        max_tokens=200, model=MODEL, tools=[calc], messages=[{"role": "user", "content": "3 + 5 = ?"}], stream=stream
    )
    last = await runner.until_done()
    assert [block.text for block in last.content] == ["8"]
    assert (await boundaries(rig))[1:] == [(Boundary.append, "append")]


async def test_tokens_are_counted_and_models_listed(rig: Any, client: AsyncAnthropic) -> None:
    counted = await client.messages.count_tokens(model=MODEL, messages=[ASK], tools=TOOLS)
    message = await asked(client, False, tools=TOOLS)
    assert counted.input_tokens == message.usage.input_tokens
    name = rig.settings.model.name
    assert [model.id async for model in client.models.list()] == [name]
    one = await client.models.retrieve("claude-opus-of-some-kind")
    assert (one.id, one.display_name) == ("claude-opus-of-some-kind", name)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_refusal_is_the_sdks_own_kind_of_error(rig: Any, client: AsyncAnthropic, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: \\d+ tokens > {WINDOW} maximum") as said:
        await asked(client, stream, messages=[{"role": "user", "content": "x y " * WINDOW}])
    assert said.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await asked(client, stream, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        await asked(client.with_options(api_key="wrong"), stream)
    rig.held.down = True
    with pytest.raises(anthropic.InternalServerError) as away:
        await asked(client, False)
    assert (away.value.status_code, away.value.type) == (503, "overloaded_error")


async def test_a_bearer_token_opens_the_same_door(rig: Any) -> None:
    session = await rig.open()
    async with AsyncAnthropic(base_url=rig.url, auth_token=session["token"], api_key=None) as client:
        assert (await asked(client, True)).content[0].text == "1"


async def test_a_failure_within_a_stream_is_raised(rig: Any, client: AsyncAnthropic) -> None:
    rig.engines["e0"].context = 1  # the engine refuses every prompt
    with pytest.raises(anthropic.APIStatusError, match="do not fit") as said:
        await asked(client, True)
    assert said.value.type == "api_error"


async def test_what_may_succeed_later_is_asked_again_and_what_never_will_is_not(
    rig: Any, client: AsyncAnthropic
) -> None:
    statuses: list[int] = []

    def hook(response: Any) -> None:
        statuses.append(response.status_code)
        rig.engines["e0"].context = WINDOW

    rig.engines["e0"].context = 1
    async with told(client, hook, retries=2) as persistent:
        assert (await asked(persistent, False)).content[0].text == "1"
        assert statuses == [502, 200]
        with pytest.raises(anthropic.BadRequestError):
            await asked(persistent, False, messages=[])
        assert statuses == [502, 200, 400]
    assert len(await rig.written("TurnCompleted")) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_waits_no_longer_takes_its_request_along_and_may_ask_again(
    rig: Any, client: AsyncAnthropic, stream: bool
) -> None:
    engine = rig.engines["e0"]
    engine.holds_after = 1
    rig.script.says("12")
    impatient = client.with_options(timeout=anthropic.Timeout(0.1, connect=30.0))
    with pytest.raises((anthropic.APITimeoutError, httpx2.ReadTimeout)):  # this, where a stream had begun
        await asked(impatient, stream)
    while not engine.aborted:  # noqa: ASYNC110 - what is waited for is a state of the gateway
        await asyncio.sleep(0.005)
    engine.holds_after = None
    rig.script.says("34")
    assert (await asked(client, stream)).content[0].text == "34"
