"""What is looked at while a run is loaded, and what its trends say: memory of each process, what waits for each role,
and disk. Memory is what a process and those it started hold alone (anonymous and shared pages, swapped ones too): files
that are mapped come and go as the system likes."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from loop import PROCESS
from scripted_loop import ScriptedLoop
from trends import Look, Trend, trend

from turnlog.consumers.lag import Lag, Markers, by_role, lag_of
from turnlog.infra.embedded.process import Child
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.log import LogError, Partition
from turnlog.infra.roles.role import Role
from turnlog.schemas import topics

CONTROL = "control"
"""The process that leaks on purpose."""
EVERY_S, DISK_EVERY_S = 5.0, 15.0
WARM_S, WINDOW_S = 180.0, 30.0
LIMIT_MB = 1.0
"""A minute: of a process's memory, and of topics on disk."""
LIMIT_SHARE = 0.05
"""Of what arrives: so much of it may be left lying, at most."""
FEEDER = PROCESS["feeder"]
HELD = re.compile(r"^(?:RssAnon|RssShmem|VmSwap):\s+(\d+) kB", re.MULTILINE)
PRUNED = {topic.name for topic in topics.CATALOGUE} - {topic.name for topic in topics.CONTROL}
PLACES = {
    "archive": "archive",
    "blobs": "objects of the store",
    "checkpoints": "checkpoints",
    "weights": "weights of loaders",
    "logs": "logs",
}
"""Folder -> what lies there."""


@dataclass(slots=True)
class Looks:
    """Since the run was fed; times are seconds since then."""

    loop: ScriptedLoop
    control: Child
    began: float = field(default_factory=time.monotonic)
    memory: defaultdict[str, dict[int, list[Look]]] = field(default_factory=lambda: defaultdict(dict))
    """Process by name -> life by pid -> MB."""
    lag: defaultdict[str, list[Look]] = field(default_factory=lambda: defaultdict(list))
    """Role -> records that wait."""
    arrived: defaultdict[str, list[Look]] = field(default_factory=lambda: defaultdict(list))
    """Role -> ends of all that it reads, summed up."""
    turns: list[Look] = field(default_factory=list)
    disk: defaultdict[str, list[Look]] = field(default_factory=lambda: defaultdict(list))
    """What lies there -> MB."""
    kills: list[tuple[float, str]] = field(default_factory=list)
    places: set[Partition] = field(default_factory=set)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """The log was looked at."""
    capacity: float = 0.0
    rate: float = 0.0
    """Turns per second: taken at most, and offered."""
    load_at: float = math.inf
    ended_at: float = math.inf

    def now(self) -> float:
        return time.monotonic() - self.began

    def minutes(self) -> float:
        return self.now() / 60

    def mark(self, victim: str) -> None:
        """It is killed now."""
        self.kills.append((self.now(), victim))

    def loaded(self) -> None:
        """The ramp is over."""
        self.load_at = self.now()

    def unloaded(self) -> None:
        """Nobody strikes any more."""
        self.ended_at = self.now()

    def loaded_s(self) -> float:
        """Seconds under load."""
        return self.ended_at - self.load_at

    def turns_per_s(self) -> float:
        """That the run took under load."""
        under = [look for look in self.turns if look[0] >= self.load_at]
        return per_s(under)

    def look(self) -> None:
        """At memory."""
        children: defaultdict[int, list[int]] = defaultdict(list)
        for process in psutil.process_iter(["ppid"]):
            children[process.info["ppid"]].append(process.pid)
        pids = {child["name"]: int(child["pid"]) for child in status_processes(self.loop.settings)}
        pids |= {FEEDER: self._feeder(pids), CONTROL: self.control.pid}
        now = self.now()
        for name, pid in pids.items():
            held = sum(map(held_mb, tree(pid, children))) if pid else 0.0
            if held:
                self.memory[name].setdefault(pid, []).append((now, held))

    def look_at_disk(self) -> None:
        """At what lies in the run's folder."""
        sizes: defaultdict[str, int] = defaultdict(int)
        for folder, _, files in os.walk(self.loop.directory):
            place = lies(Path(folder).relative_to(self.loop.directory))
            for name in files:
                what = "index" if name.startswith("index.sqlite") else place
                sizes[what] += on_disk(os.path.join(folder, name))
        now = self.now()
        for what, size in sizes.items():
            self.disk[what].append((now, size / 2**20))

    def take(self, lags: Iterable[Lag]) -> None:
        """Of every role, now."""
        lags, now = list(lags), self.now()
        ends = {one.place: one.end for one in lags}
        self.places |= ends.keys()
        self.turns.append((now, sum(end for place, end in ends.items() if place.topic == topics.TURNS.name)))
        for role, count in by_role(lags).items():
            self.lag[role].append((now, count))
            self.arrived[role].append((now, sum(one.end for one in lags if one.role == role)))
        self.begun.set()

    def _feeder(self, supervised: Mapping[str, int]) -> int:
        lives = self.memory[FEEDER]
        last = next(reversed(lives), 0)
        return last if last and psutil.pid_exists(last) else self.loop.pid(FEEDER)

    def judged(self, leaked_mb: float) -> dict[str, Any]:
        """What grows, and by how much; of what nobody can say whether it does. `control_found`: the process that leaks
        does, by the same rule, and so would each other one that leaked as much."""
        memory = {name: trend(list(lives.values()), warm_s=WARM_S, window_s=WINDOW_S)
                  for name, lives in sorted(self.memory.items())}  # fmt: skip
        control = memory.pop(CONTROL)
        disk = {what: self._later(looks) for what, looks in self.disk.items()}
        judged = {f"memory of {name}": (found, LIMIT_MB) for name, found in memory.items()}
        judged |= {f"disk: {what}": (found, LIMIT_MB) for what, found in disk.items() if what == "topics"}
        for role, looks in self.lag.items():
            limit = max(1.0, LIMIT_SHARE * 60 * per_s(self.arrived[role]))
            judged[f"lag of {role}"] = self._later(looks), limit
        return {
            "control": told_of(control), "control_found": control.low >= LIMIT_MB,
            "leak_would_be_found": {name: found.low + leaked_mb >= LIMIT_MB for name, found in memory.items()},
            "grows": [f"{what}: {told_of(found)}" for what, (found, limit) in judged.items() if found.low >= limit],
            "unsure": [f"{what}: {told_of(found)}" for what, (found, limit) in judged.items()
                       if found.low < limit <= found.high],
            "memory_mb_per_minute": {name: told_of(found) for name, found in memory.items()},
            "disk_mb_per_minute": {what: told_of(found) for what, found in disk.items()},
            "lag_records_per_minute": {role: told_of(self._later(looks)) for role, looks in self.lag.items()},
        }  # fmt: skip

    def _later(self, looks: list[Look]) -> Trend:
        """Of what has one life only."""
        under = [look for look in looks if look[0] >= self.load_at]
        return trend([under], warm_s=WARM_S, window_s=WINDOW_S)


