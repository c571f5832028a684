"""`turnlog role index`: the only writer of an index.

Rows and the offsets up to which records were read are committed together, so a killed indexer resumes where its file
ends: nothing is in it twice, nothing is missing.

`ControlStreamFold` folds what became of sessions and groups from the rows of agent.sessions, as it does in the
assembler and in replay. Sums over several topics are computed again from the rows whenever one of them changes. So the
tables are a function of the records, in whatever order partitions are read, and an index of the archive is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import orjson
from prometheus_client import Counter

from turnlog import __version__
from turnlog.consumers.index import BusyIndex, IndexBehind, LaterIndex, OtherIndex, failure, schema
from turnlog.consumers.index.flags import NO_FLAGS, FlagRules, refresh_flags
from turnlog.consumers.index.reader import path_of
from turnlog.consumers.index.rows import IndexRows, Values, as_json, origin_row
from turnlog.consumers.index.schema import SCHEMA_VERSION, place_of, standing
from turnlog.consumers.replay.source import recorded_run
from turnlog.infra.archive import ArchiveLog, NoArchive
from turnlog.infra.history import archive_role
from turnlog.infra.log import Partition, Reader, Record
from turnlog.infra.roles.loop import repeat
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured, load_configuration
from turnlog.infra.run_folder import lock_file
from turnlog.infra.session_keys import SessionKeys
from turnlog.processors.core.books import counting_steps
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.spine import ControlStreamFold
from turnlog.processors.core.fold.unit import DEFECTS, RefusedRecord, check_place
from turnlog.processors.core.fold_versions import FoldVersion, fold_version
from turnlog.schemas import UndecodableRecord
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import (
    BatchSkipped,
    Event,
    RewardAssigned,
    RewardFailed,
    SampleBatchFormed,
    SessionErased,
    SessionFinished,
    SessionStarted,
)
from turnlog.schemas.topics import SESSIONS

log = logging.getLogger(__name__)
Result = TypeVar("Result")
READ_S, WRITE_S = (STAGE_S.labels("index", stage) for stage in ("read", "write"))
INDEXED = Counter("turnlog_indexed_records", "Records in the index")
POLL_RECORDS = 2000
HELD_GROUPS = 128
"""Maximum number of group folds cached in memory. Other groups are folded again from their rows when a record
arrives."""


@dataclass(slots=True)
class _Group:
    """The fold of one group, and facts of its records that the fold does not store."""

    group_id: str
    spine: ControlStreamFold
    started: dict[str, int] = field(default_factory=dict)
    """Session -> time of its effective start."""
    finished: dict[str, int] = field(default_factory=dict)
    judged: dict[str, RewardAssigned | RewardFailed] = field(default_factory=dict)
    erased: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Session -> time of its erasure, and who erased it."""

    def fold(self, offset: int, time_ms: int, event: Event) -> None:
        """Fold a record. A record that the assembler would dead-letter counts as rejected."""
        with contextlib.suppress(FoldError):
            self.spine.fold(offset, event)
        session = self.spine.sessions.get(getattr(event, "session_id", ""))
        if session is None:
            return
        match event:
            case SessionStarted() if session.started is not None:
                self.started.setdefault(event.session_id, time_ms)
            case SessionFinished() if session.finish is not None:
                self.finished.setdefault(event.session_id, time_ms)
            case RewardAssigned() | RewardFailed() if session.verdict is not None:
                self.judged.setdefault(event.session_id, event)
            case SessionErased():
                self.erased.setdefault(event.session_id, (time_ms, event.by))


