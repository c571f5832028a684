"""What rows each view has, over histories whose rows we know."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName, SessionStory, Shape, bad_days
from turnlog.consumers.archiver import flush
from turnlog.consumers.datasets import BadQuery, MissingContent, NothingMatched
from turnlog.consumers.datasets.build import build, verify
from turnlog.consumers.datasets.manifest import DatasetManifest, Provenance, read_manifest
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.datasets.writer import DatasetWriter
from turnlog.infra.archive import ArchiveLog, archive_name
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import partition_of
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.fold.group import fold_history
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.schemas.events import (
    BatchSample,
    Environment,
    Event,
    GroupScored,
    Limits,
    Outcome,
    Purpose,
    RolloutRequested,
    SampleBatchFormed,
    Sampling,
    SegmentSample,
    SessionFinished,
    TurnTreeAssembled,
    Weighting,
)
from turnlog.schemas.topics import TOPIC_OF, TREES
from turnlog.schemas.types import BlobRef, TurnId, float32s, int32s
from turnlog.settings import KafkaSettings, RunSettings, Settings

SHA = "5" * 64
TOOLS = [{"type": "function", "function": {"name": "python", "parameters": {}}}]
CALL = {"id": "call-1", "type": "function", "function": {"name": "python", "arguments": {"code": "2+3"}}}


@dataclasses.dataclass(frozen=True)
class Said:
    """One session: what the policy answered, turn by turn, and how it was judged."""

    answers: Sequence[str | dict[str, Any]]
    reward: float = 1.0
    outcome: Outcome = Outcome.completed
    version: int = 0
    environment: str = "1"
    system: str = "be brief"
    branches: bool = False
    """Turn 2 follows turn 0, and turn 0 is recorded twice."""


def asked(said: Said, turn: int) -> list[dict[str, Any]]:
    """What the policy reads before its answer `turn`."""
    if turn == 0:
        return [{"role": "developer", "content": said.system}, {"role": "user", "content": [{"text": "2 + 3 = ?"}]}]
    return [{"role": "tool", "tool_call_id": f"of session {id(said)}", "content": "5"}]


class World:
    """A log in memory with what the roles of a run would have written."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.samples: dict[str, list[SegmentSample]] = {}

    async def group(
        self, name: str, *sessions: Said, purpose: Purpose = Purpose.train, recipe: str = "calc", task: str = "t",
        row: dict[str, Any] | None = None, tokens: int = 0,
    ) -> None:  # fmt: skip
        """Tell a group, fold it, write what the assembler would. `tokens` seeds the tokens."""
        rng = np.random.default_rng(tokens)
        group = GroupName("run", name, 0, len(sessions))
        events: list[Event] = []
        for index, said in enumerate(sessions):
            events += self._session(SessionStory(group, index, rng), said, purpose, recipe, task)
        placed = []
        for event in events:
            partition, offset = await self.role.events.append(event)
            placed.append((TOPIC_OF[type(event).__name__].name, partition, offset, event))
        history = fold_history(placed, FoldRules(run_id="run", settings_sha256=SHA, min_valid=1))
        assert not history.refused
        for output in history.outputs:
            await self.role.events.append(output)
        self.samples[name] = [each for each in history.outputs if isinstance(each, SegmentSample)]
        if row is not None:
            await self.role.events.append(requested(name, task, row))

    def _session(self, story: SessionStory, said: Said, purpose: Purpose, recipe: str, task: str) -> list[Event]:
        environment = Environment(name="shop", version=said.environment)
        early = story
        undelivered: tuple[TurnId, ...] = ()
        events: list[Event] = [
            dataclasses.replace(story.started(), purpose=purpose, recipe=recipe, task_id=task, environment=environment)
        ]
        for number, answer in enumerate(said.answers):
            if said.branches and number == 2:
                story, lost = early, story.turns[1]
                story.turns = [lost, *story.turns]
            completed, snapshot = story.turn(Shape())
            early = story.zombie() if number == 0 else early
            raw = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
            spans = tuple(dataclasses.replace(span, version=said.version) for span in snapshot.version_spans)
            events += [
                dataclasses.replace(
                    completed, new_messages=json.dumps(asked(said, number)).encode(), response=json.dumps(raw).encode(),
                    tools=None if number else json.dumps(TOOLS).encode(), tools_sha256="tools",
                ),
                dataclasses.replace(snapshot, version_spans=spans),
            ]  # fmt: skip
            if said.branches and number == 0:
                events.append(dataclasses.replace(events[-2], response=b'{"content": "another wording"}'))
            undelivered = (story.turns[1],) if said.branches and number == 1 else undelivered
        finished: SessionFinished = dataclasses.replace(story.finished(), outcome=said.outcome, undelivered=undelivered)
        return [*events, story.rewarded(said.reward), finished]

    async def trained(self, batch: int, *groups: str) -> None:
        """A manifest that trained all samples of these groups."""
        rows = tuple(
            BatchSample(
                each.sample_id, each.group_id, each.session_id, each.rollout_index, each.segment_index, 1, 1, 1, 0, 0
            )
            for group in groups
            for each in self.samples[group]
        )
        await self.role.events.append(
            SampleBatchFormed(
                event_id=f"batch {batch}", run_id="run", batch_index=batch, draw_index=batch, part=0, parts=1,
                file=BlobRef(SHA, 1), rows_sha256=SHA, samples=rows, groups=groups, weighting=Weighting.prompt,
                prompts=1, trajectories=1, trained_tokens=1, constant_length=0, masked={}, trainer_version=0,
                max_lag=0, dropped=(), whitening_mean=None, whitening_std=None, positions=(), settings_sha256=SHA,
            )
        )  # fmt: skip


