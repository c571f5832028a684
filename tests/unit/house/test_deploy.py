"""infra/deploy without a cluster: files render, validate strictly, and name verbs, settings and metrics that exist."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError

from turnlog.cli import parser
from turnlog.infra.embedded.plan import ROLES as UP
from turnlog.infra.roles.ending import grace_s
from turnlog.settings import Settings, load
from turnlog.settings_page import chart_schema

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "infra/deploy"
COMPOSE = DEPLOY / "compose/compose.yaml"
CHART = DEPLOY / "helm/turnlog"
RULES = DEPLOY / "monitoring/rules.yaml"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
KUBERNETES = "1.36"
NAMES = tomllib.loads((ROOT / "tests/golden/names.toml").read_text())
OF_PROCESSES = {
    "TURNLOG_INSTANCE",
    "TURNLOG_HEALTH_HOST",
    "TURNLOG_HEALTH_PORT",
    "TURNLOG_LOG_FORMAT",
    "TURNLOG_LOG_LEVEL",
    "TURNLOG_ENGINE_URL",
}
"""What a process is told beside its settings."""
OF_COMPOSE = {"TURNLOG_IMAGES", "TURNLOG_VERSION"}
ROLES = {*UP, "feeder", "lag", "registry"}
Document = dict[str, Any]


def verbs() -> set[str]:
    (found,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return set(found.choices)


def variables() -> set[str]:
    """Every TURNLOG_ variable that some process reads."""
    settings = {
        (f"TURNLOG_{section}_{field.name}".upper(), field.repr)
        for section, kind in get_type_hints(Settings).items()
        for field in dataclasses.fields(kind)
    }
    return (
        OF_PROCESSES | {name if shown else f"{name}_FILE" for name, shown in settings} | {name for name, _ in settings}
    )


def test_compose_is_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_compose_names_verbs_and_variables_that_exist() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    ours = {name: service for name, service in services.items() if "turnlog" in service["image"].split("/")[0].lower()}
    assert {"assembler", "batcher", "archive", "views", "lag", "gateway", "runner", "sandbox", "trainer"} <= set(ours)
    assert {service["command"][0] for service in ours.values()} <= verbs()
    named = {name for service in ours.values() for name in service["environment"] if name.startswith("TURNLOG_")}
    assert named <= variables()
    commented = re.findall(r"^#?(TURNLOG_\w+)=", (COMPOSE.parent / ".env.example").read_text(), re.MULTILINE)
    assert set(commented) <= variables() | OF_COMPOSE
    assert set(commented) <= set(re.findall(r"TURNLOG_\w+", COMPOSE.read_text()))


def rendered(values: Document) -> Iterator[Document]:
    with Chart.load(CHART) as chart:
        chart.validate_schema(chart.merge_values(values))
        for name, text in chart.render(values, name="turnlog", namespace="rl").items():
            if name.endswith(".yaml"):
                yield from (document for document in yaml.safe_load_all(text) if document)


def examples() -> dict[str, str]:
    """Values that people begin with: the chart's examples, and those of the page."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    found = {path.stem: path.read_text() for path in EXAMPLES}
    return found | {f"page-{n}": text for n, text in enumerate(re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S))}


