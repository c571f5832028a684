"""Kill the trainer, again and again: `python benchmarks/chaos/trainer.py [--kills 20] [--checkpoints s3]
[--kinds export,upload,commit]`.

Manifests wait on the log; a real `turnlog role trainer` is killed by SIGKILL again and again and started again: in
turns at
a seeded instant of a step, of an export, of an upload, of a save, of a commit, and while it starts. What is to die in
one of those is this file (`--dies-in`): the same trainer, in which the n-th call of that kind starts a timer within the
time that the one before took, and nobody outlives the end of it. Where checkpoints lie in the store
(`--checkpoints s3`, or TURNLOG_TRAINER_CHECKPOINTS=s3), also while a file or a manifest is put there or one is fetched,
and every other trainer begins with an empty disk.

In the end the history that counts (the highest incarnation per batch) must hold every batch once, and every loss of
every incarnation must be, bit for bit, that of a re-run over the same manifests; a weight version number must stand for
one set of weights.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import itertools
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from dying import doom, ended, until
from servers import TURNLOG, environment, say, servers, told

from tests.fakes.batches import append_batches, synthetic_model
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.schemas.events import Event, StepCompleted, WeightVersionPublished
from turnlog.schemas.topics import STEPS, WEIGHTS
from turnlog.settings import Settings
from turnlog.trainer.loop import rerun

STEPS_PER_KILL = 6
CHECKPOINT_EVERY = 3
PATIENCE_S = 180.0


@dataclass(slots=True)
class Story:
    """What happened."""

    kills: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    """Kills by what was under way."""
    deaths: int = 0
    """Ends that nobody asked for."""
    exit_status: int | None = None
    faults: list[str] = field(default_factory=list)
    """Whatever else was not to be."""


def trainer(settings: Settings, *doom: str) -> Child:
    """Start `turnlog role trainer`, or one that dies of itself."""
    variables = {
        "TURNLOG_MODEL_PATH": settings.model.path,
        "TURNLOG_TRAINER_LEARNING_RATE": str(settings.trainer.learning_rate),
        "TURNLOG_TRAINER_DTYPE": settings.trainer.dtype,
        "TURNLOG_FEEDER_DRAWS": str(settings.feeder.draws),
        "TURNLOG_TRAINER_THREADS": str(settings.trainer.threads),
        "TURNLOG_TRAINER_CHECKPOINT_EVERY": str(settings.trainer.checkpoint_every),
        "TURNLOG_TRAINER_CHECKPOINTS": settings.trainer.checkpoints,
    }
    name = "trainer-0"
    log = Path(settings.run.directory) / f"{name}.log"
    env = {**environment(settings, name), **variables}
    argv = (sys.executable, __file__, *doom) if doom else (*TURNLOG, "role", "trainer")
    return Child(Launch(name=name, argv=argv, log=log, env=env)).start()


Start = Callable[..., Child]
"""(settings, arguments of a process that is to die) -> a trainer."""


def _of_save() -> list[tuple[Any, str]]:
    from turnlog.trainer.checkpoints import state
    from turnlog.trainer.checkpoints.cursor import Checkpoints

    return [(state.Save, "__init__"), (state.Save, "_write"), (Checkpoints, "finish"), (Checkpoints, "seal")]


def places(kind: str) -> list[tuple[Any, str]]:
    """What is called while the trainer does that: (owner, name)."""
    from turnlog.infra.event_log import EventLog
    from turnlog.trainer.checkpoints.places import RunBlobs, StorePlace
    from turnlog.trainer.learner import Learner

    return {
        "step": [(Learner, "step")],
        "export": [(Learner, "begin_export")],
        "upload": [(RunBlobs, "put_files")],
        "save": _of_save(),
        "commit": [(EventLog, "transact")],
        "put": [(StorePlace, "put"), (StorePlace, "store_files")],
        "manifest": [(StorePlace, "seal")],
        "fetch": [(StorePlace, "fetch_files")],
    }[kind]


KINDS = ("step", "export", "upload", "save", "commit")
OF_STORE = ("put", "step", "manifest", "fetch")
"""What a trainer with its checkpoints in the store does first; nobody fetches before there is one."""
SELDOM = ("save", "manifest", "fetch")
"""Begun once or twice in a trainer's life here."""
START = "start"
LATEST = 3
"""Call of its kind that a process dies in."""


def all_kinds(*, stored: bool) -> tuple[str, ...]:
    """In their order; `stored`: checkpoints lie in the store."""
    return (*OF_STORE, *KINDS[1:], START) if stored else (*KINDS, START)


def doomed(kind: str, seed: int) -> int:
    """Be a trainer that dies in the middle of a call of that kind; it always does."""
    from turnlog.cli import main

    rng = random.Random(seed)
    owner, name = rng.choice(places(kind))
    doom(owner, name, 1 if kind in SELDOM else rng.randint(1, LATEST), rng.random())
    return main(["role", "trainer"])


