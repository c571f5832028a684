"""Program that runs inside the two sandboxes of a PatchVerifier (`patches`): `capture` takes the diff of two trees,
`grade` grades it.

Its source is sent with the call, so it uses the standard library only. `run_tests` runs in whatever Python the image
has (3.7 or later), the rest in the sandbox's own. The result is one line of JSON, the last on stdout. Code under test
never gets that descriptor, and cannot open it, since this process is not dumpable.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unittest
from collections.abc import Callable
from typing import Any

DIFF, BEFORE, AFTER, REPOSITORY = "patch.diff", "before", "after", "repository"
PROGRAM, ASKED = "grading.py", "asked.json"
PLAIN = "* -text !eol !filter !ident !working-tree-encoding !diff !merge\n"
"""Git attributes that override those of the trees, which could name programs and change bytes."""
SHOWN, LOG, REPORT = 10_000, 1 << 16, 4 << 20
"""Maximum sizes in bytes: of a diff and of a log in the answer, as JSON writes them; of a log that is read; of reports
that are read."""
PATHS = 20
BEGAN = time.monotonic()
SHADOWS = {
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "sitecustomize",
    "usercustomize",
    "nose",
    "coverage",
    "hypothesis",
}
"""Modules that a test run imports besides the standard library, and that no repository has as modules of its own."""
PR_SET_DUMPABLE = 4
FAILED, PASSED, ERROR, SKIPPED, MISSING = "f", "p", "e", "s", "m"


class GitFailed(Exception):
    """Git failed; the message is its output."""


def git(*arguments: str, cwd: str, **env: str) -> bytes:
    """Run git without anybody's settings and return its stdout. Raises GitFailed."""
    alone = {
        "PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CEILING_DIRECTORIES": os.path.dirname(os.path.abspath(cwd)), **env,
    }  # fmt: skip
    settings = (
        "core.autocrlf=false", "core.fileMode=true", f"core.hooksPath={os.devnull}", "core.fsmonitor=false",
        "core.protectNTFS=false", "core.protectHFS=false",
    )  # fmt: skip
    given = [part for setting in settings for part in ("-c", setting)]
    done = subprocess.run(
        ["git", *given, *arguments], cwd=cwd, env=alone, stdin=subprocess.DEVNULL, capture_output=True
    )
    if done.returncode:
        raise GitFailed((done.stderr or done.stdout).decode(errors="replace")[-2000:])
    return done.stdout


