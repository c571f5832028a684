"""Strike everybody while ranks send weights to engines: `python benchmarks/chaos/loader_direct.py [--kills 20]
[--engine real] [--seed 0]`.

A real `turnlog role trainer` of two tensor-parallel ranks trains on batches that lie on the log, and sends every
version to two engines, each with a real `turnlog role loader`, while clients ask the engines. Every eighth version is
stored, and each that an engine missed. In turns the trainer, its second rank, an engine and a loader are killed
(SIGKILL) and stopped (SIGSTOP, and SIGCONT a seeded while later), --kills times each, in turns at each moment of a
transfer (MOMENTS), which is read from the log. Whoever ends is started again.

In the end the loader of each engine must have named every version as loaded, superseded or refused (lost), once (twice)
since its engine was last registered with older weights, and both engines serve the newest. Every version is computed
again from the batches, with every loss the same: every token must be labelled with a published version, and have the
log-prob that an engine gives which is handed these weights as files (identical), whether the version was ever stored or
not. The trainer waited for no transfer longer than [weights] timeout_s and LATE_S (skipped), beside the time for which
we had stopped it. No process and no shared memory is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from answers import everything
from dying import until
from loader import ask, is_of
from servers import TURNLOG, environment, say, servers, told
from takeover import up

from tests.fakes.batches import synthetic_manifest, synthetic_rows
from tests.tiny_model import make_tiny_model
from turnlog.infra.batch_files import MEDIA_TYPE, write_rows
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engines.protocol import UNLABELLED, EngineError, OutputChunk
from turnlog.infra.engines.sglang import SGLang, SGLangControl
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.schemas.events import (
    EngineRegistered,
    EngineWeightsAwaited,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
    StepCompleted,
    WeightTransferBegun,
    WeightVersionPublished,
)
from turnlog.schemas.topics import ENGINES, STEPS, TRANSFERS, WEIGHTS
from turnlog.settings import EngineSettings, Settings
from turnlog.trainer import weights
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.launch import LearnerThread
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import learning_plan

TRAINER, RANK, ENGINE, LOADER = "trainer", "rank", "engine", "loader"
VICTIMS, WAYS = (TRAINER, RANK, ENGINE, LOADER), ("kill", "hang")
MOMENTS: dict[str, tuple[type[Event], float, float]] = {
    "announced": (WeightVersionPublished, 0.0, 0.0),
    "awaited": (EngineWeightsAwaited, 0.0, 0.0),
    "joining": (WeightTransferBegun, 0.0, 0.2),
    "in a bucket": (WeightTransferBegun, 0.2, 0.7),
    "before the acknowledgement": (WeightTransferBegun, 0.7, 1.0),
    "before the copy": (EngineWeightsLoaded, 0.0, 1.0),
}
"""Moment -> record behind which it lies, and how far: from one to another share of the time that the last transfer took
from its record to its first acknowledgement."""
COUNT = 2
RANKS = 2
TIMEOUT_S, JOIN_S, HANG_S = 6.0, 2.0, 9.0
LATE_S = 5.0
"""A call of all ranks, a poll of the log and a loaded machine come on top of a limit."""
DURABLE_EVERY = 8
AHEAD = 2
"""Batches that wait for the trainer."""
BATCH_S = 0.4
"""Least time between two batches."""
CLIENT_S = 0.1
PATIENCE_S = 240.0
VARIABLES = {
    "TURNLOG_TRAINER_PUBLISH": "direct", "TURNLOG_TRAINER_WORLD_SIZE": str(RANKS),
    "TURNLOG_TRAINER_TENSOR_PARALLEL": str(RANKS), "TURNLOG_TRAINER_DTYPE": "float32",
    "TURNLOG_TRAINER_LEARNING_RATE": "3e-4", "TURNLOG_TRAINER_LEARNING_RATE_SCHEDULE": "constant",
    "TURNLOG_TRAINER_THREADS": "1", "TURNLOG_TRAINER_CHECKPOINT_EVERY": "10",
    "TURNLOG_TRAINER_COLLECTIVE_TIMEOUT_S": "60", "TURNLOG_FEEDER_DRAWS": "1000000",
    "TURNLOG_WEIGHTS_TIMEOUT_S": str(TIMEOUT_S), "TURNLOG_WEIGHTS_JOIN_S": str(JOIN_S),
    "TURNLOG_WEIGHTS_BUCKET_MB": "1", "TURNLOG_WEIGHTS_DURABLE_EVERY": str(DURABLE_EVERY),
    "TURNLOG_WEIGHTS_HOST": HOST, "TURNLOG_LOADER_TIMEOUT_S": "20", "TURNLOG_LOADER_SILENT_S": "3",
    "TURNLOG_LOADER_GONE_S": "20",
}  # fmt: skip
Answer = tuple[str, OutputChunk]
"""(engine, what it answered)."""


@dataclass(slots=True)
class Story:
    """What happened."""

    struck: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    hangs: list[tuple[float, float]] = field(default_factory=list)
    """Beginning and end of each time for which the trainer or its rank was stopped, in seconds of the clock."""
    ends: Counter[str] = field(default_factory=Counter)
    """Ends of processes that nobody killed: a loader of a dead engine, a trainer of a dead rank."""
    exits: dict[str, int | None] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Whatever else was not to be."""


