"""Readers of today, writers of another day: defaults fill in, unknown fields are passed over, the rest is refused."""

from __future__ import annotations

import copy
import io
import json
import struct
from typing import Any

import fastavro
import pytest

from tests.each import each
from turnlog.schemas import LaterKind, UndecodableRecord, WrittenTooSoon, codec
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, Codec, plain
from turnlog.schemas.events import ALL, Boundary, EngineGone, FinishReason, TokenSnapshot, TurnCompleted, VersionSpan
from turnlog.schemas.releases import as_of, contains, example, releases
from turnlog.schemas.types import TurnId

THEIRS = 77
TURN = TurnCompleted(
    event_id="e", run_id="r", group_id="g", session_id="s", floor=1, turn=TurnId("x", 0), request_sha256="q",
    api="chat", agent_path="main/1", base_turn=TurnId("x", 1), system_sha256="y", tools_sha256="t", tools=b"[1]",
    new_messages=b"[]", response=b"{}", finish_reason=FinishReason.stop, aborted=False, prompt_tokens=1,
    output_tokens=2, cached_tokens=0, weight_version_first=3, weight_version_last=3, queue_s=0.5, first_token_s=0.25,
    total_s=1.0, engine_id="n",
)  # fmt: skip
SNAPSHOT = TokenSnapshot(
    event_id="e", run_id="r", group_id="g", session_id="s", floor=1, turn=TurnId("x", 0), parent_turn=None, base_len=0,
    delta_ids=b"\x01\0\0\0", output_ids=b"\x02\0\0\0", output_logprobs=b"\0\0\0\0",
    version_spans=(VersionSpan(3, 1, kv_version=2),), boundary=Boundary.root, boundary_reason="first",
    prompt_sha256="p", temperature=1.0, logprob_kind="at_temperature",
)  # fmt: skip


def written(schema: dict[str, Any], datum: Any) -> bytes:
    """Bytes of a writer that holds `schema` under the id THEIRS."""
    out = io.BytesIO(struct.pack(">bI", 0, THEIRS))
    out.seek(5)
    fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema)), datum)
    return out.getvalue()


def without(schema: dict[str, Any], *names: str) -> dict[str, Any]:
    """The schema as it was before these fields were added."""
    return {**schema, "fields": [field for field in schema["fields"] if field["name"] not in names]}


def read(schema: dict[str, Any], datum: Any) -> Any:
    codec = Codec({name: place for place, name in enumerate(ALL)})
    codec.hold(THEIRS, schema)
    return codec.decode(written(schema, datum))


def test_fields_that_an_older_writer_did_not_know_take_their_defaults() -> None:
    older = without(stored_schema("TurnCompleted"), "agent_path", "base_turn", "tools")
    event = read(older, plain(TURN))
    assert (event.agent_path, event.base_turn, event.tools) == (None, None, None)
    assert (event.turn, event.response, event.finish_reason) == (TURN.turn, TURN.response, TURN.finish_reason)


def test_defaults_reach_into_nested_records() -> None:
    older = copy.deepcopy(stored_schema("TokenSnapshot"))
    (spans,) = (field for field in older["fields"] if field["name"] == "version_spans")
    spans["type"]["items"] = without(spans["type"]["items"], "kv_version")
    event = read(without(older, "images", "experts"), plain(SNAPSHOT))
    assert event.version_spans == (VersionSpan(3, 1, kv_version=None),)
    assert (event.images, event.experts) == ((), None)


def test_fields_that_a_newer_writer_added_are_passed_over() -> None:
    newer = copy.deepcopy(stored_schema("TurnCompleted"))
    newer["fields"].insert(3, {"name": "later", "type": {"type": "array", "items": "string"}})
    assert read(newer, {**plain(TURN), "later": ["a", "b"]}) == TURN


def test_an_enum_symbol_of_a_newer_writer_reads_as_the_default() -> None:
    newer = copy.deepcopy(stored_schema("TurnCompleted"))
    (reason,) = (field for field in newer["fields"] if field["name"] == "finish_reason")
    reason["type"]["symbols"].append("refusal")
    assert read(newer, {**plain(TURN), "finish_reason": "refusal"}).finish_reason is FinishReason.error


LAST = as_of(releases()[-1].name, releases())