def requested(group: str, task: str, row: dict[str, Any]) -> RolloutRequested:
    return RolloutRequested(
        event_id=f"asked {group}", run_id="run", group_id=group, floor=0, task_id=task, rollout_id=f"{group}/0",
        rollout_index=0, group_size=1, draw=0, dataset="sums", dataset_epoch=0, index=0, recipe="calc",
        purpose=Purpose.train, task=json.dumps(row).encode(), sampling=Sampling(), limits=Limits(),
        min_weight_version=0,
    )  # fmt: skip


@pytest.fixture
async def world() -> AsyncIterator[World]:
    settings = Settings(run=RunSettings(id="run"), kafka=KafkaSettings(groups=2, rollouts=2))
    log = MemoryLog()
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        yield World(Role("dataset", "dataset-0", settings, log, events, MemoryBlobs(), Health("dataset")))


async def rows(
    world: World, out: Path, view: str, query: Query | None = None
) -> tuple[list[dict[str, Any]], DatasetManifest]:
    """The rows of a build, by group, with its manifest."""
    manifest = await build(world.role, query or Query(), out, view=view, format="parquet")
    assert verify(out).to_json() == manifest.to_json()
    found = pa.concat_tables([pq.read_table(out / file.name) for file in manifest.files]).to_pylist()
    return sorted(found, key=lambda row: row["group_id"]), manifest


async def test_a_row_of_rl_is_a_sample_token_by_token(world: World, tmp_path: Path) -> None:
    await world.group("g", Said(["a", "b", "c"], reward=1.0), Said(["d"], reward=0.0))
    found, manifest = await rows(world, tmp_path / "out", "rl")
    assert [row["sample_id"] for row in found] == [sample.sample_id for sample in world.samples["g"]]
    for row, sample in zip(found, world.samples["g"], strict=True):
        assert row["token_ids"] == int32s(sample.token_ids).tolist()
        places = [at for span in sample.spans for at in range(span.start, span.start + span.length)]
        assert [at for at, trained in enumerate(row["trained"]) if trained] == places
        assert [row["logprobs"][at] for at in places] == float32s(sample.logprobs).tolist()
        assert {row["logprobs"][at] for at in range(len(row["trained"])) if at not in places} == {0.0}
        assert {row["advantages"][at] for at in places} == {np.float32(sample.advantage)}
        assert [span["turn"] for span in row["spans"]] == [span.turn.index for span in sample.spans]
        assert (row["reward"], row["outcome"], row["recipe"]) == (sample.reward, "completed", "calc")
    assert manifest.counts.rows == 2
    assert manifest.counts.tokens == sum(len(row["token_ids"]) for row in found)
    assert manifest.counts.trained_tokens == 4 * 4


