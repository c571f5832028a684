"""Client of a schema registry with the Confluent REST API. Subject = record name (RecordNameStrategy).

RegistryError
├── RegistryUnavailable      it did not do what was requested: retried, then the process ends
│   ├── RegistryRefused      401 or 403: the login is unknown or lacks a right; waited for, as secrets rotate
│   ├── SchemaNotRegistered  [registry] auto_register is false and nobody has registered it yet: waited for
│   └── RegistryUnreachable  transport or TLS, or an answer that allows a retry
└── SchemaIncompatible       409: the change breaks BACKWARD_TRANSITIVE; names record, field and rule
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import httpx

from turnlog.infra.roles import Explained, Unreachable, passes
from turnlog.infra.roles.http_clients import direct
from turnlog.infra.roles.tls import trusting
from turnlog.infra.run_folder import present
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.compatibility import Problem, Schema, incompatibilities
from turnlog.settings import RegistrySettings

T = TypeVar("T")
ABSENT = (40401, 40402, 40403)
"""Error codes for a missing subject, version or schema."""
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"


class RegistryError(Exception):
    """Base class of all errors of the registry; see the module docstring."""


class RegistryUnavailable(RegistryError):
    """The registry did not do what was requested; check [registry] url."""


class RegistryUnreachable(RegistryUnavailable, Unreachable):
    """The registry did not answer, or failed."""


class RegistryRefused(RegistryUnavailable, Explained):
    """The login was refused; check [registry] username, password, token. Secret files are read again for each
    request."""


class SchemaNotRegistered(RegistryUnavailable, Explained):
    """The schema is not registered. Remedy: `turnlog run configure`, which registers it."""


class SchemaIncompatible(RegistryError):
    """The registry refused the schema under the subject's compatibility rule."""

    def __init__(self, subject: str, problems: Sequence[Problem], answer: str) -> None:
        """`problems`: those found against the registered versions; none if the registry's rule is stricter than
        ours."""
        why = "; ".join(dict.fromkeys(f"{problem} (rule {problem.rule})" for problem in problems)) or answer
        super().__init__(
            f"{subject}: {why}; the registry holds the schema of an older release: keep its fields, give new ones "
            "defaults (`turnlog schemas check`), or start the newer release"
        )
        self.problems = tuple(problems)


class Registry(Protocol):
    """Schemas by subject and by id; ids are global and never change."""

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        """Return the schema's id under the subject; register it if it is new."""
        ...

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        """Return the schema of an id, which may be any JSON value. Raises KeyError if there is none. Raises
        UndecodableRecord if it is not JSON."""
        ...

    async def close(self) -> None:
        """Release all connections."""
        ...


