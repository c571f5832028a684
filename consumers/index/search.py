"""Search for sessions that pass a filter, one page at a time.

The cost is bounded by Effort and by the size of one table, whatever the filter:

1. A stretch of the page's order is walked, which suffices for filters that many sessions pass.
2. The sessions that pass the narrowest filter are sorted, if they are few.
3. All sessions are scanned in file order, which is ten times faster per session than by an index.

Words that few records contain are such a narrow filter. For words that many records contain, steps 1 and 2 check
sessions one by one. If that does not fill the page, it shows the sessions of the newest such records, and the answer
says so.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from turnlog.consumers.index.schema import OFFSET_BITS, place_of
from turnlog.infra.log import Partition
from turnlog.schemas import topics

SORTS: Final = ("started_ms", "finished_ms", "reward", "output_tokens", "turns", "calls")
"""Columns by which sessions can be sorted; each has an index."""
SHARED: Final = ("recipe", "task_id", "outcome", "fate", "batch_index")
"""Columns that many sessions share values of. Each has an index that continues in the order of started_ms."""
SPEAKING: Final = (topics.TURNS.name, topics.TOOL_RESULTS.name)
"""Topics whose records are searched for words."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits on the work of one search."""

    walked: int = 2_000
    """Maximum number of sessions to walk along an order."""
    sorted: int = 10_000
    """Maximum number of sessions that pass a filter, or of records that contain the words, to sort."""
    asked: int = 500
    """Maximum number of sessions to check one by one for words."""


