"""OpenEnv servers in containers: an image is started by its own command, bounded, and gone with its worker. On a
stand-in for a Docker daemon, and on a real one where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.environments.openenv_servers import GUESS, image_folder
from tests.fakes.docker_engine import DockerServer, FakeImage
from turnlog.infra.sandbox_root import cache_directory
from turnlog.plugins.docker import Docker
from turnlog.plugins.docker.sandbox import LABEL, connect
from turnlog.plugins.openenv.servers import ServerNotStarted, ServerPlan, StartedServer, StartedServers
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.server_sandboxes import ServerSandboxes

KILLED = Path(__file__).parents[1] / "environments/killed_worker.py"
DAEMON = os.environ.get("TURNLOG_DOCKER_HOST", "")
BASE = os.environ.get("TURNLOG_DOCKER_IMAGE", "python:3.11-slim")
PACKAGES = "/opt/openenv/packages"
SERVES = f"id -u; pwd; PYTHONPATH={PACKAGES} exec python3 guess_server.py $PORT 1"
DOCKERFILE = f"""FROM {BASE}
RUN useradd player
COPY packages {PACKAGES}
WORKDIR /srv/game
COPY guess_server.py ./
USER player
CMD ["sh", "-c", {json.dumps(SERVES)}]
"""
IMAGE = f"turnlog-test/guess:{hashlib.sha256(DOCKERFILE.encode() + GUESS.read_bytes()).hexdigest()[:12]}"
SETTINGS = SandboxSettings(docker_image=IMAGE, memory_bytes=64 << 20, pids=8)
"""A server has limits of its own."""


def context(packages: Path) -> io.BytesIO:
    """The tar of a build."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add(packages, "packages")
        tar.add(GUESS, GUESS.name)
        about = tarfile.TarInfo("Dockerfile")
        about.size = len(DOCKERFILE)
        tar.addfile(about, io.BytesIO(DOCKERFILE.encode()))
    data.seek(0)
    return data


@pytest.fixture(params=["stand-in", "daemon"])
def client(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a daemon that has the image of the game."""
    if request.param == "daemon" and not DAEMON:
        pytest.skip("no Docker daemon (TURNLOG_DOCKER_HOST)")
    packages = image_folder() / "guess/opt/openenv/packages"
    with contextlib.ExitStack() as stack:
        if request.param == "daemon":
            monkeypatch.setenv("DOCKER_HOST", DAEMON)
        else:
            files = {"/srv/game/guess_server.py": GUESS.read_text()}
            path = "/opt/python/bin:/usr/bin:/bin"
            images: dict[str, str | FakeImage] = {
                IMAGE: FakeImage(path, "/srv/game", files, ("sh", "-c", SERVES), {PACKAGES: packages}),
                BASE: path,
            }
            server = stack.enter_context(DockerServer(tmp_path / "docker.sock", cache_directory(), images))
            monkeypatch.setenv("DOCKER_HOST", server.url)
        client = connect()
        stack.callback(client.close)
        if request.param == "daemon" and not client.images(IMAGE):
            for line in client.build(fileobj=context(packages), custom_context=True, tag=IMAGE, decode=True):
                assert "error" not in line, line
        yield client
        assert client.containers(all=True, filters={"label": [LABEL]}) == []


@pytest.fixture
async def servers(client: Any) -> AsyncIterator[StartedServers]:
    """The servers of a worker on the daemon."""
    provider = await Docker.open(SETTINGS)
    servers = StartedServers(ServerSandboxes({"docker": provider}, slots=2))
    yield servers
    await servers.close()
    await provider.close()


async def started(servers: StartedServers, **plan: Any) -> StartedServer:
    """A healthy server."""
    server = await servers.with_room(ServerPlan.parse({"backend": "docker", "ready_s": 130.0, **plan}))
    try:
        await server.ready(timeout_s=140.0)
    except ServerNotStarted as error:
        error.add_note(server.output())
        raise
    return server


async def test_an_image_is_started_by_its_own_command_in_a_bounded_container_without_a_network(
    client: Any, servers: StartedServers, request: pytest.FixtureRequest
) -> None:
    server = await started(servers, image=IMAGE, memory_bytes=1 << 30)
    session = await server.connect(timeout_s=10.0)
    await session.reset({"seed": 3}, timeout_s=10.0)
    step = await session.step({"number": 1}, timeout_s=10.0)
    user = "1000" if "daemon" in request.node.name else "0"
    assert (step.observation["hint"], server.output().split()) == ("higher", [user, "/srv/game"])
    [box] = client.containers(filters={"label": [LABEL]})
    host = client.inspect_container(box["Id"])["HostConfig"]
    assert (host["NetworkMode"], host["CapDrop"], host["SecurityOpt"]) == ("none", ["ALL"], ["no-new-privileges"])
    assert (host["Memory"] > 1 << 30, host["PidsLimit"] > 1000) == (True, True)
    await session.close()


async def test_a_command_replaces_the_images_own_and_an_end_is_described(servers: StartedServers) -> None:
    with pytest.raises(ServerNotStarted, match="exit status 4") as raised:
        await started(servers, image=IMAGE, command=["sh", "-c", "echo {port}; exit 4"])
    assert "sh ended" in str(raised.value)
    with pytest.raises(ServerNotStarted, match=r"image 'turnlog-test/none:0'.*docker pull"):
        await started(servers, image="turnlog-test/none:0")


async def test_an_image_without_a_command_and_a_backend_that_is_not_there_are_named(
    servers: StartedServers, request: pytest.FixtureRequest
) -> None:
    if "stand-in" in request.node.name:  # a base image has one
        with pytest.raises(ServerNotStarted, match="names no command: give one"):
            await started(servers, image=BASE)
    with pytest.raises(ServerNotStarted, match="does not serve backend 'e2b'; it serves docker: add it to"):
        await started(servers, image=IMAGE, backend="e2b")


@pytest.mark.parametrize("client", ["daemon"], indirect=True)
async def test_a_worker_that_is_killed_leaves_no_container_that_runs_and_the_next_one_removes_it(client: Any) -> None:
    plan = {"image": IMAGE, "backend": "docker", "ready_s": 130.0}
    worker = await asyncio.create_subprocess_exec(
        sys.executable, KILLED, "docker", "", json.dumps(plan), stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(KILLED.parents[2])},
    )  # fmt: skip
    try:
        assert worker.stdout is not None
        played = json.loads(await worker.stdout.readline())
        [box] = client.containers(filters={"label": [LABEL]})
        init = psutil.Process(client.inspect_container(box["Id"])["State"]["Pid"])
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
    assert played["hint"] == "higher"
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [init], timeout=20)
    assert gone == [init]
    await (await Docker.open(SETTINGS)).close()
    assert client.containers(all=True, filters={"label": [LABEL]}) == []
