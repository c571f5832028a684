"""Formation of batches from scored groups: length limit, version mask, lag, admission, whole-group drops, weights.

The rules are described in docs/folds.md. A rollout batch (`draw`) is `prompts_per_draw` groups taken together. Its
composition is a recorded decision; everything else here is a function of it, so replay recomputes rows, weights and
hashes from the manifest alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from turnlog.fold_settings import BatcherSettings, FoldSettings
from turnlog.processors.core.batches.prefixes import shared_prefixes
from turnlog.processors.core.batches.rows import KIND_NUMBERS, BatchRows
from turnlog.processors.core.batches.weighting import (
    LiveRow,
    Weights,
    WeightsDoNotAddUp,
    Whitening,
    check_rows,
    weigh,
    whitening,
)
from turnlog.processors.core.methods.rules import BUILT_IN, Methods, fold_rules
from turnlog.processors.core.views.progress import HeldVersion
from turnlog.schemas.events import (
    BatchSample,
    DroppedSample,
    GroupScored,
    MaskReason,
    SampleSpan,
    SegmentSample,
    Weighting,
)
from turnlog.schemas.types import BlobRef, float32s, int32s

LARGEST = float(np.finfo(np.float32).max)
GREEDY_OR_PLAIN = (0.0, 1.0)
"""Temperatures at which raw log-probs are accepted: steps mask what was sampled greedily, and at 1 raw log-probs equal
those at temperature.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawRules:
    """The settings on which batches depend."""

    prompts_per_draw: int
    """Number of groups in a rollout batch."""
    updates_per_draw: int
    """Maximum number of batches, and thus optimizer steps, of a rollout batch."""
    max_lag: int
    """Largest lag of a trajectory that trains, in weight publications."""
    max_tokens: int
    """Tokens after which a row is cut."""
    weighting: Weighting
    constant_length: int
    """L of the weighting `constant`: each token weighs 1 / (trajectories x L)."""
    version_mask: str
    """Tokens to mask: none | latest_only (those of older versions than the row's newest) | max_lag (those above
    `max_lag`)."""
    min_valid: int
    """Number of fresh trajectories below which a group is dropped."""
    whiten: bool = False
    """Whether advantages are whitened over the trained tokens of each batch; the estimator decides."""


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A sample with its partition and offset in segment-samples; its payloads are inline."""

    sample: SegmentSample
    partition: int
    offset: int
    erased: bool = False
    """Whether the session was erased, so that its tokens have no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrimmedSample:
    """A sample as a row: columns of equal length, and the number of tokens that the rollout batch masked, by reason."""

    sample_id: str
    group_id: str
    session_id: str
    rollout_index: int
    segment_index: int
    partition: int
    offset: int
    token_ids: NDArray[np.int32]
    """[tokens] ids, cut at `max_tokens`."""
    trained: NDArray[np.uint8]
    """[tokens] 1 where the token trains."""
    logprobs: NDArray[np.float32]
    """[tokens] the engine's log-probs, 0 where the token was not sampled."""
    advantages: NDArray[np.float64]
    """[tokens] advantages, 0 where not trained; magnitudes beyond the range of float32 saturate."""
    old_cache: NDArray[np.uint8]
    """[tokens] 1 where the KV cache was filled by other weights than those that sampled the token."""
    engine_kind: NDArray[np.uint8]
    """[tokens] number in ENGINE_KINDS of the kind of engine that sampled the token; 0 if unknown."""
    trained_tokens: int
    """Sum of `trained`."""
    temperature: float
    reward: float
    version_min: int
    """Oldest weight version among trained tokens; -1 without trained tokens."""
    version_max: int
    """Newest weight version among trained tokens; -1 without trained tokens."""
    lag: int
    """Largest lag among trained tokens, in weight publications; 0 without trained tokens."""
    raw: bool
    """True if its log-probs belong to another distribution than the one it was sampled from, which is the one it trains
    in.
    """
    masked: dict[str, int]
    """Reason -> number of tokens that the length limit or the version mask removed."""
    erased: bool = False
    """Whether the session was erased."""


