"""Verdicts on what an agent changed: in real sandboxes, each way to end by its name, and agents that cheat."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import importlib.util
import marshal
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.fakes.grounds import Grounds, grounds
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.episodes import Episode, SandboxCall
from turnlog.infra.environments.verifiers import Grading, PatchVerifier
from turnlog.infra.environments.verifiers.grading import is_protected
from turnlog.infra.environments.verifiers.judges import NoVerdict
from turnlog.infra.environments.verifiers.patches import Trees, grade_patch
from turnlog.infra.environments.workspaces import store_files
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure
from turnlog.schemas.events import Outcome, SandboxLimits, SandboxSpec, ToolCallCompleted, ToolStatus
from turnlog.schemas.types import BlobRef

PYTHON = "python{}.{}".format(*sys.version_info)
TESTS = """\
import unittest
import random
from calc import add


class T(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)

    def test_zero(self):
        self.assertEqual(add(0, 0), 0)
"""
FILES = {"calc.py": "def add(a, b):\n    return a - b\n", "test_calc.py": TESTS, ".gitignore": "build/\n"}
MENDS = "sed -i 's/a - b/a + b/' calc.py"
BY_TESTS = Grading(fail_to_pass=("test_calc.T.test_add",), pass_to_pass=("test_calc.T.test_zero",))
BY_COMMAND = Grading(command="python3 -m unittest -q")
VERIFIER = PatchVerifier(name="patch", version="1", grading=lambda task: task["grading"])


@pytest.fixture
async def sandboxes() -> AsyncIterator[Grounds]:
    if shutil.which("git", path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip("git is not installed")
    if await find_isolation_failure(SandboxSettings(first_uid=292_000)):
        pytest.skip("user namespaces are off")
    async with grounds() as found:
        yield found


async def test_a_mended_repository_is_resolved_with_its_diff_and_tests_as_evidence(sandboxes: Grounds) -> None:
    acts = f"{MENDS}; mkdir build __pycache__; touch build/x __pycache__/calc.cpython-311.pyc"
    found = await sandboxes.judged(VERIFIER, {"grading": BY_TESTS}, FILES, acts=acts)
    assert found.value == 1.0
    assert found.components == {
        "resolved": 1.0, "fail_to_pass": 1.0, "pass_to_pass": 1.0, "diff_bytes": float(found.evidence["diff_bytes"])
    }  # fmt: skip
    evidence = found.evidence
    assert (evidence["outcome"], evidence["files"], evidence["exit"], evidence["restored"]) == ("resolved", 1, 0, [])
    assert "-    return a - b\n+    return a + b\n" in evidence["diff"]
    assert evidence["tests"] == {"test_calc.T.test_add": "passed", "test_calc.T.test_zero": "passed"}


async def test_a_worker_may_allow_less_than_the_verifier_asks_for(sandboxes: Grounds) -> None:
    asks = SandboxSpec(limits=SandboxLimits(cpu_s=100 * sandboxes.limits.cpu_s, wall_s=100 * sandboxes.limits.wall_s))
    verifier = dataclasses.replace(VERIFIER, sandbox=asks)
    assert (await sandboxes.judged(verifier, {"grading": BY_TESTS}, FILES, acts=MENDS)).value == 1.0


async def test_what_is_not_mended_is_unresolved_with_the_end_of_the_log(sandboxes: Grounds) -> None:
    found = await sandboxes.judged(VERIFIER, {"grading": BY_TESTS}, FILES, acts="echo '# mended' >>calc.py")
    assert (found.value, found.evidence["outcome"]) == (0.0, "unresolved")
    assert (found.components["fail_to_pass"], found.components["pass_to_pass"]) == (0.0, 1.0)
    assert found.evidence["tests"]["test_calc.T.test_add"] == "failed"
    assert "AssertionError: -1 != 3" in found.evidence["log"]


@pytest.mark.parametrize(("acts", "value"), [(MENDS, 1.0), ("echo >>calc.py", 0.0)])
async def test_a_command_or_a_script_grades_by_its_exit(sandboxes: Grounds, acts: str, value: float) -> None:
    script = "#!/usr/bin/env python3\nimport sys\nsys.path.insert(0, '.')\nimport calc\nsys.exit(calc.add(1, 2) != 3)\n"
    for way in (BY_COMMAND, Grading(command=script)):
        found = await sandboxes.judged(VERIFIER, {"grading": way}, FILES, acts=acts)
        assert (found.value, bool(found.evidence["exit"])) == (value, not value)


async def test_tests_come_with_the_row_and_replace_what_the_agent_put_in_their_place(sandboxes: Grounds) -> None:
    new = TESTS.replace("T(", "New(")
    lines = "".join(f"+{line}\n" for line in new.splitlines())
    patch = (
        "diff --git a/checks.py b/checks.py\nnew file mode 100644\n--- /dev/null\n+++ b/checks.py\n"
        f"@@ -0,0 +1,{len(new.splitlines())} @@\n{lines}"
    )
    row = {"grading": Grading(fail_to_pass=("checks.New.test_add", "test_add (checks.New)"), test_patch=patch)}
    found = await sandboxes.judged(VERIFIER, row, FILES, acts=f"{MENDS}; mkdir checks.py; echo 1 >checks.py/x")
    assert (found.value, found.evidence["restored"]) == (1.0, [])  # the folder is gone, and its file with it
    found = await sandboxes.judged(VERIFIER, row, FILES, acts=f"{MENDS}; echo 1 >checks.py")
    assert (found.value, found.evidence["restored"]) == (1.0, ["checks.py"])
    wrong = {"grading": dataclasses.replace(row["grading"], test_patch=patch.replace("/dev/null", "a/gone"))}
    with pytest.raises(NoVerdict, match="test_patch of the row does not apply"):
        await sandboxes.judged(VERIFIER, wrong, FILES, acts=MENDS)


ENDS: dict[str, tuple[str | dict[str, Any], dict[str, Any], str]] = {
    "nothing was done": ("true", {}, "empty"),
    "only what tools leave behind": ("mkdir -p .git/hooks __pycache__; touch .git/x __pycache__/x.pyc", {}, "empty"),
    "only what the repository ignores": ("mkdir build; touch build/x", {}, "empty"),
    "a binary file": (f"{MENDS}; printf '\\0\\1' >calc.bin", {}, "binary"),
    "more than a diff may have": ("seq 200000 >numbers", {"diff_bytes": 100_000}, "huge"),
    "more than a sandbox holds twice": ("head -c 30000000 /dev/zero >zeros", {}, "huge"),
    "no end": ({**FILES, "calc.py": "while True: pass\n"}, {}, "limit"),
    "letters that are long in JSON": ("head -c 60000 /dev/zero | tr '\\0' '\\1' >ones", {}, "unresolved"),
    "a flood of such": ({**FILES, "calc.py": "while True: print('\1' * 999, flush=True)\n"}, {}, "limit"),
    "an exit": ({**FILES, "calc.py": "import os\nos._exit(0)\n"}, {}, "unresolved"),
    "the end of who grades": ({**FILES, "calc.py": "import os\nos.kill(os.getppid(), 9)\n"}, {}, "crashed"),
    "a flood": ({**FILES, "calc.py": "for _ in range(10**5): print('x' * 99)\n"}, {}, "unresolved"),
}


@pytest.mark.parametrize("case", ENDS)
async def test_each_way_to_end_has_its_name_and_is_worth_nothing(sandboxes: Grounds, case: str) -> None:
    acts, changed, name = ENDS[case]
    spec = SandboxSpec(limits=SandboxLimits(cpu_s=2.0, wall_s=20.0))
    verifier = dataclasses.replace(VERIFIER, sandbox=spec, **changed)
    found = await sandboxes.judged(verifier, {"grading": BY_TESTS}, FILES, acts=acts)
    assert (found.value, found.evidence["outcome"], found.components[name]) == (0.0, name, 1.0)


async def test_binary_files_are_graded_where_the_verifier_says_so(sandboxes: Grounds) -> None:
    verifier = dataclasses.replace(VERIFIER, binary=True)
    acts = f"{MENDS}; printf '\\0\\1' >calc.bin; chmod 755 calc.py; ln -s calc.py link"
    found = await sandboxes.judged(verifier, {"grading": BY_TESTS}, FILES, acts=acts)
    assert (found.value, found.evidence["files"]) == (1.0, 3)


async def test_a_diff_that_was_said_is_graded_and_one_that_does_not_apply_has_its_name(sandboxes: Grounds) -> None:
    good = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    cases = {
        good: "resolved",
        good.replace("a - b", "a * b"): "unapplicable",
        "I would change calc.py": "unapplicable",
        good.replace("calc.py", "../calc.py"): "unapplicable",
        " \n": "empty",
        "diff --git a/x b/x\nGIT binary patch\n": "binary",
    }
    for text, name in cases.items():
        verifier = dataclasses.replace(VERIFIER, diff=lambda _, text=text: text)
        found = await sandboxes.judged(verifier, {"grading": BY_TESTS}, FILES)
        assert found.evidence["outcome"] == name, text


def cheat(tests: str = "") -> str:
    """A compiled module that Python believes without looking at its source."""
    code = compile(tests or "def add(a, b): return a + b", "x", "exec")
    header = importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + bytes(8)  # by hash, unchecked
    return base64.b64encode(header + marshal.dumps(code)).decode()


PASSES = "import unittest\nclass T(unittest.TestCase):\n    def test_add(self): pass\n    def test_zero(self): pass\n"
EXITS = "import os\nos._exit(0)\n"
FORGED = '{"exit": 0, "late": false, "tests": "pp", "log": "", "restored": []}'
HOOK = "mkdir -p .git/hooks; printf '#!/bin/sh\\ntouch /tmp/hooked; sed -i s/a.-.b/a+b/ calc.py\\n' "
CHEATS = {
    "edited tests": f"cat >test_calc.py <<'E'\n{PASSES}E\n",
    "removed tests": "rm test_calc.py",
    "tests that are a link": "mv test_calc.py x; ln -s /dev/null test_calc.py",
    "a fake pytest": (
        f"cat >pytest.py <<'E'\n{EXITS}E\n"
        "mkdir -p _pytest bin; cp pytest.py _pytest/__init__.py; cp pytest.py bin/python3; chmod +x bin/python3"
    ),
    "a fake unittest": f"mkdir unittest; cat >unittest/__main__.py <<'E'\n{EXITS}E\ntouch unittest/__init__.py",
    "a fake module that tests import": f"cat >random.py <<'E'\n{EXITS}E\n",
    "a conftest": f"cat >conftest.py <<'E'\n{EXITS}E\n",
    "settings of pytest": "printf '[pytest]\\naddopts = --collect-only\\n' >pytest.ini",
    "a sitecustomize": f"cat >sitecustomize.py <<'E'\n{EXITS}E\ncp sitecustomize.py usercustomize.py",
    "one in its home": (
        f"d=.local/lib/{PYTHON}/site-packages; mkdir -p $d; cat >$d/usercustomize.py <<'E'\n{EXITS}E\n"
    ),
    "a hook": f"{HOOK} | tee .git/hooks/post-applypatch >.git/hooks/pre-commit; chmod +x .git/hooks/*; echo >>calc.py",
    "attributes that name programs": (
        "mkdir .git; printf '[filter \"x\"]\\nclean = sed s/-/+/\\n[core]\\nfsmonitor = touch x\\n' >.git/config; "
        "echo '* filter=x' >.gitattributes"
    ),
    "compiled tests": (
        f"mkdir __pycache__; base64 -d >__pycache__/test_calc.{sys.implementation.cache_tag}.pyc <<'E'\n"
        f"{cheat(PASSES)}\nE\necho >>calc.py"
    ),
    "a process that goes on": (
        f"setsid sh -c \"while :; do cat >test_calc.py <<'E'\n{PASSES}E\nsleep 0.1; done\" >/dev/null 2>&1 &"
    ),
    "a forged report": f"cat >>calc.py <<'E'\nprint('{FORGED}')\nE\n",
    "a fake pytest that is a link": (
        f"mkdir evil; cat >evil/__init__.py <<'E'\n{EXITS}E\ncp evil/__init__.py evil/__main__.py; "
        "for name in pytest _pytest pluggy unittest; do ln -s evil $name; done"
    ),
    "rights": "chmod 000 test_calc.py; chmod 555 .",
}


@pytest.mark.parametrize(
    "case",
    [case if n % 3 == 0 or n > 14 else pytest.param(case, marks=pytest.mark.long) for n, case in enumerate(CHEATS)],
)
async def test_an_agent_that_cheats_does_not_win_and_does_not_void_its_verdict(sandboxes: Grounds, case: str) -> None:
    ways = [BY_TESTS]
    if "fake" in case or "itecustomize" in CHEATS[case]:
        ways.append(Grading(command=f"python3 -m {'pytest' if 'pytest' in case else 'unittest'} -q"))
    for way in ways:
        found = await sandboxes.judged(VERIFIER, {"grading": way}, FILES, acts=CHEATS[case])
        assert found.value == 0.0, found.evidence
        assert found.evidence["outcome"] in ("unresolved", "empty")


async def test_a_plain_file_with_the_name_of_a_module_stays(sandboxes: Grounds) -> None:
    found = await sandboxes.judged(VERIFIER, {"grading": BY_TESTS}, FILES, acts=f"{MENDS}; touch code pluggy token")
    assert (found.value, found.evidence["restored"]) == (1.0, [])


async def test_an_agent_that_mends_and_cheats_is_graded_by_what_it_mended(sandboxes: Grounds) -> None:
    acts = f"{MENDS}; {CHEATS['a conftest']}\n{CHEATS['edited tests']}\n{CHEATS['a fake module that tests import']}"
    found = await sandboxes.judged(VERIFIER, {"grading": BY_TESTS}, FILES, acts=acts)
    assert found.value == 1.0
    assert found.evidence["restored"] == ["conftest.py", "random.py", "test_calc.py"]


# -- what is no verdict


def completed(**changed: Any) -> ToolCallCompleted:
    plain = ToolCallCompleted(
        event_id="e", run_id="r", group_id="g", session_id="s", floor=0, rollout_id="o", call_id="c", call_seq=0,
        status=ToolStatus.ok, reason="", exit_code=0, output=b"", full_output=None, duration_s=0.0, queue_s=0.0,
        workspace=None, attempt=1, worker="w", cached=False,
    )  # fmt: skip
    return dataclasses.replace(plain, **changed)


async def refused(
    run: Callable[[str], ToolCallCompleted], *, grading: Any = BY_TESTS, first: bool = True, **changed: Any
) -> NoVerdict:
    blobs = MemoryBlobs()

    async def ran(part: str, workspace: BlobRef, call: SandboxCall) -> ToolCallCompleted:
        await asyncio.sleep(0)
        return run(part)

    trees = Trees(
        first=await store_files(FILES, blobs) if first else None,
        last=await store_files({**FILES, "calc.py": ""}, blobs),
    )
    verifier = dataclasses.replace(VERIFIER, grading=lambda _: grading, **changed)
    episode = Episode(task={}, messages=(), outcome=Outcome.completed, reason="")
    with pytest.raises(NoVerdict) as failed:
        await grade_patch(verifier, episode, trees, blobs, ran)
    return failed.value


async def test_a_sandbox_without_git_or_an_answer_to_a_diff_is_no_verdict() -> None:
    missing = b'{"fault": "git: not in the sandbox"}\n'
    for answer in (missing, b"", b"[]", b"Traceback"):
        said = await refused(lambda part, answer=answer: completed(output=answer))
        assert str(said).startswith("sandbox: verifier patch cannot take the diff")


async def test_a_repository_that_fits_no_sandbox_is_no_verdict_and_one_that_does_is_the_agents() -> None:
    blobs = MemoryBlobs()
    diff = await store_files({"patch.diff": "--- a/calc.py\n"}, blobs)
    taken = completed(output=b'{"bytes": 9, "files": 1, "binary": [], "diff": "--- a"}', workspace=diff)
    full = completed(status=ToolStatus.resource_limit, reason="disk_bytes", attempt=0)

    async def run(part: str, workspace: BlobRef, call: SandboxCall) -> ToolCallCompleted:
        await asyncio.sleep(0)
        return taken if part == "capture" else full

    trees = Trees(first=await store_files(FILES, blobs), last=await store_files({**FILES, "calc.py": ""}, blobs))
    episode = Episode(task={"grading": BY_TESTS}, messages=(), outcome=Outcome.completed, reason="")
    with pytest.raises(NoVerdict, match=r"refused: the repository of \d+ bytes meets disk_bytes"):
        await grade_patch(VERIFIER, episode, trees, blobs, run)
    full = dataclasses.replace(full, attempt=1, output=b"so far")
    found = await grade_patch(VERIFIER, episode, trees, blobs, run)
    assert (found.value, found.evidence["outcome"], found.evidence["log"]) == (0.0, "limit", "so far")


async def test_a_row_that_cannot_be_graded_is_no_verdict() -> None:
    def never(part: str) -> ToolCallCompleted:
        raise AssertionError(part)

    assert "neither a command nor tests" in str(await refused(never, grading=Grading()))
    assert "not a Grading" in str(await refused(never, grading=None))
    assert "began with no files" in str(await refused(never, first=False))
    assert "not text" in str(await refused(never, diff=lambda _: None))
    assert "ZeroDivisionError" in str(await refused(never, diff=lambda _: 1 / 0))


@pytest.mark.parametrize(
    ("path", "patterns", "found"),
    [
        ("tests/a/b.py", ["tests/"], True),
        ("a/tests/b.py", ["tests/"], True),
        ("tests", ["tests/"], True),
        ("mytests/b.py", ["tests/"], False),
        ("a/test_b.py", ["test_*.py"], True),
        ("a/b.py", ["/b.py"], False),
        ("b.py", ["/b.py"], True),
        ("a/b.py", ["a/*.py"], True),
    ],
)
def test_patterns_name_files_folders_and_paths(path: str, patterns: list[str], found: bool) -> None:
    assert is_protected(path, patterns) is found
