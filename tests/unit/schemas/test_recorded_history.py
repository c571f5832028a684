"""What an older release wrote, and made of it: today's code reads the bytes and gives the same trees and samples."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import fastavro
import pytest

from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.codec import HEADER, Codec, plain
from turnlog.schemas.events import Event
from turnlog.schemas.releases import as_of, releases

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
RECORDED = sorted(path.stem.removeprefix("history-") for path in GOLDEN.glob("history-*.jsonl"))


@pytest.fixture(scope="module")
def recorder() -> ModuleType:
    """tests/golden/record_history.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("record_history", GOLDEN / "record_history.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_then(event: Event, schema: Any) -> Any:
    """What a reader that holds an older schema sees of an event that today's code wrote."""
    out, present = io.BytesIO(), fastavro.parse_schema(stored_schema(type(event).__name__))
    fastavro.schemaless_writer(out, present, plain(event), strict=True)
    out.seek(0)
    return fastavro.schemaless_reader(out, present, fastavro.parse_schema(schema))


FOLDED = sorted(
    path.name.removesuffix(".json").removeprefix("history-") for path in GOLDEN.glob("history-*.fold-*.json")
)
"""release.fold-N"""


@pytest.mark.parametrize("folded", FOLDED)
def test_a_history_folds_to_the_trees_and_samples_that_its_release_gave(recorder: ModuleType, folded: str) -> None:
    version, fold = folded.split(".fold-")
    schemas = as_of(version, releases())
    codec, ids = Codec({}), {name: place for place, name in enumerate(schemas)}
    for name, schema in schemas.items():
        codec.hold(ids[name], schema)
    lines = map(json.loads, (GOLDEN / f"history-{version}.jsonl").read_text().splitlines())
    framed = [HEADER.pack(0, ids[line["headers"]["record"]]) + base64.b64decode(line["body"]) for line in lines]
    outputs = {
        event.event_id: recorder.fingerprint(as_then(event, schemas[type(event).__name__]))
        for event in recorder.folded(map(codec.decode, framed), fold)
    }
    assert outputs == json.loads((GOLDEN / f"history-{folded}.json").read_text())


def test_the_history_of_the_first_release_is_there() -> None:
    assert "v1" in RECORDED
    assert {f"{version}.fold-1" for version in RECORDED} <= set(FOLDED)


def test_the_versions_of_the_fold_differ_where_the_recorded_history_doubts(recorder: ModuleType) -> None:
    events = list(recorder.history())
    one, two = ({each.event_id: each for each in recorder.folded(events, fold)} for fold in "12")
    differ = {each.group_id for name, each in one.items() if two.get(name) is None or set_apart(each, two[name])}
    assert differ == set(recorder.DOUBTS)


def set_apart(one: Event, two: Event) -> bool:
    """Whether they differ in more than the version that they name."""
    if not hasattr(one, "fold_version"):
        return bool(one != two)
    return bool(replace(one, fold_version="") != replace(two, fold_version=""))
