"""Mixture of experts whose products are grouped: two matrix products per layer, whatever the number of experts.

Megatron's SequentialMLP has a module per expert, about 32 kernel launches each, and reads the number of tokens per
expert on the host. Here each of the two matrices of all experts is one parameter, and a tensor on the device says where
the rows of each expert end. Without expert parallelism the host reads nothing from the device; with it, the sizes of
the exchange between ranks, once in each layer.

The keys of a checkpoint are the same in both forms, except where each rank writes the slice of the optimizer that it
updates (checkpoints/state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from turnlog.trainer import mcore

GROUPED: Callable[..., torch.Tensor] | None = getattr(functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
"""torch's grouped product: one kernel for bfloat16 on devices of compute capability 9.0 and later, and elsewhere a loop
behind one call."""
ALIGNMENT = 16
"""Number of bytes of which the size of each row must be a multiple in torch's grouped product."""


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return [n, out], the product of each row with the transposed matrix of its group.

    `rows` [n, in] are sorted by group, `weights` are [groups, out, in], and `ends` [groups] int32, on their device, is
    where the rows of each group end. Where torch has no such product, or not of these sizes, the groups are multiplied
    one by one, and their ends are read.
    """
    if not len(rows):  # some kernels refuse it; the gradient of the weights must still be zero, not absent
        return rows @ weights[0].mT
    aligned = all(size * rows.element_size() % ALIGNMENT == 0 for size in weights.shape[1:])
    if GROUPED is not None and aligned:
        return GROUPED(rows, weights.mT, offs=ends)
    return one_by_one(rows, weights, ends)


def one_by_one(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return what `grouped_product` returns, by a product for each group."""
    groups = torch.split(rows, ends.diff(prepend=ends.new_zeros(1)).tolist())
    return torch.cat([group @ weight.mT for group, weight in zip(groups, weights, strict=True)])


class StackedLinear(torch.nn.Module):
    """The same matrix of each of a rank's experts, `weight` [experts, out, in] and, optionally, `bias` [experts, out].

    The values are undefined until weights are loaded.
    """

    def __init__(self, experts: int, rows: int, columns: int, config: Any, *, cut: int) -> None:
        """`cut` is the dimension in which Megatron would share an expert's matrix among ranks, of which there is one
        here.
        """
        super().__init__()
        named = {"dtype": config.params_dtype, "device": mcore.DEVICE}
        self.weight = torch.nn.Parameter(torch.empty((experts, rows, columns), **named))
        self.bias = torch.nn.Parameter(torch.empty((experts, rows), **named)) if config.add_bias_linear else None
        for parameter in self.parameters():
            # Megatron reduces the gradients of shared experts among fewer ranks, and counts each rank's in the norm.
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            mcore.tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, cut, 1)

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Map [n, in], sorted by expert, to [n, out], without the bias."""
        return grouped_product(rows, self.weight, ends)


class GroupedExperts(mcore.MegatronModule):  # type: ignore[misc]
    """A rank's experts, each a gated feed-forward layer, with the arguments and results of Megatron's SequentialMLP."""

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None) -> None:
        """Accept the arguments with which Megatron builds experts."""
        super().__init__(config)
        self._experts, self._ranks, self._copies = num_local_experts, pg_collection.ep, pg_collection.expt_dp
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = StackedLinear(num_local_experts, 2 * ffn, hidden, config, cut=0)
        self.linear_fc2 = StackedLinear(num_local_experts, hidden, ffn, config, cut=1)

    def forward(
        self, rows: torch.Tensor, counts: torch.Tensor, probabilities: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Map rows [n, h], sorted by expert, to [n, h], weighted by `probabilities` [n]. `counts` [experts] is the
        number of rows of each expert.
        """
        ends = counts.cumsum(0, dtype=torch.int32)
        scale = probabilities[:, None]
        hidden = self.linear_fc1(rows, ends)
        expert = None
        if self.linear_fc1.bias is not None:
            expert = torch.repeat_interleave(counts, output_size=len(rows))
            hidden = hidden + self.linear_fc1.bias[expert]
        found = self.linear_fc2((self._activate(hidden) * scale).to(hidden.dtype), ends)
        if self.linear_fc2.bias is not None:
            found = (found + self.linear_fc2.bias[expert] * scale).to(found.dtype)
        return found, None

    def _activate(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return act(gate) (up + offset), both clamped if the model clamps them, of [n, gate | up]."""
        gate, up = hidden.chunk(2, -1)
        limit, offset = self.config.activation_func_clamp_value, self.config.glu_linear_offset
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        found: torch.Tensor = self.config.activation_func(gate) * (up + offset if offset else up)
        return found

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the tensors for a checkpoint under the keys of SequentialMLP, whose last dimensions are those of one
        expert, behind one that counts experts.
        """
        axis = len(sharded_offsets)
        return {
            f"{prefix}{name}": mcore.ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}",
                parameter,
                *sharded_offsets,
                (axis, self._ranks.rank(), self._ranks.size()),
                replica_id=(0, 0, self._copies.rank()),
                prepend_axis_num=axis,
            )
            for name, parameter in self.state_dict(keep_vars=True).items()
        }


