"""What the settings say of learning: model, layout, rate, and the objective as token losses in plain torch.

A loss is elementwise over tokens; weights and sums are the learner's. The clipped surrogate is PPO's (Schulman et al.
2017, eq. 7) with separate bounds (DAPO, Yu et al. 2025); under group advantages it is GRPO's (Shao et al. 2024) with
the ratio taken against the log-probs recorded by the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from turnlog.settings import Settings, SettingsError


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per token, in the shape of the inputs."""

    value: torch.Tensor
    clipped: torch.Tensor
    """True where the bound decided, so that the token has no gradient."""


Objective = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], TokenLoss]
"""(log-probs, recorded log-probs, advantages) -> token losses. Picklable: rank 0 sends it to the others."""


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """-min(ratio A, clamp(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(log-prob - recorded log-prob)."""

    clip_low: float
    clip_high: float

    def __call__(self, logprobs: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
        """An Objective."""
        ratio = (logprobs - recorded).exp()
        free = ratio * advantages
        bounded = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        return TokenLoss(-torch.minimum(free, bounded), bounded.detach() < free.detach())


def imitation(logprobs: torch.Tensor, recorded: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    """-log-prob: supervised training on demonstrations."""
    return TokenLoss(-logprobs, torch.zeros_like(logprobs, dtype=torch.bool))


def scaled_logits(
    logits: torch.Tensor, temperature: torch.Tensor, *, first_column: int, vocabulary: int
) -> torch.Tensor:
    """logits / temperature in float32 with the columns that pad the vocabulary out of every softmax.

    logits [b, s, v], this rank's columns from `first_column` on; temperature [b]. A new tensor.
    """
    scaled = logits.float() / temperature[:, None, None]
    columns = torch.arange(first_column, first_column + logits.size(-1), device=logits.device)
    padding = columns >= vocabulary
    return scaled.masked_fill(padding, torch.finfo(torch.float32).min) if bool(padding.any()) else scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerOptions:
    """How to learn; the same on every rank."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    microbatch_tokens: int = 8192
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    seed: int = 1234
    dtype: str = "float32"
    threads: int = 1
    vocabulary_multiple: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPlan:
    """The same on every rank, and in a re-run."""

    model: Path
    """Describes the policy: config, tokenizer, template."""
    weights: Path
    """What version 0 holds."""
    world_size: int
    options: LearnerOptions
    objective: PolicyGradient
    steps: int
    """Planned optimizer steps of the run."""
    rate: float
    lowest_ratio: float

    def behind(self, steps: int) -> LearningPlan:
        """The same after `steps` steps of a run that this one was forked from: its schedule goes on from there."""
        return dataclasses.replace(self, steps=self.steps + steps)

    def learning_rate(self, step: int) -> float:
        """Of the step after `step` steps: linear from `rate` to `lowest_ratio` x `rate` at the last planned step."""
        return self.rate * max(self.lowest_ratio, 1.0 - step / max(1, self.steps))


def learning_plan(settings: Settings) -> LearningPlan:
    """The plan of a run. Raises SettingsError for a layout that its ranks cannot make."""
    trainer = settings.trainer
    copy = trainer.tensor_parallel * trainer.pipeline_parallel
    if trainer.world_size % copy:
        raise SettingsError(
            f"trainer.world_size must be a multiple of tensor_parallel x pipeline_parallel = {copy}, "
            f"got {trainer.world_size}"
        )
    return LearningPlan(
        model=Path(settings.model.path),
        weights=Path(trainer.initial_weights or settings.model.path),
        world_size=trainer.world_size,
        options=LearnerOptions(
            tensor_parallel=trainer.tensor_parallel,
            pipeline_parallel=trainer.pipeline_parallel,
            microbatch_tokens=trainer.microbatch_tokens,
            beta1=trainer.beta1,
            beta2=trainer.beta2,
            weight_decay=trainer.weight_decay,
            clip_grad=trainer.clip_grad,
            seed=trainer.seed,
            dtype=trainer.dtype,
            threads=trainer.threads,
        ),
        objective=PolicyGradient(trainer.clip_low, trainer.clip_high),
        steps=settings.feeder.draws * settings.batcher.updates_per_draw,
        rate=trainer.learning_rate,
        lowest_ratio=trainer.min_learning_rate_ratio,
    )
