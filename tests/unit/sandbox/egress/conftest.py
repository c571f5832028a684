"""Real origins on loopback, with and without TLS, and a proxy in front of them on a plain listening socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from turnlog.infra.blobs import MemoryBlobs
from turnlog.sandbox_settings import EgressSettings
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.egress.certificates import CertificateAuthority
from turnlog.sandbox_workers.egress.recordings import Requests

NAMES = {"origin.test": ["127.0.0.1"], "open.test": ["93.184.216.34"], "inside.test": ["10.0.0.7"]}


@dataclass
class Origin:
    """Two servers, one with TLS, that answer alike; `seen` are the requests that reached them."""

    port: int = 0
    tls_port: int = 0
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    runners: list[web.AppRunner] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """That the resolver was asked for."""
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        """Stands in for DNS."""
        self.names.append(host)
        if host not in NAMES:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return NAMES[host]

    async def stop(self) -> None:
        """Nobody listens there any more."""
        for runner in self.runners:
            await runner.cleanup()
        self.runners.clear()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """By path."""
        body = await request.read()
        self.seen.append((f"{request.method} {request.raw_path}", dict(request.headers), body))
        self.arrived.set()
        match request.path.split("/")[1]:
            case "redirect":
                return web.Response(status=302, headers={"Location": request.query["to"]})
            case "size":
                return web.Response(body=b"x" * int(request.query["bytes"]))
            case "endless":
                answer = web.StreamResponse()
                await answer.prepare(request)
                with contextlib.suppress(ConnectionError):
                    for _ in range(64):
                        await answer.write(b"x" * 65536)
                return answer
            case "silent":
                await asyncio.Event().wait()
            case "count":
                return web.Response(text=str(len(self.seen)), headers={"X-Of": "origin", "Set-Cookie": "a=b"})
        return web.Response(text=f"{request.method} {request.raw_path} {len(body)}", headers={"X-Of": "origin"})


@dataclass
class Served:
    """A proxy under way."""

    port: int
    requests: Requests
    origin: Origin
    ca: Path | None

    def client(self, **options: Any) -> httpx.AsyncClient:
        """An HTTP client that knows no other way than the proxy."""
        trust = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        trust.verify_flags |= ssl.VERIFY_X509_STRICT  # as newer Pythons do
        return httpx.AsyncClient(proxy=f"http://127.0.0.1:{self.port}", verify=trust, trust_env=False, **options)

    def url(self, path: str, *, tls: bool = False, host: str = "origin.test") -> str:
        """At the origin."""
        return f"https://{host}:{self.origin.tls_port}{path}" if tls else f"http://{host}:{self.origin.port}{path}"

    async def raw(self, data: bytes, *, end: bool = True) -> bytes:
        """What comes back for these bytes until the proxy hangs up; without `end` (of what we send) one answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            parts = []
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(65536):
                    parts.append(part)
                    if not end and b"\r\nconnection: close" in part and b"\r\ncontent-length:" in part:
                        break
            return b"".join(parts)
        finally:
            writer.close()


@pytest.fixture(scope="session")
def origin_authority() -> CertificateAuthority:
    """Signs the origin's certificate; nobody trusts it by default."""
    return CertificateAuthority.make()


@pytest.fixture
async def origin(origin_authority: CertificateAuthority) -> AsyncIterator[Origin]:
    """Fresh servers."""
    origin = Origin()
    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{tail:.*}", origin.answer)
    for context in (None, origin_authority.context("origin.test")):
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        origin.runners.append(runner)
        port = runner.addresses[0][1]
        origin.port, origin.tls_port = (port, 0) if context is None else (origin.port, port)
    yield origin
    await origin.stop()


@pytest.fixture
def blobs() -> MemoryBlobs:
    """Shared by the egress of one test."""
    return MemoryBlobs()


@pytest.fixture
def settings(origin: Origin, origin_authority: CertificateAuthority, tmp_path: Path) -> EgressSettings:
    """Grants the origin everything; private_hosts names it, since it is on loopback."""
    ca = tmp_path / "mirror.pem"
    ca.write_bytes(origin_authority.pem)
    return EgressSettings(
        allow=("* *://origin.test:*/*",),
        private_hosts=(f"origin.test:{origin.port}", f"origin.test:{origin.tls_port}"),
        upstream_ca=str(ca),
        timeout_s=5.0,
    )


@pytest.fixture
def serving(
    settings: EgressSettings, origin: Origin, blobs: MemoryBlobs, tmp_path: Path
) -> Callable[..., contextlib.AbstractAsyncContextManager[Served]]:
    """Serve one call: keyword arguments are settings, but those of `Egress.serving`."""

    @contextlib.asynccontextmanager
    async def serve(
        *, task: Sequence[str] = (), call_seq: int = 0, answers: Any = None, **changed: Any
    ) -> AsyncIterator[Served]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            chosen = dataclasses.replace(settings, **changed)
            async with (
                Egress.open(chosen, blobs, tmp_path / "egress", resolve=origin.resolve) as egress,
                egress.serving(listener, allow=task, call_seq=call_seq, answers=answers) as requests,
            ):
                yield Served(listener.getsockname()[1], requests, origin, egress.ca)

    return serve
