"""The runner on the log in memory: refusals, defects, restarts, refusals to start."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from contextlib import AbstractAsyncContextManager

import numpy as np
import pytest
from prometheus_client import REGISTRY

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName, SessionStory, Shape, whole_group
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Commit, CommitsExpired, Fenced, GroupReader, OtherInputs, Partition, TopicSpec
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured, OtherSettings, configuration
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.core.fold.settlement import figures
from turnlog.processors.core.fold.unit import LogTruncated, MigrationNeeded
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.core.methods.rules import fold_rules
from turnlog.processors.runtime.assembler import AssemblerRunner, assembler_plan, main
from turnlog.processors.runtime.unit import REFOLD_SECONDS, AssemblerPlan, records_between
from turnlog.schemas.codec import HEADER, Codec
from turnlog.schemas.events import (
    ALL,
    DeadLetter,
    Event,
    GroupScored,
    RunConfigured,
    SegmentSample,
    SkipRequested,
    TokenSnapshot,
    TurnTreeAssembled,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import CATALOGUE, TOPIC_OF
from turnlog.schemas.types import BlobRef
from turnlog.settings import AssemblerSettings, FoldSettings, RunSettings, Settings

SETTINGS = Settings(run=RunSettings(id="run"), assembler=AssemblerSettings(commit_interval_s=0.0))
PLAN = assembler_plan(Configured.today(SETTINGS), SETTINGS.assembler)
TURNS, SNAPSHOTS = "agent.turns", "agent.token-snapshots"
UNIT_OF = {"a": 0, "b": 0, "d": 1}
"""Where murmur2 places these group ids among two partitions."""


def plan_of(version: str) -> AssemblerPlan:
    run = dataclasses.replace(Configured.today(SETTINGS), fold_version=version)
    return assembler_plan(run, SETTINGS.assembler)


class Cluster:
    """A log in memory with two units, its store, and processes on it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.registry = MemoryRegistry()
        self.blobs = MemoryBlobs()
        self.broker.create(TopicSpec(t.name, 2 if t.partitions == "groups" else 1, 1, {}) for t in CATALOGUE)
        self.codec = Codec({name: number for number, name in enumerate(ALL)})
        self.health = Health("assembler")

    def events(self, log: MemoryLog) -> EventLog:
        return EventLog(log, self.registry, self.codec, "test")

    async def append(self, *events: Event) -> None:
        for event in events:
            await self.raw(
                TOPIC_OF[type(event).__name__].name, event.group_id.encode(), self.codec.encode(event), event
            )

    async def raw(self, topic: str, key: bytes, value: bytes, event: Event = None) -> None:
        log = MemoryLog(self.broker)
        async with log.appender() as appender:
            await appender.append(topic, key, value, headers=self.events(log).headers(event))

    def runner(self, plan: AssemblerPlan = PLAN) -> AssemblerRunner:
        log = MemoryLog(self.broker)
        self.health = Health("assembler")
        return AssemblerRunner(plan, log, self.events(log), self.blobs, self.health, clock=lambda: 0.0)

    async def fold(self, plan: AssemblerPlan = PLAN) -> dict[str, str]:
        """One process until nothing is left to read, then a clean stop; what it says on /readyz before that."""
        runner = self.runner(plan)
        async with self.joined(runner) as reader:
            idle = 0
            while idle < 3:
                idle = 0 if await runner.turn(reader, poll_s=0.001) else idle + 1
            return self.health.waiting

    def joined(self, runner: AssemblerRunner) -> AbstractAsyncContextManager[GroupReader]:
        return runner.join_group("assembler-0")

    async def read(self, topic: str) -> list[Event]:
        log = MemoryLog(self.broker)
        names = [Partition(topic, p) for p in range(self.broker.partitions(topic))]
        ends = await log.end_offsets(names)
        return [
            self.codec.decode(record.value)
            for name in names
            async for record in records_between(log, name, 0, ends[name])
        ]

    async def scored(self) -> list[str]:
        return [event.group_id for event in await self.read("segment-samples") if isinstance(event, GroupScored)]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def group(name: str, *, size: int = 2, turns: int = 2, shape: Shape = Shape()) -> list[Event]:  # noqa: B008
    rng = np.random.default_rng(1)
    return list(whole_group(GroupName("run", name, 0, size), rng, turns=turns, shape=shape))


