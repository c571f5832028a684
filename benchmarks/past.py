"""A run's past, appended directly: sessions that ended, groups that were scored, drawn, trained and published.

Every record of it is one that its role would have written, folds included, and every group's commits stand where the
role would have left them; nothing but the batch files is missing. So a role that starts on it has only that to read
which it reads of any run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from bulk import Bulk, Placed, bulk

from tests.fakes.sessions import GroupName, SessionStory, Shape
from turnlog.infra.log import Commit, Partition, TopicSpec, partition_of
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured, configuration
from turnlog.names import ConsumerGroup
from turnlog.plugins.faust_views import view
from turnlog.processors.core.fold.unit import Done, LowWaterMarks, UnitFold, encode_marks
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.processors.core.methods.rules import FoldRules
from turnlog.processors.runtime.assembler import assembler_plan
from turnlog.processors.runtime.unit import AssemblerPlan
from turnlog.schemas import ids, topics
from turnlog.schemas.events import (
    BatchSample,
    EngineWeightsLoaded,
    Event,
    GroupEmitted,
    GroupRequested,
    GroupScored,
    Limits,
    Purpose,
    RolloutRequested,
    RunConfigured,
    SampleBatchFormed,
    Sampling,
    SandboxLimits,
    SandboxSpec,
    SegmentSample,
    SourcePosition,
    StepCompleted,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
    TurnTreeAssembled,
    Weighting,
    WeightVersionPublished,
)
from turnlog.schemas.topics import TOPIC_OF, Topic
from turnlog.schemas.types import BlobRef
from turnlog.settings import Settings

GROUP, PROMPTS = 8, 8
"""Rollouts of a group, groups of a draw."""
SESSIONS_PER_DRAW = GROUP * PROMPTS
SHAPE = Shape(delta=12, output=8)
ENGINE = "engine-0"
TABLES = {topics.SESSIONS.name: "sessions", topics.STEPS.name: "steps", topics.WEIGHTS.name: "versions"}
DRAWS_AT_ONCE = 16
"""Sent together: about 12,000 records."""


@dataclass(slots=True)
class Past:
    """What was appended so far."""

    role: Role
    dataset: str
    weights: WeightVersionPublished
    """Version 0; the others differ in number alone."""
    draws: int = 0
    manifest_at: int = 0
    """Offset of the last draw's manifest."""
    scores: list[GroupScored] = field(default_factory=list)
    """Of the last draw."""
    _units: dict[int, UnitFold] = field(default_factory=dict)
    _ends: dict[Partition, int] = field(default_factory=dict)
    _rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    async def begin(self) -> None:
        """The run is configured, its first weights are published and loaded."""
        settings = self.settings
        plan = self.plan
        for unit in range(settings.kafka.groups):
            marks = LowWaterMarks.start(INPUTS)
            self._units[unit] = UnitFold(
                marks, Done(), plan.factory, run_id=plan.run_id, horizon_records=plan.horizon_records
            )
        await self.place([self.configured, self.weights, loaded(self.weights)])

    async def append(self, sessions: int) -> None:
        """Whole draws, until there are so many sessions; then the commits of every role."""
        kafka = self.settings.kafka
        counts = {topics.SESSIONS: kafka.groups, topics.STEPS: 1, topics.WEIGHTS: 1}
        specs = [TopicSpec(self._changelog(topic), count, 1, {"cleanup.policy": "compact"})
                 for topic, count in counts.items()]  # fmt: skip
        await self.role.log.create_topics(specs)
        async with bulk(self.role, self._ends) as appending:
            self._viewed(appending, self.weights, 0)
            while self.draws * SESSIONS_PER_DRAW < sessions:
                self._draw(appending)
                if self.draws % DRAWS_AT_ONCE == 0:
                    await appending.send()
        await self._commit()

    def group(self, number: int, version: int) -> list[Event]:
        """The agent records of one whole group, sampled with one version, its rollouts asked for before."""
        name = group_id(self.settings, number)
        return list(agents(GroupName(self.settings.run.id, name, self.floor(name), GROUP), self._rng, version))

    def floor(self, group: str) -> int:
        """What a feeder reads before it asks for the group."""
        unit = partition_of(group.encode(), self.settings.kafka.groups)
        return self._ends.get(Partition(topics.SESSIONS.name, unit), 0)

    def asked(self, number: int) -> Iterator[Event]:
        """What a feeder writes of one group."""
        group = group_id(self.settings, number)
        return asked(self.settings, self.dataset, number, self.floor(group))

    async def place(self, events: Iterable[Event]) -> list[tuple[Event, Placed]]:
        """Append in order, wait for the acknowledgements."""
        listed = list(events)
        acks = await asyncio.gather(*[await self.role.events.submit(event) for event in listed])
        placed = []
        for event, (partition, offset) in zip(listed, acks, strict=True):
            topic = TOPIC_OF[type(event).__name__]
            self._ends[Partition(topic.name, partition)] = offset + 1
            placed.append((event, Placed(topic.name, partition, offset, topic.key_of(event))))
        return placed

    @property
    def configured(self) -> RunConfigured:
        """What `turnlog run` writes first."""
        return configuration(self.settings)

    @property
    def plan(self) -> AssemblerPlan:
        """Of its assembler."""
        return assembler_plan(Configured.today(self.settings), self.settings.assembler)

    @property
    def rules(self) -> FoldRules:
        """Of its folds."""
        return Configured.today(self.settings).rules()

    @property
    def settings(self) -> Settings:
        """Of the run."""
        return self.role.settings

    def _draw(self, appending: Bulk) -> None:
        numbers = range(self.draws * PROMPTS, (self.draws + 1) * PROMPTS)
        appending.add_all(event for number in numbers for event in self.asked(number))
        appending.add_all(event for number in numbers for event in called(self.settings, number))
        inputs = [event for number in numbers for event in self.group(number, self.draws)]
        outputs = []
        for event, at in appending.add_all(inputs):
            outputs += self._folded(event, at)
            self._viewed(appending, event, at.partition)
        samples = []
        self.scores = [event for event in outputs if isinstance(event, GroupScored)]
        for event, at in appending.add_all(outputs):
            self._note(event, at)
            if isinstance(event, SegmentSample):
                samples.append((event, at))
        trained = appending.add_all(self._trained(samples))
        self.manifest_at = trained[0][1].offset
        for event, at in trained:
            self._viewed(appending, event, at.partition)
        self.draws += 1

    def _viewed(self, appending: Bulk, event: Event, partition: int) -> None:
        """What the live views would have written into the changelogs of their tables."""
        if (update := view(event)) is not None:
            key, value = (json.dumps(each).encode() for each in update)
            appending.add_raw(Partition(self._changelog(TOPIC_OF[type(event).__name__]), partition), key, value)

    def _changelog(self, topic: Topic) -> str:
        """Of the table that the live views make of the topic."""
        group = ConsumerGroup.VIEWS.format(run=self.settings.run.id)
        return f"{group}-{TABLES[topic.name]}-changelog"

    def _folded(self, event: Event, at: Placed) -> list[Event]:
        fold = self._units[at.partition]
        taken = fold.take(at, event)
        fold.pass_over(at)
        return taken.outputs

    def _note(self, event: Event, at: Placed) -> None:
        low_water = self._units[at.partition].low_water
        match event:
            case TurnTreeAssembled():
                low_water.note_tree(event.session_id, at.offset)
            case GroupEmitted():
                low_water.note_score(event.group_id, at.offset)

    def _trained(self, samples: list[tuple[SegmentSample, Placed]]) -> Iterator[Event]:
        run_id = self.settings.run.id
        ends = [self._ends.get(Partition(topics.SAMPLES.name, n), 0) for n in range(self.settings.kafka.groups)]
        manifest = formed(run_id, self.draws, samples, ends)
        version = version_after(self.weights, self.draws)
        yield from (manifest, stepped(run_id, self.draws, manifest.trained_tokens), version, loaded(version))

    async def _commit(self) -> None:
        """Where a role of each kind would have left off."""
        run_id, kafka = self.settings.run.id, self.settings.kafka
        plan = self.plan
        commits: dict[str, dict[Partition, Commit]] = {plan.group: {}, f"{run_id}.runner": {}, f"{run_id}.sandbox": {}}
        for unit, fold in self._units.items():
            ends = [self._ends.get(Partition(topic.name, unit), 0) for topic in (topics.TREES, topics.GROUP_SCORES)]
            marks = fold.low_water.advance((ends[0], ends[1]))
            commits[plan.group] |= {
                Partition(topic, unit): Commit(marks.low[topic], encode_marks(marks, plan.fold, topic))
                for topic in INPUTS
            }
        for number in range(kafka.rollouts):
            tasks, calls, results = (
                Partition(topic.name, number) for topic in (topics.TASKS, topics.TOOL_CALLS, topics.TOOL_RESULTS)
            )
            end = self._ends.get(results, 0)
            commits[f"{run_id}.runner"] |= {tasks: Commit(self._ends.get(tasks, 0)), results: Commit(end)}
            commits[f"{run_id}.sandbox"] |= {calls: Commit(self._ends.get(calls, 0), json.dumps({"results": end}))}
        seen = [Partition(topics.SESSIONS.name, number) for number in range(kafka.groups)]
        seen += [Partition(topics.STEPS.name, 0), Partition(topics.WEIGHTS.name, 0)]
        commits[ConsumerGroup.VIEWS.format(run=run_id)] = {place: Commit(self._ends.get(place, 0)) for place in seen}
        async with self.role.log.transactor(f"{run_id}.past") as transactor:
            for group, places in commits.items():
                await transactor.begin()
                await transactor.offsets(group, places)
                await transactor.commit()


