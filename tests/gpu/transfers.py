"""Weights on their way from this machine's first GPU to another process: `python transfers.py WHAT`.

digests   bytes a second of digests of buckets, which must be those that the CPU computes
buckets   bytes a second of buckets from device to device, by CUDA IPC between two processes on one GPU, and by NCCL
          where there are two GPUs
stream    bytes a second of a model's export in buckets, and its memory beside the model

Prints a line of JSON for each result. It needs what measure.py needs. Without a device, small buckets go through shared
memory and gloo.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from measure import QWEN3_06B, SMALL

from turnlog.infra.engine_plugin.order import Transfer
from turnlog.infra.tensors.digests import bucket_digests, bucket_offsets
from turnlog.infra.tensors.files import TensorSpec
from turnlog.infra.tensors.transfer import Receiver, SenderGroup, TransferHost, TransferPlan
from turnlog.trainer import mcore
from turnlog.trainer.export import WeightExport
from turnlog.trainer.launch import process_group
from turnlog.trainer.learner import Learner
from turnlog.trainer.plan import LearnerOptions
from turnlog.trainer.warm_start import random_weights

CUDA = torch.cuda.is_available()
torch.set_num_threads(1)
HOST = "127.0.0.1"
SIDE = 4096 if CUDA else 256
TENSORS = 8 if CUDA else 4
"""Square matrices of a bucket, in bfloat16."""
BUCKETS = 16 if CUDA else 4
LIMIT_S = 120.0
Bucket = tuple[tuple[TensorSpec, ...], torch.Tensor]


def specs_of(number: int) -> list[TensorSpec]:
    """Return the tensors of a bucket, with a small one, as models have."""
    square = [TensorSpec(f"{number}.{at}", "BF16", (SIDE, SIDE)) for at in range(TENSORS)]
    return [*square, TensorSpec(f"{number}.norm", "BF16", (SIDE - 1,))]


def bucket_of(specs: Sequence[TensorSpec], device: torch.device, seed: int) -> torch.Tensor:
    """Return a bucket of random bytes with zeros behind each tensor, a uint8 tensor [bytes] on the device."""
    offsets = bucket_offsets(specs)
    generator = torch.Generator(device).manual_seed(seed)
    bucket = torch.randint(0, 256, (offsets[-1],), dtype=torch.uint8, device=device, generator=generator)
    for spec, begin, end in zip(specs, offsets[:-1], offsets[1:], strict=True):
        bucket[begin + spec.nbytes : end].zero_()
    return bucket


def synchronize() -> None:
    """Wait for the device."""
    if CUDA:
        torch.cuda.synchronize()


def fastest(work: Callable[[], object], times: int = 3) -> float:
    """Return the seconds of the fastest repetition, after one that is not counted."""
    took = []
    for _ in range(times + 1):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def digests() -> Iterator[dict[str, Any]]:
    """Compute digests of a bucket on the device and on the CPU."""
    specs = specs_of(0)
    bucket = bucket_of(specs, mcore.DEVICE, 0)
    found, wanted = bucket_digests(specs, bucket), bucket_digests(specs, bucket.cpu())
    seconds = fastest(functools.partial(bucket_digests, specs, bucket))
    yield {
        "device": str(mcore.DEVICE), "bytes": bucket.numel(), "gb_per_s": rate(bucket.numel(), seconds),
        "as_on_cpu": found == wanted,
    }  # fmt: skip


def rate(nbytes: int, seconds: float) -> float:
    """Return GB a second."""
    return round(nbytes / seconds / 1e9, 3)


def buckets() -> Iterator[dict[str, Any]]:
    """Send buckets to another process, by each way that this machine has."""
    yield _sent("shared", mcore.DEVICE)
    if not CUDA:
        yield _sent("gloo", mcore.DEVICE)
    elif torch.cuda.device_count() > 1:
        yield _sent("nccl", torch.device("cuda", 1))
    else:
        yield {"way": "nccl", "skipped": "it needs two GPUs"}


def _sent(way: str, device: torch.device) -> dict[str, Any]:
    """Send the buckets twice, and time the second transfer; `device` is the receiver's."""
    specs = [specs_of(number) for number in range(BUCKETS)]
    sizes = [bucket_offsets(each)[-1] for each in specs]
    sources = [bucket_of(each, mcore.DEVICE, number) for number, each in enumerate(specs[:2])]
    host = TransferHost(HOST, LIMIT_S)
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_receive, args=(theirs, host.port, str(device), way == "shared"))
    child.start()
    theirs.close()
    try:
        group = SenderGroup.join(HOST, host.port, "buckets", 0, 2, way, LIMIT_S)
        for version in range(2):
            plan = TransferPlan(
                version=version, attempt=0, tensors=tuple(spec for each in specs for spec in each),
                buckets=tuple((0, len(each)) for each in specs), shared=way == "shared", bucket_bytes=2 * max(sizes),
            )  # fmt: skip
            host.put_plan("buckets", plan)
            ours.recv()  # it is ready
            began = time.perf_counter()
            for number in range(BUCKETS):
                into = group.buffer(sizes[number], max(sizes), mcore.DEVICE, LIMIT_S)
                into.copy_(sources[number % 2])
                last = group.send(into)
            last.wait(LIMIT_S)
            found = ours.recv()
            seconds = time.perf_counter() - began
        group.close()
    finally:
        child.join(LIMIT_S)
        child.kill()
        host.close()
    wanted = [bucket_digests(specs[number], sources[number % 2]) for number in range(BUCKETS)]
    return {
        "way": way, "devices": [str(mcore.DEVICE), str(device)], "buckets": BUCKETS, "bucket_bytes": sizes[0],
        "gb_per_s": rate(sum(sizes), seconds), "as_sent": found == wanted,
    }  # fmt: skip


