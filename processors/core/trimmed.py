"""One sample as token columns, after the length cut and the version mask of a draw."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnlog.processors.core.weight_chain import HeldVersion
from turnlog.schemas.events import MaskReason, SampleSpan, SegmentSample, Weighting
from turnlog.schemas.types import BlobRef, float32s, int32s

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRules:
    """The settings that batches depend on."""

    prompts_per_draw: int
    updates_per_draw: int
    max_lag: int
    max_tokens: int
    weighting: Weighting
    constant_length: int
    version_mask: str
    min_valid: int
    whiten: bool = False
    """Whether advantages are whitened over the trained tokens of each batch (the estimator says so)."""


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample and where it stands in segment-samples; its payloads are inline."""

    sample: SegmentSample
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrimmedSample:
    """A sample's row: columns of equal length, and the count of tokens that the draw masked, by reason."""

    sample_id: str
    group_id: str
    session_id: str
    rollout_index: int
    segment_index: int
    partition: int
    offset: int
    token_ids: NDArray[np.int32]
    trained: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float64]
    """Within what a float32 can hold: larger magnitudes saturate. 0 where not trained."""
    trained_tokens: int
    temperature: float
    reward: float
    version_min: int
    """Oldest version among trained tokens; -1 without one."""
    version_max: int
    lag: int
    """Largest among trained tokens; 0 without one."""
    masked: dict[str, int]


def trim(placed: PlacedSample, held: HeldVersion, rules: DrawRules) -> TrimmedSample:
    """Lay a sample out as columns, cut at `rules.max_tokens`, mask by `rules.version_mask`. Payloads must be inline."""
    sample = placed.sample
    kept = inline(sample.token_ids, "token_ids", sample)
    token_ids = int32s(kept)[: rules.max_tokens]
    logprobs_of = float32s(inline(sample.logprobs, "logprobs", sample))
    columns = _Columns(len(token_ids))
    left = (span.version for span in sample.spans if span.trained and span.length > 0 and span.start < len(token_ids))
    highest = max(left, default=-1)
    sampled = 0
    for span in sample.spans:
        reason = _version_reason(span, highest, held, rules)
        advantage = sample.advantage if span.advantage is None else span.advantage
        columns.place(span, logprobs_of[sampled : sampled + span.length], advantage, reason)
        sampled += span.length
    return TrimmedSample(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        session_id=sample.session_id,
        rollout_index=sample.rollout_index,
        segment_index=sample.segment_index,
        partition=placed.partition,
        offset=placed.offset,
        token_ids=token_ids.astype("<i4"),
        trained=columns.trained,
        logprobs=columns.logprobs,
        advantages=columns.advantages,
        trained_tokens=int(columns.trained.sum()),
        temperature=sample.temperature,
        reward=sample.reward,
        version_min=min(columns.versions, default=-1),
        version_max=max(columns.versions, default=-1),
        lag=max(map(held.lag, columns.versions), default=0),
        masked=dict(columns.masked),
    )


def inline(payload: bytes | BlobRef, field: str, sample: SegmentSample) -> bytes:
    """The bytes of a payload that the shell has fetched. Raises TypeError when it was not: a bug of the shell."""
    if isinstance(payload, BlobRef):
        raise TypeError(f"sample {sample.sample_id}: {field} is still a blob reference; fetch it before folding")
    return payload


def _version_reason(span: SampleSpan, highest: int, held: HeldVersion, rules: DrawRules) -> MaskReason | None:
    latest_only = rules.version_mask == "latest_only" and span.version != highest
    too_old = rules.version_mask == "max_lag" and held.lag(span.version) > rules.max_lag
    return MaskReason.version_mask if latest_only or too_old else None


class _Columns:
    """Token columns under construction; `place` fills one span, what lies beyond the cut is counted."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.trained = np.zeros(length, "|u1")
        self.logprobs = np.zeros(length, "<f4")
        self.advantages = np.zeros(length, "<f8")
        self.masked: Counter[str] = Counter()
        self.versions: set[int] = set()

    def place(
        self, span: SampleSpan, logprobs: NDArray[np.float32], advantage: float, reason: MaskReason | None
    ) -> None:
        """Place one span's output tokens."""
        end = max(min(span.start + span.length, self.length), span.start)
        inside = end - span.start
        self.logprobs[span.start : end] = logprobs[:inside]
        if not span.trained:
            return
        if inside < span.length:
            self.masked[MaskReason.length_cut.value] += span.length - inside
        if reason is not None and inside:
            self.masked[reason.value] += inside
        elif inside:
            self.trained[span.start : end] = 1
            self.advantages[span.start : end] = min(max(advantage, -LARGEST), LARGEST)
            self.versions.add(span.version)
