"""The generated readers and writers say what fastavro says, or leave the word to it."""

from __future__ import annotations

import dataclasses
import io
import struct
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import fastavro
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.each import each
from turnlog.schemas import UndecodableRecord, binary
from turnlog.schemas.avsc import field_types, stored_schema
from turnlog.schemas.codec import Codec, plain
from turnlog.schemas.events import ALL, EngineGone, GroupClosed, StepCompleted, TokenSnapshot
from turnlog.schemas.releases import example

PARSED = {name: fastavro.parse_schema(stored_schema(name)) for name in ALL}
LONGS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 63, 64, 1023, 1024, 2**62, -(2**63)]))
SCALARS: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=70),
    int: LONGS,
    float: st.floats(),
    bool: st.booleans(),
    bytes: st.binary(max_size=140),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation."""
    origin = get_origin(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if kind is NoneType:
        return st.none()
    if origin is Annotated:
        return values(get_args(kind)[0])
    if origin in (Union, UnionType):
        return st.one_of([values(arm) for arm in get_args(kind)])
    if origin is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(str), values(get_args(kind)[1]), max_size=3)
    if not dataclasses.is_dataclass(kind):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{name: values(field) for name, field in field_types(kind).items()})


def by_fastavro(event: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, PARSED[type(event).__name__], plain(event), strict=True)
    return out.getvalue()


def written(event: Any) -> bytes:
    parts: list[bytes] = []
    binary.writer(type(event).__name__)(event, parts.append)
    return b"".join(parts)


@each("name", ALL)
@given(data=st.data())
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
def test_a_generated_pair_agrees_with_fastavro_on_every_record(name: str, data: st.DataObject) -> None:
    event = data.draw(values(ALL[name]))
    body = by_fastavro(event)
    assert written(event) == body
    read, end = binary.reader(name)(b"frame" + body, 5)
    assert end == len(body) + 5
    assert type(read) is ALL[name]
    assert repr(read) == repr(event)  # with the types of all fields, and NaN is itself


@given(data=st.data(), name=st.sampled_from(["TokenSnapshot", "TurnTreeAssembled", "SampleBatchFormed", "DeadLetter"]))
@settings(deadline=None, phases=[Phase.generate])
def test_what_a_generated_reader_takes_fastavro_takes_alike(name: str, data: st.DataObject) -> None:
    body = bytearray(by_fastavro(data.draw(values(ALL[name]))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        event, end = binary.reader(name)(bytes(body), 0)
    except binary.NOT_PLAIN:
        return
    stream = io.BytesIO(body)
    try:
        datum = fastavro.schemaless_reader(stream, PARSED[name])
    except Exception:
        assert end != len(body)  # then the codec asks fastavro
        return
    if end == len(body):
        again = io.BytesIO()
        fastavro.schemaless_writer(again, PARSED[name], datum)
        assert (by_fastavro(event), stream.tell()) == (again.getvalue(), end)


@each("name", ALL)
def test_every_cut_of_a_body_is_left_to_fastavro(name: str) -> None:
    body = by_fastavro(example(ALL[name]))
    read = binary.reader(name)
    for size in range(len(body)):
        try:
            _, end = read(body[:size], 0)
        except binary.NOT_PLAIN:
            continue
        assert end != size


def test_absurd_lengths_and_counts_end_at_once() -> None:
    for absurd in (b"\xfe" + b"\xff" * 8 + b"\x01", b"\xff" * 9 + b"\x01", b"\x80" * 40, b"\x01" * 40):
        for name in ALL:
            with pytest.raises(binary.NOT_PLAIN):
                binary.reader(name)(absurd, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"members": ("a", 1)}, {"members": (None,)}, {"members": 3}, {"seen": 2**63}, {"seen": "7"},
        {"reason": None}, {"reason": b"x"}, {"reason": "\ud800"}, {"group_id": 7},
    ],
)  # fmt: skip
def test_a_field_that_does_not_fit_is_refused_as_fastavro_refuses_it(change: dict[str, Any]) -> None:
    event = GroupClosed(event_id="e", run_id="r", group_id="g", floor=0, members=("a",), reason="", seen=7)
    with pytest.raises((TypeError, ValueError, OverflowError, AttributeError)) as ours:
        CODEC.encode(dataclasses.replace(event, **change))
    with pytest.raises(type(ours.value)):
        by_fastavro(dataclasses.replace(event, **change))


def test_values_that_fastavro_takes_too_are_written_as_it_writes_them() -> None:
    step = example(StepCompleted)
    for other in (
        dataclasses.replace(step, loss=1, grad_norm=2**70),  # ints where numbers stand
        dataclasses.replace(step, entropy=1),
        dataclasses.replace(step, seconds={"read": 1}),
        dataclasses.replace(step, step=1.0),
    ):
        assert CODEC.encode(other)[5:] == by_fastavro(other)


CODEC = Codec({name: place for place, name in enumerate(ALL)})


def test_a_codec_reads_alike_before_and_after_it_knows_the_layout() -> None:
    event = example(TokenSnapshot)
    codec = Codec({"TokenSnapshot": 7})
    data = codec.encode(event)
    assert [codec.decode(data) for _ in range(3)] == [event] * 3


def test_an_array_in_negative_blocks_is_read_by_fastavro() -> None:
    event = GroupClosed(event_id="e", run_id="r", group_id="g", floor=0, members=("a",), reason="", seen=7)
    data = CODEC.encode(event)
    assert CODEC.decode(data) == event
    one_block = b"\x02\x02a\x00"
    assert data.count(one_block) == 1
    assert CODEC.decode(data.replace(one_block, b"\x01\x04\x02a\x00")) == event  # count -1, then its bytes


def test_an_id_of_another_layout_is_resolved_and_an_id_of_the_same_one_is_not() -> None:
    event = EngineGone(event_id="e", run_id="r", engine_id="n", url="u", state="gone", version=-1, cause="c")
    data = CODEC.encode(event)
    codec = Codec({})
    same = {**stored_schema("EngineGone"), "doc": "another doc"}
    older = {**same, "fields": [{"name": "more", "type": "string"}, *same["fields"]]}
    codec.hold(1, same)
    codec.hold(2, older)
    for _ in range(2):
        assert codec.decode(struct.pack(">bI", 0, 1) + data[5:]) == event
        assert codec.decode(struct.pack(">bI", 0, 2) + b"\x02x" + data[5:]) == event
        with pytest.raises(UndecodableRecord):
            codec.decode(struct.pack(">bI", 0, 1) + b"\x02x" + data[5:])
    codec.hold(1, older)  # the id was given anew
    assert codec.decode(struct.pack(">bI", 0, 1) + b"\x02x" + data[5:]) == event