async def test_a_group_becomes_trees_samples_and_a_score(cluster: Cluster) -> None:
    await cluster.append(*group("a"))
    await cluster.fold()
    assert [type(event) for event in await cluster.read("turn-trees")] == [TurnTreeAssembled] * 2
    *samples, score = await cluster.read("segment-samples")
    assert [type(event) for event in (*samples, score)] == [SegmentSample] * 2 + [GroupScored]
    (emitted,) = await cluster.read("group-scores")
    assert (emitted,) == figures(score)
    told = dataclasses.asdict(emitted)
    assert (told.pop("event_id"), told.pop("rewards")) == (digest("GroupEmitted", "a"), (2.0, 1.0)), "in every release"
    assert told.items() <= dataclasses.asdict(score).items()
    assert (score.samples, score.books.trained) == (2, 16)


async def test_a_restart_writes_nothing_twice(cluster: Cluster) -> None:
    *most, last = group("a")
    await cluster.append(*most)
    await cluster.fold()
    await cluster.append(last)
    REFOLD_SECONDS.set(-1.0)
    await cluster.fold()
    await cluster.fold()
    assert REGISTRY.get_sample_value("turnlog_assembler_refold_seconds") == 0.0
    assert len(await cluster.read("turn-trees")) == 2
    assert len(await cluster.read("segment-samples")) == 3


def of_recipe() -> dict[str, float]:
    """What is counted of the recipe of these groups."""
    names = ("sessions_total", "reward_count", "reward_sum", "passed_total", "output_tokens_count", "output_tokens_sum")
    found: dict[str, float] = {}
    for name in names:
        labels = {"recipe": "example"} | ({"outcome": "completed"} if name == "sessions_total" else {})
        found[name] = REGISTRY.get_sample_value(f"turnlog_recipe_{name}", labels) or 0.0
    return found


async def test_each_session_counts_once_for_its_recipe_over_a_restart(cluster: Cluster) -> None:
    before = of_recipe()
    *most, last = group("a")
    await cluster.append(*most)
    await cluster.fold()
    await cluster.append(last)
    await cluster.fold()
    await cluster.fold()
    rewards = [tree.reward for tree in await cluster.read("turn-trees") if isinstance(tree, TurnTreeAssembled)]
    assert {name: value - before[name] for name, value in of_recipe().items()} == {
        "sessions_total": 2, "reward_count": 2, "reward_sum": sum(filter(None, rewards)),
        "passed_total": sum(reward is not None and reward >= 1 for reward in rewards),
        "output_tokens_count": 2, "output_tokens_sum": 16,
    }  # fmt: skip


async def test_undecodable_bytes_are_parked_once_and_the_rest_goes_on(cluster: Cluster) -> None:
    await cluster.raw(TURNS, b"a", b"\x00poison")
    await cluster.append(*group("a"))
    await cluster.fold()
    await cluster.fold()
    (letter,) = await cluster.read("dead-letters")
    assert isinstance(letter, DeadLetter)
    assert (letter.topic, letter.partition, letter.offset) == (TURNS, UNIT_OF["a"], 0)
    assert (letter.cause, letter.value, letter.role) == ("UndecodableRecord", b"\x00poison", "assembler")
    assert await cluster.scored() == ["a"]


async def test_a_refused_record_is_parked_once_although_it_is_folded_again(cluster: Cluster) -> None:
    *most, last = group("a")
    broken = [
        dataclasses.replace(event, prompt_sha256="0" * 64) if isinstance(event, TokenSnapshot) else event
        for event in most
    ]
    await cluster.append(*broken)
    await cluster.fold()
    await cluster.append(last)
    await cluster.fold()
    letters = await cluster.read("dead-letters")
    assert len({letter.event_id for letter in letters}) == len(letters) == 4
    assert {letter.cause for letter in letters} <= {"PromptHashMismatch", "UnknownParent"}
    (score,) = [event for event in await cluster.read("segment-samples") if isinstance(event, GroupScored)]
    assert {rollout.excluded_reason for rollout in score.rollouts} == {"refused"}


