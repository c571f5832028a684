"""Generate docs/index-schema.md from the tables of the index."""

from __future__ import annotations

from turnlog.consumers.index.schema import (
    ABOUT,
    BATCH_ROWS,
    DRAWN,
    DROPS,
    GROUPS,
    POSITIONS,
    RECORDED,
    SCHEMA_VERSION,
    SESSIONS,
    UNREAD,
)

PREAMBLE = """\
# Tables of the index

Generated from `consumers/index/schema.py` by `make docs`. Schema version {version}: any change of a table is a new
version, and an index of another one is built again. [index.md](index.md) says how to ask.

Each view of records has, beside what is listed, `topic`, `partition`, `offset` (where the record stands), `event_id`,
`time_ms` (of the record, ms since 1970) and `place` (the three in one integer, for joins and `search`). Behind a view
`name` stands a table `name_records` that holds the repeats, too: there `counts` is 0. `tool_calls` joins the request
and the answer of each call. `search` finds words: `SELECT rowid FROM search WHERE search MATCH 'words'` gives places of
turns and tool_results.

`fate` of a session is `open` (no finish that counts), `unscored` (its group is not scored yet), `not_member` (another
attempt counts, or it came late), `excluded`, `discarded` or `not_training` (as its group's score says), `masked` (the
tree lets no token train), `waiting` (for a draw), `dropped` (no batch has a row of it), `drawn`, `step_skipped` or
`trained`.

Times are milliseconds since 1970, ids and hashes text, booleans 0 or 1."""


def index_page() -> str:
    """Render the whole page."""
    parts = [PREAMBLE.format(version=SCHEMA_VERSION)]
    for table in (SESSIONS, GROUPS, *RECORDED, BATCH_ROWS, DROPS, DRAWN, UNREAD, POSITIONS, ABOUT):
        topic = f" Topic `{table.topic.name}`." if table.topic else ""
        once = f" The first record of the same {', '.join(table.once)} counts." if table.once else ""
        parts += [f"\n## {table.name}\n", f"{table.says}{topic}{once}\n", "| column | type | |", "|---|---|---|"]
        cells = ((each.name, each.kind, each.says.replace("|", "\\|")) for each in table.columns)
        parts += [f"| {name} | {kind} | {says} |" for name, kind, says in cells]
    return "\n".join([*parts, ""])


if __name__ == "__main__":
    print(index_page(), end="")