class HttpRegistry:
    """Client of a registry over HTTP."""

    def __init__(self, settings: RegistrySettings, *, timeout_s: float = 10.0) -> None:
        """Connections are opened by the first request. Raises TlsFileUnusable."""
        self._settings = settings
        self._url = settings.url
        self._http = direct(
            base_url=settings.url,
            timeout=timeout_s,
            headers={"content-type": MEDIA_TYPE},
            auth=_Login(settings),
            verify=trusting(settings.url, settings.ca_file, "registry"),
        )

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        """See Registry. Raises SchemaNotRegistered if the schema is missing and `auto_register` is false."""
        subject = self._settings.subject_prefix + subject
        where, body = f"/subjects/{quote(subject, safe='')}", {"schema": json.dumps(schema)}
        if not self._settings.auto_register:
            answer = await self._call("POST", where, body)
            if _is_absent(answer):
                raise SchemaNotRegistered(
                    f"{self._url} does not have this schema of {subject}, and [registry] auto_register is false: run "
                    "`turnlog run configure` as a user that may write to the registry"
                )
            return self._read_field(answer, "id", int)
        answer = await self._call("POST", f"{where}/versions", body)
        if answer.status_code == httpx.codes.CONFLICT:
            problems = incompatibilities(dict(schema), await self._fetch_versions(subject))
            raise SchemaIncompatible(subject, problems, answer.text[:500])
        return self._read_field(answer, "id", int)

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        answer = await self._call("GET", f"/schemas/ids/{schema_id}")
        if _is_absent(answer):
            raise KeyError(schema_id)
        text = self._read_field(answer, "schema", str)
        try:
            schema: Mapping[str, Any] = json.loads(text)
        except (ValueError, RecursionError) as error:  # a registry also stores Protobuf
            raise UndecodableRecord(f"{self._url}: schema id {schema_id} is not JSON: {error}") from error
        return schema

    async def config(self, record: str = "") -> httpx.Response:
        """Return the answer to a request for the compatibility of a record's subject, or without a record for the
        registry's own. Raises RegistryRefused if the login is unknown. Raises RegistryUnreachable."""
        subject = f"/{quote(self._settings.subject_prefix + record, safe='')}" if record else ""
        answer = await self._call("GET", f"/config{subject}")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            self._body(answer)
        return answer

    async def close(self) -> None:
        """Release all connections."""
        await self._http.aclose()

    async def _fetch_versions(self, subject: str) -> list[Schema]:
        """Return all registered versions of a subject, to explain a refusal in our own words."""
        where = f"/subjects/{quote(subject, safe='')}/versions"
        numbers = self._body(await self._call("GET", where))
        answers = [await self._call("GET", f"{where}/{number}") for number in numbers]
        return [self._read_field(answer, "schema", json.loads) for answer in answers]

    async def _call(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise RegistryUnreachable(f"{self._url}: {error or type(error).__name__}; check [registry] url") from error

    def _body(self, answer: httpx.Response) -> Any:
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise RegistryRefused(
                f"{self._url} refused {answer.request.method} {answer.request.url.path} with {answer.status_code}: "
                "check [registry] username and password, or token, and their permissions"
            )
        if not answer.is_success:
            kind = RegistryUnreachable if passes(answer.status_code) else RegistryUnavailable
            where = f" to {answer.headers['location']}" if "location" in answer.headers else ""
            raise kind(f"{self._url} answered {answer.status_code}{where}: {answer.text[:200]}; see [registry] url")
        return self._read(answer, answer.json)

    def _read_field(self, answer: httpx.Response, name: str, read: Callable[[Any], T]) -> T:
        """Read a field of an answer. Raises RegistryUnreachable."""
        return self._read(answer, lambda: read(self._body(answer)[name]))

    def _read(self, answer: httpx.Response, read: Callable[[], T]) -> T:
        """Read an answer. Raises RegistryUnreachable if the body is truncated or not that of a registry: a proxy
        answered, and its answer proves neither a schema nor its absence."""
        try:
            return read()
        except (ValueError, KeyError, TypeError) as error:
            raise RegistryUnreachable(
                f"{self._url} answered {answer.status_code}, but not as a schema registry does ({error!r}): "
                f"{answer.text[:200]!r}; see [registry] url"
            ) from error


def _is_absent(answer: httpx.Response) -> bool:
    """True if the registry itself reports that the subject or schema does not exist. A 404 from a proxy does not
    count."""
    if answer.status_code != httpx.codes.NOT_FOUND:
        return False
    try:
        return answer.json()["error_code"] in ABSENT
    except (ValueError, KeyError, TypeError):
        return False


class _Login(httpx.Auth):
    """Login of the settings, read anew for each request."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        """See httpx.Auth."""
        if said := authorization(self._settings):
            request.headers["authorization"] = said
        yield request


def authorization(settings: RegistrySettings) -> str:
    """Return the Authorization header for these settings with the current secrets; empty for none."""
    if token := present(settings.token):
        return f"Bearer {token}"
    if not settings.username:
        return ""
    return "Basic " + b64encode(f"{settings.username}:{present(settings.password)}".encode()).decode()


class MemoryRegistry:
    """Fake registry for tests: ids in order of registration, no compatibility rule."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.schemas: dict[int, Mapping[str, Any]] = {}

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        text = canonical_text(schema, spaces=True)
        schema_id = self._ids.setdefault(text, len(self._ids) + 1)
        self.schemas[schema_id] = schema
        return schema_id

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        return self.schemas[schema_id]

    async def close(self) -> None:
        """Do nothing: there are no connections."""
