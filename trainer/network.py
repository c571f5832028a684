"""Megatron's GPTModel from a model shape, and what trains it: DDP, distributed optimizer, schedule.

The model uses the local layer spec, torch RMSNorm and SDPA core attention on CPU and CUDA alike, so that the tested
modules are the shipped ones. Megatron's checkpoint keys are the same as those of its TransformerEngine spec.

The end of the module is for forward passes alone: frozen weights in place of the trained ones, and columns gathered
from all ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from numpy.typing import NDArray

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore
from turnlog.trainer.checkpoints.state import State
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.family import family
from turnlog.trainer.families.shape import Mixture, ModelShape
from turnlog.trainer.microbatches import (
    Microbatch,
    PaddedRows,
    context_shard,
    deal,
    pack_rows,
    pad_rows,
    plan_cost,
    worth_packing,
)
from turnlog.trainer.models import decoder, lora
from turnlog.trainer.models.attention import PackedRows, RMSNorm
from turnlog.trainer.models.experts import Replay, unrouted_rows
from turnlog.trainer.models.fused import compiled_parts
from turnlog.trainer.models.mixture import group_experts, replace_dispatchers
from turnlog.trainer.models.output import HiddenOutput
from turnlog.trainer.models.vision import Sight
from turnlog.trainer.optimizer import build_optimizer
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.trees import lay_out_tree, worthwhile_trees
from turnlog.trainer.weights import global_name, load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def padded_vocabulary(shape: ModelShape, tensor_parallel: int, multiple: int = 1) -> int:
    """Return the number of embedding rows: the vocabulary rounded up so that tensor-parallel ranks share it equally."""
    unit = math.lcm(tensor_parallel, multiple)
    return -(-shape.vocabulary // unit) * unit


def model_config(shape: ModelShape, options: LearnerOptions) -> Any:
    """Return Megatron's TransformerConfig. Kernel fusions that need apex or TransformerEngine are off."""
    params = DTYPES[options.dtype]
    arguments = dict(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        context_parallel_size=options.context_parallel,
        expert_model_parallel_size=options.expert_parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=options.sequence_parallel,
        **_recompute(options),
        # Microbatches differ in length, so pipeline stages exchange shapes; Megatron then requires `alltoall`.
        variable_seq_lengths=options.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",
        **(_mixture(shape, shape.mixture, options) if shape.mixture else {}),
        softmax_scale=shape.attention_scale,
        **decoder.window_options(shape),
        mrope_section=shape.vision.axis_sizes(shape.head_dim // 2) if shape.vision else None,
        params_dtype=params,
        pipeline_dtype=params,
        bf16=params == torch.bfloat16,
        calculate_per_token_loss=True,
        use_cpu_initialization=mcore.ON_CPU,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )
    config = mcore.TransformerConfig(**arguments | family(shape.kind).options(shape))
    config.fused, config.compiled = options.fused, compiled_parts(options.compiled, mcore.DEVICE.type)
    return config


def _recompute(options: LearnerOptions) -> dict[str, Any]:
    if options.recompute == "none":
        return {}
    if options.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(options.recompute_modules)}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _mixture(shape: ModelShape, mixture: Mixture, options: LearnerOptions) -> dict[str, Any]:
    """Return the arguments for a mixture of experts.

    Without moe_aux_loss_coeff only the batch's objective trains. A softmax over all experts whose chosen ones are
    normalised to sum to 1 equals a softmax over the chosen ones.
    """
    dense = mixture.dense_layers
    return {
        "num_moe_experts": mixture.experts,
        "moe_router_topk": mixture.experts_per_token,
        "moe_ffn_hidden_size": mixture.expert_ffn,
        "moe_router_load_balancing_type": "aux_loss" if options.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        "moe_router_pre_softmax": not mixture.normalized_routing,
        "moe_router_dtype": "fp32",
        "moe_enable_routing_replay": True,
        **({"moe_layer_freq": [int(shape.is_mixture(layer)) for layer in range(shape.layers)]} if dense else {}),
    }


def build_model(shape: ModelShape, config: Any, options: LearnerOptions) -> Any:
    """Build this rank's part of the model, with Megatron's initial weights. Call after the process groups exist."""
    model = mcore.GPTModel(
        config,
        _layers(shape, config, options),
        vocab_size=padded_vocabulary(shape, options.tensor_parallel, options.vocabulary_multiple),
        max_sequence_length=shape.positions,
        pre_process=mcore.parallel_state.is_pipeline_first_stage(),
        post_process=mcore.parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        position_embedding_type="mrope" if shape.vision else "rope",
        rotary_base=shape.rope.theta,
        rotary_percent=shape.rope.fraction,
        share_embeddings_and_output_weights=shape.tied,
    )
    model.model_type = mcore.ModelType.encoder_or_decoder
    decoder.GatedMLP.put_on(model)
    model.rotary_tables = decoder.RotaryTables(model, shape)
    decoder.scale_rope(model, shape)
    replace_dispatchers(model)
    family(shape.kind).finish(shape, model)
    model = model.to(mcore.DEVICE)
    model = model.bfloat16() if config.bf16 else model
    tower = family(shape.kind).tower
    if tower and model.pre_process:
        model.vision = tower(shape, config.params_dtype).to(mcore.DEVICE)
    return model