class IndexWriter:
    """Writer of one index file. Not thread-safe."""

    def __init__(
        self, path: Path, connection: sqlite3.Connection, codec: Codec, version: FoldVersion, rules: FlagRules
    ) -> None:
        """Use `opened_writer` instead."""
        self._rules = rules
        self._path, self.sql = path, connection
        self._codec = codec
        self._version = version
        self._groups: dict[str, _Group] = {}

    def positions(self) -> dict[Partition, int]:
        """Return the first offset of each partition that is not in the index."""
        found = self.sql.execute("SELECT topic, partition, position FROM positions")
        return {Partition(topic, number): position for topic, number, position in found}

    def apply(
        self, rows: IndexRows, events: Sequence[tuple[Record, Event]], positions: Mapping[Partition, int]
    ) -> None:
        """Add rows and the offsets reached, in one transaction. `events` are the records that the rows are made of.
        Raises DamagedIndex, IndexFull."""
        try:
            self.sql.execute("BEGIN IMMEDIATE")
            self._insert(rows)
            folded = self._fold([(record, event) for record, event in events if record.topic == SESSIONS.name], rows)
            self._refresh(rows, folded)
            self.sql.executemany(
                "INSERT OR REPLACE INTO positions VALUES (?, ?, ?)",
                [(*place, position) for place, position in positions.items()],
            )
            self.about(written_ms=time.time_ns() // 1_000_000)
            self.sql.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            self._roll_back()
            raise failure(self._path, error) from error
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        self._groups.clear()
        if self.sql.in_transaction:
            self.sql.execute("ROLLBACK")

    def note_erased(self, sessions: Set[str]) -> None:
        """Store which sessions are erased, so that nothing more of them is indexed. Raises _HoldsErased if the file has
        rows of one that was not when they were written."""
        found = self.sql.execute("SELECT value FROM about WHERE name = 'erased'").fetchone()
        before = orjson.loads(found[0]) if found else []
        if new := sorted(sessions - set(before)):
            held = self.sql.execute(
                "SELECT count(*) FROM sessions WHERE session_id IN (SELECT value FROM json_each(?))", (as_json(new),)
            )
            if held.fetchone()[0]:
                raise _HoldsErased(f"{self._path} holds texts of sessions that were erased: {', '.join(new)}")
            self.about(erased=as_json(sorted(sessions)))

    def about(self, **values: object) -> None:
        """Store facts about the file in table `about`."""
        self.sql.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", [(k, str(v)) for k, v in values.items()])

    def _insert(self, rows: IndexRows) -> None:
        for table, values in rows.inserts.items():
            self.sql.executemany(table.insert(), values)
        self.sql.executemany("INSERT INTO search(rowid, text) VALUES (?, ?)", sorted(rows.words))
        self.sql.executemany("INSERT INTO unread VALUES (?, ?, ?, ?, ?, ?)", rows.unread)
        for place, manifest in rows.manifests:
            self._draw(place, manifest)
        for batch in rows.steps:
            self._choose_step(batch)
            of_batch = self.sql.execute("SELECT session_id, group_id FROM batch_rows WHERE batch_index = ?", (batch,))
            rows.sessions.update(of_batch.fetchall())
        self.sql.executemany(STORE_VERSION, [(version,) for version in sorted(rows.stored)])

    def _draw(self, place: int, event: SampleBatchFormed | BatchSkipped) -> None:
        """Insert the rows of a manifest, if it is the effective one."""
        (counts,) = self.sql.execute("SELECT counts FROM batches_records WHERE place = ?", (place,)).fetchone()
        if not counts:
            return
        index, draw = event.batch_index, event.draw_index
        if isinstance(event, SampleBatchFormed):
            self.sql.executemany(
                "INSERT INTO batch_rows VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (index, number, row.sample_id, row.group_id, row.session_id, row.segment_index, row.tokens,
                     row.trained_tokens, row.weight_divisor)
                    for number, row in enumerate(event.samples)
                ],
            )  # fmt: skip
        self.sql.executemany(
            "INSERT OR IGNORE INTO batch_drops VALUES (?, ?, ?, ?, ?, ?)",
            [(index, draw, row.sample_id, row.group_id, row.reason, row.sampled_tokens) for row in event.dropped],
        )
        self.sql.executemany(
            "INSERT OR IGNORE INTO batch_groups VALUES (?, ?, ?)", [(index, group, draw) for group in event.groups]
        )

    def _choose_step(self, batch: int) -> None:
        """Mark the effective step of a batch."""
        found = self.sql.execute(
            "SELECT place, batch_index, incarnation FROM steps_records WHERE batch_index = ? ORDER BY place", (batch,)
        )
        chosen = counting_steps(_Step(*row) for row in found)[batch]
        self.sql.execute("UPDATE steps_records SET counts = (place = ?) WHERE batch_index = ?", (chosen.place, batch))

    def _fold(self, events: Sequence[tuple[Record, Event]], rows: IndexRows) -> set[str]:
        """Fold records of agent.sessions whose rows are inserted already. Write the state of their groups, and return
        the groups."""
        touched: dict[str, _Group] = {}
        for record, event in events:
            group = touched.get(event.group_id)
            if group is None:
                before = place_of(record.topic, record.partition, record.offset)
                group = touched[event.group_id] = self._group(event.group_id, before)
            self._fold_one(group, record, event, rows)
        folded = {event.session_id for _, event in events if hasattr(event, "session_id")}
        sessions = [(group, name) for group in touched.values() for name in folded & group.spine.sessions.keys()]
        self.sql.executemany(PUT_SESSION, [_session_row(*each) for each in sessions])
        starts = (group.spine.sessions[name].started for group, name in sessions)
        self.sql.executemany(PUT_ORIGIN, [origin_row(started) for started in starts if started is not None])
        self.sql.executemany(PUT_GROUP, [_group_row(group) for group in touched.values()])
        while len(self._groups) > HELD_GROUPS:
            del self._groups[next(iter(self._groups))]
        return set(touched)

    def _fold_one(self, group: _Group, record: Record, event: Event, rows: IndexRows) -> None:
        try:
            group.fold(record.offset, record.timestamp_ms, event)
        except DEFECTS as defect:  # the assembler would stop here until an operator skips the record
            values = (record.topic, record.partition, record.offset, record.timestamp_ms)
            self.sql.execute(
                "INSERT OR REPLACE INTO unread VALUES (?, ?, ?, ?, ?, ?)", (*values, type(defect).__name__, str(defect))
            )

    def _group(self, group_id: str, before: int) -> _Group:
        """Return the fold of a group up to a place, from the cache or from its rows."""
        group = self._groups.pop(group_id, None)
        if group is None:
            group = _Group(group_id, ControlStreamFold(self._version))
            found = self.sql.execute(
                "SELECT place, time_ms, value FROM session_events_records WHERE group_id = ? AND place < ? "
                "ORDER BY place",
                (group_id, before),
            )
            for place, time_ms, value in found.fetchall():
                with contextlib.suppress(*DEFECTS):  # listed in `unread` when it arrived
                    group.fold(standing(place)[1], time_ms, self._codec.decode(value))
        self._groups[group_id] = group
        return group

    def _refresh(self, rows: IndexRows, folded: set[str]) -> None:
        """Compute the sums again for every session and group that a record refers to."""
        sql, groups = self.sql, sorted({*rows.sessions.values(), *rows.groups, *folded})
        sql.executemany(MENTION_SESSION, [(session, group) for session, group in rows.sessions.items()])
        sql.executemany(MENTION_GROUP, [(group,) for group in groups])
        sessions = set(rows.sessions)
        for group in rows.groups:
            sessions |= {
                name for (name,) in sql.execute("SELECT session_id FROM sessions WHERE group_id = ?", (group,))
            }
        touched = [(name,) for name in sorted(sessions)]
        for statement in REFRESH_SESSION:
            sql.executemany(statement, touched)
        sql.executemany(REFRESH_GROUP, [(group,) for group in groups])
        refresh_flags(sql, self._codec, sorted(rows.heard), self._rules)


