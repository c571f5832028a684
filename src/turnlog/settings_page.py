"""docs/settings.md: every setting with its default, generated from the settings classes."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import get_type_hints

from turnlog.settings import CHOICES, Settings

HEAD = """\
# Settings

One TOML file (`--settings FILE`), then `TURNLOG_SECTION_KEY` from the environment, which wins. Unknown keys are errors.
Lists are separated by commas there, or are JSON: `'["GET,HEAD https://mirror.example/*"]'`.
The run's effective settings are kept in `runs/ID/settings.toml`. This page is generated (`make docs`).
"""


def settings_page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, kind) for name, kind in get_type_hints(Settings).items())


def _section(name: str, kind: type) -> str:
    about = (inspect.getdoc(kind) or "").partition("] ")[2]
    notes = _notes(kind)
    rows = []
    for field in dataclasses.fields(kind):
        default = "*secret*" if not field.repr and field.default else f"`{_toml(field.default)}`"
        said = notes.get(field.name, "")
        if f"{name}.{field.name}" in CHOICES and not said:
            said = " / ".join(CHOICES[f"{name}.{field.name}"])
        rows.append(f"| `{field.name}` | {default} | {said} |\n")
    return f"\n## [{name}]\n\n{about}\n\n| key | default | |\n|---|---|---|\n" + "".join(rows)


def _notes(kind: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    notes: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(after, ast.Expr):
            notes[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split()).replace("|", "\\|")
    return notes


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{part}"' for part in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    print(settings_page(), end="")