def draw_rules(fold: FoldSettings, batcher: BatcherSettings, methods: Methods = BUILT_IN) -> DrawRules:
    """Return the settings on which batches depend. Raises SettingsError for settings that the fold rejects."""
    rules = fold_rules(fold, run_id="", settings_sha256="", methods=methods)
    return DrawRules(
        prompts_per_draw=batcher.prompts_per_draw,
        updates_per_draw=batcher.updates_per_draw,
        max_lag=batcher.max_lag,
        max_tokens=batcher.max_tokens,
        weighting=Weighting(batcher.weighting),
        constant_length=batcher.constant_length,
        version_mask=batcher.version_mask,
        min_valid=rules.least_valid,
        whiten=rules.formula.whiten,
    )


@dataclass(frozen=True, slots=True)
class ReadableGroup:
    """A group whose GroupScored is on the log, with the samples that precede it."""

    score: GroupScored
    samples: tuple[PlacedSample, ...]

    @property
    def versions(self) -> frozenset[int]:
        """Weight versions that sampled the tokens that the tree marks as trained."""
        return frozenset(span.version for placed in self.samples for span in placed.sample.spans if span.trained)


def overtaken(group: ReadableGroup, held: HeldVersion, rules: DrawRules) -> bool:
    """Whether no token of the group can train at version `held` or a later one, because each is staler than
    `max_lag`.
    """
    return min(map(held.lag, group.versions), default=0) > rules.max_lag


@dataclass(frozen=True, slots=True)
class FormedBatch:
    """The rows of one optimizer step and the facts for its manifest."""

    rows: BatchRows
    samples: tuple[BatchSample, ...]
    groups: tuple[str, ...]
    weights: Weights
    masked: dict[str, int]
    max_lag: int
    whitening: Whitening | None = None
    """Mean and deviation that whitened the advantages; None for estimators that do not whiten."""


@dataclass(frozen=True, slots=True)
class FormedDraw:
    """The batches of a rollout batch (none if nothing was left to train) and what was dropped."""

    batches: tuple[FormedBatch, ...]
    dropped: tuple[DroppedSample, ...]
    masked: dict[str, int]
    """Reason -> number of tokens cut or masked in dropped samples."""


def laid_out(ordered: Sequence[TrimmedSample], weights: Weights, white: Whitening | None) -> BatchRows:
    """Lay samples out, in the given order, as the columns of a batch."""
    advantages = [row.advantages for row in ordered]
    if white is not None:
        advantages = [white.apply(row.advantages) * row.trained for row in ordered]
    rewards = [min(max(row.reward, -LARGEST), LARGEST) for row in ordered]
    old_cache = np.concatenate([row.old_cache for row in ordered])
    engine_kind = np.concatenate([row.engine_kind for row in ordered])
    return BatchRows(
        sample_ids=tuple(row.sample_id for row in ordered),
        group_ids=tuple(row.group_id for row in ordered),
        session_ids=tuple(row.session_id for row in ordered),
        rollout_index=np.array([row.rollout_index for row in ordered], "<i4"),
        segment_index=np.array([row.segment_index for row in ordered], "<i4"),
        lengths=np.array([len(row.token_ids) for row in ordered], "<i4"),
        token_ids=np.concatenate([row.token_ids for row in ordered]),
        trained=np.concatenate([row.trained for row in ordered]),
        logprobs=np.concatenate([row.logprobs for row in ordered]),
        advantages=np.concatenate(advantages).astype("<f4"),
        weight_divisor=np.array(weights.divisors, "<i8"),
        temperature=np.array([row.temperature for row in ordered], "<f4"),
        rewards=np.array(rewards, "<f4"),
        version_min=np.array([row.version_min for row in ordered], "<i4"),
        version_max=np.array([row.version_max for row in ordered], "<i4"),
        old_cache=old_cache if old_cache.any() else None,
        engine_kind=engine_kind if engine_kind.any() else None,
    )


Weigh = Callable[[Sequence[LiveRow], Weighting, int], Weights]
LayOut = Callable[[Sequence[TrimmedSample], Weights, Whitening | None], BatchRows]


