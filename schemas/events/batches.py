"""Records of batches and of optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.types import BlobRef, RunEvent


class Weighting(StrEnum):
    """How the loss weight of a trained token is made (folds.md 4)."""

    unknown = "unknown"
    prompt = "prompt"
    trajectory = "trajectory"
    token = "token"
    constant = "constant"


@dataclass(frozen=True, slots=True)
class BatchSample:
    """One row of the batch, in canonical order (group, rollout_index, segment)."""

    sample_id: str
    group_id: str
    session_id: str
    rollout_index: int
    """Index of the rollout in its group, from 0."""
    segment_index: int
    """Index of the segment in its session, from 0."""
    tokens: int
    """Tokens of the row, after the length cut."""
    trained_tokens: int
    """Tokens of the row that carry loss, after length cut and version mask."""
    weight_divisor: int
    """Divisor of the loss: each trained token of the row weighs 1 / weight_divisor."""
    partition: int
    """Partition of the SegmentSample in segment-samples."""
    offset: int
    """Offset of the SegmentSample in segment-samples."""
    parent_row: int | None = None
    """Index of a row before this one with which it shares its longest prefix, the first of several; -1 if it shares its
    first token with none. Null in older records, which do not say."""
    shared_tokens: int = 0
    """Number of tokens that it shares with `parent_row`."""


@dataclass(frozen=True, slots=True)
class DroppedSample:
    """A sample of the draw that no batch trains."""

    sample_id: str
    group_id: str
    reason: str
    """stale, length_cut, version_mask, discarded_group or raw_logprobs."""
    sampled_tokens: int
    """Output tokens that would have trained. Those that the length cut and the version mask removed before are counted
    in `masked` (so this is 0 if they removed all of them)."""
    partition: int
    """Partition of the SegmentSample in segment-samples."""
    offset: int
    """Offset of the SegmentSample in segment-samples."""


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Next segment-samples offset to read after this batch's draw."""

    partition: int
    """Partition of segment-samples."""
    offset: int
    """Offset of the first sample of a group that is not drawn yet, or of the next record to read. A restarted batcher
    reads from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatchFormed(RunEvent):
    """The manifest: the batcher's commit and the trainer's input. File first, then this event."""

    batch_index: int
    """Index in the run: 0, then +1 with each batch and each skipped draw."""
    draw_index: int
    """Index of the draw (rollout batch) in the run: 0, then +1 with each draw; the parts of a draw share it."""
    part: int
    """Index of this batch among those of its draw, from 0."""
    parts: int
    """Number of batches of the draw."""
    file: BlobRef
    """Arrow IPC file, one row per entry of `samples`, in that order (docs/attach.md)."""
    rows_sha256: str
    """Hex sha256 over those columns of `file` that `rows_version` lists, by the rule in docs/attach.md."""
    samples: tuple[BatchSample, ...]
    """Rows of the batch."""
    groups: tuple[str, ...]
    """Ids of the draw's groups in this batch; part 0 also names the groups that were dropped whole."""
    weighting: Weighting
    """Rule for weight_divisor: P x trained tokens of the prompt, J x trained tokens of the trajectory, M, or J x L."""
    prompts: int
    """P: number of groups with a trained token in this batch."""
    trajectories: int
    """J: number of trajectories with a trained token in this batch."""
    trained_tokens: int
    """M: number of tokens of this batch that carry loss."""
    constant_length: int
    """L of the weighting `constant`; 0 for others."""
    masked: dict[str, int]
    """Sampled tokens that the batcher masked, by reason (version_mask, length_cut); part 0 also counts those of dropped
    samples."""
    trainer_version: int
    """Weight version that the trainer is expected to hold at this draw; after a restart of the trainer it may differ.
    """
    max_lag: int
    """Largest lag among trained tokens: publications between the weights that sampled them and `trainer_version`."""
    dropped: tuple[DroppedSample, ...]
    """Dropped samples of the whole draw; only in part 0."""
    whitening_mean: float | None
    """Mean of the advantages over the trained tokens of the batch before whitening; null if the estimator does not
    whiten."""
    whitening_std: float | None
    """Population standard deviation of the same advantages; null if the estimator does not whiten."""
    positions: tuple[SourcePosition, ...]
    """Position for each partition of segment-samples from which a batcher that starts after this draw reads on."""
    settings_sha256: str
    lags: dict[str, int] = field(default_factory=dict)
    """Weight version -> its lag, for each version that sampled for the draw. A republication by the successor of a
    killed trainer does not make weights younger; 2^31 - 1 marks weights of no step of the live trainer. Older records
    name only the versions whose lag is not trainer_version minus the version."""
    rows_version: int = 1
    """Version of the list of columns in `rows_sha256`. A later column belongs to a later list, so that the hashes of
    earlier batches stay valid without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSkipped(RunEvent):
    """A draw that left nothing to train.

    It uses up a batch_index and a draw_index, but no optimizer step and no weight version.
    """

    batch_index: int
    """Index as in SampleBatchFormed. It is used up, as is draw_index: the next manifest has the next ones."""
    draw_index: int
    """Index of the draw, as in SampleBatchFormed."""
    reason: str
    """Reason as text."""
    groups: tuple[str, ...]
    """Ids of the draw's groups."""
    masked: dict[str, int]
    """Sampled tokens of the dropped samples that the batcher masked, by reason (version_mask, length_cut)."""
    dropped: tuple[DroppedSample, ...]
    """Every sample of the draw."""
    positions: tuple[SourcePosition, ...]
    """Positions, as in SampleBatchFormed."""
    settings_sha256: str


