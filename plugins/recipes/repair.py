"""Environment `repair`: fix a repository; the agent's change is graded by tests that it cannot touch.

Rows are read in SWE-bench's format (`instance_id`, `problem_statement`, `test_patch`, `FAIL_TO_PASS`, `PASS_TO_PASS` as
lists or JSON strings), and graded by `eval_cmd` or `f2p_script` if they have one. Nothing is cloned: the repository's
files are in the row (`files`), or in a folder beside the dataset (`folder`, or else one named `instance_id`). Built-in
rows are small repositories with one bug each, generated from a seed. Demonstrations know these bugs by heart, but often
do nothing, or fix the wrong one.
"""

from __future__ import annotations

import base64
import difflib
import functools
import json
import random
import re
import stat
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Final

from turnlog.environments import Demonstration, Message, Recipe, TaskRow
from turnlog.infra.environments.tools import tool_declarations
from turnlog.infra.environments.verifiers.kinds import PROTECTED, Grading, PatchVerifier
from turnlog.plugins.recipes.warm_start import TinyWarmStart, demonstrate_call, imitating, solving_call
from turnlog.schemas.events.tools import SandboxLimits, SandboxSpec

PROMPT: Final = """\
The folder you are in holds a repository with a bug:

{problem}

Find and mend it. Change what is wrong and nothing else: tests are run on your change, theirs and not yours.
"""
SKIPPED: Final = frozenset((".git", "__pycache__", ".venv", "node_modules", ".tox", ".pytest_cache", ".mypy_cache"))
"""Folders that are skipped when a repository is read. The history is among them, because it reveals how the bug was
fixed."""
MOST_BYTES: Final = 48 << 20
"""Maximum size in bytes of a repository that is read from a folder; it goes into the request of every rollout."""


class RowUnusable(ValueError):
    """The message names the key of the row, and what to do."""


IDLE, ERRS = 0.45, 0.35
"""Shares of demonstrations: those that do nothing, and those that fix another bug of the same module, which is not
there."""


def demonstration(generator: random.Random) -> Demonstration:
    """Return a conversation."""
    module = generator.choice(modules())
    bug = generator.choice(module["bugs"])
    row = repository(module, bug, generator)
    name = re.findall(r"\(module `(\w+)`\)", row["prompt"])[0]
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    if generator.random() >= IDLE:
        mended = generator.choice(module["bugs"]) if generator.random() < ERRS else bug
        arguments = {"path": f"{name}.py", **edit(module["code"], mended)}
        before, there, _ = row["files"][f"{name}.py"].partition(arguments["old"])
        line = before.count("\n") + 1
        told = f"replaced the text at line {line} in {name}.py" if there else "the old text does not occur in it"
        messages += demonstrate_call("edit_file", arguments, told)
    messages.append({"role": "assistant", "content": "Mended."})
    return imitating(messages)


def edit(code: str, bug: dict[str, Any]) -> dict[str, str]:
    """Return the arguments of `edit_file` that fix a module: whole lines that differ, since a part of one may occur
    elsewhere."""
    wrong, right = code.replace(bug["right"], bug["wrong"]).splitlines(), code.splitlines()
    [(_, old, old_end, new, new_end)] = [
        each for each in difflib.SequenceMatcher(None, wrong, right).get_opcodes() if each[0] != "equal"
    ]
    return {"old": "\n".join(wrong[old:old_end]).strip(), "new": "\n".join(right[new:new_end]).strip()}


class Repair(Recipe):
    """See the module's docstring. For an agent that is a program, inherit from this class and set `agent`."""

    name = "repair"
    sandbox = SandboxSpec(
        durable_workspace=True, limits=SandboxLimits(output_bytes=16 << 10, memory_bytes=1 << 30, cpu_s=60, wall_s=120)
    )
    warm_start = TinyWarmStart(demonstration, r"\b[a-z_]+(?=`|\.py)", vocabulary=1400)
    sandbox_tools: tuple[str, ...] = ("shell", "read_file", "write_file", "edit_file")

    @property
    def verifier(self) -> PatchVerifier:
        """Verifier that runs the row's tests in sandboxes like the agent's."""
        return PatchVerifier(name=self.name, version="1", grading=grading, sandbox=self.sandbox)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """Schemas of the sandbox tools."""
        return tool_declarations(self.sandbox_tools)

    def files(self, task: TaskRow) -> dict[str, Any]:
        """Return the files that the session begins with. Raises RowUnusable."""
        files = task.get("files")
        if not isinstance(files, dict) or not files:
            raise RowUnusable("the row has no `files`: its repository was not read (read_row)")
        return files

    def read_row(self, row: dict[str, Any], beside: Path, whole: bool) -> dict[str, Any]:
        """Return the row with a prompt and, if `whole`, its repository's files. Raises RowUnusable."""
        read = dict(row)
        if "prompt" not in read:
            problem = read.get("problem_statement")
            if not isinstance(problem, str) or not problem.strip():
                raise RowUnusable("the row has neither `prompt` nor `problem_statement`")
            read["prompt"] = PROMPT.format(problem=problem.strip())
        grading(read)
        if "files" not in read:
            folder = _folder(read, beside)
            if whole:
                read["files"] = read_folder(folder)
        return read

    def solution(self, task: TaskRow) -> list[Message] | None:
        """Return the call that applies the row's `patch`; None if it has none."""
        if not task.get("patch"):
            return None
        command = {"command": 'git apply --unsafe-paths --directory="$PWD" -', "stdin": task["patch"]}
        return [solving_call("shell", command), {"role": "assistant", "content": "Mended."}]

    def tasks(self, seed: int) -> Iterator[TaskRow]:
        """Yield every bug once, in an order given by the seed, and then again under other names."""
        for turn in range(2**31):
            order = random.Random(f"repair {seed} {turn}")
            bugs = [(module, bug) for module in modules() for bug in module["bugs"]]
            order.shuffle(bugs)
            yield from (repository(module, bug, order) for module, bug in bugs)