def group_id(settings: Settings, number: int) -> str:
    """Of the group at the number-th place of the first epoch."""
    return ids.group_id(settings.run.id, f"task-{number}", 0)


def asked(settings: Settings, dataset: str, number: int, floor: int) -> Iterator[Event]:
    """A group's request and those of its rollouts."""
    group, run_id = group_id(settings, number), settings.run.id
    about = {"run_id": run_id, "group_id": group, "draw": 0, "dataset": dataset, "dataset_epoch": 0, "index": number}
    yield GroupRequested(event_id=ids.digest("GroupRequested", group), **about, purpose=Purpose.train, group_size=GROUP)  # type: ignore[arg-type]
    for index in range(GROUP):
        rollout = ids.rollout_id(group, index)
        yield RolloutRequested(
            event_id=ids.digest("RolloutRequested", rollout), **about, floor=floor, task_id=f"task-{number}",  # type: ignore[arg-type]
            rollout_id=rollout, rollout_index=index, group_size=GROUP, recipe="calc", purpose=Purpose.train,
            task=b'{"answer":"8","prompt":"3 + 5 = ?"}', sampling=Sampling(), limits=Limits(), min_weight_version=0,
        )  # fmt: skip


def agents(group: GroupName, rng: np.random.Generator, version: int) -> Iterator[Event]:
    """A group without accidents, one turn a session."""
    for index in range(group.size):
        story = SessionStory(group, index, rng)
        yield story.started()
        yield from story.turn(SHAPE, version=version)
        yield story.rewarded(float(rng.integers(0, 3)))
        yield story.finished()


