"""Implementation of PatchVerifier: the diff is taken in one clean sandbox and graded in another (`grading`).

Two lists of files are compared by their hashes, so that the first sandbox holds only the files that differ. Each
outcome has a name in `Graded`, which is part of evidence and components. All outcomes but `resolved` have reward 0 and
are attributed to the agent. If our sandbox fails, or the row cannot be graded, there is no reward.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from turnlog.infra.blobs import Blobs
from turnlog.infra.environments.episodes import Episode, SandboxCall, Verdict
from turnlog.infra.environments.verifiers.grading import AFTER, ASKED, BEFORE, DIFF, PASSED, PROGRAM, REPOSITORY
from turnlog.infra.environments.verifiers.judges import Cause, NoVerdict, foreign, tail
from turnlog.infra.environments.verifiers.kinds import Grading, PatchVerifier
from turnlog.infra.environments.workspaces import (
    FileKind,
    NotAWorkspace,
    StoredEntry,
    WorkspaceManifest,
    fetch_manifest,
    join_trees,
    put,
    store_files,
)
from turnlog.schemas.events import ToolCallCompleted, ToolStatus
from turnlog.schemas.types import BlobRef

SOURCE: Final = Path(__file__).with_name("grading.py").read_text()
CALL: Final = """\
source = open({program!r}).read()
space = {{"__name__": "grading"}}
exec(compile(source, {program!r}, "exec"), space)
space["main"](source, {part!r})
"""
DROSS: Final = frozenset((".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"))
"""Names that are excluded from diffs at any depth: files that tools leave behind, and files that Python would use in
place of a source."""
NAMED = 200
"""Maximum number of tests named in evidence; those that did not pass come first."""
TEXT = 16_000
"""Maximum characters of a diff or a log in evidence."""
SHARE = 3
"""Changed files may take at most 1/SHARE of disk_bytes, since the sandbox holds them twice, and their diff."""
OUTCOMES: Final = {"p": "passed", "f": "failed", "e": "error", "s": "skipped", "m": "missing"}


class Graded(StrEnum):
    """Outcome of grading a diff."""

    resolved = "resolved"
    unresolved = "unresolved"
    """A test or command that had to pass did not."""
    empty = "empty"
    huge = "huge"
    binary = "binary"
    unapplicable = "unapplicable"
    """Git cannot make a diff of the files, or cannot apply it."""
    limit = "limit"
    """Grading exceeded a limit of its sandbox, time limits included."""
    crashed = "crashed"
    """Grading crashed or was killed because of the code that it graded."""


Run = Callable[[str, BlobRef, SandboxCall], Awaitable[ToolCallCompleted]]
"""Runs a call in a clean sandbox that holds a workspace. Arguments: `capture` or `grade`, workspace, call. Raises
NoVerdict if the sandbox is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """A session's files."""

    first: BlobRef | None
    last: BlobRef | None
    """Last workspace; None if the session made no call."""
    brought: Mapping[str, str] = field(default_factory=dict)
    """Path -> text of files that were put into the workspace to run the agent, and are not its work."""


class Ended(Exception):
    """Grading ends early with a verdict."""

    def __init__(self, graded: Graded, why: str = "", **evidence: Any) -> None:
        super().__init__(why)
        self.verdict = _verdict(graded, {}, {**({"why": tail(why, 2000)} if why else {}), **evidence})


async def grade_patch(verifier: PatchVerifier, episode: Episode, trees: Trees, blobs: Blobs, run: Run) -> Verdict:
    """Return the verdict, with the diff, the end of the log, the exit status and each test's outcome as evidence.
    Raises NoVerdict, StoreUnavailable."""
    grading = _check_grading(await foreign(verifier.timeout_s, verifier.grading, episode.task))
    if trees.first is None:
        raise NoVerdict(Cause.garbage, f"verifier {verifier.name}: the session began with no files to grade a diff on")
    try:
        before = await fetch_manifest(trees.first, blobs)
        taken, about = await _take_diff(verifier, episode, before, trees, blobs, run)
        return await _grade_diff(verifier, grading, before, (taken, about), blobs, run)
    except Ended as ended:
        return ended.verdict
    except NotAWorkspace as error:
        raise NoVerdict(Cause.sandbox, str(error), again=True) from error


def _check_grading(grading: Any) -> Grading:
    if not isinstance(grading, Grading):
        raise NoVerdict(Cause.garbage, f"grading of the verifier says {type(grading).__name__}, not a Grading")
    if not grading.command and not grading.fail_to_pass:
        raise NoVerdict(Cause.garbage, "the row says neither a command nor tests that have to pass")
    return grading