USUAL: Final = Effort()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Filter for sessions. None lets everything pass."""

    recipe: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    purpose: str | None = None
    outcome: str | None = None
    fate: str | None = None
    batch_index: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_version: int | None = None
    """Minimum of the oldest weight version that sampled for the session."""
    max_version: int | None = None
    """Maximum of the newest weight version that sampled for the session."""
    failed_calls: bool = False
    """True to let only sessions pass that have a tool call that did not end ok."""
    sessions: tuple[str, ...] | None = None
    """Ids of the only sessions that may pass."""
    text: str | None = None
    """Words within one turn or one tool output, in the query syntax of FTS5."""


ALL: Final = SessionFilter()
Found = dict[str, Any]
"""A row, by column."""


class Clause(NamedTuple):
    """A condition on sessions `s`. In `sql`, {0} is empty to search the index of the column, or `+` to only check the
    rows."""

    column: str
    sql: str
    values: tuple[Any, ...]
    indexed: bool = True


class Stretch(NamedTuple):
    """A part of an order."""

    sql: str
    values: tuple[Any, ...]
    order: str
    key: str = ""
    """Columns of the index, as an SQL row value."""


@dataclass(frozen=True, slots=True)
class Order:
    """Order of sessions, those without a value of `sort` last, and the row after which a page begins."""

    sort: str
    descending: bool = True
    after: tuple[Any, str] | None = None
    """Value, which may be None, and id of the last row of the previous page."""

    def stretches(self) -> Iterator[Stretch]:
        """Yield the part with values and the part without."""
        way, beyond, value = *self._ways(), self.after[0] if self.after else None
        if self.after is None or value is not None:
            key = f"(s.{self.sort}, s.session_id)"
            behind = f" AND {key} {beyond} (?, ?)" if self.after else ""
            order = f"s.{self.sort} {way}, s.session_id {way}"
            yield Stretch(f"s.{self.sort} IS NOT NULL{behind}", self.after or (), order, key)
        name = self.after[1:] if self.after and value is None else ()
        behind = f" AND (s.session_id) {beyond} (?)" if name else ""
        yield Stretch(f"s.{self.sort} IS NULL{behind}", name, f"s.session_id {way}", "(s.session_id)")

    def whole(self) -> Stretch:
        """Return both parts as one, without use of an index."""
        way, beyond = self._ways()
        order = f"s.{self.sort} IS NULL, s.{self.sort} {way}, s.session_id {way}"
        if self.after is None:
            return Stretch("1", (), order)
        if self.after[0] is None:
            return Stretch(f"+s.{self.sort} IS NULL AND +s.session_id {beyond} ?", self.after[1:], order)
        behind = f"(+s.{self.sort} IS NULL OR (+s.{self.sort}, +s.session_id) {beyond} (?, ?))"
        return Stretch(behind, self.after, order)

    def upto(self, stretch: Stretch, end: Sequence[Any]) -> str:
        """Return the condition that a row of the stretch is not beyond the row `end`."""
        within = ">=" if self.descending else "<="
        return f"{stretch.key} {within} ({', '.join('?' * len(end))})" if end else "1"

    def _ways(self) -> tuple[str, str]:
        return ("DESC", "<") if self.descending else ("ASC", ">")


class Search:
    """A filter over the sessions of one snapshot."""

    def __init__(
        self, sql: sqlite3.Connection, wanted: SessionFilter, places: Iterable[Partition], effort: Effort
    ) -> None:
        """`places` are the partitions that the index holds."""
        self._sql, self._effort, self._text = sql, effort, wanted.text
        self._places = sorted(place for place in places if place.topic in SPEAKING)
        self._clauses = list(_clauses(wanted))
        self._passed = {each: self._count(each) for each in self._clauses if each.indexed}
        """Number of sessions that pass each condition, counted up to `Effort.sorted` + 1."""
        self._often = False
        """True if more records contain the words than `Effort.sorted`."""
        if wanted.text is not None:
            hits = self._values(f"{HITS} LIMIT ?", wanted.text, effort.sorted + 1)
            self._often = len(hits) > effort.sorted
            if not self._often:
                said = _said_at(hits)
                self._clauses.append(said)
                self._passed[said] = len(hits)
        little = effort.asked if self._often else effort.sorted
        self._much = min(self._passed.values(), default=little + 1) > little

    def page(self, order: Order, limit: int) -> tuple[list[Found], bool]:
        """Return the first rows, and whether words were searched for in the newest records only."""
        found, rest = self._walk_order(self._skip_beginning(order), limit) if self._much else ([], order)
        if rest is None:
            return found, False
        stretch, (where, values, newest) = rest.whole(), self._surely()
        found += self._rows(
            f"SELECT s.* FROM sessions s WHERE {where} AND {stretch.sql} ORDER BY {stretch.order} LIMIT ?",
            *values, *stretch.values, limit - len(found),
        )  # fmt: skip
        return found, newest

    def total(self) -> tuple[int, bool]:
        """Return the number of sessions that pass, counted up to `Effort.sorted`, and whether it is complete."""
        where, values, newest = self._surely()
        (found,) = self._values(
            f"SELECT count(*) FROM (SELECT 1 FROM sessions s WHERE {where} LIMIT ?)", *values, self._effort.sorted + 1
        )
        return min(found, self._effort.sorted), found <= self._effort.sorted and not newest

    def histogram(self, bins: int) -> tuple[list[Found], bool]:
        """Return least, most and number of sessions for each reward bin that is not empty, and whether they are a
        sample. Sessions are stored in the order of their ids, which are digests, so the first ones are random."""
        if self._clauses or self._text is not None:
            where, values, newest = self._surely()
            found = self._values(
                f"SELECT s.reward FROM sessions s WHERE {where} AND +s.reward IS NOT NULL LIMIT ?",
                *values, self._effort.sorted + 1,
            )  # fmt: skip
            counts, edges = np.histogram(found, bins)
            sample = newest or len(found) > self._effort.sorted
        else:
            (counts, edges), sample = self._all_rewards(bins), False
        return [
            {"least": float(least), "most": float(most), "sessions": int(count)}
            for (least, most), count in zip(pairwise(edges), counts, strict=True)
            if count
        ], sample

    def _all_rewards(self, bins: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the counts and bin edges of all rewards, from the index on rewards alone."""
        least, most = (self._values(f"SELECT {end}(reward) FROM sessions")[0] for end in ("min", "max"))
        if least is None:
            return np.histogram([], bins)
        edges = np.histogram_bin_edges([least, most], bins)
        within = "SELECT count(*) FROM sessions WHERE reward >= ? AND reward < ?"
        ends = [*edges[:-1], math.inf]
        return np.array([self._values(within, *each)[0] for each in pairwise(ends)]), edges

    def _surely(self) -> tuple[str, Sequence[Any], bool]:
        """Return the condition and values that find every session that passes, and whether only the newest records that
        contain the words are covered. Uses the narrowest filter, or none."""
        if not self._much:
            return *self._where(self._narrowest(), self._says()), False
        said = self._said_newly() if self._often else None
        return *self._where(said, [said] if said else []), self._often

    def _skip_beginning(self, order: Order) -> Order:
        """Skip the beginning of an order by start time, up to the first session in the range of weight versions.
        Versions follow each other in time, so no earlier session passes."""
        versions = self._narrowest({"version_min"})
        if versions is None or order.sort != "started_ms" or (order.after and order.after[0] is None):
            return order
        before = "max(s.started_ms) + 1" if order.descending else "min(s.started_ms) - 1"
        (edge,) = self._values(f"SELECT {before} FROM sessions s WHERE {versions.sql.format('')}", *versions.values)
        begin = edge is not None and (order.after is None or ((edge, "") < order.after) == order.descending)
        return replace(order, after=(edge, "")) if begin else order

    def _walk_order(self, order: Order, limit: int) -> tuple[list[Found], Order | None]:
        """Return the rows found while walking and, if they do not fill the page, the rest of the order."""
        along = self._narrowest(SHARED if order.sort == "started_ms" else {order.sort})
        found = list[Found]()
        where, values = self._where(along, self._says())
        for stretch in order.stretches():
            end = self._end(stretch, along, self._effort.asked if self._often else self._effort.walked)
            found += self._rows(
                f"SELECT s.* FROM sessions s WHERE {where} AND {stretch.sql} AND {order.upto(stretch, end)} "
                f"ORDER BY {stretch.order} LIMIT ?", *values, *stretch.values, *end, limit - len(found),
            )  # fmt: skip
            if len(found) == limit:
                break
            if end:
                return found, replace(order, after=end if len(end) > 1 else (None, *end))
        return found, None

    def _end(self, stretch: Stretch, along: Clause | None, steps: int) -> tuple[Any, ...]:
        """Return the index columns of the row `steps` after the beginning of a stretch; () if the stretch is
        shorter."""
        where, values = ("1", ()) if along is None else (along.sql.format(""), along.values)
        found = self._rows(
            f"SELECT {stretch.key[1:-1]} FROM sessions s WHERE {where} AND {stretch.sql} ORDER BY {stretch.order} "
            "LIMIT 1 OFFSET ?", *values, *stretch.values, steps,
        )  # fmt: skip
        return tuple(found[0].values()) if found else ()

    def _narrowest(self, columns: Collection[str] | None = None) -> Clause | None:
        """Return the narrowest indexed filter on these columns, or on any."""
        fitting = [each for each in self._passed if columns is None or each.column in columns]
        return min(fitting, key=self._passed.__getitem__, default=None)

    def _where(self, sought: Clause | None, more: Sequence[Clause] = ()) -> tuple[str, list[Any]]:
        every = [*self._clauses, *more]
        sql = [each.sql.format("" if each is sought else "+") for each in every]
        return " AND ".join(sql) or "1", [value for each in every for value in each.values]

    def _says(self) -> list[Clause]:
        """Return the condition that checks each session for words that many records contain."""
        return [Clause("", SAYS, (self._text, self._text), indexed=False)] if self._often else []

    def _said_newly(self) -> Clause:
        """Return the condition for sessions of the newest records that contain the words, with an equal share per
        partition."""
        share, hits = self._effort.sorted // max(1, len(self._places)), list[int]()
        for topic, number in self._places:
            ends = (place_of(topic, number, offset) for offset in (0, 2**OFFSET_BITS - 1))
            hits += self._values(
                f"{HITS} AND rowid BETWEEN ? AND ? ORDER BY rowid DESC LIMIT ?", self._text, *ends, share
            )
        return _said_at(hits)

    def _count(self, clause: Clause) -> int:
        """Count the sessions that pass, up to `Effort.sorted` + 1."""
        sql = f"SELECT count(*) FROM (SELECT 1 FROM sessions s WHERE {clause.sql.format('')} LIMIT ?)"
        (found,) = self._values(sql, *clause.values, self._effort.sorted + 1)
        return int(found)

    def _rows(self, sql: str, *values: object) -> list[Found]:
        return [dict(row) for row in self._sql.execute(sql, values)]

    def _values(self, sql: str, *values: object) -> list[Any]:
        """Return the values of a query with one column."""
        cursor = self._sql.cursor()
        cursor.row_factory = None
        return [value for (value,) in cursor.execute(sql, values)]


