"""The embedded Apache Kafka: it keeps what it acknowledged, and says what keeps it from starting."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from turnlog.infra.embedded import BrokerDied, PortTaken
from turnlog.infra.embedded.broker import CLUSTER_FILE, Broker, cluster_id
from turnlog.infra.embedded.broker_cluster import FILES, FILES_OF_A_PARTITION
from turnlog.infra.embedded.ports import HOST, free_ports, listens
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Partition, TopicSpec
from turnlog.infra.topics_admin import specs
from turnlog.settings import KafkaSettings, Settings

pytestmark = pytest.mark.kafka
TOPIC = "kept"
COUNT = 200


async def _append(bootstrap: str, first: int) -> None:
    log = KafkaLog(bootstrap)
    try:
        if TOPIC not in await log.topics():
            await log.create_topics([TopicSpec(TOPIC, 1, 1, {})])
        async with log.appender() as appender:
            for number in range(first, first + COUNT):
                await appender.append(TOPIC, b"key", str(number).encode())
    finally:
        await log.close()


def test_a_broker_keeps_its_log_in_a_folder_of_any_name_under_any_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    with Broker(tmp_path / "läufe-字-𝛼") as broker:
        assert listens(broker.port)
    assert list((tmp_path / "läufe-字-𝛼" / "data").glob("*"))
    assert [path.name for path in tmp_path.iterdir()] == ["läufe-字-𝛼"], "Java has made a folder of another name"


async def _values(bootstrap: str) -> list[int]:
    log, partition = KafkaLog(bootstrap), Partition(TOPIC, 0)
    try:
        end = (await log.end_offsets([partition]))[partition]
        found: list[int] = []
        async with log.reader() as reader:
            reader.assign({partition: 0})
            while reader.position(partition) < end:
                found += [int(record.value) for record in await reader.poll()]
        return found
    finally:
        await log.close()


async def test_what_was_acknowledged_is_there_after_a_kill_a_stop_and_on_another_port(tmp_path: Path) -> None:
    with Broker(tmp_path / "kafka") as broker:
        address = broker.bootstrap
        await _append(address, 0)
        await _left_while_away(broker)
        assert not listens(broker.port)
        assert broker.start() == address
        assert await _values(address) == list(range(COUNT))
        await _append(address, COUNT)
        cluster = await _cluster(address)
        assert broker.stop() == 143
    with Broker(tmp_path / "kafka") as reopened:
        assert await _values(reopened.bootstrap) == list(range(2 * COUNT))
        assert await _cluster(reopened.bootstrap) == cluster == (tmp_path / "kafka" / CLUSTER_FILE).read_text()


async def _left_while_away(broker: Broker) -> None:
    """A reader whose broker is killed meets silence, and is left as any other."""
    log, partition = KafkaLog(broker.bootstrap), Partition(TOPIC, 0)
    try:
        async with log.reader() as reader:
            reader.assign({partition: COUNT})
            assert not await reader.poll(timeout_s=0.5)
            broker.kill()
            assert not await reader.poll(timeout_s=1.0)  # its fetches fail and pause, by turns
    finally:
        await log.close()


async def _cluster(address: str) -> str:
    log = KafkaLog(address)
    try:
        return await log.cluster()
    finally:
        await log.close()


def test_each_cluster_has_an_id_of_its_own_and_one_of_an_earlier_release_keeps_its(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    ours = cluster_id(tmp_path / "ours")
    assert cluster_id(tmp_path / "ours") == ours
    assert cluster_id(tmp_path) != ours
    assert (len(ours), ours[0]) == (22, "d")
    metadata = tmp_path / "three" / "kafka-2" / "metadata"
    metadata.mkdir(parents=True)
    (metadata / "meta.properties").write_text("#\nversion=1\ncluster.id=dHVybmxvZy1lbWJlZGRlZA\nnode.id=2\n")
    assert cluster_id(tmp_path / "three") == "dHVybmxvZy1lbWJlZGRlZA"


def test_a_taken_port_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"{port}.*\[kafka\] port"):
            Broker(tmp_path / "kafka", port=port)
    assert not (tmp_path / "kafka").exists()


def test_a_port_taken_since_is_told_at_the_start(tmp_path: Path) -> None:
    broker = Broker(tmp_path / "kafka", port=free_ports(1)[0])
    with socket.create_server((HOST, broker.port)), pytest.raises(PortTaken, match=r"\[kafka\] port"):
        broker.start()


def test_a_broker_that_cannot_open_its_data_dies_with_the_tail_of_its_log(tmp_path: Path) -> None:
    """Its folder was formatted for another node."""
    broker = Broker(tmp_path / "kafka", log=tmp_path / "broker.log")
    broker.launch()
    stored = tmp_path / "kafka" / "data" / "meta.properties"
    stored.write_text(stored.read_text().replace("node.id=1", "node.id=7"))
    with pytest.raises(BrokerDied, match=r"(?s)\[kafka\] port.*node.id") as died:
        broker.start()
    assert str(tmp_path / "broker.log") in str(died.value)
    assert not listens(broker.port)


@pytest.mark.long  # the suite refuses by the same sum (test_embedded_descriptors.py)
async def test_a_broker_opens_no_more_files_than_a_start_reckons_with(tmp_path: Path) -> None:
    kafka = KafkaSettings(groups=16, rollouts=16)
    topics = specs(Settings(kafka=kafka))
    with Broker(tmp_path / "kafka") as broker:
        log = KafkaLog(broker.bootstrap)
        try:
            await log.create_topics(topics)
            async with log.transactor("test") as transactor:  # an index of aborted transactions for each partition
                await transactor.begin()
                for topic in topics:
                    for number in range(topic.partitions):
                        await (await transactor.send(topic.name, number, b"key", b"value"))
                await transactor.abort()
            async with log.appender() as appender:
                for topic in topics:
                    for number in range(topic.partitions):
                        await appender.append(topic.name, b"key", b"value", partition=number)
            opened = len(os.listdir(f"/proc/{broker.pid}/fd"))
        finally:
            await log.close()
    partitions = sum(topic.partitions for topic in topics)
    assert 2 * partitions < opened < FILES + FILES_OF_A_PARTITION * partitions
