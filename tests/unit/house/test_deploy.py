"""infra/deploy without a cluster: files render, validate strictly, and name verbs, settings and metrics that exist."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, HelmError

from docs.tools.settings_page import chart_page, chart_schema
from tests.each import each
from turnlog.cli import VERBS, parser
from turnlog.infra.embedded.plan import ROLES as EMBEDDED
from turnlog.infra.roles.ending import grace_s
from turnlog.infra.topics_admin import ROLES as RIGHTS
from turnlog.names import OPTIONAL_ROLES, TRAINING_ROLES
from turnlog.settings import Settings, load
from turnlog.settings import variables as known_variables

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "infra/deploy"
COMPOSE, EGRESS = DEPLOY / "compose/compose.yaml", DEPLOY / "compose/egress.yaml"
PROMETHEUS = DEPLOY / "compose/prometheus.yaml"
CHART = DEPLOY / "helm/turnlog"
RULES = DEPLOY / "monitoring/rules.yaml"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
KUBERNETES = "1.36"
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
UP = tuple(role for role in EMBEDDED if role not in ("index", "alerts", "tinker"))
"""The indexer is in the dashboard's pod, and is who that is; the chart runs neither `alerts` nor `tinker`."""
ROLES = {*TRAINING_ROLES, *OPTIONAL_ROLES} - {"trace", "track", "tinker"}
"""Where the first two write is the user's own: who wants them starts them. `tinker` runs in place of the roles that
Compose and the chart start, with engines that load adapters from its folder: docs/tinker.md."""
Document = dict[str, Any]


def verbs() -> set[str]:
    (found,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return set(found.choices)


def roles() -> set[str]:
    return {verb.name for verb in VERBS if verb.under == "role"}


def variables() -> set[str]:
    """Every TURNLOG_ variable that some process reads."""
    return OF_PROCESSES | known_variables().keys()


@pytest.mark.parametrize("file", [COMPOSE, EGRESS], ids=lambda path: path.stem)
def test_compose_is_valid(file: Path) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_compose_names_verbs_and_variables_that_exist() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    ours = {name: service for name, service in services.items() if "turnlog" in service["image"].split("/")[0].lower()}
    beside = yaml.safe_load(EGRESS.read_text())["services"]
    ours |= {"egress": beside["egress"]}
    assert {
        "assembler",
        "batcher",
        "archive",
        "views",
        "lag",
        "index",
        "dashboard",
        "gateway",
        "runner",
        "sandbox",
        "trainer",
    } <= set(ours)
    assert {service["command"][0] for service in ours.values()} <= verbs()
    assert {
        role for verb, role, *_ in (service["command"] + [""] for service in ours.values()) if verb == "role"
    } <= roles()
    told = [service["environment"] for service in (*ours.values(), beside["sandbox"])]
    named = {name for environment in told for name in environment if name.startswith("TURNLOG_")}
    assert named <= variables()
    commented = re.findall(r"^#?(TURNLOG_\w+)=", (COMPOSE.parent / ".env.example").read_text(), re.MULTILINE)
    assert set(commented) <= variables() | OF_COMPOSE
    assert set(commented) <= set(re.findall(r"TURNLOG_\w+", COMPOSE.read_text() + EGRESS.read_text()))


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 8e-4),
        ({"TURNLOG_MODEL_PATH": "/models/mine"}, 0.0),
        ({"TURNLOG_MODEL_PATH": "/models/mine", "TURNLOG_TRAINER_LEARNING_RATE": "3e-6"}, 3e-6),
    ],
)
def test_compose_trains_the_tiny_policy_alone_at_its_rate(given: dict[str, str], rate: float) -> None:
    name = "TURNLOG_TRAINER_LEARNING_RATE"
    written = yaml.safe_load(COMPOSE.read_text())["services"]["trainer"]["environment"][name]
    assert load(None, {name: interpolated(written, given)}).trainer.learning_rate == rate


