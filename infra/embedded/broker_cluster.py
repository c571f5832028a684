"""The brokers of one log: one, or three of which any one may be killed, stopped or lose its records.

with Brokers(directory, count=3) as brokers:
    KafkaLog(brokers.bootstrap)

A single broker has the folder `kafka`, three have `kafka-1` and so on. Records are in `data`; the controllers' metadata
is apart from them in `metadata`, so that a broker that has lost its `data` returns under its own number and copies
everything from the others.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from turnlog.infra.embedded import OtherBrokers, TooFewFiles
from turnlog.infra.embedded.broker import Broker, BrokerNode
from turnlog.infra.embedded.ports import free_ports
from turnlog.infra.embedded.process import RAISE_FILES, Launch
from turnlog.kafka_settings import KafkaSettings
from turnlog.schemas.topics import CATALOGUE

T = TypeVar("T")
FILES, FILES_OF_A_PARTITION = 256, 3
"""Numbers of files that a broker opens: for jars, its own topics, connections and older segments; and for each
partition: the newest segment's log and index of aborted transactions, and one spare while it begins another segment."""


class Brokers:
    """Starts, stops and formats the brokers of a log concurrently, since a broker alone has no quorum and never becomes
    ready. A context manager."""

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
        """`port` is that of the first broker, and the others use the following ones; 0 picks free ports. For
        `password`, see Broker. Raises PortTaken; OtherBrokers if the folder holds the log of another number of
        brokers."""
        controllers = tuple(free_ports(2 * count))
        ports = [port + number for number in range(count)] if port else controllers[count:]
        nodes = [
            BrokerNode(home=directory, number=number, controllers=controllers[:count]) for number in range(1, count + 1)
        ]
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
        """Return how to start each broker; see Broker.launch."""
        return self._each(Broker.launch)

    def start(self) -> str:
        """Start all and wait until clients can connect; return the address. Stops all and raises what Broker.start
        raises if one fails."""
        try:
            self._each(Broker.start)
        except BaseException:
            self.stop()
            raise
        return self.bootstrap

    def stop(self) -> list[int]:
        """Stop all; return their exit statuses."""
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
            f"{directory} holds the log of {len(there)} broker(s) ({', '.join(there)}), but [kafka] brokers is "
            f"{len(wanted)}: set it to {len(there)} to continue with that log, or start another run ([run] id)"
        )


def check_files(kafka: KafkaSettings) -> None:
    """Raise TooFewFiles if a broker of the run would run out of file descriptors.

    The hard limit counts, because a JVM raises its soft limit itself. A broker that may open no more files does not
    end: it leads no new partitions, and its clients wait forever."""
    if kafka.bootstrap:
        return
    partitions = sum(kafka.count(topic.partitions) for topic in CATALOGUE)
    needed = FILES + FILES_OF_A_PARTITION * partitions
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        by = f"[kafka] groups = {kafka.groups}, rollouts = {kafka.rollouts}"
        raise TooFewFiles(
            f"a broker with {partitions:,} partitions ({by}) opens up to {needed:,} files, but this user may open "
            f"only {most:,}: {RAISE_FILES}, or start a run with fewer partitions"
        )