def form_draw(
    groups: Sequence[ReadableGroup],
    held: HeldVersion,
    rules: DrawRules,
    *,
    weigh: Weigh = weigh,
    lay_out: LayOut = laid_out,
) -> FormedDraw:
    """Cut, mask, admit and weigh `groups` for a trainer that will hold version `held`. Raises the errors of
    `form_batch`.
    """
    live: list[list[TrimmedSample]] = []
    dropped: list[DroppedSample] = []
    masked: Counter[str] = Counter()
    for group in groups:
        kept, out = _admit([trim(placed, held, rules) for placed in group.samples], rules)
        dropped += [_dropped_sample(sample, reason) for sample, reason in out]
        for sample, _ in out:
            masked.update(sample.masked)
        if kept:
            live.append(kept)
    parts = _parts(live, rules.updates_per_draw)
    rows = ([row for group in part for row in group] for part in parts)
    batches = tuple(form_batch(part, rules, weigh=weigh, lay_out=lay_out) for part in rows)
    return FormedDraw(batches, tuple(dropped), dict(sorted(masked.items())))


def form_batch(
    samples: Sequence[TrimmedSample], rules: DrawRules, *, weigh: Weigh = weigh, lay_out: LayOut = laid_out
) -> FormedBatch:
    """Return rows in canonical order with their weights and, if the rules whiten, whitened advantages.

    Raises WeightsDoNotAddUp if there are no rows or if the columns violate invariant I5.
    """
    if not samples:
        raise WeightsDoNotAddUp("no sample is left to train: a draw without one is skipped, never a batch")
    ordered = sorted(samples, key=lambda row: (row.group_id, row.rollout_index, row.segment_index))
    live = [LiveRow(row.group_id, row.session_id, row.trained_tokens) for row in ordered]
    weights = weigh(live, rules.weighting, rules.constant_length)
    masked: Counter[str] = Counter()
    for row in ordered:
        masked.update(row.masked)
    manifest = tuple(
        BatchSample(
            sample_id=row.sample_id,
            group_id=row.group_id,
            session_id=row.session_id,
            rollout_index=row.rollout_index,
            segment_index=row.segment_index,
            tokens=len(row.token_ids),
            trained_tokens=row.trained_tokens,
            weight_divisor=divisor,
            partition=row.partition,
            offset=row.offset,
        )
        for row, divisor in zip(ordered, weights.divisors, strict=True)
    )
    lag = max(row.lag for row in ordered)
    groups = tuple(sorted({row.group_id for row in ordered}))
    white = whitening(row.advantages[row.trained == 1] for row in ordered) if rules.whiten else None
    rows = lay_out(ordered, weights, white)
    check_rows(rows, weights, rules.weighting)
    return FormedBatch(rows, _name_parents(manifest, rows), groups, weights, dict(sorted(masked.items())), lag, white)


def _name_parents(manifest: Sequence[BatchSample], rows: BatchRows) -> tuple[BatchSample, ...]:
    found = shared_prefixes(rows.token_ids, rows.lengths)
    return tuple(
        dataclasses.replace(entry, parent_row=int(found.parents[row]), shared_tokens=int(found.lengths[row]))
        for row, entry in enumerate(manifest)
    )


def reform_batch(
    manifest: Sequence[BatchSample], samples: Mapping[str, PlacedSample], held: HeldVersion, rules: DrawRules
) -> FormedBatch:
    """Form the batch that a manifest names from the samples on the log, for replay to compare. Raises KeyError if a
    sample is missing.

    Where the manifest does not say what rows share, neither does the result.
    """
    trimmed = [trim(samples[entry.sample_id], held, rules) for entry in manifest]
    formed = form_batch(trimmed, rules)
    if any(entry.parent_row is not None for entry in manifest):
        return formed
    silent = tuple(dataclasses.replace(row, parent_row=None, shared_tokens=0) for row in formed.samples)
    return dataclasses.replace(formed, samples=silent)


