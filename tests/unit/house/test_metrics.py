"""What every role exports of itself, as the code says it, and what rules and dashboards ask for of it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.tools.grafana import dashboards
from docs.tools.metrics_page import metrics, stages
from turnlog.verbs.roles import LOOPS

ROOT = Path(__file__).parents[3]
ROOMS = ("producers", "processors", "consumers", "sandbox_workers", "trainer", "infra", "plugins", "src/turnlog/verbs")
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
ANSWER = {"dashboard", "registry", "egress", "engine"}
"""Processes that answer requests, and take nothing from the log that could wait."""


def named(call: str, keyword: str = "") -> Iterator[str]:
    """The first argument of each call, or a keyword's, where it is written out."""
    for path in MODULES:
        source = path.read_text()
        for node in ast.walk(ast.parse(source if f"{call}(" in source else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == call:
                found = [each.value for each in node.keywords if each.arg == keyword] if keyword else node.args[:1]
                yield from (str(each.value) for each in found if isinstance(each, ast.Constant))


def test_every_role_exports_what_waits_for_it_seconds_of_its_stages_and_bytes() -> None:
    served = {*LOOPS, *named("serve")}
    """By runs.serve, which opens their log under their names, and says restarts."""
    roles = served | set(named("Health")) - ANSWER
    assert len(roles) >= 15
    own = {each.name for each in metrics() if each.kind == "histogram"}
    timed = set(stages()) | {role for role in roles if any(name.startswith(f"turnlog_{role}_") for name in own)}
    assert roles - timed == set(), "observe STAGE_S (infra/roles/measures.py) where it does its work"
    counted = served | set(named("KafkaLog.of", "role"))
    assert roles - counted == set(), "open its log under its name"
    assert set(stages()) <= roles


RULES = yaml.safe_load((ROOT / "infra/deploy/monitoring/rules.yaml").read_text())["groups"]
OF_TARGETS = {"instance", "job", "component"}
"""Labels that Prometheus gives to whatever it scrapes."""
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
SERIES = re.compile(r"(?<![\w$])((?:\w+:)?turnlog_\w+(?::\w+)?|up)\b(?!\s*\()(?:\{([^}]*)\})?")
BY = re.compile(r"\bby \(([^)]*)\) \(")


def series() -> dict[str, set[str]]:
    """Whatever may be asked for -> its labels: what the code declares, and what is recorded of it."""
    found = {"up": set(OF_TARGETS)}
    for each in metrics():
        for suffix in SUFFIXES.get(each.kind, ("",)):
            found[each.name + suffix] = {*each.labels, *OF_TARGETS, *(["le"] if suffix == "_bucket" else [])}
    for rule in (rule for group in RULES for rule in group["rules"] if "record" in rule):
        labels = labels_of(rule["expr"], found) | set(rule.get("labels", ()))
        assert found.setdefault(rule["record"], labels) == labels, f"{rule['record']} has not always the same labels"
        assert rule["record"].partition(":")[0] == "_".join(name for name in ORDER if name in labels), rule["record"]
    return found


ORDER = ("role", "stage", "direction", "finish_reason", "status", "le")


def labels_of(query: str, known: dict[str, set[str]]) -> set[str]:
    """Of its answer: by what it is summed, or those of all its series."""
    by = BY.search(query)
    if by is not None:
        return {label.strip() for label in by[1].split(",")}
    labels = set.intersection(*(known[name] for name, _ in SERIES.findall(query)))
    return labels - ({"le"} if query.startswith("histogram_quantile") else set())


def within(text: str, start: int) -> str:
    """What stands between the bracket that was opened before `start` and its end."""
    depth, at = 1, start
    while depth:
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1]


def faults(query: str, known: dict[str, set[str]], shown: str = "") -> list[str]:
    """Names and labels that do not exist; `shown`: a legend, or an annotation."""
    asked = SERIES.findall(query)
    found = [f"no {name}" for name, _ in asked if name not in known]
    if found:
        return found
    for name, matchers in asked:
        labels = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers)
        found += [f"{name} has no {label}" for label in labels if label not in known[name]]
    for by in BY.finditer(query):
        for name, _ in SERIES.findall(within(query, by.end())):
            found += [f"{name} has no {one}" for one in map(str.strip, by[1].split(",")) if one not in known[name]]
    wanted = re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*(?:\||\}\})", shown)
    return [*found, *(f"the answer has no {label}" for label in wanted if label not in labels_of(query, known))]


def queries() -> Iterator[tuple[str, str]]:
    """Of every rule and panel, with what is shown of its answer."""
    for rule in (rule for group in RULES for rule in group["rules"]):
        yield rule["expr"], rule.get("annotations", {}).get("summary", "")
    for text in dashboards().values():
        for panel in json.loads(text)["panels"]:
            yield from ((target["expr"], target["legendFormat"]) for target in panel["targets"])


def test_the_dashboards_are_what_their_generator_makes() -> None:
    kept = {path.name: path.read_text() for path in (ROOT / "infra/deploy/monitoring/dashboards").iterdir()}
    assert kept == dashboards(), "make docs"


def test_what_is_recorded_is_asked_for() -> None:
    recorded = {rule["record"] for group in RULES for rule in group["rules"] if "record" in rule}
    assert recorded - {name for query, _ in queries() for name, _ in SERIES.findall(query)} == set()


def test_every_query_asks_for_metrics_and_labels_that_exist() -> None:
    known = series()
    found = {query: wrong for query, shown in queries() if (wrong := faults(query, known, shown))}
    assert found == {}
    assert len({name for query, _ in queries() for name, _ in SERIES.findall(query)}) >= 30


@pytest.mark.parametrize(
    ("query", "shown", "wrong"),
    [
        ("turnlog_nothing", "", "no turnlog_nothing"),
        ('turnlog_role_lag_records{unit="1"}', "", "turnlog_role_lag_records has no unit"),
        ("sum by (tool) (rate(turnlog_gateway_turns_total[1m]))", "", "turnlog_gateway_turns_total has no tool"),
        ("sum by (le) (turnlog_trainer_loss)", "", "turnlog_trainer_loss has no le"),
        ("sum by (kind) (turnlog_gateway_tokens_total)", "{{instance}}", "the answer has no instance"),
        ("turnlog_role_lag_records > 1", "{{ $labels.topic }} waits", "the answer has no topic"),
    ],
)
def test_a_query_that_asks_for_what_is_not_there_is_found(query: str, shown: str, wrong: str) -> None:
    assert faults(query, series(), shown) == [wrong]
