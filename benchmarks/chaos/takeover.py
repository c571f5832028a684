"""Kill, or stop, one of two gateways under a hundred streams: `python benchmarks/chaos/takeover.py [--kills 20]`.

Two real `turnlog role gateway` processes behind one address, and a scripted engine of which every answer is another
one.
Each round opens sessions through that address, has each answered once, and asks for its next answer as a stream; in
the middle one gateway is killed by SIGKILL, or stopped and, once the other one has its sessions, let go on. Clients do
what SDKs do: the same body again. Then, from what clients saw and from the log: every answer that was complete stands
(lost), every session is finished by the answers that its client saw and no other (twice), sessions were taken over
(skipped), and no request of the dead gateway runs in the engine five seconds later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import orjson
from answers import registered, with_model
from servers import TURNLOG, environment, say, servers, told

from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.history import all_events
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.producers.gateway.requests import SigningKeys
from turnlog.schemas.events import SessionAdopted, SessionFinished
from turnlog.schemas.topics import SESSIONS
from turnlog.settings import Settings

PATIENCE_S = 120.0
QUICK, SLOW = 0.0, 0.5
"""Seconds for each token."""
ENDS_S = 5.0
QUESTION = {"role": "user", "content": "3 + 5 = ?"}
TOLD = {"role": "tool", "tool_call_id": "c", "content": "8"}


@dataclass(slots=True)
class Client:
    """An agent, and what it saw."""

    session_id: str
    token: str
    owner: str
    """URL of the gateway that opened the session."""
    seen: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    """(epoch, index, message) of each answer that came whole."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """The stream has content."""
    repeats: int = 0


@dataclass(slots=True)
class Stage:
    """The processes, and the one address."""

    settings: Settings
    http: httpx.AsyncClient
    url: str = ""
    ports: list[int] = field(default_factory=list)
    """Of the gateways, while they are meant to be reached."""
    children: dict[int, Child] = field(default_factory=dict)

    @property
    def engine(self) -> str:
        """Its URL."""
        return self.settings.engine.urls[0]

    def start(self, port: int) -> None:
        """A gateway."""
        number = len(self.children)
        own = f"http://{HOST}:{port}"
        env = environment(self.settings, f"gateway-{number}") | {
            "TURNLOG_MODEL_PATH": self.settings.model.path, "TURNLOG_GATEWAY_URL": self.url,
            "TURNLOG_GATEWAY_OWN_URL": own, "TURNLOG_GATEWAY_PORT": str(port),
        }  # fmt: skip
        log = Path(self.settings.run.directory) / f"gateway-{number}.log"
        launch = Launch(
            name=f"gateway-{number}",
            argv=(*TURNLOG, "role", "gateway"),
            log=log,
            env=env,
            ready=lambda: up(f"{own}/readyz"),
        )
        self.children[port] = Child(launch).start()
        self.ports.append(port)

    async def pace(self, token_s: float) -> None:
        """Of the engine, from the next token on."""
        (await self.http.post(f"{self.engine}/pace", params={"of": token_s})).raise_for_status()

    async def running(self) -> set[str]:
        """Requests in the engine."""
        return set((await self.http.get(f"{self.engine}/running")).json())


def up(url: str) -> bool:
    """Whether a server is ready."""
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=0.5).is_success
    return False


@contextlib.asynccontextmanager
async def one_address(stage: Stage) -> AsyncIterator[str]:
    """A balancer of connections over the gateways that accept them."""
    turn = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in [stage.ports[next(turn) % len(stage.ports)], *stage.ports]:
            with contextlib.suppress(OSError):
                behind, before = await asyncio.open_connection(HOST, port)
                await asyncio.gather(copied(reader, before), copied(behind, writer))
                return
        writer.close()

    async with await asyncio.start_server(serve, HOST, 0) as server:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}"


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Every byte, until one side ends; then the other does."""
    with contextlib.suppress(OSError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    writer.close()


async def opened_session(stage: Stage, key: str, name: str) -> Client:
    """Through the one address."""
    body = {"rollout_id": name, "group_id": name, "purpose": "other", "sampling": {"max_new_tokens": 128}}
    answer = await stage.http.post(f"{stage.url}/sessions", json=body, headers={"authorization": f"Bearer {key}"})
    session = answer.raise_for_status().json()
    return Client(session["session_id"], session["token"], session["base_url"].removesuffix("/v1"))


async def asked(stage: Stage, client: Client, messages: list[dict[str, Any]]) -> None:
    """A stream to its end; the same body again until there is one."""
    body = orjson.dumps({"messages": messages, "stream": True})
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if (whole := await once(stage, client, body)) is not None:
                client.seen.append(whole)
                return
        client.repeats += 1
        await asyncio.sleep(0.2)  # as SDKs pause


async def once(stage: Stage, client: Client, body: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """The answer; None if none came. Raises httpx.HTTPError when the stream breaks."""
    said: dict[str, Any] = {"role": "assistant", "content": ""}
    headers = {"authorization": f"Bearer {client.token}"}
    async with stage.http.stream("POST", f"{stage.url}/v1/chat/completions", content=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event or answer.is_error:
                return None
            delta = event["choices"][0]["delta"]
            said["content"] += delta.get("content") or ""
            if delta.get("content"):
                client.begun.set()
            if "tool_calls" in delta:
                said["tool_calls"] = said.get("tool_calls", []) + delta["tool_calls"]
            if about := event.get("turnlog"):
                return about["epoch"], about["index"], said
    return None


@dataclass(slots=True)
class Verdict:
    """Of all rounds."""

    lost: int = 0
    twice: int = 0
    late: int = 0
    """Requests of a gateway that was dead that ran on for too long."""
    taken_over: int = 0
    sessions: int = 0
    repeats: int = 0
    slowest_end_s: float = 0.0
    zombies: int = 0
    finished: dict[str, Client] = field(default_factory=dict)


async def streaming(stage: Stage, key: str, number: int, count: int) -> tuple[list[Client], list[asyncio.Task[None]]]:
    """Clients that have one answer, and are in the middle of the next."""
    await stage.pace(QUICK)
    names = [f"round-{number}-{at}" for at in range(count)]
    clients = await asyncio.gather(*(opened_session(stage, key, name) for name in names))
    await asyncio.gather(*(asked(stage, client, [QUESTION]) for client in clients))
    await stage.pace(SLOW)
    asking = []
    for client in clients:
        (_, _, first), *_ = client.seen
        asking.append(asyncio.create_task(asked(stage, client, [QUESTION, first, TOLD])))
    await asyncio.gather(*(client.begun.wait() for client in clients))
    return clients, asking


async def struck(stage: Stage, verdict: Verdict, key: str, number: int, count: int, *, zombie: bool) -> None:
    """One round."""
    clients, asking = await streaming(stage, key, number, count)
    victim = stage.ports[0]
    theirs = sum(client.owner.endswith(f":{victim}") for client in clients)
    say(f"round {number}: {'stop' if zombie else 'kill'} a gateway with {theirs} of {count} streams")
    before = await stage.running()
    stage.ports.remove(victim)
    os.kill(stage.children[victim].pid, signal.SIGSTOP if zombie else signal.SIGKILL)
    if not zombie:
        await ended(stage, verdict, before, count - theirs)
    await stage.pace(QUICK)
    await asyncio.gather(*asking)
    if zombie:
        os.kill(stage.children[victim].pid, signal.SIGCONT)
        verdict.zombies += 1
        stage.ports.append(victim)
    else:
        stage.children.pop(victim).stop()
        stage.start(victim)
        await asyncio.to_thread(stage.children[victim].wait_ready)
    await asyncio.gather(*(finished(stage, client) for client in clients))
    verdict.finished |= {client.session_id: client for client in clients}
    verdict.repeats += sum(client.repeats for client in clients)
    verdict.sessions += count
    verdict.taken_over += theirs


async def finished(stage: Stage, client: Client) -> None:
    """By the gateway that has the session now."""
    url, headers = f"{stage.url}/sessions/{client.session_id}/finish", {"authorization": f"Bearer {client.token}"}
    (await stage.http.post(url, json={"outcome": "completed"}, headers=headers)).raise_for_status()


async def ended(stage: Stage, verdict: Verdict, before: set[str], living: int) -> None:
    """Wait until the engine has let go of the dead gateway's requests; `living` of those before are the other's."""
    began = time.monotonic()
    while len(before & await stage.running()) > living and time.monotonic() - began < 2 * ENDS_S:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    took = time.monotonic() - began
    verdict.slowest_end_s = max(verdict.slowest_end_s, took)
    verdict.late += took > ENDS_S


async def judged(role: Role, verdict: Verdict) -> int:
    """What the log says of the sessions against what clients saw; how many were adopted."""
    sessions = await all_events(role, SESSIONS)
    finishes: dict[str, SessionFinished] = {}
    epochs: dict[str, str] = {}
    for event in sessions:
        epochs.update({event.session_id: event.event_id} if not isinstance(event, SessionFinished) else {})
        if isinstance(event, SessionFinished) and event.epoch == epochs[event.session_id]:
            finishes.setdefault(event.session_id, event)
    for session_id, client in verdict.finished.items():
        named = [(turn.epoch, turn.index) for turn in finishes[session_id].turns]
        seen = [(epoch, index) for epoch, index, _ in client.seen]
        verdict.lost += len(set(seen) - set(named)) + (2 - len(seen))
        verdict.twice += len(set(named) - set(seen)) + len(seen) - len(set(seen))
    return sum(isinstance(event, SessionAdopted) for event in sessions)


async def torture(settings: Settings, *, kills: int, streams: int, seed: int) -> int:
    """The whole run; the exit status."""
    verdict, rng = Verdict(), random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # or the balancer has nothing to balance
    async with (
        httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S, read=30.0), limits=limits) as http,
        open_role("chaos", settings) as role,
    ):
        stage = Stage(settings, http)
        await configure(role)
        await role.events.append(registered(settings))
        script = Path(__file__).with_name("scripted_engine.py")
        argv = (sys.executable, str(script), settings.engine.urls[0].rpartition(":")[2], settings.model.path)
        log = Path(settings.run.directory) / "engine.log"
        launch = Launch(name="engine", argv=argv, log=log, ready=lambda: up(f"{stage.engine}/ready"))
        engine = Child(launch).start()
        try:
            await asyncio.to_thread(engine.wait_ready)
            async with one_address(stage) as stage.url:
                for port in free_ports(2):
                    stage.start(port)
                for child in stage.children.values():
                    await asyncio.to_thread(child.wait_ready)
                key = SigningKeys(settings.gateway, Path(settings.run.directory)).first.decode()
                for number in range(kills):
                    rng.shuffle(stage.ports)
                    await struck(stage, verdict, key, number, streams, zombie=bool(number % 2))
        finally:
            for child in (*stage.children.values(), engine):
                child.stop()
        adopted = await judged(role, verdict)
    skipped = int(not 0 < verdict.taken_over <= adopted)
    ok = not (verdict.lost or verdict.twice or verdict.late or skipped)
    return told(
        id="takeover", kills=kills, lost=verdict.lost, twice=verdict.twice, skipped=skipped, identical=not verdict.lost,
        ok=ok, detail={
            "sessions": verdict.sessions, "of_the_victims": verdict.taken_over, "adoptions": adopted,
            "repeats": verdict.repeats, "zombies": verdict.zombies, "slowest_end_s": round(verdict.slowest_end_s, 2),
        },
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill one of two gateways under streams.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        settings = with_model(settings)
        settings = dataclasses.replace(settings, gateway=dataclasses.replace(settings.gateway, url="", port=0))
        return asyncio.run(
            torture(settings, kills=arguments.kills, streams=arguments.streams, seed=arguments.seed)
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
