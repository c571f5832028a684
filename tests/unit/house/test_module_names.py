"""No two modules or packages in one folder have names that a newcomer would confuse."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = (
    "schemas",
    "producers",
    "processors",
    "consumers",
    "sandbox_workers",
    "trainer",
    "infra",
    "plugins",
    "src/turnlog",
)
ENDINGS = ("ings", "ing", "ers", "er", "ors", "or", "ions", "ion", "es", "s", "e")
"""Endings of a plural, of who does something, and of the doing, longest first where one ends in another."""
SHORTEST = 4
"""Letters that a stem has at least."""


def stem(name: str) -> str:
    """Return a name with each of its words cut to its stem."""
    return "_".join(stem_of_word(word) for word in name.split("_"))


def stem_of_word(word: str) -> str:
    cuts = (word.removesuffix(ending) for ending in ENDINGS if word.endswith(ending))
    return next((cut for cut in cuts if len(cut) >= SHORTEST), word)


def confusing(folder: Path) -> list[list[str]]:
    """Return the groups of modules and packages of a folder whose names have the same stem."""
    names = {path.stem for path in folder.glob("[!_]*.py")}
    names |= {path.name for path in folder.glob("[!_]*") if not path.is_symlink() and any(path.glob("*.py"))}
    groups = (sorted(group) for _, group in groupby(sorted(names, key=stem), stem))
    return [group for group in groups if len(group) > 1]


def test_no_two_modules_of_a_package_share_a_stem() -> None:
    packages = [
        package
        for folder in FOLDERS
        for package in (ROOT / folder, *sorted((ROOT / folder).rglob("*")))
        if package.is_dir() and not package.is_symlink()
    ]
    found = [f"{package.relative_to(ROOT)}: {', '.join(names)}" for package in packages for names in confusing(package)]
    assert not found


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("archive", "archiver", True),
        ("loader", "loading", True),
        ("model", "models", True),
        ("call_runner", "calls_runner", True),
        ("loop", "launch", False),
        ("calls", "call_runner", False),
        ("role", "roles", True),
    ],
)
def test_a_stem_is_a_name_without_plural_agent_and_gerund(one: str, other: str, same: bool) -> None:
    assert (stem(one) == stem(other)) is same