def interpolated(text: str, given: dict[str, str]) -> str:
    """As Compose does it, from the innermost variable outwards."""
    while found := re.search(r"\$\{(\w+):([-+])([^${}]*)\}", text):
        there, other = given.get(found[1], ""), found[3]
        value = (there or other) if found[2] == "-" else (there and other)
        text = text[: found.start()] + value + text[found.end() :]
    return text


def test_compose_runs_and_scrapes_every_role_and_the_chart_labels_each_for_its_monitor() -> None:
    labelled, running = set(), set()
    for file in (COMPOSE, EGRESS):
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            running |= {name} & (ROLES - {"engine"})
            labelled |= {name} if "turnlog.scrape" in (service.get("labels") or {}) and name in ROLES else set()
    (job,) = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    (discovery,) = job["dns_sd_configs"]
    assert ROLES - running == {"alerts"}, "compose has no service for a role"
    assert set(discovery["names"]) == running == labelled

    everything = yaml.safe_load((CHART / "examples/eight-gpus.yaml").read_text()) | {"monitoring": {"enabled": True}}
    documents = list(rendered(everything))
    (monitor,) = (one for one in documents if one["kind"] == "PodMonitor")
    endpoints = {one["port"]: one["relabelings"] for one in monitor["spec"]["podMetricsEndpoints"]}
    by_container = {"sourceLabels": ["__meta_kubernetes_pod_container_name"], "targetLabel": "component"}
    assert all(by_container in relabelings for relabelings in endpoints.values())
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    templates = [one["spec"]["template"] for one in documents if "template" in one.get("spec", {})]
    scraped = {
        container["name"]
        for template in templates
        for container in template["spec"]["containers"]
        if selected <= template["metadata"].get("labels", {}).items()
        and endpoints.keys() & {port["name"] for port in container.get("ports", ())}
    }
    assert scraped == {*UP, "feeder", "lag", "index", "egress"}


def test_the_catalogue_of_roles_is_what_up_runs_what_ends_in_order_and_what_can_be_asked() -> None:
    every = {*TRAINING_ROLES, *OPTIONAL_ROLES}
    assert len(every) == len(TRAINING_ROLES) + len(OPTIONAL_ROLES), "a role is one or the other"
    assert set(EMBEDDED) < every < roles()
    assert all(grace_s(role, Settings()) > 0 for role in every)
    for role in sorted(every):
        assert parser().parse_args(["health", role]).role == role


def test_each_service_of_compose_logs_in_as_itself() -> None:
    path = COMPOSE.with_name("principals.yaml")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    added, services = yaml.safe_load(path.read_text()), yaml.safe_load(COMPOSE.read_text())["services"]
    speak = {name for name, one in services.items() if "TURNLOG_KAFKA_BOOTSTRAP" in one.get("environment", {})}
    assert set(added["services"]) == speak - {"policy", "engine"}
    for name, service in added["services"].items():
        user = {"topics": "configure", "dashboard": "reader"}.get(name, name)
        assert service["environment"]["TURNLOG_KAFKA_USERNAME"] == user
        assert set(service["environment"]) <= variables()
        assert service["secrets"] == ["kafka_ca", {"source": f"kafka_{user}", "target": "kafka_password"}]
        assert user in RIGHTS
        assert f"kafka_{user}" in added["secrets"]


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
    assert {container["args"][3] for container in ours if container["args"][2] == "role"} <= roles()
    named = {entry["name"] for container in every for entry in container.get("env", ())}
    assert {name for name in named if name.startswith("TURNLOG_")} <= variables()


def test_settings_of_the_chart_load(documents: list[Document], tmp_path: Path) -> None:
    (settings,) = {document["data"]["settings.toml"] for document in documents if document["kind"] == "ConfigMap"}
    (tmp_path / "settings.toml").write_text(settings)
    (tmp_path / "secret").write_text("a-secret-that-is-long-enough-to-sign-by")
    assert load(
        tmp_path / "settings.toml", dict.fromkeys(secret_files(documents), str(tmp_path / "secret"))
    ).kafka.bootstrap


