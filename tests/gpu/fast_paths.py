"""Steps of one policy with each fast path on and off, in one process: `python fast_paths.py [NAME ...]`.

Prints a line of JSON for each variant: seconds of each step, tokens/s, MFU, peak memory, loss and gradient norm, which
must agree. `checks` compares kernels with definitions and asks CUDA whether passes wait for the device. It needs the
source tree and tests/fakes on PYTHONPATH. SHAPE=small runs on CPU; LENGTH and ROWS change the batch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from batches import synthetic_rows
from measure import OBJECTIVE, QWEN3_06B, SMALL

from turnlog.trainer import mcore
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.models import fused, output
from turnlog.trainer.models.attention import PackedRows, SdpaAttention, flash_rows, varlen_kernel
from turnlog.trainer.models.output import logprobs_and_entropy
from turnlog.trainer.network import model_config
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.warm_start import random_weights

CUDA = torch.cuda.is_available()
SHAPE = SMALL if os.environ.get("SHAPE") == "small" or not CUDA else QWEN3_06B
LENGTH, ROWS = (int(os.environ.get(name, default)) for name, default in (("LENGTH", 8192), ("ROWS", 4)))
PEAK_TFLOPS = float(os.environ.get("BENCH_PEAK_TFLOPS", "989"))
OFF = {"fused": False, "compiled": "off"}
VARIANTS: dict[str, dict[str, Any]] = {
    "off": OFF,
    "logprobs": {"fused": False, "compiled": "logprobs"},
    "swiglu": {"compiled": "logprobs,swiglu"},
    "all": {},
    "no-entropy": {"entropy": False},
    "packed": {"packing": "on"},
    "packed-off": {"packing": "on", **OFF},
}
COMPILED = [one for module in (fused, output) for one in vars(module).values() if isinstance(one, fused.Compiled)]
DTYPE = "bfloat16" if CUDA else "float32"


def run(name: str, options: dict[str, Any], steps: int = 4) -> None:
    """Print the figures of a variant."""
    batch = synthetic_rows(1, rows=ROWS, lengths=np.full(ROWS, LENGTH, "<i4"), vocabulary=SHAPE.vocabulary)
    weights = random_weights(SHAPE, 1, device=mcore.DEVICE, dtype=getattr(torch, DTYPE))
    learner = Learner(SHAPE, weights, LearnerOptions(**{"dtype": DTYPE, "microbatch_tokens": LENGTH, **options}))
    took, found = list[float](), None
    for step in range(steps):
        if CUDA and step == 1:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        found = learner.step(batch, OBJECTIVE, 1e-5)
        took.append(time.perf_counter() - began)
    assert found is not None
    flops = 3 * row_flops(SHAPE, LENGTH) * ROWS / min(took)
    line = {
        "variant": name, "seconds": [round(one, 3) for one in took], "tokens_per_s": round(ROWS * LENGTH / min(took)),
        "mfu": round(flops / 1e12 / PEAK_TFLOPS, 4), "loss": found.loss, "grad_norm": found.grad_norm,
        "entropy": found.entropy, "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if CUDA else None,
        "failed": [one.function.__name__ for one in COMPILED if one.failed],
    }  # fmt: skip
    print(json.dumps(line), flush=True)
    if name == os.environ.get("PROFILE") and CUDA:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            learner.step(batch, OBJECTIVE, 1e-5)
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=90), flush=True)
    release(learner)
    del learner
    if CUDA:
        torch.cuda.empty_cache()


def release(learner: Learner) -> None:
    """Free the policy before the process ends."""
    mcore.TRAINED.discard(learner.policy)
    learner.policy.release()


def check(name: str, function: Callable[[], Any]) -> None:
    """Print what a check found, or its error."""
    try:
        print(json.dumps({"check": name, "found": function()}), flush=True)
    except Exception:
        print(json.dumps({"check": name, "error": traceback.format_exc()[-1500:]}), flush=True)


def output_layer() -> dict[str, float]:
    """Largest differences of the compiled output layer in the device's dtype from float32 by definition."""
    columns = 4099
    hidden, weight = (torch.randn(size, 64, device=mcore.DEVICE).div(4) for size in (700, columns))
    targets = torch.randint(0, columns - 3, (700,), device=mcore.DEVICE)
    temperature = torch.rand(700, device=mcore.DEVICE) + 0.5
    low = [one.to(getattr(torch, DTYPE)).requires_grad_() for one in (hidden, weight)]
    high = [one.detach().float().requires_grad_() for one in low]
    found = logprobs_and_entropy(
        *low, targets, temperature, vocabulary=columns - 3, chunk_bytes=4 * columns * 100, compiled=CUDA
    )
    logits = (high[0] @ high[1].T)[:, : columns - 3] / temperature[:, None]
    every = logits.log_softmax(-1)
    wanted = every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    gradients = [torch.autograd.grad(a.sum() + 0.3 * b.sum(), of) for (a, b), of in ((found, low), (wanted, high))]
    pairs = zip((*found, *gradients[0]), (*wanted, *gradients[1]), strict=True)
    names = ("logprobs", "entropy", "to_hidden", "to_weight")
    return {
        name: float((one.float() - other).detach().abs().max() / other.detach().abs().max())
        for name, (one, other) in zip(names, pairs, strict=True)
    }


