"""The one door to megatron-core: prepares it for this machine, then names what the trainer uses of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from turnlog.trainer import megatron_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says at import that TransformerEngine and apex are absent
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistSaveShardedStrategy,
    )
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
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.module import Float16Module, MegatronModule

    ON_CPU = megatron_cpu.enable()
    megatron_cpu.install()

DEVICE = torch.device("cpu") if ON_CPU else torch.device("cuda", torch.cuda.current_device())
BACKEND = "gloo" if ON_CPU else "nccl"
"""By device: torch says that NCCL is available on machines without a GPU too."""


def rewrite_common(directory: Path, common: Mapping[str, Any]) -> None:
    """Replace what `common` of a checkpoint's common state says; shards are not touched."""
    state = dist_checkpointing.load_common_state_dict(str(directory))
    torch.save({**state, "common": dict(common)}, directory / COMMON_STATE_FNAME)  # as save_common does on rank 0


@contextmanager
def quiet() -> Iterator[None]:
    """Megatron warns about its own defaults while it builds, saves and loads; nothing of it is ours to act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


__all__ = [
    "BACKEND",
    "DEVICE",
    "ON_CPU",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Float16Module",
    "GPTModel",
    "MegatronModule",
    "ModelType",
    "OptimizerConfig",
    "TorchDistSaveShardedStrategy",
    "TransformerConfig",
    "dist_checkpointing",
    "filesystem_async",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "parallel_state",
    "quiet",
    "rewrite_common",
    "tensor_parallel",
    "vocab_parallel_cross_entropy",
]
