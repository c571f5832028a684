"""Typed queries of the index, each answered from one snapshot of the file; pages and commands use them.

    with Index.open(path) as index:
        page = index.sessions(SessionFilter(recipe="calc"), sort="reward", limit=50)
        page.as_of.positions, page.rows[0].session_id

Any number of processes may read while one writes. Not thread-safe: use one Index per thread.
"""

from __future__ import annotations

import base64
import contextlib
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self

import orjson

from turnlog.consumers.index import BadQuestion, LaterIndex, NoIndex, failure, schema
from turnlog.consumers.index.schema import NUMBERED, SCHEMA_VERSION, standing
from turnlog.consumers.index.search import ALL, SORTS, USUAL, Effort, Order, Search, SessionFilter
from turnlog.infra.log import Partition
from turnlog.processors.core.fold.settlement import PASS
from turnlog.processors.core.views.progress import OFF_CHAIN
from turnlog.settings import Settings

CALL_SORTS: Final = ("duration_s", "queue_s")
"""Columns by which answered tool calls can be sorted; each has an index."""
MOST_ROWS: Final = 1000
WHOLE: Final = re.compile("-?[0-9]{1,19}")
Row = Mapping[str, Any]
"""A row of a table or view, by column (docs/index-schema.md)."""


@dataclass(frozen=True, slots=True)
class AsOf:
    """State of the index when it answered: how far it had read."""

    run_id: str
    written_ms: int
    """Time of the last write in milliseconds since 1970."""
    positions: Mapping[Partition, int]
    """First offset of each partition that the index does not hold."""

    def body(self) -> dict[str, Any]:
        """Return the same as a JSON object."""
        places = {f"{place.topic}[{place.number}]": position for place, position in sorted(self.positions.items())}
        return {"run": self.run_id, "written_ms": self.written_ms, "positions": places}


STEPS: Final = 200_000
"""SQLite virtual machine instructions between two checks of the clock. Each check makes the thread wait for other
Python threads."""
INTERRUPTED: Final = "interrupted"
"""Message of SQLite when the time limit interrupts a query."""
UNREADABLE_WORDS: Final = ("fts5", "unterminated string", "no such column", "unknown special query")
"""Phrases in SQLite's message about a search text that FTS5 cannot parse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A session as a row of table `sessions`."""

    session_id: str
    group_id: str
    rollout_id: str | None
    rollout_index: int | None
    attempt: int | None
    task_id: str | None
    recipe: str | None
    purpose: str | None
    agent: str | None
    model: str | None
    environment: str | None
    epochs: int | None
    started_ms: int
    finished_ms: int | None
    outcome: str | None
    reason: str | None
    final: int | None
    settled: int
    reward: float | None
    components: str | None
    verifier: str | None
    verifier_failure: str | None
    erased_ms: int | None
    erased_by: str | None
    turns: int
    calls: int
    failed_calls: int
    output_tokens: int
    context_tokens: int
    version_min: int | None
    version_max: int | None
    advantage: float | None
    excluded: str | None
    trained_tokens: int
    batch_index: int | None
    fate: str


@dataclass(frozen=True, slots=True)
class SessionPage:
    """A page of sessions, in order."""

    rows: Sequence[SessionRow]
    after: str | None
    """Cursor of the next page; None at the end."""
    as_of: AsOf
    newest: bool = False
    """True if too many records contain the words: then only sessions of the newest such records are found."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """A histogram of rewards."""

    bins: Sequence[Row]
    """Rows with least, most and sessions, for each bin that is not empty."""
    as_of: AsOf
    sample: bool
    """True if only some of the sessions that pass were counted."""


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session with all that the index holds of it. Each row names the position of its record."""

    row: SessionRow
    events: Sequence[Row]
    """Events of agent.sessions in order, without `value`."""
    turns: Sequence[Row]
    """Turns in log order."""
    snapshots: Sequence[Row]
    calls: Sequence[Row]
    """Rows of view tool_calls, by call_seq."""
    tree: Row | None
    samples: Sequence[Row]
    batch_rows: Sequence[Row]
    """Rows of batches, with the effective step if there is one."""
    drops: Sequence[Row]
    score: Row | None
    """Score of its group."""
    letters: Sequence[Row]
    """Dead letters of its group."""
    as_of: AsOf


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group with its score, sessions and events."""

    row: Row
    score: Row | None
    sessions: Sequence[SessionRow]
    drops: Sequence[Row]
    events: Sequence[Row]
    as_of: AsOf


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch, or a rollout batch that left no batch, with its rows and its step."""

    row: Row
    rows: Sequence[Row]
    drops: Sequence[Row]
    step: Row | None
    as_of: AsOf