class Watch:
    """Follows the log and tells what comes."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._waiting: list[tuple[type[Event], asyncio.Future[Event]]] = []
        self.trained = -1
        """Newest batch that was trained."""
        self.newest = -1
        """Newest version that was announced or published."""
        self.loaded = dict.fromkeys(map(name_of, range(COUNT)), -1)
        """Engine -> version that it serves."""
        self.took_s = 0.1
        """Seconds from the beginning of the last transfer to its first acknowledgement."""
        self._begun = time.monotonic()

    async def next(self, kind: type[Event], limit_s: float) -> Event | None:
        """Return the next record of this kind, or None if there was none for so long."""
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiting.append((kind, future))
        done, _ = await asyncio.wait([future], timeout=limit_s)
        return future.result() if done else None

    async def follow(self) -> None:
        """Until it is cancelled."""
        async with self._role.log.reader() as reader:
            reader.assign({Partition(topic.name, 0): 0 for topic in (WEIGHTS, TRANSFERS, ENGINES, STEPS)})
            while True:
                for record in await reader.poll(timeout_s=0.2):
                    self._take(await self._role.events.decode(record))

    def _take(self, event: Event) -> None:
        match event:
            case StepCompleted():
                self.trained = max(self.trained, event.batch_index)
            case WeightVersionPublished():
                self.newest = max(self.newest, event.version)
            case WeightTransferBegun():
                self._begun = time.monotonic()
            case EngineWeightsLoaded() | EngineRegistered():
                self.loaded[event.engine_id] = event.version
                if isinstance(event, EngineWeightsLoaded) and "join" in event.seconds:
                    self.took_s = min(1.0, time.monotonic() - self._begun)
        for kind, future in self._waiting:
            if isinstance(event, kind) and not future.done():
                future.set_result(event)
        self._waiting = [one for one in self._waiting if not one[1].done()]


def name_of(number: int) -> str:
    """Return the id of an engine."""
    return f"engine-{number}"


class Processes:
    """The trainer, the engines and their loaders."""

    def __init__(self, settings: Settings, kind: str, story: Story) -> None:
        self._settings, self._kind, self.story = settings, kind, story
        self._folder = Path(settings.run.directory)
        self.children: dict[str, Child] = {}
        self._shared: set[str] = set()
        """Paths of shared memory that processes of this run had, other than what has no name."""
        self._engines = [
            EngineServer(Path(settings.model.path), EngineSettings(), log=self._folder / f"{name_of(number)}.log",
                         port=int(url.rpartition(":")[2]), name=name_of(number))
            for number, url in enumerate(settings.engine.urls)
        ]  # fmt: skip

    def start(self, name: str) -> Child:
        """Start it, or start it again."""
        kind, _, number = name.partition("-")
        child = self.children[name] = Child(self._engine(int(number)) if kind == ENGINE else self._role(name))
        return child.start()

    def _role(self, name: str) -> Launch:
        settings, (kind, _, number) = self._settings, name.partition("-")
        env = {
            **environment(settings, name), **VARIABLES, "TURNLOG_MODEL_PATH": settings.model.path,
            "TURNLOG_ENGINE_URLS": ",".join(settings.engine.urls), "TURNLOG_ENGINE_INDEX": number or "0",
        }  # fmt: skip
        return Launch(name=name, argv=(*TURNLOG, "role", kind), log=self._folder / f"{name}.log", env=env)

    def _engine(self, number: int) -> Launch:
        if self._kind == "real":
            return self._engines[number].launch()
        url = self._settings.engine.urls[number]
        script = str(Path(__file__).with_name("scripted_engine.py"))
        argv = (sys.executable, script, url.rpartition(":")[2], self._settings.model.path, "--unscripted")
        log = self._folder / f"{name_of(number)}.log"
        env = environment(self._settings, name_of(number))
        return Launch(name=name_of(number), argv=argv, log=log, env=env, ready=lambda: up(f"{url}/ready"))

    def revive(self) -> None:
        """Start again what ended, as a supervisor does."""
        for name, child in list(self.children.items()):
            if child.returncode is not None:
                self.story.ends[name.partition("-")[0]] += 1
                child.kill()  # and what it has left behind
                self.start(name)

    async def keep(self) -> None:
        """Until it is cancelled."""
        while True:
            self.revive()
            await asyncio.sleep(0.2)

    def second_rank(self) -> int | None:
        """Return the pid of the trainer's second rank, if it has one now."""
        return next(
            (pid for pid, command in commands() if "turnlog.trainer.launch" in command and self.owns(pid)), None
        )

    def owns(self, pid: int) -> bool:
        """Return whether a process belongs to this run."""
        with contextlib.suppress(OSError):
            return f"TURNLOG_RUN_ID={self._settings.run.id}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False

    def note_shared(self) -> None:
        """Note the shared memory that processes of this run have now."""
        for pid, _ in commands():
            if self.owns(pid):
                with contextlib.suppress(OSError):
                    self._shared.update(re.findall(r"(/dev/shm/\S+)$", Path(f"/proc/{pid}/maps").read_text(), re.M))

    def left(self) -> list[str]:
        """Return the commands of all processes of this run that live, and the shared memory that they have left."""
        living = [command for pid, command in commands() if self.owns(pid) and pid != os.getpid()]
        return living + sorted(path for path in self._shared if Path(path).exists())


