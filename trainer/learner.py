"""The optimizer step of a policy, and of its critic if it has one.

The loss of a step is the sum over trained tokens of token loss / weight_divisor. Nothing else normalises it, and tokens
that the objective masks still count in M, the number of trained tokens. Megatron divides gradients by the number of
tokens that the loss function reports (calculate_per_token_loss), so the loss function returns M x its share and its own
m_i trained tokens. That the m_i of all ranks sum to M is checked before the optimizer steps.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from turnlog.infra.tensors import adapters
from turnlog.infra.tensors.files import SHARD_BYTES, TensorSpec, Written
from turnlog.processors.core.batches.rows import ENGINE_KINDS, BatchRows
from turnlog.schemas.events.batches import (
    HELD_GAP_MAX,
    HELD_OLD_CACHE_GAP_MAX,
    LOGPROB_GAP_MAX,
    LOGPROB_GAP_MEAN,
    gap_of_kind,
)
from turnlog.schemas.types import BlobRef
from turnlog.trainer import BooksOff, mcore
from turnlog.trainer.algorithms.critic import Critic
from turnlog.trainer.algorithms.logprobs import frozen_network, keep_scored, logprobs_by, score, warm
from turnlog.trainer.algorithms.objective import Columns, Floats, ForwardPassResults, Objective
from turnlog.trainer.algorithms.tokens import Measure, Tokens, bounded_ratio
from turnlog.trainer.checkpoints.exports import ExportedVersion, Exports
from turnlog.trainer.checkpoints.places import StorePlace
from turnlog.trainer.checkpoints.state import Save, State, fetch_metadata, load_model, load_state
from turnlog.trainer.export import LIMIT, ExportedWeights, WeightExport, export_weights
from turnlog.trainer.families.family import as_dict
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.microbatches import PaddedRows, stand_in
from turnlog.trainer.models.experts import unrouted_rows, without_experts
from turnlog.trainer.network import TrainedNetwork, over_ranks
from turnlog.trainer.plan import ADAPTERS, LearnerOptions
from turnlog.trainer.sending import SendOrder, WeightSender
from turnlog.trainer.weights import Tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one step, measured before the weights moved; the same on every rank."""

    loss: float
    """Sum over trained, unmasked tokens of token loss / weight_divisor, plus the auxiliary loss."""
    grad_norm: float
    """Gradient norm before clipping."""
    trained_tokens: int
    skipped: bool
    """True if the gradient was not finite: weights and optimizer are unchanged."""
    logprob_gap_max: float
    """max |trainer - recorded| log-prob over trained tokens except those of rows.old_cache, which are reported
    separately.
    """
    logprob_gap_mean: float
    """Mean of the same differences."""
    old_cache_tokens: int
    """Number of trained tokens of rows.old_cache."""
    old_cache_gap_max: float
    """max |trainer - recorded| log-prob over these."""
    old_cache_gap_mean: float
    """Mean of the same differences."""
    entropy: float | None
    """Mean over trained tokens, in nats, at the row's temperature; None if nothing asked for it."""
    clip_fraction: float
    """Share of trained tokens at which the clip decided."""
    masked: int
    """Number of trained_tokens that the objective masked."""
    metrics: Mapping[str, float]
    """Metrics of the objective, by name."""
    tokens: Mapping[str, Floats] | None = None
    """[T] each, if requested: logprob, entropy, ratio, advantage; 0 where nothing trains."""


NONE = ForwardPassResults()


