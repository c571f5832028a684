"""Direct transfers as rank 0 arranges them: who takes part, what a failure leads to, and when a copy is stored."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.memory_log import MemoryLog
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import assign_from_start, caught_up
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.tensors.files import TensorSpec
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineWeightsAwaited,
    Event,
    WeightTransferBegun,
    WeightVersionPublished,
)
from turnlog.schemas.topics import TRANSFERS, WEIGHTS
from turnlog.settings import RunSettings, Settings, WeightsSettings
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.sending import SendOrder
from turnlog.trainer.transfers import Transfers

DIGESTS = {"a": "0123456789abcdef:2x3"}


class Ranks:
    """Stands for the training ranks: `fails` has the failures of the next transfers, in order."""

    def __init__(self) -> None:
        self.orders: list[SendOrder] = []
        self.groups: list[str] = []
        self.fails: list[str] = []
        self.send: Callable[[SendOrder], Awaitable[str]] | None = None

    async def call(self, method: Any, *given: Any) -> Any:
        if method.__name__ == "digests":
            return (TensorSpec("a", "F32", (2, 3)),), dict(DIGESTS)
        if method.__name__ == "open_group":
            self.groups.append(given[1])
            return "127.0.0.1", 4000 + len(self.groups), 2
        assert method.__name__ == "send_weights"
        (order,) = given
        self.orders.append(order)
        if self.send is not None:
            return await self.send(order)
        return self.fails.pop(0) if self.fails else ""


class Copies:
    """Stands for Publications: the versions whose copies began to be stored."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    async def begin(self, version: int, _: Any) -> None:
        self.begun.append(version)


@dataclasses.dataclass
class Scene:
    """A run in memory."""

    role: Role
    ranks: Ranks
    copies: Copies
    transfers: Transfers
    chain: WeightChain
    cannot: set[str] = dataclasses.field(default_factory=set)

    async def register(self, engine: str, state: str = "serving", version: int = 0) -> None:
        await self.role.events.append(
            EngineRegistered(event_id=f"{engine}{state}", state=state, model="m", version=version, **self._of(engine))
        )

    def _of(self, engine: str) -> dict[str, Any]:
        return {"run_id": "run", "engine_id": engine, "url": f"http://{engine}"}

    async def ready(self, version: int, attempt: int, *engines: str) -> None:
        for engine in engines:
            await self.role.events.append(
                EngineWeightsAwaited(
                    event_id=f"{engine}-{version}-{attempt}",
                    state="serving",
                    version=0,
                    awaited_version=version,
                    attempt=attempt,
                    ranks=0 if engine in self.cannot else 2,
                    **self._of(engine),
                )
            )

    async def publish(self, version: int, *, last: bool = False, step: int | None = None) -> WeightVersionPublished:
        cursor = Cursor(next_batch=version, step=version if step is None else step)
        event = await self.transfers.announcement(version, cursor)
        self.chain.apply(event)
        await self.transfers.publish(event, cursor, last=last)
        return event

    async def begun(self) -> list[WeightTransferBegun]:
        places = [Partition(TRANSFERS.name, 0)]
        found = []
        async with self.role.log.reader() as reader:
            ends = await assign_from_start(self.role.log, reader, places)
            while not caught_up(reader, ends):
                async for _, event in self.role.run_events(await reader.poll()):
                    found += [event] if isinstance(event, WeightTransferBegun) else []
        return found


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[Scene]:
    run = Settings(run=RunSettings(id="run"), weights=WeightsSettings(**{"join_s": 0.2, "timeout_s": 2.0, **settings}))
    log = MemoryLog()
    await apply(log, run)
    async with EventLog.open(log, MemoryRegistry(), writer="test") as events:
        role = Role("trainer", "trainer-0", run, log, events, MemoryBlobs(), Health("trainer"))
        ranks, copies = Ranks(), Copies()

        async def commit(event: Event) -> None:
            await role.events.append(event)

        chain = WeightChain()
        transfers = Transfers(role, 3, ranks.call, copies, chain, commit, lambda: None)  # type: ignore[arg-type]
        async with transfers:
            yield Scene(role, ranks, copies, transfers, chain)