def secret_files(documents: list[Document]) -> dict[str, str]:
    """Variable -> path, of every container."""
    found = (one for _, pod in pods(documents) for each in pod["containers"] for one in each.get("env", ()))
    folders = ("/etc/turnlog/secrets/", "/etc/turnlog/principal/")
    return {one["name"]: one["value"] for one in found if str(one.get("value", "")).startswith(folders)}


def test_the_companys_kafka_is_given_its_authority_and_its_password_as_files(tmp_path: Path) -> None:
    documents = list(rendered(yaml.safe_load((CHART / "examples/company-kafka.yaml").read_text())))
    (text,) = (document["data"]["settings.toml"] for document in documents if document["kind"] == "ConfigMap")
    kafka = tomllib.loads(text)["kafka"]
    assert (kafka["security_protocol"], kafka["sasl_mechanism"]) == ("SASL_SSL", "SCRAM-SHA-512")
    assert "password" not in kafka
    for name, pod in pods(documents):
        for container in pod["containers"]:
            mounts = {mount["mountPath"].rstrip("/") for mount in container["volumeMounts"]}
            assert str(Path(kafka["ca_file"]).parent) in mounts, name


def principals(documents: list[Document]) -> dict[str, str]:
    """Role -> the Secret that it logs in by, of every container of ours."""
    found: dict[str, str] = {}
    for name, pod in pods(documents):
        if name == "turnlog-egress":  # nobody to Kafka
            assert {volume["name"] for volume in pod["volumes"]} == {"secrets", "settings", "tmp", "work"}
            continue
        (secret,) = (one["secret"]["secretName"] for one in pod["volumes"] if one["name"] == "principal")
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            if "--settings" not in container["args"]:
                continue
            assert {"name": "principal", "mountPath": "/etc/turnlog/principal", "readOnly": True} in container[
                "volumeMounts"
            ]
            env = {one["name"]: one.get("value") for one in container["env"]}
            assert env["TURNLOG_KAFKA_USERNAME_FILE"] == "/etc/turnlog/principal/kafka_username"
            assert env["TURNLOG_KAFKA_PASSWORD_FILE"] == "/etc/turnlog/principal/kafka_password"
            role = container["name"] if pod.get("restartPolicy") != "Never" else name
            found["sandbox" if role == "check" else role] = secret
    return found


EVERY = {role: {"secret": f"own-{role}"} for role in (*UP, "feeder", "lag", "configure")}


def test_each_role_logs_in_as_itself() -> None:
    company = list(rendered(yaml.safe_load((CHART / "examples/company-kafka.yaml").read_text())))
    processors = {"configure", "assembler", "batcher", "archive", "views", "lag"}
    test = {"turnlog-test": "turnlog-configure"}
    assert principals(company) == {role: f"turnlog-{role}" for role in processors} | test
    gpus = yaml.safe_load((CHART / "examples/eight-gpus.yaml").read_text())
    named = EVERY | {"trainer": EVERY["trainer"] | {"serviceAccountName": "steps"}}
    documents = list(rendered(gpus | {"principals": {"roles": named}}))
    shared = {"index": "own-dashboard", "turnlog-test": "own-configure"}
    assert principals(documents) == {role: f"own-{role}" for role in EVERY} | shared
    assert [name for name, pod in pods(documents) if pod.get("serviceAccountName") == "steps"] == ["turnlog-trainer"]


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


IDS = ("runAsUser", "runAsGroup", "fsGroup")


