"""The topic catalogue: name, key, records, partitions and configuration of each topic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INLINE_LIMIT_BYTES = 1 << 20
"""Maximum size of an inline payload; larger ones go to the object store."""
MAX_MESSAGE_BYTES = 8 << 20
FOREVER = "-1"
COMPACTION_MS = "600000"
"""Milliseconds after which a later record of a compacted topic lets the broker remove a record that was replaced."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic. `partitions` names a partition count of the settings ("groups", "rollouts") or is "one"."""

    name: str
    key: str
    """The record field whose UTF-8 text is the Kafka key."""
    records: tuple[str, ...]
    partitions: str
    """groups, rollouts or one."""
    compacted: bool = False
    """True if only the last record of each key is kept."""

    def config(self) -> dict[str, str]:
        """Return the topic's configuration on the broker: nothing expires, and nothing is compacted unless the topic
        says so."""
        compaction = {
            "segment.ms": COMPACTION_MS,  # a record is compacted away only once its segment is closed
            "max.compaction.lag.ms": COMPACTION_MS,
            "min.cleanable.dirty.ratio": "0.01",
        }
        return (compaction if self.compacted else {}) | {
            "cleanup.policy": "compact" if self.compacted else "delete",
            "retention.ms": FOREVER,
            "retention.bytes": FOREVER,
            "max.message.bytes": str(MAX_MESSAGE_BYTES),
            "message.timestamp.type": "CreateTime",
        }

    def key_of(self, event: Any) -> bytes:
        """Return the Kafka key of `event` in this topic: the key field in UTF-8, or unchanged if it is bytes."""
        value: str | bytes = getattr(event, self.key)
        return value if isinstance(value, bytes) else value.encode()


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
        "SessionErased",
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
TRANSFERS = Topic("weight-transfers", "run_id", ("EngineWeightsAwaited", "WeightTransferBegun"), "one")
ENGINES = Topic(
    "engine-status",
    "engine_id",
    ("EngineRegistered", "EngineWeightsLoaded", "EngineWeightsRefused", "EngineDraining", "EngineGone"),
    "one",
)
ENGINE_REQUESTS = Topic("engine-requests", "engine_id", ("EngineRequested",), "one")
SESSION_KEYS = Topic("session-keys", "key_id", ("SessionKeyCreated", "SessionKeyErased"), "one", compacted=True)
RUN_HEALTH = Topic("run-health", "run_id", ("RoleFailed",), "one")
TENANT_COMMANDS = Topic("tenant-commands", "run_id", ("TenantCommandReceived",), "one")
TENANT_RESULTS = Topic("tenant-results", "run_id", ("TenantCommandCompleted", "TenantStateSaved"), "one")
AUDIT = Topic("audit", "run_id", ("AccessAudited",), "one")
DEAD_LETTERS = Topic("dead-letters", "key", ("DeadLetter",), "one")

CATALOGUE: tuple[Topic, ...] = (
    RUNS, GROUP_REQUESTS, TASKS, SESSIONS, TURNS, SNAPSHOTS, TOOL_CALLS, TOOL_RESULTS, TREES, SAMPLES, GROUP_SCORES,
    SCORES, BATCHES, STEPS, WEIGHTS, TRANSFERS, ENGINES, ENGINE_REQUESTS, SESSION_KEYS, RUN_HEALTH, TENANT_COMMANDS,
    TENANT_RESULTS, AUDIT, DEAD_LETTERS,
)  # fmt: skip
CONTROL: tuple[Topic, ...] = (
    RUNS, GROUP_REQUESTS, GROUP_SCORES, BATCHES, STEPS, WEIGHTS, TRANSFERS, ENGINES, ENGINE_REQUESTS, SESSION_KEYS,
    RUN_HEALTH, TENANT_COMMANDS, TENANT_RESULTS, AUDIT, DEAD_LETTERS,
)  # fmt: skip
"""Topics that roles and operators read from the beginning: they are small and kept for the life of the run. Of every
other topic only records of unfinished work are needed, so older ones may be deleted once they are archived
(docs/archive.md)."""
ARCHIVED: tuple[Topic, ...] = tuple(topic for topic in CATALOGUE if topic is not SESSION_KEYS)
"""Topics that the archive copies: not the keys of sessions, since what is archived cannot be erased."""
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in CATALOGUE}
TOPIC_OF: dict[str, Topic] = {record: topic for topic in CATALOGUE for record in topic.records}
"""Record name -> the one topic that holds it."""
