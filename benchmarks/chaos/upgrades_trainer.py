"""Upgrade trainer and loader of a run and go back, while it trains: `python benchmarks/chaos/upgrades_trainer.py
[--kills 6]`.

A real trainer and a real loader of the release before the last work on manifests that batchers of both releases write;
the loader keeps an engine that has SGLang's control endpoints. As often as --kills says the two are replaced by this
release's one after the other, and go back one after the other; every other time the loader goes first. So each of the
four pairs of releases works, and each trainer goes on from the checkpoint that one of the other release left. Batches
wait whenever somebody is replaced; after that a batch that was not there before must have been trained, and its weights
be in the engine. In the end every batch must have been stepped on once, with the loss, bit for bit, of a re-run without
a break, every version number stand for one set of weights, and every version have been loaded or passed over for a
newer one, the newest last.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import random
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

from assembler import committed
from dying import until
from loop import went_back
from servers import say, servers
from upgrades import Upgrades, Writers, begun, previous

from tests.fakes.batches import synthetic_manifest, synthetic_model, synthetic_rows
from trainer import PATIENCE_S, Story, verdict
from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.event_log import EventLog
from turnlog.infra.s3 import S3Blobs
from turnlog.schemas.events import EngineGone, EngineWeightsLoaded, EngineWeightsRefused, WeightVersionPublished
from turnlog.schemas.topics import ENGINES, STEPS, WEIGHTS
from turnlog.settings import Settings

BATCHES = 4
"""That are there when somebody is replaced; one of them is trained before the next one is."""
ORDERS = (("trainer-0", "loader-0"), ("loader-0", "trainer-0"))
CHECKPOINT_EVERY = 3


@dataclasses.dataclass(slots=True)
class Run:
    """The log, and what is on it."""

    upgrades: Upgrades
    events: EventLog
    writers: Writers
    blobs: S3Blobs
    batches: int = 0
    """Written."""
    pairs: Counter[str] = dataclasses.field(default_factory=Counter)
    """"Trainer's release, loader's release" -> versions that went from one to the other."""

    async def published(self) -> list[WeightVersionPublished]:
        """Every version, in order."""
        return [event for _, event, _ in await committed(self.events, WEIGHTS.name, 1)]  # type: ignore[misc]

    async def loaded(self) -> list[EngineWeightsLoaded]:
        """Every acknowledgement, in order."""
        found = await committed(self.events, ENGINES.name, 1)
        return [event for _, event, _ in found if isinstance(event, EngineWeightsLoaded)]

    async def further(self, pair: str) -> None:
        """Write some batches; return when one of them was trained and its weights are in the engine."""
        first = self.batches
        for self.batches in range(first + 1, first + 1 + BATCHES):
            rows = synthetic_rows(self.batches - 1)
            file = await self.blobs.put(write_rows(rows), media_type=MEDIA_TYPE)
            run_id = self.upgrades.settings.run.id
            await self.writers.append(synthetic_manifest(rows, file, run_id, self.batches - 1))
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            new = {one.version for one in await self.published() if one.batch_index >= first}
            if there := new & {one.version for one in await self.loaded()}:
                self.pairs[pair] += len(there)
                return
            await asyncio.sleep(0.1)
        self.upgrades.faults.append(f"{pair}: nothing went on for {PATIENCE_S:g} s after {first} batches")


async def upgraded(run: Run, orders: int) -> None:
    """Up and back as often."""
    release = dict.fromkeys(ORDERS[0], "old")

    def pair() -> str:
        return f"{release['trainer-0']} trainer, {release['loader-0']} loader"

    await run.further(pair())
    run.writers.of = ["old", "new"]
    for members in itertools.islice(itertools.cycle(ORDERS), orders):
        for wanted, member in itertools.product(("new", "old"), members):
            await run.upgrades.swap(member, wanted)
            release[member] = wanted
            await run.further(pair())


async def acknowledged(run: Run) -> list[str]:
    """What is wrong with the loaders' reports, once the newest version is loaded or after a while."""
    versions = [one.version for one in await run.published()]
    deadline = time.monotonic() + PATIENCE_S
    while (await run.loaded())[-1].version != versions[-1] and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    reports = [event for _, event, _ in await committed(run.events, ENGINES.name, 1)]
    faults = [f"{event}" for event in reports if isinstance(event, EngineGone | EngineWeightsRefused)]
    if back := went_back(reports):
        faults.append(f"{back} versions were loaded behind newer ones")
    loads = [one for one in reports if isinstance(one, EngineWeightsLoaded)]
    said = Counter(itertools.chain.from_iterable(([one.version, *one.superseded]) for one in loads))
    if said != Counter(versions):
        faults.append(f"of versions {versions} these were acknowledged, so often: {dict(said)}")
    return faults


