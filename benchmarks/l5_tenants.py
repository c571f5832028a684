"""L5: forward_backward and optim_step of tenants in turns, against the LoRA step of a run's learner on the same rows.

Two tenants take turns, so that every pass copies an adapter into the model. The learner of a run does the same work
for one adapter, without copies: the same rows, every token trained, and no entropy. Steps are interleaved; the value
is the tokens per second of the fastest. Beside it: one tenant alone, without copies, and core-milliseconds per thousand
tokens of each. A tenant's result has the log-prob of every position, and its gradients are added up outside of the
model. It does not show several ranks, bfloat16 or a GPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
from l1_step import LIMIT, RATE, SHAPE, drawn
from row import say, size, told

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.tenants import Datum, TenantLearner
from turnlog.trainer.warm_start import random_weights

GOAL_SHARE = 0.85
RANK, ROWS, STEPS = 16, size(12, smallest=8), size(3, smallest=1)
OPTIONS = LearnerOptions(threads=2, microbatch_tokens=LIMIT, entropy=False, lora_rank=RANK, clip_grad=0.0)


def all_trained(rows: BatchRows) -> BatchRows:
    """The rows with every token trained that another one precedes, at temperature 1."""
    trained = np.ones_like(rows.trained)
    trained[rows.starts] = 0
    advantages = np.random.default_rng(1).normal(0, 1, len(trained)).astype("<f4") * trained
    ones = np.ones_like(rows.temperature)
    return dataclasses.replace(rows, trained=trained, advantages=advantages, temperature=ones)


def as_datums(rows: BatchRows) -> list[Datum]:
    """The same rows, with the weights of their tokens in the advantages."""
    found = []
    for start, length, divisor in zip(rows.starts, rows.lengths, rows.weight_divisor, strict=True):
        before, after = slice(start, start + length - 1), slice(start + 1, start + length)
        found.append(
            Datum(
                tokens=rows.token_ids[before],
                targets=rows.token_ids[after],
                logprobs=rows.logprobs[after],
                advantages=rows.advantages[after] / np.float32(divisor),
            )
        )
    return found


def tenant_step(learner: TenantLearner, tenant: str, datums: list[Datum]) -> float:
    """Loss of a step."""
    found = learner.forward_backward(tenant, datums, "ppo", {}, backward=True)
    learner.optim_step(
        tenant, learning_rate=RATE, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0
    )
    return found.metrics["loss:sum"]


def main() -> int:
    """Print one JSON line."""
    drawn_rows = drawn()
    rows, weights = all_trained(drawn_rows.among(np.arange(len(drawn_rows)) < ROWS)), random_weights(SHAPE, 1)
    datums, tokens = as_datums(rows), int(rows.lengths.sum()) - len(rows)
    with process_group():
        run = Learner(SHAPE, weights, OPTIONS)
        alone, turns = (TenantLearner(SHAPE, weights, OPTIONS, max_rank=RANK) for _ in range(2))
        alone.create("a", rank=RANK, seed=OPTIONS.seed)
        for tenant in "ab":
            turns.create(tenant, rank=RANK, seed=OPTIONS.seed)
        work: dict[str, Callable[[int], float]] = {
            "run": lambda _: run.step(rows, PolicyGradient(0.2, 0.2), RATE).loss,
            "alone": lambda _: tenant_step(alone, "a", datums),
            "turns": lambda step: tenant_step(turns, "ab"[step % 2], datums),
        }
        seconds: dict[str, list[float]] = {name: [] for name in work}
        cores: dict[str, list[float]] = {name: [] for name in work}
        losses: dict[str, list[float]] = {name: [] for name in work}
        for step in range(2 * STEPS + 2):
            for name, one in work.items():
                start, used = time.perf_counter(), time.process_time()
                losses[name].append(one(step))
                seconds[name].append(time.perf_counter() - start)
                cores[name].append(time.process_time() - used)
            say(", ".join(f"{name} {1000 * each[-1]:.0f} ms" for name, each in seconds.items()))
    difference = max(
        abs(one - other)
        for ours, theirs in ((losses["alone"], losses["run"]), (losses["turns"][::2], losses["run"]))
        for one, other in zip(ours, theirs[: len(ours)], strict=True)
    )
    rate = {name: tokens / min(each[2:]) for name, each in seconds.items()}
    detail = {
        "tokens": tokens, "rank": RANK, "floor_is": "the LoRA step of a run's learner on the same rows",
        "one_tenant_tokens_per_s": round(rate["alone"]), "loss_difference": difference,
        "core_ms_per_1000_tokens": {name: round(1e6 * min(each[2:]) / tokens, 1) for name, each in cores.items()},
    }  # fmt: skip
    return told(
        id="L5", value=rate["turns"], unit="tokens/s", goal=None, met=difference <= 1e-4, detail=detail,
        floor=rate["run"], goal_share=GOAL_SHARE, rate=True,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
