"""Faust tables in a SQLite file of the worker, so that a restart does not read their changelogs from the beginning.

Faust's own store that survives a restart needs RocksDB; in memory, 100,000 sessions take a restart 20 s and more. The
file is a copy: without it a table comes back from its changelog.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import faust
from faust.stores import STORES
from faust.stores.base import SerializedStore
from faust.tables.recovery import Recovery
from faust.types import TP

URL = "sqlite://"
SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS rows (
  key BLOB PRIMARY KEY, partition INTEGER NOT NULL, value TEXT NOT NULL,
  outcome TEXT GENERATED ALWAYS AS (json_extract(value, '$.outcome')) STORED
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS outcomes ON rows (outcome);
CREATE TABLE IF NOT EXISTS offsets (partition INTEGER PRIMARY KEY, last INTEGER NOT NULL);
"""
"""`last`: offset in the changelog of the newest record that the rows of the partition contain."""


def install() -> str:
    """Make the store known to Faust; the URL that names it.

    A table that is ahead of its changelog is of another log, or of one that lost its end with its machine: Faust 0.15.3
    ends with ConsistencyError at every start. Here such a partition is forgotten and comes back from the changelog."""
    if "sqlite" in STORES.aliases:
        return URL
    STORES.aliases["sqlite"] = f"{__name__}:SqliteStore"
    build_offsets = Recovery._build_offsets

    async def _build_offsets(self: Recovery, consumer: Any, tps: set[TP], destination: Any, title: str) -> None:
        for tp in tps if title == "active" else ():
            if (destination[tp] or 0) > self.active_highwaters[tp]:
                self.tp_to_table[tp].data.forget({tp.partition})  # type: ignore[attr-defined]
                destination[tp] = None
        await build_offsets(self, consumer, tps, destination, title)

    Recovery._build_offsets = _build_offsets  # type: ignore[method-assign]
    return URL


class SqliteStore(SerializedStore[Any, Any]):
    """One table: JSON values by serialized key, and the partition that each belongs to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        folder = Path(self.app.conf.tabledir)
        folder.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(folder / f"{self.table_name}.sqlite", isolation_level=None)
        self._db.executescript(SCHEMA)

    def outcomes(self) -> dict[str, int]:
        """How many values there are of each `outcome`."""
        return dict(self._db.execute("SELECT outcome, count(*) FROM rows GROUP BY outcome"))

    def persisted_offset(self, tp: TP) -> int | None:
        """See Store."""
        found = self._db.execute("SELECT last FROM offsets WHERE partition = ?", (tp.partition,)).fetchone()
        return None if found is None else int(found[0])

    def set_persisted_offset(self, tp: TP, offset: int) -> None:
        """See Store."""
        self._db.execute("INSERT OR REPLACE INTO offsets VALUES (?, ?)", (tp.partition, offset))

    def apply_changelog_batch(
        self, batch: Iterable[Any], to_key: Callable[[Any], Any], to_value: Callable[[Any], Any]
    ) -> None:
        """See SerializedStore; rows and offsets in one transaction."""
        self._db.execute("BEGIN")
        for event in batch:
            message = event.message
            if message.value is None:
                self._del(message.key)
            else:
                self._put(message.key, message.partition, message.value)
            self.set_persisted_offset(message.tp, message.offset)
        self._db.execute("COMMIT")

    async def on_recovery_completed(self, active_tps: set[TP], standby_tps: set[TP]) -> None:
        """Forget partitions that another worker has: they come back from the changelog."""
        mine = {tp.partition for tp in active_tps}
        self.forget({number for (number,) in self._db.execute("SELECT DISTINCT partition FROM rows")} - mine)

    def forget(self, partitions: Iterable[int]) -> None:
        """Their rows, and how far the changelog was read."""
        for number in partitions:
            self._db.execute("DELETE FROM rows WHERE partition = ?", (number,))
            self._db.execute("DELETE FROM offsets WHERE partition = ?", (number,))

    async def on_stop(self) -> None:
        """Close the file."""
        self._db.close()

    async def backup_partition(self, tp: TP | int, flush: bool = True, purge: bool = False, keep: int = 1) -> None:
        """Nobody asks for it: the changelog is the copy."""
        raise NotImplementedError

    def restore_backup(self, tp: TP | int, latest: bool = True, backup_id: int = 0) -> None:
        """See backup_partition."""
        raise NotImplementedError

    def reset_state(self) -> None:
        """See Store."""
        self._clear()

    def _put(self, key: bytes, partition: int, value: bytes) -> None:
        values = (key, partition, value.decode())
        self._db.execute("INSERT OR REPLACE INTO rows (key, partition, value) VALUES (?, ?, ?)", values)

    def _set(self, key: bytes, value: bytes | None) -> None:
        event = faust.current_event()
        assert event is not None, "only agents write"
        assert value is not None, "they delete by key"
        self._put(key, event.message.partition, value)

    def _get(self, key: bytes) -> bytes | None:
        found = self._db.execute("SELECT value FROM rows WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0]).encode()

    def _del(self, key: bytes) -> None:
        self._db.execute("DELETE FROM rows WHERE key = ?", (key,))

    def _contains(self, key: bytes) -> bool:
        return self._get(key) is not None

    def _iteritems(self) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._db.execute("SELECT key, value FROM rows"):
            yield key, value.encode()

    def _iterkeys(self) -> Iterator[bytes]:
        return (key for key, _ in self._iteritems())

    def _itervalues(self) -> Iterator[bytes | None]:
        return (value for _, value in self._iteritems())

    def _size(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM rows").fetchone()[0])

    def _clear(self) -> None:
        self._db.executescript("DELETE FROM rows; DELETE FROM offsets;")
