"""Everything that a broken writer may append, among good groups, on a real Kafka with the real assembler role.

Each bad record is parked with its cause and counted; the sessions that it hurts are excluded by name, the groups go on
or are discarded by name, and the books balance.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import io
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import fastavro
import numpy as np
import pytest
from confluent_kafka import KafkaError, Producer
from prometheus_client import REGISTRY

from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog.consumers.figures import read_books
from turnlog.infra.log import Oversized, Partition
from turnlog.infra.registry import HttpRegistry
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.processors.runtime.assembler import main
from turnlog.processors.runtime.unit import records_between
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, plain
from turnlog.schemas.events import (
    DeadLetter,
    Event,
    GroupScored,
    RewardAssigned,
    SegmentSample,
    SessionStarted,
    StepRewardAssigned,
    TokenSnapshot,
    VersionSpan,
)
from turnlog.schemas.topics import DEAD_LETTERS, SAMPLES, TOPIC_OF
from turnlog.schemas.types import BlobRef, TurnId, pack_float32s, pack_int32s
from turnlog.settings import Settings

pytestmark = pytest.mark.kafka
NAN, INFINITE = float("nan"), float("inf")
MIB = 1 << 20
Doctor = Callable[[Event], Event]


def changed(record: type, **fields: Any) -> Doctor:
    """The session's last snapshot, or its only record of another class, with other fields."""

    def doctor(event: Event) -> Event:
        last = not isinstance(event, TokenSnapshot) or event.turn.index == LAST
        return dataclasses.replace(event, **fields) if isinstance(event, record) and last else event

    return doctor


BAD: dict[str, tuple[str, Doctor]] = {
    "hash": ("PromptHashMismatch", changed(TokenSnapshot, prompt_sha256="0" * 64)),
    "parent": ("UnknownParent", changed(TokenSnapshot, parent_turn=TurnId("nowhere", 9))),
    "base": ("BaseBeyondParent", changed(TokenSnapshot, base_len=10_000)),
    "logprobs": ("LogprobLengthMismatch", changed(TokenSnapshot, output_logprobs=pack_float32s([-0.5]))),
    "infinite": ("NotFinite", changed(TokenSnapshot, output_logprobs=pack_float32s([-0.5, NAN, 0.0, -1.0]))),
    "spans": ("SpansDoNotCover", changed(TokenSnapshot, version_spans=(VersionSpan(0, 3),))),
    "version": ("UnknownVersion", changed(TokenSnapshot, version_spans=(VersionSpan(-1, 4),))),
    "array": ("BrokenArray", changed(TokenSnapshot, delta_ids=b"12345")),
    "negative": ("TokenOutOfRange", changed(TokenSnapshot, output_ids=pack_int32s([-1, 2, 3, 4]))),
    "empty": ("EmptyPrompt", changed(TokenSnapshot, parent_turn=None, base_len=0, delta_ids=b"")),
    "reward": ("RewardNotFinite", changed(RewardAssigned, value=NAN)),
    "component": ("RewardNotFinite", changed(RewardAssigned, components={"length": INFINITE})),
}
"""Group -> the cause under which its bad record is parked, and what makes it bad. Each excludes one session."""
LAST = 2
"""Index of a session's last turn, the bad one: what extends a refused turn would be refused with it."""


@dataclass
class Written:
    """What was appended, and what must become of it."""

    causes: dict[tuple[str, int, int], str] = field(default_factory=dict)
    """(topic, partition, offset) of each bad record -> its cause."""
    excluded: dict[str, list[str | None]] = field(default_factory=dict)
    """Group -> excluded_reason of its rollouts."""
    discarded: dict[str, str] = field(default_factory=dict)
    """Group -> why it is not trained."""


def session(group: GroupName, index: int) -> Iterator[Event]:
    """A good session of three turns; the second sampled nothing, which is legal."""
    story = SessionStory(group, index, np.random.default_rng(index))
    yield story.started()
    for output in (4, 0, 4):
        yield from story.turn(Shape(output=output))
    yield story.rewarded(float(index % 2))
    yield story.finished()


async def append(tool: Role, events: Iterator[Event]) -> None:
    await asyncio.gather(*[await tool.events.submit(event) for event in events])


async def doctored(tool: Role, written: Written, name: str, size: int = 3) -> None:
    """A group whose first session has one bad record."""
    cause, doctor = BAD[name]
    group = GroupName(tool.settings.run.id, f"{name}-{size}", 0, size)
    for event in session(group, 0):
        now = doctor(event)
        partition, offset = await tool.events.append(now)
        if now is not event:
            written.causes[TOPIC_OF[type(now).__name__].name, partition, offset] = cause
    for index in range(1, size):
        await append(tool, session(group, index))
    written.excluded[group.group_id] = ["refused"] + [None] * (size - 1)
    if size < 3:
        written.discarded[group.group_id] = "too_few_valid"


