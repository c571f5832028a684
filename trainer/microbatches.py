"""Which rows a forward pass takes, and as what tensors.

Rows are right-padded, or packed behind one another; position t predicts token t + 1, so token columns are shifted by
one here. Which rank and microbatch a row goes to is a pure function of lengths, data-parallel size and the token limit,
so that a checkpoint resumes on another layout, and a re-run sees the same sums in the same order.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.models.attention import zigzag
from turnlog.trainer.models.experts import RoutedRows
from turnlog.trainer.models.vision import PicturedRows, Shown, shown


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """b rows, s = longest length - 1 positions. Padding carries weight 0."""

    inputs: torch.Tensor
    """[b, s] int64"""
    targets: torch.Tensor
    """[b, s] int64, the token after each input"""
    positions: torch.Tensor
    """[b, s] int64; [b, s, 3] of rows with images"""
    trained: torch.Tensor
    """[b, s] bool"""
    recorded: torch.Tensor
    """[b, s] float32, the engine's log-prob of the target"""
    advantages: torch.Tensor
    """[b, s] float32"""
    weights: torch.Tensor
    """[b, s] float32, 1 / weight_divisor where trained"""
    temperature: torch.Tensor
    """[b] float32; packed [1, t]"""
    places: torch.Tensor
    """[b, s] int64, where the target stands among all tokens of the batch; 0 for padding"""
    experts: torch.Tensor | None = None
    """[b, s, layers, top_k] int64, where routing is replayed; None: routers choose"""
    features: torch.Tensor | None = None
    """[b, s] int64, of rows with images: which of their features stands there, counted from 1; 0: the token's own"""
    images: Shown | None = None
    edges: tuple[int, ...] = ()
    """Of rows that are packed into one: where each begins, and where the last ends. The others are [1, t] then."""


