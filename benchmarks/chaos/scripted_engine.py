"""SGLang's HTTP contract over the engine in memory, as a process that can be killed: what the chaos run of answers
samples from. `python benchmarks/chaos/scripted_engine.py PORT MODEL_FOLDER [--host 0.0.0.0] [--right 0.5] [--by-ids]
[--unscripted]`.

Every final answer is another number, so that an answer tells which turn gave it; a share of them, if so wished, is what
the tool said, so that groups differ within and are trained. With --by-ids every output is a function of the prompt's
ids alone: some turns of one or two calls of `note`, then an answer; with --unscripted it is a hash of them. Log-probs
depend on the tensors that a loader had it load, and while it is paused it gives no token. An abort is heard late, as
SGLang hears one between two steps: what is nearly done is finished although nobody waits. POST /version?of=3 stands for
loading weights; POST /pace?of=0.5 is the time that a token takes from now on, POST /rate?of=20 how many requests begin
in a second at most; GET /running tells which requests run, GET /served how many ever came.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import random
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import servers  # noqa: F401 - finds tests.fakes
import uvicorn
from scripted_receiver import HeldTensors
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.memory_engine_control import MemoryEngineControl
from turnlog.infra.engines.protocol import UNLABELLED, EngineRefused, Generate, OutputChunk
from turnlog.producers.gateway.prompts import TextTokens

CALL = '<tool_call>{{"name":"calc","arguments":{{"expr":"{}"}}}}</tool_call>'
NOTE = '<tool_call>{{"name":"note","arguments":{{"line":"{}"}}}}</tool_call>'
FEWEST = 2
"""Turns with calls."""
NUMBERED = re.compile(r"task (\d+)")
TURN = "<|im_start|>assistant"
ASKED = re.compile(r"(\d [-+*] \d) = ")
SAID = re.compile(r"tool\n(-?\d+)")
ANSWERED = "tool\n"
TOKEN_S = 0.003
HEARD_S = 0.15
"""The longest time until an abort is heard."""
LOAD_S = 0.05
"""Of weights."""
CONTEXT = 2048


class Slow(MemoryEngine):
    """Takes its time for each token, and to hear of an abort; may let requests begin one after the other; can be
    paused."""

    token_s = TOKEN_S
    per_s = math.inf
    """Requests that begin in a second, at most."""
    _next = 0.0

    def __init__(self, **of: Any) -> None:
        super().__init__(**of)
        self.going = asyncio.Event()
        self.going.set()

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        """See Engine."""
        now = time.monotonic()
        self._next = max(now, self._next) + 1 / self.per_s
        await asyncio.sleep(self._next - now)
        self.requests.clear()  # a test may want to see all of them; this one may run for days
        await self.going.wait()
        async for piece in super().generate(request, stream=True, timeout_s=timeout_s):
            await asyncio.sleep(self.token_s)
            yield piece
            await self.going.wait()

    async def abort(self, rid: str) -> None:
        """See Engine."""
        await asyncio.sleep(random.uniform(0.0, HEARD_S))
        await super().abort(rid)


def policy(tokens: TextTokens, *, right: float) -> Slow:
    """Calls the tool, then answers with a number that nobody else gives, or in a share of `right` with the tool's."""

    def script(prompt: Sequence[int]) -> list[int]:
        text = tokens.literal(prompt)
        if ANSWERED not in text:
            (asked,) = ASKED.findall(text)
            said = CALL.format(asked.replace(" ", ""))
        else:
            told = SAID.findall(text)
            said = told[0] if told and random.random() < right else str(random.getrandbits(64))
        return tokens.encode(f"{said}<|im_end|>")

    return Slow(vocabulary=tokens.vocabulary, context=CONTEXT, script=script)


def by_ids(tokens: TextTokens) -> Slow:
    """Calls `note` in FEWEST turns or some more, at times twice in a turn, then says a number."""

    def script(prompt: Sequence[int]) -> list[int]:
        digest = hashlib.sha256(repr(list(prompt)).encode()).hexdigest()
        text = tokens.literal(prompt)
        (task,) = NUMBERED.findall(text)
        turn = text.count(TURN) - 1
        said = digest[:8]
        if turn < FEWEST + int(task) % 3:
            calls = 1 + int(digest[8], 16) % 2
            said = "".join(NOTE.format(f"{task}.{turn}.{number}.{digest[:4]}") for number in range(calls))
        return tokens.encode(f"{said}<|im_end|>")

    return Slow(vocabulary=tokens.vocabulary, context=CONTEXT, script=script)


