"""The HTTP server of the Tinker API, as the Python SDK calls it (tinker 0.38, `resources/` and `lib/`).

A call that is executed is a command on the log. It is answered with its request id once it is there, and the client
asks for the result (retrieve_future) until it has it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from turnlog.infra.blobs import BlobError
from turnlog.infra.log import LogError, Oversized
from turnlog.infra.roles import is_unreachable
from turnlog.infra.roles.health import BodyTooLarge, application, body_of
from turnlog.infra.roles.role import Role
from turnlog.infra.run_folder import present
from turnlog.plugins.tinker import BadCall, KeyRefused, ServerEnds, TinkerError, UnknownObject
from turnlog.plugins.tinker.calls import CommandMaker
from turnlog.plugins.tinker.history import OUTCOME_OK, SavedWeights, TenantModel, decode_json, row_lengths
from turnlog.plugins.tinker.results import ServerLog
from turnlog.plugins.tinker.wire import MEDIA_TYPE, encode_sample, encode_training
from turnlog.schemas.events import TenantCommandCompleted, TenantCommandReceived

log = logging.getLogger(__name__)
MAX_BODY = 64 << 20
POLL_S, MISSING_POLL_S = 20.0, 1.0
"""Seconds that a request for a result waits for it, as long as an earlier call is missing in the second case. The SDK
gives up after 45."""
PREFIX = "/api/v1"
Make = Callable[[CommandMaker, Request, bytes], TenantCommandReceived]
Handler = Callable[[Request], Awaitable[Response]]


class TinkerServer:
    """Answers the calls."""

    def __init__(self, role: Role, server: ServerLog, vocabulary: int) -> None:
        """`vocabulary`: number of token ids of the base model."""
        self._role, self._server, self._vocabulary = role, server, vocabulary

    def _owner(self, request: Request) -> str:
        """Return the owner that an API key stands for. Raises KeyRefused."""
        given = request.headers.get("x-api-key", "")
        keys = present(self._role.settings.tinker.api_keys).split()
        known = [hmac.compare_digest(given.encode(), key.encode()) for key in keys]
        if not given or (keys and not any(known)):
            raise KeyRefused("the API key is missing or unknown: TINKER_API_KEY must be one of [tinker] api_keys")
        return hashlib.sha256(given.encode()).hexdigest()[:16]

    def _maker(self, request: Request) -> CommandMaker:
        return CommandMaker(self._role.settings, self._server.history, self._owner(request), self._vocabulary)

    async def _body(self, request: Request) -> bytes:
        return await body_of(request, MAX_BODY, "send fewer or shorter rows in a call")

    def command(self, make: Make, answer: Callable[[TenantCommandReceived], Mapping[str, object]]) -> Handler:
        """Return a handler that makes a command of a request, submits it, and answers."""

        async def handle(request: Request) -> Response:
            maker = self._maker(request)
            event = make(maker, request, await self._body(request))
            await self._server.submit(event)
            return JSONResponse(answer(event))

        return handle

    def query(self, find: Callable[[CommandMaker, Request, Mapping[str, Any]], Mapping[str, object]]) -> Handler:
        """Return a handler that answers from the history."""

        async def handle(request: Request) -> Response:
            maker = self._maker(request)
            body = _json(await self._body(request)) if request.method == "POST" else {}
            return JSONResponse(find(maker, request, body))

        return handle

    async def retrieve(self, request: Request) -> Response:
        """Answer with the result of a command, or ask the client to try again."""
        owner, body = self._owner(request), _json(await self._body(request))
        wanted, history = str(body.get("request_id")), self._server.history
        entry = history.commands.get(wanted)
        if entry is None or entry.event.owner != owner:
            raise UnknownObject(f"request {wanted[:100]!r} does not exist")
        try:
            async with asyncio.timeout(POLL_S if history.missing_call(entry.event) is None else MISSING_POLL_S):
                await self._server.wait_until(lambda: entry.result is not None)
        except (TimeoutError, ServerEnds):
            answer = {"type": "try_again", "request_id": wanted, "queue_state": "active"}
            if (missing := history.missing_call(entry.event)) is not None:  # the SDK logs the reason of a pause
                reason = f"call {missing} of {entry.event.model_id} has not arrived, and later calls wait for it"
                answer |= {"queue_state": "paused_capacity", "queue_state_reason": reason}
            return JSONResponse(answer)
        return _result_response(await self._server.result_of(wanted))

    def capabilities(self, _: CommandMaker, __: Request, ___: Mapping[str, Any]) -> Mapping[str, object]:
        """The one base model."""
        settings = self._role.settings
        model = {"model_name": settings.model.name, "max_context_length": settings.engine.context - 1}
        return {"supported_models": [{**model, "trainable": True, "sampleable": bool(settings.engine.urls)}]}

    def info(self, maker: CommandMaker, _: Request, body: Mapping[str, Any]) -> Mapping[str, object]:
        """A model. Its tokenizer is named by its folder, which a client on the same machine can load."""
        name, model = self._role.settings.model.name, maker.check_model(body.get("model_id"))
        data = {"arch": None, "model_name": name, "tokenizer_id": self._role.settings.model.path}
        about = {"type": "get_info", "model_id": body["model_id"], "model_name": name, "is_lora": True}
        return {**about, "model_data": data, "lora_rank": model.arguments["rank"]}

    def weights_info(self, maker: CommandMaker, _: Request, body: Mapping[str, Any]) -> Mapping[str, object]:
        """The rank and the trained parts of saved weights."""
        saved = maker.find_saved(str(body.get("tinker_path")))
        parts = {name: saved.about[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        base = {"base_model": self._role.settings.model.name, "is_lora": True, "lora_rank": saved.about["rank"]}
        return {**base, **parts}

    def sampler(self, maker: CommandMaker, request: Request, _: Mapping[str, Any]) -> Mapping[str, object]:
        """The weights of a sampling session."""
        name = request.path_params["sampler"]
        found = maker.find_sampler(name, "sampler")
        return {"sampler_id": name, "base_model": self._role.settings.model.name, "model_path": found.path or None}

    def session(self, maker: CommandMaker, request: Request, _: Mapping[str, Any]) -> Mapping[str, object]:
        """The models and sampling sessions of a session."""
        found = maker.find_session(request.path_params["session"])
        kept = {name: found.arguments.get(name) for name in ("user_metadata", "display_name")}
        return {"training_run_ids": found.models, "sampler_ids": found.samplers, **kept}

    def sessions(self, _: CommandMaker, request: Request, __: Mapping[str, Any]) -> Mapping[str, object]:
        """The sessions of an API key."""
        owner = self._owner(request)
        found = [name for name, one in self._server.history.sessions.items() if one.owner == owner]
        return {"sessions": _page(request, found)[0]}

    def training_runs(self, _: CommandMaker, request: Request, __: Mapping[str, Any]) -> Mapping[str, object]:
        """The models of an API key, the newest first."""
        owner = self._owner(request)
        found = [(name, one) for name, one in self._server.history.models.items() if one.owner == owner]
        page, cursor = _page(request, found[::-1])
        return {"training_runs": [self._training_run(name, one) for name, one in page], "cursor": cursor}

    def training_run(self, maker: CommandMaker, request: Request, _: Mapping[str, Any]) -> Mapping[str, object]:
        """A model."""
        name = request.path_params["model"]
        return self._training_run(name, maker.check_model(name))

    def _training_run(self, name: str, model: TenantModel) -> Mapping[str, object]:
        saved = [_checkpoint(one) for one in self._server.history.saved.values() if one.model_id == name]
        last = {one["checkpoint_type"]: one for one in saved}
        return {
            "training_run_id": name,
            "base_model": self._role.settings.model.name,
            "model_owner": model.owner,
            "is_lora": True,
            "lora_rank": model.arguments["rank"],
            "last_request_time": _time(model.last_ms),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": model.arguments.get("user_metadata"),
        }

    def checkpoints(self, maker: CommandMaker, request: Request, _: Mapping[str, Any]) -> Mapping[str, object]:
        """The saved weights of a model, or of an API key."""
        name, owner = request.path_params.get("model"), self._owner(request)
        if name is not None:
            maker.check_model(name)
        found = [
            _checkpoint(one)
            for one in self._server.history.saved.values()
            if one.owner == owner and name in (None, one.model_id)
        ]
        if name is not None:
            return {"checkpoints": found, "cursor": None}
        page, cursor = _page(request, found[::-1])
        return {"checkpoints": page, "cursor": cursor}

    def heartbeat(self, maker: CommandMaker, _: Request, body: Mapping[str, Any]) -> Mapping[str, object]:
        """The client is alive."""
        maker.check_session(body.get("session_id"))
        return {"type": "session_heartbeat"}

    def routes(self) -> list[BaseRoute]:
        """Return every path of the API that is served."""
        future = _future
        posts: dict[str, Handler] = {
            "create_session": self.command(_create_session, lambda event: {
                "type": "create_session", "session_id": event.session_id}),
            "create_model": self.command(lambda maker, _, body: maker.create_model(_json(body)), future),
            "forward_backward": self.command(lambda maker, _, body: maker.train(body), future),
            "optim_step": self.command(lambda maker, _, body: maker.optim_step(_json(body)), future),
            "save_weights": self.command(lambda maker, _, body: maker.save("save_weights", _json(body)), future),
            "save_weights_for_sampler": self.command(
                lambda maker, _, body: maker.save("save_weights_for_sampler", _json(body)), future),
            "load_weights": self.command(lambda maker, _, body: maker.load(_json(body)), future),
            "create_sampling_session": self.command(
                lambda maker, _, body: maker.create_sampling_session(_json(body)), lambda event: {
                    "type": "create_sampling_session",
                    "sampling_session_id": decode_json(event.arguments)["sampling_session_id"]}),
            "asample": self.command(lambda maker, _, body: maker.sample(_json(body)), future),
            "retrieve_future": self.retrieve,
            "get_info": self.query(self.info),
            "weights_info": self.query(self.weights_info),
            "session_heartbeat": self.query(self.heartbeat),
            "client/config": self.query(lambda *_: CLIENT_CONFIG),
            "client/dynamic_config": self.query(lambda *_: {}),
            "telemetry": self.query(lambda *_: {"status": "accepted"}),
            "sessions/{session}/finish": self.command(
                lambda maker, request, body: maker.finish_session(request.path_params["session"], _json(body)),
                lambda _: {}),
        }  # fmt: skip
        gets: dict[str, Handler] = {
            "healthz": self.query(lambda *_: {"status": "ok"}),
            "get_server_capabilities": self.query(self.capabilities),
            "sessions": self.query(self.sessions),
            "sessions/{session}": self.query(self.session),
            "samplers/{sampler}": self.query(self.sampler),
            "training_runs": self.query(self.training_runs),
            "training_runs/{model}": self.query(self.training_run),
            "training_runs/{model}/checkpoints": self.query(self.checkpoints),
            "checkpoints": self.query(self.checkpoints),
        }
        delete = self.command(_delete_checkpoint, lambda _: {})
        return [
            *(Route(f"{PREFIX}/{path}", handler, methods=["POST"]) for path, handler in posts.items()),
            *(Route(f"{PREFIX}/{path}", handler, methods=["GET"]) for path, handler in gets.items()),
            Route(f"{PREFIX}/training_runs/{{model}}/checkpoints/{{checkpoint:path}}", delete, methods=["DELETE"]),
            Route(f"{PREFIX}/{{path:path}}", _not_served, methods=["GET", "POST", "PUT", "DELETE"]),
            *application(self._role.health).routes,
        ]

    def application(self) -> Starlette:
        """Return the ASGI application."""

        async def handle_disconnect(_: Request, __: Exception) -> Response:
            return Response(status_code=499)

        return Starlette(
            routes=self.routes(),
            exception_handlers={
                TinkerError: _refusal_response,
                BodyTooLarge: _refusal_response,
                LogError: _refusal_response,
                BlobError: _refusal_response,
                ClientDisconnect: handle_disconnect,
            },
        )


CLIENT_CONFIG = {"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False, "use_pyqwest_transport": False}
"""Flags of the SDK (`types/client_config_response.py`); all others keep the SDK's defaults."""


