"""The topic catalogue: name, key, records, partitions, configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INLINE_LIMIT_BYTES = 1 << 20
"""Larger payloads go to the object store."""
MAX_MESSAGE_BYTES = 8 << 20
FOREVER = "-1"


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic. `partitions` names a count of the settings ("groups", "rollouts") or is 1."""

    name: str
    key: str
    """The record field whose UTF-8 text is the key."""
    records: tuple[str, ...]
    partitions: str
    """groups | rollouts | one"""

    def config(self) -> dict[str, str]:
        """Broker configuration: nothing expires, nothing is compacted."""
        return {
            "cleanup.policy": "delete",
            "retention.ms": FOREVER,
            "retention.bytes": FOREVER,
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
            "message.timestamp.type": "CreateTime",
        }

    def key_of(self, event: Any) -> bytes:
        """The Kafka key of `event` in this topic: UTF-8 of the key field, or its bytes as they are."""
        value = getattr(event, self.key)
        return value if isinstance(value, bytes) else str(value).encode()


SESSIONS = Topic(
    "agent.sessions",
    "group_id",
    (
        "SessionStarted",
        "SessionAdopted",
        "RewardAssigned",
        "RewardFailed",
        "StepRewardAssigned",
        "SessionFinished",
        "GroupClosed",
        "SkipRequested",
    ),
    "groups",
)
RUNS = Topic("runs", "run_id", ("RunConfigured", "RunPlanned"), "one")
GROUP_REQUESTS = Topic("group-requests", "run_id", ("GroupRequested",), "one")
TASKS = Topic("tasks", "rollout_id", ("RolloutRequested",), "rollouts")
TURNS = Topic("agent.turns", "group_id", ("TurnCompleted",), "groups")
SNAPSHOTS = Topic("agent.token-snapshots", "group_id", ("TokenSnapshot",), "groups")
TOOL_CALLS = Topic("agent.tool-calls", "rollout_id", ("ToolCallRequested", "ToolCallCancelled"), "rollouts")
TOOL_RESULTS = Topic("agent.tool-results", "rollout_id", ("ToolCallStarted", "ToolCallCompleted"), "rollouts")
TREES = Topic("turn-trees", "group_id", ("TurnTreeAssembled",), "groups")
SAMPLES = Topic("segment-samples", "group_id", ("SegmentSample", "GroupScored"), "groups")
GROUP_SCORES = Topic("group-scores", "group_id", ("GroupEmitted",), "groups")
SCORES = Topic("sample-scores", "group_id", ("SampleScored",), "groups")
BATCHES = Topic("sample-batches", "run_id", ("SampleBatchFormed", "BatchSkipped"), "one")
STEPS = Topic("train-steps", "run_id", ("StepCompleted",), "one")
WEIGHTS = Topic("weight-versions", "run_id", ("WeightVersionPublished",), "one")
ENGINES = Topic(
    "engine-status",
    "engine_id",
    ("EngineRegistered", "EngineWeightsLoaded", "EngineWeightsRefused", "EngineDraining", "EngineGone"),
    "one",
)
ENGINE_REQUESTS = Topic("engine-requests", "engine_id", ("EngineRequested",), "one")
RUN_HEALTH = Topic("run-health", "run_id", ("RoleFailed",), "one")
DEAD_LETTERS = Topic("dead-letters", "key", ("DeadLetter",), "one")

CATALOGUE: tuple[Topic, ...] = (
    RUNS, GROUP_REQUESTS, TASKS, SESSIONS, TURNS, SNAPSHOTS, TOOL_CALLS, TOOL_RESULTS, TREES, SAMPLES, GROUP_SCORES,
    SCORES, BATCHES, STEPS, WEIGHTS, ENGINES, ENGINE_REQUESTS, RUN_HEALTH, DEAD_LETTERS,
)  # fmt: skip
CONTROL: tuple[Topic, ...] = (
    RUNS, GROUP_REQUESTS, GROUP_SCORES, BATCHES, STEPS, WEIGHTS, ENGINES, ENGINE_REQUESTS, RUN_HEALTH, DEAD_LETTERS,
)  # fmt: skip
"""What roles and operators read from its beginning: small, and whole for the run's life. Of every other topic they need
what is under way, so that the rest may be deleted once it is archived (docs/archive.md)."""
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in CATALOGUE}
TOPIC_OF: dict[str, Topic] = {record: topic for topic in CATALOGUE for record in topic.records}
"""The one topic of each record."""
