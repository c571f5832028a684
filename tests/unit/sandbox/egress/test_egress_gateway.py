"""What an agent's program asks of the proxy by path alone goes to the gateway with its session's token."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.roles.credentials import CredentialKeys, CredentialUnusable
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress import Egress, EgressUnavailable, GatewayRelay
from turnlog.sandbox_workers.egress.recordings import Requests
from turnlog.settings import GatewaySettings

TOKEN = "session-token"


class Upstream:
    """A server where the gateway is: streams three pieces, each when the test says so."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.go, self.gone = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((f"{request.method} {request.raw_path}", headers, await request.read()))
        if request.path != "/v1/messages":
            return web.Response(text="whole")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            await answer.write(b"data: 1\n\n")
            await self.go.wait()
            await answer.write(b"data: 2\n\n")
        except asyncio.CancelledError:
            self.gone.set()
            raise
        return answer


@pytest.fixture
async def upstream() -> AsyncIterator[tuple[Upstream, str]]:
    server = Upstream()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@contextlib.asynccontextmanager
async def proxied(url: str, egress: Egress | None = None) -> AsyncIterator[tuple[int, Requests]]:
    """The port of a call's proxy. One request of the call's to the network may be made, and takes 0.2 s at most."""
    limits = EgressSettings(requests=1, timeout_s=0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with (
            GatewayRelay.open(GatewaySettings(url=url), TOKEN) as gateway,
            (egress or Egress.without_rules(limits, MemoryBlobs())).serving(listener, gateway=gateway) as requests,
        ):
            yield listener.getsockname()[1], requests


def request(path: str, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1:3128", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def answered(port: int, data: bytes) -> bytes:
    """To the end of a whole answer with a length."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    body = await reader.readexactly(length)
    writer.close()
    return head + body


async def test_a_program_speaks_with_the_gateway_by_the_sessions_token_whatever_key_it_sends(
    upstream: tuple[Upstream, str],
) -> None:
    server, url = upstream
    keys = ("Authorization: Bearer anything", "X-Api-Key: anything", "X-Session: mine")
    async with proxied(url) as (port, requests):
        for _ in range(3):
            answer = await answered(port, request("/v1/chat/completions?beta=true", b'{"a":1}', *keys))
            assert answer.endswith(b"whole")
    assert requests.recorded_requests() == ()  # no traffic of the network: neither counted nor recorded
    for line, headers, body in server.seen:
        assert (line, body) == ("POST /v1/chat/completions?beta=true", b'{"a":1}')
        assert headers["authorization"] == f"Bearer {TOKEN}"
        assert (headers.get("x-api-key"), headers["x-session"]) == (None, "mine")


@pytest.mark.parametrize(
    "path",
    ["/sessions", "/sessions/s/finish", "/metrics", "/v1/../sessions", "/v1/%2e%2e/sessions", "/v1/..%2fsessions"],
)
async def test_a_program_reaches_the_dialects_of_the_gateway_alone(upstream: tuple[Upstream, str], path: str) -> None:
    server, url = upstream
    async with proxied(url) as (port, _):
        assert (await answered(port, request(path))).startswith(b"HTTP/1.1 403 Forbidden (turnlog egress: rule)")
    assert server.seen == []


async def test_nothing_else_is_granted_where_the_task_names_nothing(
    upstream: tuple[Upstream, str], tmp_path: Path
) -> None:
    """Though the operator's rules would grant it to a call without a gateway."""
    server, url = upstream
    own = EgressSettings(allow=("* *://*:*/*",), tls="refuse", private_hosts=(url.removeprefix("http://"),))
    async with (
        Egress.open(own, MemoryBlobs(), tmp_path) as egress,
        proxied(url, egress) as (port, requests),
    ):
        assert b"(turnlog egress: rule)" in await answered(port, request(f"{url}/v1/messages"))
    assert [one.reason for one in requests.recorded_requests()] == ["rule"]
    assert server.seen == []


async def test_an_answer_comes_piece_by_piece_and_for_as_long_as_it_takes(upstream: tuple[Upstream, str]) -> None:
    server, url = upstream
    async with proxied(url) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/messages"))
        head = await reader.readuntil(b"data: 1\n\n")
        assert b"text/event-stream" in head
        with pytest.raises(TimeoutError):  # [egress] timeout_s is over then
            await asyncio.wait_for(reader.readuntil(b"data: 2\n\n"), 0.4)
        server.go.set()
        await reader.readuntil(b"data: 2\n\n")
        writer.close()


async def test_who_hangs_up_leaves_the_gateway_too(upstream: tuple[Upstream, str]) -> None:
    server, url = upstream
    async with proxied(url) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("/v1/messages"))
        await reader.readuntil(b"data: 1\n\n")
        writer.close()
        await asyncio.wait_for(server.gone.wait(), 10)


async def test_a_gateway_that_is_away_is_said_to_be() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    async with proxied(f"http://127.0.0.1:{free}") as (port, _):
        answer = await answered(port, request("/v1/messages"))
    assert b"502 Bad Gateway" in answer
    assert b"[gateway] url" in answer


async def test_a_worker_that_knows_no_gateway_says_which_setting_it_lacks() -> None:
    with pytest.raises(EgressUnavailable, match=r"\[gateway\] url"):
        async with GatewayRelay.open(GatewaySettings(), TOKEN):
            pass


def test_a_sealed_token_opens_for_its_call_and_by_the_shared_key_alone(tmp_path: Path) -> None:
    runs = CredentialKeys("", tmp_path)  # runner and worker of one run's directory
    sealed = runs.encrypt_token(TOKEN, "call")
    assert TOKEN not in sealed
    assert CredentialKeys("", tmp_path).decrypt_token(sealed, "call") == TOKEN
    for keys, text, call in (
        (runs, sealed, "another"),
        (CredentialKeys("other", tmp_path), sealed, "call"),
        (runs, "no base64", "call"),
        (runs, sealed[:-4] + "AAA=", "call"),
        (runs, "", "call"),
    ):
        with pytest.raises(CredentialUnusable, match=r"\[sandbox\] credential_key"):
            keys.decrypt_token(text, call)


def test_keys_are_rotated_without_a_token_that_does_not_open(tmp_path: Path) -> None:
    before, after = CredentialKeys("old", tmp_path), CredentialKeys("new old", tmp_path)
    assert after.decrypt_token(before.encrypt_token(TOKEN, "c"), "c") == TOKEN
    with pytest.raises(CredentialUnusable):
        before.decrypt_token(after.encrypt_token(TOKEN, "c"), "c")
