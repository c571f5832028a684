"""The gateway on a real Kafka, a real registry, a real store and a real SGLang."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from turnlog.infra.engines.protocol import Generate
from turnlog.infra.engines.sglang import SGLang
from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import HttpRegistry
from turnlog.infra.roles.role import Role, open_role
from turnlog.producers.gateway.app import main
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.schemas import ids
from turnlog.schemas.events import Boundary, EngineRegistered, Event
from turnlog.schemas.topics import BY_NAME, TOPIC_OF
from turnlog.schemas.types import float32s, int32s
from turnlog.settings import EngineSettings, GatewaySettings, ModelSettings, Settings

pytestmark = [pytest.mark.kafka, pytest.mark.engine]
KEY = "key-of-these-tests"
QUESTION = {"role": "user", "content": "12 + 34 = ?"}


@pytest.fixture
def settings(live_settings: Settings, tiny_model: Path) -> Settings:
    """Of a gateway with a port of its own."""
    port = int(live_settings.gateway.url.rsplit(":", 1)[1])
    return dataclasses.replace(
        live_settings,
        model=ModelSettings(path=str(tiny_model)),
        engine=EngineSettings(context=512, request_timeout_s=60.0),
        gateway=GatewaySettings(url=live_settings.gateway.url, port=port, signing_key=KEY),
    )


class HeldEvents(EventLog):
    """Tells of no acknowledgement before it is released."""

    def __init__(self, *more: Any, **named: Any) -> None:
        super().__init__(*more, **named)
        self.handed_over, self.released = asyncio.Event(), asyncio.Event()
        self.released.set()

    async def submit(self, event: Event, *, output_tokens: int | None = None) -> Any:
        done = await super().submit(event, output_tokens=output_tokens)

        async def later() -> Any:
            self.handed_over.set()
            await self.released.wait()
            return await done

        return later()


@asynccontextmanager
async def held_gateway(settings: Settings) -> AsyncIterator[tuple[Role, HeldEvents]]:
    """A gateway role whose acknowledgements can be held back."""
    async with open_role("gateway", settings) as role, AsyncExitStack() as stack:
        registry = HttpRegistry(role.settings.registry)
        stack.push_async_callback(registry.close)
        opening = HeldEvents.open(role.log, registry, writer=role.instance, blobs=role.blobs)
        events = await stack.enter_async_context(opening)
        assert isinstance(events, HeldEvents)
        async with serving(dataclasses.replace(role, events=events)) as held:
            yield held, events


@asynccontextmanager
async def gateway(settings: Settings) -> AsyncIterator[Role]:
    """A gateway role as `turnlog role gateway` runs it."""
    async with open_role("gateway", settings) as role, serving(role):
        yield role


@asynccontextmanager
async def serving(role: Role) -> AsyncIterator[Role]:
    """It runs while the block does."""
    ended = asyncio.create_task(main(role))
    while "start" in role.health.waiting and not ended.done():  # noqa: ASYNC110 - readiness is a state
        await asyncio.sleep(0.01)
    try:
        yield role
    finally:
        role.stopping.set()
        await ended


async def register(role: Role, url: str) -> None:
    """What the engine's weight loader writes after loading version 0."""
    event = EngineRegistered(
        event_id=ids.digest("EngineRegistered", "e0"), run_id=role.settings.run.id, engine_id="e0", url=url,
        state="serving", version=0, model="tiny",
    )  # fmt: skip
    await role.events.append(event)


async def written(role: Role, record: str) -> list[Event]:
    """Every event of that record, in offset order per partition."""
    topic = TOPIC_OF[record].name
    count = (await role.log.topics())[topic].partitions
    partitions = [Partition(topic, number) for number in range(count)]
    ends = await role.log.end_offsets(partitions)
    events = []
    async with role.log.reader() as reader:
        reader.assign(await role.log.start_offsets(partitions))
        while any(reader.position(partition) < ends[partition] for partition in partitions):
            events += [await role.events.decode(record) for record in await reader.poll()]
    return [event for event in events if type(event).__name__ == record]


async def bytes_of(role: Role, topics: tuple[str, ...]) -> int:
    """Value bytes on those topics."""
    size = 0
    for topic in topics:
        assert topic in BY_NAME
        count = (await role.log.topics())[topic].partitions
        partitions = [Partition(topic, number) for number in range(count)]
        ends = await role.log.end_offsets(partitions)
        async with role.log.reader() as reader:
            reader.assign(await role.log.start_offsets(partitions))
            while any(reader.position(partition) < ends[partition] for partition in partitions):
                size += sum(len(record.value) for record in await reader.poll())
    return size


