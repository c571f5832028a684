"""Batches and steps: what one optimizer step eats, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.types import BlobRef


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
    """Of the rollout in its group, from 0."""
    segment_index: int
    """Of the segment in its session, from 0."""
    tokens: int
    """Of the row, after the length cut."""
    trained_tokens: int
    """Of them, those that carry loss: length cut and version mask are behind it."""
    weight_divisor: int
    """Each trained token of the row weighs 1 / weight_divisor."""
    partition: int
    """Of segment-samples."""
    offset: int
    """Where the SegmentSample stands in segment-samples."""


@dataclass(frozen=True, slots=True)
class DroppedSample:
    """A sample of the draw that no batch trains."""

    sample_id: str
    group_id: str
    reason: str
    """stale | length_cut | version_mask | discarded_group | raw_logprobs"""
    sampled_tokens: int
    """Output tokens that would have trained, in tokens: what the length cut and the version mask took before is in
    `masked` (0 where they took all of them)."""
    partition: int
    """Of segment-samples."""
    offset: int
    """Where the SegmentSample stands in segment-samples."""


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Next segment-samples offset to read after this batch's draw."""

    partition: int
    """Of segment-samples."""
    offset: int
    """Of the first sample of a group that is not drawn yet, or the next record to read: a batcher that starts again
    reads from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatchFormed:
    """The manifest: the batcher's commit and the trainer's input. File first, then this event."""

    event_id: str
    run_id: str
    batch_index: int
    """Of the run: 0, then +1 with each batch and each skipped draw."""
    draw_index: int
    """Of the run: 0, then +1 with each draw; the parts of a draw share it."""
    part: int
    """Of the draw's batches, from 0."""
    parts: int
    """Batches of the draw."""
    file: BlobRef
    """Arrow IPC file, one row per entry of `samples`, in that order (docs/attach.md)."""
    rows_sha256: str
    """Hex sha256 over the columns of `file` that `rows_version` lists, by the rule in docs/attach.md."""
    samples: tuple[BatchSample, ...]
    """The rows."""
    groups: tuple[str, ...]
    """Group ids of the draw that are in this batch; part 0 names those that fell out whole, too."""
    weighting: Weighting
    """What weight_divisor is made of: P x trained tokens of the prompt, J x those of the trajectory, M, or J x L."""
    prompts: int
    """P: groups with a trained token in this batch."""
    trajectories: int
    """J: trajectories with a trained token in this batch."""
    trained_tokens: int
    """M: tokens of this batch that carry loss."""
    constant_length: int
    """L of `constant`; 0 otherwise."""
    masked: dict[str, int]
    """Sampled tokens that the batcher masked, by reason (version_mask, length_cut); in part 0 also those of dropped
    samples."""
    trainer_version: int
    """The weight version that the trainer will hold at this draw; a trainer that was killed meanwhile holds another."""
    max_lag: int
    """Largest lag among trained tokens: publications between the weights that sampled them and `trainer_version`."""
    dropped: tuple[DroppedSample, ...]
    """Of the whole draw; in its part 0 only."""
    whitening_mean: float | None
    """Of the advantages over the trained tokens of the batch, before whitening; null where the estimator does not
    whiten."""
    whitening_std: float | None
    """Population deviation of the same."""
    positions: tuple[SourcePosition, ...]
    """One per partition of segment-samples: where a batcher that starts after this draw reads on."""
    settings_sha256: str
    lags: dict[str, int] = field(default_factory=dict)
    """Weight version -> its lag, of each that sampled for the draw: weights that a killed trainer's successor published
    again are as old as they were (2^31 - 1: they are of no step of the live trainer). Records of before name only those
    whose lag is not trainer_version minus the version."""
    rows_version: int = 1
    """Of the list of columns. A column that comes later stands in a later list, so that the batches before stay whole
    without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSkipped:
    """A draw that left nothing to train.

    It uses up a batch_index and a draw_index, but no optimizer step and no weight version.
    """

    event_id: str
    run_id: str
    batch_index: int
    """Used up, as is draw_index: the next manifest has the next ones."""
    draw_index: int
    """As in SampleBatchFormed."""
    reason: str
    """In words."""
    groups: tuple[str, ...]
    """Group ids of the draw."""
    masked: dict[str, int]
    """Sampled tokens of the dropped samples that the batcher masked, by reason (version_mask, length_cut)."""
    dropped: tuple[DroppedSample, ...]
    """Every sample of the draw."""
    positions: tuple[SourcePosition, ...]
    """As in SampleBatchFormed."""
    settings_sha256: str


HELD_GAP_MAX, HELD_OLD_CACHE_GAP_MAX = "held_gap_max", "held_old_cache_gap_max"
"""Of StepCompleted.metrics: as logprob_gap_max and old_cache_gap_max, over the tokens that the weights which the step
began with are known to have sampled. So they tell of a step with a lag, too; absent without such a token."""


def same_weights_gap(
    lag_max: int, whole: float | None, metrics: Mapping[str, float], name: str = HELD_GAP_MAX
) -> float | None:
    """A step's largest |trainer - engine| log-prob, nats, where both have the same weights (others are two policies):
    what it measured, else of a step without a lag `whole`, the gap of all its tokens. None without any."""
    return metrics.get(name, None if lag_max else whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted:
    """One optimizer step. Readers take the highest incarnation per batch_index."""

    event_id: str
    run_id: str
    batch_index: int
    """Of the manifest that was stepped on."""
    draw_index: int
    """Of that manifest."""
    incarnation: int
    """As in WeightVersionPublished."""
    step: int
    """Optimizer steps taken so far, this one included: 1 for the first."""
    loss: float
    """Sum over trained tokens of token loss / weight_divisor."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    """Of this step."""
    lag_max: int
    """Largest among trained tokens, against the weights that the trainer really held."""
    tokens: int
    """Of all rows of the batch."""
    trained_tokens: int
    """Of them, those that carry loss."""
    masked: dict[str, int]
    """Trained tokens of the manifest that this step did not train, by reason (trainer_mask, unrouted,
    step_skipped)."""
    skipped: bool
    """The gradient was not finite: weights and optimizer are as before."""
    reward_mean: float
    """Mean reward over the batch's trajectories."""
    logprob_gap_max: float
    """max |trainer - engine| log-prob over trained tokens but `old_cache_tokens`, before the step, nats."""
    logprob_gap_mean: float
    """Mean of that difference over the same tokens, nats."""
    entropy: float | None
    """Mean over trained tokens at the row's temperature, nats."""
    clip_fraction: float
    """Share of trained tokens whose ratio was clipped."""
    seconds: dict[str, float]
    """By phase: step, export (of weights); and for how long training stood still since the step before for the manifest
    (wait), its rows (read), a checkpoint, or weights of an earlier step (publish)."""
    world_size: int
    """Ranks."""
    lag_excess: int = 0
    """By how much lag_max is above [batcher] max_lag: a batch is stepped as it was formed, whatever happened since."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What the algorithm measured before the step, by name: docs/algorithms.md says what each is."""
    token_file: BlobRef | None = None
    """Parquet, one row per trained token of the batch that the step computed: what the trainer made of it before the
    step (docs/attach.md); null where [trainer] token_files_every passes the step over."""
    old_cache_tokens: int = 0
    """Of trained_tokens, those sampled on a cache that older weights filled ([engine] update = "in_place"), where the
    batch tells: from fold version 4 on."""
    old_cache_gap_max: float = 0.0
    """As logprob_gap_max, over old_cache_tokens."""
    old_cache_gap_mean: float = 0.0
    """As logprob_gap_mean, over old_cache_tokens."""