async def test_rows_hash_alike_in_either_format_and_in_the_order_of_a_refold(world: World, tmp_path: Path) -> None:
    for name in ("g", "h", "i"):
        await world.group(name, Said(["a"]), Said(["b", "c"], reward=0.0), tokens=len(world.samples))
    parquet = await build(world.role, Query(), tmp_path / "p", view="rl", format="parquet")
    arrow = await build(world.role, Query(), tmp_path / "a", view="rl", format="arrow")
    with DatasetWriter(tmp_path / "r", "rl", "arrow") as writer:
        for samples in reversed(world.samples.values()):
            writer.add(samples)
        refolded = writer.close(Provenance())
    assert parquet.rows_sha256 == arrow.rows_sha256 == refolded.rows_sha256
    assert parquet.files != arrow.files
    assert verify(tmp_path / "a").rows_sha256 == verify(tmp_path / "r").rows_sha256 == parquet.rows_sha256


@pytest.mark.parametrize("view", ["rl", "sft"])
async def test_progress_grows_to_all_records_of_every_pass(world: World, tmp_path: Path, view: str) -> None:
    await world.group("g", Said(["a"]), Said(["b", "c"], reward=0.0))
    told: list[tuple[int, int]] = []
    await build(
        world.role, Query(), tmp_path / "out", view=view, format="parquet",
        progress=lambda passed, total: told.append((passed, total)),
    )  # fmt: skip
    (total,) = {total for _, total in told}
    assert [passed for passed, _ in told] == sorted(passed for passed, _ in told)
    assert told[0][0] < told[-1][0] == total > 0


async def test_the_manifest_says_what_was_asked_and_read(world: World, tmp_path: Path) -> None:
    await world.group("g", Said(["a"]), Said(["b"], reward=0.0))
    async with world.role.log.appender() as appender:
        await appender.append("segment-samples", b"g", b"\x00poison")
    _, manifest = await rows(world, tmp_path / "out", "rl", Query(min_reward=0.5))
    body = json.loads((tmp_path / "out/manifest.json").read_text())
    assert body["query"] == {"source": "topics", "purposes": ["train"], "min_reward": 0.5}
    assert (body["runs"], body["settings_sha256"], body["rows"]) == (["run"], [SHA], 1)
    assert body["removed"] == {"min_reward": 1}
    assert body["undecodable"] == {"segment-samples": 1}
    read = {(each["topic"], each["end"] - each["start"]) for each in body["read"]}
    assert read == {("segment-samples", 0), ("segment-samples", 4)}
    assert [(each["record"], each["records"]) for each in body["schemas"]] == [("GroupScored", 1), ("SegmentSample", 2)]
    assert read_manifest(tmp_path / "out").to_json() == manifest.to_json()


FILTERS: list[tuple[Query, dict[str, int]]] = [
    (Query(recipes=("calc",)), {"recipe": 2}),
    (Query(purposes=("eval",)), {"purpose": 4}),
    (Query(tasks=("t",)), {"task": 2}),
    (Query(datasets=("sums",)), {"dataset": 2}),
    (Query(task_types=("sum",)), {"task_type": 2}),
    (Query(outcomes=("completed",)), {"outcome": 1}),
    (Query(min_reward=1.0), {"min_reward": 2}),
    (Query(max_reward=0.0), {"max_reward": 2}),
    (Query(min_version=2), {"min_version": 3}),
    (Query(max_version=1), {"max_version": 1}),
    (Query(environment_versions=("2.10",)), {"environment_version": 3}),
    (Query(expire_before=("2.9",)), {"expire_before": 3}),
    (Query(expire_before=("other=3", "shop=2.9")), {"expire_before": 3}),
    (Query(min_step=5), {"step": 2}),
    (Query(max_step=4), {"step": 2}),
    (Query(until_ms=1), {"until": 4}),
    (Query(since_ms=1, min_reward=2.0), {"min_reward": 4}),
    (Query(runs=("another",)), {}),
]


