"""Recipe `repair`: small repositories whose bugs are real, and rows as SWE-bench writes them."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from turnlog.infra.environments import sources
from turnlog.infra.environments.verifiers import grading as program
from turnlog.infra.environments.verifiers.kinds import PROTECTED
from turnlog.plugins.recipes.repair import (
    RECIPE,
    RowUnusable,
    demonstration,
    edit,
    grading,
    modules,
    read_folder,
    repository,
)
from turnlog.producers.tasks import RowRefused, read_dataset

BUGS = [(module, bug) for module in modules() for bug in module["bugs"]]
ROW = {
    "repo": "acme/calc",
    "instance_id": "acme__calc-1",
    "base_commit": "0" * 40,
    "problem_statement": "add subtracts",
    "patch": "",
    "test_patch": "--- a/x\n+++ b/x",
    "FAIL_TO_PASS": '["tests/test_x.py::test_a"]',
    "PASS_TO_PASS": ["tests/test_x.py::test_b"],
}


def outcomes(folder: Path, files: dict[str, str], tests: list[str], patch: str = "") -> dict[str, str]:
    """What the program that grades says of each test, on a copy of the files with the patch."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    if patch:
        subprocess.run(["git", "apply", "-"], cwd=folder, input=patch.encode(), check=True)
    listed = folder / "tests.json"
    listed.write_text(json.dumps(tests))
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reports:
        subprocess.run(
            [sys.executable, "-s", "-B", program.__file__, str(write), str(folder), str(listed)],
            cwd=folder, pass_fds=(write,), stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        os.close(write)
        return {test: outcome for line in reports for test, outcome in [json.loads(line)]}


@each(("module", "bug"), BUGS, ids=lambda each: each.get("kind") or each["names"][0])
def test_a_bug_can_be_mended_by_one_edit(module: dict[str, Any], bug: dict[str, Any]) -> None:
    mends, broken = edit(module["code"], bug), module["code"].replace(bug["right"], bug["wrong"])
    assert broken.count(mends["old"]) == 1, "edit_file takes no other"
    assert broken.replace(mends["old"], mends["new"]) == module["code"]


def test_demonstrations_mend_less_than_half_of_their_bugs() -> None:
    generator = random.Random(0)
    told = [demonstration(generator).messages[-2]["content"] for _ in range(1000)]
    assert 0.3 < sum(one.startswith("replaced") for one in told) / 1000 < 0.6


@pytest.mark.parametrize(
    ("module", "bug"),
    [case if number % 10 == 0 else pytest.param(*case, marks=pytest.mark.long) for number, case in enumerate(BUGS)],
    ids=lambda each: each.get("kind") or each["names"][0],
)  # each runs pytest three times in processes of its own
def test_the_bug_of_a_repository_is_real_and_its_patch_alone_mends_it(
    module: dict[str, Any], bug: dict[str, Any], tmp_path: Path
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    row = repository(module, bug, random.Random(7))
    fail, passing = row["FAIL_TO_PASS"], row["PASS_TO_PASS"]
    assert fail
    before = outcomes(tmp_path / "r", row["files"], fail + passing)
    assert {test for test, outcome in before.items() if outcome != "p"} == set(fail)
    assert before.keys() == {*fail, *passing}
    unrelated = {**row["files"], "README.md": "mended\n"} | {
        path: text + "\n\nMENDED = True\n" for path, text in row["files"].items() if path.endswith(".py")
    }
    assert outcomes(tmp_path / "r", unrelated, fail + passing) == before
    assert set(outcomes(tmp_path / "r", row["files"], fail + passing, row["patch"]).values()) == {"p"}


def test_there_are_twenty_bugs_at_least_in_an_order_of_the_seed() -> None:
    first, again, other = [list(itertools.islice(RECIPE.tasks(seed), 2 * len(BUGS))) for seed in (3, 3, 4)]
    assert first == again != other
    assert len({row["instance_id"] for row in first[: len(BUGS)]}) == len(BUGS) >= 20
    assert len({row["FAIL_TO_PASS"][0] for row in first}) > len(BUGS)
    assert max(len(json.dumps(row)) for row in first) < 10_000
    assert len({bug["kind"] for _, bug in BUGS}) >= 10


def test_the_recipe_is_offered_and_its_own_dataset_is_read(tmp_path: Path) -> None:
    recipe = sources.task_source("repair")
    recipe.write_dataset(tmp_path / "tasks.jsonl", 4, 0)
    dataset = read_dataset(tmp_path / "tasks.jsonl", recipe)
    task = json.loads(dataset.task(1))
    assert recipe.task(task).files == task["files"]
    assert recipe.task(task).messages[0]["content"].startswith("The folder you are in")
    assert RECIPE.verifier.sandbox == RECIPE.sandbox
    assert grading(task).fail_to_pass == tuple(task["FAIL_TO_PASS"])
    assert recipe.task(task).sandbox_tools == tuple(tool["function"]["name"] for tool in recipe.task(task).tools)


def test_rows_of_swe_bench_are_read_as_they_are_with_files_from_beside_them(tmp_path: Path) -> None:
    folder = tmp_path / "acme__calc-1"
    for path, content in {"calc.py": b"x", "run": b"#!", ".git/HEAD": b"", "d/blob": b"\xff"}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    (folder / "run").chmod(0o755)
    (folder / "link").symlink_to("calc.py")
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    dataset = read_dataset(tmp_path / "rows.jsonl", RECIPE)
    assert b"files" not in dataset.rows[0]
    task = json.loads(dataset.task(0))
    assert task["files"] == {
        "calc.py": "x", "run": {"text": "#!", "mode": 0o755}, "d/blob": {"base64": "/w=="}, "link": {"link": "calc.py"},
    }  # fmt: skip
    assert "add subtracts" in task["prompt"]
    found = grading(task)
    assert (found.fail_to_pass, found.pass_to_pass) == (("tests/test_x.py::test_a",), ("tests/test_x.py::test_b",))
    assert (found.command, found.test_patch, found.protected) == ("", "--- a/x\n+++ b/x\n", PROTECTED)
    assert grading({**ROW, "f2p_script": "#!/bin/sh\n", "protected": ["x"]}).protected == ("x",)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "acme/calc at 0{40} is not in .*acme__calc-1: nothing is cloned here"),
        ({"folder": "../x"}, "does not lie beside the dataset"),
        ({"folder": "."}, "does not lie beside the dataset"),
        ({"instance_id": None}, "neither `files` nor `folder`"),
        ({"problem_statement": " "}, "neither `prompt` nor `problem_statement`"),
        ({"FAIL_TO_PASS": "[]"}, "none of `eval_cmd`"),
        ({"FAIL_TO_PASS": "test_a"}, "`FAIL_TO_PASS` is neither a list"),
        ({"PASS_TO_PASS": [1]}, "`PASS_TO_PASS` is no list"),
        ({"eval_cmd": 3}, "are text"),
        ({"protected": "x"}, "`protected` is a list"),
    ],
)
def test_a_row_that_is_no_task_is_refused_before_the_run_by_key_and_line(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    (tmp_path / "rows.jsonl").write_text("\n" + json.dumps(ROW | changed) + "\n")
    with pytest.raises(RowRefused, match=f"rows.jsonl, line 2: .*{said}"):
        read_dataset(tmp_path / "rows.jsonl", RECIPE)


def test_a_repository_that_is_too_large_for_a_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(11))
    with pytest.raises(RowUnusable, match="more than 10 bytes"):
        read_folder(tmp_path, most_bytes=10)
    with pytest.raises(RowUnusable, match="was not read"):
        RECIPE.files({"prompt": "x"})


