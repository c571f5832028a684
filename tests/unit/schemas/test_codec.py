"""Every record survives the wire; nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import struct
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.each import each
from turnlog.schemas import SchemaError, UndecodableRecord, UnknownRecord, UnknownSchemaId
from turnlog.schemas.avsc import field_types
from turnlog.schemas.codec import HEADER, Codec
from turnlog.schemas.events import ALL, EngineGone, TurnCompleted
from turnlog.schemas.types import BlobRef

IDS = {name: place for place, name in enumerate(ALL)}
CODEC = Codec(IDS)
LONG = st.integers(-(2**63), 2**63 - 1)
SCALARS: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: LONG,
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=64),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation of an event record."""
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
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{name: values(field) for name, field in field_types(kind).items()})


EVENTS = {name: values(record) for name, record in ALL.items()}


@each("name", ALL)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_record_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    event = data.draw(EVENTS[name])
    encoded = CODEC.encode(event)
    assert HEADER.unpack_from(encoded) == (0, IDS[name])
    decoded = CODEC.decode(encoded)
    assert decoded == event
    assert type(decoded) is type(event)
    assert CODEC.encode(decoded) == encoded


@given(event=EVENTS["TurnCompleted"])
@settings(max_examples=25, deadline=None)
def test_field_types_survive_too(event: TurnCompleted) -> None:
    """Equality alone would let a list pass for a tuple's content or a string for an enum member."""
    decoded = CODEC.decode(CODEC.encode(event))
    for field in dataclasses.fields(event):
        assert type(getattr(decoded, field.name)) is type(getattr(event, field.name))


class TestFraming:
    """What is not a frame of ours is refused by type, and says why."""

    DATA = CODEC.encode(
        EngineGone(event_id="e", run_id="r", engine_id="n", url="u", state="gone", version=-1, cause="c")
    )

    @pytest.mark.parametrize("size", range(5))
    def test_a_cut_header_is_no_frame(self, size: int) -> None:
        with pytest.raises(UndecodableRecord, match="no Confluent frame"):
            CODEC.decode(self.DATA[:size])

    def test_every_cut_of_the_body_is_refused(self) -> None:
        for size in range(5, len(self.DATA)):
            with pytest.raises(UndecodableRecord, match="EngineGone: the Avro body is broken"):
                CODEC.decode(self.DATA[:size])

    @pytest.mark.parametrize("more", [b"\x00", b"\x00" * 9, DATA])
    def test_trailing_bytes_are_refused(self, more: bytes) -> None:
        with pytest.raises(UndecodableRecord, match="bytes follow"):
            CODEC.decode(self.DATA + more)

    @pytest.mark.parametrize("magic", [1, 127, 255])
    def test_another_magic_byte_is_refused(self, magic: int) -> None:
        with pytest.raises(UndecodableRecord, match=f"starts with {magic:02x}"):
            CODEC.decode(bytes([magic]) + self.DATA[1:])

    def test_an_unknown_id_names_itself(self) -> None:
        with pytest.raises(UnknownSchemaId, match="4294967295") as caught:
            CODEC.decode(struct.pack(">bI", 0, 2**32 - 1) + self.DATA[5:])
        assert caught.value.schema_id == 2**32 - 1

    def test_frame_gives_name_and_body_without_decoding(self) -> None:
        assert CODEC.frame(self.DATA[:5] + b"garbage") == ("EngineGone", b"garbage")

    def test_a_class_outside_the_catalogue_is_refused(self) -> None:
        with pytest.raises(UnknownRecord, match="BlobRef"):
            CODEC.encode(BlobRef("a", 1))


class TestFuzz:
    """Bytes from anywhere raise SchemaError or decode; nothing else comes out."""

    @given(schema_id=st.integers(0, len(ALL)), body=st.binary(max_size=300))
    def test_random_bodies(self, schema_id: int, body: bytes) -> None:
        self._decodes_or_refuses(struct.pack(">bI", 0, schema_id) + body)

    @given(data=st.binary(max_size=40))
    def test_random_frames(self, data: bytes) -> None:
        self._decodes_or_refuses(data)

    @given(data=st.data(), name=st.sampled_from(["TokenSnapshot", "TurnTreeAssembled", "SegmentSample", "DeadLetter"]))
    def test_a_record_with_a_few_bytes_changed(self, data: st.DataObject, name: str) -> None:
        encoded = bytearray(CODEC.encode(data.draw(EVENTS[name])))
        for _ in range(data.draw(st.integers(1, 4))):
            encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
        self._decodes_or_refuses(bytes(encoded))

    def test_absurd_lengths_and_counts_are_refused_at_once(self) -> None:
        highest, lowest = b"\xfe" + b"\xff" * 8 + b"\x01", b"\xff" * 9 + b"\x01"
        for name, schema_id in IDS.items():
            for absurd in (highest, lowest, b"\x80" * 40):
                with pytest.raises(UndecodableRecord, match=name):
                    CODEC.decode(struct.pack(">bI", 0, schema_id) + absurd)

    @staticmethod
    def _decodes_or_refuses(data: bytes) -> None:
        try:
            event = CODEC.decode(data)
        except SchemaError:
            return
        assert type(event).__name__ in ALL
