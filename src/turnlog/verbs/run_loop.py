"""`turnlog run`: configure the run, feed tasks, and show the loop until the rollout batches of [feeder] are trained.
`turnlog run configure` only configures, for feeders that run on their own.

The display is folded from the run's topics and drawn with rich: phase, steps, reward curve, tokens/s, lag, engines,
tools.

AlreadyFed          another process feeds the run
UnfinishedRun
├── FatalRoleFailure      a role of the run failed for good; the message names its log
└── NotEveryDraw    the trainer ended before all rollout batches were trained
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnlog.infra.embedded.plan import ROLE_START_S, answers, role_liveness
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Launch
from turnlog.infra.embedded.supervisor import ChildState, Member, Supervisor
from turnlog.infra.embedded.up import status_processes
from turnlog.infra.history import all_events, partitions
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, RunPhase, open_role
from turnlog.infra.roles.runs import Begun, RunClosed, begin
from turnlog.infra.roles.terminal import Terminal, say
from turnlog.infra.run_folder import LOGS, SETTINGS, lacks_room, lock_file, private_folder, verb_line
from turnlog.infra.topics_admin import WARNING, apply, check
from turnlog.names import ExitStatus
from turnlog.processors.core.views.fleet import NO_WEIGHTS
from turnlog.processors.core.views.progress import ANNOUNCED, RunView
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.events import StepCompleted
from turnlog.schemas.topics import STEPS
from turnlog.settings import Settings

WATCHED = (topics.RUNS, topics.SESSIONS, topics.TURNS, topics.TOOL_RESULTS, topics.BATCHES, topics.STEPS,
           topics.WEIGHTS, topics.ENGINES, topics.GROUP_REQUESTS, topics.GROUP_SCORES)  # fmt: skip


BARS = " ▁▂▃▄▅▆▇█"
REFRESH_PER_S = 4


def curve(values: list[float], width: int = 60) -> str:
    """Draw values in [0, 1] as a line of bars: the newest `width` of them."""
    return "".join(BARS[round(min(max(value, 0.0), 1.0) * (len(BARS) - 1))] for value in values[-width:])


class Display:
    """The live display. `phase` may be set by the caller. If the console is not a terminal, one line per step is
    printed."""

    def __init__(self, settings: Settings, console: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        self.phase = "starting"
        self.picture = RunView()
        self._run_id = settings.run.id
        self._wanted = settings.feeder.draws * settings.batcher.updates_per_draw
        self._console = console
        self._clock = clock
        self._loop_began: float | None = None
        self._said = 0

    @asynccontextmanager
    async def show_live(self) -> AsyncIterator[Display]:
        """Draw until the block ends."""
        if not self._console.is_terminal:
            yield self
            self.show_changes()
            return
        with Live(get_renderable=self.render, console=self._console, refresh_per_second=REFRESH_PER_S):
            yield self

    def show_changes(self) -> None:
        """Show a changed picture. If the console is not a terminal, print each new step once."""
        if self._loop_began is None and self.picture.sessions_started:
            self._loop_began = self._clock()
        if self._console.is_terminal:
            return
        for index in sorted(self.picture.steps)[self._said :]:
            step = self.picture.steps[index]
            self._said += 1
            self._console.print(
                f"step {self._said:3d}/{self._wanted}  reward {step.reward_mean:.3f}  loss {step.loss:+.4f}  "
                f"gap {step.logprob_gap_max:.0e}  lag {step.lag_max}  version {self.picture.weights.version}  "
                f"{self._tokens_per_s():.0f} tok/s"
            )

    def render(self) -> RenderableType:
        """Return the whole panel."""
        picture = self.picture
        done = len(picture.steps)
        rewards = picture.rewards
        facts = Table.grid(padding=(0, 2))
        facts.add_row("phase", Text(self.phase, style="bold"))
        facts.add_row("steps", Group(Text(f"{done}/{self._wanted}  {self._time_left()}"),
                                     ProgressBar(total=self._wanted, completed=done, width=40)))  # fmt: skip
        facts.add_row("reward", Text(f"{curve(rewards)} {rewards[-1]:.3f}" if rewards else "-", style="green"))
        facts.add_row("sessions", f"{picture.sessions_started} started, {_counts(picture.outcomes)}")
        facts.add_row("turns", f"{picture.turns}  ({picture.output_tokens:,} tokens, {self._tokens_per_s():.0f} tok/s)")
        facts.add_row("tool calls", _counts(Counter(picture.tool_calls.values())))
        announced = ", announced" if picture.weights.newest_state == ANNOUNCED else ""
        facts.add_row("weights", f"version {picture.weights.version}{announced}, lag {picture.lag}")
        engines = ", ".join(
            f"{name}: {_serving(version)}" for name, version in sorted(picture.fleet.acknowledged_versions().items())
        )
        facts.add_row("engines", engines or "-")
        return Panel(facts, title=Text(f"turnlog · run {self._run_id}"))

    def loop_seconds(self) -> float:
        """Return the seconds since the first session started."""
        return 0.0 if self._loop_began is None else self._clock() - self._loop_began

    def _tokens_per_s(self) -> float:
        if self._loop_began is None:
            return 0.0
        return self.picture.output_tokens / max(self._clock() - self._loop_began, 1e-9)

    def _time_left(self) -> str:
        done = len(self.picture.steps)
        if self._loop_began is None or not done:
            return ""
        seconds = (self._clock() - self._loop_began) / done * (self._wanted - done)
        return f"about {seconds:.0f} s left"


def _serving(version: int) -> str:
    return {NO_WEIGHTS: "gone", -1: "no weights yet"}.get(version, f"version {version}")


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "-"


FEEDER_LOCK = "feeder.lock"
"""Lock file in the run's directory, held by the process that feeds the run."""
LOOK_EVERY_S = 0.5
FIRST_PHASE = "waiting for the first weights"
POLL_S = 0.2


