"""The log on Apache Kafka: `KafkaLog` implements `infra.log.Log` with aiokafka."""

from turnlog.infra.kafka.log_client import KafkaLog as KafkaLog
