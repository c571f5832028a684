"""docs/asyncapi.yaml says what its specification's own schema takes, and what goes over the log."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import fastavro
import jsonschema
import pytest
import yaml

from tests.each import each
from tests.fakes.memory_log import MemoryLog
from turnlog.asyncapi_page import asyncapi, asyncapi_page
from turnlog.infra.event_log import EventLog
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.topics_admin import ACCESS
from turnlog.names import REQUEUED_HEADER
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import ALL
from turnlog.schemas.releases import example
from turnlog.schemas.topics import BY_NAME, TOPIC_OF
from turnlog.settings import Settings, from_tables

SPECIFICATION = json.loads((Path(__file__).parents[2] / "asyncapi/3.0.0.json").read_text())
DOCUMENT = asyncapi(Settings())
TEAM = {"kafka": {"bootstrap": "k-0:9092,k-1:9092", "prefix": "a.", "groups": 64}, "registry": {"url": "http://r"}}


def test_the_document_is_what_the_specification_takes() -> None:
    jsonschema.Draft7Validator(SPECIFICATION).validate(yaml.safe_load(asyncapi_page(Settings())))


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("channels", "tasks", "bindings", "kafka", "partitions"), "four"),
        (("channels", "tasks", "bindings", "kafka", "topicConfiguration", "cleanup.policy"), ["keep"]),
        (("components", "messages", "EngineGone", "payload", "schema", "type"), "recrod"),
        (("operations", "runner.consumes.tasks", "action"), "publish"),
    ],
)
def test_the_specification_refuses_what_it_does_not_take(path: tuple[str, ...], wrong: object) -> None:
    document = copy.deepcopy(DOCUMENT)
    node = document
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = wrong
    assert not jsonschema.Draft7Validator(SPECIFICATION).is_valid(document)


def test_every_topic_record_and_right_stands_in_it_once() -> None:
    assert set(DOCUMENT["channels"]) == set(BY_NAME)
    assert {name for channel in DOCUMENT["channels"].values() for name in channel["messages"]} == set(ALL)
    for direction, action in (("receives", "receive"), ("writes", "send")):
        said = {
            (name.partition(".")[0], each["channel"]["$ref"].removeprefix("#/channels/"))
            for name, each in DOCUMENT["operations"].items()
            if each["action"] == action
        }
        assert said == {(role, topic.name) for role, access in ACCESS.items() for topic in getattr(access, direction)}


def test_each_reference_leads_to_a_node() -> None:
    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            return [node["$ref"]] if "$ref" in node else [at for one in node.values() for at in references(one)]
        return [at for one in node for at in references(one)] if isinstance(node, list) else []

    found = references(DOCUMENT)
    assert len(found) > len(ALL)
    for at in found:
        node = DOCUMENT
        for part in at.removeprefix("#/").split("/"):
            node = node[part]


@each("record", ALL)
async def test_a_record_reads_as_its_message_says(record: str) -> None:
    """Headers, key and value of an event as the log's clients write them."""
    message, event = DOCUMENT["components"]["messages"][record], example(ALL[record])
    events = EventLog(MemoryLog(), MemoryRegistry(), Codec({record: 1}), "gateway-1")
    headers = {name: value.decode() for name, value in (*events.headers(event), (REQUEUED_HEADER, b"an id"))}
    jsonschema.Draft7Validator({**message["headers"], "additionalProperties": False}).validate(headers)
    read = fastavro.schemaless_reader(
        io.BytesIO(events.codec.encode(event)[5:]), fastavro.parse_schema(message["payload"]["schema"]), None
    )
    assert isinstance(read, dict)
    key = message["bindings"]["kafka"]["key"]["description"].partition(",")[0]
    value = read[key]
    assert TOPIC_OF[record].key_of(event) == (value if isinstance(value, bytes) else value.encode())


def test_the_document_of_a_cluster_has_its_addresses_prefix_and_counts() -> None:
    document = asyncapi(from_tables(TEAM, {}, source="test"))
    assert [server["host"] for server in document["servers"].values()] == ["k-0:9092", "k-1:9092"]
    assert document["channels"]["agent.turns"]["address"] == "a.agent.turns"
    kafka = document["channels"]["agent.turns"]["bindings"]["kafka"]
    assert (kafka["partitions"], kafka["topicConfiguration"]["cleanup.policy"]) == (64, ["delete"])
    group = document["operations"]["batcher.consumes.segment-samples"]["bindings"]["kafka"]["groupId"]
    assert group["const"] == "a.local.batcher"
    jsonschema.Draft7Validator(SPECIFICATION).validate(document)
