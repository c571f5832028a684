"""`turnlog erase`: erase the content of one session for good."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from turnlog.infra.roles.ending import run_verb
from turnlog.names import ExitStatus
from turnlog.settings import Settings, SettingsError
from turnlog.verbs.verb import Verb, add_json

if TYPE_CHECKING:
    from turnlog.consumers.erasure import Erasure
    from turnlog.infra.roles.role import Role

INDEX_S = 60.0
"""Maximum seconds for a running role `index` to notice an erasure; it asks for the keys every 10 seconds."""
EPILOG = """\
It drops the key that encrypts the content of the session on topics, in the archive and in batch files, deletes blobs
that only this session refers to, builds the index anew, and removes the session's rows from the datasets that are
named. Structure, rewards and token counts stay, so that all other sessions replay as before. It may be repeated after
an interruption. The run must have been configured with [erasure] master_keys. docs/erasure.md says what it cannot do.

Examples:
  turnlog --run demo-20260101-120000 erase SESSION --dry-run     only show what would be erased
  turnlog --run demo-20260101-120000 erase SESSION --yes --dataset datasets/first
"""


def _arguments(verb: argparse.ArgumentParser) -> None:
    verb.epilog = EPILOG
    verb.add_argument("session", metavar="SESSION", nargs="?", default="", help="id of the session")
    verb.add_argument(
        "--rewrap", action="store_true",
        help="erase nothing, but wrap the keys of all sessions under the first of [erasure] master_keys",
    )  # fmt: skip
    verb.add_argument("--dry-run", action="store_true", help="only show what would be erased")
    verb.add_argument("--yes", action="store_true", help="erase without asking")
    verb.add_argument("--by", default="", metavar="NAME", help="who erases it, for the record (default: your user)")
    verb.add_argument(
        "--dataset", type=Path, action="append", default=[], metavar="FOLDER",
        help="dataset from which the session's rows are removed; may be repeated",
    )  # fmt: skip
    add_json(verb)


def _erase(settings: Settings, arguments: argparse.Namespace) -> int:
    """Show what is there of the session, ask, and erase it. Return 0. Raises ErasureError, IndexFailure, DatasetError,
    LogError, BlobError, SettingsError, AuditUnavailable."""
    from turnlog.infra.roles.terminal import say, say_json

    if arguments.rewrap == bool(arguments.session):
        raise SettingsError("name the SESSION to erase, or --rewrap: one of the two")
    if arguments.rewrap:
        say(f"{run_verb(_rewrap(settings))} keys were wrapped under the first of [erasure] master_keys")
        return ExitStatus.DONE
    found = run_verb(_run(settings, arguments))
    if arguments.json:
        say_json({"run": settings.run.id, "erased": not arguments.dry_run, **found})
    elif arguments.dry_run:
        say("nothing was changed; without --dry-run all of this is erased for good")
    else:
        say(f"session {arguments.session} was erased")
        if found["waiting"]:
            say("some of its objects are too young to be deleted: repeat the command in two hours (--json names them)")
    return ExitStatus.DONE


async def _rewrap(settings: Settings) -> int:
    from turnlog.consumers.erasure import rewrap
    from turnlog.infra.roles.role import open_role

    async with open_role("erase", settings) as role:
        return await rewrap(role)


async def _run(settings: Settings, arguments: argparse.Namespace) -> dict[str, object]:
    from turnlog.infra.roles.role import open_role

    async with open_role("erase", settings) as role:
        return await erase_session(role, arguments, input if sys.stdin.isatty() else None)


async def erase_session(
    role: Role, arguments: argparse.Namespace, ask: Callable[[str], str] | None
) -> dict[str, object]:
    """Show what there is of the session, ask, and erase it; return all of that as JSON values. Rows of datasets and the
    index go last, so that nothing is lost if the session cannot be erased. `ask` puts a question to the person at the
    terminal; None if there is no terminal. Raises as the verb."""
    from turnlog.consumers.datasets.build import remove_session
    from turnlog.consumers.datasets.manifest import read_manifest
    from turnlog.consumers.erasure import erase, plan_erasure
    from turnlog.consumers.index.reader import path_of
    from turnlog.infra.access.audit import os_user

    for dataset in arguments.dataset:
        read_manifest(dataset)  # a wrong name is noticed before anything is erased
    plan = await plan_erasure(role, arguments.session)
    index = path_of(role.settings)
    found = _about(plan, index if index.exists() else None, arguments.dataset)
    if not arguments.json:
        _tell(plan, found)
    if arguments.dry_run:
        return found
    if not arguments.yes:
        _confirm(plan, ask)
    done = await erase(role, plan, by=arguments.by or os_user())
    for dataset in arguments.dataset:
        found[f"rows of {dataset}"] = remove_session(dataset, arguments.session)
    if index.exists():
        await _clear_index(role, index, arguments.session)
    return found | {"batches": list(done.batches), "waiting": list(done.objects.waiting)}


async def _clear_index(role: Role, path: Path, session: str) -> None:
    """Build the index anew without the session's texts, or wait until the role `index` has begun to. Raises BusyIndex
    if it does not."""
    import asyncio  # verbs are loaded for every command

    from turnlog.consumers.index import BusyIndex, NoIndex
    from turnlog.consumers.index.indexer import build
    from turnlog.consumers.index.reader import Index
    from turnlog.infra.roles.terminal import say

    deadline = time.monotonic() + INDEX_S
    while True:
        try:
            await build(role, path)
            return
        except BusyIndex as busy:
            if time.monotonic() > deadline:
                raise BusyIndex(
                    f"{busy}, and that one has not noticed the erasure for {INDEX_S:.0f} s: stop it, then repeat this "
                    "command"
                ) from None
        with contextlib.suppress(NoIndex), Index.open(path) as index:  # it is absent for a moment
            if session in index.erased:
                say("the role `index` builds the index anew")
                return
        await asyncio.sleep(0.5)  # another process reads the log: there is nothing here to wait on


def _about(plan: Erasure, index: Path | None, datasets: list[Path]) -> dict[str, object]:
    """Return what was found where, as JSON values."""
    return {
        "session": plan.session_id,
        "group": plan.group_id,
        "records": plan.objects.records,
        "keys": len(plan.keys),
        "batches": list(plan.batches),
        "objects": [one.name for one in plan.objects.deletable],
        "waiting": list(plan.objects.waiting),
        "shared": list(plan.objects.shared),
        "index": None if index is None else str(index),
        "datasets": list(map(str, datasets)),
        "recorded": plan.is_recorded,
    }


def _tell(plan: Erasure, found: dict[str, object]) -> None:
    from turnlog.infra.roles.terminal import say

    objects = plan.objects
    for topic, count in objects.records.items():
        say(f"{topic}: {count} records")
    batches = ", ".join(map(str, plan.batches)) or "none"
    say(f"keys: {len(plan.keys)}, which encrypt all content of these records and of the rows of batches: {batches}")
    say(f"objects that only this session refers to: {len(objects.deletable)}, and {len(objects.waiting)} too young")
    say(f"objects that stay, since others may need them: {len(objects.shared)} (--json names them)")
    say(f"index: {found['index'] or 'none here'}")


def _confirm(plan: Erasure, ask: Callable[[str], str] | None) -> None:
    """Ask for the id of the session. Raises NotErasable if something else is typed, or nobody can be asked."""
    from turnlog.consumers.erasure import NotErasable

    if ask is None:
        raise NotErasable("there is no terminal to ask for the session's id on; --yes erases without asking")
    if (typed := ask(f"type {plan.session_id} to erase it for good: ").strip()) != plan.session_id:
        raise NotErasable(f"{typed!r} is not {plan.session_id!r}: nothing was erased")


VERBS = (Verb("erase", "erase the content of one session for good", _erase, _arguments),)
