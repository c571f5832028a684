"""A local server for E2B's own SDK: the REST calls and the envd calls that the e2b backend makes, on loopback.

For tests and for trying things without a key: the SDK is pointed at it by E2B_API_URL and E2B_SANDBOX_URL. Source of
the protocol: the SDK's source (e2b 2), which is also what speaks to it; machines are bubblewraps of ours, which
makes them no microVMs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import uvicorn
from e2b.envd.process import process_connect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from turnlog.infra.health import QuietServer
from turnlog.sandbox_workers.backends.bubblewrap import find
from turnlog.sandbox_workers.backends.e2b.server_machine import Machine, Parts
from turnlog.sandbox_workers.backends.e2b.server_process import Processes
from turnlog.sandbox_workers.backends.interpreter_cache import cache_directory, interpreter

ENVD_VERSION = "0.6.7"
TEMPLATES = frozenset({"base"})
DEFAULT_TIMEOUT_S = 300


class LocalE2b:
    """The server's state. `key` is the only API key that it takes."""

    def __init__(self, parts: Parts, *, key: str, first_uid: int) -> None:
        self.key = key
        self.url = ""
        self.machines: dict[str, Machine] = {}
        """Those that live, by sandbox id."""
        self.created = 0
        self.renewals: asyncio.Queue[str] = asyncio.Queue()
        """Ids of machines whose time-out was set again."""
        self.arrived = asyncio.Event()
        """A request for a sandbox came in."""
        self.proceed = asyncio.Event()
        """Requests for a sandbox are answered once this is set."""
        self.proceed.set()
        self._parts = parts
        self._first_uid = first_uid
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def connection(self) -> dict[str, str]:
        """For the SDK's calls, so that they come here."""
        return {"api_key": self.key, "api_url": self.url, "sandbox_url": self.url}

    async def create(self, request: Request) -> Response:
        """POST /v2/sandboxes."""
        if refused := self._unauthorised(request):
            return refused
        asked = await request.json()
        self.arrived.set()
        template = asked["templateID"]
        if template not in TEMPLATES:
            return _error(404, f"template '{template}' not found")
        if asked.get("allow_internet_access") is not False:
            return _error(400, "machines of this server have no internet access: set allow_internet_access to false")
        uid = self._first_uid + self.created if os.geteuid() == 0 else None
        self.created += 1
        machine = Machine(self._parts, identity=uuid.uuid4().hex, uid=uid, metadata=asked.get("metadata") or {})
        self.machines[machine.identity] = machine
        self._expire(machine, asked.get("timeout", DEFAULT_TIMEOUT_S))
        await self.proceed.wait()
        return JSONResponse(self._described(machine), status_code=201)

    async def listed(self, request: Request) -> Response:
        """GET /v2/sandboxes."""
        if refused := self._unauthorised(request):
            return refused
        return JSONResponse([self._described(machine) for machine in self.machines.values()])

    async def details(self, request: Request) -> Response:
        """GET /sandboxes/{id}."""
        machine = self.machines.get(request.path_params["identity"])
        if refused := self._unauthorised(request):
            return refused
        return JSONResponse(self._described(machine)) if machine else _error(404, "sandbox not found")

    async def delete(self, request: Request) -> Response:
        """DELETE /sandboxes/{id}."""
        if refused := self._unauthorised(request):
            return refused
        machine = self.machines.pop(request.path_params["identity"], None)
        if machine is None:
            return _error(404, "sandbox not found")
        await machine.kill()
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        """POST /sandboxes/{id}/timeout."""
        machine = self.machines.get(request.path_params["identity"])
        if refused := self._unauthorised(request):
            return refused
        if machine is None:
            return _error(404, "sandbox not found")
        self.renewals.put_nowait(machine.identity)
        self._expire(machine, (await request.json())["timeout"])
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        """GET /health of envd."""
        known = request.headers.get("e2b-sandbox-id") in self.machines
        return Response(status_code=204) if known else _error(502, "The sandbox was not found")

    async def close(self) -> None:
        """End every machine."""
        machines = list(self.machines.values())
        self.machines.clear()
        await asyncio.gather(*(machine.kill() for machine in machines), *self._ending)

    def _expire(self, machine: Machine, after_s: float) -> None:
        if machine.expiry is not None:
            machine.expiry.cancel()
        machine.expiry = asyncio.get_running_loop().call_later(after_s, self._expired, machine)

    def _expired(self, machine: Machine) -> None:
        if self.machines.pop(machine.identity, None) is not None:
            ending = asyncio.create_task(machine.kill())
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)

    def _unauthorised(self, request: Request) -> Response | None:
        given = request.headers.get("x-api-key")
        return None if given == self.key else _error(401, "Invalid API key")

    def _described(self, machine: Machine) -> dict[str, Any]:
        now = datetime.now(UTC)
        return {
            "templateID": "local", "alias": "base", "sandboxID": machine.identity, "clientID": "local",
            "envdVersion": ENVD_VERSION, "envdAccessToken": "local", "metadata": machine.metadata, "state": "running",
            "startedAt": now.isoformat(), "endAt": (now + timedelta(seconds=DEFAULT_TIMEOUT_S)).isoformat(),
            "cpuCount": os.cpu_count() or 1, "memoryMB": 512, "diskSizeMB": 1024,
        }  # fmt: skip


def _error(status: int, message: str) -> Response:
    return JSONResponse({"code": status, "message": message}, status_code=status)


def application(state: LocalE2b, processes: process_connect.Process) -> Starlette:
    """Both APIs as one ASGI application: their paths do not meet."""
    return Starlette(
        routes=[
            Route("/v2/sandboxes", state.create, methods=["POST"]),
            Route("/v2/sandboxes", state.listed, methods=["GET"]),
            Route("/sandboxes/{identity}", state.details, methods=["GET"]),
            Route("/sandboxes/{identity}", state.delete, methods=["DELETE"]),
            Route("/sandboxes/{identity}/timeout", state.timeout, methods=["POST"]),
            Route("/health", state.health, methods=["GET"]),
            Mount("/", process_connect.ProcessASGIApplication(processes)),
        ]
    )


@asynccontextmanager
async def serving(
    *,
    first_uid: int,
    key: str = "e2b_local",
    cache: Path | None = None,
    processes: process_connect.Process | None = None,
) -> AsyncIterator[LocalE2b]:
    """Serve on a free port of loopback while the block runs. `processes` may lie in place of envd.
    Raises SandboxUnavailable without bwrap."""
    cache = cache or cache_directory()
    state = LocalE2b(Parts(find(cache), interpreter(cache).root), key=key, first_uid=first_uid)
    # With its protocol named, asyncio switches Nagle's delay off for what is accepted from it.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    state.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = application(state, processes or Processes(state.machines))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, timeout_keep_alive=3600
    )
    server = QuietServer(config)
    task = asyncio.create_task(server._serve([listener]))
    while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn offers a flag, no event
        await asyncio.sleep(0.01)
    try:
        yield state
    finally:
        state.proceed.set()
        await state.close()
        server.should_exit = True
        await task
        listener.close()
