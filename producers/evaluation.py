"""Tasks of evaluation rounds, which the feeder requests.

A round is requested before the first rollout batch and after every [eval] every of them, as soon as the weights of
those batches are published. A round that was missed while no feeder ran is skipped, because its weights are gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from turnlog.infra.environments import recipes
from turnlog.infra.environments.verifiers.kinds import live
from turnlog.producers.tasks import Dataset, provided_dataset, read_dataset
from turnlog.settings import Settings

DATASET_FILE = "eval-tasks.jsonl"
"""Name of the file in the run's directory to which the environment writes its evaluation tasks."""
OTHER_SEED = 1_000_003
"""Offset between the seeds of the environment's training tasks and its evaluation tasks."""


@dataclass(frozen=True, slots=True)
class EvalTasks:
    """Tasks of every round."""

    recipe: str
    dataset: Dataset
    samples: int
    """Number of rollouts per task."""

    @property
    def rows(self) -> range:
        """Row numbers of the dataset."""
        return range(len(self.dataset.rows))


def eval_tasks(settings: Settings) -> EvalTasks | None:
    """Return the user's file of tasks, or tasks of the environment with another seed than for training; None without
    evaluation. Raises DatasetError, RecipeError."""
    asked, feeder = settings.eval, settings.feeder
    if not asked.every:
        return None
    recipe = live(recipes.recipe(asked.recipe or feeder.recipe))
    path = Path(asked.dataset)
    if not asked.dataset:
        beside = Path(settings.run.directory) / DATASET_FILE
        path = provided_dataset(recipe, beside, count=asked.tasks, seed=feeder.seed + OTHER_SEED)
    return EvalTasks(recipe.name, read_dataset(path, recipe), asked.samples)