async def _take_diff(
    verifier: PatchVerifier, episode: Episode, before: WorkspaceManifest, trees: Trees, blobs: Blobs, run: Run
) -> tuple[StoredEntry, dict[str, Any]]:
    """Return the diff as a file, and its evidence. Raises Ended if there is no diff that can be graded, NoVerdict."""
    if verifier.diff is not None:
        text = await foreign(verifier.timeout_s, verifier.diff, episode)
        if not isinstance(text, str):
            raise NoVerdict(Cause.garbage, f"diff of the verifier says {type(text).__name__}, not text")
        said: dict[str, Any] = {"bytes": len(text.encode(errors="replace")), "diff": text, "binary": _binary_in(text)}
        place = await store_files({DIFF: text.encode(errors="replace").decode()}, blobs)
    else:
        changed = _changed_files(
            before, await fetch_manifest(trees.last, blobs) if trees.last else before, trees.brought
        )
        size = sum(stored.entry.size for files in changed.values() for stored in files)
        if size > verifier.sandbox.limits.disk_bytes // SHARE:
            raise Ended(Graded.huge, f"the files that changed have {size} bytes", changed_bytes=size)
        place, said = await _capture_diff(verifier, changed, blobs, run)
    about = {"diff": _truncate_text(said["diff"], first=True), "diff_bytes": said["bytes"], "files": said.get("files")}
    if not said["bytes"] or not said["diff"].strip():
        raise Ended(Graded.empty)
    if said["bytes"] > verifier.diff_bytes:
        raise Ended(Graded.huge, f"the diff has {said['bytes']} bytes, {verifier.diff_bytes} at most", **about)
    if said["binary"] and not verifier.binary:
        raise Ended(Graded.binary, f"binary files: {', '.join(said['binary'][:20])}", **about)
    return _file(await fetch_manifest(place, blobs), DIFF), about


def _changed_files(
    before: WorkspaceManifest, after: WorkspaceManifest, brought: Mapping[str, str]
) -> dict[str, list[StoredEntry]]:
    """Return the files of both trees that differ, and the .gitignore files that both have. Raises Ended if there is no
    difference."""
    trees = [{stored.entry.path: stored for stored in tree.files if _counts(stored)} for tree in (before, after)]
    ours = set(brought) - trees[0].keys()
    paths = {path for path in trees[0].keys() | trees[1].keys() if not _same(*(tree.get(path) for tree in trees))}
    if not paths - ours:
        raise Ended(Graded.empty)
    ignoring = {path for path in trees[0].keys() & trees[1].keys() if path.rpartition("/")[2] == ".gitignore"}
    wanted = (paths - ours) | ignoring
    both = zip((BEFORE, AFTER), trees, strict=True)
    return {name: [tree[path] for path in sorted(wanted & tree.keys())] for name, tree in both}


def _counts(stored: StoredEntry) -> bool:
    parts = stored.entry.path.split("/")
    return stored.entry.kind is not FileKind.folder and not DROSS & {*parts} and not parts[-1].endswith(".pyc")


def _same(one: StoredEntry | None, other: StoredEntry | None) -> bool:
    if one is None or other is None:
        return one is other
    about = [(each.sha256, each.entry.kind, each.entry.mode, each.entry.target) for each in (one, other)]
    return about[0] == about[1]


async def _capture_diff(
    verifier: PatchVerifier, changed: Mapping[str, Iterable[StoredEntry]], blobs: Blobs, run: Run
) -> tuple[BlobRef, dict[str, Any]]:
    """Return the workspace that holds the diff, and git's report. None of the agent's code has run there."""
    done = await run("capture", *await _call("capture", {}, changed, blobs))
    said = _answer(done)
    if done.status in (ToolStatus.timeout, ToolStatus.resource_limit):
        raise Ended(Graded.limit, f"taking the diff met {done.reason}")
    if said is None or "fault" in said or done.workspace is None:
        text = said["fault"] if said and "fault" in said else done.output.decode(errors="replace")
        raise NoVerdict(Cause.sandbox, f"verifier {verifier.name} cannot take the diff: {text}")
    if "unapplicable" in said:
        raise Ended(Graded.unapplicable, said["unapplicable"])
    return done.workspace, said