async def test_a_record_under_the_wrong_key_or_in_the_wrong_topic_is_parked(cluster: Cluster) -> None:
    started, completed, *_ = group("a")
    await cluster.raw("agent.sessions", b"b", cluster.codec.encode(started))
    await cluster.raw("agent.sessions", b"a", cluster.codec.encode(completed))
    await cluster.fold()
    assert sorted(letter.cause for letter in await cluster.read("dead-letters")) == ["KeyMismatch", "WrongTopic"]


async def test_a_parked_record_that_is_too_large_for_a_dead_letter_is_cut(cluster: Cluster) -> None:
    await cluster.raw(TURNS, b"a", b"\x07" * (7 << 20))
    await cluster.fold()
    (letter,) = await cluster.read("dead-letters")
    assert len(letter.value) == 1 << 20
    assert "cut to 1048576 bytes" in letter.message


class Defective(GroupFold):
    """Trips over the second turn of group a."""

    def apply(self, topic: str, offset: int, event: Event) -> list[Event]:
        if topic == TURNS and event.group_id == "a" and event.turn.index == 1:
            raise ZeroDivisionError("a bug")
        return super().apply(topic, offset, event)


def defective_plan() -> AssemblerPlan:
    rules = fold_rules(SETTINGS.fold, run_id=SETTINGS.run.id, settings_sha256=PLAN.fold.settings_sha256)
    return dataclasses.replace(PLAN, factory=lambda group_id, floor: Defective(group_id, floor, rules))


async def test_a_defect_stops_its_unit_and_says_where_while_others_go_on(cluster: Cluster) -> None:
    await cluster.append(*group("a"), *group("d"))
    waiting = await cluster.fold(defective_plan())
    assert await cluster.scored() == ["d"]
    assert waiting["unit 0"].startswith(
        "agent.turns[0]@1: ZeroDivisionError: a bug; fix the cause, or skip the record "
        "with `turnlog log dead-letters skip`"
    )
    assert await cluster.read("dead-letters") == []
    assert cluster.health.waiting == {}, "it is another's now"


async def test_an_operator_lets_a_stopped_unit_pass_the_record_after_a_restart(cluster: Cluster) -> None:
    await cluster.append(*group("a", size=1), *group("b"))
    await cluster.fold(defective_plan())
    assert await cluster.scored() == []
    skip = SkipRequested(
        event_id="skip", run_id="run", group_id="a", floor=0, topic=TURNS, partition=0, offset=1, reason="known bug"
    )
    await cluster.append(skip)
    for _ in range(2):
        assert await cluster.fold(defective_plan()) == {}
    (letter,) = await cluster.read("dead-letters")
    assert (letter.cause, letter.message) == ("RecordSkipped", "agent.turns[0]@1: known bug")
    assert await cluster.scored() == ["b"], "a lacks the turn that was passed over"


async def test_records_of_another_run_are_parked_once_each_and_never_folded(cluster: Cluster) -> None:
    """Not those of a group of their own, nor those that name a group of ours; their payloads are not looked for."""
    gone = BlobRef("0" * 64, 10)
    theirs = [dataclasses.replace(event, run_id="theirs") for event in group("b")]
    snapshots = [event for event in group("a") if isinstance(event, TokenSnapshot)]
    theirs += [dataclasses.replace(event, run_id="theirs", output_ids=gone) for event in snapshots]
    ours = group("a")
    await cluster.append(*ours[:3], *theirs, *ours[3:])
    assert await cluster.fold() == {}
    letters = await cluster.read("dead-letters")
    assert Counter(letter.cause for letter in letters) == {"ForeignRun": len(theirs)}
    assert {letter.run_id for letter in letters} == {"run"}
    assert await cluster.scored() == ["a"]
    await cluster.append(*group("c"))
    assert await cluster.fold() == {}  # the next process
    assert len(await cluster.read("dead-letters")) == len(theirs)
    assert sorted(await cluster.scored()) == ["a", "c"]


