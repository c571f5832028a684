"""A quota of the broker holds clients back: for how long is counted, and nothing else happens."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Float64, Int16, Int32, Schema, String

from tests.secured import Secured
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.aiokafka_changes import THROTTLED
from turnlog.infra.log import TopicSpec

pytestmark = pytest.mark.kafka
ALTER_CLIENT_QUOTAS = 49
BYTES_PER_S = 50_000.0
ENTITY = ("entity", Array(("type", String("utf-8")), ("name", String("utf-8"))))


class Altered(Response):  # type: ignore[misc]
    API_KEY = ALTER_CLIENT_QUOTAS
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("entries", Array(("error_code", Int16), ("error_message", String("utf-8")), ENTITY)),
    )


class AlterStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = ALTER_CLIENT_QUOTAS
    API_VERSION = 0
    RESPONSE_TYPE = Altered
    SCHEMA = Schema(
        ("entries", Array(ENTITY, ("ops", Array(("key", String("utf-8")), ("value", Float64), ("remove", Boolean))))),
        ("validate_only", Boolean),
    )


class Alter(Request[AlterStruct]):  # type: ignore[misc]
    """KIP-546; aiokafka has no such request."""

    API_KEY = ALTER_CLIENT_QUOTAS

    def __init__(self, rate: float | None) -> None:
        self._rate = rate

    def build(self, request_struct_class: type[AlterStruct]) -> AlterStruct:
        op = ("producer_byte_rate", self._rate or 0.0, self._rate is None)
        return request_struct_class([([("client-id", None)], [op])], False)


@asynccontextmanager
async def quota(bootstrap: str) -> AsyncIterator[None]:
    """Every client may write so many bytes a second."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await altered(admin._client, BYTES_PER_S)
        yield
        await altered(admin._client, None)
    finally:
        await admin.close()


async def altered(client: AIOKafkaClient, rate: float | None) -> None:
    answer: Any = await client.send(client.get_random_node(), Alter(rate))
    assert [code for code, *_ in answer.entries] == [0], answer


async def test_the_time_for_which_a_quota_holds_writes_back_is_counted(secured: Secured) -> None:
    """On a broker that no other worker uses: the quota holds back every client."""
    produce = next(seconds for request, seconds in THROTTLED.items() if request.__name__ == "ProduceRequest")
    before = produce._value.get()
    log = KafkaLog(secured.plain)
    try:
        await log.create_topics([TopicSpec("quotas", 1, 1, {})])
        async with log.appender() as appender:
            await appender.append("quotas", b"key", b"no quota")
            assert produce._value.get() == before
            async with quota(secured.plain):
                for _ in range(4):
                    await appender.append("quotas", b"key", os.urandom(300_000))
        assert produce._value.get() > before
    finally:
        await log.close()
