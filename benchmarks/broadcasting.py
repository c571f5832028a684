"""The bare broadcast that transfers of weights are compared with: one process of gloo sends a buffer to others on this
machine, and nothing is done with it. `python benchmarks/broadcasting.py BYTES RECEIVERS TIMES`

Prints seconds of a broadcast, the median of TIMES repetitions after one that is not counted, and the CPU seconds of all
processes, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist

from turnlog.infra.embedded.ports import ONE_HOST


def bare_broadcast(nbytes: int, receivers: int, times: int) -> tuple[float, float]:
    """Return what this script prints. Raises CalledProcessError if a process failed."""
    # Processes of their own script start in a fraction of the time: they import the main module of their parent.
    command = [sys.executable, __file__, *map(str, (nbytes, receivers, times))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    seconds, cpu_s = json.loads(done.stdout)
    return float(seconds), float(cpu_s)


def main(nbytes: int, receivers: int, times: int) -> int:
    """Print the seconds; the exit status."""
    context = get_context("spawn")
    results: SimpleQueue[tuple[list[float], float]] = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, receivers + 1, Path(folder) / "store", nbytes, times, results))
            for rank in range(receivers + 1)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        return 1
    found = [results.get() for _ in ranks]
    slowest = [max(seconds) for seconds in zip(*(seconds for seconds, _ in found), strict=True)]
    print(json.dumps((statistics.median(slowest), sum(cpu for _, cpu in found) / times)))
    return 0


def _rank(rank: int, world_size: int, meeting: Path, nbytes: int, times: int, results: SimpleQueue[object]) -> None:
    os.environ |= ONE_HOST
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=dist.FileStore(str(meeting), world_size))
    buffer = torch.full((nbytes,), rank, dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    seconds, cpu = [], 0.0
    for _ in range(times):
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        dist.broadcast(buffer, 0)
        seconds.append(time.perf_counter() - began)
        cpu += time.process_time() - used
    assert not buffer.any(), "every rank has the sender's bytes"
    dist.barrier()
    dist.destroy_process_group()
    results.put((seconds, cpu))


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:])))