@dataclass(frozen=True, slots=True)
class _Step:
    place: int
    batch_index: int
    incarnation: int


def _session_row(group: _Group, name: str) -> Values:
    session, judged = group.spine.sessions[name], group.judged.get(name)
    started, finish = session.started, session.finish
    task: Values = (None,) * 10
    if started is not None:
        task = (
            started.rollout_id, started.rollout_index, started.attempt, started.task_id, started.recipe,
            started.purpose.value, f"{started.agent.name}/{started.agent.version}", started.model,
            f"{started.environment.name}/{started.environment.version}", origin_row(started)[0],
        )  # fmt: skip
    ended: Values = (None,) * 3 if finish is None else (finish.outcome.value, finish.reason, finish.final)
    verdict: Values = (None,) * 3
    if judged is not None:
        parts = as_json(judged.components) if isinstance(judged, RewardAssigned) else None
        failure = judged.cause if isinstance(judged, RewardFailed) else None
        verdict = parts, f"{judged.verifier.name}/{judged.verifier.version}", failure
    return (
        name, group.group_id, *task, len(session.epochs), group.started.get(name, 0), group.finished.get(name), *ended,
        session.settled, session.reward, *verdict, *group.erased.get(name, (None, None)),
    )  # fmt: skip


def _group_row(group: _Group) -> Values:
    task, members = group.spine.task, group.spine.members
    about: Values = (None,) * 4 if task is None else (task.task_id, task.recipe, task.purpose.value, task.group_size)
    settled_by = None if members is None else as_json(members)
    return group.group_id, *about, len(group.spine.sessions), settled_by, min(group.started.values(), default=0)


