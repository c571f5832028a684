"""The kinds of verifiers and their parameters, as recipes declare them, and the sessions of one group that are judged
against each other.

Live, a session is judged before its group is complete: the other sessions may be at any point, or not have begun.
Callers that have the whole group pass it to judges as Means.group.

RecipeError
└── NeedsGroup   a verifier of the environment can judge only recorded groups
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.environments.episodes import Episode, Judged, SandboxAnswer, SandboxCall, TaskRow, Verdict
from turnlog.infra.environments.sources import RecipeError
from turnlog.infra.environments.tasks import TaskSource
from turnlog.schemas import ids
from turnlog.schemas.events.tools import SandboxSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxVerifier:
    """Runs calls in sandboxes that have never run anything. The reward is 1 if the last call succeeded, else 0, unless
    `judge` computes another one. Calls that fail because of the sandbox itself are repeated, and give no reward."""

    name: str
    version: str
    calls: Callable[[Episode], Sequence[SandboxCall]] | str
    """The calls for an episode, at least one, which are run one after the other on the same files; or one shell
    command."""
    judge: Callable[[Episode, Sequence[SandboxAnswer]], Verdict] | None = None
    """Computes the reward from the answers of the calls, if the exit status of the last one is not enough."""
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """Sandbox of the calls; `fresh` is always set."""
    workspace: bool = True
    """True: begin with the files that the session's last call left (`durable_workspace` of the environment's sandbox),
    or with the environment's initial files. False: begin with no files."""
    arrange: Callable[[Episode, Sequence[str]], Mapping[str, str]] | None = None
    """Chooses and moves the files that the calls begin with: given the paths of the session's last workspace, returns
    new path -> path. Without it they begin with all of them."""
    timeout_s: float = 300.0
    """Maximum seconds for the answer of one call, including its wait for a sandbox."""
    attempts: int = 2
    late: bool = False
    """True if the session is finished before the reward is there."""


