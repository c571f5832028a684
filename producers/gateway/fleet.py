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
from turnlog.processors.core.fleet import Engine
from turnlog.producers.gateway import BadRequest, EnginesRefused
from turnlog.producers.gateway.requests import SigningKeys, object_of, require_key, typed

Ask = Callable[[Role, dict[str, Any]], Awaitable[Sequence[Engine]]]


def _given(values: dict[str, Any], name: str, kind: type) -> Any:
    """Return a required field. Raises BadRequest if it is missing or of another type."""
    value = typed(values, name, kind, None)
    if value is None:
        raise BadRequest(f"{name} must be given", param=name)
    return value


async def _scale(role: Role, values: dict[str, Any]) -> Sequence[Engine]:
    return await fleet.scale(role, _given(values, "count", int), reason=typed(values, "reason", str, ""))


async def _register(role: Role, values: dict[str, Any]) -> Sequence[Engine]:
    name, reason = (typed(values, key, str, "") for key in ("name", "reason"))
    return [await fleet.register(role, _given(values, "url", str), name=name, reason=reason)]


async def _drain(role: Role, values: dict[str, Any]) -> Sequence[Engine]:
    return [await fleet.drain(role, _given(values, "engine", str), reason=typed(values, "reason", str, ""))]


ASKED: dict[str, Ask] = {"/engines/scale": _scale, "/engines/register": _register, "/engines/drain": _drain}


def routes(role: Role, keys: SigningKeys, body: Callable[[Request], Awaitable[bytes]]) -> list[Route]:
    """Return the routes; `body` reads a request's body. Endpoints raise Unauthorized, BadRequest, EnginesRefused."""

    async def listed(request: Request) -> Response:
        require_key(request.headers.get("authorization"), *keys.accepted)
        return _told((await fleet.read(role)).engines.values(), 200)

    def asking(ask: Ask) -> Callable[[Request], Awaitable[Response]]:
        async def asked(request: Request) -> Response:
            require_key(request.headers.get("authorization"), *keys.accepted)
            try:
                return _told(await ask(role, object_of(await body(request))), 202)
            except fleet.FleetError as error:
                raise EnginesRefused(str(error)) from error

        return asked

    asks = [Route(path, asking(ask), methods=["POST"]) for path, ask in ASKED.items()]
    return [Route("/engines", listed, methods=["GET"]), *asks]


def _told(engines: Any, status: int) -> Response:
    body = {"engines": [dataclasses.asdict(engine) for engine in engines]}
    return Response(orjson.dumps(body), status, media_type="application/json")