def _put(table: schema.Table, width: int) -> str:
    """Return an SQL statement that inserts the first `width` columns, or overwrites them in an existing row."""
    names = [each.name for each in table.columns[:width]]
    changed = ", ".join(f"{name} = excluded.{name}" for name in names[1:])
    return (
        f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * width)}) "
        f"ON CONFLICT ({table.key}) DO UPDATE SET {changed}"
    )


PUT_SESSION = _put(schema.SESSIONS, 25)
PUT_ORIGIN = f"INSERT OR IGNORE INTO origins VALUES ({', '.join('?' * len(schema.ORIGINS.columns))})"
PUT_GROUP = _put(schema.GROUPS, 8)
MENTION_SESSION = "INSERT OR IGNORE INTO sessions (session_id, group_id, started_ms, settled) VALUES (?, ?, 0, 0)"
MENTION_GROUP = "INSERT OR IGNORE INTO groups (group_id, sessions, started_ms) VALUES (?, 0, 0)"
STORE_VERSION = """UPDATE versions_records AS v
    SET (state, kind, base_version, bytes, files, checkpoint, stored_ms) = (
        s.state, s.kind, s.base_version, s.bytes, s.files, coalesce(s.checkpoint, v.checkpoint), s.time_ms)
    FROM versions_records s WHERE v.version = ? AND v.counts AND v.state = 'announced' AND s.place = (
        SELECT min(place) FROM versions_records WHERE version = v.version AND state != 'announced')"""
OWN_SCORE = """FROM group_scores_records g, json_each(g.rollouts) r WHERE g.group_id = sessions.group_id AND g.counts
    AND json_extract(r.value, '$.session_id') = sessions.session_id"""
