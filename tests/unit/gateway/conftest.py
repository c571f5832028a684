"""A gateway on a real socket over the fakes of log, store and engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_engine import MemoryEngine
from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.engines.kinds import Connect
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Appender, Log, LogUnavailable, Partition, Reader, TopicSpec
from turnlog.infra.redaction.redactor import Redactor
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.http_clients import direct
from turnlog.infra.roles.role import Role, session_keys
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.producers.gateway.app import REQUEST_S, Gateway, listening, serving
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.schemas import ids
from turnlog.schemas.events import EngineRegistered, Event
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import EngineSettings, FoldSettings, GatewaySettings, ModelSettings, RunSettings, Settings

WINDOW = 512
PARTITIONS = 2


def model_in(folder: Path, room: int = 0, template: str = "") -> Path:
    """The calc recipe's tokenizer and template, and the shape of its model, written to `folder`. `room`: tokens that it
    has positions for, and `template`: its chat template, where they are others."""
    RECIPE.warm_start.write_tokenizer(folder)
    config = RECIPE.warm_start.model.config()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": room} if room else config))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """See model_in."""
    return model_in(tmp_path_factory.mktemp("model"))


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another task does; pytest's timeout ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 - what is waited for is a state of the gateway
        await asyncio.sleep(0.005)


class Script:
    """The policy of a test: says what it is told to say, one answer per request, then counts."""

    def __init__(self, tokens: TextTokens) -> None:
        self.tokens = tokens
        self.answers: list[list[int]] = []
        self.asked = 0

    def says(self, text: str, *, end: bool = True) -> list[int]:
        """Queue an answer; `end` puts the end-of-turn token after it."""
        answer = self.tokens.encode(text) + ([2] if end else [])
        self.answers.append(answer)
        return answer

    def __call__(self, prompt: Sequence[int]) -> list[int]:
        self.asked += 1
        return self.answers.pop(0) if self.answers else [*self.tokens.encode(str(self.asked)), 2]


class HeldLog(MemoryLog):
    """A connection whose acknowledgements a test can hold back, or whose broker can be down."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.acknowledging = asyncio.Event()
        self.acknowledging.set()
        self.down = False
        self.handed_over: list[str] = []
        """Topics of records that went out while acknowledgements were held."""
        self.readers = 0
        """That were opened so far."""
        self.start_reads = 0
        """Reads of start offsets so far."""

    @asynccontextmanager
    async def appender(self) -> AsyncIterator[Appender]:
        """See Log."""
        async with super().appender() as appender:
            yield HeldAppender(self, appender)

    def reader(self, *, patient: bool = False, committed: bool = True) -> AbstractAsyncContextManager[Reader]:
        """See Log."""
        self.readers += 1
        return super().reader(patient=patient, committed=committed)

    async def start_offsets(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """See Log."""
        self.start_reads += 1
        return await super().start_offsets(partitions)


class HeldAppender:
    """See Appender and HeldLog."""

    def __init__(self, log: HeldLog, appender: Appender) -> None:
        self._log = log
        self._appender = appender

    async def append(self, topic: str, key: bytes, value: bytes, **more: Any) -> tuple[int, int]:
        """See Appender."""
        return await (await self.submit(topic, key, value, **more))

    async def submit(self, topic: str, key: bytes, value: bytes, **more: Any) -> Awaitable[tuple[int, int]]:
        """See Appender."""
        if self._log.down:
            raise LogUnavailable("the broker does not answer")
        if not self._log.acknowledging.is_set():
            self._log.handed_over.append(topic)
        return self._acknowledged(await self._appender.submit(topic, key, value, **more))

    async def _acknowledged(self, done: Awaitable[tuple[int, int]]) -> tuple[int, int]:
        await self._log.acknowledging.wait()
        return await done


class Rig:
    """One log, any number of gateways over it."""

    def __init__(self, settings: Settings, folder: Path, log: MemoryLog, stack: AsyncExitStack) -> None:
        self.settings = settings
        self.log: Log = log
        self.memory = log
        self.registry = MemoryRegistry()
        self.blobs = MemoryBlobs()
        self.tokens = TextTokens(folder)
        self.script = Script(self.tokens)
        self.engines = {"e0": self.new_engine("http://e0")}
        self._stack = stack
        self.connect: Connect | None = lambda url, _: self.engines[url.removeprefix("http://")]
        """None: as a gateway of its own has it."""
        self.url = ""
        self.request_s = REQUEST_S
        self.gateway: Gateway
        self.events: EventLog

    def new_engine(self, url: str) -> MemoryEngine:
        """An engine that plays the script."""
        return MemoryEngine(
            vocabulary=self.tokens.vocabulary,
            context=self.settings.engine.context,
            script=self.script,
            decode=self.tokens.decode,
        )

    async def start(self, instance: str = "gateway-0") -> AsyncExitStack:
        """Start a gateway and make it the one that requests go to; closing the stack stops it."""
        stack = await self._stack.enter_async_context(AsyncExitStack())
        self.held = log = HeldLog(self.memory.broker)
        redactor, keys = Redactor.of(self.settings), session_keys(self.settings)
        self.events = await stack.enter_async_context(
            EventLog.open(log, self.registry, writer=instance, keys=keys, redactor=redactor)
        )
        role = Role("gateway", instance, self.settings, log, self.events, self.blobs, Health("gateway"))
        listener = stack.enter_context(contextlib.closing(listening("127.0.0.1", 0, "[gateway] port")))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        gateway = await Gateway.create(role, self.url, connect=self.connect)
        self.gateway = dataclasses.replace(gateway, keep_alive_s=0.2, request_s=self.request_s)
        await stack.enter_async_context(self.gateway.current())
        await stack.enter_async_context(serving(self.gateway, listener))
        self.http = await stack.enter_async_context(direct(base_url=self.url, timeout=30))
        return stack

    async def engine_says(
        self,
        name: str = "e0",
        state: str = "serving",
        version: int = 0,
        base_version: int | None = None,
        kind: str = "sglang",
    ) -> None:
        """What the engine's weight loader writes."""
        event = EngineRegistered(
            event_id=ids.digest("EngineRegistered", name, state, version, kind),
            run_id="r",
            engine_id=name,
            url=f"http://{name}",
            state=state,
            version=version,
            model="m",
            base_version=base_version,
            kind=kind,
        )
        await self.events.append(event)

    async def open(self, rollout: str = "rollout-0", **more: Any) -> dict[str, Any]:
        """POST /sessions as a runner does."""
        body = {
            "run_id": "r", "group_id": "group-0", "task_id": "task-0", "group_size": 2, "rollout_id": rollout,
            "rollout_index": 0, "attempt": 0, "purpose": "train", "recipe": "calc", "floor": 0,
            "agent": {"name": "white-box", "version": "1"}, "environment": {"name": "calc", "version": "1"},
            "sampling": {"temperature": 1.0, "max_new_tokens": 40},
            "limits": {"max_context_tokens": WINDOW}, "min_weight_version": 0,
            **more,
        }  # fmt: skip
        answer = await self.http.post(
            "/sessions", json=body, headers={"authorization": f"Bearer {self.gateway.keys.first.decode()}"}
        )
        assert answer.status_code == 201, answer.text
        session: dict[str, Any] = answer.json()
        return session

    async def chat(
        self, session: dict[str, Any], messages: list[dict[str, Any]], *, key: str | None = None, **more: Any
    ) -> httpx.Response:
        """POST /v1/chat/completions."""
        headers = {"authorization": f"Bearer {session['agent_token']}"} | ({"idempotency-key": key} if key else {})
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **more}, headers=headers)

    async def finish(self, session: dict[str, Any], **more: Any) -> httpx.Response:
        """POST /sessions/{id}/finish."""
        body = {"outcome": "completed", "reason": "", "final": True, "expects": {"reward": True}, **more}
        headers = {"authorization": f"Bearer {session['token']}"}
        return await self.http.post(f"/sessions/{session['session_id']}/finish", json=body, headers=headers)

    async def describe(self, session: dict[str, Any]) -> dict[str, Any]:
        """GET /sessions/{id}."""
        headers = {"authorization": f"Bearer {session['token']}"}
        answer = await self.http.get(f"/sessions/{session['session_id']}", headers=headers)
        assert answer.status_code == 200, answer.text
        description: dict[str, Any] = answer.json()
        return description

    async def written(self, *names: str) -> list[Event]:
        """Events on the log, by record name, partition after partition in offset order."""
        found = []
        for topic in CATALOGUE:
            if not set(names) & set(topic.records):
                continue
            count = 1 if topic.partitions == "one" else PARTITIONS
            partitions = [Partition(topic.name, number) for number in range(count)]
            ends = await self.log.end_offsets(partitions)
            async with self.log.reader() as reader:
                reader.assign(dict.fromkeys(partitions, 0))
                while any(reader.position(partition) < ends[partition] for partition in partitions):
                    for record in await reader.poll():
                        event = await self.events.decode(record)
                        if type(event).__name__ in names:
                            found.append(event)
        return found


