"""Sources of tasks: one environment (`Recipe`) and its dataset, or several of them in one run, each with a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from turnlog.infra.environments import recipes
from turnlog.infra.environments.verifiers.kinds import live
from turnlog.producers.tasks import Dataset, provided_dataset, read_dataset
from turnlog.settings import Settings

DATASET_FILE = "tasks.jsonl"
"""Name of the task file for a run's only environment, if it brings its own tasks; with several,
`tasks-RECIPE.jsonl`."""
SHAPE = 'RECIPE:WEIGHT, or RECIPE:WEIGHT:FILE, such as "calc:3" or "household:1:tasks.jsonl"'


class BadMix(Exception):
    """[feeder] mix cannot be drawn from. The message names the entry and what is legal."""


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """An environment, and its tasks."""

    recipe: str
    dataset: Dataset
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class _Entry:
    recipe: str
    weight: float
    file: str


def sources(settings: Settings) -> tuple[EnvironmentTasks, ...]:
    """Return the sources that [feeder] mix names, or else [feeder] recipe and dataset. Tasks come from the user's
    files, or from the environments' own in the run's directory. Raises BadMix, DatasetError, RecipeError."""
    feeder = settings.feeder
    entries = [_entry(said) for said in feeder.mix] or [_Entry(feeder.recipe, 1.0, feeder.dataset)]
    single = not feeder.mix
    found = tuple(EnvironmentTasks(one.recipe, _dataset(settings, one, single=single), one.weight) for one in entries)
    names = [source.dataset.name for source in found]
    for name in names:
        if names.count(name) > 1:
            raise BadMix(
                f"feeder.mix: two entries draw from {name}, so a task would not show to which it belongs: give each "
                "its own dataset"
            )
    return found


def _entry(said: str) -> _Entry:
    recipe, _, rest = said.partition(":")
    weight, _, file = rest.partition(":")
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not recipe or not 0 < value < math.inf:
        raise BadMix(f"feeder.mix: {said!r} must be {SHAPE}, with a weight above 0")
    return _Entry(recipe, value, file)


def _dataset(settings: Settings, entry: _Entry, *, single: bool) -> Dataset:
    recipe = live(recipes.recipe(entry.recipe))
    if entry.file:
        return read_dataset(Path(entry.file), recipe)
    count = settings.feeder.draws * settings.batcher.prompts_per_draw
    path = Path(settings.run.directory) / (DATASET_FILE if single else f"tasks-{entry.recipe}.jsonl")
    return read_dataset(provided_dataset(recipe, path, count=count, seed=settings.feeder.seed), recipe)
