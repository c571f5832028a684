#!/bin/sh
# KAFKA_A_B=v becomes a.b=v (`__` is `_`, `___` is `-`); the folder is formatted once, for CLUSTER_ID.
set -euf
java="/opt/java/bin/java ${KAFKA_HEAP_OPTS:--Xmx256m} -cp /opt/kafka/libs/*"
env | grep '^KAFKA_' | grep -v '^KAFKA_HEAP_OPTS=' | while IFS='=' read -r name value; do
  key=$(printf %s "${name#KAFKA_}" | tr A-Z a-z | sed 's/___/-/g; s/__/\x01/g; s/_/./g; s/\x01/_/g')
  printf '%s=%s\n' "$key" "$value"
done > /tmp/server.properties
$java kafka.tools.StorageTool format --ignore-formatted -t "$CLUSTER_ID" -c /tmp/server.properties
exec $java kafka.Kafka /tmp/server.properties
