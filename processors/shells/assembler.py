"""The assembler role: agent events to turn trees, samples and group scores, exactly once."""

from __future__ import annotations

import asyncio
import functools
import logging
import time

from turnlog.infra.role import Role
from turnlog.infra.runs import Configured, configured
from turnlog.processors.core.fold.group import GroupFold
from turnlog.processors.shells.reaper import Reaper
from turnlog.processors.shells.restoring import Plan
from turnlog.processors.shells.runner import Runner
from turnlog.settings import AssemblerSettings

log = logging.getLogger(__name__)


async def main(role: Role) -> None:
    """Wait until the run is configured, then fold until `role.stopping`. Raises OtherRun, OtherSettings,
    UnknownFoldVersion, LowWaterError, LogError, BlobError, RegistryError."""
    run = await configured(role)
    if run is None:
        return
    settings = role.settings.assembler
    plan = assembler_plan(run, settings)
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


def assembler_plan(run: Configured, settings: AssemblerSettings) -> Plan:
    """What the units of a run share. Raises UnknownFoldVersion, SettingsError."""
    rules = run.rules()
    return Plan(
        run_id=run.run_id,
        fold=run.name,
        factory=lambda group_id, floor: GroupFold(group_id, floor, rules),
        messages=rules.cutting.needs_messages,
        horizon_records=rules.horizon_records,
        commit_interval_s=settings.commit_interval_s,
    )
