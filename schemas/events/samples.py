"""Records that the assembler derives: turn trees, segments as samples, group scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.events.sessions import Outcome
from turnlog.schemas.events.tasks import Purpose
from turnlog.schemas.events.turns import FinishReason, ImageRef
from turnlog.schemas.types import (
    BlobRef,
    Float32Payload,
    Float32s,
    GroupEvent,
    Int32Payload,
    RunEvent,
    TurnId,
    content,
)  # fmt: skip


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
    compaction = "compaction"
    untrained_player = "untrained_player"
    flagged = "flagged"
    redacted = "redacted"
    erased = "erased"


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
    """Turn that this node stands for."""
    base: TurnId | None
    """The turn that its request continues; null for a root."""
    lineage: int
    """Index into `lineages`."""
    prompt_tokens: int
    """Tokens of the whole prompt."""
    output_tokens: int
    """Sampled tokens."""
    version_min: int
    """Oldest weight version that sampled a token of the turn; -1 without a token."""
    version_max: int
    """Newest weight version that sampled a token of the turn; -1 without a token."""
    finish_reason: FinishReason
    """Finish reason, copied from TurnCompleted."""


@dataclass(frozen=True, slots=True)
class TreeLineage:
    """Turns that continue one conversation; kind is main | sub_agent | side_call | compaction | player."""

    id: int
    """Index in `lineages`, from 0."""
    kind: str
    """main, sub_agent, side_call, or, from fold version 5 on, compaction or player."""
    player: str = ""
    """Player to which the lineage belongs; empty if it belongs to none. Written by fold version 5 and later."""


@dataclass(frozen=True, slots=True)
class TreeSegment:
    """A maximal run of turns whose tokens are one contiguous sequence."""

    index: int
    """Index of the segment in its session, from 0."""
    turns: tuple[TurnId, ...]
    """Turns in the order of their tokens."""
    tokens: int
    """Length of the token sequence."""
    trained: int
    """Output tokens that the tree does not mask."""
    context: int
    """Tokens that no turn of the segment sampled."""


@dataclass(frozen=True, slots=True)
class TreeBooks:
    """sampled == trained + sum(masked.values()), always."""

    sampled: int
    """Output tokens of all turns."""
    trained: int
    """Output tokens that nothing masks so far."""
    masked: dict[str, int]
    """Masked output tokens by reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTreeAssembled(RunEvent):
    """Structure and books of one session, no tokens."""

    group_id: str
    session_id: str
    rollout_id: str
    nodes: tuple[TreeNode, ...]
    """Turns of the effective SessionFinished, in order of (epoch, index); empty for a rejected session."""
    lineages: tuple[TreeLineage, ...]
    """Lineages, in order of `id`."""
    segments: tuple[TreeSegment, ...]
    """Segments, in order of `index`."""
    anchor_segment: int | None
    """Index of the segment that holds the last turn of the main lineage, to which the reward belongs; null without one.
    """
    books: TreeBooks
    """Token accounting of the snapshots that the turns named by the session need."""
    outcome: Outcome
    """Outcome, copied from SessionFinished."""
    reward: float | None
    """Reward of the session; null without one."""
    duplicated_prefix_tokens: int
    """Context tokens of segments that repeat tokens of an earlier turn in another segment."""
    fold_version: str
    settings_sha256: str
    player_rewards: dict[str, float] = field(default_factory=dict)
    """Rewards of the players that have a reward of their own. Written by fold version 5 and later."""


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Output tokens of one turn, sampled by one version on one cache and one kind of engine, inside a segment: [start,
    start + length) of token_ids."""

    start: int
    """Index of the first token in token_ids."""
    length: int
    """Number of tokens."""
    turn: TurnId
    """Turn that sampled the tokens."""
    version: int
    """Weight version that sampled the tokens."""
    trained: bool
    """True if the tree lets the tokens train; the length cut and the version mask come later."""
    advantage: float | None = None
    """Advantage of these tokens, set only by per-turn estimators; null means the advantage of the sample."""
    kv_version: int | None = None
    """Weight version of the cache that the tokens were sampled on, if it differs (see VersionSpan). Written by fold
    version 4 and later."""
    engine_kind: str = ""
    """Kind of the engine that sampled the tokens, as in VersionSpan. Written by fold version 5 and later."""


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Routed-expert rows of a blob that land in the segment."""

    rows: BlobRef
    """Blob in NumPy's npy format, [rows, layers, top_k]."""
    row_start: int
    """First row that is taken from the blob."""
    row_count: int
    """Number of rows taken."""
    target_start: int
    """Position of the first row in the segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSample(RunEvent):
    """One training row."""

    group_id: str
    session_id: str
    rollout_id: str
    rollout_index: int
    """Index of the rollout in its group, from 0."""
    task_id: str
    sample_id: str
    """Id of this row."""
    purpose: Purpose
    """Always train."""
    segment_index: int
    """Index of the segment in its session, from 0."""
    segment_count: int
    """Number of segments of the session, including those without a sample."""
    is_anchor: bool
    """True if the segment holds the last turn of the main lineage."""
    token_ids: Int32Payload = field(metadata=content())
    """The whole token sequence."""
    spans: tuple[SampleSpan, ...]
    """Spans in order of start; tokens outside all spans are context."""
    logprobs: Float32Payload = field(metadata=content())
    """Log-probs of the output tokens in spans, concatenated."""
    temperature: float
    """Sampling temperature; the trainer divides logits by it."""
    logprob_kind: str
    """Kind of `logprobs`: at_temperature or raw."""
    advantage: float
    """Advantage of the trajectory; equal in all of its samples."""
    reward: float
    """Reward of the trajectory, before transforms."""
    outcome: Outcome
    """Outcome, copied from SessionFinished."""
    recipe: str
    """Name of the environment ([feeder] recipe)."""
    weight_version_min: int
    """Oldest weight version among the spans that train."""
    weight_version_max: int
    """Newest weight version among the spans that train."""
    experts: tuple[ExpertRows, ...] = ()
    """Routed experts. They cover positions 0 to tokens - 2 exactly, or the list is empty."""
    images: tuple[ImageRef, ...] = ()
    """Images whose tokens are in token_ids, in order of position."""
    experts_gap: str = ""
    """Reason why `experts` is empty although a turn of the segment has experts: turn_without_rows or layouts_differ."""
    player: str = ""
    """Player whose turns train here, and whose reward and advantage the sample has; empty for the session as a whole.
    Written by fold version 5 and later."""


@dataclass(frozen=True, slots=True)
class PlayerScore:
    """One player of a rollout that rewards its players one by one."""

    player: str
    """Name of the player; empty for the turns that belong to no player."""
    reward: float | None
    """Reward of the player; null without one."""
    advantage: float | None
    """Advantage of the player; null unless its samples train."""
    excluded_reason: str | None
    """Null for a valid trajectory; else verifier_failure, or the reason of the rollout."""
    tokens: int
    """Sampled tokens of the player that the tree does not mask."""


@dataclass(frozen=True, slots=True)
class RoleScore:
    """The trajectories of one player in all rollouts of a group: they are compared with each other alone."""

    player: str
    """Name of the player; empty for the turns that belong to no player."""
    status: GroupStatus
    """Status of these trajectories."""
    reason: str
    """Reason as in GroupScored."""
    baseline: float | None
    """Baseline that the estimator subtracted; null if it has none."""
    std: float | None
    """Standard deviation of the rewards as the estimator computed it; null if it computes none."""


@dataclass(frozen=True, slots=True)
class RolloutScore:
    """One rollout of a scored group."""

    rollout_id: str
    session_id: str
    outcome: Outcome
    """Outcome, copied from SessionFinished."""
    reward: float | None
    """Reward of the session, or the sum of step rewards if the session expects no reward; null without either. If it
    has players with rewards of their own and expects no other reward, the mean of theirs."""
    advantage: float | None
    """Advantage of the rollout; null unless its samples train. If it has players with rewards of their own, the mean of
    the advantages of those that train."""
    excluded_reason: str | None
    """Null for a valid rollout; else the name of an outcome, verifier_failure, refused or flagged."""
    players: tuple[PlayerScore, ...] = ()
    """Players with rewards of their own, by name. Written by fold version 5 and later."""
    flags: tuple[str, ...] = ()
    """Names of the detectors of cheating ([fold] exclude_flagged) that flagged the rollout, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScored(GroupEvent):
    """A group is readable here: its SegmentSamples precede this record in the same transaction."""

    task_id: str
    purpose: Purpose
    """Purpose of the group's sessions."""
    rollouts: tuple[RolloutScore, ...]
    """Members of the settled group, by rollout_index."""
    baseline: float | None
    """Baseline that the estimator subtracted; null if it has none."""
    std: float | None
    """Standard deviation of the rewards as the estimator computed it; null if it computes none."""
    estimator: str
    """Estimator as name/version."""
    status: GroupStatus
    """Status of the group."""
    reason: str
    """Empty if the group is trained; else too_few_valid, nothing_to_train, purpose or the name of the filter that
    discarded it."""
    samples: int
    """Number of SegmentSamples of this group that precede this record."""
    books: TreeBooks
    """Token accounting of every session of the group, up to the last snapshot that a settled session needs."""
    fold_version: str
    settings_sha256: str
    group_filters: tuple[str, ...] = ()
    """Group filters as name/version:numbers, in order of application."""
    reward_transforms: tuple[str, ...] = ()
    """Reward transforms as name/version:numbers, in order of application. The rewards in this record are those of the
    verifiers, untransformed."""
    roles: tuple[RoleScore, ...] = ()
    """Roles of a group whose sessions reward their players one by one, by name; empty for other groups. `baseline` and
    `std` are then null. Written by fold version 5 and later."""
    detectors: tuple[str, ...] = ()
    """Detectors of cheating that exclude rollouts, as name/version ([fold] exclude_flagged)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEmitted(GroupEvent):
    """A group's GroupScored is on the log, in the same transaction: its figures without its rollouts, for readers that
    must know every group of the run. Written by fold version 2 and later."""

    purpose: Purpose
    """Purpose, copied from GroupScored."""
    status: GroupStatus
    """Status, copied from GroupScored."""
    reason: str
    """Reason, copied from GroupScored."""
    samples: int
    """Number of samples, copied from GroupScored."""
    books: TreeBooks
    """Token accounting, copied from GroupScored."""
    fold_version: str
    settings_sha256: str
    rewards: tuple[float, ...] = ()
    """Rewards of the valid rollouts, by rollout_index, copied from GroupScored. Written by fold version 3 and later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleScored(RunEvent):
    """Teacher or reference log-probs of a sample's output tokens."""

    group_id: str
    sample_id: str
    """Id of the SegmentSample."""
    scorer: str
    """Name of the model that scored."""
    logprobs: Float32s
    """Log-probs of the output tokens in spans, concatenated as in SegmentSample."""