async def test_other_settings_refuse_to_start(cluster: Cluster) -> None:
    await cluster.append(*group("a")[:3])
    await cluster.fold()
    other = dataclasses.replace(SETTINGS, fold=FoldSettings(estimator="dr_grpo"))
    other = assembler_plan(Configured.today(other), other.assembler)
    with pytest.raises(
        MigrationNeeded, match=f"{PLAN.fold.settings_sha256}, the run recorded {other.fold.settings_sha256}"
    ):
        await cluster.fold(other)


async def test_a_log_that_begins_after_its_commit_refuses_to_start(cluster: Cluster) -> None:
    await cluster.append(*group("a")[:4])
    await cluster.fold()
    cluster.broker.truncate(Partition("agent.sessions", UNIT_OF["a"]), 1)
    with pytest.raises(LogTruncated, match=r"agent.sessions\[0\] begins at 1, but the fold needs it from 0 on"):
        await cluster.fold()


async def test_commits_that_expired_are_told_from_a_new_unit_where_input_is_gone(cluster: Cluster) -> None:
    await cluster.append(*group("a"))
    await cluster.fold()
    commits = cluster.broker.group(PLAN.group).commits
    commits.clear()
    await cluster.append(*group("a"), *group("b"))
    await cluster.fold()
    assert await cluster.scored() == ["a", "b"], "nothing comes out twice"
    commits.clear()
    cluster.broker.truncate(Partition(TURNS, UNIT_OF["a"]), 3)
    with pytest.raises(CommitsExpired, match=r"its commits are gone and agent\.turns\[0\] begins at 3: .*offsets\.ret"):
        await cluster.fold()


async def test_commits_of_topics_that_the_role_does_not_read_refuse_to_start(cluster: Cluster) -> None:
    await cluster.append(*group("a"))
    await cluster.fold()
    commits = cluster.broker.group(PLAN.group).commits
    commits[Partition("agent.more", 0)] = commits[Partition(TURNS, 0)]
    with pytest.raises(
        OtherInputs, match=r"assembler has commits for agent\.more, but this release reads agent\.sessions, "
    ):
        await cluster.fold()


async def test_what_a_newer_release_says_in_a_commit_stays_there(cluster: Cluster) -> None:
    await cluster.append(*group("a"))
    await cluster.fold()
    commits = cluster.broker.group(PLAN.group).commits
    for place, commit in commits.items():
        commits[place] = Commit(
            commit.offset, json.dumps({**json.loads(commit.metadata), "later": place.topic, "high": 1})
        )
    await cluster.append(*group("b"))
    await cluster.fold()
    said = {place: json.loads(commit.metadata) for place, commit in commits.items() if place.number == UNIT_OF["a"]}
    assert {place.topic: each["later"] for place, each in said.items()} == {topic: topic for topic in INPUTS}
    assert all(each["high"] > 1 for each in said.values()), "what it knows is its own"


async def test_a_kind_of_a_newer_release_is_passed_over_and_counted(cluster: Cluster) -> None:
    later = {"type": "record", "name": "SessionPaused", "namespace": "turnlog.v1", "fields": []}
    cluster.registry.schemas[900] = later
    labels = {"topic": "agent.sessions", "record": "SessionPaused"}
    before = REGISTRY.get_sample_value("turnlog_later_records_total", labels) or 0
    first, *rest = group("a")
    await cluster.append(first)
    await cluster.raw("agent.sessions", b"a", HEADER.pack(0, 900))
    await cluster.raw("agent.sessions", b"d", HEADER.pack(0, 900))
    await cluster.append(*rest)
    assert await cluster.fold() == {}
    assert await cluster.scored() == ["a"]
    assert await cluster.read("dead-letters") == []
    assert REGISTRY.get_sample_value("turnlog_later_records_total", labels) == before + 2


