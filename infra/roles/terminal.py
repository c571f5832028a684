"""Terminal output of the command line. Text from events, agents and processes is printed as plain text: it cannot move
the cursor, begin a line or act as markup. It is escaped by the rule of log lines (log_lines.escaped).
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

from turnlog.infra.roles.log_lines import escape_controls

WIDEST = 100_000
"""Width in columns of a table that is not printed to a terminal."""


class Terminal(Console):
    """rich's console. A str is plain text of one line, also in a table cell; a Text keeps its styles and line
    breaks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; into a pipe or a file, a table gets the width that all its columns need, since there is no screen
        width."""
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
        """Escape the text before it is measured, so that the escapes have room."""
        return super().render_str(escape_controls(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; escape the contents of a Text, except for its line breaks."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(escape_controls, segment.text.split("\n"))), segment.style)


def say(*lines: str) -> None:
    """Print lines, each escaped."""
    print(*map(escape_controls, lines), sep="\n", flush=True)


def aside(*lines: str) -> None:
    """Print lines, each escaped, to standard error, apart from the output that a pipe reads."""
    print(*map(escape_controls, lines), sep="\n", file=sys.stderr, flush=True)


def say_json(body: Any, *, indent: int | None = 2) -> None:
    """Print readable JSON; only non-printable characters are written as JSON escapes."""
    print(printable_json(json.dumps(body, indent=indent, ensure_ascii=False)), flush=True)


def printable_json(text: str) -> str:
    """Return the same JSON with non-printable characters as JSON escapes."""
    hidden = [char for char in set(text) if not char.isprintable() and char != "\n"]
    return text.translate({ord(char): json.dumps(char)[1:-1] for char in hidden})