def path_of(settings: Settings) -> Path:
    """Return the path of the run's index."""
    return Path(settings.index.path or Path(settings.run.directory) / "index.sqlite")


def unread(settings: Settings, places: Sequence[Partition]) -> dict[Partition, int]:
    """Return the first offset of each indexed partition that the run's indexer has not read. Return {} if the run has
    no indexer, or this machine has no index file of it. Raises DamagedIndex."""
    if settings.index.enabled or settings.dashboard.enabled:
        with contextlib.suppress(NoIndex, LaterIndex), Index.open(path_of(settings)) as index:
            read, topics = index.as_of().positions, {topic.name for topic in NUMBERED}
            return {place: read.get(place, 0) for place in places if place.topic in topics}
    return {}


class Index:
    """An index that is open for reading."""

    def __init__(self, path: Path, connection: sqlite3.Connection, effort: Effort = USUAL) -> None:
        """Use `open` instead."""
        self._path, self._sql = path, connection
        self._effort = effort

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: Path, *, within_s: float | None = None, effort: Effort = USUAL) -> Iterator[Self]:
        """Open an index for reading. Queries must be answered within `within_s` seconds from now. Raises NoIndex,
        LaterIndex, DamagedIndex, IndexFull, and BadQuestion if a query takes longer."""
        with contextlib.closing(connect_read_only(path)) as connection:
            connection.row_factory = sqlite3.Row
            if within_s is not None:
                ends = time.monotonic() + within_s
                connection.set_progress_handler(lambda: int(time.monotonic() > ends), STEPS)
            try:
                yield cls(path, connection, effort)
            except sqlite3.OperationalError as error:
                if str(error) != INTERRUPTED:
                    raise
                raise BadQuestion(f"it takes more than {within_s:g} s: ask for less, by a narrower filter") from error

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[AsOf]:
        """Answer all queries within the block from the same moment. Raises DamagedIndex, and BadQuestion for a search
        text that FTS5 cannot parse."""
        if self._sql.in_transaction:
            yield self.as_of()
            return
        self._sql.execute("BEGIN")
        try:
            yield self.as_of()
        except sqlite3.DatabaseError as error:
            if str(error) == INTERRUPTED:
                raise
            if any(word in str(error) for word in UNREADABLE_WORDS):
                raise BadQuestion(f"text: {error}; put what is no plain word in double quotes") from error
            raise failure(self._path, error) from error
        finally:
            self._sql.execute("ROLLBACK")

    def as_of(self) -> AsOf:
        """Return how far the index has read."""
        about = dict(self._sql.execute("SELECT name, value FROM about").fetchall())
        found = self._sql.execute("SELECT topic, partition, position FROM positions")
        positions = {Partition(topic, number): position for topic, number, position in found}
        return AsOf(about["run_id"], int(about.get("written_ms", 0)), positions)

    @property
    def erased(self) -> frozenset[str]:
        """Sessions of which the index holds no text, because they were erased."""
        found = self._sql.execute("SELECT value FROM about WHERE name = 'erased'").fetchone()
        return frozenset(orjson.loads(found[0]) if found else ())

    def rows(self, sql: str, *values: object) -> list[Row]:
        """Run one of turnlog's own SQL statements, and return its rows."""
        return [dict(row) for row in self._sql.execute(sql, values)]

    def row(self, sql: str, *values: object) -> Row | None:
        """Return the first row, or None."""
        return next(iter(self.rows(sql, *values)), None)

    def sessions(
        self, wanted: SessionFilter = ALL, *, sort: str = "started_ms", descending: bool = True,
        after: str | None = None, limit: int = 50,
    ) -> SessionPage:  # fmt: skip
        """Return a page of the sessions that pass; those without a value of `sort` come last. `after` is the cursor of
        the page before. Raises BadQuestion."""
        if sort not in SORTS:
            raise BadQuestion(f"sort {sort!r} is none of {', '.join(SORTS)}")
        limit = max(1, min(limit, MOST_ROWS))
        value, name = _cursor(after, sort, descending)
        order = Order(sort, descending, None if name is None else (value, name))
        with self.snapshot() as as_of:
            found, newest = Search(self._sql, wanted, as_of.positions, self._effort).page(order, limit + 1)
        rows = [_session(row) for row in found[:limit]]
        following = None
        if len(found) > limit:
            last = rows[-1]
            following = _after(sort, descending, getattr(last, sort), last.session_id)
        return SessionPage(rows, following, as_of, newest)

    def session(self, session_id: str) -> SessionView | None:
        """Return a session, or None if the index does not contain it."""
        with self.snapshot() as as_of:
            row = self.row("SELECT * FROM sessions WHERE session_id = ?", session_id)
            if row is None:
                return None
            group, mine = row["group_id"], "WHERE session_id = ?"
            return SessionView(
                _session(row),
                self.rows(
                    f"{EVENTS} {mine} OR (group_id = ? AND session_id IS NULL) ORDER BY place", session_id, group
                ),
                self.rows(f"SELECT * FROM turns {mine} ORDER BY place", session_id),
                self.rows(f"SELECT * FROM snapshots {mine} ORDER BY place", session_id),
                self.rows(f"SELECT * FROM tool_calls {mine} ORDER BY call_seq", session_id),
                self.row(f"SELECT * FROM trees {mine}", session_id),
                self.rows(f"SELECT * FROM samples {mine} ORDER BY segment_index", session_id),
                self.rows(f"{ROWS_OF_BATCHES} WHERE b.session_id = ? ORDER BY b.batch_index, b.row", session_id),
                self.rows(
                    f"{DROPS} JOIN samples s ON s.sample_id = d.sample_id WHERE s.session_id = ?",
                    session_id,
                ),
                self.row("SELECT * FROM group_scores WHERE group_id = ?", group),
                self.rows("SELECT * FROM dead_letters WHERE of_key = ? ORDER BY place", group),
                as_of,
            )

    def group(self, group_id: str) -> GroupView | None:
        """Return a group, or None if the index does not contain it."""
        with self.snapshot() as as_of:
            row = self.row("SELECT * FROM groups WHERE group_id = ?", group_id)
            if row is None:
                return None
            of_group = "SELECT * FROM sessions WHERE group_id = ? ORDER BY rollout_index, attempt, session_id"
            return GroupView(
                row,
                self.row("SELECT * FROM group_scores WHERE group_id = ?", group_id),
                [_session(each) for each in self.rows(of_group, group_id)],
                self.rows("SELECT * FROM batch_drops WHERE group_id = ? ORDER BY batch_index", group_id),
                self.rows(f"{EVENTS} WHERE group_id = ? ORDER BY place", group_id),
                as_of,
            )

    def batch(self, batch_index: int) -> BatchView | None:
        """Return a batch, or None if the index does not contain it."""
        with self.snapshot() as as_of:
            row = self.row("SELECT * FROM batches WHERE batch_index = ?", batch_index)
            if row is None:
                return None
            return BatchView(
                row,
                self.rows("SELECT * FROM batch_rows WHERE batch_index = ? ORDER BY row", batch_index),
                self.rows("SELECT * FROM batch_drops WHERE batch_index = ? ORDER BY sample_id", batch_index),
                self.row("SELECT * FROM steps WHERE batch_index = ?", batch_index),
                as_of,
            )

    def series(self) -> tuple[Sequence[Row], AsOf]:
        """Return the steps in order, each with its batch, for curves over steps."""
        with self.snapshot() as as_of:
            return self.rows(SERIES), as_of

    def engines(self) -> tuple[Sequence[Row], AsOf]:
        """Return the last event of each engine."""
        with self.snapshot() as as_of:
            # The same rule as Fleet (the last report is the status), in SQL: a page does not read every report.
            newest = "SELECT max(place) FROM engine_events GROUP BY engine_id"
            return self.rows(f"SELECT * FROM engine_events WHERE place IN ({newest}) ORDER BY engine_id"), as_of

    def versions(self) -> tuple[Sequence[Row], AsOf]:
        """Return the published weight versions, each with the engines that loaded and rejected it, and the seconds of
        its slowest load."""
        with self.snapshot() as as_of:
            return self.rows(VERSIONS), as_of

    def rewards(self, wanted: SessionFilter = ALL, *, bins: int = 20) -> Rewards:
        """Return a histogram of the rewards of sessions that pass. Raises BadQuestion."""
        with self.snapshot() as as_of:
            found, sample = Search(self._sql, wanted, as_of.positions, self._effort).histogram(bins)
        return Rewards(found, as_of, sample)

    def total(self, wanted: SessionFilter) -> tuple[int, bool]:
        """Return the number of sessions that pass, and whether it is complete. Counting stops at `Effort.sorted`, and
        words that too many records contain are searched for only in the newest ones. Raises BadQuestion."""
        with self.snapshot() as as_of:
            return Search(self._sql, wanted, as_of.positions, self._effort).total()

    def recipes(self) -> tuple[Sequence[Row], AsOf]:
        """Return figures for the settled sessions of each recipe (docs/drawing.md): their number, and the means of
        reward, pass_rate, output_tokens, turns and, over rows of batches, lag. A mean over nothing is None."""
        with self.snapshot() as as_of:
            return self.rows(RECIPES, OFF_CHAIN, PASS), as_of

    def calls(
        self, *, status: str = "", reason: str | None = None, sort: str = "duration_s", after: str | None = None,
        limit: int = 50,
    ) -> tuple[Sequence[Row], str | None, AsOf]:  # fmt: skip
        """Return answered tool calls without their outputs, highest `sort` first, and the cursor of the next page.
        `reason` None lets any reason pass. Raises BadQuestion."""
        if sort not in CALL_SORTS:
            raise BadQuestion(f"sort {sort!r} is none of {', '.join(CALL_SORTS)}")
        value, name = _cursor(after, sort, True)
        place = None if name is None else whole("after", name)
        asked = [("a.status = ?", status)] if status else []
        asked += [("a.reason = ?", reason)] if reason is not None else []
        beyond = [] if place is None else [f"(a.{sort}, a.place) < (?, ?)"]
        where = " AND ".join(["a.counts", *(clause for clause, _ in asked), *beyond])
        with self.snapshot() as as_of:
            found = self.rows(
                f"{ANSWERED} WHERE {where} ORDER BY a.{sort} DESC, a.place DESC LIMIT ?",
                *(asked_for for _, asked_for in asked), *([] if place is None else [value, place]), limit + 1,
            )  # fmt: skip
        rows = found[:limit]
        last = _after(sort, True, rows[-1][sort], str(rows[-1]["place"])) if len(found) > limit else None
        return rows, last, as_of

    def dead_letters(self, *, after: int = -1, limit: int = 50) -> tuple[Sequence[Row], AsOf]:
        """Return dead letters after the place `after`, in order of place."""
        with self.snapshot() as as_of:
            return self.rows("SELECT * FROM dead_letters WHERE place > ? ORDER BY place LIMIT ?", after, limit), as_of


