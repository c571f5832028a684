"""Verifiers of a Harbor task: its tests run in a sandbox that has never run anything, on the files that the agent left.

A verifier in the agent's environment begins with all of these files, a separate one with the artifacts alone. Each step
of a task in several steps has a verifier of its own, on the files as they were at the end of the step.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

from turnlog.environments import Episode, SandboxAnswer, SandboxCall, SandboxVerifier, StagedVerifier, Verdict
from turnlog.plugins.harbor.agents import user_text
from turnlog.plugins.harbor.inside import read_program
from turnlog.plugins.harbor.packs import unpack_calls
from turnlog.plugins.harbor.rewards import NoReward, combine_steps, main_reward, passes_gate, read_rewards
from turnlog.plugins.harbor.tables import Artifact, StepTable, TaskTable
from turnlog.schemas.events.tools import SandboxSpec

JUDGING: Final = read_program("judging")
MARK: Final = re.compile(r"^turnlog-step (begin|end|failed) (.+?)(?: ([0-9a-f]{64}))?$", re.MULTILINE)
"""Lines of `inside/driver.py`; the name of a step has no line break."""
SNAPSHOTS: Final = "logs/turnlog"
STAGED: Final = "logs/staged"
VERSION: Final = "1"
AS_USER: Final = """\
import os, pwd, subprocess, sys
user, command = sys.argv[1:]
about = pwd.getpwuid(int(user)) if user.isdigit() else pwd.getpwnam(user)
sys.exit(subprocess.run(
    ["bash", "-c", command], user=about.pw_uid, group=about.pw_gid, env={**os.environ, "HOME": about.pw_dir},
    extra_groups=os.getgrouplist(about.pw_name, about.pw_gid),
).returncode)
"""
"""Program that runs a shell command as another user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Everything that a verifier of a task, or of one step, needs."""

    row: Mapping[str, Any]
    table: TaskTable
    step: StepTable | None
    sandbox: SandboxSpec
    """Sandbox of the tests."""
    folders: tuple[str, ...]
    """Folders of the agent's sandbox that are kept."""
    workdir: str
    """Working directory of the tests, if the sandbox's first folder is another one; else empty."""
    bundled: bool
    """True if the verifier's own image holds the tests."""
    key: str
    """Name of the reward that is trained."""

    @property
    def name(self) -> str:
        """Name of the verifier."""
        return "test.sh" if self.step is None else f"step {self.step.name}"

    @property
    def separate(self) -> bool:
        """True if the tests run in a container of their own, which gets the artifacts alone."""
        return self.table.verifier_environment(self.step) is not None

    def calls(self, episode: Episode) -> list[SandboxCall]:
        """Return the verifier's calls: prepare the folders, write the tests, run them, read the reward."""
        mark = self._mark(episode)
        if mark == "unreached":
            return [SandboxCall("shell", {"command": "true"})]
        about = {"snapshot": "", "sha256": "", "folders": [path for path in self.folders if path != "/logs"]}
        if self.step is not None and mark != "begun":
            about |= {"snapshot": f"/{SNAPSHOTS}/{self.step.name}.tar.gz", "sha256": mark}
        packs = self.row["packs"]
        names = ["tests"] if self.step is None else ["tests", f"steps/{self.step.name}/tests"]
        tests = [] if self.bundled else [packs[name] for name in names if name in packs]
        sources = [one.source for one in self.table.artifacts_of(self.step) if one.service in (None, "main")]
        return [
            _python(JUDGING, "prepare", json.dumps(about)),
            *(call for pack in tests for call in unpack_calls(pack, "/tests")),
            self._tests(),
            _python(JUDGING, "report", json.dumps({"artifacts": sources})),
        ]

    def _tests(self) -> SandboxCall:
        enter = f'cd "${{IMAGE_WORKDIR:-{self.workdir}}}"; ' if self.workdir else ""
        command = f"{enter}(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1; echo exit $?"
        own = self.step.verifier.user if self.step else None
        user = user_text(own if own is not None else self.table.verifier.user)
        if user:
            command = shlex.join(["python3", "-c", AS_USER, user, command])
        return SandboxCall("shell", {"command": f"chmod +x /tests/test.sh; {command}"})

    def _mark(self, episode: Episode) -> str:
        """Return the hash of the snapshot at the step's end, `begun` if there is none because the session ended in this
        step, or `unreached`. Raises NoReward if the step could not be prepared."""
        if self.step is None:
            return ""
        found: dict[tuple[str, str], str] = {}
        for word, name, sha256 in MARK.findall(episode.ended.output if episode.ended else ""):
            found.setdefault((word, name), sha256)  # the first counts: a program cannot take it back
        if ("failed", self.step.name) in found:
            raise NoReward(f"task {self.row['task']}: setup.sh of step {self.step.name} failed")
        if sha256 := found.get(("end", self.step.name)):
            return sha256
        return "begun" if ("begin", self.step.name) in found else "unreached"

    def arrange(self, episode: Episode, paths: Sequence[str]) -> dict[str, str]:
        """Return which files the tests begin with: path in their sandbox -> path in the session's last workspace."""
        mark = self._mark(episode)
        if self.step is not None and mark not in ("begun", "unreached") and not self.separate:
            snapshot = f"{SNAPSHOTS}/{self.step.name}.tar.gz"
            return {path: path for path in (snapshot,) if path in paths}
        if self.separate:
            return staged_artifacts(self.table.artifacts_of(self.step), paths)
        return {path: path for path in paths if not f"{path}/".startswith(f"{SNAPSHOTS}/")}

    def judge(self, episode: Episode, answers: Sequence[SandboxAnswer]) -> Verdict:
        """Return the verdict by what the tests wrote. The components are all rewards. Raises NoReward."""
        if self._mark(episode) == "unreached":
            return Verdict(0.0, {}, {"step": "not reached"})
        evidence: dict[str, Any] = {"task": self.row["task"]}
        if answers[0].ok and answers[0].output.strip() == "altered":
            return Verdict(0.0, {}, {**evidence, "step": "the agent has changed the files of a step that had ended"})
        for answer in answers[:-2]:
            if not answer.ok:
                raise NoReward(f"task {self.row['task']}: the tests cannot be prepared: {answer.output[-1000:]}")
        tests, report = answers[-2], answers[-1]
        if tests.exit_code is None:
            raise NoReward(f"task {self.row['task']}: test.sh met a limit of its sandbox, such as timeout_sec")
        try:
            said: Mapping[str, Any] = json.loads(report.output) if report.ok else {}
        except ValueError:
            said = {}
        evidence |= {"test.sh": said.get("output", ""), "artifacts": said.get("artifacts", {})}
        try:
            rewards = read_rewards(said)
            value = main_reward(rewards, self.key) if self.step is None else rewards.get(self.key, 0.0)
        except NoReward as error:
            output = str(said.get("output", "")) or tests.output
            raise NoReward(f"task {self.row['task']}: {error}; test.sh: {output[-1000:]}") from None
        components = rewards if self.step else {name: one for name, one in rewards.items() if name != self.key}
        return Verdict(value, components, {**evidence, "rewards": rewards})


