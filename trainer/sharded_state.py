"""A Megatron distributed checkpoint: weights, optimizer and common values in one folder, loadable at any layout."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnlog.trainer import mcore
from turnlog.trainer.errors import CheckpointUnusable

RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Of Megatron's formats the one that loads under another tensor, pipeline and data parallel size."""


def save(model: Any, optimizer: Any, directory: Path, common: Mapping[str, Any]) -> None:
    """Write the checkpoint and wait until it is on disk. Collective; `common` is the same on every rank."""
    # Megatron would start a manager process (5 s, and an orphan after a kill) to carry write results back from an
    # asynchronous writer; a synchronous save reads them in this process.
    mcore.filesystem_async._results_queue = queue.SimpleQueue()
    strategy = mcore.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    with mcore.quiet():
        state = {**_sharded(model, optimizer, is_loading=False), "common": dict(common)}
        mcore.dist_checkpointing.save(state, str(directory), strategy)


def load(model: Any, optimizer: Any, directory: Path, shape: Mapping[str, Any]) -> None:
    """Load in place. Collective. Raises CheckpointUnusable."""
    found = read_common(directory)["shape"]
    if found != dict(shape):
        raise CheckpointUnusable(f"{directory} is of another model: {found}, not {dict(shape)}")
    with mcore.quiet():
        state = mcore.dist_checkpointing.load(_sharded(model, optimizer, is_loading=True), str(directory))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


def read_common(directory: Path) -> dict[str, Any]:
    """The values given to `save`. Raises CheckpointUnusable."""
    if not mcore.dist_checkpointing.check_is_distributed_checkpoint(str(directory)):
        raise CheckpointUnusable(f"{directory} holds no complete checkpoint; remove it to start from an older one")
    common: dict[str, Any] = mcore.dist_checkpointing.load_common_state_dict(str(directory))["common"]
    return common


def _sharded(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    weights = model.sharded_state_dict()
    # The optimizer marks shards by the model's entries, so both come from one call.
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=RESHARDABLE),
    }
