"""What the assembler derives: trees, segments as samples, group scores."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from turnlog.schemas.events.sessions import Outcome
from turnlog.schemas.events.tasks import Purpose
from turnlog.schemas.events.turns import FinishReason, ImageRef
from turnlog.schemas.types import BlobRef, Float32Payload, Float32s, Int32Payload, TurnId


class MaskReason(StrEnum):
    """Why a sampled token was not trained: the closed list of folds.md 4."""

    unknown = "unknown"
    undelivered = "undelivered"
    aborted = "aborted"
    side_call = "side_call"
    excluded_outcome = "excluded_outcome"
    discarded_group = "discarded_group"
    refused = "refused"
    not_named = "not_named"
    late = "late"
    length_cut = "length_cut"
    version_mask = "version_mask"
    stale = "stale"
    trainer_mask = "trainer_mask"
    step_skipped = "step_skipped"
    unused = "unused"
    realigned = "realigned"
    rewritten = "rewritten"
    unrouted = "unrouted"


class GroupStatus(StrEnum):
    """What becomes of a settled group."""

    unknown = "unknown"
    trained = "trained"
    discarded = "discarded"
    not_training = "not_training"


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One turn of the tree."""

    turn: TurnId
    base: TurnId | None
    lineage: int
    prompt_tokens: int
    output_tokens: int
    version_min: int
    version_max: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class TreeLineage:
    """Turns that continue one conversation; kind is main | sub_agent | side_call."""

    id: int
    kind: str


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """A maximal run of turns whose tokens are one contiguous sequence."""

    index: int
    turns: tuple[TurnId, ...]
    tokens: int
    trained: int
    context: int


@dataclass(frozen=True, slots=True)
class TreeBooks:
    """sampled == trained + sum(masked.values()), always."""

    sampled: int
    trained: int
    masked: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTreeAssembled:
    """Structure and books of one session, no tokens."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    rollout_id: str
    nodes: tuple[TreeNode, ...]
    lineages: tuple[TreeLineage, ...]
    segments: tuple[TreeSegment, ...]
    anchor_segment: int | None
    books: TreeBooks
    outcome: Outcome
    reward: float | None
    duplicated_prefix_tokens: int
    fold_version: str
    settings_sha256: str


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Output tokens of one turn and one version inside a segment: [start, start + length) of token_ids."""

    start: int
    length: int
    turn: TurnId
    version: int
    trained: bool
    advantage: float | None = None
    """Set by per-turn estimators only; else the sample's advantage holds."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Routed-expert rows of a blob that land in the segment."""

    rows: BlobRef
    row_start: int
    row_count: int
    target_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSample:
    """One training row."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    rollout_id: str
    rollout_index: int
    task_id: str
    sample_id: str
    purpose: Purpose
    segment_index: int
    segment_count: int
    is_anchor: bool
    token_ids: Int32Payload
    spans: tuple[SampleSpan, ...]
    """In order of start; tokens outside all spans are context."""
    logprobs: Float32Payload
    """Of the output tokens in spans, concatenated."""
    temperature: float
    logprob_kind: str
    advantage: float
    reward: float
    outcome: Outcome
    recipe: str
    weight_version_min: int
    weight_version_max: int
    experts: tuple[ExpertRows, ...] = ()
    """Cover positions 0 to tokens - 2 exactly, or are none."""
    images: tuple[ImageRef, ...] = ()
    """Every image whose tokens are in token_ids, by position."""
    experts_gap: str = ""
    """Why there are no experts although some turn has them: turn_without_rows | layouts_differ."""


@dataclass(frozen=True, slots=True)
class RolloutScore:
    """One rollout of a scored group."""

    rollout_id: str
    session_id: str
    outcome: Outcome
    reward: float | None
    advantage: float | None
    excluded_reason: str | None
    """None for a valid rollout; else an outcome name or verifier_failure | refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScored:
    """A group is readable here: its SegmentSamples precede this record in the same transaction."""

    event_id: str
    run_id: str
    group_id: str
    floor: int
    task_id: str
    purpose: Purpose
    rollouts: tuple[RolloutScore, ...]
    baseline: float | None
    std: float | None
    estimator: str
    """name/version"""
    status: GroupStatus
    reason: str
    """Empty when trained; else too_few_valid | purpose | the name of the group filter that discards it."""
    samples: int
    """How many SegmentSamples of this group precede this record."""
    books: TreeBooks
    fold_version: str
    settings_sha256: str
    group_filters: tuple[str, ...] = ()
    """name/version:numbers, in order of application."""
    reward_transforms: tuple[str, ...] = ()
    """name/version:numbers, in order of application; rewards in this record are as the verifiers said them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEmitted:
    """A group's GroupScored is on the log, in the same transaction: its figures without its rollouts, for readers that
    must know every group of the run. Written by fold version 2 and later."""

    event_id: str
    run_id: str
    group_id: str
    floor: int
    purpose: Purpose
    status: GroupStatus
    reason: str
    samples: int
    books: TreeBooks
    fold_version: str
    settings_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScored:
    """Teacher or reference log-probs of a sample's output tokens."""

    event_id: str
    run_id: str
    group_id: str
    sample_id: str
    scorer: str
    logprobs: Float32s