def capture(source: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Write the diff from `before` to `after` to DIFF, and remove both trees.

    Files that `after` ignores do not count as new. Files in `before` are tracked whether ignored or not."""
    folder = tempfile.mkdtemp()
    place = {"GIT_DIR": os.path.join(folder, "git"), "GIT_INDEX_FILE": os.path.join(folder, "index")}
    trees: dict[str, str] = {}
    for name in (BEFORE, AFTER):
        forced = ["-f"] if name == BEFORE else []
        os.makedirs(name, exist_ok=True)
        _restore_access(name)
        if name == BEFORE:
            git("init", "-q", "--template=", cwd=name, **place)
            os.makedirs(os.path.join(place["GIT_DIR"], "info"), exist_ok=True)
            with open(os.path.join(place["GIT_DIR"], "info", "attributes"), "w") as file:
                file.write(PLAIN)
        else:
            git("read-tree", trees[BEFORE], cwd=name, **place)
        here = {**place, "GIT_WORK_TREE": os.path.abspath(name)}
        try:
            git("add", "-A", *forced, ".", cwd=name, **here)
        except GitFailed as error:
            if name == BEFORE:
                raise
            return {"unapplicable": str(error)}
        trees[name] = git("write-tree", cwd=name, **here).decode().strip()
    plain = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames")
    both = (trees[BEFORE], trees[AFTER])
    diff = git(*plain, "--binary", "--full-index", "--src-prefix=a/", "--dst-prefix=b/", *both, cwd=".", **place)
    lines = git(*plain, "--numstat", "-z", *both, cwd=".", **place).decode(errors="surrogateescape").split("\0")[:-1]
    for name in (BEFORE, AFTER):
        shutil.rmtree(name)
    with open(DIFF, "wb") as out:
        out.write(diff)
    binary = [line[4:] for line in lines if line.startswith("-\t-\t")]
    return {
        "bytes": len(diff),
        "files": len(lines),
        "binary": [_printable_path(path) for path in binary[:PATHS]],
        "diff": _fitting(diff[:SHOWN].decode(errors="replace")),
    }


def _restore_access(root: str) -> None:
    """Restore the access rights that the agent may have removed, so that git can read the whole tree."""
    os.chmod(root, 0o700)
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | (0o700 if name in folders else 0o600))


def grade(source: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Apply DIFF to REPOSITORY, restore protected files, and run the tests or the command.

    An error before the diff is applied is a `fault`: it is not the agent's."""
    folder = tempfile.mkdtemp()
    tests = os.path.join(folder, "tests.diff")
    with open(tests, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        file.write(asked["test_patch"])
    if said := _unable(asked, folder, tests):
        return {"fault": said}
    guarded = set(_paths(tests))
    try:
        changed = _paths(DIFF)
        restored = {path for path in changed if path in guarded or is_protected(path, asked["protected"])}
        restored |= {path for path in changed if _shadows(path)}
        linked = {path for path in changed if _shadows(path, is_link=True)} - restored
        originals = {path: _state(os.path.join(REPOSITORY, path)) for path in restored | linked | guarded}
        git("apply", "--whitespace=nowarn", os.path.abspath(DIFF), cwd=REPOSITORY)
        plain = {path for path in linked if not os.path.islink(os.path.join(REPOSITORY, path))}
    except GitFailed as error:
        return {"unapplicable": str(error)}
    try:
        for path in sorted(originals.keys() - plain):
            _restore(REPOSITORY, path, originals[path])
        if asked["test_patch"]:
            git("apply", "--whitespace=nowarn", tests, cwd=REPOSITORY)
        found = _run(source, asked, folder)
    except (GitFailed, OSError, ValueError) as error:
        return {"crashed": f"{type(error).__name__}: {error}"}
    return {**found, "restored": [_printable_path(path) for path in sorted((restored | linked) - plain)[:PATHS]]}


def _paths(diff: str) -> list[str]:
    if not os.path.getsize(diff):
        return []
    lines = git("apply", "--numstat", "-z", os.path.abspath(diff), cwd=REPOSITORY).split(b"\0")
    return [os.fsdecode(line.split(b"\t", 2)[2]) for line in lines if line]


def _printable_path(path: str) -> str:
    return _fitting(path.encode(errors="replace").decode(), 300)


def _fitting(text: str, most: int = SHOWN, *, end: bool = False) -> str:
    """Return as much of the text as fits into `most` bytes of JSON, where one byte may become six."""
    room, chosen = most, []
    for letter in reversed(text) if end else text:
        room -= len(json.dumps(letter)) - 2
        if room < 0:
            break
        chosen.append(letter)
    return "".join(reversed(chosen) if end else chosen)


def _unable(asked: dict[str, Any], folder: str, tests: str) -> str:
    """Return why no diff could be graded here at all; empty if one can."""
    if asked["test_patch"]:
        try:
            git("apply", "--check", tests, cwd=REPOSITORY)
        except GitFailed as error:
            return f"test_patch of the row does not apply to its repository: {error}"
    if not asked["tests"]:
        return ""
    module = framework(asked["tests"])
    done = subprocess.run(["python3", "-s", "-c", f"import {module}"], cwd=folder, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"python3 of the sandbox cannot import {module}: {done.stderr[-500:]}"


def is_protected(path: str, patterns: list[str]) -> bool:
    """Whether the path matches a pattern: one that ends with / is a folder at any depth, one with a / elsewhere a path,
    any other a name."""
    parts = path.split("/")
    for pattern in patterns:
        if pattern.endswith("/"):
            found = any(fnmatch.fnmatchcase(part, pattern[:-1]) for part in parts)
        else:
            found = fnmatch.fnmatchcase(path if "/" in pattern else parts[-1], pattern.lstrip("/"))
        if found:
            return True
    return False


def _shadows(path: str, *, is_link: bool = False) -> bool:
    """Whether the path would be a new module, outside of any package, that is imported in place of one that a test run
    needs. Call this before the diff is applied. `is_link`: whether to take the path for a link, which may lead to a
    package; that shows only afterwards."""
    parts = path.split("/")
    for depth, part in enumerate(parts):
        folder = os.path.join(REPOSITORY, *parts[:depth])
        if os.path.lexists(os.path.join(folder, part)):
            continue
        name = part.partition(".")[0]
        return (
            (name in SHADOWS or name in sys.stdlib_module_names)
            and (depth < len(parts) - 1 or "." in part or is_link)
            and not os.path.exists(os.path.join(folder, "__init__.py"))
        )
    return False


def _state(path: str) -> tuple[str, Any, int]:
    if os.path.islink(path):
        return "link", os.readlink(path), 0
    if os.path.isfile(path):
        with open(path, "rb") as file:
            return "file", file.read(), os.stat(path).st_mode & 0o777
    return ("folder" if os.path.isdir(path) else "nothing"), None, 0


def _restore(root: str, path: str, state: tuple[str, Any, int]) -> None:
    """Restore the recorded state of the path, replacing links and files that stand in place of its folders."""
    kind, content, mode = state
    place = root
    for part in path.split("/")[:-1]:
        place = os.path.join(place, part)
        if os.path.islink(place) or (os.path.lexists(place) and not os.path.isdir(place)):
            os.unlink(place)
        if kind != "nothing":
            os.makedirs(place, exist_ok=True)
    place = os.path.join(root, path)
    if os.path.isdir(place) and not os.path.islink(place):
        if kind == "folder":
            return
        shutil.rmtree(place)
    elif os.path.lexists(place):
        os.unlink(place)
    if kind == "link":
        os.symlink(content, place)
    elif kind == "file":
        with open(place, "wb") as file:
            file.write(content)
        os.chmod(place, mode)


def _run(source: str, asked: dict[str, Any], folder: str) -> dict[str, Any]:
    """Run the tests or the command in a process of their own, so that whatever the code under test does to its process
    ends with that process."""
    home = os.path.join(folder, "home")
    os.mkdir(home)
    own = {"HOME": home, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    env = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **own}
    read, write = os.pipe()
    if asked["tests"]:
        program, listed = os.path.join(folder, "grading.py"), os.path.join(folder, "tests.json")
        for path, text in ((program, source), (listed, json.dumps(asked["tests"]))):
            with open(path, "w") as file:
                file.write(text)
        argv = ["python3", "-s", "-B", program, str(write), os.path.abspath(REPOSITORY), listed]
    else:
        argv = _command(asked["command"], os.path.join(folder, "script"))
    with open(os.devnull) as nothing:
        running = subprocess.Popen(
            argv, cwd=REPOSITORY, env=env, stdin=nothing, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=(write,) if asked["tests"] else (), start_new_session=True,
            preexec_fn=lambda: _limit_cpu(asked["cpu_s"]),
        )  # fmt: skip
    os.close(write)
    assert running.stdout is not None
    log, reported = Tail(running.stdout.fileno(), LOG), Tail(read, REPORT)
    try:
        running.wait(max(asked["seconds"] - (time.monotonic() - BEGAN), 1.0))
        late = running.returncode == -signal.SIGXCPU
    except subprocess.TimeoutExpired:
        late = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)  # includes the processes that it has left running
    running.wait()
    said = _outcomes(asked["tests"], reported.text()) if asked["tests"] else ""
    return {
        "exit": running.returncode,
        "late": late,
        "tests": said,
        "log": _fitting(log.text()[-SHOWN:].decode(errors="replace"), end=True),
    }


def _limit_cpu(cpu_s: float) -> None:
    """Limit the CPU time to less than the sandbox's own limit, which would kill this process, too, and lose the log:
    the worker may allow less than the verifier requests."""
    allowed, last = resource.getrlimit(resource.RLIMIT_CPU)
    if allowed != resource.RLIM_INFINITY:
        cpu_s = min(cpu_s, 0.8 * allowed)
    most = max(int(cpu_s), 1)
    resource.setrlimit(resource.RLIMIT_CPU, (most, most + 1 if last == resource.RLIM_INFINITY else min(most + 1, last)))


def _command(text: str, path: str) -> list[str]:
    """Return the argument vector: a script runs by its first line, a command in bash, or else in sh."""
    if text.startswith("#!"):
        with open(path, "w") as file:
            file.write(text)
        os.chmod(path, 0o700)
        return [path]
    return [shutil.which("bash") or "sh", "-c", text]


class Tail:
    """Reads a descriptor until its writers have closed it, and keeps the last `most` bytes."""

    def __init__(self, descriptor: int, most: int) -> None:
        self._descriptor, self._most, self._held = descriptor, most, b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> bytes:
        """Return what was read. Does not wait for a process that outlives its parent and continues to write."""
        self._thread.join(1.0)
        return self._held

    def _read(self) -> None:
        while part := os.read(self._descriptor, 1 << 16):
            self._held = (self._held + part)[-self._most :]


def _outcomes(tests: list[str], reported: bytes) -> str:
    """Return a letter for each test: the worst outcome that was reported for it."""
    found: dict[str, str] = {}
    for line in reported.split(b"\n"):
        try:
            test, outcome = json.loads(line)
        except (ValueError, TypeError):
            continue
        if outcome in (FAILED, PASSED, ERROR, SKIPPED) and found.get(test, PASSED) == PASSED:
            found[test] = outcome
    return "".join(found.get(test, MISSING) for test in tests)


def framework(tests: list[str]) -> str:
    """Return the test framework: pytest's node ids contain file names, unittest's are dotted names."""
    return "pytest" if any("::" in test or test.endswith(".py") for test in tests) else "unittest"


def run_tests(descriptor: int, root: str, tests: list[str]) -> None:
    """Run the tests, and write the outcome of each as it ends: ["id", "p"]."""

    def report(test: str, outcome: str) -> None:
        os.write(descriptor, (json.dumps([test, outcome]) + "\n").encode())

    sys.path[:] = [path for path in sys.path[1:] if os.path.abspath(path or ".") != root]
    run = _with_pytest if framework(tests) == "pytest" else _with_unittest
    run(root, tests, report)


def _add_module_path(root: str) -> None:
    """Append the repository to the module search path after the standard library, so that it replaces none of its
    modules."""
    sites = [index for index, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages"))]
    sys.path.insert(sites[0] if sites else len(sys.path), root)


def _with_unittest(root: str, tests: list[str], report: Callable[[str, str], None]) -> None:
    """Run each test by itself, with the fixtures of its class and module. Django writes names as `test_x
    (module.Class)`."""
    _add_module_path(root)
    for test in tests:
        written = re.match(r"^(\w+) \(([\w.]+)\)$", test)
        name = test
        if written is not None:
            name = written[2] if written[2].endswith("." + written[1]) else written[2] + "." + written[1]
        suite, result = unittest.defaultTestLoader.loadTestsFromName(name), unittest.TestResult()
        suite.run(result)
        for _, said in (*result.errors, *result.failures):
            sys.stdout.write(test + "\n" + said)
        sys.stdout.flush()
        if result.errors or result.failures or result.unexpectedSuccesses:
            report(test, ERROR if result.errors else FAILED)
        else:
            report(test, PASSED if result.testsRun > len(result.skipped) else SKIPPED)


def _with_pytest(root: str, tests: list[str], report: Callable[[str, str], None]) -> None:
    """Run the tests in their files, and no other tests there. An expected failure counts as passed, as in SWE-bench."""
    import pytest

    _add_module_path(root)
    wanted = set(tests)

    class _Reports:
        def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
            chosen = [item for item in items if item.nodeid in wanted]
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
            items[:] = chosen

        def pytest_runtest_logreport(self, report: Any) -> None:
            said = {"passed": PASSED, "skipped": PASSED if hasattr(report, "wasxfail") else SKIPPED}
            if report.when == "call" or report.outcome != "passed":
                tell(report.nodeid, said.get(report.outcome, FAILED if report.when == "call" else ERROR))

    tell = report
    files = [file for file in dict.fromkeys(test.partition("::")[0] for test in tests) if os.path.exists(file)]
    if files:
        sys.stdout.flush()
        pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", root, *files], plugins=[_Reports()])


def main(source: str, part: str) -> None:
    """Print what `capture` or `grade` found. Code under test runs below it as the same user and may kill this process;
    then nothing is printed."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        with open(ASKED) as file:
            asked = json.load(file)
        for path in (PROGRAM, ASKED):
            os.unlink(path)
        said = (capture if part == "capture" else grade)(source, asked)
    except FileNotFoundError as error:
        said = {"fault": f"{error.filename or error}: not in the sandbox"}
    except GitFailed as error:
        said = {"fault": f"git: {error}"}
    except Exception:
        said = {"fault": traceback.format_exc()[-2000:]}
    sys.stdout.write("\n" + json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        run_tests(int(sys.argv[1]), sys.argv[2], json.load(file))