async def test_a_truncated_log_without_any_commit_refuses_to_start(cluster: Cluster) -> None:
    await cluster.append(*group("a"))
    cluster.broker.truncate(Partition(SNAPSHOTS, UNIT_OF["a"]), 2)
    with pytest.raises(LogTruncated, match="begins at 2"):
        await cluster.fold()


@pytest.mark.parametrize(("version", "topic", "end"), [("1", "segment-samples", 4), ("2", "group-scores", 2)])
async def test_truncated_outputs_refuse_to_start(cluster: Cluster, version: str, topic: str, end: int) -> None:
    plan = plan_of(version)
    await cluster.append(*group("a"))
    await cluster.fold(plan)
    cluster.broker.truncate(Partition(topic, UNIT_OF["a"]), end)
    with pytest.raises(LogTruncated, match=topic):
        await cluster.fold(plan)


async def test_a_restart_reads_no_samples_and_writes_no_figures_twice(cluster: Cluster) -> None:
    await cluster.append(*group("a"))
    await cluster.fold()
    cluster.broker.truncate(Partition("segment-samples", UNIT_OF["a"]), 4)
    await cluster.append(*group("a"), *group("b"))
    await cluster.fold()
    assert [event.group_id for event in await cluster.read("group-scores")] == ["a", "b"]


async def test_a_run_of_fold_version_1_has_no_figures_and_needs_no_topic_for_them(cluster: Cluster) -> None:
    del cluster.broker.specs["group-scores"]
    for unit in range(2):
        del cluster.broker.logs[Partition("group-scores", unit)]
    plan = plan_of("1")
    for name in ("a", "b"):
        await cluster.append(*group(name))
        await cluster.fold(plan)
    assert await cluster.scored() == ["a", "b"]


async def test_a_log_that_lost_its_end_refuses_to_start(cluster: Cluster) -> None:
    await cluster.append(*group("a"))
    await cluster.fold()
    del cluster.broker.logs[Partition(TURNS, UNIT_OF["a"])].entries[-1]
    with pytest.raises(LogTruncated, match="ends at 3, but 4 records of it were folded"):
        await cluster.fold()


async def test_a_process_that_was_fenced_ends(cluster: Cluster) -> None:
    runner = cluster.runner()
    async with cluster.joined(runner) as reader:
        await runner.turn(reader, poll_s=0.001)
        async with MemoryLog(cluster.broker).transactor(PLAN.transactional_id(UNIT_OF["a"])):
            await cluster.append(*group("a"))
            with pytest.raises(Fenced, match="a newer owner started"):
                await runner.turn(reader, poll_s=0.001)
    assert await cluster.scored() == []


async def test_large_payloads_come_from_the_store_and_go_to_it(cluster: Cluster) -> None:
    events = group("a", turns=1, shape=Shape(delta=300_000, output=10))
    for at, event in enumerate(events):
        if isinstance(event, TokenSnapshot):
            assert isinstance(event.delta_ids, bytes)
            events[at] = dataclasses.replace(event, delta_ids=await cluster.blobs.put(event.delta_ids))
    await cluster.append(*events)
    await cluster.fold()
    sample = (await cluster.read("segment-samples"))[0]
    assert isinstance(sample.token_ids, BlobRef)
    assert len(await cluster.blobs.get(sample.token_ids)) == 4 * 300_010


async def test_a_payload_that_the_store_lost_stops_its_unit_until_it_is_back_or_passed_over(
    cluster: Cluster,
) -> None:
    plan = dataclasses.replace(PLAN, pauses_s=(0.0, 0.0))
    events = group("a", turns=1)
    lost = BlobRef("0" * 64, 16)
    events[2] = dataclasses.replace(events[2], output_ids=lost)
    await cluster.append(*events, *group("d"))
    for _ in range(2):
        waiting = await cluster.fold(plan)
        assert waiting["unit 0"].startswith(f"{SNAPSHOTS}[0]@0: BlobMissing")
        assert await cluster.scored() == ["d"]
    skip = SkipRequested(
        event_id="skip", run_id="run", group_id="a", floor=0, topic=SNAPSHOTS, partition=0, offset=0, reason="lost"
    )
    await cluster.append(skip, *group("b"))
    assert await cluster.fold() == {}
    assert await cluster.scored() == ["b", "d"]
    assert [letter.cause for letter in await cluster.read("dead-letters")] == ["RecordSkipped"]


