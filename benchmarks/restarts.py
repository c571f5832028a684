"""One restart of each role: what is on the log when it starts, and what its first answer to that is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
from chaos.servers import TURNLOG, environment
from past import GROUP, PROMPTS, Past, agents, call, group_id, stepped, version_after

from tests.fakes.memory_engine_control import MemoryEngineControl
from tests.fakes.sessions import GroupName
from turnlog.consumers.loader.role import Loader
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.history import events, partitions
from turnlog.infra.log import Commit, Partition
from turnlog.infra.roles.health import Health
from turnlog.names import RECORD_HEADER
from turnlog.processors.core.fold.group import offline
from turnlog.processors.core.fold.settlement import figures
from turnlog.processors.core.fold_versions import INPUTS
from turnlog.schemas import topics
from turnlog.schemas.events import Event, GroupScored, GroupStatus, RolloutRequested, SampleBatchFormed, SegmentSample
from turnlog.schemas.topics import TOPIC_OF, Topic
from turnlog.trainer.manifests import Cursor, Manifests
from turnlog.trainer.weight_records import read_past

PATIENCE_S = 300.0
KEY = "key-of-this-benchmark"
VIEWS_COMMIT_S = 2.0


class NoAnswer(Exception):
    """A role ended, or stayed silent for PATIENCE_S; the message has the end of its log."""


class Restarts:
    """The roles of one run on its past. Each method restarts one of them once: seconds until its first new output."""

    def __init__(self, past: Past) -> None:
        self._past = past
        self._role = past.role
        self._settings = past.settings
        self._numbers = itertools.count(past.draws * PROMPTS + 10_000)
        """Of groups that nobody asked for yet."""
        self._asked: RolloutRequested | None = None
        self._formed: SampleBatchFormed | None = None
        self._version = past.draws
        self._sessions = 0
        """That views have seen."""
        ports = zip(("gateway", "views"), free_ports(2), strict=True)
        self._urls = {name: f"http://{HOST}:{port}" for name, port in ports}

    async def feeder(self) -> float:
        """A group was discarded: another is asked for. (The first start finds a whole draw due.)"""

        async def provoke() -> None:
            if self._asked is not None:
                score = dataclasses.replace(
                    self._past.scores[-1], group_id=self._asked.group_id, status=GroupStatus.discarded, samples=0
                )
                await self._append(score, *figures(score))

        seconds, self._asked = await self._answered("feeder", provoke, topics.TASKS)
        return seconds

    async def gateway(self) -> float:
        """A session is opened."""
        started = time.perf_counter()
        async with self._started("gateway") as child, httpx.AsyncClient(base_url=self._urls["gateway"]) as http:
            number = next(self._numbers)
            group = group_id(self._settings, number)
            body = {
                "group_id": group, "rollout_id": f"rollout-{number}", "group_size": GROUP, "purpose": "train",
                "floor": self._past.floor(group), "sampling": {"temperature": 1.0, "max_new_tokens": 12},
            }  # fmt: skip

            async def opened() -> bool:
                answer = await http.post("/sessions", json=body, headers={"authorization": f"Bearer {KEY}"})
                return answer.status_code == 201

            await self._until(child, opened)
            return time.perf_counter() - started

    async def runner(self) -> float:
        """A rollout was asked for: its session is opened, by a gateway that is up."""
        async with self._started("gateway") as gateway:
            url = self._urls["gateway"]
            await self._until(gateway, lambda: is_up(url))

            async def provoke() -> None:
                await self._append(list(self._past.asked(next(self._numbers)))[1])

            return (await self._answered("runner", provoke, topics.SESSIONS, "SessionStarted"))[0]

    async def sandbox(self) -> float:
        """A call was requested: it is begun."""

        async def provoke() -> None:
            name = f"restart-{next(self._numbers)}"
            await self._append(call(self._settings, name, name))

        return (await self._answered("sandbox", provoke, topics.TOOL_RESULTS))[0]

    async def assembler(self) -> float:
        """A group ended: its first tree is there."""

        async def provoke() -> None:
            await self._past.place(self._past.group(next(self._numbers), self._version))

        return (await self._answered("assembler", provoke, topics.TREES))[0]

    async def pinned(self) -> float:
        """The assembler, as if one group had been open since the run began: every input is read again, and every
        score, so that what is over is passed over."""
        plan, log = self._past.plan, self._role.log
        places = [Partition(topic, unit) for topic in INPUTS for unit in range(self._settings.kafka.groups)]
        marks = {
            place: Commit(0, json.dumps({**json.loads(commit.metadata), "scores": 0, "horizon": 0}))
            for place, commit in (await log.commits(plan.group, places)).items()
        }
        async with log.transactor("pinned") as transactor:
            await transactor.begin()
            await transactor.offsets(plan.group, marks)
            await transactor.commit()
        return await self.assembler()

    async def batcher(self) -> float:
        """A draw's groups were scored and the last batch was trained: the next manifest."""

        async def provoke() -> None:
            if self._formed is not None:
                batch = self._formed.batch_index
                await self._append(stepped(self._settings.run.id, batch, self._formed.trained_tokens))
                await self._published()
            for _ in range(PROMPTS):
                await self._append(*self._scored(group_id(self._settings, next(self._numbers))))

        seconds, self._formed = await self._answered("batcher", provoke, topics.BATCHES)
        return seconds

    async def trainer(self) -> float:
        """What it reads of the past: incarnation and version, then the manifest behind its checkpoint."""
        log, run_id = self._role.log, self._settings.run.id
        cursor = Cursor(next_batch=self._past.draws - 1, offset=self._past.manifest_at)
        started = time.perf_counter()
        await read_past(log, self._role.events, run_id)
        async with log.reader() as reader:
            manifests = Manifests(reader, self._role.events, run_id, cursor, start=0)
            while await manifests.next(timeout_s=0.1) is None:
                pass
        return time.perf_counter() - started

    async def loader(self) -> float:
        """A version was published: the engine serves it."""
        await self._published()
        role = dataclasses.replace(self._role, health=Health("loader"), stopping=asyncio.Event())
        control = MemoryEngineControl(Path(self._settings.model.path))
        before = await self._ends(topics.ENGINES)
        started = time.perf_counter()
        task = asyncio.create_task(Loader(role, control, "engine-0", "http://127.0.0.1:1").run())
        await self._first(topics.ENGINES, before, task.done, "EngineWeightsLoaded")
        seconds = time.perf_counter() - started
        role.stopping.set()
        await task
        return seconds

    async def archive(self) -> float:
        """A record came: the range that it closes is decided."""
        place, group = Partition(topics.RUNS.name, 0), f"{self._settings.run.id}.archive"
        await self._append(dataclasses.replace(self._past.configured, run_id="another"))
        end = (await self._role.log.end_offsets([place]))[place]
        started = time.perf_counter()
        async with self._started("archive") as child:

            async def decided() -> bool:
                commits = await self._role.log.commits(group, [place])
                return place in commits and commits[place].offset >= end

            await self._until(child, decided)
            return time.perf_counter() - started

    async def views(self) -> float:
        """A session was started: it is counted. They have seen all others before (`ready`)."""
        name = GroupName(self._settings.run.id, f"view-{next(self._numbers)}", 0, GROUP)
        await self._append(next(agents(name, np.random.default_rng(0), 0)))
        self._sessions += 1
        started = time.perf_counter()
        async with self._started("views") as child:
            await self._until(child, self._all_counted)
            return time.perf_counter() - started

    async def ready(self, name: str) -> None:
        """What must have run once before a role can be restarted: the archive is whole, the views have seen all."""
        if name == "archive":
            async with self._started("archive", "flush") as child:
                await asyncio.to_thread(child.wait, PATIENCE_S)
                if child.returncode != 0:
                    raise NoAnswer(child.tail())
        elif name == "views":
            self._sessions = len({event.session_id async for _, event in events(self._role, topics.SESSIONS)})
            async with self._started("views") as child:
                await self._until(child, self._all_counted)
                await asyncio.sleep(VIEWS_COMMIT_S)  # what they have counted is committed, and in their changelogs

    async def _answered(
        self, name: str, provoke: Callable[[], Awaitable[None]], topic: Topic, record: str = ""
    ) -> tuple[float, Event]:
        """Provoke, start, wait for the first new `record` of the topic (any, if it has no name)."""
        await provoke()
        before = await self._ends(topic)
        started = time.perf_counter()
        async with self._started(name) as child:
            event = await self._first(topic, before, lambda: child.returncode is not None, record)
            seconds = time.perf_counter() - started
            return seconds, event

    @asynccontextmanager
    async def _started(self, name: str, *action: str) -> AsyncIterator[Child]:
        """A process of the role, killed afterwards."""
        ports = {name: url.rpartition(":")[2] for name, url in self._urls.items()}
        env = environment(self._settings, f"{name}-0") | {
            "TURNLOG_MODEL_PATH": self._settings.model.path,
            "TURNLOG_FEEDER_DRAWS": str(self._settings.feeder.draws),
            "TURNLOG_FEEDER_GROUP_SIZE": str(GROUP),
            "TURNLOG_BATCHER_PROMPTS_PER_DRAW": str(PROMPTS),
            "TURNLOG_GATEWAY_URL": self._urls["gateway"],
            "TURNLOG_GATEWAY_PORT": ports["gateway"],
            "TURNLOG_GATEWAY_SIGNING_KEY": KEY,
            "TURNLOG_VIEWS_PORT": ports["views"],
            "TURNLOG_SANDBOX_ALLOW_UNISOLATED": "true",
            "TURNLOG_ARCHIVE_MAX_AGE_S": "0.2",
            "OMP_NUM_THREADS": "1",
        }
        log = Path(self._settings.run.directory) / f"{name}.log"
        child = Child(Launch(name=name, argv=(*TURNLOG, name, *action), log=log, env=env)).start()
        try:
            yield child
        finally:
            await asyncio.to_thread(child.kill)

    async def _until(self, child: Child, condition: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if await condition():
                    return
            if child.returncode is not None or time.monotonic() > deadline:
                raise NoAnswer(f"{child.launch.name}: {child.tail()}")
            await asyncio.sleep(0.02)

    async def _first(
        self, topic: Topic, before: dict[Partition, int], ended: Callable[[], bool], record: str = ""
    ) -> Event:
        deadline = time.monotonic() + PATIENCE_S
        async with self._role.log.reader() as reader:
            reader.assign(before)
            while time.monotonic() < deadline and not ended():
                for found in await reader.poll(timeout_s=0.2):
                    if not record or dict(found.headers).get(RECORD_HEADER) == record.encode():
                        return await self._role.events.decode(found)
        raise NoAnswer(f"{topic.name}: no {record or 'record'} came; logs are in {self._settings.run.directory}")

    async def _ends(self, topic: Topic) -> dict[Partition, int]:
        return await self._role.log.end_offsets(partitions(self._role, topic))

    async def _append(self, *wanted: Event) -> None:
        await self._past.place(wanted)

    async def _published(self) -> None:
        await self._append(version_after(self._past.weights, self._version))
        self._version += 1

    async def _all_counted(self) -> bool:
        async with httpx.AsyncClient() as http:
            answer = await http.get(f"{self._urls['views']}/views")
        return answer.is_success and sum(answer.json()["sessions"].values()) >= self._sessions

    def _scored(self, name: str) -> list[Event]:
        """What an assembler writes of a group that nobody drew."""
        inputs = list(agents(GroupName(self._settings.run.id, name, 0, GROUP), np.random.default_rng(0), self._version))
        records = [(TOPIC_OF[type(event).__name__].name, 0, offset, event) for offset, event in enumerate(inputs)]
        rules = self._past.rules
        return [output for output in offline(records, rules) if isinstance(output, SegmentSample | GroupScored)]


async def is_up(url: str) -> bool:
    """Whether a role says that it is ready."""
    async with httpx.AsyncClient() as http:
        return (await http.get(f"{url}/readyz")).is_success
