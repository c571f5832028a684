"""W2: weights from a verified folder into a running engine, by each [loader] transport.

The engine is real SGLang on CPU; each transport loads two folders in turn, from the page cache, and its rate is the
median. The value is the slower of shared memory and broadcast, the floor what the engine does of itself: reading the
folder (disk). What it does not show: a network, a device to copy to.

BENCH_ENGINE=URL takes an engine that serves the tiny model, and measures with that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import torch
from row import say, size, told

from tests.tiny_model import make_tiny_model
from turnlog.consumers.loader.role import transport_of
from turnlog.infra.embedded.servers import EngineServer
from turnlog.infra.engine import SGLangControl
from turnlog.infra.tensors.fits import model_shapes
from turnlog.settings import EngineSettings, LoaderSettings
from turnlog.trainer import weights
from turnlog.trainer.families.family import read_shape

PARAMETERS = size(500_000_000, smallest=0)
TIMES = size(5, smallest=1)
TRANSPORTS: tuple[Literal["disk", "tensor", "distributed"], ...] = get_args(get_type_hints(LoaderSettings)["transport"])


def models(folder: Path) -> list[Path]:
    """Two of one shape: about PARAMETERS, or the tiny one's own."""
    tiny = make_tiny_model(folder / "tiny")
    shape = read_shape(tiny)
    if PARAMETERS:
        hidden = 1024
        layers = PARAMETERS // (12 * hidden * hidden)
        shape = dataclasses.replace(shape, hidden=hidden, ffn=4 * hidden, layers=layers)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        tensors = {name: torch.randn(dims) * 0.02 for name, dims in weights.expected_shapes(shape).items()}
        weights.write_folder(folder / str(seed), shape, tensors, tiny)
        found.append(folder / str(seed))
    return found


async def rates(url: str, folders: list[Path]) -> dict[str, float]:
    """Bytes a second of each transport."""
    nbytes = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
    found = {}
    for name in TRANSPORTS:
        control = SGLangControl(url, transport=transport_of(LoaderSettings(transport=name)))
        seconds = []
        for turn in range(TIMES + 1):  # the first warms up
            await control.pause()
            began = time.perf_counter()
            await control.load(folders[turn % 2], turn, timeout_s=300)
            seconds.append(time.perf_counter() - began)
            await control.resume()
        await control.close()
        found[name] = nbytes / statistics.median(seconds[1:])
        say(f"{name}: {found[name] / 1e6:.0f} MB/s of {nbytes / 1e6:.1f} MB")
    return found


def main() -> int:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        folders = models(Path(folder))
        if url := os.environ.get("BENCH_ENGINE", ""):
            found = asyncio.run(rates(url, folders))
        else:
            with EngineServer(folders[0], EngineSettings(), log=Path(folder) / "engine.log") as engine:
                found = asyncio.run(rates(engine.url, folders))
        detail = {
            "bytes_per_s": {name: round(rate) for name, rate in found.items()},
            "tensors": len(model_shapes(folders[0])),
            "floor_is": "the engine's own reading of the folder",
        }
        slower = min(found["tensor"], found["distributed"])
        return told(
            id="W2", value=slower, unit="bytes/s", goal=None, floor=found["disk"], met=True, rate=True, detail=detail
        )


if __name__ == "__main__":
    raise SystemExit(main())