def packed_attention() -> dict[str, Any]:
    """Largest differences of one call for packed rows from a call for each, in values and gradients."""
    torch.manual_seed(0)
    edges, config = (0, 300, 301, 1000), model_config(dataclasses.replace(SHAPE, head_dim=64), LearnerOptions())
    sizes = (SHAPE.heads, SHAPE.groups, SHAPE.groups)
    tensors = [torch.randn(1000, n, 64, device=mcore.DEVICE, dtype=torch.bfloat16, requires_grad=True) for n in sizes]
    packing, found = PackedRows(edges, mcore.DEVICE), {"kernel": str(varlen_kernel("cuda", torch.bfloat16, 64))}
    for window in (None, (99, 0)):
        results = []
        for kernel in (None, flash_rows, varlen_kernel("cuda", torch.bfloat16, 64)):
            own = SdpaAttention(dataclasses.replace(config, window_size=window), 1, None, "self")
            own.varlen_kernel = lambda *_, kernel=kernel: kernel  # type: ignore[method-assign, misc]
            out = own(*tensors, None, packed_seq_params=packing)
            results.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
        for at, which in ((1, "flash_rows"), (2, "chosen")):
            found[f"{which} {window}"] = str(
                [float((a - b).float().abs().max()) for a, b in zip(results[0], results[at], strict=True)]
            )
    return found


def waits(packing: str) -> str:
    """Run a step during whose passes CUDA raises where the host would wait."""
    batch = synthetic_rows(1, rows=6, vocabulary=SMALL.vocabulary)
    learner = Learner(SMALL, random_weights(SMALL, 1), LearnerOptions(dtype=DTYPE, packing=packing))
    learner.step(batch, OBJECTIVE, 0.0)
    config = learner.policy.model.config
    finish = config.finalize_model_grads_func

    def finalize(*arguments: Any, **named: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        finish(*arguments, **named)

    config.finalize_model_grads_func = finalize
    learner.policy.model.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error"))
    try:
        learner.step(batch, OBJECTIVE, 0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        release(learner)
    return "no wait"


def main() -> int:
    """Run what was named, by default everything."""
    names = sys.argv[1:] or ["checks", *VARIANTS]
    with process_group():
        if "checks" in names:
            check("output layer", output_layer)
            if CUDA:
                check("packed attention", packed_attention)
                for packing in ("off", "on"):
                    check(f"waits, packing {packing}", lambda packing=packing: waits(packing))  # type: ignore[misc]
        for name in names:
            if name in VARIANTS:
                run(name, VARIANTS[name])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
