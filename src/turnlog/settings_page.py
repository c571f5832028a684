"""docs/settings.md: every setting with its default, generated from the settings classes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import get_type_hints

from turnlog.fold_settings import OPERATIONAL, OWN, Since
from turnlog.setting_types import legal, notes
from turnlog.settings import FOLD_SECTIONS, Settings, declarations

HEAD = """\
# Settings

One TOML file (`--settings FILE`), then `TURNLOG_SECTION_KEY` from the environment, which wins. Unknown keys, other
types and values out of range are errors. Lists are separated by commas there, or are JSON:
`'["GET,HEAD https://mirror.example/*"]'`. The run's effective settings are kept in `runs/ID/settings.toml`. This page
is generated (`make docs`).

What concerns one process stands beside them: `TURNLOG_LOG_LEVEL` (INFO), `TURNLOG_LOG_FORMAT` (text, or json: an object
a line), `TURNLOG_HEALTH_PORT` (not served) on `TURNLOG_HEALTH_HOST` (127.0.0.1), `TURNLOG_INSTANCE` (a name that stays
the same over restarts; role, host and process id), `TURNLOG_ENGINE_INDEX` (a loader's engine of `[engine] urls`; 0).

A secret, marked so below, may stand in a file instead: `TURNLOG_SECTION_KEY_FILE` names it. One line break at its end
is cut; a file that changes is read again without a restart.
"""


def settings_page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, kind) for name, kind in get_type_hints(Settings).items())


def _section(name: str, kind: type) -> str:
    about = (inspect.getdoc(kind) or "").partition("] ")[2]
    said, hints = said_of(kind), declarations(kind)
    rows = []
    for field in dataclasses.fields(kind):
        default = "*secret*" if not field.repr and field.default else f"`{_toml(field.default)}`"
        secret = [] if field.repr else ["Secret."]
        about_it = " ".join([said[field.name], *secret, *(_remark(note) for note in notes(hints[field.name]))]).strip()
        rows.append(f"| `{field.name}` | {default} | {_cell(legal(hints[field.name]))} | {_cell(about_it)} |\n")
    kept = "" if name not in FOLD_SECTIONS else " A run keeps them for life, but for those marked operational."
    return f"\n## [{name}]\n\n{about}{kept}\n\n| key | default | takes | |\n|---|---|---|---|\n" + "".join(rows)


def _remark(note: object) -> str:
    """What a mark of fold_settings means for people."""
    if note == OPERATIONAL:
        return "Operational: may change at a restart."
    if not isinstance(note, Since):
        return ""
    if note.before == OWN:
        return f"Recorded since release {note.release}; before it each role went by its own."
    return f"Since release {note.release}; before it {_toml(note.before)}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def said_of(kind: type) -> dict[str, str]:
    """The docstring line of each field. Raises KeyError for a field without one."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    said: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            said[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return {field.name: said[field.name] for field in dataclasses.fields(kind)}


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{part}"' for part in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(settings_page(), end="")