class Agent:
    """A client of one session."""

    def __init__(self, http: httpx.AsyncClient, session: dict[str, Any]) -> None:
        self._http = http
        self.session = session
        self._headers = {"authorization": f"Bearer {session['token']}"}

    @classmethod
    async def opened(cls, http: httpx.AsyncClient, rollout: str = "rollout-0", **more: Any) -> Agent:
        """POST /sessions."""
        body = {
            "group_id": "group-0", "group_size": 2, "rollout_id": rollout, "purpose": "train", "floor": 0,
            "min_weight_version": 0,
            "sampling": {"temperature": 1.0, "max_new_tokens": 12}, **more,
        }  # fmt: skip
        answer = await http.post("/sessions", json=body, headers={"authorization": f"Bearer {KEY}"})
        assert answer.status_code == 201, answer.text
        return cls(http, answer.json())

    async def chat(self, messages: list[Any], **more: Any) -> dict[str, Any]:
        """POST /v1/chat/completions; the message and the whole body."""
        answer = await self._http.post(
            "/v1/chat/completions", json={"messages": messages, **more}, headers=self._headers
        )
        assert answer.status_code == 200, answer.text
        body: dict[str, Any] = answer.json()
        return body

    async def finish(self) -> dict[str, Any]:
        """POST /sessions/{id}/finish."""
        path = f"/sessions/{self.session['session_id']}/finish"
        answer = await self._http.post(path, json={"outcome": "completed"}, headers=self._headers)
        finished: dict[str, Any] = answer.json()
        return finished

    async def describe(self) -> dict[str, Any]:
        """GET /sessions/{id}."""
        answer = await self._http.get(f"/sessions/{self.session['session_id']}", headers=self._headers)
        described: dict[str, Any] = answer.json()
        return described

    async def streamed(self, messages: list[Any]) -> tuple[str, str]:
        """Content and finish reason of a streamed answer."""
        answer = await self._http.post(
            "/v1/chat/completions", json={"messages": messages, "stream": True}, headers=self._headers
        )
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        choices = [orjson.loads(line)["choices"][0] for line in lines]
        return "".join(each["delta"].get("content") or "" for each in choices), choices[-1]["finish_reason"]


async def test_what_was_sampled_on_is_what_stands_on_the_log(settings: Settings, engine_url: str) -> None:
    async with gateway(settings) as role, httpx.AsyncClient(base_url=settings.gateway.url, timeout=60) as http:
        label = int((await http.get(f"{engine_url}/model_info")).json()["weight_version"])
        await register(role, engine_url)
        agent = await Agent.opened(http)
        messages: list[Any] = [QUESTION]
        for turn in range(6):
            body = await agent.chat(messages)
            messages += [body["choices"][0]["message"], {"role": "tool" if turn % 2 else "user", "content": f"{turn}"}]
        streamed, reason = await agent.streamed(messages)
        assert reason in ("stop", "length", "tool_calls")
        finished = await agent.finish()
        assert [turn["index"] for turn in finished["turns"]] == list(range(7))
        assert finished["undelivered"] == []
        snapshots = await written(role, "TokenSnapshot")
        turns = await written(role, "TurnCompleted")
        assert orjson.loads(turns[-1].response)["content"] == streamed or turns[-1].finish_reason == "tool_calls"
        tokens, prompts = _tokens(snapshots), {}
        for snapshot in snapshots:
            whole = tokens[snapshot.turn]
            prompt = whole[: len(whole) - len(int32s(snapshot.output_ids))]
            prompts[snapshot.turn] = prompt
            assert hashlib.sha256(np.array(prompt, dtype="<i4").tobytes()).hexdigest() == snapshot.prompt_sha256
            assert len(float32s(snapshot.output_logprobs)) == sum(span.length for span in snapshot.version_spans)
            assert {span.version for span in snapshot.version_spans} == {label}
        assert [each.boundary for each in snapshots] == [Boundary.root] + [Boundary.append] * 6
        await _same_logprobs(engine_url, prompts, snapshots)
        text = TextTokens(Path(settings.model.path)).literal(prompts[snapshots[1].turn])
        assert text.startswith("<|im_start|>user\n12 + 34 = ?<|im_end|>\n<|im_start|>assistant\n")
        assert text.endswith("<|im_end|>\n<|im_start|>user\n0<|im_end|>\n<|im_start|>assistant\n")


async def test_what_an_engine_beside_the_policys_says_is_context_and_keeps_to_a_schema(
    settings: Settings, engine_url: str
) -> None:
    beside = dataclasses.replace(settings.gateway, side_engines=(f"*haiku*={engine_url}",))
    settings = dataclasses.replace(settings, gateway=beside)
    shape = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": shape}}
    async with gateway(settings) as role, httpx.AsyncClient(base_url=settings.gateway.url, timeout=60) as http:
        await register(role, engine_url)
        agent = await Agent.opened(http, sampling={"temperature": 1.0, "max_new_tokens": 64})
        aside = await agent.chat([QUESTION], model="haiku", response_format=schema)
        said = aside["choices"][0]
        assert said["finish_reason"] == "length" or list(orjson.loads(said["message"]["content"])) == ["sure"]
        await agent.chat([QUESTION, said["message"], {"role": "user", "content": "and?"}])
        turns, snapshots = await written(role, "TurnCompleted"), await written(role, "TokenSnapshot")
        assert [turn.engine_id for turn in turns] == [f"side/{engine_url}", "e0"]
        assert [bool(int32s(each.output_ids).size) for each in snapshots] == [False, True]
        whole = _tokens(snapshots)[snapshots[1].turn]
        assert (said["message"]["content"] or "") in TextTokens(Path(settings.model.path)).literal(whole)


