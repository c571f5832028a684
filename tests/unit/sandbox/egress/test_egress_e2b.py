"""The proxy from inside a machine of E2B, which has no network: connections are carried over the stream to its init."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes import e2b_server
from tests.unit.sandbox.egress.test_egress_gateway import TOKEN, Upstream, upstream  # noqa: F401
from tests.unit.sandbox.test_e2b_backend import READY, Lies
from turnlog.infra.blobs import MemoryBlobs
from turnlog.plugins.e2b import E2b
from turnlog.plugins.e2b.relay import CLOSE, CREDIT, DATA, EPOCH, FRAME, NUMBER, OPEN, WINDOW
from turnlog.plugins.e2b.stream import E2bStream
from turnlog.plugins.e2b.tunnels import Outbox, Tunnels
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.sandbox_workers.egress import Egress, GatewayRelay
from turnlog.sandbox_workers.protocol import Command, Kind, Sandbox, SandboxUnavailable, Shape
from turnlog.schemas.events import SandboxLimits, ToolStatus
from turnlog.settings import GatewaySettings

FIRST_UID = 278_500
SHAPE = Shape(network="allowlist", disk_bytes=8 << 20)
LIMITS = SandboxLimits(wall_s=30.0, memory_bytes=256 << 20, disk_bytes=8 << 20, output_bytes=1 << 20)
GATEWAY = "http://127.0.0.1:3128/v1"
POST = f"""
import sys, urllib.request
def post(path, body):
    asked = urllib.request.Request("{GATEWAY}" + path, body, {{"Authorization": "Bearer anything"}})
    return urllib.request.urlopen(asked)
"""


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    """A machine of the local server, with the network `allowlist`."""
    async with e2b_server.serving(first_uid=FIRST_UID) as server:
        provider = E2b(SandboxSettings(), server.connection)
        sandbox = await provider.start(0, SHAPE)
        try:
            yield sandbox
        finally:
            await sandbox.close()
            await provider.close()


@contextlib.asynccontextmanager
async def at_the_gateway(sandbox: Sandbox, url: str) -> AsyncIterator[None]:
    """The way of an agent's program to the gateway at `url`, for the calls in the block."""
    assert sandbox.proxy is not None
    async with (
        GatewayRelay.open(GatewaySettings(url=url), TOKEN) as gateway,
        Egress.without_rules(EgressSettings(), MemoryBlobs()).serving(sandbox.proxy, gateway=gateway),
    ):
        yield


async def ran(sandbox: Sandbox, source: str) -> str:
    answer = await sandbox.exec(Command(kind=Kind.python, source=POST + source), LIMITS)
    assert answer.status is ToolStatus.ok, answer
    return answer.output.decode()


async def test_a_program_in_a_machine_asks_the_gateway_by_the_sessions_token(
    sandbox: Sandbox,
    upstream: tuple[Upstream, str],  # noqa: F811
) -> None:
    server, url = upstream
    async with at_the_gateway(sandbox, url):
        for _ in range(2):
            assert await ran(sandbox, "print(post('/chat/completions', b'{}').read())") == "b'whole'\n"
    assert [(line, headers["authorization"]) for line, headers, _ in server.seen] == [
        ("POST /v1/chat/completions", f"Bearer {TOKEN}")
    ] * 2
    assert await sandbox.reset()


async def test_an_answer_comes_piece_by_piece_into_a_machine(
    sandbox: Sandbox,
    upstream: tuple[Upstream, str],  # noqa: F811
) -> None:
    server, url = upstream
    said: list[bytes] = []

    def heard(_: object, part: bytes) -> None:
        said.append(part)
        server.go.set()  # the second piece is sent once the program has told of the first

    source = POST + "for line in post('/messages', b'{}'): print(line.decode(), end='', flush=True)"
    async with at_the_gateway(sandbox, url):
        answer = await sandbox.exec(Command(kind=Kind.python, source=source), LIMITS, on_output=heard)
    assert (answer.status, b"".join(said)) == (ToolStatus.ok, b"data: 1\n\ndata: 2\n\n")


