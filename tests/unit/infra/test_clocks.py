"""A clock that is hours off, or that jumps while roles work (docs/operations.md, Clocks)."""

from __future__ import annotations

import dataclasses
import time
from contextlib import AsyncExitStack
from email.utils import formatdate
from uuid import uuid4

import pytest

from tests.fakes.faulty_store import Fault, FaultyStore
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.log import Partition, TopicSpec
from turnlog.infra.roles import now_s
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.starting import Servers, _clock, _look
from turnlog.settings import Settings, StoreSettings

HOUR_S = 3600


class Looked(Exception):
    """Somebody would have waited."""


async def waits() -> None:
    raise Looked


@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_role_whose_clock_is_off_waits_and_says_so(store: StoreSettings, hours: int) -> None:
    faulty = FaultyStore(int(store.endpoint.rpartition(":")[2]))
    faulty.fault = Fault("HEAD", 403, headers={"date": formatdate(time.time() - hours * HOUR_S, usegmt=True)})
    with faulty.serving() as url:
        settings = Settings(store=dataclasses.replace(store, endpoint=url))
        async with AsyncExitStack() as stack:
            clock, health = _clock(stack, settings), Health("test")

            async def sleep(_: float) -> None:
                await waits()

            with pytest.raises(Looked):
                await Servers([clock], health, sleep=sleep).there()
            side = "ahead of" if hours > 0 else "behind"
            assert f"{side} that of the store at {url}: synchronize both with NTP" in health.waiting["clock"]
            faulty.heal()
            assert await _look(clock) is None


async def test_nothing_is_said_of_clocks_while_the_store_is_away(store: StoreSettings) -> None:
    async with AsyncExitStack() as stack:
        away = Settings(store=dataclasses.replace(store, endpoint="http://127.0.0.1:9"))
        assert await _look(_clock(stack, away)) is None


@pytest.mark.kafka
@pytest.mark.parametrize("hours", [-2, 2])
async def test_a_jump_dates_no_record(kafka: str, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """A broker takes none that is an hour ahead of it, which made every request to a gateway a 503."""
    config = {"message.timestamp.after.max.ms": "60000", "message.timestamp.before.max.ms": "60000"}
    log, place = KafkaLog(kafka, prefix=f"t{uuid4().hex[:8]}-"), Partition("in", 0)
    await log.create_topics([TopicSpec("in", 1, 1, config)])
    before, real = now_s(), time.time
    async with log.appender() as appender, log.transactor("t") as transactor, log.reader() as reader:
        monkeypatch.setattr(time, "time", lambda: real() + hours * HOUR_S)
        await appender.append("in", b"k", b"v")
        await transactor.begin()
        await transactor.send("in", 0, b"k", b"v")
        await transactor.commit()
        reader.assign({place: 0})
        found = []
        while len(found) < 2:
            found += await reader.poll()
    monkeypatch.undo()
    assert all(before - 1 <= record.timestamp_ms / 1000 <= now_s() + 1 for record in found)
    await log.close()
