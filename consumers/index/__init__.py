"""The index: a run's log as tables of one SQLite file, for questions in SQL and for a page. It is a consumer like any
other: the loop does not know of it, and it can be deleted and built again from the topics or from the archive.

IndexFailure
├── NoIndex         nothing was indexed at that path
├── LaterIndex      a newer turnlog wrote it: its tables may mean something else
├── OtherIndex      it is of another run
├── BusyIndex       another process writes it
├── IndexBehind     the topics no longer hold what it has not read yet
├── DamagedIndex    SQLite finds it broken, or the disk does not take it
├── RecordGone      a record that a row names is neither on its topic nor in the archive
└── BadQuestion     what was asked for cannot be read, or asks for more than it may
"""

from __future__ import annotations


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


class RecordGone(IndexFailure):
    """Remedy: restore the archive; what the index itself holds can still be asked for."""


class BadQuestion(IndexFailure):
    """Remedy: what the message says."""
