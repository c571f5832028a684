"""group-scores: the figures of every group on a topic of their own, beside the samples (ADR 21).

Fold version 1 has none: its groups are scored in segment-samples alone.
"""

from __future__ import annotations

from turnlog.schemas.events import GroupEmitted, GroupScored
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import GROUP_SCORES, SAMPLES, Topic

WITHOUT = frozenset({"1", "2"})
"""Versions whose assembler writes none; 2 until it does."""


def scores_topic(fold_version: str) -> Topic:
    """Where a reader finds what became of each group of a run with that fold version."""
    return SAMPLES if fold_version in WITHOUT else GROUP_SCORES


def figures(scored: GroupScored) -> tuple[GroupEmitted, ...]:
    """What goes out with a score, in its transaction; nothing under a fold version that has none."""
    if scores_topic(scored.fold_version) is not GROUP_SCORES:
        return ()
    return (
        GroupEmitted(
            event_id=digest("GroupEmitted", scored.group_id),
            run_id=scored.run_id,
            group_id=scored.group_id,
            floor=scored.floor,
            purpose=scored.purpose,
            status=scored.status,
            reason=scored.reason,
            samples=scored.samples,
            books=scored.books,
            fold_version=scored.fold_version,
            settings_sha256=scored.settings_sha256,
        ),
    )