async def looked_at(looks: Looks, role: Role) -> None:
    """Look until cancelled."""
    await asyncio.gather(_often(looks.look, EVERY_S), _often(looks.look_at_disk, DISK_EVERY_S), _lag(looks, role))


async def _often(look: Any, every_s: float) -> None:
    while True:
        await asyncio.to_thread(look)
        await asyncio.sleep(every_s)


async def _lag(looks: Looks, role: Role) -> None:
    markers = Markers()
    while True:
        try:
            looks.take(await lag_of(role.log, role.settings, markers))
        except LogError as error:
            looks.mark(f"(no lag: {type(error).__name__})")
        await asyncio.sleep(EVERY_S)


def per_s(looks: list[Look]) -> float:
    """Of a count that rises."""
    return (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0]) if len(looks) > 1 else 0.0


def told_of(found: Trend) -> str:
    """For people."""
    return (
        f"{found.slope:+.2f} a minute ({found.low:+.2f} to {found.high:+.2f}; {found.looks} looks, {found.lives} lives)"
    )


def tree(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def held_mb(pid: int) -> float:
    """What the process holds; 0 of one that is gone."""
    try:
        return sum(map(int, HELD.findall(Path(f"/proc/{pid}/status").read_text()))) / 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def on_disk(path: str) -> int:
    """Bytes; 0 of a file that is gone. Files with holes are as large as what is in them."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def lies(folder: Path) -> str:
    """What a folder below the run's holds."""
    parts = folder.parts
    if "data" in parts and parts[0].startswith("kafka"):
        topic = parts[-1].rpartition("-")[0]
        return "topics" if topic in PRUNED else "control topics" if topic in topics.BY_NAME else "the broker's own"
    return next((what for name, what in PLACES.items() if name in parts), "other")
