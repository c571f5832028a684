"""The assembler role: agent events to turn trees, samples and group scores, exactly once."""

from __future__ import annotations

import asyncio
import functools
import logging
import time

from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition
from turnlog.infra.methods import installed
from turnlog.infra.role import Role
from turnlog.processors.core.assembler import FOLD_VERSION, GroupFold
from turnlog.processors.core.low_water import FoldName
from turnlog.processors.core.rules import fold_rules
from turnlog.processors.shells.reaper import Reaper
from turnlog.processors.shells.restoring import Plan, records_between
from turnlog.processors.shells.runner import Runner
from turnlog.schemas.topics import RUNS
from turnlog.settings import Settings, fold_settings_json, settings_sha256

log = logging.getLogger(__name__)


class SettingsDiffer(Exception):
    """The run was configured with other [fold] or [batcher] settings. Remedy: start with those, or use a new run id."""


async def main(role: Role) -> None:
    """Fold until `role.stopping`. Raises SettingsDiffer, LowWaterError, LogError, BlobError, RegistryError."""
    plan = assembler_plan(role.settings)
    await check_configured(role.log, role.events, role.settings.run.id, plan.fold)
    settings = role.settings.assembler
    runner = Runner(plan, role.log, role.events, role.blobs, role.health, clock=time.monotonic)
    reaper = Reaper(
        runner.units,
        role.log,
        role.events,
        clock=time.monotonic,
        silence_s=settings.reaper_silence_s,
        deadline_s=settings.group_deadline_s,
        beat=functools.partial(role.health.beat, "reaper"),
    )
    reaping = asyncio.create_task(reaper.run(role.stopping))
    folding = asyncio.create_task(
        runner.run(
            role.stopping,
            instance=role.instance,
            max_records=settings.max_records,
            poll_s=settings.poll_ms / 1000,
        )
    )
    try:
        done, _ = await asyncio.wait((folding, reaping), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        reaping.cancel()
        folding.cancel()
        await asyncio.wait((folding, reaping))


def assembler_plan(settings: Settings) -> Plan:
    """What the settings make of the units."""
    sha256 = settings_sha256(fold_settings_json(settings))
    rules = fold_rules(settings.fold, run_id=settings.run.id, settings_sha256=sha256, methods=installed(settings.fold))
    return Plan(
        run_id=settings.run.id,
        fold=FoldName(FOLD_VERSION, sha256),
        factory=lambda group_id, floor: GroupFold(group_id, floor, rules),
        messages=rules.cutting.needs_messages,
        horizon_records=settings.assembler.horizon_records,
        commit_interval_s=settings.assembler.commit_interval_s,
    )


async def check_configured(client: Log, events: EventLog, run_id: str, fold: FoldName) -> None:
    """Raises SettingsDiffer when the run's RunConfigured says other settings or another fold version than ours."""
    runs = Partition(RUNS.name, 0)
    start = (await client.start_offsets([runs]))[runs]
    end = (await client.end_offsets([runs]))[runs]
    async for record in records_between(client, runs, start, end, only=("RunConfigured",)):
        configured = await events.decode(record)
        theirs = FoldName(configured.fold_version, configured.settings_sha256)
        if configured.run_id == run_id and theirs != fold:
            raise SettingsDiffer(
                f"run {run_id} was configured with settings {theirs.settings_sha256} and fold version "
                f"{theirs.version}; this process has {fold.settings_sha256} and {fold.version}: start it with the "
                "run's own [fold] and [batcher] settings, or choose a new run id"
            )