def choose_kernels(*, deterministic: bool) -> None:
    """Let this process use any kernel on CUDA or only deterministic ones; RuntimeError then names an operation that has
    none.
    """
    if deterministic:
        # cuBLAS reads it at its first use. Without it the order of its sums may differ between runs.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # finds reads of it, at a cost


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""malloc_trim, which exists in glibc only. Without it, glibc retains what a step frees in holes that do not fit the
next batch, whose lengths differ: the memory of a small policy's rank rose by a quarter in 100 steps, to half as much
again as it needs.
"""


def return_memory() -> None:
    """Return what a pass freed to the system."""
    if _malloc_trim is not None:
        _malloc_trim(0)


class Learner:
    """The models of a rank and their optimizers. Collective: every rank makes the same calls with the same arguments.

    Process groups must exist before it is created.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, torch.Tensor],
        options: LearnerOptions,
        reference: Mapping[str, torch.Tensor] | None = None,
        *,
        critic: bool = False,
        teacher: tuple[ModelShape, Mapping[str, torch.Tensor]] | None = None,
        place: StorePlace | None = None,
        exports: Exports | None = None,
    ) -> None:
        """Build the models and their optimizers.

        `reference` holds the frozen weights for objectives with a divergence. `critic` adds a critic that starts as a
        copy of the policy. `teacher` is a frozen model of any shape that the ranks can shard like the policy. `place`
        is the storage of checkpoints, unless they stay in the named folders. `exports` upload weights; without them,
        exported files stay in the named folders. Raises WeightsMismatch.
        """
        torch.set_num_threads(options.threads)
        choose_kernels(deterministic=options.deterministic)
        mcore.tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
        self.shape = shape
        with mcore.quiet():
            self.policy = TrainedNetwork(shape, weights, options, reference=reference)
            self._critic = Critic(shape, weights, options) if critic else None
            self._teacher = frozen_network(*teacher, options) if teacher else None
        self._adapters = {name: getattr(options, name) for name in ADAPTERS} if options.lora_rank else {}
        self._whole = options.reshardable or mcore.parallel_state.get_data_parallel_world_size() == 1
        self._unrouted_train, self._report_entropy = options.unrouted_train, options.entropy
        self._save: Save | None = None
        self._place = place
        self._exports = exports or Exports(None, chain=0)
        self._sender = WeightSender()
        self._planned: dict[tuple[ExportedWeights, int], WeightExport] = {}

    @mcore.quiet()
    def step(
        self,
        rows: BatchRows,
        objective: Objective,
        learning_rate: float,
        numbers: ForwardPassResults = NONE,
        tell_tokens: bool = False,
        held: int | None = None,
    ) -> StepResult:
        """Take one optimizer step on all rows together.

        `numbers` are the results of the passes that the objective needs. `tell_tokens` requests the result's `tokens`.
        `held` is the version number of these weights, if they have one. A rate of 0 leaves the policy and its optimizer
        unchanged. Raises BooksOff, with the weights unchanged, if the batch is empty or the ranks' token counts do not
        add up.
        """
        if not len(rows):
            raise BooksOff("the batch has no rows: there is nothing to step on")
        rows, columns = self._prepare_rows(rows, objective, numbers)
        self.policy.forget_gradients()
        totals, tokens = self._run(rows, objective, columns, forward_only=False, tell_tokens=tell_tokens, held=held)
        grad_norm = self.policy.gradient_norm()
        finite = math.isfinite(grad_norm) and math.isfinite(totals.loss)
        metrics: dict[str, float] = {}
        if objective.critic is not None:
            assert self._critic is not None, "the learner was made without a critic"
            assert columns.lesson is not None
            finite, metrics = self._critic.learn(rows, columns.lesson, objective.critic, beside=finite)
        if finite and learning_rate:
            self.policy.step(learning_rate)
        return_memory()
        return dataclasses.replace(totals.result(grad_norm, skipped=not finite, more=metrics), tokens=tokens)

    @mcore.quiet()
    def measure(self, rows: BatchRows, objective: Objective, numbers: ForwardPassResults = NONE) -> StepResult:
        """Return what `step` would report, without moving anything; grad_norm is 0."""
        rows, columns = self._prepare_rows(rows, objective, numbers)
        totals, _ = self._run(rows, objective, columns, forward_only=True)
        return totals.result(0.0, skipped=False)

    @mcore.quiet()
    def logprobs(self, rows: BatchRows) -> Floats:
        """Return log-probs [T] float32 by the current weights, at each row's temperature; 0 where nothing trains.

        The result is the same on every rank.
        """
        return logprobs_by(self.policy, rows)

    def reference_logprobs(self, rows: BatchRows) -> Floats:
        """Like `logprobs`, by the reference."""
        assert self.policy.reference is not None, "the learner was made without a reference"
        self.policy.gather_weights()
        with self.policy.reference.in_place(self.policy.model):
            return self.logprobs(rows)

    @mcore.quiet()
    def teacher_logprobs(self, rows: BatchRows) -> Floats:
        """Like `logprobs`, by the teacher."""
        assert self._teacher is not None, "the learner was made without a teacher"
        with self._teacher.on_device():
            return logprobs_by(self._teacher, without_experts(rows))

    @mcore.quiet()
    @torch.no_grad()
    def values(self, rows: BatchRows) -> Floats:
        """Return values [T + n] float32; see Critic.values."""
        assert self._critic is not None, "the learner was made without a critic"
        return self._critic.values(rows)

    def export(self) -> Tensors:
        """Return the policy's weights under Hugging Face names, in rank 0's memory."""
        self.policy.gather_weights()
        return export_weights(self.policy.model, self.shape)

    def plan_export(self, of: ExportedWeights = "merged", bucket_bytes: int = LIMIT) -> WeightExport:
        """Return the plan of an export of the present weights, which is computed once. `bucket_bytes`: memory for
        buckets.
        """
        self.policy.gather_weights()
        if (of, bucket_bytes) not in self._planned:
            self._planned[of, bucket_bytes] = WeightExport(self.policy.model, self.shape, of, limit=bucket_bytes)
        return self._planned[of, bucket_bytes]

    def begin_export(
        self,
        folder: Path,
        of: ExportedWeights = "merged",
        version: int = 0,
        blobs: str = "",
        shard_bytes: int = SHARD_BYTES,
    ) -> list[TensorSpec]:
        """Begin to export the present weights as files, one export at a time: each rank writes its own into the folder
        of that name on its machine, and uploads them into the run's folder `blobs`. Return all tensors.

        Steps may be taken afterwards. Raises ExportFailed.
        """
        export, beside = self.plan_export(of), dict[str, bytes]()
        if of == "adapter":
            names = [spec.name for spec in export.specs]
            beside[adapters.CONFIG] = adapters.config_json(
                self._adapters["lora_rank"], self._adapters["lora_alpha"], names
            )
        self._exports.begin(export, folder, of, version, blobs, beside=beside, shard_bytes=shard_bytes)
        return export.specs

    def find_export(self, wait_s: float = 0.0) -> ExportedVersion | None:
        """Return the export once all ranks have hashed and uploaded their files, else None after at most `wait_s`.

        Not collective: rank 0 may call it from any thread, beside another call. Raises ExportFailed, BlobError.
        """
        return self._exports.find_export(wait_s)

    def finish_export(self, wait: bool) -> ExportedVersion | None:
        """Like `find_export`, as a call of all ranks, at rank 0; `wait` waits for the export. Raises ExportFailed,
        BlobError.
        """
        return self._exports.finish(wait=wait)

    def export_files(self, folder: Path, of: ExportedWeights = "merged") -> Written | None:
        """Export the present weights as files and wait for their hashes; return their description at rank 0. Raises
        ExportFailed.
        """
        self.begin_export(folder, of)
        done = self.finish_export(True)
        return None if done is None else done.written

    def checksums(self, of: ExportedWeights) -> dict[str, str] | None:
        """Return the sha256 checksums of the present weights at rank 0."""
        return self.plan_export(of).sha256()

    def digests(self, bucket_bytes: int) -> tuple[tuple[TensorSpec, ...], dict[str, str]] | None:
        """Return at rank 0 all tensors of the whole model, and name -> "HEX:SHAPE" of the digest of each
        (infra/tensors/digests.py). `bucket_bytes`: memory for buckets.
        """
        export = self.plan_export(bucket_bytes=bucket_bytes)
        found = export.digests()
        return None if found is None else (tuple(export.specs), found)

    def open_group(
        self, host: str, urls: Sequence[str], bucket_bytes: int, timeout_s: float
    ) -> tuple[str, int, int] | None:
        """Return at rank 0 where engines meet the ranks, and the number of ranks that send; see WeightSender.open.

        Raises TransferBroken.
        """
        senders = len(self.plan_export(bucket_bytes=bucket_bytes).senders)  # first, since it is collective
        place = self._sender.open(host, urls, timeout_s)
        return None if place is None else (*place, senders)

    def send_weights(self, order: SendOrder) -> str:
        """Send the whole model to engines. Return what failed on any rank; empty if nothing did."""
        return self._sender.send(self.plan_export(bucket_bytes=order.bucket_bytes), order)

    def free_cache(self) -> None:
        """Return unused cached memory to the device, so that an engine that shares it can use it."""
        torch.cuda.empty_cache()

    def begin_save(self, directory: Path, common: Mapping[str, Any], before: str = "") -> None:
        """Begin to save the current weights, optimizer, critic and `common` as one Megatron checkpoint, one at a time.

        The folder must exist and be empty; it is written while steps continue. With an object store, each machine has a
        folder of that name, beside that of the checkpoint `before`. Raises CheckpointFailed.
        """
        common = {**common, "shape": self._stored_shape()}
        if self._place is not None:
            directory = self._place.here(directory.name, before)
        self._save = Save(*self.states(), directory, common, reshardable=self._whole, place=self._place)

    def finish_save(self, wait: bool) -> dict[str, BlobRef] | None:
        """Return the files that ranks have uploaded once the checkpoint is complete, else None; `wait` waits for that.

        Raises CheckpointFailed, BlobError.
        """
        if self._save is None:
            return {}
        if (stored := self._save.finish(wait=wait)) is not None:
            self._save = None
        return stored

    def save(self, directory: Path, common: Mapping[str, Any]) -> None:
        """Save a checkpoint and wait until it is complete. Raises CheckpointFailed."""
        self.begin_save(directory, common)
        self.finish_save(True)

    def restore(self, directory: Path) -> None:
        """Restore what `save` stored; from a checkpoint without a critic, everything else.

        Raises CheckpointUnusable on every rank, BlobError.
        """
        load_state(*self.states(), fetch_metadata(directory, self._place), self._stored_shape(), self._place)

    def restore_weights(self, directory: Path) -> None:
        """Restore only the policy's weights, for an export, whatever the layout was. Raises CheckpointUnusable."""
        load_model(self.policy.model, fetch_metadata(directory, self._place), self._stored_shape(), self._place)

    def _stored_shape(self) -> dict[str, Any]:
        return as_dict(self.shape) | self._adapters

    def states(self) -> tuple[State, State | None]:
        """Return the content of a checkpoint: (model, optimizer) of the policy, and of the critic if there is one."""
        critic = self._critic.network.state if self._critic else None
        return self.policy.state, critic

    def _prepare_rows(
        self, rows: BatchRows, objective: Objective, numbers: ForwardPassResults
    ) -> tuple[BatchRows, Columns]:
        numbers = dataclasses.replace(numbers, masked=self._out(rows))
        return objective.prepare(rows, numbers, self.logprobs(rows) if objective.reads_current else None)

    def _run(
        self,
        rows: BatchRows,
        objective: Objective,
        columns: Columns,
        *,
        forward_only: bool,
        tell_tokens: bool = False,
        held: int | None = None,
    ) -> tuple[Totals, dict[str, Floats] | None]:
        trained = int(rows.trained.sum())
        forward = _Forward(objective, columns, rows, self._out(rows), self.shape.vocabulary, tell_tokens, held)
        forward.with_entropy |= self._report_entropy
        scored = rows.trained.astype(bool)
        if columns.auxiliary is not None:
            scored |= columns.auxiliary.numpy() != 0
        self.policy.run(warm(rows), forward, forward_only=forward_only, scored=scored)
        totals = Totals.over_ranks(forward)
        if totals.trained != trained:
            raise BooksOff(f"the ranks trained {totals.trained} tokens, the batch counts {trained}")
        if forward.told is None:
            return totals, None
        told: list[Floats] = list(over_ranks(forward.told).numpy())
        return totals, {**dict(zip(TOLD, told, strict=True)), "advantage": rows.advantages}

    def _out(self, rows: BatchRows) -> NDArray[np.bool_]:
        """Return a mask [n] of rows whose tokens are left out of the step: greedy rows, and unrouted rows if those must
        not train.
        """
        greedy: NDArray[np.bool_] = rows.temperature <= 0
        return greedy | unrouted_rows(rows) if self.shape.mixture and not self._unrouted_train else greedy


