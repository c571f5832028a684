"""An actor that supervises an engine and its loader on a node of a Ray cluster.

Ray imports this module before it creates the actor. Paths are those of the process that owns the actor: the actor works
in the same folder, which every node must have.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from turnlog.infra.embedded import EngineDied
from turnlog.infra.embedded.plan import RoleProcess, engine_member, loaders_own, role_member
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.embedded.process import swept_by_another
from turnlog.infra.embedded.supervisor import SATISFIED, Member, Supervisor, Watched
from turnlog.infra.roles import log_lines
from turnlog.infra.roles.probe import client_url, health_host
from turnlog.plugins.ray.cluster import ActorPlacement, place
from turnlog.settings import Settings, load

log = logging.getLogger(__name__)


def members_of(settings: Settings, name: str, address: str) -> tuple[str, list[Member]]:
    """Return the engine's address, and the engine and its loader as members whose permanent failure ends the actor.
    Raises PortTaken, ModelMissing, NotInstalled."""
    here = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, host=address))
    engine, url = engine_member(here, name)
    host = health_host(os.environ)
    health = client_url(host, free_ports(1, host)[0])
    loader = role_member(settings, RoleProcess.loader(name), health, loaders_own(name, url))
    return url, [dataclasses.replace(member, essential=True) for member in (engine, loader)]


class EngineHost:
    """Actor that hosts one engine and its loader."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._supervisor: Supervisor
        self._running: asyncio.Task[None] | None = None

    async def place(self, *folders: Path) -> ActorPlacement:
        """Return the node and address of the actor, and whether it sees these folders."""
        return place(*folders)

    async def begin(self, folder: Path, kept: Path, name: str) -> str:
        """Start the engine and its loader; return the engine's address.

        `folder` is the working directory that paths are relative to, `kept` the settings file. Raises as
        `members_of`."""
        os.chdir(folder)
        log_lines.begin(os.environ, sys.stderr)
        settings = load(kept, os.environ)
        log_lines.speaks("engine", run=settings.run.id, instance=name)
        url, members = members_of(settings, name, place().address)
        self._open.enter_context(swept_by_another())
        self._supervisor = Supervisor(members, _tell)
        self._running = asyncio.create_task(self._supervisor.run())
        return url

    async def starting(self) -> list[str]:
        """Return the names of the members that are not ready yet. Raises the error with which one of them ended for
        good."""
        if self._running is not None and self._running.done():
            self._running.result()
            raise EngineDied("it was stopped")
        return [one.name for one in self._supervisor.watched.values() if one.state not in SATISFIED]

    async def stop(self) -> None:
        """Stop the engine and its loader, and remove what they have left behind."""
        if self._running is not None:
            self._supervisor.stopping.set()
            await asyncio.wait([self._running])
        self._open.close()


def _tell(watched: Watched) -> None:
    log.info("%s is %s", watched.name, watched.state)
