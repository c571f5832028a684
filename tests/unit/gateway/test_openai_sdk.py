"""The official `openai` package as a client of the gateway: both of its APIs, whole and streamed, errors, retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.unit.gateway.conftest import WINDOW
from tests.unit.gateway.test_gateway_retries import until
from turnlog.infra.engines.protocol import EngineRefused
from turnlog.schemas.events import Boundary, FinishReason

APIS = ["chat", "responses"]
MODEL = "any-name"
QUESTION: Any = {"role": "user", "content": "3 + 5 = ?"}
SAID = 'let me see <tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call>'
FLAT: Any = {"type": "function", "name": "calc", "parameters": {"type": "object", "properties": {}}, "strict": True}
NESTED: Any = {"type": "function", "function": {name: value for name, value in FLAT.items() if name != "type"}}


@asynccontextmanager
async def connected(
    rig: Any, session: Any, *, answered: Callable[[httpx.Response], None] = lambda _: None, **more: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of one session. `answered`: told of each answer, repeats included."""

    async def hook(response: httpx.Response) -> None:
        answered(response)

    async with (
        httpx.AsyncClient(event_hooks={"response": [hook]}, timeout=60) as http,
        openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key=session["token"], http_client=http, **more) as client,
    ):
        yield client


async def ask(client: openai.AsyncOpenAI, api: str, said: str = "3 + 5 = ?", **more: Any) -> Any:
    """One turn; its text."""
    if api == "chat":
        chat = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": said}], **more)
        return chat.choices[0].message.content
    return (await client.responses.create(model=MODEL, input=said, **more)).output_text


@pytest.mark.parametrize("api", APIS)
async def test_a_turn_is_read_whole_and_streamed(rig: Any, api: str) -> None:
    session = await rig.open()
    async with connected(rig, session) as client:
        rig.script.says("it is 8")
        assert await ask(client, api) == "it is 8"
        rig.script.says("it is 8")
        texts: list[str] = []
        if api == "chat":
            async with client.chat.completions.stream(model=MODEL, messages=[QUESTION]) as chat:
                texts = [event.delta async for event in chat if event.type == "content.delta"]
                final = (await chat.get_final_completion()).choices[0].message.content
        else:
            async with client.responses.stream(model=MODEL, input=[QUESTION]) as stream:
                texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
                final = (await stream.get_final_response()).output_text
        assert ("".join(texts), final) == ("it is 8", "it is 8")
        assert [model.id async for model in client.models.list()] == [rig.settings.model.name]


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_go_round_in_chat_completions(rig: Any, stream: bool) -> None:
    session = await rig.open()
    messages: list[Any] = [QUESTION]
    async with connected(rig, session) as client:
        rig.script.says(SAID)
        if stream:
            async with client.chat.completions.stream(model=MODEL, messages=messages, tools=[NESTED]) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            chat = await client.chat.completions.create(model=MODEL, messages=messages, tools=[NESTED])
            message = chat.choices[0].message  # type: ignore[assignment]
        [call] = message.tool_calls or []
        assert (message.content, call.function.arguments) == ("let me see", '{"expr":"3+5"}')
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "8"}]
        await client.chat.completions.create(model=MODEL, messages=messages, tools=[NESTED])
    assert [each.boundary for each in await rig.written("TokenSnapshot")] == [Boundary.root, Boundary.append]


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_tools_go_round_in_responses(rig: Any, stream: bool, by_name: bool) -> None:
    session = await rig.open()
    async with connected(rig, session) as client:
        rig.script.says(SAID)
        response: Response
        if stream:
            async with client.responses.stream(model=MODEL, input=[QUESTION], tools=[FLAT]) as events:
                response = await events.get_final_response()
        else:
            response = await client.responses.create(model=MODEL, input=[QUESTION], tools=[FLAT])
        [call] = [item for item in response.output if item.type == "function_call"]
        assert (response.output_text, call.arguments) == ("let me see", '{"expr":"3+5"}')
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
        given: list[Any] = [result] if by_name else [QUESTION, *response.output, result]
        named: Any = {"previous_response_id": response.id} if by_name else {"store": False}
        await client.responses.create(model=MODEL, input=given, tools=[FLAT], **named)
    assert [each.boundary for each in await rig.written("TokenSnapshot")] == [Boundary.root, Boundary.append]


async def test_every_response_and_event_is_as_the_packages_models_have_them(rig: Any) -> None:
    event_of: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    async with connected(rig, await rig.open()) as client:
        for said, limit in (("8", 40), (SAID, 40), ("12345678", 3)):
            rig.script.says(said)
            raw = await client.responses.with_raw_response.create(
                model=MODEL, input="3 + 5 = ?", max_output_tokens=limit, tools=[FLAT]
            )
            whole = Response.model_validate(raw.http_response.json(), strict=True)
            assert whole.status == ("completed" if limit == 40 else "incomplete")
            rig.script.says(said)
            stream = await client.responses.create(
                model=MODEL, input="3 + 5 = ?", max_output_tokens=limit, tools=[FLAT], stream=True
            )
            events = [event_of.validate_python(event.to_dict()) async for event in stream]
            assert [item.type for item in events[-1].response.output] == [item.type for item in whole.output]


