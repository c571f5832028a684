"""`turnlog run delete`: print what belongs to a run, ask, and delete it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Collection
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from rich.table import Table

from turnlog.consumers import gc
from turnlog.consumers.run_delete import (
    RUNS,
    Needed,
    NotConfirmed,
    Plan,
    Run,
    RunIsUp,
    delete_run,
    needed_elsewhere,
    plan_deletion,
)
from turnlog.infra import run_folder
from turnlog.infra.archive import archive_name
from turnlog.infra.embedded.broker import kept_cluster
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import RunPhase, open_role
from turnlog.infra.roles.runs import set_phase
from turnlog.infra.roles.terminal import Terminal, say, say_json
from turnlog.infra.s3 import S3Blobs
from turnlog.names import ExitStatus
from turnlog.settings import Settings, SettingsError, load


def command(settings: Settings, arguments: argparse.Namespace) -> int:
    """Print what would be deleted and what stays, and delete it if --delete is given. Return 0. Raises DeleteError,
    OtherRun, GcError, LogError, StoreUnavailable, SettingsError."""
    own = _settings_of(settings, arguments)
    directory = Path(own.run.directory)
    if directory.exists() and run_folder.is_live(directory):
        raise RunIsUp(f"{directory} is up: `turnlog --run {own.run.id} down` stops it; then repeat this command")
    run_verb(_command(own, arguments))
    return ExitStatus.DONE


def _settings_of(settings: Settings, arguments: argparse.Namespace) -> Settings:
    """Return the settings of the named run: those of --settings, else of its directory, else of the environment with
    its id."""
    if arguments.settings is None:
        directory = Path(settings.run.directory)
        if settings.run.id != arguments.target:
            directory = directory.parent / arguments.target
        settings = run_folder.run_settings(None, os.environ, run_id=arguments.target, directory=str(directory))
    if settings.run.id != arguments.target:
        raise SettingsError(
            f"the settings are those of run {settings.run.id!r}, not {arguments.target!r}: name the settings of the "
            "intended run with --settings, or set [run] id (TURNLOG_RUN_ID) to its id"
        )
    return settings


async def _command(own: Settings, arguments: argparse.Namespace) -> None:
    async with AsyncExitStack() as stack:
        run, needed = await _connect_run(stack, own, arguments)
        plan = await plan_deletion(run, needed)
        if not arguments.json:
            _tell(plan, run.id)
        if arguments.delete and plan.items:
            _confirm(run.id, yes=arguments.yes)
            if any(item.what == "directory" for item in plan.items):
                stack.enter_context(run_folder.lock_run(run.directory))
            await delete_run(run, plan, partial(_close_run, own))
    if arguments.json:
        items = [dataclasses.asdict(item) for item in plan.items]
        say_json({"run": run.id, "deleted": arguments.delete, "items": items, "left": plan.left})
    elif not plan.items:
        say(f"nothing of run {run.id!r} was found")
    else:
        say(
            f"run {run.id!r} was deleted"
            if arguments.delete
            else "nothing was changed; --delete deletes all of it for good"
        )


async def _connect_run(stack: AsyncExitStack, own: Settings, arguments: argparse.Namespace) -> tuple[Run, Needed]:
    """Connect to the run's log and store, unless they lie in its directory. Return the run and a function that searches
    everything else in the bucket for references."""
    directory, log, blobs = Path(own.run.directory), None, None
    clusters: dict[str, gc.Connect] = {}
    roots = set()
    for one in (own, *(run_folder.resolve_endpoints(load(path, {})) for path in arguments.also)):
        if one.kafka.bootstrap:
            client = KafkaLog.of(one.kafka)
            stack.push_async_callback(client.close)
            cluster = await client.cluster()
            clusters[cluster] = partial(gc.log_of, one.kafka)
            log = client if one is own else log
            if one is not own and RUNS in await client.topics():
                roots.add((cluster, one.kafka.prefix))
    if own.store.endpoint:
        blobs = S3Blobs(dataclasses.replace(own.store, make_bucket=False))
        stack.push_async_callback(blobs.close)
    run = Run(
        id=own.run.id, prefix=own.kafka.prefix, directory=directory, archive=archive_name(own), log=log, blobs=blobs,
        cluster=await log.cluster() if log else kept_cluster(directory),
    )  # fmt: skip

    async def find_needed(hashes: Collection[str]) -> Collection[str]:
        assert blobs is not None, "what it holds is asked about"
        return await needed_elsewhere(
            hashes, blobs=blobs, run=run, clusters=clusters, roots=roots, retired=arguments.retired
        )

    return run, find_needed


async def _close_run(own: Settings) -> None:
    """Close the run, so that nothing starts for it any more and roles without a consumer group end. If the registry is
    embedded, it is down, and so is the run."""
    if own.registry.url:
        async with open_role("run", own) as role:
            await set_phase(role, RunPhase.CLOSED)


def _confirm(run_id: str, *, yes: bool) -> None:
    """Ask for the run's id on the terminal, unless `yes`. Raises NotConfirmed."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotConfirmed("there is no terminal to ask for the run's id on; --yes deletes without asking")
    if (typed := input(f"type {run_id} to delete all of it for good: ").strip()) != run_id:
        raise NotConfirmed(f"{typed!r} is not {run_id!r}: nothing was deleted")


def _tell(plan: Plan, run_id: str) -> None:
    table = Table("what", "name", "count", "bytes", title=f"run {run_id}")
    for item in plan.items:
        size = "?" if item.bytes is None else f"{item.bytes:,}"
        table.add_row(item.what, item.name, f"{item.count:,}", size)
    if plan.items:
        Terminal().print(table)
    for one in plan.left:
        say(f"stays: {one}")
