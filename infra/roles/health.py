"""HTTP endpoints of a role: /healthz, /readyz, /state and Prometheus /metrics, and the HTTP server settings common to
all servers.

They are served on TURNLOG_HEALTH_PORT (unset: not served) of TURNLOG_HEALTH_HOST (unset: loopback). The size of a
request body is limited while it arrives, so that a larger one is never in memory.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, Counter, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from turnlog.infra.roles.http_protocols import Http
from turnlog.infra.roles.measures import RESTARTS, restarts
from turnlog.infra.roles.probe import EVERY, bindable

WORK = "work"


@dataclass(slots=True)
class Loop:
    """Heartbeats of one loop of a role."""

    within_s: float
    """Maximum seconds between two heartbeats; 0: no limit."""
    rounds: int = 0
    at: float = 0.0
    """time.monotonic() of the last heartbeat."""


class Health:
    """Health of a role. It is ready while no readiness condition fails, and alive while every loop that has begun sends
    its heartbeats in time."""

    def __init__(self, role: str, *, work_s: float = 0.0) -> None:
        """Create a role's health; `work_s` is the heartbeat limit of loops that set none."""
        self.role = role
        self._work_s = work_s
        self._loops: dict[str, Loop] = {}
        self._waiting: dict[str, str] = {"start": "starting"}
        self._warnings: dict[str, tuple[str, ...]] = {}
        self._exposed: dict[str, Callable[[], Mapping[str, object]]] = {}

    def unmet(self, condition: str, why: str) -> None:
        """Mark `condition` as failing, so that the role is not ready. For a stopped partition task, `why` names topic,
        partition and offset."""
        self._waiting[condition] = why

    def mark_ready(self, condition: str) -> None:
        """Mark `condition` as holding: it no longer keeps the role from being ready."""
        self._waiting.pop(condition, None)

    def warn(self, about: str, lines: Iterable[str]) -> None:
        """Set the warnings about one subject. A working role shows them on /readyz beside its failing readiness
        conditions."""
        self._warnings[about] = tuple(lines)

    @property
    def warnings(self) -> list[str]:
        """All current warnings of the role."""
        return [line for lines in self._warnings.values() for line in lines]

    def mark_started(self) -> None:
        """Mark the role as started: it does its work."""
        self.mark_ready("start")

    def beat(self, loop: str = WORK, *, within_s: float | None = None) -> None:
        """Record a heartbeat of the loop: an iteration has ended, or has made progress. Thread-safe.

        Call it where the work is done; a responsive event loop proves nothing about the work."""
        begun = self._loops.setdefault(loop, Loop(self._work_s if within_s is None else within_s))
        begun.rounds += 1
        begun.at = time.monotonic()

    def excuse(self) -> None:
        """Reset the heartbeats of all loops, because they stood still for lack of a server."""
        for loop in list(self._loops):
            self.beat(loop, within_s=self._loops[loop].within_s)

    def ends(self, loop: str) -> None:
        """Stop monitoring a loop that has ended."""
        self._loops.pop(loop, None)

    def living(self) -> tuple[bool, dict[str, object]]:
        """Return whether every loop sends its heartbeats in time, and the body of /healthz: for each loop the number of
        iterations, its limit in seconds, and whether it is stale."""
        now = time.monotonic()
        loops = {
            name: {
                "rounds": loop.rounds,
                "within_s": loop.within_s,
                "stale": bool(loop.within_s) and now - loop.at > loop.within_s,
            }
            for name, loop in list(self._loops.items())
        }
        alive = not any(loop["stale"] for loop in loops.values())
        return alive, {"role": self.role, "pid": os.getpid(), "loops": loops}

    def expose(self, name: str, ask: Callable[[], Mapping[str, object]]) -> None:
        """Expose the result of `ask` (JSON) under `name` on /state."""
        self._exposed[name] = ask

    def state(self) -> dict[str, Mapping[str, object]]:
        """Return the exposed internal state of the role."""
        return {name: ask() for name, ask in self._exposed.items()}

    @property
    def works(self) -> bool:
        """Whether the role has started its work."""
        return "start" not in self._waiting

    @property
    def waiting(self) -> dict[str, str]:
        """Failing readiness conditions with their reasons."""
        return dict(self._waiting)


