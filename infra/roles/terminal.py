"""What a verb prints. Text that events, agents and processes brought is shown as text: it moves no cursor, begins no
line and is no markup. The rule is that of log lines (log_lines.escaped).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from turnlog.infra.roles.log_lines import escaped

WIDEST = 100_000
"""Columns of text of a table that is read by a program."""


class Terminal(Console):
    """rich's console. A str is plain text of one line, also in a cell of a table; a Text has styles, and line breaks
    that stand."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Into a pipe or a file a table has all its columns, whole: nobody there has a width."""
        width = self.width
        if not self.is_terminal:
            wide = self.options.update(max_width=WIDEST)
            self.width = max(
                [width, *(one.__rich_measure__(self, wide).maximum for one in objects if isinstance(one, Table))]
            )
        try:
            super().print(*objects, **options)
        finally:
            self.width = width

    def render_str(self, text: str, **options: Any) -> Text:
        """Escaped before it is measured, so that what is escaped has its place."""
        return super().render_str(escaped(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Whatever a Text holds: escaped but for its line breaks."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(escaped, segment.text.split("\n"))), segment.style)


def say(*lines: str) -> None:
    """Print lines, each escaped."""
    print(*map(escaped, lines), sep="\n", flush=True)


def aside(*lines: str) -> None:
    """Print lines, each escaped, to standard error: beside what a pipe reads."""
    print(*map(escaped, lines), sep="\n", file=sys.stderr, flush=True)


def say_json(body: Any, *, indent: int | None = 2) -> None:
    """Print JSON that reads as it was written, but for characters that do not print: those in JSON's own escapes."""
    print(printable_json(json.dumps(body, indent=indent, ensure_ascii=False)), flush=True)


def printable_json(text: str) -> str:
    """The same JSON, with characters that do not print in JSON's own escapes."""
    hidden = [char for char in set(text) if not char.isprintable() and char != "\n"]
    return text.translate({ord(char): json.dumps(char)[1:-1] for char in hidden})
