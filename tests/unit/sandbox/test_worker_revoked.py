"""A partition that goes in the very moment in which a call of it was taken, and comes back: the call is answered."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.fakes.memory_backend import Memory
from turnlog.infra.log import Record
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.sandbox_settings import LOCAL
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.worker import SandboxWorker
from turnlog.schemas.events import SandboxSpec, ToolStatus


class Jolted(SandboxWorker):
    """A worker whose group rebalances right after it took its first record, before anything else may happen."""

    jolts = 1

    async def _take(self, record: Record) -> None:
        await super()._take(record)
        if self.jolts:
            self.jolts -= 1
            await self._on_revoked(frozenset({record.partition}))
            await self._on_assigned(frozenset({record.partition}))


async def test_a_call_that_was_taken_as_its_partition_went_is_answered_when_it_comes_back(house: Any) -> None:
    role = Role("sandbox", "sandbox-0", house.settings, house.log, house.events, house.blobs, Health("sandbox"))
    pool = Pool(Memory(), slots=1)
    worker = Jolted(role, SandboxPools(dict.fromkeys(LOCAL, pool), fallback=False), clock=house.clock)
    running = asyncio.create_task(worker.run())
    answer = await house.answer(house.shell("a", "echo here", sandbox=SandboxSpec()))
    assert (worker.jolts, answer.status, answer.output) == (0, ToolStatus.ok, b"here\n")
    role.stopping.set()
    await running
    await pool.close()
