"""The docker backend against a local Engine API: what it asks for, what it refuses, what it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.docker_engine import DockerServer, FakeImage
from turnlog.infra.sandbox_root import cache_directory
from turnlog.plugins.docker.backend import Docker, filter_for, known_runtime
from turnlog.plugins.docker.sandbox import (
    LABEL,
    Daemon,
    boot_id,
    connect,
    container_arguments,
    listening_in,
    reachable,
    wait_for_process,
)
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends import seccomp
from turnlog.sandbox_workers.backends.roots import owned_prefix
from turnlog.sandbox_workers.protocol import (
    BackendUnavailable,
    Command,
    ImageMissing,
    Kind,
    SandboxDied,
    SandboxUnavailable,
    Shape,
)
from turnlog.schemas.events import SandboxLimits, ToolStatus

IMAGE = "agent:1"
SHAPE = Shape(disk_bytes=4 << 20)
LIMITS = SandboxLimits(cpu_s=5.0, wall_s=20.0, memory_bytes=128 << 20, pids=16, disk_bytes=4 << 20)
UNCLOSED = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
"""The SDK drops a unix socket that it could not connect without closing it; the interpreter does that."""
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="not started by root")
SLEEP = Command(kind=Kind.shell, source="echo begun; sleep 60")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerServer]:
    """An Engine API where the SDK looks for it, with an image that has python3 and one that has not."""
    images = {IMAGE: "/opt/python/bin:/usr/bin:/bin", "bare:1": "/nowhere"}
    with DockerServer(tmp_path / "docker.sock", cache_directory(), images) as server:
        monkeypatch.setenv("DOCKER_HOST", server.url)
        yield server


@pytest.fixture
def ca() -> Iterator[Path]:
    """A file that every user may read."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "ca.pem").write_text("a certificate")
        yield Path(folder) / "ca.pem"


def settings(**changes: Any) -> SandboxSettings:
    """Of a worker for IMAGE."""
    return SandboxSettings(docker_image=IMAGE, **changes)


@pytest.fixture
async def docker(server: DockerServer) -> AsyncIterator[Docker]:
    """The backend on it."""
    backend = await Docker.open(settings())
    yield backend
    await backend.close()


async def opened(**pieces: Any) -> Docker:
    """The backend on the daemon that answers, made of these pieces."""
    client = await asyncio.to_thread(connect)
    return Docker(Daemon(client, await asyncio.to_thread(client.info), None), settings(), None, **pieces)


async def begun(backend: Docker) -> tuple[Any, asyncio.Task[Any]]:
    """A sandbox in the middle of a call."""
    sandbox = await backend.start(0, SHAPE)
    printed = asyncio.Event()
    running = asyncio.create_task(sandbox.exec(SLEEP, LIMITS, on_output=lambda *_: printed.set()))
    await printed.wait()
    return sandbox, running


async def test_a_container_gets_nothing_that_it_does_not_need(docker: Docker, server: DockerServer) -> None:
    sandbox = await docker.start(3, SHAPE)
    [box] = server.boxes.all()
    host = box.config["HostConfig"]
    assert box.config["User"] == "20003:20003"
    assert (host["CapDrop"], host["SecurityOpt"], host["ReadonlyRootfs"]) == (["ALL"], ["no-new-privileges"], True)
    assert (host["NetworkMode"], host["IpcMode"], host["LogConfig"]["Type"]) == ("none", "private", "none")
    assert host["MemorySwap"] == host["Memory"] == (512 << 20) + (4 << 20) + (64 << 20)
    assert host["PidsLimit"] == 64 + 4
    assert all("size=4194304" in options and "nosuid,nodev" in options for options in host["Tmpfs"].values())
    assert not host["Mounts"]
    assert "Privileged" not in host
    await sandbox.close()
    assert server.boxes.all() == []


async def test_an_image_that_is_not_there_is_refused_with_what_to_do(docker: Docker) -> None:
    shape = Shape(image="nobody/has:this", disk_bytes=4 << 20)
    with pytest.raises(ImageMissing, match="docker pull nobody/has:this"):
        await docker.start(0, shape)
    with pytest.raises(ImageMissing, match="docker pull nobody/has:this"):
        await docker.environment(shape)


async def test_an_image_without_python_is_refused_and_leaves_no_container(docker: Docker, server: DockerServer) -> None:
    with pytest.raises(ImageMissing, match="bare:1 has no python3"):
        await docker.start(0, Shape(image="bare:1", disk_bytes=4 << 20))
    assert server.boxes.all() == []


