"""Rollouts of the source `openenv`: real runner, gateway and sandbox worker, upstream's server, a scripted policy."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.environments.openenv_servers import UpstreamServer, guessing
from tests.fakes.memory_log import MemoryLog
from tests.integration.conftest import Stage, calc_model, staged
from turnlog.infra.event_log import EventLog
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.worker import SandboxWorker
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    SessionFinished,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
)

__all__ = ["calc_model"]
SEEDED = {3: 30, 7: 41}
"""Seed -> the number that random.Random(seed).randrange(100) gives."""


@pytest.fixture
async def guess() -> AsyncIterator[UpstreamServer]:
    async with guessing(sessions=1) as server:
        yield server


@asynccontextmanager
async def playing(stage: Stage, url: str) -> AsyncIterator[None]:
    """A gateway, a runner and a sandbox worker that may reach the server."""
    egress = EgressSettings(allow=(f"GET {url}/*",), private_hosts=(url.removeprefix("http://"),), tls="refuse")
    sandbox = SandboxSettings(backend="subprocess", slots=1, prewarm=0, first_uid=246_000)
    settings = dataclasses.replace(stage.settings, sandbox=sandbox, egress=egress)
    log = MemoryLog(stage.broker)
    async with (
        EventLog.open(log, stage.registry, writer="worker", blobs=stage.blobs) as events,
        SandboxPools.open(settings) as pools,
        Egress.open_temporary(egress, stage.blobs) as way,
        stage.gateway(),
        stage.running(settings),
    ):
        role = Role("sandbox", "w-1", settings, log, events, stage.blobs, Health("sandbox"))
        worker = asyncio.create_task(SandboxWorker(role, pools, egress=way).run())
        stage.others.append(worker)
        yield
        role.stopping.set()
        await worker


def halving(prompt: str) -> int:
    """The next guess after the hints in the prompt."""
    low, high = 0, 99
    for hint in re.findall(r'"hint": ?"(higher|lower)"|\b(higher|lower)\b', prompt):
        middle = (low + high) // 2
        low, high = (middle + 1, high) if "higher" in hint else (low, middle - 1)
    return (low + high) // 2


def by_tool(prompt: str) -> str:
    return f'<tool_call>{{"name":"act","arguments":{{"number":{halving(prompt)}}}}}</tool_call>'


async def played(stage: Stage, source: str, row: dict[str, Any], guess: UpstreamServer, **limits: Any) -> Any:
    """The end of a rollout's only session."""
    stage.engine.context = 8192
    await stage.request(recipe=source, task=row, new_tokens=200, max_context_tokens=8000, **limits)
    async with playing(stage, guess.url):
        [finish] = await stage.finished(1)
        async with asyncio.timeout(20):
            while not await stage.said(ToolCallCancelled):
                await stage.broker.changed(1)
    return finish


async def test_an_episode_by_tool_calls_is_rewarded_with_the_sum_of_its_rewards(
    calc_model: Path, tmp_path: Path, guess: UpstreamServer
) -> None:
    async with staged(calc_model, tmp_path) as stage:
        stage.policy = by_tool
        finish = await played(stage, f"openenv url={guess.url}", {"prompt": "Find it.", "seed": 3}, guess, max_turns=9)
        answers = await stage.said(ToolCallCompleted)
        rewards = await stage.said(RewardAssigned)
        over = await stage.said(ToolCallCancelled)
        asked = await stage.said(ToolCallRequested)
    steps = [json.loads(answer.output) for answer in answers]
    assert finish.outcome is Outcome.completed
    assert [step["terminated"] for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(finish.turns) == len(steps) - 1
    assert rewards[0].value == pytest.approx(sum(step["reward"] for step in steps))
    assert rewards[0].components["success"] == 1.0
    assert [call.reason for call in over] == ["session_over"]
    assert (asked[0].call_seq, json.loads(asked[0].arguments)["seed"]) == (0, 3)


async def test_an_episode_by_text_ends_with_the_environment_and_its_place_is_free_for_the_next(
    calc_model: Path, tmp_path: Path, guess: UpstreamServer
) -> None:
    """The server has one place: a session that was cut off has to give it back."""
    source = f"openenv url={guess.url} action=text field=hint"
    async with staged(calc_model, tmp_path) as stage:
        stage.policy = lambda prompt: "17"
        first = await played(stage, source, {"prompt": "?", "seed": 3}, guess, max_turns=2)
        texts = [json.loads(call.arguments) for call in await stage.said(ToolCallRequested)]
    assert (first.outcome, first.reason) == (Outcome.truncated, "max_turns")
    assert texts[1:] == [{"action": {"hint": "17"}}] * 2
    async with staged(calc_model, tmp_path) as stage:
        stage.policy = by_tool
        second = await played(stage, f"openenv url={guess.url} tasks=9", {"prompt": "?", "seed": 7}, guess, max_turns=9)
    assert second.outcome is Outcome.completed


async def test_a_server_that_dies_is_no_reward_and_the_rollout_is_tried_again(
    calc_model: Path, tmp_path: Path, guess: UpstreamServer
) -> None:
    async with staged(calc_model, tmp_path) as stage:
        stage.policy = lambda prompt: '<tool_call>{"name":"act","arguments":{"number":1,"harm":"exit"}}</tool_call>'
        stage.engine.context = 8192
        await stage.request(
            recipe=f"openenv url={guess.url} wall_s=3", task={"prompt": "?", "seed": 3}, new_tokens=200,
            max_context_tokens=8000,
        )  # fmt: skip
        async with playing(stage, guess.url):
            first, second = await stage.finished(2)
        assert await stage.said(RewardAssigned) == []
    assert [each.outcome for each in (first, second)] == [Outcome.infra_failure] * 2
    assert "environment_lost" in first.reason
    assert "environment_unreachable" in second.reason
    assert isinstance(first, SessionFinished)
    assert not first.expects.reward
