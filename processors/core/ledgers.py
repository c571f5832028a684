"""The books on every level: per session, group, batch and run, from the records of a run; and where they disagree."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from dataclasses import dataclass, field

from turnlog.processors.core.accounts import LEVELS, Account, Imbalance, total
from turnlog.processors.core.draw_accounts import Draws, Manifest, SampleTokens, drawn
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold_versions import FoldVersion
from turnlog.processors.core.group_accounts import GroupRecords, Sampled, Tree
from turnlog.processors.core.run_books import RunBooks, run_books
from turnlog.processors.core.spine import Spine
from turnlog.processors.core.turns import key_of
from turnlog.schemas.events import (
    BatchSkipped,
    DeadLetter,
    Event,
    GroupScored,
    MaskReason,
    SampleBatchFormed,
    SegmentSample,
    StepCompleted,
    TokenSnapshot,
    TurnTreeAssembled,
    sampled_tokens,
)
from turnlog.schemas.topics import DEAD_LETTERS, SESSIONS

FIRST = DEAD_LETTERS
"""Must be read before the others: what was parked was folded as refused, or not at all."""
NOT_FOLDED = frozenset({"KeyMismatch", "WrongTopic", "RecordSkipped"})
"""Causes of dead letters whose record no fold saw."""
BEHIND = sys.maxsize
"""The place of a snapshot that no fold saw: behind the end of its group, so late."""


@dataclass(frozen=True, slots=True)
class Books:
    """Accounts by level and id, and every disagreement."""

    levels: dict[str, dict[str, Account]]
    """Level -> id -> account; batches by index, the run under its own id."""
    imbalances: tuple[Imbalance, ...]

    @property
    def balance(self) -> bool:
        """No records disagree, every account balances."""
        return not self.imbalances


@dataclass(slots=True)
class Ledgers:
    """Feed every record, each topic in offset order and dead letters first; then `close`."""

    run_id: str
    max_tokens: int
    """[batcher] max_tokens of the run."""
    version: FoldVersion
    """Of the run."""
    _groups: dict[str, GroupRecords] = field(default_factory=dict)
    _samples: dict[str, SampleTokens] = field(default_factory=dict)
    _manifests: dict[int, Manifest] = field(default_factory=dict)
    _steps: dict[int, StepCompleted] = field(default_factory=dict)
    _parked: dict[tuple[str, int, int], str] = field(default_factory=dict)

    def add(self, topic: str, partition: int, offset: int, event: Event) -> None:
        """Take one record; those that come again change nothing."""
        cause = self._parked.get((topic, partition, offset))
        if isinstance(event, DeadLetter):
            self._parked[event.topic, event.partition, event.offset] = event.cause
        elif topic == SESSIONS.name:
            if cause not in NOT_FOLDED:
                with contextlib.suppress(FoldError):  # parked by the assembler; the spine has folded it as refused
                    self._group(event.group_id).spine.fold(offset, event)
        elif isinstance(event, TokenSnapshot):
            turns = self._group(event.group_id).turns.setdefault(event.session_id, {})
            tokens = sampled_tokens(event)
            place = BEHIND if cause in NOT_FOLDED else offset
            turns.setdefault(key_of(event.turn), Sampled(place, tokens, cause is not None))
        elif isinstance(event, TurnTreeAssembled):
            self._group(event.group_id).trees[event.session_id] = Tree.of(event)
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
                known = self._steps.get(event.batch_index)
                if known is None or known.incarnation <= event.incarnation:
                    self._steps[event.batch_index] = event

    def _group(self, group_id: str) -> GroupRecords:
        return self._groups.setdefault(group_id, GroupRecords(Spine(self.version)))

    def run_books(self) -> RunBooks:
        """The run's total as `turnlog report` counts it, from fewer records."""
        sampled = {name: sum(turn.tokens for turns in group.turns.values() for turn in turns.values())
                   for name, group in self._groups.items() if group.turns}  # fmt: skip
        scored = [group.score for group in self._groups.values() if group.score is not None]
        return run_books(sampled, scored, self._manifests.values(), self._steps.values())

    def close(self) -> Books:
        """Every account, and every disagreement between records."""
        draws = drawn(self._samples, list(self._manifests.values()), self._steps)
        by_session: dict[str, list[str]] = {}
        for name, sample in self._samples.items():
            by_session.setdefault(sample.session_id, []).append(name)
        sessions: dict[str, Account] = {}
        groups: dict[str, Account] = {}
        found: list[Imbalance] = []
        for group_id, group in self._groups.items():
            own = group.sessions()
            found += group.imbalances(group_id, own)
            for session, account in own.items():
                if account.trained:
                    self._settle(account, by_session.get(session, []), draws)
            sessions |= own
            groups[group_id] = total(own.values())
        batches = {str(index): draws.batches[index] for index in sorted(draws.batches)}
        run = total(groups.values())
        levels = dict(zip(LEVELS, (sessions, groups, batches, {self.run_id: run}), strict=True))
        found += [*draws.imbalances, *_unbalanced(levels), *self._check_run(run)]
        return Books(levels, tuple(sorted(found, key=lambda entry: LEVELS.index(entry.level))))

    def _settle(self, account: Account, samples: list[str], draws: Draws) -> None:
        """Replace what samples held for training by what became of it."""
        account.trained = 0
        for name in samples:
            fate = draws.fates.get(name)
            if fate is not None:
                account.trained += fate.trained
                account.mask(fate.masked)
            elif self._samples[name].group_id not in draws.groups:
                account.mask({MaskReason.unused.value: self._samples[name].trained})

    def _check_run(self, run: Account) -> list[Imbalance]:
        whole = self.run_books()
        said = (whole.sampled, whole.trained, Counter(whole.masked))
        if said == (run.sampled, run.trained, run.masked):
            return []
        says = (f"scores, manifests and steps add up to {whole.trained} trained and {whole.masked} masked, "
                f"its sessions to {run.trained} and {dict(sorted(run.masked.items()))}")  # fmt: skip
        return [Imbalance("run", self.run_id, says)]


def _unbalanced(levels: dict[str, dict[str, Account]]) -> list[Imbalance]:
    return [
        Imbalance(level, name, f"{account.missing} of {account.sampled} sampled tokens are neither trained nor masked")
        for level, accounts in levels.items()
        for name, account in accounts.items()
        if not account.balance
    ]
