"""The .avsc files are the classes, and the reference implementation of Avro agrees with the hot path."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from turnlog.schemas.avsc import NAMESPACE, render, stored_schema, write_all
from turnlog.schemas.codec import Codec, plain
from turnlog.schemas.events import ALL

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of avro-python3 itself, at import
    import avro.io
    import avro.schema

ROOT = Path(__file__).resolve().parents[3]
AVRO = ROOT / "schemas" / "avro"
GOLDEN = ROOT / "tests" / "golden"
RELEASES = sorted(folder.name for folder in GOLDEN.iterdir() if folder.is_dir() and any(folder.glob("*.bin")))
RELEASED = [(release, path.stem) for release in RELEASES for path in sorted((GOLDEN / release).glob("*.bin"))]
CODEC = Codec({name: place for place, name in enumerate(ALL)})


def golden_script() -> ModuleType:
    """tests/golden/write.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("golden_write", GOLDEN / "write.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GOLDEN_SCRIPT = golden_script()


@pytest.mark.parametrize("name", ALL)
def test_the_stored_schema_is_the_one_of_the_class(name: str) -> None:
    assert (AVRO / f"{name}.avsc").read_text() == render(ALL[name]), (
        f"{name}.avsc is not what its class says: run `python -m turnlog.schemas.avsc`"
    )


def test_there_is_a_schema_for_every_record_and_for_nothing_else(tmp_path: Path) -> None:
    write_all(tmp_path)
    assert {path.name for path in AVRO.glob("*.avsc")} == {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ALL)
def test_the_reference_implementation_parses_every_schema(name: str) -> None:
    schema = parsed(stored_schema(name))
    assert schema.fullname == f"{NAMESPACE}.{name}"


@pytest.mark.parametrize("name", ALL)
def test_the_reference_implementation_reads_and_writes_the_same_bytes(name: str) -> None:
    event = GOLDEN_SCRIPT.example(ALL[name])
    schema, body = parsed(stored_schema(name)), CODEC.encode(event)[5:]
    stream = io.BytesIO(body)
    assert avro.io.DatumReader(schema, schema).read(avro.io.BinaryDecoder(stream)) == plain(event)
    assert stream.read() == b""
    out = io.BytesIO()
    avro.io.DatumWriter(schema).write(plain(event), avro.io.BinaryEncoder(out))
    assert out.getvalue() == body


def test_every_record_of_the_catalogue_has_golden_bytes() -> None:
    assert {name for _, name in RELEASED} == set(ALL), "run `python tests/golden/write.py`"


@pytest.mark.parametrize(("release", "name"), RELEASED)
def test_golden_bytes_decode_to_what_they_said(release: str, name: str) -> None:
    """Under the schema that they were written with, read with the present one. Fields added since are defaults."""
    event = CODEC_OF[release].decode((GOLDEN / release / f"{name}.bin").read_bytes())
    said = json.loads((GOLDEN / release / f"{name}.json").read_text())
    assert said.items() <= GOLDEN_SCRIPT.told(event).items()


@pytest.mark.parametrize(("release", "name"), RELEASED)
def test_golden_records_encode_to_the_golden_bytes_while_their_schema_is_the_present_one(
    release: str, name: str
) -> None:
    golden = (GOLDEN / release / f"{name}.bin").read_bytes()
    now = CODEC.encode(CODEC_OF[release].decode(golden))[5:]
    assert (now == golden[5:]) == (golden_schema(release, name) == stored_schema(name))


def test_the_script_leaves_what_was_released_alone(tmp_path: Path) -> None:
    assert set(GOLDEN_SCRIPT.write(tmp_path)) == set(ALL)
    (tmp_path / "RunConfigured.bin").write_bytes(b"released")
    (tmp_path / "GroupScored.bin").unlink()
    assert GOLDEN_SCRIPT.write(tmp_path) == ["GroupScored"]
    assert (tmp_path / "RunConfigured.bin").read_bytes() == b"released"


def parsed(schema: dict[str, Any]) -> Any:
    """Parsed by avro-python3."""
    return avro.schema.parse(json.dumps(schema))


def golden_schema(release: str, name: str) -> dict[str, Any]:
    """The schema that a golden record was written with."""
    schema: dict[str, Any] = json.loads((GOLDEN / release / f"{name}.avsc").read_text())
    return schema


def golden_codec(release: str) -> Codec:
    """Holds the schemas of a release under the ids that stand in its bytes."""
    codec = Codec({})
    for name in (path.stem for path in (GOLDEN / release).glob("*.bin")):
        schema_id = int.from_bytes((GOLDEN / release / f"{name}.bin").read_bytes()[1:5], "big")
        codec.hold(schema_id, golden_schema(release, name))
    return codec


CODEC_OF = {release: golden_codec(release) for release in RELEASES}