PROTECTED = (
    "tests/", "test_*.py", "*_test.py", "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
    "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth",
)  # fmt: skip
"""Files that an agent has no reason to change when it repairs a Python repository, or that could decide its tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grading:
    """Checks of a repaired repository: `command`, or else the tests in `fail_to_pass` and `pass_to_pass`, which must
    all pass."""

    command: str = ""
    """Shell command, or a script that begins with #!, run in the repository; exit status 0 is a pass."""
    fail_to_pass: tuple[str, ...] = ()
    """Tests by their names in pytest (`tests/test_x.py::test_y`) or unittest (`test_x.Class.test_y`)."""
    pass_to_pass: tuple[str, ...] = ()
    test_patch: str = ""
    """A diff that adds the tests; the files that it touches are protected."""
    protected: tuple[str, ...] = PROTECTED
    """Files to restore before anything is run: folders (with / at the end), paths (with / elsewhere) and names;
    wildcards are allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchVerifier:
    """Grades an agent's changes to a repository. The reward is 1 if all required tests or the command pass.

    A clean sandbox takes the diff between the session's first and last workspace. A second one applies it to the first
    workspace, restores protected files and runs the tests. The environment's sandbox must have a durable workspace."""

    name: str
    version: str
    grading: Callable[[TaskRow], Grading]
    """Returns the grading of a task row. If it raises, there is no reward."""
    diff: Callable[[Episode], str] | None = None
    """Returns the diff from the agent's messages, for agents that do not work in a sandbox."""
    diff_bytes: int = 1 << 20
    """Maximum diff size in bytes; a longer diff is `huge`."""
    binary: bool = False
    """True if diffs of binary files are graded, too; otherwise they are `binary`."""
    sandbox: SandboxSpec = field(default_factory=SandboxSpec)
    """Sandbox in which the diff is taken and graded; it is always `fresh` and durable. It needs git, and for lists of
    tests a python3 that can import the test framework."""
    timeout_s: float = 300.0
    """Maximum seconds for the answer of one call, including its wait for a sandbox."""
    attempts: int = 2
    """Maximum number of attempts while the sandbox itself fails."""
    late: bool = False
    """See SandboxVerifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpVerifier:
    """POSTs the episode to a service that answers `{"value": 1.0, "components": {...}, "evidence": ...}`."""

    name: str
    version: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers sent as they are; not for secrets."""
    secret_headers: Mapping[str, str] = field(default_factory=dict)
    """Header -> environment variable of the runner that holds its value, or whose name with _FILE appended names a file
    that holds it."""
    timeout_s: float = 30.0
    """Maximum seconds for one attempt."""
    attempts: int = 4
    """Maximum number of attempts while the service does not answer, or answers 408, 429 or 5xx; the pauses grow."""
    late: bool = False
    """See SandboxVerifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeVerifier:
    """A model behind an OpenAI-style endpoint judges the conversation by a rubric. The reward is between 0 and 1.

    With `reference` the judgement is pairwise: the judge compares the conversation with the reference twice, each of
    them once in first place, because judges favor a position. The reward is the share of comparisons won; a tie counts
    half.

    With `opponents`, sessions of one group are compared with each other in the same way. This requires the whole group,
    so it works in a rerun and not live. Raises ValueError if both are set, or `read` with `opponents`."""

    name: str
    version: str
    base_url: str
    """Base URL that ends with /v1, as OpenAI's clients take it."""
    model: str
    rubric: str
    """Description of a good conversation, in words. Instructions for the format of the answer are appended."""
    key: str = ""
    """Environment variable that holds the API key, or whose name with _FILE appended names a file that holds it."""
    reference: str = ""
    """Key in the task row of a reference answer."""
    opponents: int = 0
    """Number of other sessions of the group that each session is compared with, or all of them if the group is smaller;
    odd numbers are rounded up. A comparison takes two requests and serves both sessions: a group of n costs at most n
    times `opponents` requests."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score; the reward is the judge's score scaled from this range to 0..1."""
    read: Callable[[str], float] | None = None
    """Reads the reward from the judge's text if it is not `SCORE: x`, for a rubric that itself says how to answer."""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Parameters of the request besides model and messages."""
    timeout_s: float = 120.0
    """Maximum seconds for one attempt."""
    attempts: int = 4
    """Maximum number of attempts, as in HttpVerifier; an unreadable answer of the judge counts as a failed attempt,
    too."""
    late: bool = False
    """See SandboxVerifier."""

    def __post_init__(self) -> None:
        if self.opponents < 0 or (self.opponents and (self.reference or self.read)):
            raise ValueError(
                f"verifier {self.name!r}: opponents must be at least 0, and cannot be combined with reference or read"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentVerifier:
    """The reward is the sum of the rewards that `env_step` or `openenv` returned since the last reset; component
    `success` says whether the task was solved."""

    name: str
    version: str
    success: Callable[[Mapping[str, Any]], bool] | None = None
    """Computes success from the environment's last answer. Default: `info["success"]`, or else `terminated` with a
    reward above 0."""
    step_rewards: bool = False
    """True if each turn's reward is recorded, too, for `[fold] estimator = "step"`."""
    timeout_s: float = 300.0
    """Maximum seconds for `success`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSum:
    """The weighted sum of several verifiers' rewards, each of which is a component under the verifier's name. All judge
    at the same time; if one fails, so does the sum. Raises ValueError if two parts have the same name."""

    name: str
    version: str
    parts: tuple[tuple[Judged, float], ...]

    def __post_init__(self) -> None:
        names = [part.name for part, _ in self.parts]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"verifier {self.name!r} needs parts with distinct names, got {names}")

    @property
    def late(self) -> bool:
        """True if a part is late."""
        return any(is_late(part) for part, _ in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedVerifier:
    """Verifiers that judge one after the other, as long as each lets the next one judge, such as those of a task in
    several steps. If one of them fails, there is no reward."""

    name: str
    version: str
    parts: tuple[Judged, ...]
    proceed: Callable[[int, Verdict], bool]
    """Returns whether the part after this one judges; the arguments are a part's place and its verdict."""
    combine: Callable[[Sequence[Verdict]], Verdict]
    """Computes the verdict from those of the parts that judged, in order; at least one."""
    timeout_s: float = 300.0
    """Maximum seconds for `proceed` and for `combine`."""
    late: bool = False
    """See SandboxVerifier."""


