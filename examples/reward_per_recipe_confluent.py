"""The same without turnlog: confluent-kafka and its schema registry client read the topics as they are.

python examples/reward_per_recipe_confluent.py BOOTSTRAP REGISTRY_URL [TOPIC_PREFIX] reads to the end of the log.
"""

import sqlite3
import sys

from confluent_kafka import Consumer, KafkaError
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

if len(sys.argv) < 3:
    raise SystemExit(__doc__)
bootstrap, registry, prefix = [*sys.argv[1:4], ""][:3]
deserialize = AvroDeserializer(SchemaRegistryClient({"url": registry}))
consumer = Consumer(
    {
        "bootstrap.servers": bootstrap,
        "group.id": f"{prefix}reward-per-recipe-confluent",
        "isolation.level": "read_committed",  # samples of a transaction that was aborted were never there
        "auto.offset.reset": "earliest",
        "enable.auto.offset.store": False,  # stored below, once the row is written
        "enable.partition.eof": True,
    }
)
db = sqlite3.connect("rewards-confluent.db")
db.execute("CREATE TABLE IF NOT EXISTS rewards (rollout_id PRIMARY KEY, recipe, reward)")
consumer.subscribe([f"{prefix}segment-samples"])
unread: set[int] | None = None
while unread is None or unread:
    messages = consumer.consume(500, 1.0)
    if unread is None and consumer.assignment():
        unread = {place.partition for place in consumer.assignment()}
    for message in messages:
        if message.error():
            if message.error().code() != KafkaError._PARTITION_EOF:
                raise SystemExit(message.error())
            unread = (unread or set()) - {message.partition()}
        elif dict(message.headers())["record"] == b"SegmentSample":
            sample = deserialize(message.value(), SerializationContext(message.topic(), MessageField.VALUE))
            row = (sample["rollout_id"], sample["recipe"], sample["reward"])
            db.execute("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?)", row)
    db.commit()  # one wait for the disk, not one per row
    for message in messages:
        if not message.error():
            consumer.store_offsets(message)
consumer.close()
for row in db.execute("SELECT recipe, count(*), round(avg(reward), 4) FROM rewards GROUP BY recipe"):
    print(*row)
