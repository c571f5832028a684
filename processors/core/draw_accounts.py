"""What became of each sample in its draw, and of each batch in its step, from manifests and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from turnlog.processors.core.accounts import Account, Imbalance
from turnlog.schemas.events import (
    BatchSample,
    BatchSkipped,
    DroppedSample,
    MaskReason,
    SampleBatchFormed,
    SegmentSample,
    StepCompleted,
)

CUT, VERSION = MaskReason.length_cut.value, MaskReason.version_mask.value
Manifest = SampleBatchFormed | BatchSkipped


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Tokens that a sample marks as trained, and those of them that lie behind `max_tokens`."""

    group_id: str
    session_id: str
    trained: int
    cut: int

    @classmethod
    def of(cls, sample: SegmentSample, max_tokens: int) -> SampleTokens:
        """Counted over its spans."""
        trained = cut = 0
        for span in sample.spans:
            if span.trained:
                trained += span.length
                cut += span.length - max(min(span.start + span.length, max_tokens) - span.start, 0)
        return cls(sample.group_id, sample.session_id, trained, cut)

    def lost(self, left: int) -> Counter[str]:
        """Reasons of the tokens that the draw took from it when `left` were left: the cut comes first."""
        gone = self.trained - left
        return Counter({CUT: min(self.cut, gone), VERSION: gone - min(self.cut, gone)})


@dataclass(slots=True)
class Draws:
    """The end of every sample that a draw took."""

    fates: dict[str, Account] = field(default_factory=dict)
    """Sample -> its account; `sampled` is what it marks as trained."""
    batches: dict[int, Account] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    """Groups that a draw took."""
    imbalances: list[Imbalance] = field(default_factory=list)


def drawn(
    samples: Mapping[str, SampleTokens], manifests: Sequence[Manifest], steps: Mapping[int, StepCompleted]
) -> Draws:
    """Follow `manifests` (each batch once). `steps`: by batch, of the incarnation that counts."""
    draws = Draws()
    for manifest in manifests:
        step = steps.get(manifest.batch_index)
        draws.groups.update(manifest.groups)
        draws.batches[manifest.batch_index] = _batch(manifest, step)
        _rows(draws, samples, manifest, step)
        if isinstance(manifest, SampleBatchFormed):
            _check_batch(draws, manifest, step)
    parts: dict[int, list[Manifest]] = {}
    for manifest in manifests:
        parts.setdefault(manifest.draw_index, []).append(manifest)
    for draw in parts.values():
        _check_draw(draws, samples, draw)
    for sample_id, sample in samples.items():
        if sample.group_id in draws.groups and sample_id not in draws.fates:
            says = f"sample {sample_id} of group {sample.group_id} was taken, and no manifest says what became of it"
            draws.imbalances.append(Imbalance("session", sample.session_id, says))
    return draws


def _batch(manifest: Manifest, step: StepCompleted | None) -> Account:
    account = Account()
    account.mask(manifest.masked)
    for row in manifest.dropped:
        account.mask({row.reason: row.sampled_tokens})
    account.sampled = account.masked.total()
    if isinstance(manifest, SampleBatchFormed):
        account.sampled += manifest.trained_tokens
        masked = Counter(step.masked) if step else Counter({MaskReason.unused.value: manifest.trained_tokens})
        account.mask(masked)
        account.trained = manifest.trained_tokens - masked.total()
    return account


def _rows(draws: Draws, samples: Mapping[str, SampleTokens], manifest: Manifest, step: StepCompleted | None) -> None:
    rows = manifest.samples if isinstance(manifest, SampleBatchFormed) else ()
    reason = _step_reason(manifest, step)
    ends = [(row.sample_id, row.trained_tokens, reason) for row in rows]
    ends += [(row.sample_id, row.sampled_tokens, row.reason) for row in manifest.dropped]
    for sample_id, left, why in ends:
        where = str(manifest.batch_index)
        if sample_id not in samples:
            draws.imbalances.append(Imbalance("batch", where, f"sample {sample_id} is not on the log"))
        elif sample_id in draws.fates:
            draws.imbalances.append(Imbalance("batch", where, f"sample {sample_id} was in an earlier batch already"))
        else:
            account = draws.fates[sample_id] = Account(samples[sample_id].trained)
            account.mask(samples[sample_id].lost(left))
            if why is None:
                account.trained = left
            else:
                account.mask({why: left})


def _step_reason(manifest: Manifest, step: StepCompleted | None) -> str | None:
    """Why the step trained no token of the batch; None if it trained some: a mask of single tokens names no sample."""
    if step is None:
        return MaskReason.unused.value
    whole = isinstance(manifest, SampleBatchFormed) and sum(step.masked.values()) == manifest.trained_tokens
    return max(step.masked, key=lambda reason: step.masked[reason]) if whole and step.masked else None


def _check_batch(draws: Draws, manifest: SampleBatchFormed, step: StepCompleted | None) -> None:
    rows = sum(row.trained_tokens for row in manifest.samples)
    if rows != manifest.trained_tokens:
        says = f"its manifest trains {manifest.trained_tokens} tokens, its rows {rows}"
        draws.imbalances.append(Imbalance("batch", str(manifest.batch_index), says))
    if step is not None and step.trained_tokens != manifest.trained_tokens:
        says = f"the step counted {step.trained_tokens} trained tokens, its manifest {manifest.trained_tokens}"
        draws.imbalances.append(Imbalance("batch", str(manifest.batch_index), says))


def _check_draw(draws: Draws, samples: Mapping[str, SampleTokens], parts: Sequence[Manifest]) -> None:
    """The reasons of a draw's manifests are those of its samples; what samples hold is what the draw accounts for."""
    names = [row.sample_id for part in parts for row in _entries(part) if row.sample_id in samples]
    lost: Counter[str] = Counter()
    for name in names:
        fate = draws.fates[name]
        lost += Counter({reason: fate.masked[reason] for reason in (CUT, VERSION)})
    said: Counter[str] = Counter()
    for part in parts:
        said += Counter(part.masked)
        for row in part.dropped:
            said += Counter({row.reason: row.sampled_tokens} if row.reason in (CUT, VERSION) else {})
    if said != lost:
        says = f"draw {parts[0].draw_index} says that it masks {dict(said)}, its samples lost {dict(lost)}"
        draws.imbalances.append(Imbalance("batch", str(parts[0].batch_index), says))


def _entries(manifest: Manifest) -> Iterable[BatchSample | DroppedSample]:
    rows = manifest.samples if isinstance(manifest, SampleBatchFormed) else ()
    return (*rows, *manifest.dropped)