async def test_large_requests_pass_beside_one_whose_answer_nobody_reads(
    sandbox: Sandbox, upstream: tuple[Upstream, str], blobs: MemoryBlobs, origin: Any  # noqa: F811
) -> None:  # fmt: skip
    """The machine's stream carries the heartbeats of its init, too, without which the call would end."""
    server, url = upstream
    assert sandbox.proxy is not None
    source = f"""
import socket, time, concurrent.futures
stuck = socket.create_connection(("127.0.0.1", 3128))
stuck.sendall(b"GET http://127.0.0.1:{origin.port}/endless HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
time.sleep(7)
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(set(pool.map(lambda n: post("/chat/completions", b"x" * 900_000).read(), range(8))))
"""
    host = f"127.0.0.1:{origin.port}"
    own = EgressSettings(allow=("GET *://*:*/*",), tls="refuse", private_hosts=(host,), response_bytes=1 << 30)
    async with (
        Egress.open_temporary(own, blobs) as egress,
        GatewayRelay.open(GatewaySettings(url=url), TOKEN) as gateway,
        egress.serving(sandbox.proxy, allow=("GET *://*:*/*",), gateway=gateway),
    ):
        assert await ran(sandbox, source) == "{b'whole'}\n"
    assert [len(body) for _, _, body in server.seen] == [900_000] * 8


async def test_what_a_program_leaves_open_is_not_served_to_the_next_call(
    sandbox: Sandbox,
    upstream: tuple[Upstream, str],  # noqa: F811
) -> None:
    server, url = upstream
    leaves = """
import os, socket
sockets = [socket.create_connection(("127.0.0.1", 3128)) for _ in range(200)]
for one in sockets:
    one.sendall(b"POST /v1/left HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 0\\r\\n\\r\\n")
os.kill(os.getpid(), 9)
"""
    await sandbox.exec(Command(kind=Kind.python, source=leaves), LIMITS)  # without a proxy: nobody answers
    async with at_the_gateway(sandbox, url):
        assert await ran(sandbox, "print(post('/chat/completions', b'{}').read())") == "b'whole'\n"
    assert [line for line, _, _ in server.seen] == ["POST /v1/chat/completions"]


async def test_a_program_that_hangs_up_leaves_the_gateway_too(
    sandbox: Sandbox,
    upstream: tuple[Upstream, str],  # noqa: F811
) -> None:
    server, url = upstream
    async with at_the_gateway(sandbox, url):
        calling = asyncio.create_task(ran(sandbox, "post('/messages', b'{}').readline(); input()"))
        with pytest.raises(AssertionError):  # its input is empty, so that it ends by EOFError
            await calling
        await asyncio.wait_for(server.gone.wait(), 10)


async def test_a_program_trusts_the_proxy_with_what_the_operator_allows(
    origin: Any, blobs: MemoryBlobs, settings: EgressSettings, tmp_path: Path
) -> None:
    rules = dataclasses.replace(settings, allow=("GET *://origin.test:*/*",))
    async with (
        Egress.open(rules, blobs, tmp_path / "egress", resolve=origin.resolve) as egress,
        e2b_server.serving(first_uid=FIRST_UID + 50) as server,
    ):
        provider = E2b(SandboxSettings(), server.connection, ca=egress.ca)
        sandbox = await provider.start(0, SHAPE)
        assert sandbox.proxy is not None
        try:
            source = (
                f"import urllib.request as r; print(r.urlopen('https://origin.test:{origin.tls_port}/count').read())"
            )
            command = Command(kind=Kind.python, source=source, env=egress.environment_of(sandbox.proxy, provider))
            async with egress.serving(sandbox.proxy) as requests:
                answer = await sandbox.exec(command, LIMITS)
            assert (answer.status, answer.output) == (ToolStatus.ok, b"b'1'\n")
            assert [one.status for one in requests.recorded_requests()] == [200]
            assert await sandbox.reset()
        finally:
            await sandbox.close()
            await provider.close()


def told(kind: int, number: int, body: bytes = b"", *, size: int | None = None) -> bytes:
    """A line of the relay about a connection."""
    frame = FRAME.pack(kind, number, len(body) if size is None else size) + body
    return b"!" + base64.b64encode(frame) + b"\n"