class ValueHead(torch.nn.Module):
    """Output layer that predicts a float32 number at each position; 0 before training."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.zeros((1, config.hidden_size), dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Map [s, b, h] to [s, b, 1], as GPTModel calls an output layer; every tensor-parallel rank has the whole
        layer.
        """
        if self._parallel:
            hidden = mcore.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return functional.linear(hidden.float(), self.weight.float()), None

    @classmethod
    def put_on(cls, model: Any) -> None:
        """Replace the output layer of a model whose weights are loaded."""
        model.share_embeddings_and_output_weights = False
        if model.post_process:
            model.output_layer = cls(model.config).to(mcore.DEVICE)


def _layers(shape: ModelShape, config: Any, options: LearnerOptions) -> Any:
    """Return the specs of this pipeline stage's layers and of the final norm."""
    spec_of = family(shape.kind).layer_spec or decoder.layer_spec
    first = mcore.get_transformer_layer_offset(config)
    layers = [spec_of(shape, first + layer) for layer in range(mcore.get_num_layers_to_build(config))]
    for layer in layers if options.experts == "grouped" else ():
        group_experts(layer)
    for layer in layers if options.lora_rank else ():
        lora.adapt(layer, options.lora_rank, options.lora_alpha)
    return mcore.TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


Forward = Callable[[Iterator[PaddedRows], Any], tuple[torch.Tensor, Any]]
"""Megatron's forward_step_func."""


