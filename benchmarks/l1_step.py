"""L1: an optimizer step of the Megatron learner against a loop of plain transformers and torch, on the same rows.

The plain loop is what one would write by hand: rows sorted by length and padded into microbatches of as many tokens,
SDPA attention, the clipped ratio over the log softmax, clip_grad_norm_, fused AdamW. It computes no figures; the
learner's entropy, gaps and ratios are in its time. The value is the fastest of interleaved steps, in milliseconds.
`flops` is 3 x the forward pass of the rows (shape.row_flops), a second; `mfu`, where BENCH_PEAK_TFLOPS says what the
device could do, their share of that. It does not show several ranks, nor bfloat16.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import numpy as np
import torch
from row import say, size, told
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fakes.batches import synthetic_rows
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer import mcore
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.family import config_json
from turnlog.trainer.families.shape import TINY, ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.microbatches import PaddedRows, microbatches, pad_rows
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

GOAL_SHARE = 1 / 1.15
SMALL = dataclasses.replace(
    TINY, layers=4, hidden=256, heads=8, groups=4, head_dim=32, ffn=768, vocabulary=8192, positions=2048
)
SHAPE = size(SMALL, smallest=TINY)
ROWS, MEAN, STEPS = size((48, 200, 5), smallest=(8, 24, 1))
LIMIT = 4096
RATE = 1e-4
PEAK = float(os.environ.get("BENCH_PEAK_TFLOPS", "nan")) * 1e12


class Plain:
    """The loop by hand."""

    def __init__(self, shape: ModelShape, weights: dict[str, torch.Tensor]) -> None:
        values = config_json(shape, eos_token_id=0, pad_token_id=0)
        config = AutoConfig.for_model(values.pop("model_type"), **values)
        of_config: Any = AutoModelForCausalLM.from_config
        self._model: Any = of_config(config, attn_implementation="sdpa").float().to(mcore.DEVICE)
        self._model.load_state_dict(weights)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, batches: list[PaddedRows]) -> tuple[float, float]:
        """Loss and gradient norm."""
        self._optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            logits = self._model(batch.inputs, use_cache=False).logits / batch.temperature[:, None, None]
            logprobs = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
            ratio = torch.where(batch.trained, logprobs - batch.recorded, 0.0).exp()
            surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
            loss = -(surrogate * batch.weights).sum()
            loss.backward()
            total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0))
        for group in self._optimizer.param_groups:
            group["lr"] = RATE
        self._optimizer.step()
        return total, norm


def drawn() -> BatchRows:
    """Rows of log-normal lengths."""
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(np.log(MEAN) - 0.18, 0.6, ROWS), 3, SHAPE.positions - 1).astype("<i4")
    return synthetic_rows(1, rows=ROWS, lengths=lengths, vocabulary=SHAPE.vocabulary)


def main() -> int:
    """Print one JSON line."""
    rows, weights = drawn(), random_weights(SHAPE, 1)
    (plan,) = microbatches(rows.lengths.tolist(), 1, LIMIT)
    ours, theirs, differences = [], [], []
    with process_group():
        learner = Learner(SHAPE, weights, LearnerOptions(threads=2, microbatch_tokens=LIMIT))
        plain = Plain(SHAPE, dict(weights))
        for _ in range(STEPS + 1):
            start = time.perf_counter()
            found = learner.step(rows, PolicyGradient(0.2, 0.2), RATE)
            between = time.perf_counter()
            loss, norm = plain.step([pad_rows(rows, one, mcore.DEVICE) for one in plan])
            ours.append(between - start)
            theirs.append(time.perf_counter() - between)
            differences += [abs(found.loss - loss), abs(found.grad_norm / norm - 1)]
            say(f"{ours[-1] * 1000:.0f} ms, by hand {theirs[-1] * 1000:.0f} ms")
    fastest, by_hand = min(ours[1:]), min(theirs[1:])
    rate = 3 * sum(row_flops(SHAPE, length) for length in rows.lengths.tolist()) / fastest
    detail = {
        "device": str(mcore.DEVICE), "tokens": int(rows.lengths.sum()), "floor_is": "transformers and torch by hand",
        "tokens_per_s": round(float(rows.lengths.sum()) / fastest), "flops": rate,
        "mfu": None if np.isnan(PEAK) else round(rate / PEAK, 4), "difference": max(differences),
    }  # fmt: skip
    return told(
        id="L1", value=fastest * 1000, unit="ms", goal=None, met=max(differences) <= 1e-4, detail=detail,
        floor=by_hand * 1000, goal_share=GOAL_SHARE,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