def settings_of(folder: Path, directory: Path, context: int = WINDOW) -> Settings:
    """Of a gateway on the fakes, for the model in `folder`."""
    return dataclasses.replace(
        Settings(),
        run=RunSettings(id="r", directory=str(directory)),
        model=ModelSettings(path=str(folder)),
        engine=EngineSettings(context=context, request_timeout_s=20.0),
        fold=FoldSettings(estimator="reinforce"),  # which takes groups of one
        gateway=GatewaySettings(signing_key="test-key"),
    )


@asynccontextmanager
async def rigged(settings: Settings, folder: Path) -> AsyncIterator[Rig]:
    """A gateway with one engine that serves version 0."""
    log = MemoryLog(MemoryBroker(time.time_ns() // 10**6))  # sessions are as old as their records say
    counts = {"one": 1, "groups": PARTITIONS, "rollouts": PARTITIONS}
    await log.create_topics([TopicSpec(each.name, counts[each.partitions], 1, {}) for each in CATALOGUE])
    async with AsyncExitStack() as stack:
        rig = Rig(settings, folder, log, stack)
        await rig.start()
        await rig.engine_says()
        yield rig


@pytest.fixture
def settings(tmp_path: Path, model_folder: Path) -> Settings:
    """Of a gateway on the fakes."""
    return settings_of(model_folder, tmp_path)


@pytest.fixture
async def rig(settings: Settings, model_folder: Path) -> AsyncIterator[Rig]:
    """See rigged."""
    async with rigged(settings, model_folder) as rig:
        yield rig
