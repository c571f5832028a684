"""Ask the tests whether they notice a mutation of the fold: `python tests/mutants.py [--sample 300] [--seed 1]
[--only core.books,core.fold.*]`.

mutmut mutates, selects the tests that reach a function and stops at the first that fails (pyproject.toml has the rest).
It works in .cache/mutants, on a copy of the tree that has folders where the tree has links. What it found there stands
until a module or a test changes, so a run that was stopped goes on. Status 1 when a mutant survived, or no test reached
it, and mutants.toml does not list it with a reason.

This module is also a plugin of mutmut's pytest.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import hypothesis
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORK = ROOT / ".cache/mutants"
LISTED = HERE / "mutants.toml"
COPIED = ("src", "tests", "docs", "pyproject.toml")
PACKAGE = "turnlog.processors."
KINDS = {"survived": "survived", "no tests": "not covered", "timeout": "timed out", "not checked": "not asked"}
"""mutmut's word -> ours; all others say that something broke, so the mutant was killed."""
NOT_IMPORTED = 255
"""Exit status of mutmut's worker where a test module cannot be imported with the mutant: pytest runs nothing. It was
noticed, though mutmut says of this status that the time was out."""
UNNOTICED = ("survived", "not covered")


@dataclass(frozen=True)
class Mutant:
    """A mutation and what became of it; `function` is core.books.Books.add."""

    name: str
    path: Path
    function: str
    kind: str
    line: int = 0
    was: str = ""
    now: str = ""


@dataclass(frozen=True)
class Accepted:
    """A line of mutants.toml: functions by pattern, and the lines of one mutation (of all, where it has none)."""

    function: str
    why: str
    was: str | None = None
    now: str | None = None

    def covers(self, mutant: Mutant) -> bool:
        """Say whether `mutant` is meant."""
        lines = self.was in (None, mutant.was) and self.now in (None, mutant.now)
        return lines and fnmatchcase(mutant.function, self.function)


def accepted(path: Path = LISTED) -> list[Accepted]:
    """Read mutants.toml."""
    return [Accepted(**entry) for entry in tomllib.loads(path.read_text()).get("accepted", [])]


def sampled(names: Iterable[str], size: int, seed: int, only: Sequence[str] = ()) -> list[str]:
    """`size` of the mutants, the same as long as there are these; `only`: of these modules, functions or mutants."""
    patterns = [f"{PACKAGE}{each}{end}" for each in only for end in ("", ".*", "__mutmut_*")]
    chosen = [name for name in names if not only or any(fnmatchcase(name, each) for each in patterns)]
    return sorted(sorted(chosen, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())[:size])


def function_of(name: str) -> str:
    """turnlog.processors.core.books.xǁBooksǁadd__mutmut_3 -> core.books.Books.add"""
    module, _, mangled = name.removeprefix(PACKAGE).partition("__mutmut_")[0].rpartition(".")
    return f"{module}.{mangled.removeprefix('x_').removeprefix('xǁ').replace('ǁ', '.')}"


