"""G7: what a trainer waits for data when batches are ready: from a step's end to the checked rows of the next one.

A real Megatron trainer on the tiny model steps through manifests that a batcher would have written, from a real broker
and a real object store, in this process. Per step: what it waited for the manifest and for its rows, which are read
while the step before is taken, as StepCompleted reports it; the value is the mean. Beside it in the same run: what the
same rows take when nothing else goes on meanwhile, fetched, decoded and checked (`not_ahead_s`), and their objects
fetched alone (the floor). Not shown: a store across a network, rows of long contexts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from log_server import LogServer, broker
from row import percentile, say, size, told

from tests.fakes.batches import append_batches, synthetic_model
from turnlog.infra.embedded.servers import ObjectStore
from turnlog.infra.event_log import EventLog
from turnlog.infra.history import all_events
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.s3 import S3Blobs
from turnlog.infra.topics_admin import apply
from turnlog.schemas import topics
from turnlog.schemas.events import SampleBatchFormed
from turnlog.settings import RunSettings, Settings, StoreSettings
from turnlog.trainer import loop
from turnlog.trainer.manifests import fetch_rows

GOAL_S = 0.05
BATCHES, ROWS = size((40, 256), smallest=(3, 16))


def settings_of(folder: Path, store: StoreSettings) -> Settings:
    """One thread, no checkpoint between the first step and the last."""
    usual = Settings()
    return dataclasses.replace(
        usual,
        run=RunSettings(id="bench", directory=str(folder)),
        store=store,
        model=dataclasses.replace(usual.model, path=str(synthetic_model(folder / "model"))),
        feeder=dataclasses.replace(usual.feeder, draws=BATCHES),
        trainer=dataclasses.replace(usual.trainer, threads=1, checkpoint_every=2 * BATCHES),
    )


async def seconds_of(read: Callable[[SampleBatchFormed], Awaitable[object]], batches: list[SampleBatchFormed]) -> float:
    """Of one, on average, one after the other."""
    started = time.perf_counter()
    for manifest in batches:
        await read(manifest)
    return (time.perf_counter() - started) / len(batches)


async def measure(server: LogServer, settings: Settings) -> int:
    """Write the batches, train on them; the exit status."""
    log, blobs = server.log(), S3Blobs(settings.store)
    await apply(log, settings)
    async with EventLog.open(log, MemoryRegistry(), writer="bench") as events:
        role = Role("trainer", "bench", settings, log, events, blobs, Health("trainer"))
        await append_batches(events, blobs, settings.run.id, BATCHES, rows=ROWS)
        say(f"{BATCHES} batches of {ROWS} rows")
        await loop.main(role)
        steps = await all_events(role, topics.STEPS)
        manifests = await all_events(role, topics.BATCHES)
        floor = await seconds_of(lambda manifest: blobs.get(manifest.file), manifests)
        alone = await seconds_of(lambda manifest: fetch_rows(manifest, blobs), manifests)
    await log.close()
    waits, reads = ([step.seconds[phase] for step in steps[1:]] for phase in ("wait", "read"))
    both = [wait + read for wait, read in zip(waits, reads, strict=True)]
    value = statistics.fmean(both)
    return told(
        id="G7", value=value, unit="s/step", goal=GOAL_S, met=value <= GOAL_S, floor=floor,
        detail={
            "steps": len(steps), "rows": ROWS, "bytes": manifests[0].file.size,
            "p50_s": round(percentile(both, 0.5), 4), "p99_s": round(percentile(both, 0.99), 4),
            "wait_s": round(statistics.fmean(waits), 4), "read_s": round(statistics.fmean(reads), 4),
            "not_ahead_s": round(alone, 4),
            "step_s": round(statistics.fmean(step.seconds["step"] for step in steps[1:]), 3),
            "floor_is": "the same objects fetched, neither decoded nor checked",
        },
    )  # fmt: skip


def main() -> int:
    """One broker, one store, one run."""
    with (
        tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder,
        broker() as server,
        ObjectStore(Path(folder) / "store", StoreSettings()) as store,
    ):
        return asyncio.run(measure(server, settings_of(Path(folder), store.settings)))


if __name__ == "__main__":
    raise SystemExit(main())