EVENTS = (
    f"SELECT kind, {schema.place_sql('place')}, event_id, time_ms, group_id, session_id, place "
    "FROM session_events_records"
)
ROWS_OF_BATCHES = """SELECT b.*, m.place AS batch_place, m.trainer_version, m.lags, s.step, s.skipped AS step_skipped,
    s.place AS step_place FROM batch_rows b JOIN batches m ON m.batch_index = b.batch_index
    LEFT JOIN steps s ON s.batch_index = b.batch_index"""
ANSWERED = """SELECT a.place, a.call_id, a.session_id, a.time_ms, a.status, a.reason, a.exit_code, a.duration_s,
    a.queue_s, a.attempt, a.worker, a.cached, r.tool FROM tool_results_records a
    LEFT JOIN tool_requests_records r ON r.call_id = a.call_id AND r.counts"""
DROPS = """SELECT d.*, m.place AS batch_place, m.trainer_version, m.lags FROM batch_drops d
    JOIN batches m ON m.batch_index = d.batch_index"""
SERIES = """SELECT s.*, b.trainer_version, b.max_lag, b.masked AS batch_masked, b.rows AS batch_rows, b.prompts,
    (SELECT json_group_object(reason, tokens) FROM (
        SELECT reason, sum(sampled_tokens) AS tokens FROM batch_drops d WHERE d.batch_index = s.batch_index
        GROUP BY reason)) AS dropped
    FROM steps s LEFT JOIN batches b ON b.batch_index = s.batch_index ORDER BY s.batch_index"""
