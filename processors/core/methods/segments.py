"""Policy `prefix`: named turns become segments, runs of turns whose tokens are one contiguous sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise

from turnlog.processors.core.fold_versions import LATEST, FoldVersion
from turnlog.processors.core.lineages import Lineages, Turn
from turnlog.processors.core.token_tree import TokenTree
from turnlog.processors.core.turns import Tokens, TurnKey, agree, key_of
from turnlog.schemas.events import FinishReason, MaskReason

PARTIAL = frozenset({FinishReason.abort, FinishReason.error})
"""Outputs that the engine did not end: no answer to act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """What a policy reads of the rules of a run."""

    version: FoldVersion = LATEST
    """Of the run: which rules its records are folded by."""
    fork_threshold_tokens: int = 1024
    """Of policy slime: a turn with fewer output tokens realigns what drifted before it; 0 always forks."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of turn orders. Every turn is in one of them or masked."""

    runs: tuple[tuple[int, ...], ...]
    duplicated: int
    """Context tokens of the segments that an earlier turn of a segment holds already."""
    masked: Mapping[int, MaskReason] = field(default_factory=dict)
    """Turns that are in no segment, and why."""


def taken_out(
    turns: Sequence[Turn],
    tree: Lineages,
    undelivered: AbstractSet[TurnKey],
    version: FoldVersion,
    *,
    guess_retries: bool = True,
) -> dict[int, MaskReason]:
    """Leaves that no agent acted on: aborted, named undelivered, or retried.

    A leaf was retried when a later turn of the same agent with the same prompt is continued or is the session's last:
    the last of the whole session, of those that were neither aborted nor named (of all, before fold version 2).
    """
    continued = tree.continued
    leaves = [order for order in range(len(turns)) if order not in continued]
    out: dict[int, MaskReason] = {}
    for order in leaves:
        if _aborted(turns[order], version):
            out[order] = MaskReason.aborted
        elif key_of(turns[order].id) in undelivered:
            out[order] = MaskReason.undelivered
    if guess_retries:
        mute = out.keys() if version.retries_need_answers else frozenset[int]()
        again = _asked_again(turns, continued, [order for order in leaves if order not in mute])
        retried = [order for order in leaves if order not in out and again.get(_asked(turns[order]), -1) > order]
        out |= dict.fromkeys(retried, MaskReason.undelivered)
    return out


def _aborted(turn: Turn, version: FoldVersion) -> bool:
    """Whether an agent cannot have acted on the leaf."""
    if version.aborted_leaves_train:
        return turn.kinship.finish_reason in PARTIAL
    return turn.kinship.aborted


def _asked_again(
    turns: Sequence[Turn], continued: AbstractSet[int], leaves: Sequence[int]
) -> dict[tuple[object, ...], int]:
    """What leaves before the last turn asked -> the latest turn that asked it and is continued or is the last: of those
    that are continued, and `leaves`."""
    last = max((*continued, *leaves), default=-1)
    asked = {_asked(turns[leaf]) for leaf in leaves if leaf != last}
    if not asked:
        return {}
    answered = sorted({*continued, last})
    return {_asked(turns[order]): order for order in answered if _asked(turns[order]) in asked}


def _asked(turn: Turn) -> tuple[object, ...]:
    """Who asked what: two agents may ask the same."""
    return turn.kinship.agent_path, turn.tokens.prompt_sha256, turn.tokens.images


def cut(turns: Sequence[Turn], out: Mapping[int, MaskReason]) -> Segments:
    """Cut the turns that were not taken out into segments.

    A turn extends the longest S of an earlier turn that is a prefix of its prompt, at one temperature and one kind of
    log-prob, since a row has one of each. Where several extend one turn, the one whose subtree holds most output tokens
    takes its segment, ties by order; the others open their own. O(new tokens) where prompts extend their parents.
    """
    kept = [order for order in range(len(turns)) if order not in out]
    if _chained([turns[order].tokens for order in kept]):
        return Segments((tuple(kept),) if kept else (), 0, out)
    tree = _token_tree([turns[order].tokens for order in kept])
    for order in kept:
        tree.mark(turns[order].tokens, order)
    before = {order: _extended(turns, tree, order) for order in kept}
    after = _heirs(turns, kept, before)
    runs: list[tuple[int, ...]] = []
    again = 0
    for order in kept:
        parent = before[order]
        if parent is not None and after[parent] == order:
            continue
        run = [order]
        while run[-1] in after:
            run.append(after[run[-1]])
        runs.append(tuple(run))
        again += tree.shared(turns[order].tokens, order)
    tree.dissolve()
    return Segments(tuple(runs), again, out)


def _chained(kept: Sequence[Tokens]) -> bool:
    """Whether each turn extends exactly the one before it, as most sessions do: one segment, at 0.5 us per turn where
    the tree takes 5."""
    return all(
        turn.parent is before and turn.base_len == before.length and one_row(before, turn)
        for before, turn in pairwise(kept)
    )


def duplicated(turns: Sequence[Turn], runs: Sequence[Sequence[int]]) -> int:
    """Context tokens of segments that an earlier turn of a segment holds already, for any policy."""
    held = sorted(order for run in runs for order in run)
    tree = _token_tree([turns[order].tokens for order in held])
    for order in held:
        tree.mark(turns[order].tokens, order)
    again = sum(tree.shared(turns[run[0]].tokens, run[0]) for run in runs)
    tree.dissolve()
    return again


def one_row(one: Tokens, other: Tokens) -> bool:
    """Whether a later turn can share a row with one whose tokens it extends: one temperature and one kind of log-prob,
    since a row has one of each, and the same images, whose tokens are the same for any."""
    return (one.temperature, one.logprob_kind) == (other.temperature, other.logprob_kind) and agree(one, other)


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
        if one_row(turns[other].tokens, mine):
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
