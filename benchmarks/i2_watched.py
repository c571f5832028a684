"""I2: how much longer the loop takes for the same draws while it is indexed and looked at.

One run on a scripted engine, everything else real, Megatron's steps included, as fast as it goes. Windows of as many
draws each come in pairs: without indexer and dashboard, then with both and a browser that follows the run's page, every
other pair the other way around. What the indexer has missed it catches up before its window begins. The value is the
median over pairs of the time with over the time without; of five pairs the median of many would lie between the least
and the greatest in 94 of 100 cases. Beside it: the CPU time of the two over that of all others in their windows. Not
shown: a real engine's share of the machine, which would make the cost smaller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
from log_server import broker
from row import say, size, told

sys.path.insert(0, str(Path(__file__).with_name("chaos")))  # its loop.py is meant, not the one beside us

from loop import Story, beside, ready
from scripted_loop import SESSIONS, ScriptedLoop, scripted
from soak import ENDLESS, visit

from turnlog.infra.embedded.process import Child
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.history import events
from turnlog.infra.roles.role import Role, open_role
from turnlog.kafka_settings import KafkaSettings
from turnlog.plugins.dashboard.server import FILE
from turnlog.schemas.topics import STEPS

GOAL = 0.03
PAIRS, DRAWS, WARM = size((5, 6, 4), smallest=(1, 1, 1))
UNWATCHED = """
[dashboard]
enabled = false
"""


class Watched:
    """The run, with and without those who look at it."""

    def __init__(self, loop: ScriptedLoop, role: Role) -> None:
        self._loop, self._role = loop, role
        self.shares: list[float] = []
        """Of each window with them: their CPU time over that of all others."""

    async def trained(self, draws: int) -> float:
        """Seconds of so many draws: from the end of the next step to that of the one so many later."""
        first = await self._stepped(len(await self._steps()))
        return (await self._stepped(first[0] + draws))[1] - first[1]

    async def watched(self, draws: int) -> float:
        """The same while it is indexed and looked at."""
        caught_up = await asyncio.to_thread(self._loop.turnlog, "index", "build")
        if caught_up.returncode:
            raise SystemExit(caught_up.stderr)
        with contextlib.ExitStack() as stack:
            children = [beside(self._loop, name, f"{name}-0") for name in ("index", "dashboard")]
            for child in children:
                stack.callback(child.stop)
                if not await ready(child):
                    raise SystemExit(f"{child.launch.name} is not ready: {child.tail()}")
            visitor = asyncio.create_task(visit(json.loads((self._loop.directory / FILE).read_text())["url"]))
            stack.callback(visitor.cancel)
            before = [cpu_s(pids) for pids in (watchers(children), self._others())]
            seconds = await self.trained(draws)
            after = [cpu_s(pids) for pids in (watchers(children), self._others())]
            spent, others = (end - begin for begin, end in zip(before, after, strict=True))
            self.shares.append(spent / others)
        return seconds

    def _others(self) -> list[int]:
        return [*(int(child["pid"]) for child in status_processes(self._loop.settings)), self._loop.pid("feeder-0")]

    async def _steps(self) -> list[float]:
        return [record.timestamp_ms / 1000 async for record, _ in events(self._role, STEPS)]

    async def _stepped(self, step: int) -> tuple[int, float]:
        """That step, counted from 0, and when it was on the log."""
        while len(found := await self._steps()) <= step:
            self._loop.run_ended(Story())
            await asyncio.sleep(0.1)  # the trainer writes: there is nothing here to wait on
        return step, found[step]


def watchers(children: Sequence[Child]) -> list[int]:
    """Their pids."""
    return [child.pid for child in children]


def cpu_s(pids: Iterable[int]) -> float:
    """Of processes and of the children that they have waited for; of the run's engine and this script nothing."""
    return sum(sum(psutil.Process(pid).cpu_times()[:4]) for pid in pids if pid)


async def measured(loop: ScriptedLoop) -> int:
    """The pairs; the exit status."""
    ratios: list[float] = []
    async with open_role("bench", loop.settings) as role:
        watched = Watched(loop, role)
        loop.run_ended(Story())
        await watched.trained(WARM)
        for number in range(PAIRS):
            ways = [watched.trained, watched.watched]
            seconds = {way: await way(DRAWS) for way in (ways if number % 2 == 0 else reversed(ways))}
            without, with_them = (seconds[way] for way in ways)
            ratios.append(with_them / without - 1)
            say(f"{DRAWS} draws: {without:.2f} s, watched {with_them:.2f} s: {ratios[-1]:+.1%}")
    value = statistics.median(ratios)
    return told(
        id="I2", value=value, unit="of the loop's time more", goal=GOAL, met=value <= GOAL,
        detail={
            "pairs": [round(ratio, 4) for ratio in ratios], "interval": [round(min(ratios), 4), round(max(ratios), 4)],
            "cpu_share": round(statistics.median(watched.shares), 4), "draws": DRAWS, "sessions_per_draw": SESSIONS,
        },
    )  # fmt: skip


def main() -> int:
    """One broker, one run."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder, broker() as server:
        kafka = KafkaSettings(bootstrap=server.bootstrap, prefix=server.prefix)
        with scripted(Path(folder) / "run", "watched", draws=ENDLESS, more=UNWATCHED, kafka=kafka) as loop:
            return asyncio.run(measured(loop))


if __name__ == "__main__":
    raise SystemExit(main())
