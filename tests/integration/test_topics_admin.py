"""`turnlog topics apply` and `check` against a real Apache Kafka."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest

from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Commit, Log, Partition, TopicSpec
from turnlog.infra.topics_admin import TopicMismatch, apply, check, check_internal, specs
from turnlog.schemas.topics import BY_NAME
from turnlog.settings import KafkaSettings, Settings
from turnlog.verbs.catalogue import apply_or_check

pytestmark = pytest.mark.kafka


@pytest.fixture
def configured(kafka: str) -> Settings:
    return Settings(kafka=KafkaSettings(bootstrap=kafka, prefix=f"t{uuid4().hex[:8]}-", groups=3, rollouts=2))


@pytest.fixture
async def log(configured: Settings) -> AsyncIterator[KafkaLog]:
    log = KafkaLog(configured.kafka.bootstrap, prefix=configured.kafka.prefix)
    yield log
    await log.close()


async def test_apply_creates_the_catalogue_once_and_check_is_content(log: Log, configured: Settings) -> None:
    assert set(await apply(log, configured)) == set(BY_NAME)
    assert await apply(log, configured) == []
    assert await check(log, configured) == []
    found = await log.topics()
    assert found["agent.turns"].partitions == 3
    assert found["tasks"].partitions == 2
    assert found["runs"].partitions == 1


async def test_topics_outlive_a_broker_and_check_says_where_they_would_not(log: KafkaLog, configured: Settings) -> None:
    wanted = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}
    three = dataclasses.replace(configured, kafka=dataclasses.replace(configured.kafka, replication=3))
    assert all(spec.config.items() >= wanted.items() for spec in specs(three))
    await apply(log, configured)
    assert (await log.topics(configs=True))["agent.turns"].config["unclean.leader.election.enable"] == "false"
    async with log.transactor("t") as transactor:
        await transactor.begin()
        await transactor.offsets("g", {Partition("agent.turns", 0): Commit(0)})
        await transactor.commit()
    kept = await log.internal_topics()
    assert check_internal(kept, configured) == []
    told = check_internal(kept, three)
    for name in ("__consumer_offsets", "__transaction_state"):
        assert any(f"{name} has 1 replicas, kafka.replication asks for 3" in problem for problem in told)
        assert any(f"{name} has min.insync.replicas=1, the catalogue asks for 2" in problem for problem in told)


async def test_check_names_every_missing_topic(log: Log, configured: Settings) -> None:
    problems = await check(log, configured)
    assert len(problems) == len(BY_NAME)
    assert all("turnlog topics apply" in problem for problem in problems)


async def test_another_partition_count_is_refused_before_anything_is_created(log: Log, configured: Settings) -> None:
    (turns,) = (spec for spec in specs(configured) if spec.name == "agent.turns")
    await log.create_topics([dataclasses.replace(turns, partitions=5)])
    with pytest.raises(
        TopicMismatch, match=r"agent\.turns has 5 partitions, the settings ask for 3: set kafka\.groups"
    ):
        await apply(log, configured)
    assert set(await log.topics()) == {"agent.turns"}


async def test_check_tells_what_would_lose_data_or_break_units(log: Log, configured: Settings) -> None:
    wrong = {"retention.ms": "604800000", "cleanup.policy": "compact", "max.message.bytes": "1048576"}
    for spec in specs(configured):
        match spec.name:
            case "agent.turns":
                spec = dataclasses.replace(spec, partitions=4)
            case "tasks":
                spec = dataclasses.replace(spec, config={**spec.config, **wrong})
            case "runs":
                spec = dataclasses.replace(spec, config={**spec.config, "max.message.bytes": str(64 << 20)})
        await log.create_topics([spec])
    await log.create_topics([TopicSpec("stranger", 1, 1, {})])
    problems = await check(log, configured)
    told = "\n".join(problems)
    assert "agent.turns has 4 partitions, the settings ask for 3" in told
    assert "tasks has retention.ms=604800000, the catalogue asks for -1" in told
    assert "tasks has cleanup.policy=compact, the catalogue asks for delete" in told
    assert "tasks has max.message.bytes=1048576" in told
    assert "must share one partition count (kafka.groups)" in told
    assert "agent.turns has 4" in told
    assert problems[-1] == f"warning: {configured.kafka.prefix}stranger is not a topic of the catalogue"
    assert "runs has" not in told
    assert len(problems) == 6


async def test_the_verb_prints_and_its_status_is_1_for_a_problem(
    configured: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = dataclasses.replace(
        configured,
        registry=dataclasses.replace(configured.registry, url="http://127.0.0.1:9"),
        store=dataclasses.replace(configured.store, endpoint="http://127.0.0.1:9"),
    )
    assert await apply_or_check("check", settings) == 1
    assert await apply_or_check("apply", settings) == 0
    assert await apply_or_check("check", settings) == 0
    told = capsys.readouterr().out
    assert "does not exist" in told
    assert "created runs, group-requests, tasks" in told
    assert told.endswith("every topic matches the catalogue\n")


async def test_where_a_whole_catalogue_ends_is_found_by_one_look_at_its_leaders(
    log: Log, configured: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """aiokafka looks at one topic, waits 0.1 s, looks at the next: a restart stood for seconds."""
    await apply(log, configured)
    places = [Partition(spec.name, number) for spec in specs(configured) for number in range(spec.partitions)]
    with caplog.at_level("DEBUG", logger="aiokafka.consumer.fetcher"):
        assert set(await log.end_offsets(places)) == set(await log.start_offsets(places)) == set(places)
    assert [line for line in caplog.messages if "wait for metadata refresh" in line] == []
