"""Interruptions of blocking calls of the client, as by Ctrl-C or by a handler of SIGTERM that raises: the state of a
trainer changes together with the log."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.batches import append_batches
from tests.fakes.memory_log import MemoryLog
from tests.fakes.scripted_trainer import export
from turnlog.client.batch import TrainingBatch
from turnlog.client.loop_thread import LoopThread
from turnlog.client.trainer import _TrainerCalls
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import read_range
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.topics_admin import apply
from turnlog.schemas.events import StepCompleted
from turnlog.schemas.topics import STEPS
from turnlog.settings import FeederSettings, Settings, TrainerSettings
from turnlog.trainer.generation import Generation, StepFigures
from turnlog.trainer.manifests import PARTITION, Manifests, ReadAhead, fetch_rows

SETTINGS = Settings(feeder=FeederSettings(draws=2), trainer=TrainerSettings(kind="external"))

FIGURES = StepFigures(loss=1.0, grad_norm=1.0, learning_rate=1.0)


class Interruption(BaseException):
    """What the handler raises in the main thread."""


@pytest.fixture
def interrupt() -> Iterator[Callable[[], Awaitable[None]]]:
    """Interrupts the main thread; returns once the handler runs there."""
    arrived = threading.Event()

    def handle(*_: object) -> None:
        arrived.set()
        raise Interruption

    async def send() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        await asyncio.to_thread(arrived.wait)

    before = signal.signal(signal.SIGTERM, handle)
    yield send
    signal.signal(signal.SIGTERM, before)


@asynccontextmanager
async def trainer_calls() -> AsyncIterator[_TrainerCalls]:
    """A trainer on a log in memory that has no batch yet."""
    log = MemoryLog()
    await apply(log, SETTINGS)
    run_id = SETTINGS.run.id
    async with (
        EventLog.open(log, MemoryRegistry(), writer="test") as events,
        log.transactor("trainer") as transactor,
        log.reader() as reader,
    ):
        role = Role("trainer", "trainer", SETTINGS, log, events, MemoryBlobs(), Health("trainer"))
        generation = Generation(role, transactor)
        await generation.begin()
        generation.number = generation.least_number
        start = (await log.start_offsets([PARTITION]))[PARTITION]
        manifests = Manifests(reader, events, run_id, generation.cursor, start=start)
        async with ReadAhead(manifests, lambda manifest: fetch_rows(manifest, role.blobs)) as ahead:
            yield _TrainerCalls(role, generation, ahead)


async def steps_of(role: Role) -> list[int]:
    places = [Partition(STEPS.name, 0)]
    starts, ends = await role.log.start_offsets(places), await role.log.end_offsets(places)
    async with role.log.reader() as reader:
        found = [await role.events.decode(record) async for record in read_range(reader, starts, ends)]
    return [event.batch_index for event in found if isinstance(event, StepCompleted)]


def next_batch(thread: LoopThread, calls: _TrainerCalls) -> TrainingBatch:
    while calls.batch is None:
        thread.wait(calls.look)
    return calls.batch


def test_a_batch_is_not_skipped_and_a_step_not_written_twice_if_the_caller_is_interrupted(
    interrupt: Callable[[], Awaitable[None]], tmp_path: Path
) -> None:
    with LoopThread("test") as thread:
        calls = thread.enter(trainer_calls())
        thread.finish(calls.publish, export(tmp_path / "start", 1.0), "full")
        assert not calls.due

        async def look() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(calls.look())
                tasks.create_task(interrupt())

        with pytest.raises(Interruption):
            thread.wait(look)
        thread.wait(append_batches, calls.role.events, calls.role.blobs, SETTINGS.run.id, 2)
        batch = next_batch(thread, calls)

        async def step() -> None:
            await interrupt()
            await calls.record_step(batch, FIGURES)

        with pytest.raises(Interruption):
            thread.finish(step)
        assert (calls.batch, calls.due, calls.generation.cursor.next_batch) == (None, True, 1)
        assert thread.wait(steps_of, calls.role) == [0]
        with pytest.raises(AssertionError, match="each once"):
            thread.finish(calls.record_step, batch, FIGURES)
        assert next_batch(thread, calls).manifest.batch_index == 1


def test_an_interruption_while_something_opens_ends_it(interrupt: Callable[[], Awaitable[None]]) -> None:
    ended = threading.Event()

    @asynccontextmanager
    async def opens_for_ever() -> AsyncIterator[None]:
        try:
            await interrupt()
            await asyncio.Event().wait()
            yield
        finally:
            ended.set()

    with pytest.raises(Interruption), LoopThread("test") as thread:
        thread.enter(opens_for_ever())
    assert ended.is_set()


@pytest.mark.parametrize("times", range(20))
def test_an_interruption_while_the_thread_starts_ends_it(times: int) -> None:
    """The signal comes from another thread, at any instruction of the start."""

    def handle(*_: object) -> None:
        raise Interruption

    def send() -> None:
        for _ in range(times * 50):
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def start() -> None:
        sender.start()
        with LoopThread("test"):
            threading.Event().wait(10)

    before = signal.signal(signal.SIGTERM, handle)
    sender = threading.Thread(target=send)
    try:
        with pytest.raises(Interruption):
            start()
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
