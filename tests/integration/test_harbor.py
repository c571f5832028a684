"""Task folders in Harbor's format on bubblewrap: a program does them, and their tests judge in another sandbox."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.offers import offering
from tests.harbor_tasks import STEPS, TASK, write_task
from tests.integration.conftest import Stage
from tests.integration.test_command_agents import ASKS, BLOBS, stage, until, working  # noqa: F401
from turnlog.environments import TaskSource
from turnlog.infra.environments.sources import join_source, task_source
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    RewardFailed,
    SessionFinished,
    ToolCallRequested,
    TurnCompleted,
)

AGENT = (
    ASKS
    + """\
import subprocess
subprocess.run(ask({"role": "user", "content": sys.argv[1]}), shell=True)
ask({"role": "user", "content": "done"})
"""
)
PROGRAM = shlex.join(["python3", "-c", AGENT])
SOLVED = "sed -i s/-/+/ adds.py"


@pytest.fixture
def harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, TaskSource]]]:
    """The source over tasks of these files, as a package offers it, and its text."""

    def make(tasks: dict[str, dict[str, str]], **options: str) -> tuple[str, TaskSource]:
        for name, files in tasks.items():
            write_task(tmp_path / "tasks" / name, files)
        text = join_source(
            "tasks", {"path": str(tmp_path / "tasks"), "backend": "bubblewrap", "agent": "program",
                      "program": PROGRAM, "network": "none", **options},
        )  # fmt: skip
        return text, task_source(text)

    with offering(tmp_path, monkeypatch, "tasks", {"tasks": "turnlog.plugins.harbor.source:source"}):
        yield make
    task_source.cache_clear()


@asynccontextmanager
async def acting(stage: Stage, says: dict[str, str]) -> AsyncIterator[None]:  # noqa: F811
    """Everything that a rollout needs; the policy answers a prompt that holds a key by its value, others by `done`."""
    stage.blobs = BLOBS
    stage.policy = lambda prompt: next((line for word, line in says.items() if word in prompt), "done")
    async with working(stage, disk_bytes=64 << 20, wall_s=60.0, pids=256), stage.gateway(), stage.running():
        yield


async def test_a_task_is_done_by_a_program_and_judged_by_its_tests_elsewhere(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],
) -> None:
    text, source = harbor({"adds": TASK})
    row = dict(next(iter(source.tasks(0))))
    says = {"task solved": SOLVED, "task planted": "mkdir -p /logs/verifier; echo 1 >/logs/verifier/reward.txt",
            "task broken": "touch broken; echo x >/logs/artifacts/note"}  # fmt: skip
    for word in says:
        prompt = f"{row['prompt']} {word}"
        await stage.request(group=word.split()[1], recipe=text, new_tokens=300, task={**row, "prompt": prompt})
    async with acting(stage, says):
        finishes = await stage.finished(3, seconds=120)
    assert {finish.outcome for finish in finishes} == {Outcome.completed}, [one.reason for one in finishes]
    rewards = {reward.group_id: reward for reward in await stage.said(RewardAssigned)}
    assert rewards, [failed.cause for failed in await stage.said(RewardFailed)]
    assert {group: reward.value for group, reward in rewards.items()} == {"solved": 1.0, "planted": 0.0}
    about = json.loads(rewards["planted"].evidence)
    assert "AssertionError" in about["evidence"]["test.sh"]
    assert len(about["files"]["sha256"]) == 64
    [failed] = await stage.said(RewardFailed)
    assert failed.group_id == "broken"
    assert "wrote neither /logs/verifier/reward.txt nor reward.json" in failed.cause
    calls = await stage.said(ToolCallRequested)
    assert {call.sandbox.folders[0] for call in calls} == {"/app"}
    assert {call.sandbox.limits.memory_bytes for call in calls} == {256 << 20}
    assert {call.sandbox.limits.wall_s for call in calls if call.tool != "agent"} == {30.0}


async def test_steps_run_one_after_the_other_with_a_reward_each_and_a_gate(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],
) -> None:
    text, source = harbor({"steps": STEPS})
    row = dict(next(iter(source.tasks(0))))
    cleared = '[ -z "$(cat /tests/* /logs/verifier/* 2>/dev/null)" ]'
    both = {"Write one": "echo 1 >one", "Write two": f"{cleared} && cat given >two; rm one"}
    for group, prompt in (("both", "Write one"), ("gated", "Nothing")):
        steps = [{**row["steps"][0], "prompt": prompt}, *row["steps"][1:]]
        await stage.request(group=group, recipe=text, new_tokens=300, max_turns=8, task={**row, "steps": steps})
    async with acting(stage, both):
        finishes = await stage.finished(2, seconds=120)
    assert {finish.outcome for finish in finishes} == {Outcome.completed}, [one.reason for one in finishes]
    rewards = {reward.group_id: reward for reward in await stage.said(RewardAssigned)}
    assert rewards, [failed.cause for failed in await stage.said(RewardFailed)]
    assert rewards["both"].value == 0.75, rewards["both"]
    assert rewards["both"].components == {"one.reward": 1.0, "two.reward": 0.5, "two.extra": 3.0, "extra": 1.5}
    assert (rewards["gated"].value, rewards["gated"].components) == (0.0, {"one.reward": 0.0})
    turns = Counter(turn.group_id for turn in await stage.said(TurnCompleted))
    assert turns == {"both": 4, "gated": 2}, "the agent is stopped at the gate"


async def test_a_separate_verifier_sees_the_artifacts_alone(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],
) -> None:
    toml = TASK["task.toml"] + 'environment_mode = "separate"\n'
    test = "#!/bin/bash\nls /app >/logs/verifier/seen\n[ -e /app/adds.py ] && exit 1\n"
    test += "cat /logs/artifacts/said /app/out/deep/kept >/logs/verifier/reward.txt\n"
    task = {
        **TASK,
        "task.toml": 'artifacts = [{source = "/app/out", exclude = ["*.o"]}]\n' + toml,
        "tests/test.sh": test,
    }
    text, source = harbor({"adds": task})
    row = dict(next(iter(source.tasks(0))))
    makes = "mkdir -p out/deep; echo 5 >out/deep/kept; touch out/x.o; printf 0.2 >/logs/artifacts/said"
    await stage.request(recipe=text, new_tokens=300, task=row)
    async with acting(stage, {"add": makes}):
        [finish] = await stage.finished(1, seconds=120)
    assert finish.outcome is Outcome.completed, finish.reason
    failures = [failed.cause for failed in await stage.said(RewardFailed)]
    [reward] = await stage.said(RewardAssigned)
    assert (reward.value, failures) == (0.25, [])
    assert set(json.loads(reward.evidence)["evidence"]["artifacts"]) == {"/logs/artifacts/said", "/app/out/deep/kept"}


async def test_an_unhealthy_environment_is_our_failure_by_name(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],
) -> None:
    toml = (
        TASK["task.toml"]
        + '[environment.healthcheck]\ncommand = "test -e /app/never"\nretries = 2\ninterval_sec = 0.01\n'
    )
    text, source = harbor({"adds": {**TASK, "task.toml": toml}})
    await stage.request(recipe=text, new_tokens=300, task=dict(next(iter(source.tasks(0)))))
    async with acting(stage, {}):
        await until(stage, SessionFinished)
    [finish, *_] = await stage.said(SessionFinished)
    assert finish.outcome is Outcome.infra_failure
    assert "the health check failed 2 times: test -e /app/never" in finish.reason
