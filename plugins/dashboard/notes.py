"""Notes and tags that people attach to a run and to its sessions.

They are stored in an SQLite file beside the index, not in it: an index can be deleted and rebuilt from the log, but
notes cannot be recovered from anywhere.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from turnlog.consumers.index import BadQuestion, failure

RUN: Final = ""
"""Subject of the run itself; every other subject is a session id."""
MOST_CHARACTERS: Final = 10_000
"""Maximum length of a note in characters."""
MOST_TAGS: Final = 20
"""Maximum number of tags of one subject."""
TAG_CHARACTERS: Final = 64
"""Maximum length of a tag in characters."""
WAITS_S: Final = 5.0
"""Seconds that an access waits for another process's write."""
TABLES: Final = """
CREATE TABLE IF NOT EXISTS notes (subject TEXT PRIMARY KEY, text TEXT NOT NULL, written_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS tags (subject TEXT, tag TEXT, PRIMARY KEY (tag, subject)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tags_by_subject ON tags (subject);
"""


@dataclass(frozen=True, slots=True)
class Note:
    """Current note and tags of one subject."""

    text: str = ""
    tags: tuple[str, ...] = ()
    """Tags in sorted order."""
    written_ms: int = 0


class Notes:
    """Notes and tags of the run whose index is at `index`, or will be."""

    def __init__(self, index: Path) -> None:
        self._path = index.with_name("notes.sqlite")

    def about(self, subjects: Collection[str]) -> Mapping[str, Note]:
        """Return the notes of those subjects that have one. Raises DamagedIndex, IndexFull."""
        wanted = orjson.dumps(list(subjects)).decode()
        with self._open_transaction() as sql:
            found = sql.execute(
                "SELECT n.subject, n.text, n.written_ms, (SELECT json_group_array(tag) FROM (SELECT tag FROM tags t "
                "WHERE t.subject = n.subject ORDER BY tag)) FROM notes n "
                "WHERE subject IN (SELECT value FROM json_each(?))",
                (wanted,),
            ).fetchall()
        return {subject: Note(text, tuple(orjson.loads(tags)), at) for subject, text, at, tags in found}

    def tagged_sessions(self, tag: str) -> Sequence[str]:
        """Return the ids of the sessions with a tag. Raises DamagedIndex, IndexFull."""
        with self._open_transaction() as sql:
            return [name for (name,) in sql.execute("SELECT subject FROM tags WHERE tag = ? AND subject > ''", (tag,))]

    def tags(self) -> Sequence[str]:
        """Return every tag of any session, sorted. Raises DamagedIndex, IndexFull."""
        with self._open_transaction() as sql:
            return [tag for (tag,) in sql.execute("SELECT DISTINCT tag FROM tags WHERE subject > '' ORDER BY tag")]

    def write(self, subject: str, text: str, tags: Collection[str], *, at_ms: int) -> None:
        """Replace the note and tags of a subject, or delete them if both are empty. The write is durable on return.
        Raises BadQuestion if something is too long or too many, DamagedIndex, IndexFull."""
        text, tags = text.strip(), {tag.strip() for tag in tags} - {""}
        if len(text) > MOST_CHARACTERS:
            raise BadQuestion(f"the note has {len(text)} characters: shorten it to {MOST_CHARACTERS}")
        if len(tags) > MOST_TAGS:
            raise BadQuestion(f"there are {len(tags)} tags: keep at most {MOST_TAGS}")
        for tag in tags:
            if len(tag) > TAG_CHARACTERS:
                raise BadQuestion(f"the tag {tag[:TAG_CHARACTERS]!r}... is longer than {TAG_CHARACTERS} characters")
        with self._open_transaction(make=True) as sql:
            sql.execute("DELETE FROM notes WHERE subject = ?", (subject,))
            sql.execute("DELETE FROM tags WHERE subject = ?", (subject,))
            if text or tags:
                sql.execute("INSERT INTO notes VALUES (?, ?, ?)", (subject, text, at_ms))
                sql.executemany("INSERT INTO tags VALUES (?, ?)", [(subject, tag) for tag in tags])

    @contextlib.contextmanager
    def _open_transaction(self, *, make: bool = False) -> Iterator[sqlite3.Connection]:
        """Open a transaction that is committed at the end of the block. Unless `make` is set, a missing file is not
        created."""
        place = self._path if make or self._path.exists() else ":memory:"
        try:
            with contextlib.closing(sqlite3.connect(place, timeout=WAITS_S)) as sql, sql:
                sql.executescript(TABLES)
                yield sql
        except sqlite3.DatabaseError as error:
            remedy = "restore it from a copy, or move it away: its content is stored nowhere else"
            raise failure(self._path, error, remedy) from error
