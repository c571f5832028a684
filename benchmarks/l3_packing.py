"""L3: rows packed behind one another against rows padded to their microbatch's longest, on long rows and on short ones.

The value is the share of real ones among the positions that the model is given, of packed rows whose lengths have a
mean above 500. Tokens a second of forward and backward stand beside it for both, and which of them the trainer takes by
itself. It does not show CUDA, nor several ranks, whose shares of a row are equally long.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from row import say, size, told

from tests.fakes.batches import synthetic_rows
from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.microbatches import microbatches, worth_packing
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.warm_start import random_weights

GOAL = 0.95
SHAPE = dataclasses.replace(TINY, positions=8192)
LIMIT = 4096
RANKS = 4
ROWS, STEPS = size((48, 3), smallest=(4, 1))
MEANS = {"long": 600, "middle": 200, "short": 24}


def drawn(mean: int, seed: int = 0, rows: int = ROWS) -> BatchRows:
    """Rows whose lengths are log-normal."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(mean) - 0.32, 0.8, rows), 3, 3500).astype("<i4")
    return synthetic_rows(seed, rows=rows, lengths=lengths)


def stepped(rows: BatchRows, options: LearnerOptions) -> tuple[float, float]:
    """(tokens a second of the fastest step, real positions over those that the model was given)."""
    learner = Learner(SHAPE, random_weights(SHAPE, 1), options)
    given, took = [], []
    learner.policy.model.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0].numel()))
    for _ in range(STEPS):
        start = time.perf_counter()
        learner.step(rows, PolicyGradient(0.2, 0.2), 1e-4)
        took.append(time.perf_counter() - start)
    return float(rows.lengths.sum()) / min(took), STEPS * float((rows.lengths - 1).sum()) / sum(given)


def alike(plan: Sequence[Sequence[Sequence[int]]], lengths: Sequence[int]) -> dict[str, float]:
    """Of packed microbatches by rank: the costliest over the mean, and the sum of each turn's over that."""
    costs = [[sum(row_flops(SHAPE, lengths[row]) for row in one) for one in rank] for rank in plan]
    turns = [max(turn) for turn in itertools.zip_longest(*costs, fillvalue=0)]
    mean = sum(map(sum, costs)) / len(costs) / len(turns)
    return {"largest": round(max(turns) / mean, 3), "turns": round(sum(turns) / len(turns) / mean, 3)}


def filled_up(rows: Iterable[int], lengths: Sequence[int]) -> list[list[int]]:
    """The longest first, each with those before it while tokens allow."""
    done: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if done and sum(lengths[one] for one in done[-1]) + lengths[row] <= LIMIT:
            done[-1].append(row)
        else:
            done.append([row])
    return done


def balance() -> dict[str, Any]:
    """Of 256 long rows on four ranks."""
    lengths = drawn(MEANS["long"], rows=256).lengths.tolist()
    plan = microbatches(lengths, RANKS, LIMIT, cost=functools.partial(row_flops, SHAPE), packing=True)
    full = [filled_up(itertools.chain(*rank), lengths) for rank in plan]
    return {"dealt": alike(plan, lengths), "filled_up": alike(full, lengths)}


def main() -> int:
    """Print one JSON line."""
    torch.set_num_threads(2)
    detail: dict[str, Any] = {}
    options = LearnerOptions(threads=2, microbatch_tokens=LIMIT)
    with process_group():
        for name, mean in MEANS.items():
            rows = drawn(mean)
            found: dict[str, Any] = {"mean_tokens": round(float(rows.lengths.mean()), 1)}
            for laid, packing in (("packed", "on"), ("padded", "off")):
                rate, real = stepped(rows, dataclasses.replace(options, packing=packing))
                found |= {laid: round(rate), f"real_{laid}": round(real, 4)}
            lengths = rows.lengths.tolist()
            found["taken"] = "packed" if worth_packing(microbatches(lengths, 1, LIMIT), lengths) else "padded"
            detail[name] = found
            say(f"{name}: {found}")
    detail["balance"] = balance()
    value = detail["long"]["real_packed"]
    return told(id="L3", value=value, unit="share", goal=GOAL, met=value >= GOAL, detail=detail)


if __name__ == "__main__":
    raise SystemExit(main())
