"""Rules by their cases (tests/deploy/alerts.yaml): in Prometheus's own engine, and that none is without."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from turnlog.consumers.lag import ROLES as CONSUMERS
from turnlog.consumers.lag import STANDS_S
from turnlog.names import OPTIONAL_ROLES, TRAINING_ROLES
from turnlog.plugins.alarms import GAP
from turnlog.producers.gateway.errors import GatewayError

ROOT = Path(__file__).parents[3]
RULES = ROOT / "infra/deploy/monitoring/rules.yaml"
CASES = ROOT / "tests/deploy/alerts.yaml"


def rules(kind: str = "alert") -> dict[str, str]:
    """Alert, or `record`, -> its expression."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule[kind]: rule["expr"] for group in groups for rule in group["rules"] if kind in rule}


def ends_of_cases(text: str) -> dict[str, set[bool]]:
    """Alert -> whether its cases fire."""
    found: dict[str, set[bool]] = defaultdict(set)
    for case in yaml.safe_load(text)["tests"]:
        for moment in case.get("alert_rule_test", ()):
            found[moment["alertname"]].add(bool(moment.get("exp_alerts")))
    return found


def test_each_alert_has_a_case_that_fires_and_one_that_does_not() -> None:
    ends = ends_of_cases(CASES.read_text())
    assert [alert for alert in rules() if ends[alert] != {True, False}] == []
    assert set(ends) == set(rules()), "a case of an alert that is none"


def test_what_is_recorded_has_a_case() -> None:
    recorded = set(rules("record"))
    cases = yaml.safe_load(CASES.read_text())["tests"]
    tested = {
        name for case in cases for one in case.get("promql_expr_test", ()) for name in recorded & asked(one["expr"])
    }
    assert recorded - tested == set(), "a case in tests/deploy/alerts.yaml"


def asked(text: str) -> set[str]:
    """Names of recorded series."""
    return set(re.findall(r"\b\w+:turnlog_\w+:\w+", text))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_and_rules_record_when_their_cases_say_and_no_sooner() -> None:
    done = subprocess.run(["promtool", "test", "rules", str(CASES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_thresholds_are_those_of_the_dashboard_and_of_turnlog_alerts() -> None:
    for alert, threshold in (("TurnlogGap", GAP), ("TurnlogRoleStands", STANDS_S)):
        compared = re.search(r"> ([\d.]+)", rules()[alert])
        assert compared is not None
        assert float(compared[1]) == threshold, alert


def test_alerts_are_sent_without_the_dashboard() -> None:
    program = "import sys, turnlog.plugins.exporters.alerts; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name.startswith("turnlog.plugins.dashboard")] == []


def test_errors_of_the_gateway_that_an_alert_counts_are_its_own_and_all_of_them() -> None:
    kinds, wanted = [GatewayError], set()
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        wanted |= {kind.code} if kind.status >= 500 else set()
    counted = re.search(r'errors_total\{code=~"([^"]+)"\}', rules()["TurnlogGatewayErrors"])
    assert counted is not None
    assert counted[1].split("|") == sorted(wanted)


def test_each_role_that_can_stand_still_has_an_alert_and_no_rule_names_a_role_that_is_none() -> None:
    """One that reads topics stands still while it answers: its lag tells. Any other does when it answers no more."""
    catalogue = {*TRAINING_ROLES, *OPTIONAL_ROLES}
    selectors = {name: re.findall(r'\brole(=~|!~|!=|=)"([^"]+)"', expression) for name, expression in rules().items()}
    assert {role for found in selectors.values() for _, named in found for role in named.split("|")} <= catalogue
    assert CONSUMERS.keys() - {"run"} <= catalogue, "`turnlog run` is the one verb that reads as a group"
    told = set()
    for name, expression in rules().items():
        if "role:turnlog_role_lag_seconds:max" in expression:
            excepted = {role for mark, named in selectors[name] if mark[0] == "!" for role in named.split("|")}
            only = {role for mark, named in selectors[name] if mark[0] != "!" for role in named.split("|")}
            told |= (only or CONSUMERS.keys()) - excepted
    assert told == CONSUMERS.keys(), "roles whose lag no alert looks at"
    assert rules()["TurnlogRoleDown"] == 'up{job="turnlog"} == 0', "it is of every role"


def test_each_optional_role_that_commits_nothing_has_an_alert_on_its_progress() -> None:
    """Nothing tells its lag. The dashboard reads what a page asks for, so it stands still when its index does."""
    named = re.findall(r'turnlog_stage_seconds_count\{role=~?"([^"]+)"', rules()["TurnlogReaderStands"])
    told = {role for roles in named for role in roles.split("|")}
    assert told == set(OPTIONAL_ROLES) - CONSUMERS.keys() - {"dashboard"}
