"""What the client makes of vLLM's answers that a served model does not give at will, and what is asked of vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from turnlog.infra.engines.kinds import control_engine
from turnlog.infra.engines.protocol import (
    Adapter,
    CannotReceive,
    EngineControl,
    EngineDead,
    EngineImage,
    EngineRefused,
    Generate,
    OutputChunk,
)
from turnlog.infra.engines.vllm import NO_LOGPROB, VLLM, VLLMControl

PROMPT = [7, 9, 9, 8]
WINDOW = 16


def choice(*ids: int, finish: str | None = None, spans: list[tuple[str, int]] | None = None, **more: Any) -> Any:
    """A piece of output in vLLM's shape. `spans`: (version, tokens) of all output so far."""
    lengths = [length for _, length in spans or ()]
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    named = [
        {"version": version, "start": start, "end": start + length}
        for (version, length), start in zip(spans or (), starts, strict=True)
    ]
    content = [{"token_id": token, "logprob": -0.5, "rank": 1} for token in ids]
    found = {"token_ids": list(ids), "logprobs": {"content": content}, "finish_reason": finish}
    found["weight_versions"] = None if spans is None else named
    return {"choices": [found | more]}


@contextlib.asynccontextmanager
async def engine(*answers: Any, status: int = 200) -> AsyncIterator[tuple[str, list[Any]]]:
    """The address of a server that gives every POST these answers, one event each, and the bodies that it was sent."""
    asked: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(line[15:]) for line in head.split("\r\n") if line[:15] == "content-length:"), 0)
        body = await reader.readexactly(length)
        if head.startswith("get"):
            said, code = json.dumps({"data": [{"id": "m", "max_model_len": WINDOW}]}).encode(), 200
        else:
            asked.append(json.loads(body))
            code = status
            said = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in answers) + b"data: [DONE]\n\n"
            said = said if asked[-1].get("stream") else json.dumps(answers[0]).encode()
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (code, len(said)) + said)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


async def pieces(url: str, *, stream: bool = False, **more: Any) -> list[OutputChunk]:
    """The pieces of a request."""
    request = Generate(**{"rid": "r", "input_ids": PROMPT, "temperature": 1.0, "max_new_tokens": 8, **more})
    client = VLLM(url)
    try:
        return [piece async for piece in client.generate(request, stream=stream, timeout_s=30)]
    finally:
        await client.close()


USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}


async def test_pieces_that_name_their_weights_come_at_once_and_the_last_has_the_cached_tokens() -> None:
    answers = (
        choice(1, spans=[("4", 1)]),
        choice(2, spans=[("4", 1), ("5", 1)]),
        choice(3, finish="stop", spans=[("4", 1), ("5", 2)]),
    )
    async with engine(*answers, USAGE) as (url, _):
        found = await pieces(url, stream=True)
    assert [(piece.ids, piece.finish, piece.cached_tokens) for piece in found] == [
        ([1], None, 0), ([2], None, 0), ([3], "stop", 3)
    ]  # fmt: skip
    assert [piece.versions for piece in found] == [(("4", 1),), (("4", 1), ("5", 1)), (("4", 1), ("5", 2))]


async def test_pieces_that_do_not_name_their_weights_are_held_until_the_last_one_does() -> None:
    async with engine(choice(1), choice(2), choice(3, finish="length", spans=[("4", 3)]), USAGE) as (url, _):
        (whole,) = await pieces(url, stream=True)
    assert (whole.ids, len(whole.logprobs), whole.finish, whole.versions) == ([1, 2, 3], 3, "length", (("4", 3),))
    assert whole.cached_tokens == 3


async def test_a_stream_that_ends_early_gives_no_token_of_unknown_weights() -> None:
    async with engine(choice(1), choice(2)) as (url, _):
        with pytest.raises(EngineDead, match="without a finish reason"):
            await pieces(url, stream=True)


@each(
    "answer, why",
    [
        (choice(1, finish="stop"), "version 0.32"),
        (choice(1, finish="repetition", spans=[("4", 1)]), "repetition"),
        (choice(1, finish="stop", spans=[("4", 1)], logprobs={"content": []}), "other tokens"),
        (
            choice(1, finish="stop", spans=[("4", 1)], logprobs={"content": [{"token_id": 1, "logprob": NO_LOGPROB}]}),
            "no log-prob",
        ),
    ],
)
async def test_an_output_that_cannot_be_trained_is_refused(answer: Any, why: str) -> None:
    for stream in (False, True):
        async with engine(answer) as (url, _):
            with pytest.raises(EngineRefused, match=why):
                await pieces(url, stream=stream)


