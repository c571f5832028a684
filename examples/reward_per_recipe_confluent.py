"""The same without turnlog: confluent-kafka and its schema registry client read the topics as they are.

python examples/reward_per_recipe_confluent.py BOOTSTRAP REGISTRY_URL [TOPIC_PREFIX] reads to the end of the log,
with passwords in KAFKA_PASSWORD and REGISTRY_PASSWORD where the servers ask for them.
"""

import os
import sqlite3
import sys

from confluent_kafka import Consumer, KafkaError
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

if len(sys.argv) < 3:
    raise SystemExit(__doc__)
bootstrap, registry, prefix = [*sys.argv[1:4], ""][:3]
# Servers that `turnlog up` starts know a user `turnlog`: the passwords are in kafka.key and registry.key of the run.
password, registry_password = os.environ.get("KAFKA_PASSWORD"), os.environ.get("REGISTRY_PASSWORD")
sasl = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "turnlog"}
login = sasl | {"sasl.password": password} if password else {}
basic = {"basic.auth.user.info": f"turnlog:{registry_password}"} if registry_password else {}
deserialize = AvroDeserializer(SchemaRegistryClient({"url": registry, **basic}))
consumer = Consumer(
    {
        "bootstrap.servers": bootstrap,
        "group.id": f"{prefix}reward-per-recipe-confluent",
        "isolation.level": "read_committed",  # samples of a transaction that was aborted were never there
        "auto.offset.reset": "earliest",
        "enable.auto.offset.store": False,  # stored below, once the row is written
        "enable.partition.eof": True,
        **login,
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
