"""Roles that export the log to other programs: trace, track, alerts."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from turnlog.infra.roles.ending import run_verb
from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_source

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from turnlog.infra.roles.role import Role
    from turnlog.plugins.exporters.tracing import Collector

TRACE_EPILOG = """\
Exports sessions (with turns, engine calls, tool calls and sandboxes), steps and weights as OTLP over HTTP. A session is
exported when it is over. Progress is committed in a consumer group; after a kill, some spans are sent again with the
same ids.

Examples:
  turnlog role trace --to http://localhost:4318                  follow the run until it is stopped
  TURNLOG_TRACE_RATIO=0.1 turnlog role trace --to http://localhost:4318 --until-end
  turnlog role trace --from archive                              if the topics are gone; send to [trace] url
"""


def _trace_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = TRACE_EPILOG
    verb.add_argument("--to", default="", metavar="URL", help="collector URL without /v1/traces (default [trace] url)")
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log (default: follow)")
    add_source(verb)


def _trace(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles.loop import repeat
    from turnlog.infra.roles.runs import serve
    from turnlog.plugins.exporters.tracing import collector_of, tracing

    collector = collector_of(settings, arguments.to)
    if arguments.source == "archive" or arguments.until_end:
        return run_verb(_trace_once(settings, collector, archive=arguments.source == "archive"))

    async def main(role: Role) -> None:
        async with tracing(role, collector) as tracer:
            await repeat(role, tracer.turn)

    return serve("trace", main, settings)


async def _trace_once(settings: Settings, collector: Collector, *, archive: bool) -> int:
    from turnlog.consumers.replay.source import recorded_run
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say
    from turnlog.plugins.exporters.tracing import tracing

    async with open_role("trace", settings, archive=archive) as role:
        await recorded_run(role)  # raises NothingToReplay: the log is of another run
        async with tracing(role, collector, marks=not archive) as tracer:
            for _ in range(2):  # after the second, everything that precedes a session's end has been read
                await tracer.turn()
    collector.close()
    say(f"{tracer.exported} spans; {tracer.open_sessions} sessions are not over and were not exported")
    return ExitStatus.DONE


TRACK_EPILOG = """\
Reads train-steps and only writes files: those that TensorBoard shows, and those that `wandb sync` uploads when you call
it. Progress is read from the files, so that a restart after a kill writes no step twice and leaves none out. If a later
generation of the trainer repeats a step, it replaces the first one. docs/outlets.md lists the names of the curves.

Examples:
  turnlog role track --to tensorboard=curves             follow the run into curves/RUN
  turnlog role track --to tensorboard=curves --to wandb=curves-wandb --until-end
  turnlog role track --to wandb=curves-wandb --from archive      if the topics are gone
"""


def _track_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = TRACK_EPILOG
    verb.add_argument(
        "--to", action="append", required=True, metavar="KIND=DIR",
        help="tensorboard or wandb, and a folder; may be repeated",
    )  # fmt: skip
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log (default: follow)")
    add_source(verb)


def _track(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles.runs import serve
    from turnlog.plugins.exporters.tracking import outlets, track

    wanted = outlets(arguments.to)
    if arguments.source == "archive" or arguments.until_end:
        return run_verb(_track_once(settings, wanted, archive=arguments.source == "archive"))

    async def main(role: Role) -> None:
        await track(role, wanted, until_end=False)

    return serve("track", main, settings)


async def _track_once(settings: Settings, wanted: Sequence[tuple[str, Path]], *, archive: bool) -> int:
    from turnlog.consumers.replay.source import recorded_run
    from turnlog.infra.roles.role import open_role
    from turnlog.infra.roles.terminal import say
    from turnlog.plugins.exporters.tracking import track

    async with open_role("track", settings, archive=archive) as role:
        await recorded_run(role)  # raises NothingToReplay: the log is of another run
        steps = await track(role, wanted, until_end=True)
    say(f"{steps} steps: {', '.join(f'{kind} {folder}' for kind, folder in wanted)}")
    return ExitStatus.DONE


def _alerts(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.infra.roles.runs import serve
    from turnlog.plugins.exporters.alerts import targets, tell

    found = targets(settings)

    async def main(role: Role) -> None:
        await tell(role, found)

    return serve("alerts", main, settings)


VERBS = (
    Verb("trace", "send the spans of a run to an OpenTelemetry collector", _trace, _trace_arguments, under="role"),
    Verb("track", "write curves of a run for TensorBoard or Weights & Biases", _track, _track_arguments, under="role"),
    Verb("alerts", "send the alerts of a run by mail, chat or webhook ([alerts] urls)", _alerts, under="role"),
)
