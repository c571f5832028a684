"""E1: seconds from `scale 2` under load to the first turn that the newcomer has served, beyond the engine's own start.

Real engines of the tiny model on CPU, hosted by a supervisor, while sessions of one turn come one after another at a
gateway. The value is the largest of some rounds. An engine's own start is what the engine takes from its process to its
first answer, whoever waits for it; the detail says where the rest goes: `obeyed` from the request to that process,
`loader` from there until the loader waits for nothing but the engine, `registered` from the engine's first answer to
the loader's first report, `loaded` from there to the acknowledged version, `turn` from there to the first turn on the
log. What it does not show: weights of a size that takes time to copy.

    python benchmarks/e1_scale.py [SETTINGS]       # SETTINGS: this run, which is up with one engine that serves
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from row import say, size, told

from tests.fakes.weights import version
from tests.tiny_model import make_tiny_model
from turnlog.infra.embedded.up import down, status_processes, up
from turnlog.infra.history import events
from turnlog.infra.roles import fleet
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.infra.run_folder import kept_secret, read_endpoints, read_state
from turnlog.processors.core.views.fleet import SERVING
from turnlog.schemas.events import EngineRegistered, EngineWeightsLoaded, TurnCompleted
from turnlog.schemas.topics import ENGINES, TURNS
from turnlog.settings import EngineSettings, ModelSettings, RunSettings, Settings, load
from turnlog.trainer.weights import read_weights

ROUNDS = size(3, smallest=1)
SESSIONS, TOKENS = 4, 8
GOAL_S = 2.0
LOOK_S = 0.05
NEWCOMER, LOADER = "engine-1", "loader-1"
QUESTION = [{"role": "user", "content": "12 + 34 = ?"}]


@dataclass(slots=True)
class Times:
    """Of a round: seconds since the epoch; 0 is not yet."""

    asked: float
    began: float = 0.0
    loader: float = 0.0
    answers: float = 0.0

    def stages(self, registered: float, loaded: float, turn: float) -> dict[str, float]:
        """See the module."""
        found = {
            "obeyed": self.began - self.asked, "own_start": self.answers - self.began,
            "loader": self.loader - self.began, "registered": registered - self.answers,
            "loaded": loaded - registered, "turn": turn - loaded,
            "beyond": turn - self.asked - (self.answers - self.began),
        }  # fmt: skip
        return {name: round(seconds, 2) for name, seconds in found.items()}


async def turn(http: httpx.AsyncClient, key: str, name: str) -> None:
    """One answered turn of a session of its own."""
    body = {"rollout_id": name, "group_id": name, "purpose": "other", "sampling": {"max_new_tokens": TOKENS}}
    opened_ = await http.post("/sessions", json=body, headers={"authorization": f"Bearer {key}"})
    token = {"authorization": f"Bearer {opened_.raise_for_status().json()['token']}"}
    answer = await http.post("/v1/chat/completions", json={"messages": QUESTION}, headers=token)
    answer.raise_for_status()


@contextlib.asynccontextmanager
async def loaded_with_sessions(role: Role, number: int) -> AsyncIterator[None]:
    """While the block runs, SESSIONS are under way. Raises what one of them met."""
    directory, numbers, over = Path(role.settings.run.directory), itertools.count(), asyncio.Event()
    key = role.settings.gateway.signing_key or kept_secret(directory / "gateway.key")

    async def client(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            await turn(http, key, f"scale-{number}-{next(numbers)}")

    gateway = httpx.AsyncClient(base_url=read_endpoints(directory).gateway, timeout=300)
    async with gateway as http, asyncio.TaskGroup() as clients:
        for _ in range(SESSIONS):
            clients.create_task(client(http))
        yield
        over.set()


async def looked(directory: Path, times: Times, http: httpx.AsyncClient) -> None:
    """Watch the newcomer's processes from outside until both have come to the point."""
    while not (times.began and times.loader and times.answers):
        children = {child["name"]: child for child in read_state(directory)["children"]}
        if NEWCOMER in children and children[NEWCOMER]["pid"]:
            times.began = times.began or children[NEWCOMER]["since"]
            ends = read_endpoints(directory)
            if not times.loader and "engine" in await waits_for(http, ends.health[LOADER]):
                times.loader = time.time()
            if not times.answers and await answered(http, ends.engines[-1]):
                times.answers = time.time()
                times.loader = times.loader or times.answers
        await asyncio.sleep(LOOK_S)


