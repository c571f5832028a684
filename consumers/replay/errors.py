"""Why a replay cannot be done (exit status 2; a difference is a result, not an error).

ReplayError
├── NothingToReplay   the run, or the mark of how far it was folded, is not there
├── HistoryPruned     the topics no longer begin at their beginning
├── NoSuchMoment      `--until` names a step, a record or a time that cannot be read or is not there
├── BrokenFold        the fold met a defect at a record that no operator asked to skip
└── BadRefold         a changed setting, or where to write, cannot be used
"""

from __future__ import annotations


class ReplayError(Exception):
    """Base of the tree above."""


class NothingToReplay(ReplayError):
    """Remedy: check [run] id and [kafka] prefix; of an archive, `turnlog archive flush` while the topics live."""


class HistoryPruned(ReplayError):
    """Remedy: `turnlog replay --from archive`."""


class NoSuchMoment(ReplayError):
    """Remedy: a time as 2026-01-31T08:00, `step:N` of a step that was completed, or `agent.turns[0]@17`."""


class BrokenFold(ReplayError):
    """Remedy: fix the fold; where the assembler stopped there too, SkipRequested."""


class BadRefold(ReplayError):
    """Remedy: what the message says."""