HELD_GAPS = (HELD_GAP_MAX, HELD_OLD_CACHE_GAP_MAX)
TOLD = ("logprob", "entropy", "ratio")
"""Per-token figures from the forward pass."""


class _Forward:
    """Megatron's forward_step_func; sums the reports of this rank's microbatches."""

    def __init__(
        self,
        objective: Objective,
        columns: Columns,
        rows: BatchRows,
        out: NDArray[np.bool_],
        vocabulary: int,
        tell_tokens: bool,
        held: int | None,
    ) -> None:
        """`out` [n] flags the rows whose tokens are masked."""
        self.with_entropy = objective.trains_entropy or tell_tokens
        """Whether the entropy is computed."""
        self._objective, self._vocabulary, self._trained_total = objective, vocabulary, int(rows.trained.sum())
        self._out = torch.from_numpy(np.repeat(out, rows.lengths)).to(mcore.DEVICE)
        self.columns = columns.on(mcore.DEVICE)
        old_cache = np.zeros(len(rows.token_ids), "|u1") if rows.old_cache is None else rows.old_cache
        self._old_cache = torch.from_numpy(old_cache).bool().to(mcore.DEVICE)
        self.sums = _doubles(9)
        """Sums: weighted loss, trained tokens, entropy, clipped tokens, |gap|, masked tokens, auxiliary loss; then
        |gap| and number of the trained tokens on an old cache, which the first |gap| leaves out.
        """
        self.gap_max = _doubles(2)
        """Maxima of both gaps."""
        known = np.zeros(len(rows.token_ids), bool) if held is None else rows.known_of(held)
        self._known = torch.from_numpy(known).to(mcore.DEVICE)
        self.held_gap_max = _doubles(len(HELD_GAPS)) - torch.inf
        """Maxima of both gaps among tokens that the held weights sampled; -inf without such tokens."""
        self._kinds = None if rows.engine_kind is None else torch.from_numpy(rows.engine_kind).to(mcore.DEVICE)
        kinds = 0 if self._kinds is None else len(ENGINE_KINDS)
        self.kind_sums = _doubles(kinds, 2)
        """[kind, (|gap|, trained tokens)] by kind of engine, without tokens on an old cache; [0, 2] if the batch names
        no kind.
        """
        self.kind_gap_max = _doubles(kinds, 2) - torch.inf
        """[kind, (all of these tokens, those that the held weights sampled)] maxima; -inf without such tokens."""
        self.told = torch.zeros((len(TOLD), len(rows.token_ids)), device=mcore.DEVICE) if tell_tokens else None
        """Figures in TOLD of this rank's tokens, [figures, T], 0 elsewhere."""
        # Every rank needs the names, although only the last pipeline stage has the numbers.
        nothing = torch.zeros((1, 1), device=mcore.DEVICE)
        self.measured = objective(self._tokens(nothing, nothing, stand_in(mcore.DEVICE, 1))).measures
        self.measures = _doubles(len(self.measured), 2)
        """[k, (sum, sum of squares)] of the k measures."""
        self.largest = _doubles(len(self.measured)) - torch.inf

    def __call__(self, batches: Iterator[PaddedRows], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        output = model(batch.inputs, batch.positions, None)
        return output, lambda hidden: self._loss(model, hidden, batch)

    def _loss(
        self, model: Any, hidden: torch.Tensor, batch: PaddedRows
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        logprobs, entropy = score(model, hidden, batch, self._vocabulary, entropy=self.with_entropy)
        entropy = entropy if self._objective.trains_entropy else entropy.detach()
        seen = self._tokens(logprobs, entropy if self.with_entropy else None, batch)
        token = self._objective(seen)
        masked = self._out[batch.places]
        masked = masked if token.masked is None else masked | token.masked
        weighted = (batch.weights * torch.where(batch.trained & ~masked, token.value, 0.0)).sum()
        beside = self._beside(token.auxiliary, masked, batch)
        weighted = weighted + beside
        gap = torch.where(batch.trained, (logprobs.detach() - batch.recorded).abs(), 0.0)
        on_old = batch.trained & self._old_cache[batch.places]
        gap, old_gap = torch.where(on_old, 0.0, gap), torch.where(on_old, gap, 0.0)
        shares = (
            weighted.detach(),
            batch.trained.sum(),
            torch.where(batch.trained, entropy.detach(), 0.0).sum(),
            (batch.trained & token.clipped).sum(),
            gap.sum(),
            (batch.trained & masked).sum(),
            beside.detach(),
            old_gap.sum(),
            on_old.sum(),
        )
        self.sums += torch.stack([share.double() for share in shares])
        self.gap_max = torch.maximum(self.gap_max, torch.stack([gap.max(), old_gap.max()]).double())
        known = batch.trained & self._known[batch.places]
        held = [torch.where(known & ~on_old, gap, -torch.inf), torch.where(known & on_old, old_gap, -torch.inf)]
        self.held_gap_max = torch.maximum(self.held_gap_max, torch.stack([one.max() for one in held]).double())
        if self._kinds is not None:
            self._compare_kinds(self._kinds[batch.places], gap, batch.trained & ~on_old, known)
        self._measure(token.measures, batch.trained)
        if self.told is not None:
            keep_scored(self.told, torch.stack([logprobs, entropy, bounded_ratio(logprobs, seen.old)]), batch)
        return weighted * self._trained_total, batch.trained.sum().to(torch.int), {}

    def _compare_kinds(
        self, kinds: torch.Tensor, gap: torch.Tensor, counted: torch.Tensor, known: torch.Tensor
    ) -> None:
        """Add the gaps of `counted` tokens to those of the kinds of engines that sampled them."""
        sums, largest = [], []
        for number in range(len(ENGINE_KINDS)):
            own = counted & (kinds == number)
            sums.append(torch.stack([torch.where(own, gap, 0.0).sum().double(), own.sum().double()]))
            largest.append(
                torch.stack([torch.where(one, gap, -torch.inf).max().double() for one in (own, own & known)])
            )
        self.kind_sums += torch.stack(sums)
        self.kind_gap_max = torch.maximum(self.kind_gap_max, torch.stack(largest))

    def _beside(self, values: torch.Tensor | None, masked: torch.Tensor, batch: PaddedRows) -> torch.Tensor:
        """Return the auxiliary loss. Padding refers to the batch's first token, which has weight 0."""
        weights = self.columns.auxiliary
        if values is None or weights is None:
            return torch.zeros((), device=mcore.DEVICE)
        return (weights[batch.places] * torch.where(masked, 0.0, values)).sum()

    def _tokens(self, logprobs: torch.Tensor, entropy: torch.Tensor | None, batch: PaddedRows) -> Tokens:
        """Return the objective's view of the tokens.

        Where nothing trains, or the token's row is masked, every log-prob is replaced by the current one: the loss of
        such a token is dropped afterwards, but an infinity in it would stay in the gradient as NaN.
        """
        current, columns = logprobs.detach(), self.columns
        live = batch.trained & ~self._out[batch.places]

        def here(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[batch.places]

        def fill_untrained(column: torch.Tensor) -> torch.Tensor:
            return torch.where(live, column, current)

        old, reference, teacher = here(columns.old), here(columns.reference), here(columns.teacher)
        recorded = fill_untrained(batch.recorded)
        return Tokens(
            logprobs=logprobs,
            old=current if columns.old_is_current else recorded if old is None else fill_untrained(old),
            recorded=recorded,
            reference=None if reference is None else fill_untrained(reference),
            advantages=batch.advantages,
            trained=batch.trained,
            entropy=entropy,
            trajectory_gap=here(columns.trajectory_gap),
            trajectory_tokens=here(columns.trajectory_tokens),
            importance=here(columns.importance),
            importance_mean=columns.importance_mean,
            teacher=None if teacher is None else fill_untrained(teacher),
            chosen=here(columns.chosen),
        )

    def _measure(self, measures: Mapping[str, Measure], trained: torch.Tensor) -> None:
        if measures:
            values = torch.stack([measure.values.detach().double().flatten() for measure in measures.values()])
            counted = torch.where(trained.flatten(), values, 0.0)
            self.measures += torch.stack([counted.sum(1), counted.square().sum(1)], 1)
            self.largest = torch.maximum(self.largest, torch.where(trained.flatten(), values, -torch.inf).amax(1))


def _doubles(*size: int) -> torch.Tensor:
    """Return zeros on the device: sums stay there until the step ends, because the host would wait for each number."""
    return torch.zeros(size, dtype=torch.float64, device=mcore.DEVICE)


def _gaps_of_kinds(sums: torch.Tensor, largest: torch.Tensor) -> dict[str, float]:
    """Return the gaps of each kind of engine that the batch names, by metric; arguments as in _Forward."""
    found: dict[str, float] = {}
    for kind, (gap, tokens), (whole, held) in zip(ENGINE_KINDS, sums.tolist(), largest.tolist(), strict=True):
        if kind and tokens:
            found[gap_of_kind(LOGPROB_GAP_MAX, kind)] = whole
            found[gap_of_kind(LOGPROB_GAP_MEAN, kind)] = gap / tokens
            if math.isfinite(held):
                found[gap_of_kind(HELD_GAP_MAX, kind)] = held
    return found


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all microbatches of all ranks."""

    loss: float
    trained: int
    entropy: float | None
    clipped: float
    gap: float
    gap_max: float
    old_gap: float
    old_gap_max: float
    on_old: int
    masked: int
    metrics: dict[str, float]

    @classmethod
    def over_ranks(cls, forward: _Forward) -> Totals:
        """Sum over ranks. Only the last pipeline stage has sums; every rank receives them."""
        state = mcore.parallel_state
        sums = torch.cat([forward.kind_sums.flatten(), forward.sums, forward.measures.flatten()])
        largest = torch.cat([forward.kind_gap_max.flatten(), forward.gap_max, forward.held_gap_max, forward.largest])
        group = state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        if state.get_pipeline_model_parallel_world_size() > 1:
            last, stages = state.get_pipeline_model_parallel_last_rank(), state.get_pipeline_model_parallel_group()
            dist.broadcast(sums, last, group=stages)
            dist.broadcast(largest, last, group=stages)
        cells = forward.kind_sums.numel()
        of_kinds = {}
        if cells:
            of_kinds = _gaps_of_kinds(sums[:cells].view(-1, 2), largest[:cells].view(-1, 2))
        loss, trained, entropy, clipped, gap, masked, beside, old_gap, on_old, *moments = sums[cells:].tolist()
        gap_max, old_gap_max, *tops = largest[cells:].tolist()
        held = {name: gap for name, gap in zip(HELD_GAPS, tops, strict=False) if math.isfinite(gap)}
        del tops[: len(HELD_GAPS)]
        count = max(1, round(trained))
        metrics = {
            name: measure.figure(total, squares, top, count)
            for (name, measure), total, squares, top in zip(
                forward.measured.items(), moments[::2], moments[1::2], tops, strict=True
            )
            if round(trained)  # a maximum of no tokens is infinite
        }
        if forward.columns.auxiliary is not None:
            metrics["auxiliary_loss"] = beside
        metrics |= held | of_kinds
        return cls(
            loss, round(trained), entropy if forward.with_entropy else None, clipped, gap, gap_max, old_gap,
            old_gap_max, round(on_old), round(masked), metrics,
        )  # fmt: skip

    def result(self, grad_norm: float, *, skipped: bool, more: Mapping[str, float] | None = None) -> StepResult:
        """Return means over the trained tokens; `more` adds metrics."""
        each = max(1, self.trained)
        return StepResult(
            loss=self.loss,
            grad_norm=grad_norm,
            trained_tokens=self.trained,
            skipped=skipped,
            logprob_gap_max=self.gap_max,
            logprob_gap_mean=self.gap / max(1, self.trained - self.on_old),
            old_cache_tokens=self.on_old,
            old_cache_gap_max=self.old_gap_max,
            old_cache_gap_mean=self.old_gap / max(1, self.on_old),
            entropy=None if self.entropy is None else self.entropy / each,
            clip_fraction=self.clipped / each,
            masked=self.masked,
            metrics={**self.metrics, **(more or {})},
        )
