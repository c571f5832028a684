"""The gateway role: an ASGI application over sessions, turns and engines, and the tasks that keep it current."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import uvicorn
from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from turnlog.infra.engine import Engine, SGLang
from turnlog.infra.health import QuietServer, application
from turnlog.infra.log import TopicMissing
from turnlog.infra.role import Role
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.engines import Engines, follow
from turnlog.producers.gateway.errors import GatewayError, KeyReused, Unauthorized
from turnlog.producers.gateway.generation import Sampler
from turnlog.producers.gateway.metrics import ERRORS, REPEATS
from turnlog.producers.gateway.recovery import Recovery
from turnlog.producers.gateway.requests import ChatRequest, chat_request, finish_request, open_request
from turnlog.producers.gateway.session_tokens import Claims, bearer, require_key, sign, signing_key, verify
from turnlog.producers.gateway.sessions import Identity, Session, Sessions
from turnlog.producers.gateway.streaming import TurnResponse
from turnlog.producers.gateway.tail import SessionTail
from turnlog.producers.gateway.template import ChatTemplate
from turnlog.producers.gateway.tokenizer import TextTokens
from turnlog.producers.gateway.tokens import Prompts
from turnlog.producers.gateway.turns import Running, Turns
from turnlog.schemas.events.sessions import SessionFinished
from turnlog.schemas.events.tasks import Sampling
from turnlog.schemas.topics import SESSIONS
from turnlog.schemas.types import TurnId

log = logging.getLogger(__name__)

CHAT = "/v1/chat/completions"
CLIENT_CLOSED = 499
"""What nobody reads: the client left before its request had come in (nginx's number)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything that the endpoints need."""

    role: Role
    url: str
    key: bytes
    tail: SessionTail
    engines: Engines
    sessions: Sessions
    turns: Turns

    @classmethod
    async def assembled(cls, role: Role, url: str, connect: Callable[[str], Engine] = SGLang) -> Gateway:
        """From settings and clients. Raises ModelMissing, TemplateMissing, TopicMissing."""
        settings = role.settings
        folder = Path(settings.model.path)
        tokens, template = TextTokens(folder), ChatTemplate.load(folder)
        topics = await role.log.topics()
        if SESSIONS.name not in topics:
            raise TopicMissing(f"{SESSIONS.name} does not exist: `turnlog topics apply` makes the catalogue's topics")
        tail = SessionTail(role.log, role.events, topics[SESSIONS.name].partitions)
        identity = Identity(
            url=url,
            instance=f"{role.instance}-{secrets.token_hex(4)}",
            model=settings.model.name,
            tokenizer_sha256=tokens.sha256,
            chat_template_sha256=template.sha256,
        )
        prompts, engines = Prompts(tokens, template), Engines(connect)
        return cls(
            role=role,
            url=url,
            key=signing_key(settings.gateway.signing_key, Path(settings.run.directory)),
            tail=tail,
            engines=engines,
            sessions=Sessions(role.events, tail, Recovery(role.log, role.events, role.blobs), identity),
            turns=Turns(
                prompts=prompts,
                sampler=Sampler(
                    engines=engines, timeout_s=settings.engine.request_timeout_s, end_of_turn=prompts.end_of_turn
                ),
                events=role.events,
                blobs=role.blobs,
                window=min(settings.engine.context, tokens.window),
                history=settings.gateway.history,
            ),
        )

    @asynccontextmanager
    async def current(self) -> AsyncIterator[asyncio.Task[None]]:
        """Follow sessions and engines while the block runs; the task ends only by an error."""
        known = asyncio.Event()

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.tail.run())
                tasks.create_task(follow(self.engines, self.role.log, self.role.events, current=known))

        task = asyncio.create_task(run())

        async def caught_up() -> None:
            await self.tail.ready.wait()
            await known.wait()

        ready = asyncio.create_task(caught_up())
        try:
            await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
            yield task
        finally:
            ready.cancel()
            task.cancel()
            await asyncio.gather(ready, task, return_exceptions=True)
            await self.engines.close()

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions: a new turn, or the recorded one that a repeat asks for."""
        claims = self._claims(request)
        chat = chat_request(await request.body())
        session = await self.sessions.find(claims)
        return TurnResponse(
            self._turn(session, chat, claims, request.headers.get("idempotency-key")),
            session_id=session.id,
            model=self.role.settings.model.name,
            stream=chat.stream,
            include_usage=chat.include_usage,
            keep_alive_s=self.role.settings.gateway.keep_alive_s,
        )

    def _turn(self, session: Session, chat: ChatRequest, claims: Claims, key: str | None) -> Running | Turn:
        if key is not None and key in session.by_key:
            sha256, running = session.by_key[key]
            if sha256 != chat.sha256:
                raise KeyReused(f"Idempotency-Key {key!r} came before with another body")
            REPEATS.inc()
            return running
        repeated = session.repeated(chat.sha256)
        if repeated is not None:
            REPEATS.inc()
            return repeated
        running = self.turns.start(session, chat, claims)
        if key is not None:
            session.by_key[key] = chat.sha256, running
        return running

    async def open(self, request: Request) -> Response:
        """POST /sessions: idempotent per (rollout_id, attempt)."""
        require_key(request.headers.get("authorization"), self.key)
        wanted = open_request(
            await request.body(),
            run_id=self.role.settings.run.id,
            fallback=Sampling(),
            fresh=f"adhoc-{secrets.token_hex(12)}",
        )
        session, floor = await self.sessions.open(wanted)
        claims = Claims(
            session_id=session.id,
            group_id=wanted.group_id,
            floor=floor,
            min_weight_version=wanted.min_weight_version,
            pin_weight_version=wanted.pin_weight_version,
            max_context_tokens=wanted.max_context_tokens,
        )
        return _json(
            {
                "session_id": session.id,
                "epoch": session.epoch,
                "token": sign(claims, self.key),
                "base_url": f"{self.url}/v1",
                "finished": session.finished is not None,
            },
            201,
        )

    async def finish(self, request: Request) -> Response:
        """POST /sessions/{id}/finish: idempotent."""
        wanted = finish_request(await request.body())
        session = await self._session(request)
        return _json(_finished(await self.sessions.finish(session, wanted)))

    async def describe(self, request: Request) -> Response:
        """GET /sessions/{id}."""
        return _json((await self._session(request)).description())

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._claims(request)
        name = self.role.settings.model.name
        return _json({"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "turnlog"}]})

    def _claims(self, request: Request) -> Claims:
        return verify(bearer(request.headers.get("authorization")), self.key)

    async def _session(self, request: Request) -> Session:
        claims = self._claims(request)
        if request.path_params["session_id"] != claims.session_id:
            raise Unauthorized("the token belongs to another session")
        return await self.sessions.find(claims)


def front(gateway: Gateway) -> ASGIApp:
    """The ASGI application. Turns pass by FastAPI's routing and exception stacks, which cost half of what is left."""
    app = build(gateway)

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != CHAT or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        try:
            response = await gateway.chat(Request(scope, receive))
        except GatewayError as error:
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
        assert isinstance(error, GatewayError)
        return _refused(error)

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    app.add_exception_handler(GatewayError, refused)
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
    config = uvicorn.Config(
        front(gateway), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=30
    )
    server = QuietServer(config)
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


def _refused(error: GatewayError) -> Response:
    ERRORS.labels(error.code).inc()
    return _json(error.body(), error.status)


def _finished(event: SessionFinished) -> dict[str, object]:
    def named(turns: tuple[TurnId, ...]) -> list[dict[str, object]]:
        return [{"epoch": turn.epoch, "index": turn.index} for turn in turns]

    return {"turns": named(event.turns), "undelivered": named(event.undelivered), "outcome": event.outcome.value}


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")
