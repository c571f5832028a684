"""What a group committed, as Kafka gives it to one who asks for stable offsets (OffsetFetch 7, KIP-447).

aiokafka's own request ends at version 3, whose answer may be older than what a reader of the topics sees already: the
markers of a transaction go to each partition that it wrote to, that of the offsets among them, one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError, for_code
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

from turnlog.infra.log import Commit

RETRY_S = 0.05
"""Between two looks at a coordinator that loads, or at offsets of an open transaction: neither can be awaited."""
OFFSET_FETCH = 9
UNSTABLE_OFFSET_COMMIT = 88
"""A transaction that commits offsets of the partition is not over."""
TAGS = ("tags", TaggedFields)


class _Answer(Response):  # type: ignore[misc]
    API_KEY = OFFSET_FETCH
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("topics", CompactArray(
            ("name", CompactString("utf-8")),
            ("partitions", CompactArray(
                ("partition", Int32), ("offset", Int64), ("leader_epoch", Int32), ("metadata", CompactString("utf-8")),
                ("error_code", Int16), TAGS,
            )),
            TAGS,
        )),
        ("error_code", Int16),
        TAGS,
    )  # fmt: skip


class _Question(RequestStruct):  # type: ignore[misc]
    API_KEY = OFFSET_FETCH
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Answer
    SCHEMA = Schema(
        ("group", CompactString("utf-8")),
        ("topics", CompactArray(("name", CompactString("utf-8")), ("partitions", CompactArray(Int32)), TAGS)),
        ("require_stable", Boolean),
        TAGS,
    )


class _StableOffsets(Request[_Question]):  # type: ignore[misc]
    API_KEY = OFFSET_FETCH

    def __init__(self, group: str, places: Sequence[TopicPartition]) -> None:
        self._group = group
        self._places = sorted(places)

    def build(self, request_struct_class: type[_Question]) -> _Question:
        topics: list[Any] = [(topic, [place.partition for place in places], {})
                  for topic, places in groupby(self._places, key=lambda place: place.topic)]  # fmt: skip
        return request_struct_class(self._group, topics, True, {})


async def stable_commits(
    admin: AIOKafkaAdminClient, group: str, places: Sequence[TopicPartition]
) -> Mapping[TopicPartition, Commit]:
    """The group's commits, once its coordinator has them and no transaction that commits one is under way."""
    while True:
        try:
            answer = await admin._send_request(_StableOffsets(group, places), await admin.find_coordinator(group))
            found, codes = _read(answer)
        except KafkaError as error:
            if not error.retriable:
                raise
        else:
            if not codes:
                return found
            if UNSTABLE_OFFSET_COMMIT not in codes and not all(for_code(code).retriable for code in codes):
                raise for_code(max(codes))(f"offsets of {group}")
        await asyncio.sleep(RETRY_S)


def _read(answer: Any) -> tuple[dict[TopicPartition, Commit], set[int]]:
    """Commits, and the error codes of the group and of its partitions."""
    found: dict[TopicPartition, Commit] = {}
    codes = {answer.error_code}
    for topic, partitions, _ in answer.topics:
        for partition, offset, _, metadata, code, _ in partitions:
            codes.add(code)
            if offset >= 0:
                found[TopicPartition(topic, partition)] = Commit(offset, metadata or "")
    return found, codes - {0}
