"""Every event that may be written to the log: one frozen dataclass per record, with a .avsc file of the same name in
schemas/avro.

`ALL` maps a record's name to its class. `Event` is their structural union (every record has `event_id` and `run_id`).
"""

from __future__ import annotations

from typing import Any

from turnlog.schemas.events.batches import (
    BatchSample,
    BatchSkipped,
    DroppedSample,
    SampleBatchFormed,
    SourcePosition,
    StepCompleted,
    Weighting,
)
from turnlog.schemas.events.runs import DeadLetter, RoleFailed, RunConfigured, RunParent, RunPlace, RunPlanned
from turnlog.schemas.events.samples import (
    ExpertRows,
    GroupEmitted,
    GroupScored,
    GroupStatus,
    MaskReason,
    RolloutScore,
    SampleScored,
    SampleSpan,
    SegmentSample,
    TreeBooks,
    TreeLineage,
    TreeNode,
    TreeSegment,
    TurnTreeAssembled,
)
from turnlog.schemas.events.sessions import (
    Agent,
    Environment,
    Expects,
    GroupClosed,
    Outcome,
    RewardAssigned,
    RewardFailed,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    SkipRequested,
    StepRewardAssigned,
    Verifier,
)
from turnlog.schemas.events.tasks import GroupRequested, Limits, Purpose, RolloutRequested, Sampling
from turnlog.schemas.events.tools import (
    EgressRequest,
    EgressSource,
    SandboxLimits,
    SandboxSpec,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.events.turns import (
    Boundary,
    ExpertsLayout,
    FinishReason,
    ImageRef,
    TokenSnapshot,
    TurnCompleted,
    VersionSpan,
    sampled_tokens,
)
from turnlog.schemas.events.weights import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineRequested,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    WeightFile,
    WeightVersionPublished,
)

Event = Any
"""An instance of any class in `ALL`. The fold and the codec narrow it by class."""

ALL: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        RunConfigured, RunPlanned, GroupRequested, RolloutRequested,
        SessionStarted, SessionAdopted, RewardAssigned, RewardFailed, StepRewardAssigned, SessionFinished,
        GroupClosed, SkipRequested,
        TurnCompleted, TokenSnapshot,
        ToolCallRequested, ToolCallCancelled, ToolCallStarted, ToolCallCompleted,
        TurnTreeAssembled, SegmentSample, GroupScored, GroupEmitted, SampleScored,
        SampleBatchFormed, BatchSkipped, StepCompleted, WeightVersionPublished,
        EngineRegistered, EngineWeightsLoaded, EngineWeightsRefused, EngineDraining, EngineGone, EngineRequested,
        RoleFailed, DeadLetter,
    )
}  # fmt: skip
UNWRITTEN: frozenset[str] = frozenset()
"""Record kinds, and records that are a new arm of a union, which this release reads but does not write. Roles of the
previous release, which may still run beside it, do not know them. The next release removes them from this set and
writes them."""

__all__ = [
    "ALL",
    "UNWRITTEN",
    "Agent",
    "BatchSample",
    "BatchSkipped",
    "Boundary",
    "DeadLetter",
    "DroppedSample",
    "EgressRequest",
    "EgressSource",
    "EngineDraining",
    "EngineGone",
    "EngineRegistered",
    "EngineRequested",
    "EngineWeightsLoaded",
    "EngineWeightsRefused",
    "Environment",
    "Event",
    "Expects",
    "ExpertRows",
    "ExpertsLayout",
    "FinishReason",
    "GroupClosed",
    "GroupEmitted",
    "GroupRequested",
    "GroupScored",
    "GroupStatus",
    "ImageRef",
    "Limits",
    "MaskReason",
    "Outcome",
    "Purpose",
    "RewardAssigned",
    "RewardFailed",
    "RoleFailed",
    "RolloutRequested",
    "RolloutScore",
    "RunConfigured",
    "RunParent",
    "RunPlace",
    "RunPlanned",
    "SampleBatchFormed",
    "SampleScored",
    "SampleSpan",
    "Sampling",
    "SandboxLimits",
    "SandboxSpec",
    "SegmentSample",
    "SessionAdopted",
    "SessionFinished",
    "SessionStarted",
    "SkipRequested",
    "SourcePosition",
    "StepCompleted",
    "StepRewardAssigned",
    "TokenSnapshot",
    "ToolCallCancelled",
    "ToolCallCompleted",
    "ToolCallRequested",
    "ToolCallStarted",
    "ToolStatus",
    "TreeBooks",
    "TreeLineage",
    "TreeNode",
    "TreeSegment",
    "TurnCompleted",
    "TurnTreeAssembled",
    "Verifier",
    "VersionSpan",
    "WeightFile",
    "WeightVersionPublished",
    "Weighting",
    "sampled_tokens",
]  # fmt: skip
