"""`make mutants`: what it samples, how it judges, and a small run of all of it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import Accepted, Mutant, changed, function_of, judged, line_of, sampled

ROOT = Path(__file__).parents[3]
NAMES = [f"turnlog.processors.core.{module}.x_{function}__mutmut_{number}"
         for module in ("books", "fold.spine") for function in ("f", "g") for number in range(20)]  # fmt: skip
SURVIVOR = Mutant(NAMES[0], Path("processors/core/books.py"), "core.books.f", "survived", 7, "a < b", "a <= b")
KILLED = dataclasses.replace(SURVIVOR, kind="killed")

SOURCE = '''"""A module."""
from dataclasses import dataclass

@dataclass
class Pair:
    """Two."""
    a: int
    b: int

    def least(self) -> int:
        """Say which."""
        return self.a if self.a < self.b else self.b

def unreached(a: int) -> int:
    """Nobody calls it."""
    return a + 1

def doubled(a: int) -> int:
    """Needed at import."""
    return a * 2
'''
TESTS = '''"""Its tests."""
from turnlog.processors.core.pairs import Pair, doubled

assert doubled(2) == 4

def test_the_least_is_the_least() -> None:
    assert Pair(1, 2).least() == 1 and Pair(4, 3).least() == 3
'''
CONFTEST = '''"""As the suite's."""
import hypothesis

def pytest_configure() -> None:
    hypothesis.settings.register_profile("any machine", deadline=None)
'''


def test_a_sample_is_the_same_each_time_and_of_what_was_named() -> None:
    assert sampled(NAMES, 30, seed=1) == sampled(reversed(NAMES), 30, seed=1) != sampled(NAMES, 30, seed=2)
    assert sampled(NAMES, 100, seed=1) == sorted(NAMES)
    few = sampled(NAMES, 30, seed=1)
    assert len(set(few) - set(sampled([name for name in NAMES if name != few[0]], 30, seed=1))) == 1
    assert {function_of(name) for name in sampled(NAMES, 100, 1, ["core.fold.*"])} == {
        "core.fold.spine.f",
        "core.fold.spine.g",
    }
    assert {function_of(name) for name in sampled(NAMES, 100, 1, ["core.books.x_f"])} == {"core.books.f"}
    assert sampled(NAMES, 100, 1, ["core.books.x_f__mutmut_3"]) == ["turnlog.processors.core.books.x_f__mutmut_3"]
    assert sampled(NAMES, 100, 1, ["core.book"]) == []


@pytest.mark.parametrize("kind", ["survived", "not covered"])
def test_a_mutant_that_no_test_noticed_fails_unless_it_is_listed_with_a_reason(kind: str) -> None:
    found = [dataclasses.replace(SURVIVOR, kind=kind), KILLED]
    lines, passed = judged(found, [], of=80)
    assert not passed
    assert lines[0].startswith("processors/core/books.py:7: ")
    assert lines[1:3] == ["  - a < b", "  + a <= b"]
    for entry in (Accepted("core.books.f", "equal", "a < b", "a <= b"), Accepted("core.books.*", "not ours")):
        assert judged(found, [entry], of=80)[1]
        assert entry.why in judged(found, [entry], of=80)[0][0]
    for entry in (Accepted("core.books.f", "equal", "a < b", "a > b"), Accepted("core.draws.*", "not ours")):
        assert not judged(found, [entry], of=80)[1]


def test_one_that_ran_out_of_time_was_noticed_and_one_that_was_not_asked_fails() -> None:
    assert judged([dataclasses.replace(SURVIVOR, kind="timed out")], [], of=1)[1]
    assert not judged([dataclasses.replace(SURVIVOR, kind="not asked")], [], of=1)[1]


def test_a_change_is_found_where_it_is() -> None:
    diff = "--- a\n+++ a\n@@ -1,3 +1,3 @@\n def least(self) -> int:\n     'Say.'\n-    return 1\n+    return 2"
    assert changed(diff) == (2, "return 1", "return 2")
    assert line_of(SOURCE, "core.pairs.Pair.least", 2, "return self.a if self.a < self.b else self.b") == 12
    assert line_of(SOURCE, "core.pairs.unreached", 2, "return a + 1") == 16


def test_every_accepted_mutation_is_one_of_the_code() -> None:
    for entry in mutants.accepted():
        assert entry.why
        if entry.was is None:
            continue
        function = entry.function.split(".")
        (path,) = [
            path
            for cut in (-1, -2)
            if (path := ROOT.joinpath("processors", *function[:cut]).with_suffix(".py")).exists()
        ]
        assert all(line in path.read_text() for line in entry.was.splitlines()), entry


def test_a_small_run_finds_the_survivor_and_what_nothing_reaches(tmp_path: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    settings["pytest_add_cli_args_test_selection"] = ["tests/unit/core"]
    table = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    core, tests = tmp_path / "src/turnlog/processors/core", tmp_path / "tests/unit/core"
    for folder in (core, tests, tmp_path / "docs"):
        folder.mkdir(parents=True)
    for package in (core, core.parent, core.parents[1]):
        (package / "__init__.py").touch()
    (core / "pairs.py").write_text(SOURCE)
    (tests / "test_pairs.py").write_text(TESTS)
    (tests.parents[1] / "conftest.py").write_text(CONFTEST)
    (tests.parents[1] / "mutants.preload").touch()
    (tests.parents[1] / "mutants.toml").touch()
    shutil.copy(ROOT / "tests/mutants.py", tests.parents[1])
    (tmp_path / "pyproject.toml").write_text(
        f"[tool.pytest.ini_options]\naddopts = '--import-mode=importlib'\n[tool.mutmut]\n{table}"
    )
    command = [sys.executable, tests.parents[1] / "mutants.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search(r"pairs.py:12: survived .*\n  - .*self.a < self.b.*\n  \+ .*self.a <= self.b", done.stdout)
    assert "pairs.py:16: not covered" in done.stdout
    counted = "7 of 7 mutants: 4 killed, 1 survived, 0 timed out, 2 not covered, 0 not asked; 0 listed, 3 not"
    assert counted in done.stdout
