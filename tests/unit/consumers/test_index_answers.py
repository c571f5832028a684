"""What is asked of an index: SQL in a process of its own, what became of each token, events as lines."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
from collections import Counter
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from tests.unit.consumers.conftest import CODEC, SETTINGS, TrainedRun
from turnlog.consumers.event_json import as_json
from turnlog.consumers.figures import read_levels
from turnlog.consumers.index import BadQuestion, NoIndex, RecordGone
from turnlog.consumers.index.fate import of_session, tally, tokens
from turnlog.consumers.index.indexer import build, opened_writer
from turnlog.consumers.index.query import QueryLimits, ask, write_parquet
from turnlog.consumers.index.reader import Index, path_of, resolve_id
from turnlog.consumers.index.search import SessionFilter
from turnlog.infra.log import Partition
from turnlog.infra.roles.terminal import Terminal, say, say_json
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas import topics
from turnlog.schemas.events import SessionStarted
from turnlog.settings import IndexSettings
from turnlog.verbs.console import EventFilter, build_turn_tree, line, tail, why_command

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with no record, for questions about SQL itself."""
    path = tmp_path_factory.mktemp("index") / "index.sqlite"
    with opened_writer(path, "run", FOLD_VERSION, CODEC):
        pass
    return path


async def test_a_question_is_answered_as_of_the_positions_of_its_index(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=4)
    await run.steps()
    await build(run.role("index"), path)
    answer = ask(path, "SELECT fate, count(*) AS sessions FROM sessions GROUP BY fate")
    assert (answer.columns, answer.rows, answer.more) == (["fate", "sessions"], [["trained", 8]], False)
    assert answer.as_of["run"] == "run"
    ends = await run.role().log.end_offsets([Partition(topics.TURNS.name, 0)])
    assert answer.as_of["positions"]["agent.turns[0]"] == ends[Partition(topics.TURNS.name, 0)]
    write_parquet(answer, tmp_path / "answer.parquet")
    table = pq.read_table(tmp_path / "answer.parquet")
    assert table.to_pydict() == {"fate": ["trained"], "sessions": [8]}
    assert orjson.loads(table.schema.metadata[b"turnlog.as_of"]) == answer.as_of


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM sessions",
        "INSERT INTO about VALUES ('run_id', 'x')",
        "UPDATE sessions SET reward = 1",
        "CREATE TEMP TABLE t (a)",
        "ATTACH 'other.sqlite' AS other",
        "SELECT load_extension('x')",
        "PRAGMA journal_mode = DELETE",
        "PRAGMA user_version",
        "VACUUM INTO 'copy.sqlite'",
        "SELECT 1; SELECT 2",
        "SELECT * FROM nothing",
        "SELECT",
        "",
    ],
)
def test_a_question_reads_and_does_nothing_else(empty: Path, sql: str) -> None:
    own = {f"{empty.name}{more}" for more in ("", ".lock", "-wal", "-shm")}
    before = empty.read_bytes()
    with pytest.raises(BadQuestion):
        ask(empty, sql)
    assert empty.read_bytes() == before
    assert set(os.listdir(empty.parent)) <= own


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "


@pytest.mark.parametrize(
    ("sql", "bounds", "why"),
    [
        (ENDLESS + "SELECT count(*) FROM n", QueryLimits(timeout_s=0.2), "takes more than 0.2 s"),
        (ENDLESS + "SELECT group_concat(i) FROM (SELECT i FROM n ORDER BY -i)", QueryLimits(memory_mb=16), "MB"),
        ("SELECT zeroblob(100000000)", QueryLimits(), "too big"),
    ],
)
def test_a_question_that_would_not_end_or_fills_the_memory_is_ended(
    empty: Path, sql: str, bounds: QueryLimits, why: str
) -> None:
    with pytest.raises(BadQuestion, match=why):
        ask(empty, sql, bounds)


