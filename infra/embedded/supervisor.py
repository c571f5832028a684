"""Starts children in the order of their dependencies, watches them, restarts those that die or hang, and stops all in
reverse order.

Each child goes from waiting through starting to ready. After a death it is restarting, then starting again. Too many
quick deaths in a row, or too many of any kind within OFTEN_S, lead to failed; an end with status 0 leads to done.
`on_change` is called for each state change. A child that is alive but unresponsive is killed, which counts as a death.
The end of a child that lacked a server, or space on its disk, does not count: it is restarted as often as necessary. So
is an optional member, whose failure is reported once until it has been stable again.

Recovery has two levels. Restarts of a member come first. If they do not help, and the member has been ready before, the
run (all members except the servers) is restarted, and continues from the log and the last checkpoint. This happens at
most `run_restarts` times within RUN_RESTARTS_S. After that, or if it was never ready, a member stays failed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from turnlog.infra.embedded import DiskFull, EmbeddedError, Hung, LacksServer, NotReady, ServerDied
from turnlog.infra.embedded.liveness import Silence
from turnlog.infra.embedded.process import CLEAN_EXITS, Child, Launch
from turnlog.infra.run_folder import lacks_room

log = logging.getLogger(__name__)
FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0
LONGEST_OPTIONAL_BACKOFF_S = 120.0
"""Maximum seconds between two starts of an optional member that has died too often: its starts use resources of the
training."""
PROBE_EVERY_S = 0.1
ROOM_EVERY_S = 2.0
"""Seconds between two checks of a full disk."""
OFTEN_S = 600.0
"""Time window in seconds in which the deaths of a member are counted, even if it becomes ready each time."""
RUN_RESTARTS_S = 3600.0
"""Time window in seconds in which restarts of the run are counted."""


class ChildState(StrEnum):
    """State of a child."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    DONE = "done"
    STOPPED = "stopped"


