"""`turnlog engines` over REST. Holders of the gateway's key may list the engines that serve, and request changes.

An answer to a change repeats the request; `GET /engines` shows its effect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turnlog.infra.roles import fleet
from turnlog.infra.roles.role import Role
from turnlog.processors.core.views.fleet import FleetEngine
from turnlog.producers.gateway.errors import BadRequest, EnginesRefused
from turnlog.producers.gateway.requests import SigningKeys, object_of, require_key, typed_field

Ask = Callable[[Role, dict[str, Any]], Awaitable[Sequence[FleetEngine]]]


def _required_field(values: dict[str, Any], name: str, kind: type) -> Any:
    """Return a required field. Raises BadRequest if it is missing or of another type."""
    value = typed_field(values, name, kind, None)
    if value is None:
        raise BadRequest(f"{name} must be given", param=name)
    return value


async def _scale(role: Role, values: dict[str, Any]) -> Sequence[FleetEngine]:
    return await fleet.scale(role, _required_field(values, "count", int), reason=typed_field(values, "reason", str, ""))


async def _register(role: Role, values: dict[str, Any]) -> Sequence[FleetEngine]:
    of = {key: typed_field(values, key, str, "") for key in ("name", "kind", "reason")}
    return [await fleet.register(role, _required_field(values, "url", str), **of)]


async def _drain(role: Role, values: dict[str, Any]) -> Sequence[FleetEngine]:
    return [
        await fleet.drain(role, _required_field(values, "engine", str), reason=typed_field(values, "reason", str, ""))
    ]


ASKED: dict[str, Ask] = {"/engines/scale": _scale, "/engines/register": _register, "/engines/drain": _drain}


def routes(role: Role, keys: SigningKeys, body: Callable[[Request], Awaitable[bytes]]) -> list[Route]:
    """Return the routes; `body` reads a request's body. Endpoints raise Unauthorized, BadRequest, EnginesRefused."""

    async def list_engines(request: Request) -> Response:
        require_key(request.headers.get("authorization"), *keys.accepted_keys)
        return _engines_response((await fleet.read(role)).engines.values(), 200)

    def asking(ask: Ask) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            require_key(request.headers.get("authorization"), *keys.accepted_keys)
            try:
                return _engines_response(await ask(role, object_of(await body(request))), 202)
            except fleet.FleetError as error:
                raise EnginesRefused(str(error)) from error

        return handle

    asks = [Route(path, asking(ask), methods=["POST"]) for path, ask in ASKED.items()]
    return [Route("/engines", list_engines, methods=["GET"]), *asks]


def _engines_response(engines: Any, status: int) -> Response:
    body = {"engines": [dataclasses.asdict(engine) for engine in engines]}
    return Response(orjson.dumps(body), status, media_type="application/json")
