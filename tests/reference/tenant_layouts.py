"""Comparison of tenants on several ranks with the same tenants on one, for layouts as in layouts.py.

torchrun --nproc-per-node 2 -m tests.reference.tenant_layouts tp2 tp2-sp pp2 dp cp2
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from tests.fakes.datums import ADAM, synthetic_datums
from tests.reference.layouts import POLICY, _meeting_place, layout, weights_of
from turnlog.infra.tensors import adapters
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import layout_of, process_group
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.tenants import TenantLearner, UnknownLoss

STEPS = 3
SAME = {"eps": 1e-3}
"""See test_tenants.py: with a smaller eps, rounding decides the sign of a step where a gradient is near 0."""


def steps(learner: TenantLearner, first: int, count: int) -> list[tuple[float, float, list[float]]]:
    """Return (loss, gradient norm, log-probs) of steps of both tenants in turns."""
    found = []
    for step in range(first, first + count):
        for tenant, loss_fn, shifted in (("a", "ppo", True), ("b", "cross_entropy", False)):
            datums = synthetic_datums(step, count=7, shifted=shifted)
            result = learner.forward_backward(tenant, datums, loss_fn, {}, backward=True)
            norm = learner.optim_step(tenant, **(ADAM | SAME))["grad_norm"]
            found.append((result.metrics["loss:sum"], norm, np.concatenate(result.logprobs).tolist()))
    return found


def created(shape: ModelShape, options: LearnerOptions) -> TenantLearner:
    """Return a learner with two tenants."""
    learner = TenantLearner(shape, weights_of(shape, POLICY), options, max_rank=8)
    learner.create("a", rank=8, seed=1, unembedding=True)
    learner.create("b", rank=3, seed=2, unembedding=True, mlp=not shape.mixture)
    return learner


def run(shape: ModelShape, options: LearnerOptions, folder: Path) -> dict[str, Any]:
    """Take steps, resume from a snapshot in between, and return what came of them."""
    learner = created(shape, options)
    found = steps(learner, 0, STEPS)
    learner.snapshot(folder / "snapshots", {"step": STEPS})
    wanted = steps(learner, STEPS, 1)
    other, refused = created(shape, options), False
    try:
        other.forward_backward("a", synthetic_datums(1), "unknown", {}, backward=True)
    except UnknownLoss:
        refused = True
    about = other.restore(folder / "snapshots")
    resumed = about == {"step": STEPS} and steps(other, STEPS, 1) == wanted
    learner.export_adapter("a", folder / "a")
    learner.export_adapter("b", folder / "b")
    return {"steps": found + wanted, "resumed": resumed, "refused": refused}


def factors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{tenant} {name}": factor
        for tenant in "ab"
        for name, factor in load_file(folder / tenant / f"{adapters.STEM}.safetensors").items()
    }


def main(names: list[str]) -> None:
    """Print a line for each layout."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    met = _meeting_place()
    for name in names:
        shape, options = layout(name)
        root = Path(tempfile.gettempdir()) / f"turnlog-tenants-{os.environ['MASTER_PORT']}-{name}"
        alone = None
        if rank == 0:
            single = dataclasses.replace(
                options, tensor_parallel=1, pipeline_parallel=1, context_parallel=1, expert_parallel=1,
                sequence_parallel=False,
            )  # fmt: skip
            with process_group():
                alone = run(shape, single, root / "one")
        with process_group(rank=rank, world_size=world_size, store=PrefixStore(name, met), **layout_of(options)):
            found = run(shape, options, root / "all")
            dist.barrier()
        if rank == 0 and alone is not None:
            ours, theirs = factors(root / "all"), factors(root / "one")
            pairs = list(zip(found["steps"], alone["steps"], strict=True))
            print(json.dumps({
                "layout": name,
                "resumed": found["resumed"] and alone["resumed"],
                "refused": found["refused"],
                "loss": max(abs(one[0] - other[0]) / len(one[2]) for one, other in pairs),
                "norm": max(abs(one[1] / other[1] - 1) for one, other in pairs),
                "logprobs": max(float(np.abs(np.subtract(one[2], other[2])).max()) for one, other in pairs),
                "names": ours.keys() == theirs.keys(),
                "factors": max(float((factor - theirs[name]).abs().max()) for name, factor in ours.items()),
            }))  # fmt: skip
            shutil.rmtree(root)


if __name__ == "__main__":
    main(sys.argv[1:])
