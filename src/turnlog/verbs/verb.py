"""Parts of a verb of the command line, and the options that several verbs share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from turnlog.infra.run_folder import Endpoints
from turnlog.settings import Settings

Call = Callable[[Settings, argparse.Namespace], int]
"""Code of a verb; it returns the exit status."""
Test = Callable[[argparse.Namespace], bool]
"""A question about the arguments of a verb."""


def always(_: argparse.Namespace) -> bool:
    """Return True."""
    return True


def never(_: argparse.Namespace) -> bool:
    """Return False."""
    return False


def acts(*actions: str) -> Test:
    """Return a test for these actions of a verb."""
    return lambda arguments: arguments.action in actions


def no_arguments(_: argparse.ArgumentParser) -> None:
    """Add nothing."""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of `turnlog`."""

    name: str
    help: str
    call: Call
    add_arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    reads: Test = never
    """True if it reads the log of a run; if the run is down, its servers are started for it."""
    looks: Test = never
    """True if it inspects a run and changes nothing in it; it then uses the newest run if none is named. A verb that
    reads the log looks, too."""

    under: Literal["", "log", "role"] = ""
    """Verb below which it stands: `turnlog log NAME` reads the log, `turnlog role NAME` is one process of a run."""

    def inspects(self, arguments: argparse.Namespace) -> bool:
        """Return True if the verb changes nothing in the run."""
        return self.looks(arguments) or self.reads(arguments)


def add_source(verb: argparse.ArgumentParser) -> None:
    """Add the option that selects topics or archive."""
    verb.add_argument(
        "--from", dest="source", choices=("topics", "archive"), default="topics",
        help="read the topics of the run, or its archive in the object store (default topics)",
    )  # fmt: skip


def add_json(verb: argparse._ActionsContainer, help: str = "print JSON instead of text") -> None:
    """Add --json."""
    verb.add_argument("--json", action="store_true", help=help)


def milliseconds(text: str) -> int:
    """Parse an ISO 8601 time, UTC unless it names a zone, or milliseconds since 1970. Raises ArgumentTypeError."""
    if text.isdigit():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not an ISO 8601 time: {error}") from error
    return int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)


def endpoint_lines(found: Endpoints) -> list[str]:
    """Return the addresses of a run that was started, as lines of text."""
    servers = [f"{name:9} {getattr(found, name)}" for name in ("kafka", "registry", "store", "gateway", "views")]
    servers += [f"tinker    {found.tinker}"] if found.tinker else []
    return [*servers, *(f"engine    {url}" for url in found.engines)]
