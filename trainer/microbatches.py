"""Assignment of rows to microbatches, and their layout as tensors.

Rows are right-padded, or packed one after the other. Position t predicts token t + 1, so token columns are shifted by
one here. The rank and microbatch of a row are a pure function of lengths, data-parallel size and the token limit, so
that a checkpoint resumes on another layout, and a re-run sees the same sums in the same order.
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
from turnlog.trainer.models.attention import PackedRows, zigzag
from turnlog.trainer.models.experts import RoutedRows
from turnlog.trainer.models.tree import PrefixTree
from turnlog.trainer.models.vision import MicrobatchImages, PicturedRows, lay_out_images


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """b rows of s = longest length - 1 positions. Padding has weight 0."""

    inputs: torch.Tensor
    """[b, s] int64 token ids."""
    targets: torch.Tensor
    """[b, s] int64, the token after each input."""
    positions: torch.Tensor
    """[b, s] int64; [b, s, 3] for rows with images."""
    trained: torch.Tensor
    """[b, s] bool, whether the target trains."""
    recorded: torch.Tensor
    """[b, s] float32, the engine's log-prob of the target."""
    advantages: torch.Tensor
    """[b, s] float32, advantage of the target."""
    weights: torch.Tensor
    """[b, s] float32, 1 / weight_divisor where trained, else 0."""
    temperature: torch.Tensor
    """[b] float32; packed [1, t]."""
    places: torch.Tensor
    """[b, s] int64, index of the target among all tokens of the batch; 0 for padding."""
    scored: torch.Tensor | None = None
    """[n] int64, the targets whose log-probs are computed, as indices of the flattened [b, s]."""
    experts: torch.Tensor | None = None
    """[b, s, layers, top_k] int16, if routing is replayed; None if routers choose. Those of all microbatches of a step
    are on the device at once.
    """
    features: torch.Tensor | None = None
    """[b, s] int64, for rows with images: 1 + index of the image feature at each position; 0 for the token's own
    embedding.
    """
    images: MicrobatchImages | None = None
    edges: tuple[int, ...] = ()
    """Start of each row, and end of the last one, if the rows are packed; the tensors are [1, t] then."""
    packing: PackedRows | None = None
    """The same as the model takes it; None for padded rows."""
    merged: MergedPositions | None = None
    """The tree of rows that share prefixes. Inputs, positions and experts are those of the tree then, and `edges` are
    its start and end.
    """

    def by_row(self, output: torch.Tensor) -> torch.Tensor:
        """Map the model's output [b, s] to the layout of the rows, which differs where rows share prefixes."""
        return output if self.merged is None else output[:, self.merged.sources]

    def to(self, device: torch.device) -> PaddedRows:
        """Return the same on another device."""
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        moved: dict[str, Any] = {name: one.to(device) for name, one in held.items() if isinstance(one, torch.Tensor)}
        if self.images is not None:
            moved["images"] = MicrobatchImages(self.images.pixels.to(device), self.images.grids.to(device))
        merged = None if self.merged is None else self.merged.to(device)
        packing = PackedRows(self.edges, device, merged.tree if merged else None) if self.edges else None
        return dataclasses.replace(self, **moved, packing=packing, merged=merged)


@dataclass(frozen=True, slots=True, eq=False)
class MergedPositions:
    """Packed rows whose shared prefixes are computed once."""

    tree: PrefixTree
    sources: torch.Tensor
    """[n] int64, the position of the tree that computes each of the rows' n positions."""
    first: torch.Tensor
    """[k] int64, one of the rows' positions for each different target: those whose targets are computed."""
    which: torch.Tensor
    """[m] int64, the index in `first` of each scored target."""

    def to(self, device: torch.device) -> MergedPositions:
        """Return the same on another device."""
        return MergedPositions(*(getattr(self, field.name).to(device) for field in dataclasses.fields(self)))


