"""Names that leave the process stand as tests/golden/names.toml froze them (docs/schema-evolution.md, Names)."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from docs.tools.metrics_page import metrics as declared
from tests.each import each
from turnlog import __version__
from turnlog.former_settings import FORMER
from turnlog.names import (
    HEADERS,
    REGISTRY_TOPIC,
    VARIABLES,
    ConsumerGroup,
    EntryPointGroup,
    ExitStatus,
    TransactionalId,
)
from turnlog.schemas.events import ALL
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import Settings, declarations

ROOT = Path(__file__).parents[3]
GOLDEN = tomllib.loads((ROOT / "tests/golden/names.toml").read_text())
ROOMS = ("schemas", "producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins")
MODULES = [path for room in (*ROOMS, "src/turnlog") for path in sorted((ROOT / room).rglob("*.py"))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
METRIC = re.compile(r"^from prometheus_client import .*\b(Counter|Gauge|Histogram|Summary|Info|Enum)\b", re.MULTILINE)
COUNTED = """
import importlib, sys
from prometheus_client import REGISTRY
for module in sys.argv[1:]:
    importlib.import_module(module)
for family in REGISTRY.collect():
    if family.name.startswith("turnlog"):
        print(family.name, family.type)
"""


def metrics() -> set[str]:
    """Name and type of every metric, from the registry of a process that imported each module that makes one."""
    modules = [dotted(path) for path in MODULES if METRIC.search(path.read_text())]
    done = subprocess.run([sys.executable, "-c", COUNTED, *modules], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")) - {""}


def dotted(path: Path) -> str:
    """The module of a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("turnlog", *(parts[2:] if parts[0] == "src" else parts))).removesuffix(".__init__")


def imports() -> set[str]:
    """`module:name` of everything that README, docs and examples import or name with its path."""
    sources = [path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))]
    found: set[str] = set()
    for page in PAGES:
        text = page.read_text()
        found.update(imported("\n".join(re.findall(r"^(?:>>> )?((?:from|import) turnlog.*)$", text, re.MULTILINE))))
        for path in re.findall(r"`(turnlog(?:\.\w+){2,})", text):
            found.update(named(path))
    for source in sources:
        found.update(imported("\n".join(re.findall(r"^(?:from|import) turnlog.*$", source, re.MULTILINE))))
    return found


def imported(source: str) -> Iterator[str]:
    """What import statements import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}:{name.name}" for name in node.names)


def named(path: str) -> Iterator[str]:
    """A path in prose: of a module, or of a name in one; a path that is neither is no import."""
    module, _, name = path.rpartition(".")
    for candidate, member in ((path, ""), (module, name)):
        if (ROOT / "src" / candidate.replace(".", "/")).with_suffix(".py").is_file():
            yield f"{candidate}:{member}" if member else candidate


def entry_points() -> set[str]:
    """What our metadata offers, and the groups under which others may."""
    own = importlib.metadata.distribution("turnlog").entry_points
    return {f"{point.group}: {point.name}" for point in own} | {f"{group}: *" for group in EntryPointGroup}


NAMES: dict[str, Any] = {
    "groups": lambda: set(ConsumerGroup),
    "transactional_ids": lambda: set(TransactionalId),
    "topics": lambda: {topic.name for topic in CATALOGUE} | {REGISTRY_TOPIC},
    "records": lambda: set(ALL),
    "headers": lambda: set(HEADERS),
    "metrics": metrics,
    "settings": lambda: (
        {f"{section}.{key}" for section, kind in get_type_hints(Settings).items() for key in declarations(kind)}
        | FORMER.keys()
    ),
    "variables": lambda: VARIABLES,
    "entry_points": entry_points,
    "exit_statuses": lambda: {f"{status.value} {status.name}" for status in ExitStatus},
    "imports": imports,
}


@each("kind", NAMES)
def test_the_names_that_leave_the_process_are_those_that_were_frozen(kind: str) -> None:
    frozen, found = GOLDEN[kind], {str(name) for name in NAMES[kind]()}
    assert frozen == sorted(set(frozen)), "tests/golden/names.toml: keep each list sorted"
    new = sorted(found - set(frozen))
    assert not new, (
        f"new {kind}: check the spelling, it is for ever; then add to {kind} in tests/golden/names.toml: {new}"
    )
    gone = sorted(set(frozen) - found) if kind != "imports" else []
    assert not gone, (
        f"{kind} that are gone, and that others use: {gone}. Keep each as an alias for one release and enter it under "
        "[leaving] in tests/golden/names.toml (docs/schema-evolution.md, Names); topics and records are never removed"
    )


@each("path", GOLDEN["imports"])
def test_a_public_import_path_still_imports(path: str) -> None:
    assert imports_as(path) is not None, f"{path}: leave an alias module at the old path (decision 25)"


def imports_as(path: str) -> object:
    """What is imported; a leaving path may warn. Raises what the import raises."""
    module, _, name = path.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        found = importlib.import_module(module)
    return getattr(found, name) if name else found


def test_a_leaving_name_stays_for_one_release_and_not_longer() -> None:
    today = [int(part) for part in __version__.split(".")]
    for entry in GOLDEN["leaving"]:
        assert entry["name"] in GOLDEN[entry["kind"]]
        left = [int(part) for part in entry["until"].split(".")]
        assert today < left, f"{entry['name']}: its release has come; remove the alias, its name and this entry"
        if entry["kind"] == "imports":
            assert imports_as(entry["name"]) is imports_as(entry["now"])


def test_the_former_settings_are_those_that_leave() -> None:
    assert [entry["name"] for entry in GOLDEN["leaving"] if entry["kind"] == "settings"] == sorted(FORMER)


UNBOUNDED = {
    "session",
    "session_id",
    "group_id",
    "call",
    "call_id",
    "task",
    "task_id",
    "path",
    "url",
    "text",
    "command",
}


def test_the_page_of_metrics_has_each_of_them_and_no_label_grows_without_bound() -> None:
    found = declared()
    families = {each.name.removesuffix("_total") if each.kind == "counter" else each.name for each in found}
    assert sorted(families) == sorted(line.split()[0] for line in GOLDEN["metrics"])
    assert {label for each in found for label in each.labels} & UNBOUNDED == set()


def test_an_entry_point_group_is_named_in_one_place() -> None:
    said = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if path.name != "names.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Constant) and node.value in set(EntryPointGroup))
        or (isinstance(node, ast.keyword) and node.arg == "group" and isinstance(node.value, ast.Constant))
    ]
    assert said == [], "use turnlog.names.EntryPointGroup"
