"""What enforces NetworkPolicies in the cluster of one machine: kube-router, of which the firewall alone runs. It knows
its pods by the node's address, which both nodes share, so one agent sees the pods of both; and it judges what they send
to the node itself, where the control plane listens."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.conftest import run, succeeds
from turnlog.infra.embedded.process import Child, Launch

CHAIN = re.compile(r"^:(KUBE-(?:ROUTER|POD-FW|NWPLCY)-\S+)", re.MULTILINE)
SETS = ("KUBE-SRC-", "KUBE-DST-")


@contextlib.contextmanager
def enforced(program: Path, kubeconfig: Path, node: str, services: str, log: Path) -> Iterator[None]:
    """Policies hold meanwhile; no rule of theirs is left."""
    only = ("--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--health-port=0")
    where = ("--kubeconfig", str(kubeconfig), "--hostname-override", node, "--service-cluster-ip-range", services)
    launch = Launch(name="kube-router", argv=(str(program), *only, *where), log=log, ready=_begun)
    agent = Child(launch).start()
    try:
        agent.wait_ready()
        yield
        assert agent.returncode is None, agent.tail()
    finally:
        agent.stop()
        _forget()


def _begun() -> bool:
    return succeeds("iptables", "--list-rules", "KUBE-ROUTER-FORWARD", timeout_s=10)


def _forget() -> None:
    """Its chains and sets: `kube-router --cleanup-config` leaves them."""
    rules = run("iptables-save", "--table", "filter")
    chains = CHAIN.findall(rules)
    jumps = [rule for rule in rules.splitlines() if re.search(r"^-A (INPUT|FORWARD|OUTPUT) .*-j KUBE-ROUTER-", rule)]
    gone = [
        *(f"-D {rule.removeprefix('-A ')}" for rule in jumps),
        *(f"-F {chain}" for chain in chains),
        *(f"-X {chain}" for chain in chains),
    ]
    restore = ["iptables-restore", "--noflush"]
    subprocess.run(restore, input="\n".join(["*filter", *gone, "COMMIT", ""]), text=True, check=True)
    for name in run("ipset", "list", "-name").split():
        if name.startswith(SETS):
            run("ipset", "destroy", name)
