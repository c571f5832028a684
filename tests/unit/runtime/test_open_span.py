"""Bytes that a restart folds again."""

from __future__ import annotations

from turnlog.infra.log import Record
from turnlog.processors.runtime.unit import OpenSpan


def batch(topic: str, *offsets: int) -> list[Record]:
    return [Record(topic, 0, offset, b"k", b"123456789", (), 0) for offset in offsets]


def test_the_span_is_what_was_passed_above_the_marks_of_every_topic() -> None:
    span = OpenSpan()
    span.add_records(batch("a", 0, 1))
    span.add_records(batch("a", 2, 3, 4) + batch("b", 0))
    assert span.above({"a": 0, "b": 0}) == 60
    assert span.above({"a": 2, "b": 0}) == 40
    assert span.above({"a": 3, "b": 0}) == 40, "to the resolution of a batch"
    assert span.above({"a": 5, "b": 1}) == 0
