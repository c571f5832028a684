"""P1: share of the time in which an engine has a request to run, with 64 sessions at once whose tools take 20 times as
long as a turn of the policy.

Real broker, gateway, runner and sandboxes. The engine runs 16 requests at once and takes the same time for each; the
tools sleep, from half to one and a half of 20 times that. In theory a session alone keeps the engine busy for
g / (g + t), and n of them that know nothing of each other for 1 - (1 - g / (g + t)) ** n of the time, which is more
than is measured: what turnlog adds to a turn and a call lengthens t. `[runner] concurrency = 1` is the same without
pipelining: one session after the other.

    python benchmarks/p1_busy.py [--chart FILE.png]
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import aiohttp
import orjson
import uvicorn
import uvloop
from chaos.servers import TURNLOG, environment, servers
from row import say, size, told
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from t2_gateway import KEY, prepared, registered, there

from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.schemas import ids
from turnlog.schemas.events import Limits, Purpose, RolloutRequested, Sampling
from turnlog.settings import Settings

TURN_S, LEVELS, WINDOW_S, ROLLOUTS = size((0.15, (1, 4, 16, 64), 45.0, 640), smallest=(0.01, (1,), 0.5, 20))
TOOL_S, SPREAD = 20 * TURN_S, 0.5
CALLS = 4
"""Of a session; then it answers."""
ENGINE_CONCURRENCY = 16
GOAL = 0.7
CALL = '<tool_call>{{"name":"calc","arguments":{{"expr":"__import__(\'time\').sleep({:.3f}) or 8"}}}}</tool_call>'
"""The calculator prints what it is told to."""


def theory(sessions: float) -> float:
    """Share of the time in which at least one of them is at the engine."""
    return 1 - (1 - TURN_S / (TURN_S + TOOL_S)) ** sessions


def requested(settings: Settings, number: int) -> RolloutRequested:
    """A rollout of the calculator."""
    group, index = f"group-{number // 2}", number % 2
    rollout = ids.rollout_id(group, index)
    return RolloutRequested(
        event_id=rollout, run_id=settings.run.id, group_id=group, floor=0, task_id=group, rollout_id=rollout,
        rollout_index=index, group_size=2, draw=0, dataset="bench", dataset_epoch=0, index=0, recipe="calc",
        purpose=Purpose.train, task=json.dumps({"prompt": "3 + 5 = ?", "answer": "8"}).encode(),
        sampling=Sampling(max_new_tokens=128), min_weight_version=0,
        limits=Limits(max_turns=CALLS + 1, max_context_tokens=2048, deadline_s=600.0),
    )  # fmt: skip


@asynccontextmanager
async def process(settings: Settings, name: str, *argv: str, **variables: str) -> AsyncIterator[None]:
    """Stopped at the end."""
    env = environment(settings, f"{name}-0") | {
        "TURNLOG_MODEL_PATH": settings.model.path, "TURNLOG_GATEWAY_URL": settings.gateway.url,
        "TURNLOG_GATEWAY_SIGNING_KEY": KEY, **variables,
    }  # fmt: skip
    argv = argv or (*TURNLOG, "role", name)
    child = Child(Launch(name=name, argv=argv, log=Path(settings.run.directory) / f"{name}.log", env=env)).start()
    try:
        yield
    finally:
        await asyncio.to_thread(child.stop)


async def busy(http: aiohttp.ClientSession, engine: str, sessions: int) -> dict[str, float]:
    """What the engine counted in a window that begins when every session has had three turns."""

    async def counted(turns: float) -> dict[str, float]:
        async with http.get(f"{engine}/busy", params={"turns": turns}) as answer:
            found: dict[str, float] = await answer.json()
            return found

    begun = await counted(0)
    async with asyncio.timeout(WINDOW_S + 120):
        now = await counted(begun["turns"] + 3 * sessions)
    await asyncio.sleep(WINDOW_S)
    then = await counted(0)
    took = then["at"] - now["at"]
    return {
        "busy": round((then["busy_s"] - now["busy_s"]) / took, 4), "theory": round(theory(sessions), 4),
        "turns_per_s": round((then["turns"] - now["turns"]) / took, 2), "most_at_once": then["most"],
    }  # fmt: skip


async def measured(role: Role, settings: Settings) -> dict[int, dict[str, float]]:
    """Sessions at once -> what was seen. Requests wait on the log, so that one that ends makes room for the next."""
    await configure(role)
    await role.events.append(registered(settings))
    for number in range(ROLLOUTS):
        await role.events.append(requested(settings, number))
    engine, gateway, found = settings.engine.urls[0], settings.gateway.url, {}
    script = (sys.executable, __file__, "--engine", engine.rpartition(":")[2], settings.model.path)
    async with (
        process(settings, "engine", *script),
        process(settings, "gateway", TURNLOG_GATEWAY_PORT=gateway.rpartition(":")[2]),
        process(settings, "sandbox", TURNLOG_SANDBOX_SLOTS=str(max(LEVELS))),
        aiohttp.ClientSession() as http,
    ):
        for url in (f"{engine}/ready", f"{gateway}/readyz"):
            await there(http, url)
        for sessions in LEVELS:
            async with process(settings, "runner", TURNLOG_RUNNER_CONCURRENCY=str(sessions)):
                found[sessions] = await busy(http, engine, sessions)
            say(f"{sessions} sessions: {found[sessions]}")
    return found


async def measure(settings: Settings, chart: str | None) -> int:
    """Every level; the line."""
    gateway, engine = (f"http://{HOST}:{port}" for port in free_ports(2))
    settings = prepared(settings, gateway, engine)
    async with open_role("bench", settings) as role:
        found = await measured(role, settings)
    if chart:
        draw(found, Path(chart))
    most = LEVELS[-1]
    return told(
        id="P1", value=100 * found[most]["busy"], unit="%", goal=100 * GOAL, met=found[most]["busy"] >= GOAL,
        detail={
            "sessions": found, "without_pipelining": found[1]["busy"], "turn_s": TURN_S, "tool_s": TOOL_S,
            "tool_spread": f"uniform, {1 - SPREAD:g} to {1 + SPREAD:g} of tool_s", "calls": CALLS,
            "engine_concurrency": ENGINE_CONCURRENCY,
        },
    )  # fmt: skip


def draw(found: dict[int, dict[str, float]], path: Path) -> None:
    """What was measured, over the line of the theory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    line = [2 ** (power / 4) for power in range(29)]
    axes.plot(line, [100 * theory(count) for count in line], color="0.6", label="theory")
    axes.plot(list(found), [100 * each["busy"] for each in found.values()], "o", color="tab:blue", label="measured")
    axes.axhline(100 * GOAL, color="tab:green", linewidth=0.8, linestyle=":", label="goal at 64")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(found), [str(count) for count in found])
    axes.set(xlabel="sessions at once", ylabel="engine busy, % of the time", ylim=(0, 102))
    axes.set_title("Tools of 20 times a turn's length", fontsize="medium")
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=110)


