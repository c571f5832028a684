"""The gateway role: the ASGI application that serves sessions, turns and engines."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import orjson
from prometheus_client import Counter, Gauge
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from turnlog.infra.blobs import BlobError
from turnlog.infra.engines.kinds import Connect, connect_engine
from turnlog.infra.log import LogError, TopicMissing
from turnlog.infra.offers import load_methods
from turnlog.infra.roles.ending import drain_s
from turnlog.infra.roles.event_loop import LARGE, LARGE_BODY
from turnlog.infra.roles.health import (
    BodyTooLarge,
    QuietServer,
    application,
    body_of,
    listening,
    uvicorn_config,
)
from turnlog.infra.roles.probe import bracket_ipv6, client_url
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.tls import serving as tls_context
from turnlog.processors.core.methods.rules import fold_rules
from turnlog.producers.gateway import fleet
from turnlog.producers.gateway.chat_template import ChatTemplate, TemplateUnusable, check_ends
from turnlog.producers.gateway.conversation import RecordedTurn
from turnlog.producers.gateway.dialects.anthropic_messages import AnthropicMessages
from turnlog.producers.gateway.dialects.dialect import (
    Dialect,
    Endpoint,
    NonTurnRequest,
    TurnRequest,
    TurnResponse,
    retry_headers,
)
from turnlog.producers.gateway.dialects.openai_chat import OpenAIChat
from turnlog.producers.gateway.dialects.openai_responses import OpenAIResponses
from turnlog.producers.gateway.engines import EnginePool, Sampler, follow, side_engines
from turnlog.producers.gateway.errors import (
    ERRORS,
    AgentsToken,
    ErasedSession,
    GatewayError,
    GroupTooSmall,
    ImagesNotServed,
    NoSideEngine,
    NotRecorded,
    TooLarge,
    TooSlow,
    Unauthorized,
)
from turnlog.producers.gateway.expert_rows import routing_of
from turnlog.producers.gateway.images import ImageTokens, image_tokens
from turnlog.producers.gateway.openapi import document
from turnlog.producers.gateway.owners import OwnedElsewhere, Owners
from turnlog.producers.gateway.parsers.formats import formats_of
from turnlog.producers.gateway.planner import Planner
from turnlog.producers.gateway.profiles import Harness, harness, is_player
from turnlog.producers.gateway.prompts import Prompts, TextTokens
from turnlog.producers.gateway.recovery import ConversationRecovery, SessionTail
from turnlog.producers.gateway.redaction import RequestRedactor
from turnlog.producers.gateway.requests import (
    Claims,
    OpenRequest,
    SigningKeys,
    bearer,
    finish_request,
    open_request,
    require_key,
    reward_request,
    sign,
    traceparent,
    verify,
)
from turnlog.producers.gateway.sessions import GatewaySession, Identity, Running, SessionLimits, Sessions
from turnlog.producers.gateway.template_features import Findings, findings, probe_template
from turnlog.producers.gateway.turns import Turns
from turnlog.schemas import SessionIsErased
from turnlog.schemas.events.sessions import SessionFinished
from turnlog.schemas.events.tasks import Purpose, Sampling
from turnlog.schemas.json_depth import more_than
from turnlog.schemas.topics import SESSIONS
from turnlog.schemas.types import TurnId


def dialects(keys: SigningKeys) -> tuple[Dialect, ...]:
    """Return the API adapters that the gateway serves."""
    return OpenAIChat(), OpenAIResponses(keys), AnthropicMessages(keys)


ANTHROPIC = "anthropic-version"
"""Header that Anthropic's clients send; it selects Anthropic's format on paths that several APIs share."""
REFUSAL = OpenAIChat().refusal
"""Error format of requests that belong to no API adapter, such as those about sessions."""
JUDGES = Counter("turnlog_gateway_turns_by_judges", "Requests for turns with the judge's token instead of the agent's")
ANSWERED = (GatewayError, LogError, SessionIsErased)
"""Errors that become the answer to a request."""
NOT_SERVED = (
    "{} is not served. Agents speak OpenAI's chat completions (/v1/chat/completions) or responses (/v1/responses), or "
    "Anthropic's messages (/v1/messages); Google's API, which Gemini CLI speaks, is not: use another client, "
    "or a translating proxy (docs/harnesses.md)"
)
WRITES = Gauge("turnlog_gateway_template_writes", "1 if the model's chat template writes this part", ("what",))
REPEATS = Counter("turnlog_gateway_repeats", "Requests answered with an already recorded turn")

T = TypeVar("T")
VALUES, VALUES_PER_TOKEN = 1 << 18, 4
"""Upper bound on the JSON values in a turn request: `VALUES`, plus `VALUES_PER_TOKEN` for each token of the window. A
parser allocates an object for each value, a million in a quarter of a second, during which no other thread runs."""
RECORD_BYTES = 1 << 20
"""Maximum body size in bytes of a request to open or finish a session. Its contents go into one record, which holds far
less than 8 MiB."""

KEEP_ALIVE_S = 10.0
"""Seconds without output after which a stream sends a comment, well within the 50 to 60 s after which common proxies
close an idle connection."""
REQUEST_S = 60.0
"""Seconds within which the head of a request must arrive, and then its body; otherwise 408. The largest body arrives in
time at 5 Mbit/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """All state that the endpoints need."""

    role: Role
    url: str
    keys: SigningKeys
    tail: SessionTail
    engines: EnginePool
    sessions: Sessions
    turns: Turns
    harness: Harness
    images: ImageTokens | None
    owners: Owners | None
    dialects: tuple[Dialect, ...]
    least_group: int
    """Smallest group size that the run's estimator accepts."""
    keep_alive_s: float = KEEP_ALIVE_S
    request_s: float = REQUEST_S

    @classmethod
    async def create(cls, role: Role, url: str, connect: Connect | None = None) -> Gateway:
        """Build a gateway from settings and clients. `url` is its address as records name it. Raises ModelMissing,
        TemplateMissing, TemplateUnusable, TopicMissing, NoRouting, ProfileError."""
        settings = role.settings
        folder = Path(settings.model.path)
        tokens, template = TextTokens(folder), ChatTemplate.load(folder)
        topics = await role.log.topics()
        if SESSIONS.name not in topics:
            raise TopicMissing(f"{SESSIONS.name} does not exist: `turnlog topics apply` creates the topics")
        tail = SessionTail(role.log, role.events, topics[SESSIONS.name].partitions, beat=role.health.beat)
        identity = Identity(
            url=url,
            instance=f"{role.instance}-{secrets.token_hex(4)}",
            model=settings.model.name,
            tokenizer_sha256=tokens.sha256,
            chat_template_sha256=template.sha256,
        )
        prompts = Prompts(tokens, template)
        connect = connect or functools.partial(connect_engine, ca_file=settings.engine.ca_file)
        engines = EnginePool(connect, kinds=set(settings.engine.named_kinds))
        own, answer_s = settings.gateway.own_url, settings.engine.request_timeout_s + 30.0
        owners = Owners(url, answer_s=answer_s, ca_file=settings.gateway.ca_file) if own else None
        shown = settings.gateway
        limits = SessionLimits(
            life_s=shown.session_s, turns=shown.session_turns, turns_per_minute=shown.session_turns_per_minute
        )
        images = image_tokens(folder)
        written = probe_template(prompts)
        if written.plain is None:
            raise TemplateUnusable(
                f"the chat template of {folder} refuses a user's message, with tools and without: it needs variables "
                "that no request has; give the model's folder another one"
            )
        calls, thinking = formats_of(
            f"{template.source}\n{written.sample}", settings.gateway.tool_calls, settings.gateway.reasoning
        )
        _report_template(role, prompts, findings(prompts, written, calls, thinking))
        keys = SigningKeys(settings.gateway, Path(settings.run.directory))
        sampler = Sampler(
            engines=engines,
            timeout_s=settings.engine.request_timeout_s,
            # Where the model names its end-of-sequence ids, an end mark of the template may end only a part of an
            # answer.
            ends=tuple(sorted(tokens.eos)) or tuple(one for one in [prompts.end_of_turn] if one is not None),
            eos=tokens.eos,
            vocabulary=tokens.vocabulary,
            keyed=settings.engine.update == "in_place",
        )
        redactor = role.events.redactor
        sides = side_engines(shown.side_engines, settings.engine.kind, connect)
        return cls(
            role=role,
            url=url,
            keys=keys,
            tail=tail,
            engines=engines,
            sessions=Sessions(
                role.events, tail, ConversationRecovery(role.log, role.events, role.blobs), identity, owners, limits
            ),
            turns=Turns(
                planner=Planner(
                    prompts=prompts,
                    window=min(settings.engine.context, tokens.window),
                    history=settings.gateway.history,
                    constraints=settings.gateway.constraints,
                    routing=routing_of(tokens.config, settings.gateway.routed_experts, settings.engine.update),
                    image_token=images.token if images else None,
                    shown=written,
                    unread=shown.tool_calls == "auto" and bool(written.answer) and not written.reads(calls),
                    calls=calls,
                    thinking=thinking,
                ),
                sampler=sampler,
                events=role.events,
                blobs=role.blobs,
                redaction=None if redactor is None else RequestRedactor(redactor, lambda: keys.first),
                sides={
                    pattern: dataclasses.replace(sampler, engines=each, keyed=False, policy=False)
                    for pattern, each in sides.items()
                },
            ),
            harness=harness(settings.gateway.harness),
            images=images,
            owners=owners,
            dialects=dialects(keys),
            least_group=fold_rules(
                settings.fold, run_id="", settings_sha256="", methods=load_methods(settings.fold)
            ).least_valid,
        )

    @asynccontextmanager
    async def current(self) -> AsyncIterator[asyncio.Task[None]]:
        """Follow sessions and engines while the block runs. The yielded task ends only with an error."""
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
            for engines in (self.engines, *(side.engines for side in self.turns.sides.values())):
                await engines.close()
            if self.owners is not None:
                await self.owners.close()

    async def turn(self, dialect: Dialect, request: Request) -> Response:
        """Answer with a new turn, or with the recorded one if the request is a repeat."""
        claims = self._claims(request)
        body = await self.body(request)
        try:
            session, asked, turn = await self._begin_turn(dialect, request, body, claims)
        except OwnedElsewhere as other:
            return self.passed_on(other, request, body, dialect.refusal)
        return TurnResponse(
            turn,
            asked,
            dialect,
            session_id=session.id,
            model=asked.model if self.turns.side(asked) else self.role.settings.model.name,
            decode=self.turns.prompts.tokens.decode,
            keep_alive_s=self.keep_alive_s,
        )

    async def body(self, request: Request, most: int | None = None) -> bytes:
        """Read the request's body; call it only after the token was verified. Raises TooLarge, TooSlow."""
        setting = self.role.settings.gateway.max_body_bytes
        whole = most is None or setting < most
        remedy = "send less, or raise [gateway] max_body_bytes" if whole else "no log record is larger: send less"
        try:
            async with asyncio.timeout(self.request_s):
                return await body_of(request, min(setting, most or setting), remedy)
        except TimeoutError:
            raise TooSlow(f"the body did not arrive within {self.request_s:g} s") from None
        except BodyTooLarge as error:
            raise TooLarge(str(error)) from None

    async def _with_images(self, asked: TurnRequest, session: GatewaySession) -> TurnRequest:
        """Store the request's images and return the request with references to them. Raises ImagesNotServed,
        NotRecorded."""
        if self.images is None:
            raise ImagesNotServed(
                f"{self.role.settings.model.name} takes no images: its folder names no image token, or no rule that "
                "this gateway knows for how many of them an image takes",
                param="messages",
            )
        try:
            admitted = await self.images.admit_all(asked.pictures, session.conversation.shown, self.role.blobs)
        except BlobError as error:
            raise NotRecorded(f"the images could not be stored or read: {error}") from error
        return dataclasses.replace(asked, images=admitted)

    async def beside(self, dialect: Dialect, endpoint: Endpoint, request: Request) -> Response:
        """Answer a request to an endpoint that an API adapter serves besides turns."""
        try:
            claims = self._claims(request)
            body = await self.body(request)
            try:
                session = await self.sessions.find(claims)
            except OwnedElsewhere as other:
                return self.passed_on(other, request, body, dialect.refusal)

            async def prompt_tokens() -> int:
                asked = await self._read(dialect, body, session)
                return await self.turns.planner.prompt_tokens(session, asked, claims)

            return await endpoint.answer(NonTurnRequest(request, session, prompt_tokens))
        except ANSWERED as error:
            return _error_response(error, dialect.refusal)

    async def _begin_turn(
        self, dialect: Dialect, request: Request, body: bytes, claims: Claims
    ) -> tuple[GatewaySession, TurnRequest, Running | RecordedTurn]:
        """Return the session, the parsed request, and its turn, which is started here or was started or recorded
        before. Planning may wait for the blob store or a thread. If the session was dropped meanwhile, find it and read
        the request again. Raises GatewayError, OwnedElsewhere."""
        headers, parent = request.headers, traceparent(request.headers.getlist("traceparent"))
        key = headers.get("idempotency-key")
        JUDGES.inc(not claims.agent)
        while True:
            session = await self.sessions.find(claims)
            asked = await self._read(dialect, body, session)
            agent = session.started.agent.name
            path = self.harness.agent_path(agent, headers, asked.raw, asked.tools, asked.messages)
            turn: Running | RecordedTurn | None = session.find_repeat(asked.sha256, key, path)
            if turn is None:
                self._check_model(asked, path)
                plan = await self.turns.plan(session, asked, claims, path)
                if self.sessions.find_owned(session.id) is not session:
                    continue
                turn = session.find_repeat(asked.sha256, key, path)  # its duplicate may have begun meanwhile
                if turn is None:
                    running = self.turns.start(session, asked, claims, plan, parent)
                    if key is not None:
                        session.by_key[key] = asked.sha256, running
                    return session, asked, running
            REPEATS.inc()
            return session, asked, turn

    def _check_model(self, asked: TurnRequest, path: str | None) -> None:
        """Raise NoSideEngine if a player's model is neither the policy nor a side engine's: the policy must not answer
        in the place of an opponent or a user that is missing."""
        policy = self.role.settings.model.name
        if is_player(path) and asked.model != policy and self.turns.side(asked) is None:
            raise NoSideEngine(
                f"{path} is to be played by model {asked.model!r}, which is not the policy ({policy!r}), and which no "
                "pattern of [gateway] side_engines matches: name its engine there",
                param="model",
            )

    async def _read(self, dialect: Dialect, body: bytes, session: GatewaySession) -> TurnRequest:
        """Parse a request for a turn and store its images. Raises BadRequest, TooLarge, TooMany, ImagesNotServed,
        NotRecorded."""
        most = VALUES + VALUES_PER_TOKEN * self.turns.planner.window

        def read() -> TurnRequest:
            if more_than(body, most):
                raise TooLarge(
                    f"the body holds more than {most:,} JSON values, which no prompt has room for: send fewer"
                )
            asked = dialect.request(body, session.conversation)
            return asked if redaction is None else redaction.request(asked, session.conversation)

        redaction = self.turns.redaction
        asked = await session.work(len(body), read, large=LARGE_BODY if redaction is None else LARGE)
        return await self._with_images(asked, session) if asked.pictures else asked

    async def open(self, request: Request) -> Response:
        """Serve POST /sessions; idempotent per (rollout_id, attempt)."""
        require_key(request.headers.get("authorization"), *self.keys.accepted_keys)
        wanted = open_request(
            await self.body(request, RECORD_BYTES),
            run_id=self.role.settings.run.id,
            fallback=Sampling(),
            fresh=f"adhoc-{secrets.token_hex(12)}",
        )
        self._check_group(wanted)
        opened = await self.sessions.open(wanted)
        claims = Claims(
            session_id=opened.session_id,
            group_id=wanted.group_id,
            floor=opened.floor,
            min_weight_version=wanted.min_weight_version,
            pin_weight_version=wanted.pin_weight_version,
            max_context_tokens=wanted.max_context_tokens,
            max_turns=wanted.max_turns,
        )
        return json_response(
            {
                "session_id": opened.session_id,
                "epoch": opened.epoch,
                "token": sign(claims, self.keys.first),
                "agent_token": sign(claims._replace(agent=True), self.keys.first),
                "base_url": f"{opened.url}/v1",
                "finished": opened.finished,
            },
            201,
        )

    def _check_group(self, wanted: OpenRequest) -> None:
        """Raise GroupTooSmall if the estimator needs a larger group."""
        if wanted.purpose is Purpose.train and wanted.group_size < self.least_group:
            raise GroupTooSmall(
                f"estimator {self.role.settings.fold.estimator!r} compares at least {self.least_group} rollouts of a "
                f"group, and this one has {wanted.group_size}: name group_id and group_size, set [fold] estimator = "
                "'reinforce', or open it with a purpose other than train",
                param="group_size",
            )

    async def reward(self, request: Request) -> Response:
        """Serve POST /sessions/{id}/reward; the first reward counts."""
        session, wanted = await self._named_session(request, reward_request, judges=True)
        return json_response({"event_id": (await self.sessions.reward(session, wanted)).event_id}, 201)

    async def finish(self, request: Request) -> Response:
        """Serve POST /sessions/{id}/finish; idempotent."""
        session, wanted = await self._named_session(request, finish_request, judges=True)
        if wanted.reward is not None:
            await self.sessions.reward(session, wanted.reward)
        return json_response(_finish_body(await self.sessions.finish(session, wanted)))

    async def describe(self, request: Request) -> Response:
        """Serve GET /sessions/{id}."""
        session, _ = await self._named_session(request, bytes)
        return json_response(session.description() | {"base_url": f"{self.url}/v1"})

    async def _named_session(
        self, request: Request, read: Callable[[bytes], T], *, judges: bool = False
    ) -> tuple[GatewaySession, T]:
        """Return the session that the path names, and the parsed body, which is kept as `request.state.body`. The body
        is parsed before the session is looked up, so that a malformed request takes no session over. With `judges`, the
        agent's own token is rejected. Raises AgentsToken, Unauthorized, OwnedElsewhere."""
        claims = self._claims(request)
        if request.path_params["session_id"] != claims.session_id:
            raise Unauthorized("the token belongs to another session")
        if judges and claims.agent:
            raise AgentsToken(
                "this is the token of the session's agent, which may not judge or finish it: send `token`, which "
                "is next to `agent_token` in the answer of POST /sessions, and keep it from the agent"
            )
        request.state.body = await self.body(request, RECORD_BYTES)
        wanted = read(request.state.body)
        return await self.sessions.find(claims), wanted

    async def models(self, request: Request) -> Response:
        """Serve GET /v1/models and /v1/models/NAME. Every name that a client sends stands for the policy."""
        self._claims(request)
        policy = self.role.settings.model.name
        name = request.path_params.get("name", policy)
        one: dict[str, object] = {"id": name, "object": "model", "created": 0, "owned_by": "turnlog"}
        page: dict[str, object] = {"object": "list"}
        if ANTHROPIC in request.headers:
            one = {"id": name, "type": "model", "display_name": policy, "created_at": "1970-01-01T00:00:00Z"}
            page = {"has_more": False, "first_id": name, "last_id": name}
        return json_response(one if "name" in request.path_params else {"data": [one], **page})

    def _claims(self, request: Request) -> Claims:
        credential = bearer(request.headers.get("authorization")) or request.headers.get("x-api-key", "")
        return verify(credential, *self.keys.accepted_keys)

    def passed_on(
        self, other: OwnedElsewhere, request: Request, body: bytes, refusal: Callable[[GatewayError], bytes] = REFUSAL
    ) -> Response:
        """Return a response that forwards the answer of the gateway that owns the session."""
        assert self.owners is not None, "nobody else was asked"
        return self.owners.passed_on(other, request, body, refusal)


