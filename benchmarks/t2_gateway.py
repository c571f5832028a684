"""T2: what the gateway adds to a turn, at the median of 32 sessions at once. Each session takes 100 turns of a
conversation that grows by about 160 tokens a turn, in every dialect, whole and streamed; the first and the last six
are measured.

Client, gateway and engine are processes of their own; the engine takes a fixed time and says always the same. Taken off
is the time of the same bodies through a bare proxy to that engine, in the same run and at the same place of the
conversation. Streamed turns are timed to the first text, too. The log is one broker. With TURNLOG_ENGINE_KIND=vllm the
engine speaks as vLLM does (vllm_gateway.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import aiohttp
import orjson
import psutil
import uvicorn
import uvloop
from chaos.servers import TURNLOG, environment, servers
from row import say, size, told
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.engines.vllm import GENERATE as GENERATE_OF_VLLM
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.schemas.events import EngineRegistered
from turnlog.settings import Settings

SESSIONS, TURNS, DELAY_S = size((32, 100, 1.0), smallest=(2, 4, 0.02))
EDGE = size(6, smallest=1)
"""Turns at either end that are measured; those between them are answered at once."""
GOAL_MS, GOAL_GROWTH = 5.0, 1.2
ANSWER, QUESTION = "7" * 60, "8 + 9 = ? " * 10
MEASURED = (*range(EDGE), *range(TURNS - EDGE, TURNS))
WINDOW = 1 << 20
KEY = "key-of-this-benchmark"
DIALECTS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
KIND = os.environ.get("TURNLOG_ENGINE_KIND", "sglang")
ROW = "T2-VLLM" if KIND == "vllm" else "T2"
GENERATE = GENERATE_OF_VLLM if KIND == "vllm" else "/generate"
TEXT = {"chat": b'"content":"7', "messages": b'"text":"7', "responses": b'"delta":"7', "bare": b"_ids"}
"""What the first event with text has in it."""


@dataclasses.dataclass(slots=True)
class Times:
    """Seconds by turn, of every session."""

    whole: list[list[float]] = dataclasses.field(default_factory=lambda: [[] for _ in MEASURED])
    first: list[list[float]] = dataclasses.field(default_factory=lambda: [[] for _ in MEASURED])
    core_ms: float = 0.0
    """Core-milliseconds of gateway or proxy per turn, over all turns; they hardly depend on the load of the machine."""

    def over(self, bare: Times, *, first: bool = False) -> list[float]:
        """Milliseconds more than the bare proxy, at the median of each turn."""
        pairs = zip(self.first, bare.first, strict=True) if first else zip(self.whole, bare.whole, strict=True)
        return [1000 * (median(ours) - median(theirs)) for ours, theirs in pairs]


def body(dialect: str, turn: int, *, stream: bool) -> dict[str, Any]:
    """The request for a turn: all that was said, and the next question."""
    said = [message for _ in range(turn) for message in (USER, ASSISTANT)]
    more: dict[str, Any] = {"max_tokens": 512} if dialect == "messages" else {}
    where = "input" if dialect == "responses" else "messages"
    return {"model": "m", where: [*said, USER], "stream": stream, **more}


USER = {"role": "user", "content": QUESTION}
ASSISTANT = {"role": "assistant", "content": ANSWER}


async def conversed(http: aiohttp.ClientSession, url: str, token: str, mark: bytes, bodies: list[bytes], times: Times,
                    turns: range, *, stream: bool) -> None:  # fmt: skip
    """Some turns of one session."""
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    for turn in turns:
        content = bodies[turn]
        began, first = time.perf_counter(), 0.0
        async with http.post(url, data=content, headers=headers) as answer:
            async for part in answer.content.iter_any():
                if not first and mark in part:
                    first = time.perf_counter() - began
        if answer.status != 200 or (stream and not first):
            raise SystemExit(f"{url} answered {answer.status}, turn {turn}: {part[:500]!r}")
        if turn in MEASURED:
            times.whole[MEASURED.index(turn)].append(time.perf_counter() - began)
            times.first[MEASURED.index(turn)].append(first)


async def measured(
    http: aiohttp.ClientSession, engine: str, name: str, url: str, tokens: list[str], *, stream: bool
) -> Times:
    """Every session at once; they begin spread over the time of a turn."""
    times = Times()
    dialect = "chat" if name == "bare" else name
    bodies = [orjson.dumps(body(dialect, turn, stream=stream)) for turn in range(TURNS)]

    async def one(number: int, token: str, turns: range, apart_s: float) -> None:
        await asyncio.sleep(apart_s * number / SESSIONS)
        await conversed(http, url, token, TEXT[name], bodies, times, turns, stream=stream)

    parts = ((range(EDGE), DELAY_S), (range(EDGE, TURNS - EDGE), 0.0), (range(TURNS - EDGE, TURNS), DELAY_S))
    for turns, delay_s in parts:
        async with http.post(f"{engine}/pace", params={"of": delay_s}):
            pass
        await asyncio.gather(*(one(number, token, turns, delay_s) for number, token in enumerate(tokens)))
    return times


async def sessions(http: aiohttp.ClientSession, url: str, name: str) -> list[str]:
    """Tokens of new sessions."""
    tokens = []
    for number in range(SESSIONS):
        asked = {"rollout_id": f"{name}-{number}", "group_id": f"{name}-{number}", "sampling": {"max_new_tokens": 512}}
        async with http.post(f"{url}/sessions", json=asked, headers={"authorization": f"Bearer {KEY}"}) as answer:
            tokens.append((await answer.json())["token"])
    return tokens


async def measure(settings: Settings) -> int:
    """Bare proxy and every dialect, whole and streamed."""
    gateway, engine, proxy = (f"http://{HOST}:{port}" for port in free_ports(3))
    settings = prepared(settings, gateway, engine)
    folder, this = Path(settings.run.directory), (sys.executable, __file__)
    variables = {
        "TURNLOG_MODEL_PATH": settings.model.path, "TURNLOG_GATEWAY_URL": gateway, "TURNLOG_GATEWAY_SIGNING_KEY": KEY,
        "TURNLOG_GATEWAY_PORT": gateway.rpartition(":")[2], "TURNLOG_ENGINE_CONTEXT": str(WINDOW),
    }  # fmt: skip
    argvs = {
        "engine": (*this, "--engine", engine.rpartition(":")[2], settings.model.path),
        "proxy": (*this, "--proxy", proxy.rpartition(":")[2], engine), "gateway": (*TURNLOG, "role", "gateway"),
    }  # fmt: skip
    async with (
        open_role("bench", settings) as role,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        await configure(role)
        await role.events.append(registered(settings))
        children = [
            Child(Launch(name=name, argv=argv, log=folder / f"{name}.log",
                         env=environment(settings, f"{name}-0") | variables)).start()
            for name, argv in argvs.items()
        ]  # fmt: skip
        try:
            for url in (f"{engine}/ready", f"{proxy}/ready", f"{gateway}/readyz"):
                await there(http, url)
            spent = {child.launch.name: psutil.Process(child.pid) for child in children}
            found = await all_measured(http, engine, gateway, proxy + GENERATE, spent)
        finally:
            for child in reversed(children):
                child.stop()
    return report(found)


async def all_measured(
    http: aiohttp.ClientSession, engine: str, gateway: str, bare: str, processes: Mapping[str, psutil.Process]
) -> dict[tuple[str, bool], Times]:
    """By dialect and whether it is streamed."""
    found = {}
    for stream in (False, True):
        for name in ("bare", *DIALECTS):
            tokens = [""] * SESSIONS if name == "bare" else await sessions(http, gateway, f"{name}-{stream}")
            url = bare if name == "bare" else gateway + DIALECTS[name]
            process = processes["proxy" if name == "bare" else "gateway"]
            before_s = sum(process.cpu_times()[:2])
            found[name, stream] = times = await measured(http, engine, name, url, tokens, stream=stream)
            times.core_ms = 1000 * (sum(process.cpu_times()[:2]) - before_s) / (SESSIONS * TURNS)
            took = median(itertools.chain.from_iterable(times.whole))
            say(f"{name}{' streamed' * stream}: {1000 * took:.1f} ms a turn")
    return found


def core_s(process: psutil.Process) -> float:
    """Processor seconds of a process so far."""
    spent = process.cpu_times()
    return spent.user + spent.system


def report(found: dict[tuple[str, bool], Times]) -> int:
    """The line: the dialect that costs most."""
    detail: dict[str, Any] = {}
    worst, growth = 0.0, 0.0
    for (name, stream), times in found.items():
        if name == "bare":
            bare_s = median(map(median, times.whole)) - DELAY_S
            costs = {"p50_ms": round(1000 * bare_s, 2), "core_ms": round(times.core_ms, 2)}
            detail[f"proxy{'_streamed' * stream}"] = costs
            continue
        over = times.over(found["bare", stream])
        early, late = median(over[:EDGE]), median(over[-EDGE:])
        detail[f"{name}{'_streamed' * stream}"] = one = {
            "p50_ms": round(median(over), 2), "first_turns_ms": round(early, 2), "last_turns_ms": round(late, 2),
            "core_ms": round(times.core_ms, 2),
        }  # fmt: skip
        worst, growth = max(worst, median(over)), max(growth, late / early)
        if stream:
            first = median(times.over(found["bare", stream], first=True))
            one["first_text_ms"] = round(first, 2)
            worst = max(worst, first)
    return told(
        id=ROW, value=worst, unit="ms", goal=GOAL_MS, met=worst <= GOAL_MS and growth <= GOAL_GROWTH,
        detail={**detail, "growth": round(growth, 2), "goal_growth": GOAL_GROWTH, "sessions": SESSIONS, "turns": TURNS,
                "engine_s": DELAY_S},
    )  # fmt: skip


def registered(settings: Settings) -> EngineRegistered:
    """What the loader of its engine would write."""
    return EngineRegistered(
        event_id="e", run_id=settings.run.id, engine_id="e", url=settings.engine.urls[0], state="serving", version=0,
        model="m", kind=KIND,
    )  # fmt: skip


def prepared(settings: Settings, gateway: str, engine: str) -> Settings:
    """With a policy's folder without weights."""
    model = Path(settings.run.directory) / "model"
    model.mkdir()
    RECIPE.warm_start.write_tokenizer(model)
    config = {**RECIPE.warm_start.model.config(), "max_position_embeddings": WINDOW}
    (model / "config.json").write_text(json.dumps(config))
    replace = dataclasses.replace
    return replace(
        settings,
        model=replace(settings.model, path=str(model)),
        gateway=replace(settings.gateway, url=gateway, signing_key=KEY),
        engine=replace(settings.engine, urls=(engine,)),
    )


