"""Rows as long, and as alike, as those of recorded sessions of agents' programs.

Of recorded requests against a local server (Claude Code 2.1.329, Codex 0.169.0, opencode 1.18.33; each was to write a
file, two of them by a sub-agent), with four characters for a token. The texts are not here: the tokens are random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tests.fakes.batches import synthetic_rows
from turnlog.processors.core.batches.rows import BatchRows


@dataclass(frozen=True)
class RecordedRow:
    """A row of a session: one agent's conversation."""

    tokens: int
    common: int
    """Number of its first tokens that are the same in every session of a group: system text, tools, task."""
    as_main: int = 0
    """Number of its first tokens that are those of the session's first row."""


RECORDED = {
    "claude-code": (RecordedRow(4132, 3765), RecordedRow(2457, 2014)),
    "codex": (RecordedRow(3144, 2790),),
    "opencode": (RecordedRow(2118, 2010), RecordedRow(1817, 1660, as_main=1127)),
}
"""Program -> the rows of a session."""


def recorded_rows(program: str, rollouts: int = 8) -> BatchRows:
    """Return the rows of a group of sessions of a program."""
    random, kinds = np.random.default_rng(0), RECORDED[program]
    main = random.integers(0, 384, kinds[0].common).astype("<i4")
    alike = [main]
    alike += [
        np.append(main[: kind.as_main], random.integers(0, 384, kind.common - kind.as_main)) for kind in kinds[1:]
    ]
    ids = [
        np.append(same, random.integers(0, 384, kind.tokens - kind.common))
        for _ in range(rollouts)
        for kind, same in zip(kinds, alike, strict=True)
    ]
    lengths = np.array([len(each) for each in ids], "<i4")
    rows = synthetic_rows(0, rows=len(ids), group_size=len(ids), segments=len(kinds), lengths=lengths)
    return replace(rows, token_ids=np.concatenate(ids).astype("<i4"))
