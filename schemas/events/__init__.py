"""Every event that may be written to the log: one frozen dataclass per record, with a .avsc file of the same name in
schemas/avro."""

# Packed, because one name on each line would fill a page:
# isort: off
from turnlog.schemas.events.batches import (
    BatchSample, BatchSkipped, DroppedSample, SampleBatchFormed, SourcePosition, StepCompleted, Weighting)  # fmt: skip
from turnlog.schemas.events.catalogue import ALL, OF_SEALED_RUNS, UNWRITTEN, Event
from turnlog.schemas.events.keys import SessionKeyCreated, SessionKeyErased
from turnlog.schemas.events.runs import (
    AccessAudited, DeadLetter, RoleFailed, RunConfigured, RunParent, RunPlace, RunPlanned)  # fmt: skip
from turnlog.schemas.events.samples import (
    ExpertRows, GroupEmitted, GroupScored, GroupStatus, MaskReason, PlayerScore, RoleScore, RolloutScore, SampleScored,
    SampleSpan, SegmentSample, TreeBooks, TreeLineage, TreeNode, TreeSegment, TurnTreeAssembled)  # fmt: skip
from turnlog.schemas.events.sessions import (
    Agent, Environment, ErasedLineage, ErasedTurn, Expects, GroupClosed, Outcome, RewardAssigned, RewardFailed,
    SessionAdopted, SessionErased, SessionFinished, SessionStarted, SkipRequested, StepRewardAssigned, Verifier,
)  # fmt: skip
from turnlog.schemas.events.tasks import GroupRequested, Limits, Purpose, RolloutRequested, Sampling
from turnlog.schemas.events.tenants import TenantCommandCompleted, TenantCommandReceived, TenantStateSaved
from turnlog.schemas.events.tools import (
    EgressRequest, EgressSource, SandboxLimits, SandboxSpec, ToolCallCancelled, ToolCallCompleted, ToolCallRequested,
    ToolCallStarted, ToolStatus)  # fmt: skip
from turnlog.schemas.events.turns import (
    Boundary, ExpertsLayout, FinishReason, ImageRef, TokenSnapshot, TurnCompleted, VersionSpan,
    sampled_tokens)  # fmt: skip
from turnlog.schemas.events.weights import (
    EngineDraining, EngineGone, EngineRegistered, EngineRequested, EngineWeightsAwaited, EngineWeightsLoaded,
    EngineWeightsRefused, WeightFile, WeightTransferBegun, WeightVersionPublished)  # fmt: skip

__all__ = [
    "ALL", "OF_SEALED_RUNS", "UNWRITTEN", "AccessAudited", "Agent", "BatchSample", "BatchSkipped", "Boundary",
    "DeadLetter", "DroppedSample", "EgressRequest", "EgressSource", "EngineDraining", "EngineGone", "EngineRegistered",
    "EngineRequested", "EngineWeightsAwaited", "EngineWeightsLoaded", "EngineWeightsRefused", "Environment",
    "ErasedLineage", "ErasedTurn", "Event", "Expects", "ExpertRows", "ExpertsLayout", "FinishReason", "GroupClosed",
    "GroupEmitted", "GroupRequested", "GroupScored", "GroupStatus", "ImageRef", "Limits", "MaskReason", "Outcome",
    "PlayerScore", "Purpose", "RewardAssigned", "RewardFailed", "RoleFailed", "RoleScore", "RolloutRequested",
    "RolloutScore", "RunConfigured", "RunParent", "RunPlace", "RunPlanned", "SampleBatchFormed", "SampleScored",
    "SampleSpan", "Sampling", "SandboxLimits", "SandboxSpec", "SegmentSample", "SessionAdopted", "SessionErased",
    "SessionFinished", "SessionKeyCreated", "SessionKeyErased", "SessionStarted", "SkipRequested", "SourcePosition",
    "StepCompleted", "StepRewardAssigned", "TenantCommandCompleted", "TenantCommandReceived", "TenantStateSaved",
    "TokenSnapshot", "ToolCallCancelled", "ToolCallCompleted", "ToolCallRequested", "ToolCallStarted", "ToolStatus",
    "TreeBooks", "TreeLineage", "TreeNode", "TreeSegment", "TurnCompleted", "TurnTreeAssembled", "Verifier",
    "VersionSpan", "WeightFile", "WeightTransferBegun", "WeightVersionPublished", "Weighting",
    "sampled_tokens"]  # fmt: skip