class UnfinishedRun(Exception):
    """Base of the tree above."""


class FatalRoleFailure(UnfinishedRun):
    """A role died too often."""


class AlreadyFed(Exception):
    """The run is fed by another process already. Two feeders would fence each other until both had failed. Remedy: wait
    for the other to end."""


class NotEveryDraw(UnfinishedRun):
    """The trainer ended, but not all rollout batches are trained."""


def command(settings: Settings) -> int:
    """Feed and show a run that is up. Return 0 if every rollout batch was trained."""
    console = Terminal()
    display = Display(settings, console)
    try:
        asyncio.run(until_trained(settings, display))
    except asyncio.CancelledError:
        again, stop = (verb_line(Path(settings.run.directory), verb) for verb in ("run", "down"))
        console.print(f"interrupted: the servers still run (`{stop}` stops them); `{again}` continues", soft_wrap=True)
        return ExitStatus.INTERRUPTED
    again = verb_line(Path(settings.run.directory), "replay --verify")
    console.print(f"{len(display.picture.steps)} steps trained; next: {again}")
    return 0


def configure_command(settings: Settings) -> int:
    """Prepare the servers for a run before any role starts. A second call finds that done and says so. It registers
    schemas and makes the bucket even if roles may not. Return 1 if an existing topic differs from the catalogue. Raises
    what `prepare_run` raises."""
    own = dataclasses.replace(
        settings,
        registry=dataclasses.replace(settings.registry, auto_register=True),
        store=dataclasses.replace(settings.store, make_bucket=True),
    )

    async def run() -> int:
        async with open_role("run", own) as role:
            await role.blobs.names("none/")
            done = await prepare_run(role)
        say(*done.to_lines())
        return ExitStatus.DIFFERS if done.wrong else ExitStatus.DONE

    return run_verb(run())


@dataclass(frozen=True, slots=True)
class PreparationResult:
    """Result of `prepare_run`."""

    created: tuple[str, ...]
    """Names of created topics."""
    problems: tuple[str, ...]
    """Problems of topics that existed before."""
    begun: Begun

    @property
    def wrong(self) -> bool:
        """Whether a topic must be corrected by hand."""
        return any(not problem.startswith(WARNING) for problem in self.problems)

    def to_lines(self) -> list[str]:
        """Return the result as lines of text."""
        run, lines = self.begun.run, list(self.problems)
        if self.created:
            lines.append(f"created {len(self.created)} topics: {', '.join(self.created)}")
        if self.begun.recorded:
            lines.append(
                f"run {run.run_id!r} is configured: fold version {run.fold_version}, settings {run.settings_sha256}"
            )
        for key, (was, now) in self.begun.planned.items():
            lines.append(f"{key} {now}" if was is None else f"{key} {was} becomes {now}")
        if not (self.created or self.begun.recorded or self.begun.planned):
            lines.append(f"nothing to do: run {run.run_id!r} is configured with these settings, and its topics exist")
        return lines


async def prepare_run(role: Role) -> PreparationResult:
    """Create or check topics, and configure the run or compare its configuration. Schemas were registered when `role`
    was opened. Raises TopicMismatch, OtherRun, OtherSettings, LogUnavailable."""
    created = await apply(role.log, role.settings)
    begun = await begin(role)
    return PreparationResult(tuple(created), tuple(await check(role.log, role.settings)), begun)


async def until_trained(settings: Settings, display: Display, trainer: Path | None = None) -> None:
    """Configure the run and feed it. Return once every rollout batch is trained and its weights are stored and
    acknowledged. `trainer` is a Python program that trains the run; None: its trainer runs elsewhere. Raises
    AlreadyFed, OtherRun, OtherSettings, UnfinishedRun."""
    async with open_role("run", settings) as role:
        stop_at_signal(asyncio.current_task())
        with alone(Path(settings.run.directory)):
            await prepare_run(role)
            await _feed(role, display, trainer)


