"""W1: weights from the trainer's memory into an engine that serves them: export, store, fetch and check, swap.

Random parameters (half a billion on request: `BENCH_PARAMETERS=500000000 make bench ONLY=W1`), through the embedded
object store, into real SGLang on CPU, which is paused meanwhile. The value is the slower of the way out (export, store)
and the way in (fetch, check, swap): different processes go them, so that one version may arrive while the next one
leaves; `one_after_the_other` is the rate of a version that nothing is in flight beside. Floor: the slower of `cp` of
the same files and the store's own copy of them. Beside it stand the phases, the peak of memory above the model in
shards, and what a version takes that goes out as what a small step changed. What it does not show: a network, a device.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from row import say, size, told

from tests.tiny_model import make_tiny_model
from turnlog.infra.blobs import key
from turnlog.infra.embedded.servers import EngineServer, ObjectStore
from turnlog.infra.engine import SGLangControl
from turnlog.infra.s3 import S3Blobs
from turnlog.infra.tensors import files
from turnlog.infra.tensors.versions import Timer, WeightFolders
from turnlog.schemas.events import WeightVersionPublished
from turnlog.settings import EngineSettings, StoreSettings
from turnlog.trainer import mcore, weights
from turnlog.trainer.checkpoints.cursor import Cursor
from turnlog.trainer.families.family import read_shape
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import process_group
from turnlog.trainer.network import build_model, model_config
from turnlog.trainer.plan import LearnerOptions

GOAL_SHARE = 0.5
GOAL_SHARDS, LEAST_SHARD = 1.5, 256 << 20
"""What clients hold of files does not grow with them: below that it is more than the shards of a small model."""
PARAMETERS = int(os.environ.get("BENCH_PARAMETERS", size(50_000_000, smallest=2_000_000)))
SHARD_BYTES = max(64 << 20, PARAMETERS // 2)
"""At most eight shards of a model in float32."""
SWAPS = size(3, smallest=0)
"""Of which the median counts; none where an engine would take longer to start than all the rest."""
STEP = 1e-6
"""By how much of itself a value moves."""


def shape(tiny: Path) -> ModelShape:
    """About so many parameters, under the tokenizer of the tiny model: the feed-forward layers have nearly all."""
    hidden = 1024 if PARAMETERS > 20_000_000 else 128
    layers = max(1, PARAMETERS // (12 * hidden * hidden))
    return dataclasses.replace(read_shape(tiny), hidden=hidden, ffn=4 * hidden, layers=layers)


def resident(what: str) -> int:
    """Bytes, as the kernel counts them: VmRSS now, VmHWM at its peak."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def anew() -> int:
    """Let the peak begin anew; bytes resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


class Measured:
    """One model's way out and in."""

    def __init__(self, model: Any, form: ModelShape, directory: Path, blobs: S3Blobs) -> None:
        self._model, self._shape, self._directory, self._blobs = model, form, directory, blobs
        self._config = directory / "model"
        weights.write_folder(self._config, form, {}, directory / "tiny")
        self._last = weights.LastExport(directory / "exports", chain=8)
        self._folders = WeightFolders(directory / "weights", blobs)
        self._events: list[WeightVersionPublished] = []
        self.seconds: dict[str, float] = {}
        self.nbytes = self.stored = self.peak = 0

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        found = work()
        self.seconds[phase] = time.perf_counter() - began
        return found

    async def version(self, number: int) -> None:
        """Publish and fetch one; `seconds`, `peak` and sizes are of the last."""
        folder = self._last.create_folder(number)
        before = anew()
        written = self._timed("export", lambda: self._export(folder))
        difference = self._timed("difference", lambda: self._last.difference(folder, written))
        named = difference.files if difference and difference.files else written.sha256
        began = time.perf_counter()
        stored = await weights.upload(folder, named, self._config, self._blobs)
        self.seconds["store"] = time.perf_counter() - began
        self._last.keep(number, folder, written, difference)
        event = weights.version_event(
            written, stored, run_id="bench", version=number, incarnation=0, cursor=Cursor(), checkpoint=None,
            difference=difference,
        )  # fmt: skip
        self._events.append(event)
        timer = Timer()
        held = await self._folders.obtain_folder(self._events, timer)
        self.seconds |= timer.seconds
        self.peak = resident("VmHWM") - before
        self.nbytes, self.stored = sum(spec.nbytes for spec in written.specs), sum(one.blob.size for one in stored)
        held.release()

    async def swap(self) -> None:
        """Into an engine that began with the first version: the last two in turn."""
        first, last = (next((self._directory / "weights").glob(f"{number}-*")) for number in range(2))
        start = self._directory / "start"
        shutil.copytree(self._config, start, ignore=shutil.ignore_patterns(f"*{files.SUFFIX}"))
        for path in first.glob("*.safetensors*"):
            (start / path.name).symlink_to(path)
        with EngineServer(start, EngineSettings(start_timeout_s=900.0), log=self._directory / "engine.log") as engine:
            control, seconds = SGLangControl(engine.url), []
            for turn in range(SWAPS):
                began = time.perf_counter()
                await control.pause()
                await control.load((last, first)[turn % 2], turn, timeout_s=900.0)
                await control.resume()
                seconds.append(time.perf_counter() - began)
            await control.close()
        self.seconds["swap"] = statistics.median(seconds)

    def _export(self, folder: Path) -> files.Written:
        export = weights.Export(self._model, self._shape)
        contents = ((name, weights.tensor_bytes(tensor)) for name, tensor in export)
        return files.write_weights(folder, export.specs, contents, shard_bytes=SHARD_BYTES)

    async def floors(self) -> dict[str, float]:
        """Bytes a second of `cp`, and of the store's copy of its own objects."""
        (folder,) = (self._directory / "weights").glob("0-*")
        began = time.perf_counter()
        copying = await asyncio.create_subprocess_exec("cp", "-r", str(folder), str(self._directory / "copied"))
        assert await copying.wait() == 0
        copied = time.perf_counter() - began
        began = time.perf_counter()
        names = [key(one.blob.sha256) for one in self._events[0].files]
        await asyncio.gather(*(self._blobs.copy(name, f"copied/{name}") for name in names))
        return {"cp": self.nbytes / copied, "store_copy": self.nbytes / (time.perf_counter() - began)}