def _receive(pipe: Connection, port: int, device: str, shared: bool) -> None:
    """Receive both transfers; say of each that this process is ready, and the digests of its buckets."""
    transfer = Transfer(
        version=0, attempt=0, group="buckets", address=HOST, port=port, world_size=2, senders=1, first_rank=1,
        shared=shared,
    )  # fmt: skip
    receiver = Receiver(transfer, device=torch.device(device), timeout_s=LIMIT_S)
    for version in range(2):
        plan = receiver.plan(version, 0, LIMIT_S)
        pipe.send("ready")
        pipe.send([bucket_digests(specs, bucket) for specs, bucket in receiver.receive(plan, LIMIT_S)])
    receiver.close()


def stream() -> Iterator[dict[str, Any]]:
    """Export a model in buckets."""
    shape = QWEN3_06B if CUDA else SMALL
    dtype = "bfloat16" if CUDA else "float32"
    limit = (512 if CUDA else 4) << 20
    with process_group():
        weights = random_weights(shape, 1, device=mcore.DEVICE, dtype=getattr(torch, dtype))
        learner = Learner(shape, weights, LearnerOptions(dtype=dtype))
        del weights
        export = WeightExport(learner.policy.model, shape, limit=limit)
        nbytes = sum(spec.nbytes for spec in export.specs)

        def pass_over() -> None:
            for _ in export.stream():
                pass

        if CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        seconds = fastest(pass_over)
        beside = torch.cuda.max_memory_allocated() - before if CUDA else None
        device, cpu = (_streamed_digests(export, on) for on in (mcore.DEVICE, torch.device("cpu")))
        seconds_of_digests = fastest(lambda: export.digests())
    yield {
        "device": str(mcore.DEVICE), "bytes": nbytes, "limit": limit, "gb_per_s": rate(nbytes, seconds),
        "digests_gb_per_s": rate(nbytes, seconds_of_digests), "beside_bytes": beside,
        "tensors": len(device), "as_on_cpu": device == cpu,
    }  # fmt: skip


def _streamed_digests(export: WeightExport, device: torch.device) -> dict[str, str]:
    """Return the digests of all tensors, computed on the device."""
    return {
        spec.name: digest
        for bucket, content in export.stream()
        for spec, digest in zip(bucket.specs, bucket_digests(bucket.specs, content.to(device)), strict=True)
    }


def main() -> int:
    """Print what was asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["digests", "buckets", "stream"])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for line in {"digests": digests, "buckets": buckets, "stream": stream}[parser.parse_args().what]():
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
