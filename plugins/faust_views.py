"""Faust live views: sessions, steps and weight versions of a run, stored in tables and served as JSON at /views.

Processing is at least once with idempotent updates, can be rebuilt from the topics at any time, and is never on the
training path (ADR 4).

Tables lie in a SQLite file of the worker, so that a restart does not read their changelogs from the beginning. Faust's
own persistent store needs RocksDB, and with its in-memory store a restart takes 20 s and more for 100,000 sessions. The
file is a copy: if it is missing, a table is restored from its changelog.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import faust
import faust.transport.drivers.aiokafka as driver
from faust.assignor.client_assignment import ClientMetadata
from faust.assignor.partition_assignor import PartitionAssignor
from faust.exceptions import ConsumerNotStarted
from faust.stores import STORES
from faust.stores.base import SerializedStore
from faust.tables.recovery import Recovery
from faust.types import TP
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from turnlog.infra.access import AccessFailure, ProviderUnavailable, TokenRejected
from turnlog.infra.access.bearers import Bearers
from turnlog.infra.access.oidc import OidcProvider
from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.kafka import KafkaLog
from turnlog.infra.kafka.aiokafka_changes import MendedConsumer, MendedProducer
from turnlog.infra.kafka.connection import Connection, convert_errors
from turnlog.infra.kafka.security import Login
from turnlog.infra.log import PATIENT_S, LogError
from turnlog.infra.registry import HttpRegistry, RegistryUnavailable
from turnlog.infra.roles import http_clients, log_lines
from turnlog.infra.roles.ending import obey
from turnlog.infra.roles.health import Health, serve_health
from turnlog.infra.roles.measures import BYTES, STAGE_S
from turnlog.infra.roles.probe import EVERY, bindable, client_url, served_at
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import claim_log
from turnlog.infra.roles.starting import run_until_stopped, servers_of, stop_on_signals
from turnlog.infra.run_folder import resolve_endpoints
from turnlog.names import ConsumerGroup
from turnlog.schemas import SchemaError, UnknownSchemaId, topics
from turnlog.schemas.codec import Codec
from turnlog.schemas.events import Event, SessionFinished, SessionStarted, StepCompleted, WeightVersionPublished
from turnlog.schemas.topics import Topic
from turnlog.settings import AccessRole, AccessSettings, Settings

log = logging.getLogger(__name__)
RETRY_S = 1.0
"""Seconds between two requests to a registry that does not answer."""
URL = "sqlite://"
SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS rows (
  key BLOB PRIMARY KEY, partition INTEGER NOT NULL, value TEXT NOT NULL,
  outcome TEXT GENERATED ALWAYS AS (json_extract(value, '$.outcome')) STORED
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS outcomes ON rows (outcome);
CREATE TABLE IF NOT EXISTS offsets (partition INTEGER PRIMARY KEY, last INTEGER NOT NULL);
"""
"""`last` is the changelog offset of the newest record that the rows of the partition contain."""


def install_store() -> str:
    """Register the store with Faust and return its URL.

    A table that is ahead of its changelog belongs to another log, or to one that lost its end with its machine: Faust
    0.15.3 then ends with ConsistencyError at every start. Here such a partition is dropped and restored from the
    changelog.
    """
    if "sqlite" in STORES.aliases:
        return URL
    STORES.aliases["sqlite"] = f"{__name__}:SqliteStore"
    build_offsets = Recovery._build_offsets

    async def _build_offsets(self: Recovery, consumer: Any, tps: set[TP], destination: Any, title: str) -> None:
        for tp in tps if title == "active" else ():
            if (destination[tp] or 0) > self.active_highwaters[tp]:
                self.tp_to_table[tp].data.forget({tp.partition})  # type: ignore[attr-defined]
                destination[tp] = None
        await build_offsets(self, consumer, tps, destination, title)

    Recovery._build_offsets = _build_offsets  # type: ignore[method-assign]
    return URL