SATISFIED = frozenset({ChildState.READY, ChildState.DONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A child of the supervisor."""

    launch: Launch
    after: tuple[str, ...] = ()
    """Names of members that must be ready (or done) before the first start."""
    essential: bool = False
    """True if the supervisor ends when the member fails."""
    deaths: int = 5
    """Number of quick deaths in a row after which the member has failed."""
    quick_s: float = 10.0
    """A death is quick if the child was ready for less than this many seconds, or never. Other deaths reset the
    count and the pause before the next start."""
    often: int = 0
    """Number of deaths within OFTEN_S after which the member has failed, however long it was ready; 0: no limit."""
    optional: bool = False
    """True if the others work without the member: it never fails, and is no reason to restart the run."""
    tier: int = 0
    """Members of higher tiers are stopped first."""
    must_be_ready: bool = True
    """Whether a member that is not ready in time counts as dead. Roles may have to wait for others as long as
    necessary."""


@dataclass(slots=True)
class Watched:
    """A member and its current state."""

    member: Member
    state: ChildState = ChildState.WAITING
    since: float = field(default_factory=time.time)
    restarts: int = 0
    error: EmbeddedError | None = None
    child: Child | None = None
    satisfied: asyncio.Event = field(default_factory=asyncio.Event)
    hung: str = ""
    """Reason why we killed the current process as hung; empty if we did not."""
    ready_at: float = float("inf")
    """time.monotonic() at which the current process became ready."""
    troubled: bool = False
    """True for an optional member that has died as often as makes other members fail, and has not been stable since."""

    @property
    def name(self) -> str:
        return self.member.launch.name

    @property
    def is_past_start(self) -> bool:
        """Whether the start of the run no longer waits for the member."""
        return self.state in SATISFIED or self.troubled

    def as_dict(self) -> dict[str, object]:
        """Return the member's entry in supervisor.json."""
        return {
            "name": self.name,
            "pid": self.child.pid if self.child and self.state in (ChildState.STARTING, ChildState.READY) else 0,
            "state": str(self.state),
            "restarts": self.restarts,
            "optional": self.member.optional,
            "since": round(self.since, 3),
            "log": str(self.member.launch.log),
            "error_type": type(self.error).__name__ if self.error else "",
            "error": str(self.error or ""),
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A member whose restarts did not help."""

    name: str
    cause: str
    restart: int
    """Number of restarts of the run since the supervisor began, including the one that this failure causes, if any."""
    restarts_run: bool
    """Whether the run is restarted."""
    retried: bool = False
    """Whether the member alone is restarted, without limit, because it is optional."""

    @property
    def remedy(self) -> str:
        """Remedy as recorded in RoleFailed."""
        return "retried" if self.retried else "run_restarted" if self.restarts_run else "given_up"


class Supervisor:
    """Runs members until `stopping` is set or an essential one has failed; members may be added and removed
    meanwhile."""

    def __init__(
        self,
        members: Sequence[Member],
        on_change: Callable[[Watched], None],
        *,
        run_restarts: int = 0,
        on_failure: Callable[[Failure], None] = lambda _: None,
    ) -> None:
        self.watched = {member.launch.name: Watched(member) for member in members}
        self.stopping = asyncio.Event()
        self._on_change, self._on_failure = on_change, on_failure
        self._run_restarts = run_restarts
        self._restarted: list[float] = []
        """time.monotonic() of each restart of the run."""
        self._restarting: asyncio.Task[None] | None = None
        self._worked: set[str] = set()
        """Names of members that have been ready."""
        self._loops: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None]

    async def run(self) -> None:
        """Start all members; return after `stopping` was set and everything is stopped. Raises the error of an
        essential member that failed, after stopping the others."""
        self._failed = asyncio.get_running_loop().create_future()
        for watched in self.watched.values():
            self._begin(watched)
        stop = asyncio.create_task(self.stopping.wait())
        try:
            over: list[asyncio.Future[Any]] = [stop, self._failed]
            await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks: list[asyncio.Task[Any]] = [stop, *self._loops.values()]
            tasks += [self._restarting] if self._restarting is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_all(self.watched.values())
        if self._failed.done():
            self._failed.result()

    def add(self, *members: Member) -> None:
        """Start more members while `run` runs."""
        self._watch([Watched(member) for member in members])

    def _watch(self, news: Sequence[Watched]) -> None:
        self.watched |= {watched.name: watched for watched in news}
        for watched in news:
            self._begin(watched)

    async def remove(self, *names: str) -> None:
        """Stop members, the highest tier first, and remove them; unknown names are ignored."""
        found = [self.watched[name] for name in names if name in self.watched]
        await self._halt(found)
        for watched in found:
            del self.watched[watched.name]
            self._on_change(watched)

    async def _halt(self, members: Sequence[Watched]) -> None:
        loops = [self._loops.pop(watched.name) for watched in members if watched.name in self._loops]
        for task in loops:
            task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await self._stop_all(members)

    async def _restart_run(self) -> None:
        """Restart all members that are not essential and not done."""
        again = [one for one in self.watched.values() if not (one.member.essential or one.state is ChildState.DONE)]
        await self._halt(again)
        self._watch([Watched(watched.member, restarts=watched.restarts + 1) for watched in again])

    def _fail(self, watched: Watched) -> None:
        """Restart the run, or leave the member failed, because its own restarts did not help. Raises its error if it is
        essential."""
        now = time.monotonic()
        recent = [at for at in self._restarted if now - at < RUN_RESTARTS_S]
        idle = self._restarting is None or self._restarting.done()
        again = watched.name in self._worked and len(recent) < self._run_restarts and not watched.member.essential
        self._change(watched, ChildState.RESTARTING if again else ChildState.FAILED)
        if watched.member.essential:
            assert watched.error is not None
            raise watched.error
        if again and idle:
            self._restarted.append(now)
            self._restarting = asyncio.create_task(self._restart_run())
        if idle:
            self._on_failure(Failure(watched.name, str(watched.error), len(self._restarted), again))

    def _trouble(self, watched: Watched) -> None:
        """Report the failure of an optional member once, until it has been stable again."""
        if not watched.troubled:
            watched.troubled = True
            self._on_failure(Failure(watched.name, str(watched.error), len(self._restarted), False, retried=True))

    def _begin(self, watched: Watched) -> None:
        def over(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
                self._failed.set_exception(error)

        self._loops[watched.name] = asyncio.create_task(self._keep(watched))
        self._loops[watched.name].add_done_callback(over)

    async def _keep(self, watched: Watched) -> None:
        """Keep one member running. Raises its error if it is essential and fails."""
        for name in watched.member.after:
            await self.watched[name].satisfied.wait()
        member, quick, backoff_s = watched.member, 0, FIRST_BACKOFF_S
        recent: list[float] = []
        while True:
            watched.ready_at = float("inf")
            try:
                await self._live(watched)
                self._change(watched, ChildState.DONE)
                return
            except (NotReady, ServerDied) as death:
                watched.error = await asyncio.to_thread(_with_cause, watched, death)
            log.warning("%s", str(watched.error).partition("\n")[0])
            counts, now = not isinstance(watched.error, LacksServer | DiskFull), time.monotonic()
            recent = [at for at in recent if now - at < OFTEN_S] + [now] * counts
            if now - watched.ready_at > member.quick_s:
                quick, backoff_s, watched.troubled = 0, FIRST_BACKOFF_S, False
            else:
                longest_s = LONGEST_OPTIONAL_BACKOFF_S if watched.troubled else LONGEST_BACKOFF_S
                quick, backoff_s = quick + counts, min(2 * backoff_s, longest_s)
            if quick >= member.deaths or 0 < member.often <= len(recent):
                if not member.optional:
                    self._fail(watched)
                    return
                self._trouble(watched)
                recent = []
            watched.restarts += 1
            self._change(watched, ChildState.RESTARTING)
            await asyncio.sleep(backoff_s)
            if isinstance(watched.error, DiskFull):
                await _room(member.launch.log.parent)

    async def _live(self, watched: Watched) -> None:
        """Run a member's process once; return when it ends with status 0. Raises its death, Hung or NotReady."""
        child = watched.child = Child(watched.member.launch, restarts=watched.restarts)
        child.start()
        self._change(watched, ChildState.STARTING)
        ended = asyncio.create_task(_end(child))
        watchdog = asyncio.create_task(self._kill_when_hung(watched, child))
        try:
            if await self._becomes_ready(watched, ended):
                self._change(watched, ChildState.READY)
            await ended
        finally:
            ended.cancel()
            if not watched.hung:
                watchdog.cancel()
        if watched.hung:
            await watchdog
            raise Hung(f"{watched.name} {watched.hung}: killed, with all that it had started; log {child.launch.log}")
        await asyncio.to_thread(child.stop)  # kills the processes that it has left behind
        if child.returncode != 0:
            raise child.death()

    async def _kill_when_hung(self, watched: Watched, child: Child) -> None:
        """Check the child while it runs; kill it and its process group when it no longer works."""
        watched.hung, liveness = "", child.launch.liveness
        if liveness is None:
            return
        silence, ready = Silence(liveness, time.monotonic()), False
        while not watched.hung:
            await asyncio.sleep(liveness.every_s)
            loops = await asyncio.to_thread(liveness.look)
            if not ready and watched.state is ChildState.READY:  # the time of the start does not count
                silence, ready = Silence(liveness, time.monotonic()), True
            silence.record_check(loops, time.monotonic())
            watched.hung = silence.hung(at_least_s=0.0 if ready else child.launch.ready_timeout_s)
        await asyncio.to_thread(child.kill)

    async def _becomes_ready(self, watched: Watched, ended: asyncio.Task[None]) -> bool:
        """Wait until the child is ready; return False if it ends before. After the time-out, stop it and raise
        NotReady."""
        launch = watched.member.launch
        deadline = time.monotonic() + launch.ready_timeout_s
        while not await asyncio.to_thread(launch.ready):
            await asyncio.wait({ended}, timeout=PROBE_EVERY_S)
            if ended.done():
                return False
            if watched.member.must_be_ready and time.monotonic() > deadline:
                assert watched.child is not None
                await asyncio.to_thread(watched.child.stop)
                raise watched.child.lateness()
        return not ended.done()

    async def _stop_all(self, all_: Iterable[Watched]) -> None:
        """Stop tier by tier, the highest first; members of one tier concurrently."""
        all_ = list(all_)
        for tier in sorted({watched.member.tier for watched in all_}, reverse=True):
            await asyncio.gather(*(self._stop(watched) for watched in all_ if watched.member.tier == tier))

    async def _stop(self, watched: Watched) -> None:
        if watched.child is None or watched.state in (ChildState.FAILED, ChildState.DONE):
            return
        status = await asyncio.to_thread(watched.child.stop)
        if status > 0 and status not in CLEAN_EXITS:  # the status of a killed process means nothing
            watched.error = watched.child.death()
        self._change(watched, ChildState.STOPPED)

    def _change(self, watched: Watched, state: ChildState) -> None:
        watched.state, watched.since = state, time.time()
        if state is ChildState.READY:
            watched.ready_at = time.monotonic()
            self._worked.add(watched.name)
        if state in SATISFIED:
            watched.satisfied.set()
        self._on_change(watched)


def _with_cause(watched: Watched, death: EmbeddedError) -> EmbeddedError:
    return death if watched.child is None else watched.child.with_cause(death)


async def _room(folder: Path) -> None:
    """Return when the folder's disk is no longer full."""
    while await asyncio.to_thread(lacks_room, folder):  # noqa: ASYNC110 - there is no event for free disk space
        await asyncio.sleep(ROOM_EVERY_S)


async def _end(child: Child) -> None:
    """Return when the process has ended."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(child.pid)
    try:
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
