"""Steps of the Learner beside steps of plain transformers and torch, on any number of ranks; rank 0 prints one line.

python -m turnlog.trainer.compare TENSOR PIPELINE STEPS
torchrun --nproc-per-node 2 -m turnlog.trainer.compare 2 1 4      # tensor parallel; 1 1: data, 1 2: pipeline
"""

from __future__ import annotations

import json
import os
import sys

import torch

from turnlog.trainer.learner import Learner, LearnerOptions
from turnlog.trainer.loss import PolicyGradient
from turnlog.trainer.process_group import process_group
from turnlog.trainer.reference import PlainLearner
from turnlog.trainer.shape import TINY
from turnlog.trainer.synthetic import synthetic_rows
from turnlog.trainer.warm_start import random_weights

RATE = 1e-3


def main(tensor: int, pipeline: int, steps: int) -> None:
    """Print {"steps": [[loss, its reference, gradient norm, its reference], ...], "weights": max |difference|}."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    weights = random_weights(TINY, 1)
    options = LearnerOptions(tensor_parallel=tensor, pipeline_parallel=pipeline, microbatch_tokens=200)
    objective = PolicyGradient(0.2, 0.2)
    with process_group(rank=rank, world_size=world_size, tensor=tensor, pipeline=pipeline):
        learner, plain = Learner(TINY, weights, options), PlainLearner(TINY, weights, options)
        results = []
        for step in range(steps):
            rows = synthetic_rows(step)
            ours, theirs = learner.step(rows, objective, RATE), plain.step(rows, objective, RATE)
            results.append((ours.loss, theirs.loss, ours.grad_norm, theirs.grad_norm))
        exported, wanted = learner.export(), plain.export()
        difference = max(float((tensor - wanted[name]).abs().max()) for name, tensor in exported.items())
        if rank == 0:
            print(json.dumps({"steps": results, "weights": difference}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
