"""Verbs that report whether a run works: status, doctor, health."""

from __future__ import annotations

import argparse
import os

from turnlog.names import OPTIONAL_ROLES, TRAINING_ROLES
from turnlog.settings import Settings
from turnlog.verbs.verb import Verb, add_json, always


def _status_arguments(verb: argparse.ArgumentParser) -> None:
    add_json(verb)
    verb.add_argument(
        "--watch", type=float, nargs="?", const=2.0, default=0.0, metavar="S",
        help="refresh every S seconds (default 2); with --json, print one line each time",
    )  # fmt: skip
    verb.add_argument(
        "--health", default="", metavar="URL,...", help="health URLs of roles without a supervisor ([status] health)"
    )


def _status(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.status_page import show

    addresses = [address for address in arguments.health.split(",") if address]
    return show(settings, as_json=arguments.json, health=addresses, every_s=arguments.watch)


def _doctor_arguments(verb: argparse.ArgumentParser) -> None:
    add_json(verb)


def _doctor(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.doctor import command

    return command(settings, as_json=arguments.json)


def _health_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "role", choices=sorted((*TRAINING_ROLES, *OPTIONAL_ROLES)), metavar="NAME", help="a role, as in `turnlog role`"
    )
    question = verb.add_mutually_exclusive_group()
    question.add_argument("--ready", action="store_true", help="query whether it does its work (default)")
    question.add_argument("--live", action="store_true", help="query whether its loops make progress")
    verb.add_argument("--url", default="", help="its health endpoint (default: TURNLOG_HEALTH_HOST and _PORT)")
    verb.add_argument("--timeout", type=float, default=2.0, metavar="S", help="seconds to wait for it (default 2)")


def _health(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.infra.roles.probe import probe

    return probe(
        arguments.role, settings, os.environ, url=arguments.url, live=arguments.live, timeout_s=arguments.timeout
    )


VERBS = (
    Verb(
        "status",
        "show roles, their unread records, engines and weight versions",
        _status,
        _status_arguments,
        looks=always,
    ),
    Verb("doctor", "check brokers, topics, registry and store; recommend changes", _doctor, _doctor_arguments),
    Verb("health", "query whether a role in this container is ready (for probes)", _health, _health_arguments),
)
