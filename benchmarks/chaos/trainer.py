"""Kill the trainer, again and again: `python benchmarks/chaos/trainer.py [--kills 20]`.

Manifests wait on the log; a real `turnlog trainer` is killed by SIGKILL at random moments, some while it starts and
some while it steps, publishes or saves, and started again. In the end the history that counts (the highest incarnation
per batch) must hold every batch once, and every loss of every incarnation must be, bit for bit, that of a re-run over
the same manifests; a weight version number must stand for one set of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from servers import TURNLOG, environment, say, servers, told

from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, opened
from turnlog.schemas.events import Event, StepCompleted, WeightVersionPublished
from turnlog.schemas.topics import STEPS, WEIGHTS
from turnlog.settings import Settings
from turnlog.trainer.loop import rerun
from turnlog.trainer.reference import append_batches, synthetic_model

STEPS_PER_KILL = 12
CHECKPOINT_EVERY = 5
PATIENCE_S = 180.0


@dataclass(slots=True)
class Story:
    """What happened."""

    kills: int = 0
    deaths: int = 0
    """Ends that nobody asked for."""
    exit_status: int | None = None
    after: list[int] = field(default_factory=list)
    """Steps on the log when each kill struck."""
    faults: list[str] = field(default_factory=list)
    """Whatever else was not to be."""


def trainer(settings: Settings) -> Child:
    """Start `turnlog trainer`."""
    variables = {
        "TURNLOG_MODEL_PATH": settings.model.path,
        "TURNLOG_FEEDER_DRAWS": str(settings.feeder.draws),
        "TURNLOG_TRAINER_THREADS": str(settings.trainer.threads),
        "TURNLOG_TRAINER_CHECKPOINT_EVERY": str(settings.trainer.checkpoint_every),
    }
    name = "trainer-0"
    log = Path(settings.run.directory) / f"{name}.log"
    env = {**environment(settings, name), **variables}
    return Child(Launch(name=name, argv=(*TURNLOG, "trainer"), log=log, env=env)).start()


async def records(role: Role, topic: str) -> int:
    """Committed records and markers of a topic."""
    partition = Partition(topic, 0)
    return (await role.log.end_offsets([partition]))[partition]


async def until(condition: Callable[[], bool], limit_s: float) -> None:
    """Wait for `condition`, at most so long."""
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - a child process sets no event
        await asyncio.sleep(0.1)


async def kill(role: Role, settings: Settings, story: Story, *, kills: int, rng: random.Random) -> Child:
    """Kill at random moments; the process that is left alive."""
    child = trainer(settings)
    while story.kills < kills:
        before = await records(role, WEIGHTS.name)
        if rng.random() < 0.2:
            await asyncio.sleep(rng.uniform(0.0, 10.0))  # while it starts
        else:
            deadline = time.monotonic() + PATIENCE_S
            while child.returncode is None and time.monotonic() < deadline:
                if await records(role, WEIGHTS.name) > before:
                    break
                await asyncio.sleep(0.05)
            await asyncio.sleep(rng.uniform(0.0, 2.0))
        if child.returncode is None:
            child.kill()
            story.kills += 1
            story.after.append(await records(role, STEPS.name))
            say(f"kill {story.kills}")
        else:
            story.deaths += 1
            say(child.tail())
        child = trainer(settings)
    return child


async def everything(role: Role, topic: str) -> list[Event]:
    """All committed events of a topic of one partition."""
    partition = Partition(topic, 0)
    end = (await role.log.end_offsets([partition]))[partition]
    events: list[Event] = []
    async with role.log.reader() as reader:
        reader.assign({partition: 0})
        while reader.position(partition) < end:
            events += [await role.events.decode(record) for record in await reader.poll()]
    return events


async def torture(settings: Settings, *, kills: int, seed: int) -> tuple[Story, list[Event], list[Event]]:
    """(story, train-steps, weight-versions)"""
    story = Story()
    async with opened("chaos", settings) as role:
        await append_batches(role.events, role.blobs, settings.run.id, settings.feeder.draws)
        child = await kill(role, settings, story, kills=kills, rng=random.Random(seed))
        say(f"{story.kills} kills; waiting for the run to end")
        await until(lambda: child.returncode is not None, 2 * PATIENCE_S)
        story.exit_status = child.stop() if child.returncode is None else child.returncode
        return story, await everything(role, STEPS.name), await everything(role, WEIGHTS.name)


def verdict(
    settings: Settings,
    story: Story,
    stepped: list[Event],
    published: list[Event],
    *,
    id: str = "trainer",
    **more: object,
) -> int:
    """Compare with a re-run, print the line; `more` is told beside."""
    steps = [event for event in stepped if isinstance(event, StepCompleted)]
    versions = [event for event in published if isinstance(event, WeightVersionPublished)]
    batches = settings.feeder.draws
    counted = {step.batch_index: step for step in sorted(steps, key=lambda step: step.incarnation)}
    lost = len(set(range(batches)) - counted.keys())
    repeats = Counter((step.batch_index, step.incarnation) for step in steps)
    twice = sum(count - 1 for count in repeats.values())
    twice += sum(count - 1 for count in Counter(version.version for version in versions).values())
    skipped = sum(step.step != index + 1 for index, step in counted.items())
    losses = rerun(settings, None, batches)
    strange = sum(step.loss != losses[step.batch_index] for step in steps)
    of_batch: dict[int, set[object]] = {}
    for version in versions:
        of_batch.setdefault(version.batch_index, set()).add(version.files)
    identical = not strange and all(len(files) == 1 for files in of_batch.values())
    ok = identical and not lost and not twice and not skipped and not story.faults and story.exit_status == 0
    detail = {
        "batches": batches, "steps": len(steps), "versions": len(versions), "deaths": story.deaths,
        "incarnations": 1 + max(version.incarnation for version in versions), "exit_status": story.exit_status,
        "losses_that_differ": strange, "records_at_kill": story.after,
    }  # fmt: skip
    return told(
        id=id, kills=story.kills, lost=lost, twice=twice, skipped=skipped, identical=identical, ok=ok,
        detail=detail | more,
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill the trainer while it trains.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        replace = dataclasses.replace
        model = synthetic_model(Path(settings.run.directory) / "model")
        settings = replace(
            settings,
            model=replace(settings.model, path=str(model)),
            feeder=replace(settings.feeder, draws=max(10, STEPS_PER_KILL * arguments.kills)),
            trainer=replace(settings.trainer, threads=1, checkpoint_every=CHECKPOINT_EVERY),
        )
        return verdict(settings, *asyncio.run(torture(settings, kills=arguments.kills, seed=arguments.seed)))


if __name__ == "__main__":
    raise SystemExit(main())
