"""infra/deploy/helm on a real control plane and real nodes: `make test-kube`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.cluster import Cluster, cluster, until
from tests.deploy.conftest import BASE, ROOT, STANDINS, lacking, ours, run
from tests.deploy.node import BOUNDARY, HOST, PAUSE, PLUGINS, with_a_share
from tests.deploy.programs import KUBERNETES, described, programs
from turnlog.plugins.recipes.calc import RECIPE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]
CHART = "infra/deploy/helm/turnlog"
EXAMPLES = sorted((ROOT / CHART / "examples").glob("*.yaml"))
KUBE = Path(__file__).parent / "kube"
IMAGE = "turnlog/processors"
KEYS = ("store_access_key", "store_secret_key", "gateway_signing_key", "egress_signing_key")
READY_S = 600
"""Patience alone: an idle machine takes a minute."""
(PAGE,) = re.findall(r"^```console\n(helm install.*?)^```", (ROOT / "docs/kubernetes.md").read_text(), re.M | re.S)
COMMANDS = PAGE.splitlines()
DONE: set[str] = set()
"""Beginnings of commands of docs/kubernetes.md that were run."""
STRUCK = ("assembler", "batcher", "archive", "feeder", "runner", "gateway", "sandbox")
OUTSIDE = {
    "public": "203.0.113.213", "inside": "198.51.100.213", "private": "192.168.213.213", "mirror": "192.168.213.214",
    "metadata": "169.254.213.254",
}  # fmt: skip
"""Addresses that this machine is given, each for its kind: the one of a provider's metadata could be in use."""
SERVERS = frozenset({"kafka", "registry", "store"})
GRANTED = {"sandbox": SERVERS | {"gateway", "egress", "names"}, "egress": frozenset({"public", "mirror", "names"})}
PROBED = frozenset({"health of sandbox", "health of egress"})
SETTLED_S = 60
OPEN = "import socket, sys; server = socket.create_server(('', 8888)); print('open', flush=True); sys.stdin.read()"
CONNECT = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor

def reached(address):
    host, port = address.rsplit(":", 1)
    ((*_, at),) = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    with socket.socket() as connection:
        connection.settimeout(5)
        return connection.connect_ex(at) == 0

addresses = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(addresses)) as pool:
    print(json.dumps([name for name, there in zip(addresses, pool.map(reached, addresses.values())) if there]))
"""


@pytest.fixture(scope="module")
def kube(
    engine: dict[str, str], go: str | None, others: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Nodes that hold the images."""
    needs = ("containerd", "ctr", "runc", "iptables", "ipset", "openssl")
    lacks = [name for name in needs if shutil.which(name) is None]
    if os.geteuid():
        lacking("nodes are started by root alone", "Be root")
    if lacks or not PLUGINS.is_dir():
        debian = "Debian: containerd, containernetworking-plugins, iptables, ipset"
        lacking(f"no {', '.join([*lacks, str(PLUGINS)])}", debian)
    folder = tmp_path_factory.mktemp("kube")
    built = programs(go)
    run("docker", "build", "--quiet", "--tag", PAUSE, "--build-arg", f"BASE={BASE}", "--file",
        STANDINS / "pause.Dockerfile", STANDINS, env=engine)  # fmt: skip
    begun = time.monotonic()
    names = (*ours("processors", env=engine), *others, PAUSE)
    run("docker", "save", "--output", folder / "images.tar", *names, env=engine)
    print(f"images: {time.monotonic() - begun:.0f} s")
    with cluster(folder / "cluster", built, folder / "images.tar") as it:
        yield it


