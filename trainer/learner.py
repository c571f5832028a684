"""The optimizer step: one rank's model, Megatron's DDP, distributed optimizer and schedule.

Loss of the step = sum over trained tokens of token loss / weight_divisor; nothing else normalises it, and tokens that
the objective masks count in M all the same. Megatron divides
gradients by the number of tokens that the loss function reports (calculate_per_token_loss), so the loss function hands
over M x its share and its own m_i trained tokens; that the m_i of all ranks sum to M is checked before the optimizer
moves.

Rows are right-padded, or packed behind one another; position t predicts token t + 1, so token columns are shifted by
one here. Which rank and microbatch a row goes to is a pure function of lengths, data-parallel size and the token limit,
so that a checkpoint resumes on another layout, and a re-run sees the same sums in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from turnlog.infra.tensors.files import Written
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import BooksOff, mcore
from turnlog.trainer.algorithms.objective import Columns, Floats, Numbers, Objective
from turnlog.trainer.algorithms.passes import FrozenWeights, over_ranks
from turnlog.trainer.algorithms.passes import entropy as token_entropy
from turnlog.trainer.algorithms.tokens import Measure, Tokens
from turnlog.trainer.checkpoints.state import Save, load_model, load_state
from turnlog.trainer.model import build_model, model_config
from turnlog.trainer.models.attention import zigzag
from turnlog.trainer.models.experts import Replay, RoutedRows
from turnlog.trainer.plan import LearnerOptions, scaled_logits
from turnlog.trainer.shape import ModelShape, as_dict, row_flops
from turnlog.trainer.weights import Tensors, export_files, export_weights, load_weights


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """b rows, s = longest length - 1 positions. Padding carries weight 0."""

    inputs: torch.Tensor
    """[b, s] int64"""
    targets: torch.Tensor
    """[b, s] int64, the token after each input"""
    positions: torch.Tensor
    """[b, s] int64"""
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
    """[b, s, layers, top_k] int64, where routing is replayed"""
    edges: tuple[int, ...] = ()
    """Of rows that are packed into one: where each begins, and where the last ends. The others are [1, t] then."""


def padded(rows: BatchRows, microbatch: Microbatch, device: torch.device, *, multiple: int = 1) -> PaddedRows:
    """The rows of one microbatch, `multiple` x n positions each. A trained first token, which nothing predicts, is left
    out; `step` then finds the books off."""
    if not microbatch:
        return _stand_in(device, multiple)
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
    return PaddedRows(
        inputs=tokens[:, :-1].contiguous().to(device),
        targets=tokens[:, 1:].contiguous().to(device),
        positions=torch.arange(width - 1).expand(len(microbatch), -1).contiguous().to(device),
        trained=trained[:, 1:].to(device),
        recorded=table(rows.logprobs, torch.float32)[:, 1:].to(device),
        advantages=table(rows.advantages, torch.float32)[:, 1:].to(device),
        weights=(trained[:, 1:] * share[:, None]).to(device),
        temperature=torch.from_numpy(rows.temperature[index].astype(np.float32)).to(device),
        places=torch.from_numpy(at[:, 1:].copy()).to(device),
        experts=_experts(rows, at[:, :-1], columns[:-1] < lengths[:, None] - 1, device),
    )


def _experts(
    rows: BatchRows, at: NDArray[np.int64], real: NDArray[np.bool_], device: torch.device
) -> torch.Tensor | None:
    """Of the inputs; distinct ones for padding."""
    if not isinstance(rows, RoutedRows):
        return None
    found = np.where(real[..., None, None], rows.experts[at], np.arange(rows.experts.shape[-1]))
    return torch.from_numpy(found.astype(np.int64)).to(device)


def _stand_in(device: torch.device, positions: int) -> PaddedRows:
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
    lengths: Sequence[int], ranks: int, limit_tokens: int, *, cost: Cost = int, packing: bool = False
) -> tuple[tuple[Microbatch, ...], ...]:
    """For each rank its microbatches, equally many for all.

    Every row is in exactly one. A microbatch of several rows takes at most `limit_tokens`, with rows padded to its
    longest or, when they are packed, behind one another; a longer row goes alone. Ranks are balanced by cost (longest
    processing time first, Graham 1969).
    """
    if ranks < 1 or limit_tokens < 1:
        raise ValueError(f"ranks {ranks} and limit_tokens {limit_tokens} must be positive")
    taken = [_taken_together(rows, lengths, limit_tokens, packing) for rows in _dealt(lengths, ranks, cost)]
    count = max(1, *(len(one) for one in taken))
    return tuple((*one, *((),) * (count - len(one))) for one in taken)


ROW_POSITIONS = 25
"""What a row of its own costs attention, in positions (benchmark L3)."""


def worth_packing(padded_plan: Sequence[Sequence[Microbatch]], lengths: Sequence[int]) -> bool:
    """Whether the padding of these microbatches costs more than calling attention row by row."""
    held = [[int(lengths[row]) for row in one] for rank in padded_plan for one in rank if one]
    return sum(len(one) * max(one) - sum(one) for one in held) > ROW_POSITIONS * len(lengths)


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-int(lengths[row]), row))


def _dealt(lengths: Sequence[int], ranks: int, cost: Cost) -> list[list[int]]:
    """Rows by rank: the longest first, each to the rank with the least cost so far (then fewest rows)."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]
    for row in _longest_first(range(len(lengths)), lengths):
        total, rows, rank = min(loads)
        dealt[rank].append(row)
        loads[rank] = (total + cost(int(lengths[row])), rows + 1, rank)
    return dealt


