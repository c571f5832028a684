"""What is left of a worker that was killed in the middle of calls: nothing, once any worker has looked."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.cgroups import find, sweep
from turnlog.sandbox_workers.backends.init_wire import BEAT_S, SILENCE_S
from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
from turnlog.sandbox_workers.protocol import Command, Kind, Shape
from turnlog.schemas.events import SandboxLimits

WORKER = """
    import asyncio, sys
    from turnlog.sandbox_settings import SandboxSettings
    from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
    from turnlog.sandbox_workers.backends.subprocess_backend import Subprocess
    from turnlog.sandbox_workers.protocol import Command, Kind, Shape
    from turnlog.schemas.events import SandboxLimits

    async def main():
        backend = await {backend}.open(SandboxSettings(first_uid=222000))
        shape = Shape(disk_bytes=8 << 20)
        sandboxes = [await backend.start(slot, shape) for slot in range(2)]
        limits = SandboxLimits(wall_s=60.0)
        tree = "touch file; setsid sleep 60 & (sleep 60 & sleep 60) & echo up; sleep 60"
        ready = asyncio.Semaphore(0)
        calls = [
            asyncio.create_task(
                one.exec(Command(kind=Kind.shell, source=tree), limits, on_output=lambda *_: ready.release())
            )
            for one in sandboxes
        ]
        for _ in calls:
            await ready.acquire()
        print("up", flush=True)
        await asyncio.gather(*calls)

    asyncio.run(main())
"""


def left_by(worker: int) -> list[str]:
    """Groups and workspaces that carry a worker's pid."""
    tree = find()
    parents = [*(tree.places() if tree else ()), Path(tempfile.gettempdir())]
    return [str(path) for parent in parents for path in parent.glob(f"turnlog-sandbox-*-{worker}-*")]


@pytest.mark.parametrize("backend", ["Bubblewrap", "Subprocess"])
def test_nothing_is_left_of_a_worker_that_was_killed_in_the_middle_of_calls(
    backend: str,
) -> None:
    source = textwrap.dedent(WORKER).replace("{backend}", backend)
    worker = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "up\n"
    deadline = time.monotonic() + 30
    while len(inside := psutil.Process(worker.pid).children(recursive=True)) < 10:
        assert time.monotonic() < deadline, inside
        time.sleep(0.01)  # the kernel offers no event for a shell's last child
    mounts = Path("/proc/self/mountinfo").read_text()
    worker.kill()
    worker.wait()
    worker.stdout.close()
    deadline = time.monotonic() + 60
    while (left_by(worker.pid) or any(map(lives, inside))) and time.monotonic() < deadline:
        sweep()
        time.sleep(0.05)  # the health round of another worker
    assert left_by(worker.pid) == []
    assert [process for process in inside if lives(process)] == []
    assert Path("/proc/self/mountinfo").read_text() == mounts, "no mount of a sandbox was ever the host's"


@pytest.mark.parametrize("backend", ["Bubblewrap", "Subprocess"])
def test_the_calls_of_a_worker_that_is_stopped_end_by_themselves(backend: str) -> None:
    source = textwrap.dedent(WORKER).replace("{backend}", backend)
    worker = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "up\n"
    calls = sleeping(worker.pid)
    while len(calls) < 8 and worker.poll() is None:  # a shell says "up" before the last of them has come
        calls = sleeping(worker.pid)
    worker.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 40
    while any(map(lives, calls)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process for process in calls if lives(process)] == []
    worker.send_signal(signal.SIGCONT)
    _, said = worker.communicate(timeout=60)
    assert "SandboxDied" in said, "the worker knows that the call must run again"
    sweep()


def sleeping(pid: int) -> list[psutil.Process]:
    """What the calls of a worker have started."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.name() == "sleep" else []
    return found


async def test_a_call_goes_on_for_longer_than_a_silence() -> None:
    backend = await Subprocess.open(SandboxSettings(first_uid=222_000))
    sandbox = await backend.start(0, Shape(disk_bytes=8 << 20))
    limits = SandboxLimits(wall_s=60.0)
    command = Command(kind=Kind.shell, source=f"sleep {SILENCE_S + 2 * BEAT_S}; echo done")
    assert (await sandbox.exec(command, limits)).output == b"done\n"
    await sandbox.close()


def lives(process: psutil.Process) -> bool:
    """Neither gone nor a corpse that its reaper has not seen yet."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
