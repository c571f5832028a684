"""Verbs that start and stop: demo, recipe, warm-start, up, down, supervise."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from turnlog.names import ExitStatus
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, endpoint_lines


def demo_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog demo`."""
    verb.add_argument("--steps", type=int, default=None, metavar="N", help="rollout batches to train (default 30)")
    verb.add_argument("--engines", type=int, default=None, metavar="N", help="number of engines (default 1)")
    verb.add_argument(
        "--trainer",
        type=Path,
        default=None,
        metavar="FILE",
        help="a Python program that trains instead of turnlog's trainer, such as examples/trl_trainer.py",
    )


def _demo(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.sandbox_workers.pooling.worker_pools import find_isolation_failure
    from turnlog.trainer.tiny_policy import initial_weights, prepare_model
    from turnlog.verbs.demo import demo

    def prepare(before: Settings) -> Settings:
        prepared = prepare_model(before)
        if arguments.trainer is not None:
            initial_weights(prepared)  # only turnlog's own trainer can make them
        return prepared

    return demo(
        settings,
        prepare,
        find_isolation_failure,
        steps=arguments.steps,
        engines=arguments.engines,
        trainer=arguments.trainer,
    )


def recipe_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the action `new` of `turnlog recipe`."""
    new = verb.add_subparsers(dest="action", required=True, metavar="ACTION").add_parser(
        "new",
        help="write the package",
        description="Write a package with a dataset, an environment, a verifier and a test.",
    )
    new.add_argument("name", metavar="NAME", help="name of the recipe and its folder, such as my-game")
    new.add_argument(
        "--into", type=Path, default=Path(), metavar="DIR", help="create the folder in DIR (default: here)"
    )


def _recipe(_: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles.terminal import say
    from turnlog.plugins.recipes.new import create, next_steps

    folder = create(arguments.name, arguments.into)
    say(f"created {folder}; next:", *(f"  {line}" for line in next_steps(folder)))
    return ExitStatus.DONE


def warm_start_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog warm-start`."""
    verb.add_argument("--out", type=Path, metavar="DIR", help="copy the model to DIR, unless it is already there")


def _warm_start(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.trainer.tiny_policy import copy_model, initial_weights, prepare_model

    made = initial_weights(prepare_model(settings))
    print(copy_model(made, arguments.out) if arguments.out else made)
    return 0


def up_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog up`."""
    add_json(verb, "print the endpoints as JSON on standard output")


def _up(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.embedded.up import up
    from turnlog.infra.roles.terminal import aside, say_json
    from turnlog.trainer.tiny_policy import prepare_model

    found = up(prepare_model(settings), say=aside)
    aside(*endpoint_lines(found))
    if arguments.json:
        say_json(dataclasses.asdict(found))
    return 0


def _down(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.infra.embedded.up import down
    from turnlog.infra.roles.terminal import aside

    down(settings, say=aside)
    return 0


def _supervise(settings: Settings, _: argparse.Namespace) -> int:
    from turnlog.infra.embedded.up import supervise

    return supervise(settings)


VERBS = (
    Verb("demo", "run the whole loop with a live display, and judge the result", _demo, demo_arguments),
    Verb("recipe", "create your own recipe: a package that works as generated", _recipe, recipe_arguments),
    Verb("warm-start", "create the recipe's tiny model by supervised fine-tuning", _warm_start, warm_start_arguments),
    Verb("up", "start servers and roles, leave them running, print the endpoints", _up, up_arguments),
    Verb("down", "stop what `up` started", _down),
    Verb("supervise", "run the servers and roles of a run in the foreground", _supervise),
)
