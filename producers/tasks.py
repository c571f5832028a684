"""Datasets of tasks, the sources that a run draws from, and the sampling parameters of their rollouts.

A dataset is a JSON-lines file with one row per line, each with at least a `prompt`. A source is an environment
(`Recipe`) and its dataset; a run has one, or several with a weight each.

TaskDatasetError
├── DatasetMissing     no such file
├── DatasetEmpty       a file without rows
├── RowNotJson         a line that is no JSON object
├── RowRefused         a row that the environment cannot read
└── RowWithoutPrompt   no `prompt`, an empty one, or one that is neither text nor chat messages
BadSampling            names the setting, its value and what is legal
BadMix                 names the entry of [feeder] mix and what is legal
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.infra.environments.sources import BrokenRecipe, call_recipe, join_source, row_of, split_source, task_source
from turnlog.infra.environments.tasks import TaskSource
from turnlog.infra.environments.verifiers.kinds import live
from turnlog.infra.offers import load_methods
from turnlog.processors.core.methods.rules import fold_rules
from turnlog.schemas.canonical import canonical_text
from turnlog.schemas.events import Limits, Sampling
from turnlog.settings import Settings

REMEDY = 'each line is one JSON object such as {"prompt": "3 + 5 = ?", "answer": "8"}'


class TaskDatasetError(Exception):
    """Base class of the tree in this module's docstring. The message names file, line, key and remedy."""


class DatasetMissing(TaskDatasetError):
    """[feeder] dataset names a file that is not there."""


class DatasetEmpty(TaskDatasetError):
    """The file holds no row."""


class RowNotJson(TaskDatasetError):
    """The line is no JSON object."""


class RowRefused(TaskDatasetError):
    """The environment's `read_row` rejected the row. The message gives the reason."""


class RowWithoutPrompt(TaskDatasetError):
    """The row gives the agent nothing to start from."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows as canonical JSON, in file order."""

    name: str
    """File name and the start of the content's sha256: a changed file is another dataset."""
    rows: tuple[bytes, ...]
    beside: Path = Path()
    """The folder that the file lies in."""
    recipe: TaskSource | None = None
    """Environment that reads its rows."""

    def task(self, number: int) -> bytes:
        """Return a row as its rollouts receive it. Raises BrokenRecipe."""
        if self.recipe is None or not hasattr(self.recipe, "read_row"):
            return self.rows[number]
        return canonical_text(
            row_of(self.recipe, json.loads(self.rows[number]), self.beside, whole=True), ascii_only=False
        ).encode()


def read_dataset(path: Path, recipe: TaskSource | None = None) -> Dataset:
    """Read the file, and check every row as the environment understands it. Raises TaskDatasetError naming file and
    line."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        remedy = "set [feeder] dataset, or leave it empty to use the recipe's dataset"
        raise DatasetMissing(f"{path}: no such file; {remedy}") from None
    lines = enumerate(content.splitlines(), start=1)
    rows = tuple(_row(path, number, line, recipe) for number, line in lines if line.strip())
    if not rows:
        raise DatasetEmpty(f"{path}: no rows; {REMEDY}")
    return Dataset(f"{path.name}@{hashlib.sha256(content).hexdigest()[:16]}", rows, path.parent, recipe)


def provided_dataset(recipe: TaskSource, path: Path, *, count: int, seed: int) -> Path:
    """Return `path`, after the environment has written it unless it exists (a run keeps its tasks over restarts).
    Raises BrokenRecipe."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        call_recipe(recipe.name, recipe.write_dataset, part, count, seed)
        os.replace(part, path)
    return path


def _row(path: Path, number: int, line: bytes, recipe: TaskSource | None) -> bytes:
    where = f"{path}, line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RowNotJson(f"{where}: not JSON ({error}); {REMEDY}") from None
    if not isinstance(row, dict):
        raise RowNotJson(f"{where}: a JSON {type(row).__name__}, not an object; {REMEDY}")
    try:
        read = row if recipe is None else row_of(recipe, row, path.parent, whole=False)
    except BrokenRecipe as error:
        raise RowRefused(f"{where}: {error}") from error
    if "prompt" not in read:
        raise RowWithoutPrompt(f"{where}: no key `prompt` (it has {', '.join(read) or 'no keys'}); {REMEDY}")
    if not _is_prompt(read["prompt"]):
        raise RowWithoutPrompt(f"{where}: `prompt` must be text or a list of chat messages, and not empty; {REMEDY}")
    return canonical_text(row, ascii_only=False).encode()


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return bool(prompt.strip())
    messages = prompt if isinstance(prompt, list) else []
    return bool(messages) and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)


class BadSampling(Exception):
    """A [feeder] setting with which no group could ever be trained."""