def pad_rows(rows: BatchRows, microbatch: Microbatch, device: torch.device, *, multiple: int = 1) -> PaddedRows:
    """Lay out the rows of one microbatch, with a multiple of `multiple` positions each.

    A trained first token, which nothing predicts, is left out; `step` then raises BooksOff.
    """
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
        positions, features, images = lay_out_images(rows, microbatch, width - 1, device)
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
    """Return the experts of the inputs, with distinct ones for padding; None for unrouted rows, which share no
    microbatch with others.
    """
    if not isinstance(rows, RoutedRows) or not rows.has_experts[microbatch[0]]:
        return None
    found = np.where(real[..., None, None], rows.experts[at], np.arange(rows.experts.shape[-1], dtype=np.int16))
    return torch.from_numpy(found.astype(np.int16, copy=False)).to(device)


def stand_in(device: torch.device, positions: int) -> PaddedRows:
    """Return a stand-in row of weight 0."""
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


def pack_rows(batch: PaddedRows, positions: Sequence[int]) -> PaddedRows:
    """Pack the rows one after the other, the first `positions` of each; the only padding is what sharing among ranks
    requires.
    """
    device = batch.inputs.device
    row = torch.repeat_interleave(torch.arange(len(positions)), torch.tensor(positions)).to(device)
    column = torch.cat([torch.arange(count) for count in positions]).to(device)
    tables: dict[str, Any] = {name: value[row, column][None] for name, value in _tables(batch).items()}
    edges = tuple(itertools.accumulate(positions, initial=0))
    return dataclasses.replace(batch, **tables, temperature=batch.temperature[row][None], edges=edges)


def context_shard(batch: PaddedRows, rank: int, ranks: int) -> PaddedRows:
    """Return the part of a batch that a context-parallel rank computes."""
    if ranks == 1:
        return batch
    edges = batch.edges or (0, batch.inputs.size(1))
    own = [start + zigzag(end - start, rank, ranks) for start, end in itertools.pairwise(edges)]
    columns = torch.cat(own).to(batch.inputs.device)
    tables: dict[str, Any] = {name: value[:, columns] for name, value in _tables(batch).items()}
    return dataclasses.replace(batch, **tables)


