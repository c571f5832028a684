"""Load that lasts: `python benchmarks/chaos/soak.py [--minutes 30] [--seed 0] [--keep FOLDER]`.

A whole run under its supervisor on a scripted engine, everything else real, index, page (somebody looks at it) and
archive among it. A short ramp measures the turns per second that it takes; then it is loaded at 80 % of that, while its
roles and servers are killed one after the other, in an order that the seed gives, and archived records are pruned from
the topics every minute. Behind the warm-up of each process its memory must not grow: the 95 % upper bound of its trend
(trends.py) is below 1 MB/min. A process beside them that leaks 2 MB/min is looked at, killed and started again in the
same way, and must be found. What waits for each role and what topics hold on disk must not grow either; in the end the
run trains to its end in peace, nothing waits, and the archive gives every sample, batch and account again. One JSON
line, and a page with charts, `soak.html` in the run's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from loop import PATIENCE_S, at_end, at_first_interrupt, settled, there, verdict
from loop import Story as Strikes
from scripted_loop import EMBEDDED, ScriptedLoop, scripted
from servers import say, told
from soak_looks import CONTROL, Looks, looked_at
from soak_page import page

from turnlog.consumers.lag import by_role, lag_of
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.history import all_events
from turnlog.infra.kafka.admin import Admin
from turnlog.infra.kafka.security import Login
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.run_folder import read_endpoints
from turnlog.names import ExitStatus
from turnlog.schemas import topics
from turnlog.schemas.topics import CATALOGUE
from turnlog.settings import KafkaSettings

SHARE = 0.8
"""Of the capacity."""
RAMP = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
"""Turns per second that are offered; the first ones that are not taken end it."""
TAKEN = 0.9
"""Of what is offered, at least."""
STEP_S = 20.0
ROUNDS = 2
"""Each is struck about so often: what lives shorter than its warm-up takes tells nothing of its memory."""
PRUNE_EVERY_S = KEPT_S = 60.0
MORE = 16
"""Draws that are trained undisturbed in the end; those that are formed while the run is taken down are among them, one
in five seconds."""
ENDLESS = 5_000
NEVER_STRUCK = ("topics",)
"""Is over."""
JVM = "-Xms{mb}m -XX:+AlwaysPreTouch"
"""A heap is filled to its limit before it is collected, which is no leak: all of it is held from the start on, so that
what grows lies outside of it."""
SEGMENT_MS = "60000"
"""A broker frees whole segments, so there must be some within minutes."""
ARCHIVE = """
[archive]
enabled = true
max_age_s = 60.0  # the embedded store keeps 3 KB of each object in its memory
"""
LEAK = """
import os, time
kept = []
while True:
    kept.append(os.urandom(2**16))
    time.sleep(60 * 2**16 / {bytes_per_minute})
