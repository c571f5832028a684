"""Roles that export the log to other programs: trace, track, alerts."""

from __future__ import annotations

import argparse

from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_source

TRACE_EPILOG = """\
Exports sessions (with turns, engine calls, tool calls and sandboxes), steps and weights as OTLP over HTTP. A session is
exported when it is over. Progress is committed in a consumer group; after a kill, some spans are sent again with the
same ids.

Examples:
  turnlog role trace --to http://localhost:4318                  follow the run until it is stopped
  TURNLOG_TRACE_RATIO=0.1 turnlog role trace --to http://localhost:4318 --until-end
  turnlog role trace --from archive                              if the topics are gone; send to [trace] url
"""


def trace_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog role trace`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = TRACE_EPILOG
    verb.add_argument("--to", default="", metavar="URL", help="collector URL without /v1/traces (default [trace] url)")
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log (default: follow)")
    add_source(verb)


def _trace(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.plugins.exporters.tracing import command

    return command(settings, arguments)


TRACK_EPILOG = """\
Reads train-steps and only writes files: those that TensorBoard shows, and those that `wandb sync` uploads when you call
it. Progress is read from the files, so that a restart after a kill writes no step twice and leaves none out. If a later
generation of the trainer repeats a step, it replaces the first one. docs/outlets.md lists the names of the curves.

Examples:
  turnlog role track --to tensorboard=curves             follow the run into curves/RUN
  turnlog role track --to tensorboard=curves --to wandb=curves-wandb --until-end
  turnlog role track --to wandb=curves-wandb --from archive      if the topics are gone
"""


def track_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog role track`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = TRACK_EPILOG
    verb.add_argument(
        "--to",
        action="append",
        required=True,
        metavar="KIND=DIR",
        help="tensorboard or wandb, and a folder; may be repeated",
    )
    verb.add_argument("--until-end", action="store_true", help="stop at the current end of the log (default: follow)")
    add_source(verb)


def _track(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.plugins.exporters.tracking import command

    return command(settings, arguments)


def _alerts(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.plugins.exporters.alerts import command

    return command(settings, arguments)


VERBS = (
    Verb("trace", "send the spans of a run to an OpenTelemetry collector", _trace, trace_arguments, under="role"),
    Verb("track", "write curves of a run for TensorBoard or Weights & Biases", _track, track_arguments, under="role"),
    Verb("alerts", "send the alerts of a run by mail, chat or webhook ([alerts] urls)", _alerts, under="role"),
)
