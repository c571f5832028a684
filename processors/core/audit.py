"""Token accounting per session, group, batch and run, computed from the records of a run, and its disagreements.

The fold counts while it folds, and the batcher while it forms batches. This module counts again from the records alone,
so that a count that disagrees with the others is found and named.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from turnlog.processors.core.books import LEVELS, Imbalance, TokenAccount, counting_step, run_books, total
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.session import named_turns
from turnlog.processors.core.fold.settlement import untrained_reason
from turnlog.processors.core.fold.spine import ControlStreamFold
from turnlog.processors.core.fold_versions import FoldVersion
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.schemas.events import (
    BatchSample,
    BatchSkipped,
    DeadLetter,
    DroppedSample,
    Event,
    GroupScored,
    GroupStatus,
    MaskReason,
    SampleBatchFormed,
    SegmentSample,
    StepCompleted,
    TokenSnapshot,
    TreeBooks,
    TurnTreeAssembled,
    sampled_tokens,
)
from turnlog.schemas.topics import DEAD_LETTERS, SESSIONS

FIRST = DEAD_LETTERS
"""Topic that must be read before the others: records that were dead-lettered were folded as rejected, or not at all."""
NOT_FOLDED = frozenset({"KeyMismatch", "WrongTopic", "RecordSkipped"})
"""Causes of dead letters whose record no fold processed."""
BEHIND = sys.maxsize
"""Offset assigned to a snapshot that no fold processed: beyond the end of its group, so its tokens count as late."""


@dataclass(frozen=True, slots=True)
class Books:
    """Accounts by level and id, and all disagreements."""

    levels: dict[str, dict[str, TokenAccount]]
    """Level -> id -> account. Batches are named by index, the run by its own id."""
    imbalances: tuple[Imbalance, ...]

    @property
    def balance(self) -> bool:
        """True if no records disagree and every account balances."""
        return not self.imbalances


@dataclass(slots=True)
class Ledgers:
    """Token accounting of a run. Feed every record, each topic in offset order and dead letters first; then call
    `close`.
    """

    run_id: str
    max_tokens: int
    """[batcher] max_tokens of the run."""
    version: FoldVersion
    """Fold version of the run."""
    _groups: dict[str, GroupRecords] = field(default_factory=dict)
    _samples: dict[str, SampleTokens] = field(default_factory=dict)
    _manifests: dict[int, Manifest] = field(default_factory=dict)
    _steps: dict[int, StepCompleted] = field(default_factory=dict)
    _parked: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def add(self, topic: str, partition: int, offset: int, event: Event) -> None:
        """Count one record; repeated records change nothing."""
        cause = self._parked.get((topic, partition, offset))
        if isinstance(event, DeadLetter):
            self._parked[event.topic, event.partition, event.offset] = event.cause
        elif topic == SESSIONS.name:
            if cause not in NOT_FOLDED:
                with contextlib.suppress(FoldError):  # dead-lettered by the assembler, folded as rejected
                    self._group(event.group_id).spine.fold(offset, event)
        elif isinstance(event, TokenSnapshot):
            turns = self._group(event.group_id).turns.setdefault(event.session_id, {})
            tokens = sampled_tokens(event)
            place = BEHIND if cause in NOT_FOLDED else offset
            turns.setdefault(key_of(event.turn), Sampled(place, tokens, cause is not None))
        elif isinstance(event, TurnTreeAssembled):
            self._group(event.group_id).trees[event.session_id] = TreeSummary.of(event)
        else:
            self._add_output(event)

    def _add_output(self, event: Event) -> None:
        match event:
            case SegmentSample() if event.sample_id not in self._samples:
                tokens = self._samples[event.sample_id] = SampleTokens.of(event, self.max_tokens)
                held = self._group(event.group_id).samples
                held[event.session_id] = held.get(event.session_id, 0) + tokens.trained
            case GroupScored():
                self._group(event.group_id).score = event
            case SampleBatchFormed() | BatchSkipped():
                self._manifests.setdefault(event.batch_index, event)
            case StepCompleted():
                self._steps[event.batch_index] = counting_step(self._steps.get(event.batch_index), event)

    def _group(self, group_id: str) -> GroupRecords:
        return self._groups.setdefault(group_id, GroupRecords(ControlStreamFold(self.version)))

    def run_books(self) -> TokenAccount:
        """Return the run's total as `turnlog log report` counts it, from fewer records."""
        sampled = {name: sum(turn.tokens for turns in group.turns.values() for turn in turns.values())
                   for name, group in self._groups.items() if group.turns}  # fmt: skip
        scored = [group.score for group in self._groups.values() if group.score is not None]
        return run_books(sampled, scored, self._manifests.values(), self._steps.values())

    def close(self) -> Books:
        """Return every account and every disagreement between records."""
        draws = follow_manifests(self._samples, list(self._manifests.values()), self._steps)
        by_session: dict[str, list[str]] = {}
        for name, sample in self._samples.items():
            by_session.setdefault(sample.session_id, []).append(name)
        sessions: dict[str, TokenAccount] = {}
        groups: dict[str, TokenAccount] = {}
        found: list[Imbalance] = []
        for group_id, group in self._groups.items():
            own = group.sessions()
            found += group.imbalances(group_id, own)
            for session, account in own.items():
                if account.trained:
                    self._settle(account, by_session[session], draws)
            sessions |= own
            groups[group_id] = total(own.values())
        batches = {str(index): draws.batches[index] for index in sorted(draws.batches)}
        run = total(groups.values())
        levels = {"session": sessions, "group": groups, "batch": batches, "run": {self.run_id: run}}
        found += [*draws.imbalances, *_find_imbalances(levels), *self._check_run(run)]
        return Books(levels, tuple(sorted(found, key=lambda entry: LEVELS.index(entry.level))))

    def _settle(self, account: TokenAccount, samples: list[str], draws: Draws) -> None:
        """Replace the tokens that samples offer for training by what became of them."""
        account.trained = 0
        for name in samples:
            fate = draws.fates.get(name)
            if fate is not None:
                account.trained += fate.trained
                account.mask(fate.masked)
            elif self._samples[name].group_id not in draws.groups:
                account.mask({MaskReason.unused.value: self._samples[name].trained})

    def _check_run(self, run: TokenAccount) -> list[Imbalance]:
        whole = self.run_books()
        said = (whole.sampled, whole.trained, Counter(whole.masked))
        if said == (run.sampled, run.trained, run.masked):
            return []
        says = (f"scores, manifests and steps add up to {whole.trained} trained and {whole.masked} masked, "
                f"its sessions to {run.trained} and {dict(sorted(run.masked.items()))}")  # fmt: skip
        return [Imbalance("run", self.run_id, says)]