async def step_rewards(tool: Role, written: Written) -> None:
    """One step reward is no number."""
    group = GroupName(tool.settings.run.id, "step", 0, 3)
    for index in range(group.size):
        *before, finished = session(group, index)
        await append(tool, iter(before))
        step = StepRewardAssigned(
            event_id=f"step {index}", run_id=group.run_id, group_id="step", session_id=finished.session_id, floor=0,
            turn=finished.turns[0], value=NAN if index == 0 else 0.5, components={}, verifier=before[-1].verifier,
        )  # fmt: skip
        place = await tool.events.append(step)
        if index == 0:
            written.causes["agent.sessions", *place] = "RewardNotFinite"
        expects = dataclasses.replace(finished.expects, step_rewards=1)
        await tool.events.append(dataclasses.replace(finished, expects=expects))
    written.excluded["step"] = ["refused", None, None]


async def another_size(tool: Role, written: Written) -> None:
    """One session says that its group has five members."""
    group = GroupName(tool.settings.run.id, "sizes", 0, 3)
    for index in range(group.size):
        for event in session(group, index):
            wrong = isinstance(event, SessionStarted) and index == 2
            place = await tool.events.append(dataclasses.replace(event, group_size=5) if wrong else event)
            if wrong:
                written.causes["agent.sessions", *place] = "SessionContradicted"
    written.excluded["sizes"] = [None, None]  # the reaper closes the group at its deadline


async def undecodable(tool: Role, written: Written) -> None:
    """A snapshot whose bytes are cut, so that its turn is not there; and one that is in another group's place."""
    group = GroupName(tool.settings.run.id, "cut", 0, 3)
    async with tool.log.appender() as appender:
        for index in range(group.size):
            for event in session(group, index):
                if index == 0 and isinstance(event, TokenSnapshot) and event.turn.index == LAST:
                    value = tool.events.codec.encode(event)
                    place = await appender.append("agent.token-snapshots", b"cut", value[:-3])
                    written.causes["agent.token-snapshots", *place] = "UndecodableRecord"
                    place = await appender.append("agent.token-snapshots", b"not its group", value)
                    written.causes["agent.token-snapshots", *place] = "KeyMismatch"
                    place = await appender.append("agent.turns", b"cut", value)
                    written.causes["agent.turns", *place] = "WrongTopic"
                else:
                    await tool.events.append(event)
    written.excluded["cut"] = [None, None]


async def newer_symbols(tool: Role, written: Written) -> None:
    """A newer release ends a session with an outcome that this one does not know; a broken one does so without having
    registered its schema."""
    name, registry = "SessionFinished", HttpRegistry(tool.settings.registry)
    newer = copy.deepcopy(stored_schema(name))
    (outcome,) = (member for member in newer["fields"] if member["name"] == "outcome")
    outcome["type"]["symbols"].append("preempted")
    schema_id = await registry.register(name, newer)
    await registry.close()
    group = GroupName(tool.settings.run.id, "symbols", 0, 4)
    async with tool.log.appender() as appender:
        for index in range(group.size):
            *before, finished = session(group, index)
            await append(tool, iter(before))
            if index < 2:
                body = io.BytesIO()
                datum = {**plain(finished), "outcome": "preempted"}
                fastavro.schemaless_writer(body, fastavro.parse_schema(newer), datum, strict=True)
                header = HEADER.pack(0, schema_id) if index == 0 else tool.events.codec.encode(finished)[: HEADER.size]
                place = await appender.append("agent.sessions", b"symbols", header + body.getvalue())
                if index == 1:
                    written.causes["agent.sessions", *place] = "UndecodableRecord"
            else:
                await tool.events.append(finished)
    written.excluded["symbols"] = ["unknown", "expired", None, None]


