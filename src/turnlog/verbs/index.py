"""Verbs that write or read the index of a run: `turnlog log index`, query, tail, why."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from turnlog.infra.roles.ending import run_verb
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, add_source, always

INDEX_EPILOG = """\
`turnlog role index` indexes the log into [index] path until it is stopped.

Examples:
  turnlog log index build                     index everything that is on the log now, and exit
  turnlog log index build --from archive      if the topics are gone, or their first records were deleted
"""


def _index_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = INDEX_EPILOG
    verb.add_argument("action", choices=("build",), help="index once")
    add_source(verb)


def _index(settings: Settings, arguments: argparse.Namespace) -> int:
    return run_verb(build_index(settings, archive=arguments.source == "archive"))


async def build_index(settings: Settings, *, archive: bool) -> int:
    """Run `turnlog log index build`: index what is on the log, print how much that is, and return 0."""
    from turnlog.consumers.index import BusyIndex
    from turnlog.consumers.index.indexer import build
    from turnlog.consumers.index.reader import path_of
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say

    async with open_role("index", settings, archive=archive) as role:
        path, began = path_of(role.settings), time.perf_counter()
        try:
            records = await build(role, path)
        except BusyIndex:  # its writer reads everything on the log
            say(f"{path} is kept up to date by another process, `turnlog up` or `turnlog role index`: nothing to do")
            return ExitStatus.DONE
    say(f"{records:,} records in {time.perf_counter() - began:.1f} s: {path}")
    return ExitStatus.DONE


QUERY_EPILOG = """\
The query reads the file that `turnlog role index` writes; docs/index-schema.md lists its tables. It can only read and
compute: it opens no file, loads no extension, changes nothing, and ends when its time, memory or rows are used up.

Examples:
  turnlog log query "select recipe, avg(reward), count(*) from sessions group by recipe"
  turnlog log query --json "select fate, count(*) from sessions group by fate"
  turnlog log query --out steps.parquet "select * from steps order by step"
"""


def _query_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = QUERY_EPILOG
    verb.add_argument("sql", metavar="SQL", help="one SELECT statement; - reads it from standard input")
    shape = verb.add_mutually_exclusive_group()
    add_json(shape)
    shape.add_argument("--out", type=Path, metavar="FILE", help="write the answer as Parquet, with its provenance")
    verb.add_argument("--limit", type=int, default=10_000, metavar="N", help="maximum number of rows (default 10000)")
    verb.add_argument("--timeout", type=float, default=30.0, metavar="S", help="time limit in seconds (default 30)")
    verb.add_argument("--memory", type=int, default=512, metavar="MB", help="memory limit in MB (default 512)")


def _query(settings: Settings, arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from turnlog.consumers.index.query import QueryLimits, ask, write_parquet
    from turnlog.consumers.index.reader import path_of
    from turnlog.infra.roles.terminal import Terminal, aside, say, say_json

    bounds = QueryLimits(rows=arguments.limit, timeout_s=arguments.timeout, memory_mb=arguments.memory)
    answer = ask(path_of(settings), sys.stdin.read() if arguments.sql == "-" else arguments.sql, bounds)
    if arguments.out is not None:
        write_parquet(answer, arguments.out)
        say(f"{len(answer.rows):,} rows: {arguments.out}")
    elif arguments.json:
        say_json(answer.body(), indent=None)
    else:
        table = Table(*answer.columns)
        for row in answer.rows:
            table.add_row(*("" if value is None else str(value) for value in row))
        Terminal().print(table)
    written = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(answer.as_of["written_ms"] / 1000))
    aside(f"as of {written}, {sum(answer.as_of['positions'].values()):,} offsets of run {answer.as_of['run']}")
    if answer.more:
        aside(f"the answer has more rows than {bounds.rows:,} (--limit)")
    return ExitStatus.DONE


TAIL_EPILOG = """\
Examples:
  turnlog log tail                                    print new events until Ctrl-C
  turnlog log tail --all --until-end --kind GroupScored --kind StepCompleted
  turnlog log tail --all --session 3fa2 --json
"""


def _tail_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = TAIL_EPILOG
    verb.add_argument("--session", default="", metavar="ID", help="only events of sessions whose id begins with ID")
    verb.add_argument("--group", default="", metavar="ID", help="only events of groups whose id begins with ID")
    verb.add_argument(
        "--kind", action="append", default=[], metavar="RECORD", help="only records of this type; may be repeated"
    )
    verb.add_argument("--all", action="store_true", help="start at the beginning (default: only new events)")
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log")
    add_json(verb, "print one JSON object per line")
    add_source(verb)


def _tail(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.console import tail_command

    return tail_command(settings, arguments)


WHY_EPILOG = """\
ID is the id of a session or group, or the beginning of one. A token is SESSION:TURN:TOKEN, both counted from 0: turns
in the order of the log, tokens within the turn's output. Chains of records are read from the index, tokens from the
topics or the archive.

Examples:
  turnlog log why 3fa2            why a session was trained, masked, discarded, excluded, stale or never batched
  turnlog log why 3fa2:1:17       the same for one of its tokens
"""


def _why_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = WHY_EPILOG
    verb.add_argument("about", metavar="ID", help="a session, a group, or SESSION:TURN:TOKEN")
    add_json(verb)
    add_source(verb)


def _why(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.console import why_command

    return why_command(settings, arguments)


def _until_end(arguments: argparse.Namespace) -> bool:
    return bool(arguments.until_end)


def _of_a_token(arguments: argparse.Namespace) -> bool:
    return ":" in arguments.about


VERBS = (
    Verb("query", "query the index in SQL; the answer states how old it is", _query, _query_arguments,
         looks=always, under="log"),
    Verb("why", "show the records that decided about a session, group or token", _why, _why_arguments,
         reads=_of_a_token, looks=always, under="log"),
    Verb("tail", "print events as they arrive, one per line", _tail, _tail_arguments,
         reads=_until_end, looks=always, under="log"),
    Verb("index", "index what is on the log now, for SQL queries", _index, _index_arguments, reads=always, under="log"),
)  # fmt: skip
