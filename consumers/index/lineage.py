"""Origin of a set of weights or a dataset: sessions, tasks, rewards, verifiers, environments and code versions.

The answer comes from the index of the run and, for a fork, from the indexes of the runs before it. Each is attached to
a temporary database, which holds one narrow row per session while its run is counted, and one row per value that was
found. SQLite keeps both on disk, so the memory does not depend on the number of sessions.

A batch belongs to weights if the generation that published them, or one before it, took a step on it. Of several such
steps the one of the latest generation made the weights (core/books.py has the same rule for the whole run).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import orjson

from turnlog.consumers.datasets import DatasetDamaged
from turnlog.consumers.datasets.build import session_rows
from turnlog.consumers.datasets.manifest import DatasetManifest, read_manifest
from turnlog.consumers.index import BadQuestion, IndexFailure, failure
from turnlog.consumers.index.reader import INTERRUPTED, STEPS, AsOf, Index, Row, connect_read_only, path_of
from turnlog.processors.core.methods.estimators import ESTIMATORS
from turnlog.schemas.canonical import canonical_json
from turnlog.settings import Settings

IndexOf = Callable[[str], Path]
"""Path of the index of a run, by its id. The file may be missing."""
NOT_RECORDED: Final = "not recorded"
"""Stands for a fact that the records do not say, because an earlier release wrote them."""
GONE: Final = "not on the log"
"""Stands for every fact of a session of which the index has no SessionStarted."""
CHECKPOINT: Final = re.compile(r"step-(\d+)-i(\d+)")
"""Name of a checkpoint's folder: steps before it, and generation that wrote it."""
MOST_TASKS: Final = 20
"""Number of tasks that an answer lists; the others are counted."""
KINDS: Final = ("source", "verifier", "environment", "agent", "engine", "code")
"""Kinds of facts that an answer lists completely, beside tasks."""
ROLES: Final = (
    "feeder", "gateway", "rewards", "sandbox worker", "weight loader", "assembler", "batcher", "trainer",
)  # fmt: skip
"""Writers of the records whose code versions are known. `rewards` is the runner or, for sessions from outside, the
gateway."""
ALONE: Final = frozenset(each.label for each in ESTIMATORS if not each.is_group_relative)
"""Estimators under which the reward of a session has no part in the advantages of others."""

TABLES: Final = """
CREATE TABLE taken (batch_index INTEGER PRIMARY KEY, place INTEGER, incarnation INTEGER, step INTEGER, skipped INTEGER,
    trained_tokens INTEGER, masked INTEGER, code TEXT);
CREATE TABLE contributions (session_id TEXT PRIMARY KEY, group_id TEXT, tokens INTEGER, task_id TEXT, reward REAL,
    origin TEXT, verifier TEXT, dataset TEXT, engines TEXT, feeder TEXT, gateway TEXT, rewards TEXT, assembler TEXT)
    WITHOUT ROWID;
CREATE TABLE shares (kind TEXT, value TEXT, sessions INTEGER, tokens INTEGER, rewarded INTEGER, reward REAL,
    PRIMARY KEY (kind, value)) WITHOUT ROWID;
CREATE TABLE dataset_rows (run_id TEXT, session_id TEXT, tokens INTEGER, PRIMARY KEY (run_id, session_id))
    WITHOUT ROWID;
"""
TAKE: Final = """INSERT INTO taken SELECT batch_index, place, incarnation, step, skipped, trained_tokens,
    (SELECT coalesce(sum(value), 0) FROM json_each(s.masked)), code FROM log.steps_records s
    WHERE s.batch_index <= ?1 AND s.incarnation <= ?2 AND s.step <= ?3 AND s.place = (
        SELECT o.place FROM log.steps_records o WHERE o.batch_index = s.batch_index AND o.incarnation <= ?2
        ORDER BY o.incarnation DESC, o.place DESC LIMIT 1)"""
TRAINED: Final = """SELECT session_id, min(group_id) AS group_id, sum(trained_tokens) AS tokens FROM log.batch_rows
    WHERE batch_index IN (SELECT batch_index FROM taken WHERE NOT skipped) GROUP BY session_id"""
OF_DATASET: Final = """SELECT d.session_id, s.group_id, d.tokens FROM dataset_rows d
    LEFT JOIN log.sessions s ON s.session_id = d.session_id WHERE d.run_id = :run"""
