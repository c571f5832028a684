"""Turn trees rendered as text: one line per segment with <trained> and {masked} outputs, then the session's accounting.

a0* main 0,1: 12 <34> 5 <20>          session a, segment 0, which is the anchor; its turns; tokens by number
a1 side_call 2: (9 tokens)            a segment without a sample
a 60 = 54 trained + 6 side_call
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from turnlog.processors.core.turns import Ids
from turnlog.schemas.events import SegmentSample, TreeSegment, TurnTreeAssembled
from turnlog.schemas.types import int32s

Text = Callable[[Ids], str]


def render(trees: Iterable[TurnTreeAssembled], samples: Iterable[SegmentSample], text: Text, *, gap: str = "") -> str:
    """Render sessions as text. `text` renders a piece of tokens, `gap` separates two pieces; payloads must be
    inline.
    """
    found = {(sample.session_id, sample.segment_index): sample for sample in samples}
    lines: list[str] = []
    for tree in trees:
        kinds = {node.turn: tree.lineages[node.lineage].kind for node in tree.nodes}
        for segment in tree.segments:
            star = "*" if segment.index == tree.anchor_segment else ""
            turns = ",".join(str(turn.index) for turn in segment.turns)
            tokens = _tokens(segment, found.get((tree.session_id, segment.index)), text, gap)
            lines.append(f"{tree.session_id}{segment.index}{star} {kinds[segment.turns[-1]]} {turns}: {tokens}")
        masked = "".join(f" + {count} {reason}" for reason, count in tree.books.masked.items())
        lines.append(f"{tree.session_id} {tree.books.sampled} = {tree.books.trained} trained{masked}")
    return "\n".join(lines)


def sizes(ids: Ids) -> str:
    """Return the number of tokens in a piece."""
    return str(len(ids))


def _tokens(segment: TreeSegment, sample: SegmentSample | None, text: Text, gap: str) -> str:
    if sample is None:
        return f"({segment.tokens} tokens)"
    assert isinstance(sample.token_ids, bytes), "payloads are fetched before rendering"
    ids, pieces, at = int32s(sample.token_ids), [], 0
    for span in sample.spans:
        if span.start > at:
            pieces.append(text(ids[at : span.start]))
        at = span.start + span.length
        inside = text(ids[span.start : at])
        pieces.append(f"<{inside}>" if span.trained else f"{{{inside}}}")
    if at < len(ids):
        pieces.append(text(ids[at:]))
    return gap.join(pieces)