def _find_imbalances(levels: dict[str, dict[str, TokenAccount]]) -> list[Imbalance]:
    return [
        Imbalance(level, name, f"{account.missing} of {account.sampled} sampled tokens are neither trained nor masked")
        for level, accounts in levels.items()
        for name, account in accounts.items()
        if not account.balance
    ]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampled output of one turn on the log."""

    offset: int
    tokens: int
    refused: bool


@dataclass(frozen=True, slots=True)
class TreeSummary:
    """The part of a TurnTreeAssembled that is retained: a run has many trees, and their nodes are large."""

    books: TreeBooks
    bare: bool
    """True if the tree has no nodes: its session names no turn, or was rejected."""

    @classmethod
    def of(cls, event: TurnTreeAssembled) -> TreeSummary:
        """Return the retained part of a record."""
        return cls(event.books, not event.nodes)


@dataclass(slots=True)
class GroupRecords:
    """The records of one group."""

    spine: ControlStreamFold
    turns: dict[str, dict[TurnKey, Sampled]] = field(default_factory=dict)
    """Session -> its turns; the first snapshot of a turn is the effective one."""
    trees: dict[str, TreeSummary] = field(default_factory=dict)
    score: GroupScored | None = None
    samples: dict[str, int] = field(default_factory=dict)
    """Session -> number of tokens that its samples mark as trained."""

    def sessions(self) -> dict[str, TokenAccount]:
        """Return an account per session: what its samples offer for training, and what the group masks."""
        end = max((self._end(session) for session in self._scored_sessions()), default=-1)
        return {session: self._account(session, end) for session in self.turns}

    def imbalances(self, group_id: str, accounts: dict[str, TokenAccount]) -> list[Imbalance]:
        """Return the disagreements of trees, samples and score with `accounts`."""
        found: list[Imbalance] = []
        for session, tree in self.trees.items():
            end = self._end(session)
            held = sum(turn.tokens for turn in self.turns.get(session, {}).values() if turn.offset <= end)
            books = tree.books
            if held != books.sampled:
                says = f"its tree counts {books.sampled} sampled tokens, the snapshots hold {held}"
                found.append(Imbalance("session", session, says))
            trained = books.trained - self._untrained_players(session).total()
            if session in self._worth() and self.samples.get(session, 0) != trained:
                says = f"its tree trains {trained} tokens, its samples hold {self.samples.get(session, 0)}"
                found.append(Imbalance("session", session, says))
        if self.score is None:
            return found
        said, summed = self.score.books, total(accounts.values())
        late = summed.sampled - said.sampled
        masked = Counter(said.masked) + Counter({MaskReason.late.value: late})
        if (said.trained, +masked) != (summed.trained, +summed.masked):
            says = (f"GroupScored trains {said.trained} and masks {dict(sorted(masked.items()))}, its sessions "
                    f"{summed.trained} and {dict(sorted(summed.masked.items()))}")  # fmt: skip
            found.append(Imbalance("group", group_id, says))
        return found

    def _scored_sessions(self) -> list[str]:
        """Return the sessions that were assembled when the group was scored."""
        named = self.spine.named_by_reaper
        return [session for session in self.spine.settled if named is None or session in named]

    def _worth(self) -> set[str]:
        """Return the sessions with an advantage."""
        rollouts = self.score.rollouts if self.score is not None else ()
        return {rollout.session_id for rollout in rollouts if rollout.advantage is not None}

    def _untrained_players(self, session: str) -> Counter[str]:
        """Count the tokens of players that their tree lets train and their group does not, by reason. Such a session
        has another player that trains.
        """
        masked: Counter[str] = Counter()
        for rollout in self.score.rollouts if self.score is not None else ():
            for player in rollout.players:
                if rollout.session_id == session and player.advantage is None:
                    masked[untrained_reason(player.excluded_reason).value] += player.tokens
        return +masked

    def _end(self, session: str) -> int:
        """Return the offset of the last snapshot that the session's finish names; -1 if there is none."""
        known, turns = self.spine.sessions.get(session), self.turns.get(session, {})
        if known is None or known.finish is None:
            return -1
        named = [key_of(turn) for turn in named_turns(known)]
        return max((turns[turn].offset for turn in named if turn in turns), default=-1)

    def _account(self, session: str, end: int) -> TokenAccount:
        turns = self.turns[session].values()
        account = TokenAccount(sampled=sum(turn.tokens for turn in turns))
        if self.score is None:
            account.mask({MaskReason.unused.value: account.sampled})
            return account
        inside = sum(turn.tokens for turn in turns if turn.offset <= end)
        account.mask({MaskReason.late.value: account.sampled - inside})
        reason = self._fate(session)
        if reason is not None:
            account.mask({reason.value: inside})
            return account
        account.trained = self.samples.get(session, 0)
        if session in self.trees:
            account.mask(self.trees[session].books.masked)
            account.mask(self._untrained_players(session))
        account.mask(self._unnamed_tokens(session, end))
        return account

    def _fate(self, session: str) -> MaskReason | None:
        """Return why the whole session is masked; None if its tree decides."""
        assert self.score is not None
        if self.score.status is not GroupStatus.trained:
            return MaskReason.discarded_group
        if session not in self._scored_sessions():
            return MaskReason.late
        if session in self._worth():
            return None
        if self._is_rejected(session):
            return MaskReason.refused
        reasons = (one.excluded_reason for one in self.score.rollouts if one.session_id == session)
        return MaskReason.flagged if MaskReason.flagged.value in reasons else MaskReason.excluded_outcome

    def _is_rejected(self, session: str) -> bool:
        """Whether the session was rejected, by the session fold or because a record of a turn that it names was
        rejected.
        """
        known = self.spine.sessions[session]
        bare = session in self.trees and self.trees[session].bare
        return known.refused or (bare and known.finish is not None and bool(known.finish.turns))

    def _unnamed_tokens(self, session: str, end: int) -> Counter[str]:
        """Count the tokens of turns after the last one that the session needs and before the end of its group, by
        reason.
        """
        finish = self.spine.sessions[session].finish
        undelivered = {key_of(turn) for turn in finish.undelivered} if finish is not None else set()
        own, masked = self._end(session), Counter[str]()
        for key, turn in self.turns[session].items():
            if own < turn.offset <= end:
                reason = MaskReason.undelivered if key in undelivered else MaskReason.not_named
                masked[(MaskReason.refused if turn.refused else reason).value] += turn.tokens
        return masked


