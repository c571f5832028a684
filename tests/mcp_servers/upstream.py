"""Environment with the reference implementation of MCP (the package mcp), whose pins are not ours."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LOCK, KEPT, UV = ROOT / "locks/mcp.lock", ROOT / ".cache/mcp", ROOT / ".cache/bootstrap/bin/uv"
NO_PACKAGE = "no registry gives the package mcp"


def environment() -> Path:
    """The interpreter of that environment, which is made once. Skips the test where no registry has the package."""
    made = KEPT / hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    if not made.exists():
        shutil.rmtree(KEPT, ignore_errors=True)
        part = KEPT / "part"
        subprocess.run([UV, "venv", "--quiet", "--relocatable", "--python", sys.executable, part], check=True)
        sync = [UV, "pip", "sync", "--quiet", "--compile-bytecode", "--require-hashes", "--python", part, LOCK]
        if subprocess.run(sync).returncode:
            pytest.skip(NO_PACKAGE)
        part.rename(made)
    return made / "bin/python"


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
