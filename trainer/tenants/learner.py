"""The learner of many tenants: one base model, and an adapter with an optimizer for each tenant.

A call names a tenant. Its adapter is copied into the model, unless the call before it was the same tenant's; the pass
is the trainer's own. What a call computes depends on the tenant's state and the call alone, so that tenants in any
order get bit for bit what each would get alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.optim.adam import adam

from turnlog.trainer import mcore
from turnlog.trainer.algorithms.logprobs import keep_scored, score
from turnlog.trainer.algorithms.tokens import Tokens
from turnlog.trainer.families.family import as_dict
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.learner import choose_kernels, return_memory
from turnlog.trainer.microbatches import PaddedRows
from turnlog.trainer.network import over_ranks
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.tenants.adapters import AdapterNetwork, AdapterSpec, TenantState
from turnlog.trainer.tenants.datums import Datum, DatumColumns, lay_out_datums
from turnlog.trainer.tenants.errors import (
    DatumNotFinite,
    InvalidArgument,
    RankTooLarge,
    TenantExists,
    UnknownTenant,
)
from turnlog.trainer.tenants.losses import TenantLoss, find_loss, is_number
from turnlog.trainer.tenants.store import TenantStore

LARGEST = 1e20
"""Bound of the optimizer's arguments, far from overflow in float32."""
LEAST_EPS = 1e-30
"""Adam would divide 0 by 0 where an adapter is filled up with zeros, if eps were 0 in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardResult:
    """Result of a call, by the weights before it; the same on every rank."""

    logprobs: list[NDArray[np.float32]]
    """Log-probs of the targets, [n] for each datum."""
    metrics: dict[str, float]
    """Metrics by names that say how those of several calls are combined: `loss:sum`, `clipped_tokens:sum`."""


class TenantLearner:
    """A base model and the adapters of tenants. Collective: every rank makes the same calls with the same arguments.

    Process groups must exist before it is created. The same calls give the same bits.
    """

    def __init__(
        self, shape: ModelShape, weights: Mapping[str, torch.Tensor], options: LearnerOptions, *, max_rank: int
    ) -> None:
        """Build the model with room for adapters up to `max_rank`. An adapter's product is scaled by
        `options.lora_alpha` / its own rank. Options of the optimizer do not apply. Raises WeightsMismatch,
        InvalidArgument.
        """
        if max_rank < 1:
            raise InvalidArgument(f"max_rank is {max_rank}, it must be at least 1")
        options = dataclasses.replace(
            options,
            lora_rank=max_rank,
            deterministic=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
            moe_aux_loss_coeff=0.0,
        )
        torch.set_num_threads(options.threads)
        choose_kernels(deterministic=options.deterministic)
        mcore.tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
        self.shape, self.max_rank = shape, max_rank
        with mcore.quiet():
            self._network = AdapterNetwork(shape, weights, options)
        self._tenants: dict[str, TenantState] = {}
        self._store = TenantStore(
            self._network, {"shape": as_dict(shape), "alpha": options.lora_alpha, "ranks": dist.get_world_size()}
        )

    def tenants(self) -> dict[str, AdapterSpec]:
        """Return what each tenant trains, by name, in order of creation."""
        return {name: tenant.spec for name, tenant in self._tenants.items()}

    def create(
        self,
        tenant: str,
        *,
        rank: int,
        seed: int,
        attention: bool = True,
        mlp: bool = True,
        unembedding: bool = False,
    ) -> None:
        """Add a tenant whose adapter adds nothing yet. See AdapterSpec. Raises TenantExists, RankTooLarge,
        InvalidArgument.
        """
        if tenant in self._tenants:
            raise TenantExists(f"there is a tenant {tenant!r} already")
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in (rank, seed)):
            raise InvalidArgument(f"rank is {rank!r} and seed {seed!r}, they must be whole numbers")
        if rank > self.max_rank:
            raise RankTooLarge(f"rank {rank} is above this learner's max_rank {self.max_rank}")
        if rank < 1:
            raise InvalidArgument(f"rank is {rank}, it must be at least 1")
        spec = AdapterSpec(rank=rank, seed=seed, attention=attention, mlp=mlp, unembedding=unembedding)
        if not (attention or mlp or unembedding):
            raise InvalidArgument("attention, mlp and unembedding are all off: there is nothing to train")
        self._tenants[tenant] = TenantState(spec, self._network.start_weights(spec))

    def forget(self, tenant: str) -> None:
        """Remove a tenant. Raises UnknownTenant."""
        self._find(tenant)
        del self._tenants[tenant]

    @mcore.quiet()
    def forward_backward(
        self, tenant: str, datums: Sequence[Datum], loss_fn: str, config: Mapping[str, float], *, backward: bool
    ) -> ForwardBackwardResult:
        """Return the loss of datums and the log-probs of their targets; with `backward`, add the gradient of the loss
        to the tenant's. For `loss_fn` and `config` see LOSSES.

        Raises UnknownTenant, UnknownLoss, InvalidArgument, DatumError.
        """
        state, loss = self._find(tenant), find_loss(loss_fn)
        arguments = loss.complete(config)
        laid_out = lay_out_datums(datums, loss, self.shape)
        self._network.place(state)
        self._network.forget_gradients()
        forward = _DatumForward(laid_out, loss, arguments, self.shape.vocabulary)
        with torch.set_grad_enabled(backward):
            self._network.run(laid_out.rows, forward, forward_only=not backward, trees=laid_out.shifted)
        return_memory()
        found: NDArray[np.float32] = over_ranks(forward.found).numpy()
        self._check_finite(laid_out, found)
        if backward:
            gradients = self._network.summed_gradients()
            if not math.isfinite(self._network.norm(gradients)):
                raise DatumNotFinite(None, "gradient", "of the loss is not finite")
            state.gradients = gradients if state.gradients is None else state.gradients + gradients
        values = found[1:].astype(np.float64).sum(1)
        metrics = {"loss:sum": float(values[0]), "clipped_tokens:sum": float(values[1])}
        return ForwardBackwardResult(logprobs=laid_out.split(found[0]), metrics=metrics)

    @torch.no_grad()
    def optim_step(
        self,
        tenant: str,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        grad_clip_norm: float,
    ) -> dict[str, float]:
        """Take a step of Adam with decoupled weight decay (arXiv 1711.05101) by the summed gradients, or by zeros if
        there are none, and clear them. Return metrics: `grad_norm`, before clipping, and `step`, the steps so far.

        A norm above `grad_clip_norm` is scaled down to it; 0 disables that. Raises UnknownTenant, and, with nothing
        changed, InvalidArgument, DatumNotFinite.
        """
        state = self._find(tenant)
        for name, value, least, most in (
            ("learning_rate", learning_rate, 0.0, LARGEST),
            ("beta1", beta1, 0.0, 1.0),
            ("beta2", beta2, 0.0, 1.0),
            ("eps", eps, LEAST_EPS, LARGEST),
            ("weight_decay", weight_decay, 0.0, LARGEST),
            ("grad_clip_norm", grad_clip_norm, 0.0, LARGEST),
        ):
            if not is_number(value) or not least <= value < most:
                raise InvalidArgument(f"{name} is {value!r}, it must be at least {least:g} and below {most:g}")
        zeros = torch.zeros_like(state.weights)
        gradients = zeros if state.gradients is None else state.gradients
        norm = self._network.norm(gradients)
        if not math.isfinite(norm):
            raise DatumNotFinite(None, "gradient", "summed over the calls since the last step is not finite")
        if 0 < grad_clip_norm < norm:
            gradients = gradients * (grad_clip_norm / norm)
        weights, first, second = (
            zeros.clone() if one is None else one.clone()
            for one in (state.weights, state.first_moment, state.second_moment)
        )
        adam(
            [weights], [gradients], [first], [second], [], [torch.tensor(float(state.steps))], foreach=False,
            amsgrad=False, beta1=beta1, beta2=beta2, lr=learning_rate, weight_decay=weight_decay, eps=eps,
            maximize=False, decoupled_weight_decay=True,
        )  # fmt: skip
        if not math.isfinite(self._network.norm(weights)):
            raise DatumNotFinite(
                None, "weights", f"would not be finite after a step with learning_rate {learning_rate!r}"
            )
        state.weights, state.first_moment, state.second_moment = weights, first, second
        state.gradients, state.steps = None, state.steps + 1
        return {"grad_norm": norm, "step": float(state.steps)}

    def save(self, tenant: str, folder: Path, *, optimizer: bool) -> None:
        """Save a tenant's adapter as a folder, in place of one that is there; with `optimizer`, Adam's state too. It
        loads with any max_rank that is large enough, and on the same layout of ranks.

        Raises UnknownTenant, CheckpointFailed.
        """
        self._store.save(self._find(tenant), folder, optimizer=optimizer)

    def load(self, tenant: str, folder: Path, *, optimizer: bool) -> None:
        """Replace a tenant's adapter by a saved one, and clear its gradients. Adam starts anew, unless `optimizer`.

        Raises UnknownTenant, and, with nothing changed, SavedUnusable.
        """
        state = self._find(tenant)
        self._tenants[tenant] = self._store.load(state.spec, folder, optimizer=optimizer)

    @mcore.quiet()
    def export_adapter(self, tenant: str, folder: Path) -> None:
        """Write a tenant's adapter in PEFT's files, which engines load, as a folder in place of one that is there.

        Raises UnknownTenant, CheckpointFailed.
        """
        state = self._find(tenant)
        self._network.place(state)
        self._store.export(state, folder, self.shape)

    def snapshot(self, folder: Path, about: Mapping[str, Any] | None = None) -> None:
        """Save all tenants with their gradients and optimizers, and `about`, which must be JSON, as the newest snapshot
        in `folder`. Whenever the process is killed, the folder has the previous snapshot or this one.

        Raises CheckpointFailed; the previous snapshot remains.
        """
        self._store.snapshot(self._tenants, folder, about or {})

    def restore(self, folder: Path) -> dict[str, Any]:
        """Replace all tenants by those of the newest snapshot in `folder`, bit for bit, and return its `about`.

        Raises SavedUnusable, with nothing changed, also if there is no snapshot.
        """
        self._tenants, about = self._store.restore(folder)
        return about

    def _find(self, tenant: str) -> TenantState:
        if tenant not in self._tenants:
            raise UnknownTenant(f"there is no tenant {tenant!r}")
        return self._tenants[tenant]

    def _check_finite(self, laid_out: DatumColumns, found: NDArray[np.float32]) -> None:
        """Raises DatumNotFinite for the first datum whose log-probs or loss are not finite."""
        for name, column in zip(("log-prob", "loss"), found, strict=False):
            for index, values in enumerate(laid_out.split(column)):
                if not np.isfinite(values).all():
                    at = int(np.isfinite(values).argmin())
                    raise DatumNotFinite(index, name, f"is {values[at]} at position {at}")


class _DatumForward:
    """Megatron's forward_step_func; keeps the log-prob, the loss and the clip of each position."""

    def __init__(
        self, laid_out: DatumColumns, loss: TenantLoss, arguments: Mapping[str, float], vocabulary: int
    ) -> None:
        self._loss, self._arguments, self._vocabulary = loss, arguments, vocabulary
        self._columns = {name: torch.from_numpy(one).to(mcore.DEVICE) for name, one in laid_out.columns.items()}
        self._shifted = laid_out.shifted
        self.found = torch.zeros((3, len(laid_out.rows.token_ids)), device=mcore.DEVICE)
        """[log-prob, loss, whether clipped; T], this rank's share."""
        state = mcore.parallel_state
        self._counts = int(state.get_data_parallel_rank(with_context_parallel=True) == 0)
        """Number of tokens to report for the next microbatch. Megatron divides gradients by the number that all ranks
        report for all microbatches; 1 in all leaves them as they are.
        """

    def __call__(self, batches: Iterator[PaddedRows], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        if not self._shifted:
            batch = dataclasses.replace(batch, targets=self._columns["targets"][batch.places])
        output = model(batch.inputs, batch.positions, None)
        return output, functools.partial(self._score, model, batch)

    def _score(
        self, model: Any, batch: PaddedRows, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        logprobs, _ = score(model, hidden, batch, self._vocabulary, entropy=False)
        here = {name: column[batch.places] for name, column in self._columns.items()}
        zeros = torch.zeros_like(logprobs)
        old = here.get("logprobs", zeros)
        tokens = Tokens(
            logprobs=logprobs,
            old=old,
            recorded=old,
            reference=None,
            advantages=here.get("advantages", zeros),
            trained=batch.trained,
            entropy=None,
        )
        result = self._loss.compute(tokens, self._arguments)
        values = result.value * here["weights"] if "weights" in here else result.value
        values = torch.where(batch.trained, values, 0.0)
        keep_scored(self.found, torch.stack([logprobs, values, result.clipped.to(values.dtype)]), batch)
        counted, self._counts = self._counts, 0
        return values.sum(), torch.tensor(counted, dtype=torch.int, device=mcore.DEVICE), {}
