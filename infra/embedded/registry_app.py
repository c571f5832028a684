"""The embedded schema registry: the part of the Confluent REST API that serializers call, its state on the log.

`turnlog registry` runs it; so does `python -m turnlog.infra.embedded.registry_app` with TURNLOG_* in the environment.
Source: Confluent Schema Registry API reference, v1; what confluent-kafka 2.16 calls was seen in an access log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnlog.infra import log_lines
from turnlog.infra.embedded.ports import HOST, claim
from turnlog.infra.embedded.registry_store import Refused, SchemaStore, Version
from turnlog.infra.endpoints import read
from turnlog.infra.health import Health, QuietServer, configured, serve_health
from turnlog.infra.http_bodies import BodyTooLarge, body_of
from turnlog.infra.log import LogError
from turnlog.infra.registry import MEDIA_TYPE
from turnlog.settings import Settings, load

log = logging.getLogger(__name__)

REMEDY = "raise [registry] max_body_bytes, if that is a schema"


class RegistryApi:
    """The routes over one store. `failed` is done when the log failed a write: the process must end."""

    def __init__(self, store: SchemaStore, max_body_bytes: int) -> None:
        self._store = store
        self._max_body_bytes = max_body_bytes
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def application(self) -> Starlette:
        """The ASGI application."""
        routes: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("GET", "/", self._nothing),
            ("GET", "/subjects", self._subjects),
            ("POST", "/subjects/{subject}/versions", self._register),
            ("POST", "/subjects/{subject}", self._lookup),
            ("GET", "/subjects/{subject}/versions", self._versions),
            ("GET", "/subjects/{subject}/versions/{version}", self._version),
            ("GET", "/schemas/ids/{id}", self._schema),
            ("POST", "/compatibility/subjects/{subject}/versions/{version}", self._compatible),
            ("GET", "/config", self._config),
            ("PUT", "/config", self._set_config),
            ("GET", "/config/{subject}", self._config),
            ("PUT", "/config/{subject}", self._set_config),
        ]
        return Starlette(
            routes=[Route(path, self._answer(call), methods=[method]) for method, path, call in routes],
            exception_handlers={404: _not_found, 405: _not_found},
        )

    def _answer(self, call: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                if "origin" in request.headers:
                    raise Refused(403, 40301, "pages of a browser are not served: a request with an Origin is refused")
                return _json(await call(request))
            except ClientDisconnect:
                return Response(status_code=400)  # nobody reads it
            except Refused as refused:
                return _error(refused.status, refused.code, str(refused))
            except LogError as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                return _error(500, 50001, f"the log failed: {error}")

        return answer

    async def _nothing(self, _: Request) -> Any:
        return {}

    async def _subjects(self, _: Request) -> Any:
        return self._store.subjects()

    async def _register(self, request: Request) -> Any:
        return {"id": await self._store.register(request.path_params["subject"], await self._schema_text(request))}

    async def _lookup(self, request: Request) -> Any:
        return _shown(self._store.lookup(request.path_params["subject"], await self._schema_text(request)))

    async def _versions(self, request: Request) -> Any:
        return [version.number for version in self._store.versions(request.path_params["subject"])]

    async def _version(self, request: Request) -> Any:
        return _shown(self._store.version(request.path_params["subject"], request.path_params["version"]))

    async def _schema(self, request: Request) -> Any:
        return {"schema": self._store.schema(_number(request.path_params["id"]))}

    async def _compatible(self, request: Request) -> Any:
        path = request.path_params
        problems = self._store.problems(path["subject"], await self._schema_text(request), path["version"])
        return {"is_compatible": not problems, "messages": problems}

    async def _config(self, request: Request) -> Any:
        subject = request.path_params.get("subject")
        level = self._store.level(subject)
        if level is None and request.query_params.get("defaultToGlobal") == "true":
            level = self._store.level(None)
        if level is None:
            raise Refused(404, 40408, f"subject {subject} has no compatibility level of its own")
        return {"compatibilityLevel": level}

    async def _set_config(self, request: Request) -> Any:
        level = str((await self._body(request)).get("compatibility", ""))
        await self._store.set_level(request.path_params.get("subject"), level)
        return {"compatibility": level}

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            body = orjson.loads(await body_of(request, self._max_body_bytes, REMEDY))
        except orjson.JSONDecodeError:
            raise Refused(422, 42201, "the body is not JSON") from None
        except BodyTooLarge as error:
            raise Refused(413, 41301, str(error)) from None
        if not isinstance(body, dict):
            raise Refused(422, 42201, "the body is not a JSON object")
        return body

    async def _schema_text(self, request: Request) -> str:
        body = await self._body(request)
        if body.get("schemaType", "AVRO") != "AVRO" or body.get("references"):
            raise Refused(422, 42201, "only self-contained Avro schemas are kept here")
        if not isinstance(body.get("schema"), str):
            raise Refused(422, 42201, "the body has no schema")
        return str(body["schema"])


def serve_registry(settings: Settings) -> int:
    """The role: serve on 127.0.0.1 until SIGTERM or SIGINT; 0. Port and broker are the settings' or the run's.
    Raises LogError when the log fails (the supervisor starts it again), NoEndpoints, PortTaken."""
    bootstrap, port = settings.kafka.bootstrap, settings.registry.port
    if not (bootstrap and port):
        found = read(Path(settings.run.directory))
        bootstrap, port = bootstrap or found.kafka, port or urlsplit(found.registry).port or 0
    kafka = dataclasses.replace(settings.kafka, bootstrap=bootstrap)
    asyncio.run(_serve(dataclasses.replace(settings, kafka=kafka), claim(port, "[registry] port")))
    return 0


async def _serve(settings: Settings, port: int) -> None:
    from turnlog.infra.kafka import KafkaLog

    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    health = Health("registry")
    kafka = KafkaLog(settings.kafka.bootstrap, prefix=settings.kafka.prefix)
    try:
        async with (
            SchemaStore.opened(kafka, replication=settings.kafka.replication) as store,
            serve_health(health, instance="registry"),
        ):
            api = RegistryApi(store, settings.registry.max_body_bytes)
            async with QuietServer(configured(api.application(), host=HOST, port=port)).running():
                health.started()
                log.info("registry serves http://%s:%d", HOST, port)
                await _first(stopping.wait(), api.failed)
    finally:
        await kafka.close()


async def _first(stopped: Awaitable[object], failed: asyncio.Future[None]) -> None:
    stop = asyncio.ensure_future(stopped)
    waiting: list[asyncio.Future[Any]] = [stop, failed]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if failed.done():
        failed.result()


def _number(text: str) -> int:
    """An id of a path; -1, which no schema has, for what is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def _shown(version: Version) -> dict[str, object]:
    return {
        "subject": version.subject,
        "id": version.schema_id,
        "version": version.number,
        "schema": version.schema,
    }


def _json(content: object, status: int = 200) -> Response:
    return JSONResponse(content, status_code=status, media_type=MEDIA_TYPE)


def _error(status: int, code: int, why: str) -> Response:
    return _json({"error_code": code, "message": why}, status)


async def _not_found(request: Request, error: Exception) -> Response:
    """Also for /associations, which confluent-kafka asks before each first serialisation."""
    status = int(getattr(error, "status_code", 404))
    return _error(status, status, f"{request.method} {request.url.path} is not served here")


if __name__ == "__main__":
    log_lines.begin("INFO", sys.stderr)
    raise SystemExit(serve_registry(load(None, os.environ)))
