"""The embedded schema registry: the part of the Confluent REST API that serializers call, with its state in the log.

`turnlog role registry` runs it; so does `python -m turnlog.infra.embedded.registry_app` with TURNLOG_* in the
environment.
The state is a fold of the one-partition compacted topic `_schemas`, whose records are those of Confluent's registry
(key {"keytype": "SCHEMA", subject, version}, value with id and schema). One process owns the topic: opening it fences
the previous owner, and a change is acknowledged after its transaction. Ids are global, assigned in order, and never
change. Source: Confluent Schema Registry API reference, v1; the requests of confluent-kafka 2.16 were taken from an
access log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fastavro
import orjson
from fastavro.schema import SchemaParseException
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnlog.infra.embedded.ports import claim
from turnlog.infra.history import read_range
from turnlog.infra.log import Log, LogError, Partition, TopicSpec, Transactor
from turnlog.infra.registry import MEDIA_TYPE, authorization
from turnlog.infra.roles import log_lines
from turnlog.infra.roles.health import (
    BodyTooLarge,
    Health,
    QuietServer,
    body_of,
    listening,
    serve_health,
    uvicorn_config,
)
from turnlog.infra.roles.probe import health_address, is_loopback, leads_nowhere_else, parse_host
from turnlog.infra.roles.starting import run_until_stopped, servers_of, stop_on_signals, watch_servers
from turnlog.infra.run_folder import EMBEDDED_USER, REGISTRY_KEY, kafka_of, read_endpoints, registry_of
from turnlog.names import REGISTRY_TOPIC, TransactionalId
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.compatibility import incompatibilities
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than
from turnlog.settings import RegistrySettings, Settings, load

DEFAULT_LEVEL = "BACKWARD_TRANSITIVE"
LEVELS = (
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE",
)  # fmt: skip


class RegistryErrorResponse(Exception):
    """A response of the registry that is not 2xx: HTTP status, Confluent's error code, and the reason."""

    def __init__(self, status: int, code: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A schema as version `number` of its subject."""

    subject: str
    number: int
    schema_id: int
    schema: str
    """JSON text as registered."""


class SchemaStore:
    """Schemas by subject, version and id, written through to the log. Use `opened`."""

    def __init__(self, log: Log, transactor: Transactor) -> None:
        self._log = log
        self._transactor = transactor
        self._writing = asyncio.Lock()
        self._subjects: dict[str, list[SchemaVersion]] = {}
        self._ids: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._levels: dict[str | None, str] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, log: Log, *, replication: int = 1) -> AsyncIterator[SchemaStore]:
        """Open the store of a log and read all its records. Raises LogError."""
        config = {"cleanup.policy": "compact"}
        if REGISTRY_TOPIC not in await log.topics():
            await log.create_topics([TopicSpec(REGISTRY_TOPIC, 1, replication, config)])
        async with log.transactor(TransactionalId.REGISTRY) as transactor:
            store = cls(log, transactor)
            await store._read()
            yield store

    async def register(self, subject: str, text: str) -> int:
        """Return the id of the schema under `subject`, registering a new version if the subject does not have it.

        Raises RegistryErrorResponse (413, 42201, 409) and LogError, after which the process must end."""
        schema, canonical = await _read_schema(text)
        async with self._writing:
            known = self._find(subject, canonical)
            if known is not None:
                return known.schema_id
            if problems := await self._problems(subject, schema, self._subjects.get(subject, [])):
                raise RegistryErrorResponse(409, 409, "; ".join(problems))
            schema_id = self._ids.get(canonical, len(self._texts) + 1)
            version = SchemaVersion(subject, len(self._subjects.get(subject, ())) + 1, schema_id, text)
            key = {"keytype": "SCHEMA", "subject": subject, "version": version.number, "magic": 1}
            value = {"subject": subject, "version": version.number, "id": schema_id, "schema": text, "deleted": False}
            await self._write(key, value)
            self._hold(version, canonical)
            return schema_id

    async def lookup(self, subject: str, text: str) -> SchemaVersion:
        """Return the version of `subject` with that schema. Raises RegistryErrorResponse (40401, 40403, 413, 42201)."""
        _, canonical = await _read_schema(text)
        self.versions(subject)
        version = self._find(subject, canonical)
        if version is None:
            raise RegistryErrorResponse(404, 40403, f"subject {subject} does not have this schema")
        return version

    def schema(self, schema_id: int) -> str:
        """Return the JSON text of the schema with this id. Raises RegistryErrorResponse (40403)."""
        if schema_id not in self._texts:
            raise RegistryErrorResponse(404, 40403, f"no schema has id {schema_id}")
        return self._texts[schema_id]

    def subjects(self) -> list[str]:
        """Return all subjects, sorted."""
        return sorted(self._subjects)

    def versions(self, subject: str) -> list[SchemaVersion]:
        """Return the versions of a subject, oldest first. Raises RegistryErrorResponse (40401)."""
        if subject not in self._subjects:
            raise RegistryErrorResponse(404, 40401, f"there is no subject {subject}")
        return self._subjects[subject]

    def version(self, subject: str, number: str) -> SchemaVersion:
        """Return a version of a subject; `number` is digits, or `latest`. Raises RegistryErrorResponse (40401, 40402,
        42202)."""
        versions = self.versions(subject)
        if number == "latest" or number == "-1":
            return versions[-1]
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise RegistryErrorResponse(422, 42202, f"a version is a positive integer or `latest`, got {number!r}")
        if not 1 <= int(number) <= len(versions):
            raise RegistryErrorResponse(
                404, 40402, f"subject {subject} has versions 1 to {len(versions)}, not {number}"
            )
        return versions[int(number) - 1]

    async def problems(self, subject: str, text: str, number: str) -> list[str]:
        """Return why the schema is not compatible with one version; empty if it is. Raises RegistryErrorResponse."""
        schema, _ = await _read_schema(text)
        return await self._problems(subject, schema, [self.version(subject, number)])

    def level(self, subject: str | None) -> str | None:
        """Return the compatibility level set for a subject, or None; without a subject, the default level."""
        return self._levels.get(subject, DEFAULT_LEVEL if subject is None else None)

    async def set_level(self, subject: str | None, level: str) -> None:
        """Set the compatibility level of a subject, or the default level. Raises RegistryErrorResponse (42203)."""
        if level not in LEVELS:
            raise RegistryErrorResponse(
                422, 42203, f"a compatibility level is one of {', '.join(LEVELS)}, got {level!r}"
            )
        async with self._writing:
            await self._write({"keytype": "CONFIG", "subject": subject, "magic": 0}, {"compatibilityLevel": level})
            self._levels[subject] = level

    async def _problems(self, subject: str, schema: Any, versions: list[SchemaVersion]) -> list[str]:
        level = self.level(subject) or self.level(None) or DEFAULT_LEVEL
        if level == "NONE":
            return []
        texts = [version.schema for version in versions]
        return await asyncio.to_thread(_against, level, schema, texts if level.endswith("_TRANSITIVE") else texts[-1:])

    def _find(self, subject: str, canonical: str) -> SchemaVersion | None:
        schema_id = self._ids.get(canonical)
        same = (version for version in self._subjects.get(subject, ()) if version.schema_id == schema_id)
        return next(same, None)

    def _hold(self, version: SchemaVersion, canonical: str) -> None:
        self._subjects.setdefault(version.subject, []).append(version)
        self._ids.setdefault(canonical, version.schema_id)
        self._texts.setdefault(version.schema_id, version.schema)

    async def _write(self, key: object, value: object) -> None:
        await self._transactor.begin()
        sent = await self._transactor.send(REGISTRY_TOPIC, 0, json.dumps(key).encode(), json.dumps(value).encode())
        await self._transactor.commit()
        await sent

    async def _read(self) -> None:
        partition = Partition(REGISTRY_TOPIC, 0)
        end = (await self._log.end_offsets([partition]))[partition]
        start = (await self._log.start_offsets([partition]))[partition]
        if start == end:
            return
        async with self._log.reader() as reader:
            async for record in read_range(reader, {partition: start}, {partition: end}):
                self._fold(record.key, record.value)

    def _fold(self, key_bytes: bytes, value_bytes: bytes) -> None:
        key, value = json.loads(key_bytes), json.loads(value_bytes or b"null")
        match key["keytype"]:
            case "SCHEMA":
                version = SchemaVersion(key["subject"], key["version"], value["id"], value["schema"])
                self._hold(version, canonical_text(json.loads(version.schema)))
            case "CONFIG":
                self._levels[key["subject"]] = value["compatibilityLevel"]


SCHEMA_BYTES = 128 << 10
"""Maximum size of a schema in bytes: unions and promotions are compared pairwise, so that the time grows
quadratically."""


async def _read_schema(text: str) -> tuple[Any, str]:
    """Parse a schema in a thread, so that other requests are served meanwhile; return it and its canonical JSON. Raises
    Refused (413, 42201)."""

    def read() -> tuple[Any, str]:
        schema = parse_avro_schema(text)
        return schema, canonical_text(schema)

    return await asyncio.to_thread(read)


def _against(level: str, schema: Any, texts: list[str]) -> list[str]:
    """Return how the schema violates the compatibility level with respect to other schemas."""
    others = [json.loads(text) for text in texts]
    problems = [] if level.startswith("FORWARD") else incompatibilities(schema, others)
    if not level.startswith("BACKWARD"):
        problems += [problem for other in others for problem in incompatibilities(other, [schema])]
    return list(dict.fromkeys(map(str, problems)))  # several versions may have the same problem


def parse_avro_schema(text: str) -> Any:
    """Return the JSON of a valid Avro schema. Raises RegistryErrorResponse (413, 42201)."""
    if (size := len(text.encode(errors="surrogatepass"))) > SCHEMA_BYTES:
        raise RegistryErrorResponse(
            413, 41301, (
                f"the schema has {size} bytes; this registry accepts at most {SCHEMA_BYTES}: shorten it, or set "
                "[registry] url to a registry of your own"
            )
        )  # fmt: skip
    if deeper_than(text):
        raise RegistryErrorResponse(422, 42201, f"not a valid Avro schema: nested deeper than {MAX_DEPTH} levels")
    try:
        schema = orjson.loads(text)
        fastavro.parse_schema(schema, _write_hint=False)
        incompatibilities(schema, [schema])  # finds missing attributes that fastavro does not require
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, SchemaParseException) as error:
        raise RegistryErrorResponse(422, 42201, f"not a valid Avro schema: {type(error).__name__}: {error}") from None
    return schema


log = logging.getLogger(__name__)

BODY_BYTES = 2**20
"""Maximum body of a request; a larger one is rejected with 413 while it is received. It has room for a schema of
SCHEMA_BYTES, every character escaped."""
REMEDY = "a schema must be smaller"


class RegistryApi:
    """HTTP routes over one store. `failed` completes with an error when a write to the log failed: the process must
    then end."""

    def __init__(self, store: SchemaStore, settings: RegistrySettings, *, body_bytes: int = BODY_BYTES) -> None:
        """`settings`: the registry's own, with its clients' login; without a login, everybody is allowed."""
        self._store = store
        self._settings = settings
        self._body_bytes = body_bytes
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def application(self) -> Starlette:
        """Return the ASGI application."""
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
                self._check(request)
                return _json(await call(request))
            except ClientDisconnect:
                return Response(status_code=400)  # the client is gone
            except RegistryErrorResponse as refused:
                return _error(refused.status, refused.code, str(refused))
            except LogError as error:
                if not self.failed.done():
                    self.failed.set_exception(error)
                return _error(500, 50001, f"the log failed: {error}")

        return answer

    def _check(self, request: Request) -> None:
        """Raise Refused for requests of browser pages, including those that reach the registry by DNS rebinding, and
        without a valid login.

        `/` returns no data, and needs no login, so that probes can use it."""
        if "origin" in request.headers:
            raise RegistryErrorResponse(
                403, 40301, "browser pages may not use this registry: requests with an Origin header are refused"
            )
        host = request.headers.get("host", "")
        if is_loopback(self._settings.host) and not leads_nowhere_else(parse_host(host)):
            raise RegistryErrorResponse(
                421, 42101, f"{host[:200]!r} is not a name of this registry: use its numeric address"
            )
        expected = authorization(self._settings)
        if request.url.path != "/" and not compare_digest(
            request.headers.get("authorization", "").encode(), expected.encode()
        ):
            raise RegistryErrorResponse(
                401, 40101, (
                    f"log in as clients of this run do: user {EMBEDDED_USER}, with the password from {REGISTRY_KEY} "
                    "in the run's directory"
                )
            )  # fmt: skip

    async def _nothing(self, _: Request) -> Any:
        return {}

    async def _subjects(self, _: Request) -> Any:
        return self._store.subjects()

    async def _register(self, request: Request) -> Any:
        return {"id": await self._store.register(request.path_params["subject"], await self._schema_text(request))}

    async def _lookup(self, request: Request) -> Any:
        return _version_json(await self._store.lookup(request.path_params["subject"], await self._schema_text(request)))

    async def _versions(self, request: Request) -> Any:
        return [version.number for version in self._store.versions(request.path_params["subject"])]

    async def _version(self, request: Request) -> Any:
        return _version_json(self._store.version(request.path_params["subject"], request.path_params["version"]))

    async def _schema(self, request: Request) -> Any:
        return {"schema": self._store.schema(_number(request.path_params["id"]))}

    async def _compatible(self, request: Request) -> Any:
        path = request.path_params
        problems = await self._store.problems(path["subject"], await self._schema_text(request), path["version"])
        return {"is_compatible": not problems, "messages": problems}

    async def _config(self, request: Request) -> Any:
        subject = request.path_params.get("subject")
        level = self._store.level(subject)
        if level is None and request.query_params.get("defaultToGlobal") == "true":
            level = self._store.level(None)
        if level is None:
            raise RegistryErrorResponse(404, 40408, f"subject {subject} has no compatibility level configured")
        return {"compatibilityLevel": level}

    async def _set_config(self, request: Request) -> Any:
        level = str((await self._body(request)).get("compatibility", ""))
        await self._store.set_level(request.path_params.get("subject"), level)
        return {"compatibility": level}

    async def _body(self, request: Request) -> dict[str, Any]:
        try:
            body = orjson.loads(await body_of(request, self._body_bytes, REMEDY))
        except orjson.JSONDecodeError:
            raise RegistryErrorResponse(422, 42201, "the body is not JSON") from None
        except BodyTooLarge as error:
            raise RegistryErrorResponse(413, 41301, str(error)) from None
        if not isinstance(body, dict):
            raise RegistryErrorResponse(422, 42201, "the body is not a JSON object")
        return body

    async def _schema_text(self, request: Request) -> str:
        body = await self._body(request)
        if body.get("schemaType", "AVRO") != "AVRO" or body.get("references"):
            raise RegistryErrorResponse(422, 42201, "only self-contained Avro schemas are supported here")
        if not isinstance(body.get("schema"), str):
            raise RegistryErrorResponse(422, 42201, "the body has no schema")
        return str(body["schema"])


def serve_registry(settings: Settings) -> int:
    """Run the registry role until SIGTERM or SIGINT; return 0. Port and brokers are those of the settings or of the
    run.

    Raises LogError if the log fails (the supervisor restarts the registry), NoEndpoints, PortTaken, SecretUnusable."""
    directory, port = Path(settings.run.directory), settings.registry.port
    kafka, registry = kafka_of(settings), registry_of(settings.registry, "", directory)
    port = port or urlsplit(read_endpoints(directory).registry).port or 0
    settings = dataclasses.replace(settings, kafka=kafka, registry=registry)
    asyncio.run(_serve(settings, claim(port, "[registry] port", registry.host)))
    return 0


async def _serve(settings: Settings, port: int) -> None:
    stopping, health = stop_on_signals(), Health("registry")
    async with serve_health(health, health_address(os.environ)):
        await run_until_stopped(_life(settings, port, stopping, health), stopping, health)


async def _life(settings: Settings, port: int, stopping: asyncio.Event, health: Health) -> None:
    from turnlog.infra.kafka import KafkaLog

    async with AsyncExitStack() as stack:
        servers = await stack.enter_async_context(servers_of("registry", settings, health))
        await servers.there()
        kafka = KafkaLog.of(settings.kafka, role="registry")
        stack.push_async_callback(kafka.close)
        opened = SchemaStore.open(kafka, replication=settings.kafka.copies)
        api = RegistryApi(await stack.enter_async_context(opened), settings.registry)
        listener = listening(settings.registry.host, port, "[registry] host or port")
        await stack.enter_async_context(QuietServer(uvicorn_config(api.application())).running(listener))
        await stack.enter_async_context(watch_servers(servers))
        health.mark_started()
        log.info("registry serves http://%s:%d", settings.registry.host, port)
        await _first(stopping.wait(), api.failed)


async def _first(stopped: Awaitable[object], failed: asyncio.Future[None]) -> None:
    stop = asyncio.ensure_future(stopped)
    waiting: list[asyncio.Future[Any]] = [stop, failed]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if failed.done():
        failed.result()


def _number(text: str) -> int:
    """Return the id in a path; -1, which no schema has, if it is malformed."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


def _version_json(version: SchemaVersion) -> dict[str, object]:
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
    """Answer unknown routes, such as /associations, which confluent-kafka requests before each first serialization."""
    status = int(getattr(error, "status_code", 404))
    return _error(status, status, f"{request.method} {request.url.path} is not served here")


if __name__ == "__main__":
    log_lines.begin(os.environ, sys.stderr)
    raise SystemExit(serve_registry(load(None, os.environ)))
