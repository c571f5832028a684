"""Agents that a recipe brings as a function: any client, at the real gateway, in the runner's process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.fakes.offers import offering
from tests.integration.conftest import QUESTION, Stage
from tests.unit.gateway.test_gateway_images import CAT, PAD, shows, vision
from tests.unit.gateway.test_gateway_images import TEMPLATE as SEEING
from turnlog.infra.environments.agents import AgentError, AgentSession, FunctionAgent, TruncatedRun
from turnlog.infra.environments.episodes import Episode, FunctionVerifier, SandboxCall, TaskRow, Verdict
from turnlog.infra.environments.simulations import Step
from turnlog.infra.environments.tasks import Recipe, acted_out, played
from turnlog.plugins.recipes.calc import RECIPE as CALC
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    Outcome,
    RewardAssigned,
    SessionFinished,
    SessionStarted,
    ToolCallRequested,
    ToolStatus,
    TurnCompleted,
)
from turnlog.settings import EngineSettings

Acts = Callable[[AgentSession], Awaitable[Any]]
UNFINISHED = (Outcome.infra_failure, False)


class Brought(Recipe):
    """A recipe whose agent is a function."""

    name = "brought"
    verifier = FunctionVerifier("last", "1", lambda episode: Verdict(float(episode.messages[-1]["content"] == "8")))

    def __init__(self, function: Acts) -> None:
        self.agent = FunctionAgent("mine", "7", function)


OFFERED = types.SimpleNamespace()
"""`recipe`: what the installed package offers."""


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """Install a package that offers a recipe."""
    with offering(tmp_path, monkeypatch, "brought", {"brought": f"{__name__}:OFFERED.recipe"}):
        yield OFFERED


@pytest.fixture
def acts(offered: types.SimpleNamespace) -> Callable[[Acts], None]:
    """Have the recipe offered, with this function as its agent."""

    def bring(function: Acts) -> None:
        offered.recipe = Brought(function)

    return bring


async def ask(session: AgentSession, *said: dict[str, Any]) -> str:
    """One turn by OpenAI's own client."""
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": QUESTION}, *said]
        answer = await client.chat.completions.create(model=session.model, messages=messages)
    return answer.choices[0].message.content or ""


async def outcomes(stage: Stage, sessions: int, **limits: Any) -> list[tuple[Outcome, bool]]:
    await stage.request(recipe="brought", **limits)
    async with stage.gateway(), stage.running():
        return [(finish.outcome, finish.final) for finish in await stage.finished(sessions)]


async def test_a_function_acts_with_a_client_of_its_own_and_its_last_message_is_judged(
    stage: Stage, acts: Callable[[Acts], None]
) -> None:
    async def two_turns(session: AgentSession) -> None:
        assert session.task["answer"] == "8"
        answer = await session.call(SandboxCall("python", {"code": "print(3+5)"}))
        assert (answer.ok, answer.output) == (True, "8\n")
        first = await ask(session)
        said = {"role": "user", "content": f"the tool says {answer.output}"}
        await ask(session, {"role": "assistant", "content": first}, said)

    acts(two_turns)
    stage.policy = lambda prompt: "8" if "says 8" in prompt else "?"
    assert await outcomes(stage, 1) == [(Outcome.completed, True)]
    [reward] = await stage.said(RewardAssigned)
    assert (reward.value, reward.verifier.name) == (1.0, "last")
    [started] = await stage.said(SessionStarted)
    assert (started.agent.name, started.agent.version, started.environment.name) == ("mine", "7", "brought")


async def test_a_function_may_say_the_verdict_itself(stage: Stage, acts: Callable[[Acts], None]) -> None:
    async def says(session: AgentSession) -> Verdict:
        await ask(session)
        return Verdict(0.25, evidence={"won": "a quarter"})

    acts(says)
    assert await outcomes(stage, 1) == [(Outcome.completed, True)]
    [reward] = await stage.said(RewardAssigned)
    assert (reward.value, reward.verifier.name, reward.verifier.version) == (0.25, "mine", "7")
    assert json.loads(reward.evidence) == {"won": "a quarter"}


