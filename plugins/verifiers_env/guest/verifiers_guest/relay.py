"""The way of an environment's requests to the gateway.

Source: verifiers 0.4.0, `verifiers.v1.clients.client.SESSION_ID_HEADER`.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

TEXT = 2000
"""Maximum number of characters of a text in an answer."""
SESSION_HEADER = "x-session-id"
"""Header in which verifiers sends the id of the trace that a request belongs to (`SESSION_ID_HEADER`)."""
PATH_HEADER = "x-turnlog-agent-path"
"""Header that tells the gateway which agent of the session sent a request (plugins/verifiers_env/profile.py)."""
HOP_HEADERS = frozenset(
    {"authorization", "connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "x-api-key", SESSION_HEADER, "accept-encoding", "content-encoding"}
)


@dataclass
class Seat:
    """The model access of one trace: where its requests go."""

    episode: RunningEpisode
    path: str
    """Agent path of its turns; see docs/harnesses.md."""


@dataclass
class RunningEpisode:
    """An episode in progress."""

    base_url: str
    api_key: str
    role: str
    refused: str = ""
    """Error code of the last request of the trained role, if the gateway refused it."""
    unreachable: str = ""
    """Error of the last request that the gateway did not answer; empty if it answered all."""
    main: str | None = None
    """Id of the trace whose turns are the main lineage."""
    others: int = 0


class ModelRelay:
    """A local HTTP endpoint between the environment's model client and the gateway. It adds the session's key, so that
    no client of the environment has it, and the agent path of the trace that a request belongs to."""

    def __init__(self) -> None:
        self.seats: dict[str, Seat] = {}
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        import aiohttp
        from aiohttp import web

        self._errors = aiohttp.ClientError
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)
        self._client = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{tail:.*}", self._forward)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Close the endpoint."""
        await self._runner.cleanup()
        await self._client.close()

    async def _forward(self, request: Any) -> Any:
        from aiohttp import web

        seat = self.seats.get(request.headers.get(SESSION_HEADER, ""))
        if seat is None:
            return _refusal(web, 403, "no_session", "the request names no trace of a running episode")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        headers |= {"Authorization": f"Bearer {seat.episode.api_key}", PATH_HEADER: seat.path}
        if seat.path != "main":
            headers["User-Agent"] = "turnlog-verifiers"  # a harness's own name would decide its path otherwise
        url = seat.episode.base_url.removesuffix("/v1") + request.raw_path
        body = await request.read()
        try:
            async with self._client.request(request.method, url, data=body, headers=headers) as answer:
                kind = answer.headers.get("Content-Type", "application/json")
                if not seat.path.startswith("side"):
                    seat.episode.refused = ""
                if not kind.startswith("text/event-stream"):
                    content = await answer.read()
                    if answer.status >= 400 and not seat.path.startswith("side"):
                        seat.episode.refused = _error_code(content)
                    return web.Response(body=content, status=answer.status, headers={"Content-Type": kind})
                stream = web.StreamResponse(status=answer.status, headers={"Content-Type": kind})
                await stream.prepare(request)
                async for chunk in answer.content.iter_any():
                    await stream.write(chunk)
                await stream.write_eof()
                return stream
        except self._errors as error:
            seat.episode.unreachable = f"{type(error).__name__}: {error}"[:TEXT]
            return _refusal(web, 502, "gateway_unreachable", seat.episode.unreachable)


def _refusal(web: Any, status: int, code: str, message: str) -> Any:
    error = {"message": message, "type": "server_error", "code": code}
    return web.json_response({"error": error}, status=status)


def _error_code(content: bytes) -> str:
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        return str(json.loads(content)["error"]["code"] or "")
    return ""
