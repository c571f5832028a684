"""Client of a schema registry that speaks the Confluent REST API. Subject = record name (RecordNameStrategy).

RegistryError
├── RegistryUnavailable      it did not do what was asked: retried, then the process ends
│   └── RegistryUnreachable  transport or 5xx
└── SchemaIncompatible       409: the change breaks BACKWARD_TRANSITIVE; names record, field and rule
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import httpx

from turnlog.infra.roles import Unreachable
from turnlog.schemas.compatibility import Problem, Schema, incompatibilities

MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"


class RegistryError(Exception):
    """Base of the tree above."""


class RegistryUnavailable(RegistryError):
    """The registry did not do what was asked; check [registry] url."""


class RegistryUnreachable(RegistryUnavailable, Unreachable):
    """The registry did not answer, or failed."""


class SchemaIncompatible(RegistryError):
    """The registry refused the schema under the subject's compatibility rule."""

    def __init__(self, subject: str, problems: Sequence[Problem], answer: str) -> None:
        """`problems`: found here against the registered versions; none when the registry's rule is stricter."""
        why = "; ".join(dict.fromkeys(f"{problem} (rule {problem.rule})" for problem in problems)) or answer
        super().__init__(
            f"{subject}: {why}; the registry holds what an older release wrote: keep its fields, give new ones "
            "defaults (`turnlog schemas check`), or start the newer release"
        )
        self.problems = tuple(problems)


class Registry(Protocol):
    """Schemas by subject and by id; ids are global and never change."""

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        """The id of the schema under the subject, registering it if new."""
        ...

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        """The schema of an id. Raises KeyError when there is none."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


class HttpRegistry:
    """The real client."""

    def __init__(self, url: str, *, timeout_s: float = 10.0) -> None:
        self._url = url
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s, headers={"content-type": MEDIA_TYPE})

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        answer = await self._call("POST", f"/subjects/{subject}/versions", {"schema": json.dumps(schema)})
        if answer.status_code == httpx.codes.CONFLICT:
            problems = incompatibilities(dict(schema), await self._registered(subject))
            raise SchemaIncompatible(subject, problems, answer.text[:500])
        return int(self._body(answer)["id"])

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        answer = await self._call("GET", f"/schemas/ids/{schema_id}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise KeyError(schema_id)
        schema: Mapping[str, Any] = json.loads(self._body(answer)["schema"])
        return schema

    async def close(self) -> None:
        """Release connections."""
        await self._http.aclose()

    async def _registered(self, subject: str) -> list[Schema]:
        """Every version of a subject: the answer to a refused one says why in words of its own."""
        numbers = self._body(await self._call("GET", f"/subjects/{subject}/versions"))
        answers = [await self._call("GET", f"/subjects/{subject}/versions/{number}") for number in numbers]
        return [json.loads(self._body(answer)["schema"]) for answer in answers]

    async def _call(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, json=body)
        except httpx.TransportError as error:
            raise RegistryUnreachable(f"{self._url}: {error or type(error).__name__}; check [registry] url") from error

    def _body(self, answer: httpx.Response) -> Any:
        if answer.status_code >= httpx.codes.BAD_REQUEST:
            kind = RegistryUnreachable if answer.is_server_error else RegistryUnavailable
            raise kind(f"{self._url} answered {answer.status_code}: {answer.text[:200]}")
        return answer.json()


class MemoryRegistry:
    """The fake: ids by order of registration, no compatibility rule."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._schemas: dict[int, Mapping[str, Any]] = {}

    async def register(self, subject: str, schema: Mapping[str, Any]) -> int:
        text = json.dumps(schema, sort_keys=True)
        schema_id = self._ids.setdefault(text, len(self._ids) + 1)
        self._schemas[schema_id] = schema
        return schema_id

    async def schema(self, schema_id: int) -> Mapping[str, Any]:
        return self._schemas[schema_id]

    async def close(self) -> None:
        """Nothing to release."""