@pytest.mark.parametrize("profile", ["userns", "privileged", "runtime"])
def test_the_cluster_assigns_users_and_groups_where_the_values_name_none(profile: str) -> None:
    everything = OUT | {"sandbox": {"profile": profile, "runtimeClassName": "kata"}, "dashboard": {"enabled": True}}

    def asked(ids: Document) -> dict[str, list[int | None]]:
        found = pods(list(rendered(everything | {"podSecurity": ids})))
        return {name: [pod["securityContext"].get(one) for one in IDS] for name, pod in found}

    makes_sandboxes = {"turnlog-sandbox"} if profile != "runtime" else set()
    for ids, wanted in (
        ({}, [10001] * 3), (dict.fromkeys(IDS, 1000660000), [1000660000] * 3), (dict.fromkeys(IDS), [None] * 3),
    ):  # fmt: skip
        given = asked(ids)
        assert makes_sandboxes < given.keys()
        assert {name: found for name, found in given.items() if found != wanted} == {
            name: [None, None, wanted[2]] for name in makes_sandboxes if wanted[2]
        }
    for root in IDS:
        with pytest.raises(HelmError, match=root):
            asked({root: 0})


def test_servers_of_ours_in_pods_listen_on_both_families(documents: list[Document]) -> None:
    hosts = {
        entry["value"]
        for container in containers(documents)
        for entry in container.get("env", ())
        if entry["name"].endswith("_HOST")
    }
    assert hosts == {"::"}


def test_sandbox_workers_live_by_themselves_without_keys_of_others() -> None:
    documents = list(rendered(LAPTOP | {"model": {"claim": "policy"}}))
    spaces: dict[str, set[str]] = {}
    for document in documents:
        spaces.setdefault(document["metadata"].get("namespace", "rl"), set()).add(
            f"{document['kind']} {document['metadata']['name']}"
        )
    kinds = ("ConfigMap turnlog", *(f"{kind} turnlog-sandbox" for kind in ("Deployment", "PodDisruptionBudget")))
    assert spaces["turnlog-sandboxes"] == {*kinds, "NetworkPolicy turnlog-sandbox"}
    (worker,) = (pod for name, pod in pods(documents) if name == "turnlog-sandbox")
    (gateway,) = (pod for name, pod in pods(documents) if name == "turnlog-gateway")
    for pod, signs, reads in ((worker, False, False), (gateway, True, True)):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        every = {"store_access_key", "store_secret_key", "gateway_signing_key"}
        keys = {item["key"] for item in volumes["secrets"]["secret"].get("items", ())} or every
        assert ("gateway_signing_key" in keys, "model" in volumes) == (signs, reads)
        for container in (*pod["containers"], *pod.get("initContainers", ())):
            named = {entry["name"] for entry in container["env"]}
            assert ("TURNLOG_GATEWAY_SIGNING_KEY_FILE" in named) is signs


