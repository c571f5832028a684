"""T4: turns a second through a gateway's recording path: a chat request on a context of 4,096 tokens, of which 256 are
new, read, answered with 512 tokens by an engine inside the process that takes no time, and both records acknowledged by
all before the answer leaves. 64 sessions at once, each asks again when it is answered.

The floor of the same run: an application that reads the same bodies with orjson, sends two records of the same bytes
with bare aiokafka, waits for both, and answers with what it read. Client, gateway and floor are processes of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median

import aiohttp
import orjson
import uvloop
from aiokafka import AIOKafkaProducer
from log_server import ACKS, LogServer, broker
from row import say, size, told
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from t2_gateway import serve, there

from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.engines.protocol import Generate, OutputChunk
from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Log, Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles import event_loop
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers.gateway.app import Gateway, listening, serving
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.schemas.events import EngineRegistered
from turnlog.schemas.topics import ENGINES, MAX_MESSAGE_BYTES, SESSIONS, SNAPSHOTS, TURNS, WEIGHTS
from turnlog.settings import EngineSettings, GatewaySettings, ModelSettings, RunSettings, Settings

CONTEXT, DELTA, NEW, PARTITIONS, KEY = 4096, 256, 512, 4, "bench"
CLIENTS, ROUNDS, EACH = size((64, 3, 40), smallest=(2, 1, 2))
GOAL_SHARE = 0.4
ASKED = {"role": "user", "content": "9" * (CONTEXT - DELTA - NEW)}
ANSWER = {"role": "assistant", "content": "7" * (NEW - 1)}
FLOOR = "floor"
RECORDS = (TURNS.name, SNAPSHOTS.name)


def body(number: int | None) -> bytes:
    """The first request of a session, or one that goes on behind its answer."""
    more = [] if number is None else [ANSWER, {"role": "user", "content": f"{number:0{DELTA}}"}]
    return orjson.dumps({"model": "m", "messages": [ASKED, *more]})


async def asked(http: aiohttp.ClientSession, url: str, token: str, content: bytes) -> None:
    """One turn."""
    async with http.post(url, data=content, headers={"authorization": f"Bearer {token}"}) as answer:
        said = await answer.read()
        if answer.status != 200:
            raise SystemExit(f"{url} answered {answer.status}: {said[:500]!r}")


async def rate(http: aiohttp.ClientSession, url: str, tokens: list[str], first: int) -> float:
    """Turns a second of a round, every session at once."""
    bodies = [body(first + number) for number in range(EACH)]

    async def session(token: str) -> None:
        for content in bodies:
            await asked(http, url, token, content)

    started = time.perf_counter()
    await asyncio.gather(*map(session, tokens))
    return len(tokens) * EACH / (time.perf_counter() - started)


async def measure(server: LogServer, folder: Path) -> int:
    """Rounds of ours and of the floor in turn."""
    ports, log = free_ports(2), server.log()
    config = {"max.message.bytes": str(MAX_MESSAGE_BYTES)}
    counts = {topic.name: PARTITIONS for topic in (SESSIONS, TURNS, SNAPSHOTS)}
    counts |= {ENGINES.name: 1, WEIGHTS.name: 1, FLOOR: 4}
    await log.create_topics([TopicSpec(name, count, 1, config) for name, count in counts.items()])
    gateway, floor = (f"http://{HOST}:{port}" for port in ports)
    rates: dict[str, list[float]] = {"gateway": [], "floor": []}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        await begun(stack, http, "gateway", ports[0], server, folder)
        tokens = [await opened(http, gateway, number) for number in range(CLIENTS)]
        url = f"{gateway}/v1/chat/completions"
        await asyncio.gather(*(asked(http, url, token, body(None)) for token in tokens))
        await rate(http, url, tokens, 0)
        for name in RECORDS:
            (folder / name).write_bytes(await newest(log, name))
        await begun(stack, http, "floor", ports[1], server, folder)
        await asked(http, f"{floor}/echo", tokens[0], body(None))  # which starts its producer
        await rate(http, f"{floor}/echo", tokens, 0)
        for number in range(1, ROUNDS + 1):
            rates["gateway"].append(await rate(http, url, tokens, number * EACH))
            rates["floor"].append(await rate(http, f"{floor}/echo", tokens, number * EACH))
            say(f"turns/s: { ({name: round(values[-1]) for name, values in rates.items()}) }")
    await log.close()
    return told(
        id="T4", value=median(rates["gateway"]), unit="turns/s", goal=None, met=True, rate=True,
        floor=median(rates["floor"]), goal_share=GOAL_SHARE,
        detail={
            "context_tokens": CONTEXT, "delta_tokens": DELTA, "new_tokens": NEW, "sessions": CLIENTS, "rounds": rates,
            "bytes_per_turn": sum((folder / name).stat().st_size for name in RECORDS),
            "floor_is": "orjson, the same bytes through bare aiokafka, and back what came", **ACKS,
        },
    )  # fmt: skip


async def begun(
    stack: contextlib.AsyncExitStack, http: aiohttp.ClientSession, name: str, port: int, server: LogServer, folder: Path
) -> None:
    """Start this file as `name`, and wait until it serves."""
    argv = (sys.executable, __file__, f"--{name}", str(port), server.bootstrap, server.prefix, str(folder))
    child = Child(Launch(name=name, argv=argv, log=folder / f"{name}.log")).start()
    stack.callback(child.stop)
    await there(http, f"http://{HOST}:{port}/ready{'z' * (name == 'gateway')}")


async def opened(http: aiohttp.ClientSession, url: str, number: int) -> str:
    """The token of a new session."""
    asked_for = {"rollout_id": f"r{number}", "group_id": f"g{number}", "sampling": {"max_new_tokens": NEW}}
    async with http.post(f"{url}/sessions", json=asked_for, headers={"authorization": f"Bearer {KEY}"}) as answer:
        token: str = (await answer.json())["token"]
        return token


async def newest(log: Log, topic: str) -> bytes:
    """The value of the last record that stands in a topic."""
    ends = await log.end_offsets([Partition(topic, number) for number in range(PARTITIONS)])
    async with log.reader() as reader:
        reader.assign({place: end - 1 for place, end in ends.items() if end})
        return (await reader.poll(timeout_s=5.0))[0].value


class AtOnce:
    """An engine that says always the same, in no time. See Engine."""

    def __init__(self, answer: list[int]) -> None:
        self._said = OutputChunk(
            ids=answer, logprobs=[-0.5 - 1 / (3 + at) for at in range(len(answer))], finish="stop",
            versions=(("0", len(answer)),),
        )  # fmt: skip

    async def generate(self, request: Generate, *, stream: bool, timeout_s: float) -> AsyncIterator[OutputChunk]:
        yield self._said

    async def abort(self, rid: str) -> None: ...

    async def alive(self, *, timeout_s: float) -> None: ...

    async def close(self) -> None: ...


async def gateway(port: int, log: Log, folder: Path) -> None:
    """Until it is ended. Its schemas and blobs are in memory."""
    RECIPE.warm_start.write_tokenizer(folder)
    (folder / "config.json").write_text(
        json.dumps(RECIPE.warm_start.model.config() | {"max_position_embeddings": 1 << 20})
    )
    settings = dataclasses.replace(
        Settings(),
        run=RunSettings(id="bench", directory=str(folder)),
        model=ModelSettings(path=str(folder)),
        engine=EngineSettings(context=1 << 20),
        gateway=GatewaySettings(signing_key=KEY),
    )
    engine = AtOnce([*TextTokens(folder).encode(str(ANSWER["content"])), 2])
    async with EventLog.open(log, MemoryRegistry(), writer="gateway-0") as events:
        role = Role("gateway", "gateway-0", settings, log, events, MemoryBlobs(), Health("gateway"))
        served = await Gateway.create(role, f"http://{HOST}:{port}", connect=lambda *_: engine)
        await events.append(
            EngineRegistered(
                event_id="e", run_id="bench", engine_id="e", url="http://e", state="serving", version=0, model="m"
            )
        )  # fmt: skip
        with contextlib.closing(listening(HOST, port, "the benchmark's port")) as listener:
            async with served.current(), serving(served, listener):
                role.health.mark_started()
                await asyncio.Event().wait()


def floor(port: int, bootstrap: str, prefix: str, folder: Path) -> None:
    """Until it is ended."""
    values = [(folder / name).read_bytes() for name in RECORDS]
    producers: list[AIOKafkaProducer] = []

    async def echo(request: Request) -> Response:
        if not producers:
            producers.append(
                AIOKafkaProducer(
                    bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, max_batch_size=1 << 20
                )
            )
            await producers[0].start()
        asked_for = orjson.loads(await request.body())
        key = request.headers["authorization"].encode()
        sent = [await producers[0].send(prefix + FLOOR, value, key=key) for value in values]
        await asyncio.gather(*sent)
        return Response(orjson.dumps(asked_for), media_type="application/json")

    serve(port, [Route("/echo", echo, methods=["POST"])])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--gateway"]:
        event_loop.run(
            "gateway", gateway(int(sys.argv[2]), KafkaLog(sys.argv[3], prefix=sys.argv[4]), Path(sys.argv[5]))
        )
    elif sys.argv[1:2] == ["--floor"]:
        floor(int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
    else:
        with broker() as server, tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder:
            raise SystemExit(uvloop.run(measure(server, Path(folder))))
