"""Queries of the index in SQL; a separate process answers each of them.

That process opens the index read-only. An SQLite authorizer checks every statement: it may call SQLite's functions,
except those that open a file or load code, and may not change a row. Its time and memory are limited. The answer says
as of when it is. Tables and columns are listed in docs/index-schema.md.
"""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from turnlog.consumers.index import BadQuestion, IndexFailure, reader

READS: Final = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE})
NOT_CALLED: Final = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"})
VALUE_BYTES: Final = 16 * 2**20
"""Maximum size of one value that a query computes, in bytes."""
RESULT_BYTES: Final = 256 * 2**20
STEPS: Final = 10_000
"""SQLite virtual machine instructions between two checks of the clock."""
GRACE_S: Final = 5.0
"""Seconds that a process past its time limit gets to report so, before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """Limits of one query."""

    rows: int = 10_000
    timeout_s: float = 30.0
    memory_mb: int = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of an answer and where they come from."""

    sql: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    more: bool
    """True if there are more rows than the limit."""
    as_of: dict[str, Any]

    def body(self) -> dict[str, Any]:
        """Return the answer as a JSON object."""
        return {"sql": self.sql, "as_of": self.as_of, "columns": self.columns, "rows": self.rows, "more": self.more}


def ask(path: Path, sql: str, bounds: QueryLimits = QueryLimits()) -> Answer:
    """Run a query in a process of its own. Raises BadQuestion, NoIndex, LaterIndex, DamagedIndex."""
    question = {"path": str(path), "sql": sql, "rows": bounds.rows, "s": bounds.timeout_s, "mb": bounds.memory_mb}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],  # -P: import nothing from the current folder
            input=orjson.dumps(question), capture_output=True, timeout=bounds.timeout_s + GRACE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise _too_long(bounds) from None
    try:
        said = orjson.loads(done.stdout)
    except orjson.JSONDecodeError:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise BadQuestion(
            f"its process ended with {done.returncode} before it answered: {why or 'too much memory'}"
        ) from None
    if "error" in said:
        kind = next((each for each in IndexFailure.__subclasses__() if each.__name__ == said["error"]), BadQuestion)
        raise kind(said["message"])
    return Answer(sql, said["columns"], said["rows"], said["more"], said["as_of"])


def _too_long(bounds: QueryLimits) -> BadQuestion:
    return BadQuestion(f"it takes more than {bounds.timeout_s:g} s: ask for less, or give it more time (--timeout)")


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answer a query; runs in the separate process. Raises IndexFailure."""
    bounds = QueryLimits(rows=question["rows"], timeout_s=question["s"], memory_mb=question["mb"])
    with contextlib.closing(reader.connect_read_only(Path(question["path"]))) as connection:
        _apply_bounds(connection, bounds)
        index = reader.Index(Path(question["path"]), connection)
        connection.execute("BEGIN")
        as_of = index.as_of().body()
        for table in ("json_each('[]')", "json_tree('[]')", "search"):  # creating them needs more rights
            connection.execute(f"SELECT 1 FROM {table}").fetchall()
        connection.set_authorizer(_authorize_action)
        columns, rows, more = _rows(connection, question["sql"], bounds)
    return {"as_of": as_of, "columns": columns, "rows": rows, "more": more}


def _apply_bounds(connection: sqlite3.Connection, bounds: QueryLimits) -> None:
    """Limit time and memory, and forbid files, temporary ones included."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.execute(f"PRAGMA hard_heap_limit = {bounds.memory_mb * 2**20}")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (used + (bounds.memory_mb + 1024) * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    ends = time.monotonic() + bounds.timeout_s
    connection.set_progress_handler(lambda: int(time.monotonic() > ends), STEPS)


def _authorize_action(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow reading tables and calling functions, and the pragma that FTS5 runs internally."""
    called = action == sqlite3.SQLITE_FUNCTION and second not in NOT_CALLED
    own = action == sqlite3.SQLITE_PRAGMA and first == "data_version"
    return sqlite3.SQLITE_OK if action in READS or called or own else sqlite3.SQLITE_DENY


def _rows(connection: sqlite3.Connection, sql: str, bounds: QueryLimits) -> tuple[list[str], list[list[Any]], bool]:
    try:
        cursor = connection.execute(sql)
        if cursor.description is None:
            raise BadQuestion("this is not a query: write SELECT ...")
        columns, rows, held = [each[0] for each in cursor.description], list[list[Any]](), 0
        for row in cursor:
            if len(rows) == bounds.rows:
                return columns, rows, True
            rows.append([_plain(value) for value in row])
            held += sum(len(value) if isinstance(value, str) else 8 for value in rows[-1])
            if held > RESULT_BYTES:
                raise BadQuestion(f"its answer is larger than {RESULT_BYTES >> 20} MiB: ask for fewer rows or columns")
    except MemoryError:
        raise BadQuestion(
            f"it takes more than {bounds.memory_mb} MB: ask for less, or give it more (--memory)"
        ) from None
    except (sqlite3.Error, sqlite3.Warning) as error:
        if str(error) == "interrupted":
            raise _too_long(bounds) from error
        if "not authorized" in str(error) or "prohibited" in str(error):
            raise BadQuestion(
                f"{error}: a query may read the tables of docs/index-schema.md and nothing else"
            ) from error
        raise BadQuestion(f"{error}; docs/index-schema.md lists tables and columns") from error
    return columns, rows, False


def _plain(value: Any) -> Any:
    """Convert a value to JSON; bytes become hexadecimal."""
    return value.hex() if isinstance(value, bytes) else value


def write_parquet(answer: Answer, path: Path) -> None:
    """Write the answer to a Parquet file, with the SQL and the as-of state in its metadata. Raises BadQuestion."""
    import pyarrow as pa  # takes half a second, which printing a table does not need
    import pyarrow.parquet as pq

    try:
        columns = [pa.array([row[number] for row in answer.rows]) for number in range(len(answer.columns))]
        metadata = {"turnlog.sql": answer.sql, "turnlog.as_of": orjson.dumps(answer.as_of).decode()}
        pq.write_table(pa.table(columns, names=list(answer.columns)).replace_schema_metadata(metadata), path)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise BadQuestion(f"a column of the answer has several types: {error}; CAST it to one") from error
    except OSError as error:
        raise BadQuestion(f"{path}: {error}") from error


def _serve() -> Iterator[bytes]:
    try:
        yield orjson.dumps(_answer(orjson.loads(sys.stdin.buffer.read())))
    except IndexFailure as failure:
        yield orjson.dumps({"error": type(failure).__name__, "message": str(failure)})


if __name__ == "__main__":
    sys.stdout.buffer.writelines(_serve())
