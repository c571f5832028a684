"""Requests to an engine over HTTP, with failures as the errors of protocol.py, whatever the engine's kind."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp
import httpx
import orjson

from turnlog.infra.engines.protocol import EngineDead, EngineRefused, EngineSlow, EngineUnreachable, NoSuchEndpoint
from turnlog.infra.roles import passes
from turnlog.infra.roles.http_clients import direct, for_turns
from turnlog.infra.roles.tls import trusting

CONNECT_S = 5.0
QUICK_S = 10.0
"""Time-out in seconds of all control requests but loads."""
JSON = {"content-type": "application/json"}


class EngineCalls:
    """Requests of a gateway to the engine at `url`, over one connection pool."""

    def __init__(self, url: str, *, ca_file: str = "") -> None:
        """Connections are opened by the first request. Raises TlsFileUnusable."""
        self.url = url.rstrip("/")
        self._trusted = trusting(url, ca_file, "engine")
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def post(self, path: str, body: bytes, timeout_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield the answer, which the block reads. `timeout_s` bounds each wait for bytes. Raises
        EngineDead, and EngineRefused if the block finds an answer that is not the engine's."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=timeout_s)
        try:
            async with self._http().post(self.url + path, data=body, headers=JSON, timeout=timeout) as answer:
                yield answer
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        except aiohttp.SocketTimeoutError as error:
            raise EngineSlow(f"{self.url}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDead(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        except (orjson.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise EngineRefused(f"{self.url}: an answer that is not the engine's: {error!r}") from error

    async def send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> bytes:
        """Send a request and return the body of the answer, whatever its status. Raises EngineDead."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            request = self._http().request(method, self.url + path, data=body, headers=JSON, timeout=timeout)
            async with request as answer:
                return await answer.read()
        except aiohttp.ClientConnectorError as error:
            raise EngineUnreachable(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDead(f"{self.url}: {type(error).__name__} {error}".rstrip()) from error

    async def refusal(self, answer: aiohttp.ClientResponse) -> str | None:
        """Return what an answer with an error status says, or None for any other. Raises EngineDead if the same request
        may be accepted later or elsewhere."""
        if answer.status < HTTPStatus.BAD_REQUEST:
            return None
        text = (await answer.read())[:500].decode(errors="replace")
        if passes(answer.status):
            raise EngineDead(f"{self.url} answered {answer.status}: {text}")
        return f"{self.url} answered {answer.status}: {text}"

    async def close(self) -> None:
        """Release connections."""
        if self._session is not None:
            await self._session.close()

    def _http(self) -> aiohttp.ClientSession:
        """Return the client session, which is created in the event loop that uses it."""
        if self._session is None:
            self._session = for_turns(self._trusted)
        return self._session


async def server_sent(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event (WHATWG HTML, section 9.2). Engines write one data line per event."""
    rest = b""
    async for chunk in chunks:
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield event[5:].strip()


OTHER_KIND = "is it an engine of kind {}? see [engine] kind and kinds"


class ControlCalls:
    """Requests of a loader to the engine at `url`."""

    def __init__(self, url: str, *, ca_file: str = "") -> None:
        """Raises TlsFileUnusable."""
        self.url = url.rstrip("/")
        self._http = direct(base_url=self.url, timeout=QUICK_S, verify=trusting(url, ca_file, "engine"))

    async def close(self) -> None:
        """Release all connections."""
        await self._http.aclose()

    async def call(self, method: str, path: str, body: object, timeout_s: float) -> dict[str, Any]:
        """Send a control request and return the answer. Raises EngineRefused, EngineDead."""
        answer = await self.answer(method, path, body, timeout_s)
        try:
            found: dict[str, Any] = answer.json() if answer.content else {}
        except ValueError as error:
            raise EngineDead(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        return found

    async def answer(self, method: str, path: str, body: object, timeout_s: float) -> httpx.Response:
        """Send a control request and return the answer, read. Raises EngineRefused, NoSuchEndpoint, EngineDead."""
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout_s)
        except httpx.ConnectError as error:
            raise EngineUnreachable(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        except httpx.TransportError as error:
            raise EngineDead(f"{self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        if answer.status_code < httpx.codes.BAD_REQUEST:
            return answer
        text = f"{self.url}{path} answered {answer.status_code}: {answer.text[:300]}"
        if passes(answer.status_code):
            raise EngineDead(text)
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise NoSuchEndpoint(text)
        raise EngineRefused(text)
