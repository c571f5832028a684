"""The thread behind the blocking client, in a process that ends without leaving it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import asyncio
from contextlib import asynccontextmanager
from turnlog.client.loop_thread import LoopThread

async def one():
    return 1

async def never():
    await asyncio.Event().wait()

@asynccontextmanager
async def opened():
    yield
    print(await one(), "closed")

thread = LoopThread("test").__enter__()
"""


@pytest.mark.parametrize(
    ("rest", "status", "said"),
    [
        ("thread.wait(one)", 0, ""),
        ("thread.wait(one); raise SystemExit(3)", 3, ""),
        ("thread.enter(opened()); thread.wait(one)", 0, "1 closed\n"),
        ("thread.enter(opened()); thread._portal.start_task_soon(never)", 0, "1 closed\n"),
        ("thread.enter(opened()); thread.__exit__()", 0, "1 closed\n"),
    ],
    ids=["nothing open", "an error", "an open context", "work that does not end", "left"],
)
def test_a_process_that_does_not_leave_the_thread_ends_and_closes_what_is_open(
    tmp_path: Path, rest: str, status: int, said: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(BEGIN + rest)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, said), done.stderr