class _Transposed(torch.autograd.Function):
    """A linear function whose gradient is that of its transpose, which is given beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
        transpose: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.transpose = transpose
        return function(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transpose(gradient), None, None


def _spread(tokens: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Copy tokens [tokens, h] into rows [tokens k, h], each to k places."""
    found: torch.Tensor = _Transposed.apply(tokens, order.spread, order.collect)  # type: ignore[no-untyped-call]
    return found


def _collect(rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Sum over the k rows of each token."""
    found: torch.Tensor = _Transposed.apply(rows, order.collect, order.spread)  # type: ignore[no-untyped-call]
    return found


class RowOrder:
    """Order of rows by their key, where each token has k rows.

    Both directions and both gradients are gathers, so that sums have the same order in every run.
    """

    def __init__(self, keys: torch.Tensor) -> None:
        """`keys` [tokens, k]; equal ones keep the order of their tokens."""
        self._each = keys.size(1)
        self.rows = keys.flatten().argsort(stable=True)
        """[tokens k] the place in `keys`, flattened, that each sorted row has."""
        self._places = torch.empty_like(self.rows)
        self._places.scatter_(0, self.rows, torch.arange(len(self.rows), device=keys.device))
        self._tokens = self.rows // self._each

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the sorted rows [tokens k, h] of [tokens, h]."""
        return tokens.index_select(0, self._tokens)

    def collect(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum [tokens, h] of each token's sorted rows."""
        found = rows.index_select(0, self._places)
        return found if self._each == 1 else found.view(-1, self._each, rows.size(-1)).sum(1)


class TokenDispatcher:
    """Exchange of tokens between the ranks that share a layer's experts, with the methods that Megatron's layer calls.

    Rows go to experts in the order of their number, and those of an expert in the order of ranks and tokens.
    """

    def __init__(self, config: Any, group: Any) -> None:
        self._chosen, self._experts, self._group = config.moe_router_topk, config.num_moe_experts, group
        self._shape: torch.Size
        self._order: RowOrder
        self._counts: torch.Tensor
        self._sent: list[int]
        self._received: list[int]
        self._arrived: RowOrder

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows [tokens k, h], sorted by expert, and their weights [tokens k], of [s, b, h], the map
        [tokens, experts] of the k experts of each token, and weights [tokens, experts].
        """
        self._shape = hidden_states.shape
        ids = routing_map.int().topk(self._chosen, dim=-1).indices.sort(dim=-1).values
        self._order, self._counts = RowOrder(ids), routing_map.sum(0)
        rows = _spread(hidden_states.reshape(-1, self._shape[-1]), self._order)
        return rows, probs.gather(1, ids).flatten().gather(0, self._order.rows)

    def token_dispatch(self, rows: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send each row to the rank of its expert. The sizes of this exchange are read on the host, once."""
        ranks = self._group.size()
        if ranks == 1:
            return rows, weights
        gathered = self._counts.new_empty(ranks * self._experts)
        dist.all_gather_into_tensor(gathered, self._counts, group=self._group)
        everywhere, rank = gathered.view(ranks, ranks, -1), self._group.rank()  # [from, to, expert of that rank]
        self._sent, self._received = torch.stack([everywhere[rank].sum(1), everywhere[:, rank].sum(1)]).tolist()
        arriving = everywhere[:, rank].flatten()
        own = torch.arange(self._experts // ranks, device=rows.device).repeat(ranks)
        expert = own.repeat_interleave(arriving, output_size=sum(self._received))
        self._arrived, self._counts = RowOrder(expert[:, None]), everywhere[:, rank].sum(0)
        rows, weights = (
            mcore.tensor_parallel.all_to_all(self._group, some, self._received, self._sent)
            for some in (rows, weights[:, None])
        )
        return rows, weights[:, 0]

    def dispatch_postprocess(
        self, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows sorted by this rank's experts, how many each has, and their weights."""
        if self._group.size() > 1:
            rows, weights = _spread(rows, self._arrived), weights.gather(0, self._arrived.rows)
        return rows, self._counts, weights

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows in the order in which they arrived."""
        return rows if self._group.size() == 1 else _collect(rows, self._arrived)

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Send each row back to the rank of its token."""
        if self._group.size() == 1:
            return rows
        found: torch.Tensor = mcore.tensor_parallel.all_to_all(self._group, rows, self._sent, self._received)
        return found

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's rows, [s, b, h]."""
        return _collect(rows, self._order).view(self._shape)


def group_experts(layer: Any) -> None:
    """Replace Megatron's sequential experts in the spec of a mixture's layer. Experts of a family's own are left."""
    mixture = layer.submodules.mlp
    if mixture.module is mcore.MoELayer and mixture.submodules.experts.module is mcore.SequentialMLP:
        mixture.submodules.experts = GroupedExperts


def replace_dispatchers(model: Any) -> None:
    """Give layers with grouped experts this module's dispatcher."""
    for module in model.modules():
        if isinstance(module, mcore.MoELayer) and isinstance(module.experts, GroupedExperts):
            module.token_dispatcher = TokenDispatcher(module.config, module.ep_group)