def _tables(batch: PaddedRows) -> dict[str, torch.Tensor]:
    """Return the tensors with a value for each position."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.dim() > 1}


Microbatch = tuple[int, ...]
"""Row indices in ascending order. Empty: a stand-in row of weight 0, so that every rank runs equally many
microbatches.
"""


Cost = Callable[[int], int]
"""Cost of a row, as a function of its length."""


def microbatches(
    lengths: Sequence[int],
    ranks: int,
    limit_tokens: int,
    *,
    cost: Cost = int,
    packing: bool = False,
    kinds: Sequence[bool] | None = None,
) -> tuple[tuple[Microbatch, ...], ...]:
    """Return for each rank its microbatches, equally many for all ranks; within each of `kinds`, which share none, the
    costliest first.

    Every row is in exactly one microbatch. A microbatch of several rows takes at most `limit_tokens`, with rows padded
    to its longest one or, if packed, one after the other; a longer row forms a microbatch alone. Ranks are balanced by
    cost (longest processing time first, Graham 1969). So are the microbatches of a rank, whose number is as small as
    the limits allow: ranks that share experts wait for each other in every microbatch, and pipeline stages for the
    costliest one. Raises ValueError if `ranks` or `limit_tokens` is not positive.
    """
    costs = [cost(int(length)) for length in lengths]
    return deal(list(map(int, lengths)), costs, ranks, limit_tokens, packing=packing, kinds=kinds)


def deal(
    lengths: Sequence[int],
    costs: Sequence[int],
    ranks: int,
    limit_tokens: int,
    *,
    packing: bool = False,
    kinds: Sequence[bool] | None = None,
) -> tuple[tuple[Microbatch, ...], ...]:
    """Return what `microbatches` does, for anything that has a length in tokens and a cost."""
    if ranks < 1 or limit_tokens < 1:
        raise ValueError(f"ranks {ranks} and limit_tokens {limit_tokens} must be positive")
    rows = _Rows(lengths, costs, limit_tokens)
    loads = [(0, 0, rank) for rank in range(ranks)]
    plan: list[list[Microbatch]] = [[] for _ in range(ranks)]
    of = [False] * len(lengths) if kinds is None else list(kinds)
    for kind in sorted(set(of)):
        dealt = rows.dealt([row for row in range(len(of)) if of[row] == kind], loads)
        taken = rows.pack(dealt) if packing else rows.pad(dealt)
        count = max(map(len, taken))
        for rank, filled in zip(plan, taken, strict=True):
            rank += [tuple(sorted(one.rows)) for one in sorted(filled)] + [()] * (count - len(filled))
    return tuple(tuple(rank) or ((),) for rank in plan)


ROW_POSITIONS = 25
"""Cost of a separate attention call per row, in positions (benchmark L3)."""


def worth_packing(padded_plan: Sequence[Sequence[Microbatch]], lengths: Sequence[int]) -> bool:
    """Whether the padding of these microbatches costs more than calling attention row by row."""
    held = [[int(lengths[row]) for row in one] for rank in padded_plan for one in rank if one]
    return sum(len(one) * max(one) - sum(one) for one in held) > ROW_POSITIONS * len(lengths)


def plan_cost(plan: Sequence[Sequence[Microbatch]], costs: Sequence[int], *, packing: bool) -> int:
    """Return the sum over microbatches of the cost of the costliest rank, for rows of these costs."""

    def weigh(microbatch: Microbatch) -> int:
        each = [costs[row] for row in microbatch]
        return sum(each) if packing else len(each) * max(each, default=0)

    return sum(max(map(weigh, turn)) for turn in zip(*plan, strict=True))


STEPS = 4096
"""Resolution of the search for the lowest cost limit."""


@dataclass(order=True, slots=True)
class _Filled:
    """A microbatch under construction; sorted order puts the cheapest last."""

    credit: int
    """Negative cost."""
    rows: list[int]
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Rows:
    lengths: Sequence[int]
    costs: Sequence[int]
    limit: int
    """Maximum number of tokens in a microbatch."""

    def dealt(self, rows: Sequence[int], loads: list[tuple[int, int, int]]) -> list[list[int]]:
        """Deal rows to ranks: the costliest first, each to the rank with the least cost so far (then fewest rows).

        `loads` holds (cost, rows, rank) of the ranks and is updated in place.
        """
        dealt: list[list[int]] = [[] for _ in loads]
        for row in sorted(rows, key=lambda row: (-self.costs[row], row)):
            total, count, rank = heapq.heappop(loads)
            dealt[rank].append(row)
            heapq.heappush(loads, (total + self.costs[row], count + 1, rank))
        return dealt

    def pack(self, dealt: Sequence[Sequence[int]]) -> list[list[_Filled]]:
        """Pack the rows of every rank into the smallest number of microbatches that has room on every rank."""
        counts = range(1, max(map(len, dealt)) + 1)

        def fits(count: int) -> bool:
            return all(self._spread(rows, count) is not None for rows in dealt)

        fewest = bisect.bisect_left(counts, True, key=fits)
        return [self._spread(rows, counts[fewest]) or [] for rows in dealt]

    def _spread(self, rows: Sequence[int], count: int) -> list[_Filled] | None:
        """Put each row into the cheapest microbatch that has room for it; None if none has."""
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

    def pad(self, dealt: Sequence[Sequence[int]]) -> list[list[_Filled]]:
        """Fill padded microbatches, as few as the fullest rank needs, and make the costliest of each rank as cheap as
        possible.
        """
        filled = [self._fill_microbatches(rows, math.inf) for rows in dealt]
        count = max(map(len, filled))
        return [self._even_out(rows, count, one) for rows, one in zip(dealt, filled, strict=True)]

    def _even_out(self, rows: Sequence[int], count: int, filled: list[_Filled]) -> list[_Filled]:
        """Distribute rows over at most `count` microbatches; `filled` is the distribution without a cost limit."""
        high = max((-one.credit for one in filled), default=0)

        def fill_within(step: int) -> list[_Filled]:
            return self._fill_microbatches(rows, high * (step + 1) // STEPS)

        def fits(step: int) -> bool:
            tried = fill_within(step)
            return len(tried) <= count and all(-one.credit <= high * (step + 1) // STEPS for one in tried)

        return fill_within(bisect.bisect_left(range(STEPS - 1), True, key=fits))

    def _fill_microbatches(self, rows: Sequence[int], most: float) -> list[_Filled]:
        """Fill microbatches one after the other, the longest rows first, so that rows of similar length share one.

        Each row costs as much as the first, the longest one. A microbatch costs more than `most` only if it is a single
        row.
        """
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
