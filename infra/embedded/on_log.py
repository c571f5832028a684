"""Engine requests and failures in the run's log, from the supervisor's side: it starts and stops engines, and reports
failed roles.

The engines in the settings are requested at each start, unless somebody else has requested something for them since. A
new engine is started with its loader. An engine that leaves is stopped once its loader has reported it gone, or after a
time-out. The loader of an engine on Ray dies with it, so the supervisor reports that engine as gone. While the log is
not available, engines and roles continue to run, and reports are sent later.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from turnlog.infra.blobs import BlobError
from turnlog.infra.embedded import EmbeddedError
from turnlog.infra.embedded.plan import LaunchPlan
from turnlog.infra.embedded.process import cause_of
from turnlog.infra.embedded.supervisor import ChildState, Failure, Supervisor, Watched
from turnlog.infra.engines.kinds import control_engine
from turnlog.infra.engines.protocol import EngineError
from turnlog.infra.history import assign_from_start, caught_up
from turnlog.infra.log import LogError, Partition, Reader
from turnlog.infra.registry import RegistryError
from turnlog.infra.roles import fleet as requests
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.run_folder import NoEndpoints
from turnlog.processors.core.views.fleet import (
    AUTOSCALE,
    GONE,
    SERVING,
    SETTINGS,
    Autoscale,
    AutoscaleRules,
    Fleet,
    FleetEngine,
)
from turnlog.schemas.events import EngineGone, RoleFailed
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import ENGINE_REQUESTS, ENGINES
from turnlog.settings import Settings

log = logging.getLogger(__name__)
PLACES = (Partition(ENGINE_REQUESTS.name, 0), Partition(ENGINES.name, 0))
POLL_S = 0.5
PATIENCE_S = 30.0
"""Seconds beyond [engine] drain_s for an engine to drain and its loader to report it."""
LOOK_S = 2.0
"""Seconds between two checks of the load, and maximum seconds for an engine to report its load."""
AUTOSCALE_AFTER_S = 15.0
"""Seconds for which a load must last before an engine is added for it: a burst adds none, and the start of an engine
takes longer anyway."""
AGAIN_S = 5.0
"""Seconds before the next attempt to open the log."""


class OnLog:
    """Keeps the supervisor's engines and loaders as the log requests, and reports failures to the log."""

    def __init__(self, settings: Settings, plan: LaunchPlan, supervisor: Supervisor, told: Callable[[], None]) -> None:
        """`told` is called when addresses of the plan change."""
        self._settings, self._plan, self._supervisor, self._told = settings, plan, supervisor, told
        self._asked_at: dict[str, float] = {}
        """Engine -> time.monotonic() at which it was first seen leaving."""
        wanted = settings.engine
        rules = AutoscaleRules(wanted.autoscale_min, wanted.autoscale_max, wanted.autoscale_requests, AUTOSCALE_AFTER_S)
        self._autoscale = Autoscale(rules) if rules.most and not wanted.urls else None
        self._looked_at = float("-inf")
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._failures: deque[RoleFailed] = deque()
        """Failures that are not reported yet."""
        self._lost: dict[str, str] = {}
        """Engine on Ray -> cause of its death, until that is reported or the engine is ready again."""

    def report_failure(self, failure: Failure) -> None:
        """Report a member whose restarts did not help, as soon as the log is available."""
        run_id, host, ended = self._settings.run.id, socket.gethostname(), failure.cause.partition("\n")[0]
        event = RoleFailed(
            event_id=digest("RoleFailed", run_id, failure.name, host, time.time_ns()),
            run_id=run_id, role=failure.name, cause=": ".join(filter(None, (ended, cause_of(failure.cause)))),
            remedy=failure.remedy, restart=failure.restart, host=host,
        )  # fmt: skip
        log.error("%s failed, %s: %s", event.role, event.remedy.replace("_", " "), event.cause)
        self._failures.append(event)

    def on_change(self, watched: Watched) -> None:
        """Handle a state change of a member."""
        if watched.state in (ChildState.RESTARTING, ChildState.FAILED) and self._plan.on_ray(watched.name):
            self._lost[watched.name] = _cause_of(str(watched.error))
        elif watched.state is ChildState.READY:
            self._lost.pop(watched.name, None)

    async def run(self) -> None:
        """Follow the log forever, reopening it after errors."""
        await self._supervisor.watched["topics"].satisfied.wait()
        while True:
            try:
                async with open_role("supervisor", self._settings) as role:
                    await self.follow(role)
            except (LogError, RegistryError, BlobError, NoEndpoints) as error:
                log.warning("cannot follow the log; engines are left as they are until it can be read again: %s", error)
            await asyncio.sleep(AGAIN_S)

    async def follow(self, role: Role) -> None:
        """Apply requests of the log to the supervisor, and append reports, forever. Raises LogError."""
        fleet = Fleet()
        async with role.log.reader() as reader:
            ends = await assign_from_start(role.log, reader, PLACES)
            while not caught_up(reader, ends):
                await self._hear(role, reader, fleet)
            await requests.ask(role, fleet, fleet.compare_settings(self._plan.declared_engines()), by=SETTINGS)
            while True:
                while self._failures:
                    await role.events.append(self._failures[0])
                    self._failures.popleft()
                await self._tell_lost(role, fleet)
                await self._obey(role, fleet)
                if self._autoscale is not None and time.monotonic() - self._looked_at >= LOOK_S:
                    await self._scale(role, fleet, self._autoscale)
                await self._hear(role, reader, fleet)

    async def _scale(self, role: Role, fleet: Fleet, autoscale: Autoscale) -> None:
        """Request as many hosted engines as the load needs."""
        hosted = fleet.hosted_engines()
        serving = [engine for engine in hosted if engine.state == SERVING]
        loads = await self._loads(serving)
        self._looked_at = time.monotonic()
        count = autoscale.look(self._looked_at, hosted=len(hosted), serving=len(loads), under_way=sum(loads))
        if count != len(hosted):
            reason = f"{sum(loads)} requests run or wait at {len(loads)} engines: {count} instead of {len(hosted)}"
            log.info("%s", reason)
            changes = [(name, "", wanted) for name, wanted in fleet.plan_scaling(count)]
            await requests.ask(role, fleet, changes, by=AUTOSCALE, reason=reason)

    async def _loads(self, engines: Sequence[FleetEngine]) -> list[int]:
        """Return the number of requests at each engine that answers."""

        async def count_requests(engine: FleetEngine) -> int:
            control = control_engine(engine.url, engine.kind, ca_file=self._settings.engine.ca_file)
            try:
                async with asyncio.timeout(LOOK_S):
                    return await control.under_way()
            finally:
                await control.close()

        found = await asyncio.gather(*map(count_requests, engines), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, EngineError | TimeoutError):
                raise error
        return [load for load in found if isinstance(load, int)]

    async def _hear(self, role: Role, reader: Reader, fleet: Fleet) -> None:
        async for _, event in role.run_events(await reader.poll(timeout_s=POLL_S)):
            fleet.apply(event)

    async def _obey(self, role: Role, fleet: Fleet) -> None:
        """Start engines that are wanted and do not run, stop those that have left."""
        for engine in list(fleet.engines.values()):
            runs = self._plan.has(engine.id)
            if not engine.leaving:
                self._asked_at.pop(engine.id, None)
                if engine.wanted and not runs and engine.id not in self._stopping:
                    self._start(engine)
                elif runs and not engine.hosted and self._plan.registered_kind(engine.id) != engine.wanted_kind:
                    log.info("%s was registered as another kind: its loader starts again", engine.id)
                    self._stop(engine)
            elif runs and engine.has_left:
                log.info("%s has left: %s", engine.id, engine.cause or "it never reported a state")
                self._stop(engine)
            elif engine.state not in (GONE, "") and ((engine.hosted and not runs) or self._overdue(engine)):
                await self._give_up(role, fleet, engine)

    def _start(self, engine: FleetEngine) -> None:
        try:
            url, kind = ("", "") if engine.hosted else (engine.url, engine.wanted_kind)
            members = self._plan.join(engine.id, url, kind)
        except EmbeddedError as error:
            log.error("%s was requested but cannot be started: %s", engine.id, error)
            return
        log.info("starting %s, requested by %s", engine.id, engine.by)
        self._supervisor.add(*members)
        self._told()

    def _stop(self, engine: FleetEngine) -> None:
        names = self._plan.leave(engine.id)
        task = self._stopping[engine.id] = asyncio.create_task(self._supervisor.remove(*names))
        task.add_done_callback(lambda _: self._stopping.pop(engine.id))
        self._told()

    def _overdue(self, engine: FleetEngine) -> bool:
        since = self._asked_at.setdefault(engine.id, time.monotonic())
        return time.monotonic() - since > self._settings.engine.drain_s + PATIENCE_S

    async def _tell_lost(self, role: Role, fleet: Fleet) -> None:
        for name, cause in list(self._lost.items()):
            if (engine := fleet.engines.get(name)) is not None and engine.state not in (GONE, ""):
                await self._say_gone(role, fleet, engine, cause)
            if self._lost.get(name) == cause:
                del self._lost[name]

    async def _give_up(self, role: Role, fleet: Fleet, engine: FleetEngine) -> None:
        """Report an engine as gone in place of its loader."""
        here = self._plan.has(engine.id)
        cause = "its loader did not let it drain in time" if here else "nothing of it runs here"
        await self._say_gone(role, fleet, engine, cause)

    async def _say_gone(self, role: Role, fleet: Fleet, engine: FleetEngine, cause: str) -> None:
        run_id = role.settings.run.id
        event = EngineGone(
            event_id=digest("EngineGone", run_id, engine.id, "supervisor", time.time_ns()),
            run_id=run_id, engine_id=engine.id, url=engine.url, kind=engine.kind, state=GONE, version=engine.version,
            cause=cause,
        )  # fmt: skip
        await role.events.append(event)
        fleet.apply(event)


def _cause_of(death: str) -> str:
    """Return the cause of a death in one line: the process's own last words, or else the supervisor's description."""
    return cause_of(death) or death.partition("\n")[0]
