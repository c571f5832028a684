"""Kill the Tinker server, again and again: `python benchmarks/chaos/tinker.py [--kills 20]`.

The unmodified SDK trains two models side by side while `turnlog role tinker` is killed by SIGKILL and started again: in
turns between two answers, after a random time within a command, and while it starts. In the end every loss, log-prob
and metric must be, bit for bit, that of an undisturbed server, and no command may have two results.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

from servers import make_topics, say, servers, told

from tests.tinker_process import SCRIPTS, TinkerProcess, sdk_environment
from tests.tiny_model import make_tiny_model
from tests.upstream_environments import locked_python
from turnlog.infra.history import all_events
from turnlog.infra.roles.role import open_role
from turnlog.schemas.events import TenantCommandCompleted
from turnlog.schemas.topics import TENANT_COMMANDS, TENANT_RESULTS
from turnlog.settings import Settings

KINDS = ("between", "within", "start")
PATIENCE_S = 600.0


class Client:
    """The SDK, which trains in a process of its own; `lines` are its answers so far."""

    def __init__(self, python: Path, url: str, steps: int) -> None:
        command = [python, SCRIPTS / "losses.py", url, "--models", "2", "--steps", str(steps)]
        self.process = subprocess.Popen(command, env=sdk_environment(), stdout=subprocess.PIPE, text=True)
        self.lines: list[dict[str, Any]] = []
        self.came = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.came:
                self.lines.append(json.loads(line))
                self.came.notify_all()
        with self.came:
            self.came.notify_all()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait_for(self, count: int) -> None:
        """Wait until there are so many lines, or the process has ended."""
        with self.came:
            self.came.wait_for(lambda: len(self.lines) >= count or self.ended, PATIENCE_S)


def undisturbed(settings: Settings, model: Path, python: Path, steps: int) -> list[dict[str, Any]]:
    """Return what a server answers that nobody kills, on a log of its own."""
    prefix = f"{settings.kafka.prefix}plain-"
    plain = dataclasses.replace(
        settings,
        kafka=dataclasses.replace(settings.kafka, prefix=prefix),
        run=dataclasses.replace(settings.run, id=f"{settings.run.id}-plain"),
    )
    asyncio.run(make_topics(plain))
    server = TinkerProcess(plain, model, TURNLOG_TINKER_SNAPSHOT_EVERY="7")
    try:
        server.start()
        client = Client(python, server.url, steps)
        client.process.wait(PATIENCE_S)
        return client.lines
    finally:
        server.stop()


def strike(server: TinkerProcess, client: Client, kind: str, chance: random.Random) -> None:
    """Kill the server in one of the ways, and start it again."""
    if kind == "start":
        server.start(wait=False)
        time.sleep(chance.uniform(0.5, 8))
        server.kill()
    else:
        client.wait_for(len(client.lines) + chance.randint(1, 3))
        if kind == "within":
            time.sleep(chance.uniform(0, 0.4))
        server.kill()


def torture(settings: Settings, model: Path, python: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill so often, and return the verdict."""
    steps, chance = 2 * kills + 4, random.Random(seed)
    plain = undisturbed(settings, model, python, steps)
    server, struck = TinkerProcess(settings, model, TURNLOG_TINKER_SNAPSHOT_EVERY="7"), Counter[str]()
    try:
        server.start()
        client = Client(python, server.url, steps)
        for number in range(kills):
            if client.ended:
                break
            kind = KINDS[number % len(KINDS)]
            strike(server, client, kind, chance)
            struck[kind] += 1
            if KINDS[(number + 1) % len(KINDS)] != "start":
                server.start()
            say(f"{number + 1} of {kills}: {kind}, {len(client.lines)} answers")
        if not server.alive:
            server.start()
        client.process.wait(PATIENCE_S)
        lost, twice = asyncio.run(books(settings))
        identical = client.lines == plain
        return {
            "id": "tinker",
            "kills": struck.total(),
            "lost": lost,
            "twice": twice,
            "skipped": 0,
            "identical": identical,
            "ok": identical and not lost and not twice and struck.total() == kills and client.process.returncode == 0,
            "detail": {"struck": dict(struck), "answers": len(client.lines), "steps": steps, "seed": seed},
        }
    finally:
        server.stop()


async def books(settings: Settings) -> tuple[int, int]:
    """Return the commands without a result, and the results beyond one of a command."""
    async with open_role("chaos", settings) as role:
        commands = {one.request_id: one for one in await all_events(role, TENANT_COMMANDS)}
        results = Counter(
            one.request_id for one in await all_events(role, TENANT_RESULTS) if isinstance(one, TenantCommandCompleted)
        )
    executed = {name for name, one in commands.items() if one.command != "create_session"}
    return len(executed - results.keys()), sum(count - 1 for count in results.values())


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill the Tinker server while the SDK trains.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    python = locked_python("tinker", "no registry gives tinker")
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        model = make_tiny_model(Path(settings.run.directory) / "model")
        return told(**torture(settings, model, python, arguments.kills, arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
