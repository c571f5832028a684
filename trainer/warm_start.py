"""A policy to start from: random weights at once, then supervised training on demonstrations by the same Learner.

An engine can start with `make_base` while `warm_start` runs, since it only needs the architecture to start.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from turnlog.processors.core.batches.rows import BatchRows
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.weights import Tensors, expected_shapes, write_folder

ROWS_PER_STEP = 32
RAMP_STEPS = 30
LOWEST_RATE = 0.05
INITIAL_STD = 0.02

Demonstration = tuple[Sequence[int], Sequence[int]]
"""(token ids, mask): mask is 1 where the token is imitated; the first token never is."""
Progress = Callable[[int, float], None]
"""Called with (steps taken, mean negative log-prob of the step)."""


def random_weights(
    shape: ModelShape, seed: int, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Tensors:
    """Return random weights in host memory: matrices and kernels from Normal(0, 0.02), norms 1, biases 0, like
    transformers.

    `device` is where they are sampled; another device gives other numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights: Tensors = {}
    for name, size in expected_shapes(shape).items():
        if len(size) > 1:
            weights[name] = (torch.randn(size, generator=generator, device=device, dtype=dtype) * INITIAL_STD).cpu()
        else:
            weights[name] = (torch.zeros if name.endswith("bias") else torch.ones)(size, dtype=dtype)
    return weights


def make_base(shape: ModelShape, tokenizer: Path, folder: Path, *, seed: int = 0) -> None:
    """Write a model folder with the random weights from which `warm_start` with the same seed starts."""
    write_folder(folder, shape, random_weights(shape, seed), tokenizer)


def warm_start(
    shape: ModelShape,
    tokenizer: Path,
    demonstrations: Iterator[Demonstration],
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    folder: Path,
    progress: Progress = lambda step, loss: None,
    threads: int = 2,
) -> None:
    """Train on `steps` x 32 rows of demonstrations and write the model folder. Needs no other process and no port.

    The learning rate rises over 30 steps and falls linearly to 5 %.
    """
    from turnlog.trainer.launch import process_group
    from turnlog.trainer.learner import Learner
    from turnlog.trainer.plan import LearnerOptions, imitation

    torch.set_num_threads(threads)
    with process_group():
        learner = Learner(shape, random_weights(shape, seed), LearnerOptions(threads=threads, seed=seed))
        for step in range(steps):
            rate = learning_rate * min(1.0, (step + 1) / RAMP_STEPS) * max(LOWEST_RATE, 1 - step / steps)
            rows = demonstration_rows(list(itertools.islice(demonstrations, ROWS_PER_STEP)))
            progress(step + 1, learner.step(rows, imitation, rate).loss)
        write_folder(folder, shape, learner.export(), tokenizer)


def demonstration_rows(demonstrations: Sequence[Demonstration]) -> BatchRows:
    """Return rows in which all imitated tokens have the same weight."""
    rows = len(demonstrations)
    lengths = np.array([len(ids) for ids, _ in demonstrations], "<i4")
    trained = np.concatenate([np.asarray(mask, "u1") for _, mask in demonstrations])
    trained[np.cumsum(lengths) - lengths] = 0
    tokens = int(lengths.sum())
    names = tuple(str(row) for row in range(rows))
    none = np.zeros(rows, "<i4")
    return BatchRows(
        sample_ids=names,
        group_ids=names,
        session_ids=names,
        rollout_index=none,
        segment_index=none,
        lengths=lengths,
        token_ids=np.concatenate([np.asarray(ids, "<i4") for ids, _ in demonstrations]),
        trained=trained,
        logprobs=np.zeros(tokens, "<f4"),
        advantages=np.zeros(tokens, "<f4"),
        weight_divisor=np.full(rows, max(1, int(trained.sum())), "<i8"),
        temperature=np.ones(rows, "<f4"),
        rewards=np.zeros(rows, "<f4"),
        version_min=none,
        version_max=none,
    )
