"""One evolution carried through on real servers: docs/schema-evolution.md tells it, this runs it.

A registry of its own, because the story begins with the schemas of release v1 alone.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import importlib.util
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import fastavro
import httpx
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from tests.addresses import variables
from tests.fakes.sessions import bad_days
from tests.shared_servers import running_registry
from turnlog.infra.log import Log, Partition
from turnlog.infra.registry import HttpRegistry, SchemaIncompatible
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configuration
from turnlog.processors.runtime.assembler import main
from turnlog.processors.runtime.unit import records_between
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, plain
from turnlog.schemas.compatibility import CompatibilityRule
from turnlog.schemas.events import Event, GroupScored
from turnlog.schemas.releases import as_of, releases
from turnlog.schemas.topics import SAMPLES, SESSIONS, SNAPSHOTS, TREES, TURNS
from turnlog.settings import RegistrySettings, Settings

pytestmark = pytest.mark.kafka
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
V1 = as_of("v1", releases())
RECORDED = [json.loads(line) for line in (GOLDEN / "history-v1.jsonl").read_text().splitlines()]
SAID: dict[str, str] = json.loads((GOLDEN / "history-v1.fold-1.json").read_text())


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    """tests/golden/record_history.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("record_history", GOLDEN / "record_history.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_registry(kafka: str, servers: Path) -> Iterator[str]:
    """URL of a registry that holds nothing yet."""
    name = f"registry-{uuid4().hex[:8]}"
    with running_registry(kafka, f"{name}-", servers / f"{name}.log") as url:
        yield url


@pytest.fixture
def settings(live_settings: Settings, fresh_registry: str) -> Settings:
    """A run of the release that made the history, on fresh topics."""
    run = dataclasses.replace(live_settings.run, id="history")
    return dataclasses.replace(live_settings, run=run, registry=RegistrySettings(url=fresh_registry))


async def write_as_v1(log: Log, registry: HttpRegistry) -> None:
    """What release v1 put on the log: its schemas in the registry, its bytes in the topics."""
    ids = {name: await registry.register(name, schema) for name, schema in V1.items()}
    async with log.appender() as appender:
        for line in RECORDED:
            value = HEADER.pack(0, ids[line["headers"]["record"]]) + base64.b64decode(line["body"])
            headers = [(name, text.encode()) for name, text in line["headers"].items()]
            await appender.append(line["topic"], line["key"].encode(), value, headers=headers)


@asynccontextmanager
async def log_only(settings: Settings) -> AsyncIterator[Any]:
    """The log and the registry, before any process of today's release has started."""
    from turnlog.infra.kafka import KafkaLog

    log, registry = (
        KafkaLog(settings.kafka.bootstrap, prefix=settings.kafka.prefix),
        HttpRegistry(settings.registry),
    )
    try:
        yield log, registry
    finally:
        await registry.close()
        await log.close()


def versions(settings: Settings, name: str) -> list[int]:
    """Versions of a record in the registry."""
    numbers: list[int] = httpx.get(f"{settings.registry.url}/subjects/{name}/versions").json()
    return numbers


def send(method: str, url: str, body: object) -> httpx.Response:
    """What a tool that knows nothing of turnlog sends to the registry."""
    return httpx.request(method, url, json=body)


async def outputs(role: Role, events: set[str], groups: set[str]) -> list[Event]:
    """Run today's assembler until these events stand on the log and these groups are scored: every tree, sample and
    score. Trees and scores of one transaction become readable one partition after another, so each is waited for."""
    names = [Partition(topic.name, unit) for topic in (TREES, SAMPLES) for unit in range(role.settings.kafka.groups)]
    folding = asyncio.create_task(main(role))
    found: list[Event] = []
    missing = events | groups
    try:
        async with asyncio.timeout(60), role.log.reader() as reader:
            reader.assign(dict.fromkeys(names, 0))
            while missing and not folding.done():
                found += [await role.events.decode(record) for record in await reader.poll()]
                missing -= {event.event_id for event in found} | scored(found)
            ends = await role.log.end_offsets(names)  # what nobody waits for is found, too
            while any(reader.position(name) < end for name, end in ends.items()):
                found += [await role.events.decode(record) for record in await reader.poll()]
    except TimeoutError:
        pytest.fail(f"{len(found)} outputs after 60 s, not among them: {sorted(missing)}")
    finally:
        role.stopping.set()
        await folding
    return found


def scored(events: Iterable[Event]) -> set[str]:
    return {event.group_id for event in events if isinstance(event, GroupScored)}


def as_v1(event: Event) -> Any:
    """What a reader of v1 sees of an event that today's code wrote."""
    name, out = type(event).__name__, io.BytesIO()
    present = fastavro.parse_schema(stored_schema(name))
    fastavro.schemaless_writer(out, present, plain(event), strict=True)
    out.seek(0)
    return fastavro.schemaless_reader(out, present, fastavro.parse_schema(V1[name]))


async def schema_ids(role: Role, topic: str) -> set[int]:
    names = [Partition(topic, unit) for unit in range(role.settings.kafka.groups)]
    ends = await role.log.end_offsets(names)
    return {
        HEADER.unpack_from(record.value)[1]
        for name in names
        async for record in records_between(role.log, name, 0, ends[name])
    }


async def test_a_topic_of_v1_is_replayed_by_todays_code_and_goes_on_with_todays_records(
    settings: Settings, recorder: ModuleType
) -> None:
    async with log_only(settings) as (log, registry):
        await write_as_v1(log, registry)
        assert {name: versions(settings, name) for name in V1} == {name: [1] for name in V1}
    old = {line["key"] for line in RECORDED}
    async with open_role("assembler", settings) as role:
        await role.events.append(dataclasses.replace(configuration(settings), fold_version="1"))
        found = await outputs(role, set(SAID), old)
        assert {event.event_id: recorder.fingerprint(as_v1(event)) for event in found} == SAID
    evolved = [name for name in V1 if V1[name] != stored_schema(name)]
    assert {name: versions(settings, name) for name in evolved} == {name: [1, 2] for name in evolved}
    async with open_role("assembler", settings) as role:
        names = [Partition(SESSIONS.name, unit) for unit in range(settings.kafka.groups)]
        ends = list((await role.log.end_offsets(names)).values())
        for event in bad_days(
            random.Random(5), groups=3, partitions=len(names), run_id="history", name="new", ends=ends
        ):
            await role.events.append(event)
        for topic, record in ((TURNS.name, "TurnCompleted"), (SNAPSHOTS.name, "TokenSnapshot")):
            assert len(await schema_ids(role, topic)) == (2 if record in evolved else 1)
        later = await outputs(role, set(SAID), old | {"new-0", "new-1", "new-2"})
    assert {event.event_id for event in found} < {event.event_id for event in later}
    assert len({event.event_id for event in later}) == len(later)


def incompatible(name: str) -> dict[str, Any]:
    """The schema of a record with a new field that has no default."""
    schema = stored_schema(name)
    return {**schema, "fields": [*schema["fields"], {"name": "mood", "type": "string"}]}


async def test_the_registry_refuses_an_incompatible_schema_and_says_why(registry_url: str) -> None:
    registry, name = HttpRegistry(RegistrySettings(url=registry_url)), "EngineGone"
    await registry.register(name, stored_schema(name))
    body = {"schema": json.dumps(incompatible(name))}
    answer = send("POST", f"{registry_url}/subjects/{name}/versions", body)
    assert answer.status_code == 409
    assert "turnlog.v1.EngineGone.mood: new without a default" in answer.json()["message"]
    with SchemaRegistryClient({"url": registry_url}) as client:
        assert client.test_compatibility(name, Schema(json.dumps(stored_schema(name)), "AVRO"))
        assert not client.test_compatibility(name, Schema(body["schema"], "AVRO"))
    with pytest.raises(SchemaIncompatible, match=r"EngineGone\.mood.*rule new_without_default") as refused:
        await registry.register(name, incompatible(name))
    assert [(problem.where, problem.rule) for problem in refused.value.problems] == [
        ("turnlog.v1.EngineGone.mood", CompatibilityRule.new_without_default)
    ]
    await registry.close()


async def test_a_registry_that_is_stricter_than_ours_is_quoted(registry_url: str) -> None:
    subject = f"subject-{uuid4().hex[:8]}"
    send("PUT", f"{registry_url}/config/{subject}", {"compatibility": "FULL_TRANSITIVE"})
    registry = HttpRegistry(RegistrySettings(url=registry_url))
    await registry.register(subject, incompatible("EngineGone"))
    with pytest.raises(SchemaIncompatible, match=r"EngineGone\.mood: new without a default"):
        await registry.register(subject, stored_schema("EngineGone"))
    await registry.close()


def test_a_role_whose_schema_the_registry_refuses_ends_with_field_and_rule(settings: Settings) -> None:
    """Another release wrote BatchSkipped without `batch_index`, which this one cannot do without."""
    schema = stored_schema("BatchSkipped")
    fields = [field for field in schema["fields"] if field["name"] != "batch_index"]
    body = {"schema": json.dumps({**schema, "fields": fields})}
    send("POST", f"{settings.registry.url}/subjects/BatchSkipped/versions", body).raise_for_status()
    env = {
        **os.environ,
        **variables(settings),
    }
    command = [sys.executable, "-m", "turnlog.cli", "role", "assembler"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2, ran.stderr
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("turnlog assembler: SchemaIncompatible: BatchSkipped: ")
    assert "turnlog.v1.BatchSkipped.batch_index: new without a default" in last
    assert "rule new_without_default" in last
    assert "turnlog schemas check" in last
