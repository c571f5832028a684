"""The gateway role: what each request does with sessions, turns and engines, served by an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from turnlog.infra.blobs import BlobError
from turnlog.infra.engine import Engine, SGLang
from turnlog.infra.log import LogError, TopicMissing
from turnlog.infra.roles.ending import drain_s
from turnlog.infra.roles.health import BodyTooLarge, QuietServer, application, body_of, configured, listening
from turnlog.infra.roles.role import Role
from turnlog.producers.gateway import ERRORS, GatewayError, ImagesNotServed, NotRecorded, TooLarge, Unauthorized
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.dialects.dialect import Dialect, TurnRequest, TurnResponse
from turnlog.producers.gateway.dialects.openai_chat import OpenAIChat
from turnlog.producers.gateway.engines import Engines, Sampler, follow, routing_of
from turnlog.producers.gateway.images import Admitted, ImageTokens, Picture, image_tokens
from turnlog.producers.gateway.owners import OwnedElsewhere, Owners
from turnlog.producers.gateway.profiles import Harness, harness
from turnlog.producers.gateway.prompts import ChatTemplate, Prompts, TextTokens
from turnlog.producers.gateway.recovery import Recovery, SessionTail
from turnlog.producers.gateway.requests import (
    Claims,
    SigningKeys,
    bearer,
    finish_request,
    open_request,
    require_key,
    sign,
    verify,
)
from turnlog.producers.gateway.sessions import Identity, Running, Session, Sessions
from turnlog.producers.gateway.turns import Planner, Turns
from turnlog.schemas.events.sessions import SessionFinished
from turnlog.schemas.events.tasks import Sampling
from turnlog.schemas.topics import SESSIONS
from turnlog.schemas.types import TurnId

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(),)
"""The APIs that are served."""
REPEATS = Counter("turnlog_gateway_repeats", "Requests answered with a turn that was recorded before")

RECORD_BYTES = 1 << 20
"""Of a request to open or finish a session: what it says goes into one record, which holds far less than 8 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything that the endpoints need."""

    role: Role
    url: str
    keys: SigningKeys
    tail: SessionTail
    engines: Engines
    sessions: Sessions
    turns: Turns
    harness: Harness
    images: ImageTokens | None
    owners: Owners | None

    @classmethod
    async def assembled(cls, role: Role, url: str, connect: Callable[[str], Engine] = SGLang) -> Gateway:
        """From settings and clients; `url`: as records name it.
        Raises ModelMissing, TemplateMissing, TopicMissing, NoRouting, ProfileError."""
        settings = role.settings
        folder = Path(settings.model.path)
        tokens, template = TextTokens(folder), ChatTemplate.load(folder)
        topics = await role.log.topics()
        if SESSIONS.name not in topics:
            raise TopicMissing(f"{SESSIONS.name} does not exist: `turnlog topics apply` makes the catalogue's topics")
        tail = SessionTail(role.log, role.events, topics[SESSIONS.name].partitions, beat=role.health.beat)
        identity = Identity(
            url=url,
            instance=f"{role.instance}-{secrets.token_hex(4)}",
            model=settings.model.name,
            tokenizer_sha256=tokens.sha256,
            chat_template_sha256=template.sha256,
        )
        prompts, engines = Prompts(tokens, template), Engines(connect)
        own, answer_s = settings.gateway.own_url, settings.engine.request_timeout_s + 30.0
        owners = Owners(url, answer_s=answer_s) if own else None
        images = image_tokens(folder, settings.gateway.max_image_pixels)
        return cls(
            role=role,
            url=url,
            keys=SigningKeys(settings.gateway, Path(settings.run.directory)),
            tail=tail,
            engines=engines,
            sessions=Sessions(role.events, tail, Recovery(role.log, role.events, role.blobs), identity, owners),
            turns=Turns(
                planner=Planner(
                    prompts=prompts,
                    window=min(settings.engine.context, tokens.window),
                    history=settings.gateway.history,
                    routing=routing_of(tokens.config, settings.gateway.routed_experts),
                    image_token=images.token if images else None,
                ),
                sampler=Sampler(
                    engines=engines,
                    timeout_s=settings.engine.request_timeout_s,
                    end_of_turn=prompts.end_of_turn,
                    eos=tokens.eos,
                ),
                events=role.events,
                blobs=role.blobs,
            ),
            harness=harness(settings.gateway.harness),
            images=images,
            owners=owners,
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
            if self.owners is not None:
                await self.owners.close()

    async def turn(self, dialect: Dialect, request: Request) -> Response:
        """A new turn, or the recorded one that a repeat asks for."""
        claims = self._claims(request)
        body = await self._body(request)
        try:
            session = await self.sessions.find(claims)
        except OwnedElsewhere as other:
            return self._passed_on(other, request, body)
        asked = dialect.request(body, session.conversation.messages.read)
        if pictures := asked.pictures:
            asked = dataclasses.replace(asked, images=await self._admitted(pictures, session))
            session = await self.sessions.find(claims)  # the store took its time
        return TurnResponse(
            self._turn(session, asked, claims, request.headers),
            asked,
            dialect,
            session_id=session.id,
            model=self.role.settings.model.name,
            keep_alive_s=self.role.settings.gateway.keep_alive_s,
        )

    async def _body(self, request: Request, most: int | None = None) -> bytes:
        """After the token was looked at. Raises TooLarge."""
        setting = self.role.settings.gateway.max_body_bytes
        whole = most is None or setting < most
        remedy = "send less, or raise [gateway] max_body_bytes" if whole else "that is one record of the log: send less"
        try:
            return await body_of(request, min(setting, most or setting), remedy)
        except BodyTooLarge as error:
            raise TooLarge(str(error)) from None

    async def _admitted(self, pictures: list[Picture], session: Session) -> dict[str, Admitted]:
        if self.images is None:
            raise ImagesNotServed(
                f"{self.role.settings.model.name} takes no images: its folder names no image token and no rule for how "
                "many an image takes that this gateway knows",
                param="messages",
            )
        try:
            return await self.images.admitted(pictures, session.conversation.shown, self.role.blobs)
        except BlobError as error:
            raise NotRecorded(f"the images could not be stored or read: {error}") from error

    def _turn(self, session: Session, asked: TurnRequest, claims: Claims, headers: Mapping[str, str]) -> Running | Turn:
        key = headers.get("idempotency-key")
        repeated = session.repeated(asked.sha256, key)
        if repeated is not None:
            REPEATS.inc()
            return repeated
        path = self.harness.agent_path(session.started.agent.name, headers, asked.raw, asked.tools, asked.messages)
        running = self.turns.start(session, asked, claims, path)
        if key is not None:
            session.by_key[key] = asked.sha256, running
        return running

    async def open(self, request: Request) -> Response:
        """POST /sessions: idempotent per (rollout_id, attempt)."""
        require_key(request.headers.get("authorization"), *self.keys.accepted)
        wanted = open_request(
            await self._body(request, RECORD_BYTES),
            run_id=self.role.settings.run.id,
            fallback=Sampling(),
            fresh=f"adhoc-{secrets.token_hex(12)}",
        )
        opened = await self.sessions.open(wanted)
        claims = Claims(
            session_id=opened.session_id,
            group_id=wanted.group_id,
            floor=opened.floor,
            min_weight_version=wanted.min_weight_version,
            pin_weight_version=wanted.pin_weight_version,
            max_context_tokens=wanted.max_context_tokens,
        )
        return answered(
            {
                "session_id": opened.session_id,
                "epoch": opened.epoch,
                "token": sign(claims, self.keys.first),
                "base_url": f"{opened.url}/v1",
                "finished": opened.finished,
            },
            201,
        )

    async def finish(self, request: Request) -> Response:
        """POST /sessions/{id}/finish: idempotent."""
        claims = self._claims_of_path(request)
        body = await self._body(request, RECORD_BYTES)
        wanted = finish_request(body)
        try:
            session = await self.sessions.find(claims)
        except OwnedElsewhere as other:
            return self._passed_on(other, request, body)
        return answered(_finished(await self.sessions.finish(session, wanted)))

    async def describe(self, request: Request) -> Response:
        """GET /sessions/{id}."""
        try:
            session = await self.sessions.find(self._claims_of_path(request))
        except OwnedElsewhere as other:
            return self._passed_on(other, request, b"")
        return answered(session.description() | {"base_url": f"{self.url}/v1"})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._claims(request)
        name = self.role.settings.model.name
        return answered(
            {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "turnlog"}]}
        )

    def _claims(self, request: Request) -> Claims:
        return verify(bearer(request.headers.get("authorization")), *self.keys.accepted)

    def _claims_of_path(self, request: Request) -> Claims:
        claims = self._claims(request)
        if request.path_params["session_id"] != claims.session_id:
            raise Unauthorized("the token belongs to another session")
        return claims

    def _passed_on(self, other: OwnedElsewhere, request: Request, body: bytes) -> Response:
        assert self.owners is not None, "nobody else was asked"
        return self.owners.passed_on(other, request, body)


def _finished(event: SessionFinished) -> dict[str, object]:
    def named(turns: tuple[TurnId, ...]) -> list[dict[str, object]]:
        return [{"epoch": turn.epoch, "index": turn.index} for turn in turns]

    return {"turns": named(event.turns), "undelivered": named(event.undelivered), "outcome": event.outcome.value}


def answered(content: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, media_type="application/json")


log = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""What nobody reads: the client left before its request had come in (nginx's number)."""