async def measure(model: Any, form: ModelShape, directory: Path, blobs: S3Blobs) -> int:
    """A whole version and a small step behind it; the exit status."""
    measured = Measured(model, form, directory, blobs)
    await measured.version(0)
    whole, peak = dict(measured.seconds), measured.peak
    floors = await measured.floors()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + STEP)
    await measured.version(1)
    changed = dict(measured.seconds)
    if SWAPS:
        await measured.swap()
        whole["swap"] = measured.seconds["swap"]
    ways = {"out": whole["export"] + whole["store"], "in": whole["fetch"] + whole["verify"] + whole.get("swap", 0.0)}
    detail = {
        "bytes": measured.nbytes, "seconds": {name: round(taken, 3) for name, taken in whole.items()},
        "ways": {name: round(measured.nbytes / taken) for name, taken in ways.items()},
        "one_after_the_other": round(measured.nbytes / sum(ways.values())),
        "floors": {name: round(rate) for name, rate in floors.items()},
        "floor_is": "the slower of cp and the store's own copy",
        "peak_shards": round(peak / SHARD_BYTES, 2), "goal_peak_shards": GOAL_SHARDS,
        "delta": {
            "seconds": {name: round(taken, 3) for name, taken in changed.items()},
            "share_of_bytes": round(measured.stored / measured.nbytes, 3),
        },
    }  # fmt: skip
    return told(
        id="W1", value=measured.nbytes / max(ways.values()), unit="bytes/s", goal=None, floor=min(floors.values()),
        goal_share=GOAL_SHARE, met=peak <= GOAL_SHARDS * max(SHARD_BYTES, LEAST_SHARD), rate=True,
        detail=detail,
    )  # fmt: skip


def main() -> int:
    """Print one JSON line."""
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder, ObjectStore(Path(folder) / "store", StoreSettings()) as store:
        form = shape(make_tiny_model(Path(folder) / "tiny"))
        say(f"{form.layers} layers of {form.hidden}")
        with process_group(), mcore.quiet():
            mcore.tensor_parallel.model_parallel_cuda_manual_seed(0)
            model = build_model(form, model_config(form, LearnerOptions()), LearnerOptions())
            blobs = S3Blobs(store.settings)
            return asyncio.run(_closing(measure(model, form, Path(folder), blobs), blobs))


async def _closing(work: Any, blobs: S3Blobs) -> int:
    try:
        return int(await work)
    finally:
        await blobs.close()


if __name__ == "__main__":
    raise SystemExit(main())