def test_an_old_python_says_so_before_it_sees_anything_newer() -> None:
    loader = Path(sys.modules["turnlog.sandbox_workers.inside.loader"].__file__ or "")
    older = f"import sys; sys.version_info = (3, 6); exec(open({str(loader)!r}).read())"
    ended = subprocess.run([sys.executable, "-c", older], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("this image's python3 is 3.")


@UNCLOSED
async def test_no_daemon_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    with pytest.raises(BackendUnavailable, match=r"DOCKER_HOST.*docker info"):
        await Docker.open(settings())


async def test_an_address_that_is_none_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "nonsense://x")
    with pytest.raises(BackendUnavailable, match="DOCKER_HOST"):
        await Docker.open(settings())


async def test_the_runtime_is_passed_and_must_be_known(server: DockerServer) -> None:
    backend = await Docker.open(settings(docker_runtime="runc"))
    sandbox = await backend.start(0, SHAPE)
    assert server.boxes.all()[0].config["HostConfig"]["Runtime"] == "runc"
    assert (await backend.environment(SHAPE))["runtime"] == "runc"
    await sandbox.close()
    await backend.close()
    with pytest.raises(BackendUnavailable, match=r"docker_runtime = 'runsc'.*knows runc.*daemon\.json"):
        await Docker.open(settings(docker_runtime="runsc"))


