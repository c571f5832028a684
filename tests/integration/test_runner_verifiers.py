"""What verifiers of each kind leave on the log, and when: the runner at the real gateway, calls answered on the log."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_log import Died
from tests.fakes.offers import offering
from tests.integration.conftest import CALL, Stage
from turnlog.infra.environments.episodes import Episode, FunctionVerifier, Judged, SandboxAnswer, SandboxCall, Verdict
from turnlog.infra.environments.tasks import Recipe
from turnlog.infra.environments.verifiers import EnvironmentVerifier, SandboxVerifier, WeightedSum
from turnlog.schemas import ids
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    RewardFailed,
    SessionFinished,
    StepRewardAssigned,
    ToolCallRequested,
    ToolStatus,
)

Judges = Callable[[Judged], None]
PASSES = SandboxCall("python", {"code": "print(8)"})


class Judging(Recipe):
    """Its tool is `env_step` to the sandbox; the stand-in worker answers with the JSON that it is told to."""

    name = "judged"
    verifier: Judged
    rewards: tuple[float, ...] = ()

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return ({"type": "function", "function": {"name": "calc", "parameters": {}}},)

    def tool_call(self, name: str, arguments: str) -> SandboxCall | str:
        answer = {"observation": 8, "reward": 0.5, "terminated": True, "truncated": False, "info": {}}
        return SandboxCall("env_step", {"action": 0, "code": f"print({json.dumps(answer)!r})"})

    def tool_answer(self, ok: bool, output: bytes) -> str:
        return "8"


RECIPE = Judging()


@pytest.fixture
def judged_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judges]:
    """Install a package that offers the recipe, with this verifier."""

    def bring(verifier: Judged) -> None:
        RECIPE.verifier = verifier

    with offering(tmp_path, monkeypatch, "judged", {"judged": f"{__name__}:RECIPE"}):
        yield bring


async def ended(stage: Stage) -> SessionFinished:
    await stage.request(recipe="judged")
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    return finish


async def test_a_verifiers_calls_run_in_fresh_sandboxes_that_nothing_of_the_session_is_in(
    stage: Stage, judged_by: Judges
) -> None:
    def said(episode: Episode, answers: Sequence[SandboxAnswer]) -> Verdict:
        return Verdict(float([each.output for each in answers] == ["8\n", "8\n"]), evidence={"judged": len(answers)})

    judged_by(SandboxVerifier(name="tests", version="3", calls=lambda episode: [PASSES, PASSES], judge=said))
    finish = await ended(stage)
    [reward] = await stage.said(RewardAssigned)
    assert (reward.value, reward.verifier.name, reward.session_id) == (1.0, "tests", finish.session_id)
    acted, first, second = await stage.said(ToolCallRequested)
    assert first.call_id == ids.call_id(finish.session_id, "tests:3", 0, 0, "verify")
    assert (first.call_seq, second.call_seq) == (0, 1)
    assert first.session_id == second.session_id != acted.session_id
    assert all(call.sandbox.fresh and call.sandbox.durable_workspace for call in (first, second))
    evidence = json.loads(reward.evidence)
    assert [call["exit_code"] for call in evidence["calls"]] == [0, 0]
    assert evidence["evidence"] == {"judged": 2}


@pytest.mark.parametrize(
    ("answers", "kind", "said"),
    [
        ({}, RewardAssigned, 1.0),
        ({"tests": ToolStatus.tool_error}, RewardAssigned, 0.0),
        ({"tests": ToolStatus.infra_error}, RewardFailed, "sandbox: call"),
        ({"tests": ToolStatus.refused}, RewardFailed, "refused: call"),
    ],
)
async def test_a_command_is_judged_by_its_exit_and_a_broken_sandbox_is_no_zero(
    stage: Stage, judged_by: Judges, answers: dict[str, ToolStatus], kind: type, said: Any
) -> None:
    stage.answers = lambda request, count: (
        ToolStatus.ok if request.tool == "env_step" else answers.get("tests", ToolStatus.ok)
    )
    judged_by(SandboxVerifier(name="tests", version="1", calls=lambda _: [PASSES], attempts=2))
    finish = await ended(stage)
    assert (finish.outcome, finish.expects.reward) == (Outcome.completed, True)
    [record] = await stage.said(RewardAssigned, RewardFailed)
    assert type(record) is kind
    assert said in (record.cause if kind is RewardFailed else [record.value])
    asked = [call for call in await stage.said(ToolCallRequested) if call.tool == "python"]
    assert len(asked) == (2 if answers.get("tests") is ToolStatus.infra_error else 1)


@pytest.mark.parametrize("calls", [lambda _: [], lambda _: ["true"], lambda _: 1 / 0, lambda _: None])
async def test_calls_that_a_verifier_cannot_say_fail_the_verdict_and_not_the_runner(
    stage: Stage, judged_by: Judges, calls: Any
) -> None:
    judged_by(SandboxVerifier(name="tests", version="1", calls=calls))
    assert (await ended(stage)).outcome is Outcome.completed
    [failed] = await stage.said(RewardFailed)
    assert failed.cause.startswith("crashed: ")


async def test_rewards_of_the_environment_go_to_the_turns_that_stepped(stage: Stage, judged_by: Judges) -> None:
    stage.policy = lambda prompt: "8" if prompt.count("tool\n8") == 2 else CALL
    environment = EnvironmentVerifier(name="env", version="1", step_rewards=True)
    judged_by(WeightedSum(name="all", version="1", parts=((environment, 2.0),)))
    finish = await ended(stage)
    steps = await stage.said(StepRewardAssigned)
    assert [(step.turn, step.value) for step in steps] == [(turn, 1.0) for turn in finish.turns[:2]]
    assert finish.expects.step_rewards == 2
    spine = [type(each) for each in await stage.said(StepRewardAssigned, RewardAssigned, SessionFinished)]
    assert spine == [StepRewardAssigned, StepRewardAssigned, RewardAssigned, SessionFinished]
    [reward] = await stage.said(RewardAssigned)
    assert (reward.value, reward.components) == (2.0, {"env": 1.0, "env.success": 1.0, "env.steps": 2.0})


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "stopped"])
async def test_a_late_verdict_gives_the_slot_back_and_survives_the_end_of_its_runner(
    stage: Stage, judged_by: Judges, killed: bool
) -> None:
    judging, released = threading.Semaphore(0), threading.Event()

    def slow(episode: Episode) -> Verdict:
        judging.release()
        released.wait(60)
        return Verdict(float(len(episode.messages)))

    judged_by(FunctionVerifier("slow", "1", slow, late=True))
    settings = dataclasses.replace(stage.settings, runner=dataclasses.replace(stage.settings.runner, concurrency=1))
    for group in "gh":
        await stage.request(group, recipe="judged")
    async with stage.gateway():
        async with stage.running(settings) as (task, log):
            finishes = await stage.finished(2)  # one slot, and the first judge is not done
            assert all(finish.expects.reward for finish in finishes)
            for _ in range(2):
                assert await asyncio.to_thread(judging.acquire, timeout=20)
            if killed:
                log.abandon()
                with pytest.raises(Died):
                    await asyncio.wait_for(task, 20)
        assert await stage.said(RewardAssigned) == []
        released.set()
        async with stage.running(settings):
            async with asyncio.timeout(20):
                while len(rewards := await stage.said(RewardAssigned)) < 2:
                    await stage.broker.changed(1)
    assert {(reward.session_id, reward.value) for reward in rewards} == {(one.session_id, 4.0) for one in finishes}
    assert len(await stage.finished(2)) == 2
