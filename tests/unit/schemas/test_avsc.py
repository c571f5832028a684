"""The .avsc files are the classes, and the reference implementation of Avro agrees with the hot path."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

from tests.each import each
from turnlog.schemas.avsc import NAMESPACE, render, stored_schema, write_all
from turnlog.schemas.codec import Codec, plain
from turnlog.schemas.events import ALL
from turnlog.schemas.releases import contains, example, golden_codec, history, releases, to_json

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of avro-python3 itself, at import
    import avro.io
    import avro.schema

AVRO = Path(__file__).resolve().parents[3] / "schemas" / "avro"
PAST = {release.name: release for release in releases()}
RELEASED = [(name, record) for name, release in PAST.items() for record in release.records]
CODEC = Codec({name: place for place, name in enumerate(ALL)})
CODEC_OF = {name: golden_codec(release) for name, release in PAST.items()}


@each("name", ALL)
def test_the_stored_schema_is_the_one_of_the_class(name: str) -> None:
    assert (AVRO / f"{name}.avsc").read_text() == render(ALL[name]), (
        f"{name}.avsc is not what its class says: run `python -m turnlog.schemas.avsc`"
    )


def test_there_is_a_schema_for_every_record_and_for_nothing_else(tmp_path: Path) -> None:
    write_all(tmp_path)
    assert {path.name for path in AVRO.glob("*.avsc")} == {path.name for path in tmp_path.iterdir()}


@each("name", ALL)
def test_the_reference_implementation_parses_every_schema(name: str) -> None:
    schema = parsed(stored_schema(name))
    assert schema.fullname == f"{NAMESPACE}.{name}"


@each("name", ALL)
def test_the_reference_implementation_reads_and_writes_the_same_bytes(name: str) -> None:
    event = example(ALL[name])
    schema, body = parsed(stored_schema(name)), CODEC.encode(event)[5:]
    stream = io.BytesIO(body)
    assert avro.io.DatumReader(schema, schema).read(avro.io.BinaryDecoder(stream)) == plain(event)
    assert stream.read() == b""
    out = io.BytesIO()
    avro.io.DatumWriter(schema).write(plain(event), avro.io.BinaryEncoder(out))
    assert out.getvalue() == body


@each(("release", "name"), RELEASED)
def test_golden_bytes_decode_to_what_they_said(release: str, name: str) -> None:
    """Under the schema that they were written with, read with the present one. Fields added since are defaults."""
    golden, said = PAST[release].golden(name)
    assert contains(to_json(CODEC_OF[release].decode(golden)), said)


@each(("release", "name"), [(one, name) for one, name in RELEASED if PAST[one].schema(name) == stored_schema(name)])
def test_golden_records_encode_to_the_golden_bytes_while_their_schema_is_the_present_one(
    release: str, name: str
) -> None:
    golden, _ = PAST[release].golden(name)
    assert CODEC.encode(CODEC_OF[release].decode(golden))[5:] == golden[5:]


def test_every_record_that_was_released_has_a_first_schema() -> None:
    assert {name for _, name in RELEASED} <= set(ALL)
    assert all(history(name, PAST.values()) for _, name in RELEASED)


def parsed(schema: dict[str, Any]) -> Any:
    """Parsed by avro-python3."""
    return avro.schema.parse(json.dumps(schema))
