"""Replay of recorded routing (R3): each token goes to the experts that the engine sent it to when it was sampled.

A router picks the largest of numbers that often are nearly equal. Engine and trainer, whose kernels round differently,
would therefore send some tokens to different experts, and their log-probs would differ widely. With the choice
replayed, the weights of the chosen experts are still the trainer's own, and its gradient flows through them.

Every position is replayed, including prompts and tool results. Padding takes the first experts, because a router's map
of a row cannot contain an expert twice. Rows without recorded experts are unrouted: they share no microbatch with the
others, and routers choose for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import ExpertsUnfit, mcore
from turnlog.trainer.families.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutedRows(BatchRows):
    """Rows with the experts of their tokens."""

    experts: NDArray[Any]
    """[T, layers, top_k], entry t belongs to token t as a model's input. Entries of a row's last token, which no engine
    ran, and of unrouted rows are not read.
    """
    has_experts: NDArray[np.bool_]
    """[n] False for unrouted rows."""

    def among(self, kept: NDArray[np.bool_]) -> RoutedRows:
        """Return the rows of `kept`, with their experts."""
        found = BatchRows.among(self, kept)
        experts = self.experts[np.repeat(kept, self.lengths)]
        return replace(found, experts=experts, has_experts=self.has_experts[kept])


def unrouted_rows(rows: BatchRows) -> NDArray[np.bool_]:
    """Return [n] whether a row lacks recorded experts."""
    return ~rows.has_experts if isinstance(rows, RoutedRows) else np.ones(len(rows), bool)


def attach_experts(
    rows: BatchRows, experts: NDArray[Any], shape: ModelShape, recorded: NDArray[np.bool_] | None = None
) -> RoutedRows:
    """Return rows with experts; `recorded` [n] flags the rows that have some, None means all.

    Raises ExpertsUnfit for ids that are not `experts_per_token` different experts of the model in every layer that has
    experts. What is recorded of dense layers is not read.
    """
    recorded = np.ones(len(rows), bool) if recorded is None else recorded
    wanted = (len(rows.token_ids), shape.layers, shape.experts_per_token)
    if experts.shape != wanted or not shape.mixture:
        raise ExpertsUnfit(f"experts of shape {experts.shape}, the rows of this model ({shape.kind}) take {wanted}")
    routed = [layer for layer in range(shape.layers) if shape.is_mixture(layer)]
    for row in np.flatnonzero(recorded).tolist():
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        ordered = np.sort(experts[start : start + length - 1, routed].astype(np.int64), axis=-1)
        about = f"sample {rows.sample_ids[row]}"
        if ordered.size and (ordered[..., 0].min() < 0 or ordered[..., -1].max() >= shape.experts):
            raise ExpertsUnfit(f"{about}: an expert outside of the model's {shape.experts}")
        if (np.diff(ordered, axis=-1) == 0).any():
            token, layer, _ = (int(place[0]) for place in np.nonzero(np.diff(ordered, axis=-1) == 0))
            raise ExpertsUnfit(f"{about}: one expert twice at token {token} in layer {routed[layer]}")
    return RoutedRows(**rows.columns(), experts=experts, has_experts=recorded)


def without_experts(rows: BatchRows) -> BatchRows:
    """Return the rows without recorded experts, for models other than the policy, whose experts they are."""
    return BatchRows(**rows.columns()) if isinstance(rows, RoutedRows) else rows


class RoutedMicrobatch(Protocol):
    """The part of a microbatch that replay reads."""

    @property
    def inputs(self) -> torch.Tensor:
        """[b, s] of this rank."""
        ...

    @property
    def experts(self) -> torch.Tensor | None:
        """[b, s, layers, top_k] of its positions; None if routers choose."""
        ...


M = TypeVar("M", bound=RoutedMicrobatch)


class Replay:
    """Replay on the routers of this rank's layers."""

    def __init__(self, model: Any, *, recompute: bool) -> None:
        """`recompute`: layers are computed again for the gradient, and must then repeat their choice."""
        mixtures = [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
        self._routers = [(int(layer.layer_number) - 1, layer.mlp.router) for layer in mixtures]
        self._recompute = recompute
        self._replays = False
        """Whether the microbatch taken last replays routing."""
        self._again: dict[Any, deque[bool]] = {router: deque() for _, router in self._routers}
        """Router -> whether each microbatch that it has seen and will see again replays, in order."""
        for _, router in self._routers:
            router.register_forward_pre_hook(self._say_which_pass)

    def over(self, batches: Sequence[M]) -> Iterator[M]:
        """Yield the microbatches. As a forward pass takes one, its experts become the routers' targets. Call `clear`
        afterwards.
        """
        for batch in batches:
            self._replays = batch.experts is not None
            if batch.experts is not None:
                for layer, router in self._routers:
                    router.router_replay.set_target_indices(_in_router_order(batch.experts[:, :, layer]))
            yield batch

    def clear(self) -> None:
        """Let routers choose again."""
        self._replays = False
        for _, router in self._routers:
            self._again[router].clear()
            router.router_replay.clear_indices()
            router.router_replay.clear_router_replay_action()

    def _say_which_pass(self, router: Any, _: Any) -> None:
        """Forward hook: tell a router whether it replays. A layer that will be computed again first runs without
        gradients.
        """
        again = self._recompute and torch.is_grad_enabled()
        if again:
            replays = self._again[router].popleft()
        else:
            replays = self._replays
            self._again[router].append(replays)
        action = mcore.RouterReplayAction
        if not replays:
            router.router_replay.clear_router_replay_action()
        else:
            router.router_replay.set_router_replay_action(action.REPLAY_BACKWARD if again else action.REPLAY_FORWARD)


def _in_router_order(ids: torch.Tensor) -> torch.Tensor:
    """Reorder [b, s, top_k] to [tokens, top_k] int64 in a router's token order.

    The order is all rows of one position before the next. Tensor-parallel ranks, which are sequence parallel in a
    mixture, have equally many positions each.
    """
    state = mcore.parallel_state
    shares = ids.transpose(0, 1).chunk(state.get_tensor_model_parallel_world_size())
    mine: torch.Tensor = shares[state.get_tensor_model_parallel_rank()]
    return mine.reshape(-1, ids.size(-1)).long()