def _taken_together(rows: Sequence[int], lengths: Sequence[int], limit_tokens: int, packing: bool) -> list[Microbatch]:
    """Neighbours in length share a microbatch, so that little of it is padding."""
    done: list[Microbatch] = []
    current: list[int] = []
    for row in _longest_first(rows, lengths):
        longest = int(lengths[current[0]]) if current else 0
        size = sum(int(lengths[one]) for one in (*current, row)) if packing else (len(current) + 1) * longest
        if current and size > limit_tokens:
            done.append(tuple(sorted(current)))
            current = []
        current.append(row)
    if current:
        done.append(tuple(sorted(current)))
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did; measured before the weights moved, the same on every rank."""

    loss: float
    grad_norm: float
    """Before clipping."""
    trained_tokens: int
    skipped: bool
    """The gradient was not finite: weights and optimizer are as before."""
    logprob_gap_max: float
    """max |trainer - recorded| log-prob over trained tokens."""
    logprob_gap_mean: float
    entropy: float
    """Mean over trained tokens, nats, at the row's temperature."""
    clip_fraction: float
    masked: int
    """Of trained_tokens, those that the objective gave no part in the step."""
    metrics: Mapping[str, float]
    """What the objective measures, by name."""


NONE = Numbers()


class Learner:
    """Collective: every rank makes the same calls with the same arguments. Process groups exist before it."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, torch.Tensor],
        options: LearnerOptions,
        reference: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """`reference`: the frozen weights that objectives with a divergence are held to. Raises WeightsMismatch."""
        torch.set_num_threads(options.threads)
        mcore.tensor_parallel.model_parallel_cuda_manual_seed(options.seed)
        self.shape, self._options = shape, options
        with mcore.quiet():
            self._config = model_config(shape, options)
            self._model = build_model(shape, self._config, vocabulary_multiple=options.vocabulary_multiple)
            self._reference: FrozenWeights | None = None
            if reference is not None:
                load_weights(self._model, reference, shape)
                self._reference = FrozenWeights(self._model)
            load_weights(self._model, weights, shape)
            distributed = mcore.DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
            self._ddp = mcore.DistributedDataParallel(self._config, distributed, self._model)
            self._optimizer = mcore.get_megatron_optimizer(self._optimizer_config(), [self._ddp])
            for one in self._optimizer.chained_optimizers:  # moments of 0, so that step 0 can be saved
                one.init_state_fn(one.optimizer, one.config)
                for group in one.optimizer.param_groups:
                    group.setdefault("step", 0)
        self._edges: tuple[int, ...] = ()
        self._model.register_forward_pre_hook(self._say_where_rows_end, with_kwargs=True)
        self._replay = Replay(self._model, recompute=options.recompute != "none") if shape.experts else None
        self._config.grad_scale_func = self._optimizer.scale_loss
        self._config.finalize_model_grads_func = mcore.finalize_model_grads
        self._schedule = mcore.get_forward_backward_func()
        self._save: Save | None = None

    @mcore.quiet()
    def step(self, rows: BatchRows, objective: Objective, learning_rate: float, numbers: Numbers = NONE) -> StepResult:
        """One optimizer step on all rows together; `numbers`: what the passes that the objective asks for gave them.
        Raises BooksOff, with the weights as before."""
        rows, columns = self._prepared(rows, objective, numbers)
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()
        totals = self._run(rows, objective, columns, forward_only=False)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        finite = math.isfinite(grad_norm) and math.isfinite(totals.loss)
        if finite:
            self._optimizer.step()
        return totals.result(grad_norm, skipped=not finite)

    @mcore.quiet()
    def measure(self, rows: BatchRows, objective: Objective, numbers: Numbers = NONE) -> StepResult:
        """What `step` would report, without moving anything; grad_norm is 0."""
        rows, columns = self._prepared(rows, objective, numbers)
        return self._run(rows, objective, columns, forward_only=True).result(0.0, skipped=False)

    @mcore.quiet()
    @torch.no_grad()
    def logprobs(self, rows: BatchRows) -> Floats:
        """[T] of the weights as they are, at each row's temperature; 0 where nothing trains. The same on every rank."""
        forward = _LogProbs(self.shape.vocabulary, len(rows.token_ids))
        self._pass(_warm(rows), forward, forward_only=True)
        found: Floats = over_ranks(forward.found).numpy()
        return found

    def reference_logprobs(self, rows: BatchRows) -> Floats:
        """The same of the reference."""
        assert self._reference is not None, "the learner was made without a reference"
        with self._reference.in_place(self._model):
            return self.logprobs(rows)

    def export(self) -> Tensors:
        """The weights under Hugging Face names, in rank 0's memory."""
        return export_weights(self._model, self.shape)

    def export_files(self, folder: Path) -> Written | None:
        """The same as files in rank 0's `folder`, what is in them at rank 0."""
        return export_files(self._model, self.shape, folder)

    def begin_save(self, directory: Path, common: Mapping[str, Any]) -> None:
        """Weights, optimizer and `common` as they are now, as one Megatron checkpoint in an existing empty folder that
        is written while steps go on: one at a time. Raises CheckpointFailed."""
        whole = self._options.reshardable or mcore.parallel_state.get_data_parallel_world_size() == 1
        common = {**common, "shape": as_dict(self.shape)}
        self._save = Save(self._model, self._optimizer, directory, common, reshardable=whole)

    def saved(self, wait: bool) -> bool:
        """Whether that checkpoint is whole; `wait`: until it is. Raises CheckpointFailed."""
        if self._save is not None and self._save.done(wait=wait):
            self._save = None
        return self._save is None

    def save(self, directory: Path, common: Mapping[str, Any]) -> None:
        """Both at once. Raises CheckpointFailed."""
        self.begin_save(directory, common)
        self.saved(True)

    def restore(self, directory: Path) -> None:
        """Become what `save` stored. Raises CheckpointUnusable."""
        load_state(self._model, self._optimizer, directory, as_dict(self.shape))

    def restore_weights(self, directory: Path) -> None:
        """Of it the weights alone, for an export: whatever the layout then was. Raises CheckpointUnusable."""
        load_model(self._model, directory, as_dict(self.shape))

    def _optimizer_config(self) -> Any:
        options = self._options
        return mcore.OptimizerConfig(
            optimizer="adam",
            lr=1.0,  # set before every step
            weight_decay=options.weight_decay,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            clip_grad=options.clip_grad,
            bf16=self._config.bf16,
            params_dtype=self._config.params_dtype,
            use_distributed_optimizer=True,
        )

    def _prepared(self, rows: BatchRows, objective: Objective, numbers: Numbers) -> tuple[BatchRows, Columns]:
        return objective.prepared(rows, numbers, self.logprobs(rows) if objective.by_trajectory else None)

    def _run(self, rows: BatchRows, objective: Objective, columns: Columns, *, forward_only: bool) -> Totals:
        trained = int(rows.trained.sum())
        forward = _Forward(objective, columns, rows, self.shape.vocabulary)
        self._pass(_warm(rows), forward, forward_only=forward_only)
        totals = Totals.over_ranks(forward)
        if totals.trained != trained:
            raise BooksOff(f"the ranks trained {totals.trained} tokens, the batch counts {trained}")
        return totals

    def _pass(self, rows: BatchRows, forward: _Forward | _LogProbs, *, forward_only: bool) -> None:
        """This rank's microbatches through Megatron's schedule."""
        rank = mcore.parallel_state.get_data_parallel_rank()
        ranks = mcore.parallel_state.get_data_parallel_world_size()
        lengths, limit = rows.lengths.tolist(), self._options.microbatch_tokens
        dealt = functools.partial(microbatches, lengths, ranks, limit, cost=functools.partial(row_flops, self.shape))
        plan, packing = dealt(), self._options.packing == "on"
        if packing or (self._options.packing == "auto" and worth_packing(plan, lengths)):
            plan, packing = dealt(packing=True), True
        batches = [self._laid_out(rows, one, packing) for one in plan[rank]]
        self._schedule(
            forward_step_func=forward,
            data_iterator=self._taken(rows, batches),
            model=[self._ddp],
            num_microbatches=len(batches),
            seq_length=max(batch.inputs.size(1) for batch in batches),
            micro_batch_size=max(batch.inputs.size(0) for batch in batches),
            forward_only=forward_only,
        )
        if self._replay:
            self._replay.clear()

    def _laid_out(self, rows: BatchRows, microbatch: Microbatch, packing: bool) -> PaddedRows:
        """This rank's part of a microbatch."""
        multiple = self._options.multiple
        batch = padded(rows, microbatch, mcore.DEVICE, multiple=multiple)
        if packing:
            positions = [max(1, int(rows.lengths[row]) - 1) for row in microbatch] or [multiple]
            batch = packed(batch, [-(-count // multiple) * multiple for count in positions])
        return shared(batch, mcore.parallel_state.get_context_parallel_rank(), self._options.context_parallel)

    def _taken(self, rows: BatchRows, batches: Sequence[PaddedRows]) -> Iterator[PaddedRows]:
        """As forward passes take them; routers replay what the rows recorded."""
        replayed = self._replay is not None and isinstance(rows, RoutedRows)
        for batch in self._replay.over(batches) if self._replay and replayed else batches:
            self._edges = batch.edges
            yield batch

    def _say_where_rows_end(self, _: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Whoever runs the model on a batch that was just taken runs it on rows that do not see each other."""
        if not self._edges:
            return arguments, named
        ends = torch.tensor(self._edges, dtype=torch.int32, device=mcore.DEVICE)
        longest = int(ends.diff().max())
        packing = mcore.PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)
        return arguments, {**named, "packed_seq_params": packing}


def _warm(rows: BatchRows) -> BatchRows:
    """Greedy rows, which have no temperature to divide by, at 1: `_Forward` masks them."""
    greedy = rows.temperature <= 0
    if not greedy.any():
        return rows
    return dataclasses.replace(rows, temperature=np.where(greedy, 1.0, rows.temperature).astype("<f4"))


class _Forward:
    """Megatron's forward_step_func; sums what the microbatches of this rank report."""

    def __init__(self, objective: Objective, columns: Columns, rows: BatchRows, vocabulary: int) -> None:
        self._objective, self._vocabulary, self._trained_total = objective, vocabulary, int(rows.trained.sum())
        self._greedy = torch.from_numpy(np.repeat(rows.temperature <= 0, rows.lengths)).to(mcore.DEVICE)
        self._columns = columns.on(mcore.DEVICE)
        self.sums = torch.zeros(6, dtype=torch.float64)
        """weighted loss, trained tokens, entropy, clipped tokens, |gap|, masked tokens"""
        self.gap_max = torch.zeros(1, dtype=torch.float64)
        # Every rank knows the names, while the last pipeline stage alone has the numbers.
        nothing = torch.zeros((1, 1), device=mcore.DEVICE)
        self.measured = objective(self._tokens(nothing, nothing, _stand_in(mcore.DEVICE, 1))).measures
        self.measures = torch.zeros((len(self.measured), 2), dtype=torch.float64)
        """[k, (sum, sum of squares)]"""
        self.largest = torch.full((len(self.measured),), -torch.inf, dtype=torch.float64)

    def __call__(self, batches: Iterator[PaddedRows], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        output = model(batch.inputs, batch.positions, None)
        return output, lambda logits: self._loss(logits, batch)

    def _loss(self, logits: torch.Tensor, batch: PaddedRows) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        scaled = _scaled(logits, batch, self._vocabulary)
        entropy = token_entropy(scaled if self._objective.trains_entropy else scaled.detach())
        logprobs = -mcore.vocab_parallel_cross_entropy(scaled, batch.targets)  # it overwrites `scaled`
        token = self._objective(self._tokens(logprobs, entropy, batch))
        masked = self._greedy[batch.places]
        masked = masked if token.masked is None else masked | token.masked
        weighted = (batch.weights * torch.where(batch.trained & ~masked, token.value, 0.0)).sum()
        gap = torch.where(batch.trained, (logprobs.detach() - batch.recorded).abs(), 0.0)
        shares = (
            weighted.detach(),
            batch.trained.sum(),
            torch.where(batch.trained, entropy.detach(), 0.0).sum(),
            (batch.trained & token.clipped).sum(),
            gap.sum(),
            (batch.trained & masked).sum(),
        )
        self.sums += torch.stack([share.double() for share in shares]).cpu()
        self.gap_max = torch.maximum(self.gap_max, gap.max().double().cpu())
        self._measure(token.measures, batch.trained)
        return weighted * self._trained_total, batch.trained.sum().to(torch.int), {}

    def _tokens(self, logprobs: torch.Tensor, entropy: torch.Tensor, batch: PaddedRows) -> Tokens:
        """The objective's view. Where nothing trains every log-prob is the current one, so that no ratio overflows."""
        current, columns = logprobs.detach(), self._columns

        def here(column: torch.Tensor | None) -> torch.Tensor | None:
            return None if column is None else column[batch.places]

        def trained(column: torch.Tensor) -> torch.Tensor:
            return torch.where(batch.trained, column, current)

        old, reference = here(columns.old), here(columns.reference)
        recorded = trained(batch.recorded)
        return Tokens(
            logprobs=logprobs,
            old=current if columns.old_is_current else recorded if old is None else trained(old),
            recorded=recorded,
            reference=None if reference is None else trained(reference),
            advantages=batch.advantages,
            trained=batch.trained,
            entropy=entropy,
            trajectory_gap=here(columns.trajectory_gap),
            trajectory_tokens=here(columns.trajectory_tokens),
            importance=here(columns.importance),
        )

    def _measure(self, measures: Mapping[str, Measure], trained: torch.Tensor) -> None:
        for place, measure in enumerate(measures.values()):
            values = measure.values.detach().double()[trained]
            if len(values):
                self.measures[place] += torch.stack([values.sum(), values.square().sum()]).cpu()
                self.largest[place] = torch.maximum(self.largest[place], values.max().cpu())


class _LogProbs:
    """The same for a pass that only says what the trained tokens' log-probs are."""

    def __init__(self, vocabulary: int, tokens: int) -> None:
        self._vocabulary = vocabulary
        self.found = torch.zeros(tokens, device=mcore.DEVICE)
        """[T], this rank's share"""

    def __call__(self, batches: Iterator[PaddedRows], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        output = model(batch.inputs, batch.positions, None)
        return output, lambda logits: self._keep(logits, batch)

    def _keep(self, logits: torch.Tensor, batch: PaddedRows) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        logprobs = -mcore.vocab_parallel_cross_entropy(_scaled(logits, batch, self._vocabulary), batch.targets)
        self.found[batch.places[batch.trained]] = logprobs[batch.trained]
        return logprobs.sum(), batch.trained.sum().to(torch.int), {}


def _scaled(logits: torch.Tensor, batch: PaddedRows, vocabulary: int) -> torch.Tensor:
    columns = logits.size(-1)
    first = mcore.parallel_state.get_tensor_model_parallel_rank() * columns
    return scaled_logits(logits, batch.temperature, first_column=first, vocabulary=vocabulary)


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all microbatches of all ranks."""

    loss: float
    trained: int
    entropy: float
    clipped: float
    gap: float
    gap_max: float
    masked: int
    metrics: dict[str, float]

    @classmethod
    def over_ranks(cls, forward: _Forward) -> Totals:
        """Only the last pipeline stage has sums; every rank gets them."""
        state = mcore.parallel_state
        sums = torch.cat([forward.sums, forward.measures.flatten()]).to(mcore.DEVICE)
        largest = torch.cat([forward.gap_max, forward.largest]).to(mcore.DEVICE)
        group = state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        if state.get_pipeline_model_parallel_world_size() > 1:
            last, stages = state.get_pipeline_model_parallel_last_rank(), state.get_pipeline_model_parallel_group()
            dist.broadcast(sums, last, group=stages)
            dist.broadcast(largest, last, group=stages)
        loss, trained, entropy, clipped, gap, masked, *moments = sums.tolist()
        gap_max, *tops = largest.tolist()
        count = max(1, round(trained))
        metrics = {
            name: measure.figure(total, squares, top, count)
            for (name, measure), total, squares, top in zip(
                forward.measured.items(), moments[::2], moments[1::2], tops, strict=True
            )
        }
        return cls(loss, round(trained), entropy, clipped, gap, gap_max, round(masked), metrics)

    def result(self, grad_norm: float, *, skipped: bool) -> StepResult:
        """Means over the trained tokens."""
        each = max(1, self.trained)
        return StepResult(
            loss=self.loss,
            grad_norm=grad_norm,
            trained_tokens=self.trained,
            skipped=skipped,
            logprob_gap_max=self.gap_max,
            logprob_gap_mean=self.gap / each,
            entropy=self.entropy / each,
            clip_fraction=self.clipped / each,
            masked=self.masked,
            metrics=self.metrics,
        )