async def test_engines_that_are_ready_take_a_version_in_one_group() -> None:
    async with opened() as scene:
        for engine in ("e1", "e0"):
            await scene.register(engine)
        await scene.ready(1, 0, "e0", "e1")
        event = await scene.publish(1)
        assert (event.state, event.transport, event.files, event.checksums) == ("announced", "direct", (), {})
        assert (event.digests, event.dtype, event.step, event.batch_index) == (DIGESTS, "float32", 1, 0)
        (begun,) = await scene.begun()
        assert begun.members == {"e0": 1, "e1": 3}  # each has two ranks, and a sender has rank 0
        assert (begun.world_size, begun.senders, begun.incarnation, begun.attempt) == (5, 2, 3, 0)
        (order,) = scene.ranks.orders
        assert (order.group, order.port, order.world_size) == (begun.group, begun.port, 5)
        assert order.timeout_s <= 2.0


async def test_groups_live_as_long_as_their_engines() -> None:
    async with opened() as scene:
        await scene.register("e0")
        for version in (1, 2):
            await scene.ready(version, 0, "e0")
            await scene.publish(version)
        assert len(scene.ranks.groups) == 1
        await scene.register("e0")  # it restarted
        await scene.ready(3, 0, "e0")
        await scene.publish(3)
        await scene.register("e1")
        await scene.ready(4, 0, "e0", "e1")
        await scene.publish(4)
        assert len({begun.group for begun in await scene.begun()}) == len(scene.ranks.groups) == 3


async def test_a_transfer_begins_without_engines_that_do_not_answer_and_they_get_a_copy() -> None:
    async with opened(durable_every=10) as scene:
        for engine in ("e0", "hangs"):
            await scene.register(engine)
        await scene.ready(1, 0, "e0")
        await scene.publish(1)
        assert [begun.members for begun in await scene.begun()] == [{"e0": 1}]
        assert scene.copies.begun == [1]


async def test_nobody_waits_for_engines_that_are_gone_or_leave() -> None:
    async with opened(durable_every=10, join_s=60.0, timeout_s=120.0) as scene:
        for engine in ("e0", "gone", "drains"):
            await scene.register(engine)
        await scene.ready(1, 0, "e0")
        publishing = asyncio.create_task(scene.publish(1))
        await asyncio.sleep(0)
        of = {"run_id": "run", "url": "http://x", "version": 0}
        await scene.role.events.append(EngineGone(event_id="g", engine_id="gone", state="gone", cause="", **of))  # type: ignore[arg-type]
        await scene.role.events.append(EngineDraining(event_id="d", engine_id="drains", state="draining", **of))  # type: ignore[arg-type]
        await publishing
        assert [begun.members for begun in await scene.begun()] == [{"e0": 1}]
        assert scene.copies.begun == []  # nobody missed it


async def test_a_transfer_that_failed_is_repeated_in_a_new_group_with_those_who_ask_for_it() -> None:
    async with opened(durable_every=10) as scene:
        for engine in ("e0", "e1"):
            await scene.register(engine)
        await scene.ready(1, 0, "e0", "e1")
        await scene.ready(1, 1, "e0")
        scene.ranks.fails = ["e1 left in the middle"]
        await scene.publish(1)
        first, second = await scene.begun()
        assert (second.attempt, second.members) == (1, {"e0": 1})
        assert first.group != second.group
        assert scene.copies.begun == [1]  # e1 is there and has not got it


async def test_training_waits_no_longer_than_the_setting() -> None:
    async with opened(timeout_s=0.5, join_s=0.4) as scene:
        await scene.register("e0")
        await scene.ready(1, 0, "e0")

        async def send(order: SendOrder) -> str:
            await scene.ready(1, order.attempt + 1, "e0")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), min(order.timeout_s, 0.2))
            return "an engine hangs"

        scene.ranks.send = send
        await scene.publish(1)
        assert 1 <= len(scene.ranks.orders) <= 4
        assert scene.copies.begun == [1]
        assert scene.transfers.waited_s() > 0
        assert scene.transfers.waited_s() == 0


