"""`turnlog demo`: run the whole loop on this machine, then replay it, write the report and judge the run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from turnlog.consumers.replay.verify import run as replay
from turnlog.infra.embedded import NotUp
from turnlog.infra.embedded.up import down, up
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.terminal import Terminal
from turnlog.names import ExitStatus
from turnlog.sandbox_settings import SandboxSettings
from turnlog.settings import RunSettings, Settings, override_settings
from turnlog.verbs.report import JUDGED_FROM, Measured, RunReport, gather, plot_rewards, store, summary
from turnlog.verbs.run_loop import Display, beside, curve, stop_at_signal, until_trained
from turnlog.verbs.verb import endpoint_lines

PLOT = "reward.png"
SCREEN = "screen.svg"
"""Picture of the live display at its end, with the summary."""
Prepare = Callable[[Settings], Settings]
Unisolated = Callable[[SandboxSettings], Awaitable[str]]
"""Function that returns the reason why sandboxes cannot isolate on this machine; empty if they can."""


def demo(
    settings: Settings,
    prepare: Prepare,
    unisolated: Unisolated,
    *,
    steps: int | None,
    engines: int | None,
    trainer: Path | None = None,
) -> int:
    """Run everything. Return 0 only if the reward rose, the token accounting balances, every version was acknowledged
    and the replay is identical.

    `prepare` makes the model folder. `trainer` is a Python program that trains instead of the Megatron trainer. No
    process that this starts survives it, not even after Ctrl-C; a run that is up already is not touched. Raises
    AlreadyUp, AlreadyFed.
    """
    console = Terminal()
    settings = demo_settings(settings, steps, engines, trainer)
    measured = Measured()
    directory = Path(settings.run.directory)
    console.print(f"run {settings.run.id}, files in {directory}", style="bold")
    settings = run_verb(runnable_here(settings, unisolated, console))
    with _phase(measured, "model"), console.status("creating the tiny model (importing torch takes a few seconds)"):
        settings = prepare(settings)
    started = False  # a failed `up` stops what it started; a run that was up before must stay up
    try:
        with _phase(measured, "servers"):
            found = up(settings, attached=True, say=lambda line: console.print(f"  {line}", highlight=False))
            console.print(*(f"  {line}" for line in endpoint_lines(found)), sep="\n", highlight=False)
        started = True
        report = run_verb(_run_and_report(settings, console, measured, trainer))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("interrupted; stopping everything")
        return ExitStatus.INTERRUPTED
    finally:
        if started:
            with contextlib.suppress(NotUp):  # the supervisor died
                down(settings, say=lambda line: console.print(f"  {line}", highlight=False))
    _say(report, directory, console)
    return ExitStatus.DIFFERS if report.failures else ExitStatus.DONE


def demo_settings(settings: Settings, steps: int | None, engines: int | None, trainer: Path | None = None) -> Settings:
    """Return settings with a new run id, unless one was given, with the requested numbers of steps and engines, and
    with an external trainer if it is a program. Raises SettingsError."""
    if settings.run == RunSettings():
        run_id = time.strftime("demo-%Y%m%d-%H%M%S")
        settings = dataclasses.replace(settings, run=RunSettings(id=run_id, directory=f"runs/{run_id}"))
    if steps is not None:
        settings = override_settings(settings, {"feeder": {"draws": steps}}, {}, source="--steps")
    if engines is not None:
        settings = override_settings(settings, {"engine": {"count": engines}}, {}, source="--engines")
    if trainer is not None:
        settings = override_settings(settings, {"trainer": {"kind": "external"}}, {}, source="--trainer")
    return settings


async def runnable_here(settings: Settings, unisolated: Unisolated, console: Terminal) -> Settings:
    """Set [sandbox] allow_unisolated if no sandbox can isolate on this machine, and print a warning. This is acceptable
    because all tool calls of a demo come from its own model (arithmetic, unless another environment is set). The report
    and the tool results state it, too."""
    why = await unisolated(settings.sandbox)
    if not why:
        return settings
    console.print("TOOLS RUN WITHOUT ISOLATION", style="bold red", end=" ")
    console.print(
        f"on this machine: the demo sets [sandbox] allow_unisolated = true for the calls of its own model. {why}",
        soft_wrap=True,
    )
    return dataclasses.replace(settings, sandbox=dataclasses.replace(settings.sandbox, allow_unisolated=True))


async def _run_and_report(settings: Settings, console: Terminal, measured: Measured, trainer: Path | None) -> RunReport:
    """Run the loop, then replay and report while the servers still run."""
    display = Display(settings, console)
    began = time.monotonic()
    async with beside(_mean_load(measured)):
        await until_trained(settings, display, trainer)
    total = time.monotonic() - began
    loop = display.loop_seconds()
    measured.seconds |= {"first weights": total - loop, "loop": loop}
    stop_at_signal(asyncio.current_task())
    async with open_role("demo", settings) as role:
        with _phase(measured, "replay"), console.status("replaying the topics"):
            verdict = await replay(role)
        report = await gather(role, verdict, measured)
    _save_screen(display, report, Path(settings.run.directory))
    return report


def _save_screen(display: Display, report: RunReport, directory: Path) -> None:
    display.phase = "done"
    recorder = Terminal(record=True, width=110, file=io.StringIO(), force_terminal=True)
    recorder.print(display.render(), summary(report))
    recorder.save_svg(str(directory / SCREEN), title="make demo")


async def _mean_load(measured: Measured, every_s: float = 2.0) -> None:
    """Measure the mean of the one-minute load average while the loop runs."""
    samples: list[float] = []
    while True:
        samples.append(os.getloadavg()[0])
        measured.load_average = round(sum(samples) / len(samples), 2)
        await asyncio.sleep(every_s)


@contextlib.contextmanager
def _phase(measured: Measured, name: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        measured.seconds[name] = time.monotonic() - began


def _say(report: RunReport, directory: Path, console: Terminal) -> None:
    body = report.body
    path = store(report, directory)
    if body["rewards"]:
        plot_rewards(body["rewards"], directory / PLOT, title=f"turnlog demo, run {body['run']}")
    console.print(summary(report))
    console.print(f"reward  {curve(body['rewards'])}", highlight=False)
    console.print(f"files   {path}, {PLOT}, {SCREEN}, logs/ next to it", highlight=False, soft_wrap=True)
    console.print(
        f"next    turnlog --run {body['run']} dashboard          show the run in the browser until Ctrl-C",
        f"        turnlog --run {body['run']} log books          sampled = trained + masked",
        f"        turnlog --run {body['run']} replay --verify    fold the topics again and compare",
        f"        turnlog --run {body['run']} up                 start servers and roles of this run again",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )
    for failure in report.failures:
        console.print(f"FAILED: {failure}", style="red")
    if not report.failures:
        judged = "the books balance, every version was acknowledged, replay is identical"
        if body["reward_rise_wanted"]:
            short = f"done; with fewer than {JUDGED_FROM} steps the reward is not judged"
            judged = f"the reward rose, {judged}" if body["steps"] >= JUDGED_FROM else short
        console.print(judged, style="green")
