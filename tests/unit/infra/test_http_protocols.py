"""The servers' HTTP/1.1 on a real socket: heads are bounded, and clients that offer another protocol are served."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from tests.each import each
from turnlog.infra.embedded.ports import HOST
from turnlog.infra.roles.health import QuietServer, listening, uvicorn_config
from turnlog.infra.roles.http_protocols import HEAD_BYTES

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
"""Headers of the first request of Java's HttpClient to a server."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    request = Request(scope, receive)
    body = await request.body()
    await PlainTextResponse(b"%s %s %s" % (request.method.encode(), request.url.path.encode(), body))(
        scope, receive, send
    )


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A server that answers with what it was sent."""
    with contextlib.closing(listening(HOST, 0, "the test's port")) as listener:
        async with QuietServer(uvicorn_config(echo, head_s=20.0)).running(listener):
            yield listener.getsockname()[1]


class Client:
    """A connection whose bytes the test writes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[int, bytes]:
        """The status and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split(b" ")[1]), await self.reader.readexactly(length)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection(HOST, port)
    async with asyncio.timeout(20):
        yield Client(reader, writer)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


def post(path: str, body: bytes, more: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (path.encode(), more, len(body), body)


async def test_a_request_that_offers_another_protocol_keeps_its_body(port: int) -> None:
    async with connected(port) as client:
        client.writer.write(post("/a", b"one", OFFER))
        assert await client.answer() == (200, b"POST /a one")
        head, _, body = post("/b", b"another", OFFER).partition(b"\r\n\r\n")
        for part in (head + b"\r\n\r\n" + body[:3], body[3:]):
            client.writer.write(part)
            await asyncio.sleep(0.01)  # so that the parts arrive one after the other
        assert await client.answer() == (200, b"POST /b another")
        client.writer.write(post("/c", b"last"))
        assert await client.answer() == (200, b"POST /c last")


async def test_an_offer_that_does_not_wait_for_the_answer_before_it_is_refused(port: int) -> None:
    async with connected(port) as client:
        client.writer.write(post("/a", b"one") + post("/b", b"two", OFFER))
        status, said = await client.answer()
        assert (status, b"offers another protocol" in said) == (400, True)


CHUNK = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n?\r\n"


@each("begun, more", [
    (b"GET /a HTTP/1.1\r\nHost: x\r\nX: ", b"a" * 1000),
    (b"GET /a HTTP/1.1\r\nHost: x\r\n", b"X: a\r\n" * 100),
    (b"GET /", b"a" * 1000),
    (CHUNK + b"1;", b"a" * 1000),
    (CHUNK + b"0\r\n", b"X: a\r\n" * 100),
    (CHUNK + b"0\r\nX: ", b"a" * 1000),
], ids=["header", "headers", "path", "extension of a chunk", "trailers", "trailer"])  # fmt: skip
async def test_what_is_sent_beside_a_body_is_bounded(port: int, begun: bytes, more: bytes) -> None:
    async with connected(port) as client:
        client.writer.write(begun)
        sent = 0
        while not client.reader.at_eof() and sent < 100 * HEAD_BYTES:
            client.writer.write(more)
            sent += len(more)
            with contextlib.suppress(ConnectionError):
                await client.writer.drain()
            if client.writer.is_closing():
                break
        assert sent < 100 * HEAD_BYTES


async def test_a_large_body_is_not_taken_for_a_head(port: int) -> None:
    body = b"b" * 10 * HEAD_BYTES
    async with connected(port) as client:
        for _ in range(2):
            client.writer.write(post("/a", body))
            assert await client.answer() == (200, b"POST /a " + body)
        client.writer.write(b"".join([CHUNK, b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n"]))
        assert await client.answer() == (200, b"POST /a ?" + body)


async def test_no_line_of_h11_runs_for_a_request_without_an_offer(port: int) -> None:
    files = set[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    async with connected(port) as client:
        sys.setprofile(note)
        client.writer.write(post("/a", b"one"))
        answer = await client.answer()
        sys.setprofile(None)
    assert answer == (200, b"POST /a one")
    assert any(file.endswith("httptools_impl.py") for file in files)
    assert not [file for file in files if "/h11/" in file or file.endswith("h11_impl.py")]
