"""The role `tinker`: one process that owns the commands of a run, executes them, and serves the API."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from turnlog.infra.roles.ending import drain_s
from turnlog.infra.roles.health import QuietServer, listening, uvicorn_config
from turnlog.infra.roles.probe import client_url, is_loopback
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import configure, folder_of
from turnlog.infra.roles.tls import serving as tls_context
from turnlog.names import TransactionalId
from turnlog.plugins.tinker import BadSetup
from turnlog.plugins.tinker.app import TinkerServer
from turnlog.plugins.tinker.engines import AdapterFleet
from turnlog.plugins.tinker.executor import Executor
from turnlog.plugins.tinker.results import ServerLog
from turnlog.plugins.tinker.sampling import SampleRunner
from turnlog.plugins.tinker.snapshots import Scratch, SnapshotStore
from turnlog.settings import Settings
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.launch import process_group
from turnlog.trainer.plan import learning_plan
from turnlog.trainer.tenants import TenantLearner
from turnlog.trainer.weights import read_weights

log = logging.getLogger(__name__)


@contextmanager
def open_learner(settings: Settings) -> Iterator[TenantLearner]:
    """Open the learner on the run's base model; in the thread that calls it from then on. Raises BadSetup,
    SettingsError, and what the model's folder raises."""
    if settings.trainer.world_size != 1:
        raise BadSetup(f"the Tinker server trains on one rank: trainer.world_size is {settings.trainer.world_size}")
    folder = Path(settings.model.path)
    with process_group():
        options = learning_plan(settings).options
        yield TenantLearner(read_shape(folder), read_weights(folder), options, max_rank=settings.tinker.max_rank)


def check_keys(settings: Settings) -> None:
    """Check that whoever can reach the server needs an API key. Raises BadSetup."""
    if not settings.tinker.api_keys and not is_loopback(settings.tinker.host):
        raise BadSetup(
            f"[tinker] host is {settings.tinker.host}, which other machines reach, and [tinker] api_keys is empty: set "
            "keys that begin with tml- (TURNLOG_TINKER_API_KEYS, or TURNLOG_TINKER_API_KEYS_FILE)"
        )


async def main(role: Role) -> None:
    """Serve until the role stops.

    Order of effects: 1. record the run's configuration; 2. fence the previous server; 3. fold the log; 4. restore the
    models; 5. serve, execute, sample. Raises BadSetup, StateDiverged, OtherRun, LogError, StoreUnavailable,
    CannotListen.
    """
    settings = role.settings
    check_keys(settings)
    await configure(role)
    own, directory = settings.tinker, Path(settings.run.directory)
    with contextlib.closing(listening(own.host, own.port, "[tinker] host or port")) as listener:
        async with contextlib.AsyncExitStack() as stack:
            transactor = await stack.enter_async_context(
                role.log.transactor(TransactionalId.TINKER.format(run=settings.run.id))
            )
            server = ServerLog(role, transactor)
            await server.load()
            folder = await folder_of(role, owned=True)
            snapshots = SnapshotStore(role.blobs, folder, Scratch(directory / "tinker-scratch"))
            executor = await stack.enter_async_context(Executor.open(role, server, snapshots, open_learner))
            await executor.restore()
            work = [server.follow(), server.write(), executor.run()]
            if settings.engine.urls:
                fleet = AdapterFleet.connect(
                    settings.engine,
                    role.blobs,
                    directory / "tinker-adapters",
                    most=own.max_adapters,
                    timeout_s=settings.loader.timeout_s,
                )
                stack.push_async_callback(fleet.close)
                work.append(SampleRunner(role, server, fleet).run())
            else:
                log.warning("no engine is known ([engine] urls): samples wait until there is one")
            scheme = "https" if own.certificate_file else "http"
            config = uvicorn_config(
                TinkerServer(role, server, read_shape(Path(settings.model.path)).vocabulary).application(),
                timeout_graceful_shutdown=math.ceil(drain_s("tinker", settings)),
                tls=tls_context(own.certificate_file, own.key_file, "tinker"),
                proxy_headers=False,
            )
            async with QuietServer(config).running(listener):
                role.health.mark_started()
                log.info("serving %s", client_url(own.host, listener.getsockname()[1], scheme))
                await _until_stopped(role, server, work)


async def _until_stopped(role: Role, server: ServerLog, work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run the work until the role stops; raise what ends a part of it."""
    tasks = [asyncio.create_task(one) for one in work]
    stopping: asyncio.Task[Any] = asyncio.create_task(role.stopping.wait())
    try:
        await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in (stopping, *tasks):
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)
        await server.end()
