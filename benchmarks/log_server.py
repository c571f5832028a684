"""What the benchmarks of the log share: a broker of their own, events of a realistic size, the line they print."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from turnlog.infra.embedded.broker import Broker

VOCABULARY = 151_936
"""Of Qwen3: ids are drawn from all of it, so nothing compresses better than it would in a real run."""
ACKS = {
    "acks": "all, on one broker: the record is in the operating system's page cache; it survives kill -9 of the "
    "broker, not a power cut",
    "acks_fsync": "with flush.messages=1 on the topic: the broker has called fsync before it answers",
}


@contextmanager
def broker() -> Iterator[tuple[str, Path]]:
    """Bootstrap address and log folder of an embedded broker that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder, Broker(Path(folder) / "kafka") as server:
        yield server.bootstrap, Path(folder) / "kafka" / "data"


def token_ids(rng: np.random.Generator, count: int) -> bytes:
    """Packed random ids."""
    return rng.integers(0, VOCABULARY, count, dtype=np.int32).astype("<i4").tobytes()


def logprobs(rng: np.random.Generator, count: int) -> bytes:
    """Packed random log-probs."""
    return (-rng.exponential(0.5, count)).astype("<f4").tobytes()


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return float(np.percentile(values, share * 100))


def told(**line: Any) -> int:
    """Print the one line of a benchmark; the exit status."""
    print(json.dumps({**line, "load": round(os.getloadavg()[0], 2)}), flush=True)
    return 0 if line["ok"] else 1


def say(text: str) -> None:
    """To stderr."""
    print(text, file=sys.stderr, flush=True)
