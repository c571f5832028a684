"""The process that owns an engine on Ray (see the package).

NodeUnfit   Ray chose a node that lacks the run's folders
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup

from turnlog.infra.roles.health import Health, serve_health
from turnlog.infra.roles.log_lines import instance_of
from turnlog.infra.roles.probe import health_address
from turnlog.infra.run_folder import SETTINGS
from turnlog.plugins.ray.actor import EngineHost
from turnlog.plugins.ray.cluster import (
    ActorLost,
    ActorPlacement,
    ActorSilent,
    Bundle,
    bundles,
    in_a_line,
    join_cluster,
    no_room,
    start_actor,
)
from turnlog.settings import EngineSettings, Settings

log = logging.getLogger(__name__)
LOOK_S = 1.0
STOP_S = 25.0
"""Maximum seconds for the engine and its loader to stop."""
STRATEGY = "SPREAD"


class NodeUnfit(Exception):
    """Remedy: a volume that every node has under the same path."""


def bundle_of(engine: EngineSettings) -> dict[str, int]:
    """Return the resources that an engine takes of a node."""
    return {"CPU": engine.ray_cpus} | ({"GPU": engine.ray_gpus} if engine.device == "cuda" else {})


async def watch_engine(settings: Settings) -> int:
    """Place the engine named by TURNLOG_INSTANCE with its loader, and watch both until this asyncio task is cancelled.
    Raises as `turnlog.plugins.ray.host_engine`."""
    name, health = instance_of("engine"), Health("engine")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serve_health(health, health_address(os.environ)))
        await stack.enter_async_context(_join_in_thread(settings.engine.ray_address))
        bundle = bundle_of(settings.engine)
        group = stack.enter_context(bundles(bundle, 1, STRATEGY))
        await _roomy(group, bundle, health)
        health.unmet("actor", "the actor of the engine is starting on a node of Ray")
        actor = start_actor(ray.remote(EngineHost), group, 0, bundle)
        stack.push_async_callback(_stop_actor, actor)
        where, url = await _start_engine(actor, settings, name)
        health.mark_ready("actor")
        log.info("%s is on node %s of Ray, at %s", name, where.node, url)
        await _watch(actor, settings, health, f"on node {where.node} ({where.address}) of Ray")
    raise AssertionError("unreachable")


@asynccontextmanager
async def _join_in_thread(address: str) -> AsyncIterator[None]:
    """Join the cluster in a thread: in the main thread, Ray installs its own handler for SIGTERM."""
    with ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, join_cluster(address, "engine"))
        yield


async def _roomy(group: PlacementGroup, bundle: Bundle, health: Health) -> None:
    """Wait for the placement group as long as necessary."""
    while not await asyncio.to_thread(group.wait, LOOK_S):
        health.beat()
        said = await asyncio.to_thread(no_room, bundle, 1, STRATEGY)
        log.warning("%s", said)
        health.unmet("room", f"{said}; add nodes, or set engine.ray_cpus or engine.ray_gpus")
    health.mark_ready("room")


async def _start_engine(actor: Any, settings: Settings, name: str) -> tuple[ActorPlacement, str]:
    here, kept = Path.cwd(), (Path(settings.run.directory) / SETTINGS).resolve()
    where: ActorPlacement = await _answer(actor.place.remote(here, kept.parent))
    if not where.sees:
        raise NodeUnfit(
            f"node {where.node} ({where.address}) of Ray does not see {here} and {kept.parent}: [run] directory and "
            "[model] path must be on storage that all nodes share"
        )
    url: str = await _answer(actor.begin.remote(here, kept, name))
    return where, url


async def _watch(actor: Any, settings: Settings, health: Health, where: str) -> None:
    """Poll the actor. Raises ActorLost if it does not answer within [loader] gone_s, and whatever the actor raises."""
    heard, bound_s = time.monotonic(), settings.loader.gone_s
    while True:
        try:
            async with asyncio.timeout(bound_s):
                starting: list[str] = await _answer(actor.starting.remote())
        except (ActorSilent, TimeoutError) as error:
            if time.monotonic() - heard >= bound_s:
                raise ActorLost(f"no answer {where} in {bound_s:g} s: [loader] gone_s ({error})") from error
        else:
            heard = time.monotonic()
            health.beat()
            _tell(health, starting, where)
        await asyncio.sleep(LOOK_S)


def _tell(health: Health, starting: list[str], where: str) -> None:
    if starting:
        health.unmet("members", f"{', '.join(starting)} {where} not ready yet")
    else:
        health.mark_ready("members")
        health.mark_started()


async def _answer(asked: Awaitable[Any]) -> Any:
    """Await an answer of the actor. Raises what the actor raised, ActorSilent if it cannot be reached, ActorLost if it
    is gone."""
    try:
        return await asked
    except RayTaskError as error:
        raise error.cause or error from error
    except ActorUnavailableError as error:
        raise ActorSilent(f"its actor does not answer: {in_a_line(error)}") from error
    except RayError as error:
        raise ActorLost(f"its actor is gone: {in_a_line(error)}") from error


async def _stop_actor(actor: Any) -> None:
    """Stop the engine and its loader, then kill the actor."""
    try:
        async with asyncio.timeout(STOP_S):
            await actor.stop.remote()
    except (RayError, TimeoutError) as error:
        log.info("not waiting for the actor to stop: %s", error)
    ray.kill(actor)
