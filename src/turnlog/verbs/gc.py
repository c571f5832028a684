"""`turnlog gc`: find or delete unreferenced objects in the store."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnlog.settings import Settings
from turnlog.verbs.verb import Verb

GC_EPILOG = """\
The first call with --delete moves objects that nothing has referred to for the grace period into the bucket's trash/,
from which readers can restore them; a call one grace period later checks again and deletes them for good. Each call
reads every record of every log and archive of the bucket. It needs no lock: concurrent or killed calls lose nothing.

Examples:
  turnlog --run demo-20260101-120000 gc               only show what would be moved or deleted
  turnlog --settings cluster.toml gc --grace 3d --delete
  turnlog --settings cluster.toml gc --also other-cluster.toml --json
"""


def gc_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of `turnlog gc`."""
    verb.formatter_class = argparse.RawDescriptionHelpFormatter
    verb.epilog = GC_EPILOG
    verb.add_argument("--delete", action="store_true", help="delete them (default: only show them)")
    verb.add_argument(
        "--grace", type=_seconds, default="1d", metavar="TIME",
        help="minimum time without a reference, by the store's clock, at least 2h: 36h, 3d (default 1d)",
    )  # fmt: skip
    add_bucket(verb)
    verb.add_argument(
        "--unowned", action="store_true",
        help="also objects in no owner's folder; requires that every log that ever used the bucket is read here",
    )  # fmt: skip
    verb.add_argument("--json", action="store_true")


def _seconds(text: str) -> float:
    """Parse 90s, 30m, 36h, 3d into seconds. Raises ArgumentTypeError."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        return float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write a number and one of {', '.join(units)}") from None


def add_bucket(verb: argparse.ArgumentParser) -> None:
    """Add the options that name other users of the bucket."""
    verb.add_argument(
        "--also", type=Path, action="append", default=[], metavar="FILE",
        help="settings of another cluster whose runs use the bucket; may be repeated",
    )  # fmt: skip
    verb.add_argument(
        "--retired", action="append", default=[], metavar="FOLDER",
        help="an owner whose log is gone for good, so that only its archives count; may be repeated",
    )  # fmt: skip


def _gc(settings: Settings, arguments: argparse.Namespace) -> int:
    from turnlog.verbs.gc_page import command

    return command(settings, arguments)


VERBS = (Verb("gc", "show unreferenced objects in the store, or delete them", _gc, gc_arguments),)