class Network:
    """A model that can run forward passes over rows. Collective: every rank makes the same calls with the same
    arguments.

    Process groups must exist before it is created.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, torch.Tensor],
        options: LearnerOptions,
        *,
        reference: Mapping[str, torch.Tensor] | None = None,
        values: bool = False,
    ) -> None:
        """`reference` holds weights to keep beside its own. `values` replaces the output layer by a value head. Raises
        WeightsMismatch.
        """
        self.shape, self._options = shape, options
        self._config = model_config(shape, options)
        self.model = build_model(shape, self._config, options)
        if options.lora_rank:
            lora.start(self.model, options.seed, global_name(self.model, shape))
        self.reference: FrozenWeights | None = None
        if reference is not None:
            load_weights(self.model, reference, shape)
            self.reference = FrozenWeights(self.model)
        load_weights(self.model, weights, shape)
        (ValueHead if values else HiddenOutput).put_on(self.model)
        self._packing: PackedRows | None = None
        self._padding: torch.Tensor | None = None
        self.model.register_forward_pre_hook(self._say_where_rows_stand, with_kwargs=True)
        self._sight = Sight(self.model, shape.vision) if shape.vision and self.model.pre_process else None
        routes_again = options.recompute == "full" or (
            options.recompute == "selective" and "moe" in options.recompute_modules
        )
        self._replay = Replay(self.model, recompute=routes_again) if shape.mixture else None
        self._schedule = mcore.get_forward_backward_func()
        self._wrapped: Any = self.model

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the model on its rank's device while the block runs, and move it to host memory afterwards."""
        self.model.to(mcore.DEVICE)
        try:
            yield
        finally:
            self.model.to("cpu")

    def run(
        self,
        rows: BatchRows,
        forward: Forward,
        *,
        forward_only: bool,
        scored: NDArray[np.bool_] | None = None,
        trees: bool = True,
    ) -> None:
        """Run this rank's microbatches through Megatron's schedule. `scored` [T] flags the tokens whose log-probs
        `forward` wants, by default those that train. `trees`: whether rows that share prefixes may be computed as
        trees, which needs `forward` to score the tokens of the rows themselves.
        """
        rank = mcore.parallel_state.get_data_parallel_rank()
        ranks = mcore.parallel_state.get_data_parallel_world_size()
        lengths, limit = rows.lengths.tolist(), self._options.microbatch_tokens
        cost, kinds = functools.partial(row_flops, self.shape), unrouted_rows(rows).tolist()
        costs = [cost(length) for length in lengths]
        dealt = functools.partial(deal, lengths, costs, ranks, limit, kinds=kinds)
        plan, packing = dealt(), self._options.packing == "on"
        automatic = self._options.packing == "auto" and "packing" not in family(self.shape.kind).without
        if packing or (automatic and worth_packing(plan, lengths)):
            plan, packing = dealt(packing=True), True
        if self._options.moe_aux_loss_coeff:
            # Megatron divides the sum over tokens of all losses by the number of trained ones; routers see them all.
            share = int(rows.trained.sum()) / max(1, int((rows.lengths - 1).sum()))
            self._config.moe_aux_loss_coeff = self._options.moe_aux_loss_coeff * share
        scored = rows.trained.astype(bool) if scored is None else scored
        alone = plan_cost(plan, costs, packing=packing)
        shared = (
            worthwhile_trees(self.shape, self._options, rows, ranks, cost=cost, kinds=kinds, alone=alone)
            if trees
            else None
        )
        if shared is not None:
            multiple = self._options.multiple
            laid_out = (
                lay_out_tree(rows, one, shared.shared, scored, multiple=multiple) for one in shared.microbatches[rank]
            )
            batches = [batch.to(mcore.DEVICE) for batch in laid_out]
        else:
            wanted = torch.from_numpy(scored)
            batches = [self._laid_out(rows, one, packing, wanted) for one in plan[rank]]
        self._schedule(
            forward_step_func=forward,
            data_iterator=self._iterate_microbatches(batches),
            model=[self._wrapped],
            num_microbatches=len(batches),
            seq_length=max(batch.inputs.size(1) for batch in batches),
            micro_batch_size=max(batch.inputs.size(0) for batch in batches),
            forward_only=forward_only,
        )
        self._packing = self._padding = None
        if self._replay:
            self._replay.clear()

    def _laid_out(self, rows: BatchRows, microbatch: Microbatch, packing: bool, scored: torch.Tensor) -> PaddedRows:
        """Return this rank's part of a microbatch. It is laid out on the host: nothing of it is read from the device,
        and all of it is there before the first pass."""
        multiple = self._options.multiple
        batch = pad_rows(rows, microbatch, mcore.CPU, multiple=multiple)
        if packing:
            positions = [max(1, int(rows.lengths[row]) - 1) for row in microbatch] or [multiple]
            batch = pack_rows(batch, [-(-count // multiple) * multiple for count in positions])
        batch = context_shard(batch, mcore.parallel_state.get_context_parallel_rank(), self._options.context_parallel)
        found = scored[batch.places].flatten().nonzero()[:, 0]
        return dataclasses.replace(batch, scored=found).to(mcore.DEVICE)

    def _iterate_microbatches(self, batches: Sequence[PaddedRows]) -> Iterator[PaddedRows]:
        """Yield microbatches as forward passes take them; routers replay what their rows recorded."""
        for batch in self._replay.over(batches) if self._replay else batches:
            self._packing = batch.packing
            if self._options.moe_aux_loss_coeff:
                self._padding = self._padding_mask(batch)
            if self._sight:
                self._sight.microbatch = batch
            yield batch

    def _padding_mask(self, batch: PaddedRows) -> torch.Tensor:
        """Return [b, s] whether a position is padding, of this rank's share where Megatron does not take that itself.

        No target is the batch's first token, to which padding refers.
        """
        padding, state = batch.places == 0, mcore.parallel_state
        if self._options.sequence_parallel and not self.model.pre_process:
            padding = padding.chunk(self._options.tensor_parallel, 1)[state.get_tensor_model_parallel_rank()]
        return padding

    def _say_where_rows_stand(self, _: Any, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward hook: tell the model where the rows of the current microbatch lie.

        Packed rows do not attend to each other, and positions get as many axes as the model has.
        """
        inputs, positions, *rest = arguments
        self.model.rotary_tables.expect(len(inputs), positions[0] if self._packing else None)
        if self.shape.vision:
            axes = positions.movedim(-1, 0) if positions.dim() > inputs.dim() else positions.expand(3, -1, -1)
            arguments = (inputs, axes, *rest)
        if self._padding is not None:
            named = {**named, "padding_mask": self._padding}
        return arguments, named if self._packing is None else {**named, "packed_seq_params": self._packing}


class GradientNetwork(Network):
    """A network whose trained parameters have gradients, summed over ranks by Megatron's DDP."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, torch.Tensor],
        options: LearnerOptions,
        *,
        reference: Mapping[str, torch.Tensor] | None = None,
        values: bool = False,
        shards: bool = False,
    ) -> None:
        """The other arguments are those of Network. `shards`: whether each data-parallel rank gets only its share of
        the summed gradients, as a distributed optimizer takes them.
        """
        super().__init__(shape, weights, options, reference=reference, values=values)
        self._add_parameters()
        distributed = mcore.DistributedDataParallelConfig(
            grad_reduce_in_fp32=options.grad_reduce_in_fp32,
            overlap_grad_reduce=options.overlap_grad_reduce,
            overlap_param_gather=options.overlap_param_gather,
            use_distributed_optimizer=shards,
        )
        self._wrapped = mcore.DistributedDataParallel(self._config, distributed, self.model)
        self._config.finalize_model_grads_func = mcore.finalize_model_grads
        if options.overlap_grad_reduce:  # gradients are summed once, behind the last microbatch
            self._config.no_sync_func = self._wrapped.no_sync
        mcore.TRAINED.add(self)

    def _add_parameters(self) -> None:
        """Add trained parameters to the model before its gradients have memory."""

    def release(self) -> None:
        """Drop the gradient hooks, so that the garbage collector can free the network.

        Hooks and the optimizer's views of the weights refer to each other through autograd's C++ nodes. The collector
        does not see such a cycle: a process would keep every network that it has trained, and its groups' sockets.
        """
        self._wrapped.grad_accs.clear()
        for module in self.model.modules():
            if dispatcher := getattr(module, "token_dispatcher", None):
                dispatcher.__dict__.clear()  # it keeps tensors of the last pass, whose graph has those hooks
        self._config.grad_scale_func = self._config.finalize_model_grads_func = self._config.no_sync_func = None

    def forget_gradients(self) -> None:
        """Reset gradients; call before a pass with gradients."""
        self._wrapped.zero_grad_buffer()


class TrainedNetwork(GradientNetwork):
    """A network with its optimizer."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Mapping[str, torch.Tensor],
        options: LearnerOptions,
        *,
        reference: Mapping[str, torch.Tensor] | None = None,
        values: bool = False,
    ) -> None:
        """The arguments are those of Network."""
        super().__init__(shape, weights, options, reference=reference, values=values, shards=True)
        self._gathered = True
        """Whether this rank has the weights that other ranks updated."""
        self.optimizer = build_optimizer(self._wrapped, options)
        self._config.grad_scale_func = self.optimizer.scale_loss

    def release(self) -> None:
        """Drop the optimizer too."""
        super().release()
        del self.optimizer

    @property
    def state(self) -> State:
        """The content of a checkpoint: (model, optimizer)."""
        self.gather_weights()
        return self.model, self.optimizer

    @mcore.quiet()
    def gather_weights(self) -> None:
        """Gather the weights that other ranks updated, if the next forward pass would do so. Call before anything else
        reads or replaces the weights. Collective.
        """
        if not self._gathered:
            self._wrapped.start_param_sync(force_sync=True)
            self._gathered = True

    def forget_gradients(self) -> None:
        """Reset gradients; call before a pass with gradients."""
        super().forget_gradients()
        self.optimizer.zero_grad()

    def gradient_norm(self) -> float:
        """Return the gradient norm of the last pass, before clipping."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def step(self, learning_rate: float) -> None:
        """Update the weights with the gradients whose norm was computed."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            # Megatron sets `wd_mult` to 0 for norms and biases, but only its own scheduler would read it.
            group["weight_decay"] = self._options.weight_decay * group.get("wd_mult", 1.0)
        self.optimizer.step()
        self._gathered = not self._options.overlap_param_gather


class FrozenWeights:
    """A snapshot of this rank's part of a model's weights on the CPU; it takes as many bytes as the rank's
    parameters.
    """

    def __init__(self, model: Any) -> None:
        self._kept = _copies(model)

    @contextmanager
    @torch.no_grad()
    def in_place(self, model: Any) -> Iterator[None]:
        """Put these weights into `model` while the block runs, then restore its own bit for bit.

        The model's own weights wait on the CPU meanwhile. The optimizer's state is not touched.
        """
        own = _copies(model)
        try:
            _put(model, self._kept)
            yield
        finally:
            _put(model, own)


def _copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to("cpu", copy=True) for name, parameter in model.named_parameters()}


@torch.no_grad()
def _put(model: Any, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def over_ranks(column: torch.Tensor) -> torch.Tensor:
    """Gather a column on every rank's CPU, whole. Collective.

    On input each entry is set on one data-parallel rank of the last pipeline stage and 0 on the others.
    """
    state = mcore.parallel_state
    dist.all_reduce(column, group=state.get_data_parallel_group(with_context_parallel=True))
    if state.get_pipeline_model_parallel_world_size() > 1:
        last, stages = state.get_pipeline_model_parallel_last_rank(), state.get_pipeline_model_parallel_group()
        dist.broadcast(column, last, group=stages)
    return column.cpu()
