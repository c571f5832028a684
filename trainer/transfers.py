"""The trainer's side of direct transfers of weight versions from the training ranks to the engines ([trainer] publish =
"direct"). docs/decisions/0050-weights-go-from-ranks-to-engines.md describes the protocol.

    announced   WeightVersionPublished is on the log; every engine's loader answers with EngineWeightsAwaited
    begun       WeightTransferBegun names the engines that answered in time, and the address at which they join ranks
    sent        the ranks have sent every bucket; if that fails, the transfer begins again with the engines that ask for
                the next attempt

Process groups are formed anew when the set of engines changes, when an engine registers again, and after a failure.
Training waits for a version at most [weights] timeout_s, whatever the engines do.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from prometheus_client import Counter

from turnlog.infra.history import caught_up
from turnlog.infra.log import Partition, Reader
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.infra.tensors.files import Written
from turnlog.infra.tensors.transfer_groups import TransferBroken
from turnlog.processors.core.views.fleet import RELEASED, SERVING, SILENT, STARTING, Fleet
from turnlog.processors.core.views.progress import ANNOUNCED, DURABLE, WeightChain
from turnlog.schemas.events import (
    EngineGone,
    EngineRegistered,
    EngineWeightsAwaited,
    Event,
    WeightFile,
    WeightTransferBegun,
    WeightVersionPublished,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import ENGINE_REQUESTS, ENGINES, TRANSFERS
from turnlog.trainer.calls import RanksCall
from turnlog.trainer.checkpoints.publications import VERSION, Publications
from turnlog.trainer.export import bucket_memory
from turnlog.trainer.learner import Learner
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.sending import SendOrder
from turnlog.trainer.weight_records import WeightDelta, version_event

log = logging.getLogger(__name__)
STATUS = [Partition(ENGINES.name, 0), Partition(ENGINE_REQUESTS.name, 0)]
ARRANGED = Partition(TRANSFERS.name, 0)
READY = {SERVING, RELEASED}
"""States of engines that are waited for."""
IN_THE_RUN = READY | {STARTING, SILENT}
"""States of engines that get every version, by one way or the other."""
HALVED_AFTER, MOST_FAILURES, FORGIVE_EVERY = 2, 3, 10
"""Attempts after which half of the engines take part; failures in a row after which an engine takes part no more; and
number of versions after which all may try again."""
MISSED = Counter(
    "turnlog_trainer_missed", "Engines that did not take a version from the training ranks, each once per version"
)


def durable_event(
    announced: WeightVersionPublished,
    written: Written,
    files: tuple[WeightFile, ...],
    *,
    difference: WeightDelta | None = None,
    **more: Any,
) -> WeightVersionPublished:
    """Return the second record of a version, which names the files of its copy. For `more`, see `version_event`."""
    event_id = digest("WeightVersionPublished", announced.run_id, announced.version, DURABLE)
    stored = version_event(written, files, difference=difference, **more)
    return dataclasses.replace(stored, event_id=event_id, transport="direct")


@dataclass(frozen=True, slots=True)
class _EngineGroup:
    """The process groups of a set of engines."""

    name: str
    address: str
    port: int
    senders: int
    members: Mapping[str, int]
    """Engine -> number of its ranks."""

    @property
    def first_ranks(self) -> dict[str, int]:
        first, found = 1, {}
        for engine, ranks in self.members.items():
            found[engine], first = first, first + ranks
        return found

    @property
    def world_size(self) -> int:
        return 1 + sum(self.members.values())


class Transfers:
    """Sends announced versions to the engines of the run, one at a time. A context manager."""

    def __init__(
        self,
        role: Role,
        incarnation: int,
        call: RanksCall,
        publications: Publications,
        chain: WeightChain,
        commit: Callable[[Event], Awaitable[None]],
        beat: Callable[[], None],
    ) -> None:
        """`call` calls all ranks, `publications` stores copies, `chain` has every version that the trainer published,
        and `commit` writes a record in a transaction. `beat` is called while waiting.
        """
        self._role, self._incarnation, self._call, self._commit, self._beat = role, incarnation, call, commit, beat
        self._run_id, self._publications, self._chain = role.settings.run.id, publications, chain
        self._failures: dict[str, int] = {}
        """Engine -> failed transfers in which it took part since it last received a version."""
        self._settings = role.settings.weights
        self._open = AsyncExitStack()
        self._reader: Reader
        self._fleet = Fleet()
        self._awaited: dict[str, EngineWeightsAwaited] = {}
        """Engine -> its last report that it is ready for a version."""
        self._group: _EngineGroup | None = None
        self._groups = 0
        self._attempt = -1
        """Number of the last attempt."""
        self._unstored: list[WeightVersionPublished] = []
        """Announced versions since the last one that was stored."""
        self._waited_s = 0.0

    async def __aenter__(self) -> Self:
        self._reader = await self._open.enter_async_context(self._role.log.reader())
        # Records of earlier transfers do not matter.
        arranged = await self._role.log.end_offsets([ARRANGED])
        self._reader.assign(await self._role.log.start_offsets(STATUS) | arranged)
        await self._catch_up()
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._open.aclose()

    def waited_s(self) -> float:
        """Return for how many seconds training waited for transfers since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    async def announcement(self, version: int, cursor: Cursor) -> WeightVersionPublished:
        """Return the record that announces the weights that the ranks have at `cursor`."""
        found = await self._call(Learner.digests, self._limit)
        assert found is not None, "rank 0 has the digests"
        specs, digests = found
        event = version_event(
            Written({}, {}, specs), (), run_id=self._run_id, version=version, incarnation=self._incarnation,
            cursor=cursor, checkpoint=None, digests=digests,
        )  # fmt: skip
        return dataclasses.replace(event, state=ANNOUNCED, transport="direct")

    async def publish(self, event: WeightVersionPublished, cursor: Cursor, *, last: bool) -> None:
        """Send an announced version, whose weights the ranks have at `cursor`. Begin to store a copy if it is time for
        one, if an engine needs it, or if the version is the run's last.
        """
        VERSION.set(event.version)
        if self._role.settings.engine.colocate:  # engines take their memory back now
            await self._call(Learner.free_cache)
        missed = await self._send(event)
        self._unstored.append(event)
        if missed or last or len(self._unstored) >= self._settings.durable_every:
            await self._store(event, cursor)

    async def look(self, cursor: Cursor) -> None:
        """Begin to store a copy of the last version if it has none, the ranks still have its weights, and an engine
        that is there has not got it although it was sent: nothing newer may come before that engine serves.
        """
        if not self._unstored or self._unstored[-1].step != cursor.step:
            return
        event = self._unstored[-1]
        await self._hear(timeout_s=0.05)
        asks = {
            engine
            for engine, one in self._awaited.items()
            if one.awaited_version == event.version and one.attempt > self._attempt
        }
        lost = self._engines({STARTING}) | asks
        if lacking := sorted(lost & self._engines(IN_THE_RUN, news=event.version)):
            log.warning("version %d: stored for %s, which lost it on the way", event.version, ", ".join(lacking))
            await self._store(event, cursor)

    async def store_last(self, cursor: Cursor) -> None:
        """Begin to store a copy of the last version unless it has one, if the ranks still have its weights."""
        if self._unstored and self._unstored[-1].step == cursor.step:
            await self._store(self._unstored[-1], cursor)

    async def _store(self, event: WeightVersionPublished, cursor: Cursor) -> None:
        self._unstored.clear()
        said = functools.partial(
            durable_event, event, run_id=self._run_id, version=event.version, incarnation=self._incarnation,
            cursor=cursor, checkpoint=None,
        )  # fmt: skip
        await self._publications.begin(event.version, said)

    async def _send(self, event: WeightVersionPublished) -> list[str]:
        """Return the engines of the run to which the version was not sent."""
        began = time.monotonic()
        deadline = began + self._settings.timeout_s
        await self._catch_up()
        taken = await self._attempts(event, deadline)
        await self._catch_up()
        missed = sorted(self._engines(IN_THE_RUN, news=event.version) - taken)
        took_s = time.monotonic() - began
        self._waited_s += took_s
        STAGE_S.labels("trainer", "send").observe(took_s)
        MISSED.inc(len(missed))
        log.info("version %d: sent to %d engines in %.2f s", event.version, len(taken), took_s)
        if missed:
            log.warning("version %d: not sent to %s: they load its copy in the store", event.version, ", ".join(missed))
        return missed

    async def _attempts(self, event: WeightVersionPublished, deadline: float) -> set[str]:
        """Return the engines to which every bucket was sent."""
        expected, attempt = self._engines(READY, news=event.version), 0
        if event.version % FORGIVE_EVERY == 0:
            self._failures.clear()
        while expected and not self._role.stopping.is_set():
            ready = await self._await_ready(event.version, attempt, expected, deadline)
            members = self._choose_members(ready, attempt)
            left_s = deadline - time.monotonic()
            if not members or left_s <= 0:
                break
            try:
                group = await self._group_of(members)
            except TransferBroken as error:  # rank 0 has no route to the engines: [weights] host
                log.warning("version %d: %s", event.version, error)
                break
            self._attempt = attempt
            await self._commit(self._begin_record(event, attempt, group))
            failure = await self._call(Learner.send_weights, self._order(event, attempt, group, left_s))
            if not failure:
                for engine in members:
                    self._failures.pop(engine, None)
                return set(members)
            for engine in members:
                self._failures[engine] = self._failures.get(engine, 0) + 1
            log.warning("version %d, attempt %d: %s", event.version, attempt, failure)
            self._group, expected, attempt = None, set(members), attempt + 1
        return set()

    def _choose_members(self, ready: Mapping[str, int], attempt: int) -> dict[str, int]:
        """Return the engines that take part in an attempt, with their numbers of ranks.

        Nobody can tell at which engine a transfer failed. After two failures only half of the engines take part, so
        that those that are well are told apart from one that is not, which then gets versions through the store.
        """
        found = {engine: ranks for engine, ranks in sorted(ready.items()) if ranks}
        found = {engine: ranks for engine, ranks in found.items() if self._failures.get(engine, 0) < MOST_FAILURES}
        half = (len(found) + 1) // 2 if attempt >= HALVED_AFTER else len(found)
        return dict(list(found.items())[:half])

    async def _await_ready(
        self, version: int, attempt: int, expected: Collection[str], deadline: float
    ) -> dict[str, int]:
        """Return the engines that are ready for this attempt, with their numbers of ranks. Wait until all `expected`
        engines that are still in the run are ready, but for at most join_s.
        """
        until = min(deadline, time.monotonic() + self._settings.join_s)
        while True:
            here = self._engines(IN_THE_RUN)
            ready = {
                engine: one.ranks
                for engine, one in self._awaited.items()
                if engine in here and (one.awaited_version, one.attempt) == (version, attempt)
            }
            # An engine that a failed transfer has left without a whole version is not SERVING until the next attempt.
            states = IN_THE_RUN if attempt else READY
            waiting = ({*expected} & self._engines(states, news=version)) - ready.keys()
            left_s = until - time.monotonic()
            if not waiting or left_s <= 0 or self._role.stopping.is_set():
                if waiting:
                    log.warning("version %d: %s are not ready for it", version, ", ".join(sorted(waiting)))
                return ready
            self._beat()
            await self._hear(timeout_s=min(left_s, 1.0))

    async def _group_of(self, members: Mapping[str, int]) -> _EngineGroup:
        """Return process groups with these engines: the last ones if they have the same engines, else new ones."""
        if self._group is not None and self._group.members == members:
            return self._group
        name = f"turnlog-{self._run_id}-{self._incarnation}-{self._groups}-{secrets.token_hex(4)}"
        self._groups, self._group = self._groups + 1, None
        urls, settings = [self._fleet.engines[engine].url for engine in members], self._settings
        found = await self._call(Learner.open_group, settings.host, urls, self._limit, settings.timeout_s)
        assert found is not None, "rank 0 knows where it listens"
        address, port, senders = found
        self._group = _EngineGroup(name, address, port, senders, dict(members))
        log.info("engines %s form group %s at %s:%d", ", ".join(members), name, address, port)
        return self._group

    def _begin_record(self, event: WeightVersionPublished, attempt: int, group: _EngineGroup) -> WeightTransferBegun:
        return WeightTransferBegun(
            event_id=digest("WeightTransferBegun", self._run_id, event.version, attempt),
            run_id=self._run_id,
            version=event.version,
            incarnation=self._incarnation,
            attempt=attempt,
            group=group.name,
            address=group.address,
            port=group.port,
            world_size=group.world_size,
            senders=group.senders,
            members=group.first_ranks,
        )

    def _order(self, event: WeightVersionPublished, attempt: int, group: _EngineGroup, left_s: float) -> SendOrder:
        return SendOrder(
            group=group.name,
            address=group.address,
            port=group.port,
            world_size=group.world_size,
            version=event.version,
            attempt=attempt,
            timeout_s=left_s,
            bucket_bytes=self._limit,
            shared=self._role.settings.engine.colocate,
        )

    @property
    def _limit(self) -> int:
        return bucket_memory(self._settings.bucket_mb)

    def _engines(self, states: Collection[str], *, news: int | None = None) -> set[str]:
        """Return the engines that were not requested to go and are in one of these states; with `news`, only those that
        are to load this version.
        """
        found = (engine for engine in self._fleet.present() if engine.state in states)
        return {engine.id for engine in found if news is None or self._chain.is_news(news, engine.version)}

    async def _catch_up(self) -> None:
        """Read all records about engines that are on the log."""
        ends = await self._role.log.end_offsets(STATUS)
        while not caught_up(self._reader, ends):
            await self._hear(timeout_s=0.1)

    async def _hear(self, *, timeout_s: float) -> None:
        """Read new records; wait for the first one for at most `timeout_s`."""
        async for _, event in self._role.run_events(await self._reader.poll(timeout_s=timeout_s)):
            if isinstance(event, EngineWeightsAwaited):
                self._awaited[event.engine_id] = event
            elif isinstance(event, EngineRegistered | EngineGone) and self._is_member(event.engine_id):
                self._group = None  # its process may be another one, which has not joined
            self._fleet.apply(event)

    def _is_member(self, engine: str) -> bool:
        return self._group is not None and engine in self._group.members
