"""Steps of the trainer on whatever device torch sees first, in a process of their own: `python steps.py WHAT`.

Prints one line of JSON. It needs the source tree and tests/fakes on PYTHONPATH and what the trainer imports, but no
installed turnlog.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from batches import synthetic_rows

from turnlog.trainer import mcore
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.shape import TINY, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models.attention import varlen_kernel
from turnlog.trainer.network import DTYPES
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights
from turnlog.trainer.weights import expected_shapes

SMALL = dataclasses.replace(TINY, layers=4, hidden=256, heads=8, groups=4, head_dim=32, ffn=768, vocabulary=8192)
QWEN3_06B = dataclasses.replace(
    TINY, kind="qwen3", layers=28, hidden=1024, heads=16, groups=8, head_dim=128, ffn=3072, vocabulary=151_936,
    positions=40_960, tied=True,
)  # fmt: skip
QWEN25_7B = dataclasses.replace(
    TINY, kind="qwen2", layers=28, hidden=3584, heads=28, groups=4, head_dim=128, ffn=18_944, vocabulary=152_064,
    positions=32_768, tied=False,
)  # fmt: skip
OBJECTIVE = PolicyGradient(0.2, 0.2)


def alike(dtype: str, packing: str = "off") -> dict[str, Any]:
    """Two steps of a small policy."""
    rows = synthetic_rows(1, rows=24, lengths=np.arange(20, 260, 10, dtype="<i4"), vocabulary=SMALL.vocabulary)
    learner = Learner(SMALL, random_weights(SMALL, 1), LearnerOptions(dtype=dtype, packing=packing))
    found = [learner.step(rows, OBJECTIVE, 1e-4) for _ in range(2)]
    after = learner.export()
    return {
        "device": str(mcore.DEVICE), "varlen": bool(varlen_kernel(mcore.DEVICE.type, DTYPES[dtype], SMALL.head_dim)),
        "losses": [one.loss for one in found], "norms": [one.grad_norm for one in found],
        "weights": {name: float(tensor.double().abs().sum()) for name, tensor in sorted(after.items())},
    }  # fmt: skip


def fast(shape: ModelShape, rows: int, length: int, options: LearnerOptions, steps: int) -> dict[str, Any]:
    """Tokens and FLOPs a second of the fastest step, peak memory, and bytes a second of the export."""
    lengths = np.full(rows, length, "<i4")
    batch = synthetic_rows(1, rows=rows, lengths=lengths, vocabulary=shape.vocabulary)
    weights = random_weights(shape, 1, device=mcore.DEVICE, dtype=torch.bfloat16)
    learner = Learner(shape, weights, options)
    torch.cuda.reset_peak_memory_stats()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        found = learner.step(batch, OBJECTIVE, 1e-5)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated()
    began = time.perf_counter()
    exported = sum(tensor.nbytes for tensor in learner.export().values())
    export_s = time.perf_counter() - began
    flops = 3 * row_flops(shape, length) * rows / min(took)
    return {
        "device": torch.cuda.get_device_name(), "parameters": sum(map(np.prod, expected_shapes(shape).values())).item(),
        "loss": found.loss, "grad_norm": found.grad_norm, "seconds": [round(one, 3) for one in took],
        "tokens_per_s": round(rows * length / min(took)), "tflops": round(flops / 1e12, 1),
        "peak_gib": round(peak / 2**30, 2), "export_bytes": exported, "export_bytes_per_s": round(exported / export_s),
    }  # fmt: skip


def main() -> int:
    """Print what was asked for."""
    what = sys.argv[1]
    with process_group():
        if what in ("float32", "bfloat16"):
            told = alike(what)
        elif what == "packed":
            told = alike("bfloat16", "on")
        elif what == "qwen3-0.6b":
            told = fast(QWEN3_06B, 32, 1024, LearnerOptions(dtype="bfloat16", microbatch_tokens=8192), 4)
        else:
            lora = LearnerOptions(dtype="bfloat16", lora_rank=16, recompute="full", microbatch_tokens=4096)
            told = fast(QWEN25_7B, 8, 1024, lora, 2)
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