async def test_a_runtime_goes_by_the_name_that_the_daemon_has_for_it(
    docker: Docker, server: DockerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(disk_bytes=4 << 20)
    daemon = Daemon(connect(), {"CpuCfsQuota": True}, "kata-runtime")
    made = container_arguments(daemon, settings(cpus=0.5), 0, shape, None)["host_config"]
    assert (made["Runtime"], made["NanoCpus"]) == ("kata-runtime", 500_000_000)
    daemon.client.close()


def test_kata_is_found_under_the_names_that_it_has() -> None:
    about = {"Runtimes": {"runc": {}, "kata-runtime": {}}}
    assert known_runtime(about, "kata") == "kata-runtime"
    assert known_runtime(about, "io.containerd.kata.v2") == "io.containerd.kata.v2"
    assert known_runtime(about, "") is None


@UNCLOSED
async def test_a_daemon_that_goes_away_in_a_call_is_a_sandbox_that_died(
    docker: Docker, server: DockerServer, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox, running = await begun(docker)
    await asyncio.to_thread(server.stop)
    with pytest.raises(SandboxDied, match="daemon"):
        await running
    assert "could not be removed" in caplog.text
    assert not await sandbox.healthy()
    assert not await sandbox.reset()
    with pytest.raises(SandboxUnavailable, match="daemon"):
        await docker.start(0, SHAPE)


async def test_a_container_that_the_kernel_ended_for_memory_is_a_limit(docker: Docker, server: DockerServer) -> None:
    sandbox, running = await begun(docker)
    server.boxes.find(sandbox.container).kill(exhausted=True)
    answer = await running
    assert (answer.status, answer.reason, answer.exit_code) == (ToolStatus.resource_limit, "memory_bytes", None)
    assert server.boxes.all() == []


async def test_a_container_that_somebody_removes_is_a_sandbox_that_died(docker: Docker, server: DockerServer) -> None:
    sandbox, running = await begun(docker)
    await asyncio.to_thread(server.boxes.remove, sandbox.container)
    with pytest.raises(SandboxDied, match="removed by somebody else"):
        await running


async def test_an_abandoned_call_takes_its_container_along(docker: Docker, server: DockerServer) -> None:
    sandbox, running = await begun(docker)
    inside = psutil.Process(sandbox.process.pid)
    below = [inside, *inside.children(recursive=True)]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert server.boxes.all() == []
    assert psutil.wait_procs(below, timeout=10)[1] == []


async def test_a_sandbox_whose_init_a_call_can_reach_is_never_as_new(
    server: DockerServer, caplog: pytest.LogCaptureFixture
) -> None:
    prying = Command(kind=Kind.python, source="import os; os.listdir('/proc/self/fd')")
    docker = await opened(denied=b"", probe=prying)
    sandbox = await docker.start(0, SHAPE)
    assert not await sandbox.reset()
    assert "every lease gets a new container" in caplog.text
    await sandbox.close()
    await docker.close()


@ROOT
async def test_the_proxy_socket_is_on_the_sandboxs_loopback(docker: Docker) -> None:
    sandbox = await docker.start(0, Shape(network="allowlist", disk_bytes=4 << 20))
    source = "import socket; s = socket.create_connection(('127.0.0.1', 3128)); s.send(b'hi'); print(s.recv(9))"
    running = asyncio.create_task(sandbox.exec(Command(kind=Kind.python, source=source), LIMITS))
    assert sandbox.proxy is not None
    sandbox.proxy.setblocking(False)
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(sandbox.proxy)
    with connection:
        assert await loop.sock_recv(connection, 9) == b"hi"
        await loop.sock_sendall(connection, b"you")
        assert (await running).output == b"b'you'\n"
    await sandbox.close()


@ROOT
async def test_the_ca_of_the_proxy_is_shown_where_there_is_a_network(server: DockerServer, ca: Path) -> None:
    backend = await Docker.open(settings(), ca=ca)
    shown = Command(kind=Kind.shell, source="cat /etc/turnlog/ca.pem")
    for network, output in (("allowlist", b"a certificate"), ("none", b"cat: /etc/turnlog/ca.pem: No such file")):
        sandbox = await backend.start(0, Shape(network=network, disk_bytes=4 << 20))
        assert (await sandbox.exec(shown, LIMITS)).output.startswith(output)
        await sandbox.close()
    await backend.close()


async def test_an_entrypoint_that_is_not_executed_yet_is_waited_for() -> None:
    late = 'read -r name; exec sh -c "read -r _" "$name"'
    process = await asyncio.create_subprocess_exec("sh", "-c", late, stdin=asyncio.subprocess.PIPE)
    waiting = asyncio.create_task(asyncio.to_thread(wait_for_process, process.pid, "its-name", time.monotonic() + 20))
    assert not (await asyncio.wait({waiting}, timeout=0.1))[0]
    assert process.stdin is not None
    process.stdin.write(b"its-name\n")
    await waiting
    process.stdin.close()
    assert await process.wait() == 1


@ROOT
async def test_a_process_that_is_not_the_containers_is_not_entered() -> None:
    with pytest.raises(SandboxUnavailable, match="not a process of this machine"):
        listening_in(1, "turnlog-sandbox-other", patience_s=0.0)


async def test_a_network_that_cannot_be_served_is_refused(docker: Docker, server: DockerServer) -> None:
    with pytest.raises(SandboxUnavailable, match="'everything'"):
        await docker.start(0, Shape(network="everything", disk_bytes=4 << 20))
    assert server.boxes.all() == []
    assert not reachable("http+docker://localhost", "runsc")
    assert not reachable("https://10.0.0.1:2376", "runc")


async def test_system_calls_are_filtered_as_in_a_local_sandbox(docker: Docker) -> None:
    assert seccomp.program(), "this machine has no libseccomp"
    source = """
import ctypes, os, socket
print(ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0), os.strerror(ctypes.get_errno()))
try:
    socket.socket(socket.AF_VSOCK)
except OSError as error:
    print(error.strerror)
"""
    sandbox = await docker.start(0, SHAPE)
    answer = await sandbox.exec(Command(kind=Kind.python, source=source), LIMITS)
    assert answer.output == b"-1 Operation not permitted\nAddress family not supported by protocol\n"
    await sandbox.close()


async def test_a_filter_is_not_sent_to_another_architecture(caplog: pytest.LogCaptureFixture) -> None:
    assert filter_for({"Architecture": "riscv64"}) == b""
    assert "riscv64" in caplog.text


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.05, 0.15])
async def test_a_start_that_is_given_up_leaves_no_container(
    docker: Docker, server: DockerServer, after_s: float
) -> None:
    starting = asyncio.create_task(docker.start(0, SHAPE))
    await asyncio.wait([starting], timeout=after_s)
    if starting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await starting
    else:
        await (await starting).close()
    assert server.boxes.all() == []