def call(settings: Settings, rollout: str, session: str) -> ToolCallRequested:
    """A session's one tool call."""
    return ToolCallRequested(
        event_id=ids.digest("ToolCallRequested", session), run_id=settings.run.id, group_id="g", session_id=session,
        floor=0, rollout_id=rollout, call_id=f"{session}-0", call_seq=0, tool="shell",
        arguments=b'{"command": "echo 8"}', sandbox=SandboxSpec(limits=SandboxLimits()), workspace=None,
        deadline_s=600.0,
    )  # fmt: skip


def called(settings: Settings, number: int) -> Iterator[Event]:
    """One answered tool call a session of the group."""
    for index in range(GROUP):
        rollout = ids.rollout_id(group_id(settings, number), index)
        request = call(settings, rollout, ids.session_id(rollout, 0))
        names = ("run_id", "group_id", "session_id", "floor", "rollout_id", "call_id")
        about = {name: getattr(request, name) for name in names}
        yield request
        yield ToolCallStarted(event_id=f"{request.call_id}-started", **about, attempt=0, worker="past")
        yield ToolCallCompleted(
            event_id=f"{request.call_id}-completed", **about, call_seq=0, status=ToolStatus.ok, reason="", exit_code=0,
            output=b"8\n", full_output=None, duration_s=0.01, queue_s=0.0, workspace=None, attempt=0, worker="past",
            cached=False,
        )  # fmt: skip


