"""infra/deploy/compose on a real container engine: `make test-compose`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import pytest

from tests.deploy.conftest import DRAWS, ROOT, Compose, run

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]
SCRIPT = "/repo/benchmarks/chaos/assembler.py"
HEALTHY_S = 60
LOAD_S = 40
PROCESSORS = {"assembler", "batcher", "archive", "views", "lag", "index", "dashboard", "registry"}
OUT = """
import os, socket, sys, urllib.error, urllib.request
from turnlog.sandbox_workers.egress.apart import EgressTokens
try:
    socket.create_connection((sys.argv[1], 8080), 5).close()
    print("answered")
except OSError:
    print("no way")
token = EgressTokens(open(os.environ["TURNLOG_EGRESS_SIGNING_KEY_FILE"]).read()).make_token("call", None)
request = urllib.request.Request("http://store:7070/", headers={"Proxy-Authorization": f"Bearer {token}"})
request.set_proxy("egress:3128", "http")
try:
    urllib.request.urlopen(request, timeout=20)
except urllib.error.HTTPError as error:
    print(error.headers["turnlog-egress"])
"""
"""Of a worker that somebody has taken over: to a role that is not on its network, and to an address inside by the way
out."""


@pytest.fixture(scope="module")
def processors(compose: Compose) -> float:
    """The profile `data`, up; seconds that it took."""
    begun = time.monotonic()
    compose("--profile", "data", "up", "--detach", "--wait", "--wait-timeout", "240")
    return time.monotonic() - begun


def test_processors_are_healthy_and_say_so(compose: Compose, processors: float) -> None:
    print(f"healthy after {processors:.0f} s")
    for role in PROCESSORS:
        assert "ready" in compose("exec", "-T", role, "turnlog", "health", role)


def test_prometheus_finds_every_role_and_reads_the_rules(compose: Compose, processors: float) -> None:
    compose("--profile", "data", "--profile", "observe", "up", "--detach", "--no-recreate", "prometheus")
    address = compose("port", "prometheus", "9090").strip()

    def said(path: str) -> Any:
        with urllib.request.urlopen(f"http://{address}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    up: set[str] = set()
    rules: list[Any] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (up >= PROCESSORS and all(rule["health"] == "ok" for rule in rules)):
        with contextlib.suppress(urllib.error.URLError, ConnectionError):  # it is still starting
            targets = said("targets?state=active")["activeTargets"]
            up = {target["labels"]["component"] for target in targets if target["health"] == "up"}
            rules = [rule for group in said("rules")["groups"] for rule in group["rules"]]
        time.sleep(1)
    assert up >= PROCESSORS
    assert rules
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    for panel in panels():
        assert said(f"query?{urllib.parse.urlencode({'query': panel})}")["resultType"] in ("vector", "scalar"), panel
    compose("--profile", "observe", "rm", "--stop", "--force", "prometheus")


def panels() -> list[str]:
    """Every query of the dashboards."""
    found = [json.loads(path.read_text()) for path in sorted((ROOT / "infra/deploy/monitoring/dashboards").iterdir())]
    asked = [target["expr"] for board in found for panel in board["panels"] for target in panel.get("targets", ())]
    assert asked
    return asked


def test_nothing_is_lost_or_counted_twice_while_assemblers_are_scaled_and_killed(
    compose: Compose, processors: float
) -> None:
    mounts = [word for name in ("tests", "benchmarks") for word in ("-v", f"{ROOT / name}:/repo/{name}:ro")]
    load = ("run", "--rm", "-T", "--no-deps", *mounts, "--entrypoint", "python", "assembler", SCRIPT)
    command = compose.command("--profile", "data", *load, "--seconds", str(LOAD_S))
    writing = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=compose.env)
    assert writing.stderr is not None
    assert "writing" in next(line for line in writing.stderr if "writing" in line)
    try:
        scale(compose, 3)
        struck = [name for name in compose.containers("assembler") if "-run-" not in name]
        assert len(struck) == 3
        kill_init(compose, struck[0])
        run("docker", "kill", struck[1], env=compose.env)
        scale(compose, 1)
    finally:
        said, log = writing.communicate(timeout=400)
    line = json.loads(said.splitlines()[-1])
    found = {name: line[name] for name in ("lost", "twice", "skipped", "identical", "ok")}
    assert found == {"lost": 0, "twice": 0, "skipped": 0, "identical": True, "ok": True}, (line, log[-3000:])
    assert line["detail"]["outputs"] > 0


def scale(compose: Compose, assemblers: int) -> None:
    compose("--profile", "data", "up", "--detach", "--no-recreate", "--scale", f"assembler={assemblers}")


def kill_init(compose: Compose, container: str) -> None:
    """SIGKILL from outside, which the engine takes for a crash: it starts the container again."""
    pid = run("docker", "inspect", "--format", "{{.State.Pid}}", container, env=compose.env).strip()
    subprocess.run(["kill", "-9", pid], check=True)


def test_a_role_obeys_at_once_and_ends_well(compose: Compose, processors: float) -> None:
    (container,) = compose.containers("batcher")
    begun = time.monotonic()
    compose("--profile", "data", "stop", "batcher")
    state = json.loads(run("docker", "inspect", "--format", "{{json .State}}", container, env=compose.env))
    assert (state["ExitCode"], time.monotonic() - begun < 10) == (0, True)
    compose("--profile", "data", "up", "--detach", "--wait", "batcher")


def test_the_loop_trains_and_its_topics_fold_to_what_was_trained(compose: Compose) -> None:
    begun = time.monotonic()
    compose(
        "--profile", "data", "down", "--volumes"
    )  # a run of its own: the chaos case wrote groups that nobody trains
    compose("--profile", "loop", "up", "--detach", timeout_s=900)
    (trainer,) = compose.containers("trainer")
    assert run("docker", "wait", trainer, timeout_s=600, env=compose.env).strip() == "0", compose("logs", "trainer")
    said = compose("exec", "-T", "assembler", "turnlog", "replay", "--verify")
    print(f"{DRAWS} draws, from nothing to trained and replayed, in {time.monotonic() - begun:.0f} s")
    assert f"{DRAWS} batches" in said
    assert "identical" in said
    networks = {service: networks_of(compose, service) for service in ("assembler", "egress", "sandbox")}
    inside = f"{compose.project}_inside"
    assert set(networks["sandbox"]) == {inside}
    assert run("docker", "network", "inspect", inside, "--format", "{{.Internal}}", env=compose.env).strip() == "true"
    ((_, beyond),) = networks["assembler"].items()
    for service, reached in (("egress", "answered"), ("sandbox", "no way")):
        told = compose("exec", "-T", service, "python", "-c", OUT, beyond)
        assert told.split("\n")[:2] == [reached, "private_address"], (service, told)


def networks_of(compose: Compose, service: str) -> dict[str, str]:
    """Those of its one container, and its address on each."""
    (container,) = compose.containers(service)
    found = run("docker", "inspect", "--format", "{{json .NetworkSettings.Networks}}", container, env=compose.env)
    return {name: network["IPAddress"] for name, network in json.loads(found).items()}
