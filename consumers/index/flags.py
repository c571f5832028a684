"""Flags of suspicious success in the index: what detectors of cheating find in each rewarded session, and across them.

The findings of a session are rows, computed again whenever a record of the session arrives. Findings across sessions
depend on the order of rewards, so they are computed from the rows when somebody looks, over the newest MOST sessions.
"""

from __future__ import annotations

import collections
import logging
import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from prometheus_client import Counter, Gauge

from turnlog.consumers.index.reader import Index, Row
from turnlog.infra.offers import load_detectors
from turnlog.infra.roles.runs import Configured
from turnlog.processors.core.cheating.across import RunHistory, SessionSummary, summarize
from turnlog.processors.core.cheating.actions import SessionTrace, TurnText, trace
from turnlog.processors.core.cheating.detectors import ACROSS, CheatDetector, findings
from turnlog.processors.core.cheating.findings import Finding
from turnlog.processors.core.errors import BrokenMethod
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import EgressRequest, EgressSource, RewardAssigned, SessionStarted
from turnlog.schemas.types import TurnId
from turnlog.settings import Settings

MOST: Final = 2000
"""Maximum number of sessions that are compared with each other, and of flagged sessions in a list."""
log = logging.getLogger(__name__)
FAILURES = Counter("turnlog_cheating_failures", "Sessions on which a detector failed", ["detector"])
FLAGGED = Gauge("turnlog_cheating_sessions", "Rewarded sessions with a finding, by detector", ["detector"])
TURNS: Final = """SELECT epoch, turn_index, base_epoch, base_index, messages, response FROM turns_records
    WHERE session_id = ? AND counts ORDER BY place"""
EVENTS: Final = """SELECT kind, time_ms, value FROM session_events_records
    WHERE session_id = ? AND kind IN ('SessionStarted', 'RewardAssigned', 'StepRewardAssigned') ORDER BY place"""
ASKED: Final = "SELECT call_id, asked FROM tool_results_records WHERE session_id = ? AND counts AND asked <> '[]'"
SUMMARIES: Final = """SELECT session_id, task_id, recipe, reward, ended_ms, solution, solution_size, sketch, turn_number
    FROM solutions ORDER BY ended_ms DESC, session_id DESC LIMIT ?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagRules:
    """Detectors and thresholds that decide which sessions are flagged."""

    detectors: tuple[CheatDetector, ...] = ()
    """Detectors of sessions."""
    across: tuple[str, ...] = ()
    """Names of detectors across sessions."""
    above: float = 0.0
    """Reward above which a session is a success."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all detectors."""
        return (*(one.name for one in self.detectors), *self.across)

    @classmethod
    def of(cls, settings: Settings, run: Configured) -> FlagRules:
        """Return the rules of [cheating], with the recorded `flagged_above` of the run. Raises SettingsError."""
        names = settings.cheating.detectors
        across = tuple(name for name in names if name in ACROSS)
        return cls(detectors=load_detectors(settings.cheating), across=across, above=run.fold.flagged_above)


NO_FLAGS: Final = FlagRules()
"""Rules by which nothing is flagged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A finding about one session, as people see it."""

    session_id: str
    detector: str
    severity: str
    says: str
    turn_number: int | None
    """Number of the turn in its session, from 0; None if no turn shows it."""
    call_id: str = ""
    excerpt: str = ""

    @property
    def href(self) -> str:
        """The part of a link that leads to the turn."""
        return "" if self.turn_number is None else f"#turn-{self.turn_number}"


def refresh_flags(sql: sqlite3.Connection, codec: Codec, sessions: Iterable[str], rules: FlagRules) -> None:
    """Compute the flags of these sessions again from the rows."""
    changed = False
    for session_id in sessions:
        found = sql.execute("SELECT settled, reward FROM sessions WHERE session_id = ?", (session_id,)).fetchone()
        if found is None or not found[0]:
            continue
        changed = True
        _refresh_one(sql, codec, session_id, found[1], rules)
    if changed:
        counts = dict(
            sql.execute("SELECT detector, count(DISTINCT session_id) FROM flags GROUP BY detector").fetchall()
        )
        for detector in rules.detectors:
            FLAGGED.labels(detector.name).set(counts.get(detector.name, 0))


def _refresh_one(
    sql: sqlite3.Connection, codec: Codec, session_id: str, reward: float | None, rules: FlagRules
) -> None:
    started: SessionStarted | None = None
    rewards: list[float] = []
    steps: dict[TurnId, float] = {}
    ended_ms = 0
    for kind, time_ms, value in sql.execute(EVENTS, (session_id,)).fetchall():
        event: Any = codec.decode(value)
        if kind == "SessionStarted":
            started = started or event
        elif isinstance(event, RewardAssigned):
            rewards.append(event.value)
            ended_ms = ended_ms or time_ms
        else:
            steps.setdefault(event.turn, event.value)
            ended_ms = ended_ms or time_ms
    sql.execute("DELETE FROM flags WHERE session_id = ?", (session_id,))
    sql.execute("DELETE FROM solutions WHERE session_id = ?", (session_id,))
    if reward is None:
        reward = max(rewards, default=math.fsum(steps.values()) if steps else None)
    if reward is None or started is None:
        return
    turns = list(_turns(sql.execute(TURNS, (session_id,)).fetchall()))
    numbers = {one.turn: number for number, one in enumerate(turns)}
    session = trace(
        _in_order(turns), session_id=session_id, task_id=started.task_id, recipe=started.recipe,
        hidden=started.environment.hidden, reward=reward, requests=_requests(sql, session_id), ended_ms=ended_ms,
    )  # fmt: skip
    about = summarize(session)
    last = None if about.last is None else numbers[about.last]
    sql.execute(
        "INSERT INTO solutions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (session_id, about.task_id, about.recipe, reward, ended_ms, about.solution, about.solution_size,
         orjson.dumps(about.sketch).decode(), last),
    )  # fmt: skip
    if reward <= rules.above:
        return
    sql.executemany(
        "INSERT INTO flags VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        [
            (session_id, number, one.detector, one.severity.value, one.says,
             None if one.turn is None else numbers.get(one.turn), one.call_id, one.excerpt)
            for number, one in enumerate(_findings(session, rules.detectors))
        ],
    )  # fmt: skip


