"""W1: weights from the memory of training ranks into engines that serve them, sent directly.

A real Megatron trainer and two real SGLang engines on CPU, with their loaders. Before each version the trainer takes a
step, so that every value is another. Seconds run from the beginning of the digests, before the version is announced,
until both engines have compared what they loaded with the announcement and serve again. The log is in memory, which
spares a few milliseconds. The floor is a bare broadcast of as many bytes between as many processes.

Beside it: the same weights through the store (export, upload, fetch, check, load, by the same roles); the engines'
pause beside the time that they receive, and beside their own loading of such a folder from the page cache, both at once
(without a goal: on two cores a bare broadcast alone takes longer); memory beside the model at its peak; two training
ranks (tensor parallel) to the two engines; engines that map the memory of the training rank ([engine] colocate) in
place of a broadcast; the CPU time of each way; and differences in bfloat16 beside whole copies (weight_deltas.py). What
it does not show: a network, a device.

BENCH_PARAMETERS=500000000 sets the number of parameters.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from broadcasting import bare_broadcast
from cost_meter import processes, tree_seconds, trees
from row import say, size, told
from weight_deltas import changed_versions

from tests.fakes.batches import synthetic_rows
from tests.fakes.memory_log import MemoryLog
from tests.tiny_model import make_tiny_model
from turnlog.consumers.loader.role import Loader
from turnlog.infra.embedded.servers import EngineServer, ObjectStore
from turnlog.infra.engines.sglang import SGLangControl
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Partition
from turnlog.infra.registry import MemoryRegistry
from turnlog.infra.roles.health import Health
from turnlog.infra.roles.role import Role
from turnlog.infra.s3 import S3Blobs
from turnlog.infra.topics_admin import apply
from turnlog.processors.core.views.progress import WeightChain
from turnlog.schemas.events import EngineWeightsLoaded, EngineWeightsRefused, Event
from turnlog.schemas.topics import ENGINES
from turnlog.settings import (
    EngineSettings,
    LoaderSettings,
    ModelSettings,
    RunSettings,
    Settings,
    StoreSettings,
    TrainerSettings,
    WeightsSettings,
)
from turnlog.trainer import weights
from turnlog.trainer.checkpoints.places import RunBlobs
from turnlog.trainer.checkpoints.publications import Publications
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import LearnerThread
from turnlog.trainer.learner import Learner
from turnlog.trainer.manifests import Cursor
from turnlog.trainer.plan import LearningPlan, learning_plan
from turnlog.trainer.transfers import Transfers
from turnlog.trainer.weight_records import version_event

GOAL_SHARE, GOAL_OF_STORE, GOAL_PAUSE, GOAL_BUCKETS = 0.5, 5.0, 1.3, 1.0
PARAMETERS = int(os.environ.get("BENCH_PARAMETERS", size(200_000_000, smallest=0)))
BUCKET_MB = size(64, smallest=1)
TIMES = size(5, smallest=1)
"""Repetitions, of which the median counts."""
ENGINES_COUNT = 2
CORES = len(os.sched_getaffinity(0))
LOADED_S = 600.0
"""Limit of everything that is waited for."""


def model_folder(folder: Path) -> tuple[Path, ModelShape]:
    """Write a random model of about PARAMETERS parameters, nearly all of them in feed-forward layers, or of a tiny
    model's shape, and return its folder."""
    tiny = make_tiny_model(folder / "tiny")
    shape = read_shape(tiny)
    if PARAMETERS:
        hidden = 1024 if PARAMETERS > 20_000_000 else 128
        shape = dataclasses.replace(
            shape, hidden=hidden, ffn=4 * hidden, layers=max(1, PARAMETERS // (12 * hidden * hidden))
        )
    torch.manual_seed(0)
    tensors = {name: torch.randn(dims) * 0.02 for name, dims in weights.expected_shapes(shape).items()}
    weights.write_folder(folder / "model", shape, tensors, tiny)
    return folder / "model", shape


def settings_of(
    folder: Path, model: Path, store: StoreSettings, urls: Sequence[str], *, ranks: int = 1, colocate: bool = False
) -> Settings:
    """Return the settings of a run whose trainer has so many tensor-parallel ranks. `colocate`: engines map the
    trainer's memory."""
    name = f"w1-{ranks}-{colocate}"
    return Settings(
        run=RunSettings(id=name, directory=str(folder / name)),
        model=ModelSettings(path=str(model)),
        engine=EngineSettings(urls=tuple(urls), colocate=colocate),
        store=store,
        trainer=TrainerSettings(
            publish="direct",
            world_size=ranks,
            tensor_parallel=ranks,
            threads=max(1, CORES // ranks),
            dtype="float32",
            learning_rate=1e-4,
        ),
        weights=WeightsSettings(
            durable_every=1_000_000, timeout_s=LOADED_S, join_s=LOADED_S, bucket_mb=BUCKET_MB, host="127.0.0.1"
        ),
        loader=LoaderSettings(timeout_s=LOADED_S, silent_s=LOADED_S, gone_s=LOADED_S),
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """One version, from the trainer's memory to both engines."""

    seconds: float
    cpu_s: float
    phases: Mapping[str, float]
    """The trainer's phases, and the longest of each phase of the engines."""

    @property
    def pause_s(self) -> float:
        """Seconds for which an engine was paused, at the longest."""
        return sum(self.phases[name] for name in PAUSED if name in self.phases)


PAUSED = ("pause", "load", "check", "resume")


class Way:
    """A run whose versions go to engines."""

    def __init__(
        self, role: Role, plan: LearningPlan, learner: LearnerThread, transfers: Transfers, publications: Publications
    ) -> None:
        self._role, self._plan, self._learner = role, plan, learner
        self._transfers, self._publications = transfers, publications
        self._cursor = Cursor()
        self.version = -1

    async def step(self) -> None:
        """Change every value."""
        rows = synthetic_rows(self._cursor.step)
        await self._learner.call(Learner.step, rows, self._plan.objective, 1e-4)
        self._cursor = dataclasses.replace(
            self._cursor, step=self._cursor.step + 1, next_batch=self._cursor.next_batch + 1
        )
        self.version += 1

    async def send(self) -> Taken:
        """Send the ranks' weights to the engines."""
        before, began = cpu_seconds(), time.perf_counter()
        event = await self._transfers.announcement(self.version, self._cursor)
        digests_s = time.perf_counter() - began
        await self._role.events.append(event)
        await self._transfers.publish(event, self._cursor, last=False)
        sent_s = time.perf_counter() - began - digests_s
        return await self._taken(before, began, {"digests": digests_s, "send": sent_s})

    async def store(self) -> Taken:
        """Publish the ranks' weights through the store."""
        before, began = cpu_seconds(), time.perf_counter()

        def said(*of: Any, **more: Any) -> Any:
            about = {"incarnation": 0, "cursor": self._cursor, "checkpoint": None}
            return version_event(*of, **more, run_id=self._role.settings.run.id, version=self.version, **about)

        await self._publications.begin(self.version, said)
        exported_s = time.perf_counter() - began
        await self._publications.settle()
        uploaded_s = time.perf_counter() - began - exported_s
        return await self._taken(before, began, {"export": exported_s, "upload": uploaded_s})

    async def _taken(self, cpu_s: float, began: float, phases: Mapping[str, float]) -> Taken:
        loaded = await self._acknowledged()
        seconds = time.perf_counter() - began
        names = {name for event in loaded for name in event.seconds}
        of_engines = {name: max(event.seconds.get(name, 0.0) for event in loaded) for name in names}
        return Taken(seconds, cpu_seconds() - cpu_s, {**phases, **of_engines})

    async def _acknowledged(self) -> list[EngineWeightsLoaded]:
        """Return the records of the engines that have loaded the version, once all have."""
        found: dict[str, EngineWeightsLoaded] = {}
        async with asyncio.timeout(LOADED_S), self._role.log.reader() as reader:
            reader.assign({Partition(ENGINES.name, 0): 0})
            while len(found) < ENGINES_COUNT:
                for record in await reader.poll(timeout_s=0.2):
                    event: Event = await self._role.events.decode(record)
                    if isinstance(event, EngineWeightsRefused):
                        raise AssertionError(event.message)
                    if isinstance(event, EngineWeightsLoaded) and event.version == self.version:
                        found[event.engine_id] = event
        return list(found.values())


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and everything below it so far."""
    return sum(tree_seconds({"all": os.getpid()}, processes())["all"])


@contextlib.asynccontextmanager
async def way(settings: Settings, blobs: S3Blobs) -> AsyncIterator[Way]:
    """A run with its trainer's ranks and its loaders. Its first version is in the engines."""
    log = MemoryLog()
    await apply(log, settings)
    async with contextlib.AsyncExitStack() as stack:
        events = await stack.enter_async_context(EventLog.open(log, MemoryRegistry(), writer="bench"))

        def role(name: str) -> Role:
            return Role(name.partition("-")[0], name, settings, log, events, blobs, Health(name))

        trainer, loaders = role("trainer"), [role(f"loader-{number}") for number in range(ENGINES_COUNT)]
        plan = dataclasses.replace(learning_plan(settings), blobs=RunBlobs(settings.store))
        learner = await stack.enter_async_context(LearnerThread(plan, lambda _: None))
        exports, model = Path(settings.run.directory) / "exports", Path(settings.model.path)
        publications = await stack.enter_async_context(
            Publications(exports, model, blobs, learner.call, learner.call_beside, events.append)
        )
        controls = [SGLangControl(url) for url in settings.engine.urls]
        tasks = [
            asyncio.create_task(Loader(each, control, f"engine-{number}", control.url).run())
            for number, (each, control) in enumerate(zip(loaders, controls, strict=True))
        ]
        transfers = Transfers(trainer, 0, learner.call, publications, WeightChain(), events.append, lambda: None)
        found = Way(trainer, plan, learner, await stack.enter_async_context(transfers), publications)
        try:
            await found.step()
            await found.store()
            yield found
        except BaseException:
            for task in tasks:
                task.cancel()  # it may wait for its engine, which waits for the trainer
            raise
        finally:
            for each in loaders:
                each.stopping.set()
            await asyncio.wait(tasks)
            for control in controls:
                await control.close()
        for task in tasks:
            task.result()


class Peaks:
    """Memory that processes have in a transfer beside what they had before, at its peak."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = pids
        self.found = dict.fromkeys(pids, 0)
        """Bytes of each process."""

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch one transfer."""
        before = dict[str, int]()
        for name, pid in self._pids.items():
            Path(f"/proc/{pid}/clear_refs").write_text("5")
            before[name] = resident(pid, "VmRSS")
        yield
        for name, pid in self._pids.items():
            self.found[name] = max(self.found[name], resident(pid, "VmHWM") - before[name])


def resident(pid: int, what: str) -> int:
    """Return bytes as the kernel counts them: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def schedulers() -> dict[str, int]:
    """Return the processes of the engines that hold weights."""
    known = processes()
    below = trees([os.getpid()], known)[os.getpid()]
    found = [pid for pid in below if known[pid].name.startswith("sglang::sched")]
    return {f"engine-{number}": pid for number, pid in enumerate(sorted(found))}


async def own_load(urls: Sequence[str], model: Path) -> tuple[float, float]:
    """Return the median seconds for which engines are paused that read a folder from the page cache, all at once, and
    the CPU seconds."""
    controls = [SGLangControl(url) for url in urls]

    async def one(control: SGLangControl, label: int) -> float:
        began = time.perf_counter()
        await control.pause()
        await control.load(model, label, timeout_s=LOADED_S)
        await control.resume()
        return time.perf_counter() - began

    seconds, cpu_s = [], 0.0
    for turn in range(TIMES + 1):  # the first warms up
        before = cpu_seconds()
        seconds.append(max(await asyncio.gather(*(one(control, turn) for control in controls))))
        cpu_s = cpu_seconds() - before
    for control in controls:
        await control.close()
    return statistics.median(seconds[1:]), cpu_s


def medians(taken: Sequence[Taken]) -> dict[str, float]:
    """Return the median of each phase in seconds."""
    return {
        name: round(statistics.median(one.phases.get(name, 0.0) for one in taken), 4)
        for name in dict.fromkeys(name for one in taken for name in one.phases)
    }


async def sent(found: Way, peaks: Peaks) -> list[Taken]:
    """Send versions; the first, for which groups are formed, and then TIMES more."""
    taken = []
    for _ in range(TIMES + 1):
        await found.step()
        with peaks.watched():
            taken.append(await found.send())
        say(f"  sent in {taken[-1].seconds:.3f} s: {medians(taken[-1:])}")
    return taken


async def measure(
    folder: Path, model: Path, urls: Sequence[str], store: StoreSettings, blobs: S3Blobs
) -> dict[str, Any]:
    """Return all figures of the ways, by one training rank and by two."""
    found: dict[str, Any] = {}
    async with way(settings_of(folder, model, store, urls), blobs) as one:
        say("direct, one training rank")
        peaks = Peaks({"trainer": os.getpid(), **schedulers()})
        found["direct"] = await sent(one, peaks)
        found["peaks"] = peaks.found
        say("through the store")
        found["store"] = []
        for _ in range(TIMES):
            await one.step()
            found["store"].append(await one.store())
            say(f"  stored and loaded in {found['store'][-1].seconds:.3f} s: {medians(found['store'][-1:])}")
    say("direct, two training ranks")
    async with way(settings_of(folder, model, store, urls, ranks=2), blobs) as two:
        found["two"] = await sent(two, Peaks({}))
    say("by shared memory, one training rank")
    async with way(settings_of(folder, model, store, urls, colocate=True), blobs) as colocated:
        found["shared"] = await sent(colocated, Peaks({}))
    say("the engines' own loading")
    found["own"] = await own_load(urls, model)
    return found


def main() -> int:
    """Print one JSON line."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, shape = model_folder(folder)
        nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        say(f"{shape.layers} layers of {shape.hidden}, {nbytes / 1e6:.0f} MB in float32")
        floor_s, floor_cpu_s = bare_broadcast(nbytes, ENGINES_COUNT, TIMES)
        say(f"bare broadcast: {nbytes / floor_s / 1e6:.0f} MB/s")
        store = stack.enter_context(ObjectStore(folder / "store", StoreSettings()))
        began = time.perf_counter()
        urls = started(stack, folder, model)
        say(f"engines started in {time.perf_counter() - began:.0f} s")
        found = asyncio.run(_closing(folder, model, urls, store.settings))
        again_s, _ = bare_broadcast(nbytes, ENGINES_COUNT, TIMES)
    say(f"bare broadcast again: {nbytes / again_s / 1e6:.0f} MB/s")
    return report(nbytes, statistics.mean((floor_s, again_s)), floor_cpu_s, found)


def started(stack: contextlib.ExitStack, folder: Path, model: Path) -> list[str]:
    """Return the addresses of engines that serve the model."""
    engines = [
        EngineServer(model, EngineSettings(start_timeout_s=LOADED_S), log=folder / f"engine-{number}.log")
        for number in range(ENGINES_COUNT)
    ]
    with ThreadPoolExecutor() as threads:  # they start at the same time
        for engine in engines:
            stack.callback(engine.stop)
        return list(threads.map(EngineServer.start, engines))


async def _closing(folder: Path, model: Path, urls: Sequence[str], store: StoreSettings) -> dict[str, Any]:
    blobs = S3Blobs(store)
    try:
        found = await measure(folder, model, urls, store, blobs)
        return found | {"deltas": await changed_versions(folder, store, blobs, PARAMETERS)}
    finally:
        await blobs.close()


def report(nbytes: int, floor_s: float, floor_cpu_s: float, found: Mapping[str, Any]) -> int:
    """Print the line; the exit status."""
    direct, store, two, shared = found["direct"][1:], found["store"], found["two"][1:], found["shared"][1:]
    direct_s, store_s, two_s, shared_s = (
        statistics.median(one.seconds for one in taken) for taken in (direct, store, two, shared)
    )
    own_s, own_cpu_s = found["own"]
    pause_s = statistics.median(one.pause_s for one in direct)
    buckets = {name: round(peak / (BUCKET_MB << 20), 2) for name, peak in found["peaks"].items()}
    pause_share = statistics.median(one.pause_s / one.phases["load"] for one in direct)
    met = store_s / direct_s >= GOAL_OF_STORE and pause_share <= GOAL_PAUSE
    met = met and max(buckets.values()) <= GOAL_BUCKETS
    cpu_s = {
        "broadcast": floor_cpu_s, "direct": statistics.median(one.cpu_s for one in direct),
        "store": statistics.median(one.cpu_s for one in store), "own_load": own_cpu_s,
        "two_ranks": statistics.median(one.cpu_s for one in two),
        "shared": statistics.median(one.cpu_s for one in shared),
    }  # fmt: skip
    detail = {
        "bytes": nbytes, "engines": ENGINES_COUNT, "floor_is": "a bare broadcast of as many bytes, by gloo",
        "seconds": {
            "direct": round(direct_s, 4), "store": round(store_s, 4), "broadcast": round(floor_s, 4),
            "two_ranks": round(two_s, 4), "first": round(found["direct"][0].seconds, 4),
        },
        "phases": {
            "direct": medians(direct), "store": medians(store), "two_ranks": medians(two), "shared": medians(shared),
        },
        "times_the_store": round(store_s / direct_s, 2), "goal_times_the_store": GOAL_OF_STORE,
        "pause": {
            "seconds": round(pause_s, 4), "of_receiving": round(pause_share, 2), "goal_of_receiving": GOAL_PAUSE,
            "own_load": round(own_s, 4), "of_own_load": round(pause_s / own_s, 2),
            "broadcast_of_own_load": round(floor_s / own_s, 2),
        },
        "bucket_mb": BUCKET_MB, "peak_buckets": buckets, "goal_peak_buckets": GOAL_BUCKETS,
        "two_ranks": {"bytes_per_s": round(nbytes / two_s), "share": round(floor_s / two_s, 3)},
        "shared_memory": {
            "bytes_per_s": round(nbytes / shared_s), "share": round(floor_s / shared_s, 3),
            "pause_share": round(statistics.median(one.pause_s for one in shared) / own_s, 2),
        },
        "core_ms_per_gb": {name: round(seconds / nbytes * 1e12) for name, seconds in cpu_s.items()},
        "deltas": found["deltas"],
    }  # fmt: skip
    return told(
        id="W1", value=nbytes / direct_s, unit="bytes/s", goal=None, floor=nbytes / floor_s, goal_share=GOAL_SHARE,
        met=met, rate=True, detail=detail,
    )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
