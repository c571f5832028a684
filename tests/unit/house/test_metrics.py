"""What every role exports of itself, as the code says it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from turnlog import cli
from turnlog.metrics_page import metrics, stages

ROOT = Path(__file__).parents[3]
ROOMS = ("producers", "processors", "consumers", "sandbox_workers", "trainer", "infra")
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
ANSWER = {"dashboard", "registry", "egress", "engine"}
"""Processes that answer requests, and take nothing from the log that could wait."""


def named(call: str, keyword: str = "") -> Iterator[str]:
    """The first argument of each call, or a keyword's, where it is written out."""
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == call:
                found = [each.value for each in node.keywords if each.arg == keyword] if keyword else node.args[:1]
                yield from (str(each.value) for each in found if isinstance(each, ast.Constant))


def test_every_role_exports_what_waits_for_it_seconds_of_its_stages_and_bytes() -> None:
    served = {*cli.ROLES, *named("serve")}
    """By runs.serve, which opens their log under their names, and says restarts."""
    roles = served | set(named("Health")) - ANSWER
    assert len(roles) >= 15
    own = {each.name for each in metrics() if each.kind == "histogram"}
    timed = set(stages()) | {role for role in roles if any(name.startswith(f"turnlog_{role}_") for name in own)}
    assert roles - timed == set(), "observe STAGE_S (infra/roles/measures.py) where it does its work"
    counted = served | set(named("KafkaLog.of", "role"))
    assert roles - counted == set(), "open its log under its name"
    assert set(stages()) <= roles
