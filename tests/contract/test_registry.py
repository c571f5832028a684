"""The schema registry: its contract on the real server and the fake; Confluent's own client on the real one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.serialization import MessageField, SerializationContext

from tests.shared_servers import registry_launch
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child
from turnlog.infra.registry import HttpRegistry, MemoryRegistry, Registry, RegistryUnavailable, SchemaIncompatible
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.schemas.events.runs import RunConfigured
from turnlog.settings import RegistrySettings


def _record(*fields: dict[str, Any], name: str = "Ping") -> dict[str, Any]:
    return {"type": "record", "name": name, "namespace": "test", "fields": list(fields)}


TEXT = {"name": "text", "type": "string"}
COUNT = {"name": "count", "type": "long"}
COUNT_OR_0 = {**COUNT, "default": 0}


@pytest.fixture(params=["memory", "http"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[Registry]:
    opened: Registry = (
        MemoryRegistry()
        if request.param == "memory"
        else HttpRegistry(RegistrySettings(url=request.getfixturevalue("registry_url")))
    )
    yield opened
    await opened.close()


@pytest.fixture
async def http(registry_url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=registry_url) as client:
        yield client


@pytest.fixture
def subject() -> str:
    return f"subject-{uuid4().hex[:8]}"


def _body(schema: object) -> dict[str, str]:
    return {"schema": json.dumps(schema)}


async def test_a_schema_keeps_its_id_and_comes_back(registry: Registry, subject: str) -> None:
    first = await registry.register(subject, _record(TEXT))
    second = await registry.register(subject, _record(TEXT, COUNT_OR_0))
    assert first != second
    assert await registry.register(subject, _record(TEXT)) == first
    assert await registry.schema(first) == _record(TEXT)
    assert await registry.schema(second) == _record(TEXT, COUNT_OR_0)


async def test_one_schema_has_one_id_under_every_subject(registry: Registry, subject: str) -> None:
    assert await registry.register(subject, _record(TEXT)) == await registry.register(f"{subject}-2", _record(TEXT))


async def test_an_unknown_id_is_a_key_error(registry: Registry) -> None:
    with pytest.raises(KeyError):
        await registry.schema(10**6)


async def test_a_field_without_a_default_is_refused_as_incompatible(registry_url: str, subject: str) -> None:
    registry = HttpRegistry(RegistrySettings(url=registry_url))
    await registry.register(subject, _record(TEXT))
    with pytest.raises(SchemaIncompatible, match=r"test\.Ping\.count.*default"):
        await registry.register(subject, _record(TEXT, COUNT))
    await registry.close()


async def test_every_earlier_version_counts_not_only_the_last(registry_url: str, subject: str) -> None:
    """`extra` as a string can be read by the last version's reader, which lacks it, but the first wrote a long."""
    registry = HttpRegistry(RegistrySettings(url=registry_url))
    await registry.register(subject, _record(TEXT, {"name": "extra", "type": "long", "default": 0}))
    await registry.register(subject, _record(TEXT))
    with pytest.raises(SchemaIncompatible, match="long cannot be read as string"):
        await registry.register(subject, _record(TEXT, {"name": "extra", "type": "string", "default": ""}))
    await registry.close()


async def test_many_registrations_at_once_agree(registry_url: str, subject: str) -> None:
    registry = HttpRegistry(RegistrySettings(url=registry_url))
    assert len(set(await asyncio.gather(*(registry.register(subject, _record(TEXT)) for _ in range(10))))) == 1
    await registry.close()


async def test_a_registry_that_is_not_there_names_its_setting() -> None:
    registry = HttpRegistry(RegistrySettings(url=f"http://{HOST}:{free_ports(1)[0]}"))
    with pytest.raises(RegistryUnavailable, match=r"\[registry\] url"):
        await registry.schema(1)
    await registry.close()


