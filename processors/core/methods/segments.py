"""Trajectory rule `prefix`: named turns become segments, runs of turns whose tokens are one contiguous sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import pairwise

from turnlog.processors.core.fold_versions import LATEST, FoldVersion
from turnlog.processors.core.lineages import Lineages, Turn
from turnlog.processors.core.turns import TokenTree, TurnKey, TurnTokenDelta, agree, key_of
from turnlog.schemas.events import FinishReason, MaskReason

PARTIAL = frozenset({FinishReason.abort, FinishReason.error})
"""Finish reasons of outputs that the engine did not end: there is no answer to act on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The options of a trajectory rule."""

    version: FoldVersion = LATEST
    """Fold version of the run."""
    fork_threshold_tokens: int = 1024
    """Used by `slime`: a turn with fewer output tokens realigns a drift before it; 0 always forks."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of turn orders. Every turn is in exactly one run or masked."""

    runs: tuple[tuple[int, ...], ...]
    duplicated: int
    """Number of context tokens of the segments that an earlier turn of a segment already contains."""
    masked: Mapping[int, MaskReason] = field(default_factory=dict)
    """Turn order -> reason, for turns that are in no segment."""


def taken_out(
    turns: Sequence[Turn],
    tree: Lineages,
    undelivered: AbstractSet[TurnKey],
    version: FoldVersion,
    *,
    guess_retries: bool = True,
) -> dict[int, MaskReason]:
    """Return the leaves that no agent acted on, with the reason: aborted, named undelivered, or retried.

    A leaf was retried if a later turn of the same agent with the same prompt is continued or is the last of the whole
    session. The last is chosen among the turns that were neither aborted nor named undelivered (among all, before fold
    version 2).
    """
    continued = tree.continued_turns
    leaves = [order for order in range(len(turns)) if order not in continued]
    out: dict[int, MaskReason] = {}
    for order in leaves:
        if _is_aborted(turns[order], version):
            out[order] = MaskReason.aborted
        elif key_of(turns[order].id) in undelivered:
            out[order] = MaskReason.undelivered
    if guess_retries:
        mute = out.keys() if version.retries_need_answers else frozenset[int]()
        again = _asked_again(turns, continued, [order for order in leaves if order not in mute])
        retried = [order for order in leaves if order not in out and again.get(_request_key(turns[order]), -1) > order]
        out |= dict.fromkeys(retried, MaskReason.undelivered)
    return out


def _is_aborted(turn: Turn, version: FoldVersion) -> bool:
    """Whether an agent cannot have acted on the leaf."""
    if version.aborted_leaves_train:
        return turn.kinship.finish_reason in PARTIAL
    return turn.kinship.aborted


def _asked_again(
    turns: Sequence[Turn], continued: AbstractSet[int], leaves: Sequence[int]
) -> dict[tuple[object, ...], int]:
    """Map the requests of leaves before the last turn to the latest turn that repeats them and is continued or the
    last.

    Only continued turns and `leaves` are considered.
    """
    last = max((*continued, *leaves), default=-1)
    asked = {_request_key(turns[leaf]) for leaf in leaves if leaf != last}
    if not asked:
        return {}
    answered = sorted({*continued, last})
    return {_request_key(turns[order]): order for order in answered if _request_key(turns[order]) in asked}


def _request_key(turn: Turn) -> tuple[object, ...]:
    """Return the key of a request, including the agent: two agents may send the same prompt."""
    return turn.kinship.agent_path, turn.tokens.prompt_sha256, turn.tokens.images


