"""A Kubernetes of one machine: released control plane, nodes with real kubelets, names of services, policies that are
enforced; started from nothing and gone afterwards with its mounts, bridges, control groups and rules of the packet
filter. Root only."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from tests.deploy.conftest import run
from tests.deploy.node import HOST, PODS, SERVICES, Node, without_groups
from tests.deploy.policies import enforced
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.embedded.process import Child, Launch

NODES = ("node-a", "node-b")
TOKEN = "turnlog-tests"
RULES = (
    # A docker engine drops what is forwarded and not its own.
    ("filter", "FORWARD", "-s", PODS, "-j", "ACCEPT"),
    ("filter", "FORWARD", "-d", PODS, "-j", "ACCEPT"),
    ("nat", "POSTROUTING", "-s", PODS, "!", "-d", f"{HOST.rpartition('.')[0]}.0/16", "-j", "MASQUERADE"),
)
FORWARDED = {"/proc/sys/net/ipv4/ip_forward": "1", "/proc/sys/net/bridge/bridge-nf-call-iptables": "1"}
LEFT = (
    ("--delete", "INPUT", "--jump", "KUBE-FIREWALL"),
    ("--delete", "OUTPUT", "--jump", "KUBE-FIREWALL"),
    ("--flush", "KUBE-FIREWALL"),
    ("--delete-chain", "KUBE-FIREWALL"),
)
"""What kube-proxy forgets when it cleans up."""
FIXED = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers", "/var/log/pods", "/run/containerd")
"""Folders that no option moves."""
NAMES = """\
.:53 {{
  bind {host}
  errors
  kubernetes cluster.local {{
    kubeconfig {kubeconfig}
  }}
  forward . /etc/resolv.conf
}}
"""


@dataclass(frozen=True)
class Cluster:
    """Clients of it."""

    programs: Mapping[str, Path]
    kubeconfig: Path
    nodes: list[Node]

    def kubectl(self, *arguments: str, timeout_s: float = 300, given: str | None = None) -> str:
        """Its output; `given` is its standard input. Raises AssertionError with both streams when it fails."""
        return self._run(self.programs["kubectl"], *arguments, timeout_s=timeout_s, given=given)

    def helm(self, *arguments: str, timeout_s: float = 600) -> str:
        """See kubectl."""
        return self._run(self.programs["helm"], *arguments, timeout_s=timeout_s)

    def get(self, *arguments: str) -> list[dict[str, object]]:
        """Objects that `kubectl get ARGUMENTS` lists."""
        found: list[dict[str, object]] = json.loads(self.kubectl("get", *arguments, "--output", "json"))["items"]
        return found

    def command(self, *arguments: str) -> list[str]:
        """`kubectl ARGUMENTS`, for a process of its own."""
        return [str(self.programs["kubectl"]), "--kubeconfig", str(self.kubeconfig), *arguments]

    def _run(self, program: Path, *arguments: str, timeout_s: float, given: str | None = None) -> str:
        command = [str(program), "--kubeconfig", str(self.kubeconfig), *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
        return done.stdout


class ControlPlane:
    """etcd, apiserver, controller-manager, scheduler, kube-proxy and CoreDNS below one folder."""

    def __init__(self, folder: Path, programs: Mapping[str, Path]) -> None:
        self._folder, self._programs = folder, programs
        self._children: list[Child] = []
        self._etcd, self._peer, self._port = free_ports(3)
        self.kubeconfig = folder / "kubeconfig"

    @property
    def url(self) -> str:
        """Of the apiserver."""
        return f"https://{HOST}:{self._port}"

    def start(self) -> None:
        """Until the apiserver is ready; controllers and names follow."""
        folder = self._folder
        etcd = f"http://127.0.0.1:{self._etcd}"
        run("openssl", "genrsa", "-out", folder / "accounts.key", "2048")
        (folder / "tokens.csv").write_text(f"{TOKEN},admin,admin,system:masters\n")
        peer = f"http://127.0.0.1:{self._peer}"
        self._start(
            "etcd", "--data-dir", folder / "etcd", "--unsafe-no-fsync", "--listen-client-urls", etcd,
            "--advertise-client-urls", etcd, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}", ready=lambda: answers(f"{etcd}/health"),
        )  # fmt: skip
        self._start(
            "kube-apiserver", "--etcd-servers", etcd, "--bind-address", HOST, "--advertise-address", HOST,
            "--secure-port", str(self._port), "--cert-dir", folder / "certificates",
            "--service-cluster-ip-range", SERVICES, "--authorization-mode", "RBAC", "--allow-privileged",
            "--token-auth-file", folder / "tokens.csv", "--service-account-issuer", "https://kubernetes.default.svc",
            "--service-account-key-file", folder / "accounts.key",
            "--service-account-signing-key-file", folder / "accounts.key",
            "--kubelet-preferred-address-types", "InternalIP", ready=lambda: answers(f"{self.url}/readyz"),
        )  # fmt: skip
        authority = folder / "certificates/apiserver.crt"
        self.kubeconfig.write_text(yaml.safe_dump(self._access(authority)))
        self._start(
            "kube-controller-manager", "--kubeconfig", self.kubeconfig, "--leader-elect=false", "--secure-port", "0",
            "--service-account-private-key-file", folder / "accounts.key", "--root-ca-file", authority,
        )  # fmt: skip
        self._start("kube-scheduler", "--kubeconfig", self.kubeconfig, "--leader-elect=false", "--secure-port", "0")
        self._services()

    def _services(self) -> None:
        folder = self._folder
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "iptables",
            "clientConnection": {"kubeconfig": str(self.kubeconfig)}, "hostnameOverride": NODES[0],
            "healthzBindAddress": f"{HOST}:{free_ports(1)[0]}", "metricsBindAddress": f"{HOST}:{free_ports(1)[0]}",
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "nodePortAddresses": ["127.0.0.0/8"],
        }  # fmt: skip
        (folder / "kube-proxy.yaml").write_text(yaml.safe_dump(config))
        self._start("kube-proxy", "--config", folder / "kube-proxy.yaml")
        (folder / "Corefile").write_text(NAMES.format(host=HOST, kubeconfig=self.kubeconfig))
        self._start("coredns", "-conf", folder / "Corefile")

    def _access(self, authority: Path) -> dict[str, object]:
        return {
            "apiVersion": "v1", "kind": "Config", "current-context": "it",
            "clusters": [{"name": "it", "cluster": {"server": self.url, "certificate-authority": str(authority)}}],
            "users": [{"name": "it", "user": {"token": TOKEN}}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        }  # fmt: skip

    def _start(self, name: str, *arguments: str | Path, ready: Callable[[], bool] = lambda: True) -> None:
        argv = (str(self._programs[name]), *map(str, arguments))
        launch = Launch(name=name, argv=argv, log=self._folder / f"{name}.log", ready=ready, ready_timeout_s=120)
        self._children.append(Child(launch).start())
        self._children[-1].wait_ready()

    def stop(self) -> None:
        """At once: an apiserver whose etcd is gone takes a minute to end, and nothing here is needed again."""
        for child in reversed(self._children):
            child.kill()
        subprocess.run([self._programs["kube-proxy"], "--cleanup"], capture_output=True, check=False)
        for program in ("iptables", "ip6tables"):
            for rule in LEFT:
                subprocess.run([program, *rule], capture_output=True, check=False)


def answers(url: str) -> bool:
    """Whether it says that all is well."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=1.0, verify=False, headers={"Authorization": f"Bearer {TOKEN}"}).is_success
    return False