def test_sandboxes_go_out_by_a_pod_that_knows_one_key_and_reaches_no_address_inside() -> None:
    documents = list(rendered(OUT))
    (proxy,) = (pod for name, pod in pods(documents) if name == "turnlog-egress")
    (own,) = proxy["containers"]
    assert {entry["name"] for entry in own["env"] if entry["name"].endswith("_FILE")} == {
        "TURNLOG_EGRESS_SIGNING_KEY_FILE"
    }
    (mounted,) = (volume["secret"]["items"] for volume in proxy["volumes"] if volume["name"] == "secrets")
    assert [item["key"] for item in mounted] == ["egress_signing_key"]
    (worker,) = (pod["containers"][0] for name, pod in pods(documents) if name == "turnlog-sandbox")
    told = {entry["name"]: entry.get("value") for entry in worker["env"]}
    assert told["TURNLOG_EGRESS_PROXY"] == "http://turnlog-egress.rl:3128"
    assert "TURNLOG_EGRESS_SIGNING_KEY_FILE" in told
    policies = {one["metadata"]["name"]: one["spec"] for one in documents if one["kind"] == "NetworkPolicy"}
    reached = [to["ipBlock"] for rule in policies["turnlog-egress"]["egress"] for to in rule.get("to", ())]
    for address in INSIDE:
        (family,) = (one for one in reached if ip_address(address).version == ip_network(one["cidr"]).version)
        holes = [ip_network(hole) for hole in family["except"]]
        assert ip_address(address) not in ip_network(family["cidr"]) or any(
            ip_address(address) in hole for hole in holes
        ), address
    (asks,) = (rule["from"] for rule in policies["turnlog-egress"]["ingress"] if "from" in rule)
    assert [one["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for one in asks] == ["sandbox"]
    ways = [to for rule in policies["turnlog-sandbox"]["egress"] for to in rule.get("to", ())]
    assert all("podSelector" in way or way in OUT["networkPolicy"]["servers"] for way in ways)
    assert all("to" in rule or {port["port"] for port in rule["ports"]} == {53}
               for rule in policies["turnlog-sandbox"]["egress"])  # fmt: skip


def test_the_page_and_its_indexer_share_one_file_in_one_pod() -> None:
    documents = list(rendered(LAPTOP | {"model": {"claim": "policy"}}))
    (stateful,) = (
        one for one in documents if one["metadata"]["name"] == "turnlog-dashboard" and "replicas" in one["spec"]
    )
    assert (stateful["kind"], stateful["spec"]["replicas"]) == ("StatefulSet", 1)
    (claim,) = stateful["spec"]["volumeClaimTemplates"]
    (settings,) = {one["data"]["settings.toml"] for one in documents if one["kind"] == "ConfigMap"}
    directory = Path(tomllib.loads(settings)["run"]["directory"])
    page, indexer = stateful["spec"]["template"]["spec"]["containers"]
    for container in (page, indexer):
        mounts = {Path(one["mountPath"]): one["name"] for one in container["volumeMounts"]}
        assert mounts[directory.parent] == claim["metadata"]["name"]
    assert Path("/model") in {Path(one["mountPath"]) for one in page["volumeMounts"]}, "texts of tokens"
    ports = [port for container in (page, indexer) for port in container["ports"]]
    assert len({port["name"] for port in ports}) == len({port["containerPort"] for port in ports}) == 3
    for container in (page, indexer):
        env = {one["name"]: one.get("value") for one in container["env"]}
        own = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        assert own[container["readinessProbe"]["httpGet"]["port"]] == env["TURNLOG_HEALTH_PORT"]
    (service,) = (
        one for one in documents if one["kind"] == "Service" and one["metadata"]["name"] == "turnlog-dashboard"
    )
    assert service["spec"]["ports"][0]["port"] == int(next(
        one["value"] for one in page["env"] if one["name"] == "TURNLOG_DASHBOARD_PORT"))  # fmt: skip


def test_single_roles_are_recreated_and_never_held_by_a_budget(documents: list[Document]) -> None:
    roles = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Deployment"}
    budgets = {document["metadata"]["name"] for document in documents if document["kind"] == "PodDisruptionBudget"}
    for name, document in roles.items():
        single = name in ("turnlog-archive", "turnlog-batcher", "turnlog-feeder")
        assert (document["spec"]["strategy"]["type"] == "Recreate") is single, name
        assert (name not in budgets) is single, name


def test_a_role_is_given_the_time_that_it_may_need_to_end(documents: list[Document]) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    services["egress"] = yaml.safe_load(EGRESS.read_text())["services"]["egress"]
    compose = {
        name: float(service["stop_grace_period"].removesuffix("s"))
        for name, service in services.items()
        if "stop_grace_period" in service and service["command"][-1] == name
    }
    chart = {
        name.removeprefix("turnlog-"): pod.get("terminationGracePeriodSeconds", 30) for name, pod in pods(documents)
    }
    chart["loader"] = chart.pop("engine", math.inf)  # one pod
    chart["index"] = chart.get("dashboard", math.inf)
    for given in (compose, chart):
        roles = {role: seconds for role, seconds in given.items() if role in ROLES}
        assert len(roles) >= 6
        assert {role: seconds for role, seconds in roles.items() if seconds < grace_s(role, Settings())} == {}


LAPTOP = yaml.safe_load((CHART / "examples/laptop.yaml").read_text())
OUT = yaml.safe_load((CHART / "examples/eight-gpus.yaml").read_text())
INSIDE = (
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "127.0.0.1",
    "169.254.169.254",
    "100.64.0.1",
    "fd00:ec2::254",
    "fe80::1",
)
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
    "a role that logs in as nobody": (
        {"principals": {"roles": {"assembler": {"secret": "a"}}}},
        "principals.roles.archive.secret is missing",
    ),
    "a page that logs in as nobody": (
        {"principals": {"roles": {role: of for role, of in EVERY.items() if role != "dashboard"}}},
        "principals.roles.dashboard.secret is missing",
    ),
    "a login from two Secrets": (
        {"principals": {"roles": EVERY}, "secrets": {"name": "turnlog", "keys": ["kafka_password"]}},
        "both name kafka_password",
    ),
    "gateways without a common key": ({"secrets": {"name": ""}, "roles": {}}, "signing key"),
    "a way out without its key": (OUT | {"secrets": {"name": "turnlog"}}, "egress_signing_key"),
    "a way out that sees nothing": (
        OUT | {"settings": OUT["settings"] | {"egress": OUT["settings"]["egress"] | {"tls": "tunnel"}}},
        "settings.egress.tls",
    ),
    "a way around the way out": (OUT | {"networkPolicy": {"servers": []}}, "networkPolicy.servers"),
    "a runtime class that is not named": ({"sandbox": {"profile": "runtime"}}, "sandbox.runtimeClassName"),
}  # fmt: skip


@each("case", REFUSED)
def test_values_that_contradict_each_other_are_refused_by_name(case: str) -> None:
    values, named = REFUSED[case]
    with pytest.raises(HelmError, match=re.escape(named)):
        list(rendered(LAPTOP | values))


def test_the_charts_schema_holds_todays_settings() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema == json.loads(json.dumps(chart_schema(schema))), "make docs"


def test_the_charts_page_says_of_every_value_what_the_file_says() -> None:
    page = (CHART / "README.md").read_text()
    assert page == chart_page(CHART), "make docs"
    told = dict(re.findall(r"^\| `([^`]+)` \| `([^`]*)` \|", page, re.MULTILINE))
    for path, default in told.items():
        value = yaml.safe_load((CHART / "values.yaml").read_text())
        for key in path.split("."):
            value = value[key]
        assert yaml.safe_load(default) == value, path
    assert len(told) > 100


def test_each_alert_has_its_section_of_the_runbook() -> None:
    headings = re.findall(r"^## (Turnlog\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    assert [rule["alert"] for rule in alerts] == headings
    for rule in alerts:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_rules_are_those_of_prometheus() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_bill_of_an_image_names_every_package_of_its_lock_with_its_hashes(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "locks", tmp_path / "locks")
    shutil.copytree(ROOT / ".cache/bootstrap", tmp_path / ".cache/bootstrap")
    made = subprocess.run(
        ["make", "-C", str(tmp_path), "sbom", "ONLY=processors", f"PYTHON={sys.executable}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    bill = json.loads((tmp_path / "build/sbom/processors.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "turnlog")
    lock = (ROOT / "locks/3.11/processors.lock").read_text()
    pinned = {tuple(line.split("==")) for line in re.findall(r"^([\w.\[\]-]+==[^\s;\\]+)", lock, re.MULTILINE)}
    assert {(one["name"], one["version"]) for one in bill["components"]} == {
        (name.partition("[")[0], version) for name, version in pinned
    }
    assert all(one["externalReferences"][0]["hashes"] for one in bill["components"])
