"""What the chart gives each role to log in with, against a Kafka that asks: processes with environment, arguments and
files of the rendered pods, each with the rights that are printed for its role and no others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml

from tests.integration.test_acls import environment, process
from tests.secured import PASSWORD, SUPER, Secured
from tests.unit.house.test_deploy import CHART, Document, rendered
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.topics_admin import acls
from turnlog.settings import KafkaSettings, RegistrySettings, RunSettings, Settings, StoreSettings

pytestmark = pytest.mark.kafka
MOUNTED = "/etc/turnlog"
Contents = dict[tuple[str, str], dict[str, str]]
"""(kind, name) -> file name -> what it holds."""
ROLES = ("configure", "assembler", "batcher")


def container_of(documents: list[Document], role: str) -> tuple[Document, Document]:
    """The pod in which a role runs, and its container there."""
    (pod,) = (
        one["spec"]["template"]["spec"]
        for one in documents
        if one["kind"] in ("Deployment", "StatefulSet", "Job") and one["metadata"]["name"].startswith(f"turnlog-{role}")
    )
    return pod, pod["containers"][0]


def mounted(pod: Document, container: Document, contents: Contents, folder: Path) -> None:
    """Write what the pod mounts below MOUNTED, from the Secrets and ConfigMaps of `contents`, below `folder`."""
    volumes = {one["name"]: one for one in pod["volumes"]}
    for mount in container["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "configMap" in volume:
            source = "ConfigMap", volume["configMap"]["name"]
        elif "secret" in volume:
            source = "Secret", volume["secret"]["secretName"]
        else:
            continue
        place = folder / Path(mount["mountPath"]).relative_to(MOUNTED)
        if "subPath" in mount:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(contents[source][mount["subPath"]].replace(MOUNTED, str(folder)))
            continue
        place.mkdir(parents=True)
        for name, text in contents[source].items():
            (place / name).write_text(text)


class Company:
    """A cluster's Secrets and ConfigMaps, the chart's documents, and whoever runs what they say."""

    def __init__(self, secured: Secured, settings: Settings, folder: Path) -> None:
        values = yaml.safe_load((CHART / "examples/company-kafka.yaml").read_text())
        values["roles"]["assembler"]["autoscale"] = {"enabled": False}
        kafka, store = settings.kafka, settings.store
        values["settings"] |= {
            "run": {"id": settings.run.id},
            "registry": {"url": settings.registry.url},
            "store": {"endpoint": store.endpoint, "bucket": store.bucket},
        }
        values["settings"]["kafka"] |= {
            "bootstrap": secured.sasl, "prefix": kafka.prefix, "groups": kafka.groups, "rollouts": kafka.rollouts,
            "replication": 1,
        }  # fmt: skip
        self.folder, self.documents = folder, list(rendered(values))
        self.contents: Contents = {
            (one["kind"], one["metadata"]["name"]): one["data"] for one in self.documents if one["kind"] == "ConfigMap"
        }
        self.contents["ConfigMap", "company-ca"] = {"ca.crt": secured.authority.file.read_text()}
        keys = {"store_access_key": store.access_key, "store_secret_key": store.secret_key}
        self.contents["Secret", "turnlog"] = keys
        for role in ROLES:
            self.contents["Secret", f"turnlog-{role}"] = {"kafka_username": role, "kafka_password": f"{PASSWORD}\n"}

    def launch(self, role: str) -> tuple[Launch, str]:
        """The role as its pod starts it, and where it says how it is."""
        pod, container = container_of(self.documents, role)
        folder, port = self.folder / role, free_ports(1)[0]
        mounted(pod, container, self.contents, folder)
        env = {one["name"]: one["value"].replace(MOUNTED, str(folder)) for one in container["env"] if "value" in one}
        env |= {"TURNLOG_HEALTH_PORT": str(port), "TURNLOG_HEALTH_HOST": HOST}
        arguments = [word.replace(MOUNTED, str(folder)) for word in container["args"]]
        ready = f"http://{HOST}:{port}/readyz"
        argv = (sys.executable, "-m", "turnlog.cli", *arguments)
        return Launch(name=role, argv=argv, log=folder / "log", env=env, ready=lambda: answers(ready)), ready


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=1).is_success
    except httpx.TransportError:
        return False


@contextlib.asynccontextmanager
async def up(launch: Launch) -> AsyncIterator[None]:
    """As soon as it is ready."""
    child = Child(launch)
    await asyncio.to_thread(child.start)
    try:
        await asyncio.to_thread(child.wait_ready)
        yield
    finally:
        await asyncio.to_thread(child.stop)


async def test_each_pod_of_the_chart_logs_in_as_its_role_and_does_with_its_rights(
    secured: Secured, store: StoreSettings, tmp_path: Path
) -> None:
    name = f"t{uuid4().hex[:8]}"
    settings = Settings(
        run=RunSettings(id=name), store=store, registry=RegistrySettings(url=f"http://{HOST}:{free_ports(1)[0]}"),
        kafka=KafkaSettings(bootstrap=secured.sasl, prefix=f"{name}-", groups=2, rollouts=2),
    )  # fmt: skip
    secured.grant(acl for role in ROLES for acl in acls(settings, role))
    since, company = secured.log.stat().st_size, Company(secured, settings, tmp_path)
    registry: Any = environment(SUPER, secured, settings)
    async with process("registry", "registry", f"{settings.registry.url}/subjects", registry, tmp_path):
        job, _ = company.launch("configure")
        once = await asyncio.create_subprocess_exec(*job.argv, env=os.environ | dict(job.env))
        assert await once.wait() == 0
        async with up(company.launch("assembler")[0]), up(company.launch("batcher")[0]):
            pass
    did = secured.asked(since)
    topic = f"{settings.kafka.prefix}agent.sessions"
    assert {("configure", "CREATE", "Topic", topic), ("assembler", "READ", "Group", f"{name}-{name}.assembler")} <= did
    assert ("batcher", "WRITE", "TransactionalId", f"{name}-{name}.batcher") in did
    assert {one for one in secured.asked(since, verdict="Denied") if one[0] in ROLES} == set()