def commands() -> Iterator[tuple[int, str]]:
    """Yield (pid, command line) of every process of the machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield int(folder.name), (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


async def feed(role: Role, watch: Watch, count: list[int]) -> None:
    """Write batches as the trainer needs them, until it is cancelled; `count` holds how many there are."""
    while True:
        if count[0] - watch.trained <= AHEAD:
            rows = synthetic_rows(count[0])
            file = await role.blobs.put(write_rows(rows), media_type=MEDIA_TYPE)
            await role.events.append(synthetic_manifest(rows, file, role.settings.run.id, count[0]))
            count[0] += 1
        await asyncio.sleep(BATCH_S)


async def ask_on(name: str, url: str, answers: list[Answer]) -> None:
    """Ask an engine until it is cancelled; at times it is dead."""
    engine = SGLang(url)
    try:
        while True:
            with contextlib.suppress(EngineError):
                answer = await ask(engine)
                if UNLABELLED not in (label for label, _ in answer.versions):  # gateways know no engine without weights
                    answers.append((name, answer))
            await asyncio.sleep(CLIENT_S)
    finally:
        await engine.close()


async def strike(processes: Processes, watch: Watch, story: Story, *, kills: int, rng: random.Random) -> None:
    """Strike each victim in each way, so many times, at one moment after another."""
    for number in range(kills):
        for at, (way, victim) in enumerate(itertools.product(WAYS, VICTIMS)):
            moment = list(MOMENTS)[(number + at) % len(MOMENTS)]
            await calm(watch, story)
            processes.note_shared()
            kind, least, most = MOMENTS[moment]
            if await watch.next(kind, PATIENCE_S) is None:
                story.faults.append(f"no {kind.__name__} for {PATIENCE_S:g} s before {way} of {victim} {moment}")
                return
            await asyncio.sleep(rng.uniform(least, most) * watch.took_s)
            if await struck(processes, story, victim, way, rng):
                story.struck[f"{way} {victim}: {moment}"] += 1
                say(f"{number + 1}/{kills}: {way} {victim} {moment}, version {watch.newest}")
            else:
                story.faults.append(f"there was no {victim} to {way} {moment}")


async def struck(processes: Processes, story: Story, victim: str, way: str, rng: random.Random) -> bool:
    """Strike; return whether there was somebody."""
    name = victim if victim in (TRAINER, RANK) else f"{victim}-{rng.randrange(COUNT)}"
    whole = processes.children.get(name)
    pid = processes.second_rank() if victim == RANK else whole.pid if whole and whole.returncode is None else None
    if pid is None:
        return False
    # An engine is several processes, which lead a group. A training rank is one.
    send = os.killpg if victim == ENGINE else os.kill
    with contextlib.suppress(ProcessLookupError):
        if way == "kill":
            send(pid, signal.SIGKILL)
            return True
        began = time.time()
        send(pid, signal.SIGSTOP)
        await asyncio.sleep(rng.uniform(0.2, HANG_S))
        send(pid, signal.SIGCONT)
        if victim in (TRAINER, RANK):
            story.hangs.append((began, time.time()))
        return True
    return False


async def calm(watch: Watch, story: Story) -> None:
    """Wait until both engines have taken a version that is newer than all there is now."""
    there = watch.newest
    await until(lambda: min(watch.loaded.values()) > there, PATIENCE_S)
    if min(watch.loaded.values()) <= there:
        story.faults.append(f"engines have {watch.loaded}, none newer than {there}, after {PATIENCE_S:g} s")


async def torture(settings: Settings, role: Role, processes: Processes, *, kills: int, seed: int) -> tuple[Story, int]:
    """Return what happened and the number of batches, once the engines have the newest version and all has stopped."""
    story, watch, count = processes.story, Watch(role), [0]
    tasks = [asyncio.create_task(watch.follow())]
    for number in range(COUNT):
        processes.start(name_of(number))
    await asyncio.gather(*(asyncio.to_thread(processes.children[name_of(one)].wait_ready) for one in range(COUNT)))
    for name in (TRAINER, *(f"{LOADER}-{number}" for number in range(COUNT))):
        processes.start(name)
    keeping = asyncio.create_task(processes.keep())
    feeding = asyncio.create_task(feed(role, watch, count))
    for number, url in enumerate(settings.engine.urls):
        tasks.append(asyncio.create_task(ask_on(name_of(number), url, story.answers)))
    await strike(processes, watch, story, kills=kills, rng=random.Random(seed))
    feeding.cancel()
    say(f"{story.struck.total()} strikes; waiting until {count[0]} batches are trained and served")
    await until(lambda: watch.trained == count[0] - 1 and set(watch.loaded.values()) == {watch.newest}, PATIENCE_S)
    if set(watch.loaded.values()) != {watch.newest}:
        story.faults.append(f"at the end the engines have {watch.loaded}, not {watch.newest}")
    begun = len(story.answers)
    await until(lambda: len(story.answers) > begun + 4 * COUNT, PATIENCE_S)
    processes.note_shared()
    keeping.cancel()
    for name in (TRAINER, *(f"{LOADER}-{number}" for number in range(COUNT))):
        story.exits[name] = await asyncio.to_thread(processes.children[name].stop)
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, keeping, feeding, return_exceptions=True)
    story.faults += [f"a task ended with {end!r}" for end in ends if not isinstance(end, asyncio.CancelledError)]
    return story, count[0]


async def references(
    settings: Settings, published: dict[int, WeightVersionPublished], steps: dict[int, StepCompleted], used: set[int]
) -> tuple[dict[int, OutputChunk], int]:
    """Return what an engine answers under each of these versions, whose weights are computed again from the batches and
    handed to it as files; and how many losses were others."""
    plan = learning_plan(settings)
    of_step: dict[int, list[int]] = {}
    for number in used & published.keys():
        of_step.setdefault(published[number].step, []).append(number)
    found: dict[int, OutputChunk] = {}
    strange, url = 0, settings.engine.urls[0]
    asked, control = SGLang(url), SGLangControl(url)
    async with LearnerThread(plan, lambda _: None) as learner:
        for step in range(max(of_step, default=0) + 1):
            if step:
                rows = plan.objective.rows_to_compute(synthetic_rows(step - 1))
                result = await learner.call(Learner.step, rows, plan.objective, plan.learning_rate(step - 1))
                strange += result.loss != steps[step - 1].loss
            if step not in of_step:
                continue
            folder = Path(settings.run.directory) / f"reference-{step}"
            folder.mkdir()
            await learner.call(Learner.export_files, folder)
            shutil.copyfile(Path(settings.model.path) / "config.json", folder / "config.json")
            await control.pause()
            await control.load(folder, step, timeout_s=60.0)
            await control.resume()
            found |= dict.fromkeys(of_step[step], await ask(asked))
            shutil.rmtree(folder)
    await asked.close()
    await control.close()
    return found, strange


@dataclass(slots=True)
class Acknowledged:
    """What the loader of one engine said of versions."""

    lives: list[Counter[int]] = field(default_factory=lambda: [Counter()])
    """Version -> how often it was named as loaded or superseded, since each time at which the engine was registered
    with older weights: it was started again, or a transfer left it without a whole version."""
    refused: set[int] = field(default_factory=set)

    def apply(self, event: Event) -> None:
        """Fold a record of the engine."""
        match event:
            case EngineRegistered() if event.version < max(self.lives[-1], default=-1):
                self.lives.append(Counter())
            case EngineWeightsLoaded():
                self.lives[-1].update((event.version, *event.superseded))
            case EngineWeightsRefused():
                self.refused.add(event.refused_version)

    @property
    def named(self) -> set[int]:
        return self.refused.union(*self.lives)

    @property
    def twice(self) -> int:
        return sum(count - 1 for life in self.lives for count in life.values())


def held_too_long(steps: Sequence[tuple[float, StepCompleted]], hangs: Sequence[tuple[float, float]]) -> list[str]:
    """Return the steps before which training waited for weights longer than it may."""
    found = []
    for at, step in steps:
        waited_s = step.seconds.get("publish", 0.0)
        begin = at - waited_s - sum(step.seconds.values())
        stopped_s = sum(max(0.0, min(at, end) - max(begin, start)) for start, end in hangs)
        if waited_s > TIMEOUT_S + LATE_S + stopped_s:
            found.append(f"step {step.step} waited {waited_s:.1f} s, {stopped_s:.1f} s of them stopped by us")
    return found


async def tried(settings: Settings, processes: Processes, *, kills: int, seed: int, bits: bool) -> int:
    """The whole story; the exit status."""
    async with open_role("chaos", settings) as role:
        story, batches = await torture(settings, role, processes, kills=kills, seed=seed)
        published = await everything(role, WEIGHTS.name, TRANSFERS.name)
        status = [event for _, _, event in await everything(role, ENGINES.name)]
        stepped = await timed_steps(role)
    versions = {event.version: event for _, _, event in published if isinstance(event, WeightVersionPublished)}
    stored = {event.version for _, _, event in published if isinstance(event, WeightVersionPublished) and event.files}
    used = {int(label) for _, answer in story.answers for label, _ in answer.versions if label.isdecimal()}
    say(f"{len(story.answers)} answers by {len(used)} of {len(versions)} versions, {len(stored)} of which are stored")
    steps = {step.step - 1: step for _, step in stepped}
    found, strange_losses = await references(settings, versions, steps, used)
    for name in map(name_of, range(COUNT)):
        processes.children[name].stop()
    said = {name: Acknowledged() for name in map(name_of, range(COUNT))}
    for event in status:
        said[event.engine_id].apply(event)  # type: ignore[attr-defined]
    lost = {name: sorted(set(versions) - one.named) for name, one in said.items()}
    strange = [answer for answer in story.answers if not is_of(answer[1], found, bits=bits)]
    for answer in strange[:5]:
        say(f"of no published weights: {answer}")
    late = held_too_long(stepped, story.hangs)
    left = processes.left()
    loads = [event for event in status if isinstance(event, EngineWeightsLoaded)]
    twice, missing = sum(one.twice for one in said.values()), sum(map(len, lost.values()))
    well = not any(story.exits.values()) and not (story.faults or late or left or strange_losses)
    wanted = kills * len(VICTIMS) * len(WAYS)
    return told(
        id="loader-direct", kills=story.struck.total(), lost=missing, twice=twice, skipped=len(late),
        identical=not strange and not strange_losses,
        ok=well and story.struck.total() == wanted and not (missing or twice or strange),
        detail={
            "struck": dict(sorted(story.struck.items())), "batches": batches, "versions": len(versions),
            "stored": len(stored), "transfers": sum(isinstance(one, WeightTransferBegun) for _, _, one in published),
            "direct_loads": sum("fetch" not in event.seconds for event in loads), "loads": len(loads),
            "superseded": sum(len(event.superseded) for event in loads),
            "refused": {name: sorted(one.refused) for name, one in said.items()},
            "lives": {name: len(one.lives) for name, one in said.items()}, "answers": len(story.answers),
            "versions_answered_by": len(used), "never_stored_of_these": len(used - stored),
            "losses_that_differ": strange_losses, "late": late[:5], "left": left, "ends": dict(story.ends),
            "longest_wait_s": round(max((step.seconds.get("publish", 0.0) for _, step in stepped), default=0.0), 2),
            "exits": story.exits, "faults": story.faults, "unanswered": {name: ids[:9] for name, ids in lost.items()},
        },
    )  # fmt: skip


async def timed_steps(role: Role) -> list[tuple[float, StepCompleted]]:
    """Return every step with the time of its record, in seconds of the clock."""
    partition, found = Partition(STEPS.name, 0), list[tuple[float, StepCompleted]]()
    end = (await role.log.end_offsets([partition]))[partition]
    async with role.log.reader() as reader:
        reader.assign({partition: 0})
        while reader.position(partition) < end:
            for record in await reader.poll():
                event = await role.events.decode(record)
                if isinstance(event, StepCompleted):
                    found.append((record.timestamp_ms / 1000, event))
    return found


def model_folder(folder: Path) -> Path:
    """Write a random model of a dozen buckets, with a tokenizer that engines can use."""
    tiny = make_tiny_model(folder / "tiny")
    shape = dataclasses.replace(read_shape(tiny), hidden=128, ffn=512, layers=6)
    torch.manual_seed(0)
    tensors = {name: torch.randn(dims) * 0.02 for name, dims in weights.expected_shapes(shape).items()}
    weights.write_folder(folder / "model", shape, tensors, tiny)
    return folder / "model"


def with_all(settings: Settings, model: Path) -> Settings:
    """Return the settings that the processes have by VARIABLES."""
    replace, urls = dataclasses.replace, tuple(f"http://{HOST}:{port}" for port in free_ports(COUNT))
    trainer = replace(
        settings.trainer, publish="direct", world_size=RANKS, tensor_parallel=RANKS, dtype="float32", threads=1,
        learning_rate=3e-4, learning_rate_schedule="constant",
    )  # fmt: skip
    return replace(
        settings, model=replace(settings.model, path=str(model)), engine=replace(settings.engine, urls=urls),
        feeder=replace(settings.feeder, draws=1_000_000), trainer=trainer,
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Strike everybody while weights go from ranks to engines.")
    parser.add_argument("--kills", type=int, default=20, help="of each victim, and as many hangs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("scripted", "real"), default="scripted")
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        settings = with_all(settings, model_folder(Path(settings.run.directory)))
        processes = Processes(settings, arguments.engine, Story())
        try:
            return asyncio.run(
                tried(settings, processes, kills=arguments.kills, seed=arguments.seed,
                      bits=arguments.engine == "scripted")
            )  # fmt: skip
        finally:
            for child in processes.children.values():
                child.kill()


if __name__ == "__main__":
    raise SystemExit(main())