def test_a_module_that_lies_where_it_is_asked_is_not_run(
    empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("orjson", "rich", "turnlog"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    assert ask(empty, "SELECT 1").rows == [[1]]


def test_more_rows_than_asked_for_are_said_and_a_missing_index_is_named(empty: Path, tmp_path: Path) -> None:
    answer = ask(empty, ENDLESS + "SELECT i FROM n", QueryLimits(rows=3))
    assert (answer.rows, answer.more) == ([[1], [2], [3]], True)
    with pytest.raises(NoIndex, match="turnlog log index build"):
        ask(tmp_path / "none.sqlite", "SELECT 1")


@pytest.mark.parametrize(("seed", "players"), [(0, False), (1, False), (2, False), (3, False), (4, True), (5, True)])
async def test_the_tokens_of_every_session_by_reason_are_its_books(tmp_path: Path, seed: int, players: bool) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.bad_days(seed, groups=12 if players else 6, players=players)
    await run.steps()
    await build(run.role("index"), path)
    levels = await read_levels(run.role())
    assert {one.level for one in levels.imbalances} <= {"batch"}, "whose steps are invented"
    books = levels.levels["session"]
    if players:
        reasons = {reason for one in books.values() for reason in one.masked}
        assert {"untrained_player", *(("discarded_group", "excluded_outcome") if seed == 4 else ())} <= reasons
    found: dict[str, Counter[str]] = {}
    with Index.open(path) as index:
        for row in index.sessions(limit=1000).rows:
            view = index.session(row.session_id)
            assert view is not None
            found[row.session_id] = tally(await tokens(run.role(), index, view))
    assert sum(map(len, found.values())) > 6
    for session, account in books.items():
        counts = found[session]
        assert counts.pop("", 0) == account.trained, session
        assert +counts == +account.masked, session


async def test_tokens_are_read_from_the_archive_when_their_topics_are_pruned(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=2)
    await run.steps()
    await build(run.role("index"), path)
    with Index.open(path) as index:
        (row, *_) = index.sessions(SessionFilter(fate="trained")).rows
        view = index.session(row.session_id)
        assert view is not None
        before = [turn.body() for turn in await tokens(run.role(), index, view)]
        assert all(turn["segment"] is not None and turn["step"] == 1 for turn in before)
        held = dict(run.objects.named)
        await run.archive()
        for topic in (topics.SNAPSHOTS, topics.TURNS, topics.SAMPLES):
            for number in range(2):
                place = Partition(topic.name, number)
                run.broker.truncate(place, run.broker.log_of(place).end)
        assert [turn.body() for turn in await tokens(run.role(), index, view)] == before
        run.objects.named.clear()
        run.objects.named.update(held)
        with pytest.raises(RecordGone, match="pruned"):
            await tokens(run.role(), index, view)


async def test_the_chain_of_a_session_names_every_record_that_decided(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=2)
    await run.steps()
    await build(run.role("index"), path)
    with Index.open(path) as index:
        view = index.session(index.sessions().rows[0].session_id)
        assert view is not None
        kinds = [link.kind for link in of_session(view)]
        kind, name = resolve_id(index, view.row.session_id)
        with pytest.raises(BadQuestion, match="nothing"):
            resolve_id(index, "nobody")
        shown = Terminal(width=200)
        with shown.capture() as said:
            shown.print(build_turn_tree(view, await tokens(run.role(), index, view)))
    assert (kind, name) == ("session", view.row.session_id)
    order = ("SessionStarted", "SessionFinished", "TurnTreeAssembled", "SegmentSample", "GroupScored",
             "SampleBatchFormed", "StepCompleted")  # fmt: skip
    assert [kind for kind in kinds if kind in order] == sorted(
        (kind for kind in kinds if kind in order), key=order.index
    )
    assert set(order) <= set(kinds)
    assert "trained)" in said.get()


@pytest.mark.parametrize("kind", ["session", "group"])
async def test_why_tells_the_records_that_decided_as_lines_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    settings = dataclasses.replace(SETTINGS, index=IndexSettings(path=str(tmp_path / "index.sqlite")))
    run = TrainedRun(settings)
    await run.bad_days(3, groups=4)
    await run.steps()
    await build(run.role("index"), path_of(settings))
    with Index.open(path_of(settings)) as index:
        trained = f"SELECT sessions.{kind}_id AS id FROM batch_rows JOIN sessions USING (session_id) LIMIT 1"
        name = index.rows(trained)[0]["id"]
    said = list[str]()
    for whole in (False, True):
        assert why_command(settings, argparse.Namespace(about=name[:20], json=whole, source="topics")) == 0
        said.append(capsys.readouterr().out)
    told = orjson.loads(said[1])
    kinds = [record["kind"] for record in told["records"]]
    assert {"GroupScored", "SampleBatchFormed"} <= set(kinds)
    assert kinds.index("GroupScored") < kinds.index("SampleBatchFormed")
    assert told["about"].startswith(f"{kind} {name}: ")
    head, *lines = said[0].splitlines()
    assert (head, len(lines)) == (told["about"], len(kinds))
    assert all(record["at"] in line for record, line in zip(told["records"], lines, strict=True))


async def test_a_tail_shows_what_passes_one_line_each_and_no_escape_reaches_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = TrainedRun()
    await run.good_days(groups=2)
    wanted = EventFilter(group="group-1", kinds=frozenset({"SessionStarted", "GroupScored"}))
    found = [each async for each in tail(run.role(), wanted, since_start=True, until_end=True)]
    assert {event.group_id for _, event in found} == {"group-1"}
    assert {type(event).__name__ for _, event in found} == wanted.kinds
    assert all("\n" not in line(*each) for each in found)
    assert [type(event).__name__ for _, event in found][-1] == "GroupScored"
    record, event = found[0]
    assert isinstance(event, SessionStarted)
    planted = dataclasses.replace(event, task_id="t\x1b[2J\u202e\n")
    say(line(record, planted))
    say_json(as_json(record, planted), indent=None)
    shown = capsys.readouterr().out
    assert all(each.isprintable() for each in shown.splitlines())
    told = orjson.loads(shown.splitlines()[1])
    assert (told["topic"], told["offset"], told["event"]["task_id"]) == (record.topic, record.offset, planted.task_id)


async def test_ten_questions_are_answered(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.bad_days(3, groups=6)
    await run.steps()
    (first,) = await run.read(topics.WEIGHTS)
    await run.append([dataclasses.replace(first, event_id="v1", version=1, batch_index=0)])
    await build(run.role("index"), path)
    spec = importlib.util.spec_from_file_location("ten_questions", ROOT / "examples/ten_questions.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.answers(path)
    assert len(found) == 10
    empty = {question for question, answer in found.items() if not answer.rows}
    assert empty <= {question for question in found if "tools" in question or "draws" in question}, empty