async def torture(settings: Settings, *, orders: int, seed: int) -> int:
    """The whole story; the exit status."""
    env = {
        "TURNLOG_MODEL_PATH": settings.model.path, "TURNLOG_ENGINE_URLS": settings.engine.urls[0],
        "TURNLOG_FEEDER_DRAWS": str(settings.feeder.draws), "TURNLOG_TRAINER_THREADS": "1",
        "TURNLOG_TRAINER_CHECKPOINT_EVERY": str(CHECKPOINT_EVERY),
        "TURNLOG_TRAINER_LEARNING_RATE": "8e-4", "TURNLOG_TRAINER_DTYPE": "float32",  # whatever a release takes
        "TURNLOG_TRAINER_DUAL_CLIP": "3.0",
        # The older release comes to a linear schedule's floor at 90 % of the run, the newer one at its end.
        "TURNLOG_TRAINER_LEARNING_RATE_SCHEDULE": "constant",
    }  # fmt: skip
    upgrades, blobs, story = Upgrades(settings, previous(), env), S3Blobs(settings.store), Story()
    async with begun(upgrades) as (events, registry), events.log.appender() as appender:
        run = Run(upgrades, events, Writers(appender, events, registry, random.Random(seed)), blobs)
        upgrades.start_engine()
        try:
            for member in ORDERS[0]:
                upgrades.start(member, "old")
            await upgraded(run, orders)
            last = upgrades.roles.pop("trainer-0")
            await until(lambda: last.returncode is not None, PATIENCE_S)
            story.exit_status = last.stop() if last.returncode is None else last.returncode
            upgrades.faults += await acknowledged(run)
        finally:
            await upgrades.close()
            await blobs.close()
        steps = [event for _, event, _ in await committed(events, STEPS.name, 1)]
        published = await run.published()
    if len(steps) != settings.feeder.draws:
        upgrades.faults.append(f"{len(steps)} steps on {settings.feeder.draws} batches: nobody was killed")
    story.kills, story.faults = upgrades.swaps, upgrades.faults
    for fault in story.faults:
        say(fault)
    more = {"pairs": dict(run.pairs), "wrote": dict(run.writers.wrote), "faults": len(story.faults)}
    return await asyncio.to_thread(verdict, settings, story, steps, [*published], id="upgrades_trainer", **more)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Upgrade trainer and loader of a run and go back, while it trains.")
    parser.add_argument("--kills", type=int, default=6, help="how often the two are replaced and go back")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        replace, model = dataclasses.replace, synthetic_model(Path(settings.run.directory) / "model")
        settings = replace(
            settings,
            model=replace(settings.model, path=str(model)),
            engine=replace(settings.engine, urls=(f"http://{HOST}:{free_ports(1)[0]}",)),
            feeder=replace(settings.feeder, draws=BATCHES * (1 + 4 * arguments.kills)),
            trainer=replace(
                settings.trainer,
                threads=1,
                checkpoint_every=CHECKPOINT_EVERY,
                learning_rate=8e-4,
                dtype="float32",
                learning_rate_schedule="constant",
            ),
        )
        return asyncio.run(torture(settings, orders=arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
