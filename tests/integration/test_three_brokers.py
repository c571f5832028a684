"""Three embedded brokers under a run's supervisor: any of them may be killed, stopped or robbed of its records."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from aiokafka.errors import KafkaError

from turnlog.infra.embedded import NotUp, OtherBrokers
from turnlog.infra.embedded.broker_cluster import Brokers
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.up import down, status_processes, up
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.admin import Admin
from turnlog.infra.kafka.producers import KafkaAppender
from turnlog.infra.kafka.security import Login
from turnlog.infra.log import LacksReplicas, LogUnreachable, Partition, ProducerDied, Record, TopicSpec
from turnlog.infra.run_folder import SETTINGS, resolve_endpoints
from turnlog.infra.topics_admin import check, check_internal
from turnlog.schemas import topics
from turnlog.settings import EngineSettings, KafkaSettings, LivenessSettings, RunSettings, Settings

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(420)]
NAMES = ("kafka-1", "kafka-2", "kafka-3")
PLACE = Partition(topics.TASKS.name, 0)
STRICT = Partition("strict", 0)
PATIENCE_S = 120.0
FENCED_S = 10.0
"""A broker that has been silent for so long is in no ISR, if that is enough (4 s) on a busy machine."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Settings of a run that is up, addresses filled in."""
    directory = tmp_path_factory.mktemp("runs") / "three"
    elsewhere = f"http://{HOST}:{free_ports(1)[0]}"
    settings = Settings(
        run=RunSettings(id="three", directory=str(directory)),
        kafka=KafkaSettings(brokers=3, heap_mb=192),
        engine=EngineSettings(urls=(elsewhere,)),
        liveness=LivenessSettings(servers_s=0.0),  # who is stopped here is let go on here
    )
    up(settings, (), say=lambda _: None)
    yield resolve_endpoints(settings)
    with contextlib.suppress(NotUp):
        down(settings, say=lambda _: None)


@pytest.fixture
async def log(run: Settings) -> AsyncIterator[KafkaLog]:
    """On all three, each of which holds everything."""
    found = KafkaLog.of(run.kafka)
    await full(run)
    yield found
    await found.close()


async def struck(run: Settings, name: str, signal_number: signal.Signals) -> int:
    """Pid of a broker that was given the signal."""
    pid = next(int(child["pid"]) for child in status_processes(run) if child["name"] == name)
    assert pid, name
    os.kill(pid, signal_number)
    if signal_number is signal.SIGKILL:
        async with asyncio.timeout(PATIENCE_S):
            while (Path("/proc") / str(pid) / "cmdline").exists():  # noqa: ASYNC110 - it is another's child
                await asyncio.sleep(0.05)
    return pid


async def partitions(run: Settings) -> list[dict[str, list[int]]]:
    """Of all topics, as some broker describes them."""
    admin = Admin(bootstrap_servers=run.kafka.bootstrap, **Login(run.kafka).options())
    try:
        await admin.start()
        return [one for topic in await admin.describe_topics() for one in topic["partitions"]]
    finally:
        await admin.close()


async def full(run: Settings) -> None:
    """Wait until every broker serves, and every partition has all of its replicas in sync."""
    async with asyncio.timeout(PATIENCE_S):
        while not await whole(run):  # noqa: ASYNC110 - states and metadata can only be asked
            await asyncio.sleep(0.2)


async def whole(run: Settings) -> bool:
    states = [child["state"] for child in status_processes(run) if child["name"] in NAMES]
    with contextlib.suppress(KafkaError):  # one that has just come back may turn clients away
        return states == ["ready"] * 3 and all(len(one["isr"]) == 3 for one in await partitions(run))
    return False


async def leader(run: Settings, place: Partition) -> int:
    """Number of the broker that leads it."""
    admin = Admin(bootstrap_servers=run.kafka.bootstrap, **Login(run.kafka).options())
    try:
        await admin.start()
        [topic] = await admin.describe_topics([place.topic])
        return next(int(one["leader"]) for one in topic["partitions"] if one["partition"] == place.number)
    finally:
        await admin.close()


async def waits(port: int, why: str) -> str:
    """What a role says that it waits for, once that holds `why`; empty: once it is ready."""
    async with httpx.AsyncClient() as http, asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                said = (await http.get(f"http://{HOST}:{port}/readyz")).json()
                if said["ready"] if not why else why in str(said["waiting"]):
                    return str(said["waiting"])
            await asyncio.sleep(0.2)  # it can only be asked


@contextlib.asynccontextmanager
async def heard(logger: str, words: str) -> AsyncIterator[None]:
    """Leaving waits until these words were logged."""
    found = asyncio.Event()

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if words in record.getMessage():
                found.set()

    listening = Listening()
    logging.getLogger(logger).addHandler(listening)
    try:
        yield
        async with asyncio.timeout(PATIENCE_S):
            await found.wait()
    finally:
        logging.getLogger(logger).removeHandler(listening)


async def append(log: KafkaLog, values: range) -> None:
    async with log.appender() as appender:
        await asyncio.gather(*[appender.append(topics.TASKS.name, b"key", str(number).encode()) for number in values])


async def read(log: KafkaLog, *places: Partition) -> list[Record]:
    ends = await log.end_offsets(places)
    found: list[Record] = []
    async with log.reader() as reader:
        reader.assign(dict.fromkeys(places, 0))
        while any(reader.position(place) < ends[place] for place in places):
            found += await reader.poll()
    return found


