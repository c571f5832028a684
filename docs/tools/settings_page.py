"""Generate docs/settings.md (every setting with its default) and the chart's schema of `settings` (values.schema.json)
from the settings classes, and the chart's README from its values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import yaml

from turnlog.fold_settings import OPERATIONAL, OWN, Since
from turnlog.former_settings import keys_of
from turnlog.setting_types import legal, notes
from turnlog.settings import FOLD_SECTIONS, Settings, declarations

HEAD = """\
# Settings

Settings come from one TOML file (`--settings FILE`) and from environment variables `TURNLOG_SECTION_KEY`, which
win. Unknown keys, unknown variables that begin with `TURNLOG_`, wrong types and values out of range are errors. In
the environment, a list is separated by commas or is JSON: `'["GET,HEAD https://mirror.example/*"]'`. The effective
settings of a run are stored in `runs/ID/settings.toml`. This page is generated (`make docs`). A key that was a setting
until 0.2 only causes a warning, until 0.3.0 (`turnlog.former_settings` lists them).

These variables concern one process and are no settings:

| variable | default | |
|---|---|---|
| `TURNLOG_LOG_LEVEL` | INFO | Level of the log. |
| `TURNLOG_LOG_FORMAT` | text | Format of the log: `text`, or `json` for one object per line. |
| `TURNLOG_HEALTH_PORT` | not served | Port of the health endpoint. |
| `TURNLOG_HEALTH_HOST` | 127.0.0.1 | Address of the health endpoint. |
| `TURNLOG_INSTANCE` | role, host and process id | Name that stays the same over restarts. |
| `TURNLOG_RESTARTS` | 0 | How often the process was restarted, for its metrics. |
| `TURNLOG_ENGINE_INDEX` | 0 | Which engine of `[engine] urls` a loader serves. |

A secret, marked as such below, may be stored in a file that `TURNLOG_SECTION_KEY_FILE` names. One line break at its
end is removed. A file that changes is read again without a restart.
"""


def settings_page() -> str:
    """Render the whole page."""
    return HEAD + "".join(_section(name, kind) for name, kind in get_type_hints(Settings).items())


def chart_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the chart's JSON schema with the current settings in it. Secrets are left out, since they belong in a
    Kubernetes Secret."""
    (_, parts) = msgspec.json.schema_components([Settings], ref_template="#/$defs/{name}")
    everything = parts.pop("Settings")["properties"]
    for name, kind in get_type_hints(Settings).items():
        part = parts[kind.__name__]
        for field in dataclasses.fields(kind):
            if not field.repr:
                del part["properties"][field.name]
        part["properties"] |= {key: {"deprecated": True} for key in keys_of(name)}
        parts[kind.__name__] = {"type": "object", "additionalProperties": False, "properties": part["properties"]}
        everything[name] = {"$ref": everything[name]["$ref"]}
    settings = {"type": "object", "additionalProperties": False, "properties": everything}
    kept = {name: part for name, part in schema["$defs"].items() if not name.endswith("Settings")}
    return schema | {"properties": schema["properties"] | {"settings": settings}, "$defs": kept | parts}


CHART_HEAD = """\
# The Helm chart of turnlog {version}

{description}. Kubernetes {kubernetes}. [docs/kubernetes.md](../../../../docs/kubernetes.md) installs, changes and
strikes it. An unknown value is refused (`values.schema.json`), and so are values that contradict each other. This
page is generated from [values.yaml](values.yaml) (`make docs`).

```console
helm install turnlog infra/deploy/helm/turnlog --namespace rl --values values.yaml --wait
```

Begin with one of these:

{examples}
"""


