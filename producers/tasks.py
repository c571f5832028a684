"""A dataset of tasks: a JSON-lines file with one row per line, each with at least a `prompt`; and the sampling
parameters of their rollouts.

TaskDatasetError
├── DatasetMissing     no such file
├── DatasetEmpty       a file without rows
├── RowNotJson         a line that is no JSON object
├── RowRefused         a row that the environment cannot read
└── RowWithoutPrompt   no `prompt`, an empty one, or one that is neither text nor chat messages
BadSampling            names the setting, its value and what is legal
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.infra.environments.recipes import BrokenRecipe, Recipe, call_recipe, row_of
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
    recipe: Recipe | None = None
    """Environment that reads its rows."""

    def task(self, number: int) -> bytes:
        """Return a row as its rollouts receive it. Raises BrokenRecipe."""
        if self.recipe is None or not hasattr(self.recipe, "read_row"):
            return self.rows[number]
        return canonical_text(
            row_of(self.recipe, json.loads(self.rows[number]), self.beside, whole=True), ascii_only=False
        ).encode()


def read_dataset(path: Path, recipe: Recipe | None = None) -> Dataset:
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


def provided_dataset(recipe: Recipe, path: Path, *, count: int, seed: int) -> Path:
    """Return `path`, after the environment has written it unless it exists (a run keeps its tasks over restarts).
    Raises BrokenRecipe."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        call_recipe(recipe, recipe.write_dataset, part, count, seed)
        os.replace(part, path)
    return path


def _row(path: Path, number: int, line: bytes, recipe: Recipe | None) -> bytes:
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
