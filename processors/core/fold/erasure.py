"""Sessions whose content was erased: what their fold still knows, and what it takes as recorded.

Everything but content stays in the clear, so lengths, versions, rewards and the control stream are folded as before.
Which turns continue each other as tokens, and which records were rejected for their content, cannot be computed from
erased content: SessionErased records it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnlog.processors.core.lineages import Lineages
from turnlog.processors.core.methods.segments import Segments
from turnlog.schemas.events import ErasedLineage, ErasedTurn, MaskReason, SessionErased
from turnlog.schemas.types import TurnId

Erasures = Mapping[str, SessionErased]
"""Session -> the record of its erasure, for sessions whose tree was assembled before it."""


def recorded_turns(ids: Sequence[TurnId], tree: Lineages, segments: Segments) -> tuple[ErasedTurn, ...]:
    """Return what SessionErased records of a tree, in order of (epoch, index)."""
    of = {order: index for index, run in enumerate(segments.runs) for order in run}
    return tuple(
        ErasedTurn(
            turn=turn, base=tree.bases[order], lineage=tree.of[order], segment=of.get(order, -1),
            reason="" if order in of else segments.masked[order].value,
        )
        for order, turn in enumerate(ids)
    )  # fmt: skip


def recorded_lineages(tree: Lineages) -> tuple[ErasedLineage, ...]:
    """Return the lineages of a tree as SessionErased records them."""
    return tuple(map(ErasedLineage, tree.kinds, tree.agents, tree.players))


def lineages_of(erased: SessionErased) -> Lineages:
    """Return the lineages of an erased session, as recorded."""
    return Lineages(
        of=tuple(turn.lineage for turn in erased.turns),
        kinds=tuple(lineage.kind for lineage in erased.lineages),
        bases=tuple(turn.base for turn in erased.turns),
        players=tuple(lineage.player for lineage in erased.lineages),
        agents=tuple(lineage.agent for lineage in erased.lineages),
    )


def segments_of(erased: SessionErased) -> Segments:
    """Return the segments of an erased session, as recorded."""
    runs: dict[int, list[int]] = {}
    masked = {}
    for order, turn in enumerate(erased.turns):
        if turn.segment < 0:
            masked[order] = MaskReason(turn.reason)
        else:
            runs.setdefault(turn.segment, []).append(order)
    in_order = tuple(tuple(runs[index]) for index in sorted(runs))
    return Segments(in_order, erased.duplicated_prefix_tokens, masked)
