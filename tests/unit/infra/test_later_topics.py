"""A run of an earlier release gets the topics that the catalogue has now, as `turnlog run configure` creates them."""

from __future__ import annotations

from tests.fakes.memory_broker import MemoryBroker
from tests.fakes.memory_log import MemoryLog
from turnlog.infra.topics_admin import apply, check, specs
from turnlog.schemas.topics import TRANSFERS
from turnlog.settings import Settings


async def test_a_topic_that_an_earlier_release_did_not_have_is_created_and_the_others_are_left_alone() -> None:
    settings, log = Settings(), MemoryLog(MemoryBroker())
    await log.create_topics([spec for spec in specs(settings) if spec.name != TRANSFERS.name])
    assert await check(log, settings) == ["weight-transfers does not exist: run `turnlog topics apply`"]
    assert await apply(log, settings) == ["weight-transfers"]
    assert await check(log, settings) == []
    assert await apply(log, settings) == []
