"""/healthz, /readyz, /state and Prometheus /metrics of a role, on TURNLOG_HEALTH_PORT (unset: not served)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp


class Health:
    """What a role says of itself. `ready` needs every named condition to hold."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._waiting: dict[str, str] = {"start": "starting"}
        self._tells: dict[str, Callable[[], Mapping[str, object]]] = {}

    def waits(self, condition: str, why: str) -> None:
        """Not ready because of `condition`; for a stopped unit `why` names topic, partition, offset."""
        self._waiting[condition] = why

    def holds(self, condition: str) -> None:
        """`condition` no longer stands in the way."""
        self._waiting.pop(condition, None)

    def started(self) -> None:
        """The role does its work."""
        self.holds("start")

    def tells(self, name: str, ask: Callable[[], Mapping[str, object]]) -> None:
        """/state answers what `ask` returns (JSON) under `name`."""
        self._tells[name] = ask

    def state(self) -> dict[str, Mapping[str, object]]:
        """What the role tells of its insides."""
        return {name: ask() for name, ask in self._tells.items()}

    @property
    def waiting(self) -> dict[str, str]:
        """Conditions that are not met, with their reasons."""
        return dict(self._waiting)


def application(health: Health) -> Starlette:
    """The endpoints as an ASGI application."""

    async def healthz(_: Request) -> Response:
        return JSONResponse({"role": health.role, "pid": os.getpid()})

    async def readyz(_: Request) -> Response:
        waiting = health.waiting
        return JSONResponse({"ready": not waiting, "waiting": waiting}, status_code=503 if waiting else 200)

    async def state(_: Request) -> Response:
        return JSONResponse({"role": health.role, "pid": os.getpid(), **health.state()})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    routes = {"/healthz": healthz, "/readyz": readyz, "/state": state, "/metrics": metrics}
    return Starlette(routes=[Route(path, answer) for path, answer in routes.items()])


def configured(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """How every server of ours runs: what it has to say goes where the process's lines go, from WARNING on."""
    return uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, lifespan="off", **more)


class QuietServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its process."""

    def install_signal_handlers(self) -> None:
        """Signals belong to the role."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve in the background until the block ends."""
        task = asyncio.create_task(self._serve())
        while not self.started and not task.done():  # noqa: ASYNC110 - uvicorn offers a flag, no event
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            self.should_exit = True
            await task


@asynccontextmanager
async def serve_health(health: Health, *, instance: str) -> AsyncIterator[None]:
    """Serve while the block runs."""
    port = int(os.environ.get("TURNLOG_HEALTH_PORT", "0"))
    if not port:
        yield
        return
    async with QuietServer(configured(application(health), host="127.0.0.1", port=port)).running():
        yield