def _clauses(wanted: SessionFilter) -> Iterator[Clause]:
    """Yield the conditions of a filter, except words."""
    for name in (*SHARED, "group_id", "purpose"):
        if (value := getattr(wanted, name)) is not None:
            yield Clause(name, f"{{0}}s.{name} = ?", (value,), indexed=name != "purpose")
    if wanted.sessions is not None:
        ids = orjson.dumps(wanted.sessions).decode()
        yield Clause("session_id", "{0}s.session_id IN (SELECT value FROM json_each(?))", (ids,))
    newest = wanted.max_version
    for name, least, most in (
        ("reward", wanted.min_reward, wanted.max_reward), ("version_min", wanted.min_version, newest),
    ):  # fmt: skip
        bounds = {f"{{0}}s.{name} >= ?": least, f"{{0}}s.{name} <= ?": most}
        found = {sql: value for sql, value in bounds.items() if value is not None}
        if found:
            yield Clause(name, " AND ".join(found), tuple(found.values()))
    if newest is not None:
        yield Clause("version_max", "+s.version_max <= ?", (newest,), indexed=False)
    if wanted.failed_calls:
        yield Clause("failed_calls", "s.failed_calls > 0", (), indexed=False)


def _said_at(places: Sequence[int]) -> Clause:
    """Return the condition for the sessions of records at these places."""
    return Clause("session_id", f"{{0}}s.session_id IN ({SAID})", (orjson.dumps(places).decode(),) * 2)


HITS: Final = "SELECT rowid FROM search WHERE search MATCH ?"
SAID: Final = """SELECT t.session_id FROM json_each(?) j CROSS JOIN turns_records t ON t.place = j.value WHERE t.counts
    UNION SELECT r.session_id FROM json_each(?) j CROSS JOIN tool_results_records r ON r.place = j.value
    WHERE r.counts"""
SAYS: Final = """(EXISTS (SELECT 1 FROM turns_records t CROSS JOIN search f ON f.rowid = t.place
    WHERE t.session_id = s.session_id AND t.counts AND f.text MATCH ?)
    OR EXISTS (SELECT 1 FROM tool_results_records r CROSS JOIN search f ON f.rowid = r.place
    WHERE r.session_id = s.session_id AND r.counts AND f.text MATCH ?))"""