def _findings(session: SessionTrace, detectors: Iterable[CheatDetector]) -> Iterator[Finding]:
    """Yield what the detectors find. The index goes on without the findings of one that fails, and counts the
    failure."""
    for detector in detectors:
        try:
            yield from findings(session, (detector,))
        except BrokenMethod as broken:
            log.error("%s", broken)
            FAILURES.labels(detector.name).inc()


def _turns(rows: Iterable[Sequence[Any]]) -> Iterator[TurnText]:
    """Yield the turns of rows; a message that the index does not hold is empty."""
    for epoch, index, base_epoch, base_index, messages, response in rows:
        base = None if base_epoch is None else TurnId(base_epoch, base_index)
        yield TurnText(TurnId(epoch, index), base, (messages or "[]").encode(), (response or "{}").encode())


def _in_order(turns: Sequence[TurnText]) -> list[TurnText]:
    """Return turns in order of ownership term and index, as the fold has them."""
    rank: dict[str, int] = {}
    for one in turns:
        rank.setdefault(one.turn.epoch, len(rank))
    return sorted(turns, key=lambda one: (rank[one.turn.epoch], one.turn.index))


def _requests(sql: sqlite3.Connection, session_id: str) -> list[tuple[str, EgressRequest]]:
    found = []
    for call_id, asked in sql.execute(ASKED, (session_id,)).fetchall():
        for method, url, status, source in orjson.loads(asked):
            found.append((call_id, EgressRequest(
                method=method, url=url, status=status, source=EgressSource(source), reason="", request_sha256="",
                response=None, request_bytes=0, response_bytes=0, duration_s=0.0,
            )))  # fmt: skip
    return found


def flags_of(index: Index, session_id: str) -> list[Flag]:
    """Return what was found in a session by itself."""
    return [_flag(row) for row in index.rows("SELECT * FROM flags WHERE session_id = ? ORDER BY number", session_id)]


def _flag(row: Row) -> Flag:
    return Flag(
        session_id=row["session_id"], detector=row["detector"], severity=row["severity"], says=row["says"],
        turn_number=row["turn_number"], call_id=row["call_id"], excerpt=row["excerpt"],
    )  # fmt: skip


def _about(index: Index) -> tuple[tuple[str, ...], float]:
    """Return the names of the detectors with which the index is made, and the reward above which a session is a
    success."""
    about = {row["name"]: row["value"] for row in index.rows("SELECT name, value FROM about")}
    return tuple(orjson.loads(about.get("detectors", "[]"))), float(about.get("flagged_above", "0"))


def across(index: Index) -> dict[str, list[Flag]]:
    """Return session -> what the newest rewarded sessions reveal when they are compared with each other."""
    names, above = _about(index)
    if not set(names) & set(ACROSS):
        return {}
    history = RunHistory(above=above)
    found: dict[str, list[Flag]] = {}
    rows = index.rows(SUMMARIES, MOST)
    last = {row["session_id"]: row["turn_number"] for row in rows}
    for row in reversed(rows):
        about = SessionSummary(
            session_id=row["session_id"], task_id=row["task_id"], recipe=row["recipe"], reward=row["reward"],
            ended_ms=row["ended_ms"], solution=row["solution"], solution_size=row["solution_size"],
            sketch=tuple(orjson.loads(row["sketch"])),
        )  # fmt: skip
        for session_id, one in history.add(about):
            if one.detector in names:
                found.setdefault(session_id, []).append(
                    Flag(session_id=session_id, detector=one.detector, severity=one.severity.value, says=one.says,
                         turn_number=last[session_id])
                )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class FlaggedSessions:
    """The flagged sessions of one moment, newest first."""

    rows: Sequence[Row]
    """Rows of table sessions."""
    flags: Mapping[str, Sequence[Flag]]
    """Session -> its flags."""
    counts: Mapping[str, int]
    """Detector -> number of flagged sessions."""
    detectors: Sequence[str]
    """Names of the detectors with which the index is made."""


def flagged_sessions(index: Index, *, detector: str = "", limit: int = MOST) -> FlaggedSessions:
    """Return the newest flagged sessions, of one detector if it is given."""
    found = across(index)
    of_sessions = index.rows(
        "SELECT f.* FROM flags f JOIN sessions s ON s.session_id = f.session_id ORDER BY s.started_ms DESC, "
        "f.session_id, f.number LIMIT ?",
        limit * 4,
    )
    flags: dict[str, list[Flag]] = {}
    for row in of_sessions:
        flags.setdefault(row["session_id"], []).append(_flag(row))
    for session_id, more in found.items():
        flags.setdefault(session_id, []).extend(more)
    counts = collections.Counter(name for held in flags.values() for name in {one.detector for one in held})
    chosen = [name for name, held in flags.items() if not detector or any(one.detector == detector for one in held)]
    named = (index.row("SELECT * FROM sessions WHERE session_id = ?", name) for name in chosen)
    rows = [row for row in named if row is not None]
    rows.sort(key=lambda row: (-(row["started_ms"] or 0), row["session_id"]))
    return FlaggedSessions(rows[:limit], flags, dict(sorted(counts.items())), _about(index)[0])