REFRESH_SESSION = (
    """UPDATE sessions SET
    (turns, output_tokens, context_tokens, version_min, version_max) = (
        SELECT count(*), coalesce(sum(output_tokens), 0), coalesce(max(prompt_tokens + output_tokens), 0),
            min(version_first), max(version_last)
        FROM turns_records t WHERE t.session_id = sessions.session_id AND t.counts),
    engines = (
        SELECT json_group_array(engine_id) FROM (SELECT DISTINCT engine_id FROM turns_records t
        WHERE t.session_id = sessions.session_id AND t.counts ORDER BY engine_id)),
    (calls, failed_calls) = (
        SELECT count(*), count(CASE WHEN a.status <> 'ok' THEN 1 END) FROM tool_requests_records q
        LEFT JOIN tool_results_records a ON a.call_id = q.call_id AND a.counts
        WHERE q.session_id = sessions.session_id AND q.counts),
    (trained_tokens, batch_index) = (
        SELECT coalesce(sum(trained_tokens), 0), min(batch_index) FROM batch_rows b
        WHERE b.session_id = sessions.session_id),
    (advantage, excluded) = (
        SELECT json_extract(r.value, '$.advantage'), json_extract(r.value, '$.excluded') """
    + OWN_SCORE
    + """)
    WHERE session_id = ?""",
    """UPDATE sessions SET fate = CASE
    WHEN outcome IS NULL THEN 'open'
    WHEN NOT EXISTS (SELECT 1 FROM group_scores_records g WHERE g.group_id = sessions.group_id AND g.counts)
        THEN 'unscored'
    WHEN NOT EXISTS (SELECT 1 """
    + OWN_SCORE
    + """) THEN 'not_member'
    WHEN excluded IS NOT NULL THEN 'excluded'
    WHEN EXISTS (SELECT 1 FROM batch_rows b JOIN steps_records s ON s.batch_index = b.batch_index AND s.counts
        AND NOT s.skipped WHERE b.session_id = sessions.session_id) THEN 'trained'
    WHEN EXISTS (SELECT 1 FROM batch_rows b JOIN steps_records s ON s.batch_index = b.batch_index AND s.counts
        WHERE b.session_id = sessions.session_id) THEN 'step_skipped'
    WHEN batch_index IS NOT NULL THEN 'drawn'
    ELSE (SELECT CASE WHEN g.status <> 'trained' THEN g.status
        WHEN NOT EXISTS (SELECT 1 FROM samples_records s WHERE s.session_id = sessions.session_id) THEN 'masked'
        WHEN EXISTS (SELECT 1 FROM batch_groups d WHERE d.group_id = g.group_id) THEN 'dropped'
        ELSE 'waiting' END
        FROM group_scores_records g WHERE g.group_id = sessions.group_id AND g.counts) END
    WHERE session_id = ?""",
)
REFRESH_GROUP = """UPDATE groups SET
    (status, reason, reward_mean) = (
        SELECT coalesce(max(g.status), CASE WHEN groups.members IS NULL THEN 'open' ELSE 'settled' END), max(g.reason),
            (SELECT avg(json_extract(r.value, '$.reward')) FROM json_each(max(g.rollouts)) r
             WHERE json_extract(r.value, '$.excluded') IS NULL)
        FROM group_scores_records g WHERE g.group_id = groups.group_id AND g.counts),
    draw_index = (SELECT min(d.draw_index) FROM batch_groups d WHERE d.group_id = groups.group_id)
    WHERE group_id = ?"""


@contextlib.contextmanager
def opened_writer(
    path: Path, run_id: str, version: str, codec: Codec, rules: FlagRules = NO_FLAGS
) -> Iterator[IndexWriter]:
    """Open the index at `path` for writing, and create it if needed. `rules` say which sessions are flagged.

    Raises BusyIndex, LaterIndex, OtherIndex, DamagedIndex, IndexFull, UnknownFoldVersion.
    """
    with _write_lock(path), _connected_writer(path, run_id, version, codec, rules) as writer:
        yield writer


@contextlib.contextmanager
def _write_lock(path: Path) -> Iterator[None]:
    """Be the only writer of the index at `path`. Raises BusyIndex."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(Path(f"{path}.lock"), BusyIndex(f"{path} is being written by another indexer")):
        yield


@contextlib.contextmanager
def _connected_writer(path: Path, run_id: str, version: str, codec: Codec, rules: FlagRules) -> Iterator[IndexWriter]:
    """See opened_writer; the lock is held already."""
    with contextlib.closing(_connection(path, run_id)) as connection:
        writer = IndexWriter(path, connection, codec, fold_version(version), rules)
        writer.about(fold_version=version, turnlog=__version__)
        writer.about(detectors=as_json(rules.names), flagged_above=rules.above)
        yield writer


def _remove(path: Path) -> None:
    for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        name.unlink(missing_ok=True)


def _connection(path: Path, run_id: str) -> sqlite3.Connection:
    """Connect to a file with the tables of this release. The index of an earlier release is deleted and built anew."""
    with contextlib.ExitStack() as unusable:
        try:
            connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            unusable.callback(connection.close)
            if _found_version(connection, path) not in (0, SCHEMA_VERSION):
                _check_run(connection, path, run_id)  # never delete another run's index, or a file that is no index
                log.warning("%s has the tables of an earlier release: rebuilding it", path)
                connection.close()
                _remove(path)
                connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                unusable.callback(connection.close)
            _prepare(connection, path, run_id)
        except sqlite3.DatabaseError as error:
            raise failure(path, error) from error
        unusable.pop_all()
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Make the tables of an empty file, and check that those of another are of this run. Raises LaterIndex,
    OtherIndex."""
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "cache_size = -16384", "temp_store = MEMORY"):
        connection.execute(f"PRAGMA {pragma}")
    if _found_version(connection, path) == 0:
        if connection.execute("SELECT name FROM sqlite_master").fetchone():
            _check_run(connection, path, run_id)  # raises: a file with tables but no version is no index
        connection.execute("BEGIN IMMEDIATE")
        for statement in schema.statements():
            connection.execute(statement)
        connection.execute("INSERT INTO about VALUES ('run_id', ?)", (run_id,))
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    _check_run(connection, path, run_id)