def formed(run_id: str, draw: int, samples: list[tuple[SegmentSample, Placed]], ends: list[int]) -> SampleBatchFormed:
    """The manifest of a draw of one batch; its file is nowhere."""
    rows = tuple(
        BatchSample(
            sample.sample_id, sample.group_id, sample.session_id, sample.rollout_index, 0, SHAPE.delta + SHAPE.output,
            SHAPE.output, SESSIONS_PER_DRAW * SHAPE.output, at.partition, at.offset,
        )
        for sample, at in samples
    )  # fmt: skip
    return SampleBatchFormed(
        event_id=ids.digest("SampleBatchFormed", run_id, draw), run_id=run_id, batch_index=draw, draw_index=draw,
        part=0, parts=1, file=BlobRef("0" * 64, 1), rows_sha256="0" * 64, samples=rows,
        groups=tuple(sorted({row.group_id for row in rows})), weighting=Weighting.prompt, prompts=PROMPTS,
        trajectories=len(rows), trained_tokens=len(rows) * SHAPE.output, constant_length=0, masked={},
        trainer_version=draw, max_lag=0, dropped=(), whitening_mean=None, whitening_std=None,
        positions=tuple(SourcePosition(number, end) for number, end in enumerate(ends)), settings_sha256="0" * 64,
    )  # fmt: skip


def stepped(run_id: str, draw: int, trained: int) -> StepCompleted:
    """The step on that batch."""
    return StepCompleted(
        event_id=ids.digest("StepCompleted", run_id, draw, 0), run_id=run_id, batch_index=draw, draw_index=draw,
        incarnation=0, step=draw + 1, loss=0.0, grad_norm=1.0, learning_rate=1e-3, lag_max=0, tokens=2 * trained,
        trained_tokens=trained, masked={}, skipped=False, reward_mean=1.0, logprob_gap_max=0.0, logprob_gap_mean=0.0,
        entropy=None, clip_fraction=0.0, seconds={"wait": 0.0, "read": 0.0, "step": 1.0}, world_size=1,
    )  # fmt: skip


def version_after(first: WeightVersionPublished, draw: int) -> WeightVersionPublished:
    """The version that goes out after a draw."""
    event_id = ids.digest("WeightVersionPublished", first.run_id, draw + 1)
    return dataclasses.replace(first, event_id=event_id, version=draw + 1, step=draw + 1, batch_index=draw)


def loaded(weights: WeightVersionPublished) -> EngineWeightsLoaded:
    """The engine's acknowledgement."""
    return EngineWeightsLoaded(
        event_id=ids.digest("EngineWeightsLoaded", weights.run_id, weights.version), run_id=weights.run_id,
        engine_id=ENGINE, url="http://127.0.0.1:1", state="serving", version=weights.version, superseded=(), seconds={},
    )  # fmt: skip