async def test_a_killed_gateway_is_continued_by_another_with_the_same_tokens(
    settings: Settings, engine_url: str
) -> None:
    async with gateway(settings) as role, httpx.AsyncClient(base_url=settings.gateway.url, timeout=60) as http:
        await register(role, engine_url)
        agent = await Agent.opened(http)
        first = (await agent.chat([QUESTION]))["choices"][0]["message"]
        second_body = [QUESTION, first, {"role": "user", "content": "and?"}]
        second = await agent.chat(second_body)
    # the first gateway knows nothing of a second one and wrote nothing when it left
    async with gateway(settings) as role, httpx.AsyncClient(base_url=settings.gateway.url, timeout=60) as http:
        agent = Agent(http, agent.session)
        described = await agent.describe()
        assert described["messages"] == [*second_body, second["choices"][0]["message"]]
        repeat = await agent.chat(second_body)
        assert repeat["turnlog"] == second["turnlog"]
        third = await agent.chat([*described["messages"], {"role": "user", "content": "so?"}])
        assert third["turnlog"]["epoch"] == described["epoch"] != second["turnlog"]["epoch"]
        assert len((await agent.finish())["turns"]) == 3
        snapshots = await written(role, "TokenSnapshot")
        assert snapshots[2].boundary is Boundary.append
        assert snapshots[2].parent_turn == snapshots[1].turn
        tokens = _tokens(snapshots)
        before = tokens[snapshots[1].turn]
        assert tokens[snapshots[2].turn][: len(before)] == before
        [finished] = await written(role, "SessionFinished")
        assert finished.epoch == described["epoch"]


async def test_bytes_grow_with_tokens_and_not_with_turns_times_tokens(settings: Settings, engine_url: str) -> None:
    topics = ("agent.turns", "agent.token-snapshots")
    async with gateway(settings) as role, httpx.AsyncClient(base_url=settings.gateway.url, timeout=60) as http:
        await register(role, engine_url)
        agent = await Agent.opened(http, sampling={"temperature": 1.0, "max_new_tokens": 4})
        messages: list[Any] = [{"role": "user", "content": "x" * 200}]
        sizes = []
        for _ in range(10):
            body = await agent.chat(messages)
            messages += [body["choices"][0]["message"], {"role": "user", "content": "7"}]
            sizes.append(await bytes_of(role, topics))
        per_turn = np.diff(sizes)
        assert per_turn.max() < 1.5 * per_turn.min()


async def test_a_broker_that_does_not_acknowledge_holds_back_the_last_byte(settings: Settings, engine_url: str) -> None:
    async with (
        held_gateway(settings) as (role, events),
        httpx.AsyncClient(base_url=settings.gateway.url, timeout=60) as http,
    ):
        await register(role, engine_url)
        agent = await Agent.opened(http)
        for call in (agent.chat([QUESTION]), agent.streamed([{"role": "user", "content": "7"}])):
            events.released.clear()
            events.handed_over.clear()
            ask = asyncio.create_task(call)
            await events.handed_over.wait()
            assert not (await asyncio.wait([ask], timeout=0.5))[0]
            events.released.set()
            await ask
        assert isinstance(role.log, KafkaLog)


def _tokens(snapshots: list[Any]) -> dict[Any, list[int]]:
    """Prompt + output of each turn, from the deltas."""
    tokens: dict[Any, list[int]] = {}
    for snapshot in snapshots:
        parent = tokens[snapshot.parent_turn][: snapshot.base_len] if snapshot.parent_turn else []
        tokens[snapshot.turn] = [*parent, *int32s(snapshot.delta_ids), *int32s(snapshot.output_ids)]
        tokens[snapshot.turn] = [int(token) for token in tokens[snapshot.turn]]
    return tokens


async def _same_logprobs(engine_url: str, prompts: dict[Any, list[int]], snapshots: list[Any]) -> None:
    """The engine gives the recorded prompt's first output id the log-prob that was recorded: it was sampled on these
    ids. (A one-token sample that happens to be the same id is compared; others say nothing.)"""
    engine, compared = SGLang(engine_url), 0
    for snapshot in snapshots:
        recorded = (int(int32s(snapshot.output_ids)[0]), float(float32s(snapshot.output_logprobs)[0]))
        for _ in range(60):
            request = Generate(
                rid=hashlib.sha256(repr((snapshot.turn, compared, _)).encode()).hexdigest()[:32],
                input_ids=prompts[snapshot.turn], temperature=1.0, max_new_tokens=1,
            )  # fmt: skip
            [piece] = [piece async for piece in engine.generate(request, stream=False, timeout_s=60)]
            if piece.ids == [recorded[0]]:
                assert abs(piece.logprobs[0] - recorded[1]) < 1e-4
                compared += 1
                break
    await engine.close()
    assert compared
