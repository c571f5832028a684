"""Strike three brokers, one at a time, under load: `python benchmarks/chaos/brokers.py [--kills 20] [--only wipe,...]`.

    leader        SIGKILL of the broker that leads a partition which the assembler reads
    group         ... of the coordinator of the assembler's group
    begin         ... of its transactions' coordinator, when a transaction's outputs are on the log, its offsets are not
    offsets       ... when its offsets are there, too
    ending        ... when the request to commit is under way
    markers       ... when the commit is answered, and its markers need not be written
    stop          SIGSTOP of a leader for 30 s
    wipe          SIGKILL of one, and its records are deleted when the others have taken it out of every in-sync set
    rolling       SIGTERM of all three, one after the other, each when all copies are whole again

Each row has topics of its own, a writer of histories as bad days leave them (assembler.py) and a real `turnlog
assembler`; `--kills` strikes are shared among the rows. The four of the transactions' coordinator are hit exactly: the
assembler is held at that place while its coordinator is killed. After every strike the copies must become whole. Then
everything must have been folded once, with the bytes of the offline fold. `detail` says, of each strike, the broker,
how long an append of the writer's took at most (s), and of a restart the time to its port and to whole copies (s).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import assembler
from aiokafka.client import ConnectionGroup, CoordinationType
from servers import environment, make_topics, say, servers

from turnlog import cli
from turnlog.infra.embedded.broker import Broker
from turnlog.infra.embedded.broker_cluster import Brokers
from turnlog.infra.embedded.ports import HOST
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.kafka.admin import Admin
from turnlog.infra.kafka.aiokafka_changes import MendedClient
from turnlog.infra.kafka.producers import KafkaTransactor
from turnlog.infra.log import Log
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.processors.core.fold_versions import SPINE
from turnlog.processors.runtime.assembler import assembler_plan
from turnlog.processors.runtime.unit import AssemblerPlan
from turnlog.settings import RunSettings, Settings

COUNT = 3
PLACES = ("begin", "offsets", "ending", "markers")
ROWS = ("leader", "group", *PLACES, "stop", "wipe", "rolling")
STOPPED_S = 30.0
PATIENCE_S = 240.0
UNIT = 0
"""Whose leader, transactional id and so on."""


@dataclasses.dataclass(slots=True)
class Cluster:
    """Three brokers, and what Kafka says of them."""

    brokers: Brokers
    settings: Settings
    admin: Admin

    def broker(self, number: int) -> Broker:
        """By its node's number."""
        return self.brokers.all[number - 1]

    async def partitions(self) -> list[tuple[str, dict[str, Any]]]:
        """(topic, partition) of all topics."""
        return [(topic["topic"], one) for topic in await self.admin.describe_topics() for one in topic["partitions"]]

    async def leader(self) -> int:
        """Of a partition that the assembler reads."""
        wanted = self.settings.kafka.prefix + SPINE
        return next(int(one["leader"]) for topic, one in await self.partitions()
                    if topic == wanted and one["partition"] == UNIT)  # fmt: skip

    async def coordinator(self, kind: CoordinationType, name: str) -> int:
        """Of a group or of a transactional id."""
        return int(await self.admin._client.coordinator_lookup(kind, self.settings.kafka.prefix + name))

    async def until(self, holds: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Wait until it holds for every partition."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(Exception):  # what cannot be asked now is asked again
                    if all(holds(one) for _, one in await self.partitions()):
                        return
                await asyncio.sleep(0.1)  # metadata can only be asked
        raise AssertionError(what)

    async def whole(self) -> None:
        """Every copy is in sync."""
        await self.until(lambda one: len(one["isr"]) == len(one["replicas"]), "whole copies")

    async def without(self, number: int) -> None:
        """No copy of this broker's is."""
        await self.until(lambda one: number not in one["isr"], f"copies without broker {number}")


class Held:
    """The assembler tells where its transactions are, and is held there while a strike is due."""

    def __init__(self) -> None:
        self.place = ""
        """Where it shall be held."""
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.port = 0

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Serve the assembler's questions."""
        async with await asyncio.start_server(self._told, HOST, 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield

    async def _told(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readline()).decode().strip() == self.place:
            self.reached.set()
            await self.go.wait()
        writer.close()

    async def at(self, place: str, strike: Callable[[], Awaitable[None]]) -> None:
        """Strike while the assembler is there."""
        self.reached.clear()
        self.go.clear()
        self.place = place
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.reached.wait()
            await strike()
        finally:
            self.place = ""
            self.go.set()


@dataclasses.dataclass(slots=True)
class Role:
    """A real assembler, started again whenever it ends."""

    settings: Settings
    held: Held
    story: assembler.Story
    child: Child | None = None

    def start(self) -> Child:
        """Start it."""
        env = environment(self.settings, "assembler-0")
        launch = Launch(
            name="assembler-0",
            argv=(sys.executable, __file__, "--assembler", str(self.held.port)),
            log=Path(self.settings.run.directory) / "assembler-0.log",
            env=env,
        )
        self.child = Child(launch).start()
        return self.child

    async def keep(self) -> None:
        """For ever."""
        child = self.start()
        while True:
            if child.returncode is not None:
                self.story.deaths += 1
                say(f"the assembler ended with {child.returncode}: {child.tail(2)}")
                child = self.start()
            await asyncio.sleep(0.1)


async def strike(row: str, cluster: Cluster, held: Held, plan: AssemblerPlan) -> dict[str, Any]:
    """One strike of a row, and its end; what is to be told of it."""
    if row in ("leader", "stop", "wipe"):
        number = await cluster.leader()
    elif row == "group":
        number = await cluster.coordinator(CoordinationType.GROUP, plan.group)
    else:
        number = await cluster.coordinator(CoordinationType.TRANSACTION, plan.transactional_id(UNIT))
    broker = cluster.broker(number)
    if row in PLACES:
        await held.at(row, lambda: asyncio.to_thread(broker.kill))
    elif row == "stop":
        os.kill(broker.pid, signal.SIGSTOP)
        await asyncio.gather(asyncio.sleep(STOPPED_S), cluster.without(number))
        os.kill(broker.pid, signal.SIGCONT)
        return {"broker": number} | await back(cluster, None)
    else:
        await asyncio.to_thread(broker.kill)
    if row == "wipe":
        await cluster.without(number)
        shutil.rmtree(broker.directory / "data")
    return {"broker": number} | await back(cluster, broker)


async def rolling(cluster: Cluster) -> list[dict[str, Any]]:
    """All three restarted."""
    told = []
    for number, broker in enumerate(cluster.brokers.all, 1):
        await asyncio.to_thread(broker.stop)
        told.append({"broker": number} | await back(cluster, broker))
    return told


async def back(cluster: Cluster, broker: Broker | None) -> dict[str, float]:
    """Start a broker that is down; seconds until its port is open and until every copy is whole."""
    began, told = time.monotonic(), {}
    if broker is not None:
        await asyncio.to_thread(broker.start)
        told["port_s"] = round(time.monotonic() - began, 1)
    await cluster.whole()
    return told | {"whole_s": round(time.monotonic() - began, 1)}


async def suffer(row: str, cluster: Cluster, log: Log, plan: AssemblerPlan, *, strikes: int, held: Held,
                 story: assembler.Story) -> list[dict[str, Any]]:  # fmt: skip
    """All strikes of a row; what is to be told of each. Between two something is folded."""
    told: list[dict[str, Any]] = []
    while len(told) < strikes:
        await assembler.progress(log, plan, cluster.settings)
        story.longest_s = 0.0
        found = await rolling(cluster) if row == "rolling" else [await strike(row, cluster, held, plan)]
        await acknowledged(story)  # the append that the strike held up has ended, and counts
        await cluster.whole()  # a broker that was stopped says at first what was when it was
        story.kills += len(found)
        for each in found:
            told.append(each | {"append_s": round(story.longest_s, 1)})
        say(f"{row}: {told[-1]}")
    await assembler.progress(log, plan, cluster.settings)
    return told


async def acknowledged(story: assembler.Story) -> None:
    """Return when the writer has written once more."""
    before = story.events
    async with asyncio.timeout(PATIENCE_S):
        while story.events <= before:  # noqa: ASYNC110 - the writer counts
            await asyncio.sleep(0.05)


async def run(row: str, cluster: Cluster, *, strikes: int, seed: int) -> int:
    """One row; the exit status."""
    settings = cluster.settings
    story, held = assembler.Story(), Held()
    async with held.listening(), open_role("chaos", settings) as tool:
        plan = assembler_plan(await configure(tool), settings.assembler)
        role, done = Role(settings, held, story), asyncio.Event()
        keeping = asyncio.create_task(role.keep())
        writing = asyncio.create_task(
            assembler.write(tool.events, settings, story, enough=lambda _: done.is_set(), seed=seed)
        )
        try:
            told = await suffer(row, cluster, tool.log, plan, strikes=strikes, held=held, story=story)
            done.set()
            await writing
            await assembler.drained(tool.log, plan, settings, None)
        finally:
            keeping.cancel()
            writing.cancel()
            await asyncio.wait((keeping, writing))
            if role.child is not None:
                story.exit_status = await asyncio.to_thread(role.child.stop)
        return await assembler.verdict(tool.events, plan, settings, story, id=f"brokers-{row}", strikes=told)


async def rows(only: list[str], settings: Settings, brokers: Brokers, *, kills: int, seed: int) -> int:
    """Every row, on topics of its own; 1 when one failed."""
    failed = 0
    for row in only:
        own = dataclasses.replace(
            settings,
            run=RunSettings(id=f"{settings.run.id}-{row}", directory=settings.run.directory),
            kafka=dataclasses.replace(settings.kafka, prefix=f"{row}-"),
        )
        await make_topics(own)
        admin = Admin(bootstrap_servers=brokers.bootstrap)
        try:
            await admin.start()
            cluster = Cluster(brokers, own, admin)
            await cluster.whole()
            say(f"{row}: {max(1, kills // len(ROWS))} strikes")
            failed |= await run(row, cluster, strikes=max(1, kills // len(ROWS)), seed=seed)
        finally:
            await admin.close()
    return failed


def hold(port: int) -> None:
    """Make this process say where its transactions are, and wait there until it is answered."""
    send, offsets, commit = MendedClient.send, KafkaTransactor.offsets, KafkaTransactor.commit

    async def at(place: str) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(f"{place}\n".encode())
        await reader.read()
        writer.close()

    async def asked(client: MendedClient, node: int, request: Any, *, group: Any = ConnectionGroup.DEFAULT) -> Any:
        if type(request).__name__ != "EndTxnRequest":
            return await send(client, node, request, group=group)
        answer = asyncio.ensure_future(send(client, node, request, group=group))
        await asyncio.sleep(0)  # it is on its way
        await at("ending")
        return await answer

    async def with_offsets(transactor: KafkaTransactor, *arguments: Any) -> None:
        await asyncio.gather(*transactor._sent)
        await at("begin")
        await offsets(transactor, *arguments)
        await at("offsets")

    async def committed(transactor: KafkaTransactor) -> None:
        await commit(transactor)
        await at("markers")

    MendedClient.send = asked  # type: ignore[method-assign]
    KafkaTransactor.offsets, KafkaTransactor.commit = with_offsets, committed  # type: ignore[method-assign]


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Strike three brokers under load.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(ROWS))
    parser.add_argument("--assembler", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.assembler:
        hold(arguments.assembler)
        return cli.main(["assembler"])
    found: list[Brokers] = []
    with servers(f"chaos-{uuid4().hex[:8]}", brokers=COUNT, started=found.append) as settings:
        only = [row for row in arguments.only.split(",") if row]
        return asyncio.run(rows(only, settings, found[0], kills=arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