async def large(tool: Role, written: Written) -> None:
    """Ten megabytes: of a payload they go to the store by themselves; of anything else our producer refuses them, and
    the broker does when a producer of other people's asks."""
    group = GroupName(tool.settings.run.id, "large", 0, 2)
    for index in range(group.size):
        story = SessionStory(group, index, np.random.default_rng(index))
        await append(
            tool, iter([story.started(), *story.turn(Shape(delta=10 * MIB // 4)), story.rewarded(float(index))])
        )
        finished = story.finished()
        await tool.events.append(finished)
    wordy = dataclasses.replace(finished, reason="x" * 10 * MIB)
    with pytest.raises(Oversized, match=r"at most 8388608 bytes.*object store.*BlobRef"):
        await tool.events.append(wordy)
    topic, value = f"{tool.settings.kafka.prefix}agent.sessions", tool.events.codec.encode(wordy)
    answer = await asyncio.to_thread(foreign, tool.settings.kafka.bootstrap, topic, value)
    assert answer == KafkaError.MSG_SIZE_TOO_LARGE
    written.excluded["large"] = [None, None]


def foreign(bootstrap: str, topic: str, value: bytes) -> int | None:
    """The error code of a producer that knows no limit of ours."""
    answers: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": bootstrap, "message.max.bytes": 64 * MIB})
    producer.produce(topic, value, b"large", on_delivery=lambda error, _: answers.append(error))
    producer.flush(30)
    (error,) = answers
    return error.code() if error is not None else None


async def read(role: Role, topic: str, units: int) -> list[Event]:
    names = [Partition(topic, unit) for unit in range(units)]
    ends = await role.log.end_offsets(names)
    return [
        await role.events.decode(record)
        for name in names
        async for record in records_between(role.log, name, 0, ends[name])
    ]


async def fold(settings: Settings, groups: set[str]) -> None:
    """The assembler until all these groups are scored; it must not end by itself."""
    async with open_role("assembler", settings) as role:
        await configure(role)
        folding = asyncio.create_task(main(role))
        scored: set[str] = set()
        async with asyncio.timeout(100), role.log.reader() as reader:
            reader.assign({Partition(SAMPLES.name, unit): 0 for unit in range(settings.kafka.groups)})
            while not groups <= scored:
                assert not folding.done(), folding.result()
                events = [await role.events.decode(record) for record in await reader.poll()]
                scored |= {event.group_id for event in events if isinstance(event, GroupScored)}
        role.stopping.set()
        await folding


def counted() -> Counter[str]:
    """Dead letters of the assemblers of this process by cause, as /metrics says."""
    (family,) = (found for found in REGISTRY.collect() if found.name == "turnlog_dead_letters")
    totals = [sample for sample in family.samples if sample.name.endswith("_total")]
    return Counter({t.labels["cause"]: int(t.value) for t in totals if t.labels["role"] == "assembler"})


async def test_bad_records_are_parked_counted_and_hurt_nobody_else(live_settings: Settings) -> None:
    hasty = dataclasses.replace(live_settings.assembler, group_deadline_s=4.0, reaper_silence_s=2.0)
    settings, written, before = dataclasses.replace(live_settings, assembler=hasty), Written(), counted()
    async with open_role("test", settings) as tool:
        for name in BAD:
            await doctored(tool, written, name)
        await doctored(tool, written, "hash", size=2)
        for write in (step_rewards, another_size, undecodable, newer_symbols, large):
            await write(tool, written)
        for name in ("good-1", "good-2"):
            for index in range(2):
                await append(tool, session(GroupName(settings.run.id, name, 0, 2), index))
            written.excluded[name] = [None, None]
        await fold(settings, set(written.excluded))

        letters = await read(tool, DEAD_LETTERS.name, 1)
        assert all(isinstance(letter, DeadLetter) and letter.message for letter in letters)
        found = {(letter.topic, letter.partition, letter.offset): letter.cause for letter in letters}
        assert found == written.causes
        assert len(letters) == len(found)
        assert counted() - before == Counter(written.causes.values())

        samples = await read(tool, SAMPLES.name, settings.kafka.groups)
        scores = {event.group_id: event for event in samples if isinstance(event, GroupScored)}
        excluded = {name: [rollout.excluded_reason for rollout in score.rollouts] for name, score in scores.items()}
        assert excluded == written.excluded
        assert {name: score.reason for name, score in scores.items() if score.reason} == written.discarded
        stored = [event for event in samples if isinstance(event, SegmentSample) and event.group_id == "large"]
        assert all(isinstance(event.token_ids, BlobRef) and event.token_ids.size > 10 * MIB for event in stored)
        trained = Counter(event.group_id for event in samples if isinstance(event, SegmentSample))
        valid = {name: reasons.count(None) for name, reasons in excluded.items() if name not in written.discarded}
        assert trained == valid
        assert all(np.isfinite(event.advantage) for event in samples if isinstance(event, SegmentSample))
        for score in scores.values():
            assert score.books.sampled == score.books.trained + sum(score.books.masked.values())
        assert (await read_books(tool)).balance