def staged_artifacts(artifacts: Sequence[Artifact], paths: Sequence[str]) -> dict[str, str]:
    """Return the artifacts among the paths of a workspace, to be moved below STAGED: new path -> path."""
    found: dict[str, str] = {}
    for artifact in artifacts:
        source = artifact.source.strip("/")
        for path in paths:
            if path != source and not path.startswith(f"{source}/"):
                continue
            parts = PurePosixPath(path).relative_to(source).parts
            if not any(
                fnmatch.fnmatchcase(name, pattern) for pattern in artifact.exclude for name in (*parts, "/".join(parts))
            ):
                found[f"{STAGED}/{path}"] = path
    return found


def _python(source: str, *arguments: str) -> SandboxCall:
    """Return the call of a program that reads `sys.argv`."""
    first, line, rest = source.partition("from __future__ import annotations\n")
    return SandboxCall("python", {"code": f"{first}{line}import sys\nsys.argv = {['judging', *arguments]!r}\n{rest}"})


def verifier_of(judgements: Sequence[Judgement]) -> SandboxVerifier | StagedVerifier:
    """Return the verifier of a task; several judgements are those of its steps."""
    parts = [_part(one) for one in judgements]
    if judgements[0].step is None:
        return parts[0]
    steps = [one.step for one in judgements if one.step is not None]
    strategy, key = judgements[0].table.multi_step_reward_strategy, judgements[0].key
    return StagedVerifier(
        name="steps", version=VERSION, parts=tuple(parts),
        proceed=lambda place, verdict: passes_gate(steps[place], verdict.components),
        combine=_combine_function(steps, strategy, key),
    )  # fmt: skip


def _combine_function(
    steps: Sequence[StepTable], strategy: str | None, key: str
) -> Callable[[Sequence[Verdict]], Verdict]:
    def combine(verdicts: Sequence[Verdict]) -> Verdict:
        if not any(verdict.components for verdict in verdicts):
            total = Verdict(0.0)
        else:
            total = combine_steps(strategy, [verdict.components for verdict in verdicts], key)
        components, evidence = dict(total.components), {}
        for step, verdict in zip(steps, verdicts, strict=False):
            components |= {f"{step.name}.{name}": value for name, value in verdict.components.items()}
            evidence[step.name] = verdict.evidence
        return Verdict(total.value, components, {"steps": evidence})

    return combine


def _part(judgement: Judgement) -> SandboxVerifier:
    return SandboxVerifier(
        name=judgement.name, version=VERSION, calls=judgement.calls, judge=judgement.judge,
        sandbox=judgement.sandbox, arrange=judgement.arrange, timeout_s=2 * judgement.sandbox.limits.wall_s + 60,
    )  # fmt: skip
