"""`turnlog env`: build the images of a source's tasks, and check the tasks, before training on them."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json

ENV_EPILOG = """\
Examples:
  turnlog env check calc                              the tasks that the recipe writes itself
  turnlog env check 'harbor path=tasks'               every task folder in tasks/
  turnlog env check calc --dataset tasks.jsonl        the tasks of a file
  turnlog env build 'harbor path=tasks'               the images of every task folder in tasks/
"""
CHECK_EPILOG = """\
Each task is tried twice, as in training but without a model: once by its own solution, which must be rewarded with 1,
and once by an agent that does nothing, which must be rewarded with 0 or less. Neither Kafka nor an engine is needed;
sandboxes are started as [sandbox] says.

Examples:
  turnlog env check calc
  turnlog env check 'harbor path=tasks' --tasks 50 --at-once 4
  turnlog env check 'verifiers env=my_env python=venv/bin/python' --empty-only

Exit status: 0 if every task behaves so, 1 if one does not or has no solution, 2 if the source cannot be used.
"""
BUILD_EPILOG = """\
The container engine is found as `docker` finds it: DOCKER_HOST says where it listens. An image that is there is neither
pulled nor built again. For backend=bubblewrap, images are also unpacked into [sandbox] image_folder.

Examples:
  turnlog env build 'harbor path=tasks'
  turnlog env build 'harbor path=tasks' --network host

Exit status: 0 if every image is there or the source has none, 2 if one cannot be pulled or built, or no engine answers.
"""


def _env_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = ENV_EPILOG
    actions = verb.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser(
        "check",
        help="run the solution and an empty agent on every task",
        description="Run the solution of every task and an agent that does nothing, and compare their rewards.",
        epilog=CHECK_EPILOG,
    )
    _add_source(check)
    check.add_argument("--dataset", type=Path, metavar="FILE", help="tasks of this file (default: those of the source)")
    check.add_argument("--tasks", type=int, default=20, metavar="N", help="check the first N tasks (default 20)")
    check.add_argument("--at-once", type=int, default=0, metavar="N", help="tasks at a time (default: [sandbox] slots)")
    check.add_argument(
        "--empty-only", action="store_true", help="check only that an agent that does nothing is rewarded with 0"
    )
    add_json(check)
    build = actions.add_parser(
        "build",
        help="pull and build the images of every task",
        description="Pull and build the images of every task of a source, so that no call waits for one.",
        epilog=BUILD_EPILOG,
    )
    _add_source(build)
    build.add_argument(
        "--network", default="", metavar="NAME",
        help="network of builds, as of `docker build --network` (default: the engine's), such as host",
    )  # fmt: skip


def _add_source(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "source", metavar="SOURCE", nargs="?", default="",
        help="NAME or 'NAME key=value ...', as in [feeder] recipe (the default)",
    )  # fmt: skip


def _env(settings: Settings, arguments: argparse.Namespace) -> int:
    if arguments.action == "build":
        from turnlog.verbs.env_build import BuildOptions, build

        source = arguments.source or settings.feeder.recipe
        return build(settings, BuildOptions(source=source, network=arguments.network))
    from turnlog.infra.roles.ending import run_verb
    from turnlog.verbs.env_check import CheckOptions, check

    options = CheckOptions(
        source=arguments.source or settings.feeder.recipe,
        dataset=arguments.dataset,
        tasks=arguments.tasks,
        at_once=arguments.at_once or settings.sandbox.slots,
        empty_only=arguments.empty_only,
        as_json=arguments.json,
    )
    return run_verb(check(settings, options))


VERBS = (Verb("env", "check tasks by their solutions, and build their images", _env, _env_arguments),)