def _check_run(connection: sqlite3.Connection, path: Path, run_id: str) -> None:
    """Check that the file is an index of this run. Raises OtherIndex."""
    try:
        found = connection.execute("SELECT value FROM about WHERE name = 'run_id'").fetchone()
    except sqlite3.OperationalError:
        found = None
    if found is None:
        raise OtherIndex(f"{path} is not the index of a run: set [index] path to another file")
    if found != (run_id,):
        raise OtherIndex(f"{path} is of run {found[0]!r}, not of {run_id!r}: give each run its own [index] path")


def _found_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version of the file. Raises LaterIndex."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > SCHEMA_VERSION:
        raise LaterIndex(f"{path} has schema version {found}, this turnlog knows up to {SCHEMA_VERSION}")
    return int(found)


class _HoldsErased(Exception):
    """The index holds texts of sessions that were erased since."""


class Indexer:
    """Reader of topics, or of an archive, into an index file."""

    def __init__(self, role: Role, writer: IndexWriter, reader: Reader, *, poll_records: int = POLL_RECORDS) -> None:
        self._role = role
        self._poll_records = poll_records
        self.writer = writer
        self._reader = reader
        self._at: dict[Partition, int] = {}
        self._ends: dict[Partition, int] = {}
        self._noted: frozenset[str] = frozenset()
        """Erased sessions of which the writer was told."""

    async def open(self) -> None:
        """Position the reader after the records that are indexed. Raises IndexBehind, OtherIndex, LogUnavailable, and
        _HoldsErased."""
        if self._role.events.keys is not None:  # rows of earlier records are decoded without asking the log
            await self._role.events.keys.refresh()
            self._note_erased(self._role.events.keys)
        known = await self._role.log.topics()
        places = [
            Partition(t.name, n) for t in schema.NUMBERED if t.name in known for n in range(known[t.name].partitions)
        ]
        starts, ends = await self._role.log.start_offsets(places), await self._role.log.end_offsets(places)
        indexed = self.writer.positions()
        self._at = {place: indexed.get(place, 0) for place in places}
        if isinstance(self._role.log, ArchiveLog):  # an archive may end before the index does
            self._at = {place: at for place, at in self._at.items() if at < ends[place]}
        for place, at in self._at.items():
            if at < starts[place]:
                raise IndexBehind(
                    f"{place.topic}[{place.number}] begins at {starts[place]}, the index ends at {at}: "
                    "`turnlog log index build --from archive` reads the records between; run it, then continue"
                )
            if at > ends[place]:
                raise OtherIndex(
                    f"{place.topic}[{place.number}] ends at {ends[place]}, the index at {at}: this is another log"
                )
        self._ends = {place: ends[place] for place in self._at}
        self._reader.assign(self._at)

    async def turn(self) -> int:
        """Write one poll of records into the file, and return their number. Raises DamagedIndex, IndexFull, LogError,
        RegistryUnavailable, and _HoldsErased."""
        keys = self._role.events.keys
        if keys is not None:
            if keys.is_due:
                await keys.refresh()
            self._note_erased(keys)  # whoever refreshed them: each record of a new session does
        records = await self._reader.poll(max_records=self._poll_records, timeout_s=0.5)
        rows, events = IndexRows(), list[tuple[Record, Event]]()
        if records:
            with READ_S.time():
                await self._read(records, rows, events)
        positions = {place: self._reader.position(place) for place in self._at}
        moved = {place: at for place, at in positions.items() if at != self._at[place]}
        if moved:
            with WRITE_S.time():
                await asyncio.to_thread(self.writer.apply, rows, events, moved)
            self._at = positions
            INDEXED.inc(len(records))
        return len(records)

    def _note_erased(self, keys: SessionKeys) -> None:
        if (erased := keys.erased) != self._noted:
            self.writer.note_erased(erased)
            self._noted = erased

    async def _read(self, records: list[Record], rows: IndexRows, events: list[tuple[Record, Event]]) -> None:
        for record in records:
            try:
                event = await self._role.events.decode_fast(record)
                check_place(record, event, self._role.settings.run.id)
            except (UndecodableRecord, RefusedRecord) as refusal:
                rows.pass_over(record, refusal)
                continue
            rows.take(record, event)
            events.append((record, event))

    async def catch_up(self) -> int:
        """Read up to the end offsets at the time of `open`, and return the number of records."""
        read = 0
        while any(self._at[place] < end for place, end in self._ends.items()):
            self._role.health.beat()
            read += await self.turn()
        return read


