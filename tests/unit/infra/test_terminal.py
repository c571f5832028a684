"""What verbs print: text from outside is shown, and does nothing."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from turnlog.infra.roles.terminal import Terminal, aside, say, say_json
from turnlog.settings import RunSettings, Settings
from turnlog.verbs import status_page

PLANTED = "g1\n2026-01-01 INFO all is well\r\x1b[2J\x1b]0;title\x07\x9b31m\u2028\u202e\x00 [/red] [bold]:smiley:"
SHOWN = r"g1\n2026-01-01 INFO all is well\r\x1b[2J\x1b]0;title\x07\x9b31m\u2028\u202e\x00 [/red] [bold]:smiley:"


def terminal() -> Terminal:
    """A terminal of colours that can be read."""
    return Terminal(file=io.StringIO(), width=500, force_terminal=True, color_system=None)


def test_a_line_and_a_cell_show_text_from_outside_as_it_is_logged() -> None:
    console = terminal()
    console.print(PLANTED)
    table = Table("name", title=PLANTED)
    table.add_row(PLANTED)
    console.print(table)
    shown = console.file.getvalue()
    assert shown.startswith(SHOWN + "\n")
    assert shown.count(SHOWN) == 3


@given(st.text(), st.text())
def test_nothing_that_is_printed_reaches_the_terminal_but_as_characters(line: str, styled: str) -> None:
    console = terminal()
    console.print(line)
    console.print(Text(styled))
    table = Table(line)
    table.add_row(Text(styled))
    console.print(table)
    assert all(char.isprintable() or char == "\n" for char in console.file.getvalue())


def test_a_table_into_a_pipe_keeps_every_column_whole() -> None:
    console = Terminal(file=io.StringIO())
    table = Table(*(f"column {number}" for number in range(12)))
    table.add_row(*(f"value-{number}-{'x' * 30}" for number in range(12)))
    width = console.width
    console.print(table)
    shown = console.file.getvalue()
    assert all(f"value-{number}-{'x' * 30}" in shown for number in range(12))
    assert console.width == width


def test_plain_lines_are_escaped_on_both_streams(capsys: pytest.CaptureFixture[str]) -> None:
    say(PLANTED, "next")
    aside(PLANTED)
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"{SHOWN}\nnext\n", f"{SHOWN}\n")


@given(st.recursive(st.text() | st.integers() | st.none(), lambda inner: st.dictionaries(st.text(), inner)))
def test_json_is_read_back_as_it_was(body: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        say_json(body)
    assert json.loads(out.getvalue()) == body
    assert all(char.isprintable() or char == "\n" for char in out.getvalue())


def test_json_keeps_the_letters_of_every_script(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"é": "字\x9b"}, indent=None)
    assert capsys.readouterr().out == '{"é": "字\\u009b"}\n'


def test_status_shows_what_engines_and_processes_call_themselves_as_text() -> None:
    console = terminal()
    child = {"name": PLANTED, "state": "failed", "pid": None, "restarts": 1, "waiting": "", "error": f"{PLANTED}\nmore"}
    found = {
        "run": "r",
        "processes": [child],
        "warnings": {PLANTED: [PLANTED]},
        "engines": {PLANTED: {"state": PLANTED, "version": 1, "url": PLANTED}},
        "views": {"unavailable": PLANTED},
        "recipes": {"unavailable": PLANTED},
    }
    status_page.tell(found, Settings(run=RunSettings(id="r")), console)
    shown = console.file.getvalue()
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert shown.count(SHOWN) == 8
