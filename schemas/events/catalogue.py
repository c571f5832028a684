"""The catalogue of events.

`ALL` maps a record's name to its class. `Event` is their structural union (every record has `event_id` and `run_id`).
"""

from __future__ import annotations

from typing import Any

from turnlog.schemas.events.batches import BatchSkipped, SampleBatchFormed, StepCompleted
from turnlog.schemas.events.keys import SessionKeyCreated, SessionKeyErased
from turnlog.schemas.events.runs import AccessAudited, DeadLetter, RoleFailed, RunConfigured, RunPlanned
from turnlog.schemas.events.samples import GroupEmitted, GroupScored, SampleScored, SegmentSample, TurnTreeAssembled
from turnlog.schemas.events.sessions import (
    GroupClosed,
    RewardAssigned,
    RewardFailed,
    SessionAdopted,
    SessionErased,
    SessionFinished,
    SessionStarted,
    SkipRequested,
    StepRewardAssigned,
)
from turnlog.schemas.events.tasks import GroupRequested, RolloutRequested
from turnlog.schemas.events.tenants import TenantCommandCompleted, TenantCommandReceived, TenantStateSaved
from turnlog.schemas.events.tools import ToolCallCancelled, ToolCallCompleted, ToolCallRequested, ToolCallStarted
from turnlog.schemas.events.turns import TokenSnapshot, TurnCompleted
from turnlog.schemas.events.weights import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineRequested,
    EngineWeightsAwaited,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    WeightTransferBegun,
    WeightVersionPublished,
)

Event = Any
"""An instance of any class in `ALL`. The fold and the codec narrow it by class."""

ALL: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        RunConfigured, RunPlanned, GroupRequested, RolloutRequested,
        SessionStarted, SessionAdopted, RewardAssigned, RewardFailed, StepRewardAssigned, SessionFinished,
        GroupClosed, SkipRequested, SessionErased,
        TurnCompleted, TokenSnapshot,
        ToolCallRequested, ToolCallCancelled, ToolCallStarted, ToolCallCompleted,
        TurnTreeAssembled, SegmentSample, GroupScored, GroupEmitted, SampleScored,
        SampleBatchFormed, BatchSkipped, StepCompleted, WeightVersionPublished, WeightTransferBegun,
        EngineRegistered, EngineWeightsAwaited, EngineWeightsLoaded, EngineWeightsRefused, EngineDraining, EngineGone,
        EngineRequested,
        SessionKeyCreated, SessionKeyErased,
        RoleFailed, DeadLetter, AccessAudited,
        TenantCommandReceived, TenantCommandCompleted, TenantStateSaved,
    )
}  # fmt: skip
OF_SEALED_RUNS: frozenset[str] = frozenset({"SessionErased"})
"""Record kinds that only runs with [erasure] have. They may stand on a topic that the previous release reads, because
that release cannot take part in such a run anyway: it does not know encrypted content."""
UNWRITTEN: frozenset[str] = frozenset()
"""Record kinds, and records that are a new arm of a union, which this release reads but does not write. Roles of the
previous release, which may still run beside it, do not know them. The next release removes them from this set and
writes them."""
