"""Environments whose steps are tool calls on the log: an opening call, actions that are plain text, an end by the
environment, limits of one task; and sources that take options."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.offers import offering
from tests.integration.conftest import Stage
from turnlog.environments import (
    BadSource,
    FunctionVerifier,
    Observation,
    Opening,
    Recipe,
    SandboxAnswer,
    SandboxCall,
    Task,
    TaskRow,
    UnknownRecipe,
    Verdict,
    task_source,
)
from turnlog.infra.environments.sources import join_source, split_source
from turnlog.schemas.events import Outcome, RewardAssigned, ToolCallRequested, ToolStatus

UNFINISHED = (Outcome.infra_failure, False)
FIRST = "four doors"


def said(text: str) -> SandboxCall:
    """A call that answers this text."""
    return SandboxCall("python", {"code": f"print({text!r})"})


class RemoteDoors(Recipe):
    """An environment behind a tool: the model writes the number of a door; door 8 is the last one."""

    name = "remote"
    verifier = FunctionVerifier(
        "last", "1", lambda episode: Verdict(float(any("[8]" in str(one["content"]) for one in episode.messages)))
    )

    def __init__(self, **limits: Any) -> None:
        self._limits = limits

    def task(self, row: TaskRow) -> Task:
        return Task(
            id="doors",
            row=row,
            messages=({"role": "user", "content": "open doors"},),
            verifier=self.verifier,
            environment=self.environment,
            sandbox_tools=("python",),
            opening=said(FIRST),
            opened=open_doors,
            text_action=lambda text: "write digits" if text == "what" else said(f"[{text}]"),
            observe=lambda call, answer: Observation(answer.output, done="[8]" in answer.output),
            **self._limits,
        )


def open_doors(answer: SandboxAnswer) -> Opening:
    return Opening(messages=({"role": "user", "content": answer.output},))


OFFERED = types.SimpleNamespace()
"""`source`: what the installed package offers."""


def made(*, limit: str = "9", **more: str) -> RemoteDoors:
    """A factory with options."""
    if not limit.isdigit():
        raise BadSource(f"limit={limit}: it must be a number of turns")
    return RemoteDoors(max_turns=int(limit))


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    points: Mapping[str, str] = {"remote": f"{__name__}:OFFERED.source", "made": f"{__name__}:made"}
    with offering(tmp_path, monkeypatch, "remote", points):
        OFFERED.source = RemoteDoors()
        yield OFFERED


def walk(prompt: str) -> str:
    """Open door 7, ask a question, open door 8."""
    if "write digits" in prompt:
        return "8"
    return "what" if "[7]" in prompt else "7"


async def test_each_step_is_a_call_on_the_log_and_the_environment_ends_the_session(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    stage.policy = walk
    await stage.request(recipe="remote")
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, len(finish.turns)) == (Outcome.completed, 3)
    calls = await stage.said(ToolCallRequested)
    assert [(call.call_seq, call.arguments) for call in calls] == [
        (number, f'{{"code": "print({text!r})"}}'.encode()) for number, text in enumerate((FIRST, "[7]", "[8]"))
    ]
    [reward] = await stage.said(RewardAssigned)
    assert reward.value == 1.0


@pytest.mark.parametrize("turns", [1, 2])
async def test_under_another_runner_no_step_is_taken_twice(
    stage: Stage, offered: types.SimpleNamespace, turns: int
) -> None:
    reached = asyncio.Event()

    def policy(prompt: str) -> str:
        if prompt.count("assistant") >= turns:
            reached.set()
        return walk(prompt)

    stage.policy = policy
    await stage.request(recipe="remote")
    async with stage.gateway():
        async with stage.running():
            await asyncio.wait_for(reached.wait(), 20)
        async with stage.running(instance="r-2"):
            [finish] = await stage.finished(1)
    assert (finish.outcome, len(finish.turns)) == (Outcome.completed, 3)
    assert sorted(stage.executed.values()) == [1, 1, 1]
    found = {call.call_id: call.call_seq for call in await stage.said(ToolCallRequested)}
    assert sorted(found.values()) == [0, 1, 2]


@pytest.mark.parametrize("status", [ToolStatus.tool_error, ToolStatus.timeout, ToolStatus.infra_error])
async def test_an_environment_that_does_not_open_is_no_failure_of_the_agent(
    stage: Stage, offered: types.SimpleNamespace, status: ToolStatus
) -> None:
    stage.answers, stage.reason = lambda request, count: status, "environment_lost"
    await stage.request(recipe="remote")
    async with stage.gateway(), stage.running():
        finishes = await stage.finished(2)
    assert [(one.outcome, one.final) for one in finishes] == [UNFINISHED, (Outcome.infra_failure, True)]
    assert all(status.value in one.reason and "environment_lost" in one.reason for one in finishes)
    assert await stage.said(RewardAssigned) == []


async def test_a_limit_of_the_task_counts_and_the_last_action_still_runs(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    stage.policy = lambda prompt: "7"
    await stage.request(recipe="made limit=2", max_turns=4)
    async with stage.gateway(), stage.running():
        [finish] = await stage.finished(1)
    assert (finish.outcome, finish.reason, len(finish.turns)) == (Outcome.truncated, "max_turns", 2)
    assert len(stage.executed) == 3


class Unmakeable(RemoteDoors):
    """A source that cannot make its task."""

    def task(self, row: TaskRow) -> Task:
        raise KeyError("image")


async def test_a_source_that_cannot_make_its_task_ends_the_session_by_name(
    stage: Stage, offered: types.SimpleNamespace
) -> None:
    offered.source = Unmakeable()
    await stage.request(recipe="remote")
    async with stage.gateway(), stage.running():
        finishes = await stage.finished(2)
    assert [(one.outcome, one.final) for one in finishes] == [UNFINISHED, (Outcome.infra_failure, True)]
    assert "recipe 'remote': task (task, test_runner_environments.py:" in finishes[0].reason
    assert finishes[0].reason.endswith("raises KeyError: 'image'")


def test_the_text_of_a_source_says_its_options_and_bad_ones_are_refused(offered: types.SimpleNamespace) -> None:
    assert task_source("made limit=3").task({"prompt": ""}).max_turns == 3
    assert task_source("remote") is offered.source
    assert split_source("made 'path=a b' limit=3") == ("made", {"path": "a b", "limit": "3"})
    assert join_source("made", {"path": "a b"}) == "made 'path=a b'"
    for text, why in (
        ("made limit=x", "limit=x: it must be a number"),
        ("made limit", "'limit' must be key=value"),
        ("made limit=1 limit=2", "must be key=value, with each key once"),
        ("made 'limit=1", "No closing quotation"),
        ("remote limit=1", "takes no options, got limit"),
    ):
        with pytest.raises(BadSource, match=why):
            task_source(text)
    with pytest.raises(UnknownRecipe, match="no recipe 'nobody'"):
        task_source("nobody a=1")
