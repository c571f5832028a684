"""Let engines come and go under streams: `python benchmarks/chaos/elastic.py [--kills 5] [--streams 100]`.

A supervisor runs a gateway and a loader for each engine; engines are scripted, and real weights are published to them.
In each round an engine joins, clients stream, new weights come out, and the engine that was there before is drained;
what has not ended by then is aborted, which gateways submit again to the newcomer. Then, from what clients saw and from
the log: every answer that was complete stands (lost), every session is finished by the answers that its client saw and
no other (twice), a drained engine gets nothing more and is gone (skipped). `serves_s`: from the request for an engine
that runs to the first request that it serves.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import httpx
import torch
from answers import with_model
from safetensors.torch import save_file
from servers import say, servers, told
from takeover import PATIENCE_S, QUESTION, Stage, Verdict, asked, finished, judged, opened_session, streaming, up

from tests.fakes.weights import version
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.up import down
from turnlog.infra.embedded.up import up as run_up
from turnlog.infra.roles import fleet
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.processors.core.views.fleet import GONE, SERVING
from turnlog.producers.gateway.requests import SigningKeys
from turnlog.settings import Settings

DRAIN_S = 1.0


@dataclass(slots=True)
class Engines(Stage):
    """Engines that come and go behind one gateway."""

    live: dict[str, Child] = field(default_factory=dict)
    """Address -> process."""
    serves_s: list[float] = field(default_factory=list)
    drains_s: list[float] = field(default_factory=list)

    def begin(self, url: str) -> Child:
        """The process of an engine."""
        script, port = Path(__file__).with_name("scripted_engine.py"), url.rpartition(":")[2]
        log = Path(self.settings.run.directory) / f"scripted-{port}.log"
        argv = (sys.executable, str(script), port, self.settings.model.path)
        self.live[url] = Child(Launch(name=port, argv=argv, log=log, ready=lambda: up(f"{url}/ready"))).start()
        return self.live[url]

    async def pace(self, token_s: float) -> None:
        """Of every engine."""
        for url in self.live:
            (await self.http.post(f"{url}/pace", params={"of": token_s})).raise_for_status()

    async def served(self, url: str) -> int:
        """Requests that an engine was ever sent."""
        count: int = (await self.http.get(f"{url}/served")).json()
        return count


def weights(number: int) -> dict[str, torch.Tensor]:
    """Of a version; what is sampled does not depend on them."""
    return {"a": torch.full((2, 3), float(number))}


async def publish(role: Role, number: int) -> None:
    """As a trainer does."""
    folder = Path(role.settings.model.path)
    await role.events.append(await version(weights(number), number, role.blobs, folder, run_id=role.settings.run.id))


async def until(role: Role, name: str, state: str) -> None:
    """Wait for what the log says of an engine."""
    while True:
        known = (await fleet.read(role)).find_engine(name)
        if known is not None and known.state == state:
            return
        await asyncio.sleep(0.05)


async def joined(stage: Engines, role: Role, key: str, number: int) -> str:
    """Start an engine, register it, and ask until it serves; its address."""
    url = f"http://{HOST}:{free_ports(1)[0]}"
    await asyncio.to_thread(stage.begin(url).wait_ready)
    began = time.monotonic()
    await fleet.register(role, url)
    at = 0
    while not await stage.served(url):
        client = await opened_session(stage, key, f"probe-{number}-{at}")
        await asked(stage, client, [QUESTION])
        at += 1
    stage.serves_s.append(time.monotonic() - began)
    return url


async def scaled_in(stage: Engines, verdict: Verdict, role: Role, key: str, number: int, count: int) -> int:
    """One round; 1 where the drained engine was asked for something afterwards."""
    old = next(iter(stage.live))
    await joined(stage, role, key, number)
    clients, asking = await streaming(stage, key, number, count)
    await publish(role, number + 1)
    began = time.monotonic()
    await fleet.drain(role, old)
    await until(role, old, GONE)
    stage.drains_s.append(time.monotonic() - began)
    served = await stage.served(old)
    say(f"round {number}: {old} is gone after {stage.drains_s[-1]:.1f} s")
    await stage.pace(0.0)
    await asyncio.gather(*asking)
    late = int(await stage.served(old) > served)
    stage.live.pop(old).stop()
    await asyncio.gather(*(finished(stage, client) for client in clients))
    verdict.finished |= {client.session_id: client for client in clients}
    verdict.repeats += sum(client.repeats for client in clients)
    verdict.sessions += count
    return late


async def torture(settings: Settings, *, kills: int, streams: int) -> int:
    """The whole run; the exit status."""
    verdict, skipped = Verdict(), 0
    async with httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S, read=60.0)) as http:
        stage = Engines(settings, http)
        try:
            await asyncio.to_thread(stage.begin(settings.engine.urls[0]).wait_ready)
            ends = await asyncio.to_thread(run_up, settings, ("gateway", "loader"), wait=False, attached=True, say=say)
            stage.url = ends.gateway
            async with open_role("chaos", settings) as role:
                await configure(role)
                await publish(role, 0)
                await until(role, settings.engine.urls[0], SERVING)
                while not await asyncio.to_thread(up, f"{stage.url}/readyz"):  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
                key = SigningKeys(settings.gateway, Path(settings.run.directory)).first.decode()
                for number in range(kills):
                    skipped += await scaled_in(stage, verdict, role, key, number, streams)
                await judged(role, verdict)
            await asyncio.to_thread(down, settings, say=say)
        finally:
            for child in stage.live.values():
                child.stop()
    ok = not (verdict.lost or verdict.twice or skipped)
    return told(
        id="elastic", kills=kills, lost=verdict.lost, twice=verdict.twice, skipped=skipped, identical=not verdict.lost,
        ok=ok, detail={
            "sessions": verdict.sessions, "repeats": verdict.repeats,
            "serves_s": [round(seconds, 2) for seconds in stage.serves_s],
            "drains_s": [round(seconds, 2) for seconds in stage.drains_s],
        },
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Let engines come and go under streams.")
    parser.add_argument("--kills", type=int, default=5, help="engines that are drained")
    parser.add_argument("--streams", type=int, default=100)
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        settings = with_model(settings)
        save_file(weights(0), str(Path(settings.model.path) / "model.safetensors"))
        replace = dataclasses.replace
        settings = replace(
            settings,
            gateway=replace(settings.gateway, url="", port=0),
            engine=replace(settings.engine, drain_s=DRAIN_S),
            loader=replace(settings.loader, timeout_s=20.0),
        )
        return asyncio.run(torture(settings, kills=arguments.kills, streams=arguments.streams))


if __name__ == "__main__":
    sys.exit(main())