@pytest.mark.parametrize("verdict", [Verdict(0.5), None])
async def test_a_function_may_say_that_a_limit_of_its_own_ended_it(
    stage: Stage, acts: Callable[[Acts], None], verdict: Verdict | None
) -> None:
    async def gives_up(session: AgentSession) -> TruncatedRun:
        assert session.max_turns == 4
        await ask(session)
        return TruncatedRun("too many moves", verdict)

    acts(gives_up)
    assert await outcomes(stage, 1) == [(Outcome.truncated, True)]
    [end] = await stage.said(SessionFinished)
    [reward] = await stage.said(RewardAssigned)
    assert end.reason == "too many moves"
    assert (reward.value, reward.verifier.name) == ((0.5, "mine") if verdict else (0.0, "last"))


async def broken(session: AgentSession) -> None:
    await ask(session)
    raise KeyError("a bug")


async def leaves(session: AgentSession) -> None:
    await ask(session)
    sys.exit(3)


async def idle(session: AgentSession) -> None:
    """Asks nothing."""


async def returns_text(session: AgentSession) -> Any:
    return await ask(session)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (broken, "KeyError: 'a bug'"),
        (leaves, "SystemExit: 3"),
        (idle, "without a turn"),
        (returns_text, "returned str"),
    ],
)
async def test_what_breaks_a_function_is_no_reward_and_is_tried_again_with_the_end_of_its_trace(
    stage: Stage, acts: Callable[[Acts], None], function: Acts, said: str
) -> None:
    acts(function)
    assert await outcomes(stage, 2) == [UNFINISHED, (Outcome.infra_failure, True)]
    assert all(said in finish.reason for finish in await stage.finished(2))
    assert await stage.said(RewardAssigned) == []


async def test_a_function_says_that_its_agent_failed_and_is_judged(stage: Stage, acts: Callable[[Acts], None]) -> None:
    async def fails(session: AgentSession) -> None:
        await ask(session)
        raise AgentError("it gave up")

    acts(fails)
    assert await outcomes(stage, 1) == [(Outcome.agent_error, True)]
    [finish], [reward] = await stage.finished(1), await stage.said(RewardAssigned)
    assert (finish.reason, reward.value) == ("it gave up", 0.0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 2}, "max_turns"), ({"max_context_tokens": 60}, "context"), ({"deadline_s": 1.0}, "deadline")],
)
async def test_a_function_that_is_at_its_limits_is_truncated_and_judged(
    stage: Stage, acts: Callable[[Acts], None], limits: dict[str, Any], reason: str
) -> None:
    async def goes_on(session: AgentSession) -> None:
        said: list[dict[str, Any]] = []
        for _ in range(3):
            said += [
                {"role": "assistant", "content": await ask(session, *said)},
                {"role": "user", "content": "go on " * 9},
            ]
        await asyncio.Event().wait()

    acts(goes_on)
    assert await outcomes(stage, 1, **({"max_turns": 9} | limits)) == [(Outcome.truncated, True)]
    [finish], [reward] = await stage.finished(1), await stage.said(RewardAssigned)
    assert (finish.reason, reward.value) == (reason, 0.0)


async def test_what_a_function_waits_for_an_engine_is_not_of_its_deadline(
    stage: Stage, acts: Callable[[Acts], None]
) -> None:
    async def asks(session: AgentSession) -> None:
        asking = asyncio.create_task(ask(session))
        await asyncio.wait({asking}, timeout=2.5)
        assert not asking.done()
        await stage.engine_says(EngineRegistered, model="m")
        await asking

    acts(asks)
    stage.policy = lambda prompt: "8"
    await stage.engine_says(EngineGone, state="gone", cause="killed")
    assert await outcomes(stage, 1, deadline_s=1.0) == [(Outcome.completed, True)]
    [reward], [turn] = await stage.said(RewardAssigned), await stage.said(TurnCompleted)
    assert reward.value == 1.0
    assert 2.0 < turn.waited_s < turn.total_s


