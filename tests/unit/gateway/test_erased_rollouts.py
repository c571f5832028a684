"""A runner whose session is erased: the rollout is over, and nothing is written for it any more."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from tests.unit.gateway.conftest import Rig, rigged
from tests.unit.gateway.test_gateway_replicas import request, runner_settings
from tests.unit.producers.test_verdicts import EPISODE
from turnlog.infra.environments.episodes import FunctionVerifier, Verdict
from turnlog.infra.environments.verifiers import SandboxVerifier
from turnlog.infra.environments.verifiers.judges import client
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers.gateway_client import GatewayClient
from turnlog.producers.rollout import Owed, Rollout
from turnlog.producers.tool_calls import ToolResults
from turnlog.producers.verdicts import Bench
from turnlog.schemas import ids
from turnlog.schemas.content import holds_erased
from turnlog.settings import ErasureSettings, Settings

TASK = {"prompt": "3 + 5 = ?", "expr": "3 + 5", "answer": "8"}


@pytest.fixture
async def rig(settings: Settings, model_folder: Path) -> AsyncIterator[Rig]:
    """A gateway of a run that encrypts content."""
    sealed = dataclasses.replace(settings, erasure=ErasureSettings(master_keys="0123456789abcdef"))
    async with rigged(sealed, model_folder) as rig:
        yield rig


async def erase(rig: Rig, session: str) -> None:
    assert rig.events.keys is not None
    await rig.events.keys.prepare(session)
    await rig.events.keys.erase(session, "an operator")


@asynccontextmanager
async def judged(rig: Rig) -> AsyncIterator[Bench]:
    """All that is needed to judge an open session."""
    async with GatewayClient(runner_settings(rig.settings, rig.url)) as gateway, client() as http:
        wanted, task = dataclasses.replace(request("rollout-0"), task=orjson.dumps(TASK)), RECIPE.task(TASK)
        yield Bench(
            http=http, events=rig.events, gateway=gateway, results=ToolResults(), blobs=rig.blobs, request=wanted,
            task=task, session=await gateway.open(wanted, task, 0), asked={},
        )  # fmt: skip


@pytest.mark.parametrize("erased", [True, False])
async def test_a_rollout_ends_whose_session_is_erased(rig: Rig, erased: bool) -> None:
    session = ids.session_id("rollout-0", 0)
    if erased:
        await erase(rig, session)
    settings = runner_settings(rig.settings, rig.url)
    async with GatewayClient(settings) as gateway, client() as http:
        wanted = dataclasses.replace(request("rollout-0"), task=orjson.dumps(TASK))
        rollout = Rollout(wanted, RECIPE, settings.runner, gateway, rig.events, ToolResults(), rig.blobs, http)
        assert await rollout.run(resume=False) is None
    names = ("TurnCompleted", "TokenSnapshot", "RewardAssigned", "SessionFinished")
    assert [len(await rig.written(name)) > 0 for name in names] == [not erased] * len(names)


async def test_a_late_reward_of_an_erased_session_is_not_written_and_ends_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    async with judged(rig) as bench:
        session, settings = bench.session, runner_settings(rig.settings, rig.url)
        rollout = Rollout(
            bench.request, RECIPE, settings.runner, bench.gateway, rig.events, bench.results, rig.blobs, bench.http
        )
        await erase(rig, session.session_id)
        late = FunctionVerifier("late", "1", lambda _: Verdict(1.0, {}, {"seen": "what it said"}))
        await rollout.settle(Owed(bench, late, EPISODE))
    assert await rig.written("RewardAssigned") == []
    assert f"session {session.session_id} was erased" in caplog.text


async def test_calls_that_judge_a_session_are_erased_with_it(rig: Rig) -> None:
    async with judged(rig) as bench:
        session = bench.session
        judging = asyncio.create_task(bench.verdict(SandboxVerifier(name="tests", version="1", calls="true"), EPISODE))
        async with asyncio.timeout(30):
            while not (asked := await rig.written("ToolCallRequested")):
                await asyncio.wait([judging], timeout=0.01)
        judging.cancel()
    keys = rig.events.keys
    assert keys is not None
    assert asked[0].session_id != session.session_id
    await keys.erase(session.session_id, "an operator")
    assert keys.is_erased(asked[0].session_id)
    assert holds_erased((await rig.written("ToolCallRequested"))[0])
