"""Two gateways behind one public address, each with its own: a session stays with the one that opened it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from tests.fakes.memory_log import MemoryLog
from tests.unit.gateway.conftest import Rig
from turnlog.infra.event_log import EventLog
from turnlog.infra.roles.health import Health, listening
from turnlog.infra.roles.role import Role
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers.gateway.app import Gateway, serving
from turnlog.producers.gateway.owners import Owners
from turnlog.producers.gateway_client import GatewayClient
from turnlog.schemas.events import Limits, Outcome, Purpose, RolloutRequested, Sampling
from turnlog.settings import RunnerSettings, Settings

HOST = "127.0.0.1"
QUESTION = {"role": "user", "content": "1 + 1 = ?"}


class Service:
    """What Kubernetes does with a Service: each connection goes to one of those that take it, in turn."""

    def __init__(self) -> None:
        self.backends: list[int] = []
        self.first = 0
        """Which of them takes the next connection."""
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Listen while the block runs."""
        self._tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._pass, HOST, 0)
        self.url = f"http://{HOST}:{server.sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        order = [*self.backends[self.first :], *self.backends[: self.first]]
        for port in order:
            with contextlib.suppress(OSError):
                behind = await asyncio.open_connection(HOST, port)
                both = (_copied(reader, behind[1]), _copied(behind[0], writer))
                self._tasks |= {asyncio.create_task(each) for each in both}
                return
        writer.close()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.close()


class Replicas:
    """Gateways on one log."""

    def __init__(self, rig: Rig, service: Service) -> None:
        self.rig, self.service = rig, service
        self.urls: list[str] = []
        self.stacks: list[AsyncExitStack] = []

    async def start(self) -> None:
        """One more."""
        number = len(self.urls)
        stack = AsyncExitStack()
        log = MemoryLog(self.rig.memory.broker)
        listener = stack.enter_context(contextlib.closing(listening(HOST, 0, "[gateway] port")))
        port = listener.getsockname()[1]
        own = f"http://{HOST}:{port}"
        settings = self.rig.settings
        settings = dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, own_url=own))
        name = f"gateway-{number}"
        events = await stack.enter_async_context(EventLog.open(log, self.rig.registry, writer=name))
        role = Role("gateway", name, settings, log, events, self.rig.blobs, Health("gateway"))
        gateway = await Gateway.create(role, own, connect=lambda url, _: self.rig.engines[url.removeprefix("http://")])
        await stack.enter_async_context(gateway.current())
        await stack.enter_async_context(serving(gateway, listener))
        self.urls.append(own)
        self.stacks.append(stack)
        self.service.backends.append(port)

    async def stop(self, url: str) -> None:
        """End one."""
        await self.stacks[self.urls.index(url)].aclose()

    def other(self, url: str) -> str:
        """Of two, the one that is not at `url`."""
        return next(each for each in self.urls if each != url)


@pytest.fixture
async def replicas(rig: Rig) -> AsyncIterator[Replicas]:
    """Two."""
    service = Service()
    async with service.serving():
        replicas = Replicas(rig, service)
        for _ in range(2):
            await replicas.start()
        yield replicas
        for stack in replicas.stacks:
            await stack.aclose()


@pytest.fixture
async def client(replicas: Replicas, rig: Rig) -> AsyncIterator[GatewayClient]:
    """A runner's, which knows the public address."""
    async with GatewayClient(runner_settings(rig.settings, replicas.service.url)) as client:
        yield client


def runner_settings(settings: Settings, url: str) -> Settings:
    return dataclasses.replace(
        settings,
        gateway=dataclasses.replace(settings.gateway, url=url),
        runner=RunnerSettings(gateway_patience_s=20.0),
    )


def request(rollout: str) -> RolloutRequested:
    return RolloutRequested(
        event_id=rollout, run_id="r", group_id="group-0", floor=0, task_id="t", rollout_id=rollout, rollout_index=0,
        group_size=1, draw=0, dataset="d", dataset_epoch=0, index=0, recipe="calc", purpose=Purpose.train, task=b"{}",
        sampling=Sampling(temperature=1.0, max_new_tokens=16), min_weight_version=0,
        limits=Limits(max_turns=4, max_context_tokens=512, deadline_s=60.0),
    )  # fmt: skip


async def writers(rig: Rig) -> list[tuple[str, str]]:
    """(record, writer_url) of what opened or adopted."""
    return [(type(e).__name__, e.writer_url) for e in await rig.written("SessionStarted", "SessionAdopted")]


async def test_every_request_of_a_session_goes_to_the_replica_that_opened_it(
    replicas: Replicas, client: GatewayClient, rig: Rig
) -> None:
    for number in range(4):  # connections are kept, so the Service is made to choose otherwise each time
        replicas.service.first = number % 2
        session = await client.open(request(f"rollout-{number}"), RECIPE.task({"prompt": "?"}), 0)
        assert session.base_url in replicas.urls
        replicas.service.first = 1 - replicas.service.first
        await client.close()
        turn = await client.complete(session, [QUESTION], None, step=0)
        await client.close()
        assert (await client.state(session)).last_turn == turn.turn
        await client.close()
        await client.finish(session, Outcome.completed, "", final=True, reward=True, judged=turn.turn)
        await client.close()
    found = await writers(rig)
    assert {record for record, _ in found} == {"SessionStarted"}, "nobody had to take anything over"
    assert {url for _, url in found} == set(replicas.urls), "records name replicas, not the public address"