def _create_session(maker: CommandMaker, request: Request, body: bytes) -> TenantCommandReceived:
    key = request.headers.get("x-idempotency-key", "")
    if not key:
        raise BadCall("create_session needs the header X-Idempotency-Key, by which a repeated request is told")
    return maker.create_session(_json(body), key)


def _delete_checkpoint(maker: CommandMaker, request: Request, _: bytes) -> TenantCommandReceived:
    return maker.delete_checkpoint(f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}")


async def _not_served(request: Request) -> Response:
    raise UnknownObject(f"{request.url.path[:200]} is not served (docs/tinker.md, What is not served)")


def _future(event: TenantCommandReceived) -> Mapping[str, object]:
    found: dict[str, object] = {"request_id": event.request_id}
    if event.model_id:
        found["model_id"] = event.model_id
    if event.command == "sample":
        count = decode_json(event.arguments)["count"]
        found["sample_sequence_ids"] = [f"{event.request_id}-{number}" for number in range(count)]
    return found


def _result_response(result: TenantCommandCompleted) -> Response:
    if result.outcome != OUTCOME_OK:
        return JSONResponse({"error": result.error, "category": result.category})
    assert isinstance(result.logprobs, bytes)
    assert isinstance(result.tokens, bytes)
    if result.command in ("forward", "forward_backward"):
        body = encode_training(row_lengths(result), result.logprobs, result.metrics)
        return Response(body, media_type=MEDIA_TYPE)
    if result.command == "sample":
        assert isinstance(result.prompt_logprobs, bytes)
        body = encode_sample(
            row_lengths(result), result.tokens, result.logprobs, result.stop_reasons, result.prompt_logprobs
        )
        return Response(body, media_type=MEDIA_TYPE)
    if result.command == "optim_step":
        return JSONResponse({"metrics": result.metrics})
    answer = decode_json(result.answer)
    shown = {name: answer[name] for name in ("model_id", "path", "sampling_session_id") if name in answer}
    return JSONResponse({**shown, "type": result.command})


