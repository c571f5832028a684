"""Requests that aiokafka 0.14.0 lacks, or has only in older versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from aiokafka import TopicPartition
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

OFFSET_FETCH = 9
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


class StableOffsets(Request[_Question]):  # type: ignore[misc]
    """OffsetFetch version 7 (KIP-447), which can wait for open transactions; aiokafka's own ends at version 3."""

    API_KEY = OFFSET_FETCH

    def __init__(self, group: str, places: Sequence[TopicPartition] | None) -> None:
        """`places`: the partitions to read; None reads all and ignores open transactions."""
        self._group = group
        self._places = None if places is None else sorted(places)

    def build(self, request_struct_class: type[_Question]) -> _Question:
        """See Request."""
        if self._places is None:
            return request_struct_class(self._group, None, False, {})
        topics: list[Any] = [(topic, [place.partition for place in places], {})
                  for topic, places in groupby(self._places, key=lambda place: place.topic)]  # fmt: skip
        return request_struct_class(self._group, topics, True, {})


LEAVE_GROUP = 13


class _Left(Response):  # type: ignore[misc]
    API_KEY = LEAVE_GROUP
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("members", Array(
            ("member_id", String("utf-8")), ("group_instance_id", String("utf-8")), ("error_code", Int16),
        )),
    )  # fmt: skip


class _Leave(RequestStruct):  # type: ignore[misc]
    API_KEY = LEAVE_GROUP
    API_VERSION = 3
    RESPONSE_TYPE = _Left
    SCHEMA = Schema(
        ("group", String("utf-8")),
        ("members", Array(("member_id", String("utf-8")), ("group_instance_id", String("utf-8")))),
    )


class StaticGoodbye(Request[_Leave]):  # type: ignore[misc]
    """LeaveGroup version 3 (KIP-345) for one static member; aiokafka's own request ends at version 1."""

    API_KEY = LEAVE_GROUP

    def __init__(self, group: str, member_id: str, instance: str) -> None:
        self._group = group
        self._member = member_id, instance

    def build(self, request_struct_class: type[_Leave]) -> _Leave:
        """See Request."""
        return request_struct_class(self._group, [self._member])


class _Sizes(Response):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("results", Array(
            ("error_code", Int16), ("folder", String("utf-8")),
            ("topics", Array(("topic", String("utf-8")), ("partitions", Array(
                ("partition", Int32), ("size", Int64), ("lag", Int64), ("is_future", Boolean),
            )))),
        )),
    )  # fmt: skip


class _AskSizes(RequestStruct):  # type: ignore[misc]
    API_KEY = 35
    API_VERSION = 1
    RESPONSE_TYPE = _Sizes
    SCHEMA = Schema(("topics", Array(("topic", String("utf-8")), ("partitions", Array(Int32)))))


class LogDirs(Request[_AskSizes]):  # type: ignore[misc]
    """DescribeLogDirs version 1 (KIP-113), which aiokafka lacks."""

    API_KEY = 35

    def __init__(self, counts: Mapping[str, int]) -> None:
        self._topics = [(name, list(range(count))) for name, count in counts.items()]

    def build(self, request_struct_class: type[_AskSizes]) -> _AskSizes:
        """See Request."""
        return request_struct_class(self._topics)


class _Transactions(Response):  # type: ignore[misc]
    API_KEY = 66
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("error_code", Int16), ("unknown", CompactArray(CompactString("utf-8"))),
        ("states", CompactArray(
            ("id", CompactString("utf-8")), ("producer", Int64), ("state", CompactString("utf-8")),
            ("tags", TaggedFields),
        )),
        ("tags", TaggedFields),
    )  # fmt: skip


class _AskTransactions(RequestStruct):  # type: ignore[misc]
    API_KEY = 66
    API_VERSION = 0
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _Transactions
    SCHEMA = Schema(
        ("states", CompactArray(CompactString("utf-8"))), ("producers", CompactArray(Int64)), ("tags", TaggedFields)
    )


class ListTransactions(Request[_AskTransactions]):  # type: ignore[misc]
    """ListTransactions version 0 (KIP-664), which aiokafka lacks."""

    API_KEY = 66

    def build(self, request_struct_class: type[_AskTransactions]) -> _AskTransactions:
        """See Request."""
        return request_struct_class([], [], {})