HELD_GAP_MAX, HELD_OLD_CACHE_GAP_MAX = "held_gap_max", "held_old_cache_gap_max"
"""Keys of StepCompleted.metrics: like logprob_gap_max and old_cache_gap_max, but only over the tokens that are known to
have been sampled by the weights that the step began with. So they are meaningful for a step with a lag, too. They are
absent if there is no such token."""


LOGPROB_GAP_MAX, LOGPROB_GAP_MEAN = "logprob_gap_max", "logprob_gap_mean"


def gap_of_kind(name: str, kind: str) -> str:
    """Return the key of StepCompleted.metrics for `name` (LOGPROB_GAP_MAX, LOGPROB_GAP_MEAN or HELD_GAP_MAX), only over
    tokens that one kind of engine sampled. Steps have it if the batch names the kinds of engines, and that kind."""
    return f"{name}/{kind}"


def gaps_of_kinds(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    """Return kind -> gap from the keys that `gap_of_kind` returns for `name`."""
    prefix = gap_of_kind(name, "")
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


def same_weights_gap(
    lag_max: int, whole: float | None, metrics: Mapping[str, float], name: str = HELD_GAP_MAX
) -> float | None:
    """Return a step's largest |trainer - engine| log-prob difference, in nats, over tokens for which both had the same
    weights (otherwise two different policies would be compared). That is the measured metric or, for a step without a
    lag, `whole`, the gap of all its tokens. None if neither exists."""
    return metrics.get(name, None if lag_max else whole)


def same_weights_gaps_of_kinds(lag_max: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `same_weights_gap` of each kind of engine that a step names, by kind, as far as it exists."""
    whole = gaps_of_kinds(metrics, LOGPROB_GAP_MAX)
    found = {
        kind: same_weights_gap(lag_max, gap, metrics, gap_of_kind(HELD_GAP_MAX, kind)) for kind, gap in whole.items()
    }
    return {kind: gap for kind, gap in found.items() if gap is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted(RunEvent):
    """One optimizer step. Readers take the highest incarnation per batch_index."""

    batch_index: int
    """Index of the batch, as in its manifest."""
    draw_index: int
    """Index of the draw, as in the manifest."""
    incarnation: int
    """Generation of the trainer, as in WeightVersionPublished."""
    step: int
    """Number of optimizer steps taken so far, including this one: 1 for the first."""
    loss: float
    """Sum over trained tokens of token loss / weight_divisor."""
    grad_norm: float
    """Global norm of the gradient before clipping."""
    learning_rate: float
    """Learning rate of this step."""
    lag_max: int
    """Largest lag among trained tokens, against the weights that the trainer actually held."""
    tokens: int
    """Tokens of all rows of the batch."""
    trained_tokens: int
    """Tokens of the batch that carry loss."""
    masked: dict[str, int]
    """Trained tokens of the manifest that this step did not train, by reason (trainer_mask, unrouted, step_skipped)."""
    skipped: bool
    """True if the gradient was not finite, so that weights and optimizer are unchanged."""
    reward_mean: float
    """Mean reward over the batch's trajectories."""
    logprob_gap_max: float
    """Maximum |trainer - engine| log-prob difference over the trained tokens except `old_cache_tokens`, before the
    step, in nats."""
    logprob_gap_mean: float
    """Mean of that difference over the same tokens, in nats."""
    entropy: float | None
    """Mean entropy over trained tokens at the row's temperature, in nats."""
    clip_fraction: float
    """Share of trained tokens whose ratio was clipped."""
    seconds: dict[str, float]
    """Duration by phase: step and export (of weights), and the time since the previous step in which training waited
    for the manifest (wait), its rows (read), a checkpoint, or the weights of an earlier step (publish)."""
    world_size: int
    """Number of ranks."""
    lag_excess: int = 0
    """Amount by which lag_max exceeds [batcher] max_lag: a batch is trained as it was formed, even if the trainer has
    restarted since."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the algorithm measured before the step, by name (docs/algorithms.md)."""
    token_file: BlobRef | None = None
    """Parquet file with one row per trained token of the batch that the step computed: its values in the trainer before
    the step (docs/attach.md). Null for steps that [trainer] token_files_every passes over."""
    old_cache_tokens: int = 0
    """Trained tokens that were sampled on a cache filled by older weights ([engine] update = "in_place"), if the batch
    records it: from fold version 4 on."""
    old_cache_gap_max: float = 0.0
    """Maximum difference as in logprob_gap_max, over old_cache_tokens."""
    old_cache_gap_mean: float = 0.0
    """Mean difference as in logprob_gap_mean, over old_cache_tokens."""