def alone(directory: Path) -> contextlib.AbstractContextManager[object]:
    """Hold the lock that allows feeding the run. Raises AlreadyFed."""
    private_folder(directory)
    return lock_file(
        directory / FEEDER_LOCK,
        AlreadyFed(
            f"another `turnlog run` or `turnlog demo` already feeds {directory} and continues: "
            f"`{verb_line(directory, 'status --watch')}` shows its progress"
        ),
    )


async def _feed(role: Role, display: Display, trainer: Path | None) -> None:
    """Feed the run until it is over. Raises UnfinishedRun."""
    members = [_feeder_member(role.settings), *([] if trainer is None else [trainer_member(role.settings, trainer)])]
    supervisor = Supervisor(members, lambda _: None)
    async with display.show_live(), _running(supervisor), beside(_watch(role, display)) as watching:
        display.phase = FIRST_PHASE
        while not await _over(role, display, supervisor):
            await asyncio.wait({watching}, timeout=LOOK_EVERY_S)  # polled: process states are files, not events
            if watching.done():
                watching.result()
            if display.picture.phase == RunPhase.PAUSED:
                display.phase = "paused"
            elif full := lacks_room(Path(role.settings.run.directory)):
                display.phase = f"paused: {full}"
            elif display.picture.sessions_started:
                display.phase = "looping"
            elif display.phase.startswith("paused"):
                display.phase = FIRST_PHASE


@contextlib.asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run `work` while the block runs, then cancel it."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def stop_at_signal(task: asyncio.Task[None] | None) -> None:
    """Cancel `task` on SIGINT and SIGTERM, so that every context exits in order."""
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


def _feeder_member(settings: Settings) -> Member:
    directory = Path(settings.run.directory)
    health = f"http://{HOST}:{free_ports(1)[0]}"
    launch = Launch(
        name="feeder-0",
        argv=(sys.executable, "-m", "turnlog.cli", "--settings", str(directory / SETTINGS), "role", "feeder"),
        log=directory / LOGS / "feeder-0.log",
        env={"TURNLOG_INSTANCE": "feeder-0", "TURNLOG_HEALTH_PORT": health.rpartition(":")[2], "OMP_NUM_THREADS": "1"},
        ready=lambda: answers(f"{health}/readyz"),
        ready_timeout_s=ROLE_START_S,
        liveness=role_liveness(health, settings.liveness),
    )
    return Member(launch=launch, must_be_ready=False)


def trainer_member(settings: Settings, program: Path) -> Member:
    """Return a program of the user's that trains the run, as docs/trainers.md describes."""
    directory = Path(settings.run.directory).absolute()
    launch = Launch(
        name="trainer-0",
        argv=(sys.executable, str(program)),
        log=directory / LOGS / "trainer-0.log",
        env={"TURNLOG_RUN_DIRECTORY": str(directory), "TURNLOG_INSTANCE": "trainer-0"},
        remedy=f"`TURNLOG_RUN_DIRECTORY={directory} python {program}` can be run by hand",
    )
    return Member(launch=launch, often=settings.liveness.deaths)


@contextlib.asynccontextmanager
async def _running(supervisor: Supervisor) -> AsyncIterator[None]:
    """Run the supervisor's members while the block runs. They are restarted if they die, and stopped at the end."""
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
                    continue  # the role that owns the topic dead-letters it
                if event.run_id == role.settings.run.id:
                    display.picture.apply(event)
            display.show_changes()


async def _over(role: Role, display: Display, supervisor: Supervisor) -> bool:
    """Return whether every rollout batch is trained, every engine has the newest version, and the last evaluation is
    scored. Raises FatalRoleFailure, NotEveryDraw, RunClosed."""
    settings, picture = role.settings, display.picture
    if picture.phase == RunPhase.CLOSED:
        raise RunClosed(f"run {settings.run.id!r} was closed; what it recorded can be read")
    if picture.is_over(settings.feeder.draws, settings.eval.every):
        return True
    drawn = picture.draws_trained
    own = [{**member.as_dict(), "waiting": ""} for member in supervisor.watched.values()]
    for child in [*status_processes(settings), *own]:
        if child["state"] == ChildState.FAILED:
            raise FatalRoleFailure(f"{child['name']}: {child['error']}; log {child['log']}")
        if child["name"].startswith("trainer") and child["state"] == ChildState.DONE and drawn < settings.feeder.draws:
            trained = await _count_trained(role)  # the picture may not have caught up with the log yet
            if trained < settings.feeder.draws:
                raise NotEveryDraw(
                    f"the trainer ended after {trained} of {settings.feeder.draws} draws; log {child['log']}"
                )
        waiting = child["waiting"]
        if waiting and not picture.sessions_started:
            display.phase = f"{child['name']}: {waiting}"
    return False


async def _count_trained(role: Role) -> int:
    """Return the number of rollout batches with a step on the log."""
    return len({step.draw_index for step in await all_events(role, STEPS) if isinstance(step, StepCompleted)})
