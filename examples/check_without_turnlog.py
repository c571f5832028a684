"""What anybody can check with topics and store alone: confluent-kafka, pyarrow, minio, and what docs/attach.md says.

python examples/check_without_turnlog.py BOOTSTRAP REGISTRY_URL STORE BUCKET [TOPIC_PREFIX], the store's keys in
AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, passwords of the others in KAFKA_PASSWORD and REGISTRY_PASSWORD where they
ask for them. Reads to the end of the log and says how much of each kind held.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from urllib.parse import urlsplit

import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from minio import Minio

if len(sys.argv) < 5:
    raise SystemExit(__doc__)
bootstrap, registry, endpoint, bucket, prefix = [*sys.argv[1:6], ""][:5]
# Servers that `turnlog up` starts know a user `turnlog`: the passwords are in kafka.key and registry.key of the run.
password, registry_password = os.environ.get("KAFKA_PASSWORD"), os.environ.get("REGISTRY_PASSWORD")
sasl = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "turnlog"}
login = sasl | {"sasl.password": password} if password else {}
basic = {"basic.auth.user.info": f"turnlog:{registry_password}"} if registry_password else {}
deserialize = AvroDeserializer(SchemaRegistryClient({"url": registry, **basic}))
place, keys = urlsplit(endpoint), (os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
store = Minio(place.netloc, *keys, secure=place.scheme == "https", region="us-east-1")


def records(topic: str) -> Iterator[tuple[str, dict]]:
    """(name, record) of a topic, each partition to its end. A marker of a transaction takes an offset of its own and is
    never delivered: the end is what the client reports as such, not an offset."""
    settings = {"group.id": "nobody", "isolation.level": "read_committed", "enable.partition.eof": True}
    consumer = Consumer({"bootstrap.servers": bootstrap, "enable.auto.commit": False, **login, **settings})
    unread = set(consumer.list_topics(prefix + topic).topics[prefix + topic].partitions)
    consumer.assign([TopicPartition(prefix + topic, number, OFFSET_BEGINNING) for number in unread])
    while unread:
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error():
            if message.error().code() != KafkaError._PARTITION_EOF:
                raise SystemExit(message.error())
            unread.discard(message.partition())
            continue
        context = SerializationContext(message.topic(), MessageField.VALUE)
        yield dict(message.headers())["record"].decode(), deserialize(message.value(), context)
    consumer.close()


def payload(value: bytes | dict) -> bytes:
    """Bytes that stand in the record, or those that its BlobRef names."""
    if isinstance(value, bytes):
        return value
    with store.get_object(bucket, f"{folder}blobs/{value['sha256'][:2]}/{value['sha256']}") as answer:
        content = answer.read()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (value["size"], value["sha256"])
    return content


def digest(*about: str | int) -> str:
    """An id."""
    return hashlib.sha256(json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()[:32]


FIRST = (
    "sample_ids", "group_ids", "session_ids", "rollout_index", "segment_index", "lengths", "token_ids", "trained",
    "logprobs", "advantages", "weight_divisor", "temperature", "rewards", "version_min", "version_max",
)  # fmt: skip
COLUMNS = {1: FIRST, 2: (*FIRST, "old_cache"), 3: (*FIRST, "old_cache", "engine_kind")}


def rows_sha256(file: bytes, rows_version: int) -> str:
    table = pa.ipc.open_file(pa.BufferReader(file)).read_all().combine_chunks()
    hashed = hashlib.sha256()
    for name in COLUMNS[rows_version]:
        if name == "lengths":  # not in the file: how long the lists are, as int32
            column = table["token_ids"].combine_chunks().value_lengths()
        elif name not in table.column_names:  # optional, and without bytes in the hash
            column = pa.array([], pa.uint8())
        else:
            column = table[name].combine_chunks()
        if pa.types.is_string(column.type):
            texts = [text.encode() for text in column.to_pylist()]
            content = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        else:
            numbers = column.flatten() if pa.types.is_list(column.type) else column
            content = numbers.to_numpy(zero_copy_only=False).tobytes()
        for part in (name.encode(), content):
            hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


folders = (event["blob_folder"] for kind, event in records("runs") if kind == "RunConfigured")
folder = f"{name}/" if (name := next(folders, "")) else ""
batches = 0
for kind, manifest in records("sample-batches"):
    if kind == "SampleBatchFormed":
        assert rows_sha256(payload(manifest["file"]), manifest.get("rows_version", 1)) == manifest["rows_sha256"]
        assert manifest["event_id"] == digest(kind, manifest["run_id"], manifest["batch_index"])
        batches += 1
print(batches, "batch files hash to what their manifests say")

turns, asked = 0, {}
for kind, event in records("agent.turns"):
    session, turn = event["session_id"], event["turn"]
    assert event["event_id"] == digest(kind, session, turn["epoch"], turn["index"])
    for number, call in enumerate(json.loads(payload(event["response"])).get("tool_calls") or ()):
        assert call["id"] == digest("call", session, turn["epoch"], turn["index"], number, "agent")
        asked[call["id"]] = turn
    turns += 1
print(turns, "turns have the ids that they should")

effective: dict[str, dict] = {}
for kind, event in records("agent.tool-results"):
    if kind == "ToolCallCompleted":
        first = effective.setdefault(event["call_id"], event)
        assert not event["cached"] or {**event, "cached": False} == first
assert effective.keys() <= asked.keys()
print(len(effective), "answered calls belong to a turn")