def chart_page(chart: Path) -> str:
    """Render the README of a chart's folder: every value with its default and its comment in values.yaml."""
    about, text = yaml.safe_load((chart / "Chart.yaml").read_text()), (chart / "values.yaml").read_text()
    examples = "\n".join(
        f"* [{path.stem}](examples/{path.name}): {_above(yaml.compose(said), said.splitlines())}"
        for path in sorted((chart / "examples").glob("*.yaml"))
        if (said := path.read_text())
    )
    head = CHART_HEAD.format(
        version=about["version"], description=about["description"], kubernetes=about["kubeVersion"], examples=examples
    )
    return head + "".join(_values(key, value, text.splitlines()) for key, value in yaml.compose(text).value)


def _values(key: yaml.Node, value: yaml.Node, lines: list[str]) -> str:
    """Render the section of a top-level value, with a table of the values below it."""
    rows = "".join(
        f"| `{path}` | {default} | {_cell(said)} |\n" for path, default, said in _leaves(key.value, key, value, lines)
    )
    return f"\n## {key.value}\n\n{_above(key, lines)}\n\n| value | default | |\n|---|---|---|\n{rows}"


def _leaves(path: str, key: yaml.Node, value: yaml.Node, lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (path, default, comment) for each value in a node and for each comment between them. A value written on one
    line counts as one value."""
    above = _above(key, lines) if "." in path else ""
    if isinstance(value, yaml.MappingNode) and not value.flow_style:
        if above:
            yield path, "", above
        for inner, found in value.value:
            yield from _leaves(f"{path}.{inner.value}", inner, found, lines)
        return
    source = lines[value.start_mark.line][value.start_mark.column : value.end_mark.column]
    behind = lines[value.end_mark.line][value.end_mark.column :].strip().removeprefix("#").strip()
    yield path, f"`{source}`", " ".join(filter(None, (above, behind)))


def _above(key: yaml.Node, lines: list[str]) -> str:
    """Return the comment above a key."""
    said: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        if not line.strip().startswith("#"):
            break
        said.insert(0, line.strip().removeprefix("#").strip())
    return " ".join(" ".join(said).split())


def _section(name: str, kind: type) -> str:
    about = (inspect.getdoc(kind) or "").partition("] ")[2]
    said, hints = said_of(kind), declarations(kind)
    rows = []
    for field in dataclasses.fields(kind):
        default = "*secret*" if not field.repr and field.default else f"`{_toml(field.default)}`"
        secret = [] if field.repr else ["Secret."]
        remarks = filter(None, map(_remark, notes(hints[field.name])))
        about_it = " ".join([said[field.name], *secret, *remarks]).strip()
        rows.append(f"| `{field.name}` | {default} | {_cell(legal(hints[field.name]))} | {_cell(about_it)} |\n")
    kept = (
        "" if name not in FOLD_SECTIONS else " They are fixed for the life of a run, except those marked operational."
    )
    return f"\n## [{name}]\n\n{about}{kept}\n\n| key | default | takes | what it does |\n|---|---|---|---|\n" + "".join(
        rows
    )


def _remark(note: object) -> str:
    """Return the text for a mark of fold_settings."""
    if note == OPERATIONAL:
        return "Operational: may change at a restart."
    if not isinstance(note, Since):
        return ""
    if note.before == OWN:
        return f"Recorded since release {note.release}; before it, each role used its own setting."
    return f"Since release {note.release}; before it, {_toml(note.before)}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def said_of(kind: type) -> dict[str, str]:
    """Return the docstring of each field as one line, including inherited fields. Raises KeyError for a field without
    one."""
    said: dict[str, str] = {}
    for part in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
        assert isinstance(body, ast.ClassDef)
        for before, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
            ):
                said[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
    return {field.name: said[field.name] for field in dataclasses.fields(kind)}


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(f'"{part}"' for part in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


if __name__ == "__main__":
    for chart in map(Path, sys.argv[1:]):
        schema = chart / "values.schema.json"
        schema.write_text(json.dumps(chart_schema(json.loads(schema.read_text())), indent=2) + "\n")
        (chart / "README.md").write_text(chart_page(chart))
    if not sys.argv[1:]:
        print(settings_page(), end="")