def changed(diff: str) -> tuple[int, str, str]:
    """Of a unified diff: the offset of the first line that it changes, what stood there and what stands there now."""
    lines = [line for line in diff.splitlines() if not line.startswith(("--- ", "+++ "))]
    began = int(lines[0].split()[1].lstrip("-").partition(",")[0]) - 1
    before = next(number for number, line in enumerate(lines[1:]) if line[0] in "-+")
    texts = ("\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    was, now = texts
    return began + before, was, now


def line_of(source: str, function: str, offset: int, was: str) -> int:
    """Number of the line `was` (its first) of a function: the one that is nearest to `offset`."""
    *_, owner, name = function.split(".")
    tree = ast.parse(source)
    scopes: list[ast.Module | ast.ClassDef] = [tree]
    scopes += [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == owner]
    node = [
        node
        for scope in scopes
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
    ][-1]
    lines = enumerate(source.splitlines()[node.lineno - 1 : node.end_lineno])
    same = [number for number, line in lines if line.strip() == was.partition("\n")[0]]
    return node.lineno + min(same, key=lambda number: abs(number - offset), default=0)


def judged(mutants: Sequence[Mutant], listed: Sequence[Accepted], of: int) -> tuple[list[str], bool]:
    """What to print of the mutants, and whether every one was noticed or is listed."""
    lines, faults = [], 0
    counts = Counter(mutant.kind for mutant in mutants)
    for mutant in mutants:
        if mutant.kind not in UNNOTICED:
            continue
        why = next((each.why for each in listed if each.covers(mutant)), None)
        counts["listed"] += why is not None
        faults += why is None
        lines.append(f"{mutant.path}:{mutant.line}: {mutant.kind}{f', listed: {why}' if why else ''}  {mutant.name}")
        lines += [f"  - {line}" for line in mutant.was.splitlines()] + [
            f"  + {line}" for line in mutant.now.splitlines()
        ]
    told = (f"{counts[kind]} {kind}" for kind in ("killed", "survived", "timed out", "not covered", "not asked"))
    lines.append(f"{len(mutants)} of {of} mutants: {', '.join(told)}; {counts['listed']} listed, {faults} not")
    return lines, not faults and not counts["not asked"]


def copied() -> None:
    """Bring .cache/mutants up to date: all anew if a file has changed."""
    digest = hashlib.sha256()
    for path in sorted(_files()):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    said = WORK / "digest"
    if not said.exists() or said.read_text() != digest.hexdigest():
        shutil.rmtree(WORK, ignore_errors=True)
        WORK.mkdir(parents=True)
        for path in _files():
            target = WORK / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        said.write_text(digest.hexdigest())


def _files() -> Iterator[Path]:
    for name in COPIED:
        for folder, folders, files in os.walk(ROOT / name, followlinks=True):
            folders[:] = [each for each in folders if each != "__pycache__" and not each.endswith(".egg-info")]
            yield from (Path(folder) / each for each in files if each != LISTED.name)
        if (ROOT / name).is_file():
            yield ROOT / name


def asked(sample: int, seed: int, only: Sequence[str]) -> tuple[list[Mutant], int]:
    """Let mutmut ask the tests about those of the sample that it has not asked about yet."""
    from mutmut import __main__ as mutmut
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.mutation.trampoline import set_mutant_under_test
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir

    set_mutant_under_test("mutant_generation")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # it names every file
        copy_src_dir()
        copy_also_copy_files()
        mutmut.create_mutants(os.cpu_count() or 2)
    names = [name for _, name, _ in mutmut.collect_source_file_mutation_data(mutant_names=())[0]]
    chosen = sampled(names, sample, seed, only)
    if not chosen:
        raise SystemExit(f"no mutant of {', '.join(only)}: name modules as core.books, functions as core.books.x_added")

    def found() -> Iterator[tuple[Path, str, str]]:
        for data, name, status in mutmut.collect_source_file_mutation_data(mutant_names=chosen)[0]:
            word = "killed" if status == NOT_IMPORTED else status_by_exit_code[status]
            yield Path(data.path), name, KINDS.get(word, "killed")

    if open_ones := [name for _, name, kind in found() if kind == "not asked"]:
        mutmut._run(open_ones, None)
    mutants = []
    for path, name, kind in found():
        mutant = Mutant(name, path.relative_to("src/turnlog"), function_of(name), kind)
        if kind in UNNOTICED:
            offset, was, now = changed(get_diff_for_mutant(name, path=path))
            line = line_of(path.read_text(), mutant.function, offset, was)
            mutant = Mutant(mutant.name, mutant.path, mutant.function, kind, line, was, now)
        mutants.append(mutant)
    return mutants, len(names)


def main() -> int:
    """Ask, and print what the tests did not notice."""
    parser = argparse.ArgumentParser(description="Mutate processors/core and processors/runtime.")
    parser.add_argument("--sample", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--only", default="", metavar="NAMES", help="modules, functions or mutants, with * and ?")
    arguments = parser.parse_args()
    copied()
    temporary = WORK / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    os.chdir(WORK)
    try:
        mutants, of = asked(arguments.sample, arguments.seed, [name for name in arguments.only.split(",") if name])
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    lines, passed = judged(mutants, accepted(), of)
    print(*lines, sep="\n")
    return 0 if passed else 1


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """A run repeats the one before; an example that fails need not be a short one."""
    hypothesis.settings.register_profile(
        "mutants", hypothesis.settings.get_profile("any machine"), derandomize=True, database=None, max_examples=100,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )  # fmt: skip
    hypothesis.settings.load_profile("mutants")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick ones first, as far as mutmut has timed them."""
    with contextlib.suppress(FileNotFoundError):
        seconds = json.loads(Path("mutmut-stats.json").read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0.0))


if __name__ == "__main__":
    sys.exit(main())
