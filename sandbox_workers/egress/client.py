"""Client side of the proxy: parse the requests of one connection from a sandbox and send the answers (h11; RFC 9112).

It is stricter than h11 where two readers of the same bytes may disagree (request smuggling): bare line feeds, folded
lines, and repeated or contradicting lengths end the connection. What goes on to an origin is always written anew.

Every connection is ended by a reset (SO_LINGER 0, socket(7)): a closed one would remain in the sandbox's network
namespace as TIME_WAIT for a minute, and a sandbox with such a trace of a call cannot be proved to be as new."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus

import anyio
import h11
from anyio.abc import ByteStream

from turnlog.sandbox_workers.egress.policy import Reason, RequestRefused
from turnlog.sandbox_workers.egress.recordings import Headers

HEAD_BYTES = 32 * 2**10
"""Maximum size of request line and headers together, in bytes."""
TARGET_BYTES = 8 * 2**10
METHOD_BYTES = 32
READ_BYTES = 64 * 2**10
LINGER_S = 5.0
"""Seconds after a last answer for the sandbox to read it and to close: what is not read by then is lost with the
connection."""
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n)")
_EMPTY_LINES = re.compile(rb"\A(?:\r\n)+")

_RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Head:
    """Request line and headers; the names of headers are in lower case."""

    method: str
    target: str
    headers: Headers

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of a header."""
        return [value for key, value in self.headers if key == name]


class Client:
    """Reads requests one by one and answers each."""

    def __init__(self, stream: ByteStream) -> None:
        """Create it for a connection; the stream stays the caller's."""
        self.stream = stream
        self._buffer = b""
        self._http = h11.Connection(h11.SERVER)
        self.used = False
        """True if the connection has carried a request."""
        self._whole = False
        """True if the request was read to its end."""
        self._declared, self._method = 0, ""
        self._endless = False
        self.sent = 0
        """Bytes of bodies sent to the sandbox for this request."""

    async def wait_for_request(self) -> bool:
        """Wait for a request's first byte, skipping empty lines before it. Return False if none comes."""
        while True:
            self._buffer = _EMPTY_LINES.sub(b"", self._buffer)
            if self._buffer not in (b"", b"\r"):
                return True
            if not (data := await self._receive()):
                return False
            self._buffer += data

    async def head(self) -> Head:
        """Read the head of the next request. Raises RequestRefused(malformed)."""
        self._http, self._whole, self.sent = h11.Connection(h11.SERVER), False, 0
        self.used = True
        self._declared, self._method = 0, ""
        came, self._buffer = bytearray(self._buffer), b""
        seen = 0
        while (end := came.find(b"\r\n\r\n", max(0, seen - 3))) < 0:
            if len(came) > HEAD_BYTES or not 0x20 < came[0] < 0x7F:
                raise RequestRefused(Reason.malformed, f"no head of a request within {HEAD_BYTES} bytes")
            whole = len(came) - came.endswith(b"\r")
            if _BARE.search(came, max(0, seen - 1), whole):
                raise RequestRefused(Reason.malformed, "a line does not end with CR LF")
            seen = whole
            if not (data := await self._receive()):
                raise RequestRefused(Reason.malformed, "the request ended early")
            came += data
        head = bytes(came[: end + 4])
        if len(head) > HEAD_BYTES:
            raise RequestRefused(Reason.malformed, f"no head of a request within {HEAD_BYTES} bytes")
        _unambiguous(head)
        self._http.receive_data(bytes(came))
        event = self._event()
        assert isinstance(event, h11.Request)
        if len(event.target) > TARGET_BYTES or len(event.method) > METHOD_BYTES:
            raise RequestRefused(Reason.malformed, f"a URL longer than {TARGET_BYTES} bytes")
        headers = tuple((bytes(name), bytes(value)) for name, value in event.headers)
        self._declared = int(dict(headers).get(b"content-length", b"0"))
        self._method = event.method.decode()
        return Head(self._method, event.target.decode(), headers)

    async def body(self, most: int) -> bytes:
        """Read the body of the request. Raises RequestRefused (request_bytes, malformed)."""
        if self._declared > most:
            raise RequestRefused(Reason.request_bytes)
        parts: list[bytes] = []
        size = 0
        while not isinstance(event := self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                parts.append(bytes(event.data))
                if (size := size + len(event.data)) > most:
                    raise RequestRefused(Reason.request_bytes)
                continue
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._receive())
        self._whole = True
        self._buffer = self._http.trailing_data[0]
        return b"".join(parts)

    async def drain_body(self, most: int) -> None:
        """Read the rest of a refused request if it is small, so that the connection can be used again."""
        if self._whole or self._http.they_are_waiting_for_100_continue or self._http.our_state is not h11.SEND_RESPONSE:
            return
        try:
            await self.body(most)
        except RequestRefused:
            return

    async def answer(self, status: int, headers: Headers, content: bytes, *, phrase: bytes | None = None) -> None:
        """Send a whole answer. `phrase` replaces the reason phrase of the status."""
        known = not _has_body(status) or any(name == b"content-length" for name, _ in headers)
        if not known and (content or self._method != "HEAD"):
            headers = [*headers, (b"content-length", b"%d" % len(content))]
        data = self._begin(self._response(status, headers, phrase))
        if content:
            data += self._http.send(h11.Data(data=content)) or b""
        self.sent += len(content)
        await self.stream.send(data + (self._http.send(h11.EndOfMessage()) or b""))

    async def stream_answer(self, status: int, headers: Headers, chunks: AsyncIterator[bytes]) -> None:
        """Send an answer as it comes. Without Content-Length among `headers` it is sent in chunks."""
        await self.stream.send(self._begin(self._response(status, headers)))
        async for chunk in chunks:
            self.sent += len(chunk)
            await self._send(h11.Data(data=chunk))
        await self._send(h11.EndOfMessage())

    async def open_tunnel(self) -> bytes:
        """Answer a CONNECT; from here on the bytes belong to the tunnel. Return those that came already. Raises
        RequestRefused(malformed) for a CONNECT with a body."""
        if not isinstance(self._event(), h11.EndOfMessage):
            raise RequestRefused(Reason.malformed, "a CONNECT with a body")
        await self._send(h11.Response(status_code=200, headers=[], reason=b"Connection established"))
        return self._http.trailing_data[0]

    async def wait_until_closed(self) -> None:
        """Wait until the sandbox has closed its side. Bytes that it sends ahead meanwhile are retained for its next
        request."""
        while data := await self._receive():
            self._buffer += data
            if len(self._buffer) > HEAD_BYTES:  # a client that sends so much is not waiting for an answer
                return

    @property
    def has_begun_answer(self) -> bool:
        """True if part of an answer was sent."""
        return self._http.our_state is not h11.SEND_RESPONSE and self._http.our_state is not h11.IDLE

    @property
    def has_finished_answer(self) -> bool:
        """True if the answer was sent to its end."""
        return self._http.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.SWITCHED_PROTOCOL)

    @property
    def reusable(self) -> bool:
        """True if the connection may carry one more request."""
        return self._whole and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def linger(self) -> None:
        """Give the sandbox a moment to close. If only the end of the connection ends the answer, close our direction
        first."""
        try:
            with anyio.move_on_after(LINGER_S):
                if self._endless:
                    await self.stream.send_eof()
                while await self._receive():
                    pass
        except (anyio.ClosedResourceError, OSError, NotImplementedError):
            return

    def _response(self, status: int, headers: Headers, phrase: bytes | None = None) -> h11.Response:
        closing = [] if self._whole else [(b"connection", b"close")]
        return h11.Response(status_code=status, headers=[*headers, *closing], reason=phrase or _phrase(status))

    def _begin(self, response: h11.Response) -> bytes:
        data = self._http.send(response) or b""
        fields = data.lower()
        sized = b"\r\ncontent-length:" in fields or b"\r\ntransfer-encoding:" in fields
        self._endless = not sized and _has_body(response.status_code)
        return data

    async def _send(self, event: h11.Event) -> None:
        if data := self._http.send(event):
            await self.stream.send(data)

    def _event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            return self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise RequestRefused(Reason.malformed, str(error)) from None

    async def _receive(self) -> bytes:
        try:
            return await self.stream.receive(READ_BYTES)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return b""


