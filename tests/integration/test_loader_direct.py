"""The loader of a real SGLang on a real log, to whose engine a test sends weights as training ranks do."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from tests.fakes.weights import version
from tests.integration.test_loader_engine import greedy, loader_settings, publish, said
from tests.training_side import TrainingSide, digests_of
from turnlog.consumers.loader.role import main
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.schemas.events import (
    EngineRegistered,
    EngineWeightsAwaited,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    WeightTransferBegun,
    WeightVersionPublished,
)
from turnlog.schemas.topics import TRANSFERS
from turnlog.settings import Settings
from turnlog.trainer.weights import read_weights

pytestmark = [pytest.mark.kafka, pytest.mark.engine]
HALF = 64 << 10
TRANSFER_S = 20.0
Weights = dict[str, torch.Tensor]


@pytest.fixture
async def role(live_settings: Settings, tiny_model: Path, engine_url: str) -> AsyncIterator[Role]:
    settings = loader_settings(live_settings, tiny_model, engine_url)
    weights = dataclasses.replace(settings.weights, timeout_s=TRANSFER_S)
    async with open_role("loader", dataclasses.replace(settings, weights=weights)) as role:
        yield role


class Trainer:
    """It announces versions of the role's run, and its one rank sends them to engine-0."""

    def __init__(self, role: Role) -> None:
        self._role, self._model = role, Path(role.settings.model.path)

    def weights(self, factor: float) -> Weights:
        return {
            name: tensor.float() * (factor if tensor.dim() > 1 else 1.0)
            for name, tensor in read_weights(self._model).items()
        }

    async def _event(self, number: int, weights: Weights) -> WeightVersionPublished:
        event = await version(weights, number, self._role.blobs, self._model, run_id=self._role.settings.run.id)
        return dataclasses.replace(event, transport="direct")

    async def announce(self, number: int, weights: Weights) -> None:
        event = dataclasses.replace(await self._event(number, weights), event_id=f"announced-{number}")
        await self._role.events.append(
            dataclasses.replace(event, state="announced", files=(), checksums={}, digests=digests_of(weights))
        )

    async def awaited(self, number: int, attempt: int) -> EngineWeightsAwaited:
        """The report that the engine is ready for this attempt, once it is there."""
        async with asyncio.timeout(60), self._role.log.reader() as reader:
            reader.assign({Partition(TRANSFERS.name, 0): 0})
            while True:
                events = [await self._role.events.decode(record) for record in await reader.poll()]
                for event in events:
                    found = isinstance(event, EngineWeightsAwaited) and event.awaited_version == number
                    if found and event.attempt == attempt:  # type: ignore[attr-defined]
                        return event  # type: ignore[return-value]

    async def begin(self, side: TrainingSide, number: int, attempt: int) -> None:
        transfer = side.transfer(number, attempt)
        await self._role.events.append(
            WeightTransferBegun(
                event_id=f"begun-{number}-{attempt}", run_id=self._role.settings.run.id, version=number, incarnation=0,
                attempt=attempt, group=transfer.group, address=transfer.address, port=transfer.port,
                world_size=transfer.world_size, senders=transfer.senders, members={"engine-0": transfer.first_rank},
            )
        )  # fmt: skip


@pytest.fixture
async def loaded(role: Role) -> AsyncIterator[tuple[asyncio.Task[None], int]]:
    """A loader, and the version that it has loaded from the store."""
    loader = asyncio.create_task(main(role))
    (registered,) = await said(role, 1, loader)
    first = 1000 + registered.version
    await publish(role, first, factor=1.0)
    await said(role, 2, loader)
    yield loader, first
    role.stopping.set()
    await loader


async def test_an_engine_serves_what_ranks_send_with_the_log_probs_of_the_same_weights_from_the_store(
    role: Role, engine_url: str, loaded: tuple[asyncio.Task[None], int]
) -> None:
    trainer, (loader, first) = Trainer(role), loaded
    before, weights = await greedy(engine_url), trainer.weights(1.5)
    with TrainingSide(1, half_bytes=HALF) as side:
        for number in (first + 1, first + 2):  # the second one goes through the groups of the first
            await trainer.announce(number, weights)
            awaited = await trainer.awaited(number, 0)
            assert (awaited.ranks, awaited.cause, awaited.state) == (1, "", "serving")
            await trainer.begin(side, number, 0)
            await side.sends(weights, number)
            event = (await said(role, 2 + number - first, loader))[-1]
            assert isinstance(event, EngineWeightsLoaded)
            assert (event.version, event.state, event.superseded) == (number, "serving", ())
            assert set(event.seconds) == {"join", "pause", "load", "check", "resume"}
    direct = await greedy(engine_url)
    assert direct[1] == str(first + 2)
    assert direct[0] != pytest.approx(before[0], abs=1e-2)
    await publish(role, first + 3, factor=1.5)
    await said(role, 5, loader)
    assert await greedy(engine_url) == (direct[0], str(first + 3))


async def test_an_engine_with_tensors_of_two_versions_serves_again_with_the_next_attempt(
    role: Role, engine_url: str, loaded: tuple[asyncio.Task[None], int]
) -> None:
    trainer, (loader, first) = Trainer(role), loaded
    weights = trainer.weights(0.5)
    await trainer.announce(first + 1, weights)
    await trainer.awaited(first + 1, 0)
    with TrainingSide(1, half_bytes=HALF) as side:
        await trainer.begin(side, first + 1, 0)
        await asyncio.to_thread(side.send, side.plan(weights, first + 1), weights, count=1)
        for group in side.groups:
            group.abort()
    again = await trainer.awaited(first + 1, 1)
    assert (again.state, again.version) == ("starting", -1)
    assert again.cause.startswith("TransferFailed: ")
    with TrainingSide(1, half_bytes=HALF) as side:
        await trainer.begin(side, first + 1, 1)
        await side.sends(weights, first + 1, attempt=1)
        registered, event = (await said(role, 4, loader))[2:]
    assert isinstance(registered, EngineRegistered)
    assert isinstance(event, EngineWeightsLoaded)
    assert (registered.state, registered.version) == ("starting", -1)
    assert (event.state, event.version) == ("serving", first + 1)
    assert (await greedy(engine_url))[1] == str(first + 1)


async def test_weights_other_than_announced_never_serve_and_are_refused_the_second_time(
    role: Role, engine_url: str, loaded: tuple[asyncio.Task[None], int]
) -> None:
    trainer, (loader, first) = Trainer(role), loaded
    before, weights = await greedy(engine_url), trainer.weights(1.5)
    wrong = {name: tensor + 1.0 for name, tensor in weights.items()}
    await trainer.announce(first + 1, weights)
    for attempt in (0, 1):
        cause = (await trainer.awaited(first + 1, attempt)).cause
        assert cause.partition(":")[0] == ("DigestMismatch" if attempt else "")
        with TrainingSide(1, half_bytes=HALF) as side:
            await trainer.begin(side, first + 1, attempt)
            await side.sends(wrong, first + 1, attempt=attempt)
    registered, refused, event = (await said(role, 5, loader))[2:]
    assert isinstance(registered, EngineRegistered)
    assert isinstance(refused, EngineWeightsRefused)
    assert (refused.cause, refused.refused_version) == ("DigestMismatch", first + 1)
    assert isinstance(event, EngineWeightsLoaded)
    assert event.version == first
    assert await greedy(engine_url) == (before[0], str(first))
