"""Generate AsyncAPI documents of the log from the catalogue, such as docs/asyncapi.yaml.

Channels are topics, messages are records with their Avro schemas, operations are the rights of each role and verb.
Source: AsyncAPI 3.0.0 and its Kafka bindings 0.5.0.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import yaml

from turnlog import __version__
from turnlog.infra.archive import archive_name
from turnlog.infra.event_log import CODE_RECORDS
from turnlog.infra.log import TopicSpec
from turnlog.infra.topics_admin import ACCESS, VERBS, Access, specs
from turnlog.names import CODE_HEADER, OUTPUT_TOKENS_HEADER, RECORD_HEADER, REQUEUED_HEADER, WRITER_HEADER
from turnlog.schemas.avsc import NAMESPACE, field_types, stored_schema
from turnlog.schemas.events import ALL, TokenSnapshot
from turnlog.schemas.topics import BY_NAME, TOPIC_OF, Topic
from turnlog.settings import Settings

Node = dict[str, Any]
BINDING = "0.5.0"
NUMBERS = ("retention.ms", "retention.bytes", "max.message.bytes", "min.insync.replicas")
"""Keys of a topic's configuration that the binding has as numbers and Kafka as text."""
ABOUT = f"""\
Every event of a run of turnlog, as Avro records of namespace `{NAMESPACE}` in the Confluent wire format: byte 0, 4-byte
big-endian schema id, Avro body. The registry's subject is the record's short name. Read with
`isolation.level = read_committed`, and partition by murmur2 of the key.

Operations are the rights of each role, and of verbs that people run, on a whole topic; of a topic's records a role
writes those that are its own. docs/events.md says what the fields and ids mean, docs/attach.md how to read along.
"""


def asyncapi(settings: Settings) -> Node:
    """Return the document for a cluster, with the addresses, prefix, partition and replica counts of the settings."""
    of_topics = {spec.name: spec for spec in specs(settings)}
    return {
        "asyncapi": "3.0.0",
        "id": "urn:turnlog",
        "info": {
            "title": "turnlog",
            "version": __version__,
            "description": ABOUT,
            "license": {"name": "Apache 2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": "avro/binary",
        "servers": dict(_servers(settings)),
        "channels": {
            name: _channel(BY_NAME[name], spec, settings.kafka.prefix) for name, spec in of_topics.items()
        },
        "operations": {
            name: operation
            for role, access in ACCESS.items()
            for name, operation in _operations(role, access, settings)
        },
        "components": {"messages": {record: _message(record) for record in ALL}},
    }  # fmt: skip


def asyncapi_page(settings: Settings) -> str:
    """Render the document as YAML."""
    text: str = yaml.dump(
        asyncapi(settings), Dumper=_Whole, sort_keys=False, allow_unicode=True, width=150, default_flow_style=None
    )
    return f"# Generated from the catalogue: `turnlog schemas asyncapi`.\n{text}"


class _Whole(yaml.SafeDumper):  # type: ignore[misc]  # it ships no types
    """Writes no anchors, since each message should be readable alone, and keeps multi-line texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Represent a string, in block style if it has several lines."""
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Whole.add_representer(str, _Whole.represent_str)


def _servers(settings: Settings) -> Iterator[tuple[str, Node]]:
    secured = settings.kafka.security_protocol != "PLAINTEXT"
    registry = {"schemaRegistryUrl": settings.registry.url} if settings.registry.url else {}
    for number, host in enumerate((settings.kafka.bootstrap or "localhost:9092").split(",")):
        yield (
            f"kafka-{number}",
            {
                "host": host.strip(),
                "protocol": "kafka-secure" if secured else "kafka",
                "description": f"[kafka] bootstrap, {settings.kafka.security_protocol}",
                "bindings": {"kafka": {**registry, "schemaRegistryVendor": "confluent", "bindingVersion": BINDING}},
            },
        )


def _channel(topic: Topic, spec: TopicSpec, prefix: str) -> Node:
    places = "one partition" if topic.partitions == "one" else f"[kafka] {topic.partitions} partitions"
    config = {name: int(value) if name in NUMBERS else value for name, value in spec.config.items()}
    return {
        "address": prefix + topic.name,
        "description": f"Keyed by {topic.key}, in {places}.",
        "messages": {record: {"$ref": f"#/components/messages/{record}"} for record in topic.records},
        "bindings": {
            "kafka": {
                "topic": prefix + topic.name,
                "partitions": spec.partitions,
                "replicas": spec.replication,
                "topicConfiguration": config | {"cleanup.policy": spec.config["cleanup.policy"].split(",")},
                "bindingVersion": BINDING,
            }
        },
    }


def _operations(role: str, access: Access, settings: Settings) -> Iterator[tuple[str, Node]]:
    """Yield an operation for each topic and direction."""
    who = f"turnlog {VERBS.get(role, f'role {role}')}"
    for topic in access.receives:
        consumes = access.group is not None and topic in access.consumes
        operation = {"action": "receive", "channel": {"$ref": f"#/channels/{topic.name}"}, "summary": who}
        if consumes:
            operation["bindings"] = {"kafka": {"groupId": _group(access, settings), "bindingVersion": BINDING}}
        yield f"{role}.{'consumes' if consumes else 'reads'}.{topic.name}", operation
    for topic in dict.fromkeys(access.writes):
        yield f"{role}.writes.{topic.name}", {
            "action": "send", "channel": {"$ref": f"#/channels/{topic.name}"}, "summary": who,
        }  # fmt: skip


def _group(access: Access, settings: Settings) -> Node:
    """Return the schema of the consumer group whose committed offsets give the role's progress."""
    assert access.group is not None
    said = settings.kafka.prefix + access.group.format(
        run=settings.run.id, archive=archive_name(settings), engine="{engine}"
    )
    return {"type": "string", **({"examples": [said]} if said.endswith("{engine}") else {"const": said})}


def _message(record: str) -> Node:
    topic, cls = TOPIC_OF[record], ALL[record]
    key_is_text = field_types(cls)[topic.key] is not bytes
    headers: Node = {
        RECORD_HEADER: {"type": "string", "const": record},
        WRITER_HEADER: {"type": "string", "description": "Instance of the role that wrote it."},
        REQUEUED_HEADER: {"type": "string", "description": "event_id of the DeadLetter that it was put back from."},
    }
    if record in CODE_RECORDS:
        headers[CODE_HEADER] = {
            "type": "string",
            "description": "Version of turnlog that wrote it; none in older records.",
        }
    if record == TokenSnapshot.__name__:
        headers[OUTPUT_TOKENS_HEADER] = {"type": "string", "pattern": "^[0-9]+$"}
    return {
        "name": record,
        "summary": " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()),
        "headers": {"type": "object", "properties": headers, "required": [RECORD_HEADER, WRITER_HEADER]},
        "payload": {
            "schemaFormat": "application/vnd.apache.avro;version=1.9.0",
            "schema": stored_schema(record),
        },
        "bindings": {
            "kafka": {
                "key": {"type": "string", "description": f"{topic.key}, {'in UTF-8' if key_is_text else 'its bytes'}"},
                "schemaIdLocation": "payload",
                "schemaIdPayloadEncoding": "confluent",
                "schemaLookupStrategy": "RecordNameStrategy",
                "bindingVersion": BINDING,
            }
        },
    }


if __name__ == "__main__":
    print(asyncapi_page(Settings()), end="")
