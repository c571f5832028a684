"""`turnlog gc`: find or delete unreferenced objects in the store."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from turnlog.infra.roles.ending import run_verb
from turnlog.names import ExitStatus
from turnlog.schemas import topics
from turnlog.settings import Settings, load
from turnlog.verbs.verb import Verb, add_json

if TYPE_CHECKING:
    from turnlog.consumers.gc import Marked, ObjectState
    from turnlog.infra.blobs import Listed

GC_EPILOG = """\
The first call with --delete moves objects that nothing has referred to for the grace period into the bucket's trash/,
from which readers can restore them; a call one grace period later checks again and deletes them for good. Each call
reads every record of every log and archive of the bucket. It needs no lock: concurrent or killed calls lose nothing.
An owner is a log (a cluster and a prefix), which has a folder of its own in the bucket.

Examples:
  turnlog --run demo-20260101-120000 gc               only show what would be moved or deleted
  turnlog --settings cluster.toml gc --grace 3d --delete
  turnlog --settings cluster.toml gc --also other-cluster.toml --json
"""


def _gc_arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = GC_EPILOG
    verb.add_argument("--delete", action="store_true", help="delete them (default: only show them)")
    verb.add_argument(
        "--grace", type=_seconds, default="1d", metavar="TIME",
        help="minimum time without a reference, by the store's clock, at least 2h: 36h, 3d (default 1d)",
    )  # fmt: skip
    add_bucket(verb)
    verb.add_argument(
        "--unowned", action="store_true",
        help="also objects in no owner's folder; every log that ever used the bucket must then be read (--also)",
    )  # fmt: skip
    add_json(verb)


def _seconds(text: str) -> float:
    """Parse 90s, 30m, 36h, 3d into seconds. Raises ArgumentTypeError."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    try:
        return float(text[:-1]) * units[text[-1:]]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a time: write a number and one of {', '.join(units)}"
        ) from None


def add_bucket(verb: argparse.ArgumentParser) -> None:
    """Add the options that name other users of the bucket."""
    verb.add_argument(
        "--also", type=Path, action="append", default=[], metavar="FILE",
        help="settings of another cluster whose runs use the bucket; may be repeated",
    )  # fmt: skip
    verb.add_argument(
        "--retired", action="append", default=[], metavar="FOLDER",
        help="owner whose log is gone for good, so that only its archives count; may be repeated",
    )  # fmt: skip


def _gc(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print what is there and what would be removed; with --delete remove it. Return 0. Raises GcError, LogError,
    StoreUnavailable, SettingsError."""
    from turnlog.consumers.gc import LEAST_GRACE_S, GraceTooShort
    from turnlog.infra.blobs import REUSED_S
    from turnlog.infra.roles.terminal import say_json
    from turnlog.infra.run_folder import resolve_endpoints

    if arguments.grace < LEAST_GRACE_S:
        raise GraceTooShort(
            f"--grace {arguments.grace:g} s: writers refer to a blob up to {REUSED_S:g} s after they put it, so the "
            f"minimum is {LEAST_GRACE_S:g} s"
        )
    everyone = [resolve_endpoints(settings), *(resolve_endpoints(load(path, {})) for path in arguments.also)]
    plan, done = run_verb(_run(everyone, arguments))
    rows = _rows(plan)
    if arguments.json:
        about = {"grace_s": plan.grace_s, "deleted": arguments.delete, "objects": rows, "done": dict(done)}
        say_json({**about, "owners": [dataclasses.asdict(owner) for owner in plan.owners], "read": plan.read})
    else:
        _tell(plan, rows, done, delete=arguments.delete)
    return ExitStatus.DONE


async def _run(everyone: Sequence[Settings], arguments: argparse.Namespace) -> tuple[Marked, Counter[ObjectState]]:
    from turnlog.consumers.gc import Connect, log_of, mark_objects, sweep_objects
    from turnlog.infra.kafka import KafkaLog
    from turnlog.infra.roles.terminal import aside
    from turnlog.infra.s3 import S3Blobs

    clusters: dict[str, Connect] = {}
    roots = set()
    async with AsyncExitStack() as stack:
        blobs = S3Blobs(dataclasses.replace(everyone[0].store, make_bucket=False))
        stack.push_async_callback(blobs.close)
        for one in everyone:
            log = KafkaLog.of(one.kafka)
            stack.push_async_callback(log.close)
            cluster = await log.cluster()
            clusters[cluster] = partial(log_of, one.kafka)
            if topics.RUNS.name in await log.topics():
                roots.add((cluster, one.kafka.prefix))
        plan = await mark_objects(
            blobs, clusters, grace_s=arguments.grace, roots=roots, retired=arguments.retired, unowned=arguments.unowned,
            told=aside,
        )  # fmt: skip
        return plan, await sweep_objects(blobs, plan) if arguments.delete else Counter()


def _rows(plan: Marked) -> list[dict[str, str | int | float]]:
    """Return one row for each folder and state."""
    kinds: defaultdict[tuple[str, ObjectState], list[Listed]] = defaultdict(list)
    for found in plan.found:
        kinds[found.folder or "blobs", found.state].append(found.at)
    return [
        {"folder": folder, "state": state.name.lower(), "what": state.value, "objects": len(some),
         "bytes": sum(one.size for one in some), "oldest_s": round(plan.now - min(one.modified for one in some), 1)}
        for (folder, state), some in sorted(kinds.items())
    ]  # fmt: skip


def _tell(
    plan: Marked, rows: Iterable[Mapping[str, str | int | float]], done: Counter[ObjectState], *, delete: bool
) -> None:
    from rich.table import Table

    from turnlog.consumers.gc import ObjectState
    from turnlog.infra.roles.terminal import Terminal

    console, table = Terminal(), Table("folder", "what", "objects", "bytes", "oldest")
    for row in rows:
        oldest = f"{float(row['oldest_s']) / 3600:.1f} h"
        table.add_row(str(row["folder"]), str(row["what"]), f"{row['objects']:,}", f"{row['bytes']:,}", oldest)
    console.print(table)
    if plan.absent:
        console.print(f"{plan.absent} workspaces or answers that records refer to are not in the store")
    if delete:
        said = {ObjectState.GARBAGE: "moved to the trash", ObjectState.NEEDED: "restored"}
        told = [f"{done[state]} objects were {where}" for state, where in said.items()]
        console.print(
            "; ".join([*told, f"{done[ObjectState.DUE] + done[ObjectState.UNFINISHED]} objects were deleted for good"]),
            soft_wrap=True,
        )
    else:
        console.print("nothing was changed; --delete moves garbage to the trash and deletes what is due there")


VERBS = (Verb("gc", "show unreferenced objects in the store, or delete them", _gc, _gc_arguments),)