CONTRIBUTE: Final = """INSERT INTO contributions SELECT c.session_id, c.group_id, c.tokens, s.task_id, s.reward,
    s.origin, s.verifier, r.dataset, s.engines, r.code,
    (SELECT e.code FROM log.session_events_records e WHERE e.session_id = c.session_id AND e.kind = 'SessionStarted'
     ORDER BY e.place LIMIT 1),
    (SELECT e.code FROM log.session_events_records e WHERE e.session_id = c.session_id
     AND e.kind IN ('RewardAssigned', 'RewardFailed') ORDER BY e.place LIMIT 1),
    (SELECT g.code FROM log.group_scores_records g WHERE g.group_id = c.group_id AND g.counts)
    FROM ({found}) c LEFT JOIN log.sessions s ON s.session_id = c.session_id
    LEFT JOIN log.rollouts_records r ON r.rollout_id = s.rollout_id AND r.counts"""
ABSENT: Final = """INSERT INTO contributions (session_id, tokens)
    SELECT session_id, tokens FROM dataset_rows WHERE run_id = :run"""
SUMS: Final = (
    "count(*) AS sessions, sum(tokens) AS tokens, count(reward) AS rewarded, coalesce(sum(reward), 0.0) AS reward"
)
ADD: Final = """ON CONFLICT DO UPDATE SET sessions = sessions + excluded.sessions, tokens = tokens + excluded.tokens,
    rewarded = rewarded + excluded.rewarded, reward = reward + excluded.reward"""
ADD_TASKS: Final = f"""INSERT INTO shares SELECT 'task', json_object('task', CASE WHEN origin IS NULL THEN ?1
    ELSE task_id END), {SUMS} FROM contributions WHERE true GROUP BY origin IS NULL, task_id {ADD}"""
SANDBOX_CODE: Final = f"""SELECT code, {SUMS} FROM (SELECT DISTINCT c.session_id, t.code, c.tokens, c.reward
    FROM contributions c JOIN log.tool_starts_records t ON t.session_id = c.session_id) GROUP BY code"""
BATCH_CODE: Final = """SELECT {code} AS code, count(DISTINCT r.session_id) AS sessions, sum(r.trained_tokens) AS tokens,
    0 AS rewarded, 0.0 AS reward FROM taken k JOIN log.batches_records b ON b.batch_index = k.batch_index AND b.counts
    JOIN log.batch_rows r ON r.batch_index = k.batch_index WHERE NOT k.skipped GROUP BY 1"""
COMPARED: Final = """SELECT count(*) FROM (SELECT DISTINCT group_id FROM contributions) g
    JOIN log.sessions s ON s.group_id = g.group_id WHERE s.advantage IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM contributions c WHERE c.session_id = s.session_id)"""
UNSTEPPED: Final = """SELECT count(*) FROM log.batches_records b WHERE b.counts AND b.skipped IS NULL
    AND b.batch_index <= ? AND NOT EXISTS (SELECT 1 FROM taken k WHERE k.batch_index = b.batch_index)"""
GENERATIONS: Final = """SELECT incarnation, min(batch_index) AS first FROM {log}steps_records WHERE incarnation <= ?
    GROUP BY incarnation ORDER BY incarnation"""