LATE = "turnlog_assembler_late_records_total"


async def test_a_record_of_a_forgotten_group_is_dropped(cluster: Cluster) -> None:
    plan = dataclasses.replace(PLAN, horizon_records=0)
    await cluster.append(*group("a"))
    await cluster.fold(plan)
    later = GroupName("run", "c", 6, 1)
    await cluster.append(SessionStory(later, 0, np.random.default_rng(0)).started())
    await cluster.fold(plan)
    counted = REGISTRY.get_sample_value(LATE)
    again = group("a")
    await cluster.append(*again)
    await cluster.fold(plan)
    await cluster.fold(plan)
    assert await cluster.scored() == ["a"]
    assert REGISTRY.get_sample_value(LATE) == counted + len(again), "once, although the second process reads them again"


async def test_the_role_refuses_to_start_under_settings_other_than_the_run_was_configured_with(
    cluster: Cluster,
) -> None:
    role = await role_of(cluster, configuration(dataclasses.replace(SETTINGS, fold=FoldSettings(estimator="rloo"))))
    with pytest.raises(OtherSettings, match=r"fold\.estimator was recorded as 'rloo' and is 'grpo' here"):
        await main(role)


async def test_the_role_folds_until_it_is_stopped_under_the_hash_that_the_run_recorded(cluster: Cluster) -> None:
    """An earlier release recorded other keys, so that today's hash of the same values is another one."""
    recorded = dataclasses.replace(configuration(SETTINGS), settings_sha256="e" * 64)
    role = await role_of(cluster, recorded)
    await cluster.append(*group("a"), *group("d"))
    running = asyncio.create_task(main(role))
    async with asyncio.timeout(20):
        while sorted(await cluster.scored()) != ["a", "d"]:
            assert not running.done(), running.exception()
            await cluster.broker.changed(0.1)
    assert not role.health.waiting
    role.stopping.set()
    await running
    held = cluster.broker.group(PLAN.group).commits
    assert {name.number for name in held} == {0, 1}
    assert all("e" * 64 in commit.metadata for commit in held.values())
    derived = [*await cluster.read("segment-samples"), *await cluster.read("turn-trees")]
    assert {event.settings_sha256 for event in derived if hasattr(event, "settings_sha256")} == {"e" * 64}


async def test_the_role_folds_nothing_before_the_run_is_configured(cluster: Cluster) -> None:
    role = await role_of(cluster, None)
    await cluster.append(*group("a"))
    running = asyncio.create_task(main(role))
    async with asyncio.timeout(20):
        await asyncio.wait((running,), timeout=0.2)
        assert not role.health.waiting, "`turnlog up` does not wait for `turnlog run`"
        assert await cluster.scored() == []
        configured = dataclasses.replace(configuration(SETTINGS), fold_version="1")
        await cluster.raw("runs", b"run", cluster.codec.encode(configured), configured)
        while await cluster.scored() != ["a"]:
            assert not running.done(), running.exception()
            await cluster.broker.changed(0.1)
    (score,) = [event for event in await cluster.read("segment-samples") if isinstance(event, GroupScored)]
    assert score.fold_version == "1"
    role.stopping.set()
    await running


async def role_of(cluster: Cluster, configured: RunConfigured | None) -> Role:
    if configured is not None:
        await cluster.raw("runs", b"run", cluster.codec.encode(configured), configured)
    log = MemoryLog(cluster.broker)
    events = cluster.events(log)
    return Role("assembler", "assembler-0", SETTINGS, log, events, cluster.blobs, Health("assembler"))
