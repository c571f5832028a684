"""Which rank and microbatch a row goes to: a pure function of lengths, data-parallel size and the token limit.

So a checkpoint resumes on another layout, and a re-run sees the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

Microbatch = tuple[int, ...]
"""Row indices in ascending order; empty: a stand-in row of weight 0, so that every rank runs equally many."""


def microbatches(lengths: Sequence[int], ranks: int, limit_tokens: int) -> tuple[tuple[Microbatch, ...], ...]:
    """For each rank its microbatches, equally many for all.

    Every row is in exactly one. A microbatch of several rows takes at most `limit_tokens` with rows padded to its
    longest; a longer row goes alone. Ranks are balanced by tokens (longest processing time first, Graham 1969).
    """
    if ranks < 1 or limit_tokens < 1:
        raise ValueError(f"ranks {ranks} and limit_tokens {limit_tokens} must be positive")
    packed = [_packed(rows, lengths, limit_tokens) for rows in _dealt(lengths, ranks)]
    count = max(1, *(len(one) for one in packed))
    return tuple((*one, *((),) * (count - len(one))) for one in packed)


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-int(lengths[row]), row))


def _dealt(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows by rank: the longest first, each to the rank with the fewest tokens so far (then fewest rows)."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for row in _longest_first(range(len(lengths)), lengths):
        tokens, rows, rank = min(loads)
        dealt[rank].append(row)
        loads[rank] = (tokens + int(lengths[row]), rows + 1, rank)
    return dealt


def _packed(rows: Sequence[int], lengths: Sequence[int], limit_tokens: int) -> list[Microbatch]:
    """Neighbours in length share a microbatch, so that little of it is padding."""
    packed: list[Microbatch] = []
    current: list[int] = []
    for row in _longest_first(rows, lengths):
        if current and (len(current) + 1) * int(lengths[current[0]]) > limit_tokens:
            packed.append(tuple(sorted(current)))
            current = []
        current.append(row)
    if current:
        packed.append(tuple(sorted(current)))
    return packed
