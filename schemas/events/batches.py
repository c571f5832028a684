"""Batches and steps: what one optimizer step eats, and what came of it."""

from __future__ import annotations

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
    segment_index: int
    tokens: int
    trained_tokens: int
    weight_divisor: int
    """Each trained token of the row weighs 1 / weight_divisor."""
    partition: int
    offset: int
    """Where the SegmentSample stands in segment-samples."""


@dataclass(frozen=True, slots=True)
class DroppedSample:
    """A sample of the draw that no batch trains."""

    sample_id: str
    group_id: str
    reason: str
    sampled_tokens: int
    """Output tokens of the sample that had been marked trained by the tree."""
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """Next segment-samples offset to read after this batch's draw."""

    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatchFormed:
    """The manifest: the batcher's commit and the trainer's input. File first, then this event."""

    event_id: str
    run_id: str
    batch_index: int
    draw_index: int
    part: int
    parts: int
    file: BlobRef
    rows_sha256: str
    samples: tuple[BatchSample, ...]
    groups: tuple[str, ...]
    """Group ids of the draw that are in this batch; part 0 names those that fell out whole, too."""
    weighting: Weighting
    prompts: int
    """P: groups with a trained token in this batch."""
    trajectories: int
    """J: trajectories with a trained token in this batch."""
    trained_tokens: int
    """M."""
    constant_length: int
    """L of `constant`; 0 otherwise."""
    masked: dict[str, int]
    """Sampled tokens that the batcher masked, by reason (version_mask, length_cut)."""
    trainer_version: int
    """The weight version that the trainer will hold at this draw; a trainer that was killed meanwhile holds another."""
    max_lag: int
    """Largest lag among trained tokens: publications between the weights that sampled them and `trainer_version`."""
    dropped: tuple[DroppedSample, ...]
    """Of the whole draw; in its part 0 only."""
    whitening_mean: float | None
    whitening_std: float | None
    positions: tuple[SourcePosition, ...]
    settings_sha256: str
    lags: dict[str, int] = field(default_factory=dict)
    """Weight version -> its lag, where it is not trainer_version minus the version: weights that a killed trainer's
    successor published again are as old as they were (2^31 - 1: they are of no step of the live trainer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSkipped:
    """A draw that left nothing to train."""

    event_id: str
    run_id: str
    batch_index: int
    draw_index: int
    reason: str
    groups: tuple[str, ...]
    masked: dict[str, int]
    dropped: tuple[DroppedSample, ...]
    positions: tuple[SourcePosition, ...]
    settings_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCompleted:
    """One optimizer step. Readers take the highest incarnation per batch_index."""

    event_id: str
    run_id: str
    batch_index: int
    draw_index: int
    incarnation: int
    step: int
    """Optimizer steps taken so far, this one included."""
    loss: float
    grad_norm: float
    learning_rate: float
    lag_max: int
    """Largest among trained tokens, against the weights that the trainer really held."""
    tokens: int
    trained_tokens: int
    masked: dict[str, int]
    """trainer_mask, step_skipped."""
    skipped: bool
    reward_mean: float
    """Mean reward over the batch's trajectories."""
    logprob_gap_max: float
    """max |trainer - engine| log-prob over trained tokens, before the step."""
    logprob_gap_mean: float
    entropy: float | None
    clip_fraction: float
    seconds: dict[str, float]
    """By phase: wait, read, step, checkpoint, export, publish."""
    world_size: int
    lag_excess: int = 0
    """By how much lag_max is above [batcher] max_lag: a batch is stepped as it was formed, whatever happened since."""