def application(health: Health) -> Starlette:
    """Return the endpoints as an ASGI application. Raises SettingsError."""

    RESTARTS.labels(health.role).set(restarts(os.environ))

    async def healthz(_: Request) -> Response:
        alive, said = health.living()
        return JSONResponse(said, status_code=200 if alive else 503)

    async def readyz(_: Request) -> Response:
        waiting = health.waiting
        said = {"ready": not waiting, "waiting": waiting, "warnings": health.warnings}
        return JSONResponse(said, status_code=503 if waiting else 200)

    async def state(_: Request) -> Response:
        return JSONResponse({"role": health.role, "pid": os.getpid(), **health.state()})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    routes = {"/healthz": healthz, "/readyz": readyz, "/state": state, "/metrics": metrics}
    return Starlette(routes=[Route(path, answer) for path, answer in routes.items()])


def uvicorn_config(
    app: ASGIApp, *, tls: ssl.SSLContext | None = None, head_s: float = 60.0, **more: Any
) -> uvicorn.Config:
    """Return the configuration common to all of our HTTP servers. It logs to the process's handlers, from WARNING on.
    With `tls` it serves HTTPS only; `head_s` limits the time for the head of a request."""
    http: Any = functools.partial(Http, head_s=head_s)
    config = uvicorn.Config(
        app, http=http, log_config=None, log_level="warning", access_log=False, lifespan="off",
        ws="none",  # otherwise uvicorn takes upgrades from our apps wherever a WebSocket library is installed
        **more,
    )  # fmt: skip
    if tls is not None:
        config.load()  # now, since it resets config.ssl; a context of uvicorn would read its files only once
        config.ssl = tls
    return config


class QuietServer(uvicorn.Server):
    """A uvicorn server that runs beside other work and leaves signal handling to its process (`serve` would install
    handlers, `_serve` does not)."""

    @asynccontextmanager
    async def running(self, listener: socket.socket | None = None) -> AsyncIterator[None]:
        """Serve in the background until the block ends, on a socket from `listening`, which is then closed, or at the
        configured address."""
        task = asyncio.create_task(self._serve(None if listener is None else [listener]))
        while not self.started and not task.done():  # noqa: ASYNC110 - uvicorn offers a flag, no event
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            self.should_exit = True
            await task


class CannotListen(OSError):
    """The address cannot be bound; the message names it and the setting to change."""


def listening(host: str, port: int, setting: str) -> socket.socket:
    """Return a bound socket, so that the address is known and reserved before anything is written; `setting` is the one
    that chooses it.

    Host :: means every address of both families, or of IPv4 only on a machine without IPv6. Raises CannotListen."""
    host = bindable(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on a socket whose protocol is given; without it a response takes 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if host == EVERY:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        said = f"{host}:{port} cannot be bound ({error.strerror}): change {setting}"
        raise CannotListen(error.errno, said) from None
    return listener


@asynccontextmanager
async def serve_health(health: Health, address: tuple[str, int] | None) -> AsyncIterator[None]:
    """Serve the health endpoints while the block runs; do nothing if `address` is None. Raises CannotListen."""
    if address is None:
        yield
        return
    with closing(listening(*address, "TURNLOG_HEALTH_HOST or TURNLOG_HEALTH_PORT")) as listener:
        async with QuietServer(uvicorn_config(application(health))).running(listener):
            yield


TOKENS = Counter(
    "turnlog_books_tokens", "Output tokens by level (group, draw, step) and entry (sampled, trained, a reason)",
    ["level", "entry"],
)  # fmt: skip


def count_tokens(level: str, *, sampled: int, trained: int, masked: Mapping[str, int]) -> None:
    """Add the tokens of one group, rollout batch or step. `sampled` must be counted independently of the others, or the
    accounting checks nothing."""
    TOKENS.labels(level, "sampled").inc(sampled)
    TOKENS.labels(level, "trained").inc(trained)
    for reason, tokens in masked.items():
        TOKENS.labels(level, reason).inc(tokens)


class BodyTooLarge(Exception):
    """A request body is larger than its limit; the message says the limit and what to do."""


async def body_of(request: Request, most: int, remedy: str) -> bytes:
    """Return the request body of at most `most` bytes. Raises BodyTooLarge, starlette's ClientDisconnect.

    A declared length is trusted only if it is too large. The server discards the rest of a body that is too large."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
        raise _too_large(most, remedy)
    parts, size = [], 0
    async for part in request.stream():
        if (size := size + len(part)) > most:
            raise _too_large(most, remedy)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int, remedy: str) -> BodyTooLarge:
    return BodyTooLarge(f"the body is longer than {most:,} bytes: {remedy}")
