"""Feeder, runner, gateway and sandbox worker together on real servers; only the engine is in memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_engine import MemoryEngine
from tests.secured import Authority
from turnlog.infra.log import Fenced, Partition, TransactionFailed
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.processors.core.fold.settlement import with_figures
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.producers import feeder, runner
from turnlog.producers.gateway.app import Gateway, serving
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.sandbox_workers import worker
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineRegistered,
    GroupScored,
    GroupStatus,
    Outcome,
    Purpose,
    RewardAssigned,
    RolloutRequested,
    SessionFinished,
    ToolCallCompleted,
    ToolStatus,
    TreeBooks,
    WeightVersionPublished,
)
from turnlog.settings import ModelSettings, Settings

pytestmark = pytest.mark.kafka
PROMPTS, GROUP = 2, 4


def acts(prompt: str) -> str:
    """The ideal policy: copy the expression into a call, then say what the tool said."""
    if "tool\n" in prompt:
        return prompt.rpartition("tool\n")[2].partition("<")[0]
    expression = prompt.partition("user\n")[2].partition(" = ?")[0].replace(" ", "")
    return f'<tool_call>{{"name":"calc","arguments":{{"expr":"{expression}"}}}}</tool_call>'


@pytest.fixture
def settings(live_settings: Settings, tmp_path: Path) -> Settings:
    """The gateway is spoken to over TLS."""
    model, authority = tmp_path / "model", Authority(tmp_path)
    RECIPE.warm_start.write_tokenizer(model)
    (model / "config.json").write_text(json.dumps(RECIPE.warm_start.model.config()))
    replace = dataclasses.replace
    return replace(
        live_settings,
        model=ModelSettings(path=str(model)),
        gateway=replace(
            live_settings.gateway,
            url=live_settings.gateway.url.replace("http:", "https:"),
            port=int(live_settings.gateway.url.rpartition(":")[2]),
            certificate_file=str(authority.issue("gateway")),
            ca_file=str(authority.file),
        ),
        feeder=replace(live_settings.feeder, group_size=GROUP, draws=1),
        batcher=replace(live_settings.batcher, prompts_per_draw=PROMPTS),
        sandbox=replace(live_settings.sandbox, backend="subprocess", slots=2, prewarm=1),
    )


@asynccontextmanager
async def started(name: str, main: Callable[[Role], Awaitable[None]], settings: Settings) -> AsyncIterator[Any]:
    """A role on its own clients, as its own process has them; drained at the end."""
    async with open_role(name, settings) as role:
        task = asyncio.ensure_future(main(role))
        try:
            yield task
        finally:
            role.stopping.set()
            await asyncio.gather(task, return_exceptions=True)


async def gateway(role: Role, acts: Callable[[str], str] = acts) -> None:
    """The gateway role with an engine in memory behind it, whose policy `acts`."""
    engine = MemoryEngine(vocabulary=384, context=512)
    tokens = TextTokens(Path(role.settings.model.path))
    engine.script = lambda prompt: tokens.encode(acts(tokens.literal(prompt)) + "<|im_end|>")
    url = role.settings.gateway.url
    with contextlib.closing(socket.create_server(("127.0.0.1", int(url.rpartition(":")[2])))) as listener:
        served = await Gateway.create(role, url, connect=lambda *_: engine)
        async with served.current(), serving(served, listener):
            await role.stopping.wait()


async def publish_first_weights(role: Role) -> None:
    run = role.settings.run.id
    await configure(role)
    await role.events.append(
        WeightVersionPublished(
            event_id="w0",
            run_id=run,
            version=0,
            step=0,
            batch_index=-1,
            incarnation=0,
            kind="full",
            base_version=None,
            files=(),
            dtype="float32",
            checksums={},
            checkpoint=None,
        )
    )
    await role.events.append(
        EngineRegistered(event_id="e", run_id=run, engine_id="e", url="http://e", state="serving", version=0, model="m")
    )


async def read(role: Role, kind: type, count: int) -> list[Any]:
    """Wait for `count` events of a kind, wherever they stand in their topic."""
    topic = topics.TOPIC_OF[kind.__name__].name
    partitions = [Partition(topic, number) for number in range((await role.log.topics())[topic].partitions)]
    found: list[Any] = []
    async with role.log.reader() as reader, asyncio.timeout(240):
        reader.assign(dict.fromkeys(partitions, 0))
        while len(found) < count:
            found += [
                event
                for record in await reader.poll(timeout_s=0.2)
                if isinstance(event := await role.events.decode(record), kind)
            ]
    return found


async def test_every_rollout_of_a_draw_is_fed_run_executed_in_a_sandbox_and_rewarded(
    settings: Settings,
) -> None:
    async with AsyncExitStack() as stack:
        role = await stack.enter_async_context(open_role("test", settings))
        await publish_first_weights(role)
        for name, main in (
            ("gateway", gateway),
            ("sandbox", worker.main),
            ("runner", runner.main),
            ("feeder", feeder.main),
        ):
            await stack.enter_async_context(started(name, main, settings))
        finishes = await read(role, SessionFinished, PROMPTS * GROUP)
        rewards = await read(role, RewardAssigned, PROMPTS * GROUP)
        results = await read(role, ToolCallCompleted, PROMPTS * GROUP)
    assert {finish.outcome for finish in finishes} == {Outcome.completed}
    assert {len(finish.turns) for finish in finishes} == {2}
    assert {reward.value for reward in rewards} == {1.0}
    assert {result.status for result in results} == {ToolStatus.ok}


async def test_a_feeder_that_was_replaced_is_fenced_and_nothing_is_asked_for_twice(settings: Settings) -> None:
    async with open_role("test", settings) as role:
        await publish_first_weights(role)
        async with started("feeder", feeder.main, settings) as first:
            requests = await read(role, RolloutRequested, PROMPTS * GROUP)
            async with role.log.transactor(f"{settings.run.id}.feeder"):  # a newer feeder came, and is gone again
                pass
            for event in with_figures([discarded(requests[0])]):
                await role.events.append(event)
            # Kafka answers UNKNOWN_SERVER_ERROR to a commit that arrives while it is writing the new owner's epoch.
            with pytest.raises((Fenced, TransactionFailed)):
                await asyncio.wait_for(first, 60)
        async with started("feeder", feeder.main, settings):
            requests = await read(role, RolloutRequested, (PROMPTS + 1) * GROUP)
    assert len({request.rollout_id for request in requests}) == len(requests) == (PROMPTS + 1) * GROUP


def discarded(request: RolloutRequested) -> GroupScored:
    return GroupScored(
        event_id="d",
        run_id=request.run_id,
        group_id=request.group_id,
        floor=0,
        task_id=request.task_id,
        purpose=Purpose.train,
        rollouts=(),
        baseline=None,
        std=None,
        estimator="grpo/1",
        status=GroupStatus.discarded,
        reason="too_few_valid",
        samples=0,
        books=TreeBooks(0, 0, {}),
        fold_version=FOLD_VERSION,
        settings_sha256="",
    )
