"""The only importer of megatron-core: prepares it for this machine, then re-exports what the trainer uses of it.

Unmodified megatron-core runs on CPU and gloo: `enable()` prepares it, and does nothing if CUDA is available. Megatron
names "cuda" in many places that no setting reaches. The real torch module is not changed. Instead:

  * in each listed megatron.core module the global `torch` becomes a proxy that forwards everything, except that
    factories take device="cuda" for the CPU, and torch.cuda's stream, device and RNG functions are torch.cpu's;
  * the few functions of SCOPED, which compare `tensor.type()` with a CUDA name or call `tensor.cuda()`, run under a
    TorchFunctionMode that answers as they expect.

torch.compile (`jit_fuser`) decorates nothing. This is pinned to megatron-core 0.16.1: a new call site in another
version fails with "Torch not compiled with CUDA enabled", never with wrong numbers. GroupStepAdam replaces the Adam of
apex and TransformerEngine, with the state layout that Megatron's checkpoints round-trip.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.adam import adam
from torch.overrides import TorchFunctionMode

from turnlog.trainer import LOCAL_RANK, LayoutUnfit

CPU = torch.device("cpu")
# fmt: off
FACTORIES = frozenset((
    "tensor", "zeros", "ones", "empty", "full", "arange", "eye", "rand", "randn", "zeros_like", "ones_like",
    "empty_like", "full_like", "linspace", "randint", "as_tensor",
))
MODULES = (
    "parallel_state", "utils", "timers",
    "tensor_parallel.layers", "tensor_parallel.mappings", "tensor_parallel.random", "tensor_parallel.utils",
    "tensor_parallel.data",
    "pipeline_parallel.schedules", "pipeline_parallel.p2p_communication", "pipeline_parallel.utils",
    "distributed.param_and_grad_buffer", "distributed.distributed_data_parallel", "distributed.finalize_model_grads",
    "optimizer.optimizer", "optimizer.clip_grads", "optimizer.distrib_optimizer", "optimizer.grad_scaler",
    "optimizer.cpu_offloading.hybrid_optimizer",
    "transformer.utils", "transformer.attention", "transformer.dot_product_attention", "transformer.module",
    "transformer.transformer_layer", "transformer.transformer_block", "transformer.mlp",
    "transformer.moe.router", "transformer.moe.moe_utils", "transformer.moe.experts",
    "transformer.moe.token_dispatcher",
    "models.gpt.gpt_model", "models.common.embeddings.rotary_pos_embedding", "models.common.embeddings.rope_utils",
    "models.common.language_module.language_module",
    "dist_checkpointing.exchange_utils", "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async", "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
)
# fmt: on
"""Modules on the path of GPT training (dense and mixtures of experts) and checkpointing that mention CUDA."""
SCOPED = (
    ("optimizer.optimizer", "clip_grad_by_total_norm_fp32"),
    ("optimizer.optimizer", "Float16OptimizerWithFloat16Params.__init__"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer.__init__"),
    ("optimizer.distrib_optimizer", "DistributedOptimizer.get_parameter_state_dp_zero"),
    ("models.common.language_module.language_module", "LanguageModule.setup_embeddings_and_output_layer"),
    ("models.common.embeddings.rotary_pos_embedding", "get_pos_emb_on_this_cp_rank"),
    ("models.common.embeddings.rope_utils", "get_pos_emb_on_this_cp_rank"),
    ("dist_checkpointing.exchange_utils", "exchange_loaded_tensors_gather_rounds"),
    ("dist_checkpointing.exchange_utils", "exchange_loaded_tensors_broadcast"),
    ("tensor_parallel.data", "broadcast_data"),
    ("utils", "check_param_hashes_across_dp_replicas"),
)
"""(module, attribute) of setup and clipping functions that check CUDA type names or move tensors."""
CPU_MIRROR = ("synchronize", "current_device", "stream", "set_device", "device_count", "Event")
"""Functions of torch.cuda that torch.cpu mirrors; current_device() is "cpu"."""


@contextmanager
def importing() -> Iterator[None]:
    """Context for the first import of megatron-core; it reduces a trainer's start from 9.2 s to 5.7 s.

    wandb, to which Megatron's inference could log, is hidden. Without CUDA, torch.compile is replaced by a no-op: the
    fusions that it would compile are off, and its machinery is not loaded.
    """
    compiled = torch.compile
    if not torch.cuda.is_available():
        torch.compile = _skip_compile  # type: ignore[assignment]
    hidden = "wandb" not in sys.modules
    if hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiled
        if hidden:
            del sys.modules["wandb"]


def _skip_compile(function: Any = None, **_: Any) -> Any:
    return (lambda made: made) if function is None else function


@functools.cache
def enable() -> bool:
    """Prepare megatron-core for a machine without CUDA and return whether that was needed. Call before a model is
    built.
    """
    if torch.cuda.is_available():
        return False
    proxy = _TorchProxy()
    for name in MODULES:
        importlib.import_module(f"megatron.core.{name}").torch = proxy  # type: ignore[attr-defined]
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)  # type: ignore[attr-defined]
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _as_numpy  # type: ignore[attr-defined]
    for name, path in SCOPED:
        *outer, leaf = path.split(".")
        owner: Any = functools.reduce(getattr, outer, importlib.import_module(f"megatron.core.{name}"))
        setattr(owner, leaf, _run_as_cuda(getattr(owner, leaf)))
    return True


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert split sizes of tokens between expert-parallel ranks to NumPy; Megatron does so only for tensors from a
    GPU.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class _Stream(torch.cpu.Stream):
    """A stream without order: on the CPU all work is complete when a call returns."""

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cpu.Event()

    def synchronize(self) -> None:
        """Do nothing: there is nothing to wait for."""


def _rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


class _CudaProxy(types.ModuleType):
    """torch.cuda as Megatron's modules see it; `is_available()` and everything else stay truthful."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        stands_in: dict[str, Any] = {name: getattr(torch.cpu, name) for name in CPU_MIRROR}
        stands_in["Stream"] = stands_in["current_stream"] = stands_in["default_stream"] = lambda *_, **__: _Stream()
        stands_in["empty_cache"] = lambda: None
        stands_in["manual_seed"] = lambda seed: torch.default_generator.manual_seed(seed)
        stands_in["get_rng_state"] = _rng_state
        stands_in["set_rng_state"] = lambda state, *_, **__: torch.set_rng_state(state)
        stands_in["random"] = types.SimpleNamespace(get_rng_state=_rng_state)
        self.__dict__.update(stands_in)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _TorchProxy(types.ModuleType):
    """torch as Megatron's modules see it."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__["cuda"] = _CudaProxy()
        self.__dict__["autocast"] = lambda device, *args, **named: torch.autocast(
            "cpu" if device == "cuda" else device, *args, **named
        )

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in FACTORIES:
            value = _on_cpu(value)
        self.__dict__[name] = value
        return value


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **named: Any) -> Any:
        device = named.get("device")
        if device is not None and (str(device).startswith("cuda") or type(device) is int):
            named["device"] = CPU
        if named.pop("pin_memory", False):
            named["pin_memory"] = False  # pinned memory needs a GPU
        return factory(*args, **named)

    return make


class _AnswersAsCuda(TorchFunctionMode):
    """Mode in which `tensor.type()` returns "torch.cuda.XTensor" and `tensor.cuda()` returns the tensor itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        answer = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def _run_as_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        with _AnswersAsCuda():
            return function(*args, **named)

    return run


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015), with decoupled weight decay (Loshchilov and Hutter 2019) by default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        **_: Any,
    ) -> None:
        """`adam_w_mode` and `bias_correction` are arguments that Megatron passes."""
        if not bias_correction:
            raise ValueError("Adam without bias correction is not supported")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode
        self.fused = True
        """Whether parameters on CUDA are updated by a few kernels for all of them, instead of several for each."""

    @torch.no_grad()
    def step(self, closure: None = None, **_: Any) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param].update(exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        device = params[0].device
        fused = self.fused and device.type == "cuda" and all(param.device == device for param in params)
        steps = torch.full((len(params),), float(group["step"] - 1), device=device if fused else CPU)
        adam(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            list(steps.unbind()),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=self.adam_w_mode,
            foreach=False,
            fused=fused,
        )


def install() -> None:
    """Give Megatron this Adam where it would fall back to torch.optim.AdamW.

    Also define a name that its router uses, but that nothing defines without TransformerEngine.
    """
    mixtures: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(mixtures, "te_general_gemm"):
        mixtures.te_general_gemm = None
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = GroupStepAdam, False
        distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
        distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = GroupStepAdam, True, True


@contextmanager
def torch_adam() -> Iterator[None]:
    """Let Megatron use torch's AdamW on the GPU too while it builds an optimizer that is offloaded in part: it counts
    steps in the state of each parameter, as the part on the CPU does.
    """
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    own, optimizer.Adam = optimizer.Adam, torch.optim.AdamW
    try:
        yield
    finally:
        optimizer.Adam = own


def own_device(environment: Mapping[str, str]) -> torch.device:
    """Return this rank's device and make it current: on its machine, the device with the number of its local rank.

    Megatron uses the current device as soon as it is imported. Raises LayoutUnfit if there is no such device.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = int(environment.get(LOCAL_RANK, "0"))
    check_devices(local + 1)
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def check_devices(ranks: int) -> None:
    """Check that each of `ranks` ranks on this machine has its own device; on CPU they share it. Raises LayoutUnfit."""
    if torch.cuda.is_available() and ranks > torch.cuda.device_count():
        raise LayoutUnfit(f"{ranks} ranks on this machine need a device each, torch sees {torch.cuda.device_count()}")


def device_bytes() -> int:
    """Return the memory of this rank's device; 0 on a CPU."""
    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0


DEVICE = own_device(os.environ)

with warnings.catch_warnings(), importing():
    warnings.simplefilter("ignore")  # Megatron warns at import that TransformerEngine and apex are absent
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies import torch as torch_format
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.mlp import MLP, apply_swiglu_sharded_factory
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
    from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

    ON_CPU = enable()
    install()

BACKEND = "gloo" if ON_CPU else "nccl"
"""Chosen by device, because torch reports that NCCL is available on machines without a GPU too."""


TRAINED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The model.TrainedNetworks of this process, which are released with its groups."""


def rewrite_common(directory: Path, common: Mapping[str, Any]) -> None:
    """Replace the value of `common` in a checkpoint's common state; shards are not touched."""
    state = dist_checkpointing.load_common_state_dict(str(directory))
    torch.save({**state, "common": dict(common)}, directory / COMMON_STATE_FNAME)  # as save_common does on rank 0


def files_of(sharded_state_dict: Mapping[str, Any], directory: Path) -> set[str]:
    """Return the files of a checkpoint that hold what this rank loads, according to the metadata in its folder.

    TorchDistLoadShardedStrategy makes the same plan.
    """
    named, _, _ = torch_format._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
    other = {one.key: one for some in named.values() for one in some if getattr(one, "allow_shape_mismatch", False)}
    metadata = torch_format.FileSystemReader(directory).read_metadata()
    planner = torch_format.MCoreLoadPlanner(allow_shape_mismatch_sharded_tensors=other)
    planner.set_up_planner(torch_format.mcore_to_pyt_state_dict(named, True), metadata, is_coordinator=False)
    items = planner.create_local_plan().items
    return {metadata.storage_data[item.storage_index].relative_path for item in items}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings: Megatron warns about its own defaults while it builds, saves and loads, and no warning is ours
    to act on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


__all__ = [
    "BACKEND",
    "COMMON_STATE_FNAME",
    "DEVICE",
    "MLP",
    "ON_CPU",
    "TRAINED",
    "CheckpointingException",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "LocalNonpersistentObject",
    "MegatronModule",
    "MoEAuxLossAutoScaler",
    "MoELayer",
    "ModelType",
    "ModuleSpec",
    "OptimizerConfig",
    "PackedSeqParams",
    "ParamKey",
    "ParamPredicate",
    "ProcessGroupCollection",
    "RotaryEmbedding",
    "RouterReplay",
    "RouterReplayAction",
    "RowParallelLinear",
    "SelfAttention",
    "SequentialMLP",
    "ShardedTensor",
    "TopKRouter",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "add_prefix_for_sharding",
    "apply_swiglu_sharded_factory",
    "build_module",
    "check_devices",
    "device_bytes",
    "dist_checkpointing",
    "files_of",
    "filesystem_async",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_standard_config_overrides",
    "get_transformer_layer_offset",
    "is_layer_window_attention",
    "make_sharded_tensors_for_checkpoint",
    "own_device",
    "parallel_state",
    "quick_gelu",
    "quiet",
    "rewrite_common",
    "tensor_parallel",
    "torch_adam",
]
