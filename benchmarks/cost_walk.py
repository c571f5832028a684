"""Instructions of one session in gateway and runner, counted by valgrind: a figure that does not depend on who else
uses the machine, nor on whether it has performance counters.

The real gateway and runner play sessions in one process, over HTTP, with log, engine and the tool's answer in memory
(tests/integration/conftest.py). Valgrind simulates the processor, so it counts the same for the same work, and what a
session costs is the difference between many sessions and few; two measurements, at loads of 10 and 6 on two cores,
differed by 0.9 %. It takes about forty times as long as the processor,
which rules out the whole stack: its roles would miss their deadlines. Calls of Python functions would be counted in
less time, but they say nothing of what C code does.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import row  # noqa: F401 - finds tests.integration
import uvloop

from turnlog.plugins.recipes.calc import RECIPE

FEW, MANY = 8, 40
TURNS = 2
"""Of a session."""
TIMEOUT_S = 900.0
COUNT = re.compile(r"I\s+refs:\s+([\d,]+)")


def instructions_of_a_session() -> tuple[float | None, str]:
    """Return millions of instructions, or None and why there is no figure."""
    if shutil.which("valgrind") is None:
        return None, "valgrind is not installed"
    with tempfile.TemporaryDirectory(prefix="turnlog-walk-") as folder:
        logs = {count: Path(folder, f"{count}.log") for count in (FEW, MANY)}
        running = [
            subprocess.Popen(
                ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null",
                 f"--log-file={log}", sys.executable, __file__, str(count)],
                stdout=sys.stderr,
            )
            for count, log in logs.items()
        ]  # fmt: skip
        try:
            statuses = [each.wait(TIMEOUT_S) for each in running]
        except subprocess.TimeoutExpired:
            return None, f"valgrind took longer than {TIMEOUT_S:g} s"
        finally:
            for each in running:
                each.kill()
        few, many = (counted(log.read_text()) for log in logs.values())
        if any(statuses) or few is None or many is None:
            return None, f"valgrind ended with {statuses}"
    return (many - few) / (MANY - FEW) / 1e6, ""


def counted(log: str) -> int | None:
    """Return the instructions in what cachegrind wrote, or None if it wrote none."""
    found = COUNT.search(log)
    return int(found[1].replace(",", "")) if found else None


async def walk(folder: Path, sessions: int) -> None:
    """Play sessions, at most as many at once as the runner of the stage takes."""
    from tests.integration.conftest import staged

    RECIPE.warm_start.write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(RECIPE.warm_start.model.config()))
    async with staged(folder, folder) as stage:
        worker = asyncio.create_task(stage.work())
        for number in range(sessions):
            await stage.request(f"group-{number}", deadline_s=TIMEOUT_S)
        async with stage.gateway(), stage.running():
            while len(stage.engine.requests) < TURNS * sessions:
                stage.check_alive()
                await stage.broker.changed(1)
            await stage.finished(sessions, TIMEOUT_S)
        worker.cancel()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="turnlog-walk-") as own:
        uvloop.run(walk(Path(own), int(sys.argv[1])))