def cut(turns: Sequence[Turn], out: Mapping[int, MaskReason]) -> Segments:
    """Cut the turns that were not removed into segments.

    A turn extends the longest S of an earlier turn that is a prefix of its prompt, at one temperature and one kind of
    log-prob, since a row has one of each. If several turns extend one turn, the one whose subtree holds most output
    tokens continues its segment, ties by order; the others open their own. Costs O(new tokens) if prompts extend their
    parents.
    """
    kept = [order for order in range(len(turns)) if order not in out]
    if _is_chain([turns[order].tokens for order in kept]):
        return Segments((tuple(kept),) if kept else (), 0, out)
    tree = _token_tree([turns[order].tokens for order in kept])
    for order in kept:
        tree.mark(turns[order].tokens, order)
    before = {order: _find_extended(turns, tree, order) for order in kept}
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
        again += tree.shared_length(turns[order].tokens, order)
    tree.dissolve()
    return Segments(tuple(runs), again, out)


def _is_chain(kept: Sequence[TurnTokenDelta]) -> bool:
    """Whether each turn extends exactly the one before it, as in most sessions: one segment, found at 0.5 us per turn
    instead of the 5 us of the tree.
    """
    return all(
        turn.parent is before and turn.base_len == before.length and one_row(before, turn)
        for before, turn in pairwise(kept)
    )


def split_by_player(turns: Sequence[Turn], segments: Segments, tree: Lineages) -> Segments:
    """Return segments that hold the turns of one player each. The turns of other players become context, wherever the
    tokens of one player's turn continue those of another's.
    """
    if all(len({tree.player_of(order) for order in run}) == 1 for run in segments.runs):
        return segments
    runs: list[tuple[int, ...]] = []
    for run in segments.runs:
        by_player: dict[str, list[int]] = {}
        for order in run:
            by_player.setdefault(tree.player_of(order), []).append(order)
        runs += map(tuple, by_player.values())
    runs.sort()
    return Segments(tuple(runs), count_duplicates(turns, runs), segments.masked)


def count_duplicates(turns: Sequence[Turn], runs: Sequence[Sequence[int]]) -> int:
    """Count the context tokens of segments that an earlier turn of a segment already contains, for any trajectory
    rule.
    """
    held = sorted(order for run in runs for order in run)
    tree = _token_tree([turns[order].tokens for order in held])
    for order in held:
        tree.mark(turns[order].tokens, order)
    again = sum(tree.shared_length(turns[run[0]].tokens, run[0]) for run in runs)
    tree.dissolve()
    return again


def one_row(one: TurnTokenDelta, other: TurnTokenDelta) -> bool:
    """Whether a later turn can share a row with an earlier one whose tokens it extends.

    Both must have one temperature and one kind of log-prob, since a row has one of each, and the same images, because
    all images have the same placeholder tokens.
    """
    return one.temperature == other.temperature and one.logprob_kind == other.logprob_kind and agree(one, other)


def _token_tree(kept: Sequence[TurnTokenDelta]) -> TokenTree:
    """Return the tree of these turns and of the turns that they are stored against."""
    needed: dict[TurnTokenDelta, None] = {}
    for turn in kept:
        owner: TurnTokenDelta | None = turn
        while owner is not None and owner not in needed:
            needed[owner] = None
            owner = owner.parent
    tree = TokenTree()
    for turn in sorted(needed, key=lambda turn: turn.offset):
        tree.insert(turn)
    return tree


def _find_extended(turns: Sequence[Turn], tree: TokenTree, order: int) -> int | None:
    mine = turns[order].tokens
    for other in tree.prefix_turns(mine, order):
        if one_row(turns[other].tokens, mine):
            return other
    return None


def _heirs(turns: Sequence[Turn], kept: Sequence[int], before: Mapping[int, int | None]) -> dict[int, int]:
    """Return, for each turn with followers, the turn that continues its segment."""
    outputs = {order: len(turns[order].tokens.output) for order in kept}
    heirs: dict[int, int] = {}
    for order in reversed(kept):
        parent = before[order]
        if parent is not None:
            outputs[parent] += outputs[order]
            if parent not in heirs or outputs[order] >= outputs[heirs[parent]]:
                heirs[parent] = order
    return heirs
