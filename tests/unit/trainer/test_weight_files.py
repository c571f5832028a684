"""An export holds no more in memory than it writes at once; a difference gives back what it was made of."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.batches import synthetic_model
from tests.fakes.weights import Publications
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.tensors.deltas import MAGIC, BrokenDelta, Unchanged, apply_delta, write_delta
from turnlog.schemas.events import WeightVersionPublished
from turnlog.trainer.weights import write_tensors

SHARD = 16 << 20
PEAK = """
import dataclasses, json, re, sys
from pathlib import Path
from turnlog.trainer import weights
from turnlog.trainer.checkpoints.exports import Exports
from turnlog.trainer.export import WeightExport, export_weights
from turnlog.trainer.launch import process_group
from turnlog.trainer.network import build_model, model_config
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.families.shape import TINY

def resident(what):
    return int(re.search(what + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

def more(work):
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    held = work()
    return resident("VmHWM") - before, held

def written(model, shape):
    exports, limit = Exports(None, chain=0), int(sys.argv[2])
    exports.begin(WeightExport(model, shape, limit=limit), Path(sys.argv[1]), "merged", 0, "", beside={},
                  shard_bytes=limit)
    return exports.finish(wait=True).written

if __name__ == "__main__":
    shape = dataclasses.replace(TINY, hidden=512, ffn=1536, layers=8)
    options = LearnerOptions()
    with process_group():
        weights.mcore.tensor_parallel.model_parallel_cuda_manual_seed(0)
        with weights.mcore.quiet():
            model = build_model(shape, model_config(shape, options), options)
        written(model, shape)
        streamed, files = more(lambda: written(model, shape))
        whole, _ = more(lambda: export_weights(model, shape))
    print(json.dumps([streamed, whole, 4 * files.parameters, len(files.sha256)]))
"""


def test_an_export_takes_little_more_than_its_limit_of_memory_beside_the_model(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(tmp_path), str(SHARD)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    streamed, whole, model, names = json.loads(done.stdout.splitlines()[-1])
    assert model > 4 * SHARD
    assert names >= 1 + model // SHARD
    assert streamed < 1.5 * SHARD, "two pieces that are hashed come besides"
    assert whole > 2 * SHARD, "what is measured shows a model in memory"


def weights(step: int, *, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A matrix that moves a little with each step, and what does not move."""
    generator = torch.Generator().manual_seed(7)
    still, moving = (torch.randn(200, 300, generator=generator) for _ in range(2))
    return {
        "moving": (moving * (1 + 1e-4 * step)).to(dtype),
        "still": still.to(dtype),
        "odd": torch.arange(5, dtype=torch.float32) + step,
        "scalar": torch.tensor(1.5, dtype=dtype),
    }


def files_of(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    write_tensors(folder, tensors)
    return folder / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_and_its_base_give_every_byte_back(tmp_path: Path, dtype: torch.dtype) -> None:
    old, new = (files_of(tmp_path / str(step), weights(step, dtype=dtype)) for step in range(2))
    delta, unchanged = tmp_path / "delta", Unchanged()
    write_delta(old, new, delta, unchanged)
    apply_delta(old, delta, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == new.read_bytes()
    assert delta.stat().st_size < 0.5 * new.stat().st_size
    shares = unchanged.shares()
    before, after = (weights(step, dtype=dtype) for step in range(2))
    alike = sum(int((before[name] == after[name]).sum()) for name in before)
    assert shares["published"] == pytest.approx(alike / unchanged.values)
    if dtype == torch.float32:
        rounded = sum(int((before[name].bfloat16() == after[name].bfloat16()).sum()) for name in before)
        assert alike < rounded
        assert shares["bfloat16"] == pytest.approx(rounded / unchanged.values)


def test_the_page_says_enough_of_a_delta_to_apply_one(tmp_path: Path) -> None:
    """Of several pieces, one of them unchanged, and in an order of names that is not that of bytes."""
    large = {"z": torch.randn(3 << 20), "a": torch.randn(5)}
    old = files_of(tmp_path / "old", large)
    large["z"][:100] += 1
    new = files_of(tmp_path / "new", large)
    write_delta(old, new, tmp_path / "delta", Unchanged())
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    told: dict[str, Any] = {}
    exec(page.partition("## Deltas of weights")[2].partition("```python\n")[2].partition("```")[0], told)
    assert told["apply_delta"](old.read_bytes(), (tmp_path / "delta").read_bytes()) == new.read_bytes()


@pytest.mark.parametrize("cut", [0, 15, -1])
def test_a_difference_that_is_cut_or_of_other_tensors_is_broken(tmp_path: Path, cut: int) -> None:
    old, new = (files_of(tmp_path / str(step), weights(step)) for step in range(2))
    other = files_of(tmp_path / "other", {"moving": torch.ones(3)})
    delta = tmp_path / "delta"
    with pytest.raises(BrokenDelta, match="other tensors"):
        write_delta(other, new, delta, Unchanged())
    write_delta(old, new, delta, Unchanged())
    with pytest.raises(BrokenDelta, match="other tensors"):
        apply_delta(other, delta, tmp_path / "out")
    delta.write_bytes(delta.read_bytes()[:cut])
    with pytest.raises(BrokenDelta):
        apply_delta(old, delta, tmp_path / "out")


def delta_of(index: bytes, frames: bytes = b"") -> bytes:
    return frames + index + struct.pack("<Q", len(index)) + MAGIC


@pytest.mark.parametrize(
    "content",
    [
        delta_of(b'{"header": 5, "frames": {}}'),
        delta_of(b'{"header": "[]", "frames": {}}'),
        delta_of(b'{"header": "{\\"a\\": 5}", "frames": {}}'),
        delta_of(b"[" * 100_000),
        delta_of(b'{"header": "' + b"[" * 100_000 + b'", "frames": {}}'),
        delta_of(b"\xff"),
        b"",
    ],
    ids=["number", "list", "entry", "nested", "nested header", "no text", "empty"],
)
def test_an_index_that_is_none_is_a_broken_delta(tmp_path: Path, content: bytes) -> None:
    old, delta = files_of(tmp_path / "old", weights(0)), tmp_path / "delta"
    delta.write_bytes(content)
    with pytest.raises(BrokenDelta, match=r"^delta on "):
        apply_delta(old, delta, tmp_path / "out")


@pytest.mark.parametrize("size", [1 << 40, -1, 1.5, None])
def test_a_frame_larger_than_its_file_is_never_read(tmp_path: Path, size: object) -> None:
    """A frame of 2^40 bytes asked for a terabyte of memory."""
    old, new = (files_of(tmp_path / str(step), weights(step)) for step in range(2))
    delta = tmp_path / "delta"
    write_delta(old, new, delta, Unchanged())
    content = delta.read_bytes()
    (length,) = struct.unpack("<Q", content[-16:-8])
    frames, index = content[: -16 - length], json.loads(content[-16 - length : -16])
    next(found for found in index["frames"].values() if found)[0] = size
    delta.write_bytes(delta_of(json.dumps(index).encode(), frames))
    with pytest.raises(BrokenDelta, match=r"its index says|ValidationError"):
        apply_delta(old, delta, tmp_path / "out")


async def published_by(tmp_path: Path, steps: list[int], *, chain: int) -> list[WeightVersionPublished]:
    trainer = Publications(MemoryBlobs(), synthetic_model(tmp_path / "model"), tmp_path / "exports", chain=chain)
    return [await trainer.version(weights(step), number) for number, step in enumerate(steps)]


async def test_a_chain_of_differences_is_as_long_as_the_setting_says(tmp_path: Path) -> None:
    events = await published_by(tmp_path, list(range(6)), chain=2)
    assert [event.kind for event in events] == ["full", "delta", "delta", "full", "delta", "delta"]
    assert [event.base_version for event in events] == [None, 0, 1, None, 3, 4]
    assert not events[0].unchanged
    assert all(0 < event.unchanged["published"] < event.unchanged["bfloat16"] <= 1 for event in events[1:])
    sizes = [sum(file.blob.size for file in event.files) for event in events]
    assert max(sizes[1], sizes[2]) < 0.5 * sizes[0]
    (left,) = (tmp_path / "exports").iterdir()
    assert [path.name for path in left.iterdir()] == ["model.safetensors"]


async def test_without_a_chain_every_version_is_whole_and_nothing_stays_on_disk(tmp_path: Path) -> None:
    events = await published_by(tmp_path, [0, 1], chain=0)
    assert [(event.kind, event.unchanged) for event in events] == [("full", {}), ("full", {})]
    assert not list((tmp_path / "exports").iterdir())


async def test_an_export_that_was_altered_on_disk_is_no_base(tmp_path: Path) -> None:
    trainer = Publications(MemoryBlobs(), synthetic_model(tmp_path / "model"), tmp_path / "exports", chain=5)
    await trainer.version(weights(0), 0)
    (file,) = (tmp_path / "exports").glob("*/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert [(await trainer.version(weights(step), step)).kind for step in (1, 2)] == ["full", "delta"]
