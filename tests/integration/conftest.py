"""A runner at the real gateway over HTTP, with the log and the engine in memory; the policy is scripted on the text of
its prompt, a stand-in answers tool calls on the log as a sandbox worker does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import specs
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers import runner
from turnlog.producers.gateway.app import Gateway, serving
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.schemas import ids, topics
from turnlog.schemas.events import (
    EngineRegistered,
    Event,
    Limits,
    Purpose,
    RolloutRequested,
    Sampling,
    SessionFinished,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.settings import GatewaySettings, KafkaSettings, ModelSettings, RunnerSettings, RunSettings, Settings

CALL = '<tool_call>{"name":"calc","arguments":{"expr":"3+5"}}</tool_call>'
QUESTION = "3 + 5 = ?"
Policy = Callable[[str], str]
Answerer = Callable[[ToolCallRequested, int], ToolStatus | None]


def uses_the_tool(prompt: str) -> str:
    return "8" if "tool\n8" in prompt else CALL


@pytest.fixture(scope="module")
def calc_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    RECIPE.warm_start.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(RECIPE.warm_start.model.config()))
    return folder


@dataclasses.dataclass
class Stage:
    """Everything around the runner."""

    settings: Settings
    broker: MemoryBroker
    registry: MemoryRegistry
    events: EventLog
    engine: MemoryEngine
    policy: Policy = uses_the_tool
    answers: Answerer = lambda request, count: ToolStatus.ok
    reports: int = 0
    """Of the engine, so far."""
    reason: str = ""
    """Of answers that are not ok."""
    begins: bool = False
    """The worker says that it begins with a call, as real ones do."""
    executed: Counter[str] = dataclasses.field(default_factory=Counter)
    blobs: MemoryBlobs = dataclasses.field(default_factory=MemoryBlobs)
    sides: dict[str, MemoryEngine] = dataclasses.field(default_factory=dict)
    """Auxiliary engines by URL."""
    runner: asyncio.Task[None] | None = None
    """The runner that was started last."""
    others: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)
    """What works beside runners: the stand-in, or real sandbox workers."""
    decoded: dict[Partition, tuple[int, list[Event]]] = dataclasses.field(default_factory=dict)
    """The offset up to which a partition was decoded, and its events: tests ask at every change of the log."""

    async def request(
        self,
        group: str = "g",
        index: int = 0,
        recipe: str = "calc",
        new_tokens: int = 24,
        size: int = 2,
        task: dict[str, Any] | None = None,
        **limits: Any,
    ) -> str:
        """Ask for a rollout; its id. `new_tokens`: of one turn."""
        rollout = ids.rollout_id(group, index)
        await self.events.append(
            RolloutRequested(
                event_id=rollout,
                run_id="r",
                group_id=group,
                floor=0,
                task_id="t",
                rollout_id=rollout,
                rollout_index=index,
                group_size=size,
                draw=0,
                dataset="d",
                dataset_epoch=0,
                index=0,
                recipe=recipe,
                purpose=Purpose.train,
                task=json.dumps(task or {"prompt": QUESTION, "answer": "8"}).encode(),
                sampling=Sampling(max_new_tokens=new_tokens),
                min_weight_version=0,
                limits=Limits(**{"max_turns": 4, "max_context_tokens": 512, "deadline_s": 30.0, **limits}),
            )
        )
        return rollout

    async def said(self, *kinds: type) -> list[Any]:
        """Events of these kinds, in log order per topic."""
        found: list[Event] = []
        for topic in dict.fromkeys(topics.TOPIC_OF[kind.__name__].name for kind in kinds):
            for number in range(self.broker.partitions(topic)):
                place = Partition(topic, number)
                offset, events = self.decoded.get(place, (0, []))
                records, offset = self.broker.read(place, offset, 10**6)
                events = [*events, *[await self.events.decode(record) for record in records]]
                self.decoded[place] = offset, events
                found += [event for event in events if isinstance(event, kinds)]
        return found

    async def finished(self, sessions: int, seconds: float = 60) -> list[SessionFinished]:
        """Wait for so many SessionFinished. Raises what check_alive raises."""
        async with asyncio.timeout(seconds):
            while len(found := await self.said(SessionFinished)) < sessions:
                self.check_alive()
                await self.broker.changed(1)
        return found

    def check_alive(self) -> None:
        """Raise what the last runner or anything beside it died of, if it did: nobody waits for the dead."""
        for task in (self.runner, *self.others):
            if task is not None and task.done() and not task.cancelled():
                task.result()

    @asynccontextmanager
    async def gateway(self, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[None]:
        """A real gateway on the address of the settings. `clock`: by which it waits for engines."""
        log = MemoryLog(self.broker)
        async with EventLog.open(log, self.registry, writer="gateway") as events:
            role = Role("gateway", "gateway-1", self.settings, log, events, self.blobs, Health("gateway"))
            url = self.settings.gateway.url
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(url.rpartition(":")[2])))
            with contextlib.closing(listener):
                gateway = await Gateway.create(role, url, connect=lambda url, _: self.sides.get(url, self.engine))
                gateway.engines.clock = clock
                async with gateway.current(), serving(gateway, listener):
                    yield

    @asynccontextmanager
    async def running(
        self, settings: Settings | None = None, instance: str = "r-1"
    ) -> AsyncIterator[tuple[asyncio.Task[None], MemoryLog]]:
        """A runner; stopped at the end, unless it is dead."""
        log = MemoryLog(self.broker)
        async with EventLog.open(log, self.registry, writer="runner") as events:
            role = Role("runner", instance, settings or self.settings, log, events, self.blobs, Health("runner"))
            task = self.runner = asyncio.create_task(runner.main(role))
            try:
                yield task, log
            finally:
                role.stopping.set()
                if not task.done():
                    await task

    async def work(self) -> None:
        """A stand-in sandbox worker: the first request of a call is executed once, repeats get the stored answer."""
        stored: dict[str, ToolCallCompleted] = {}
        position = dict.fromkeys(range(self.settings.kafka.rollouts), 0)
        while True:
            for number in position:
                records, position[number] = self.broker.read(
                    Partition(topics.TOOL_CALLS.name, number), position[number], 99
                )
                for record in records:
                    event = await self.events.decode(record)
                    if not isinstance(event, ToolCallRequested):
                        continue
                    if event.call_id not in stored:
                        if self.begins:
                            await self.events.append(self.started(event))
                        status = self.answers(event, sum(self.executed.values()))
                        self.executed[event.call_id] += 1
                        if status is None:
                            continue
                        stored[event.call_id] = self.completed(event, status)
                    await self.events.append(stored[event.call_id])
            await self.broker.changed(0.2)

    async def engine_says(self, record: type[Event], *, version: int = 0, **more: Any) -> None:
        """What the engine's weight loader writes."""
        self.reports += 1
        about = {"run_id": "r", "engine_id": "e", "url": "http://e", "state": "serving", "version": version}
        await self.events.append(record(event_id=f"report {self.reports}", **{**about, **more}))

    def started(self, event: ToolCallRequested, attempt: int = 1) -> ToolCallStarted:
        return ToolCallStarted(
            event_id=f"{event.call_id} {attempt}", run_id="r", group_id=event.group_id, session_id=event.session_id,
            floor=event.floor, rollout_id=event.rollout_id, call_id=event.call_id, attempt=attempt, worker="w",
        )  # fmt: skip

    def completed(self, event: ToolCallRequested, status: ToolStatus) -> ToolCallCompleted:
        expression = json.loads(event.arguments)["code"].removeprefix("print(").removesuffix(")")
        reason = "" if status is ToolStatus.ok else self.reason
        return ToolCallCompleted(
            event_id=event.call_id, run_id="r", group_id=event.group_id, session_id=event.session_id,
            floor=event.floor, rollout_id=event.rollout_id, call_id=event.call_id, call_seq=event.call_seq,
            status=status, reason=reason, exit_code=0, output=f"{eval(expression)}\n".encode(), full_output=None,
            duration_s=0.0, queue_s=0.0, workspace=None, attempt=0, worker="w", cached=False,
        )  # fmt: skip

    def script(self, tokens: TextTokens) -> Callable[[Any], list[int]]:
        """The policy on token ids."""
        return lambda prompt: tokens.encode(self.policy(tokens.literal(prompt)) + "<|im_end|>")