@pytest.mark.long
async def test_three_brokers_hold_three_copies_of_everything(run: Settings, log: KafkaLog) -> None:
    """The suite checks how many copies topics have on one broker (test_topics_admin.py)."""
    assert len(run.kafka.bootstrap.split(",")) == 3
    states = {child["name"]: child["state"] for child in status_processes(run)}
    assert states == dict.fromkeys(NAMES, "ready") | {"store": "ready", "registry": "ready", "topics": "done"}
    async with log.transactor("some") as transactor:
        await transactor.begin()
        await transactor.commit()
    assert await check(log, run) == []
    assert check_internal(await log.internal_topics(), run) == []
    assert all(len(one["replicas"]) == 3 for one in await partitions(run))


@pytest.mark.long  # the suite kills one broker that comes back (test_embedded_broker.py)
async def test_what_was_acknowledged_outlives_a_broker_and_its_folder(run: Settings, log: KafkaLog) -> None:
    victim = NAMES[await leader(run, PLACE) - 1]
    await append(log, range(100))
    stopped = await struck(run, victim, signal.SIGSTOP)
    await append(log, range(100, 200))
    await asyncio.sleep(FENCED_S)
    shutil.rmtree(Path(run.run.directory) / victim / "data")
    os.kill(stopped, signal.SIGKILL)
    await full(run)
    found = await read(log, *(Partition(topics.TASKS.name, number) for number in range(run.kafka.rollouts)))
    assert sorted(int(record.value) for record in found) == list(range(200))


async def takes_appends(log: KafkaLog) -> bool:
    with contextlib.suppress(LacksReplicas):
        await log.check_replicas("strict")
        return True
    return False


@pytest.mark.long  # the suite has a broker that is away amid a call (test_kafka_faults.py)
async def test_what_the_log_cannot_take_is_held_or_ends_uncommitted(run: Settings, log: KafkaLog) -> None:
    impatient = KafkaLog(run.kafka.bootstrap, login=Login(run.kafka), answer_s=10.0, close_s=3.0)
    await log.create_topics([TopicSpec("strict", 1, 3, {"min.insync.replicas": "3"})])
    await log.check_replicas("strict")
    follower = NAMES[await leader(run, STRICT) % 3]
    async with impatient.appender() as appender, impatient.transactor("some") as transactor:
        await transactor.begin()
        stopped = await struck(run, follower, signal.SIGSTOP)
        async with heard("turnlog.infra.kafka.producers", "still waiting"):
            held = asyncio.create_task(appender.append("strict", b"key", b"held"))
        with pytest.raises(
            LacksReplicas, match=r"1 partitions .* strict\[0\] .* 2 of 3 replicas .*insync.replicas is 3; brokers away"
        ):
            await log.check_replicas("strict")
        await transactor.send("strict", 0, b"key", b"uncommitted")
        with pytest.raises(LogUnreachable):
            await transactor.commit()
        assert not held.done()
        os.kill(stopped, signal.SIGCONT)
        await held
    await impatient.close()
    async with asyncio.timeout(PATIENCE_S):
        while not await takes_appends(log):  # noqa: ASYNC110 - it can only be asked
            await asyncio.sleep(0.2)
    async with log.transactor("some"):  # aborts what was left open
        assert [record.value for record in await read(log, STRICT)] == [b"held"]


@pytest.mark.long
async def test_a_role_waits_for_replicas_and_says_so(run: Settings, log: KafkaLog) -> None:
    """The suite has a role that waits for a log that is away (test_starting.py)."""
    [port] = free_ports(1)
    folder = Path(run.run.directory)
    role = Launch(
        name="assembler-0",
        argv=(sys.executable, "-m", "turnlog.cli", "--settings", str(folder / SETTINGS), "role", "assembler"),
        log=folder / "logs/assembler-0.log",
        env={"TURNLOG_HEALTH_PORT": str(port)},
    )
    stopped = [await struck(run, name, signal.SIGSTOP) for name in NAMES[:2]]
    child = Child(role).start()
    try:
        why = await waits(port, "min.insync.replicas")
        assert "brokers away or behind: 1, 2" in why
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        await waits(port, "")
    finally:
        child.stop()


async def cut_off(log: KafkaLog) -> None:
    async with log.appender() as appender:
        assert isinstance(appender, KafkaAppender)
        appender._producer._sender.sender_task.cancel()  # as a cancelled future within aiokafka does
        await asyncio.Event().wait()


async def test_who_holds_a_producer_that_sends_no_more_ends(kafka: str) -> None:
    log = KafkaLog(kafka)
    with pytest.raises(ProducerDied, match="has stopped sending"):
        await cut_off(log)
    await log.close()


def test_a_log_keeps_its_number_of_brokers(tmp_path: Path) -> None:
    for folder in ("kafka-1", "kafka-2", "kafka-3"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "server.properties").touch()
    assert [broker.directory.name for broker in Brokers(tmp_path, count=3).all] == list(NAMES)
    with pytest.raises(OtherBrokers, match=r"log of 3 broker\(s\) .* but \[kafka\] brokers is 1: set it to 3"):
        Brokers(tmp_path, count=1)
