"""Comparison of the export of many ranks with that of one, for layouts as in layouts.py.

torchrun --nproc-per-node 2 -m tests.reference.exports tp2 pp2-lora:adapter

After a colon, what is exported: merged (without one), base or adapter. Each rank writes into a folder of its own, as on
machines that share no disk.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from tests.reference.layouts import POLICY, layout, weights_of
from turnlog.infra.tensors.digests import bucket_digests, bucket_offsets
from turnlog.infra.tensors.files import SUFFIX, TensorSpec, places
from turnlog.trainer.export import ExportedWeights, WeightExport
from turnlog.trainer.families.shape import ModelShape
from turnlog.trainer.launch import layout_of, process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions

SHARD = 128 << 10
LIMIT = 4 << 20


def peak_bytes(work: Callable[[], None]) -> int:
    """Return the peak CPU memory of torch during `work`, beyond what it held before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(held, default=0)


def drain(export: WeightExport) -> None:
    """Let every bucket pass."""
    for bucket, values in export.stream():
        assert len(values) == bucket_offsets(bucket.specs)[-1]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder's files."""
    return {name: each for file in folder.glob(f"*{SUFFIX}") for name, each in load_file(file).items()}


def digest_of(spec: TensorSpec, tensor: torch.Tensor) -> str:
    """Return the digest of one tensor."""
    bucket = torch.zeros(bucket_offsets([spec])[-1], dtype=torch.uint8)
    bucket[: spec.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    return bucket_digests([spec], bucket)[0]


def alone(shape: ModelShape, options: LearnerOptions, of: ExportedWeights) -> dict[str, torch.Tensor]:
    """Return what one rank exports."""
    one = LearnerOptions(dtype=options.dtype, lora_rank=options.lora_rank, lora_alpha=options.lora_alpha)
    with process_group(), tempfile.TemporaryDirectory() as folder:
        learner = Learner(shape, weights_of(shape, POLICY), one)
        learner.export_files(Path(folder), of)
        return read(Path(folder))


def large(shape: ModelShape) -> ModelShape:
    """Return a larger model of the same kind, of whose tensors none is larger than a bucket."""
    if shape.latent or shape.linear or shape.vision or shape.layer_types:
        return shape
    mixture = shape.mixture and dataclasses.replace(shape.mixture, expert_ffn=128)
    return dataclasses.replace(shape, hidden=256, ffn=512, layers=8, mixture=mixture)


def peaks_of(shape: ModelShape, options: LearnerOptions) -> list[int]:
    """Return the peak memory by rank of an export of a model. Collective."""
    learner = Learner(shape, weights_of(shape, POLICY), options)
    export, peaks = WeightExport(learner.policy.model, shape, limit=LIMIT), [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes(lambda: drain(export)))
    return peaks


def main(names: list[str]) -> None:
    """Print one JSON object for each layout: whether tensors and digests are the same, bytes by sender, and by rank the
    peak memory of an export of a larger model, in bytes."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    met = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
    for name in names:
        of_ranks, _, of = name.partition(":")
        kind: ExportedWeights = of or "merged"  # type: ignore[assignment]
        shape, options = layout(of_ranks)
        store = PrefixStore(name, met)
        with (
            process_group(rank=rank, world_size=world_size, store=store, **layout_of(options)),
            tempfile.TemporaryDirectory() as folder,
        ):
            learner = Learner(shape, weights_of(shape, POLICY), options)
            learner.begin_export(Path(folder), kind, shard_bytes=SHARD)
            done = learner.finish_export(True)
            folders = [""] * world_size
            dist.all_gather_object(folders, folder)
            export, digests = learner.plan_export(kind), learner.plan_export(kind).digests()
            found = {key: each for one in folders for key, each in read(Path(one)).items()} if rank == 0 else {}
            held = [file.name for one in folders for file in Path(one).glob(f"*{SUFFIX}")]
            dist.barrier()
            specs = {spec.name: spec for spec in export.specs}
            sent = [sum(spec.nbytes for spec in export.sent_by(one)) for one in range(len(export.senders))]
            aligned = all(place.begin % 2 == 0 for file in Path(folder).glob(f"*{SUFFIX}") for place in places(file))
            peaks = peaks_of(large(shape), options) if kind == "merged" and large(shape) is not shape else [0]
        if rank == 0:
            assert done is not None
            assert digests is not None
            wanted = alone(shape, options, kind)
            said = {
                "layout": name,
                "same": found.keys() == wanted.keys()
                and all(torch.equal(each, wanted[key]) for key, each in found.items()),
                "digests": digests == {key: digest_of(specs[key], each) for key, each in found.items()},
                "files": sorted(held) == sorted(file for file in done.written.sha256 if file.endswith(SUFFIX)),
                "checksums": done.written.checksums.keys() == wanted.keys() and aligned,
                "senders": export.senders,
                "sent": sent,
                "largest": max(spec.nbytes for spec in export.specs),
                "peaks": peaks,
            }
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
