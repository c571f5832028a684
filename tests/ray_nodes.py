"""A real Ray of several nodes on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from ray.cluster_utils import Cluster

from turnlog.infra.embedded.ports import free_ports

AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")


def room(**more: int) -> dict[str, int]:
    """Of a node: for one actor. A raylet dies where its agents have not chosen ports of their own within 15 s, which is
    little on two cores that other tests share."""
    ports = dict(zip(AGENTS, free_ports(len(AGENTS)), strict=True))
    return {"num_cpus": 1, "object_store_memory": 80 * 2**20} | ports | more


@contextmanager
def two_nodes(**more: int) -> Iterator[Cluster]:
    """While the block runs; their sockets want a short path."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", folder)
        head = {**room(**more), "include_dashboard": False}
        # Nothing at its exit, which sets a handler of signals: nodes are added in threads, too, and gone below.
        cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        try:
            cluster.add_node(**room(**more))
            yield cluster
        finally:
            cluster.shutdown()


def actors(kind: str) -> list[psutil.Process]:
    """Processes of a class of actors. They descend from the cluster's nodes, and so from here."""
    return [one for one in psutil.Process().children(recursive=True) if f"ray::{kind}" in _title(one)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""