def front(gateway: Gateway) -> ASGIApp:
    """The ASGI application. Turns pass by routing and exception stacks, which cost half of what is left."""
    app = build(gateway)
    dialects = {dialect.path: dialect for dialect in DIALECTS}

    async def served(scope: Scope, receive: Receive, send: Send) -> None:
        dialect = dialects.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if dialect is None:
            await app(scope, receive, send)
            return
        try:
            response = await gateway.turn(dialect, Request(scope, receive))
        except (GatewayError, LogError) as error:
            response = _refused(error, dialect.refusal)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    return served


def build(gateway: Gateway) -> Starlette:
    """Every endpoint."""

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, GatewayError | LogError)
        return _refused(error)

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    async def unknown(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"detail": error.detail}, error.status_code, error.headers)

    turns = (Route(each.path, functools.partial(gateway.turn, each), methods=["POST"]) for each in DIALECTS)
    return Starlette(
        routes=[
            Route("/sessions", gateway.open, methods=["POST"]),
            Route("/sessions/{session_id}", gateway.describe, methods=["GET"]),
            Route("/sessions/{session_id}/finish", gateway.finish, methods=["POST"]),
            *turns,
            Route("/v1/models", gateway.models, methods=["GET"]),
            *application(gateway.role.health).routes,
        ],
        exception_handlers={GatewayError: refused, LogError: refused, ClientDisconnect: left, HTTPException: unknown},
    )


async def main(role: Role) -> None:
    """Serve until the role stops; then refuse new connections, let running turns reach the log, and leave."""
    settings = role.settings.gateway
    with contextlib.closing(listening(settings.host, settings.port, "[gateway] host or port")) as listener:
        port = listener.getsockname()[1]
        own = settings.own_url.rstrip("/") or settings.url or f"http://{settings.host}:{port}"
        gateway = await Gateway.assembled(role, own)
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
    longest = math.ceil(drain_s("gateway", gateway.role.settings))
    server = QuietServer(configured(front(gateway), timeout_graceful_shutdown=longest))
    try:
        async with server.running(listener):
            yield
    finally:
        await gateway.sessions.drain()


def _refused(error: GatewayError | LogError, body: Callable[[GatewayError], bytes] = DIALECTS[0].refusal) -> Response:
    if isinstance(error, LogError):
        error = NotRecorded(f"the log could not be read or written: {error}")
    ERRORS.labels(error.code).inc()
    return Response(body(error), error.status, media_type="application/json")
