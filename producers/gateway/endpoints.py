"""The gateway's endpoints: what each request does with sessions, turns and engines."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
from fastapi import Request
from starlette.responses import Response

from turnlog.infra.blobs import BlobError
from turnlog.infra.engine import Engine, SGLang
from turnlog.infra.http_bodies import BodyTooLarge, body_of
from turnlog.infra.log import TopicMissing
from turnlog.infra.role import Role
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.engines import Engines, follow
from turnlog.producers.gateway.errors import ImagesNotServed, NotRecorded, TooLarge, Unauthorized
from turnlog.producers.gateway.experts import routing_of
from turnlog.producers.gateway.generation import Sampler
from turnlog.producers.gateway.images import Admitted, ImageTokens, Picture, image_tokens
from turnlog.producers.gateway.metrics import REPEATS
from turnlog.producers.gateway.plans import Planner
from turnlog.producers.gateway.profiles import Harness, harness
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

RECORD_BYTES = 1 << 20
"""Of a request to open or finish a session: what it says goes into one record, which holds far less than 8 MiB."""


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
    harness: Harness
    images: ImageTokens | None

    @classmethod
    async def assembled(cls, role: Role, url: str, connect: Callable[[str], Engine] = SGLang) -> Gateway:
        """From settings and clients. Raises ModelMissing, TemplateMissing, TopicMissing, NoRouting, ProfileError."""
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
        images = image_tokens(folder, settings.gateway.max_image_pixels)
        return cls(
            role=role,
            url=url,
            key=signing_key(settings.gateway.signing_key, Path(settings.run.directory)),
            tail=tail,
            engines=engines,
            sessions=Sessions(role.events, tail, Recovery(role.log, role.events, role.blobs), identity),
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
        body = await self._body(request)
        session = await self.sessions.find(claims)
        chat = chat_request(body, session.conversation.messages.read)
        if pictures := chat.pictures:
            chat = dataclasses.replace(chat, images=await self._admitted(pictures, session))
            session = await self.sessions.find(claims)  # the store took its time
        return TurnResponse(
            self._turn(session, chat, claims, request.headers),
            session_id=session.id,
            model=self.role.settings.model.name,
            stream=chat.stream,
            include_usage=chat.include_usage,
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

    def _turn(self, session: Session, chat: ChatRequest, claims: Claims, headers: Mapping[str, str]) -> Running | Turn:
        key = headers.get("idempotency-key")
        repeated = session.repeated(chat.sha256, key)
        if repeated is not None:
            REPEATS.inc()
            return repeated
        path = self.harness.agent_path(session.started.agent.name, headers, chat.raw, chat.tools, chat.messages)
        running = self.turns.start(session, chat, claims, path)
        if key is not None:
            session.by_key[key] = chat.sha256, running
        return running

    async def open(self, request: Request) -> Response:
        """POST /sessions: idempotent per (rollout_id, attempt)."""
        require_key(request.headers.get("authorization"), self.key)
        wanted = open_request(
            await self._body(request, RECORD_BYTES),
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
        return answered(
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
        self._claims_of_path(request)
        wanted = finish_request(await self._body(request, RECORD_BYTES))
        session = await self._session(request)
        return answered(_finished(await self.sessions.finish(session, wanted)))

    async def describe(self, request: Request) -> Response:
        """GET /sessions/{id}."""
        return answered((await self._session(request)).description())

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._claims(request)
        name = self.role.settings.model.name
        return answered(
            {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "turnlog"}]}
        )

    def _claims(self, request: Request) -> Claims:
        return verify(bearer(request.headers.get("authorization")), self.key)

    def _claims_of_path(self, request: Request) -> Claims:
        claims = self._claims(request)
        if request.path_params["session_id"] != claims.session_id:
            raise Unauthorized("the token belongs to another session")
        return claims

    async def _session(self, request: Request) -> Session:
        return await self.sessions.find(self._claims_of_path(request))


def _finished(event: SessionFinished) -> dict[str, object]:
    def named(turns: tuple[TurnId, ...]) -> list[dict[str, object]]:
        return [{"epoch": turn.epoch, "index": turn.index} for turn in turns]

    return {"turns": named(event.turns), "undelivered": named(event.undelivered), "outcome": event.outcome.value}


def answered(content: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, media_type="application/json")
