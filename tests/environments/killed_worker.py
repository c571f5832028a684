"""Plays at an OpenEnv server in a bubblewrap sandbox until it is killed: `python killed_worker.py IMAGES PLAN`.

IMAGES is a folder of images."""

from __future__ import annotations

import asyncio
import json
import sys

from turnlog.plugins.openenv.servers import ServerPlan, StartedServers
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.backends.bubblewrap import Bubblewrap
from turnlog.sandbox_workers.server_sandboxes import ServerSandboxes


async def main(images: str, plan: str) -> None:
    """Start the server, take a step, print its observation, and wait."""
    provider = await Bubblewrap.open(SandboxSettings(image_folder=images, first_uid=247_000))
    servers = StartedServers(ServerSandboxes(provider, slots=1))
    server = await servers.with_room(ServerPlan.parse(json.loads(plan)))
    await server.ready(timeout_s=100.0)
    session = await server.connect(timeout_s=10.0)
    await session.reset({"seed": 3}, timeout_s=10.0)
    step = await session.step({"number": 1}, timeout_s=10.0)
    print(json.dumps(step.observation), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