async def test_a_response_is_retrieved_and_deleted(rig: Any) -> None:
    async with connected(rig, await rig.open()) as client:
        made = await client.responses.create(model=MODEL, input="3 + 5 = ?")
        shown = await client.responses.retrieve(made.id)
        assert (shown.output_text, shown.usage) == (made.output_text, made.usage)
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError, match=made.id):
            await client.responses.retrieve(made.id)


class Sum(BaseModel):
    sum: int


@pytest.mark.parametrize("api", APIS)
async def test_a_schema_holds_where_nothing_trains_and_is_refused_where_it_does(rig: Any, api: str) -> None:
    async def parsed(client: openai.AsyncOpenAI) -> Sum | None:
        if api == "chat":
            chat = await client.chat.completions.parse(model=MODEL, messages=[QUESTION], response_format=Sum)
            return chat.choices[0].message.parsed
        return (await client.responses.parse(model=MODEL, input=[QUESTION], text_format=Sum)).output_parsed

    async with connected(rig, await rig.open("eval", purpose="eval")) as client:
        rig.engines["e0"].fitting = lambda _: [*rig.tokens.encode('{"sum":8}'), 2]
        assert await parsed(client) == Sum(sum=8)
    async with connected(rig, await rig.open("train")) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await parsed(client)
    assert refused.value.code == "constraint_refused"


@pytest.mark.parametrize("api", APIS)
async def test_refusals_are_the_exceptions_that_clients_expect_and_are_not_asked_again(rig: Any, api: str) -> None:
    session, answers = await rig.open(), list[httpx.Response]()
    key = {"extra_headers": {"Idempotency-Key": "k"}}
    async with connected(rig, session, answered=answers.append) as client:
        cases: list[tuple[type[openai.APIStatusError], str, Any]] = [
            (openai.BadRequestError, "invalid_request", ask(client, api, tools="all")),
            (openai.BadRequestError, "context_length_exceeded", ask(client, api, "3" * 2 * WINDOW)),
            (openai.AuthenticationError, "invalid_api_key", ask(client.with_options(api_key="no"), api)),
        ]
        for kind, code, asked in cases:
            with pytest.raises(kind) as refused:
                await asked
            assert refused.value.code == code
        await ask(client, api, **key)
        with pytest.raises(openai.ConflictError) as conflict:  # which the package would ask again by its status
            await ask(client, api, "another", **key)
        assert conflict.value.code == "idempotency_key_reused"
        await rig.finish(session)
        with pytest.raises(openai.BadRequestError) as over:
            await ask(client, api, "go on")
        assert over.value.code == "session_finished"
    assert len(answers) == len(cases) + 3, "each was asked once"
    assert len(await rig.written("TurnCompleted")) == 1


@pytest.mark.parametrize("api", APIS)
async def test_what_may_succeed_later_is_asked_again_by_itself(rig: Any, api: str) -> None:
    answers, engine = list[httpx.Response](), rig.engines["e0"]

    def refuses(_: Any) -> list[int]:
        engine.script = rig.script
        raise EngineRefused("not now")

    async with connected(rig, await rig.open(), answered=answers.append, max_retries=2) as client:
        engine.script = refuses
        rig.script.says("it is 8")
        assert await ask(client, api) == "it is 8"
    assert [answer.status_code for answer in answers] == [502, 200]
    assert len(await rig.written("TurnCompleted")) == 1


@pytest.mark.parametrize("api", APIS)
async def test_a_client_whose_time_is_up_takes_its_request_along(rig: Any, api: str) -> None:
    session, engine = await rig.open(), rig.engines["e0"]
    rig.script.says("it is 8")
    engine.holds_after = 3
    async with connected(rig, session, max_retries=0) as client:
        asked = asyncio.create_task(ask(client, api, timeout=1.0))
        await engine.reached.wait()
        with pytest.raises(openai.APITimeoutError):
            await asked
        await until(lambda: engine.aborted)
        engine.holds_after = None
        rig.script.says("it is 8")
        assert await ask(client, api) == "it is 8"
    turns = {turn.turn.index: turn.finish_reason for turn in await rig.written("TurnCompleted")}
    assert turns == {0: FinishReason.abort, 1: FinishReason.stop}


async def test_a_stream_that_fails_is_an_error_of_a_chat_and_a_failed_response(rig: Any) -> None:
    async with connected(rig, await rig.open()) as client:
        rig.held.down = True
        chat = await client.chat.completions.create(model=MODEL, messages=[QUESTION], stream=True)
        with pytest.raises(openai.APIError, match="could not be recorded"):
            [chunk async for chunk in chat]
        stream = await client.responses.create(model=MODEL, input=[QUESTION], stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert (last.response.status, last.response.output) == ("failed", [])
