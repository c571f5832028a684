"""The HTTP/1.1 protocols of uvicorn as our servers use them: the head of a request must arrive in time, and is bounded.

httptools parses in C, for a third of h11's CPU time. It drops the body of a request that offers to change the protocol,
as Java's HttpClient does: its first request to a server offers HTTP/2. h11 ignores the offer, and continues the
connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
"""Maximum bytes of a request beside its body: of its head, and of what frames a body in chunks. That is h11's own
limit."""


class HeadInTime(asyncio.Protocol):
    """Closes a connection whose next request head is not complete within `head_s` seconds, whether it was begun or not:
    uvicorn would wait forever for a client that sends it byte by byte. Base class of a class of uvicorn."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    cycle: Any
    _late: asyncio.TimerHandle | None = None

    def __init__(self, *about: Any, head_s: float, **more: Any) -> None:
        super().__init__(*about, **more)
        self._head_s = head_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        super().connection_lost(exc)
        self._forget()

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(self._head_s, self.transport.abort)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class OfferIgnored(HeadInTime, H11Protocol):
    """Continues a connection whose client has offered to change the protocol."""


class Http(HeadInTime, HttpToolsProtocol):
    """Protocol of all connections."""

    _unread = 0
    """Bytes received since the last part of a body, or end of a request."""

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._unread += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._ignore_offer(data[offer.args[0] :])
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._unread > HEAD_BYTES:
            self.send_400_response(f"The head of the request is longer than {HEAD_BYTES} bytes.")
        self._look()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._unread = 0
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        """Return True, so that uvicorn does not serve a request without its body."""
        return True

    def _ignore_offer(self, rest: bytes) -> None:
        """Let h11 serve the request whose head has been read, and all that follow. `rest`: what follows the head."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.send_400_response("A request that offers another protocol must wait for the answer before it.")
            return
        self._forget()
        self.connections.discard(self)
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            head += [name, b": ", value, b"\r\n"]
        following = OfferIgnored(self.config, self.server_state, self.app_state, self.loop, head_s=self._head_s)
        following.connection_made(self.transport)
        self.transport.set_protocol(following)
        following.data_received(b"".join([*head, b"\r\n", rest]))
