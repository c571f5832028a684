"""Policy `prefix`: named turns become segments, runs of turns whose tokens are one contiguous sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from turnlog.processors.core.lineages import Lineages, Turn
from turnlog.processors.core.tree import TokenTree
from turnlog.processors.core.turns import Tokens, TurnKey, key_of
from turnlog.schemas.events import MaskReason


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of turn orders, in order of their first turns; every turn that was not taken out is in exactly one."""

    runs: tuple[tuple[int, ...], ...]
    duplicated: int
    """Context tokens of the segments that an earlier turn holds already."""


def taken_out(turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey]) -> dict[int, MaskReason]:
    """Leaves that no agent acted on: aborted, named undelivered, or retried.

    A leaf was retried when a later turn with the same prompt is continued or is the session's last.
    """
    continued = tree.continued
    retried: dict[str, int] = {}
    for order, turn in enumerate(turns):
        if order in continued or order == len(turns) - 1:
            retried[turn.tokens.prompt_sha256] = order
    out: dict[int, MaskReason] = {}
    for order, turn in enumerate(turns):
        if order in continued:
            continue
        if turn.kinship.aborted:
            out[order] = MaskReason.aborted
        elif key_of(turn.id) in undelivered or retried.get(turn.tokens.prompt_sha256, -1) > order:
            out[order] = MaskReason.undelivered
    return out


def cut(turns: Sequence[Turn], out: Mapping[int, MaskReason]) -> Segments:
    """Cut the turns that were not taken out into segments.

    A turn extends the longest S of an earlier turn that is a prefix of its prompt, at one temperature and one kind of
    log-prob, since a row has one of each. Where several extend one turn, the one whose subtree holds most output tokens
    takes its segment, ties by order; the others open their own. O(new tokens) where prompts extend their parents.
    """
    kept = [order for order in range(len(turns)) if order not in out]
    tree = _token_tree([turns[order].tokens for order in kept])
    for order in kept:
        tree.mark(turns[order].tokens, order)
    before = {order: _extended(turns, tree, order) for order in kept}
    after = _heirs(turns, kept, before)
    runs: list[tuple[int, ...]] = []
    duplicated = 0
    for order in kept:
        parent = before[order]
        if parent is not None and after[parent] == order:
            continue
        run = [order]
        while run[-1] in after:
            run.append(after[run[-1]])
        runs.append(tuple(run))
        duplicated += tree.shared(turns[order].tokens, order)
    return Segments(tuple(runs), duplicated)


def _token_tree(kept: Sequence[Tokens]) -> TokenTree:
    """The tree of these turns and of those that they are stored against."""
    needed: dict[Tokens, None] = {}
    for turn in kept:
        owner: Tokens | None = turn
        while owner is not None and owner not in needed:
            needed[owner] = None
            owner = owner.parent
    tree = TokenTree()
    for turn in sorted(needed, key=lambda turn: turn.offset):
        tree.insert(turn)
    return tree


def _extended(turns: Sequence[Turn], tree: TokenTree, order: int) -> int | None:
    mine = turns[order].tokens
    for other in tree.extended(mine, order):
        theirs = turns[other].tokens
        if (theirs.temperature, theirs.logprob_kind) == (mine.temperature, mine.logprob_kind):
            return other
    return None


def _heirs(turns: Sequence[Turn], kept: Sequence[int], before: Mapping[int, int | None]) -> dict[int, int]:
    """Which turn takes over the segment of each turn that has followers."""
    outputs = {order: len(turns[order].tokens.output) for order in kept}
    heirs: dict[int, int] = {}
    for order in reversed(kept):
        parent = before[order]
        if parent is not None:
            outputs[parent] += outputs[order]
            if parent not in heirs or outputs[order] >= outputs[heirs[parent]]:
                heirs[parent] = order
    return heirs
