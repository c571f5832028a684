"""One node of a Kubernetes: containerd, a kubelet and the network of its pods, all of it below one folder and gone
afterwards. Several can live on one machine: each has a bridge and addresses of its own.

The machine is a plain one: control groups in version 1 or 2 without systemd, and a root that may lack CAP_SYS_RESOURCE,
so neither asks for another OOM score.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.deploy.conftest import run
from turnlog.infra.embedded.process import Child, Launch

HOST = "10.213.0.1"
"""An address of the loopback that nobody but this machine and its pods can reach: kubelets ask callers for nothing."""
PODS = "10.213.0.0/17"
SERVICES = "10.213.128.0/20"
PLUGINS = Path("/usr/lib/cni")
PAUSE = "turnlog-standins/pause:1"
BOUNDARY = "boundary"
"""A handler for a RuntimeClass: runc once more, which is no boundary, but says whether the chart names one well."""
CONTAINERD = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
stream_server_address = "{host}"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{folder}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{boundary}]
runtime_type = "io.containerd.runc.v2"
"""


@dataclass
class Node:
    """`number`: of its network, from 1."""

    name: str
    number: int
    port: int
    folder: Path
    programs: Mapping[str, Path]
    children: list[Child] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        """containerd's."""
        return self.folder / "containerd.sock"

    @property
    def bridge(self) -> str:
        """What its pods are plugged into."""
        return f"turnlog-cni{self.number}"

    def ctr(self, *arguments: str | Path) -> str:
        """`ctr` of the kubelet's namespace."""
        return run("ctr", "--address", self.socket, "--namespace", "k8s.io", *arguments)

    def start_containers(self) -> None:
        """containerd, before the control plane is there: images can be imported."""
        (self.folder / "cni").mkdir(parents=True)
        subnet = PODS.replace("0.0/17", f"{self.number}.0/24")
        allocation = {
            "type": "host-local", "dataDir": str(self.folder / "addresses"), "ranges": [[{"subnet": subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }  # fmt: skip
        bridge = {"type": "bridge", "bridge": self.bridge, "isGateway": True, "hairpinMode": True, "ipam": allocation}
        network = {"cniVersion": "0.4.0", "name": self.bridge, "plugins": [bridge]}
        (self.folder / "cni/10-turnlog.conflist").write_text(json.dumps(network))
        config = self.folder / "containerd.toml"
        config.write_text(
            CONTAINERD.format(
                folder=self.folder, socket=self.socket, pause=PAUSE, host=HOST, plugins=PLUGINS, boundary=BOUNDARY
            )
        )
        self._start("containerd", "containerd", "--config", config, ready=self._answers)

    def start_kubelet(self, kubeconfig: Path) -> None:
        """It registers the node."""
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
            "address": HOST, "port": self.port, "healthzPort": 0, "readOnlyPort": 0,
            "containerRuntimeEndpoint": f"unix://{self.socket}", "clusterDNS": [HOST], "clusterDomain": "cluster.local",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "failCgroupV1": False, "failSwapOn": False, "cgroupDriver": "cgroupfs", "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [], "oomScoreAdj": 0, "makeIPTablesUtilChains": False,
            "podLogsDir": str(self.folder / "logs"), "volumePluginDir": str(self.folder / "plugins"),
            "evictionHard": {"memory.available": "100Mi"}, "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            # Ends of containers are to be seen soon: tests wait for them.
            "syncFrequency": "10s", "nodeStatusUpdateFrequency": "4s",
        }  # fmt: skip
        (self.folder / "kubelet.yaml").write_text(yaml.safe_dump(config))
        self._start(
            "kubelet", self.programs["kubelet"], "--config", self.folder / "kubelet.yaml", "--kubeconfig", kubeconfig,
            "--root-dir", self.folder / "kubelet", "--cert-dir", self.folder / "pki", "--hostname-override", self.name,
            "--node-ip", HOST, "--v", "1",
        )  # fmt: skip

    def _start(self, name: str, *command: str | Path, ready: Callable[[], bool] = lambda: True) -> None:
        argv = tuple(map(str, command))
        child = Child(
            Launch(name=f"{self.name}-{name}", argv=argv, log=self.folder / f"{name}.log", ready=ready)
        ).start()
        self.children.append(child)
        child.wait_ready()

    def _answers(self) -> bool:
        command = ["ctr", "--address", str(self.socket), "version"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def stop(self) -> None:
        """Containers, processes, mounts, bridge and control groups."""
        for child in self.children[1:]:
            child.stop()
        if self.children and self.children[0].returncode is None:
            for task in self.ctr("tasks", "list", "--quiet").split():
                with contextlib.suppress(AssertionError):  # it ended meanwhile
                    self.ctr("tasks", "delete", "--force", task)
            self.children[0].stop()
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if mount.startswith(f"{self.folder}/")]):
            run("umount", "--lazy", mount)
        bridge = Path("/sys/class/net", self.bridge)
        if bridge.exists():
            for port in (bridge / "brif").iterdir():
                with contextlib.suppress(AssertionError):  # it goes with its pod's network
                    run("ip", "link", "delete", port.name)
            run("ip", "link", "delete", self.bridge)
        for left in Path("/var/lib/cni/results").glob(f"{self.bridge}-*"):
            left.unlink()
        shutil.rmtree(self.folder)


def with_a_share() -> bool:
    """All containers are one control group, which gets what one process beside it does. Give it that of a dozen, if it
    is there."""
    for name, share in (("cpu/k8s.io/cpu.shares", 12288), ("k8s.io/cpu.weight", 1200)):
        if (file := Path("/sys/fs/cgroup", name)).exists():
            file.write_text(str(share))
            return True
    return False


def without_groups() -> None:
    """Remove the control groups that containers of nodes were in."""
    for top in Path("/sys/fs/cgroup").glob("**/k8s.io"):
        for folder, _, _ in os.walk(top, topdown=False):
            Path(folder).rmdir()