CUT, VERSION = MaskReason.length_cut.value, MaskReason.version_mask.value
Manifest = SampleBatchFormed | BatchSkipped


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Number of tokens that a sample marks as trained, and number of those at positions from `max_tokens` on."""

    group_id: str
    session_id: str
    trained: int
    cut: int

    @classmethod
    def of(cls, sample: SegmentSample, max_tokens: int) -> SampleTokens:
        """Count over the spans of a sample."""
        trained = cut = 0
        for span in sample.spans:
            if span.trained:
                trained += span.length
                cut += span.length - max(min(span.start + span.length, max_tokens) - span.start, 0)
        return cls(sample.group_id, sample.session_id, trained, cut)

    def removed_tokens(self, left: int) -> Counter[str]:
        """Return the reasons of the tokens that the rollout batch removed from the sample when `left` remained. Tokens
        beyond the length limit are counted first.
        """
        gone = self.trained - left
        return Counter({CUT: min(self.cut, gone), VERSION: gone - min(self.cut, gone)})


@dataclass(slots=True)
class Draws:
    """Dispositions of all samples that a rollout batch took."""

    fates: dict[str, TokenAccount] = field(default_factory=dict)
    """Sample -> its account; `sampled` is the number of tokens that the sample marks as trained."""
    batches: dict[int, TokenAccount] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    """Groups that a rollout batch took."""
    imbalances: list[Imbalance] = field(default_factory=list)


def follow_manifests(
    samples: Mapping[str, SampleTokens], manifests: Sequence[Manifest], steps: Mapping[int, StepCompleted]
) -> Draws:
    """Follow `manifests` (each batch once). `steps` maps a batch to its effective step."""
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


def _batch(manifest: Manifest, step: StepCompleted | None) -> TokenAccount:
    account = TokenAccount()
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
            account = draws.fates[sample_id] = TokenAccount(samples[sample_id].trained)
            account.mask(samples[sample_id].removed_tokens(left))
            if why is None:
                account.trained = left
            else:
                account.mask({why: left})


def _step_reason(manifest: Manifest, step: StepCompleted | None) -> str | None:
    """Return why the step trained no token of the batch. None if it trained some: a mask of single tokens names no
    sample.
    """
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
    """Check that the reasons in the manifests of a rollout batch match those of its samples, and that it accounts for
    all tokens of these samples.
    """
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