async def waits_for(http: httpx.AsyncClient, health: str) -> dict[str, str]:
    """What a role says that it waits for."""
    try:
        found: dict[str, str] = (await http.get(f"{health}/readyz")).json()["waiting"]
    except httpx.TransportError:
        return {}
    return found


async def answered(http: httpx.AsyncClient, url: str) -> bool:
    """Whether an engine is there."""
    try:
        return (await http.get(f"{url}/model_info")).is_success
    except httpx.TransportError:
        return False


async def one_round(role: Role, number: int) -> dict[str, Any]:
    """Scale out and in again; the stages."""
    directory = Path(role.settings.run.directory)
    async with loaded_with_sessions(role, number), httpx.AsyncClient(timeout=2.0) as http:
        times = Times(time.time())
        await fleet.scale(role, 2)
        await looked(directory, times, http)
        first = 0.0
        while not first:
            await asyncio.sleep(LOOK_S)
            turns = [at(record) async for record, one in events(role, TURNS) if of_newcomer(one, TurnCompleted)]
            first = min((stamp for stamp in turns if stamp > times.asked), default=0.0)
        reports = [(at(record), one) async for record, one in events(role, ENGINES) if at(record) > times.asked]
        registered = next(stamp for stamp, one in reports if of_newcomer(one, EngineRegistered))
        loaded, report = next((stamp, one) for stamp, one in reports if of_newcomer(one, EngineWeightsLoaded))
        await fleet.scale(role, 1)
        while {process["name"] for process in status_processes(role.settings)} & {NEWCOMER, LOADER}:  # noqa: ASYNC110 - another process
            await asyncio.sleep(LOOK_S)
    found = times.stages(registered, loaded, first)
    say(f"round {number}: {found}")
    return found | {"swap": {name: round(seconds, 3) for name, seconds in report.seconds.items()}}


def at(record: Any) -> float:
    """Seconds since the epoch, as its writer said."""
    return float(record.timestamp_ms) / 1000


def of_newcomer(event: object, kind: type) -> bool:
    """Whether that is such a record of it."""
    return isinstance(event, kind) and getattr(event, "engine_id", "") == NEWCOMER


async def began(settings: Settings) -> None:
    """The run's first version is published, and its engine serves it."""
    folder = Path(settings.model.path)
    async with open_role("bench", settings) as role:
        await configure(role)
        weights = {name: tensor.float() for name, tensor in read_weights(folder).items()}
        await role.events.append(await version(weights, 0, role.blobs, folder, run_id=settings.run.id))
        while not any(one.state == SERVING for one in (await fleet.read(role)).engines.values()):  # noqa: ASYNC110 - the same
            await asyncio.sleep(LOOK_S)


async def measured(settings: Settings) -> int:
    """Print the line; the exit status."""
    async with open_role("bench", settings) as role:
        rounds = [await one_round(role, number) for number in range(ROUNDS)]
    value = max(each["beyond"] for each in rounds)
    return told(id="E1", value=value, unit="s", goal=GOAL_S, met=value <= GOAL_S, detail={"rounds": rounds})


def main() -> int:
    """One run from `turnlog up` to `turnlog down`, or the one that is named."""
    if sys.argv[1:]:
        return asyncio.run(measured(load(Path(sys.argv[1]), {})))
    with tempfile.TemporaryDirectory(prefix="turnlog-scale-") as folder:
        settings = Settings(
            run=RunSettings(id="scale", directory=str(Path(folder) / "run")),
            model=ModelSettings(path=str(make_tiny_model(Path(folder) / "model"))),
            engine=EngineSettings(start_timeout_s=600.0, drain_s=2.0),
        )
        up(settings, ("gateway", "loader"), attached=True, say=say)
        try:
            asyncio.run(began(settings))
            return asyncio.run(measured(settings))
        finally:
            down(settings, say=say)


if __name__ == "__main__":
    raise SystemExit(main())
