"""Plays at an OpenEnv server in a sandbox until it is killed: `python killed_worker.py BACKEND IMAGES PLAN`.

IMAGES is a folder of images, for bubblewrap."""

from __future__ import annotations

import asyncio
import json
import sys

from turnlog.plugins.openenv.servers import ServerPlan, StartedServers
from turnlog.sandbox_settings import SandboxSettings
from turnlog.sandbox_workers.pooling.worker_pools import backend
from turnlog.sandbox_workers.server_sandboxes import ServerSandboxes


async def main(name: str, images: str, plan: str) -> None:
    """Start the server, take a step, print its observation, and wait."""
    provider = await backend(name, SandboxSettings(image_folder=images, first_uid=247_000))
    servers = StartedServers(ServerSandboxes({name: provider}, slots=1))
    server = await servers.with_room(ServerPlan.parse(json.loads(plan)))
    await server.ready(timeout_s=100.0)
    session = await server.connect(timeout_s=10.0)
    await session.reset({"seed": 3}, timeout_s=10.0)
    step = await session.step({"number": 1}, timeout_s=10.0)
    print(json.dumps(step.observation), flush=True)
    await asyncio.Event().wait()


asyncio.run(main(*sys.argv[1:]))
