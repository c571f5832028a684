"""Allocations of a training step, by torch's own dispatch, beside those that turnlog.trainer.memory predicts.

Every tensor that an operation returns is followed until its storage is freed, so that the peak is exact and the same on
every machine. On two ranks, from the repository's root:

    torchrun --nproc-per-node 2 -m tests.reference.memory_record tp2 tp2-sp ep2 tp2-sp-ep2 pp2 dp
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.batches import synthetic_rows
from turnlog.trainer.families.shape import TINY, Mixture, ModelShape
from turnlog.trainer.launch import layout_of, process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.memory import RankMemory, rank_memory
from turnlog.trainer.network import TrainedNetwork
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

DENSE = dataclasses.replace(
    TINY, layers=2, hidden=128, heads=8, groups=4, head_dim=32, ffn=384, vocabulary=2048, positions=4096
)
MIXTURE = dataclasses.replace(
    DENSE, kind="qwen3_moe", mixture=Mixture(experts=8, experts_per_token=2, expert_ffn=256)
)  # fmt: skip
"""Small models whose activations outweigh what a step has besides."""
OBJECTIVE = PolicyGradient(0.2, 0.2)


class AllocationRecord(TorchDispatchMode):
    """Bytes of the storages that exist."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._held = set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        pytree.tree_map_only(torch.Tensor, self._see, found)
        return found

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._held or not size:
            return
        self._held.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._held.discard(key)
        self.now -= size


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one rank."""

    resident: int
    """Weights, gradients and the optimizer's state, without what Megatron pads its buffers with and counts steps by."""
    step: int
    """Bytes that a step takes beside them at its peak."""
    predicted: RankMemory
    """Prediction for the rank that takes the most."""


def measure(shape: ModelShape, options: LearnerOptions, tokens: int, *, rows: int = 1, world_size: int = 1) -> Measured:
    """Measure a step on rows of `tokens` + 1 tokens, one of them in a microbatch."""
    batch = synthetic_rows(1, rows=rows, lengths=np.full(rows, tokens + 1, "<i4"), vocabulary=shape.vocabulary)
    record = AllocationRecord()
    with record:
        learner = Learner(shape, random_weights(shape, 1), options)
        gc.collect()
        record.peak = resident = record.now
        learner.step(batch, OBJECTIVE, 1e-3)
    scored = int(batch.trained_per_row().max())
    predicted = rank_memory(shape, options, tokens=tokens, world_size=world_size, scored=scored, device="cpu")
    return Measured(resident - _unused(learner.policy), record.peak - resident, predicted)


def _unused(network: TrainedNetwork) -> int:
    """Return the bytes of padding in Megatron's buffers, and of what it keeps that has no gradient."""
    found: int = sum(buffer.nbytes for buffer in network.model.buffers())
    found += network.model.rotary_pos_emb.inv_freq.nbytes
    for buffer in network._wrapped.buffers + network._wrapped.expert_parallel_buffers:
        for data in (buffer.param_data, buffer.grad_data):
            found += (data.numel() - sum(parameter.numel() for parameter in buffer.params)) * data.element_size()
    return found


SHARES = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "cp": "context_parallel", "ep": "expert_parallel"}


def main(names: Sequence[str]) -> None:
    """Print a JSON object for each layout: {"layout", "resident": [of each rank], "step": ..., "predicted": ...}."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    met = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    for name in names:
        words = name.split("-")
        shares: dict[str, Any] = {SHARES[word[:2]]: int(word[2:]) for word in words if word[:2] in SHARES}
        options = LearnerOptions(
            **shares, sequence_parallel="sp" in words, recompute="full" if "again" in words else "none",
            packing="off", microbatch_tokens=1, lora_rank=8 if "lora" in words else 0,
        )  # fmt: skip
        shape = MIXTURE if options.expert_parallel > 1 else DENSE
        with process_group(rank=rank, world_size=world_size, store=PrefixStore(name, met), **layout_of(options)):
            data = world_size // (options.tensor_parallel * options.pipeline_parallel)
            found = measure(shape, options, 1024, rows=2 * data if options.pipeline_parallel > 1 else data,
                            world_size=world_size)  # fmt: skip
            ranks: list[Any] = [None] * world_size
            dist.all_gather_object(ranks, (found.resident, found.step))
        if rank == 0:
            resident, step = (list(each) for each in zip(*ranks, strict=True))
            most = found.predicted
            said = {"layout": name, "resident": resident, "step": step}
            predicted = {"resident": most.resident, "step": most.logits + most.activations}
            print(json.dumps({**said, "predicted": predicted}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
