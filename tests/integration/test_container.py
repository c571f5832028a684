"""Roles as a container runs them: no folder of theirs, addresses from the environment, servers that come later."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from turnlog.infra.embedded.broker import Broker
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.embedded.servers import ObjectStore
from turnlog.settings import GatewaySettings, KafkaSettings, RegistrySettings, RunSettings, Settings, StoreSettings

COMMAND = [sys.executable, "-m", "turnlog.cli"]
HOST = "127.0.0.2"
"""Of the loopback, and not what anything listens on unless it is told to."""


def environment(settings: Settings, **more: str) -> dict[str, str]:
    """What a pod sets, and what Kubernetes adds of Services beside it."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")},
        "TURNLOG_RUN_ID": settings.run.id,
        "TURNLOG_KAFKA_BOOTSTRAP": settings.kafka.bootstrap,
        "TURNLOG_KAFKA_PREFIX": settings.kafka.prefix,
        "TURNLOG_REGISTRY_URL": settings.registry.url,
        "TURNLOG_STORE_ENDPOINT": settings.store.endpoint,
        "TURNLOG_STORE_SECRET_KEY": settings.store.secret_key,
        "TURNLOG_HEALTH_HOST": HOST,
        "TURNLOG_GATEWAY_PORT": "tcp://10.0.0.1:8080",
        "TURNLOG_KAFKA_SERVICE_HOST": "10.0.0.1",
        **more,
    }


class Container:
    """A verb in a folder that it has no business in."""

    def __init__(self, folder: Path, port: int, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process
        self.url = f"http://{HOST}:{port}"

    async def says(self, path: str, status: int, *, within_s: float = 60.0) -> httpx.Response:
        """The first answer with the status; while /healthz is asked, the process was never unhealthy."""
        async with httpx.AsyncClient(base_url=self.url, timeout=5) as http, asyncio.timeout(within_s):
            while True:
                assert self.process.poll() is None, f"it ended: {self.log}"
                try:
                    answer = await http.get(path)
                except httpx.TransportError:
                    answer = None
                if answer is not None and answer.status_code == status:
                    return answer
                assert answer is None or path != "/healthz", answer.text
                await asyncio.sleep(0.05)  # another process: there is nothing to wait on

    @property
    def log(self) -> str:
        """What it has said."""
        return self.folder.with_suffix(".log").read_text()

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    async def waits_for(self, server: str, said: str, *, within_s: float = 60.0) -> dict[str, str]:
        """What it waits for, once it says so of a server."""
        async with asyncio.timeout(within_s):
            # Another process: there is nothing to wait on.
            while said not in (waiting := (await self.says("/readyz", 503)).json()["waiting"]).get(server, ""):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return dict(waiting)


@contextmanager
def container(tmp_path: Path, settings: Settings, role: str, **more: str) -> Iterator[Container]:
    """A process of a role; killed at the end."""
    folder, port = tmp_path / f"cwd-{role}", free_ports(1)[0]
    folder.mkdir(mode=0o555)
    env = environment(settings, TURNLOG_HEALTH_PORT=str(port), **more)
    with folder.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "turnlog.cli", "role", role], cwd=folder, env=env, stdout=log, stderr=log
        )
    try:
        yield Container(folder, port, process)
    finally:
        process.kill()
        process.wait()


@pytest.mark.kafka
async def test_the_views_need_no_folder_listen_where_they_are_told_and_are_scraped(
    live_settings: Settings, tmp_path: Path
) -> None:
    lines = {"TURNLOG_LOG_FORMAT": "json", "TURNLOG_LOG_LEVEL": "INFO", "TURNLOG_INSTANCE": "views-7"}
    with container(tmp_path, live_settings, "views", **lines) as views:
        await views.says("/readyz", 200)
        metrics = await views.says("/metrics", 200)
        assert metrics.headers["content-type"].startswith("text/plain; version=")
        names = {family.name for family in text_string_to_metric_families(metrics.text)}
        assert "process_resident_memory_bytes" in names
        assert views.stop() == 0
        assert list(views.folder.iterdir()) == []
        said = [json.loads(line) for line in views.log.splitlines()]
        assert {(one["role"], one["instance"], one["run"]) for one in said} == {
            ("views", "views-7", live_settings.run.id)
        }
        assert any(one["logger"].startswith("faust") for one in said)


