"""Evaluation by the feeder: which rounds of eval groups were asked for, a fold of group-requests, and their tasks.

A round is asked for after every [eval] every draws, before the first one too, as soon as the weights of those draws are
published. One that was missed while no feeder ran is left out: its weights are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from turnlog.infra import recipes
from turnlog.infra.verifiers.groups import live
from turnlog.producers.tasks import Dataset, provided_dataset, read_dataset
from turnlog.schemas.events import Event, GroupRequested, Purpose
from turnlog.settings import Settings

DATASET_FILE = "eval-tasks.jsonl"
"""In the run's directory, where the recipe brings the tasks."""
OTHER_SEED = 1_000_003
"""Between the seed of the recipe's training tasks and that of its evaluation tasks."""


@dataclass(slots=True)
class Rounds:
    """Repeats change nothing."""

    every: int
    """Draws between rounds; 0: there are none."""
    _asked: set[int] = field(default_factory=set)
    _groups: set[str] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Fold one record; others are passed over."""
        if isinstance(event, GroupRequested) and event.purpose is Purpose.eval:
            self._asked.add(event.dataset_epoch)
            self._groups.add(event.group_id)

    def knows(self, group_id: str) -> bool:
        """Whether it is of a round that was asked for."""
        return group_id in self._groups

    def due(self, draws_trained: int) -> int | None:
        """The round to ask for now."""
        if not self.every:
            return None
        newest = draws_trained // self.every
        return None if newest in self._asked else newest


@dataclass(frozen=True, slots=True)
class EvalTasks:
    """What every round asks for."""

    recipe: str
    dataset: Dataset
    samples: int
    """Rollouts of a task."""

    @property
    def rows(self) -> range:
        """Of the dataset."""
        return range(len(self.dataset.rows))


def eval_tasks(settings: Settings) -> EvalTasks | None:
    """The user's file, or tasks of the recipe's own by another seed than the training's; None without evaluation.
    Raises DatasetError, RecipeError."""
    asked, feeder = settings.eval, settings.feeder
    if not asked.every:
        return None
    recipe = live(recipes.recipe(asked.recipe or feeder.recipe))
    path = Path(asked.dataset)
    if not asked.dataset:
        beside = Path(settings.run.directory) / DATASET_FILE
        path = provided_dataset(recipe, beside, count=asked.tasks, seed=feeder.seed + OTHER_SEED)
    return EvalTasks(recipe.name, read_dataset(path, recipe), asked.samples)
