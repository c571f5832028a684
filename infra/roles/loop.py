"""Loops of roles: `repeat`, and that of a role which alone acts on the log (OwnerRole)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnlog.infra.history import caught_up
from turnlog.infra.log import Commit, Partition, Reached, Reader, Record, Transactor, own_ends
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured, load_configuration
from turnlog.names import ConsumerGroup, TransactionalId
from turnlog.schemas.topics import Topic


async def repeat(role: Role, turn: Callable[[], Awaitable[object]]) -> None:
    """Mark the role as started, then repeat heartbeat and `turn` until the role stops. `turn` waits at most about a
    second if there is nothing to do; its errors end the role."""
    role.health.mark_started()
    while not role.stopping.is_set():
        role.health.beat()
        await turn()


class RoleWork(Protocol):
    """State of an OwnerRole according to the log, and what it does because of it."""

    async def take(self, records: list[Record]) -> None:
        """Fold records that were read."""

    async def begin(self) -> Mapping[Partition, int]:
        """Prepare to act, once the followed topics are read to their ends. Return the partitions that the role reads
        besides, with the offsets to begin at."""

    async def act(self, reader: Reader) -> None:
        """Do everything that is due, each effect in a transaction of the role."""

    def commits(self, reader: Reader, places: Sequence[Partition]) -> dict[Partition, Commit]:
        """Return the positions to report as the role's progress in `places`: the partitions that `begin` returned, or
        else all followed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRole:
    """A role of which one process at a time acts on a run. All its state is a fold of the log."""

    owner: TransactionalId
    """Transactional id that fences the previous process."""
    group: ConsumerGroup
    """Consumer group under which progress is committed, for measuring the lag alone."""
    writes: tuple[Topic, ...] = ()
    """Followed topics to which only this role writes. They are read until its last transaction has ended."""
    past_records: int = 500
    """Maximum number of records per poll while the past is read."""
    poll_s: float = 0.2
    """Maximum seconds that a poll waits for records."""

    async def run(
        self,
        role: Role,
        follows: Callable[[Configured], Awaitable[Mapping[Partition, int]]],
        work: Callable[[Configured, Transactor], RoleWork],
    ) -> None:
        """Run until the role stops. `follows`: the followed partitions, with the offsets to begin at.

        Order of effects: 1. wait until the run's configuration is recorded; 2. fence the previous owner; 3. `serve`.
        Raises OtherRun, OtherSettings, LogError, RegistryUnavailable, and what the work raises.
        """
        run = await load_configuration(role)
        if run is None:
            return
        async with role.log.transactor(self.owner.format(run=role.settings.run.id)) as transactor:
            await self.serve(role, await follows(run), work(run, transactor), transactor)

    async def serve(self, role: Role, follows: Mapping[Partition, int], work: RoleWork, transactor: Transactor) -> None:
        """Run with a transactor that is entered already.

        Order of effects: 1. read the followed topics to their ends; 2. `begin`; 3. until the role stops: `act`, commit
        the progress, read and `take`; 4. commit the progress a last time. After an error nothing is committed.
        """
        async with role.log.reader() as reader:
            reader.assign(follows)
            ends = await self._ends(role, list(follows))
            while not caught_up(reader, ends):
                role.health.beat()
                await work.take(await reader.poll(max_records=self.past_records))
            reads = await work.begin()
            group = self.group.format(run=role.settings.run.id)
            places = list(reads or follows)
            reached = await Reached.from_log(role.log, transactor, group, places)
            if reads:
                reader.assign({**{place: reader.position(place) for place in follows}, **reads})

            async def turn() -> None:
                await work.act(reader)
                await reached.say_in_time(lambda: work.commits(reader, places))
                await work.take(await reader.poll(timeout_s=self.poll_s))

            await repeat(role, turn)
            await reached.say(work.commits(reader, places), last=True)

    async def _ends(self, role: Role, places: Sequence[Partition]) -> dict[Partition, int]:
        own = [place for place in places if place.topic in {topic.name for topic in self.writes}]
        return await role.log.end_offsets(places) | await own_ends(role.log, own)
