"""SGLang's HTTP contract over the engine in memory, as a process that can be killed: what the chaos run of answers
samples from. `python benchmarks/chaos/scripted_engine.py PORT MODEL_FOLDER`.

Every final answer is another number, so that an answer tells which turn gave it. An abort is heard late, as SGLang
hears one between two steps: what is nearly done is finished although nobody waits.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import orjson
import servers  # noqa: F401 - finds tests.fakes
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.memory_engine import MemoryEngine
from turnlog.infra.engine import Generate, Piece
from turnlog.producers.gateway.prompts import TextTokens

CALL = '<tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call>'
ANSWERED = "tool\n"
TOKEN_S = 0.003
HEARD_S = 0.15
"""The longest time until an abort is heard."""
CONTEXT = 2048


class Slow(MemoryEngine):
    """Takes its time for each token, and to hear of an abort."""

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[Piece]:
        """See Engine."""
        async for piece in super().generate(request, stream=True, timeout_s=timeout_s):
            await asyncio.sleep(TOKEN_S)
            yield piece

    async def abort(self, rid: str) -> None:
        """See Engine."""
        await asyncio.sleep(random.uniform(0.0, HEARD_S))
        await super().abort(rid)


def policy(tokens: TextTokens) -> MemoryEngine:
    """Calls the tool, then answers with a number that nobody else gives."""

    def script(prompt: Sequence[int]) -> list[int]:
        said = str(random.getrandbits(64)) if ANSWERED in tokens.literal(prompt) else CALL
        return tokens.encode(f"{said}<|im_end|>")

    return Slow(vocabulary=tokens.vocabulary, context=CONTEXT, script=script)


def application(engine: MemoryEngine) -> Starlette:
    """POST /generate and /abort_request. Source: sglang 0.5.23 `entrypoints/http_server.py`."""

    async def generate(request: Request) -> Response:
        body = orjson.loads(await request.body())
        sampling = body["sampling_params"]
        wanted = Generate(
            rid=body["rid"], input_ids=body["input_ids"], temperature=sampling["temperature"],
            max_new_tokens=sampling["max_new_tokens"], stop_token_ids=tuple(sampling.get("stop_token_ids", ())),
        )  # fmt: skip
        answers = _answers(engine, wanted)
        if not body["stream"]:
            *_, last = [answer async for answer in answers]
            return Response(orjson.dumps(last), media_type="application/json")

        async def events() -> AsyncIterator[bytes]:
            async for answer in answers:
                yield b"data: " + orjson.dumps(answer) + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def abort(request: Request) -> Response:
        await engine.abort(orjson.loads(await request.body())["rid"])
        return Response()

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/abort_request", abort, methods=["POST"]),
            Route("/ready", lambda _: Response()),
        ]
    )


async def _answers(engine: MemoryEngine, wanted: Generate) -> AsyncIterator[dict[str, object]]:
    """Each repeats all output so far."""
    ids: list[int] = []
    logprobs: list[float] = []
    async for piece in engine.generate(wanted, stream=True, timeout_s=60.0):
        ids += piece.ids
        logprobs += piece.logprobs
        yield {
            "output_ids": ids,
            "meta_info": {
                "id": wanted.rid,
                "finish_reason": piece.finish and {"type": piece.finish},
                "completion_tokens": len(ids),
                "output_token_logprobs": [[value, one, None] for value, one in zip(logprobs, ids, strict=True)],
                "weight_version": engine.version,
                "cached_tokens": 0,
            },
        }


if __name__ == "__main__":
    app = application(policy(TextTokens(Path(sys.argv[2]))))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