@each("name", sorted(LAST))
def test_the_last_release_reads_what_is_written_today(name: str) -> None:
    """RunConfigured.parent, say, which came after v3: a reader of v3 passes it over."""
    event = example(ALL[name])
    body = io.BytesIO(Codec({name: THEIRS}).encode(event)[HEADER.size :])
    writer, reader = (fastavro.parse_schema(copy.deepcopy(each)) for each in (stored_schema(name), LAST[name]))
    found, said = (
        json.loads(json.dumps(each, default=bytes.hex))
        for each in (fastavro.schemaless_reader(body, writer, reader), plain(event))
    )
    assert not body.read()
    assert contains(said, found)


def test_a_missing_field_without_a_default_is_refused() -> None:
    with pytest.raises(UndecodableRecord, match="TurnCompleted: the Avro body is broken"):
        read(without(stored_schema("TurnCompleted"), "engine_id"), plain(TURN))


def test_a_field_of_another_type_is_refused() -> None:
    other = copy.deepcopy(stored_schema("TurnCompleted"))
    (field,) = (field for field in other["fields"] if field["name"] == "engine_id")
    field["type"] = {"type": "map", "values": "long"}
    with pytest.raises(UndecodableRecord, match="TurnCompleted"):
        read(other, {**plain(TURN), "engine_id": {"a": 1}})


def test_a_kind_of_a_newer_release_is_told_from_broken_bytes() -> None:
    codec = Codec({})
    codec.hold(THEIRS, {"type": "record", "name": "SessionPaused", "namespace": "turnlog.v1", "fields": []})
    for _ in range(2):
        with pytest.raises(LaterKind, match="SessionPaused is a record of a newer release"):
            codec.decode(HEADER.pack(0, THEIRS))


def test_what_the_last_release_cannot_read_is_passed_over_and_not_written() -> None:
    event, ids = example(EngineGone), {"EngineGone": 1}
    written = Codec(ids).encode(event)
    codec = Codec(ids, unwritten={"EngineGone"})
    with pytest.raises(LaterKind, match="EngineGone"):
        codec.decode(written)
    with pytest.raises(WrittenTooSoon, match="EngineGone holds EngineGone, which the last release cannot read"):
        codec.encode(event)
    with pytest.raises(WrittenTooSoon, match="TokenSnapshot holds VersionSpan"):
        Codec({"TokenSnapshot": 1}, unwritten={"VersionSpan", "Sampling"}).encode(SNAPSHOT)


def test_a_schema_of_no_record_of_ours_is_not_held() -> None:
    codec = Codec({})
    with pytest.raises(UndecodableRecord, match="'Stranger', which is no record"):
        codec.hold(THEIRS, {"type": "record", "name": "else.where.Stranger", "fields": []})


@each("name", ALL)
def test_every_enum_has_a_default_so_that_it_may_grow(name: str) -> None:
    def enums(part: Any) -> list[dict[str, Any]]:
        if isinstance(part, list):
            return [found for item in part for found in enums(item)]
        if not isinstance(part, dict):
            return []
        return [part] * (part.get("type") == "enum") + [found for item in part.values() for found in enums(item)]

    for enum in enums(stored_schema(name)):
        assert enum["default"] in enum["symbols"]


def test_a_schema_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(UndecodableRecord, match="EngineGone is refused: it is no Avro schema"):
        Codec({}).hold(
            THEIRS, {"type": "record", "name": "turnlog.v1.EngineGone", "fields": [{"name": "a", "type": "b"}]}
        )


def with_field(kind: Any) -> dict[str, Any]:
    """EngineGone with a first field more, as a newer release could write it."""
    present = stored_schema("EngineGone")
    return {**present, "fields": [{"name": "more", "type": kind}, *present["fields"]]}


def doubled(types: int) -> Any:
    """A record of 2^types values."""
    kind: Any = {"type": "record", "name": "D0", "fields": [{"name": "a", "type": "long"}]}
    for number in range(1, types):
        fields = [{"name": "a", "type": kind}, {"name": "b", "type": f"D{number - 1}"}]
        kind = {"type": "record", "name": f"D{number}", "fields": fields}
    return kind


def nested(levels: int) -> Any:
    kind: Any = "long"
    for _ in range(levels):
        kind = {"type": "array", "items": kind}
    return kind