def grading(row: TaskRow) -> Grading:
    """Return the row's rules for grading. Raises RowUnusable."""
    command = row.get("eval_cmd") or row.get("f2p_script") or ""
    fail, passing = _tests(row, "FAIL_TO_PASS"), _tests(row, "PASS_TO_PASS")
    test_patch = row.get("test_patch") or ""
    if not isinstance(command, str) or not isinstance(test_patch, str):
        raise RowUnusable("`eval_cmd`, `f2p_script` and `test_patch` are text")
    if not command and not fail:
        raise RowUnusable("the row has none of `eval_cmd`, `f2p_script` and `FAIL_TO_PASS`: nothing says what is right")
    if test_patch and not test_patch.endswith("\n"):
        test_patch += "\n"
    protected = row.get("protected", list(PROTECTED))
    if not isinstance(protected, list) or not all(isinstance(each, str) for each in protected):
        raise RowUnusable("`protected` is a list of names and paths")
    return Grading(
        command=command, fail_to_pass=fail, pass_to_pass=passing, test_patch=test_patch, protected=tuple(protected)
    )


def _tests(row: TaskRow, key: str) -> tuple[str, ...]:
    said = row.get(key) or []
    if isinstance(said, str):
        try:
            said = json.loads(said)
        except ValueError as error:
            raise RowUnusable(f"`{key}` is neither a list nor the JSON of one: {error}") from error
    if not isinstance(said, list) or not all(isinstance(test, str) and test for test in said):
        raise RowUnusable(f"`{key}` is no list of tests")
    return tuple(said)


def _folder(row: TaskRow, beside: Path) -> Path:
    """Return the folder of the row's repository. Raises RowUnusable."""
    name = row.get("folder") or row.get("instance_id")
    if not isinstance(name, str) or not name:
        raise RowUnusable("the row has neither `files` nor `folder` nor `instance_id`: where is its repository?")
    folder = (beside / name).resolve()
    if not folder.is_relative_to(beside.resolve()) or folder == beside.resolve():
        raise RowUnusable(f"folder {name!r} does not lie beside the dataset, in {beside}")
    if not folder.is_dir():
        at = f"{row.get('repo', 'its repository')} at {row.get('base_commit', 'its base commit')}"
        raise RowUnusable(f"{at} is not in {folder}: nothing is cloned here, put the files there or into `files`")
    return folder


def read_folder(folder: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the files of a repository in the form that a row holds. Raises RowUnusable."""
    files: dict[str, Any] = {}
    left = most_bytes
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if SKIPPED & {*name.parts} or name.suffix == ".pyc":
            continue
        if path.is_symlink():
            files[str(name)] = {"link": str(path.readlink())}
        elif path.is_file():
            content = path.read_bytes()
            left -= len(content)
            if left < 0:
                raise RowUnusable(f"{folder} holds more than {most_bytes} bytes: leave out what the task does not need")
            files[str(name)] = _file(content, stat.S_IMODE(path.stat().st_mode))
    return files


def _file(content: bytes, mode: int) -> Any:
    try:
        text: dict[str, Any] = {"text": content.decode()}
    except UnicodeDecodeError:
        text = {"base64": base64.b64encode(content).decode()}
    if mode & stat.S_IXUSR:
        return {**text, "mode": 0o755}
    return text.get("text", text)


# -- built-in repositories


@functools.cache
def modules() -> tuple[dict[str, Any], ...]:
    """Return the modules from which repositories are built."""
    found = tomllib.loads(resources.files("turnlog.plugins.recipes").joinpath("repositories.toml").read_text())
    return tuple(found["modules"])


def repository(module: dict[str, Any], bug: dict[str, Any], order: random.Random) -> dict[str, Any]:
    """Return a row: two modules with their tests, one of them with the bug. `patch` fixes it."""
    other = order.choice([each for each in modules() if each is not module])
    names = {id(each): order.choice(each["names"]) for each in (module, other)}
    name = names[id(module)]
    files: dict[str, Any] = {"README.md": f"# {name}\n\nTests: `python3 -m unittest`.\n"}
    tests: list[str] = []
    for each in (module, other):
        own = names[id(each)]
        files[f"{own}.py"] = each["code"]
        files[f"test_{own}.py"] = (
            f"import unittest\n\nfrom {own} import *\n\n\nclass Tests(unittest.TestCase):\n{each['tests']}"
        )
        tests += [f"test_{own}.Tests.{test}" for test in re.findall(r"def (test_\w+)", each["tests"])]
    files[f"{name}.py"] = module["code"].replace(bug["right"], bug["wrong"])
    broken = [f"test_{name}.Tests.{test}" for test in bug["breaks"]]
    return {
        "instance_id": f"{module['names'][0]}-{bug['kind'].replace(' ', '-')}",
        "prompt": PROMPT.format(problem=f"{bug['says']} (module `{name}`)"),
        "files": files,
        "patch": _patch(f"{name}.py", files[f"{name}.py"], module["code"]),
        "FAIL_TO_PASS": broken,
        "PASS_TO_PASS": [test for test in tests if test not in broken],
    }


def _patch(path: str, before: str, after: str) -> str:
    """Return a diff in git's format."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n{''.join(lines)}"


RECIPE: Final = Repair()