async def test_versions_lookup_and_compatibility_answer_as_confluent_does(
    http: httpx.AsyncClient, subject: str
) -> None:
    one, two = _record(TEXT), _record(TEXT, COUNT_OR_0)
    first = (await http.post(f"/subjects/{subject}/versions", json=_body(one))).json()["id"]
    second = (await http.post(f"/subjects/{subject}/versions", json=_body(two))).json()["id"]
    assert subject in (await http.get("/subjects")).json()
    assert (await http.get(f"/subjects/{subject}/versions")).json() == [1, 2]
    latest = (await http.get(f"/subjects/{subject}/versions/latest")).json()
    assert latest == {"subject": subject, "id": second, "version": 2, "schema": json.dumps(two)}
    found = (await http.post(f"/subjects/{subject}", json=_body(one))).json()
    assert (found["id"], found["version"]) == (first, 1)
    path = f"/compatibility/subjects/{subject}/versions/latest"
    assert (await http.post(path, json=_body(one))).json()["is_compatible"] is True
    assert (await http.post(path, json=_body(_record({**TEXT, "type": "long"})))).json()["is_compatible"] is False


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/subjects/nobody/versions", None, 404, 40401),
        ("POST", "/subjects/nobody", _body(_record(TEXT)), 404, 40401),
        ("GET", "/subjects/{subject}/versions/7", None, 404, 40402),
        ("GET", "/subjects/{subject}/versions/x", None, 422, 42202),
        ("POST", "/subjects/{subject}", _body(_record(COUNT)), 404, 40403),
        ("GET", "/schemas/ids/999999", None, 404, 40403),
        ("POST", "/subjects/{subject}/versions", {"schema": "{not json"}, 422, 42201),
        ("POST", "/subjects/{subject}/versions", _body({"type": "record", "name": "X"}), 422, 42201),
        ("POST", "/subjects/{subject}/versions", {"schema": '"string"', "schemaType": "JSON"}, 422, 42201),
        ("POST", "/subjects/{subject}/versions", _body(_record(TEXT, COUNT)), 409, 409),
        ("PUT", "/config/{subject}", {"compatibility": "SOMETIMES"}, 422, 42203),
        ("GET", "/config/{subject}", None, 404, 40408),
        ("GET", "/associations/resources/-/topic", None, 404, 404),
    ],
)
async def test_refusals_carry_confluents_codes(
    http: httpx.AsyncClient, subject: str, method: str, path: str, body: Any, status: int, code: int
) -> None:
    await http.post(f"/subjects/{subject}/versions", json=_body(_record(TEXT)))
    answer = await http.request(method, path.format(subject=subject), json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)
    assert answer.json()["message"]


async def test_the_level_of_a_subject_decides(http: httpx.AsyncClient, subject: str) -> None:
    assert (await http.get("/config")).json() == {"compatibilityLevel": "BACKWARD_TRANSITIVE"}
    await http.post(f"/subjects/{subject}/versions", json=_body(_record(TEXT)))
    await http.put(f"/config/{subject}", json={"compatibility": "NONE"})
    assert (await http.get(f"/config/{subject}")).json() == {"compatibilityLevel": "NONE"}
    assert (await http.post(f"/subjects/{subject}/versions", json=_body(_record(COUNT)))).is_success
    await http.put(f"/config/{subject}", json={"compatibility": "FULL"})
    refused = await http.post(f"/subjects/{subject}/versions", json=_body(_record(TEXT, COUNT)))
    assert refused.status_code == 409


def test_confluents_serializer_and_our_codec_read_each_other(registry_url: str) -> None:
    context = SerializationContext("runs", MessageField.VALUE)
    schema = Schema(json.dumps(stored_schema("RunConfigured")), "AVRO")
    event = RunConfigured(event_id="e", run_id="r", settings=b"{}", settings_sha256="00", fold_version="1")
    names = [field.name for field in dataclasses.fields(RunConfigured)]
    datum = {name: getattr(event, name) for name in names}
    with SchemaRegistryClient({"url": registry_url}) as client:
        serialize = AvroSerializer(client, schema, conf={"subject.name.strategy": record_subject_name_strategy})
        theirs = serialize(datum, context)
        schema_id = client.register_schema("turnlog.v1.RunConfigured", schema)
        codec = Codec({name: schema_id if name == "RunConfigured" else 10**6 + n for n, name in enumerate(ALL)})
        assert theirs == codec.encode(event)
        assert codec.decode(codec.encode(event)) == event
        assert AvroDeserializer(client)(codec.encode(event), context) == datum


def test_confluents_client_sees_versions_compatibility_and_refusals(registry_url: str, subject: str) -> None:
    bad = Schema(json.dumps(_record(COUNT)), "AVRO")
    with SchemaRegistryClient({"url": registry_url}) as client:
        schema_id = client.register_schema(subject, Schema(json.dumps(_record(TEXT)), "AVRO"))
        assert client.get_latest_version(subject).schema_id == schema_id
        assert json.loads(client.get_schema(schema_id).schema_str or "") == _record(TEXT)
        assert not client.test_compatibility(subject, bad)
        with pytest.raises(SchemaRegistryError) as refused:
            client.register_schema(subject, bad)
        assert refused.value.http_status_code == 409


async def test_ids_and_versions_survive_a_kill_of_the_registry(kafka: str, tmp_path: Path) -> None:
    url, launch = registry_launch(kafka, f"{uuid4().hex[:8]}-", tmp_path / "registry.log")
    registry = HttpRegistry(RegistrySettings(url=url))
    first_life = Child(launch).start()
    first_life.wait_ready()
    ids = [await registry.register("s", _record(TEXT, name=name)) for name in ("One",)]
    ids.append(await registry.register("t", _record(TEXT, name="Two")))
    first_life.kill()
    second_life = Child(launch).start()
    try:
        second_life.wait_ready()
        assert ids == [1, 2]
        assert await registry.register("t", _record(TEXT, name="Two")) == 2
        assert await registry.register("u", _record(TEXT, name="Three")) == 3
        assert await registry.schema(1) == _record(TEXT, name="One")
    finally:
        await registry.close()
        second_life.stop()
