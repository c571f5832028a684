"""Servers of the run are asked directly, whatever proxy the environment names."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import turnlog
from tests.contract.test_https import served
from tests.fakes.otlp_collector import collecting
from tests.unit.consumers.test_alerts import listening
from turnlog.cli import main
from turnlog.infra.embedded import liveness
from turnlog.infra.embedded.plan import waiting_for
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.environments.verifiers.judges import client
from turnlog.infra.registry import HttpRegistry
from turnlog.infra.roles import http_clients
from turnlog.infra.roles.health import uvicorn_config
from turnlog.infra.roles.starting import _gateway
from turnlog.infra.s3 import S3Blobs
from turnlog.plugins.exporters.alerts import targets
from turnlog.plugins.exporters.spans import TraceSpan
from turnlog.plugins.exporters.tracing import Collector as Exporter
from turnlog.producers.gateway_client import GatewayClient
from turnlog.settings import (
    AlertsSettings,
    GatewaySettings,
    RegistrySettings,
    RunSettings,
    Settings,
    StoreSettings,
    TraceSettings,
)

ROOT = Path(turnlog.__file__).parent
NOWHERE = "http://127.0.0.1:9"
PROXIES = {
    "http_proxy": {"http_proxy": NOWHERE, "https_proxy": NOWHERE},
    "all_proxy": {"all_proxy": NOWHERE},
    "socks": {"all_proxy": "socks5://127.0.0.1:9"},
    "socks for http": {"http_proxy": "socks5h://127.0.0.1:9", "HTTPS_PROXY": "socks5h://127.0.0.1:9"},
}


@pytest.fixture(params=PROXIES)
def proxy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, url in PROXIES[request.param].items():
        monkeypatch.setenv(name, url)


@pytest.fixture
async def url(proxy: None) -> AsyncIterator[str]:
    """Of a server that answers whatever one of ours would."""

    async def answer(_: Request) -> Response:
        return JSONResponse({
            "schema": '{"type": "string"}', "model_path": "m", "weight_version": "1", "loops": {}, "session_id": "s",
        })  # fmt: skip

    async with served(answer) as url:
        yield url


async def test_every_client_of_our_servers_goes_past_a_proxy(url: str) -> None:
    settings = Settings(gateway=GatewaySettings(url=url, signing_key="k"))
    registry, engine, control = HttpRegistry(RegistrySettings(url=url)), SGLang(url), SGLangControl(url)
    assert await registry.schema(1) == {"type": "string"}
    await engine.alive(timeout_s=5.0)
    assert (await control.model_info()).model_path == "m"
    async with AsyncExitStack() as stack:
        await _gateway(stack, settings).answers()
        gateway = await stack.enter_async_context(GatewayClient(settings))
        assert (await gateway._send("POST", f"{url}/sessions", "k", {})).status == 200
        for made in (registry, engine, control):
            stack.push_async_callback(made.close)


async def test_the_supervisor_finds_healthy_what_is_healthy(url: str, tiny_model: Path, tmp_path: Path) -> None:
    engine = EngineServer(tiny_model, Settings().engine, log=tmp_path / "engine.log")
    engine.port = int(url.rpartition(":")[2])
    looks = (
        lambda: liveness.http_answers(url),
        lambda: liveness.generates(url),
        lambda: liveness.is_well(url, timeout_s=5.0),
        lambda: liveness.role_loops(url) == {},
        lambda: waiting_for(url) == "",
        lambda: http_clients.fetch_json(url, timeout_s=5.0)[0],
        engine.serves,
    )
    assert [await asyncio.to_thread(look) for look in looks] == [True] * len(looks)


async def test_a_judge_on_this_machine_is_asked_directly(url: str) -> None:
    async with client() as http:
        assert (await http.get(url)).json()["session_id"] == "s"


@pytest.mark.usefixtures("proxy")
async def test_the_store_is_asked_directly(store: StoreSettings) -> None:
    blobs = S3Blobs(store)
    assert await blobs.get(await blobs.put(b"x")) == b"x"
    await blobs.close()


@pytest.mark.usefixtures("proxy")
def test_children_ask_their_own_machine_directly() -> None:
    """An engine asks itself over HTTP before it serves. requests and urllib go by the same names."""
    told = (
        "import json, urllib.request as u; print(json.dumps([u.proxy_bypass(h) for h in ('127.0.0.1', 'localhost')]))"
    )
    verb = f"import os; from turnlog.infra.roles import http_clients; http_clients.spare_loopback(os.environ); {told}"
    said = subprocess.run([sys.executable, "-c", verb], capture_output=True, text=True, check=True).stdout
    assert all(json.loads(said))


@pytest.mark.usefixtures("proxy")
@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # apprise imports it
def test_a_collector_and_a_hook_on_this_machine_are_asked_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clients are others' and know no_proxy alone, which every verb sets before it does anything."""
    monkeypatch.chdir(tmp_path)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "kept.example")  # and so it is set back afterwards
    main(["run", "list"])
    span = TraceSpan(trace_id=f"{1:032x}", span_id=f"{1:016x}", name="turn", start_ns=1, end_ns=2)
    with collecting() as collector, listening() as hook:
        exporter = Exporter(TraceSettings(timeout_s=5.0), collector.url, {})
        exporter.export([span])
        exporter.close()
        (target,) = targets(Settings(run=RunSettings(directory=str(tmp_path)), alerts=AlertsSettings(urls=hook.url)))
        assert target.notifier.notify(title="t", body="b")
    assert (len(collector.spans), len(hook.bodies)) == (1, 1)


def test_what_no_proxy_names_already_stays() -> None:
    environment = {"https_proxy": NOWHERE, "NO_PROXY": "kafka.svc, localhost"}
    http_clients.spare_loopback(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "kafka.svc,localhost,127.0.0.1,::1"
    http_clients.spare_loopback(bare := {"PATH": "x"})
    assert bare == {"PATH": "x"}


def test_no_other_module_makes_clients_that_would_ask_a_proxy() -> None:
    """Downloads of the embedded broker's jars are from outside, and follow the environment."""
    asking = {"urllib.request.urlopen", "httpx.AsyncClient", "httpx.Client", "httpx.get", "httpx.post", "httpx.stream"}
    spared = {"infra/roles/http_clients.py", "infra/embedded/broker.py"}
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in ROOT.rglob("*.py")
        if str(path.relative_to(ROOT)) not in spared
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) in asking or any(one.arg == "trust_env" for one in node.keywords))
    ]
    assert not found


async def test_clients_drop_an_idle_connection_before_our_servers_do() -> None:
    """Otherwise a request may meet a connection that its server is closing, and fails though the server is well."""
    server = uvicorn_config(Starlette())
    for make in (http_clients.direct, http_clients.outside):
        async with make() as client:
            transport: Any = client._transport
            assert transport._pool._keepalive_expiry == http_clients.KEEP_ALIVE_S < server.timeout_keep_alive
