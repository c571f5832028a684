"""group-scores: the figures of every group on a topic of their own, beside the samples (ADR 21).

Fold version 1 has none: its groups are scored in segment-samples alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from turnlog.processors.core.fold_versions import fold_version
from turnlog.schemas.events import Event, GroupEmitted, GroupScored
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import GROUP_SCORES, SAMPLES, TREES, Topic


def score_record(version: str) -> str:
    """The record that says what became of a group of a run with that fold version. Raises UnknownFoldVersion."""
    return GroupEmitted.__name__ if fold_version(version).group_scores else GroupScored.__name__


def scores_topic(version: str) -> Topic:
    """Where it stands. Raises UnknownFoldVersion."""
    return GROUP_SCORES if fold_version(version).group_scores else SAMPLES


def outputs_of(version: str) -> tuple[str, ...]:
    """The topics that a unit writes under that fold version. Raises UnknownFoldVersion."""
    return tuple(dict.fromkeys((TREES.name, SAMPLES.name, scores_topic(version).name)))


def with_figures(outputs: Iterable[Event]) -> Iterator[Event]:
    """What a group gives, each score with its figures behind it where its fold version has them."""
    for output in outputs:
        yield output
        if isinstance(output, GroupScored):
            yield from figures(output)


def figures(scored: GroupScored) -> tuple[GroupEmitted, ...]:
    """What goes out with a score, in its transaction; nothing under a fold version that has none."""
    if not fold_version(scored.fold_version).group_scores:
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
