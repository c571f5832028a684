"""`turnlog run`: write RunConfigured, feed tasks, show the loop until the draws of [feeder] are trained.

ConductError
├── RoleFailed      a role of the run gave up; names its log
└── NotEveryDraw    the trainer ended before all draws were trained
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from turnlog.consumers.display import WATCHED, Display
from turnlog.infra.embedded.plan import ROLE_START_S, answers, role_liveness
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Launch
from turnlog.infra.embedded.run_files import LOGS, SETTINGS
from turnlog.infra.embedded.supervisor import Member, State, Supervisor
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.history import all_events, partitions
from turnlog.infra.roles.role import Role, opened
from turnlog.infra.roles.runs import configure
from turnlog.infra.roles.terminal import Terminal
from turnlog.names import ExitStatus
from turnlog.schemas.errors import UndecodableRecord
from turnlog.schemas.events import StepCompleted
from turnlog.schemas.topics import STEPS
from turnlog.settings import Settings

LOOK_EVERY_S = 0.5
POLL_S = 0.2


class ConductError(Exception):
    """Base of the tree above."""


class RoleFailed(ConductError):
    """A role died too often."""


class NotEveryDraw(ConductError):
    """The trainer is done, the draws are not."""


def conduct(settings: Settings) -> int:
    """Feed and show a run that is up; 0 when every draw was trained."""
    console = Terminal()
    display = Display(settings, console)
    try:
        asyncio.run(run(settings, display))
    except asyncio.CancelledError:
        console.print("interrupted: the servers go on (`turnlog down` stops them); `turnlog run` continues")
        return ExitStatus.INTERRUPTED
    console.print(f"{len(display.picture.steps)} steps trained; next: turnlog --run {settings.run.id} replay --verify")
    return 0


async def run(settings: Settings, display: Display) -> None:
    """Configure the run, feed it, return when every draw is trained and its weights are acknowledged. Raises OtherRun,
    OtherSettings, ConductError."""
    async with opened("run", settings) as role:
        stop_at_signal(asyncio.current_task())
        await configure(role)
        async with display.shown(), _fed(settings), beside(_watch(role, display)) as watching:
            display.phase = "waiting for the first weights"
            while not await _over(role, display):
                await asyncio.wait({watching}, timeout=LOOK_EVERY_S)  # states of processes are files, not events
                if watching.done():
                    watching.result()
                display.phase = "looping" if display.picture.sessions_started else display.phase


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run `work` while the block runs; cancelled at its end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def stop_at_signal(task: asyncio.Task[None] | None) -> None:
    """SIGINT and SIGTERM cancel `task`, so that every context is left in order."""
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


@contextlib.asynccontextmanager
async def _fed(settings: Settings) -> AsyncIterator[None]:
    """A feeder beside us, restarted when it dies, stopped at the end."""
    directory = Path(settings.run.directory)
    health = f"http://{HOST}:{free_ports(1)[0]}"
    launch = Launch(
        name="feeder-0",
        argv=(sys.executable, "-m", "turnlog.cli", "--settings", str(directory / SETTINGS), "feeder"),
        log=directory / LOGS / "feeder-0.log",
        env={"TURNLOG_INSTANCE": "feeder-0", "TURNLOG_HEALTH_PORT": health.rpartition(":")[2], "OMP_NUM_THREADS": "1"},
        ready=lambda: answers(f"{health}/readyz"),
        ready_timeout_s=ROLE_START_S,
        liveness=role_liveness(health, settings.liveness),
    )
    supervisor = Supervisor([Member(launch=launch, essential=True, must_be_ready=False)], lambda _: None)
    task = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        supervisor.stopping.set()
        await task


async def _watch(role: Role, display: Display) -> None:
    starts = await role.log.start_offsets([partition for topic in WATCHED for partition in partitions(role, topic)])
    async with role.log.reader(patient=True) as reader:
        reader.assign(starts)
        while True:
            for record in await reader.poll(max_records=2000, timeout_s=POLL_S):
                try:
                    event = await role.events.decode(record)
                except UndecodableRecord:
                    continue  # the role that owns the topic parks it
                if event.run_id == role.settings.run.id:
                    display.picture.apply(event)
            display.refreshed()


async def _over(role: Role, display: Display) -> bool:
    """Every draw trained, every engine on the newest version. Raises RoleFailed, NotEveryDraw."""
    settings, picture = role.settings, display.picture
    drawn = len({step.draw_index for step in picture.steps.values()})
    loaded = all(version >= picture.version for version in picture.engines.values())
    if drawn >= settings.feeder.draws and picture.published_after(max(picture.steps)) and loaded:
        return True
    for child in status_processes(settings):
        if child["state"] == State.FAILED:
            raise RoleFailed(f"{child['name']}: {child['error']}; log {child['log']}")
        if child["name"].startswith("trainer") and child["state"] == State.DONE and drawn < settings.feeder.draws:
            trained = await _trained(role)  # the picture is still folding what was there before us
            if trained < settings.feeder.draws:
                raise NotEveryDraw(
                    f"the trainer ended after {trained} of {settings.feeder.draws} draws; log {child['log']}"
                )
        waiting = child["waiting"]
        if waiting and not picture.sessions_started:
            display.phase = f"{child['name']}: {waiting}"
    return False


async def _trained(role: Role) -> int:
    """Draws with a step on the log."""
    return len({step.draw_index for step in await all_events(role, STEPS) if isinstance(step, StepCompleted)})


__all__ = ["conduct", "run", "stop_at_signal"]