def _admit(
    samples: list[TrimmedSample], rules: DrawRules
) -> tuple[list[TrimmedSample], list[tuple[TrimmedSample, MaskReason]]]:
    """Split the samples of one group into those that train and those that are dropped, with the reason.

    Lag is that of a whole trajectory. Advantages are not recomputed when trajectories are dropped.
    """
    lags: dict[str, int] = {}
    for sample in samples:
        if sample.trained_tokens and not sample.raw and not sample.erased:
            lags[sample.session_id] = max(lags.get(sample.session_id, sample.lag), sample.lag)
    fresh = {session for session, lag in lags.items() if lag <= rules.max_lag}
    kept: list[TrimmedSample] = []
    out: list[tuple[TrimmedSample, MaskReason]] = []
    for sample in samples:
        if sample.trained_tokens and sample.erased:
            out.append((sample, MaskReason.erased))
        elif sample.trained_tokens and sample.raw:
            out.append((sample, MaskReason.raw_logprobs))
        elif sample.trained_tokens and sample.session_id not in fresh:
            out.append((sample, MaskReason.stale))
        elif not sample.trained_tokens:
            out.append((sample, _emptied_by(sample)))
        elif len(fresh) < rules.min_valid:
            out.append((sample, MaskReason.discarded_group))
        else:
            kept.append(sample)
    return kept, out


def _emptied_by(sample: TrimmedSample) -> MaskReason:
    """Return why nothing of a sample trains. The version mask applies to what the length limit left, so it takes
    precedence.
    """
    return MaskReason.version_mask if MaskReason.version_mask.value in sample.masked else MaskReason.length_cut


def _dropped_sample(row: TrimmedSample, reason: MaskReason) -> DroppedSample:
    return DroppedSample(row.sample_id, row.group_id, reason.value, row.trained_tokens, row.partition, row.offset)


def _parts(groups: list[list[TrimmedSample]], updates: int) -> list[list[list[TrimmedSample]]]:
    """Split into at most `updates` runs of whole groups, with sizes as equal as possible and none empty."""
    whole, count = len(groups), min(updates, len(groups))
    return [groups[whole * part // count : whole * (part + 1) // count] for part in range(count)]


def trim(placed: PlacedSample, held: HeldVersion, rules: DrawRules) -> TrimmedSample:
    """Lay a sample out as columns, cut it at `rules.max_tokens` and mask it by `rules.version_mask`. Payloads must be
    inline.
    """
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
        old_cache=columns.old_cache,
        engine_kind=columns.engine_kind,
        trained_tokens=int(columns.trained.sum()),
        temperature=sample.temperature,
        reward=sample.reward,
        version_min=min(columns.versions, default=-1),
        version_max=max(columns.versions, default=-1),
        lag=max(map(held.lag, columns.versions), default=0),
        raw=sample.logprob_kind != "at_temperature" and sample.temperature not in GREEDY_OR_PLAIN,
        masked=dict(columns.masked),
        erased=placed.erased,
    )


def inline(payload: bytes | BlobRef, field: str, sample: SegmentSample) -> bytes:
    """Return the bytes of a payload that the role has fetched. Raises TypeError if it was not fetched: a bug of the
    role.
    """
    if isinstance(payload, BlobRef):
        raise TypeError(f"sample {sample.sample_id}: {field} is still a blob reference; fetch it before folding")
    return payload


def _version_reason(span: SampleSpan, highest: int, held: HeldVersion, rules: DrawRules) -> MaskReason | None:
    latest_only = rules.version_mask == "latest_only" and span.version != highest
    too_old = rules.version_mask == "max_lag" and held.lag(span.version) > rules.max_lag
    return MaskReason.version_mask if latest_only or too_old else None


class _Columns:
    """Token columns under construction; `place` fills one span and counts the tokens beyond the length limit."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.trained = np.zeros(length, "|u1")
        self.logprobs = np.zeros(length, "<f4")
        self.advantages = np.zeros(length, "<f8")
        self.old_cache = np.zeros(length, "|u1")
        self.engine_kind = np.zeros(length, "|u1")
        self.masked: Counter[str] = Counter()
        self.versions: set[int] = set()

    def place(
        self, span: SampleSpan, logprobs: NDArray[np.float32], advantage: float, reason: MaskReason | None
    ) -> None:
        """Write the output tokens of one span into the columns."""
        end = max(min(span.start + span.length, self.length), span.start)
        inside = end - span.start
        self.logprobs[span.start : end] = logprobs[:inside]
        self.old_cache[span.start : end] = span.kv_version not in (None, span.version)
        self.engine_kind[span.start : end] = KIND_NUMBERS.get(span.engine_kind, 0)
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