async def _grade_diff(
    verifier: PatchVerifier, grading: Grading, before: WorkspaceManifest, taken: tuple[StoredEntry, dict[str, Any]],
    blobs: Blobs, run: Run,
) -> Verdict:  # fmt: skip
    tests, limits = [*grading.fail_to_pass, *grading.pass_to_pass], verifier.sandbox.limits
    asked = {
        "command": grading.command,
        "tests": [] if grading.command else tests,
        "test_patch": grading.test_patch,
        "protected": [*grading.protected, *_files_of(tests)],
        "seconds": limits.wall_s * 0.9,
        "cpu_s": limits.cpu_s * 0.8,
    }
    files = [stored for stored in before.files if not DROSS & {*stored.entry.path.split("/")}]
    done = await run("grade", *await _call("grade", asked, {REPOSITORY: files, "": [taken[0]]}, blobs))
    said, about = _answer(done), taken[1]
    if done.status is ToolStatus.resource_limit and not done.attempt:
        raise NoVerdict(Cause.refused, f"the repository of {before.size} bytes meets {done.reason} before it is graded")
    if done.status in (ToolStatus.timeout, ToolStatus.resource_limit):
        raise Ended(Graded.limit, f"grading met {done.reason}", **about, log=_truncate_text(_output_text(done)))
    if said is None or "crashed" in said:
        why = said["crashed"] if said else f"the grading ended as {done.status.value}, exit {done.exit_code}"
        raise Ended(Graded.crashed, why, **about, log=_truncate_text(_output_text(done)))
    if "fault" in said:
        raise NoVerdict(Cause.sandbox, f"verifier {verifier.name} cannot grade: {said['fault']}")
    if "unapplicable" in said:
        raise Ended(Graded.unapplicable, said["unapplicable"], **about)
    about |= {"exit": said["exit"], "log": _truncate_text(said["log"]), "restored": said["restored"]}
    if said["late"]:
        raise Ended(Graded.limit, f"not done in {asked['seconds']:g} s, or {asked['cpu_s']:g} s of cpu", **about)
    if grading.command:
        return _verdict(Graded.resolved if said["exit"] == 0 else Graded.unresolved, {}, about)
    return _by_tests(grading, said["tests"], about)


def _by_tests(grading: Grading, letters: str, about: Mapping[str, Any]) -> Verdict:
    ids = [*grading.fail_to_pass, *grading.pass_to_pass]
    found = list(zip(ids, letters, strict=True))
    split = len(grading.fail_to_pass)
    shares = {
        name: sum(letter == PASSED for _, letter in part) / len(part)
        for name, part in (("fail_to_pass", found[:split]), ("pass_to_pass", found[split:]))
        if part
    }
    solved = all(letter == PASSED for _, letter in found)
    shown = sorted(found, key=lambda one: one[1] == PASSED)[:NAMED]
    tests = {test[:300]: OUTCOMES[letter] for test, letter in shown}
    return _verdict(
        Graded.resolved if solved else Graded.unresolved, shares, {**about, "tests": tests, "of_tests": len(found)}
    )


def _verdict(graded: Graded, components: Mapping[str, float], about: Mapping[str, Any]) -> Verdict:
    size = {"diff_bytes": float(about["diff_bytes"])} if "diff_bytes" in about else {}
    return Verdict(
        float(graded is Graded.resolved),
        {graded.value: 1.0, **components, **size},
        {"outcome": graded.value, **about},
    )


async def _call(
    part: str, asked: Mapping[str, Any], files: Mapping[str, Iterable[StoredEntry]], blobs: Blobs
) -> tuple[BlobRef, SandboxCall]:
    """Return the workspace that a part begins with, and its call."""
    ours = await fetch_manifest(await store_files({PROGRAM: SOURCE, ASKED: json.dumps(asked)}, blobs), blobs)
    trees = {name: list(stored) for name, stored in files.items()}
    trees[""] = [*trees.get("", []), *ours.files]
    code = CALL.format(program=PROGRAM, part=part)
    return await put(join_trees(trees), blobs), SandboxCall("python", {"code": code})


def _answer(done: ToolCallCompleted) -> dict[str, Any] | None:
    """Return the program's result, its last line, or None if it wrote none."""
    if done.status is not ToolStatus.ok:
        return None
    try:
        said = json.loads(done.output.strip().rpartition(b"\n")[2])
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _output_text(done: ToolCallCompleted) -> str:
    return done.output.decode(errors="replace")


def _files_of(tests: Iterable[str]) -> list[str]:
    """Return the files that tests are in, according to their names: a/b.py::c, or a.b.C.c."""
    found = set()
    for test in tests:
        file, _, _ = test.partition("::")
        parts = file.rpartition("(")[2].rstrip(")").split(".")
        found |= {file} if file.endswith(".py") else {"/".join(parts[:end]) + ".py" for end in range(1, len(parts))}
    return sorted(f"/{path}" for path in found)


def _file(manifest: WorkspaceManifest, path: str) -> StoredEntry:
    found = next((stored for stored in manifest.files if stored.entry.path == path), None)
    if found is None or found.entry.kind is not FileKind.file:
        raise NotAWorkspace(f"{path} is not in the workspace that was to hold it")
    return found


def _binary_in(diff: str) -> list[str]:
    lines = diff.split("\n")
    return [line for line in lines if line == "GIT binary patch" or line.startswith("Binary files ")]


def _truncate_text(text: str, *, first: bool = False) -> str:
    """Return as much of the text as evidence holds, escapes included: its end, or its beginning with `first`."""
    most = len(text) * TEXT // max(len(json.dumps(text)), TEXT)
    return text[:most] if first else tail(text, most)