class SqliteStore(SerializedStore[Any, Any]):
    """Store of one table: JSON values by serialized key, and the partition that each belongs to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        folder = Path(self.app.conf.tabledir)
        folder.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(folder / f"{self.table_name}.sqlite", isolation_level=None)
        self._db.executescript(SCHEMA)

    def outcomes(self) -> dict[str, int]:
        """Return the number of values of each `outcome`."""
        return dict(self._db.execute("SELECT outcome, count(*) FROM rows GROUP BY outcome"))

    def persisted_offset(self, tp: TP) -> int | None:
        """Implement Store."""
        found = self._db.execute("SELECT last FROM offsets WHERE partition = ?", (tp.partition,)).fetchone()
        return None if found is None else int(found[0])

    def set_persisted_offset(self, tp: TP, offset: int) -> None:
        """Implement Store."""
        self._db.execute("INSERT OR REPLACE INTO offsets VALUES (?, ?)", (tp.partition, offset))

    def apply_changelog_batch(
        self, batch: Iterable[Any], to_key: Callable[[Any], Any], to_value: Callable[[Any], Any]
    ) -> None:
        """Implement SerializedStore, with rows and offsets in one transaction."""
        self._db.execute("BEGIN")
        for event in batch:
            message = event.message
            if message.value is None:
                self._del(message.key)
            else:
                self._put(message.key, message.partition, message.value)
            self.set_persisted_offset(message.tp, message.offset)
        self._db.execute("COMMIT")

    async def on_recovery_completed(self, active_tps: set[TP], standby_tps: set[TP]) -> None:
        """Drop partitions that another worker has; they are restored from the changelog when they return."""
        mine = {tp.partition for tp in active_tps}
        self.forget({number for (number,) in self._db.execute("SELECT DISTINCT partition FROM rows")} - mine)

    def forget(self, partitions: Iterable[int]) -> None:
        """Delete the rows of partitions, and their changelog offsets."""
        for number in partitions:
            self._db.execute("DELETE FROM rows WHERE partition = ?", (number,))
            self._db.execute("DELETE FROM offsets WHERE partition = ?", (number,))

    async def on_stop(self) -> None:
        """Close the file."""
        self._db.close()

    async def backup_partition(self, tp: TP | int, flush: bool = True, purge: bool = False, keep: int = 1) -> None:
        """Not supported, and never called: the changelog is the backup."""
        raise NotImplementedError

    def restore_backup(self, tp: TP | int, latest: bool = True, backup_id: int = 0) -> None:
        """Not supported; see backup_partition."""
        raise NotImplementedError

    def reset_state(self) -> None:
        """Implement Store."""
        self._clear()

    def _put(self, key: bytes, partition: int, value: bytes) -> None:
        values = (key, partition, value.decode())
        self._db.execute("INSERT OR REPLACE INTO rows (key, partition, value) VALUES (?, ?, ?)", values)

    def _set(self, key: bytes, value: bytes | None) -> None:
        event = faust.current_event()
        assert event is not None  # only agents write
        assert value is not None  # they delete by key
        self._put(key, event.message.partition, value)

    def _get(self, key: bytes) -> bytes | None:
        found = self._db.execute("SELECT value FROM rows WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0]).encode()

    def _del(self, key: bytes) -> None:
        self._db.execute("DELETE FROM rows WHERE key = ?", (key,))

    def _contains(self, key: bytes) -> bool:
        return self._get(key) is not None

    def _iteritems(self) -> Iterator[tuple[bytes, bytes]]:
        for key, value in self._db.execute("SELECT key, value FROM rows"):
            yield key, value.encode()

    def _iterkeys(self) -> Iterator[bytes]:
        return (key for key, _ in self._iteritems())

    def _itervalues(self) -> Iterator[bytes | None]:
        return (value for _, value in self._iteritems())

    def _size(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM rows").fetchone()[0])

    def _clear(self) -> None:
        self._db.executescript("DELETE FROM rows; DELETE FROM offsets;")


OPEN = "open"
SESSION_TIMEOUT_S = 6.0
"""Seconds after which a killed worker's partitions go to another: the lowest value that a broker accepts by default
(`group.min.session.timeout.ms`). A successor of the same instance is a static member and gets them at once.
"""
LOOK_EVERY_S = 5.0
COMMIT_S = 1.0
"""Seconds between two commits, each of which first sends what the tables wrote to their changelogs meanwhile."""
MOVING = "partitions move, or tables are read from their changelogs"
FIXED_VERSION = "0.15.3"
FOLD_S = STAGE_S.labels("views", "fold")
READ = BYTES.labels("views", "read")
"""Bytes of record values only: Faust manages its consumers itself."""


class UnknownFaust(Exception):
    """The installed faust-streaming is not the version that the fix was made for. Remedy: check the race again, then
    raise the pin.
    """


def serve_views(settings: Settings) -> int:
    """Run the worker until SIGTERM. The address is [views] host and port, else the role's health endpoint.

    Raises OtherRun, LogUnreachable, RegistryUnreachable, and any other error that ended the worker.
    """
    settings = resolve_endpoints(settings)
    codec = asyncio.run(_wait_for_codec(settings))
    obey()  # the loop's handlers are gone with it, and Faust installs its own later
    if codec is None:
        return 0
    connection = Connection(settings.kafka.bootstrap, login=Login(settings.kafka))
    with _folder(settings) as folder:
        return _work(make_app(settings, codec, folder, connection), connection)


def make_worker(app: faust.App) -> faust.Worker:
    """Return the worker of an application, at the log level of the environment."""
    level = log_lines.level(os.environ, "WARNING")
    lines = {"version": 1, "disable_existing_loggers": False, "root": {"level": level}}
    worker = faust.Worker(app, loglevel=level, logging_config=lines, redirect_stdouts=False, quiet=True)
    worker.spinner = None  # it turns with every message of any level, so Faust would set the root logger to DEBUG
    return worker


def _work(app: faust.App, connection: Connection) -> int:
    worker = make_worker(app)
    try:
        worker.execute_from_commandline()
    except SystemExit as done:
        # Faust has printed the error; typing it lets the exit status tell a missing broker from a bug of ours.
        cause = worker.crash_reason or app.crash_reason or done.__context__
        if done.code and isinstance(cause, Exception):
            with convert_errors(connection, "views"):
                raise cause from None
        return int(done.code or 0)
    return 0


async def _wait_for_codec(settings: Settings) -> Codec | None:
    """Serve health until Faust takes over, and wait for the servers; None if a stop was requested. Raises the errors of
    `_codec`.
    """
    stopping, health = stop_on_signals(), Health("views")
    async with serve_health(health, served_at("views", settings, os.environ)):
        return await run_until_stopped(_codec(settings, health), stopping, health)


async def _codec(settings: Settings, health: Health) -> Codec:
    """Return the codec of a log that belongs to this run or to none. Raises OtherRun, CannotListen."""
    log, registry = (
        KafkaLog.of(settings.kafka, role="views"),
        HttpRegistry(settings.registry),
    )
    async with AsyncExitStack() as stack:
        await (await stack.enter_async_context(servers_of("views", settings, health))).there()
        stack.push_async_callback(log.close)
        stack.push_async_callback(registry.close)
        events = await stack.enter_async_context(EventLog.open(log, registry, writer="views"))
        role = Role("views", "views", settings, log, events, MemoryBlobs(), health)  # views read no payloads
        async with claim_log(role):
            events.codec.hide_content()  # views show figures, and need no master key
            return events.codec


@contextlib.contextmanager
def _folder(settings: Settings) -> Iterator[Path]:
    """Yield the folder that keeps tables between starts: the run's folder, if there is one. Otherwise tables are
    restored from their changelogs and lie in a temporary folder.
    """
    kept = Path(settings.run.directory)
    if kept.is_dir():
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="turnlog-views-") as folder:
        yield Path(folder)


def make_app(settings: Settings, codec: Codec, folder: Path, connection: Connection | None = None) -> faust.App:
    """Return the application: three agents, three tables, four pages. For `folder`, see `_folder`."""
    connection = connection or Connection(settings.kafka.bootstrap, login=Login(settings.kafka))
    # Faust's own credentials keep one password for good; ours are fetched at each login.
    driver.credentials_to_aiokafka_auth = lambda *_: connection.login.options()
    _mend_clients()
    _mend_recovery()
    _mend_seeking()
    _mend_rejoining()
    _stop_livelock_checks()
    instance = os.environ.get("TURNLOG_INSTANCE")
    address = served_at("views", settings, os.environ)
    host, port = address or ("127.0.0.1", 6066)
    app = faust.App(
        settings.kafka.prefix + ConsumerGroup.VIEWS.format(run=settings.run.id),
        broker=[f"kafka://{address}" for address in settings.kafka.bootstrap.split(",")],
        store=install_store(),
        datadir=str(folder / (instance or "views")),
        topic_partitions=settings.kafka.groups,
        topic_replication_factor=settings.kafka.copies,
        topic_disable_leader=True,
        consumer_auto_offset_reset="earliest",
        table_standby_replicas=0,
        broker_commit_interval=COMMIT_S,
        producer_linger=2 * COMMIT_S,  # a commit flushes earlier, and no table is read from its changelog meanwhile
        broker_session_timeout=SESSION_TIMEOUT_S,
        broker_heartbeat_interval=SESSION_TIMEOUT_S / 3,
        consumer_group_instance_id=instance,
        web_enabled=address is not None,
        web_host=urlsplit(client_url(host, port)).netloc.rpartition(":")[0],
        web_port=port,
        web_tables_enabled=False,  # Faust's own pages show the tables to anybody who reaches the port
        web_router_enabled=False,
        web_bind="" if bindable(host) == EVERY else bindable(host),  # on ::, asyncio's servers accept IPv6 only
        loghandlers=[log_lines.handler(sys.stderr, as_json=log_lines.is_json(os.environ))],
    )
    tables = _tables(app, settings)
    _agents(app, settings, codec, tables)
    health = Health("views", work_s=settings.liveness.work_s)
    health.mark_started()  # Faust reports the rest
    _beats(app, health, connection)

    async def watch() -> None:
        async with servers_of("views", settings, health) as servers:
            await servers.watch()

    app.task(watch)
    _pages(app, tables, health, settings.access)
    return app


def _tables(app: faust.App, settings: Settings) -> dict[str, Any]:
    """Return one table per topic; a changelog has as many partitions as its topic."""
    counts = {"sessions": settings.kafka.groups, "steps": 1, "versions": 1}
    return {name: app.Table(name, key_type=str, partitions=count, default=None) for name, count in counts.items()}


async def event_of(
    raw: bytes, codec: Codec, ask: Callable[[int], Awaitable[Mapping[str, Any]]], *, retry_s: float = RETRY_S
) -> Event | None:
    """Decode an event under the schema of whichever release wrote it; None if it is no event that we know, which the
    topic's owner dead-letters.

    `ask` fetches a schema like Registry.schema; this function waits while the registry does not answer.
    """
    try:
        try:
            return codec.decode(raw)
        except UnknownSchemaId as unknown:
            codec.hold(unknown.schema_id, await _fetch_schema(unknown.schema_id, ask, retry_s))
            return codec.decode(raw)
    except (SchemaError, KeyError):
        return None


async def _fetch_schema(
    schema_id: int, ask: Callable[[int], Awaitable[Mapping[str, Any]]], retry_s: float
) -> Mapping[str, Any]:
    """Fetch a schema and retry until the registry answers: for an exception, Faust would skip the record."""
    while True:
        try:
            return await ask(schema_id)
        except RegistryUnavailable as away:
            log.warning("%s", away)
            await asyncio.sleep(retry_s)


def _agents(app: faust.App, settings: Settings, codec: Codec, tables: dict[str, Any]) -> None:
    def source(topic: Topic, partitions: int) -> Any:
        name = settings.kafka.prefix + topic.name
        return app.topic(name, key_serializer="raw", value_serializer="raw", partitions=partitions, internal=False)

    async def ask(schema_id: int) -> Mapping[str, Any]:
        registry = HttpRegistry(settings.registry)
        try:
            return await registry.schema(schema_id)
        finally:
            await registry.close()

    async def keep(stream: Any, table: Any) -> AsyncIterator[None]:
        """Apply the records of a stream to a table, one key per record. Applying a record again, or an older one after
        a newer, has no effect.
        """
        async for raw in stream:
            READ.inc(len(raw))
            with FOLD_S.time():
                event = await event_of(raw, codec, ask)
                update = None if event is None or event.run_id != settings.run.id else view(event)
                if update is not None:
                    key, value = update
                    before = table.get(key)
                    if before is None or before["rank"] <= value["rank"]:
                        table[key] = value
            yield

    wiring = ((topics.SESSIONS, settings.kafka.groups, "sessions"), (topics.STEPS, 1, "steps"),
              (topics.WEIGHTS, 1, "versions"))  # fmt: skip
    for topic, partitions, name in wiring:
        _attach(app, source(topic, partitions), tables[name], keep, name)


def _attach(app: faust.App, source: Any, table: Any, keep: Any, name: str) -> None:
    async def agent(stream: Any) -> AsyncIterator[None]:
        async for _ in keep(stream, table):
            yield

    app.agent(source, name=f"views.{name}")(agent)


def view(event: object) -> tuple[str, dict[str, Any]] | None:
    """Return (table key, value) of an event, or None. `rank` orders updates of one key, so that a repeat of an older
    one is ignored.
    """
    match event:
        case SessionStarted():
            return event.session_id, {"rank": 0, "outcome": OPEN}
        case SessionFinished():
            return event.session_id, {"rank": 1, "outcome": event.outcome.value}
        case StepCompleted():
            facts = {"reward": event.reward_mean, "loss": event.loss, "lag": event.lag_max, "step": event.step}
            return str(event.batch_index), {"rank": event.incarnation, **facts}
        case WeightVersionPublished():
            return str(event.version), {"rank": 0, "step": event.step, "batch": event.batch_index}
        case _:
            return None


def picture(outcomes: Mapping[str, int], steps: Any, versions: Any) -> dict[str, Any]:
    """Return what `turnlog status` shows of the run: sessions by outcome, and the newest steps and versions."""
    newest = max(map(int, steps.keys()), default=None)
    return {
        "sessions": dict(outcomes),
        "steps": len(steps),
        "last_step": None if newest is None else {"batch": newest, **steps[str(newest)]},
        "weight_versions": len(versions),
        "newest_version": max(map(int, versions.keys()), default=None),
    }


class Offsets(NamedTuple):
    """Position and end of each assigned partition."""

    positions: Mapping[Any, Any]
    ends: Mapping[Any, Any]


def is_alive(before: Offsets, now: Offsets, *, whole: bool) -> bool:
    """Return True if the streams advanced since the last check, or if the tables are `whole` and no records arrived
    that the streams could have read. A recovery of tables that stands still is stuck.

    Positions in changelogs are no evidence of whole tables: this worker does not read what it writes there.
    """
    return bool(now.positions) and (now.positions != before.positions or (whole and now.ends == before.ends))


def _tables_are_whole(app: faust.App) -> bool:
    recovery: Any = app.tables.recovery  # type: ignore[attr-defined]
    return recovery.completed.is_set() and not app.rebalancing


def _beats(app: faust.App, health: Health, connection: Connection) -> None:
    """Report a heartbeat whenever `is_alive` says so."""
    before = Offsets({}, {})

    async def look() -> None:
        nonlocal before
        consumer: Any = app.consumer
        assigned = sorted(consumer.assignment())
        positions = {place: await consumer.position(place) for place in assigned}
        now = Offsets(positions, dict(await consumer.highwaters(*assigned)) if assigned else {})
        if is_alive(before, now, whole=_tables_are_whole(app)):
            health.beat()
        before = now

    async def patiently() -> None:
        # During a rebalance, or without a broker, there is nothing to check and no heartbeat to report.
        with contextlib.suppress(ConsumerNotStarted, LogError), convert_errors(connection, "views"):
            await look()

    app.timer(LOOK_EVERY_S)(patiently)


class ViewsGuard:
    """Access control of /views: anybody without [access], else a bearer token with the role of a reader."""

    def __init__(self, access: AccessSettings) -> None:
        self._access = access
        self._bearers: Bearers | None = None

    async def refusal(self, authorization: str) -> tuple[int, str] | None:
        """Return status and reason for a request that is refused, or None if it may be answered. Use it from one event
        loop."""
        if not self._access.restricted:
            return None
        if self._bearers is None:  # here, because a client belongs to the loop that uses it
            provider = OidcProvider(self._access, http_clients.outside()) if self._access.oidc_issuer else None
            self._bearers = Bearers(self._access, provider)
        try:
            person = await self._bearers.person(authorization)
        except ProviderUnavailable as failure:
            return 503, str(failure)
        except TokenRejected as failure:
            return 401, str(failure)
        except AccessFailure as failure:
            return 403, str(failure)
        return None if person.may(AccessRole.READER) else (403, f"{person.described} has no role")


def _pages(app: faust.App, tables: dict[str, Any], health: Health, access: AccessSettings) -> None:
    guard = ViewsGuard(access)

    def waiting() -> dict[str, str]:
        return health.waiting | ({} if _tables_are_whole(app) else {"tables": MOVING})

    async def views(web: Any, request: Any) -> Any:
        if (refused := await guard.refusal(request.headers.get("Authorization", ""))) is not None:
            return web.json({"unavailable": refused[1]}, status=refused[0])
        if "tables" in waiting():  # half a table looks like a whole one
            return web.json({"unavailable": MOVING}, status=503)
        return web.json(picture(tables["sessions"].data.outcomes(), tables["steps"], tables["versions"]))

    async def healthz(web: Any, request: Any) -> Any:
        alive, said = health.living()
        return web.json(said, status=200 if alive else 503)

    async def readyz(web: Any, request: Any) -> Any:
        found = waiting()
        return web.json({"ready": not found, "waiting": found}, status=503 if found else 200)

    async def metrics(web: Any, request: Any) -> Any:
        # Set as a header: aiohttp's `content_type` rejects a charset, which Prometheus' type has.
        return web.bytes(generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    for path, page in (("/views", views), ("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
        app.page(path)(page)


def _mend_recovery() -> None:
    """Close a race of faust-streaming 0.15.3 that loses events after a restart with a table to recover.

    `Recovery.on_recovery_completed` resumes the source partitions and only then seeks them to the committed offsets,
    while the flow is still active from the replay. Records that arrive in between go into the stream queues and are
    dropped when the queues are cleared, and the copies fetched again are taken for old. Stopping the flow first, as
    Faust itself does where there are no tables, closes the race. Raises UnknownFaust for another version.
    """
    if faust.__version__ != FIXED_VERSION:
        raise UnknownFaust(f"faust-streaming {faust.__version__} is installed, the recovery fix is for {FIXED_VERSION}")
    original = Recovery.on_recovery_completed
    if getattr(original, "stops_flow_first", False):
        return

    async def on_recovery_completed(self: Recovery, generation_id: int = 0) -> Any:
        consumer: Any = self.app.consumer
        consumer.stop_flow()
        await consumer.wait_for_stopped_flow()
        return await original(self, generation_id)

    on_recovery_completed.stops_flow_first = True  # type: ignore[attr-defined]
    Recovery.on_recovery_completed = on_recovery_completed  # type: ignore[method-assign]


class PatientConsumer(MendedConsumer):
    """Consumer that pauses between two fetches, for which Faust has no settings."""

    async def start(self) -> None:
        """Start, and pause between two fetches from now on."""
        await super().start()
        self._fetcher.pause_s = PATIENT_S


class PatientProducer(MendedProducer):
    """Producer whose flush ends the linger, as that of Kafka's own producer does. aiokafka's flush waits for it."""

    async def flush(self) -> None:
        """Send all batches now, and wait until they are acknowledged."""
        await self._message_accumulator.flush_for_commit()


def _mend_clients() -> None:
    """Let Faust create our clients of Kafka, which log in again, survive silent brokers, and send few requests.

    Only Faust's name for aiokafka is replaced, aiokafka itself is not.
    """
    ours = {"AIOKafkaConsumer": PatientConsumer, "AIOKafkaProducer": PatientProducer}
    driver.aiokafka = SimpleNamespace(**{**vars(driver.aiokafka), **ours})  # type: ignore[attr-defined]


def _mend_seeking() -> None:
    """Read a partition from its beginning if a rebalance comes before its first commit.

    A rebalance drops what is queued and goes back to the committed offset. If there is none, aiokafka's
    `seek_to_committed` does not move, and what was queued is never read again. (Changelogs have no commits: Recovery
    seeks them.)
    """
    original = driver.AIOKafkaConsumerThread.seek_to_committed
    if getattr(original, "from_beginning", False):
        return

    async def seek_to_committed(self: driver.AIOKafkaConsumerThread) -> Mapping[TP, int]:
        committed = await original(self)
        changelogs = self.app.tables.changelog_topics
        fresh = [place for place, offset in committed.items() if not offset and place.topic not in changelogs]
        if fresh:
            await self.seek_to_beginning(*fresh)
        return committed

    seek_to_committed.from_beginning = True  # type: ignore[attr-defined]
    driver.AIOKafkaConsumerThread.seek_to_committed = seek_to_committed  # type: ignore[method-assign]


def _mend_rejoining() -> None:
    """Let a static member return under another address within its session.

    The group then gives it the assignment of its predecessor, whose address Faust 0.15.3 takes for a mistake: the
    consumer's coordinator dies, and the worker waits forever. Other workers would request rows at that address; here
    nobody does, so the worker adopts the known address.
    """
    original = PartitionAssignor.on_assignment
    if getattr(original, "keeps_address", False):
        return

    def on_assignment(self: PartitionAssignor, assignment: Any) -> None:
        known = ClientMetadata.loads(self._decompress(assignment.user_data))
        self.app.conf.canonical_url = known.url
        original(self, assignment)

    on_assignment.keeps_address = True  # type: ignore[attr-defined]
    PartitionAssignor.on_assignment = on_assignment  # type: ignore[method-assign]


def _stop_livelock_checks() -> None:
    """Turn off Faust's check for slow streams.

    It reads the position of every assigned partition, and aiokafka asserts that there is one. There is none between the
    assignment and the answer about its offsets, which a busy broker delays; the worker then ends. The check only writes
    to the log, and `_beats` reports stuck streams to /healthz.
    """
    driver.AIOKafkaConsumerThread.verify_event_path = lambda *_: None  # type: ignore[method-assign]