@pytest.fixture
async def stage(calc_model: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(calc_model, tmp_path) as stage:
        worker = asyncio.create_task(stage.work())
        stage.others.append(worker)
        yield stage
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)


@asynccontextmanager
async def staged(calc_model: Path, directory: Path) -> AsyncIterator[Stage]:
    """A stage on which nobody answers tool calls yet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    settings = Settings(
        run=RunSettings(id="r", directory=str(directory)),
        kafka=KafkaSettings(groups=2, rollouts=2),
        model=ModelSettings(path=str(calc_model)),
        gateway=GatewaySettings(url=url),
        runner=RunnerSettings(concurrency=8, max_attempts=2, tool_deadline_s=20.0, gateway_patience_s=20.0),
    )
    # Sessions are as old as their records say.
    log, registry = MemoryLog(MemoryBroker(time.time_ns() // 10**6)), MemoryRegistry()
    await log.create_topics(specs(settings))
    log.patience_s = math.inf  # of the test's own words
    async with AsyncExitStack() as stack:
        events = await stack.enter_async_context(EventLog.open(log, registry, writer="test"))
        engine = MemoryEngine(vocabulary=384, context=512)
        stage = Stage(settings, log.broker, registry, events, engine)
        engine.script = stage.script(TextTokens(calc_model))
        await stage.engine_says(EngineRegistered, model="m")
        yield stage
