"""The engine protocol on the fake, real SGLang and real vLLM: ids in; ids, log-probs and versions out; aborts."""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_engine import MemoryEngine, joined
from tests.fakes.weights import adapter
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.engines.protocol import (
    Adapter,
    Engine,
    EngineDead,
    EngineRefused,
    EngineUnreachable,
    Generate,
    Grammar,
    OutputChunk,
)
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.engines.vllm import VLLM
from turnlog.infra.tensors.versions import fetch
from turnlog.producers.gateway.parsers.formats import FORMATS, only_call, only_json
from turnlog.producers.gateway.parsers.parser import Delimiters, OutputParser, ParsedCall, Reasoning
from turnlog.producers.gateway.prompts import UNKNOWN, TextTokens
from turnlog.trainer.weights import read_weights

PROMPT = [10, 20, 30, 40]
CONTEXT = 512


@pytest.fixture(params=["fake", *(pytest.param(kind, marks=pytest.mark.engine) for kind in ("sglang", "vllm"))])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """Each engine in turn; all have a vocabulary of 384 and a window of 512."""
    found: Engine
    if request.param == "fake":
        found = MemoryEngine(vocabulary=384, context=CONTEXT)
    elif request.param == "sglang":
        found = SGLang(request.getfixturevalue("engine_url"))
    else:
        found = VLLM(request.getfixturevalue("vllm_engine_url"))
    yield found
    await found.close()


def _request(**more: Any) -> Generate:
    values: dict[str, Any] = {"input_ids": PROMPT, "temperature": 1.0, "max_new_tokens": 12, **more}
    return Generate(rid=uuid.uuid4().hex, **values)


async def _pieces(engine: Engine, request: Generate, *, stream: bool) -> list[OutputChunk]:
    return [piece async for piece in engine.generate(request, stream=stream, timeout_s=60)]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_output_id_has_a_logprob_and_a_version(engine: Engine, stream: bool) -> None:
    pieces = await _pieces(engine, _request(), stream=stream)
    assert len(pieces) == 1 or stream
    assert [piece.finish is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    reached = itertools.accumulate(len(piece.ids) for piece in pieces)
    assert [sum(tokens for _, tokens in piece.versions) for piece in pieces] == list(reached)  # of each piece at once
    whole = joined(pieces)
    assert whole.finish in ("length", "stop")
    assert len(whole.ids) == len(whole.logprobs) == sum(length for _, length in whole.versions)
    assert len(whole.ids) == 12 or whole.finish == "stop"
    assert all(0 <= token < 384 for token in whole.ids)
    assert all(logprob <= 0 for logprob in whole.logprobs)


async def test_a_stop_id_ends_the_output_and_stays_in_it(engine: Engine) -> None:
    every = tuple(range(384))
    for stream in (False, True):
        whole = joined(await _pieces(engine, _request(stop_token_ids=every), stream=stream))
        assert (whole.finish, len(whole.ids), len(whole.logprobs)) == ("stop", 1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_output_with_the_token_that_completes_it(
    engine: Engine, tiny_model: Path, stream: bool
) -> None:
    tokens = TextTokens(tiny_model)
    if isinstance(engine, MemoryEngine):
        engine.decode = tokens.decode
    free = joined(await _pieces(engine, _request(temperature=0.0), stream=False)).ids
    pairs = (tokens.decode(free[at : at + 2]) for at in range(len(free) - 1))
    text = next(pair for pair in pairs if len(pair) > 1 and UNKNOWN not in pair)
    end = next(at for at in range(len(free) + 1) if text in tokens.decode(free[:at]))
    whole = joined(await _pieces(engine, _request(temperature=0.0, stop=(text,)), stream=stream))
    assert (whole.finish, whole.ids, len(whole.logprobs)) == ("stop", free[:end], end)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.engine)])