def padded(rows: BatchRows, microbatch: Microbatch, device: torch.device, *, multiple: int = 1) -> PaddedRows:
    """The rows of one microbatch, `multiple` x n positions each. A trained first token, which nothing predicts, is left
    out; `step` then finds the books off."""
    if not microbatch:
        return stand_in(device, multiple)
    index = np.asarray(microbatch)
    starts, lengths = rows.starts[index], rows.lengths[index].astype(np.int64)
    width = 1 + -(-max(1, int(lengths.max()) - 1) // multiple) * multiple
    columns = np.arange(width)
    real = columns < lengths[:, None]
    at = np.where(real, starts[:, None] + columns, 0)

    def table(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.where(real, values[at], values.dtype.type(0))).to(dtype)

    trained = table(rows.trained, torch.bool)
    tokens = table(rows.token_ids, torch.int64)
    share = torch.from_numpy(1.0 / rows.weight_divisor[index]).to(torch.float32)
    positions = torch.arange(width - 1).expand(len(microbatch), -1).contiguous().to(device)
    features = images = None
    if isinstance(rows, PicturedRows):
        positions, features, images = shown(rows, microbatch, width - 1, device)
    return PaddedRows(
        inputs=tokens[:, :-1].contiguous().to(device),
        targets=tokens[:, 1:].contiguous().to(device),
        positions=positions,
        trained=trained[:, 1:].to(device),
        recorded=table(rows.logprobs, torch.float32)[:, 1:].to(device),
        advantages=table(rows.advantages, torch.float32)[:, 1:].to(device),
        weights=(trained[:, 1:] * share[:, None]).to(device),
        temperature=torch.from_numpy(rows.temperature[index].astype(np.float32)).to(device),
        places=torch.from_numpy(at[:, 1:].copy()).to(device),
        experts=_experts(rows, microbatch, at[:, :-1], columns[:-1] < lengths[:, None] - 1, device),
        features=features,
        images=images,
    )


def _experts(
    rows: BatchRows, microbatch: Microbatch, at: NDArray[np.int64], real: NDArray[np.bool_], device: torch.device
) -> torch.Tensor | None:
    """Of the inputs; distinct ones for padding. None of unrouted rows, which share no microbatch with others."""
    if not isinstance(rows, RoutedRows) or not rows.has_experts[microbatch[0]]:
        return None
    found = np.where(real[..., None, None], rows.experts[at], np.arange(rows.experts.shape[-1]))
    return torch.from_numpy(found.astype(np.int64)).to(device)


def stand_in(device: torch.device, positions: int) -> PaddedRows:
    """One row of weight 0."""
    integers = torch.zeros((1, positions), dtype=torch.int64, device=device)
    floats = torch.zeros((1, positions), dtype=torch.float32, device=device)
    return PaddedRows(
        inputs=integers,
        targets=integers,
        positions=integers,
        trained=integers.bool(),
        recorded=floats,
        advantages=floats,
        weights=floats,
        temperature=torch.ones(1, device=device),
        places=integers,
    )


def packed(batch: PaddedRows, positions: Sequence[int]) -> PaddedRows:
    """The rows behind one another, of each the first `positions`: no padding but what ranks need to share them."""
    device = batch.inputs.device
    row = torch.repeat_interleave(torch.arange(len(positions)), torch.tensor(positions)).to(device)
    column = torch.cat([torch.arange(count) for count in positions]).to(device)
    tables: dict[str, Any] = {name: value[row, column][None] for name, value in _tables(batch).items()}
    edges = tuple(itertools.accumulate(positions, initial=0))
    return dataclasses.replace(batch, **tables, temperature=batch.temperature[row][None], edges=edges)


def shared(batch: PaddedRows, rank: int, ranks: int) -> PaddedRows:
    """What a context-parallel rank computes of it."""
    if ranks == 1:
        return batch
    edges = batch.edges or (0, batch.inputs.size(1))
    own = [start + zigzag(end - start, rank, ranks) for start, end in itertools.pairwise(edges)]
    columns = torch.cat(own).to(batch.inputs.device)
    tables: dict[str, Any] = {name: value[:, columns] for name, value in _tables(batch).items()}
    return dataclasses.replace(batch, **tables)


def _tables(batch: PaddedRows) -> dict[str, torch.Tensor]:
    """What has a number for each position."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.dim() > 1}


Microbatch = tuple[int, ...]
"""Row indices in ascending order; empty: a stand-in row of weight 0, so that every rank runs equally many."""


Cost = Callable[[int], int]
"""Of a row, by its length."""


def microbatches(
    lengths: Sequence[int],
    ranks: int,
    limit_tokens: int,
    *,
    cost: Cost = int,
    packing: bool = False,
    kinds: Sequence[bool] | None = None,
) -> tuple[tuple[Microbatch, ...], ...]:
    """For each rank its microbatches, equally many for all; of each of the `kinds`, which share none, the costliest
    first.

    Every row is in exactly one. A microbatch of several rows takes at most `limit_tokens`, with rows padded to its
    longest or, when they are packed, behind one another; a longer row goes alone. Ranks are balanced by cost (longest
    processing time first, Graham 1969), and so are the microbatches of a rank, in number as few as limits allow: ranks
    that share experts wait for each other in every one, and pipeline stages for the costliest.
    """
    if ranks < 1 or limit_tokens < 1:
        raise ValueError(f"ranks {ranks} and limit_tokens {limit_tokens} must be positive")
    rows = _Rows(list(map(int, lengths)), [cost(int(length)) for length in lengths], limit_tokens)
    loads = [(0, 0, rank) for rank in range(ranks)]
    plan: list[list[Microbatch]] = [[] for _ in range(ranks)]
    of = [False] * len(lengths) if kinds is None else list(kinds)
    for kind in sorted(set(of)):
        dealt = rows.dealt([row for row in range(len(of)) if of[row] == kind], loads)
        taken = rows.packed(dealt) if packing else rows.padded(dealt)
        count = max(map(len, taken))
        for rank, filled in zip(plan, taken, strict=True):
            rank += [tuple(sorted(one.rows)) for one in sorted(filled)] + [()] * (count - len(filled))
    return tuple(tuple(rank) or ((),) for rank in plan)


ROW_POSITIONS = 25
"""What a row of its own costs attention, in positions (benchmark L3)."""


def worth_packing(padded_plan: Sequence[Sequence[Microbatch]], lengths: Sequence[int]) -> bool:
    """Whether the padding of these microbatches costs more than calling attention row by row."""
    held = [[int(lengths[row]) for row in one] for rank in padded_plan for one in rank if one]
    return sum(len(one) * max(one) - sum(one) for one in held) > ROW_POSITIONS * len(lengths)


STEPS = 4096
"""Into which the least cost is looked for."""


@dataclass(order=True, slots=True)
class _Filled:
    """A microbatch, of any the cheapest last."""

    credit: int
    """What it costs, below 0."""
    rows: list[int]
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    lengths: Sequence[int]
    costs: Sequence[int]
    limit: int
    """Tokens of a microbatch."""

    def dealt(self, rows: Sequence[int], loads: list[tuple[int, int, int]]) -> list[list[int]]:
        """By rank: the costliest first, each to the rank with the least cost so far (then fewest rows), which `loads`
        say, and go on saying."""
        dealt: list[list[int]] = [[] for _ in loads]
        for row in sorted(rows, key=lambda row: (-self.costs[row], row)):
            total, count, rank = heapq.heappop(loads)
            dealt[rank].append(row)
            heapq.heappush(loads, (total + self.costs[row], count + 1, rank))
        return dealt

    def packed(self, dealt: Sequence[Sequence[int]]) -> list[list[_Filled]]:
        """As few for every rank as have room for its rows."""
        counts = range(1, max(map(len, dealt)) + 1)

        def fits(count: int) -> bool:
            return all(self._spread(rows, count) is not None for rows in dealt)

        fewest = bisect.bisect_left(counts, True, key=fits)
        return [self._spread(rows, counts[fewest]) or [] for rows in dealt]

    def _spread(self, rows: Sequence[int], count: int) -> list[_Filled] | None:
        """Each row to the cheapest microbatch that has room for it; None where none has."""
        open_ = [(0, place, _Filled(0, [])) for place in range(count)]
        for row in rows:
            full = []
            while open_ and open_[0][2].rows and open_[0][2].tokens + self.lengths[row] > self.limit:
                full.append(heapq.heappop(open_))
            if not open_:
                return None
            _, place, one = open_[0]
            one.rows.append(row)
            one.tokens += self.lengths[row]
            one.credit -= self.costs[row]
            heapq.heapreplace(open_, (-one.credit, place, one))
            for entry in full:
                heapq.heappush(open_, entry)
        return [one for _, _, one in open_ if one.rows]

    def padded(self, dealt: Sequence[Sequence[int]]) -> list[list[_Filled]]:
        """As few for every rank as the fullest one needs, of each rank the costliest as cheap as may be."""
        filled = [self._filled(rows, math.inf) for rows in dealt]
        count = max(map(len, filled))
        return [self._evened(rows, count, one) for rows, one in zip(dealt, filled, strict=True)]

    def _evened(self, rows: Sequence[int], count: int, filled: list[_Filled]) -> list[_Filled]:
        """At most `count`; `filled`: without a bound on cost."""
        high = max((-one.credit for one in filled), default=0)

        def found(step: int) -> list[_Filled]:
            return self._filled(rows, high * (step + 1) // STEPS)

        def fits(step: int) -> bool:
            tried = found(step)
            return len(tried) <= count and all(-one.credit <= high * (step + 1) // STEPS for one in tried)

        return found(bisect.bisect_left(range(STEPS - 1), True, key=fits))

    def _filled(self, rows: Sequence[int], most: float) -> list[_Filled]:
        """One after the other, the longest rows first, so that neighbours in length share one, and each counts as the
        first, the longest. Over `most` cost is only a row alone."""
        filled: list[_Filled] = []
        for row in rows:
            last = filled[-1] if filled else None
            if last is not None:
                longest = last.rows[0]
                tokens, credit = last.tokens + self.lengths[longest], last.credit - self.costs[longest]
                if tokens <= self.limit and -credit <= most:
                    last.rows.append(row)
                    last.tokens, last.credit = tokens, credit
                    continue
            filled.append(_Filled(-self.costs[row], [row], self.lengths[row]))
        return filled
