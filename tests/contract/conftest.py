"""Sandbox backends for the contract: each in turn as `provider`, a new sandbox of it as `sandbox`.

A backend NAME is opened by a fixture `NAME_provider`. A test names by `needs` what a backend must have, as attributes
of its class (`sessions`, `shell`: it has what it does not deny); one that lacks it gets no such test at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psutil
import pytest

from tests.fakes import e2b_server
from tests.fakes.docker_engine import DockerServer
from turnlog.infra.sandbox_root import cache_directory
from turnlog.plugins.docker import Docker
from turnlog.plugins.e2b import E2b
from turnlog.plugins.wasm.backend import Wasm
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Provider, Sandbox, Shape
from turnlog.schemas.events import SandboxLimits


class E2bService(E2b):
    """The real service: in the contract where there is a key for it."""

    name = "e2b_service"


class DockerDaemon(Docker):
    """A real daemon: in the contract where there is an address of one."""

    name = "docker_daemon"


SERVICES: tuple[type[Any], ...] = (E2bService,) if os.environ.get("E2B_API_KEY") else ()
DAEMON = os.environ.get("TURNLOG_DOCKER_HOST", "")
DAEMONS: tuple[type[Any], ...] = (DockerDaemon,) if DAEMON else ()
BACKENDS: tuple[type[Any], ...] = (Bubblewrap, Subprocess, Wasm, Docker, *DAEMONS, E2b, *SERVICES)
DISK = 8 << 20
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
SETTINGS = SandboxSettings(first_uid=210_000 + 1_000 * WORKER)
E2B_UID = 277_000 + 100 * WORKER


def pytest_configure(config: pytest.Config) -> None:
    """Our marker."""
    config.addinivalue_line("markers", "needs(*names): attributes that a sandbox backend must have")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every backend that has what the test needs."""
    if "provider" in metafunc.fixturenames:
        needed = [name for mark in metafunc.definition.iter_markers("needs") for name in mark.args]
        fit = [kind.name for kind in BACKENDS if all(getattr(kind, name, True) for name in needed)]
        metafunc.parametrize("provider", fit, indirect=True)


@pytest.fixture(scope="session")
def bubblewrap_provider() -> Iterator[Provider]:
    """Opened once."""
    yield from _opened(Bubblewrap)


@pytest.fixture(scope="session")
def subprocess_provider() -> Iterator[Provider]:
    """Opened once."""
    yield from _opened(Subprocess)


@pytest.fixture(scope="session")
def wasm_provider() -> Iterator[Provider]:
    """Opened once; the first of a machine compiles for half a minute."""
    yield from _opened(Wasm)


@pytest.fixture(scope="session")
def e2b_provider() -> Iterator[Provider]:
    """The real SDK and a local server, which runs on a loop and a thread of its own."""
    with ThreadPoolExecutor(1) as pool, asyncio.Runner() as runner:
        context = e2b_server.serving(first_uid=E2B_UID)
        server = pool.submit(runner.run, context.__aenter__()).result()
        ending = asyncio.run_coroutine_threadsafe
        served = pool.submit(runner.get_loop().run_forever)
        provider = E2b(SETTINGS, server.connection)
        yield provider
        ending(provider.close(), runner.get_loop()).result()
        runner.get_loop().call_soon_threadsafe(runner.get_loop().stop)
        served.result()
        pool.submit(runner.run, context.__aexit__(None, None, None)).result()


@pytest.fixture(scope="session")
def e2b_service_provider() -> Iterator[Provider]:
    """Opened once, with the key of the environment."""
    yield from _opened(E2bService)


@pytest.fixture(scope="session")
def docker_provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    """Opened once, on a local Engine API."""
    socket = tmp_path_factory.mktemp("docker") / "docker.sock"
    images = {SETTINGS.docker_image: "/opt/python/bin:/usr/bin:/bin"}
    with DockerServer(socket, cache_directory(), images) as server, pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER_HOST", server.url)
        yield from _opened(Docker)


@pytest.fixture(scope="session")
def docker_daemon_provider() -> Iterator[Provider]:
    """Opened once, with the image and the runtime that the environment names."""
    image = os.environ.get("TURNLOG_DOCKER_IMAGE", SETTINGS.docker_image)
    runtime = os.environ.get("TURNLOG_DOCKER_RUNTIME", "")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER_HOST", DAEMON)
        yield from _opened(DockerDaemon, dataclasses.replace(SETTINGS, docker_image=image, docker_runtime=runtime))


def _opened(backend: type[Any], settings: SandboxSettings = SETTINGS) -> Iterator[Provider]:
    with ThreadPoolExecutor(1) as pool:  # a loop of its own, whatever loop the test runs on
        provider: Provider = pool.submit(asyncio.run, backend.open(settings)).result()
        yield provider
        pool.submit(asyncio.run, provider.close()).result()


@pytest.fixture
def provider(request: pytest.FixtureRequest) -> Provider:
    """Each backend in turn."""
    found: Provider = request.getfixturevalue(f"{request.param}_provider")
    return found


@pytest.fixture
def disk_bytes() -> int:
    """What a workspace may hold."""
    return DISK


@pytest.fixture
async def sandbox(provider: Provider, disk_bytes: int) -> AsyncIterator[Sandbox]:
    """A new one."""
    sandbox = await provider.start(0, Shape(disk_bytes=disk_bytes))
    yield sandbox
    await sandbox.close()


@pytest.fixture
def limited(disk_bytes: int) -> Callable[..., SandboxLimits]:
    """Limits of a quick call, with some of them changed."""
    usual = SandboxLimits(
        cpu_s=5.0, wall_s=10.0, memory_bytes=128 << 20, pids=16, disk_bytes=disk_bytes, output_bytes=4096
    )
    return lambda **changes: dataclasses.replace(usual, **changes)


@pytest.fixture
def limits(limited: Callable[..., SandboxLimits]) -> SandboxLimits:
    """The usual ones."""
    return limited()


@dataclasses.dataclass(frozen=True)
class Mark:
    """An environment by which a call's processes are known on this machine, whatever they call themselves."""

    env: dict[str, str]

    def living(self) -> list[psutil.Process]:
        """Processes that have it."""
        found = []
        for process in psutil.process_iter():
            try:
                if self.env.items() <= process.environ().items():
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # it ended meanwhile
        return found

    def gone(self) -> bool:
        """None lives, after a moment for those that were just killed."""
        return not psutil.wait_procs(self.living(), timeout=5)[1]


@pytest.fixture
def mark() -> Mark:
    """A new one."""
    return Mark({"TURNLOG_TEST_MARK": uuid4().hex})
