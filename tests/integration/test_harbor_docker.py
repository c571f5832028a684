"""Task folders in Harbor's format on a real Docker daemon: images, rollouts, refusals."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harbor_tasks import STEPS, TASK, write_task
from tests.integration.conftest import Stage
from tests.integration.test_command_agents import BLOBS, stage, until, working  # noqa: F401
from tests.integration.test_harbor import PROGRAM, harbor  # noqa: F401
from turnlog.plugins.docker.sandbox import connect
from turnlog.plugins.harbor.images import BadImage, image_workdir, prepare, task_image
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    RewardFailed,
    SessionFinished,
    ToolCallStarted,
    TurnCompleted,
)

DAEMON = os.environ.get("TURNLOG_DOCKER_HOST", "")
BASE = os.environ.get("TURNLOG_DOCKER_IMAGE", "python:3.11-slim")
BUILT = f"FROM {BASE}\nWORKDIR /app\nCOPY adds.py ./\nRUN echo built >/opt/built && useradd -m tester\n"


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the daemon that the environment names."""
    if not DAEMON:
        pytest.skip("no Docker daemon (TURNLOG_DOCKER_HOST)")
    monkeypatch.setenv("DOCKER_HOST", DAEMON)
    client = connect()
    yield client
    client.close()


def test_an_image_is_built_once_by_its_content_and_unpacked(client: Any, tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", {**TASK, "environment/Dockerfile": BUILT})
    image = task_image("task", None, folder / "environment", "", 300.0)
    said: list[str] = []
    prepare([image], client, said.append)
    prepare([image], client, said.append, roots=str(tmp_path / "roots"))
    assert [line.split()[0] for line in said if image.name in line] in (["build", "unpack"], ["unpack"])
    assert image_workdir(client, image.name) == "/app"
    root = tmp_path / "roots" / image.root
    assert (root / "app/adds.py").read_text() == TASK["environment/adds.py"]
    assert (root / "opt/built").read_text() == "built\n"
    more = task_image("task", None, folder / "environment", "echo more >/opt/more", 300.0)
    prepare([more], client)
    assert more.name != image.name


def test_an_image_that_does_not_exist_or_build_is_named_before_the_run(client: Any, tmp_path: Path) -> None:
    with pytest.raises(BadImage, match=r"'registry.invalid/none:1' cannot be pulled"):
        prepare([task_image("task", "registry.invalid/none:1", tmp_path, "", 60.0)], client)
    write_task(tmp_path, {"Dockerfile": f"FROM {BASE}\nRUN echo because; exit 3\n"})
    with pytest.raises(BadImage, match=r"(?s)does not build.*because"):
        prepare([task_image("task", None, tmp_path, "", 60.0)], client)


@asynccontextmanager
async def acting(stage: Stage, says: dict[str, str]) -> Any:  # noqa: F811
    """As in test_harbor, on docker."""
    stage.blobs = BLOBS
    stage.policy = lambda prompt: next((line for word, line in says.items() if word in prompt), "done")
    bounds = {"disk_bytes": 64 << 20, "wall_s": 60.0, "pids": 256, "memory_bytes": 512 << 20}
    async with working(stage, backends=("docker",), docker_image=BASE, **bounds), stage.gateway(), stage.running():
        yield


async def test_a_task_runs_in_its_own_image_as_root_and_is_judged_in_a_new_container(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],  # noqa: F811
    client: Any,
) -> None:
    test = '#!/bin/bash\ncat /opt/built >/dev/null && [ ! -e /opt/planted ] && [ "$(id -un)" = tester ] && pwd\n'
    test += "grep -q + adds.py && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n"
    toml = TASK["task.toml"] + 'user = "tester"\n'
    text, source = harbor(
        {"built": {**TASK, "environment/Dockerfile": BUILT, "tests/test.sh": test, "task.toml": toml}}, backend="docker"
    )
    source.prepare(client)
    row = dict(next(iter(source.tasks(0))))
    does = "touch /opt/planted /usr/x; sed -i s/-/+/ adds.py; id -u >/logs/artifacts/user"
    await stage.request(recipe=text, new_tokens=300, task=row)
    async with acting(stage, {"add": does}):
        await stage.finished(1, seconds=180)
        await stage.request(group="h", recipe=text, new_tokens=300, task={**row, "image": "turnlog-harbor/none:0"})
        await until(stage, SessionFinished, 2)
        finishes = {finish.group_id: finish for finish in await stage.said(SessionFinished)}
    failures = [failed.cause for failed in await stage.said(RewardFailed)]
    assert finishes["g"].outcome is Outcome.completed, finishes["g"].reason
    rewards = await stage.said(RewardAssigned)
    assert ([reward.value for reward in rewards], failures) == ([1.0], []), rewards
    assert finishes["h"].outcome is Outcome.infra_failure
    assert "no image 'turnlog-harbor/none:0'" in finishes["h"].reason
    assert len({start.environment_sha256 for start in await stage.said(ToolCallStarted)}) >= 2


async def test_the_agent_of_a_task_of_steps_is_stopped_at_a_gate_and_the_tests_are_hidden_until_then(
    stage: Stage,  # noqa: F811
    harbor: Callable[..., Any],  # noqa: F811
    client: Any,
) -> None:
    text, source = harbor(
        {"steps": {**STEPS, "environment/Dockerfile": f"FROM {BASE}\nWORKDIR /app\n"}}, backend="docker"
    )
    source.prepare(client)
    row = dict(next(iter(source.tasks(0))))
    driver = "$(sed -n 's/PPid:.//p' /proc/$PPID/status)"  # the parent of the program that runs the policy's commands
    hidden = f"! cat /tests/* /logs/verifier/* && ! python3 -c \"open('/proc/{driver}/mem', 'rb')\""
    says = {"Write one": f"{hidden} && echo 1 >one", "Write two": f"{hidden} && cat given >two; rm one"}
    for group, prompt in (("both", "Write one"), ("gated", "Nothing")):
        steps = [{**row["steps"][0], "prompt": prompt}, *row["steps"][1:]]
        await stage.request(group=group, recipe=text, new_tokens=600, max_turns=8, task={**row, "steps": steps})
    async with acting(stage, says):
        finishes = await stage.finished(2, seconds=240)
    assert {finish.outcome for finish in finishes} == {Outcome.completed}, [one.reason for one in finishes]
    rewards = {reward.group_id: reward.value for reward in await stage.said(RewardAssigned)}
    assert rewards == {"both": 0.75, "gated": 0.0}, [failed.cause for failed in await stage.said(RewardFailed)]
    turns = Counter(turn.group_id for turn in await stage.said(TurnCompleted))
    assert turns == {"both": 4, "gated": 2}
