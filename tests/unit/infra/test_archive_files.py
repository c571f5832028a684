"""Archive files: other tools read them, and every value comes back byte for byte."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import avro.datafile
import avro.io
import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.sessions import GroupName, Shape, whole_group
from turnlog.infra.archive.files import CorruptArchive, RangeFile, read_range, zigzag
from turnlog.infra.log import Partition, Record
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, Codec, plain
from turnlog.schemas.events import ALL, Event
from turnlog.schemas.topics import TOPIC_OF

IDS = {name: number for number, name in enumerate(ALL, start=1)}
SCHEMAS = {number: stored_schema(name) for name, number in IDS.items()}
CODEC = Codec(IDS)
PLACE = Partition("agent.sessions", 3)


def record(offset: int, value: bytes, key: bytes = b"group") -> Record:
    headers = (("writer", b"test"), ("empty", b""))
    return Record(PLACE.topic, PLACE.number, offset, key, value, headers, 1_700_000_000_000 + offset)


def events(topic: str | None = None) -> list[Event]:
    group = GroupName("run", "group", 0, 2)
    found = whole_group(group, np.random.default_rng(0), turns=3, shape=Shape())
    return [event for event in found if topic in (None, TOPIC_OF[type(event).__name__].name)]


def written(records: list[Record], schemas: dict[int, Any], codec: str = "deflate") -> bytes:
    file = RangeFile(PLACE, codec=codec)
    for one in records:
        file.add(one, schemas)
    return file.content(records[0].offset, records[-1].offset + 1)


def back(content: bytes) -> list[Record]:
    return [found for block in read_range(content, PLACE) for found in block]


@pytest.mark.parametrize("codec", ["deflate", "null"])
def test_fastavro_and_avro_python3_read_a_file_of_every_record_of_a_topic(codec: str) -> None:
    told = events()
    content = written([record(n * 2, CODEC.encode(event)) for n, event in enumerate(told)], SCHEMAS, codec)
    by_fastavro = list(fastavro.reader(io.BytesIO(content), return_record_name=True, return_record_name_override=True))
    assert [found["record"] for found in by_fastavro] == [
        (f"turnlog.v1.{type(event).__name__}", plain(event)) for event in told
    ]
    assert [found["offset"] for found in by_fastavro] == list(range(0, 2 * len(told), 2))
    assert {found["raw"] for found in by_fastavro} == {None}
    with avro.datafile.DataFileReader(io.BytesIO(content), avro.io.DatumReader()) as reader:
        by_reference = list(reader)
    assert [found["record"] for found in by_reference] == [plain(event) for event in told]
    assert [found["key"] for found in by_reference] == [b"group"] * len(told)


def test_the_metadata_names_subject_and_schema_of_every_id() -> None:
    told = events("agent.sessions")
    content = written([record(n, CODEC.encode(event)) for n, event in enumerate(told)], SCHEMAS)
    kept = json.loads(fastavro.reader(io.BytesIO(content)).metadata["turnlog.schemas"])
    names = {type(event).__name__ for event in told}
    assert {entry["subject"] for entry in kept.values()} == names
    assert {name: kept[str(IDS[name])]["schema"] for name in names} == {name: stored_schema(name) for name in names}


def test_what_does_not_decode_is_kept_raw_and_comes_back_too() -> None:
    good = CODEC.encode(events()[0])
    values = [b"", b"\x00poison", good, good[:-3], good + b"!", b"\x00" + HEADER.pack(0, 999)[1:] + b"x", b"\x01abc"]
    content = written([record(n, value) for n, value in enumerate(values)], SCHEMAS)
    assert [found.value for found in back(content)] == values
    read = list(fastavro.reader(io.BytesIO(content)))
    assert [found["raw"] for found in read] == [None if value is good else value for value in values]


def test_two_versions_of_one_record_lie_in_one_file() -> None:
    old = copy.deepcopy(stored_schema("GroupScored"))
    rollout = next(field for field in old["fields"] if field["name"] == "rollouts")["type"]["items"]
    rollout["fields"] = [field for field in rollout["fields"] if field["name"] in ("rollout_id", "session_id")]
    old["fields"] = [field for field in old["fields"] if field["name"] in ("event_id", "rollouts")]
    out = io.BytesIO()
    out.write(HEADER.pack(0, 77))
    datum = {"event_id": "e", "rollouts": [{"rollout_id": "r", "session_id": "s"}]}
    fastavro.schemaless_writer(out, fastavro.parse_schema(old), datum)
    new = [CODEC.encode(event) for event in events()]
    values = [*new[:2], out.getvalue(), *new[2:], out.getvalue()]
    schemas = {**SCHEMAS, 77: old, 78: {**old, "name": "SegmentSample"}}
    values.append(HEADER.pack(0, 78) + out.getvalue()[HEADER.size :])
    content = written([record(n, value) for n, value in enumerate(values)], schemas)
    assert [found.value for found in back(content)] == values
    read = list(fastavro.reader(io.BytesIO(content)))
    assert {found["raw"] for found in read} == {None}
    assert read[-1]["record"] == read[-2]["record"] == read[2]["record"] == datum


def test_the_same_records_give_the_same_bytes() -> None:
    records = [record(n, CODEC.encode(event)) for n, event in enumerate(events())]
    assert written(records, SCHEMAS) == written(records, SCHEMAS)


VALUES = st.one_of(st.binary(max_size=40), st.sampled_from([CODEC.encode(event) for event in events()]))


@given(
    st.lists(st.tuples(VALUES, st.binary(max_size=9), st.integers(1, 1 << 40)), min_size=1, max_size=30),
    st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3),
)
def test_any_records_come_back_as_they_stood(
    rows: list[tuple[bytes, bytes, int]], headers: list[tuple[str, bytes]]
) -> None:
    offset = 0
    records = []
    for value, key, gap in rows:
        offset += gap
        records.append(Record(*PLACE, offset, key, value, tuple(headers), gap))
    content = written(records, SCHEMAS)
    assert back(content) == records
    assert [found["offset"] for found in fastavro.reader(io.BytesIO(content))] == [one.offset for one in records]


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_longs_are_coded_as_fastavro_codes_them(value: int) -> None:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, "long", value)
    assert zigzag(value) == out.getvalue()


@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: c[:40], lambda c: b"PAR1" + c[4:], lambda c: c + b"xx"])
def test_a_damaged_file_is_refused(damage: Any) -> None:
    content = written([record(n, CODEC.encode(event)) for n, event in enumerate(events())], SCHEMAS)
    with pytest.raises(CorruptArchive):
        back(damage(content))


@pytest.mark.parametrize("kind", [{"type": "array", "items": "null"}, {"type": "map", "values": {"x": 1}}, 5])
def test_a_value_whose_schema_no_reader_follows_is_kept_as_it_stood(kind: object) -> None:
    present = stored_schema("EngineGone")
    schema = {**present, "fields": [{"name": "more", "type": kind}, *present["fields"]]}
    value = HEADER.pack(0, 9) + zigzag(1 << 62)
    content = written([record(0, value)], {9: schema})
    assert back(content) == [record(0, value)]
    assert [found["raw"] for found in fastavro.reader(io.BytesIO(content))] == [value]


@pytest.mark.parametrize("schema_id", [1 << 32, -1, 1 << 70])
def test_a_schema_id_that_no_frame_can_have_makes_a_file_corrupt(schema_id: int) -> None:
    events_ = [CODEC.encode(event) for event in events("agent.sessions")[:1]]
    content = written([record(0, events_[0])], SCHEMAS, "null")
    known, given = zigzag(1) + zigzag(HEADER.unpack_from(events_[0])[1]), zigzag(1) + wide(schema_id)
    at = content.index(known + zigzag(len(events_[0]) - HEADER.size))
    with pytest.raises(CorruptArchive):
        back(content[:at] + given + content[at + len(known) :])


def wide(value: int) -> bytes:
    """Avro's coding of a number of any size."""
    left = value * 2 if value >= 0 else -value * 2 - 1
    out = bytearray()
    while left > 127:
        out.append(left & 127 | 128)
        left >>= 7
    return bytes([*out, left])