async def test_what_does_not_fit_the_window_is_refused_before_it_is_sent() -> None:
    async with engine(choice(1, finish="stop", spans=[("4", 1)])) as (url, asked):
        with pytest.raises(EngineRefused, match="window of 16"):
            await pieces(url, max_new_tokens=13)
        assert asked == []


async def test_an_error_within_a_stream_is_a_death_if_the_server_failed_and_else_a_refusal() -> None:
    for code, error in ((500, EngineDead), (400, EngineRefused)):
        async with engine(choice(1), {"error": {"message": "no", "code": code}}) as (url, _):
            with pytest.raises(error, match="no"):
                await pieces(url, stream=True)


@each(
    "more, setting",
    [
        ({"images": (EngineImage("data:image/png;base64,AA", 1, 2),)}, "engine. kind"),
        ({"adapter": Adapter("9", "0")}, "trainer. publish"),
        ({"temperature": 0.005}, "at temperature 0.01 if asked for 0.005: raise .feeder. temperature"),
    ],
)
async def test_what_vllm_is_not_asked_for_is_refused_with_the_setting(more: dict[str, Any], setting: str) -> None:
    async with engine(choice(1, finish="stop", spans=[("4", 1)])) as (url, asked):
        with pytest.raises(EngineRefused, match=setting):
            await pieces(url, **more)
        assert asked == []


async def test_the_key_of_the_cache_and_the_grammar_go_by_vllms_names() -> None:
    async with engine(choice(1, finish="stop", spans=[("4", 1)])) as (url, asked):
        await pieces(url, cache_key="4", stop=("x",), stop_token_ids=(2,))
    assert asked[0]["cache_salt"] == "4"
    assert {name: asked[0]["sampling_params"][name] for name in ("stop", "stop_token_ids", "logprobs")} == {
        "stop": ["x"], "stop_token_ids": [2], "logprobs": 0
    }  # fmt: skip


async def test_a_server_without_the_endpoints_of_updates_is_refused_with_the_variable() -> None:
    async with controlled("vllm", 404) as (control, _):
        with pytest.raises(EngineRefused, match="VLLM_SERVER_DEV_MODE=1"):
            await control.model_info()


@each("kind", ["sglang", "vllm"])
async def test_a_server_of_another_kind_is_refused_with_the_settings_of_kinds(kind: str) -> None:
    async with controlled(kind, 404) as (control, _):
        with pytest.raises(EngineRefused, match=rf"is it an engine of kind {kind}\? see .engine. kind and kinds$"):
            await control.model_info()


async def test_an_engine_whose_new_weights_get_no_label_must_not_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    async with controlled("vllm", 200, 200, 400) as (control, asked):
        with pytest.raises(EngineDead, match="new weights without their label"):
            await control.load(tmp_path, 1, timeout_s=30)
    assert asked == ["/update_weight_version", "/collective_rpc", "/update_weight_version"]


async def test_an_engine_without_metrics_of_its_requests_is_not_idle() -> None:
    async with controlled("vllm", 200) as (control, _):
        with pytest.raises(EngineRefused, match="--disable-log-stats"):
            await control.under_way()


@contextlib.asynccontextmanager
async def controlled(kind: str, *statuses: int) -> AsyncIterator[tuple[EngineControl, list[str]]]:
    """The control of a server that answers nothing with these statuses in turn, and the paths that it was asked for."""
    left, asked = iter(statuses), list[str]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split()[1].decode())
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % next(left))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        control = control_engine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", kind)
        yield control, asked
        await control.close()


async def test_what_a_control_does_not_offer_is_refused_with_the_setting(tmp_path: Path) -> None:
    control = VLLMControl("http://127.0.0.1:1")
    with pytest.raises(CannotReceive, match="durable copies"):
        await control.direct_ranks()
    for wanted, setting in ((control.release, "colocate"), (control.retake, "colocate")):
        with pytest.raises(EngineRefused, match=setting):
            await wanted()
    with pytest.raises(EngineRefused, match="publish"):
        await control.load_adapter(tmp_path, 1, timeout_s=1)
    with pytest.raises(EngineRefused, match="publish"):
        await control.unload_adapter(1, patience_s=1)
    with pytest.raises(EngineRefused, match="cannot load"):  # nothing is sent
        await control.load(tmp_path, 1, timeout_s=1)
    await control.close()
