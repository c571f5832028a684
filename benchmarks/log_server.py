"""What the benchmarks of the log share: a broker, names of their own on it, packed numbers of a realistic size."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from turnlog.infra.embedded.broker import Broker
from turnlog.infra.kafka import KafkaLog

VOCABULARY = 151_936
"""Of Qwen3: ids are drawn from all of it, so nothing compresses better than it would in a real run."""
GIVEN = "BENCH_BROKER"
"""Environment variable: address and log folder of a broker to use, with a space between; else one is started."""
ACKS = {
    "acks": "all, on one broker: the record is in the operating system's page cache; it survives kill -9 of the "
    "broker, not a power cut",
    "acks_fsync": "with flush.messages=1 on the topic: the broker has called fsync before it answers",
}


@dataclass(frozen=True, slots=True)
class LogServer:
    """A broker, and the prefix under which everything of this run stands there."""

    bootstrap: str
    data: Path
    prefix: str

    def log(self, part: str = "") -> KafkaLog:
        """A client, of the topics of one `part` of the benchmark."""
        return KafkaLog(self.bootstrap, prefix=self.prefix + part)

    def written(self, topics: Iterable[str], part: str = "") -> int:
        """Bytes in the log files of topics."""
        globs = (self.data.glob(f"{self.prefix}{part}{topic}-[0-9]*/*.log") for topic in topics)
        return sum(path.stat().st_size for paths in globs for path in paths)


@contextmanager
def broker() -> Iterator[LogServer]:
    """A broker that is gone afterwards, or the one that the environment names."""
    prefix = f"{uuid4().hex[:8]}-"
    if GIVEN in os.environ:
        bootstrap, _, data = os.environ[GIVEN].partition(" ")
        yield LogServer(bootstrap, Path(data), prefix)
        return
    with tempfile.TemporaryDirectory(prefix="turnlog-bench-") as folder, Broker(Path(folder) / "kafka") as server:
        yield LogServer(server.bootstrap, Path(folder) / "kafka" / "data", prefix)


def token_ids(rng: np.random.Generator, count: int) -> bytes:
    """Packed random ids."""
    return rng.integers(0, VOCABULARY, count, dtype=np.int32).astype("<i4").tobytes()


def logprobs(rng: np.random.Generator, count: int) -> bytes:
    """Packed random log-probs."""
    return (-rng.exponential(0.5, count)).astype("<f4").tobytes()