def application(engine: Slow, control: MemoryEngineControl) -> Starlette:
    """POST /generate and /abort_request, and what a loader asks. Source: sglang 0.5.23 `entrypoints/http_server.py`."""

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
        asked = orjson.loads(await request.body())
        if asked.get("abort_all"):
            engine.abort_all()
        else:
            await engine.abort(asked["rid"])
        return Response()

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/abort_request", abort, methods=["POST"]),
            Route("/ready", lambda _: Response()),
            Route("/health_generate", lambda _: Response()),
            *remote(engine),
            *controls(engine, control),
        ]
    )


def remote(engine: Slow) -> list[Route]:
    """What a test says to it, and asks of it."""

    async def version(request: Request) -> Response:
        engine.version = request.query_params["of"]
        return Response()

    async def pace(request: Request) -> Response:
        engine.token_s = float(request.query_params["of"])
        return Response()

    async def rate(request: Request) -> Response:
        engine.per_s = float(request.query_params["of"])
        return Response()

    async def running(_: Request) -> Response:
        return Response(orjson.dumps(list(engine.live)))

    async def served(_: Request) -> Response:
        return Response(orjson.dumps(len(engine.requests)))

    async def loads(_: Request) -> Response:
        rank = {"dp_rank": 0, "num_running_reqs": len(engine.live), "num_waiting_reqs": 0}
        return Response(orjson.dumps({"loads": [rank]}))

    return [
        Route("/pace", pace, methods=["POST"]),
        Route("/rate", rate, methods=["POST"]),
        Route("/version", version, methods=["POST"]),
        Route("/running", running),
        Route("/served", served),
        Route("/v1/loads", loads),
    ]


def controls(engine: Slow, control: MemoryEngineControl) -> list[Route]:
    """Weights, as a loader or training ranks hand them over."""
    held = HeldTensors(engine)

    async def model_info(_: Request) -> Response:
        info = await control.model_info()
        return Response(orjson.dumps({"weight_version": info.weight_version, "model_path": info.model_path}))

    async def pause(_: Request) -> Response:
        await control.pause()
        engine.going.clear()
        return Response(b"{}")

    async def resume(_: Request) -> Response:
        await control.resume()
        engine.going.set()
        return Response(b"{}")

    async def label(request: Request) -> Response:
        engine.version = orjson.loads(await request.body())["new_version"]
        await control.label(engine.version)
        return Response(b"{}")

    async def load(request: Request) -> Response:
        body = orjson.loads(await request.body())
        await asyncio.sleep(LOAD_S)
        try:
            await control.load(Path(body["model_path"]), int(body["weight_version"]), timeout_s=0.0)
        except EngineRefused as refused:
            return Response(orjson.dumps({"success": False, "message": str(refused)}))
        engine.version = body["weight_version"]
        held.read(Path(body["model_path"]))
        return Response(orjson.dumps({"success": True}))

    return [
        Route("/model_info", model_info),
        Route("/pause_generation", pause, methods=["POST"]),
        Route("/continue_generation", resume, methods=["POST"]),
        Route("/update_weights_from_disk", load, methods=["POST"]),
        Route("/update_weight_version", label, methods=["POST"]),
        *held.routes(),
    ]


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
                "weight_versions": piece.finish and list(_spans(piece)),
                "cached_tokens": 0,
            },
        }


def _spans(piece: OutputChunk) -> Iterator[dict[str, object]]:
    start = 0
    for label, count in piece.versions:
        yield {"version": label, "start": start, "end": start + count}
        start += count


def main() -> None:
    """Parse and serve."""
    parser = argparse.ArgumentParser(description="Answer as SGLang does, by a script.")
    parser.add_argument("port", type=int)
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--right", type=float, default=0.0, help="share of right answers")
    parser.add_argument("--by-ids", action="store_true", help="nothing is random")
    parser.add_argument("--unscripted", action="store_true", help="answer any prompt")
    arguments = parser.parse_args()
    tokens = TextTokens(arguments.model)
    if arguments.unscripted:
        engine = Slow(vocabulary=tokens.vocabulary, context=CONTEXT, version=UNLABELLED)
    else:
        engine = by_ids(tokens) if arguments.by_ids else policy(tokens, right=arguments.right)
    app = application(engine, MemoryEngineControl(arguments.model))
    uvicorn.run(app, host=arguments.host, port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
