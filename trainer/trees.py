"""Trees of rows: a token that several rows begin with is computed once.

The rows of a group begin with the same prompt, and those of a session with the same turns. A microbatch may hold such
rows as a tree (models.tree). Only attention and positions depend on that. The model's hidden states are then laid out
by row again, so that objectives see rows as if each were computed alone, and the gradient of a shared token is the sum
over its rows. The log-prob of a token that trains in several rows is computed once.

The plan is a pure function of token ids, recorded experts, data-parallel size and limits, as is that of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.prefixes import SharedPrefixes, shared_prefixes
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore
from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.microbatches import (
    Cost,
    MergedPositions,
    Microbatch,
    PaddedRows,
    deal,
    pack_rows,
    pad_rows,
    plan_cost,
    stand_in,
)
from turnlog.trainer.models import decoder
from turnlog.trainer.models.attention import SdpaAttention
from turnlog.trainer.models.experts import RoutedRows
from turnlog.trainer.models.tree import PrefixTree, grow_tree
from turnlog.trainer.models.vision import PicturedRows
from turnlog.trainer.plan import LearnerOptions

log = logging.getLogger(__name__)
LEAST_SHARED = 16
"""Number of tokens: rows with fewer in common are computed apart, so that the first tokens of a chat template do not
make one tree of all rows of a batch.
"""
WORTH = 0.95
"""Share of the cost of separate rows below which trees are taken. They copy keys and values of what is shared, which
the cost leaves out."""
PARTS = (1, 2, 4)
"""Plans are compared whose trees are cut into parts that cost at most 1 / (ranks x one of these) of the batch, or not
at all. Smaller parts are balanced better, and larger ones share more.
"""


@dataclass(frozen=True, slots=True, eq=False)
class TreePlan:
    """Microbatches of rows that share prefixes."""

    microbatches: tuple[tuple[Microbatch, ...], ...]
    """Microbatches of each rank. Their rows are in depth-first order."""
    shared: NDArray[np.int64]
    """[n] number of input tokens that a row has in common with the one before it in its microbatch."""
    cost: int
    """Sum over microbatches of that of the costliest rank."""


def worthwhile_trees(
    shape: ModelShape,
    options: LearnerOptions,
    rows: BatchRows,
    ranks: int,
    *,
    cost: Cost,
    kinds: Sequence[bool],
    alone: int,
) -> TreePlan | None:
    """Return microbatches of rows that share prefixes. Return None if prefix_sharing is off, if something prevents it
    (`obstacle`), or if trees cost about as much as `alone`, the cost of a plan without them.
    """
    if options.prefix_sharing == "off":
        return None
    if reason := obstacle(shape, options, rows):
        report_obstacle(reason)
        return None
    plan = plan_trees(rows, ranks, options.microbatch_tokens, cost=cost, kinds=kinds)
    return plan if plan is not None and plan.cost < WORTH * alone else None


def obstacle(shape: ModelShape, options: LearnerOptions, rows: BatchRows) -> str | None:
    """Return why these rows cannot be computed as trees, None if they can. Every rank finds the same."""
    if options.packing == "off":
        return "trainer.packing is off"
    if options.context_parallel > 1:
        return "context-parallel ranks share each row (trainer.context_parallel)"
    if options.moe_aux_loss_coeff:
        return "a load-balancing loss counts the tokens of every row (trainer.moe_aux_loss_coeff)"
    if shape.vision or isinstance(rows, PicturedRows):
        return "the positions of images are not those of a tree"
    return _foreign_layers(shape)


@functools.cache
def _foreign_layers(shape: ModelShape) -> str | None:
    spec_of = family(shape.kind).layer_spec or decoder.layer_spec
    for layer in range(shape.layers):
        attention = spec_of(shape, layer).submodules.self_attention
        core = getattr(attention.submodules, "core_attention", None)
        core = getattr(core, "module", core)
        if not (inspect.isclass(core) and issubclass(core, SdpaAttention)):
            name = getattr(attention.module, "__name__", "another attention")
            return f"{name}, in layer {layer} of a {shape.kind}, has a state or an attention that trees do not have"
    return None


@functools.cache
def report_obstacle(reason: str) -> None:
    """Log, once, why rows that share prefixes are computed apart."""
    log.info("every row is computed alone, also what it shares with others (trainer.prefix_sharing): %s", reason)


def plan_trees(rows: BatchRows, ranks: int, limit_tokens: int, *, cost: Cost, kinds: Sequence[bool]) -> TreePlan | None:
    """Return the cheapest plan, None if no rows share a prefix. The arguments are those of `microbatches`.

    A microbatch takes at most `limit_tokens`, each shared one counted once; a tree above that is cut into several,
    each of which computes what it shares again, and a row above it forms a microbatch alone.
    """
    order, shared = _order_depth_first(rows, kinds)
    if not shared.any():
        return None
    lengths = rows.lengths.tolist()
    costs = [cost(length) - (cost(kept) if kept else 0) for length, kept in zip(lengths, shared.tolist(), strict=True)]
    limits = [math.inf, *(sum(costs) / (ranks * parts) for parts in PARTS)]
    plans = []
    for limit in limits:
        parts = list(_cut(order, shared, lengths, limit_tokens, limit, cost))
        plans.append(_deal_parts(parts, shared, ranks, limit_tokens, kinds))
    return min(plans, key=lambda plan: plan.cost)


def _order_depth_first(rows: BatchRows, kinds: Sequence[bool]) -> tuple[list[int], NDArray[np.int64]]:
    """Return the rows in depth-first order, and of each row the number of inputs that it shares with the one before it.

    Rows of different `kinds` share nothing.
    """
    order, shared = list[int](), np.zeros(len(rows), np.int64)
    for kind in sorted(set(kinds)):
        own = np.asarray(kinds) == kind
        index = np.flatnonzero(own).tolist()
        some = rows if own.all() else rows.among(own)
        # Routers replay one choice for a token, so that it is shared only where the engine's choices were the same.
        experts = [some.experts] if isinstance(some, RoutedRows) and some.has_experts.all() else []
        prefixes = shared_prefixes(some.token_ids, some.lengths, experts)
        before = -1
        for row in _walk(prefixes):
            if before >= 0 and prefixes.lengths[row] >= LEAST_SHARED:
                # The last token of a row is no input.
                shared[index[row]] = min(prefixes.lengths[row], some.lengths[row] - 1, some.lengths[before] - 1)
            order.append(index[row])
            before = row
    return order, shared


def _walk(prefixes: SharedPrefixes) -> Iterator[int]:
    """Yield rows depth first. Of the rows behind one parent those that share more with it come first, so that a row
    shares with the row before it what it shares with its parent.
    """
    below = defaultdict[int, list[int]](list)
    for row in np.lexsort((np.arange(len(prefixes.parents)), -prefixes.lengths)).tolist():
        linked = prefixes.lengths[row] >= LEAST_SHARED
        below[int(prefixes.parents[row]) if linked else -1].append(row)
    waiting = sorted(below[-1], reverse=True)
    while waiting:
        yield (row := waiting.pop())
        waiting += reversed(below[row])


@dataclass(slots=True)
class _Part:
    """Rows of one tree that stay together."""

    rows: list[int]
    tokens: int
    """Number of tokens, each shared one counted once."""
    cost: int


def _cut(
    order: Sequence[int], shared: NDArray[np.int64], lengths: Sequence[int], most_tokens: int, most: float, cost: Cost
) -> Iterator[_Part]:
    """Cut trees into parts of at most `most_tokens` and of at most the cost `most`, or of a single row."""
    part: _Part | None = None
    for row in order:
        length, kept = lengths[row], int(shared[row])
        more = cost(length) - (cost(kept) if kept else 0)
        if part and kept and part.tokens + length - kept <= most_tokens and part.cost + more <= most:
            part.rows.append(row)
            part.tokens += length - kept
            part.cost += more
            continue
        if part:
            yield part
        part = _Part([row], length, cost(length))
    if part:
        yield part


def _deal_parts(
    parts: Sequence[_Part], shared: NDArray[np.int64], ranks: int, limit_tokens: int, kinds: Sequence[bool]
) -> TreePlan:
    tokens, costs = [part.tokens for part in parts], [part.cost for part in parts]
    plan = deal(tokens, costs, ranks, limit_tokens, packing=True, kinds=[kinds[part.rows[0]] for part in parts])
    kept = shared.copy()
    kept[[part.rows[0] for part in parts]] = 0
    rows = tuple(tuple(tuple(row for part in one for row in parts[part].rows) for one in rank) for rank in plan)
    return TreePlan(rows, kept, plan_cost(plan, costs, packing=True))


def lay_out_tree(
    rows: BatchRows, microbatch: Microbatch, shared: NDArray[np.int64], scored: NDArray[np.bool_], *, multiple: int = 1
) -> PaddedRows:
    """Lay out the rows of a TreePlan's microbatch, on the CPU.

    Inputs, positions and experts are those of the tree, [1, t] with t a multiple of `multiple`; the other tensors are
    those of packed rows. `scored` [T] flags the tokens whose log-probs are wanted.
    """
    cpu = mcore.CPU
    if not microbatch:
        return dataclasses.replace(stand_in(cpu, multiple), scored=torch.zeros(0, dtype=torch.int64))
    counts = [max(1, int(rows.lengths[row]) - 1) for row in microbatch]
    packed = pack_rows(pad_rows(rows, microbatch, cpu), counts)
    kept = [int(shared[row]) for row in microbatch]
    own = [count - known for count, known in zip(counts, kept, strict=True)]
    filling = -sum(own) % multiple
    tree, sources = grow_tree([*own, filling], [*kept, 0], cpu)
    first = torch.cat(
        [
            torch.arange(edge + known, edge + count)
            for edge, known, count in zip(packed.edges, kept, counts, strict=False)
        ]
    )
    fill = functools.partial(torch.nn.functional.pad, pad=(0, filling))
    experts = packed.experts
    if experts is not None:
        other = torch.arange(experts.size(-1), dtype=experts.dtype).expand(1, filling, experts.size(2), -1)
        experts = torch.cat([experts[:, first], other], 1)
    found = dataclasses.replace(
        packed,
        inputs=fill(packed.inputs[:, first]),
        positions=tree.depths[None],
        experts=experts,
        edges=(0, sum(own) + filling),
    )
    at = torch.from_numpy(scored)[packed.places].flatten().nonzero()[:, 0]
    return dataclasses.replace(
        found, scored=at, merged=_merge_targets(packed, tree, sources[: len(packed.places[0])], at)
    )


def _merge_targets(packed: PaddedRows, tree: PrefixTree, sources: torch.Tensor, at: torch.Tensor) -> MergedPositions:
    """Find targets that are the same: one token, predicted at one position of the tree, at one temperature."""
    kinds, temperatures = np.unique(packed.temperature.numpy(), return_inverse=True)
    targets = packed.targets[0].numpy()[at]
    pairs = sources.numpy()[at] * (targets.max(initial=0) + 1) + targets  # one number sorts faster than three
    same = pairs * len(kinds) + temperatures.reshape(-1)[at]
    _, first, which = np.unique(same, return_index=True, return_inverse=True)
    return MergedPositions(tree, sources, at[first], torch.from_numpy(which.reshape(-1)))