async def test_an_engine_at_which_transfers_fail_takes_no_way_from_the_others() -> None:
    async with opened(durable_every=100, timeout_s=20.0, join_s=0.3) as scene:
        for engine in ("bad", "good"):
            await scene.register(engine)

        async def send(order: SendOrder) -> str:
            (begun,) = [
                each for each in await scene.begun() if (each.version, each.attempt) == (order.version, order.attempt)
            ]
            if "bad" not in begun.members:
                return ""
            await scene.ready(order.version, order.attempt + 1, *begun.members)
            return "bad refuses every transfer"

        scene.ranks.send = send
        sent = []
        for version in range(1, 6):
            await scene.ready(version, 0, "bad", "good")
            await scene.publish(version)
            sent.append((await scene.begun())[-1].members)
        assert sent[-1] == {"good": 1}
        assert len(scene.ranks.orders) < 10
        await scene.ready(10, 0, "bad", "good")
        await scene.publish(10)
        assert set(next(each for each in await scene.begun() if each.version == 10).members) == {"bad", "good"}


async def test_a_version_that_an_engine_lost_after_it_was_sent_is_stored_while_the_trainer_waits() -> None:
    async with opened(durable_every=100) as scene:
        await scene.register("e0")
        await scene.ready(1, 0, "e0")
        await scene.publish(1)
        await scene.transfers.look(Cursor(next_batch=1, step=1))
        assert scene.copies.begun == []
        await scene.ready(1, 1, "e0")  # its digests differed
        while not scene.copies.begun:
            await scene.transfers.look(Cursor(next_batch=1, step=1))
        await scene.transfers.look(Cursor(next_batch=1, step=1))
        assert scene.copies.begun == [1]


async def test_engines_that_serve_newer_weights_are_not_waited_for() -> None:
    """A trainer that went back to a checkpoint repeats steps: engines keep what they have."""
    async with opened(durable_every=100, join_s=60.0, timeout_s=120.0) as scene:
        event = await scene.publish(5)
        await scene.register("e0", version=5)
        scene.chain.apply(dataclasses.replace(event, version=6, step=1, incarnation=1))
        await scene.publish(7, step=2)
        assert scene.ranks.orders == []
        assert scene.copies.begun == []


async def test_engines_without_the_plugin_get_a_copy_of_every_version() -> None:
    async with opened(durable_every=10) as scene:
        scene.cannot = {"plain"}
        for engine in ("e0", "plain"):
            await scene.register(engine)
        for version in (1, 2):
            await scene.ready(version, 0, "e0", "plain")
            await scene.publish(version)
        assert [begun.members for begun in await scene.begun()] == [{"e0": 1}] * 2
        assert scene.copies.begun == [1, 2]


@pytest.mark.parametrize(("every", "stored"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (3, [3, 5])])
async def test_every_nth_version_and_the_last_are_stored(every: int, stored: list[int]) -> None:
    async with opened(durable_every=every) as scene:
        for version in range(1, 6):
            await scene.publish(version, last=version == 5)
        assert scene.copies.begun == stored
        assert await scene.begun() == []  # there is no engine


async def test_a_trainer_that_stops_stores_what_its_ranks_still_have() -> None:
    async with opened(durable_every=10) as scene:
        await scene.publish(1)
        await scene.transfers.store_last(Cursor(next_batch=2, step=2))
        assert scene.copies.begun == []  # a step has changed the weights
        await scene.transfers.store_last(Cursor(next_batch=1, step=1))
        assert scene.copies.begun == [1]


async def test_the_record_of_the_copy_is_another_record_of_the_same_version(tmp_path: Path) -> None:
    from turnlog.trainer.transfers import durable_event
    from turnlog.trainer.weights import write_tensors

    async with opened() as scene:
        event = await scene.publish(1)
    written = write_tensors(tmp_path, {"a": torch.zeros(2, 3)})
    copy = durable_event(
        event, written, (), run_id="run", version=1, incarnation=3, cursor=Cursor(next_batch=1, step=1), checkpoint=None
    )
    assert (copy.version, copy.step, copy.state, copy.transport) == (1, 1, "durable", "direct")
    assert copy.event_id != event.event_id
    assert copy.checksums == written.checksums
    assert copy.digests == {}
    assert WEIGHTS.key_of(copy) == WEIGHTS.key_of(event)
