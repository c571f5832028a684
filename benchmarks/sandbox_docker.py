"""What a sandbox of a Docker daemon costs, beside the local backends in the same run: start, call, reset, close.

Usage: python benchmarks/sandbox_docker.py [--image IMAGE] [--runtimes runc,runsc]
The daemon is the one that DOCKER_HOST names. Last, the same command by the Engine API's own exec, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable

from turnlog.plugins.docker import Docker
from turnlog.plugins.docker.sandbox import connect
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Command, Kind, Provider, Shape
from turnlog.schemas.events import SandboxLimits

SHAPE = Shape(disk_bytes=8 << 20)
COMMANDS = {
    "program": Command(kind=Kind.program, argv=("true",)),
    "shell": Command(kind=Kind.shell, source="true"),
    "python": Command(kind=Kind.python, source="1"),
}
STARTS, CALLS, FIRST_UID = 8, 100, 288_000


async def timed(act: Callable[[], Awaitable[object]], times: int) -> str:
    """Median and longest in milliseconds."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        await act()
        took.append((time.perf_counter() - began) * 1000)
    return f"{sorted(took)[times // 2]:.1f} ({max(took):.1f})"


async def backend(name: str, provider: Provider) -> None:
    """One row."""

    async def whole() -> None:
        await (await provider.start(0, SHAPE)).close()

    print(f"{name}: start and close {await timed(whole, STARTS)}", end="")
    sandbox = await provider.start(0, SHAPE)
    for kind, command in COMMANDS.items():
        print(f", {kind} {await timed(lambda: sandbox.exec(command, SandboxLimits()), CALLS)}", end="")  # noqa: B023
    print(f", reset {await timed(sandbox.reset, CALLS)}", flush=True)
    await sandbox.close()


async def engine(docker: Docker) -> None:
    """`docker exec` without its command line."""
    sandbox = await docker.start(0, SHAPE)
    client = connect()

    def call() -> None:
        made = client.exec_create(sandbox.container, ["true"])
        client.exec_start(made["Id"])
        client.exec_inspect(made["Id"])

    print(f"exec of the Engine API: {await timed(lambda: asyncio.to_thread(call), 20)}")
    client.close()
    await sandbox.close()


async def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", default=SandboxSettings().docker_image)
    parser.add_argument("--runtimes", default="runc")
    asked = parser.parse_args()
    settings = SandboxSettings(first_uid=FIRST_UID, docker_image=asked.image)
    print(f"milliseconds, median (longest); load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    await backend("subprocess", await Subprocess.open(settings))
    await backend("bubblewrap", await Bubblewrap.open(settings))
    for runtime in asked.runtimes.split(","):
        docker = await Docker.open(SandboxSettings(docker_image=asked.image, docker_runtime=runtime))
        await backend(f"docker, {runtime}", docker)
        if runtime == "runc":
            await engine(docker)
        await docker.close()


if __name__ == "__main__":
    asyncio.run(main())
