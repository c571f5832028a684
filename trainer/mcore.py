"""The only importer of megatron-core: prepares it for this machine, then re-exports what the trainer uses of it."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from turnlog.trainer import LayoutUnfit, megatron_cpu
from turnlog.trainer.gang import LOCAL_RANK


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


DEVICE = own_device(os.environ)

with warnings.catch_warnings(), megatron_cpu.importing():
    warnings.simplefilter("ignore")  # Megatron warns at import that TransformerEngine and apex are absent
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.core import CheckpointingException
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
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec, TransformerConfig
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
    from megatron.core.transformer.module import Float16Module, MegatronModule
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    ON_CPU = megatron_cpu.enable()
    megatron_cpu.install()

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
    "LOCAL_RANK",
    "ON_CPU",
    "TRAINED",
    "CheckpointingException",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "MegatronModule",
    "ModelType",
    "ModuleSpec",
    "OptimizerConfig",
    "PackedSeqParams",
    "RouterReplay",
    "RouterReplayAction",
    "RowParallelLinear",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "add_prefix_for_sharding",
    "apply_swiglu_sharded_factory",
    "check_devices",
    "dist_checkpointing",
    "files_of",
    "filesystem_async",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "make_sharded_tensors_for_checkpoint",
    "own_device",
    "parallel_state",
    "quiet",
    "rewrite_common",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
