"""Bytes from outside, changed at random: each parser gives what it promises, or raises the error that it names.

By hypothesis, which the suite has, and not a fuzzer that follows coverage: it shrinks what it finds to the test that
stands in the suite afterwards, and needs no package in a lock of its own. `make test-long` runs these; what they and
others found stands as a fast test beside the parser's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.memory_log import MemoryLog
from turnlog.consumers.datasets.query import Filters, Joined, Query
from turnlog.infra.archive.files import CorruptArchive, RangeFile, read_range
from turnlog.infra.batch_files import CorruptBatch, read_rows
from turnlog.infra.embedded.registry_app import RegistryErrorResponse, parse_avro_schema
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition, Record
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.tensors.deltas import BrokenDelta, Unchanged, apply_delta, write_delta
from turnlog.infra.tensors.files import NotSafetensors, read_checksums
from turnlog.schemas import SchemaError, UndecodableRecord
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, Codec
from turnlog.schemas.events import ALL, Environment
from turnlog.schemas.releases import example
from turnlog.settings import Settings, SettingsError, load
from turnlog.trainer.weights import write_tensors

pytestmark = pytest.mark.long
often = settings(suppress_health_check=list(HealthCheck))
GOLDEN = Path(__file__).parents[2] / "golden"
IDS = {name: number for number, name in enumerate(ALL, 1)}
THEIRS = 77_777
BYTES = st.one_of(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF]), st.integers(0, 255))
KINDS = st.recursive(
    st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string", "Other", "Later", 5, None])
    | st.builds(
        lambda size: {"type": "fixed", "name": "Later", "size": size}, st.sampled_from([0, 1, -1, 1 << 40, "1"])
    )
    | st.builds(
        lambda symbols: {"type": "enum", "name": "Later", "symbols": symbols}, st.lists(st.sampled_from("abc"))
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda values: {"type": "map", "values": values}, inner)
        | st.builds(
            lambda kind, logical: {"type": kind, "logicalType": logical},
            inner,
            st.sampled_from(["uuid", "decimal", "date", "timestamp-millis", "time-micros"]),
        )
        | st.builds(
            lambda name, kinds: {
                "type": "record",
                "name": name,
                "fields": [{"name": f"f{at}", "type": kind} for at, kind in enumerate(kinds)],
            },
            st.sampled_from(["Other", "Later"]),
            st.lists(inner, max_size=3),
        )
    ),
    max_leaves=8,
)


@st.composite
def changed(draw: st.DrawFn, content: bytes) -> bytes:
    """Some of its bytes, a piece cut out of it or put into it."""
    found = bytearray(content)
    for at, byte in draw(st.lists(st.tuples(st.integers(0, len(found)), BYTES), max_size=4)):
        found[at : at + 1] = bytes([byte])
    if draw(st.booleans()):
        at = draw(st.integers(0, len(found)))
        found[at : at + draw(st.integers(0, 40))] = draw(st.binary(max_size=12))
    return bytes(found)


@often
@given(data=st.data())
def test_a_record_is_an_event_that_can_be_written_again_or_undecodable(data: st.DataObject) -> None:
    codec = Codec(IDS)
    name = data.draw(st.sampled_from(sorted(ALL)))
    value = data.draw(changed(codec.encode(example(ALL[name]))))
    try:
        event = codec.decode(value)
    except SchemaError:
        return
    codec.encode(event)


@often
@given(data=st.data())
def test_under_any_schema_a_record_is_an_event_that_can_be_written_again_or_undecodable(data: st.DataObject) -> None:
    codec = Codec(IDS)
    schema: Any = copy.deepcopy(stored_schema("EngineGone"))
    fields = schema["fields"]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(fields) - 1))
        if data.draw(st.booleans()):
            fields[at]["type"] = data.draw(KINDS)
        else:
            fields.insert(at, {"name": f"more{len(fields)}", "type": data.draw(KINDS)})
    value = HEADER.pack(0, THEIRS) + data.draw(changed(codec.encode(example(ALL["EngineGone"]))[HEADER.size :]))
    try:
        codec.hold(THEIRS, schema)
        event = codec.decode(value)
    except SchemaError:
        event = None
    if event is not None:
        codec.encode(event)
    file, record = RangeFile(Partition("engine-status", 0)), Record("engine-status", 0, 0, b"", value, (), 0)
    file.add(record, {THEIRS: schema})
    (found,) = list(read_range(file.content(0, 1), Partition("engine-status", 0)))
    assert found == [record]


@often
@given(
    schema=st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.sampled_from(["record", "turnlog.v1", *ALL]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["name", "type", "fields", "items", "namespace", "symbols", "x"]), inner)
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_schema_or_refused(schema: Any) -> None:
    codec = Codec({})
    with contextlib.suppress(UndecodableRecord):
        codec.hold(THEIRS, schema)
    with pytest.raises(SchemaError):
        codec.decode(HEADER.pack(0, THEIRS))
    with contextlib.suppress(RegistryErrorResponse):
        parse_avro_schema(json.dumps(schema))


@often
@given(data=st.data())
def test_an_archive_file_gives_records_or_is_corrupt(data: st.DataObject) -> None:
    content = data.draw(changed(archive()))
    try:
        for records in list(read_range(content, Partition("engine-status", 0))):
            assert all(isinstance(record.value, bytes) for record in records)
    except CorruptArchive:
        pass


@functools.cache
def archive() -> bytes:
    codec, file = Codec(IDS), RangeFile(Partition("engine-status", 0), codec="null")
    schemas = {number: stored_schema(name) for name, number in IDS.items()}
    for offset in range(3):
        value = codec.encode(example(ALL["EngineGone"])) if offset else b"none"
        file.add(Record("engine-status", 0, offset, b"key", value, (("a", b"b"),), 5), schemas)
    return file.content(0, 3)


@often
@given(
    content=st.sampled_from(["batch-rows-1.arrow", "batch-rows-2.arrow", "batch-rows-3.arrow"]).flatmap(
        lambda name: changed(golden(name))
    )
)
def test_a_batch_file_gives_rows_or_is_corrupt(content: bytes) -> None:
    try:
        rows = read_rows(content)
    except CorruptBatch:
        return
    assert rows.lengths.sum() == len(rows.token_ids)


@functools.cache
def golden(name: str) -> bytes:
    return (GOLDEN / name).read_bytes()


@functools.cache
def weights() -> tuple[Path, bytes, bytes]:
    """A file, its bytes, and those of a delta that another makes of it."""
    folder = Path(tempfile.mkdtemp())
    files = []
    for step in range(2):
        (at := folder / str(step)).mkdir()
        write_tensors(at, {"a": torch.arange(6.0).reshape(2, 3) + step, "b": torch.ones(4, dtype=torch.bfloat16)})
        files.append(at / "model.safetensors")
    write_delta(*files, folder / "delta", Unchanged())
    return files[0], files[0].read_bytes(), (folder / "delta").read_bytes()


@often
@given(data=st.data())
def test_a_safetensors_file_gives_checksums_or_is_none(data: st.DataObject) -> None:
    base, content, _ = weights()
    path = base.with_name("changed.safetensors")
    path.write_bytes(data.draw(changed(content)))
    with contextlib.suppress(NotSafetensors):
        list(read_checksums(path))


@often
@given(data=st.data())
def test_a_delta_gives_tensors_or_is_broken(data: st.DataObject) -> None:
    base, _, delta = weights()
    path = base.with_name("changed.delta")
    path.write_bytes(data.draw(changed(delta)))
    with contextlib.suppress(BrokenDelta):
        apply_delta(base, path, base.with_name("out"))


@often
@given(data=st.data())
def test_a_settings_file_gives_settings_or_is_refused(data: st.DataObject) -> None:
    configs = sorted((Path(__file__).parents[3] / "configs").glob("*.toml"))
    path = weights()[0].with_name("settings.toml")
    path.write_bytes(data.draw(changed(data.draw(st.sampled_from(configs)).read_bytes())))
    with contextlib.suppress(SettingsError):
        assert isinstance(load(path, {}), Settings)


VARIABLES = (
    "KAFKA_GROUPS", "FEEDER_TEMPERATURE", "VIEWS_ENABLED", "ENGINE_DEVICE", "EGRESS_ALLOW", "HEALTH_PORT", "RUN_ID",
    "GATEWAY_SIDE_ENGINES", "KAFKA_BROKERS",
)  # fmt: skip


@often
@given(
    key=st.sampled_from(VARIABLES),
    text=st.text(max_size=20) | st.sampled_from("[{-1").flatmap(lambda one: st.integers(0, 20_000).map(one.__mul__)),
)
def test_an_environment_variable_gives_settings_or_is_refused(key: str, text: str) -> None:
    with contextlib.suppress(SettingsError):
        assert isinstance(load(None, {f"TURNLOG_{key}": text}), Settings)


@often
@given(version=st.text(), asked=st.text(min_size=1))
def test_every_version_of_an_environment_passes_a_filter_or_not(version: str, asked: str) -> None:
    filters = Filters(Query(expire_before=(asked,)), Joined(), Counter())
    assert filters.check_environment(Environment(name="e", version=version)) in (None, "expire_before")


@settings(suppress_health_check=list(HealthCheck))
@given(schema=KINDS, body=st.binary(max_size=40))
def test_a_reader_of_the_log_parks_what_it_cannot_decode(schema: Any, body: bytes) -> None:
    async def read() -> None:
        registry = MemoryRegistry()
        async with EventLog.open(MemoryLog(), registry, writer="test") as events:
            registry.schemas[THEIRS] = schema
            record = Record("engine-status", 0, 0, b"", HEADER.pack(0, THEIRS) + body, (), 0)
            for _ in range(2):
                with pytest.raises(UndecodableRecord):
                    await events.decode(record)

    asyncio.run(read())
