"""Steps of the trainer on whatever device torch sees first, in a process of their own: `python measure.py WHAT`.

Prints a line of JSON per result. It needs the source tree and tests/fakes on PYTHONPATH and what the trainer imports,
but no installed turnlog. `--profile` adds the kernels on which one step of each case spends its time.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from batches import answers_to_a_prompt, synthetic_rows

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.shape import TINY, Mixture, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.memory import predicted_peak
from turnlog.trainer.models.attention import varlen_kernel
from turnlog.trainer.network import DTYPES
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights
from turnlog.trainer.weights import expected_shapes

SMALL = dataclasses.replace(TINY, layers=4, hidden=256, heads=8, groups=4, head_dim=32, ffn=768, vocabulary=8192)
SMALL_MIXTURE = dataclasses.replace(
    SMALL, kind="qwen3_moe", mixture=Mixture(experts=16, experts_per_token=4, expert_ffn=128)
)
QWEN3 = dataclasses.replace(TINY, heads=16, groups=8, head_dim=128, vocabulary=151_936, positions=40_960)
QWEN3_06B = dataclasses.replace(QWEN3, layers=28, hidden=1024, ffn=3072, tied=True)
QWEN3_4B = dataclasses.replace(QWEN3, layers=36, hidden=2560, heads=32, ffn=9728, tied=True)
QWEN3_8B = dataclasses.replace(QWEN3, layers=36, hidden=4096, heads=32, ffn=12_288)
QWEN3_30B = dataclasses.replace(
    QWEN3, kind="qwen3_moe", layers=4, hidden=2048, heads=32, groups=4, ffn=6144,
    mixture=Mixture(experts=128, experts_per_token=8, expert_ffn=768),
)  # fmt: skip
"""A twelfth of Qwen3-30B-A3B's layers: one device holds it and its optimizer."""
OBJECTIVE = PolicyGradient(0.2, 0.2)
MICROBATCH = 16_384
"""Tokens of a microbatch. Longer rows go alone."""
TIMED_S = 8.0
"""Seconds of repeated steps after which a case has been measured; at most three are."""
RECOMPUTE: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "selective", "recompute_modules": ("mlp",)},
    {"recompute": "full"},
)
"""What is computed again for the gradient: the first that fits into ROOM of the device's memory."""
ROOM = 0.9


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one step: all of `length` tokens, or if `ragged` of a quarter of it up to all of it."""

    length: int
    ragged: bool = False
    packing: str = "off"
    tokens: int = 32_768
    """Tokens of a step, at least."""

    def rows(self, vocabulary: int) -> BatchRows:
        """Return random rows."""
        draw = np.random.default_rng(self.length)
        found: list[int] = []
        while sum(found) < self.tokens:
            found.append(int(draw.integers(self.length // 4, self.length + 1)) if self.ragged else self.length)
        return synthetic_rows(1, rows=len(found), lengths=np.array(found, "<i4"), vocabulary=vocabulary)


EVEN = tuple(map(Case, (1024, 8192, 16_384, 65_536)))
RAGGED = tuple(Case(length, True, packing) for packing in ("off", "on") for length in (1024, 8192))
BFLOAT16 = LearnerOptions(dtype="bfloat16", microbatch_tokens=MICROBATCH)
MODELS: dict[str, tuple[ModelShape, LearnerOptions, Sequence[Case]]] = {
    "qwen3-0.6b": (QWEN3_06B, BFLOAT16, EVEN + RAGGED),
    "qwen3-4b": (QWEN3_4B, BFLOAT16, EVEN[1:]),
    "qwen3-8b-lora": (QWEN3_8B, dataclasses.replace(BFLOAT16, lora_rank=16), EVEN[1:]),
    "qwen3-30b-a3b-4-layers": (QWEN3_30B, BFLOAT16, (*EVEN[:3], RAGGED[3])),
    "small": (
        SMALL,
        LearnerOptions(),
        tuple(Case(128, ragged, packing, 512) for ragged, packing in ((False, "off"), (True, "off"), (True, "on"))),
    ),
}
"""What is measured: shape, options and rows. `small` is for machines without a device."""


def alike(shape: ModelShape, dtype: str, packing: str = "off") -> dict[str, Any]:
    """Take two steps of a small policy."""
    rows = synthetic_rows(1, rows=24, lengths=np.arange(20, 260, 10, dtype="<i4"), vocabulary=shape.vocabulary)
    learner = Learner(shape, random_weights(shape, 1), LearnerOptions(dtype=dtype, packing=packing))
    found = [learner.step(rows, OBJECTIVE, 1e-4) for _ in range(2)]
    after = learner.export()
    return {
        "device": str(mcore.DEVICE), "varlen": bool(varlen_kernel(mcore.DEVICE.type, DTYPES[dtype], shape.head_dim)),
        "losses": [one.loss for one in found], "norms": [one.grad_norm for one in found],
        "weights": {name: float(tensor.double().abs().sum()) for name, tensor in sorted(after.items())},
    }  # fmt: skip


def repeat(shape: ModelShape, options: LearnerOptions) -> dict[str, Any]:
    """Take the same three steps twice and say whether every loss and weight is the same."""
    rows = synthetic_rows(1, rows=32, lengths=np.arange(64, 576, 16, dtype="<i4"), vocabulary=shape.vocabulary)
    found: list[tuple[list[float], dict[str, torch.Tensor]]] = []
    for _ in range(2):
        learner = Learner(shape, random_weights(shape, 1), options)
        losses = [learner.step(rows, OBJECTIVE, 1e-4).loss for _ in range(3)]
        found.append((losses, dict(learner.export())))
    (first, before), (second, after) = found
    return {"same": first == second and all(torch.equal(before[name], after[name]) for name in before)}


def trees(shape: ModelShape, options: LearnerOptions, prompt: int, answers: int, tokens: int) -> dict[str, Any]:
    """Take steps on the answers to one prompt, with the prompt computed once and for each answer."""
    rows = answers_to_a_prompt(prompt, answers, tokens, shape.vocabulary)
    found: dict[str, Any] = {"rows": answers, "tokens": int(rows.lengths.sum()), "dtype": options.dtype}
    for sharing in ("off", "auto"):
        own = dataclasses.replace(options, prefix_sharing=sharing, packing="on")
        with process_group():
            learner = _learner(shape, own)
            given = list[int]()
            learner.policy.model.register_forward_pre_hook(lambda _, inputs, into=given: into.append(inputs[0].numel()))
            results, took = [], list[float]()
            for _ in range(3):
                began = time.perf_counter()
                results.append(learner.step(rows, OBJECTIVE, 1e-6))
                took.append(time.perf_counter() - began)
            found[sharing] = {
                "computed": sum(given) // 3, "seconds": round(min(took[1:]), 4), "peak_gb": _peak_gb(),
                "losses": [one.loss for one in results], "norms": [one.grad_norm for one in results],
            }  # fmt: skip
            del learner
        gc.collect()
        torch.cuda.empty_cache()
    return found


def _peak_gb() -> float | None:
    """Return the peak of allocated memory since the last call."""
    if mcore.DEVICE.type != "cuda":
        return None
    found = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    torch.cuda.reset_peak_memory_stats()
    return found


def step_flops(shape: ModelShape, options: LearnerOptions, rows: BatchRows) -> int:
    """Return the FLOPs of a step: three forward passes, and without gradients of the weights one less of what is no
    attention. What recomputation adds does not count.
    """
    passes = sum(row_flops(shape, length) for length in rows.lengths.tolist())
    parameters = row_flops(shape, 1) * int(rows.lengths.sum())
    return 3 * passes - (parameters if options.lora_rank else 0)


def measure(shape: ModelShape, options: LearnerOptions, cases: Sequence[Case], *, profile: bool, until: float) -> None:
    """Print figures of each case: tokens and FLOPs a second of the fastest step, and peak memory."""
    about = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "torch": torch.__version__,
        "parameters": sum(map(np.prod, expected_shapes(shape).values())).item(),
    }  # fmt: skip
    for own, some in itertools.groupby(cases, lambda case: _fitting(shape, options, case)):
        with process_group():
            learner = _learner(shape, own)
            for case in some:
                line: dict[str, Any] = dataclasses.asdict(case) | {"recompute": own.recompute}
                if time.time() > until:
                    line["error"] = "not run: out of time"
                else:
                    try:
                        line |= about | _measure(learner, case.rows(shape.vocabulary), own, profile)
                    except torch.OutOfMemoryError as error:
                        line["error"] = str(error).splitlines()[0]
                print(json.dumps(line), flush=True)
            del learner
        gc.collect()
        torch.cuda.empty_cache()


def _fitting(shape: ModelShape, options: LearnerOptions, case: Case) -> LearnerOptions:
    """Return the options for a case, with as little computed again as the device's memory allows."""
    own = dataclasses.replace(options, packing=case.packing)
    if mcore.DEVICE.type != "cuda":
        return own
    room = ROOM * torch.cuda.get_device_properties(mcore.DEVICE).total_memory
    held = _largest_microbatch(options, case.length)
    choices = [dataclasses.replace(own, **one) for one in RECOMPUTE]
    return next((one for one in choices if predicted_peak(shape, one, held) < room), choices[-1])