@pytest.fixture(scope="module")
def servers(kube: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Kafka, registry, store and a scripted engine in the cluster; what stands for what in the files of `kube`."""
    folder = tmp_path_factory.mktemp("servers")
    model, scripts = folder / "model", folder / "scripts"
    model.mkdir()
    RECIPE.warm_start.write_tokenizer(model)
    (model / "config.json").write_text(
        json.dumps({**RECIPE.warm_start.model.config(), "max_position_embeddings": 2048})
    )
    for name in ("benchmarks", "tests"):
        shutil.copytree(ROOT / name, scripts / name, ignore=shutil.ignore_patterns("__pycache__"))
    run("chmod", "-R", "a+rX", folder)
    version = yaml.safe_load((ROOT / CHART / "Chart.yaml").read_text())["appVersion"]
    names = {"IMAGE": f"{IMAGE}:{version}", "MODEL": str(model), "SCRIPTS": str(scripts)}
    apply(kube, "servers.yaml", names)
    literals = [f"--from-literal={key}={os.urandom(16).hex()}" for key in KEYS]
    for namespace in ("servers", "rl", "rl-sandboxes"):
        kube.kubectl("create", "secret", "generic", "turnlog", "--namespace", namespace, *literals)
    until(with_a_share, READY_S, "a container")
    kube.kubectl("wait", "--namespace", "servers", "--for=condition=Available", "deployment", "--all", "--timeout=240s")
    return names


@pytest.fixture(scope="module")
def release(kube: Cluster, servers: dict[str, str]) -> float:
    """The chart, installed and ready; seconds that it took."""
    apply(kube, "script.yaml", servers | {"NAME": "train", "ENV": json.dumps(environment())})
    begun = time.monotonic()
    documented(kube, "helm install")
    return time.monotonic() - begun


def documented(kube: Cluster, begins: str, **names: str) -> str:
    """Run the one command of the page that begins so, with what stands in it for things of the reader's."""
    (line,) = (line for line in COMMANDS if line.startswith(begins))
    for name, value in {"values.yaml": str(KUBE / "values.yaml"), "8m": f"{2 * READY_S}s", **names}.items():
        line = line.replace(name, value)
    DONE.add(begins)
    program, *arguments = shlex.split(line)
    client = kube.helm if program == "helm" else kube.kubectl
    return client(*arguments, timeout_s=2 * READY_S + 60)


def apply(kube: Cluster, name: str, names: dict[str, str]) -> None:
    text = (KUBE / name).read_text()
    for key, value in names.items():
        text = text.replace(f"@{key}@", value)
    kube.kubectl("apply", "--filename", "-", given=text)


def environment() -> list[dict[str, str]]:
    """The release's settings as variables of a process beside it."""
    settings = yaml.safe_load((KUBE / "values.yaml").read_text())["settings"]
    told = {
        f"TURNLOG_{section}_{key}".upper(): value for section, keys in settings.items() for key, value in keys.items()
    }
    told |= {f"TURNLOG_{key}_FILE".upper(): f"/secrets/{key}" for key in KEYS}
    told |= {"ENGINE_URL": "http://engine.servers:30000", "TURNLOG_RUN_DIRECTORY": "/tmp/run"}
    return [
        {"name": name, "value": value if isinstance(value, str) else json.dumps(value)} for name, value in told.items()
    ]


@pytest.fixture(scope="module")
def addresses(kube: Cluster, release: float) -> Iterator[dict[str, str]]:
    """What a pod may try to reach, by a name for it; somebody listens at each."""
    with contextlib.ExitStack() as stack:
        outside = {}
        for name, address in OUTSIDE.items():
            run("ip", "address", "add", f"{address}/32", "dev", "lo")
            stack.callback(run, "ip", "address", "delete", f"{address}/32", "dev", "lo")
            server = stack.enter_context(socket.create_server((address, 0)))
            outside[name] = f"{address}:{server.getsockname()[1]}"
        services = {
            "kafka": "kafka.servers:9092", "registry": "registry.servers:8081", "store": "store.servers:7070",
            "engine": "engine.servers:30000", "gateway": "turnlog-gateway.rl:8000", "egress": "turnlog-egress.rl:3128",
            "apiserver": "kubernetes.default:443", "names": f"{HOST}:53",
        }  # fmt: skip
        others = {role: f"{pods(kube, role)[0]['status']['podIP']}:8080" for role in ("views", "archive")}
        yield {**services, **others, **outside}


@pytest.fixture
def doors(kube: Cluster, addresses: dict[str, str]) -> Iterator[dict[str, str]]:
    """Ports of pods that have policies; `opened` is what agents' code may do in a worker's."""
    pod = pods(kube, "sandbox")[0]["metadata"]
    command = kube.command("exec", "--stdin", "--namespace", pod["namespace"], pod["name"], "--", "python", "-c", OPEN)
    at = {role: pods(kube, role)[0]["status"]["podIP"] for role in GRANTED}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        health = {f"health of {role}": f"{ip}:8080" for role, ip in at.items()}
        yield {**health, "proxy": addresses["egress"], "opened": f"{at['sandbox']}:8888"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_admitted(kube: Cluster, example: Path, go: str | None) -> None:
    """Strictly, with the restricted profile enforced where the release lives."""
    for folder in described(go):
        kube.kubectl("apply", "--server-side", "--filename", str(folder))
    kube.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    names = {"restricted": f"of-{example.stem}", "privileged": "turnlog-sandboxes"}
    for level, name in names.items():
        labels = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "warn")}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        kube.kubectl("apply", "--filename", "-", given=json.dumps(namespace))
        kube.kubectl("wait", "--namespace", name, "--for=create", "serviceaccount/default", "--timeout=60s")
    rendered = kube.helm("template", "turnlog", CHART, "--namespace", names["restricted"], "--values", str(example),
                         "--kube-version", KUBERNETES)  # fmt: skip
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    pods = list(pods_of(documents))
    for name in {pod["spec"]["runtimeClassName"] for pod in pods if "runtimeClassName" in pod["spec"]}:
        its_own = {"metadata": {"name": name}, "handler": BOUNDARY}  # who names one has installed it
        kube.kubectl("apply", "--filename", "-",
                     given=json.dumps({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", **its_own}))  # fmt: skip
    admitted(kube, names["restricted"], [*documents, *pods])
    spoilt = [document for document in documents if document["kind"] == "Deployment"]
    spoilt[0]["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(AssertionError, match="readynessProbe"):
        admitted(kube, names["restricted"], spoilt)


def admitted(kube: Cluster, namespace: str, documents: list[dict[str, Any]]) -> None:
    """Warnings count: of a Deployment whose pods would be refused, the server only warns."""
    for document in documents:
        if not document["kind"].startswith("Cluster"):
            document["metadata"].setdefault("namespace", namespace)
    strictly = ("--dry-run=server", "--validate=strict", "--warnings-as-errors")
    kube.kubectl("apply", *strictly, "--filename", "-", given=yaml.safe_dump_all(documents))


def pods_of(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A pod of each template, which is what Pod Security looks at."""
    for document in documents:
        template = document["spec"].get("template") if "spec" in document else None
        if template and document["kind"] in ("Deployment", "StatefulSet", "Job"):
            metadata = {"name": f"of-{document['metadata']['name']}"}
            if "namespace" in document["metadata"]:
                metadata["namespace"] = document["metadata"]["namespace"]
            claims = [one["metadata"]["name"] for one in document["spec"].get("volumeClaimTemplates", ())]
            volumes = [*template["spec"].get("volumes", ()), *({"name": name, "emptyDir": {}} for name in claims)]
            spec = {**template["spec"], "volumes": volumes}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def test_a_worker_that_makes_namespaces_is_refused_where_pods_are_restricted(kube: Cluster, servers: object) -> None:
    rendered = kube.helm("template", "turnlog", CHART, "--namespace", "rl", "--values", str(KUBE / "values.yaml"),
                         "--kube-version", KUBERNETES, "--set", "sandbox.profile=userns")  # fmt: skip
    documents = [document for document in yaml.safe_load_all(rendered) if document]
    worker = [pod for pod in pods_of(documents) if pod["metadata"]["name"] == "of-turnlog-sandbox"]
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        admitted(kube, "rl-sandboxes", worker)


def test_the_chart_installs_and_its_test_passes(kube: Cluster, release: float) -> None:
    print(f"installed and ready after {release:.0f} s")
    for role in ("assembler", "batcher", "archive", "views", "lag", "gateway", "runner", "feeder", "egress"):
        assert "ready" in documented(kube, "kubectl exec", assembler=role)
    assert "Succeeded" in documented(kube, "helm test")


@pytest.mark.parametrize("role", GRANTED)
def test_a_policy_lets_through_what_its_role_needs_and_nothing_else(
    kube: Cluster, addresses: dict[str, str], role: str
) -> None:
    reaches(kube, role, addresses, GRANTED[role])


def test_a_worker_and_the_egress_proxy_are_probed_by_everybody_and_asked_by_no_other_role(
    kube: Cluster, doors: dict[str, str]
) -> None:
    reaches(kube, "views", doors, PROBED)


def test_it_is_the_policy_that_refuses(kube: Cluster, addresses: dict[str, str], doors: dict[str, str]) -> None:
    found = kube.get("networkpolicies", "--all-namespaces", "--selector", "app.kubernetes.io/instance=turnlog")
    for policy in found:
        policy["metadata"] = {key: policy["metadata"][key] for key in ("name", "namespace", "labels", "annotations")}
    policies = json.dumps({"apiVersion": "v1", "kind": "List", "items": found})
    kube.kubectl("delete", "--filename", "-", given=policies)
    for role in GRANTED:
        reaches(kube, role, addresses, frozenset(addresses))
    reaches(kube, "views", doors, frozenset(doors))
    kube.kubectl("create", "--filename", "-", given=policies)
    for role, granted in GRANTED.items():
        reaches(kube, role, addresses, granted)
    reaches(kube, "views", doors, PROBED)


def reaches(kube: Cluster, role: str, addresses: dict[str, str], expected: frozenset[str]) -> None:
    """From a pod of the role, by connections: these and no others, as soon as the network has heard of its policies."""
    pod = pods(kube, role)[0]["metadata"]
    command = ("exec", "--namespace", pod["namespace"], pod["name"], "--", "python", "-c", CONNECT)
    begun = time.monotonic()
    while (found := set(json.loads(kube.kubectl(*command, json.dumps(addresses))))) != expected:
        late = f"{role} reaches {sorted(found)}, not {sorted(expected)}"
        assert time.monotonic() - begun < SETTLED_S, late


def test_nothing_is_lost_or_counted_twice_while_the_release_is_struck(
    kube: Cluster, release: float, servers: dict[str, str]
) -> None:
    for strike in (scaled, killed, drained, upgraded, rolled_back):
        begun, before = time.monotonic(), trained(kube)
        strike(kube)
        took = time.monotonic() - begun
        until(lambda before=before: trained(kube) > before + 1, READY_S, f"draws after {strike.__name__}")
        print(f"{strike.__name__}: {took:.0f} s, {trained(kube) - before} draws trained")
    kube.kubectl("scale", "--namespace", "rl", "deployment/turnlog-feeder", "--replicas=0")
    apply(kube, "script.yaml", servers | {"NAME": "judge", "ENV": json.dumps(environment())})
    until(lambda: ended(kube, "judge"), 2 * READY_S, "the verdict")
    said = kube.kubectl("logs", "--namespace", "servers", "job/judge")
    loop, fold = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    print(loop, fold)
    assert [loop[name] for name in ("groups_lost", "rollouts_lost", "twice", "untrained")] == [0, 0, 0, 0], said
    found = {name: fold[name] for name in ("lost", "twice", "skipped", "identical", "ok")}
    assert found == {"lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}, said
    assert loop["batches"] >= 10
    verified = kube.kubectl("exec", "--namespace", "rl", "deployment/turnlog-assembler", "--", "turnlog", "--settings",
                            "/etc/turnlog/settings.toml", "replay", "--verify")  # fmt: skip
    assert "identical" in verified


def trained(kube: Cluster) -> int:
    """Draws so far, by the scripted trainer."""
    said = kube.kubectl("logs", "--namespace", "servers", "job/train", "--tail=50")
    return max((1 + int(draw) for draw in re.findall(r"draw (\d+) is trained", said)), default=0)


def ended(kube: Cluster, job: str) -> bool:
    status = json.loads(kube.kubectl("get", "--namespace", "servers", f"job/{job}", "--output", "json"))["status"]
    return bool(status.get("succeeded") or status.get("failed"))


def pods(kube: Cluster, role: str) -> list[dict[str, Any]]:
    return kube.get(
        "pods", "--all-namespaces", "--selector", f"app.kubernetes.io/name=turnlog,app.kubernetes.io/component={role}"
    )


def ready(kube: Cluster) -> None:
    for namespace in ("rl", "rl-sandboxes"):
        for name in kube.kubectl("get", "deployments", "--namespace", namespace, "--output", "name").split():
            kube.kubectl(
                "rollout", "status", "--namespace", namespace, name, f"--timeout={READY_S}s", timeout_s=READY_S + 30
            )


def scaled(kube: Cluster) -> None:
    """2 to 4 to 1."""
    for replicas in (4, 1):
        for role in ("assembler", "runner"):
            documented(kube, "kubectl scale", assembler=role, **{"=4": f"={replicas}"})
            until(lambda role=role, n=replicas: len(pods(kube, role)) == n, READY_S, f"{replicas} {role}s")
        ready(kube)


def killed(kube: Cluster) -> None:
    """SIGKILL from the node to the first process of one container of each role: the kubelet starts it again."""
    before = {role: sum(restarts(pod) for pod in pods(kube, role)) for role in STRUCK}
    for role in STRUCK:
        container = pods(kube, role)[0]["status"]["containerStatuses"][0]["containerID"].removeprefix("containerd://")
        node = next(node for node in kube.nodes if node.name == pods(kube, role)[0]["spec"]["nodeName"])
        (pid,) = (line.split()[1] for line in node.ctr("tasks", "list").splitlines() if line.startswith(container))
        os.kill(int(pid), 9)
    for role in STRUCK:
        until(lambda role=role: sum(restarts(pod) for pod in pods(kube, role)) > before[role], READY_S, f"{role} again")
    ready(kube)


def restarts(pod: dict[str, Any]) -> int:
    return sum(status["restartCount"] for status in pod["status"]["containerStatuses"])


def drained(kube: Cluster) -> None:
    """All that is ours leaves a node, budgets observed, and comes to life on the other."""
    node = pods(kube, "assembler")[0]["spec"]["nodeName"]
    documented(kube, "kubectl drain", NODE=node)
    ready(kube)
    left = [pod for role in STRUCK for pod in pods(kube, role) if pod["spec"]["nodeName"] == node]
    assert left == []
    documented(kube, "kubectl uncordon", NODE=node)


def upgraded(kube: Cluster) -> None:
    """Another setting, so that every pod is replaced."""
    documented(kube, "helm upgrade")
    assert "max_age_s = 5" in kube.kubectl("get", "configmap", "turnlog", "--namespace", "rl", "--output", "yaml")


def rolled_back(kube: Cluster) -> None:
    documented(kube, "helm rollback")
    assert "max_age_s = 10" in kube.kubectl("get", "configmap", "turnlog", "--namespace", "rl", "--output", "yaml")
    ready(kube)


def test_an_uninstalled_release_leaves_nothing(kube: Cluster, release: float) -> None:
    documented(kube, "helm uninstall")
    until(lambda: not any(pods(kube, role) for role in STRUCK), READY_S, "all pods are gone")
    kinds = "deployments,jobs,configmaps,services,poddisruptionbudgets,networkpolicies"
    left = kube.kubectl(
        "get", kinds, "--all-namespaces", "--selector", "app.kubernetes.io/instance=turnlog", "--output", "name"
    )
    assert left == ""
    assert [line for line in COMMANDS if not any(line.startswith(begins) for begins in DONE)] == []