async def serve_openapi(_: Request) -> Response:
    """Serve GET /openapi.json."""
    return json_response(document())


def _finish_body(event: SessionFinished) -> dict[str, object]:
    def turn_names(turns: tuple[TurnId, ...]) -> list[dict[str, object]]:
        return [{"epoch": turn.epoch, "index": turn.index} for turn in turns]

    return {
        "turns": turn_names(event.turns),
        "undelivered": turn_names(event.undelivered),
        "outcome": event.outcome.value,
    }


def json_response(content: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(orjson.dumps(content), status, media_type="application/json")


log = logging.getLogger(__name__)

CLIENT_CLOSED = 499
"""Status of a response that nobody reads: the client disconnected before its request had arrived (nginx's number)."""


def front(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application. Turn requests bypass Starlette's router and exception middleware, which cost half of
    the remaining overhead."""
    app = build(gateway)
    dialects = {dialect.path: dialect for dialect in gateway.dialects}

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        dialect = dialects.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if dialect is None:
            await app(scope, receive, send)
            return
        try:
            response = await gateway.turn(dialect, Request(scope, receive))
        except ANSWERED as error:
            response = _error_response(error, dialect.refusal)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    return serve


def build(gateway: Gateway) -> Starlette:
    """Return the Starlette application with all endpoints."""

    async def handle_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ANSWERED)
        return _error_response(error, AnthropicMessages.refusal if ANTHROPIC in request.headers else REFUSAL)

    async def pass_on(request: Request, other: Exception) -> Response:
        assert isinstance(other, OwnedElsewhere)
        return gateway.passed_on(other, request, request.state.body)

    async def handle_disconnect(_: Request, __: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        body: dict[str, object] = {"detail": error.detail}
        if error.status_code == HTTPStatus.NOT_FOUND:
            body["error"] = {
                "code": "not_served",
                "status": "NOT_FOUND",
                "message": NOT_SERVED.format(request.url.path[:200]),
            }
        return JSONResponse(body, error.status_code, error.headers)

    turns = (Route(each.path, functools.partial(gateway.turn, each), methods=["POST"]) for each in gateway.dialects)
    beside = (
        Route(one.path, functools.partial(gateway.beside, each, one), methods=[one.method])
        for each in gateway.dialects
        for one in each.endpoints()
    )
    return Starlette(
        routes=[
            Route("/sessions", gateway.open, methods=["POST"]),
            Route("/sessions/{session_id}", gateway.describe, methods=["GET"]),
            Route("/sessions/{session_id}/finish", gateway.finish, methods=["POST"]),
            Route("/sessions/{session_id}/reward", gateway.reward, methods=["POST"]),
            Route("/openapi.json", serve_openapi, methods=["GET"]),
            *fleet.routes(gateway.role, gateway.keys, gateway.body),
            *turns,
            *beside,
            Route("/v1/models", gateway.models, methods=["GET"]),
            Route("/v1/models/{name:path}", gateway.models, methods=["GET"]),
            *application(gateway.role.health).routes,
        ],
        exception_handlers={
            **dict.fromkeys(ANSWERED, handle_error),
            OwnedElsewhere: pass_on,
            ClientDisconnect: handle_disconnect,
            HTTPException: unknown,
        },
    )


def _report_template(role: Role, prompts: Prompts, found: Findings) -> None:
    """Report what the gateway derived from the chat template, as metrics, health data and log lines, so that a wrong
    guess and whatever costs tokens become visible."""
    facts = found.facts()
    for what, written in found.shown.written_parts().items():
        WRITES.labels(what).set(bool(written))
    role.health.expose("chat_template", lambda: {"sha256": prompts.template.sha256, **facts})
    role.health.warn("chat_template", found.doubts)
    said = (f"{name.replace('_', ' ')}: {_join_values(value)}" for name, value in facts.items())
    log.info("chat template %s: %s", prompts.template.sha256[:12], "; ".join(said))
    for doubt in found.doubts:
        log.warning("%s", doubt)


def _join_values(value: object) -> str:
    return (", ".join(value) if isinstance(value, list) else str(value)) or "none"


async def main(role: Role) -> None:
    """Serve until the role stops; then refuse new connections, let running turns reach the log, and return."""
    settings = role.settings.gateway
    with contextlib.closing(listening(settings.host, settings.port, "[gateway] host or port")) as listener:
        port = listener.getsockname()[1]
        scheme = "https" if settings.certificate_file else "http"
        own = bracket_ipv6(settings.own_url.rstrip("/")) or settings.url or client_url(settings.host, port, scheme)
        await asyncio.to_thread(check_ends, Path(role.settings.model.path))
        gateway = await Gateway.create(role, own)
        async with gateway.current() as following, serving(gateway, listener):
            role.health.mark_started()
            log.info("serving %s", gateway.url)
            stopping = asyncio.create_task(role.stopping.wait())
            await asyncio.wait([stopping, following], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if following.done():
                await following


@asynccontextmanager
async def serving(gateway: Gateway, listener: socket.socket) -> AsyncIterator[None]:
    """Serve on an open socket while the block runs. Leaving the block waits for running turns."""
    longest = math.ceil(drain_s("gateway", gateway.role.settings))
    shown = gateway.role.settings.gateway
    tls = tls_context(shown.certificate_file, shown.key_file, "gateway")
    served = uvicorn_config(  # it reads no client's address, so no proxy's headers
        front(gateway), timeout_graceful_shutdown=longest, tls=tls, head_s=gateway.request_s, proxy_headers=False
    )
    server = QuietServer(served)
    try:
        async with server.running(listener):
            yield
    finally:
        await gateway.sessions.drain()


def _error_response(
    error: GatewayError | LogError | SessionIsErased, body: Callable[[GatewayError], bytes] = REFUSAL
) -> Response:
    if isinstance(error, LogError):
        error = NotRecorded(f"the log could not be read or written: {error}")
    elif isinstance(error, SessionIsErased):
        error = ErasedSession(str(error))
    ERRORS.labels(error.code).inc()
    headers = {name.decode(): value.decode() for name, value in retry_headers(error)}
    return Response(body(error), error.status, headers, media_type="application/json")
