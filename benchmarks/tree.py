"""TREE: tokens that a group's rows share, computed once against computed for every row.

One step of a small model on 16 answers of 512 tokens to a prompt of 8,192, with prefix sharing on and off in turn. The
value is how many times fewer tokens the model is given; the goal also asks that the step takes a third of the time.
Loss and gradient norm must agree to 1e-5. Beside it stands the share of tokens that is computed of groups of 8 sessions
of Claude Code, Codex and opencode, whose rows have the lengths of recorded ones. It does not show CUDA.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import torch
from row import say, size, told

from tests.fakes.batches import answers_to_a_prompt
from tests.fakes.recorded_rows import RECORDED, recorded_rows
from turnlog.trainer.families.costs import row_flops
from turnlog.trainer.families.shape import TINY
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions, PolicyGradient
from turnlog.trainer.trees import plan_trees
from turnlog.trainer.warm_start import random_weights

FEWER, FASTER, NEAR = 5.0, 3.0, 1e-5
"""Goals: times fewer tokens, times less time, and the largest difference of losses and (relative) gradient norms."""
PROMPT, ANSWERS, ANSWER, STEPS = size((8192, 16, 512, 3), smallest=(64, 4, 8, 1))
SHAPE = dataclasses.replace(TINY, positions=2 * (PROMPT + ANSWER))


def computed_share(program: str) -> float:
    """Return the tokens that are computed over those of all rows, of a group of sessions, at the default settings."""
    rows, limit = recorded_rows(program), LearnerOptions().microbatch_tokens
    plan = plan_trees(rows, 1, limit, cost=functools.partial(row_flops, SHAPE), kinds=[False] * len(rows))
    return 1.0 if plan is None else 1 - float(plan.shared.sum() / rows.lengths.sum())


def main() -> int:
    """Print one JSON line."""
    torch.set_num_threads(1)
    rows = answers_to_a_prompt(PROMPT, ANSWERS, ANSWER, SHAPE.vocabulary)
    detail: dict[str, Any] = {"prompt": PROMPT, "answers": ANSWERS, "answer_tokens": ANSWER}
    given: dict[str, list[int]] = {"rows": [], "tree": []}
    took: dict[str, list[float]] = {"rows": [], "tree": []}
    with process_group():
        learners = {}
        for name, sharing in (("rows", "off"), ("tree", "auto")):
            options = LearnerOptions(microbatch_tokens=2 * (PROMPT + ANSWER * ANSWERS), prefix_sharing=sharing)
            learners[name] = Learner(SHAPE, random_weights(SHAPE, 1), options)
            seen = given[name]
            learners[name].policy.model.register_forward_pre_hook(
                lambda _, inputs, into=seen: into.append(inputs[0].numel())
            )
        apart = 0.0
        for step in range(STEPS):
            results = {}
            for name, learner in learners.items():
                start = time.perf_counter()
                results[name] = learner.step(rows, PolicyGradient(0.2, 0.2), 1e-4)
                took[name].append(time.perf_counter() - start)
            one, other = results["tree"], results["rows"]
            apart = max(apart, abs(one.loss - other.loss), abs(one.grad_norm / other.grad_norm - 1))
            say(f"step {step}: rows {took['rows'][-1]:.1f} s, tree {took['tree'][-1]:.1f} s, apart {apart:.1e}")
    for name in given:
        detail[name] = {"tokens": sum(given[name]) // STEPS, "seconds": round(statistics.median(took[name]), 2)}
    detail["computed_share_of_recorded"] = {program: round(computed_share(program), 3) for program in RECORDED}
    fewer = sum(given["rows"]) / sum(given["tree"])
    faster = statistics.median(took["rows"]) / statistics.median(took["tree"])
    detail |= {"times_faster": round(faster, 2), "difference": apart}
    met = fewer >= FEWER and faster >= FASTER and apart <= NEAR
    return told(id="TREE", value=round(fewer, 2), unit="times fewer tokens", goal=FEWER, met=met, detail=detail)


if __name__ == "__main__":
    raise SystemExit(main())
