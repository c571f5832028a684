"""The gateway role: an ASGI application over the endpoints, and the tasks that keep it current."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from turnlog.infra.health import QuietServer, application, configured
from turnlog.infra.log import LogError
from turnlog.infra.role import Role
from turnlog.producers.gateway.endpoints import Gateway, answered
from turnlog.producers.gateway.errors import GatewayError, NotRecorded
from turnlog.producers.gateway.metrics import ERRORS

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
CLIENT_CLOSED = 499
"""What nobody reads: the client left before its request had come in (nginx's number)."""


def front(gateway: Gateway) -> ASGIApp:
    """The ASGI application. Turns pass by FastAPI's routing and exception stacks, which cost half of what is left."""
    app = build(gateway)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != CHAT or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        try:
            response = await gateway.chat(Request(scope, receive))
        except (GatewayError, LogError) as error:
            response = _refused(error)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    return served


def build(gateway: Gateway) -> FastAPI:
    """Every endpoint as a FastAPI application."""
    app = FastAPI(title="turnlog gateway", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/sessions", gateway.open, methods=["POST"])
    app.add_api_route("/sessions/{session_id}", gateway.describe, methods=["GET"])
    app.add_api_route("/sessions/{session_id}/finish", gateway.finish, methods=["POST"])
    app.add_api_route(CHAT, gateway.chat, methods=["POST"])
    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.router.routes.extend(application(gateway.role.health).routes)

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError | LogError)
        return _refused(error)

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(GatewayError, refused)
    app.add_exception_handler(LogError, refused)
    app.add_exception_handler(ClientDisconnect, left)
    return app


async def main(role: Role) -> None:
    """Serve until the role stops; then refuse new connections, let running turns reach the log, and leave."""
    settings = role.settings.gateway
    with contextlib.closing(listening(settings.host, settings.port)) as listener:
        port = listener.getsockname()[1]
        gateway = await Gateway.assembled(role, settings.url or f"http://{settings.host}:{port}")
        async with gateway.current() as following, serving(gateway, listener):
            role.health.started()
            log.info("serving %s", gateway.url)
            stopping = asyncio.create_task(role.stopping.wait())
            await asyncio.wait([stopping, following], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if following.done():
                await following


@asynccontextmanager
async def serving(gateway: Gateway, listener: socket.socket) -> AsyncIterator[None]:
    """Serve on an open socket while the block runs; leaving waits for running turns."""
    server = QuietServer(configured(front(gateway), timeout_graceful_shutdown=30))
    task = asyncio.create_task(server._serve([listener]))
    while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn offers a flag, no event
        await asyncio.sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        await task
        await gateway.sessions.drain()


def listening(host: str, port: int) -> socket.socket:
    """A bound socket, so that the address is known before anything is written. Raises OSError naming the address."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"{host}:{port} cannot be bound ({error.strerror}): change [gateway] port") from None
    return listener


def _refused(error: GatewayError | LogError) -> Response:
    if isinstance(error, LogError):
        error = NotRecorded(f"the log could not be read or written: {error}")
    ERRORS.labels(error.code).inc()
    return answered(error.body(), error.status)