@pytest.mark.kafka
async def test_a_registry_and_a_health_endpoint_listen_where_they_are_told(
    live_settings: Settings, tmp_path: Path
) -> None:
    port = free_ports(1)[0]
    where = {"TURNLOG_REGISTRY_HOST": HOST, "TURNLOG_REGISTRY_PORT": str(port)}
    with container(tmp_path, live_settings, "registry", **where) as registry:
        await registry.says("/readyz", 200)
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"http://{HOST}:{port}/subjects")).json() == []
            with pytest.raises(httpx.ConnectError):
                await http.get(f"http://127.0.0.1:{port}/subjects")
        assert registry.stop() == 0


@pytest.mark.kafka
async def test_an_address_that_is_not_ours_names_the_setting(live_settings: Settings, tmp_path: Path) -> None:
    with container(tmp_path, live_settings, "batcher", TURNLOG_HEALTH_HOST="192.0.2.1") as batcher:
        assert batcher.process.wait(60) == 2
        assert "change TURNLOG_HEALTH_HOST or TURNLOG_HEALTH_PORT" in batcher.log.splitlines()[-1]


@pytest.fixture
def none_there(tmp_path: Path) -> tuple[Settings, Broker, ObjectStore, int]:
    """Settings of a run, and the servers that they name: nothing of it runs."""
    broker = Broker(tmp_path / "kafka", port=free_ports(1)[0])
    port, gateway = free_ports(2)
    store = ObjectStore(tmp_path / "store", StoreSettings())
    settings = Settings(
        run=RunSettings(id="r", directory="nowhere"),
        kafka=KafkaSettings(bootstrap=broker.bootstrap),
        registry=RegistrySettings(url=f"http://127.0.0.1:{port}"),
        store=store.settings,
        gateway=GatewaySettings(url=f"http://127.0.0.1:{gateway}"),
    )
    return settings, broker, store, port


WORK_S = 15.0
"""Without a round for longer, a process is stuck; the outage is longer still."""
ROLES = ("assembler", "batcher", "archive", "runner", "sandbox", "views", "registry")


@pytest.mark.kafka
@pytest.mark.long
async def test_roles_that_start_before_their_servers_wait_alive_and_say_for_what(
    none_there: tuple[Settings, Broker, ObjectStore, int], tmp_path: Path
) -> None:
    settings, broker, store, registry_port = none_there
    more = {
        "TURNLOG_GATEWAY_URL": settings.gateway.url,
        "TURNLOG_GATEWAY_SIGNING_KEY": "key-of-these-tests",
        "TURNLOG_SANDBOX_ALLOW_UNISOLATED": "true",
        "TURNLOG_REGISTRY_PORT": str(registry_port),
        "TURNLOG_LIVENESS_WORK_S": str(WORK_S),
    }
    with ExitStack() as stack:
        roles = {role: stack.enter_context(container(tmp_path, settings, role, **more)) for role in ROLES}
        for role, one in roles.items():
            assert (await one.says("/healthz", 200)).json()["role"] == role
            said = (await one.waits_for("Kafka", f"Kafka at {broker.bootstrap} does not answer"))["Kafka"]
            assert "TURNLOG_KAFKA_BOOTSTRAP" in said
        await roles["views"].waits_for("registry", f"registry at {settings.registry.url} does not answer")
        await roles["batcher"].waits_for("store", f"store at {settings.store.endpoint} does not answer")
        with broker, store:
            await roles["registry"].says("/readyz", 200)
            await roles["assembler"].waits_for("Kafka", "run `turnlog topics apply`")
            apply = [*COMMAND, "topics", "apply"]
            await asyncio.to_thread(subprocess.run, apply, env=environment(settings), check=True)
            for role in ("assembler", "batcher", "archive", "sandbox", "views"):
                await roles[role].says("/readyz", 200)
            gateway = f"gateway at {settings.gateway.url} does not answer"
            assert set(await roles["runner"].waits_for("gateway", gateway)) == {"start", "gateway"}
            pids = {role: one.process.pid for role, one in roles.items()}
            broker.stop()
            away = time.monotonic()
            for one in roles.values():
                await one.waits_for("Kafka", f"Kafka at {broker.bootstrap}")
            while time.monotonic() < away + 1.5 * WORK_S:
                for one in roles.values():
                    assert (await one.says("/healthz", 200)).is_success
            broker.start()
            for role in ROLES:
                if role != "runner":
                    await roles[role].says("/readyz", 200)
            assert {role: (await one.says("/healthz", 200)).json()["pid"] for role, one in roles.items()} == pids
            for role in ROLES:
                assert roles[role].stop() == 0, roles[role].log
                assert list(roles[role].folder.iterdir()) == []