"""
LEAKED_MB = 2.0
"""A minute."""


def control(loop: ScriptedLoop) -> Child:
    """A process that leaks."""
    code = LEAK.format(bytes_per_minute=LEAKED_MB * 2**20)
    return Child(
        Launch(name=CONTROL, argv=(sys.executable, "-c", code), log=loop.directory / "logs/control.log")
    ).start()


class Soak:
    """A run under load, and who strikes it."""

    def __init__(self, loop: ScriptedLoop, role: Role, looks: Looks, rng: random.Random, under_load_s: float) -> None:
        self._loop, self._role, self._looks, self._rng, self._under_load_s = loop, role, looks, rng, under_load_s
        self.kills: Counter[str] = Counter()
        self.pruned = 0
        self.unpruned = 0
        """Prunes that failed, since a server was away."""

    async def ramp(self, step_s: float) -> float:
        """Turns per second that the run takes. Raises SystemExit when it takes none."""
        most = 0.0
        for offered in RAMP:
            self._loop.paced(offered)
            await asyncio.sleep(step_s / 4)  # what was under way at the rate before
            rate = await self._rate(step_s)
            say(f"{offered:.0f} turns/s are offered, {rate:.1f} are taken")
            most = max(most, rate)
            if rate < TAKEN * offered:
                break
        if not most:
            raise SystemExit("the run takes no turns: see its logs")
        return most

    async def _rate(self, over_s: float) -> float:
        began, before = time.monotonic(), await self._turns()
        await asyncio.sleep(over_s)
        return (await self._turns() - before) / (time.monotonic() - began)

    async def _turns(self) -> int:
        places = [place for place in self._looks.places if place.topic == topics.TURNS.name]
        return sum((await self._role.log.end_offsets(places)).values())

    async def strike(self) -> None:
        """Kill one after the other, each once in a round, until cancelled."""
        strikes = Strikes()
        while True:
            names = [child["name"] for child in status_processes(self._loop.settings)]
            victims = [name for name in names if name not in NEVER_STRUCK] + ["feeder-0", "engine", CONTROL]
            pause_s = self._under_load_s / (ROUNDS * len(victims))
            for victim in self._rng.sample(victims, len(victims)):
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
                await self._kill(victim)
                await settled(self._loop, strikes)

    async def _kill(self, victim: str) -> None:
        self._looks.mark(victim)
        say(f"{self._looks.minutes():5.1f} min  kill {victim}")
        if victim == "engine" and self._loop.engine is not None:
            self._loop.engine.kill()
            await asyncio.to_thread(self._loop.start_engine)
        elif victim == CONTROL:
            self._looks.control.kill()
            self._looks.control = control(self._loop)
        elif pid := await there(self._loop, victim):
            os.kill(pid, signal.SIGKILL)
        self.kills[victim] += 1

    async def prune(self) -> None:
        """Let go of what is archived, every minute, until cancelled."""
        while True:
            await asyncio.sleep(PRUNE_EVERY_S)
            before = str(int((time.time() - KEPT_S) * 1000))
            done = await asyncio.to_thread(self._loop.turnlog, "archive", "prune", "--before", before, "--yes")
            self.pruned += done.returncode == 0
            self.unpruned += done.returncode != 0
            if done.returncode:
                say(f"prune: {done.stderr.strip()[-300:]}")


async def visit(url: str) -> None:
    """Look at the page of a run as a browser does, until cancelled."""
    async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):  # it is killed as all others are
                async with client.stream("GET", "/live", timeout=None) as live:
                    async for line in live.aiter_lines():
                        if line.startswith("event: moved"):
                            await client.get("/")
            await asyncio.sleep(1.0)


async def segments_of_a_minute(kafka: KafkaSettings) -> None:
    """For every topic."""
    admin = Admin(bootstrap_servers=kafka.bootstrap, **Login(kafka).options())
    await admin.start()
    try:
        resources = [
            ConfigResource(ConfigResourceType.TOPIC, topic.name, configs=topic.config() | {"segment.ms": SEGMENT_MS})
            for topic in CATALOGUE
        ]
        await admin.alter_configs(resources)
    finally:
        await admin.close()


async def under_load(
    loop: ScriptedLoop, *, minutes: float, step_s: float, rng: random.Random
) -> tuple[Soak, Looks, int]:
    """Ramp, load and strikes; what was seen, and how many draws are formed. The first Ctrl-C ends it early."""
    enough = at_first_interrupt()
    async with open_role("soak", loop.settings) as role:
        await segments_of_a_minute(role.settings.kafka)
        looks = Looks(loop, control(loop))
        soak = Soak(loop, role, looks, rng, 60 * minutes)
        loop.run_ended(Strikes())
        page_of = read_endpoints(loop.directory).dashboard
        beside = [asyncio.create_task(each) for each in (looked_at(looks, role), soak.prune(), visit(page_of))]
        try:
            await settled(loop, Strikes())
            await looks.begun.wait()
            looks.capacity = await soak.ramp(step_s)
            looks.rate = SHARE * looks.capacity
            loop.paced(looks.rate)
            say(f"{looks.capacity:.1f} turns/s is what it takes; {minutes:g} minutes at {looks.rate:.1f}")
            looks.loaded()
            beside.append(asyncio.create_task(soak.strike()))
            ended = asyncio.create_task(enough.wait())
            beside.append(ended)
            done, _ = await asyncio.wait(beside, timeout=60 * minutes, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {ended}:
                task.result()  # raises what it died of
        finally:
            looks.unloaded()
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            looks.control.stop()
        await settled(loop, Strikes())
        formed = 1 + max((batch.draw_index for batch in await all_events(role, topics.BATCHES)), default=-1)
    return soak, looks, formed


async def waiting(loop: ScriptedLoop) -> dict[str, int]:
    """Records that wait for roles when nothing is asked for any more: none, or after a while those that are left."""
    deadline = time.monotonic() + PATIENCE_S
    async with open_role("soak", loop.settings) as role:
        while True:
            left = {name: count for name, count in by_role(await lag_of(role.log, role.settings)).items() if count}
            if not left or time.monotonic() > deadline:
                return left
            await asyncio.sleep(1.0)


def soaked(directory: Path, *, minutes: float, step_s: float, seed: int) -> int:
    """The whole story; the exit status."""
    began = time.monotonic()
    with scripted(directory, "soak", draws=ENDLESS, more=ARCHIVE) as loop:
        soak, looks, formed = run_verb(under_load(loop, minutes=minutes, step_s=step_s, rng=random.Random(seed)))
        say(f"{formed} draws are formed; training {MORE} more in peace")
        loop.stop()
        loop.paced(math.inf)
        loop.up(formed + MORE)
        run_verb(at_end(loop, Strikes()))
        left = run_verb(waiting(loop))
        found = run_verb(verdict(loop, pruned=True))
    books = found.pop("detail")
    seen = looks.judged(LEAKED_MB)
    clean = not (found["lost"] or found["twice"] or found["skipped"] or left) and found["identical"] and books["books"]
    detail: dict[str, Any] = {
        "minutes": round(looks.loaded_s() / 60, 1), "seed": seed, "seconds": round(time.monotonic() - began),
        "capacity_turns_per_s": round(looks.capacity, 1), "offered_turns_per_s": round(looks.rate, 1),
        "turns_per_s": round(looks.turns_per_s(), 1), "kills": dict(soak.kills), "pruned": soak.pruned,
        "unpruned": soak.unpruned, "waits_in_the_end": left, "books": books["books"], "steps": books["steps"],
        "draws": books["draws"], "calls": books["calls"], "versions": books["versions"],
        "dead_letters": books["dead_letters"], **seen,
    }  # fmt: skip
    ok = clean and not seen["grows"] and not seen["unsure"] and seen["control_found"]
    line = {"id": "soak", "kills": soak.kills.total(), **found, "ok": ok, "detail": detail}
    shown = directory / "soak.html"
    shown.write_text(page(line, looks))
    say(f"the page: {shown}")
    return told(**line)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Load a whole run for long, and kill its roles meanwhile.")
    parser.add_argument("--minutes", type=float, default=30.0, help="under load, the ramp and the end not counted")
    parser.add_argument("--seed", type=int, default=0, help="of the order of kills")
    parser.add_argument("--step", type=float, default=STEP_S, metavar="S", help="of the ramp")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="the run's (default: runs/soak-TIME)")
    arguments = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # a broker that is away is what we came for
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaving takes the run down
    now = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    os.environ["JAVA_TOOL_OPTIONS"] = JVM.format(mb=EMBEDDED.heap_mb)
    directory = (arguments.keep or Path(f"runs/soak-{now}")).resolve()
    try:
        return soaked(directory, minutes=arguments.minutes, step_s=arguments.step, seed=arguments.seed)
    except KeyboardInterrupt:
        return ExitStatus.INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
