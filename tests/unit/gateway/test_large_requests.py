"""One large request holds up nobody else: what cannot fit is refused before it is rendered, and what may fit is read,
rendered and tokenised while the gateway goes on answering."""

from __future__ import annotations

import asyncio
import json
import random
import string
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.unit.gateway.conftest import rigged, settings_of, until
from turnlog.infra.roles.event_loop import LARGE
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.producers.gateway.requests import Claims

MARKS = ["<|im_start|>", "<|im_end|>"]
LONGEST = max(map(len, MARKS))
WINDOW = 100_000
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for one in messages %}<|im_start|>{{ one.role }}\n"
    "{{ one.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MEANWHILE = 10
"""Answers that others get at least while a large request is worked on, and half as many streams: four and three where
it holds the loop."""
PATIENCE_S = 120.0
"""Of a client, on a machine that has other things to do."""
ROOM: dict[str, Any] = {"limits": {"max_context_tokens": WINDOW}}
NEVER = "{% if [messages, tools] | tojson | length > 9000 %}{{ raise_exception('this was rendered') }}{% endif %}"
"""Writes what a gateway tries at its start."""
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
OVERFLOW, TOO_LARGE = (400, "maximum context length", "prompt is too long"), (413, "JSON values", "JSON values")


def byte_level(*, normalizer: Any = None) -> Tokenizer:
    """A tokenizer that has an id for each byte."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return tokenizer


def folder_of(folder: Path, template: str, tokenizer: Tokenizer) -> Path:
    """A model's folder."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "max_position_embeddings": WINDOW,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Callable[[str], Any]:
    """A gateway for a template."""

    def started(template: str) -> Any:
        folder = folder_of(tmp_path / "large", template, byte_level())
        return rigged(settings_of(folder, tmp_path, context=WINDOW), folder)

    return started


def body(api: str, messages: list[Any], tools: list[str] = []) -> bytes:  # noqa: B006
    """A request of a dialect; tools by their names."""
    schema = {"type": "object", "properties": {}}
    offered: list[Any]
    match api:
        case "chat":
            offered = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in tools]
        case "responses":
            offered = [{"type": "function", "name": name, "parameters": schema} for name in tools]
        case _:
            offered = [{"name": name, "input_schema": schema} for name in tools]
    return orjson.dumps({"model": "m", "input" if api == "responses" else "messages": messages, "tools": offered})


async def ask(rig: Any, api: str, session: dict[str, Any], content: bytes) -> httpx.Response:
    headers = {"authorization": f"Bearer {session['token']}", "content-type": "application/json"}
    answer: httpx.Response = await rig.http.post(PATHS[api], content=content, headers=headers, timeout=PATIENCE_S)
    return answer


def of_text(api: str, size: int) -> bytes:
    letters = random.Random(0).choices(string.ascii_letters, k=size)
    return body(api, [{"role": "user", "content": "".join(letters)}])


@pytest.mark.parametrize("api", PATHS)
async def test_a_large_request_is_tokenised_while_others_are_answered(start: Any, api: str) -> None:
    """Its text might fit, as far as its length tells; that it does not is known when it is tokenised."""
    content = of_text(api, (WINDOW - 10) * LONGEST)
    async with start(TEMPLATE) as rig:
        session = await rig.open(**ROOM)
        request, answered = asyncio.create_task(ask(rig, api, session, content)), 0
        while not request.done():
            answered += (await rig.http.get("/healthz")).status_code == 200
        refused = await request
        assert refused.status_code == 400
        assert "at least" not in refused.text
        assert answered >= MEANWHILE


async def test_a_stream_of_another_session_goes_on_while_a_large_request_is_tokenised(start: Any) -> None:
    content = of_text("chat", (WINDOW - 10) * LONGEST)
    async with start(TEMPLATE) as rig:
        session, other = await rig.open(**ROOM), await rig.open("rollout-1", **ROOM)
        headers = {"authorization": f"Bearer {other['token']}"}
        streamed = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        request, streams = asyncio.create_task(ask(rig, "chat", session, content)), 0
        while not request.done():
            rig.script.answers.append([*rig.tokens.encode("abcdefgh"), rig.tokens.encode("<|im_end|>")[0]])
            async with rig.http.stream("POST", PATHS["chat"], json=streamed, headers=headers) as answer:
                streams += [line async for line in answer.aiter_lines() if line][-1] == "data: [DONE]"
        assert (await request).status_code == 400
        assert streams > MEANWHILE / 2


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("much", ["text", "messages", "tools", "blocks"])
async def test_what_cannot_fit_is_refused_before_it_is_rendered(start: Any, api: str, much: str) -> None:
    one = {"role": "user", "content": "x"}
    kind = "input_text" if api == "responses" else "text"
    content, (status, said, to_anthropic) = {
        "text": lambda: (of_text(api, 2 * WINDOW * LONGEST), OVERFLOW),
        "messages": lambda: (body(api, [one] * WINDOW), OVERFLOW),
        "tools": lambda: (body(api, [one], ["f"] * WINDOW), TOO_LARGE if api != "messages" else OVERFLOW),
        "blocks": lambda: (body(api, [{"role": "user", "content": [{"type": kind, "text": "x"}] * 10**6}]), TOO_LARGE),
    }[much]()
    async with start(NEVER) as rig:
        session = await rig.open(**ROOM)
        refused = await ask(rig, api, session, content)
        assert refused.status_code == status, refused.text
        assert (to_anthropic if api == "messages" else said) in refused.text