def _unambiguous(head: bytes) -> None:
    """Raise RequestRefused(malformed) where RFC 9112 6.3 leaves a choice, or h11 is lenient."""
    if _BARE.search(head):
        raise RequestRefused(Reason.malformed, "a line does not end with CR LF")
    lines = head.split(b"\r\n")[1:-2]
    names = [line.partition(b":")[0].lower() for line in lines]
    if any(line[:1] in (b" ", b"\t") for line in lines):
        raise RequestRefused(Reason.malformed, "a folded header line")
    framing = names.count(b"content-length") + names.count(b"transfer-encoding")
    if framing > 1 or names.count(b"host") > 1:
        raise RequestRefused(Reason.malformed, "its length or its host is given twice")
    for name, line in zip(names, lines, strict=True):
        if name == b"content-length" and not line.partition(b":")[2].strip().isdigit():
            raise RequestRefused(Reason.malformed, "no length")


def _has_body(status: int) -> bool:
    return status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""


class Accepted(ByteStream):
    """A plain socket as a stream. An asyncio transport is not used, because it would shut down cleanly before its
    reset."""

    def __init__(self, connection: socket.socket) -> None:
        """Take the socket over."""
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._loop = connection, asyncio.get_running_loop()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """See ByteStream."""
        try:
            data = await self._loop.sock_recv(self._socket, max_bytes)
        except OSError as error:
            raise anyio.BrokenResourceError from error
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        try:
            await self._loop.sock_sendall(self._socket, item)
        except OSError as error:
            raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        """See ByteStream."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Reset the connection now."""
        reset(self._socket)


def reset(connection: socket.socket) -> None:
    """Close a connection by a reset, which leaves no trace; may be called twice."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()


def forget_waiting(listener: socket.socket) -> None:
    """Reset connections that were not accepted yet: they belong to another call."""
    listener.setblocking(False)
    with contextlib.suppress(OSError):
        while True:
            reset(listener.accept()[0])
