"""Environment with the reference implementation of MCP (the package mcp), whose pins are not ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from tests.upstream_environments import locked_python

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NO_PACKAGE = "no registry gives the package mcp"


def environment() -> Path:
    """The interpreter of that environment. Skips the test where no registry has the package."""
    return locked_python("mcp", NO_PACKAGE)


@asynccontextmanager
async def http_server(
    python: Path, port: int, *options: str, program: str = "server.py"
) -> AsyncIterator[anyio.abc.Process]:
    """A server at http://127.0.0.1:PORT/mcp."""
    command = [str(python), "-u", str(HERE / program), "http", str(port), *options]
    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with anyio.fail_after(30):
                while True:
                    try:
                        await (await anyio.connect_tcp("127.0.0.1", port)).aclose()
                        break
                    except OSError:
                        assert process.returncode is None, f"{command} ended with {process.returncode}"
                        await anyio.sleep(0.05)
            yield process
        finally:
            if process.returncode is None:
                process.kill()


def clean_environment() -> dict[str, str]:
    """Without what a test run has set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