"""Every generation up to one that took a step, with its first batch."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part of the data that has one value of a fact, such as a verifier."""

    value: Mapping[str, Any]
    """The fact, by name. None stands for what was not recorded."""
    sessions: int
    tokens: int
    """Trained tokens of these sessions."""
    reward: float | None
    """Mean over those of them that have a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLink:
    """A weight version of a chain, and the steps between it and the version before it."""

    version: int
    incarnation: int
    """Generation of the trainer that published it."""
    batches: tuple[int, int] | None
    """First and last batch of these steps; None if it repeats the weights of the version before it."""
    steps: int
    skipped: int
    """Number of these steps that changed nothing, because the gradient was not finite."""
    tokens: int
    """Tokens that the others trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPart:
    """The part of one run in a lineage."""

    run: str
    missing: str = ""
    """Reason that nothing is known about this part; empty if it is known."""
    chain: Sequence[VersionLink] = ()
    """Versions from the first one on."""
    steps: int = 0
    skipped: int = 0
    sessions: int = 0
    groups: int = 0
    tokens: int = 0
    masked: int = 0
    """Trained tokens of the manifests that the trainer masked; no session is known for them."""
    compared: int = 0
    """Sessions whose rewards shifted advantages of the others, and of which no token was trained."""
    started_from: str | None = None
    """Model folder of the weights before the first step, or RUN/CHECKPOINT of a fork; None if not recorded."""
    notes: tuple[str, ...] = ()
    as_of: AsOf | None = None

    def body(self) -> dict[str, Any]:
        """Return the part as a JSON object."""
        own = dataclasses.asdict(dataclasses.replace(self, as_of=None))
        return own | {"as_of": None if self.as_of is None else self.as_of.body()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Origin of a set of weights or a dataset."""

    about: Mapping[str, Any]
    """The question: `weights` and `since`, or `dataset`."""
    runs: Sequence[RunPart]
    """The run asked about, then the runs that it was forked from; of a dataset, its runs."""
    shares: Mapping[str, Sequence[Share]]
    """Shares by each of KINDS, and the MOST_TASKS tasks with the most tokens; most tokens first."""
    tasks: int
    """Number of different tasks."""
    reward: float | None
    """Mean reward of the sessions."""

    def total(self, name: str) -> int:
        """Return the sum of a count of RunPart over all runs."""
        return sum(int(getattr(part, name)) for part in self.runs)

    def body(self) -> dict[str, Any]:
        """Return the lineage as a JSON object (docs/lineage.md)."""
        counts = ("sessions", "groups", "tokens", "masked", "compared", "steps", "skipped")
        return {
            **self.about,
            "totals": {name: self.total(name) for name in counts} | {"tasks": self.tasks, "reward": self.reward},
            "runs": [part.body() for part in self.runs],
            "made_of": {kind: [dataclasses.asdict(share) for share in shares] for kind, shares in self.shares.items()},
        }


class LineageReader:
    """A temporary database to which indexes are attached, one at a time. Not thread-safe."""

    def __init__(self, sql: sqlite3.Connection, index_of: IndexOf) -> None:
        """Use `open` instead."""
        self._sql, self._index_of = sql, index_of

    @classmethod
    @contextlib.contextmanager
    def open(cls, index_of: IndexOf, *, within_s: float | None = None) -> Iterator[LineageReader]:
        """Open a reader. Questions must be answered within `within_s` seconds from now. Raises IndexFailure, and
        BadQuestion if one takes longer."""
        with contextlib.closing(sqlite3.connect("", uri=True, isolation_level=None)) as sql:
            sql.row_factory = sqlite3.Row
            sql.executescript(TABLES)
            if within_s is not None:
                ends = time.monotonic() + within_s
                sql.set_progress_handler(lambda: int(time.monotonic() > ends), STEPS)
            try:
                yield cls(sql, index_of)
            except sqlite3.OperationalError as error:
                if str(error) != INTERRUPTED:
                    raise
                raise BadQuestion(f"it takes more than {within_s:g} s: `turnlog lineage` has no limit") from error

    def weights(self, run: str, version: int | None, since: int | None = None) -> Lineage:
        """Return what made a weight version (None: the newest), or what made it from version `since`. Raises
        BadQuestion, NoIndex and other IndexFailures of the run's own index."""
        self._forget()
        parts = list[RunPart]()
        for part, asked in self._runs(run, version, since):
            parts.append(part)
            version = asked if version is None else version
        return self._lineage({"run": run, "weights": version, "since": since}, parts)

    def sessions(self, run: str, version: int | None, since: int | None = None) -> Iterator[Row]:
        """Yield every session that a weight version was trained on, run by run, in order of ids. Raises as
        `weights`."""
        self._forget()
        for part, _ in self._runs(run, version, since):
            found = self._sql.execute("SELECT session_id, group_id, task_id, reward, tokens FROM contributions")
            yield from ({"run": part.run, **row} for row in found)

    def dataset(self, folder: Path) -> Lineage:
        """Return what made the dataset in a folder. Raises NotADataset, DatasetDamaged, IndexFailure."""
        manifest = self._read_dataset(folder)
        runs = [row["run_id"] for row in self._sql.execute("SELECT DISTINCT run_id FROM dataset_rows ORDER BY run_id")]
        about = {
            "dataset": str(folder), "view": manifest.view, "rows": manifest.counts.rows,
            "rows_sha256": manifest.rows_sha256, "query": manifest.provenance.query,
            "fold_versions": sorted(manifest.provenance.fold_versions),
        }  # fmt: skip
        return self._lineage(about, [self._dataset_run(run) for run in runs])

    def dataset_sessions(self, folder: Path) -> Iterator[Row]:
        """Yield every session of a dataset, in order of runs and ids. Raises as `dataset`."""
        self._read_dataset(folder)
        found = self._sql.execute("SELECT run_id, session_id, tokens FROM dataset_rows")
        yield from ({"run": row["run_id"], "session_id": row["session_id"], "tokens": row["tokens"]} for row in found)

    def _forget(self) -> None:
        for table in ("taken", "contributions", "shares", "dataset_rows"):
            self._sql.execute(f"DELETE FROM {table}")

    @contextlib.contextmanager
    def _attach(self, run: str) -> Iterator[AsOf]:
        """Attach the index of a run as `log`, and yield its as-of state. Everything within the block is read from one
        snapshot. Raises IndexFailure."""
        path = self._index_of(run)
        with contextlib.closing(connect_read_only(path)) as checked:
            checked.row_factory = sqlite3.Row
            as_of = Index(path, checked).as_of()
        if as_of.run_id != run:
            raise BadQuestion(f"{path} is the index of run {as_of.run_id!r}, not of {run!r}")
        self._sql.execute("ATTACH ? AS log", (f"{path.absolute().as_uri()}?mode=ro",))
        try:
            self._sql.execute("BEGIN")
            yield as_of
        except sqlite3.DatabaseError as error:
            if str(error) == INTERRUPTED:
                raise
            raise failure(path, error) from error
        finally:
            if self._sql.in_transaction:
                self._sql.execute("COMMIT")
            self._sql.execute("DETACH log")

    def _runs(self, run: str, version: int | None, since: int | None) -> Iterator[tuple[RunPart, int]]:
        """Yield the part of each run of the chain, while `contributions` holds its sessions, and the version asked
        about."""
        with self._attach(run) as as_of:
            end = self._version(run, version)
            self._take(end["batch_index"], end["incarnation"])
            notes = self._unstepped_note(end["batch_index"])
            if since is not None:
                notes += self._leave_out(run, since, end)
            part, parent = self._run_part(run, as_of, end, since=since, notes=notes)
            yield part, end["version"]
        known = {run}
        while parent is not None and since is None:
            run, before = parent["run_id"], parent
            if run in known:
                raise BadQuestion(f"run {run!r} is recorded as its own parent: its RunConfigured is damaged")
            known.add(run)
            self._sql.execute("DELETE FROM taken")
            self._sql.execute("DELETE FROM contributions")
            try:
                with self._attach(run) as as_of:
                    part, parent = self._parent_part(run, as_of, before)
                    yield part, end["version"]
            except IndexFailure as gone:
                missing = f"its {before['step']} steps up to checkpoint {before['checkpoint']}: {gone}"
                yield RunPart(run=run, missing=missing), end["version"]
                return

    def _parent_part(self, run: str, as_of: AsOf, fork: Mapping[str, Any]) -> tuple[RunPart, Mapping[str, Any] | None]:
        """Return the part of a run up to the checkpoint that a run was forked from, and the run's own parent."""
        written = CHECKPOINT.fullmatch(fork["checkpoint"])
        incarnation = int(written[2]) if written else 2**62
        self._take(2**62, incarnation, fork["step"])
        (batch,) = self._sql.execute("SELECT coalesce(max(batch_index), -1) FROM taken").fetchone()
        end = {"version": 2**62, "batch_index": batch, "incarnation": incarnation}
        return self._run_part(run, as_of, end, notes=self._unstepped_note(batch))

    def _version(self, run: str, version: int | None) -> Row:
        """Return the row of a version (None: the newest). Raises BadQuestion."""
        order = "ORDER BY version DESC LIMIT 1" if version is None else "AND version = ?"
        found = self._sql.execute(
            f"SELECT version, batch_index, incarnation FROM log.versions_records WHERE counts {order}",
            () if version is None else (version,),
        ).fetchone()
        if found is None:
            first, last = self._sql.execute("SELECT min(version), max(version) FROM log.versions_records").fetchone()
            there = "has published no weights" if first is None else f"has published versions {first} to {last}"
            raise BadQuestion(f"run {run!r} {there}, as far as its index has read; --weights {version} is none of them")
        return dict(found)

    def _take(self, batch: int, incarnation: int, step: int = 2**62) -> None:
        """Fill `taken` with the steps up to a batch, and up to a number of steps, of generations up to one."""
        self._sql.execute(TAKE, (batch, incarnation, step))

    def _unstepped_note(self, batch: int) -> list[str]:
        """Return a note if the index has batches without a step, up to one that was trained."""
        (count,) = self._sql.execute(UNSTEPPED, (batch,)).fetchone()
        return [f"the index has not read the steps of {count} batches yet"] if count else []

    def _leave_out(self, run: str, since: int, end: Row) -> list[str]:
        """Leave out the steps that made version `since`, and return notes. Raises BadQuestion."""
        start, sql = self._version(run, since), self._sql
        if start["version"] >= end["version"]:
            raise BadQuestion(f"--since {since} must be a version before {end['version']}")
        sql.execute("CREATE TABLE later AS SELECT * FROM taken")
        sql.execute("DELETE FROM taken")
        self._take(start["batch_index"], start["incarnation"])
        lost = "SELECT count(*) FROM taken WHERE place NOT IN (SELECT place FROM later)"
        (count,) = sql.execute(lost).fetchone()
        sql.execute("DELETE FROM later WHERE place IN (SELECT place FROM taken)")
        sql.execute("DELETE FROM taken")
        sql.execute("INSERT INTO taken SELECT * FROM later")
        sql.execute("DROP TABLE later")
        if not count:
            return []
        return [
            f"version {since} is not in the chain of version {end['version']}: {count} of its steps were lost with "
            "their trainer, and a later generation took steps on the same batches again"
        ]

    def _run_part(
        self, run: str, as_of: AsOf, end: Row, *, since: int | None = None, notes: Sequence[str] = ()
    ) -> tuple[RunPart, Mapping[str, Any] | None]:
        """Count the sessions of `taken`, add their facts to `shares`, and return the part of the run and the parent
        that it was forked from."""
        sql = self._sql
        sql.execute(CONTRIBUTE.format(found=TRAINED))
        self._add_facts()
        for role, code in (("batcher", "b.code"), ("trainer", "k.code")):
            for row in sql.execute(BATCH_CODE.format(code=code)).fetchall():
                self._add("code", {"role": role, "code": row["code"]}, row)
        steps, skipped, masked = sql.execute(
            "SELECT count(*), coalesce(sum(skipped), 0), coalesce(sum(masked) FILTER (WHERE NOT skipped), 0) FROM taken"
        ).fetchone()
        sessions, groups, tokens = self._counts()
        configured = sql.execute("SELECT parent FROM log.runs WHERE kind = 'RunConfigured' LIMIT 1").fetchone()
        parent = orjson.loads(configured["parent"]) if configured and configured["parent"] else None
        return RunPart(
            run=run, chain=tuple(self._chain(end, -1 if since is None else since)), steps=steps, skipped=skipped,
            sessions=sessions, groups=groups, tokens=tokens, masked=masked, compared=self._count_compared(),
            started_from=f"{parent['run_id']}/{parent['checkpoint']}" if parent else self._model_folder(),
            notes=tuple(notes), as_of=as_of,
        ), parent  # fmt: skip

    def _counts(self) -> tuple[int, int, int]:
        """Count the sessions, groups and tokens of `contributions`."""
        found = self._sql.execute(
            "SELECT count(*), count(DISTINCT group_id), coalesce(sum(tokens), 0) FROM contributions"
        )
        sessions, groups, tokens = found.fetchone()
        return sessions, groups, tokens

    def _count_compared(self) -> int:
        """Count the sessions of COMPARED; 0 if the estimator compares none with others."""
        estimator = self._sql.execute(
            "SELECT estimator FROM log.group_scores WHERE group_id = (SELECT max(group_id) FROM contributions)"
        ).fetchone()
        if estimator is None or estimator["estimator"] in ALONE:
            return 0
        return int(self._sql.execute(COMPARED).fetchone()[0])

    def _model_folder(self) -> str | None:
        first = self._sql.execute("SELECT started_from FROM log.versions ORDER BY version LIMIT 1").fetchone()
        return first["started_from"] or None if first else None

    def _chain(self, end: Row, since: int) -> Iterator[VersionLink]:
        """Yield the versions of the chain that ends at a version, from the one after `since` on, with the steps of
        `taken` between them. Steps after the last version have a VersionLink of their own, with version -1."""
        later = list(map(tuple, self._sql.execute(GENERATIONS.format(log="log."), (end["incarnation"],))))
        versions = self._sql.execute(
            "SELECT version, batch_index, incarnation FROM log.versions_records WHERE counts AND version > ? "
            "AND version <= ? AND batch_index <= ? AND incarnation <= ? ORDER BY version",
            (since, end["version"], end["batch_index"], end["incarnation"]),
        )
        steps = self._sql.execute(
            "SELECT batch_index, skipped, trained_tokens - masked AS tokens FROM taken ORDER BY batch_index"
        )
        step = steps.fetchone()
        for version in (*filter(lambda row: is_on_chain(row, later), versions), None):
            upto, between = 2**62 if version is None else version["batch_index"], list[sqlite3.Row]()
            while step is not None and step["batch_index"] <= upto:
                between.append(step)
                step = steps.fetchone()
            if version is not None or between:
                yield VersionLink(
                    version=-1 if version is None else version["version"],
                    incarnation=end["incarnation"] if version is None else version["incarnation"],
                    batches=(between[0]["batch_index"], between[-1]["batch_index"]) if between else None,
                    steps=len(between), skipped=sum(each["skipped"] for each in between),
                    tokens=sum(each["tokens"] for each in between if not each["skipped"]),
                )  # fmt: skip

    def _add_facts(self) -> None:
        """Add the facts of all sessions in `contributions` to `shares`."""
        sql = self._sql
        origins = {row["origin"]: dict(row) for row in sql.execute("SELECT * FROM log.origins")}
        (fold,) = sql.execute("SELECT value FROM log.about WHERE name = 'fold_version'").fetchone()
        columns = "origin, verifier, dataset, feeder, gateway, rewards, assembler"
        for row in sql.execute(f"SELECT {columns}, {SUMS} FROM contributions GROUP BY {columns}").fetchall():
            for kind, value in _facts(row, origins.get(row["origin"]), fold):
                self._add(kind, value, row)
        self._add_engines()
        for row in sql.execute(SANDBOX_CODE).fetchall():
            self._add("code", {"role": "sandbox worker", "code": row["code"]}, row)
        sql.execute(ADD_TASKS, (GONE,))

    def _add_engines(self) -> None:
        """Add the kinds of the engines that sampled, and the code of their weight loaders. A session counts once for
        each."""
        sql, kinds, codes = self._sql, dict[str, str](), dict[str, set[str | None]]()
        found = sql.execute("SELECT DISTINCT engine_id, engine_kind, kind, code FROM log.engine_events")
        for row in found:
            kinds[row["engine_id"]] = row["engine_kind"]
            if row["kind"] == "EngineRegistered":
                codes.setdefault(row["engine_id"], set()).add(row["code"])
        grouped = f"SELECT engines, {SUMS} FROM contributions WHERE origin IS NOT NULL GROUP BY engines"
        for row in sql.execute(grouped).fetchall():
            engines = orjson.loads(row["engines"] or "[]")
            for kind in {kinds.get(engine) for engine in engines} or {None}:
                self._add("engine", {"engine": kind}, row)
            for code in set[str | None]().union(*(codes.get(engine, {None}) for engine in engines)):
                self._add("code", {"role": "weight loader", "code": code}, row)

    def _add(self, kind: str, value: Mapping[str, Any], row: sqlite3.Row) -> None:
        text = canonical_json(value).decode()
        sums = (row["sessions"], row["tokens"], row["rewarded"], row["reward"])
        self._sql.execute(f"INSERT INTO shares VALUES (?, ?, ?, ?, ?, ?) {ADD}", (kind, text, *sums))

    def _lineage(self, about: Mapping[str, Any], parts: Sequence[RunPart]) -> Lineage:
        sql, ordered = self._sql, "ORDER BY tokens DESC, sessions DESC, value"
        shares = {
            kind: [_share(row) for row in sql.execute(f"SELECT * FROM shares WHERE kind = ? {ordered}", (kind,))]
            for kind in KINDS
        }
        shares["code"].sort(key=lambda share: ROLES.index(share.value["role"]) if "role" in share.value else len(ROLES))
        few = sql.execute(f"SELECT * FROM shares WHERE kind = 'task' {ordered} LIMIT ?", (MOST_TASKS,))
        tasks, rewarded, reward = sql.execute(
            "SELECT count(*), sum(rewarded), sum(reward) FROM shares WHERE kind = 'task'"
        ).fetchone()
        return Lineage(
            about=about, runs=parts, shares=shares | {"task": [_share(row) for row in few]}, tasks=tasks,
            reward=reward / rewarded if rewarded else None,
        )  # fmt: skip

    def _read_dataset(self, folder: Path) -> DatasetManifest:
        """Fill `dataset_rows` with the sessions of a dataset. Raises NotADataset, DatasetDamaged."""
        self._forget()
        manifest, rows = read_manifest(folder), 0

        def count_rows() -> Iterator[tuple[str, str, int]]:
            nonlocal rows
            for found in session_rows(folder, manifest):
                rows += 1
                yield from found

        self._sql.execute("BEGIN")
        self._sql.executemany(
            "INSERT INTO dataset_rows VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
            count_rows(),
        )
        self._sql.execute("COMMIT")
        if rows != manifest.counts.rows:
            raise DatasetDamaged(f"{folder}: its files hold {rows} rows, its manifest says {manifest.counts.rows}")
        return manifest

    def _dataset_run(self, run: str) -> RunPart:
        """Return the part of one run in the dataset. If its index is missing, its sessions are counted as gone."""
        sql, missing = self._sql, ""
        sql.execute("DELETE FROM contributions")
        try:
            with self._attach(run) as as_of:
                sql.execute(CONTRIBUTE.format(found=OF_DATASET), {"run": run})
                self._add_facts()
                sessions, groups, tokens = self._counts()
                return RunPart(run=run, sessions=sessions, groups=groups, tokens=tokens, as_of=as_of)
        except IndexFailure as gone:
            missing = str(gone)
        sql.execute(ABSENT, {"run": run})
        row = sql.execute(f"SELECT {SUMS} FROM contributions").fetchone()
        for kind in (*KINDS, "task"):
            self._add(kind, {kind: GONE}, row)
        sessions, groups, tokens = self._counts()
        return RunPart(run=run, sessions=sessions, groups=groups, tokens=tokens, missing=missing)


def index_beside(settings: Settings) -> IndexOf:
    """Return a function that maps the settings' own run to its index, and any other run to the index in the folder of
    its name beside the run's own. An id that is no name of a folder maps to a file that cannot exist."""
    own = settings.run

    def find(run: str) -> Path:
        if run == own.id:
            return path_of(settings)
        beside = Path(own.directory).parent
        return beside / (run if Path(run).name == run else quote(run, safe="")) / Path(path_of(settings)).name

    return find


def is_on_chain(version: Row | sqlite3.Row, generations: Iterable[tuple[int, int]]) -> bool:
    """Return whether the steps that made a version were not taken again by any of these generations after its own."""
    incarnation, batch = version["incarnation"], version["batch_index"]
    return all(first > batch for generation, first in generations if generation > incarnation)


def _facts(row: sqlite3.Row, origin: Mapping[str, Any] | None, fold: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (kind, value) for each fact of sessions with the same facts."""
    if origin is None:
        for kind in KINDS:
            yield kind, {kind: GONE}
        return
    yield "source", {"recipe": origin["recipe"], "dataset": row["dataset"]}
    yield "verifier", {"verifier": row["verifier"]}
    yield "environment", {
        **{name: origin[name] for name in ("environment", "image", "root_sha256", "policy_sha256")},
        "packages": orjson.loads(origin["packages"]), "tools": orjson.loads(origin["tools"]),
    }  # fmt: skip
    yield "agent", {"agent": origin["agent"]}
    for role in ("feeder", "gateway", "rewards"):
        yield "code", {"role": role, "code": row[role]}
    yield "code", {"role": "assembler", "code": row["assembler"], "fold_version": fold}


def _share(row: sqlite3.Row) -> Share:
    mean = row["reward"] / row["rewarded"] if row["rewarded"] else None
    return Share(orjson.loads(row["value"]), row["sessions"], row["tokens"], mean)
