"""The state of the embedded schema registry: a fold of the one-partition compacted topic `_schemas`.

Records are those of Confluent's registry (key {"keytype": "SCHEMA", subject, version}, value with id and schema), so
that its topic can be read. One process owns the topic: opening fences the last owner, and a change is acknowledged
after its transaction. Ids are global, given in the order of registration and never change.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import fastavro
import orjson
from fastavro.schema import SchemaParseException

from turnlog.infra.log import Log, Partition, TopicSpec, Transactor
from turnlog.names import REGISTRY_TOPIC, TransactionalId
from turnlog.schemas.compatibility import incompatibilities
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than

DEFAULT_LEVEL = "BACKWARD_TRANSITIVE"
LEVELS = (
    "NONE", "BACKWARD", "BACKWARD_TRANSITIVE", "FORWARD", "FORWARD_TRANSITIVE", "FULL", "FULL_TRANSITIVE",
)  # fmt: skip


class Refused(Exception):
    """An answer of the registry that is not 2xx: its HTTP status, Confluent's error code, and why."""

    def __init__(self, status: int, code: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Version:
    """A schema as version `number` of its subject."""

    subject: str
    number: int
    schema_id: int
    schema: str
    """JSON text as it was registered."""


class SchemaStore:
    """Schemas by subject, version and id; written through to the log. Use `opened`."""

    def __init__(self, log: Log, transactor: Transactor) -> None:
        self._log = log
        self._transactor = transactor
        self._writing = asyncio.Lock()
        self._subjects: dict[str, list[Version]] = {}
        self._ids: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._levels: dict[str | None, str] = {}

    @classmethod
    @asynccontextmanager
    async def opened(cls, log: Log, *, replication: int = 1) -> AsyncIterator[SchemaStore]:
        """The store of a log, everything read. Raises LogError."""
        config = {"cleanup.policy": "compact"}
        if REGISTRY_TOPIC not in await log.topics():
            await log.create_topics([TopicSpec(REGISTRY_TOPIC, 1, replication, config)])
        async with log.transactor(TransactionalId.REGISTRY) as transactor:
            store = cls(log, transactor)
            await store._read()
            yield store

    async def register(self, subject: str, text: str) -> int:
        """The id of the schema under `subject`, a new version when the subject does not have it.
        Raises Refused (42201, 409) and LogError, after which the process must end."""
        schema = parsed(text)
        async with self._writing:
            known = self._find(subject, schema)
            if known is not None:
                return known.schema_id
            if problems := self._problems(subject, schema, self._subjects.get(subject, [])):
                raise Refused(409, 409, "; ".join(problems))
            schema_id = self._ids.get(_canonical(schema), len(self._texts) + 1)
            version = Version(subject, len(self._subjects.get(subject, ())) + 1, schema_id, text)
            key = {"keytype": "SCHEMA", "subject": subject, "version": version.number, "magic": 1}
            value = {"subject": subject, "version": version.number, "id": schema_id, "schema": text, "deleted": False}
            await self._write(key, value)
            self._hold(version)
            return schema_id

    def lookup(self, subject: str, text: str) -> Version:
        """The version of `subject` with that schema. Raises Refused (40401, 40403, 42201)."""
        schema = parsed(text)
        self.versions(subject)
        version = self._find(subject, schema)
        if version is None:
            raise Refused(404, 40403, f"subject {subject} does not have this schema")
        return version

    def schema(self, schema_id: int) -> str:
        """JSON text of an id. Raises Refused (40403)."""
        if schema_id not in self._texts:
            raise Refused(404, 40403, f"no schema has id {schema_id}")
        return self._texts[schema_id]

    def subjects(self) -> list[str]:
        """Every subject, sorted."""
        return sorted(self._subjects)

    def versions(self, subject: str) -> list[Version]:
        """Oldest first. Raises Refused (40401)."""
        if subject not in self._subjects:
            raise Refused(404, 40401, f"there is no subject {subject}")
        return self._subjects[subject]

    def version(self, subject: str, number: str) -> Version:
        """`number`: digits, or `latest`. Raises Refused (40401, 40402, 42202)."""
        versions = self.versions(subject)
        if number == "latest" or number == "-1":
            return versions[-1]
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise Refused(422, 42202, f"a version is a positive integer or `latest`, got {number!r}")
        if not 1 <= int(number) <= len(versions):
            raise Refused(404, 40402, f"subject {subject} has versions 1 to {len(versions)}, not {number}")
        return versions[int(number) - 1]

    def problems(self, subject: str, text: str, number: str) -> list[str]:
        """What stands against registering the schema, next to one version. Raises Refused."""
        return self._problems(subject, parsed(text), [self.version(subject, number)])

    def level(self, subject: str | None) -> str | None:
        """The compatibility level set for a subject (None: for all others); None when none was set."""
        return self._levels.get(subject, DEFAULT_LEVEL if subject is None else None)

    async def set_level(self, subject: str | None, level: str) -> None:
        """Raises Refused (42203)."""
        if level not in LEVELS:
            raise Refused(422, 42203, f"a compatibility level is one of {', '.join(LEVELS)}, got {level!r}")
        async with self._writing:
            await self._write({"keytype": "CONFIG", "subject": subject, "magic": 0}, {"compatibilityLevel": level})
            self._levels[subject] = level

    def _problems(self, subject: str, schema: Any, versions: list[Version]) -> list[str]:
        level = self.level(subject) or self.level(None) or DEFAULT_LEVEL
        if level == "NONE":
            return []
        others = [json.loads(version.schema) for version in versions]
        if not level.endswith("_TRANSITIVE"):
            others = others[-1:]
        problems = [] if level.startswith("FORWARD") else incompatibilities(schema, others)
        if not level.startswith("BACKWARD"):
            problems += [problem for other in others for problem in incompatibilities(other, [schema])]
        return list(dict.fromkeys(map(str, problems)))  # several versions may say the same

    def _find(self, subject: str, schema: Any) -> Version | None:
        schema_id = self._ids.get(_canonical(schema))
        same = (version for version in self._subjects.get(subject, ()) if version.schema_id == schema_id)
        return next(same, None)

    def _hold(self, version: Version) -> None:
        self._subjects.setdefault(version.subject, []).append(version)
        self._ids.setdefault(_canonical(json.loads(version.schema)), version.schema_id)
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
            reader.assign({partition: start})
            while reader.position(partition) < end:
                self._fold((record.key, record.value) for record in await reader.poll())

    def _fold(self, records: Iterable[tuple[bytes, bytes]]) -> None:
        for key_bytes, value_bytes in records:
            key, value = json.loads(key_bytes), json.loads(value_bytes or b"null")
            match key["keytype"]:
                case "SCHEMA":
                    self._hold(Version(key["subject"], key["version"], value["id"], value["schema"]))
                case "CONFIG":
                    self._levels[key["subject"]] = value["compatibilityLevel"]


def parsed(text: str) -> Any:
    """The JSON of a valid Avro schema. Raises Refused (42201)."""
    if deeper_than(text):
        raise Refused(422, 42201, f"not a valid Avro schema: nested deeper than {MAX_DEPTH} levels")
    try:
        schema = orjson.loads(text)
        fastavro.parse_schema(schema, _write_hint=False)
        incompatibilities(schema, [schema])  # finds the attributes that fastavro does not miss
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, SchemaParseException) as error:
        raise Refused(422, 42201, f"not a valid Avro schema: {type(error).__name__}: {error}") from None
    return schema


def _canonical(schema: Any) -> str:
    """What makes two schemas the same: their JSON, whatever its spaces and the order of its keys."""
    return json.dumps(schema, sort_keys=True, separators=(",", ":"))