@pytest.mark.parametrize(
    ("query", "removed"),
    FILTERS,
    ids=lambda value: None if isinstance(value, dict) else str(value.non_default_values()),
)
@pytest.mark.parametrize("view", ["rl", "sft"])
async def test_each_filter_removes_what_it_names(
    world: World, tmp_path: Path, query: Query, removed: dict[str, int], view: str
) -> None:
    await world.group("g", Said(["a"]), Said(["b"], reward=0.0, version=2), row={"type": "sum"})
    await world.group(
        "h", Said(["c"], environment="2.10"), Said(["d"], reward=0.0, outcome=Outcome.truncated),
        recipe="shop", task="u",
    )  # fmt: skip
    await world.trained(4, "g")
    await world.trained(5, "h")
    left = 4 - sum(removed.values())
    if not removed or not left:
        with pytest.raises(NothingMatched) as said:
            await build(world.role, query, tmp_path / "out", view=view, format="parquet")
        assert all(f"{name} removed {count}" in str(said.value) for name, count in removed.items())
        assert not os.listdir(tmp_path)
        return
    found, manifest = await rows(world, tmp_path / "out", view, query)
    assert (len(found), dict(manifest.provenance.removed)) == (left, removed)


@pytest.mark.parametrize(
    ("query", "view"),
    [
        (Query(outcomes=("fine",)), "rl"),
        (Query(min_reward=2.0, max_reward=1.0), "rl"),
        (Query(best_of_group=True), "rl"),
        (Query(best=2), "preference"),
        (Query(best=0), "sft"),
        (Query(min_margin=1.0), "sft"),
        (Query(dedupe="rows"), "rl"),
    ],
)
async def test_a_query_that_cannot_be_meant_is_refused(world: World, tmp_path: Path, query: Query, view: str) -> None:
    with pytest.raises(BadQuery):
        await build(world.role, query, tmp_path / "out", view=view, format="parquet")


