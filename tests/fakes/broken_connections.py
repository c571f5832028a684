"""Connections of a real client that break at a chosen point, each in a way that asyncio, uvloop, ssl or a dying broker
has."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CONNECTING: dict[str, Callable[[], Exception]] = {
    "refused": lambda: ConnectionRefusedError(111, "Connection refused"),
    "no name": lambda: socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    "no handshake": lambda: ssl.SSLError(1, "UNEXPECTED_EOF_WHILE_READING"),
    "lost in the handshake": lambda: RuntimeError("unable to perform operation on <TCPTransport closed=True>"),
    "slow": TimeoutError,
}
WRITING: dict[str, Callable[[], Exception]] = {
    "uvloop": lambda: RuntimeError("unable to perform operation on <TCPTransport closed=True>; the handler is closed"),
    "reset": lambda: ConnectionResetError(104, "Connection reset by peer"),
    "pipe": lambda: BrokenPipeError(32, "Broken pipe"),
    "closed": lambda: OSError(9, "Bad file descriptor"),
    "tls": lambda: ssl.SSLError(1, "APPLICATION_DATA_AFTER_CLOSE_NOTIFY"),
}
ANSWERING = ("reset in the middle", "end in the middle", "another answer", "noise")
KINDS = (*(f"connecting: {name}" for name in CONNECTING), *(f"writing: {name}" for name in WRITING), *(
    f"answering: {name}" for name in ANSWERING))  # fmt: skip


class Breaker:
    """Breaks one event, or every one from there on: the `at`-th connection, write or answer since `arm`."""

    def __init__(self) -> None:
        self._kind, self._at, self._lasting, self._seen = "", 0, False, 0

    def arm(self, kind: str, at: int, *, lasting: bool) -> None:
        """See the class; `kind` is one of KINDS."""
        self._kind, self._at, self._lasting, self._seen = kind, at, lasting, 0

    def heal(self) -> bool:
        """Break nothing from now on. Whether anything was broken."""
        broke = bool(self._kind) and self._seen > self._at
        self._kind = ""
        return broke

    def breaks(self, event: str) -> str:
        """How this event breaks, if it does."""
        happening, _, how = self._kind.partition(": ")
        if event != happening:
            return ""
        self._seen += 1
        due = self._seen > self._at if self._lasting else self._seen == self._at + 1
        return how if due else ""

    @contextmanager
    def around(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Every connection that `loop` makes in the block can break."""
        connect = loop.create_connection

        async def create_connection(factory: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
            if how := self.breaks("connecting"):
                raise CONNECTING[how]()
            transport, protocol = await connect(factory, *args, **options)
            received = protocol.data_received
            protocol.data_received = lambda data: self._answered(transport, received, data)
            return _Transport(transport, self), protocol

        loop.create_connection = create_connection  # type: ignore[method-assign]
        try:
            yield
        finally:
            del loop.create_connection

    def _answered(self, transport: Any, received: Callable[[bytes], None], data: bytes) -> None:
        match self.breaks("answering"):
            case "reset in the middle":
                received(data[: len(data) // 2])
                transport.abort()
            case "end in the middle":
                received(data[: len(data) // 2])
                transport.close()
            case "another answer":
                received(data[:4] + bytes(byte ^ 0x55 for byte in data[4:8]) + data[8:])
            case "noise":
                received(data[:8] + b"\xff" * len(data[8:]))
            case _:
                received(data)


class _Transport:
    """The transport, but for writes that break."""

    def __init__(self, transport: Any, breaker: Breaker) -> None:
        self._transport, self._breaker = transport, breaker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if how := self._breaker.breaks("writing"):
            self._transport.abort()
            raise WRITING[how]()
        self._transport.write(data)