@pytest.mark.parametrize("says", [AgentError, None])
async def test_a_turn_that_no_engine_served_is_no_failure_of_the_agent_whatever_the_function_makes_of_it(
    stage: Stage, acts: Callable[[Acts], None], says: type[AgentError] | None
) -> None:
    attempts = 0

    async def gives_up(session: AgentSession) -> None:
        nonlocal attempts
        attempts += 1
        await ask(session)
        if attempts <= stage.settings.runner.max_attempts:  # as many outages are no attempts at all
            await stage.engine_says(EngineGone, state="gone", cause="killed")
            with pytest.raises(openai.InternalServerError):
                await ask(session, {"role": "user", "content": "go on"})
            await stage.engine_says(EngineRegistered, model="m")
            if says is not None:
                raise says("no answer")

    acts(gives_up)
    stage.settings = dataclasses.replace(stage.settings, engine=EngineSettings(request_timeout_s=0.5))
    assert await outcomes(stage, 3) == [UNFINISHED, UNFINISHED, (Outcome.completed, True)]
    assert len(await stage.said(RewardAssigned)) == 1


async def test_a_call_that_found_no_sandbox_in_time_is_no_answer_of_a_tool(
    stage: Stage, acts: Callable[[Acts], None]
) -> None:
    async def shrugs(session: AgentSession) -> None:
        await ask(session)
        try:
            await session.call(SandboxCall("python", {"code": "print(1)"}))
        except Exception:
            return

    acts(shrugs)
    stage.answers, stage.reason = (
        lambda request, count: ToolStatus.timeout if count == 0 else ToolStatus.ok,
        "deadline_s",
    )
    assert await outcomes(stage, 2) == [UNFINISHED, (Outcome.completed, True)]


async def test_an_image_token_that_the_model_writes_beside_images_is_the_agents_error(
    stage: Stage, acts: Callable[[Acts], None], calc_model: Path, tmp_path: Path
) -> None:
    async def looks_twice(session: AgentSession) -> None:
        picture = shows(CAT)
        await ask(session, picture, {"role": "assistant", "content": await ask(session, picture)}, picture)

    acts(looks_twice)
    stage.settings = vision(stage.settings, calc_model, tmp_path / "vision", SEEING.replace("IMAGE", PAD))
    token = json.loads((tmp_path / "vision/config.json").read_text())["image_token_id"]
    stage.engine.vocabulary, stage.engine.script = token + 1, lambda prompt: [token]
    assert await outcomes(stage, 1) == [(Outcome.agent_error, True)]
    [finish], [reward] = await stage.finished(1), await stage.said(RewardAssigned)
    assert (finish.reason, reward.value) == ("stray_image_token", 0.0)


async def test_a_sandbox_that_breaks_is_no_failure_of_the_agent_whatever_the_function_makes_of_it(
    stage: Stage, acts: Callable[[Acts], None]
) -> None:
    async def shrugs(session: AgentSession) -> None:
        await ask(session)
        try:
            await session.call(SandboxCall("python", {"code": "print(1)"}))
        except Exception:
            return

    acts(shrugs)
    stage.answers = lambda request, count: ToolStatus.infra_error
    assert await outcomes(stage, 2) == [UNFINISHED, (Outcome.infra_failure, True)]


async def test_calls_of_a_function_at_once_run_one_after_the_other(stage: Stage, acts: Callable[[Acts], None]) -> None:
    async def at_once(session: AgentSession) -> None:
        calls = [session.call(SandboxCall("python", {"code": f"print({number})"})) for number in range(3)]
        assert [answer.output for answer in await asyncio.gather(*calls)] == ["0\n", "1\n", "2\n"]
        await ask(session)

    acts(at_once)
    assert await outcomes(stage, 1) == [(Outcome.completed, True)]
    assert [call.call_seq for call in await stage.said(ToolCallRequested)] == [0, 1, 2]


async def test_under_another_runner_a_function_begins_anew_in_a_session_of_its_own(
    stage: Stage, acts: Callable[[Acts], None]
) -> None:
    begun = asyncio.Event()

    async def waits_once(session: AgentSession) -> None:
        await ask(session)
        if not begun.is_set():
            begun.set()
            await asyncio.Event().wait()

    acts(waits_once)
    await stage.request(recipe="brought")
    async with stage.gateway():
        async with stage.running():
            await asyncio.wait_for(begun.wait(), 20)
        async with stage.running(instance="r-2"):
            finishes = await stage.finished(2)
    assert [(one.outcome, one.final) for one in finishes] == [UNFINISHED, (Outcome.completed, True)]
    assert "begins anew" in finishes[0].reason