def _checkpoint(saved: SavedWeights) -> dict[str, Any]:
    ttl = saved.about.get("ttl_seconds")
    ends = datetime.fromtimestamp(saved.at_ms / 1000, UTC) + timedelta(seconds=ttl) if ttl else None
    return {
        "checkpoint_id": saved.checkpoint_id,
        "checkpoint_type": "training" if saved.kind == "weights" else "sampler",
        "time": _time(saved.at_ms),
        "tinker_path": saved.path,
        "size_bytes": saved.size,
        "public": False,
        "user_metadata": saved.about.get("user_metadata"),
        "expires_at": None if ends is None else ends.isoformat(),
    }


def _time(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


def _page(request: Request, found: list[Any]) -> tuple[list[Any], dict[str, int]]:
    try:
        offset, limit = (
            int(request.query_params.get(name, default)) for name, default in (("offset", 0), ("limit", 20))
        )
    except ValueError:
        raise BadCall("offset and limit must be numbers") from None
    cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[max(offset, 0) :][: max(limit, 0)], cursor


def _json(content: bytes) -> Mapping[str, Any]:
    try:
        body = orjson.loads(content or b"{}")
    except json.JSONDecodeError as error:
        raise BadCall(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadCall("the body is not a JSON object")
    return body


async def _refusal_response(_: Request, error: Exception) -> Response:
    if isinstance(error, BodyTooLarge | Oversized):
        status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    elif isinstance(error, TinkerError):
        status = error.status
    else:
        log.warning("a request cannot be recorded now: %s", error)
        status = HTTPStatus.SERVICE_UNAVAILABLE if is_unreachable(error) else HTTPStatus.INTERNAL_SERVER_ERROR
    return JSONResponse({"error": type(error).__name__, "detail": str(error)}, status)
