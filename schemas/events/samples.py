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
    constrained = "constrained"
    raw_logprobs = "raw_logprobs"


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
    """Whose turn this is."""
    base: TurnId | None
    """The turn that its request continues; null for a root."""
    lineage: int
    """Index into `lineages`."""
    prompt_tokens: int
    """Of the whole prompt."""
    output_tokens: int
    """Sampled."""
    version_min: int
    """Oldest weight version that sampled a token of it; -1 without one."""
    version_max: int
    """Newest; -1 without one."""
    finish_reason: FinishReason
    """As in TurnCompleted."""


@dataclass(frozen=True, slots=True)
class TreeLineage:
    """Turns that continue one conversation; kind is main | sub_agent | side_call."""

    id: int
    """Place in `lineages`, from 0."""
    kind: str
    """main | sub_agent | side_call"""


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """A maximal run of turns whose tokens are one contiguous sequence."""

    index: int
    """Of the segment in its session, from 0."""
    turns: tuple[TurnId, ...]
    """In order of their tokens."""
    tokens: int
    """Length of the sequence."""
    trained: int
    """Output tokens that the tree does not mask."""
    context: int
    """Tokens that none of its turns sampled."""


@dataclass(frozen=True, slots=True)
class TreeBooks:
    """sampled == trained + sum(masked.values()), always."""

    sampled: int
    """Output tokens of all turns."""
    trained: int
    """Of them, those that nothing masks so far."""
    masked: dict[str, int]
    """The others, by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTreeAssembled:
    """Structure and books of one session, no tokens."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    rollout_id: str
    nodes: tuple[TreeNode, ...]
    """Turns of the counting finish, in order of (epoch, index); none of a refused session."""
    lineages: tuple[TreeLineage, ...]
    """By id."""
    segments: tuple[TreeSegment, ...]
    """By index."""
    anchor_segment: int | None
    """Index of the segment that holds the last turn of the main lineage, which the reward is about."""
    books: TreeBooks
    """Of the snapshots that the session's named turns need."""
    outcome: Outcome
    """As in SessionFinished."""
    reward: float | None
    """The verdict; null without one."""
    duplicated_prefix_tokens: int
    """Context tokens of segments that an earlier turn of another segment holds already."""
    fold_version: str
    settings_sha256: str


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Output tokens of one turn, sampled by one version on one cache, inside a segment: [start, start + length) of
    token_ids."""

    start: int
    """First token, as an index into token_ids."""
    length: int
    """Tokens."""
    turn: TurnId
    """That sampled them."""
    version: int
    """Weight version that sampled them."""
    trained: bool
    """Whether the tree lets them train; length cut and version mask come later."""
    advantage: float | None = None
    """Set by per-turn estimators only; else the sample's advantage holds."""
    kv_version: int | None = None
    """As in VersionSpan: of the cache that they were sampled on, where it is another. Written by fold version 4 and
    later."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Routed-expert rows of a blob that land in the segment."""

    rows: BlobRef
    """NumPy's npy format, [rows, layers, top_k]."""
    row_start: int
    """First row of the blob that is taken."""
    row_count: int
    """Rows taken."""
    target_start: int
    """Position in the segment of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSample:
    """One training row."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    rollout_id: str
    rollout_index: int
    """Of the rollout in its group, from 0."""
    task_id: str
    sample_id: str
    """Of this row."""
    purpose: Purpose
    """Always train."""
    segment_index: int
    """Of the segment in its session, from 0."""
    segment_count: int
    """Segments of the session, those without a sample included."""
    is_anchor: bool
    """Whether it holds the last turn of the main lineage."""
    token_ids: Int32Payload
    """The whole sequence."""
    spans: tuple[SampleSpan, ...]
    """In order of start; tokens outside all spans are context."""
    logprobs: Float32Payload
    """Of the output tokens in spans, concatenated."""
    temperature: float
    """Of sampling; the trainer divides logits by it."""
    logprob_kind: str
    """at_temperature | raw"""
    advantage: float
    """Of the trajectory: the same in all of its samples."""
    reward: float
    """Of the trajectory, before transforms."""
    outcome: Outcome
    """As in SessionFinished."""
    recipe: str
    """Name of the recipe."""
    weight_version_min: int
    """Oldest among the spans that train."""
    weight_version_max: int
    """Newest among them."""
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
    """As in SessionFinished."""
    reward: float | None
    """The verdict, or the sum of step rewards of a session that expects none; null without either."""
    advantage: float | None
    """Null unless its samples train."""
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
    """Of its sessions."""
    rollouts: tuple[RolloutScore, ...]
    """Members of the settled group, by rollout_index."""
    baseline: float | None
    """That the estimator took off; null where it has none."""
    std: float | None
    """Of the rewards, as the estimator took it; null where it has none."""
    estimator: str
    """name/version"""
    status: GroupStatus
    """What becomes of the group."""
    reason: str
    """Empty when trained; else too_few_valid | nothing_to_train | purpose | the name of the filter that discards it."""
    samples: int
    """How many SegmentSamples of this group precede this record."""
    books: TreeBooks
    """Of every session of the group, up to the last snapshot that a settled one needs."""
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
    """As in GroupScored."""
    status: GroupStatus
    """As in GroupScored."""
    reason: str
    """As in GroupScored."""
    samples: int
    """As in GroupScored."""
    books: TreeBooks
    """As in GroupScored."""
    fold_version: str
    settings_sha256: str
    rewards: tuple[float, ...] = ()
    """Of its valid rollouts, by rollout_index, as in GroupScored. Written by fold version 3 and later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScored:
    """Teacher or reference log-probs of a sample's output tokens."""

    event_id: str
    run_id: str
    group_id: str
    sample_id: str
    """Of the SegmentSample."""
    scorer: str
    """Name of the model that scored."""
    logprobs: Float32s
    """As in SegmentSample: of the output tokens in spans, concatenated."""
