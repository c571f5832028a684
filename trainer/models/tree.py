"""Attention of rows that share prefixes: each token is computed once, and attends to its ancestors alone.

The ancestors of a token are the tokens before it in its row. The own tokens of a row are those that it does not share
with the row before it. A tree lies in depth-first order: the own tokens of each row follow those of the row before. So
every token's descendants lie directly behind it, and token j is an ancestor of i, or i itself, where
j <= i < end of j's descendants. FlexAttention takes that as its mask on CUDA. Elsewhere the own tokens of each row take
one call, with the keys of the whole row (its path). AReaL, NeMo Automodel and verl train trees of rollouts under such a
mask.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as functional

Span = tuple[int, int]
"""(start, end) of neighbouring positions."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Branch:
    """The own tokens of a row."""

    size: int
    """Number of its own tokens, at least 1."""
    path: tuple[int, ...]
    """Indices of the pieces of the tree that the whole row consists of."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixTree:
    """Positions of a microbatch whose rows share prefixes: t of them, in depth-first order."""

    branches: tuple[Branch, ...]
    """The branches, in the order in which their tokens lie."""
    pieces: tuple[int, ...]
    """Sizes of the pieces into which t is cut wherever a path ends or begins."""
    depths: torch.Tensor
    """[t] int64, the position of each token in its row."""
    ends: torch.Tensor
    """[t] int64, the end of each token's descendants."""
    masks: dict[int, Any]
    """FlexAttention's mask of each sliding window that was asked for; 0: no window."""

    def to(self, device: torch.device) -> PrefixTree:
        """Return the tree with its tensors on a device."""
        return replace(self, depths=self.depths.to(device), ends=self.ends.to(device), masks={})

    def branch_tensors(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the own queries of each branch, and the keys and values of its whole path, from those of the tree,
        [t, h, d] x 3.

        Compute with them before taking the next ones: no copy of the joined keys and values is then kept for the
        gradient, because the backward pass joins them again.
        """
        queries = torch.split(query, [branch.size for branch in self.branches])
        cut = [torch.split(x, list(self.pieces)) for x in (key, value)]
        for own, branch in zip(queries, self.branches, strict=True):
            joined = [_Join.apply(*(pieces[at] for at in branch.path)) for pieces in cut]  # type: ignore[no-untyped-call]
            # By address, because what is saved holds the hook.
            sources = {
                one.untyped_storage().data_ptr(): [pieces[at].detach() for at in branch.path]
                for one, pieces in zip(joined, cut, strict=True)
            }
            with torch.autograd.graph.saved_tensors_hooks(functools.partial(_pack, sources), _unpack):
                yield own, *joined

    def mask(self, window: int) -> Callable[..., torch.Tensor]:
        """Return FlexAttention's mask: a function of (batch, head, query, key) that says whether the token at position
        `query` attends to the one at `key`, within `window` if that is not 0.
        """
        ends, depths = self.ends, self.depths  # tensors alone, which torch's compiler follows

        def attends(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            seen = (key <= query) & (query < ends[key])
            return seen & (depths[query] - depths[key] < window) if window else seen

        return attends


class _Join(torch.autograd.Function):
    """torch.cat whose gradients are copies: a view of a branch's own part would hold the gradient of its whole path."""

    @staticmethod
    def forward(context: Any, *pieces: torch.Tensor) -> torch.Tensor:
        context.sizes = [len(piece) for piece in pieces]
        return torch.cat(pieces)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return tuple(part.clone() for part in torch.split(gradient, context.sizes))


@dataclass(frozen=True, slots=True, eq=False)
class _View:
    """A view of joined tensors, without their memory."""

    pieces: Sequence[torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any


def _pack(sources: Mapping[int, Sequence[torch.Tensor]], saved: torch.Tensor) -> torch.Tensor | _View:
    """Replace a saved tensor that lies in joined memory by what that was joined from; `sources` is by its address."""
    pieces = sources.get(saved.untyped_storage().data_ptr())
    return saved if pieces is None else _View(pieces, saved.size(), saved.stride(), saved.storage_offset())


def _unpack(kept: torch.Tensor | _View) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    return torch.cat(list(kept.pieces)).as_strided(kept.size, kept.stride, kept.offset)


def grow_tree(own: Sequence[int], shared: Sequence[int], device: torch.device) -> tuple[PrefixTree, torch.Tensor]:
    """Return the tree of rows, each of which has `own` tokens behind `shared` ones of the row before. Also return the
    places in the tree of the tokens of all rows, one row after the other: [sum of own + shared] int64 on the CPU.
    """
    paths, places, path, at = list[list[Span]](), list[torch.Tensor](), list[Span](), 0
    depths, ends, before = (
        list[torch.Tensor](),
        torch.zeros(sum(own), dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
    )
    for count, kept in zip(own, shared, strict=True):
        path = [*_cut(path, kept), *([(at, at + count)] if count else [])]
        depths.append(torch.arange(kept, kept + count))
        before = torch.cat([before[:kept], torch.arange(at, at + count)])
        places.append(before)
        at += count
        ends[before] = at
        if count:
            paths.append(_join_spans(path))
    cuts = sorted({edge for each in paths for span in each for edge in span})
    branches = tuple(
        Branch(size, tuple(i for span in each for i in range(*(bisect.bisect_left(cuts, edge) for edge in span))))
        for size, each in zip([count for count in own if count], paths, strict=True)
    )
    pieces = tuple(end - start for start, end in itertools.pairwise(cuts))
    tree = PrefixTree(branches, pieces, torch.cat(depths).to(device), ends.to(device), {})
    return tree, torch.cat(places)


def _cut(path: Sequence[Span], size: int) -> list[Span]:
    """Return the first `size` positions of a path."""
    found = list[Span]()
    for start, end in path:
        if size <= 0:
            break
        found.append((start, min(end, start + size)))
        size -= end - start
    return found


def _join_spans(path: Sequence[Span]) -> list[Span]:
    """Join neighbouring spans."""
    found = list[Span]()
    for start, end in path:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


MASK_BLOCK = 128
"""Queries and keys of a block of FlexAttention's mask."""


def block_mask(tree: PrefixTree, window: int) -> Any:
    """Return FlexAttention's mask of a tree, within `window` if that is not 0, from the ends and depths of each block.

    torch's create_block_mask would compute the whole mask [t, t] first.
    """
    from torch.nn.attention.flex_attention import BlockMask

    t = len(tree.ends)
    ends, depths = (functional.pad(x, (0, -t % MASK_BLOCK)).view(-1, MASK_BLOCK) for x in (tree.ends, tree.depths))
    starts = torch.arange(0, t, MASK_BLOCK, device=tree.ends.device)
    queries, keys = starts[:, None], starts[None]
    some = (keys <= queries) & (queries < ends.amax(1))
    if window:
        some &= depths.amin(1)[:, None] - depths.amax(1) < window
        whole = torch.zeros_like(some)
    else:  # keys of a block that is not full have an end of 0
        whole = (keys < queries) & ((queries + MASK_BLOCK).clamp(max=t) <= ends.amin(1))
    listed = [
        (
            blocks.sum(1, dtype=torch.int32)[None, None],
            blocks.int().argsort(dim=1, descending=True, stable=True).int()[None, None],
        )
        for blocks in (some & ~whole, whole)
    ]
    return BlockMask.from_kv_blocks(
        *listed[0], *listed[1], BLOCK_SIZE=MASK_BLOCK, mask_mod=tree.mask(window), seq_lengths=(t, t)
    )


TreeKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, PrefixTree, int, float], torch.Tensor]
"""Map queries, keys and values [t, h, d], the tree, the sliding window (0: none) and the scale of scores to
[t, h, d].
"""


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tree: PrefixTree,
    window: int,
    scale: float,
    *,
    attend: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """Attend by torch's FlexAttention, in one call; see TreeKernel. `attend` is torch's function, by default
    compiled.
    """
    if window not in tree.masks:
        tree.masks[window] = block_mask(tree, window)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    found: torch.Tensor = (attend or _compile_attention())(
        q, k, v, block_mask=tree.masks[window], scale=scale, enable_gqa=query.size(1) != key.size(1)
    )
    return found[0].transpose(0, 1)


@functools.cache
def _compile_attention() -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as module

    compiled: Callable[..., Any] = torch.compile(module.flex_attention, dynamic=True)  # every tree has another size
    return compiled


@functools.cache
def tree_kernel(device: str, dtype: torch.dtype, query: int, value: int) -> TreeKernel | None:
    """Return FlexAttention for heads of sizes `query` and `value`; None elsewhere than on CUDA, and where a trial of it
    fails (its compiler needs triton and a C compiler).
    """
    if device != "cuda":
        return None
    tree, _ = grow_tree([200, 70, 30], [0, 150, 200], torch.device(device))  # several blocks of its mask
    sizes = ((4, query), (2, query), (2, value))  # of a model whose heads share keys
    q, k, v = (torch.ones(300, *size, device=device, dtype=dtype, requires_grad=True) for size in sizes)
    try:
        with torch.enable_grad():
            torch.autograd.grad(flex_attention(q, k, v, tree, 0, 1.0).sum(), (q, k, v))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler raises, one call per branch computes the same
        log.warning("rows that share prefixes take one attention call each, because FlexAttention failed: %r", error)
        return None
    return flex_attention