async def test_the_workers_end_needs_no_short_path_and_refuses_connections_of_another_call(tmp_path: Path) -> None:
    """Addresses of sockets are shorter than paths of temporary files may be."""
    sent, answered = [], asyncio.Event()

    async def send(data: bytes) -> None:
        sent.append(data)
        if b"answered" in data:
            answered.set()

    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    outbox = Outbox(send)
    tunnels, sending = Tunnels(outbox, within=folder), asyncio.create_task(outbox.run())

    def take(*frame: Any) -> None:
        tunnels.take(told(*frame).decode().strip().removeprefix("!"))

    tunnels.begin_call()
    take(OPEN, 7, NUMBER.pack(1))
    take(DATA, 7, b"asked")
    near, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(tunnels.listener), 10)
    with near:
        assert await asyncio.get_running_loop().sock_recv(near, 99) == b"asked"
        await asyncio.get_running_loop().sock_sendall(near, b"answered")
        await asyncio.wait_for(answered.wait(), 10)
    assert sent[0] == FRAME.pack(EPOCH, 1, 0) and FRAME.pack(CREDIT, 7, 4) + NUMBER.pack(5) in b"".join(sent)  # noqa: PT018
    tunnels.end_call()
    for epoch in (0, 1):  # late ones: of no call, and of the one that has ended
        take(OPEN, 8 + epoch, NUMBER.pack(epoch))
    tunnels.begin_call()
    take(OPEN, 10, NUMBER.pack(1))
    await outbox.put(DATA, 0).wait()
    assert [FRAME.pack(CLOSE, number, 0) in b"".join(sent) for number in (8, 9, 10)] == [True] * 3
    await tunnels.close()
    sending.cancel()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "lies",
    [
        Lies(READY, b"!no base64\n"),
        Lies(READY, told(0, 1, b"for the init")),
        Lies(READY, told(DATA, 1, b"x", size=9)),
        Lies(READY, told(OPEN, 1, b"x")),
        Lies(READY, *(told(OPEN, number, NUMBER.pack(1)) for number in range(200))),
        Lies(READY, told(OPEN, 1, NUMBER.pack(1)), told(OPEN, 1, NUMBER.pack(1))),
        Lies(READY, told(OPEN, 1, NUMBER.pack(1)), *[told(DATA, 1, b"x" * (WINDOW // 4))] * 6),
        Lies(READY, told(OPEN, 1, NUMBER.pack(1)), told(CREDIT, 1, b"")),
    ],
    ids=["noise", "a kind", "a size", "an epoch", "too many", "twice", "beyond the window", "no credit"],
)
async def test_a_machine_that_lies_about_connections_is_given_up(lies: Lies) -> None:
    async with e2b_server.serving(first_uid=FIRST_UID + 90, processes=lies) as server:
        provider = E2b(SandboxSettings(), server.connection)
        with pytest.raises(SandboxUnavailable):
            await provider.start(0, SHAPE)
        await provider.close()
        assert (server.created, server.machines) == (1, {})


async def test_a_stream_ends_though_a_request_to_the_service_swallows_its_cancellation() -> None:
    class Service:
        """Takes the program, and goes on with what comes next when it is cancelled for the first time."""

        pid = 1
        sent = 0
        asked, left = asyncio.Event(), asyncio.Event()

        async def send_stdin(self, _: bytes) -> None:
            self.sent += 1
            if self.sent == 2:
                self.asked.set()
                with contextlib.suppress(asyncio.CancelledError):
                    await self.left.wait()

        async def wait(self) -> None:
            await self.left.wait()

        async def disconnect(self) -> None:
            pass

    service, stream = Service(), E2bStream("allowlist", b"a certificate")

    async def run(*_: Any, **__: Any) -> Service:
        return service

    machine: Any = SimpleNamespace(commands=SimpleNamespace(run=run))
    await stream.open(machine)
    await service.asked.wait()
    async with asyncio.timeout(20):
        await stream.close()
    stream.control.close()