class Doors:
    """A simulation: the second door is the right one. One that is told to break raises."""

    def __init__(self, task: TaskRow) -> None:
        self.right = task["answer"]

    def reset(self) -> str:
        return QUESTION

    def step(self, name: str, arguments: dict[str, Any]) -> Step:
        if arguments["expr"] == "break":
            raise ValueError("a hinge")
        right = arguments["expr"] == self.right
        return Step(f"door {arguments['expr']}", float(right), right)

    def format_observation(self, observation: Any) -> str:
        return f"[{observation}]"


def opens(door: str) -> str:
    return f'<tool_call>{{"name":"calc","arguments":{{"expr":"{door}"}}}}</tool_call>'


def door(call_id: str, number: str) -> dict[str, Any]:
    function = {"name": "calc", "arguments": f'{{"expr":"{number}"}}'}
    return {"id": call_id, "type": "function", "function": function}


class Played(Recipe):
    """A recipe with a simulation instead of an agent; its reward is the sum of the simulation's."""

    name = "brought"
    simulation = Doors
    tools = CALC.tools

    def __init__(self) -> None:
        self.verifier = FunctionVerifier("total", "1", self.total)

    def total(self, episode: Episode) -> Verdict:
        found = played(self, episode.task, episode.messages)
        assert found is not None
        return Verdict(sum(found.rewards))


@pytest.fixture
def doors(offered: types.SimpleNamespace) -> Played:
    """The recipe that is offered."""
    offered.recipe = Played()
    return offered.recipe


async def test_a_simulation_answers_calls_and_its_end_is_that_of_the_session(stage: Stage, doors: Played) -> None:
    stage.policy = lambda prompt: opens("8") if "[door 7]" in prompt else opens("7")
    assert await outcomes(stage, 1) == [(Outcome.completed, True)]
    [finish], [reward] = await stage.finished(1), await stage.said(RewardAssigned)
    assert (len(finish.turns), reward.value, reward.verifier.name) == (2, 1.0, "total")
    assert await stage.said(ToolCallRequested) == []


async def test_the_last_action_of_a_simulation_counts_and_the_log_tells_a_later_judge_of_it(
    stage: Stage, doors: Played
) -> None:
    stage.policy = lambda prompt: opens("8") if "[door 7]" in prompt else opens("7")
    assert await outcomes(stage, 1, max_turns=2) == [(Outcome.completed, True)]
    [reward] = await stage.said(RewardAssigned)
    assert reward.value == 1.0
    said = [{"role": "user", "content": QUESTION}, {"role": "assistant", "tool_calls": [door("c0", "7")]}]
    said += [{"role": "tool", "tool_call_id": "c0", "content": "[door 7]"}]
    said += [{"role": "assistant", "tool_calls": [door("c1", "8")]}]
    told = acted_out(doors.task({"prompt": "?", "answer": "8"}), said)
    assert told == [*said, {"role": "tool", "tool_call_id": "c1", "content": "[door 8]"}]
    assert acted_out(doors.task({"prompt": "?", "answer": "8"}), told) == told


async def test_a_simulation_that_is_not_over_when_its_turns_are_is_truncated(stage: Stage, doors: Played) -> None:
    stage.policy = lambda prompt: opens("7")
    assert await outcomes(stage, 1, max_turns=2) == [(Outcome.truncated, True)]
    [reward] = await stage.said(RewardAssigned)
    assert reward.value == 0.0


async def test_a_simulation_goes_on_under_another_runner_where_it_stood(stage: Stage, doors: Played) -> None:
    asked = asyncio.Event()

    def policy(prompt: str) -> str:
        asked.set()
        return opens("8") if "[door 7]" in prompt else opens("7")

    stage.policy = policy
    await stage.request(recipe="brought")
    async with stage.gateway():
        async with stage.running():
            await asyncio.wait_for(asked.wait(), 20)
        async with stage.running(instance="r-2"):
            [finish] = await stage.finished(1)
    [reward] = await stage.said(RewardAssigned)
    assert (finish.outcome, len(finish.turns), reward.value) == (Outcome.completed, 2, 1.0)


async def test_a_simulation_that_raises_is_no_failure_of_the_agent(stage: Stage, doors: Played) -> None:
    stage.policy = lambda prompt: opens("break")
    assert await outcomes(stage, 2) == [UNFINISHED, (Outcome.infra_failure, True)]
    assert "raises ValueError: a hinge" in (await stage.finished(2))[0].reason
