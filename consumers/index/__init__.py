"""The index: a run's log as tables of one SQLite file, for questions in SQL and for a page. It is a consumer like any
other: the loop does not know of it, and it can be deleted and built again from the topics or from the archive.

IndexFailure
├── NoIndex         nothing was indexed at that path
├── LaterIndex      a newer turnlog wrote it: its tables may mean something else
├── OtherIndex      it is of another run
├── BusyIndex       another process writes it
├── IndexBehind     the topics no longer hold what it has not read yet
├── DamagedIndex    SQLite finds it broken
├── IndexFull       its disk takes no more: it goes on where it stopped
├── RecordGone      a record that a row names is neither on its topic nor in the archive
└── BadQuestion     what was asked for cannot be read, or asks for more than it may
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from turnlog.infra.run_folder import MAKE_ROOM, lacks_room


class IndexFailure(Exception):
    """Base of the tree above."""


class NoIndex(IndexFailure):
    """Remedy: `turnlog index build`, or the role `turnlog index`."""


class LaterIndex(IndexFailure):
    """Remedy: the turnlog that wrote it, or another [index] path for this one."""


class OtherIndex(IndexFailure):
    """Remedy: an [index] path of its own for each run."""


class BusyIndex(IndexFailure):
    """Remedy: stop the other indexer; who asks needs none of their own."""


class IndexBehind(IndexFailure):
    """Remedy: `turnlog index build --from archive`, then go on from the topics."""


class DamagedIndex(IndexFailure):
    """Remedy: delete the file, and build it again."""


class IndexFull(IndexFailure):
    """Remedy: room on the disk that it names. Nothing that was written is lost, and nothing has to be built again."""


class RecordGone(IndexFailure):
    """Remedy: restore the archive; what the index itself holds can still be asked for."""


class BadQuestion(IndexFailure):
    """Remedy: what the message says."""


WITHOUT_ROOM = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY})
"""What SQLite says, beside SQLITE_FULL, when it cannot make or extend the files beside an index."""


def failure(path: Path, error: sqlite3.DatabaseError, remedy: str = "delete it and build it again") -> IndexFailure:
    """What an error of SQLite means for the index at `path`; `remedy`: of a damaged file."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    full = lacks_room(path.parent) if code in WITHOUT_ROOM else ""
    if code == sqlite3.SQLITE_FULL:
        full = f"the disk of {path.parent} is full; {MAKE_ROOM}"
    if full:
        return IndexFull(f"{path}: {error}: {full}")
    return DamagedIndex(f"{path}: {error}; {remedy}")
