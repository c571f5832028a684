"""The index: the log of a run as tables of one SQLite file, for SQL queries and for the dashboard.

It is a consumer like any other: the training loop does not depend on it, and it can be deleted and rebuilt from the
topics or from the archive.

IndexFailure
├── NoIndex         there is no index at that path
├── LaterIndex      a newer turnlog wrote it: its tables may have another meaning
├── OtherIndex      it belongs to another run
├── BusyIndex       another process is writing it
├── IndexBehind     neither the topics nor an archive hold records that it has not read yet
├── DamagedIndex    SQLite finds it corrupt
├── IndexFull       its disk is full: indexing resumes where it stopped once there is room
├── RecordGone      a record that a row names is neither on its topic nor in the archive
└── BadQuestion     the query cannot be read, or exceeds what it may do or use
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from turnlog.infra.run_folder import MAKE_ROOM, lacks_room


class IndexFailure(Exception):
    """Base of the tree above."""


class NoIndex(IndexFailure):
    """Remedy: run `turnlog log index build`, or the role `turnlog role index`."""


class LaterIndex(IndexFailure):
    """Remedy: use the turnlog that wrote it, or another [index] path for this one."""


class OtherIndex(IndexFailure):
    """Remedy: give each run its own [index] path."""


class BusyIndex(IndexFailure):
    """Remedy: stop the other indexer. Reading needs no indexer of its own."""


class IndexBehind(IndexFailure):
    """Remedy: restore the archive, run `turnlog log index build --from archive`, then continue from the topics."""


class DamagedIndex(IndexFailure):
    """Remedy: delete the file and build it again."""


class IndexFull(IndexFailure):
    """Remedy: make room on the disk that the message names. Nothing written is lost, and nothing has to be rebuilt."""


class RecordGone(IndexFailure):
    """Remedy: restore the archive. What the index itself holds can still be queried."""


class BadQuestion(IndexFailure):
    """Remedy: see the message."""


WITHOUT_ROOM = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
"""Error codes, beside SQLITE_FULL, that SQLite reports when it cannot create or extend the files beside an index."""


def failure(path: Path, error: sqlite3.DatabaseError, remedy: str = "delete it and build it again") -> IndexFailure:
    """Convert an SQLite error into the error for the index at `path`. `remedy` is the one for a damaged file."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    full = lacks_room(path.parent) if code in WITHOUT_ROOM else ""
    if code == sqlite3.SQLITE_FULL:
        full = f"the disk of {path.parent} is full; {MAKE_ROOM}"
    if full:
        return IndexFull(f"{path}: {error}: {full}")
    return DamagedIndex(f"{path}: {error}; {remedy}")
