"""What was released forbids: each rule fails on a doctored schema, and a release is cut once and never altered."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from turnlog import cli
from turnlog.schemas import releases as cutting
from turnlog.schemas.avsc import stored_schema
from turnlog.schemas.compatibility import CompatibilityRule
from turnlog.schemas.events import ALL
from turnlog.schemas.releases import altered_files, changed_records, history, problems, releases

PRESENT = {name: stored_schema(name) for name in ALL}
Schema = dict[str, Any]


def field(schema: Schema, name: str) -> Schema:
    (found,) = [member for member in schema["fields"] if member["name"] == name]
    return found


def outcome(schema: Schema) -> Schema:
    kind: Schema = field(schema, "outcome")["type"]
    return kind


def new_field(schema: Schema) -> None:
    schema["fields"].append({"name": "later", "type": "long"})


def fewer_fields(schema: Schema) -> None:
    schema["fields"].remove(field(schema, "reason"))


def another_type(schema: Schema) -> None:
    field(schema, "reason")["type"] = "long"


def another_name(schema: Schema) -> None:
    schema["name"] = "SessionEnded"


def another_enum_name(schema: Schema) -> None:
    outcome(schema)["name"] = "Ending"


def narrower_union(schema: Schema) -> None:
    field(schema, "experts")["type"] = ["null"]


def fewer_symbols(schema: Schema) -> None:
    outcome(schema)["symbols"].remove("expired")


def no_default(schema: Schema) -> None:
    del outcome(schema)["default"]


def another_default(schema: Schema) -> None:
    outcome(schema)["default"] = "completed"


def other_packing(schema: Schema) -> None:
    (packed, _) = field(schema, "delta_ids")["type"]
    packed["logicalType"] = "turnlog-float32-le"


DOCTORED: list[tuple[str, Callable[[Schema], None], CompatibilityRule, str]] = [
    ("SessionFinished", new_field, CompatibilityRule.new_without_default, "turnlog.v1.SessionFinished.later"),
    ("SessionFinished", fewer_fields, CompatibilityRule.field_removed, "turnlog.v1.SessionFinished.reason"),
    ("SessionFinished", another_type, CompatibilityRule.type_changed, "turnlog.v1.SessionFinished.reason"),
    ("SessionFinished", another_name, CompatibilityRule.name_changed, "the schema"),
    ("SessionFinished", another_enum_name, CompatibilityRule.name_changed, "turnlog.v1.SessionFinished.outcome"),
    ("TokenSnapshot", narrower_union, CompatibilityRule.union_arm_lost, "turnlog.v1.TokenSnapshot.experts"),
    ("SessionFinished", fewer_symbols, CompatibilityRule.enum_symbol_lost, "turnlog.v1.Outcome"),
    ("SessionFinished", no_default, CompatibilityRule.enum_without_default, "turnlog.v1.Outcome"),
    ("SessionFinished", another_default, CompatibilityRule.enum_default_moved, "turnlog.v1.Outcome"),
    ("TokenSnapshot", other_packing, CompatibilityRule.packing_changed, "turnlog.v1.TokenSnapshot.delta_ids"),
]


def test_todays_schemas_may_follow_every_release() -> None:
    assert cutting.check(releases()) == []


@each(("name", "doctor", "rule", "where"), DOCTORED, ids=[case[1].__name__ for case in DOCTORED])
def test_a_doctored_schema_breaks_its_rule_by_name(
    name: str, doctor: Callable[[Schema], None], rule: CompatibilityRule, where: str
) -> None:
    schema = copy.deepcopy(PRESENT[name])
    doctor(schema)
    found = problems({**PRESENT, name: schema}, releases())
    assert (rule, where) in {(problem.rule, problem.where) for problem in found}
    assert all(problem.what for problem in found)


def test_a_new_symbol_of_an_enum_with_a_default_may_come() -> None:
    schema = copy.deepcopy(PRESENT["SessionFinished"])
    outcome(schema)["symbols"].append("preempted")
    assert problems({**PRESENT, "SessionFinished": schema}, releases()) == []


def test_a_new_symbol_may_not_come_where_an_old_reader_has_no_default_for_it(folder: Path) -> None:
    path = folder / "v1" / "SessionFinished.avsc"
    old = json.loads(path.read_text())
    del outcome(old)["default"]
    path.write_text(json.dumps(old))
    assert problems(PRESENT, releases(folder)[:1])[0].rule is CompatibilityRule.enum_default_moved
    newer = copy.deepcopy(PRESENT["SessionFinished"])
    outcome(newer)["symbols"].append("preempted")
    found = problems({**PRESENT, "SessionFinished": newer}, releases(folder)[:1])
    (told,) = [problem for problem in found if problem.rule is CompatibilityRule.enum_without_default]
    assert str(told) == "turnlog.v1.Outcome: gained preempted, for which readers of the release have no default"


def test_a_new_kind_is_read_by_one_release_and_written_by_the_next() -> None:
    """On a topic that the last release reads; on one of its own it has no reader that could stumble."""
    past = releases()
    (told,) = problems(PRESENT, past[:2])
    assert (told.where, told.rule) == ("RunPlanned", CompatibilityRule.written_too_soon)
    assert "a new kind on runs, which v2 reads" in told.what
    assert problems(PRESENT, past[:2], unwritten={"RunPlanned"}) == []


def test_a_new_arm_of_a_union_is_read_by_one_release_and_written_by_the_next() -> None:
    schema = copy.deepcopy(PRESENT["TokenSnapshot"])
    arm = {"type": "record", "name": "Packed", "fields": [{"name": "bits", "type": "bytes"}]}
    field(schema, "delta_ids")["type"].append(arm)
    present = {**PRESENT, "TokenSnapshot": schema}
    (told,) = problems(present, releases())
    assert (told.where, told.rule) == ("turnlog.v1.TokenSnapshot.delta_ids", CompatibilityRule.written_too_soon)
    assert "Packed" in told.what
    assert problems(present, releases(), unwritten={"Packed"}) == []


def test_a_record_that_was_released_stays() -> None:
    present = {name: schema for name, schema in PRESENT.items() if name != "EngineGone"}
    (problem,) = problems(present, releases())
    assert (problem.where, problem.rule) == ("EngineGone", CompatibilityRule.record_removed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the released folder."""
    copied = tmp_path / "released"
    shutil.copytree(cutting.FOLDER, copied)
    return copied


