"""Task sources by their text: `NAME`, or `NAME key=value ...`, where a package offers NAME under `turnlog.recipes`.

The text is on the log with each rollout, so that the log itself names the source. An entry point is a TaskSource, or a
factory that takes the options as keyword arguments, all of them strings, and returns one.

RecipeError
├── UnknownRecipe    no installed package offers that name; the message lists the names that exist
├── AmbiguousRecipe  two packages offer one name
├── BadSource        the text or an option cannot be used; the message names the option and what is legal
└── BrokenRecipe     the entry point does not import, its object is not a source, or a function of it raises
"""

from __future__ import annotations

import inspect
import json
import shlex
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from turnlog.infra.code_version import package_version
from turnlog.infra.environments.tasks import TaskSource
from turnlog.infra.environments.warm_starts import WarmStart
from turnlog.infra.offers import find_plugins
from turnlog.names import EntryPointGroup

P = ParamSpec("P")
T = TypeVar("T")


class RecipeError(Exception):
    """Base class of the errors of task sources; see the module docstring."""


class UnknownRecipe(RecipeError):
    """No package offers this name; see [feeder] recipe."""


class AmbiguousRecipe(RecipeError):
    """Two packages offer this name. Remedy: uninstall one of them."""


class BadSource(RecipeError):
    """The text of a source, or one of its options, cannot be used."""


class BrokenRecipe(RecipeError):
    """The entry point cannot be loaded, or a function of the source raises."""


def call_recipe(name: str, method: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
    """Call a function of the source `name`, and return its result. Raises BrokenRecipe if it raises."""
    try:
        return method(*arguments, **named)
    except Exception as error:  # foreign code may raise anything, RecursionError and MemoryError among it
        frames = traceback.extract_tb(error.__traceback__)
        called, last = frames[min(1, len(frames) - 1)].name, frames[-1]
        where = f"{called} ({last.name}, {Path(last.filename).name}:{last.lineno})"
        raise BrokenRecipe(f"recipe {name!r}: {where} raises {type(error).__name__}: {error}") from error


def split_source(text: str) -> tuple[str, dict[str, str]]:
    """Return the name and the options of a source's text. Raises BadSource."""
    try:
        name, *words = shlex.split(text)
    except ValueError as error:
        raise BadSource(f"source {text!r}: {error}; write NAME key=value, values with spaces in quotes") from None
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier() or key in options:
            raise BadSource(f"source {text!r}: {word!r} must be key=value, with each key once")
        options[key] = value
    return name, options


def join_source(name: str, options: Mapping[str, str]) -> str:
    """Return the text of a source, the reverse of `split_source`."""
    return shlex.join([name, *(f"{key}={value}" for key, value in options.items())])


def whole_option(option: str, text: str, least: int = 0, most: int | None = None) -> int:
    """Return the whole number that an option of a source states. Raises BadSource."""
    if not (text.isascii() and text.isdecimal()) or int(text) < least or (most is not None and int(text) > most):
        legal = f"from {least} on" if most is None else f"from {least} to {most}"
        raise BadSource(f"{option}={text}: must be a whole number {legal}")
    return int(text)


def number_option(option: str, text: str) -> float:
    """Return the number above 0 and below a billion that an option of a source states. Raises BadSource."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e9:
        raise BadSource(f"{option}={text}: must be a number above 0")
    return found


def object_option(option: str, text: str) -> dict[str, Any]:
    """Return the JSON object that an option of a source states. Raises BadSource."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSource(f"{option}={text}: must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise BadSource(f"{option}={text}: must be a JSON object")
    return found


def weights_option(option: str, text: str) -> dict[str, float]:
    """Return the weight of each name that an option NAME[:WEIGHT],... of a source lists. Raises BadSource."""
    weights: dict[str, float] = {}
    for item in text.split(","):
        name, _, weight = item.partition(":")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = 0.0
        if not 0 < weights[name] < float("inf"):
            raise BadSource(f"{option}={text}: the weight {weight!r} of {name} must be a number above 0")
    return weights


@cache
def packages_of(text: str) -> dict[str, str]:
    """Return the Python package that offers a source, with its version and commit; {} if no package does. Raises
    RecipeError."""
    name, _ = split_source(text)
    point = find_plugins(EntryPointGroup.RECIPES, "recipe", AmbiguousRecipe).get(name)
    package = None if point is None else point.dist
    return {} if package is None else {package.name: package_version(package)}


@cache
def task_source(text: str) -> TaskSource:
    """Return the source of this text. The result is cached, because reading the metadata of all installed packages
    takes tens of milliseconds. Raises RecipeError."""
    name, options = split_source(text)
    points = find_plugins(EntryPointGroup.RECIPES, "recipe", AmbiguousRecipe)
    if name not in points:
        names = ", ".join(points) or "none"
        raise UnknownRecipe(f"no recipe {name!r}: [feeder] recipe takes one of the installed ones ({names})")
    try:
        found = points[name].load()
    except Exception as error:  # a module may raise anything while it is imported
        said = f"{type(error).__name__}: {error}"
        raise BrokenRecipe(f"recipe {name!r} ({points[name].value}) does not import: {said}") from error
    if isinstance(found, TaskSource) and not isinstance(found, type):
        if options:
            raise BadSource(f"source {text!r}: recipe {name!r} takes no options, got {', '.join(options)}")
        return found
    if callable(found):
        found = _make(text, name, found, options)
    if not isinstance(found, TaskSource):
        raise BrokenRecipe(f"recipe {name!r} ({points[name].value}) lacks part of turnlog.environments.TaskSource")
    return found


def _make(text: str, name: str, factory: Callable[..., object], options: Mapping[str, str]) -> object:
    """Return the source that a factory makes of the options. Raises BadSource, BrokenRecipe."""
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        legal = ", ".join(inspect.signature(factory).parameters) or "none"
        raise BadSource(f"source {text!r}: {error}; the options of {name} are {legal}") from None
    try:
        return factory(**options)
    except BadSource as error:
        raise BadSource(f"source {text!r}: {error}") from error
    except Exception as error:  # foreign code may raise anything
        raise BrokenRecipe(f"source {text!r} cannot be made: {type(error).__name__}: {error}") from error


def demo_rise(source: TaskSource) -> float:
    """Return the rise of the mean reward that `turnlog demo` requires with this source, from the first two steps to the
    last five. This is its attribute `demo_rise`; with 0, the default, the rise is not checked."""
    rise: float = getattr(source, "demo_rise", 0.0)
    return rise


def warm_start_of(source: TaskSource) -> WarmStart | None:
    """Return the source's warm start, or None if it needs an existing model ([model] path)."""
    start: WarmStart | None = getattr(source, "warm_start", None)
    return start


def row_of(source: TaskSource, row: dict[str, Any], beside: Path, *, whole: bool) -> dict[str, Any]:
    """Convert a row of a dataset by the source's method `read_row`, or return it unchanged if there is none.

    The method may read the folder `beside`, in which the dataset is. With `whole`, the row must have all that its
    rollouts need; without it, the row is only examined before the run begins, and large parts may be missing. Raises
    BrokenRecipe if the method raises.
    """
    read: Callable[[dict[str, Any], Path, bool], dict[str, Any]] | None = getattr(source, "read_row", None)
    return row if read is None else call_recipe(source.name, read, row, beside, whole)