def _largest_microbatch(options: LearnerOptions, longest: int) -> int:
    """Return the tokens of the largest microbatch of rows of one length."""
    return max(longest, options.microbatch_tokens // longest * longest)


def _learner(shape: ModelShape, options: LearnerOptions) -> Learner:
    """Return a learner with random weights, whose host copy is freed."""
    return Learner(shape, random_weights(shape, 1, device=mcore.DEVICE, dtype=DTYPES[options.dtype]), options)


def _measure(learner: Learner, rows: BatchRows, options: LearnerOptions, profile: bool) -> dict[str, Any]:
    on_device = mcore.DEVICE.type == "cuda"
    took: list[float] = []
    while len(took) < 2 or (len(took) < 4 and sum(took[1:]) < TIMED_S):  # the first one warms up
        if on_device and took:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        found = learner.step(rows, OBJECTIVE, 1e-6)
        if on_device:
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    if profile:
        _profile(learner, rows)
    tokens, best = int(rows.lengths.sum()), min(took[1:])
    held = _largest_microbatch(options, int(rows.lengths.max()))
    return {
        "rows": len(rows), "tokens": tokens, "seconds": [round(one, 3) for one in took],
        "tokens_per_s": round(tokens / best),
        "tflops": round(step_flops(learner.shape, options, rows) / best / 1e12, 3),
        "peak_gb": _peak_gb(), "predicted_gb": round(predicted_peak(learner.shape, options, held) / 1e9, 2),
        "loss": found.loss, "grad_norm": found.grad_norm,
    }  # fmt: skip


def _profile(learner: Learner, rows: BatchRows) -> None:
    """Print the kernels of a step that took longest to standard error."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if mcore.DEVICE.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        learner.step(rows, OBJECTIVE, 1e-6)
        if mcore.DEVICE.type == "cuda":
            torch.cuda.synchronize()
    order = "self_device_time_total" if mcore.DEVICE.type == "cuda" else "self_cpu_time_total"
    print(
        profiler.key_averages().table(sort_by=order, row_limit=32, max_name_column_width=90),
        file=sys.stderr,
        flush=True,
    )


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["alike", "deterministic", "trees", *MODELS])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", default="", help="indices of the cases, with commas between them")
    parser.add_argument("--until", type=float, default=float("inf"), help="time after which no case begins")
    asked = parser.parse_args()
    if asked.what == "alike":
        kinds = ("float32", "bfloat16") if mcore.DEVICE.type == "cuda" else ("float32",)
        for shape, dtype, packing in itertools.product((SMALL, SMALL_MIXTURE), kinds, ("off", "on")):
            with process_group():
                found = alike(shape, dtype, packing)
            print(json.dumps({"kind": shape.kind, "dtype": dtype, "packing": packing} | found), flush=True)
        return 0
    if asked.what == "deterministic":
        for shape, packing in itertools.product((SMALL, SMALL_MIXTURE), ("off", "on")):
            options = dataclasses.replace(BFLOAT16, deterministic=True, packing=packing)
            with process_group():
                told = repeat(shape, options)
            print(json.dumps({"kind": shape.kind, "packing": packing} | told), flush=True)
        return 0
    if asked.what == "trees":
        if mcore.DEVICE.type == "cuda":
            print(json.dumps(trees(SMALL, LearnerOptions(), 1000, 8, 100)), flush=True)
            print(json.dumps(trees(QWEN3_06B, BFLOAT16, 8192, 16, 512)), flush=True)
        else:
            print(json.dumps(trees(SMALL, LearnerOptions(), 64, 4, 16)), flush=True)
        return 0
    shape, options, cases = MODELS[asked.what]
    chosen = [cases[int(index)] for index in asked.only.split(",")] if asked.only else cases
    measure(shape, options, chosen, profile=asked.profile, until=asked.until)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
