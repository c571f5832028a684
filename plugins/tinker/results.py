"""Commands and results between the server and the log."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from turnlog.infra.blobs import externalize_payloads, inlined
from turnlog.infra.history import assign_from_start, caught_up, read_range
from turnlog.infra.log import Commit, Partition, Record, Transactor, own_ends
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.names import ConsumerGroup
from turnlog.plugins.tinker import ServerEnds
from turnlog.plugins.tinker.history import History
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.events import Event, TenantCommandCompleted, TenantCommandReceived, TenantStateSaved

COMMANDS, RESULTS = Partition(topics.TENANT_COMMANDS.name, 0), Partition(topics.TENANT_RESULTS.name, 0)
COMMIT_S = STAGE_S.labels("tinker", "commit")
CACHED_BYTES = 64 << 20
"""Bytes of results that are kept in memory for clients that have not fetched them yet; older ones are read again."""


@dataclass(frozen=True, slots=True)
class _Pending:
    event: TenantCommandCompleted | TenantStateSaved
    done: asyncio.Future[None]


class ServerLog:
    """Appends commands, follows them, and writes each result once, in a transaction with the progress."""

    def __init__(self, role: Role, transactor: Transactor) -> None:
        self._role, self._transactor = role, transactor
        self.history = History()
        self._changed = asyncio.Condition()
        self._ends = False
        self._appending: dict[str, asyncio.Future[None]] = {}
        self._pending: list[_Pending] = []
        self._due = asyncio.Event()
        self._cached: OrderedDict[str, tuple[TenantCommandCompleted, int]] = OrderedDict()
        self._cached_bytes = 0

    async def load(self) -> None:
        """Fold everything that is on the log. Call it once the transactor has fenced the previous server."""
        async with self._role.log.reader() as reader:
            ends = await assign_from_start(self._role.log, reader, [COMMANDS])
            while not caught_up(reader, ends):
                self._role.health.beat()
                await self._take(await reader.poll(max_records=2000))
            starts = await self._role.log.start_offsets([RESULTS])
            async for record in read_range(reader, starts, await own_ends(self._role.log, [RESULTS])):
                self._role.health.beat()
                self._fold_result(await self._role.events.decode(record), record.offset)

    def _fold_result(self, event: Event, offset: int) -> None:
        if event.run_id != self._role.settings.run.id:
            return
        if isinstance(event, TenantStateSaved):
            self.history.add_snapshot(event)
        elif isinstance(event, TenantCommandCompleted):
            self.history.complete(event, offset)

    async def _take(self, records: list[Record]) -> None:
        """Fold commands; what is no command is dead-lettered."""
        for record in records:
            try:
                event = await self._role.events.decode(record)
            except UndecodableRecord as cause:
                await self._role.park(record, cause)
                continue
            if isinstance(event, TenantCommandReceived) and event.run_id == self._role.settings.run.id:
                self.history.apply(event, record.offset, record.timestamp_ms)
        self.history.end = max(self.history.end, records[-1].offset + 1 if records else 0)
        if records:
            await self.notify()

    async def notify(self) -> None:
        """Wake whoever waits for a change of the history."""
        async with self._changed:
            self._changed.notify_all()

    async def follow(self) -> None:
        """Follow the commands until cancelled."""
        async with self._role.log.reader() as reader:
            reader.assign({COMMANDS: self.history.end})
            while True:
                self._role.health.beat()
                await self._take(await reader.poll(timeout_s=0.5))

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` is true of the history. Raises ServerEnds if `end` is called before."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._ends or holds())
            if not holds():
                raise ServerEnds("the server ends: send the call again")

    async def end(self) -> None:
        """End every wait: nothing is executed any more, and a client that waits for a result would delay the end."""
        self._ends = True
        await self.notify()

    async def submit(self, event: TenantCommandReceived) -> None:
        """Append a command unless it is on the log already, and return once it has been folded. Raises LogUnavailable,
        StoreUnavailable."""
        request = event.request_id
        if request in self.history.commands:
            return
        if (running := self._appending.get(request)) is not None:
            await asyncio.shield(running)
            return
        append = asyncio.ensure_future(self._append(event))
        self._appending[request] = append
        append.add_done_callback(functools.partial(self._forget_append, request))
        await asyncio.shield(append)  # a client that leaves does not take the append of another with it

    def _forget_append(self, request: str, append: asyncio.Future[None]) -> None:
        del self._appending[request]
        if not append.cancelled():
            append.exception()  # clients that still wait raise it; if all have left, asyncio is not to report it

    async def _append(self, event: TenantCommandReceived) -> None:
        await self._role.events.append(event)
        await self.wait_until(lambda: event.request_id in self.history.commands)

    async def record(self, event: TenantCommandCompleted | TenantStateSaved) -> None:
        """Write a result, and return once it is on the log."""
        pending = _Pending(event, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self._due.set()
        await pending.done

    async def write(self) -> None:
        """Write results until cancelled: all that are due in one transaction, with the progress. Raises Fenced,
        TransactionFailed, LogUnavailable, StoreUnavailable."""
        group = ConsumerGroup.TINKER.format(run=self._role.settings.run.id)
        while True:
            await self._due.wait()
            self._due.clear()
            batch, self._pending = self._pending, []
            begun = time.perf_counter()
            stored = [await externalize_payloads(each.event, self._role.blobs) for each in batch]
            acks = await self._role.events.begin(self._transactor, stored, lambda _: 0)
            places = await asyncio.gather(*acks)
            low = self.history.low_water(getattr(each.event, "request_id", "") for each in batch)
            progress = Commit.low_water(low, high=self.history.end, under_way=self.history.unfinished)
            await self._transactor.offsets(group, {COMMANDS: progress})
            await self._transactor.commit()
            COMMIT_S.observe(time.perf_counter() - begun)
            for each, (_, offset) in zip(batch, places, strict=True):
                self._fold_result(each.event, offset)
                if isinstance(each.event, TenantCommandCompleted):
                    self._cache(each.event)
                each.done.set_result(None)
            await self.notify()

    def _cache(self, event: TenantCommandCompleted) -> None:
        size = sum(len(part) for part in (event.tokens, event.logprobs, event.prompt_logprobs)
                   if isinstance(part, bytes))  # fmt: skip
        _, replaced = self._cached.pop(event.request_id, (event, 0))  # two clients may have read it at once
        self._cached[event.request_id] = event, size
        self._cached_bytes += size - replaced
        while self._cached_bytes > CACHED_BYTES and len(self._cached) > 1:
            self._cached_bytes -= self._cached.popitem(last=False)[1][1]

    async def result_of(self, request: str) -> TenantCommandCompleted:
        """Return the whole result of a command that has one. Raises BlobMissing, LogUnavailable."""
        if (found := self._cached.get(request)) is not None:
            return found[0]
        event = await self._read(RESULTS, self.history.commands[request].result_offset)
        assert isinstance(event, TenantCommandCompleted), "the offset is that of the result"
        self._cache(event)
        return event

    async def command_of(self, request: str) -> TenantCommandReceived:
        """Return the whole command. Raises BlobMissing, LogUnavailable."""
        entry = self.history.commands[request]
        if entry.result is None:
            event = await inlined(entry.event, self._role.blobs)
        else:
            event = await self._read(COMMANDS, entry.offset)
        assert isinstance(event, TenantCommandReceived), "the offset is that of the command"
        return event

    async def _read(self, place: Partition, offset: int) -> Event:
        async with self._role.log.reader() as reader:
            async for record in read_range(reader, {place: offset}, {place: offset + 1}):
                return await inlined(await self._role.events.decode(record), self._role.blobs)
        raise AssertionError(f"{place} has no record at {offset}")