RECIPES = """WITH lags AS (
    SELECT s.recipe, avg(nullif(coalesce(json_extract(m.lags, '$."' || p.version_min || '"'),
        m.trainer_version - p.version_min), ?)) AS lag
    FROM batch_rows b JOIN batches m ON m.batch_index = b.batch_index JOIN samples p ON p.sample_id = b.sample_id
    JOIN sessions s ON s.session_id = b.session_id GROUP BY s.recipe)
    SELECT s.recipe, count(*) AS sessions, avg(s.reward) AS reward, avg(s.reward >= ?) AS pass_rate,
        avg(s.output_tokens) AS output_tokens, avg(s.turns) AS turns, lags.lag
    FROM sessions s LEFT JOIN lags ON lags.recipe = s.recipe
    WHERE s.settled AND s.recipe IS NOT NULL GROUP BY s.recipe ORDER BY s.recipe"""
VERSIONS = """SELECT v.*,
    (SELECT json_group_array(DISTINCT engine_id) FROM engine_events e
     WHERE e.kind = 'EngineWeightsLoaded' AND e.version = v.version) AS loaded,
    (SELECT max((SELECT sum(s.value) FROM json_each(e.seconds) s)) FROM engine_events e
     WHERE e.kind = 'EngineWeightsLoaded' AND e.version = v.version) AS load_s,
    (SELECT json_group_array(json_object('engine', engine_id, 'cause', cause, 'message', message)) FROM engine_events e
     WHERE e.kind = 'EngineWeightsRefused' AND e.refused_version = v.version) AS refused
    FROM versions v ORDER BY v.version"""


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a read-only connection. Raises NoIndex, LaterIndex, DamagedIndex."""
    if not path.exists():
        raise NoIndex(
            f"{path} is not there: `turnlog log index build` makes it, `turnlog role index` keeps it up to date"
        )
    with contextlib.ExitStack() as unusable:
        try:
            connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            unusable.callback(connection.close)
            connection.execute("PRAGMA query_only = ON")
            (found,) = connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise failure(path, error) from error
        if found == 0:
            raise NoIndex(f"{path} is just being made: ask again in a moment")
        if found != SCHEMA_VERSION:
            kind, what = (LaterIndex, "a later") if found > SCHEMA_VERSION else (NoIndex, "an earlier")
            raise kind(f"{path} has schema version {found}, of {what} turnlog; this one has {SCHEMA_VERSION}")
        unusable.pop_all()
    return connection


def whole(name: str, text: str) -> int:
    """Parse parameter `name` as an integer of 64 bits. Raises BadQuestion."""
    if not WHOLE.fullmatch(text) or not -(2**63) <= (found := int(text)) < 2**63:
        raise BadQuestion(f"{name}: {text[:40]!r} is no whole number of 64 bits")
    return found


def where_of(place: int) -> str:
    """Format a place as topic[partition]@offset."""
    (topic, number), offset = standing(place)
    return f"{topic}[{number}]@{offset}"


def _session(row: Row) -> SessionRow:
    return SessionRow(**{each.name: row[each.name] for each in fields(SessionRow)})


def _after(sort: str, descending: bool, value: object, name: str) -> str:
    return base64.urlsafe_b64encode(orjson.dumps([sort, descending, value, name])).decode()


def _cursor(after: str | None, sort: str, descending: bool) -> tuple[Any, str | None]:
    """Parse a cursor: value and id of the last row. Raises BadQuestion."""
    if after is None:
        return None, None
    try:
        of_sort, of_order, value, name = orjson.loads(base64.urlsafe_b64decode(after))
    except (ValueError, TypeError) as error:
        raise BadQuestion(f"after {after!r} is of no page") from error
    fits = isinstance(name, str) and isinstance(value, int | float | None)
    if (of_sort, of_order) != (sort, descending) or not fits:
        raise BadQuestion(f"after {after!r} is of another order")
    if isinstance(value, int):
        whole("after", str(value))
    return value, name


def resolve_id(index: Index, text: str) -> tuple[str, str]:
    """Return ("session" or "group", id) for the one id that begins with `text`. Raises BadQuestion if there is none or
    several."""
    found: list[tuple[str, str]] = []
    for kind, table in (("session", "sessions"), ("group", "groups")):
        sql = f"SELECT {kind}_id AS id FROM {table} WHERE {kind}_id >= ? AND {kind}_id < ? LIMIT 3"
        names = [row["id"] for row in index.rows(sql, text, text + "\U0010ffff")]
        if text in names:
            return kind, text
        found += [(kind, name) for name in names]
    if len(found) != 1:
        what = "nothing" if not found else f"{len(found)} or more: " + ", ".join(name for _, name in found)
        raise BadQuestion(f"{text!r} begins the id of {what}; `turnlog log query` finds ids")
    return found[0]