def is_late(verifier: Judged) -> bool:
    """Whether the session is finished before the reward is there."""
    return bool(getattr(verifier, "late", False))


def rewarding_steps(verifier: Judged, weight: float = 1.0) -> tuple[EnvironmentVerifier, float] | None:
    """Return the verifier whose step rewards are recorded, and the weight that they are multiplied by; None if there is
    none."""
    if isinstance(verifier, EnvironmentVerifier):
        return (verifier, weight) if verifier.step_rewards else None
    parts = verifier.parts if isinstance(verifier, WeightedSum) else ()
    return next((found for part, share in parts if (found := rewarding_steps(part, weight * share))), None)


class NeedsGroup(RecipeError):
    """A verifier with `opponents` cannot judge live. Remedy: `turnlog log reward rerun`, or compare with a
    `reference`."""


def live(source: TaskSource) -> TaskSource:
    """Return the source if its verifier judges a session by itself; a source with a verifier per task is not checked.
    Raises NeedsGroup."""
    verifier: Judged | None = getattr(source, "verifier", None)
    if verifier is not None and (found := _comparing(verifier)) is not None:
        raise NeedsGroup(f"recipe {source.name!r}: {why_not_live(found)}")
    return source


def why_not_live(verifier: JudgeVerifier) -> str:
    """Return the message for the user."""
    return (
        f"verifier {verifier.name!r} compares the sessions of a group with each other, but a session is judged before "
        "its group is complete: compare with a `reference`, or run the verifier on recorded groups with "
        "`turnlog log reward rerun`"
    )


def _comparing(verifier: Judged) -> JudgeVerifier | None:
    if isinstance(verifier, JudgeVerifier):
        return verifier if verifier.opponents else None
    parts: Sequence[Judged] = ()
    if isinstance(verifier, WeightedSum):
        parts = [part for part, _ in verifier.parts]
    elif isinstance(verifier, StagedVerifier):
        parts = verifier.parts
    return next((found for part in parts if (found := _comparing(part)) is not None), None)


class JudgedGroup:
    """All sessions of a group that can be judged, by session id."""

    def __init__(self, episodes: Mapping[str, Episode]) -> None:
        self.episodes = episodes
        self._circle = sorted(episodes, key=lambda session: ids.digest("opponents", session))
        self._found: dict[tuple[str, str, str], float] = {}
        self._asking: defaultdict[tuple[str, str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    def opponents(self, session: str, most: int) -> tuple[str, ...]:
        """Return the session's opponents: its neighbors on a circle in hash order, half of them on each side.

        Every session therefore has the same number of opponents, the relation is symmetric, and the result does not
        depend on the order of arrival."""
        circle, at = self._circle, self._circle.index(session)
        reach = min((most + 1) // 2, len(circle) // 2)
        places = ((at + step) % len(circle) for away in range(1, reach + 1) for step in (away, -away))
        return tuple(dict.fromkeys(circle[place] for place in places))

    async def comparison_share(self, by: str, first: str, second: str, ask: Callable[[], Awaitable[float]]) -> float:
        """Return the share that verifier `by` gives `first` when it comes before `second`. It is requested once, and
        again for the other session of the pair if that failed. Raises what `ask` raises."""
        key = (by, first, second)
        async with self._asking[key]:
            if key not in self._found:
                self._found[key] = await ask()
        return self._found[key]