async def test_sft_rows_are_whole_conversations_with_their_tools(world: World, tmp_path: Path) -> None:
    calls = {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": [CALL]}
    await world.group("g", Said([calls, "it is 5"]), Said(["4"], reward=0.0), row={"task_type": "sum"})
    found, _ = await rows(world, tmp_path / "out", "sft", Query(best_of_group=True))
    (row,) = found
    absent = {"reasoning_content": None, "name": None, "tool_call_id": None, "tool_calls": None}
    system, user, call, result, answer = row["messages"]
    assert system == {"role": "system", "content": "be brief", **absent}
    assert user == {"role": "user", "content": "2 + 3 = ?", **absent}
    assert (call["content"], call["reasoning_content"]) == ("", "add")
    assert call["tool_calls"] == [
        {"id": "call-1", "type": "function", "function": {"name": "python", "arguments": '{"code":"2+3"}'}}
    ]
    assert (result["role"], result["content"], answer["content"]) == ("tool", "5", "it is 5")
    assert json.loads(row["tools"]) == TOOLS
    assert (row["reward"], row["turns"], row["dataset"], row["task_type"]) == (1.0, 2, "sums", "sum")
    assert (row["environment"], row["environment_version"], row["tokens"]) == ("shop", "1", 20)


async def test_the_best_of_each_group_are_taken_ties_by_their_place(world: World, tmp_path: Path) -> None:
    await world.group("g", *(Said(["x"], reward=reward) for reward in (0.0, 1.0, 0.5, 0.5)))
    await world.group("h", Said(["y"], reward=0.0))
    found, manifest = await rows(world, tmp_path / "out", "sft", Query(best=2))
    taken = sorted((row["group_id"], row["rollout_index"]) for row in found)
    assert taken == [("g", 1), ("g", 2), ("h", 0)]
    assert manifest.provenance.removed["best_of_group"] == 2
    assert manifest.provenance.query["best"] == 2


async def test_a_conversation_whose_tree_becomes_readable_after_its_score_is_waited_for(
    world: World, tmp_path: Path
) -> None:
    unit = partition_of(b"g", world.role.settings.kafka.groups)
    async with world.role.log.transactor("late") as late:
        await late.begin()
        await late.send(TREES.name, unit, b"g", b"before the trees of g")
        await world.group("g", Said(["4"]))
        building = asyncio.create_task(rows(world, tmp_path / "out", "sft"))
        await asyncio.wait({building}, timeout=0.3)
        await late.abort()
        found, _ = await building
    assert [row["group_id"] for row in found] == ["g"]


async def test_a_session_that_nobody_could_judge_is_no_example(world: World, tmp_path: Path) -> None:
    await world.group("g", Said(["a"]), Said(["b"], outcome=Outcome.infra_failure))
    found, manifest = await rows(world, tmp_path / "out", "sft")
    assert [row["outcome"] for row in found] == ["completed"]
    assert manifest.provenance.removed == {"excluded": 1}


async def test_a_pair_parts_where_the_policy_said_another_thing(world: World, tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    again = {**call, "tool_calls": [{**CALL, "id": "call-of-another-session"}]}
    await world.group("g", Said([call, "4"], 0.0), Said([again, "5"], 1.0), Said([call, "5!"], 0.5), Said(["6"], 0.5))
    (row,), _ = await rows(world, tmp_path / "out", "preference")
    assert [each["role"] for each in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert ([m["content"] for m in row["chosen"]], [m["content"] for m in row["rejected"]]) == (["5"], ["4"])
    assert (row["chosen_reward"], row["rejected_reward"], row["margin"]) == (1.0, 0.0, 1.0)
    query = Query(pairs="all", min_margin=0.5)
    every, manifest = await rows(world, tmp_path / "all", "preference", query)
    said = {(row["chosen"][-1]["content"], row["rejected"][-1]["content"], len(row["prompt"])) for row in every}
    assert said == {("5", "4", 4), ("5", "5!", 4), ("5", "6", 2), ("5!", "4", 4), ("6", "4", 2)}
    assert not manifest.provenance.removed


async def test_what_is_no_pair_is_counted_by_name(world: World, tmp_path: Path) -> None:
    await world.group("equal", Said(["a"]), Said(["b"]))
    await world.group("same", Said(["a"]), Said(["a"], 0.0))
    await world.group("apart", Said(["a"], system="you are A"), Said(["b"], 0.0, system="you are B"))
    await world.group("close", Said(["a"], 0.1), Said(["b"], 0.0))
    await world.group("pair", Said(["a"]), Said(["b"], 0.0))
    found, manifest = await rows(world, tmp_path / "out", "preference", Query(min_margin=0.5))
    assert [row["group_id"] for row in found] == ["pair"]
    assert manifest.provenance.removed == {
        "no_pair": 1, "same_conversation": 1, "no_common_prompt": 1, "min_margin": 1
    }  # fmt: skip


@pytest.mark.parametrize("view", ["rl", "sft", "preference"])
async def test_the_archive_gives_the_rows_that_the_topics_gave(world: World, tmp_path: Path, view: str) -> None:
    await world.group("g", Said(["a"]), Said(["b", "c"], 0.0), row={"type": "sum"})
    await world.group("h", Said(["d"]), Said(["e"], 0.0), tokens=1)
    await world.trained(0, "g", "h")
    query = Query(min_step=0, task_types=("sum",), expire_before=("1",))
    topics = await build(world.role, query, tmp_path / "topics", view=view, format="parquet")
    await flush(world.role)
    archive = await ArchiveLog.open(world.role.blobs, archive_name(world.role.settings))
    role = dataclasses.replace(world.role, log=archive, events=archive.events(writer="test"))
    archived = await build(role, query, tmp_path / "archive", view=view, format="arrow", source="archive")
    assert archived.rows_sha256 == topics.rows_sha256
    assert archived.provenance.query == topics.provenance.query | {"source": "archive"}
    assert archived.provenance.reading == topics.provenance.reading


@pytest.mark.parametrize(("dedupe", "left"), [("none", 6), ("tokens", 4), ("task", 4)])
async def test_repeats_are_dropped_by_content_or_by_task(world: World, tmp_path: Path, dedupe: str, left: int) -> None:
    await world.group("g", Said(["a"]), Said(["b"], 0.0), tokens=1)
    await world.group("h", Said(["a"]), Said(["b"], 0.0), task="u", tokens=1)
    await world.group("i", Said(["c"]), Said(["d"], 0.0), tokens=2)
    for view in ("rl", "sft"):
        found, manifest = await rows(world, tmp_path / view, view, Query(dedupe=dedupe))
        assert len(found) == left
        assert sum(manifest.provenance.removed.values()) == 6 - left
        if dedupe == "task":
            assert len({row["group_id"] for row in found}) == 2


async def test_a_conversation_that_cannot_be_told_is_passed_over_and_counted(world: World, tmp_path: Path) -> None:
    await world.group("g", Said(["a"]), Said([{"role": "assistant", "content": [{"type": "image_url"}]}], 0.0))
    found, manifest = await rows(world, tmp_path / "out", "sft")
    assert len(found) == 1
    assert manifest.provenance.removed == {"unreadable": 1}


async def test_an_object_that_is_gone_is_named_and_nothing_is_written(world: World, tmp_path: Path) -> None:
    await world.group("g", Said(["a"]), Said(["b"], 0.0))
    gone = BlobRef("f" * 64, 10)
    (sample, _) = world.samples["g"]
    await world.role.events.append(dataclasses.replace(sample, event_id="late", sample_id="late", token_ids=gone))
    with pytest.raises(MissingContent, match=rf"segment-samples\[\d\]@3: sample late: .*{'f' * 64}"):
        await build(world.role, Query(), tmp_path / "out", view="rl", format="parquet")
    assert not os.listdir(tmp_path)


async def test_a_conversation_follows_its_bases_and_the_first_record_of_each_turn(world: World, tmp_path: Path) -> None:
    """Turn 1 never reached the agent, which asked again after turn 0; turn 0 came twice, in two wordings."""
    await world.group("g", Said(["first", "lost", "then"], branches=True), Said(["other"], 0.0))
    found, _ = await rows(world, tmp_path / "out", "sft", Query(min_reward=1.0))
    (row,) = found
    assert [each["content"] for each in row["messages"] if each["role"] == "assistant"] == ["first", "then"]
    assert row["turns"] == 2


@pytest.mark.parametrize("seed", range(3))
async def test_bad_days_give_one_row_per_sample_and_per_judged_conversation(
    world: World, tmp_path: Path, seed: int
) -> None:
    """Zombies, repeats and turns of nobody, in any interleaving."""
    placed = []
    for event in bad_days(random.Random(seed), groups=12, partitions=2):
        partition, offset = await world.role.events.append(event)
        placed.append((TOPIC_OF[type(event).__name__].name, partition, offset, event))
    outputs = fold_history(placed, FoldRules(run_id="run", settings_sha256=SHA)).outputs
    for output in outputs:
        await world.role.events.append(output)
    samples = {each.sample_id: each for each in outputs if isinstance(each, SegmentSample)}
    found, manifest = await rows(world, tmp_path / "rl", "rl")
    assert {row["sample_id"]: row["token_ids"] for row in found} == {
        name: int32s(each.token_ids).tolist() for name, each in samples.items() if isinstance(each.token_ids, bytes)
    }
    assert manifest.counts.trained_tokens == sum(
        span.length for each in samples.values() for span in each.spans if span.trained
    )
    judged = {
        each.session_id for out in outputs if isinstance(out, GroupScored) for each in out.rollouts
        if each.excluded_reason is None
    }  # fmt: skip
    told = {out.session_id: out for out in outputs if isinstance(out, TurnTreeAssembled) and out.segments}
    found, _ = await rows(world, tmp_path / "sft", "sft")
    assert {row["session_id"] for row in found} == judged & set(told)
    for row in found:
        assert row["turns"] == len(row["messages"])
