"""The brokers of one log: one, or three of which any may be killed, stopped or robbed of its records.

with Brokers(directory, count=3) as brokers:
    KafkaLog(brokers.bootstrap)

One keeps its folder as it ever was (`kafka`), three have theirs (`kafka-1` ...): records in `data` and, apart from them
in `metadata`, what the controllers know of the cluster, so that a broker whose `data` is lost comes back under its own
number and copies everything from the others.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from turnlog.infra.embedded import OtherBrokers, TooFewFiles
from turnlog.infra.embedded.broker import Broker, Node
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.embedded.process import RAISE_FILES, Launch
from turnlog.kafka_settings import KafkaSettings
from turnlog.schemas.topics import CATALOGUE

T = TypeVar("T")
FILES, FILES_OF_A_PARTITION = 256, 3
"""That a broker opens: jars, its own topics, connections and older segments; and of each partition the newest segment's
log and index of aborted transactions, with one to spare while it begins another."""


class Brokers:
    """They start, stop and are formatted side by side: one alone has no quorum and never gets ready. A context
    manager."""

    def __init__(
        self,
        directory: Path,
        *,
        count: int,
        port: int = 0,
        heap_mb: int = 256,
        logs: Path | None = None,
        password: str = "",
    ) -> None:
        """`port`: of the first, the others' follow; 0 picks free ones. `password`: see Broker. Raises PortTaken, and
        OtherBrokers where the folder holds the log of another number of brokers."""
        controllers = tuple(free_ports(2 * count))
        ports = [port + number for number in range(count)] if port else controllers[count:]
        nodes = [Node(home=directory, number=number, controllers=controllers[:count]) for number in range(1, count + 1)]
        _check(directory, [node.name for node in nodes])
        self.all = [
            Broker(
                directory / node.name,
                port=at,
                heap_mb=heap_mb,
                log=logs and logs / f"{node.name}.log",
                node=node,
                password=password,
            )
            for node, at in zip(nodes, ports, strict=True)
        ]

    @property
    def bootstrap(self) -> str:
        """host:port[,host:port]"""
        return ",".join(broker.bootstrap for broker in self.all)

    def launches(self) -> list[Launch]:
        """How each is started; see Broker.launch."""
        return self._each(Broker.launch)

    def start(self) -> str:
        """Start all and wait until clients can connect; the address. Raises what Broker.start raises, none left."""
        try:
            self._each(Broker.start)
        except BaseException:
            self.stop()
            raise
        return self.bootstrap

    def stop(self) -> list[int]:
        """Their exit statuses."""
        return self._each(Broker.stop)

    def _each(self, work: Callable[[Broker], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.all), "brokers") as pool:
            return list(pool.map(work, self.all))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _check(directory: Path, wanted: list[str]) -> None:
    there = sorted(path.name for path in directory.glob("kafka*") if (path / "server.properties").exists())
    if there and there != sorted(wanted):
        raise OtherBrokers(
            f"{directory} holds the log of {len(there)} broker(s) ({', '.join(there)}), [kafka] brokers asks for "
            f"{len(wanted)}: set it to {len(there)} to go on with that log, or start another run ([run] id)"
        )


def check_files(kafka: KafkaSettings) -> None:
    """Raises TooFewFiles where a broker of the run would run out of file descriptors. A JVM raises its soft limit
    itself, so that the hard one counts. A broker that may open no more does not end: it leads no new partition, and its
    clients wait for ever."""
    if kafka.bootstrap:
        return
    partitions = sum(kafka.count(topic.partitions) for topic in CATALOGUE)
    needed = FILES + FILES_OF_A_PARTITION * partitions
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        by = f"[kafka] groups = {kafka.groups}, rollouts = {kafka.rollouts}"
        raise TooFewFiles(
            f"a broker of {partitions:,} partitions ({by}) opens up to {needed:,} files, and this user may open "
            f"{most:,}: {RAISE_FILES}, or begin a run with fewer partitions"
        )
