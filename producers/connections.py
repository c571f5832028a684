"""Kept-alive HTTP connections of one process to its gateway, on httpcore (httpx's own transport).

A free list of single connections: 0.7 core-ms per request where httpx with its pool takes 3.4 at 32 at once, since the
pool looks at every connection for each request.

NoAnswer: the connection was refused, dropped or silent; whether the request took effect is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpcore


class NoAnswer(Exception):
    """Names the URL and what happened to the connection."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response."""

    url: str
    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The start of the body, for messages."""
        return self.content[:300].decode(errors="replace")


class Connections:
    """As many connections as there were requests at once, each to one origin."""

    def __init__(self, *, connect_s: float, answer_s: float) -> None:
        """`answer_s`: the longest silence while an answer is awaited."""
        self._timeout = {"connect": connect_s, "read": answer_s, "write": connect_s, "pool": connect_s}
        self._free: dict[str, list[httpcore.AsyncHTTPConnection]] = {}
        """By scheme and authority."""

    async def close(self) -> None:
        """Close what is idle."""
        for connections in self._free.values():
            for connection in connections:
                await connection.aclose()
        self._free.clear()

    async def request(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Answer:
        """Send and read the whole answer. Raises NoAnswer."""
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        origin = httpcore.Origin(parts.scheme.encode(), (parts.hostname or "").encode(), port)
        free = self._free.setdefault(f"{parts.scheme}://{parts.netloc}", [])
        connection = await _usable(free) or httpcore.AsyncHTTPConnection(origin=origin)
        try:
            response = await connection.request(
                method, url, headers=list(headers.items()), content=content, extensions={"timeout": self._timeout}
            )
            return Answer(url, response.status, response.content)
        except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
            raise NoAnswer(f"{url}: {type(error).__name__} {error}".rstrip()) from error
        finally:
            if connection.is_idle():
                free.append(connection)
            else:  # it broke, or the request was given up: the gateway must see us leave
                await connection.aclose()


async def _usable(free: list[httpcore.AsyncHTTPConnection]) -> httpcore.AsyncHTTPConnection | None:
    """The connection used last that the server has not closed meanwhile."""
    while free:
        connection = free.pop()
        if connection.is_available() and not connection.has_expired():
            return connection
        await connection.aclose()
    return None