async def adapted(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> AsyncIterator[Engine]:
    """Either engine with adapter 9 on weights labelled 0."""
    if request.param == "fake":
        fake = MemoryEngine(vocabulary=384, context=CONTEXT)
        fake.adapters = {"9"}
        yield fake
        return
    real, control = (one(request.getfixturevalue("lora_engine_url")) for one in (SGLang, SGLangControl))
    blobs, matrices = MemoryBlobs(), {name: one for name, one in read_weights(tiny_model).items() if "_proj" in name}
    await fetch(await adapter(matrices, 9, blobs, adapts=0), blobs, tmp_path)
    await control.label("0")  # whoever had the engine before left another
    await control.load_adapter(tmp_path, 9, timeout_s=60)
    yield real
    await control.unload_adapter(9, patience_s=60)
    await real.close()
    await control.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_output_of_an_adapter_is_labelled_with_it_and_one_that_is_not_there_is_of_a_restart(
    adapted: Engine, stream: bool
) -> None:
    whole = joined(await _pieces(adapted, _request(adapter=Adapter("9", "0")), stream=stream))
    assert whole.versions == (("9", len(whole.ids)),)
    for other in (Adapter("8", "0"), Adapter("9", "7")):
        with pytest.raises(EngineDead):
            await _pieces(adapted, _request(adapter=other), stream=stream)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_under_a_grammar_fits_it(engine: Engine, tiny_model: Path, stream: bool) -> None:
    tokens = TextTokens(tiny_model)
    if isinstance(engine, MemoryEngine):
        engine.decode, engine.fitting = tokens.decode, lambda _: tokens.encode('{"a":true}')
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    request = _request(grammar=Grammar("json_schema", json.dumps(schema)), max_new_tokens=CONTEXT - len(PROMPT) - 1)
    whole = joined(await _pieces(engine, request, stream=stream))
    end = len(whole.ids) - (whole.finish == "stop" and whole.ids[-1] in tokens.special)
    assert json.loads(tokens.decode(whole.ids[:end])) in ({"a": True}, {"a": False})
    assert len(whole.ids) == len(whole.logprobs)


CALLS = {
    "hermes": '<tool_call>\n{"name": "set", "arguments": {"a":true}}\n</tool_call>',
    "llama3": '{"name": "set", "parameters": {"a":true}}',
    "mistral": '[TOOL_CALLS][{"name": "set", "arguments": {"a":true}}]',
    "glm4": 'set\n{"a":true}',
}
SET = {"type": "object", "properties": {"a": {"const": True}}, "required": ["a"], "additionalProperties": False}
OFFERED = [{"function": {"name": "other", "parameters": {}}}, {"function": {"name": "set", "parameters": SET}}]


SOON = Delimiters("<think>", "r")
"""Reasoning that also a model which knows nothing brings to an end."""


@pytest.mark.parametrize(
    ("family", "thinking"), [("hermes", None), ("hermes", SOON), ("llama3", None), ("mistral", None), ("glm4", None)]
)
async def test_an_output_that_must_be_a_call_is_one_for_the_parser_of_its_family(
    engine: Engine, tiny_model: Path, family: str, thinking: Delimiters | None
) -> None:
    tokens, calls, inside = TextTokens(tiny_model), FORMATS[family], thinking is not None
    if isinstance(engine, MemoryEngine):
        said = f"her {CALLS[family]}" if inside else CALLS[family]
        engine.decode, engine.fitting = tokens.decode, lambda _: tokens.encode(said)
    tag = only_call(calls, OFFERED, "set", thinking, inside=inside)
    assert tag is not None
    request = _request(grammar=Grammar("structural_tag", tag), max_new_tokens=CONTEXT - len(PROMPT) - 1)
    whole = joined(await _pieces(engine, request, stream=False))
    ended = whole.finish == "stop" and tokens.is_control(whole.ids[-1])
    parser = OutputParser(calls, thinking, inside, OFFERED)
    parser.push(text := tokens.decode(whole.ids[: len(whole.ids) - ended]))
    parser.end()
    assert [part for part in parser.parts if not isinstance(part, Reasoning)] == [ParsedCall("set", '{"a":true}')], text


async def test_an_output_that_must_be_json_may_be_thought_of_first(engine: Engine, tiny_model: Path) -> None:
    tokens = TextTokens(tiny_model)
    if isinstance(engine, MemoryEngine):
        engine.decode, engine.fitting = tokens.decode, lambda _: tokens.encode('her {"a":true}')
    tag = only_json(json.dumps(SET), SOON, inside=True)
    request = _request(grammar=Grammar("structural_tag", tag), max_new_tokens=CONTEXT - len(PROMPT) - 1)
    whole = joined(await _pieces(engine, request, stream=False))
    ended = whole.finish == "stop" and tokens.is_control(whole.ids[-1])
    _, closing, said = tokens.decode(whole.ids[: len(whole.ids) - ended]).partition(SOON.closing)
    assert closing
    assert json.loads(said) == {"a": True}


async def test_what_does_not_fit_the_window_is_refused(engine: Engine) -> None:
    for stream in (False, True):
        with pytest.raises(EngineRefused):
            await _pieces(engine, _request(max_new_tokens=CONTEXT), stream=stream)


async def test_requests_run_at_the_same_time(engine: Engine) -> None:
    answers = await asyncio.gather(*(_pieces(engine, _request(), stream=bool(n % 2)) for n in range(8)))
    assert all(joined(answer).finish for answer in answers)


async def test_an_aborted_request_ends_with_what_it_has(engine: Engine) -> None:
    if isinstance(engine, MemoryEngine):
        engine.holds_after = 3
    request = _request(max_new_tokens=CONTEXT - len(PROMPT) - 1, stop_token_ids=())
    pieces = []
    async for piece in engine.generate(request, stream=True, timeout_s=60):
        pieces.append(piece)
        if sum(len(each.ids) for each in pieces) == 3 or (len(pieces) == 1 and not isinstance(engine, MemoryEngine)):
            await engine.abort(request.rid)
    whole = joined(pieces)
    assert whole.finish in ("abort", "stop")  # a natural stop may win the race
    assert 0 < len(whole.ids) < request.max_new_tokens
    assert len(whole.ids) == len(whole.logprobs) == sum(length for _, length in whole.versions)


@pytest.mark.parametrize("client", [SGLang, VLLM])
async def test_nobody_home_is_a_dead_engine(client: Callable[[str], Engine]) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for closed in (False, True):
        if closed:
            server.close()
            await server.wait_closed()
        engine = client(f"http://127.0.0.1:{port}")
        for stream in (False, True):
            with pytest.raises(EngineDead, match=str(port)) as dead:
                await _pieces(engine, _request(), stream=stream)
            assert isinstance(dead.value, EngineUnreachable) == closed
        with pytest.raises(EngineDead) as dead:
            await engine.abort("x")
        assert isinstance(dead.value, EngineUnreachable) == closed
        await engine.close()
    fake = MemoryEngine(vocabulary=384, context=CONTEXT)
    fake.kill()
    with pytest.raises(EngineUnreachable):
        await _pieces(fake, _request(), stream=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dense_model_has_no_routed_experts_to_give(engine: Engine, stream: bool) -> None:
    whole = joined(await _pieces(engine, _request(experts_from=2), stream=stream))
    assert whole.ids
    assert whole.experts is None