@contextlib.contextmanager
def cluster(folder: Path, programs: Mapping[str, Path], images: Path) -> Iterator[Cluster]:
    """A cluster whose nodes are ready and hold the images of an archive."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(network())
        stack.callback(without_groups)
        ports = free_ports(len(NODES))
        nodes = [Node(name, n + 1, ports[n], folder / name, programs) for n, name in enumerate(NODES)]
        for node in nodes:
            node.folder.mkdir(parents=True)
            stack.callback(node.stop)
            node.start_containers()
        imports = [subprocess.Popen(
            ["ctr", "--address", str(node.socket), "--namespace", "k8s.io", "images", "import", str(images)],
            stdout=subprocess.DEVNULL,
        ) for node in nodes]  # fmt: skip
        assert [each.wait(600) for each in imports] == [0] * len(nodes)
        begun = time.monotonic()
        plane = ControlPlane(folder, programs)
        stack.callback(plane.stop)
        plane.start()
        for node in nodes:
            node.start_kubelet(plane.kubeconfig)
        it = Cluster(programs, plane.kubeconfig, nodes)
        for name in NODES:
            until(lambda name=name: name in it.kubectl("get", "nodes", "--output", "name"), 60, f"{name} is there")
        it.kubectl("wait", "--for=condition=Ready", "node", "--all", "--timeout=60s")
        log = folder / "kube-router.log"
        stack.enter_context(enforced(programs["kube-router"], plane.kubeconfig, NODES[0], SERVICES, log))
        print(f"cluster of {len(nodes)} nodes: Ready after {time.monotonic() - begun:.1f} s")
        yield it


@contextlib.contextmanager
def network() -> Iterator[None]:
    """An address for the control plane, and what lets pods reach each other; as before afterwards."""
    before = {name: Path(name).read_text() for name in FORWARDED if Path(name).exists()}
    new = [folder for folder in FIXED if not Path(folder).exists()]
    run("ip", "address", "add", f"{HOST}/32", "dev", "lo")
    try:
        for name in before:
            Path(name).write_text(FORWARDED[name])
        for table, chain, *rule in RULES:
            run("iptables", "--table", table, "--insert", chain, *rule)
        yield
    finally:
        for table, chain, *rule in RULES:
            subprocess.run(["iptables", "--table", table, "--delete", chain, *rule], capture_output=True, check=False)
        for name, value in before.items():
            Path(name).write_text(value)
        run("ip", "address", "delete", f"{HOST}/32", "dev", "lo")
        for folder in new:
            shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], bool], limit_s: float, what: str) -> float:
    """Wait until it holds, asking again and again; seconds that it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit_s, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.2)  # the state of a cluster is asked for
    return time.monotonic() - begun