async def there(http: aiohttp.ClientSession, url: str) -> None:
    """Wait until it answers."""
    async with asyncio.timeout(60):
        while True:
            try:
                async with http.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)


def engine(port: int, model: str) -> None:
    """Says always the same, half of it after half the time. Source: sglang 0.5.23 `entrypoints/http_server.py`."""
    ids = [*TextTokens(Path(model)).encode(ANSWER), 2]

    def said(count: int) -> bytes:
        whole = count == len(ids)
        meta = {
            "id": "r", "finish_reason": {"type": "stop"} if whole else None, "completion_tokens": count,
            "output_token_logprobs": [[-0.5, token, None] for token in ids[:count]], "weight_version": "0",
            "cached_tokens": 0,
        }  # fmt: skip
        return orjson.dumps({"output_ids": ids[:count], "meta_info": meta})

    def said_by_vllm(first: int, count: int, **more: object) -> bytes:
        """The next tokens, in the form of vllm 0.32.0 with turnlog's plugin."""
        content = [{"token_id": token, "logprob": -0.5, "rank": 1} for token in ids[first:count]]
        choice = {
            "index": 0, "finish_reason": "stop" if count == len(ids) else None, "token_ids": ids[first:count],
            "logprobs": {"content": content}, "weight_versions": [{"version": "0", "start": 0, "end": count}],
        }  # fmt: skip
        return orjson.dumps({"choices": [choice], **more})

    half, whole = said(len(ids) // 2), said(len(ids))
    rest = whole
    if KIND == "vllm":
        half, rest, whole = (
            said_by_vllm(0, len(ids) // 2),
            said_by_vllm(len(ids) // 2, len(ids)),
            said_by_vllm(0, len(ids)),
        )
    delay_s = DELAY_S

    async def pace(request: Request) -> Response:
        nonlocal delay_s
        delay_s = float(request.query_params["of"])
        return Response()

    async def events() -> AsyncIterator[bytes]:
        await asyncio.sleep(delay_s / 2)
        yield b"data: " + half + b"\n\n"
        await asyncio.sleep(delay_s / 2)
        yield b"data: " + rest + b"\n\ndata: [DONE]\n\n"

    async def generate(request: Request) -> Response:
        if b'"stream":true' in await request.body():  # reading it is an engine's work and not the gateway's
            return StreamingResponse(events(), media_type="text/event-stream")
        await asyncio.sleep(delay_s)
        return Response(whole, media_type="application/json")

    async def models(_: Request) -> Response:
        return Response(orjson.dumps({"data": [{"id": "m", "max_model_len": WINDOW}]}), media_type="application/json")

    serve(port, [
        Route(GENERATE, generate, methods=["POST"]), Route("/pace", pace, methods=["POST"]),
        Route("/v1/models", models),
    ])  # fmt: skip


def proxy(port: int, behind: str) -> None:
    """Passes on."""
    http: list[aiohttp.ClientSession] = []

    async def generate(request: Request) -> Response:
        if not http:
            http.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        content = await request.body()

        async def answer() -> AsyncIterator[bytes]:
            async with http[0].post(behind + GENERATE, data=content) as said:
                async for part in said.content.iter_any():
                    yield part

        return StreamingResponse(answer())

    serve(port, [Route(GENERATE, generate, methods=["POST"])])


def serve(port: int, routes: list[Route]) -> None:
    """Until it is ended."""
    app = Starlette(routes=[*routes, Route("/ready", lambda _: Response())])
    uvicorn.run(app, host=HOST, port=port, log_level="warning")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        engine(int(sys.argv[2]), sys.argv[3])
    elif sys.argv[1:2] == ["--proxy"]:
        proxy(int(sys.argv[2]), sys.argv[3])
    else:
        with servers(f"bench-{uuid4().hex[:8]}") as settings:
            raise SystemExit(uvloop.run(measure(settings)))
