"""Any sequence of announcements, transfers, failures, durable copies and restarts: every version is answered once, and
an engine never serves one whose digests were not compared."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from safetensors.torch import save_file

from tests.fakes.direct_engine import DirectEngine, Outcome, Ranks, digests_of
from tests.unit.consumers.test_colocation import Killable, Killed, opened
from tests.unit.consumers.test_loader import URL, tensors
from turnlog.consumers.loader import EngineSwapFailed
from turnlog.consumers.loader.role import Loader
from turnlog.infra.engines.protocol import EngineDead, EngineRefused, TransferFailed
from turnlog.infra.log import Partition
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    EngineWeightsAwaited,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
)
from turnlog.schemas.topics import ENGINES, TRANSFERS, Topic
from turnlog.settings import EngineSettings

ENGINE = "engine-0"
LOOK_S = 0.3
"""Longest time in seconds that the trainer waits for the engine."""


class KillableDirect(Killable, DirectEngine):
    """Kills its loader at a step."""


class Directed(RuleBasedStateMachine):
    """A trainer whose ranks send versions, one engine, and its loader under a supervisor."""

    def __init__(self) -> None:
        super().__init__()
        self.runner, self.open = asyncio.Runner(), AsyncExitStack()
        self.newest, self.step, self.incarnation, self.attempt = -1, 0, 0, 0
        self.announced = False
        """Whether the newest version has no files yet."""
        self.runner.run(self._opened())

    async def _opened(self) -> None:
        folder = Path(self.open.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-test-")))
        self.role = await self.open.enter_async_context(opened(folder))
        model = Path(self.role.settings.model.path)
        save_file(tensors(0), str(model / "model.safetensors"))
        self.role.settings = dataclasses.replace(
            self.role.settings, engine=EngineSettings(),
            loader=dataclasses.replace(self.role.settings.loader, timeout_s=LOOK_S),
        )  # fmt: skip
        self.engine, self.ranks = KillableDirect(model), Ranks(self.role)
        self._start()

    def _start(self) -> None:
        self.loading = asyncio.ensure_future(Loader(self.role, self.engine, ENGINE, URL).run())

    async def _publish(self) -> None:
        """The next version, through the store."""
        self.newest, self.step, self.announced = self.newest + 1, self.step + 1, False
        await self.ranks.store(self.newest, step=self.step, incarnation=self.incarnation)

    @initialize()
    def first_weights(self) -> None:
        self.runner.run(self._publish())
        self.runner.run(self._serves())

    @rule()
    def a_version_is_announced(self) -> None:
        self.newest, self.step, self.announced, self.attempt = self.newest + 1, self.step + 1, True, 0
        self.runner.run(self.ranks.announce(self.newest, step=self.step, incarnation=self.incarnation))
        self.runner.run(self._turned())

    @precondition(lambda self: self.announced)
    @rule(outcome=st.sampled_from(["whole", "whole", "refused", "failed", "wrong", "dead"]), joins=st.booleans())
    def a_transfer_begins(self, outcome: str, joins: bool) -> None:
        outcomes: dict[str, Outcome] = {
            "whole": digests_of(self.newest), "refused": EngineRefused("no sender"), "dead": EngineDead("dropped"),
            "failed": TransferFailed("a rank is away"), "wrong": digests_of(self.newest + 1000),
        }  # fmt: skip
        self.engine.outcomes = [outcomes[outcome]]
        self.runner.run(self._transferred(joins))

    async def _transferred(self, joins: bool) -> None:
        ready = await self._is_ready() and joins
        before = len(self.engine.transfers)
        await self.ranks.begin(self.newest, ENGINE if ready else "another", attempt=self.attempt)
        self.attempt += 1
        await self._turned(until=before + 1 if ready else None)

    async def _is_ready(self) -> bool:
        """Whether the engine awaits the next attempt, once it was given time to."""
        for _ in range(10):
            awaited = [event for event in await self._read(TRANSFERS) if isinstance(event, EngineWeightsAwaited)]
            if any((event.awaited_version, event.attempt) == (self.newest, self.attempt) for event in awaited):
                return True
            await self._turned()
        return False

    @precondition(lambda self: self.announced)
    @rule()
    def a_durable_copy_is_stored(self) -> None:
        self.announced = False
        self.runner.run(self.ranks.store(self.newest, step=self.step, incarnation=self.incarnation))
        self.runner.run(self._turned())

    @rule(back=st.integers(0, 2))
    def the_trainer_starts_again_from_an_earlier_step(self, back: int) -> None:
        self.incarnation, self.step = self.incarnation + 1, max(0, self.step - back)
        self.runner.run(self._publish())
        self.runner.run(self._turned())

    @rule(after=st.integers(0, 4))
    def the_loader_will_be_killed(self, after: int) -> None:
        self.engine.left = after

    @rule()
    def the_engine_starts_anew(self) -> None:
        self.engine.restart()
        self.runner.run(self._turned())

    async def _turned(self, until: int | None = None) -> None:
        """Let the loader go on for a while, or until so many transfers were received."""
        for _ in range(3):
            await asyncio.wait([self.loading], timeout=LOOK_S / 10)
            self._watch()
            if until is not None and len(self.engine.transfers) >= until:
                return

    def _watch(self) -> None:
        """A supervisor's work."""
        if not self.loading.done():
            return
        failure = self.loading.exception()
        assert isinstance(failure, Killed | EngineSwapFailed | EngineDead), failure
        self.engine.killed, self.engine.left = False, None
        if not self.engine.alive:
            self.engine.restart()
        self._start()

    async def _read(self, topic: Topic) -> list[Event]:
        place, found = Partition(topic.name, 0), list[Event]()
        async with self.role.log.reader() as reader:
            end = (await self.role.log.end_offsets([place]))[place]
            reader.assign({place: 0})
            while reader.position(place) < end:
                found += [await self.role.events.decode(record) for record in await reader.poll(timeout_s=0.1)]
        return found

    async def _serves(self) -> None:
        """The engine comes to serve the newest version, which was stored."""
        async with asyncio.timeout(20):
            while True:
                events = await self._read(ENGINES)
                last = (events[-1].state, events[-1].version) if events else None
                if last == ("serving", self.newest) and self.engine.holds == self.newest and not self.engine.paused:
                    return
                await asyncio.wait([self.loading], timeout=0.02)
                self._watch()

    def teardown(self) -> None:
        self.runner.run(self._checked())
        self.runner.close()

    async def _checked(self) -> None:
        self.engine.outcomes, self.engine.left = [], None
        self.step += 10
        await self._publish()
        await self._serves()
        check_answers(await self._read(ENGINES), self.newest)
        assert not self.engine.served_mixed
        assert not self.engine.misused
        self.role.stopping.set()
        await asyncio.wait([self.loading])
        await self.open.aclose()


def check_answers(events: list[Event], newest: int) -> None:
    """Every version up to `newest` has one answer; one that was loaded is loaded again only into an engine that lost
    it."""
    answers: dict[int, str] = {}
    held: int | None = None
    refused: set[int] = set()
    for event in events:
        match event:
            case EngineWeightsRefused():
                assert answers.setdefault(event.refused_version, event.event_id) == event.event_id
                refused.add(event.refused_version)
            case EngineWeightsLoaded():
                assert held != event.version, "the engine had it"
                assert not refused & {event.version, *event.superseded}
                held = event.version
                answers.setdefault(event.version, "loaded")
                for version in event.superseded:
                    assert answers.setdefault(version, event.event_id) == event.event_id
            case EngineRegistered() | EngineGone():
                held = event.version if isinstance(event, EngineRegistered) else None
            case _:
                pass
    assert answers.keys() == set(range(newest + 1))


TestDirected = Directed.TestCase
TestDirected.settings = hypothesis_settings(max_examples=5, stateful_step_count=10, deadline=None)