async def test_a_session_has_one_large_request_worked_on_at_a_time(start: Any) -> None:
    """So that no session takes every thread, and what waits for one is bounded as its turns are."""
    async with start(TEMPLATE) as rig:
        session = await rig.open(**ROOM)
        held = rig.gateway.sessions.held[session["session_id"]]
        async with held.large:
            most = held.limits.turns
            content = of_text("chat", LARGE)
            waiting = [asyncio.create_task(ask(rig, "chat", session, content)) for _ in range(2)]
            await until(lambda: held.waiting == 2)
            held.waiting = most
            assert (await ask(rig, "chat", session, content)).status_code == 429
            held.waiting = 2
            small = await rig.chat(session, [{"role": "user", "content": "hi"}])
            assert small.status_code == 200
            assert not any(one.done() for one in waiting)
        assert [one.status_code for one in await asyncio.gather(*waiting)] == [200, 200]
        assert held.waiting == 0


async def test_a_turn_that_adds_little_to_a_long_conversation_needs_no_thread(start: Any) -> None:
    async with start(TEMPLATE) as rig:
        session, first = await rig.open(**ROOM), {"role": "user", "content": "x" * 2 * LARGE}
        said = (await rig.chat(session, [first])).json()["choices"][0]["message"]
        async with rig.gateway.sessions.held[session["session_id"]].large:  # whoever needs a thread would wait
            assert (await rig.chat(session, [first, said, {"role": "user", "content": "hi"}])).status_code == 200


@pytest.mark.parametrize(("api", "most"), [("chat", 1), ("responses", 6), ("messages", 3)])
async def test_a_message_that_is_known_costs_few_calls(start: Any, api: str, most: int) -> None:
    """Of Python functions and generators, to read it, to find the turn that the request continues, and to prompt."""
    counts = []
    async with start(TEMPLATE) as rig:
        dialect = next(one for one in rig.gateway.dialects if one.path == PATHS[api])
        for number, pairs in enumerate((10, 110)):
            said = [{"role": role, "content": "x"} for _ in range(pairs) for role in ("user", "assistant")]
            session = await rig.open(f"rollout-{number}", **ROOM)
            assert (await ask(rig, api, session, body(api, [*said, said[0]]))).status_code == 200
            held = rig.gateway.sessions.held[session["session_id"]]
            [turn] = held.conversation.turns.values()
            again = body(api, [*said, said[0], {"role": "assistant", "content": turn.response_raw["content"]}, said[0]])
            calls = 0

            def note(_: Any, event: str, __: Any) -> None:
                nonlocal calls
                calls += event == "call"

            claims = Claims(session_id=held.id, group_id="g", floor=0)
            sys.setprofile(note)
            request = dialect.request(again, held.conversation)
            tokens = await rig.gateway.turns.planner.prompt_tokens(held, request, claims)
            sys.setprofile(None)
            assert tokens > turn.total
            assert held.conversation.base_of(request.messages) == (turn, len(said) + 2)
            counts.append(calls)
    assert (counts[1] - counts[0]) / 200 <= most, counts


async def test_twins_under_one_key_that_are_read_at_once_are_one_turn(start: Any) -> None:
    async with start(TEMPLATE) as rig:
        session, content = await rig.open(**ROOM), of_text("chat", LARGE)
        headers = {"authorization": f"Bearer {session['token']}", "idempotency-key": "k"}
        twins = [rig.http.post(PATHS["chat"], content=content, headers=headers) for _ in range(4)]
        answers = [one.json()["turnlog"]["index"] for one in await asyncio.gather(*twins)]
        assert answers == [0] * 4
        assert len(await rig.written("TurnCompleted")) == 1


@pytest.mark.parametrize(
    ("normalizer", "longest"),
    [(None, LONGEST), (normalizers.NFC(), 4 * LONGEST), (normalizers.Sequence([normalizers.NFC()]), 4 * LONGEST),
     (normalizers.Strip(), 0)],
)  # fmt: skip
def test_how_much_a_token_holds_is_known_where_nothing_is_taken_away(
    tmp_path: Path, normalizer: Any, longest: int
) -> None:
    """Else the length of a text says nothing of how many tokens it takes."""
    folder = folder_of(tmp_path / "model", TEMPLATE, byte_level(normalizer=normalizer))
    assert TextTokens(folder).longest == longest


def test_how_much_a_token_holds_is_not_known_where_unknown_text_is_passed_over(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert TextTokens(folder_of(tmp_path / "model", TEMPLATE, tokenizer)).longest == 0