@pytest.fixture(scope="module", params=examples())
def documents(request: pytest.FixtureRequest) -> list[Document]:
    """What the chart makes of an example."""
    return list(rendered(yaml.safe_load(examples()[request.param])))


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name, pod spec) of all that runs."""
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "Pod" or "template" in spec:
            yield document["metadata"]["name"], spec["template"]["spec"] if "template" in spec else spec


def containers(documents: list[Document]) -> Iterator[Document]:
    for _, pod in pods(documents):
        yield from (*pod["containers"], *pod.get("initContainers", ()))


def test_what_the_chart_makes_is_valid(documents: list[Document]) -> None:
    for document in documents:
        if document["apiVersion"].partition("/")[0] not in ("keda.sh", "monitoring.coreos.com"):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_chart_names_verbs_and_variables_that_exist(documents: list[Document]) -> None:
    every = list(containers(documents))
    ours = [container for container in every if "--settings" in container.get("args", ())]
    assert {container["args"][2] for container in ours} <= verbs()
    named = {entry["name"] for container in every for entry in container.get("env", ())}
    assert {name for name in named if name.startswith("TURNLOG_")} <= variables()


def test_settings_of_the_chart_load(documents: list[Document], tmp_path: Path) -> None:
    (settings,) = (document["data"]["settings.toml"] for document in documents if document["kind"] == "ConfigMap")
    (tmp_path / "settings.toml").write_text(settings)
    assert load(tmp_path / "settings.toml", {}).kafka.bootstrap


def test_pods_are_restricted_but_for_those_that_make_sandboxes(documents: list[Document]) -> None:
    for name, pod in pods(documents):
        assert pod["enableServiceLinks"] is False, name
        assert pod["automountServiceAccountToken"] is False, name
        if name.endswith("-sandbox"):
            continue
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in pod["containers"]:
            own = container["securityContext"]
            assert (own["allowPrivilegeEscalation"], own["capabilities"]) == (False, {"drop": ["ALL"]}), name
            assert own["readOnlyRootFilesystem"] is True, name


def test_single_roles_are_recreated_and_never_held_by_a_budget(documents: list[Document]) -> None:
    roles = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Deployment"}
    budgets = {document["metadata"]["name"] for document in documents if document["kind"] == "PodDisruptionBudget"}
    for name, document in roles.items():
        single = name in ("turnlog-batcher", "turnlog-feeder")
        assert (document["spec"]["strategy"]["type"] == "Recreate") is single, name
        assert (name not in budgets) is single, name


def test_a_role_is_given_the_time_that_it_may_need_to_end(documents: list[Document]) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    compose = {
        name: float(service["stop_grace_period"].removesuffix("s"))
        for name, service in services.items()
        if "stop_grace_period" in service and service["command"][0] == name
    }
    chart = {
        name.removeprefix("turnlog-"): pod.get("terminationGracePeriodSeconds", 30) for name, pod in pods(documents)
    }
    chart["loader"] = chart.pop("engine", math.inf)  # one pod
    for given in (compose, chart):
        roles = {role: seconds for role, seconds in given.items() if role in ROLES}
        assert len(roles) >= 6
        assert {role: seconds for role, seconds in roles.items() if seconds < grace_s(role, Settings())} == {}


LAPTOP = yaml.safe_load((CHART / "examples/laptop.yaml").read_text())
REFUSED = {
    "a misspelt value": ({"rolez": {}}, "rolez"),
    "a misspelt setting": ({"settings": LAPTOP["settings"] | {"kafka": {"bootstraps": "kafka:9092"}}}, "bootstraps"),
    "a secret in values": ({"settings": LAPTOP["settings"] | {"store": {"secret_key": "s"}}}, "secret_key"),
    "no brokers": ({"settings": LAPTOP["settings"] | {"kafka": {"bootstrap": ""}}}, "settings.kafka.bootstrap"),
    "two batchers": ({"roles": LAPTOP["roles"] | {"batcher": {"replicas": 2}}}, "roles.batcher.replicas"),
    "scaling without a scaler": (
        {"roles": LAPTOP["roles"] | {"assembler": {"autoscale": {"enabled": True}}}},
        "autoscaler.kind",
    ),
    "more assemblers than partitions": (
        {"autoscaler": {"kind": "keda"}, "roles": {"assembler": {"autoscale": {"enabled": True, "max": 9}}}},
        "settings.kafka.groups",
    ),
    "scaling without lag": (
        {"autoscaler": {"kind": "keda"},
         "roles": {"lag": {"enabled": False}, "assembler": {"autoscale": {"enabled": True}}}},
        "roles.lag",
    ),
    "gateways without a common key": ({"secrets": {"name": ""}, "roles": {}}, "signing key"),
    "a runtime class that is not named": ({"sandbox": {"profile": "runtime"}}, "sandbox.runtimeClassName"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_contradict_each_other_are_refused_by_name(case: str) -> None:
    values, named = REFUSED[case]
    with pytest.raises(HelmError, match=re.escape(named)):
        list(rendered(LAPTOP | values))


def test_the_charts_schema_holds_todays_settings() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema == json.loads(json.dumps(chart_schema(schema))), "make docs"


def test_rules_and_dashboards_name_metrics_that_exist() -> None:
    exported = {"up"}
    for line in NAMES["metrics"]:
        name, kind = line.split()
        exported |= {"gauge": {name}, "counter": {f"{name}_total"}}.get(
            kind, {f"{name}_{of}" for of in ("bucket", "sum", "count")}
        )
    texts = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for dashboard in (DEPLOY / "monitoring/dashboards").glob("*.json"):
        texts += [
            target["expr"] for panel in json.loads(dashboard.read_text())["panels"] for target in panel["targets"]
        ]
    named = {name for text in texts for name in re.findall(r"\bturnlog_\w+", text)}
    assert named <= exported
    assert len(named) >= 30


def test_each_alert_leads_to_a_page() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            page, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert (page, anchor in anchors) == ("docs/operations.md", True), rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_rules_are_those_of_prometheus() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
