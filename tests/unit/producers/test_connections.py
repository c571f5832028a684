"""Connections: kept alive, replaced when the server closes them, closed when a request is given up."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest

from turnlog.infra.roles import event_loop
from turnlog.infra.roles.http_clients import direct
from turnlog.producers.gateway_client import Connections, NoAnswer


@dataclass
class Server:
    """A real HTTP/1.1 server of a few lines: answers /hold never, the rest with its path."""

    url: str = ""
    peers: list[tuple[str, int]] = field(default_factory=list)
    """One per request: equal peers are one connection."""
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    held: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        while head := await self._head(reader):
            self.peers.append(writer.get_extra_info("peername"))
            path = head.split(b" ")[1]
            if path == b"/hold":
                self.held.set()
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(path), path))
        self.left.set()
        writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return b""


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with listening:
        yield server
        for writer in server.writers:
            writer.close()


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    connections = Connections(connect_s=5.0, answer_s=20.0)
    yield connections
    await connections.close()


async def test_requests_one_after_another_share_a_connection(server: Server, connections: Connections) -> None:
    answers = [await connections.request("GET", f"{server.url}/{n}", {}, None) for n in range(3)]
    assert [(answer.status, answer.content) for answer in answers] == [(200, b"/0"), (200, b"/1"), (200, b"/2")]
    assert len(set(server.peers)) == 1


async def test_requests_at_once_have_a_connection_each(server: Server, connections: Connections) -> None:
    await asyncio.gather(*(connections.request("GET", f"{server.url}/{n}", {}, None) for n in range(3)))
    assert len(set(server.peers)) == 3


async def test_a_connection_that_the_server_closed_is_replaced(server: Server, connections: Connections) -> None:
    await connections.request("GET", f"{server.url}/a", {}, None)
    server.writers[0].close()
    await server.writers[0].wait_closed()
    assert (await connections.request("GET", f"{server.url}/b", {}, None)).content == b"/b"
    assert len(set(server.peers)) == 2


async def test_a_request_that_is_given_up_closes_its_connection(server: Server, connections: Connections) -> None:
    waiting = asyncio.create_task(connections.request("GET", f"{server.url}/hold", {}, None))
    await server.held.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await asyncio.wait_for(server.left.wait(), 20)
    assert (await connections.request("GET", f"{server.url}/b", {}, None)).content == b"/b"


async def test_nobody_listening_is_no_answer_and_names_the_url(server: Server, connections: Connections) -> None:
    with pytest.raises(NoAnswer, match=r"http://127.0.0.1:1/x: ClientConnectorError"):
        await connections.request("GET", "http://127.0.0.1:1/x", {}, None)


async def test_silence_is_no_answer(server: Server) -> None:
    impatient = Connections(connect_s=5.0, answer_s=0.05)
    with pytest.raises(NoAnswer, match=r"/hold: SocketTimeoutError"):
        await impatient.request("GET", f"{server.url}/hold", {}, None)
    await impatient.close()


def test_a_server_that_resets_what_it_accepts_is_no_answer_on_the_loop_of_the_roles() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=reset_all, args=(listening,), daemon=True).start()
        found = set[type]()

        async def asked() -> None:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
            connections, others = Connections(connect_s=5.0, answer_s=20.0), direct()
            for _ in range(100):  # many at a time: some are reset before the loop looks at what it connected
                asking = [connections.request("GET", url, {}, None) for _ in range(10)]
                found.update(map(type, await asyncio.gather(*asking, return_exceptions=True)))
                more = [others.get(url) for _ in range(10)]
                found.update(map(type, await asyncio.gather(*more, return_exceptions=True)))
            await connections.close()
            await others.aclose()

        event_loop.run("runner", asked())
        listening.shutdown(socket.SHUT_RDWR)
    assert NoAnswer in found
    assert all(issubclass(kind, NoAnswer | httpx.TransportError) for kind in found), found


def reset_all(listening: socket.socket) -> None:
    """Accept and reset at once, until nothing listens."""
    while True:
        try:
            accepted, _ = listening.accept()
        except OSError:
            return
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