async def kill(
    settings: Settings, story: Story, kinds: Sequence[str], start: Start, *, kills: int, rng: random.Random
) -> Child:
    """Kill in each kind of call in turn; the process that is left alive."""
    stored = settings.trainer.checkpoints == "s3"
    for number, kind in zip(range(kills), itertools.cycle(kinds), strict=False):
        if stored and number % 2:
            shutil.rmtree(Path(settings.run.directory) / "checkpoints", ignore_errors=True)
        if kind == START:
            child = start(settings)
            await until(functools.partial(ended, child), rng.uniform(0.0, 10.0))
            child.kill()
        else:
            child = start(settings, "--dies-in", kind, "--seed", str(rng.getrandbits(32)))
            await until(functools.partial(ended, child), PATIENCE_S)
        if kind != START and child.returncode != -signal.SIGKILL:
            story.faults.append(f"a trainer that was to die in a call of {kind} ended with {child.returncode}")
            say(child.tail())
            child.kill()
            continue
        story.kills += 1
        story.struck[kind] += 1
        say(f"kill {story.kills}: {kind}")
    return start(settings)


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


async def torture(
    settings: Settings, kinds: Sequence[str], *, kills: int, seed: int, start: Start = trainer
) -> tuple[Story, list[Event], list[Event]]:
    """(story, train-steps, weight-versions)"""
    story = Story()
    async with open_role("chaos", settings) as role:
        await append_batches(role.events, role.blobs, settings.run.id, settings.feeder.draws)
        child = await kill(settings, story, kinds, start, kills=kills, rng=random.Random(seed))
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
    within: float = 0.0,
    **more: object,
) -> int:
    """Compare with a re-run, from whose losses those of the log may differ by `within`, and print the line; `more` is
    told beside."""
    steps = [event for event in stepped if isinstance(event, StepCompleted)]
    versions = [event for event in published if isinstance(event, WeightVersionPublished)]
    batches = settings.feeder.draws
    counted = {step.batch_index: step for step in sorted(steps, key=lambda step: step.incarnation)}
    lost = len(set(range(batches)) - counted.keys())
    repeats = Counter((step.batch_index, step.incarnation) for step in steps)
    twice = sum(count - 1 for count in repeats.values())
    twice += sum(count - 1 for count in Counter((version.version, version.state) for version in versions).values())
    skipped = sum(step.step != index + 1 for index, step in counted.items())
    losses = rerun(settings, None, batches)
    strange = sum(abs(step.loss - losses[step.batch_index]) > within for step in steps)
    of_batch: dict[tuple[int, str], set[object]] = {}
    for version in versions:
        for name, sums in (("checksums", version.checksums), ("digests", version.digests)):
            if sums:
                of_batch.setdefault((version.batch_index, name), set()).add(frozenset(sums.items()))
    identical = not strange and all(len(sums) == 1 for sums in of_batch.values())
    ok = identical and not lost and not twice and not skipped and not story.faults and story.exit_status == 0
    detail = {
        "batches": batches, "steps": len(steps), "versions": len({version.version for version in versions}),
        "deaths": story.deaths,
        "incarnations": 1 + max(version.incarnation for version in versions), "exit_status": story.exit_status,
        "losses_that_differ": strange, "struck": dict(story.struck),
    }  # fmt: skip
    return told(
        id=id, kills=story.kills, lost=lost, twice=twice, skipped=skipped, identical=identical, ok=ok,
        detail=detail | more,
    )  # fmt: skip


def of_tiny_model(settings: Settings, kills: int) -> Settings:
    """Return the settings of a run that trains a tiny model for so many kills."""
    replace = dataclasses.replace
    model = synthetic_model(Path(settings.run.directory) / "model")
    return replace(
        settings,
        model=replace(settings.model, path=str(model)),
        feeder=replace(settings.feeder, draws=max(10, STEPS_PER_KILL * kills)),
        trainer=replace(
            settings.trainer, threads=1, learning_rate=8e-4, dtype="float32", checkpoint_every=CHECKPOINT_EVERY
        ),
    )


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill the trainer while it trains.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", choices=("folder", "s3"))
    parser.add_argument("--kinds", default="", help=f"what is under way: {', '.join((*KINDS, *OF_STORE, START))}; all")
    parser.add_argument("--dies-in", choices={*KINDS, *OF_STORE}, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.dies_in:
        return doomed(arguments.dies_in, arguments.seed)
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        settings = of_tiny_model(settings, arguments.kills)
        if arguments.checkpoints:
            trainer = dataclasses.replace(settings.trainer, checkpoints=arguments.checkpoints)
            settings = dataclasses.replace(settings, trainer=trainer)
        stored = settings.trainer.checkpoints == "s3"
        kinds = arguments.kinds.split(",") if arguments.kinds else all_kinds(stored=stored)
        story = asyncio.run(torture(settings, kinds, kills=arguments.kills, seed=arguments.seed))
        return verdict(settings, *story)


if __name__ == "__main__":
    raise SystemExit(main())
