"""Checkpoints of one incarnation that are written while it trains on: at most one at a time.

    begin      state copied (a call of the ranks, between two steps)
    written    every rank has written its part, and put it into the store, and the metadata are there (a look at the
               ranks, between two steps)
    summed     the sums of all files are known, and nothing is left to put (in a thread); which older ones are needed is
               known
    sealed     this is still the owner; the folder has its name, or the store its manifest

Killed before it is sealed, a checkpoint was never there. What fails on the way is a CheckpointFailed, or what the store
said, and ends the trainer at its next look: the state that the run would go on from stays the one before, and what was
written goes, so that a disk that it has filled has room for the log.
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

from turnlog.trainer import CheckpointFailed
from turnlog.trainer.checkpoint import Checkpoints, Cursor, about
from turnlog.trainer.checkpoints.places import Stored
from turnlog.trainer.checkpoints.state import unwritten
from turnlog.trainer.gang.calls import Ranks


@dataclass(slots=True)
class _Open:
    """The one under way."""

    cursor: Cursor
    part: Path
    about: dict[str, Any]
    sums: asyncio.Task[Collection[str]] | None = None
    """Ends with the names of older ones that are needed."""


class Saves:
    """Not thread-safe, and not within a transaction: it looks at the fence."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        call: Callable[..., Awaitable[Any]],
        check_owner: Callable[[], Awaitable[None]],
        needed: Callable[[], Awaitable[Collection[str]]],
    ) -> None:
        """`call`: of a method of Ranks. `check_owner` raises where another one owns the run. `needed`: names of
        checkpoints that stay, whatever their age."""
        self._checkpoints, self._call, self._check_owner, self._needed = checkpoints, call, check_owner, needed
        self._open: _Open | None = None
        self._waited_s = 0.0
        self.saved: Cursor | None = None
        """Of the newest one that is sealed, or that was gone on from."""
        self.name = ""
        """Of that one."""

    async def begin(self, cursor: Cursor, common: dict[str, Any]) -> None:
        """Save the state of `cursor`, which the ranks hold now; first the one before it is ended. Raises
        CheckpointFailed, StoreUnavailable, Superseded."""
        await self.settle()
        mark = time.monotonic()
        try:
            part = await asyncio.to_thread(self._checkpoints.begin, cursor)
        except OSError as error:
            raise CheckpointFailed(unwritten(Path(error.filename or "a checkpoint"), error)) from error
        with _failing(part):
            await self._call(Ranks.begin_save, part, common, self.name)
        self._open = _Open(cursor, part, about(common))
        self._waited_s += time.monotonic() - mark

    async def look(self) -> None:
        """Take it a step further where that needs no waiting. Raises as `begin`."""
        mark = time.monotonic()
        if self._open is not None and self._open.sums is None:
            with _failing(self._open.part):
                stored = await self._call(Ranks.saved, False)
            if stored is not None:
                self._sum(self._open, stored)
        if self._open is not None and self._open.sums is not None and self._open.sums.done():
            await self._seal(self._open, self._open.sums)
        self._waited_s += time.monotonic() - mark

    async def settle(self) -> None:
        """The same to its end: nothing is under way then."""
        mark = time.monotonic()
        if (held := self._open) is not None:
            with _failing(held.part):
                sums = held.sums or self._sum(held, await self._call(Ranks.saved, True))
            await self._seal(held, sums)
        self._waited_s += time.monotonic() - mark

    def waited_s(self) -> float:
        """For how long training stood still for checkpoints since this was asked last."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _sum(self, held: _Open, stored: Stored) -> asyncio.Task[Collection[str]]:
        held.sums = asyncio.create_task(self._summed(held, stored))
        return held.sums

    async def _summed(self, held: _Open, stored: Stored) -> Collection[str]:
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
    """While a step towards a checkpoint is taken: what that fails with is a CheckpointFailed, and the part goes."""
    try:
        yield
    except (OSError, CheckpointFailed) as error:
        said = str(error) if isinstance(error, CheckpointFailed) else unwritten(part, error)
        shutil.rmtree(part, ignore_errors=True)
        raise CheckpointFailed(said) from error
