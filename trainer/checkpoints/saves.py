"""Checkpoints of one trainer generation, written while training continues: at most one at a time.

    begin      state copied (a call of the ranks, between two steps)
    written    every rank has written and uploaded its part, and the metadata exist (a check of the ranks, between two
               steps)
    summed     the checksums of all files are known, and everything is uploaded (in a thread); it is known which older
               checkpoints are needed
    sealed     ownership is confirmed; the folder has its final name, or the store its manifest

If the trainer is killed before a checkpoint is sealed, the checkpoint never existed. A failure is a CheckpointFailed or
a store's error, and ends the trainer at its next check. The run would still resume from the previous checkpoint, and
the files written so far are removed, so that a disk that they filled has room for the log.

Evaluations need the checkpoint of the best version, which may be older than the [trainer] checkpoints_kept newest ones,
and those whose rounds are not scored yet. So where [eval] every requests rounds, the trainer follows the same fold of
the log as `turnlog log eval`: concurrently with its steps, once per checkpoint, from where it stopped.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnlog.infra.history import events, partitions
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role
from turnlog.processors.core.evaluation import EvalGroups
from turnlog.schemas import topics
from turnlog.trainer import CheckpointFailed
from turnlog.trainer.calls import RanksCall
from turnlog.trainer.checkpoints.cursor import Checkpoints, about, folder_name
from turnlog.trainer.checkpoints.places import Stored
from turnlog.trainer.checkpoints.state import unwritten
from turnlog.trainer.learner import Learner
from turnlog.trainer.manifests import Cursor


@dataclass(slots=True)
class _Open:
    """The checkpoint in progress."""

    cursor: Cursor
    part: Path
    about: dict[str, Any]
    sums: asyncio.Task[Collection[str]] | None = None
    """Returns the names of older checkpoints that are needed."""


class Saves:
    """Writer of checkpoints. Not thread-safe; must not be used within a transaction, since it checks the fence."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        call: RanksCall,
        check_owner: Callable[[], Awaitable[None]],
        needed: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        """`call` calls all ranks. `check_owner` raises if another process owns the run. `needed` returns the
        names of checkpoints to retain, whatever their age.
        """
        self._checkpoints, self._call, self._check_owner, self._needed = checkpoints, call, check_owner, needed
        self._open: _Open | None = None
        self._waited_s = 0.0
        self.saved: Cursor | None = None
        """Cursor of the newest checkpoint that was sealed, or that training resumed from."""
        self.name = ""
        """Name of that checkpoint."""

    async def begin(self, cursor: Cursor, common: dict[str, Any]) -> None:
        """Begin to save the state of `cursor`, which the ranks hold now, after completing the previous checkpoint.

        Raises CheckpointFailed, StoreUnavailable, Superseded.
        """
        await self.settle()
        mark = time.monotonic()
        try:
            part = await asyncio.to_thread(self._checkpoints.begin, cursor)
        except OSError as error:
            raise CheckpointFailed(unwritten(Path(error.filename or "a checkpoint"), error)) from error
        with _failing(part):
            await self._call(Learner.begin_save, part, common, self.name)
        self._open = _Open(cursor, part, about(common))
        self._waited_s += time.monotonic() - mark

    async def look(self) -> None:
        """Advance the checkpoint in progress as far as possible without waiting. Raises the errors of `begin`."""
        mark = time.monotonic()
        if self._open is not None and self._open.sums is None:
            with _failing(self._open.part):
                stored = await self._call(Learner.finish_save, False)
            if stored is not None:
                self._sum(self._open, stored)
        if self._open is not None and self._open.sums is not None and self._open.sums.done():
            await self._seal(self._open, self._open.sums)
        self._waited_s += time.monotonic() - mark

    async def settle(self) -> None:
        """Complete the checkpoint in progress, so that none is left. Raises the errors of `begin`."""
        mark = time.monotonic()
        if (held := self._open) is not None:
            with _failing(held.part):
                if (sums := held.sums) is None:
                    stored = await self._call(Learner.finish_save, True)
                    assert stored is not None, "it was waited for"
                    sums = self._sum(held, stored)
            await self._seal(held, sums)
        self._waited_s += time.monotonic() - mark

    def waited_s(self) -> float:
        """Return for how many seconds training waited for checkpoints since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _sum(self, held: _Open, stored: Stored) -> asyncio.Task[Collection[str]]:
        held.sums = asyncio.create_task(self._finish_part(held, stored))
        return held.sums

    async def _finish_part(self, held: _Open, stored: Stored) -> Collection[str]:
        await asyncio.to_thread(self._checkpoints.finish, held.part, stored, held.about)
        return await self._needed()

    async def _seal(self, held: _Open, sums: asyncio.Task[Collection[str]]) -> None:
        with _failing(held.part):
            needed = await sums
            await self._check_owner()
            self.name = await asyncio.to_thread(self._checkpoints.seal, held.part, needed)
        self.saved, self._open = held.cursor, None


@contextmanager
def _failing(part: Path) -> Iterator[None]:
    """Convert an OSError during a step of a checkpoint to CheckpointFailed, and remove the part on any
    CheckpointFailed.
    """
    try:
        yield
    except (OSError, CheckpointFailed) as error:
        said = str(error) if isinstance(error, CheckpointFailed) else unwritten(part, error)
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointFailed(said) from error


TOPICS = (topics.WEIGHTS, topics.GROUP_REQUESTS, topics.SAMPLES, topics.TREES)


class NeededByEvaluations:
    """The checkpoints that the evaluations of a role's run need. Not safe for concurrent calls."""

    def __init__(self, role: Role, checkpoints: Checkpoints) -> None:
        self._role, self._checkpoints, self._groups = role, checkpoints, EvalGroups()
        self._since: dict[Partition, int] = {}

    async def __call__(self) -> frozenset[str]:
        """Return the names of needed folders, whether they exist or not. Raises LogError.

        Of those that wait for their rounds, only the newest checkpoints_kept are returned.
        """
        every, kept = self._role.settings.eval.every, self._role.settings.trainer.checkpoints_kept
        if not every:
            return frozenset()
        await self._follow()
        rounds: dict[int, str] = {}
        for name, cursor in (await asyncio.to_thread(self._checkpoints.cursors)).items():
            if cursor.draws % every == 0:
                rounds.setdefault(cursor.draws // every, name)  # the first one if the rollout batch has several steps
        waiting = [rounds[one] for one in sorted(rounds) if not self._groups.is_settled(one)]
        return frozenset((*waiting[-kept:], *self._best()))

    def _best(self) -> list[str]:
        best = self._groups.evaluations().best
        event = None if best is None else self._groups.published.get(best.number)
        if event is None:
            return []
        return [Path(event.checkpoint).name if event.checkpoint else folder_name(event.step, event.incarnation)]

    async def _follow(self) -> None:
        for topic in TOPICS:
            ends = await self._role.log.end_offsets(partitions(self._role, topic))
            async for record, event in events(self._role, topic, since=self._since, names=EvalGroups.READS):
                self._groups.apply(event)
                place = Partition(record.topic, record.partition)
                ends[place] = max(ends[place], record.offset + 1)
            self._since |= ends