def test_every_earlier_release_counts_not_only_the_last(folder: Path) -> None:
    """A field was dropped in one release; coming back with another type it can be read after that one alone."""
    first, last = releases(folder)[0], folder / "v90"
    last.mkdir()
    schema = first.schema("EngineGone")
    schema["fields"] = [member for member in schema["fields"] if member["name"] != "cause"]
    (last / "EngineGone.avsc").write_text(json.dumps(schema))
    again = {**schema, "fields": [*schema["fields"], {"name": "cause", "type": "long", "default": 0}]}
    past = releases(folder)
    assert problems({"EngineGone": again}, past[-1:]) == []
    found = problems({**PRESENT, "EngineGone": again}, past)
    assert [(problem.where, problem.rule) for problem in found] == [
        ("turnlog.v1.EngineGone.cause", CompatibilityRule.type_changed)
    ]


def test_releases_stand_in_the_order_of_their_numbers(folder: Path) -> None:
    for number in (11, 9):
        (folder / f"v{number}").mkdir()
    names = [release.name for release in releases(folder)]
    assert names[0] == "v1"
    assert names[-2:] == ["v9", "v11"]


@pytest.mark.parametrize("change", ["edited", "gone", "added"])
def test_a_file_of_a_release_never_changes(folder: Path, change: str) -> None:
    path = folder / "v1" / ("Stranger.avsc" if change == "added" else "EngineGone.avsc")
    if change == "gone":
        path.unlink()
    else:
        path.write_text('{"type": "record", "name": "EngineGone", "fields": []}')
    (problem,) = altered_files(releases(folder)[0])
    assert (problem.where, problem.rule) == (f"v1/{path.name}", CompatibilityRule.release_altered)


def test_golden_bytes_that_no_longer_say_what_they_said_are_told(folder: Path) -> None:
    for name, was, now in (("EngineGone", b"cause", b"CAUSE"), ("GroupClosed", b"reason", b"\xffeason")):
        path = folder / "v1" / f"{name}.bin"
        path.write_bytes(path.read_bytes().replace(was, now))
    found = [
        problem for problem in cutting.check(releases(folder)) if problem.rule is CompatibilityRule.golden_unreadable
    ]
    assert [problem.where for problem in found] == ["v1/EngineGone.bin", "v1/GroupClosed.bin"]
    assert "another record" in found[0].what
    assert "Avro body is broken" in found[1].what


def test_a_release_is_what_has_changed_since_the_last_and_is_cut_once(folder: Path) -> None:
    last = len(releases(folder))
    (folder / "v1" / "EngineGone.avsc").write_text(
        (folder / "v1" / "EngineGone.avsc").read_text().replace("The engine died", "An engine died")
    )
    cutting.write_sums(folder / "v1")
    before = {path: path.read_bytes() for path in (folder / "v1").iterdir()}
    due = changed_records(releases(folder))  # and what has changed since the last release was cut
    assert "EngineGone" in due
    assert cutting.cut(folder) == (f"v{last + 1}", due)
    assert {path: path.read_bytes() for path in (folder / "v1").iterdir()} == before
    past = releases(folder)
    assert past[last].records == sorted(due)
    assert cutting.check(past) == []
    assert history("EngineGone", past)[-1] == PRESENT["EngineGone"]
    assert cutting.cut(folder) == ("", [])


def test_what_breaks_a_rule_is_not_released(folder: Path) -> None:
    (folder / "v1" / "RunConfigured.bin").write_bytes(b"")
    with pytest.raises(cutting.ReleaseRefused, match=r"v1/RunConfigured\.bin.*release_altered"):
        cutting.cut(folder)


def test_the_first_release_holds_every_record(tmp_path: Path) -> None:
    assert cutting.cut(tmp_path) == ("v1", list(ALL))


def test_the_verb_says_what_is_unreleased_and_what_is_broken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schemas", "check"]) == 0
    assert "may follow" in capsys.readouterr().out
    assert cli.main(["schemas", "check", "--against", str(folder)]) == 0
    schema = folder / "v1" / "EngineGone.avsc"
    schema.write_text(
        schema.read_text().replace('"name": "cause",\n      "type": "string"', '"name": "cause",\n      "type": "long"')
    )
    cutting.write_sums(folder / "v1")
    assert cli.main(["schemas", "check", "--against", str(folder)]) == 1
    assert "turnlog.v1.EngineGone.cause: long cannot be read as string (rule type_changed)" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schemas", "check", "--against", str(tmp_path / "nowhere")]) == 2
    assert f"NoReleases: {tmp_path}/nowhere is no folder" in capsys.readouterr().err
