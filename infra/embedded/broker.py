"""One small Apache Kafka (KRaft, broker and controller in one process) on 127.0.0.1.

with Broker(directory) as broker:
    KafkaLog(broker.bootstrap)
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from turnlog.infra.embedded.errors import BrokerDied
from turnlog.infra.embedded.jars import class_path
from turnlog.infra.embedded.java import java
from turnlog.infra.embedded.ports import HOST, claim, free_ports, listens
from turnlog.infra.embedded.process import Child, Launch
from turnlog.schemas.topics import MAX_MESSAGE_BYTES

CLUSTER_ID = "dHVybmxvZy1lbWJlZGRlZA"
"""16 bytes in url-safe base64 without padding ("turnlog-embedded")."""
FORMATTED = "formatted"
REMEDY = "look at the lines below; give it another port by [kafka] port, or more memory by [kafka] heap_mb"
READY_TIMEOUT_S = 120.0

PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@{host}:{controller}
listeners=PLAINTEXT://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=PLAINTEXT://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
# One node: with the defaults (3) every group and every transaction would wait for replicas for ever.
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
# A restart after a kill waits until the old registration has expired: 9 s by default.
broker.session.timeout.ms=1500
broker.heartbeat.interval.ms=500
controller.quorum.election.timeout.ms=200
# The log is the state: nothing expires.
log.retention.ms=-1
offsets.retention.minutes=2147483647
transactional.id.expiration.ms=2147483647
auto.create.topics.enable=false
message.max.bytes={max_message_bytes}
replica.fetch.max.bytes={max_message_bytes}
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size=16777216
"""


class Broker:
    """A broker whose data lie in `directory`; started again there, it serves the same log."""

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        heap_mb: int = 256,
        log: Path | None = None,
        controller_port: int | None = None,
    ) -> None:
        """Port 0 picks a free one, kept for every start of this object. Raises PortTaken."""
        self.directory = directory.resolve()
        self.port = claim(port, "[kafka] port")
        self._controller = controller_port or free_ports(1)[0]
        self._heap_mb = heap_mb
        self._log = log or self.directory / "broker.log"
        self._child: Child | None = None

    @property
    def bootstrap(self) -> str:
        """host:port"""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Of the JVM."""
        if self._child is None:
            raise RuntimeError("the broker was not started")
        return self._child.pid

    def start(self) -> str:
        """Start and wait until clients can connect; the bootstrap address. Raises PortTaken, BrokerDied, NoJava,
        JarError, NotReady."""
        claim(self.port, "[kafka] port")
        self._child = Child(self.launch()).start()
        try:
            self._child.wait_ready()
        except BaseException:
            self._child.stop()
            raise
        return self.bootstrap

    def stop(self) -> int:
        """Shut down cleanly (SIGTERM); the exit status, 143 when clean."""
        return 0 if self._child is None else self._child.stop()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self._child is not None:
            self._child.kill()

    def launch(self) -> Launch:
        """How the broker is started; writes its properties and formats the folder when that was never done."""
        self.directory.mkdir(parents=True, exist_ok=True)
        properties = self.directory / "server.properties"
        properties.write_text(
            PROPERTIES.format(
                host=HOST,
                port=self.port,
                controller=self._controller,
                data=self.directory / "data",
                max_message_bytes=MAX_MESSAGE_BYTES,
            )
        )
        jvm = (
            java(),
            f"-Xmx{self._heap_mb}m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
            "-cp",
            class_path(),
        )
        self._format(jvm, properties)
        return Launch(
            name="kafka",
            argv=(*jvm, "kafka.Kafka", str(properties)),
            log=self._log,
            ready=lambda: listens(self.port),  # the client port opens last
            ready_timeout_s=READY_TIMEOUT_S,
            stop_timeout_s=30.0,
            died=BrokerDied,
            remedy=REMEDY,
        )

    def _format(self, jvm: tuple[str, ...], properties: Path) -> None:
        done = self.directory / FORMATTED
        if done.exists():
            return
        argv = [
            *jvm,
            "kafka.tools.StorageTool",
            "format",
            "--ignore-formatted",
            "-t",
            CLUSTER_ID,
            "-c",
            str(properties),
        ]
        answer = subprocess.run(argv, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise BrokerDied(f"{self.directory} cannot be formatted: {answer.stderr[-2000:] or answer.stdout[-2000:]}")
        done.touch()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
