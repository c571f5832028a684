"""The index on the log in memory: killed at any point, in any order of polls, it is the one that the archive gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.memory_log import MemoryLog
from tests.fakes.sessions import GroupName, Shape, whole_group
from tests.unit.consumers.conftest import CODEC, TrainedRun
from turnlog.consumers.index import (
    BadQuestion,
    BusyIndex,
    DamagedIndex,
    IndexBehind,
    LaterIndex,
    NoIndex,
    OtherIndex,
    schema,
)
from turnlog.consumers.index.indexer import build, indexing, opened_writer
from turnlog.consumers.index.reader import Index, SessionRow, connect_read_only
from turnlog.consumers.index.rows import IndexRows
from turnlog.consumers.index.search import SORTS, USUAL, Effort, SessionFilter
from turnlog.infra.archive import ArchiveDamaged
from turnlog.infra.log import Partition
from turnlog.processors.core.fold_versions import FOLD_VERSION
from turnlog.schemas import topics
from turnlog.schemas.events import (
    EngineRegistered,
    Event,
    SandboxSpec,
    SessionStarted,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)


class Killed(BaseException):
    """kill -9, at a statement of SQL."""


def content(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every table but how far it is, rows in order of their places or keys; of the search, which words stand where."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE VIRTUAL TABLE temp.words USING fts5vocab('main', 'search', 'instance')")
    found: dict[str, list[tuple[Any, ...]]] = {}
    for table in (*schema.RECORDED, *schema.MADE):
        if table not in (schema.POSITIONS, schema.ABOUT):
            key = "place" if table.topic else table.key
            found[table.name] = connection.execute(f"SELECT * FROM {table.sql_name} ORDER BY {key}").fetchall()
    found["search"] = connection.execute("SELECT term, doc, offset FROM temp.words ORDER BY 1, 2, 3").fetchall()
    connection.close()
    return found


async def noisy_run(seed: int, groups: int = 4) -> TrainedRun:
    """A trained run of unlucky sessions, with poison, repeats and aborted transactions on its topics."""
    run, rng = TrainedRun(), random.Random(seed)
    await run.bad_days(seed, groups=groups)
    await run.steps()
    await run.append(
        told(session) for session in await run.read(topics.SESSIONS) if isinstance(session, SessionStarted)
    )
    await run.append(each for session in await run.read(topics.SESSIONS) for each in called(session, rng))
    log = MemoryLog(run.broker)
    async with log.appender() as appender, log.transactor("noise") as transactor:
        for place in sorted(run.broker.logs):
            records, _ = run.broker.read(place, 0, 10**6)
            for record in rng.sample(records, min(2, len(records))):
                await appender.append(place.topic, record.key, record.value, partition=place.number)
                await transactor.begin()
                await transactor.send(place.topic, place.number, record.key, record.value)
                await (transactor.commit if rng.random() < 0.5 else transactor.abort)()
            await appender.append(place.topic, b"poison", b"\x00poison", partition=place.number)
    return run


def told(session: SessionStarted) -> EngineRegistered:
    """Of an engine, for its topic."""
    return EngineRegistered(
        event_id=f"engine-{session.session_id}", run_id="run", engine_id="engine-0", url="http://engine",
        state="serving", version=0, model="policy",
    )  # fmt: skip


def called(session: Event, rng: random.Random) -> Iterator[Event]:
    """A tool call of a session that starts: asked for, now and then cancelled, answered twice."""
    if not isinstance(session, SessionStarted):
        return
    about = {name: getattr(session, name) for name in ("run_id", "group_id", "session_id", "floor", "rollout_id")}
    call = f"call-{session.session_id}"
    yield ToolCallRequested(
        event_id=f"{call}-asked", **about, call_id=call, call_seq=0, tool="python", arguments=b'{"code": "1"}',
        sandbox=SandboxSpec(), workspace=None, deadline_s=9.0,
    )  # fmt: skip
    if rng.random() < 0.3:
        yield ToolCallCancelled(event_id=f"{call}-cancelled", **about, call_id=call, reason="late")
    for attempt, status in enumerate((ToolStatus.tool_error, ToolStatus.ok), start=1):
        yield ToolCallStarted(event_id=f"{call}-{attempt}", **about, call_id=call, attempt=attempt, worker="w")
        yield ToolCallCompleted(
            event_id=f"{call}-answer-{attempt}", **about, call_id=call, call_seq=0, status=status, reason="",
            exit_code=attempt, output=f"Traceback \x1b[31m of attempt {attempt}".encode(), full_output=None,
            duration_s=1.0, queue_s=0.1, workspace=None, attempt=attempt, worker="w", cached=False,
        )  # fmt: skip


async def index_with_deaths(run: TrainedRun, path: Path, rng: random.Random, deaths: int, poll: int) -> None:
    """Index by processes of which each dies within a transaction, but the last."""
    for number in range(deaths + 1):
        log = MemoryLog(run.broker, order=random.Random(rng.random()))
        with contextlib.suppress(Killed):
            async with indexing(run.role("index", log), path, FOLD_VERSION, poll_records=poll) as indexer:
                if number < deaths:
                    indexer.writer.sql = Mortal(indexer.writer.sql, rng.randrange(1, 80))  # type: ignore[assignment]
                await indexer.catch_up()


class Mortal:
    """A connection whose process dies before the n-th statement: nothing is rolled back by hand."""

    def __init__(self, connection: sqlite3.Connection, left: int) -> None:
        self._connection = connection
        self._left = left

    def __getattr__(self, name: str) -> Any:
        if name.startswith("execute"):
            self._left -= 1
            if self._left < 0:
                raise Killed
        return getattr(self._connection, name)


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000), deaths=st.integers(0, 6), poll=st.sampled_from([1, 7, 60, 2000]))
async def test_an_index_that_was_killed_is_the_one_that_the_archive_gives(
    tmp_path_factory: pytest.TempPathFactory, seed: int, deaths: int, poll: int
) -> None:
    run, folder = await noisy_run(seed), tmp_path_factory.mktemp("index")
    await index_with_deaths(run, folder / "live.sqlite", random.Random(seed), deaths, poll)
    await run.archive()
    await build(await run.archived(), folder / "archive.sqlite")
    live, archived = content(folder / "live.sqlite"), content(folder / "archive.sqlite")
    for table, rows in archived.items():
        assert live[table] == rows, table
    assert all(archived[name] for name in ("turns", "sessions", "groups", "session_events", "tool_results", "search"))


async def indexed(run: TrainedRun, path: Path) -> None:
    """Everything that is on the topics."""
    await build(run.role("index"), path)


async def test_a_session_shows_its_turns_calls_samples_and_the_step_that_trained_it(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=4)
    await run.steps()
    await indexed(run, path)
    with Index.open(path) as index:
        page = index.sessions(SessionFilter(fate="trained"))
        view = index.session(page.rows[0].session_id)
        group = index.group(page.rows[0].group_id)
        series, _ = index.series()
    assert len(page.rows) == 8
    assert view is not None
    assert view.events[0]["kind"] == "SessionStarted"
    assert len(view.turns) == len(view.snapshots) == view.row.turns == 2
    assert view.tree is not None
    assert sum(row["trained_tokens"] for row in view.batch_rows) == view.row.trained_tokens > 0
    assert {row["step"] for row in view.batch_rows} <= {row["step"] for row in series}
    assert group is not None
    assert {row.session_id for row in group.sessions} >= {view.row.session_id}
    assert group.row["status"] == "trained"
    (topic, number), offset = schema.standing(view.turns[0]["place"])
    assert (topic, number, offset) == tuple(view.turns[0][name] for name in ("topic", "partition", "offset"))


@pytest.mark.parametrize("sort", ["started_ms", "reward", "output_tokens", "finished_ms"])
@pytest.mark.parametrize("descending", [True, False])
async def test_pages_give_every_session_once_in_order(tmp_path: Path, sort: str, *, descending: bool) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.bad_days(3, groups=8)
    await indexed(run, path)
    found, after = list[SessionRow](), None
    with Index.open(path) as index:
        while True:
            page = index.sessions(sort=sort, descending=descending, after=after, limit=3)
            found += page.rows
            after = page.after
            if after is None:
                break
        whole = index.sessions(sort=sort, descending=descending, limit=1000)
    assert found == list(whole.rows)
    values = [getattr(row, sort) for row in found]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=descending)
    assert values == known + [None] * (len(values) - len(known))
    assert len({row.session_id for row in found}) == len(found) > 9


@pytest.mark.parametrize("effort", [USUAL, Effort(sorted=0)], ids=["sorted", "walked"])
@pytest.mark.parametrize("sort", ["started_ms", "reward"])
async def test_a_range_of_versions_passes_those_that_no_other_version_sampled_for(
    tmp_path: Path, sort: str, effort: Effort
) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.bad_days(3, groups=8)
    await indexed(run, path)
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute("UPDATE sessions SET version_min = started_ms % 4")
        file.execute("UPDATE sessions SET version_max = version_min + turns % 2")
    with Index.open(path, effort=effort) as index:
        every = index.sessions(sort=sort, limit=1000).rows
        known = [(row.version_min, row.version_max) for row in every]
        top = max(high for _, high in known if high is not None)
        assert top > 0
        for low, high in [(0, 0), (0, top), (1, None), (None, top), (None, 0), (top + 1, None)]:
            page = index.sessions(SessionFilter(min_version=low, max_version=high), sort=sort, limit=1000)
            assert page.rows == [
                row
                for row, (oldest, newest) in zip(every, known, strict=True)
                if (low is None or (oldest is not None and oldest >= low))
                and (high is None or (newest is not None and newest <= high))
            ]


async def test_a_cursor_of_another_order_and_an_unknown_sort_are_bad_questions(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=2)
    await indexed(run, path)
    with Index.open(path) as index:
        after = index.sessions(limit=1).after
        for question in ({"sort": "text"}, {"after": after, "sort": "reward"}, {"after": "garbage"}):
            with pytest.raises(BadQuestion):
                index.sessions(**question)  # type: ignore[arg-type]
        with pytest.raises(BadQuestion, match="text"):
            index.sessions(SessionFilter(text='"open'))


async def test_words_that_a_tool_said_find_their_sessions_and_the_first_answer_counts(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.configure()
    await run.good_groups(groups=2)
    starts = [event for event in await run.read(topics.SESSIONS) if isinstance(event, SessionStarted)]
    await run.append(called(starts[0], random.Random(0)))
    await indexed(run, path)
    with Index.open(path) as index:
        found = index.sessions(SessionFilter(text="traceback", failed_calls=True))
        assert [row.session_id for row in found.rows] == [starts[0].session_id]
        view = index.session(starts[0].session_id)
        assert index.sessions(SessionFilter(text="nowhere")).rows == []
    assert view is not None
    assert [(call["status"], call["exit_code"]) for call in view.calls] == [("tool_error", 1)]


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], dict[str, set[str]]]:
    """An index of sessions of every kind; its sessions; of some words the sessions that say them."""
    path, rng = tmp_path_factory.mktemp("index") / "index.sqlite", random.Random(8)

    async def tell() -> None:
        await indexed(await noisy_run(8, groups=12), path)

    asyncio.run(tell())
    said: dict[str, set[str]] = {}
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        for (name,) in file.execute("SELECT session_id FROM sessions").fetchall():
            file.execute(
                "UPDATE sessions SET recipe = ?, fate = ?, purpose = ?, reward = ?, version_min = ?, version_max = ?, "
                "turns = ?, failed_calls = ? WHERE session_id = ?",
                (*(rng.choice("ab") for _ in range(3)), rng.choice([None, 0.0, 0.5, 1.0]), *rng.choice(VERSIONS),
                 rng.randrange(3), rng.randrange(2), name),
            )  # fmt: skip
        file.row_factory = sqlite3.Row
        every = [dict(row) for row in file.execute("SELECT * FROM sessions")]
        for word in WORDS:
            places = file.execute("SELECT rowid FROM search WHERE search MATCH ?", (word,)).fetchall()
            said[word] = {
                name
                for table in ("turns", "tool_results") for (place,) in places
                for (name,) in file.execute(f"SELECT session_id FROM {table} WHERE place = ?", (place,))
            }  # fmt: skip
    return path, every, said


VERSIONS = [(None, None), (0, 0), (0, 2), (1, 1), (1, 3)]
WORDS = ("traceback", "attempt 1", "nobody")
BOUND = st.none() | st.sampled_from([0, 0.5, 1])
FILTERS = st.builds(
    SessionFilter, recipe=st.sampled_from([None, "a", "c"]), fate=st.sampled_from([None, "a"]),
    purpose=st.sampled_from([None, "b"]), min_reward=BOUND, max_reward=BOUND,
    min_version=st.sampled_from([None, 0, 1]), max_version=st.sampled_from([None, 1, 2]), failed_calls=st.booleans(),
    text=st.sampled_from([None, None, *WORDS]),
)  # fmt: skip
EFFORTS = st.builds(Effort, walked=st.integers(1, 30), sorted=st.integers(0, 60), asked=st.integers(0, 30))


def passes(wanted: SessionFilter, row: dict[str, Any], said: dict[str, set[str]]) -> bool:
    """Whether a session does, asked alone."""
    same = all(getattr(wanted, name) in (None, row[name]) for name in ("recipe", "fate", "purpose"))
    within = (
        between(wanted.min_reward, row["reward"], wanted.max_reward)
        and between(wanted.min_version, row["version_min"], None)
        and between(None, row["version_max"], wanted.max_version)
    )
    spoken = wanted.text is None or row["session_id"] in said[wanted.text]
    return same and within and spoken and (not wanted.failed_calls or row["failed_calls"] > 0)


def between(low: float | None, value: float | None, high: float | None) -> bool:
    """What is not known is within no bounds."""
    if value is None:
        return low is None and high is None
    return (low is None or low <= value) and (high is None or value <= high)


@given(wanted=FILTERS, effort=EFFORTS, sort=st.sampled_from(SORTS), descending=st.booleans(), limit=st.integers(1, 9))
def test_however_pages_are_found_they_give_every_session_that_passes_once_in_order(
    varied: tuple[Path, list[dict[str, Any]], dict[str, set[str]]], wanted: SessionFilter, effort: Effort, sort: str,
    descending: bool, limit: int,
) -> None:  # fmt: skip
    path, every, said = varied
    passed = [row for row in every if passes(wanted, row, said)]
    passed.sort(key=lambda row: (row[sort] is not None, row[sort] or 0, row["session_id"]), reverse=descending)
    if not descending:
        passed.sort(key=lambda row: row[sort] is None)
    known = [row["session_id"] for row in passed]
    found, newest, after = list[str](), False, None
    with Index.open(path, effort=effort) as index:
        while True:
            page = index.sessions(wanted, sort=sort, descending=descending, after=after, limit=limit)
            found += [row.session_id for row in page.rows]
            assert len(found) <= len(known), "one was given twice"
            newest, after = newest or page.newest, page.after
            if after is None:
                break
        rewards = index.rewards(wanted)
    assert found == ([name for name in known if name in set(found)] if newest else known)
    assert not newest or wanted.text is not None
    counted = sum(each["sessions"] for each in rewards.bins)
    rewarded = sum(row["reward"] is not None for row in passed)
    assert counted <= rewarded if rewards.sample else counted == rewarded


@pytest.mark.parametrize(
    ("wanted", "sort"),
    [
        (SessionFilter(outcome="expired"), "reward"),
        (SessionFilter(recipe="0"), "reward"),
        (SessionFilter(min_reward=50, max_reward=60), "started_ms"),
        (SessionFilter(outcome="completed", recipe="0", min_reward=50, max_reward=80), "output_tokens"),
        (SessionFilter(text="hello"), "started_ms"),
        (SessionFilter(text="hello"), "reward"),
        (SessionFilter(text="hello", outcome="expired"), "turns"),
        (SessionFilter(text="seldom"), "calls"),
    ],
)
def test_what_a_page_and_a_histogram_take_does_not_grow_with_the_sessions(
    tmp_path: Path, wanted: SessionFilter, sort: str
) -> None:
    effort, steps = Effort(walked=100, sorted=100, asked=100), list[int]()
    for count in (2_000, 4_000):
        path = tmp_path / f"{count}.sqlite"
        many(path, count)
        with contextlib.closing(connect_read_only(path)) as connection:
            connection.row_factory = sqlite3.Row
            looks = itertools.count()
            connection.set_progress_handler(lambda looks=looks: next(looks) < 0, 10)  # type: ignore[misc]
            index = Index(path, connection, effort)
            index.sessions(wanted, sort=sort, limit=9)
            index.rewards(wanted)
            steps.append(next(looks))
    assert steps[1] <= 1.1 * steps[0] + 10, "steps of SQLite's machine, by ten"


def many(path: Path, count: int) -> None:
    """An index of so many sessions, each with a turn that says hello, and each reward once."""
    with opened_writer(path, "run", FOLD_VERSION, CODEC) as writer:
        writer.about(written_ms=0)
    n = f"WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < {count - 1})"
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute(
            "INSERT INTO sessions (session_id, started_ms, finished_ms, recipe, outcome, reward, turns, calls, "
            f"output_tokens) {n} SELECT printf('%05d', i * 7919 % 99991), i, i, i % 3, 'completed', "
            f"i * 2503 % {count}, i % 7, i % 5, i % 11 FROM n"
        )
        file.execute(
            f"INSERT INTO turns_records (place, session_id, epoch, turn_index, counts) {n} "
            f"SELECT {schema.place_of('agent.turns', 0, 0)} + i, printf('%05d', i * 7919 % 99991), i, 0, 1 FROM n"
        )
        file.execute(
            f"INSERT INTO search (rowid, text) {n} SELECT {schema.place_of('agent.turns', 0, 0)} + i, "
            "CASE i % 1000 WHEN 7 THEN 'hello seldom' ELSE 'hello' END FROM n WHERE i < 2000 OR i % 1000 != 7"
        )
        file.execute("INSERT INTO positions VALUES ('agent.turns', 0, ?)", (count,))


async def test_a_record_of_one_session_computes_no_sums_of_the_others_in_its_group(tmp_path: Path) -> None:
    run, size, asked = TrainedRun(), 8, list[str]()
    group = GroupName("run", "g", 0, size)
    await run.append(whole_group(group, np.random.default_rng(0), turns=1, shape=Shape()))
    async with indexing(run.role("index"), tmp_path / "index.sqlite", FOLD_VERSION, poll_records=1) as indexer:
        indexer.writer.sql.set_trace_callback(asked.append)
        records = await indexer.catch_up()
    updates = sum(each.startswith("UPDATE sessions") for each in asked)
    assert updates <= 2 * records, "two statements, of the session that a record names"


async def test_one_process_writes_an_index_and_any_number_reads_it(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=2)
    await indexed(run, path)
    with (
        opened_writer(path, "run", FOLD_VERSION, CODEC) as writer,
        Index.open(path) as one,
        Index.open(path) as other,
    ):
        with pytest.raises(BusyIndex), opened_writer(path, "run", FOLD_VERSION, CODEC):
            pass
        with one.snapshot() as before:
            writer.apply(IndexRows(), [], {Partition(topics.RUNS.name, 0): 999})
            assert one.as_of() == before
        assert other.as_of().positions[Partition(topics.RUNS.name, 0)] == 999


async def test_an_index_of_a_later_turnlog_or_another_run_is_refused_and_an_earlier_one_is_built_again(
    tmp_path: Path,
) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=2)
    await indexed(run, path)
    with pytest.raises(OtherIndex, match="'run'"), opened_writer(path, "another", FOLD_VERSION, CODEC):
        pass
    before = content(path)
    for version, wanted in ((schema.SCHEMA_VERSION + 1, LaterIndex), (schema.SCHEMA_VERSION + 10, LaterIndex)):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(wanted):
            await indexed(run, path)
        with pytest.raises(wanted), Index.open(path):
            pass
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = -1")
        connection.execute("DELETE FROM sessions")
        connection.commit()
    await indexed(run, path)
    assert content(path) == before


@pytest.mark.parametrize("version", [0, 1])
def test_a_database_of_somebody_else_is_neither_built_again_nor_written_to(tmp_path: Path, version: int) -> None:
    """Not even where it says a version that an index of an earlier release might have."""
    path = tmp_path / "sales.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE sales (amount)")
        connection.execute(f"PRAGMA user_version = {version}")
        connection.commit()
    with pytest.raises(OtherIndex, match="is not the index of a run"), opened_writer(path, "run", FOLD_VERSION, CODEC):
        pass
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("sales",)]


async def test_an_index_of_another_run_and_an_earlier_release_stays(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=1)
    await indexed(run, path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 1")
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(OtherIndex, match="'run'"), opened_writer(path, "another", FOLD_VERSION, CODEC):
        pass
    assert path.read_bytes() == before


async def test_a_file_that_is_no_index_is_damaged_and_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    with pytest.raises(NoIndex, match="turnlog log index build"), Index.open(path):
        pass
    path.touch()  # as sqlite does before its first table
    with pytest.raises(NoIndex, match="is just being made"), Index.open(path):
        pass
    path.write_bytes(b"no database at all" * 1000)
    with pytest.raises(DamagedIndex), Index.open(path):
        pass
    with pytest.raises(DamagedIndex), opened_writer(path, "run", FOLD_VERSION, CODEC):
        pass


async def test_a_damaged_archive_ends_a_build_and_what_was_read_of_it_stands(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=4)
    await run.archive()
    name = max(name for name in run.objects.named if "topic=agent.turns" in name)
    whole = run.objects.named[name]
    run.objects.named[name] = whole[:-7]
    with pytest.raises(ArchiveDamaged, match=r"agent\.turns"):
        await build(await run.archived(), path)
    run.objects.named[name] = whole
    await build(await run.archived(), path)
    await indexed(run, tmp_path / "topics.sqlite")
    assert content(path) == content(tmp_path / "topics.sqlite")


@pytest.mark.parametrize("by_hand", [True, False])
async def test_pruned_topics_are_read_from_the_archive_first_and_then_go_on(tmp_path: Path, by_hand: bool) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=2)
    await run.archive()
    run.broker.truncate(Partition(topics.TURNS.name, 0), 1)
    run.broker.truncate(Partition(topics.TURNS.name, 1), 1)
    with pytest.raises(IndexBehind, match="--from archive"):
        async with indexing(run.role("index"), path, FOLD_VERSION):
            pytest.fail("nobody has read the first records")
    if by_hand:
        await build(await run.archived(), path)
    await run.good_groups(groups=1, first=7)
    await indexed(run, path)
    with Index.open(path) as index:
        assert index.group("group-7") is not None
        assert index.group("group-0") is not None


async def test_an_index_ahead_of_its_archive_stays_and_one_of_another_log_is_refused(tmp_path: Path) -> None:
    run, path = TrainedRun(), tmp_path / "index.sqlite"
    await run.good_days(groups=2)
    await run.archive()
    await run.good_groups(groups=2, first=7)
    await indexed(run, path)
    before = content(path)
    assert await build(await run.archived(), path) == 0
    assert content(path) == before
    other = TrainedRun()
    await other.configure()
    with pytest.raises(OtherIndex, match="another log"):
        await indexed(other, path)
