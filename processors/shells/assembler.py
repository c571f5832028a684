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
from turnlog.processors.core.assembler import GroupFold
from turnlog.processors.core.fold_versions import FOLD_VERSION
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
    version = await recorded_version(role.log, role.events, role.settings)
    plan = assembler_plan(role.settings, version)
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


def assembler_plan(settings: Settings, version: str = FOLD_VERSION) -> Plan:
    """What the settings make of the units, by the fold version of the run. Raises SettingsError."""
    sha256 = settings_sha256(fold_settings_json(settings))
    rules = fold_rules(
        settings.fold, run_id=settings.run.id, settings_sha256=sha256, version=version,
        methods=installed(settings.fold),
    )  # fmt: skip
    return Plan(
        run_id=settings.run.id,
        fold=FoldName(version, sha256),
        factory=lambda group_id, floor: GroupFold(group_id, floor, rules),
        messages=rules.cutting.needs_messages,
        horizon_records=settings.assembler.horizon_records,
        commit_interval_s=settings.assembler.commit_interval_s,
    )


async def recorded_version(client: Log, events: EventLog, settings: Settings) -> str:
    """The fold version of the run's RunConfigured, which it keeps for life; today's while there is none.

    Raises SettingsDiffer when the run was configured with other settings than ours.
    """
    ours, run_id = settings_sha256(fold_settings_json(settings)), settings.run.id
    runs = Partition(RUNS.name, 0)
    start = (await client.start_offsets([runs]))[runs]
    end = (await client.end_offsets([runs]))[runs]
    version = FOLD_VERSION
    async for record in records_between(client, runs, start, end, only=("RunConfigured",)):
        configured = await events.decode(record)
        if configured.run_id != run_id:
            continue
        if configured.settings_sha256 != ours:
            raise SettingsDiffer(
                f"run {run_id} was configured with settings {configured.settings_sha256}; this process has {ours}: "
                "start it with the run's own [fold] and [batcher] settings, or choose a new run id"
            )
        version = configured.fold_version
    return version
