"""What the settings say of learning: model, layout, objective, rate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turnlog.settings import Settings, SettingsError
from turnlog.trainer.learner import LearnerOptions
from turnlog.trainer.loss import PolicyGradient


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
