"""/healthz, /readyz, /state and Prometheus /metrics of a role, on TURNLOG_HEALTH_PORT (unset: not served) of
TURNLOG_HEALTH_HOST (unset: the loopback).
Bodies of requests to our servers are held to a size while they come: what is larger is never in memory.
"""

from __future__ import annotations

import asyncio
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
from uvicorn.protocols.http.h11_impl import H11Protocol

from turnlog.infra.roles.measures import RESTARTS, restarts
from turnlog.infra.roles.probe import EVERY, bindable

WORK = "work"


@dataclass(slots=True)
class Loop:
    """A loop of a role that must come round."""

    within_s: float
    """0: whenever."""
    rounds: int = 0
    at: float = 0.0
    """time.monotonic() of the last round."""


class Health:
    """What a role says of itself. `ready` needs every named condition to be met; it is alive while every loop that has
    begun comes round in time."""

    def __init__(self, role: str, *, work_s: float = 0.0) -> None:
        """`work_s`: within which a loop comes round that says nothing else."""
        self.role = role
        self._work_s = work_s
        self._loops: dict[str, Loop] = {}
        self._waiting: dict[str, str] = {"start": "starting"}
        self._warnings: dict[str, tuple[str, ...]] = {}
        self._exposed: dict[str, Callable[[], Mapping[str, object]]] = {}

    def unmet(self, condition: str, why: str) -> None:
        """Not ready because of `condition`; for a stopped unit `why` names topic, partition, offset."""
        self._waiting[condition] = why

    def met(self, condition: str) -> None:
        """`condition` no longer stands in the way of `ready`."""
        self._waiting.pop(condition, None)

    def warn(self, about: str, lines: Iterable[str]) -> None:
        """What somebody should know of a role that works: /readyz has it beside what is waited for."""
        self._warnings[about] = tuple(lines)

    @property
    def warnings(self) -> list[str]:
        """All that the role warns of."""
        return [line for lines in self._warnings.values() for line in lines]

    def started(self) -> None:
        """The role does its work."""
        self.met("start")

    def beat(self, loop: str = WORK, *, within_s: float | None = None) -> None:
        """The loop has come round, or gets ahead within a round. To be called where the work is done: that the event
        loop answers says nothing of it. Thread-safe."""
        begun = self._loops.setdefault(loop, Loop(self._work_s if within_s is None else within_s))
        begun.rounds += 1
        begun.at = time.monotonic()

    def excuse(self) -> None:
        """What stood still, stood still for want of a server: every loop begins a round anew."""
        for loop in list(self._loops):
            self.beat(loop, within_s=self._loops[loop].within_s)

    def ends(self, loop: str) -> None:
        """The loop is over: nobody waits for it any more."""
        self._loops.pop(loop, None)

    def living(self) -> tuple[bool, dict[str, object]]:
        """Whether every loop comes round in time, and what /healthz says: of each loop its rounds, the seconds that one
        may take, and whether the last one is older."""
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
        """/state answers what `ask` returns (JSON) under `name`."""
        self._exposed[name] = ask

    def state(self) -> dict[str, Mapping[str, object]]:
        """What the role tells of its insides."""
        return {name: ask() for name, ask in self._exposed.items()}

    @property
    def works(self) -> bool:
        """Whether the role has begun to do its work."""
        return "start" not in self._waiting

    @property
    def waiting(self) -> dict[str, str]:
        """Conditions that are not met, with their reasons."""
        return dict(self._waiting)


def application(health: Health) -> Starlette:
    """The endpoints as an ASGI application. Raises SettingsError."""

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


class HeadInTime(H11Protocol):
    """Drops a connection whose next request's head is begun, or was never begun, and not whole after `head_s`: uvicorn
    waits for ever for a client that sends it byte by byte."""

    head_s: float
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
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
            self._late = self.loop.call_later(self.head_s, self.transport.abort)

    def _forget(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def configured(app: ASGIApp, *, tls: ssl.SSLContext | None = None, head_s: float = 60.0, **more: Any) -> uvicorn.Config:
    """How every server of ours runs: what it has to say goes where the process's lines go, from WARNING on. With
    `tls` it serves https alone; `head_s`: within which the head of a request must be there."""
    http = type("HeadInTime", (HeadInTime,), {"head_s": head_s})
    config = uvicorn.Config(
        app, http=http, log_config=None, log_level="warning", access_log=False, lifespan="off", **more
    )
    if tls is not None:
        config.load()  # which would make a context of its own, of files that it reads once
        config.ssl = tls
    return config


class QuietServer(uvicorn.Server):
    """A uvicorn server beside other work: signals stay its process's (`serve` would take them, `_serve` does not)."""

    @asynccontextmanager
    async def running(self, listener: socket.socket | None = None) -> AsyncIterator[None]:
        """Serve in the background until the block ends: on a socket of `listening`, which is closed then, or where the
        configuration says."""
        task = asyncio.create_task(self._serve(None if listener is None else [listener]))
        while not self.started and not task.done():  # noqa: ASYNC110 - uvicorn offers a flag, no event
            await asyncio.sleep(0.01)
        try:
            yield
        finally:
            self.should_exit = True
            await task


class CannotListen(OSError):
    """Names the address, and the setting to change."""


def listening(host: str, port: int, setting: str) -> socket.socket:
    """A bound socket, so that the address is known, and ours, before anything is written; `setting` chooses it. The
    host :: is every address of both families, and of IPv4 alone where there is no IPv6. Raises CannotListen."""
    host = bindable(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends at once (TCP_NODELAY) only on a socket that says its protocol: else an answer takes 40 ms
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
    """Serve while the block runs. Raises CannotListen."""
    if address is None:
        yield
        return
    with closing(listening(*address, "TURNLOG_HEALTH_HOST or TURNLOG_HEALTH_PORT")) as listener:
        async with QuietServer(configured(application(health))).running(listener):
            yield


TOKENS = Counter(
    "turnlog_books_tokens", "Output tokens by level (group, draw, step) and entry (sampled, trained, a reason)",
    ["level", "entry"],
)  # fmt: skip


def count_tokens(level: str, *, sampled: int, trained: int, masked: Mapping[str, int]) -> None:
    """Add what one group, draw or step holds. `sampled` is counted apart from the others, or nothing is checked."""
    TOKENS.labels(level, "sampled").inc(sampled)
    TOKENS.labels(level, "trained").inc(trained)
    for reason, tokens in masked.items():
        TOKENS.labels(level, reason).inc(tokens)


class BodyTooLarge(Exception):
    """Says the limit, and what to do."""


async def body_of(request: Request, most: int, remedy: str) -> bytes:
    """The body, of at most `most` bytes. A length that is declared is believed only where it is too large. Raises
    BodyTooLarge, starlette's ClientDisconnect. The server passes over what still comes."""
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
