"""Verifiers that a recipe may name beside `FunctionVerifier`; `judges` says how each comes to its verdict.

Every one of them has a name and a version, which stand on the log with the verdict. One that crashes, is not done in
time or answers what is no verdict leaves the session without a reward (`verifier_failure`): never with a reward of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.recipes import Episode, Judged, SandboxAnswer, SandboxCall, TaskRow, Verdict
from turnlog.schemas.events.tools import SandboxSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxVerifier:
    """Runs calls in sandboxes that have never run anything. The reward is 1 if the last one ended well, else 0, unless
    `judge` says more. Calls that the sandbox itself failed are asked again, and are no verdict."""

    name: str
    version: str
    calls: Callable[[Episode], Sequence[SandboxCall]] | str
    """Those of an episode, at least one, run one after the other on the same files; or one command of the shell."""
    judge: Callable[[Episode, Sequence[SandboxAnswer]], Verdict] | None = None
    """The verdict of the calls' answers, where the last one's exit does not say it."""
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """`fresh` it is whatever this says."""
    workspace: bool = True
    """Begin with the files that the session's last call left (`durable_workspace` of the recipe's sandbox), or those
    that the recipe begins with; else with none."""
    timeout_s: float = 300.0
    """For the answer of one call, its wait for a sandbox included."""
    attempts: int = 2
    late: bool = False
    """The session is finished before the verdict is there."""


PROTECTED = (
    "tests/", "test_*.py", "*_test.py", "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
    "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth",
)  # fmt: skip
"""What an agent that mends a Python repository has no business in, and what could decide its tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """How a repaired repository is graded: by `command`, or else by `fail_to_pass` and `pass_to_pass`, all of which
    have to pass."""

    command: str = ""
    """Of the shell, or a script that begins with #!, in the repository: exit status 0 is a pass."""
    fail_to_pass: tuple[str, ...] = ()
    """Tests as pytest (`tests/test_x.py::test_y`) or unittest (`test_x.Class.test_y`) name them."""
    pass_to_pass: tuple[str, ...] = ()
    test_patch: str = ""
    """A diff that brings the tests; what it touches is protected."""
    protected: tuple[str, ...] = PROTECTED
    """Put back before anything is run: folders (a / at the end), paths (a / before that) and names, with wildcards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchVerifier:
    """Grades what an agent changed in a repository: the diff between the session's first workspace and its last is
    taken in a clean sandbox, applied to the first in a second one, protected files are put back, tests run. The reward
    is 1 if all that was asked for passes. The recipe's sandbox has a durable workspace."""

    name: str
    version: str
    grading: Callable[[TaskRow], Grading]
    """Of a row. What it raises is no verdict."""
    diff: Callable[[Episode], str] | None = None
    """The diff that the agent has said, where it does not work in a sandbox."""
    diff_bytes: int = 1 << 20
    """A longer diff is `huge`."""
    binary: bool = False
    """Grade diffs of binary files, too; else they are `binary`."""
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """Where the diff is taken and graded; `fresh` and durable whatever this says. It has git, and for lists of tests a
    python3 that can import what runs them."""
    timeout_s: float = 300.0
    """For the answer of one call, its wait for a sandbox included."""
    attempts: int = 2
    """While the sandbox itself fails."""
    late: bool = False
    """See SandboxVerifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpVerifier:
    """POSTs the episode to a service that answers `{"value": 1.0, "components": {...}, "evidence": ...}`."""

    name: str
    version: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Sent as they are; no place for secrets."""
    secret_headers: Mapping[str, str] = field(default_factory=dict)
    """Header -> environment variable of the runner that holds its value, or whose name with _FILE behind it names a
    file that does."""
    timeout_s: float = 30.0
    """Of one attempt."""
    attempts: int = 4
    """While nobody answers, or 408, 429 or a 5xx comes; pauses grow."""
    late: bool = False
    """See SandboxVerifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeVerifier:
    """A model behind an OpenAI-style endpoint judges the conversation by a rubric. The reward is between 0 and 1.

    With `reference` it is pairwise: the judge says whether the conversation or the reference is better, twice, each of
    them once in first place, since judges favour a place. The reward is the share of what was won, a tie half of it.
    With `opponents` so are sessions of one group with each other, where the whole group is at hand: in a rerun, and not
    while it is lived through. Raises ValueError for both, and for `read` beside it."""

    name: str
    version: str
    base_url: str
    """Ends with /v1, as OpenAI's clients take it."""
    model: str
    rubric: str
    """What is good, in words. How to answer is said behind it."""
    key: str = ""
    """Environment variable that holds the API key, or whose name with _FILE behind it names a file that does."""
    reference: str = ""
    """Key of the task row that holds a reference answer."""
    opponents: int = 0
    """Others of its group that each session is compared with, all of them where it has no more; odd numbers are rounded
    up. Two requests for a comparison, which serves both: a group of n costs at most n times as many requests."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score; the reward is where between them the judge's score lies."""
    read: Callable[[str], float] | None = None
    """Reads the reward of the judge's text where that is no `SCORE: x`; for a rubric that says how to answer itself."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Of the request, beside model and messages."""
    timeout_s: float = 120.0
    """Of one attempt."""
    attempts: int = 4
    """As of HttpVerifier; also while what the judge says cannot be read."""
    late: bool = False
    """See SandboxVerifier."""

    def __post_init__(self) -> None:
        if self.opponents < 0 or (self.opponents and (self.reference or self.read)):
            raise ValueError(
                f"verifier {self.name!r}: opponents are at least 0, and leave no room for reference and read"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVerifier:
    """The sum of the rewards that `env_step` answered since the last reset, and as component `success` whether the task
    was solved."""

    name: str
    version: str
    success: Callable[[Mapping[str, Any]], bool] | None = None
    """Of the last answer of the environment. Without it: `info["success"]`, else an end (`terminated`) with a reward
    above 0."""
    step_rewards: bool = False
    """Each turn's reward goes to the log, too: for `[fold] estimator = "step"`."""
    timeout_s: float = 300.0
    """Of `success`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """The sum of verdicts, each times its weight, with every one as a component by its verifier's name. All of them
    judge at once; if one fails, so does the sum. Raises ValueError for parts of one name."""

    name: str
    version: str
    parts: tuple[tuple[Judged, float], ...]

    def __post_init__(self) -> None:
        names = [part.name for part, _ in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"verifier {self.name!r} needs parts with names of their own, has {names}")

    @property
    def late(self) -> bool:
        """One of its parts is."""
        return any(is_late(part) for part, _ in self.parts)


def is_late(verifier: Judged) -> bool:
    """Whether the session is finished before the verdict is there."""
    return bool(getattr(verifier, "late", False))


def rewarding_steps(verifier: Judged, weight: float = 1.0) -> tuple[EnvironmentVerifier, float] | None:
    """The verifier whose step rewards go to the log, and what they are multiplied with; None: none of it does."""
    if isinstance(verifier, EnvironmentVerifier):
        return (verifier, weight) if verifier.step_rewards else None
    parts = verifier.parts if isinstance(verifier, WeightedSum) else ()
    return next((found for part, share in parts if (found := rewarding_steps(part, weight * share))), None)