async def test_a_killed_worker_leaves_no_process_and_the_next_one_removes_the_record(server: DockerServer) -> None:
    program = """
        import asyncio
        from turnlog.sandbox_settings import SandboxSettings
        from turnlog.plugins.docker import Docker
        from turnlog.sandbox_workers.protocol import Shape

        async def main():
            docker = await Docker.open(SandboxSettings(docker_image="agent:1"))
            sandbox = await docker.start(0, Shape(disk_bytes=4 << 20))
            print(sandbox.process.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    worker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(program), stdout=asyncio.subprocess.PIPE
    )
    assert worker.stdout is not None
    inside = psutil.Process(int(await worker.stdout.readline()))
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    assert (await asyncio.to_thread(psutil.wait_procs, [inside], timeout=20))[1] == []
    [box] = server.boxes.all()
    assert box.process is not None
    await asyncio.to_thread(box.process.wait, 20)
    assert box.state == "exited"
    await (await Docker.open(settings())).close()
    assert server.boxes.all() == []


async def test_a_sweep_takes_what_dead_workers_of_this_machine_left_and_nothing_else(server: DockerServer) -> None:
    ended = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from turnlog.sandbox_workers.backends.roots import owned_prefix; print(owned_prefix())",
        stdout=asyncio.subprocess.PIPE,
    )
    dead = (await ended.communicate())[0].decode().strip()
    config = {"Image": IMAGE, "HostConfig": {}}
    for name, labels in (
        (f"{dead}0-a", {LABEL: boot_id()}),
        (f"{dead}0-b", {LABEL: "another machine"}),
        (f"{owned_prefix()}0-c", {LABEL: boot_id()}),
        (f"{dead}0-d", {}),
    ):
        server.boxes.create(name, {**config, "Labels": labels})
    await (await Docker.open(settings())).close()
    assert [box.name[-1] for box in server.boxes.all()] == ["b", "c", "d"]


async def test_the_environment_names_image_runtime_and_init(docker: Docker) -> None:
    found = await docker.environment(SHAPE)
    assert found == await docker.environment(SHAPE)
    assert set(found) == {"image", "runtime", "init", "seccomp", "docker"}
    assert found["image"].startswith("sha256:")
    assert found != await docker.environment(Shape(image="bare:1", disk_bytes=4 << 20))


async def test_a_first_process_that_ends_at_once_is_said_with_its_last_words(
    server: DockerServer,
) -> None:
    docker = await opened(denied=b"no program")
    with pytest.raises(SandboxUnavailable, match="the seccomp filter was refused"):
        await docker.start(0, SHAPE)
    await docker.close()
    assert server.boxes.all() == []


async def test_a_sandbox_of_a_server_has_bounds_of_its_own_and_an_image_says_how_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = FakeImage("/opt/python/bin:/usr/bin:/bin", "/app", {"/app/serve": ""}, ("python3", "serve"))
    with DockerServer(tmp_path / "docker.sock", cache_directory(), {IMAGE: task}) as server:
        monkeypatch.setenv("DOCKER_HOST", server.url)
        backend = await Docker.open(settings())
        own = await backend.image_command(IMAGE)
        assert (own.argv, own.cwd, own.user) == (("python3", "serve"), "/app", "")
        with pytest.raises(ImageMissing, match="docker pull none:1"):
            await backend.image_command("none:1")
        sandbox = await backend.start(0, Shape(disk_bytes=4 << 20, memory_bytes=3 << 30, pids=900))
        [box] = server.boxes.all()
        host = box.config["HostConfig"]
        assert (host["Memory"], host["PidsLimit"]) == ((3 << 30) + (4 << 20) + (64 << 20), 904)
        await sandbox.close()
        await backend.close()


async def test_a_workspace_in_the_images_folders_begins_with_their_content_and_is_never_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = FakeImage("/opt/python/bin:/usr/bin:/bin", "/app", {"/app/seed.txt": "from the image"})
    bare = FakeImage("/opt/python/bin:/usr/bin:/bin")
    with DockerServer(tmp_path / "docker.sock", cache_directory(), {IMAGE: task, "bare:1": bare}) as server:
        monkeypatch.setenv("DOCKER_HOST", server.url)
        backend = await Docker.open(settings())
        sandbox = await backend.start(0, Shape(disk_bytes=4 << 20, folders=(".", "/logs")))
        [box] = server.boxes.all()
        host = box.config["HostConfig"]
        assert (box.config["User"], host["ReadonlyRootfs"], "SYS_ADMIN" in host["CapAdd"]) == ("0:0", False, False)
        assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])
        done = await sandbox.exec(Command(kind=Kind.shell, source="pwd; cat seed.txt; id -u"), LIMITS)
        assert done.output == b"/app\nfrom the image0\n"
        assert [entry.path for entry in await sandbox.index()] == ["app", "app/seed.txt", "logs"]
        assert not await sandbox.reset()
        await sandbox.close()
        with pytest.raises(ImageMissing, match="working directory is /: give it a WORKDIR"):
            await backend.start(0, Shape(image="bare:1", disk_bytes=4 << 20, folders=(".", "/logs")))
        await backend.close()
