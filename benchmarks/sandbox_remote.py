"""G15, the backends beside bubblewrap that need no daemon: wasm, and e2b's own SDK against our local server.

Prints one JSON line a backend on stdout: seconds to open (of wasm with what is cached, with `--compile` with an empty
cache), milliseconds to start a sandbox, of a `python` call of one line, of a reset, and CPU milliseconds of a call and
of a loop of a million additions, beside the same loop in this interpreter. e2b's figures have no network and no microVM
in them: the service's own are added to that.

    python benchmarks/sandbox_remote.py [--compile]
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import row  # noqa: F401 - finds tests.fakes

from tests.fakes import e2b_server
from turnlog.plugins.e2b import E2b
from turnlog.plugins.wasm.backend import Wasm
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.protocol import Command, Kind, Provider, Shape
from turnlog.schemas.events import SandboxLimits

STARTS, CALLS = 10, 100
LIMITS = SandboxLimits()
SHAPE = Shape(disk_bytes=LIMITS.disk_bytes)
ONE_LINE = Command(kind=Kind.python, source="print(1)")
LOOP = "s = 0\nfor i in range(1_000_000): s += i\n"
SETTINGS = SandboxSettings(first_uid=278_000)


async def spent(work: Callable[[], Awaitable[Any]], times: int) -> dict[str, float]:
    """Milliseconds of a repeated work."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        await work()
        found.append((time.perf_counter() - began) * 1000)
    return {"p50_ms": round(statistics.median(found), 1), "most_ms": round(max(found), 1)}


async def measured(provider: Provider, opened_s: float) -> dict[str, Any]:
    """All figures of one backend."""

    async def started() -> None:
        await (await provider.start(0, SHAPE)).close()

    starts = await spent(started, STARTS)
    sandbox = await provider.start(0, SHAPE)
    try:
        calls = await spent(lambda: sandbox.exec(ONE_LINE, LIMITS), CALLS)
        resets = await spent(sandbox.reset, STARTS)
        one = (await sandbox.exec(ONE_LINE, LIMITS)).cpu_s
        loop = (await sandbox.exec(Command(kind=Kind.python, source=LOOP), LIMITS)).cpu_s
    finally:
        await sandbox.close()
    began = time.process_time()
    exec(LOOP, {})
    here = time.process_time() - began
    return {
        "backend": provider.name, "open_s": round(opened_s, 2), "start": starts, "call": calls, "reset": resets,
        "call_cpu_ms": round(one * 1000, 1), "loop_cpu_ms": round((loop - one) * 1000),
        "loop_here_ms": round(here * 1000),
    }  # fmt: skip


async def main(*, afresh: bool) -> None:
    """Both, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # noqa: ASYNC240 - for the users of the slots
        began = time.perf_counter()
        wasm = await Wasm.open(SETTINGS, cache=Path(folder) / "cache" if afresh else None)
        print(json.dumps(await measured(wasm, time.perf_counter() - began)))
    async with e2b_server.serving(first_uid=SETTINGS.first_uid) as server:
        e2b = E2b(SETTINGS, server.connection)
        print(json.dumps(await measured(e2b, 0.0)))
        await e2b.close()


if __name__ == "__main__":
    asyncio.run(main(afresh="--compile" in sys.argv))
