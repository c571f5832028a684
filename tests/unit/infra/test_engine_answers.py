"""What the client makes of SGLang's answers that a served model does not give at will: other prompts, broken rows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from turnlog.infra.engines.protocol import EngineImage, EngineRefused, Generate, OutputChunk
from turnlog.infra.engines.sglang import SGLang

PROMPT = [7, 9, 9, 8]


@contextlib.asynccontextmanager
async def engine(*, body: bytes = b"", **more: Any) -> AsyncIterator[tuple[SGLang, list[Any]]]:
    """A client of a server that gives every request one answer of SGLang's shape, and the bodies that it was sent.
    `more` goes beside or into the answer's meta_info; `body` stands for it all."""
    meta = {
        "completion_tokens": 1, "finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 3, None]],
        "weight_version": "0", **more.pop("meta", {}),
    }  # fmt: skip
    body = body or json.dumps({"output_ids": [3], "meta_info": meta, **more}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.decode().lower().split("\r\n") if line[:15] == "content-length:")
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        writer.close()

    asked: list[Any] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = SGLang(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        yield client, asked
    await client.close()


async def answer(client: SGLang, **more: Any) -> OutputChunk:
    """The one piece of a request."""
    request = Generate(**{"rid": "r", "input_ids": PROMPT, "temperature": 1.0, "max_new_tokens": 1, **more})
    (piece,) = [piece async for piece in client.generate(request, stream=False, timeout_s=30)]
    return piece


async def test_routed_experts_are_asked_from_a_position_and_come_as_bytes() -> None:
    async with engine(meta={"routed_experts": base64.b64encode(b"12345678").decode()}) as (client, asked):
        assert (await answer(client, experts_from=3)).experts == b"12345678"
        assert (await answer(client)).experts == b"12345678"
        first, second = asked
    assert (first["return_routed_experts"], first["routed_experts_start_len"]) == (True, 3)
    assert "return_routed_experts" not in second


async def test_routed_experts_that_are_no_base64_are_refused() -> None:
    async with engine(meta={"routed_experts": "!"}) as (client, _):
        with pytest.raises(EngineRefused, match="not base64"):
            await answer(client, experts_from=0)


async def test_an_image_goes_as_one_placeholder_and_the_ids_that_it_comes_to_must_be_those_given() -> None:
    images = (EngineImage("data:image/png;base64,AA", 1, 2), EngineImage("data:image/png;base64,BB", 4, 3))
    given = [7, 9, 9, 8, 9, 9, 9]
    async with engine(prompt_token_ids=given) as (client, asked):
        assert (await answer(client, input_ids=given, images=images)).ids == [3]
    assert asked[0]["input_ids"] == [7, 9, 8, 9]
    assert asked[0]["image_data"] == ["data:image/png;base64,AA", "data:image/png;base64,BB"]
    async with engine(prompt_token_ids=[7, 9, 9, 9, 8, 9, 9, 9]) as (client, _):
        with pytest.raises(EngineRefused, match="8 prompt ids that differ from the 7 given, from position 3 on"):
            await answer(client, input_ids=given, images=images)


async def test_pieces_of_a_stream_keep_the_label_that_each_came_with_until_the_engine_gives_spans() -> None:
    def event(label: str, count: int, **more: Any) -> bytes:
        meta = {"completion_tokens": count, "finish_reason": None, "weight_version": label, **more,
                "output_token_logprobs": [[-0.5, 3, None]] * count}  # fmt: skip
        return b"data: " + json.dumps({"output_ids": [3] * count, "meta_info": meta}).encode() + b"\n\n"

    spans = [{"version": "1", "end": 1, "start": 0}, {"version": "2", "end": 4, "start": 1}]
    last = event("2", 4, weight_versions=spans, finish_reason={"type": "length"})
    body = event("1", 1) + event("1", 2) + event("2", 3) + last
    async with engine(body=body) as (client, _):
        request = Generate(rid="r", input_ids=PROMPT, temperature=1.0, max_new_tokens=4)
        pieces = [piece async for piece in client.generate(request, stream=True, timeout_s=30)]
    assert [piece.versions for piece in pieces] == [
        (("1", 1),), (("1", 2),), (("1", 2), ("2", 1)), (("1", 1), ("2", 3)),
    ]  # fmt: skip