class Engine:
    """Calls the tool CALLS times, then answers; counts when it runs anything. Source: sglang 0.5.23
    `entrypoints/http_server.py`."""

    def __init__(self, model: Path) -> None:
        self._tokens, self._rng = TextTokens(model), random.Random(0)
        self._slots, self._another = asyncio.Semaphore(ENGINE_CONCURRENCY), asyncio.Event()
        self._running, self._most, self._turns = 0, 0, 0
        self._busy_s, self._since = 0.0, 0.0

    async def generate(self, request: Request) -> Response:
        """The same time for each."""
        body = orjson.loads(await request.body())
        async with self._slots:
            if not self._running:
                self._since = time.perf_counter()
            self._running, self._turns = self._running + 1, self._turns + 1
            self._most = max(self._most, self._running)
            self._another.set()
            await asyncio.sleep(TURN_S)
            self._running -= 1
            if not self._running:
                self._busy_s += time.perf_counter() - self._since
        output = self._said(body["input_ids"])
        meta = {
            "id": body["rid"], "finish_reason": {"type": "stop", "matched": output[-1]}, "cached_tokens": 0,
            "completion_tokens": len(output), "weight_version": "0", "prompt_tokens": len(body["input_ids"]),
            "output_token_logprobs": [[-0.5, token, None] for token in output],
        }  # fmt: skip
        content = orjson.dumps({"text": "", "output_ids": output, "meta_info": meta})
        if body["stream"]:
            return Response(b"data: " + content + b"\n\ndata: [DONE]\n\n", media_type="text/event-stream")
        return Response(content, media_type="application/json")

    def _said(self, prompt: list[int]) -> list[int]:
        over = self._tokens.literal(prompt).count("tool\n") >= CALLS
        sleeps = TOOL_S * self._rng.uniform(1 - SPREAD, 1 + SPREAD)
        return self._tokens.encode(("8" if over else CALL.format(sleeps)) + "<|im_end|>")

    async def counted(self, request: Request) -> Response:
        """Waits until there were so many turns."""
        while self._turns < float(request.query_params["turns"]):
            self._another.clear()
            await self._another.wait()
        now = time.perf_counter()
        busy_s = self._busy_s + (now - self._since if self._running else 0.0)
        content = orjson.dumps({"at": now, "busy_s": busy_s, "turns": self._turns, "most": self._most})
        return Response(content, media_type="application/json")


def serve(port: int, model: str) -> None:
    """An engine, until it is ended."""
    engine = Engine(Path(model))
    routes = [
        Route("/generate", engine.generate, methods=["POST"]), Route("/busy", engine.counted),
        Route("/ready", lambda _: Response()),
    ]  # fmt: skip
    uvicorn.run(Starlette(routes=routes), host=HOST, port=port, log_level="warning")


def main(*arguments: str) -> int:
    """Measure, or be the engine of a measurement."""
    if arguments[:1] == ("--engine",):
        serve(int(arguments[1]), arguments[2])
        return 0
    chart = arguments[1] if arguments[:1] == ("--chart",) else None
    with servers(f"bench-{uuid4().hex[:8]}") as settings:
        return uvloop.run(measure(settings, chart))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
