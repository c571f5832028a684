"""An engine in memory whose plugin receives versions from training ranks, and a trainer that says on the log what ranks
do.

It behaves as EngineControl prescribes: what a transfer leaves is labelled loading-N until somebody labels it otherwise.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import torch

from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.fakes.weights import version
from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.engines.protocol import EngineDead, EngineRefused, TransferFailed
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import EngineWeightsAwaited, WeightTransferBegun, WeightVersionPublished
from turnlog.schemas.topics import TRANSFERS

Outcome = Mapping[str, str] | EngineRefused | TransferFailed | EngineDead


def digests_of(number: int) -> dict[str, str]:
    """Of version `number` of the tensors a and b of the model of `Ranks`."""
    return {"a": f"{number:016x}:2x3", "b": f"{number:016x}:4"}


async def nothing() -> None:
    """Let a step pass."""


class DirectEngine(MemoryEngineControl):
    """`outcomes`: what the next transfers come to, in order; without any the announced digests are found. `gate`:
    awaited in the middle of each transfer; `gate_resume`: before it resumes. `served_mixed`: it was resumed with
    tensors of two versions, or with wrong ones, which must never be."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.outcomes: list[Outcome] = []
        self.gate: Callable[[], Awaitable[None]] = nothing
        self.gate_resume: Callable[[], Awaitable[None]] = nothing
        self.refuses_files_of = -1
        self.served_mixed = False
        self.take = self._take_part
        self._whole = True

    def restart(self, label: str = "default") -> None:
        self._whole = True
        super().restart(label)

    async def load(self, folder: Path, version: int, *, timeout_s: float, released: bool = False) -> None:
        if version == self.refuses_files_of:
            raise EngineRefused("memory engine: not these files")
        await super().load(folder, version, timeout_s=timeout_s, released=released)
        self._whole = True

    async def release(self) -> None:
        self._whole = False
        await super().release()

    async def receive(self, transfer: Transfer, *, timeout_s: float, released: bool = False) -> dict[str, str]:
        """See EngineControl."""
        self._alive()
        self._needs(self.paused)
        return await super().receive(transfer, timeout_s=timeout_s, released=released)

    async def _take_part(self, transfer: Transfer, timeout_s: float) -> dict[str, str]:
        outcome = self.outcomes.pop(0) if self.outcomes else digests_of(transfer.version)
        if isinstance(outcome, EngineRefused):
            raise outcome
        self._whole = False
        await self.gate()
        if isinstance(outcome, Exception):
            raise outcome
        self.loads.append(transfer.version)
        self._whole = outcome == digests_of(transfer.version)
        await self._step()
        return dict(outcome)

    async def resume(self) -> None:
        await self.gate_resume()
        self.served_mixed = self.served_mixed or not self._whole
        await super().resume()


class Ranks:
    """A trainer whose model has a tensor a [2, 3] and a tensor b [4]."""

    def __init__(self, role: Role) -> None:
        self._role = role

    async def _event(self, number: int) -> WeightVersionPublished:
        tensors = {"a": torch.full((2, 3), float(number)), "b": torch.ones(4)}
        event = await version(tensors, number, self._role.blobs, Path(self._role.settings.model.path))
        return dataclasses.replace(event, transport="direct")

    async def announce(self, number: int, digests: Mapping[str, str] | None = None, **of: int) -> None:
        """Version `number`; `of`: its step, batch index and incarnation."""
        event = dataclasses.replace(
            await self._event(number), event_id=f"announced-{number}", state="announced", files=(), checksums={},
            digests=dict(digests_of(number) if digests is None else digests),
        )  # fmt: skip
        await self._role.events.append(dataclasses.replace(event, **of))

    async def store(self, number: int, **of: int) -> None:
        """The durable copy of version `number`."""
        await self._role.events.append(dataclasses.replace(await self._event(number), **of))

    async def begin(self, number: int, *members: str, attempt: int = 0) -> None:
        """The transfer to these engines of one rank each."""
        await self._role.events.append(
            WeightTransferBegun(
                event_id=f"begun-{number}-{attempt}", run_id="run", version=number, incarnation=0, attempt=attempt,
                group=f"group-{number}-{attempt}", address="127.0.0.1", port=29500, senders=1,
                world_size=1 + len(members), members={name: rank for rank, name in enumerate(members, start=1)},
            )
        )  # fmt: skip

    async def offer(self, number: int, *members: str, reports: int) -> None:
        """Version `number`, once it is announced and engines have made so many reports in all: the transfer to these
        engines.
        """
        await self.announce(number)
        await self.awaited(reports)
        await self.begin(number, *members)

    async def awaited(self, count: int) -> list[EngineWeightsAwaited]:
        """The first `count` reports of engines that are ready, once they are there."""
        found: list[EngineWeightsAwaited] = []
        async with asyncio.timeout(20), self._role.log.reader() as reader:
            reader.assign({Partition(TRANSFERS.name, 0): 0})
            while len(found) < count:
                events = [await self._role.events.decode(record) for record in await reader.poll()]
                found += [event for event in events if isinstance(event, EngineWeightsAwaited)]
        return found