async def test_another_replica_passes_on_what_it_is_asked_while_the_owner_lives(
    replicas: Replicas, client: GatewayClient, rig: Rig
) -> None:
    session = await client.open(request("rollout-0"), RECIPE.task({"prompt": "?"}), 0)
    first = await client.complete(session, [QUESTION], None, step=0)
    headers = {"authorization": f"Bearer {session.token}"}
    async with httpx.AsyncClient(base_url=replicas.other(session.base_url), headers=headers, timeout=30) as other:
        again = {"messages": [QUESTION, first.message, {"role": "user", "content": "and?"}]}
        answer = (await other.post("/v1/chat/completions", json=again)).json()
        assert answer["turnlog"]["epoch"] == first.turn.epoch, "the owner sampled it"
        streamed = await other.post("/v1/chat/completions", json=again | {"stream": True})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.rstrip().endswith("data: [DONE]")
        described = (await other.get(f"/sessions/{session.session_id}")).json()
        assert described["base_url"] == f"{session.base_url}/v1"
        assert [turn["epoch"] for turn in described["turns"]] == [first.turn.epoch] * len(described["turns"])
        refused = await other.post("/v1/chat/completions", json={"messages": "?"})
        assert refused.status_code == 400
        done = await other.post(f"/sessions/{session.session_id}/finish", json={"outcome": "completed"})
        assert done.json()["outcome"] == "completed"
    replicas.service.first = replicas.urls.index(replicas.other(session.base_url))
    async with GatewayClient(runner_settings(rig.settings, replicas.service.url)) as late:
        reopened = await late.open(request("rollout-1"), RECIPE.task({"prompt": "?"}), 0)
        replicas.service.first = replicas.urls.index(replicas.other(reopened.base_url))
    async with GatewayClient(runner_settings(rig.settings, replicas.service.url)) as later:
        assert (await later.open(request("rollout-1"), RECIPE.task({"prompt": "?"}), 0)).base_url == reopened.base_url
    assert {record for record, _ in await writers(rig)} == {"SessionStarted"}


async def test_a_session_moves_when_its_owner_is_gone_and_stays_where_it_went(
    replicas: Replicas, client: GatewayClient, rig: Rig
) -> None:
    session = await client.open(request("rollout-0"), RECIPE.task({"prompt": "?"}), 0)
    owner, heir = session.base_url, replicas.other(session.base_url)
    first = await client.complete(session, [QUESTION], None, step=0)
    await replicas.stop(owner)
    messages = [QUESTION, first.message, {"role": "user", "content": "and?"}]
    second = await client.complete(session, messages, None, step=1)
    assert session.base_url == heir
    assert second.turn.epoch != first.turn.epoch
    await client.finish(session, Outcome.completed, "", final=True, reward=True, judged=second.turn)
    assert await writers(rig) == [("SessionStarted", owner), ("SessionAdopted", heir)]
    (finished,) = await rig.written("SessionFinished")
    assert finished.turns == (first.turn, second.turn)


async def test_a_request_that_was_passed_on_is_not_passed_on_again(replicas: Replicas, client: GatewayClient) -> None:
    session = await client.open(request("rollout-0"), RECIPE.task({"prompt": "?"}), 0)
    headers = {"authorization": f"Bearer {session.token}", "turnlog-forwarded": "1"}
    async with httpx.AsyncClient(base_url=replicas.other(session.base_url), headers=headers) as other:
        refused: Any = await other.get(f"/sessions/{session.session_id}")
        paths = ("/v1/messages", "/v1/messages/count_tokens")
        theirs = [await other.post(path, json={"messages": [QUESTION]}) for path in paths]
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "epoch_lost")
    for answer in theirs:  # in the shape of the API that was asked
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "api_error")


async def test_a_client_that_leaves_the_one_it_asked_leaves_the_owner_too(
    replicas: Replicas, client: GatewayClient, rig: Rig
) -> None:
    session = await client.open(request("rollout-0"), RECIPE.task({"prompt": "?"}), 0)
    engine = rig.engines["e0"]
    engine.holds_after = 1
    rig.script.says("a long answer")
    headers = {"authorization": f"Bearer {session.token}"}
    async with httpx.AsyncClient(base_url=replicas.other(session.base_url), headers=headers) as other:
        ask = asyncio.create_task(other.post("/v1/chat/completions", json={"messages": [QUESTION]}))
        await engine.reached.wait()
        ask.cancel()
        await asyncio.gather(ask, return_exceptions=True)
    async with asyncio.timeout(20):
        while not engine.aborted:  # noqa: ASYNC110 - what is waited for is a state of the engine
            await asyncio.sleep(0.005)


async def test_a_request_is_passed_on_with_its_own_headers_alone_and_by_a_parser_in_c() -> None:
    heads, files = list[bytes](), set[str]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b")
        writer.close()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    path = "/v1/models/a%2Fb"
    sent = [(b"authorization", b"Bearer t"), (b"x-two", b"1"), (b"x-two", b"2"), (b"connection", b"close")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"a=%20", "headers": sent}
    owners = Owners("http://own", answer_s=20.0)
    async with server:
        sys.setprofile(note)
        async with owners.stream(url, Request(scope), b"") as passed:
            body = b"".join([part async for part in passed.content.iter_any()])
        sys.setprofile(None)
    await owners.close()
    assert (body, dict(passed.raw_headers)[b"content-encoding"]) == (b"\x1f\x8b", b"gzip")
    first, *rest = heads[0].decode().splitlines()[:-1]
    assert first == f"GET {path}?a=%20 HTTP/1.1"
    host = f"host: {url.removeprefix('http://')}"
    assert sorted(line.lower() for line in rest) == [
        "authorization: bearer t", host, "turnlog-forwarded: 1", "x-two: 1", "x-two: 2"
    ]  # fmt: skip
    assert not [file for file in files if "/h11/" in file or "/httpcore/" in file]