def checked_sampling(settings: Settings) -> tuple[Sampling, Limits]:
    """Return the policy's sampling parameters and the limits of a live agent. Raises BadSampling, SettingsError."""
    feeder = settings.feeder
    least = fold_rules(settings.fold, run_id="", settings_sha256="", methods=load_methods(settings.fold)).least_valid
    _require(
        feeder.group_size >= least,
        "feeder.group_size",
        feeder.group_size,
        f"at least {least}, as fold.min_valid or the estimator {settings.fold.estimator!r} says, or every group is "
        "discarded and drawn again forever",
    )
    _require(
        feeder.pass_rate_low <= feeder.pass_rate_high,
        "feeder.pass_rate_low",
        feeder.pass_rate_low,
        f"at most feeder.pass_rate_high ({feeder.pass_rate_high})",
    )
    _require(
        not feeder.oversample or settings.assembler.stragglers == "cut",
        "feeder.oversample",
        feeder.oversample,
        f'0 where assembler.stragglers is {settings.assembler.stragglers!r}: "cut" closes a group once '
        f"feeder.group_size ({feeder.group_size}) of its rollouts can be trained on",
    )
    _require(
        feeder.max_context_tokens <= settings.engine.context,
        "feeder.max_context_tokens",
        feeder.max_context_tokens,
        f"at most engine.context ({settings.engine.context})",
    )
    return (
        Sampling(temperature=feeder.temperature, max_new_tokens=feeder.max_new_tokens),
        Limits(max_turns=feeder.max_turns, max_context_tokens=feeder.max_context_tokens, deadline_s=feeder.deadline_s),
    )


def _require(met: bool, key: str, value: object, legal: str) -> None:
    if not met:
        raise BadSampling(f"{key} = {value!r}: it must be {legal}")


DATASET_FILE = "tasks.jsonl"
"""Name of the task file for a run's only environment, if it brings its own tasks; with several,
`tasks-RECIPE.jsonl`."""
SHAPE = (
    'RECIPE:WEIGHT, RECIPE:WEIGHT:FILE or RECIPE key=value weight=WEIGHT, such as "calc:3", "household:1:tasks.jsonl" '
    'or "harbor path=tasks weight=2"'
)


class BadMix(Exception):
    """[feeder] mix cannot be drawn from. The message names the entry and what is legal."""


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """An environment, and its tasks."""

    recipe: str
    dataset: Dataset
    weight: float = 1.0


def sources(settings: Settings) -> tuple[EnvironmentTasks, ...]:
    """Return the sources that [feeder] mix names, or else [feeder] recipe and dataset. Tasks come from the user's
    files, or from the environments' own in the run's directory. Raises BadMix, DatasetError, RecipeError."""
    feeder = settings.feeder
    entries = [_entry(said) for said in feeder.mix] or [(feeder.recipe, 1.0, feeder.dataset)]
    found = tuple(EnvironmentTasks(name, _dataset(settings, name, file), weight) for name, weight, file in entries)
    names = [source.dataset.name for source in found]
    for name in names:
        if names.count(name) > 1:
            raise BadMix(
                f"feeder.mix: two entries draw from {name}, so a task would not show to which it belongs: give each "
                "its own dataset"
            )
    return found


def _entry(said: str) -> tuple[str, float, str]:
    """Return source, weight and dataset of an entry. Weight and dataset are options if the source has options."""
    if " " in said.strip():
        source, options = split_source(said)
        weight, file = options.pop("weight", ""), options.pop("dataset", "")
        source = join_source(source, options)
    else:
        source, _, rest = said.partition(":")
        weight, _, file = rest.partition(":")
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not source or not 0 < value < math.inf:
        raise BadMix(f"feeder.mix: {said!r} must be {SHAPE}, with a weight above 0")
    return source, value, file


def _dataset(settings: Settings, name: str, file: str) -> Dataset:
    source = live(task_source(name))
    if file:
        return read_dataset(Path(file), source)
    count = settings.feeder.draws * settings.batcher.prompts_per_draw
    path = Path(settings.run.directory) / (f"tasks-{_file_name(name)}.jsonl" if settings.feeder.mix else DATASET_FILE)
    return read_dataset(provided_dataset(source, path, count=count, seed=settings.feeder.seed), source)


def _file_name(source: str) -> str:
    """Return the text of a source as part of a file's name, different for different texts."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", source)[:40]
    return plain if plain == source else f"{plain}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


EVAL_FILE = "eval-tasks.jsonl"
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
    evaluation. A round is requested before the first rollout batch and after every [eval] every of them, as soon as
    their weights are published; one that was missed while no feeder ran is skipped, because its weights are gone.
    Raises TaskDatasetError, RecipeError."""
    asked, feeder = settings.eval, settings.feeder
    if not asked.every:
        return None
    name = asked.recipe or feeder.recipe
    source = live(task_source(name))
    path = Path(asked.dataset)
    if not asked.dataset:
        beside = Path(settings.run.directory) / EVAL_FILE
        path = provided_dataset(source, beside, count=asked.tasks, seed=feeder.seed + OTHER_SEED)
    return EvalTasks(name, read_dataset(path, source), asked.samples)