@contextlib.asynccontextmanager
async def indexing(
    role: Role, path: Path, version: str, rules: FlagRules = NO_FLAGS, *, poll_records: int = POLL_RECORDS
) -> AsyncIterator[Indexer]:
    """Open an indexer that reads a role's log into a file. Raises what `opened_writer` and `Indexer.open` raise."""
    with _write_lock(path):
        async with _indexing(role, path, version, rules, poll_records=poll_records) as indexer:
            yield indexer


@contextlib.asynccontextmanager
async def _indexing(
    role: Role, path: Path, version: str, rules: FlagRules, *, poll_records: int = POLL_RECORDS
) -> AsyncIterator[Indexer]:
    """See indexing; the lock is held already."""
    with _connected_writer(path, role.settings.run.id, version, role.events.codec, rules) as writer:
        async with role.log.reader(patient=True) as reader:
            indexer = Indexer(role, writer, reader, poll_records=poll_records)
            await indexer.open()
            yield indexer


async def main(role: Role) -> None:
    """Index until the role stops. Raises IndexFailure, LogError, RegistryUnavailable; the process then ends without a
    commit."""
    run = await load_configuration(role)
    if run is None:
        return
    await _index(role, path_of(role.settings), run, lambda indexer: repeat(role, indexer.turn))


async def build(role: Role, path: Path) -> int:
    """Read up to the present end of the log, and return the number of records. Raises NothingToReplay, and what `main`
    raises."""
    return await _index(role, path, await recorded_run(role), lambda indexer: indexer.catch_up())


async def _index(role: Role, path: Path, run: Configured, work: Callable[[Indexer], Awaitable[Result]]) -> Result:
    """Do `work` with an indexer, and begin again with an empty file when a session of it was erased. Deleting its rows
    would leave texts in free pages and in the search. What the topics lack is read from the archive first. Raises what
    `main` raises."""
    rules, source, archived = FlagRules.of(role.settings, run), role, False
    with _write_lock(path):  # all the time, so that no other indexer gets the file between two attempts
        while True:
            try:
                async with _indexing(source, path, run.fold_version, rules) as indexer:
                    if source is role:
                        return await work(indexer)
                    await indexer.catch_up()
                source, archived = role, True
            except _HoldsErased as erased:
                log.warning("%s: building it anew", erased)
                _remove(path)
                source, archived = role, False
            except IndexBehind as behind:
                if archived or source is not role or isinstance(role.log, ArchiveLog):
                    raise
                try:
                    source = await archive_role(role)
                except NoArchive:
                    raise behind from None
                log.warning("%s: reading the archive first, because the topics are pruned", path)