def test_tests_are_named_as_pytest_unittest_and_django_name_them(tmp_path: Path) -> None:
    unit = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"
        "    def test_b(self): self.skipTest('')\n"
    )
    plain = (
        "import pytest\n@pytest.mark.parametrize('x', [1, 2])\ndef test_a(x): assert x == 1\n"
        "@pytest.mark.xfail\ndef test_x(): assert False\n@pytest.fixture\ndef broken(): 1 / 0\n"
        "def test_e(broken): pass\ndef test_s(): pytest.skip('')\ndef test_not_asked_for(): assert False\n"
    )
    files = {"test_u.py": unit, "d/test_p.py": plain}
    tests = ["test_u.T.test_a", "test_a (test_u.T)", "test_a (test_u.T.test_a)", "test_u.T.test_b", "gone.T.test_x"]
    assert outcomes(tmp_path / "r", files, tests) == dict(zip(tests, "pppse", strict=True))
    tests = ["d/test_p.py::test_a[1]", "d/test_p.py::test_a[2]", "d/test_p.py::test_x", "d/test_p.py::test_e"]
    tests += ["d/test_p.py::test_s", "test_u.py::T::test_a"]
    assert outcomes(tmp_path / "r", files, [*tests, "gone.py::test_y"]) == dict(zip(tests, "pfpesp", strict=True))