EMPTY = {"type": "record", "name": "Empty", "fields": []}
LIST = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}
COSTLY = {
    "items without bytes": ({"type": "array", "items": "null"}, "takes no bytes"),
    "items without bytes, as a type": ({"type": "array", "items": {"type": "null"}}, "takes no bytes"),
    "empty records": ({"type": "array", "items": EMPTY}, "takes no bytes"),
    "records of empty ones": (
        {"type": "array", "items": {"type": "record", "name": "R", "fields": [{"name": "e", "type": EMPTY}]}},
        "takes no bytes",
    ),
    "fixed of 0": ({"type": "array", "items": {"type": "fixed", "name": "F", "size": 0}}, "takes no bytes"),
    "values of a map": ({"type": "map", "values": "null"}, "takes no bytes"),
    "within a union": (["null", {"type": "array", "items": "null"}], "takes no bytes"),
    "holds itself": (LIST, "Node holds itself"),
    "holds itself in an array": (
        {"type": "record", "name": "T", "fields": [{"name": "a", "type": {"type": "array", "items": "T"}}]},
        "T holds itself",
    ),
    "doubled": (doubled(40), "types inside one another and .* in all"),
    "nested": (nested(65), "65 types inside one another"),
    "nested beyond what a stack holds": (nested(100_000), "nested deeper"),
}


@each("name", COSTLY)
def test_a_schema_that_lets_few_bytes_cost_much_is_refused(name: str) -> None:
    """Four hundred million items of no bytes took a reader 28 s, a type that holds itself its process."""
    kind, why = COSTLY[name]
    codec = Codec({})
    with pytest.raises(UndecodableRecord, match=why):
        codec.hold(THEIRS, with_field(kind))
    for _ in range(2):  # and the registry is not asked again
        with pytest.raises(UndecodableRecord, match=f"schema id {THEIRS} of EngineGone is refused"):
            codec.decode(HEADER.pack(0, THEIRS) + b"\x80\x80\x80\x80\x80\x80\x80\x80\x7f")


@pytest.mark.parametrize(
    "schema",
    [
        {"name": "StepCompleted", "namespace": "turnlog.v1"},
        {"type": "record", "name": "StepCompleted", "fields": [{"name": "a", "type": {"name": "b"}}]},
        {"type": "record", "name": "StepCompleted", "fields": 5},
        {"type": "record", "name": ["StepCompleted"], "fields": []},
        {"type": "fixed", "name": "StepCompleted", "size": "16"},
        [{"type": "record", "name": "StepCompleted", "fields": []}],
        "long",
        None,
        5,
    ],
)
def test_json_that_is_no_schema_is_refused_as_any_other(schema: object) -> None:
    codec = Codec({})
    with pytest.raises(UndecodableRecord, match=f"schema id {THEIRS}"):
        codec.hold(THEIRS, schema)
    with pytest.raises(UndecodableRecord, match=f"schema id {THEIRS}"):
        codec.decode(HEADER.pack(0, THEIRS))


def test_an_id_that_is_given_anew_is_no_longer_refused() -> None:
    codec = Codec({"EngineGone": 1})
    with pytest.raises(UndecodableRecord):
        codec.hold(THEIRS, {"name": "EngineGone"})
    codec.hold(THEIRS, stored_schema("EngineGone"))
    event = example(EngineGone)
    assert codec.decode(HEADER.pack(0, THEIRS) + codec.encode(event)[HEADER.size :]) == event


@pytest.mark.parametrize(
    ("field", "logical"),
    [("version", "timestamp-millis"), ("version", "time-micros"), ("event_id", "uuid"), ("run_id", "uuid")],
)
def test_a_logical_type_of_the_writer_changes_no_value(field: str, logical: str) -> None:
    schema = copy.deepcopy(stored_schema("EngineGone"))
    (found,) = (each for each in schema["fields"] if each["name"] == field)
    found["type"] = {"type": found["type"], "logicalType": logical}
    event = example(EngineGone)
    codec = Codec({"EngineGone": 1})
    codec.hold(THEIRS, schema)
    assert codec.decode(HEADER.pack(0, THEIRS) + codec.encode(event)[HEADER.size :]) == event


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.name)
def test_the_schemas_of_every_release_stay_far_below_the_limits(release: Any) -> None:
    for name in release.records:
        size = codec._size(codec.parsed_schema(release.schema(name)), name, {})
        assert size.levels * 4 < codec.MAX_LEVELS
        assert size.values * 4 < codec.MAX_VALUES
