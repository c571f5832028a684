"""The tokens of a session's turns, each stored once: a radix tree whose edges are arrays that grow.

A strand holds the ids that come after a point of the strand above it, so a session takes memory in proportion to its
new tokens, however often its history is rewritten. A prompt is compared from the place that it is known to pass.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from turnlog.processors.core.token_tree import common
from turnlog.processors.core.turns import Ids
from turnlog.schemas.events.turns import ImageRef

if TYPE_CHECKING:
    from turnlog.producers.gateway.conversation import Turn


class Place(NamedTuple):
    """The point behind the first `depth` ids of a line, on the strand that holds the last of them."""

    strand: Strand
    depth: int


@dataclass(slots=True, eq=False)
class Strand:
    """Ids from `start` on of a line whose first `start` ids the strands above hold."""

    above: Strand | None
    start: int
    ids: array[int] = field(default_factory=lambda: array("i"))
    turns: list[Turn] = field(default_factory=list)
    """Those that end here, by length."""
    below: dict[tuple[int, int], Strand] = field(default_factory=dict)
    """Strands that part from this one, by depth and first id."""

    @property
    def end(self) -> int:
        """How many ids a line has that ends where this strand does."""
        return self.start + len(self.ids)

    def slice(self, start: int, end: int) -> Ids:
        """Ids [start, end) of the line, as far as they are here: a copy, for an array that is looked into cannot
        grow."""
        return np.array(self.ids[max(0, start - self.start) : max(0, end - self.start)], dtype=np.int32)


class Strands:
    """Lines are looked up and added; nothing is taken out."""

    def __init__(self) -> None:
        self.start = Place(Strand(None, 0), 0)
        self.held = 0
        """Ids in memory."""
        self._images: dict[tuple[str, int], int] = {}
        """(sha256, placeholder id) -> the number that stands for it here."""

    def keyed(self, ids: Sequence[int], images: Sequence[ImageRef], start: int) -> Ids:
        """Ids of a prompt from `start` on as they are held: with a number of its own, below 0, for each image in place
        of its placeholders, so that prompts that differ in an image alone part there."""
        keyed = np.array(ids, dtype=np.int32)
        for one in images:
            if one.position >= start:
                name = (one.image.sha256, ids[one.position - start])
                number = self._images.setdefault(name, -1 - len(self._images))
                keyed[one.position - start :][: one.tokens] = number
        return keyed

    def plain(self, ids: Ids) -> Ids:
        """Ids as the model sees them."""
        if not self._images:
            return ids
        placeholders = np.array([token for _, token in self._images], dtype=np.int32)
        return np.where(ids < 0, placeholders[np.minimum(ids, -1) * -1 - 1], ids)

    def follow(self, ids: Ids, start: Place) -> Place:
        """Where a line that passes `start` and goes on with `ids` parts from everything that is held."""
        strand, depth = start
        done = 0
        while True:
            same = common(strand.slice(depth, depth + len(ids) - done), ids[done:])
            depth, done = depth + same, done + same
            below = strand.below.get((depth, int(ids[done]))) if done < len(ids) else None
            if below is None:
                return Place(strand, depth)
            strand = below

    def add(self, turn: Turn, ids: Ids, start: Place) -> None:
        """Hold the line of a turn, which passes `start` and goes on with `ids`; sets the turn's strand."""
        strand, depth = self.follow(ids, start)
        new = array("i", ids[depth - start.depth :].tobytes())
        if new and depth < strand.end:
            strand.below[depth, new[0]] = strand = Strand(strand, depth)
        strand.ids.extend(new)
        self.held += len(new)
        turn.strand = strand
        insort(strand.turns, turn, key=_length)


def above(place: Place, depth: int | None = None) -> Iterator[Place]:
    """Places that the line to `place` passes, from the lowest up: where `depth` is, and where each strand begins."""
    strand: Strand | None = place.strand
    at = place.depth if depth is None else depth
    while strand is not None:
        if at > strand.start or strand.above is None:
            yield Place(strand, at)
            at = strand.start
        strand = strand.above


def line(place: Place) -> Ids:
    """All ids of the line up to `place`."""
    pieces = [strand.slice(strand.start, depth) for strand, depth in above(place)]
    return np.concatenate(pieces[::-1])


def holders(place: Place) -> Iterator[Turn]:
    """Turns whose lines pass `place`: those of its strand first, the shortest first, then those of strands below."""
    waiting = [place.strand]
    while waiting:
        strand = waiting.pop()
        yield from strand.turns[bisect_left(strand.turns, place.depth, key=_length) :]
        waiting += (below for (depth, _), below in strand.below.items() if depth >= place.depth)


def longest(place: Place) -> Turn | None:
    """The longest turn that ends on the strand of `place`, at or before it."""
    turns = place.strand.turns
    at = bisect_right(turns, place.depth, key=_length)
    return turns[at - 1] if at else None


def points(place: Place) -> Iterator[int]:
    """Depths of a strand, from `place` up, at which other turns may hold its line: where turns end or strands part."""
    yield place.depth
    strand = place.strand
    depths = {turn.total for turn in strand.turns} | {depth for depth, _ in strand.below}
    yield from sorted((depth for depth in depths if strand.start < depth < place.depth), reverse=True)


def _length(turn: Turn) -> int:
    return turn.total
