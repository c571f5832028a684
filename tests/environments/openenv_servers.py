"""OpenEnv servers for tests: upstream's package in an environment of its own, and one that breaks the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.upstream_environments import alone, make

ROOT = Path(__file__).parents[2]
PACKAGE = "openenv==0.10.0"
LEFT_OUT = "gradio; sys_platform == 'none'"
"""Upstream does without its web page then. The imports of that take 4 s of a core."""
KEPT = ROOT / ".cache/openenv"
MADE = KEPT / (PACKAGE.replace("==", "-") + "-without-page")
GUESS = Path(__file__).with_name("guess_server.py")
READY_S = 120.0
"""Seconds for a server to start on a machine that is busy: its imports take 2 s of a core."""


def upstream_python() -> Path:
    """The interpreter of upstream's environment, which is made once. Skips where no registry gives the package."""
    with alone(KEPT):
        if not MADE.exists():
            overrides = KEPT / "overrides.txt"
            overrides.write_text(LEFT_OUT)
            make(MADE, ["install", "--override", str(overrides)], [PACKAGE], "no registry gives openenv")
    return MADE / "bin/python"


def image_folder() -> Path:
    """A folder of images with one, `guess`: upstream's packages and the game below /opt, and the machine's C libraries.

    Sandboxes run as users of their own, so skips where those may not read this repository."""
    python = upstream_python()
    folder = MADE.with_name(f"{MADE.name}-images")
    if not os.access(ROOT, os.X_OK) or any(not parent.stat().st_mode & 1 for parent in (KEPT, *KEPT.parents)):
        pytest.skip("the repository lies where no other user can read")
    if not (folder / "guess").exists():
        part = KEPT / f"image-{os.getpid()}"
        shutil.rmtree(part, ignore_errors=True)
        (part / "opt/openenv").mkdir(parents=True)
        (part / "etc").mkdir()
        subprocess.run([python, GUESS], check=True)  # leaves the bytecode that sandboxes may not write
        packages = next(python.parents[1].glob("lib/python3*/site-packages"))
        subprocess.run(["cp", "-al", packages, part / "opt/openenv/packages"], check=True)
        for library in c_libraries(packages):
            target = part / "usr" / library.relative_to(*library.parts[: 2 if library.parts[1] == "usr" else 1])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
        for name in ("bin", "lib", "lib64"):
            (part / name).symlink_to(f"usr/{name}")
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):  # another process was faster
            part.rename(folder / "guess")
    shutil.copy(GUESS, folder / "guess/opt/openenv/guess_server.py")
    return folder


def c_libraries(packages: Path) -> set[Path]:
    """Libraries of this machine that Python, its modules and packages need, and the one that loads them."""
    modules = Path(sys.base_prefix).glob("lib/python3*/lib-dynload/*.so")
    listed = subprocess.run(
        ["ldd", os.path.realpath(sys.executable), *modules, *packages.rglob("*.so")], capture_output=True, text=True
    ).stdout
    found = {Path(path) for path in re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", listed, re.MULTILINE)}
    beside = {path.parent / "libgcc_s.so.1" for path in found if path.name.startswith("libc.")}
    return {
        path
        for path in found | beside
        if path.exists() and not {sys.base_prefix, str(packages)} & set(map(str, path.parents))
    }


def sandboxed_command(sessions: int, *, image: bool = False) -> list[str]:
    """The command of the game's server in a sandbox: its own Python, upstream's packages."""
    packages = image_folder() / "guess/opt/openenv"
    place = Path("/opt/openenv") if image else packages
    code = f"import sys; sys.path.insert(0, '{place}/packages'); import runpy; sys.argv[0] = '{place}/guess_server.py'"
    return ["python3", "-c", f"{code}; runpy.run_path(sys.argv[0], run_name='__main__')", "{port}", str(sessions)]


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


@dataclass
class UpstreamServer:
    """A process of upstream's server."""

    process: asyncio.subprocess.Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def kill(self) -> None:
        """As kill -9."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        await self.process.wait()

    def stop(self) -> None:
        """It stands, and answers nobody."""
        self.process.send_signal(signal.SIGSTOP)


@asynccontextmanager
async def serve(*command: str | Path, port: int, cwd: Path | None = None) -> AsyncIterator[UpstreamServer]:
    """A server of a command, once it is healthy; killed at the end."""
    process = await asyncio.create_subprocess_exec(*map(str, command), cwd=cwd, stdout=asyncio.subprocess.DEVNULL)
    server = UpstreamServer(process, port)
    try:
        await healthy(server)
        yield server
    finally:
        await server.kill()


async def healthy(server: UpstreamServer) -> None:
    """Wait until it serves. There is no event to wait for."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(READY_S):
        while True:
            assert server.process.returncode is None, "the server ended"
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{server.url}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)


def guessing(sessions: int = 64) -> contextlib.AbstractAsyncContextManager[UpstreamServer]:
    """A server of the game in guess_server.py."""
    port = free_port()
    return serve(upstream_python(), GUESS, str(port), str(sessions), port=port)


Answers = Callable[[str], str | bytes | tuple[str, ...] | None]
"""What a broken server says to a message; None: nothing; empty: it ends the connection."""


@asynccontextmanager
async def broken(answers: Answers, *, health: str = '{"status": "healthy"}') -> AsyncIterator[str]:
    """The URL of a server that answers each message over its WebSocket as it is told, and /health with `health`."""

    async def talk(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            said = answers(str(message.data))
            if said == "":
                break
            if isinstance(said, bytes):
                await socket.send_bytes(said)
            for each in said if isinstance(said, tuple) else (said,) if isinstance(said, str) else ():
                await socket.send_str(each)
        await socket.close()
        return socket

    async def well(request: web.Request) -> web.Response:
        return web.Response(text=health, content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/ws", talk), web.get("/health", well)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
