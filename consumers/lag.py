"""Unread records of a run's consumer groups: the difference between their commits and the ends of their topics.

This is computed from the log, so it is available while no process of a role runs, and nothing is reported twice when
partition tasks move. `turnlog role lag` exports it for autoscaling and alerts. It needs only the broker and is a member
of none of the groups. `turnlog status` shows it, too.

A record counts as unread if nobody has consumed it, or if its consumer has not committed that it is finished. `high`
and `under_way` of the commit metadata state both (infra.log.Commit); without them, the committed offset counts. Records
are counted by offsets, so among many records aborted ones and transaction markers count, too. If only a few offsets are
left, they are checked for actual records.

Also exported is what no role can report about itself: how long a transaction has been open, and until when the servers'
certificates are valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from prometheus_client import Gauge

from turnlog.infra.archive import archive_name
from turnlog.infra.history import read_range
from turnlog.infra.log import Log, LogUnavailable, Partition, TlsFailed, TopicMissing
from turnlog.infra.roles.health import Health, QuietServer, application, listening, uvicorn_config
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.probe import served_at
from turnlog.infra.roles.starting import stop_on_signals
from turnlog.infra.roles.tls import trusting
from turnlog.infra.run_folder import kafka_of
from turnlog.infra.topics_admin import ACCESS
from turnlog.names import ConsumerGroup
from turnlog.schemas.topics import Topic
from turnlog.setting_types import SettingsError
from turnlog.settings import Settings

log = logging.getLogger(__name__)
ROLES: Mapping[str, tuple[ConsumerGroup, tuple[Topic, ...]]] = {
    role: (access.group, access.consumes) for role, access in ACCESS.items() if access.group is not None
}
"""Consumer group and topics of every role that consumes."""
FEW = 4
"""Maximum number of offsets that are checked for actual records. A transaction leaves one marker per partition."""
LOOKS = 1000
"""Number of observed ends of a partition that are remembered. An age covers at most that many observations."""
STANDS_S = 1800.0
"""Seconds after which a role counts as standing still; the same as in the alert TurnlogRoleStands."""
LABELS = ("group", "topic", "partition")
RECORDS = Gauge("turnlog_lag_records", "Records that a consumer group has not committed yet", LABELS)
ROLE_RECORDS = Gauge("turnlog_role_lag_records", "Sum of turnlog_lag_records over the role's groups", ["role"])
ROLE_SECONDS = Gauge(
    "turnlog_role_lag_seconds", "Lower bound of the age of the oldest record that the role has not taken", ["role"]
)  # fmt: skip
OPEN_SECONDS = Gauge(
    "turnlog_log_open_transaction_seconds", "How long an open transaction has hidden the records after it", ["topic"]
)
EXPIRES = Gauge(
    "turnlog_certificate_expires_timestamp_seconds",
    "Expiry of the certificate of a server, in Unix time; 0 if it is not trusted", ["server"]
)  # fmt: skip
LOOK_S = STAGE_S.labels("lag", "look")
CERTIFICATES_S = 600.0
"""Seconds between two checks of certificates."""
HANDSHAKE_S = 5.0


@dataclass(frozen=True, slots=True)
class Lag:
    """Unread records of one group in one partition."""

    role: str
    group: str
    place: Partition
    taken: int
    """First offset that was not consumed."""
    end: int
    """End of the partition."""
    records: int
    """Number of unread records: from `taken` on, and those under way below it."""


@dataclass(slots=True)
class Markers:
    """Ranges of offsets known to hold only transaction markers, so that an idle log is read only once."""

    known: dict[Partition, set[tuple[int, int]]] = field(default_factory=dict)

    async def alone(self, client: Log, gaps: Iterable[tuple[Partition, int, int]]) -> set[tuple[Partition, int, int]]:
        """Return those of the ranges (partition, start, end) that hold no record. Raises LogError."""
        small = {gap for gap in gaps if 0 < gap[2] - gap[1] <= FEW}
        found = {gap for gap in small if gap[1:] in self.known.get(gap[0], ())}
        wanted = small - found
        if wanted:
            async with client.reader() as reader:
                for place, start, end in wanted:
                    if await anext(read_range(reader, {place: start}, {place: end}), None) is None:
                        found.add((place, start, end))
        self.known = {}
        for place, start, end in found:
            self.known.setdefault(place, set()).add((start, end))
        return found


async def lag_of(client: Log, settings: Settings, markers: Markers | None = None) -> list[Lag]:
    """Return the lag of every group of the run in every partition that it reads. For a group without commits, all
    retained records are unread. Optional roles of `turnlog up` are included if they are enabled or have ever committed.
    Raises TopicMissing, LogUnavailable."""
    held = {name: spec.partitions for name, spec in (await client.topics()).items()}
    if missing := sorted({topic.name for _, read in ROLES.values() for topic in read} - held.keys()):
        raise TopicMissing(f"{', '.join(missing)}: no such topic; run `turnlog topics apply`")
    wanted = {
        (role, group): [Partition(topic.name, number) for topic in ROLES[role][1] for number in range(held[topic.name])]
        for role, group in _groups(settings, await client.groups())
    }
    places = sorted({place for places in wanted.values() for place in places})
    starts = await client.start_offsets(places)
    commits = await asyncio.gather(*(client.commits(group, places) for (_, group), places in wanted.items()))
    ends = await client.end_offsets(places)  # read after the commits, so that an end is never below a commit
    found = []
    for ((role, group), places), said in zip(wanted.items(), commits, strict=True):
        for place in places:
            high, under_way = said[place].read_progress() if place in said else (starts[place], 0)
            taken = max(min(high, ends[place]), starts[place])
            found.append(Lag(role, group, place, taken, ends[place], max(0, ends[place] - taken) + under_way))
    alone = await (markers or Markers()).alone(client, ((one.place, one.taken, one.end) for one in found))
    return [_skip_markers(one) if (one.place, one.taken, one.end) in alone else one for one in found]


def by_role(lags: Iterable[Lag]) -> dict[str, int]:
    """Return the number of unread records of each role."""
    sums: dict[str, int] = {}
    for one in lags:
        sums[one.role] = sums.get(one.role, 0) + one.records
    return sums


def _skip_markers(lag: Lag) -> Lag:
    """Move `taken` to the end, because only markers follow."""
    under_way = lag.records - (lag.end - lag.taken)
    return Lag(lag.role, lag.group, lag.place, lag.end, lag.end, under_way)


def _groups(settings: Settings, there: frozenset[str]) -> list[tuple[str, str]]:
    """Return (role, group) pairs of the run. There is a loader group for each engine that the settings name or that
    ever had one."""
    run, found = settings.run.id, []
    optional = {"views": settings.views.enabled, "archive": settings.archive.enabled, "trace": False}
    for role, (pattern, _) in ROLES.items():
        if role == "loader":
            names = {pattern.format(run=run, engine=f"engine-{number}") for number in range(len(settings.engine.urls))}
            names |= {name for name in there if name.startswith(pattern.format(run=run, engine=""))}
        else:
            names = {pattern.format(run=run, archive=archive_name(settings))}
        found += [(role, name) for name in sorted(names) if optional.get(role, True) or name in there]
    return found


class Ages:
    """Remembers when each end of a partition was first observed, so that ages of records are known without reading
    any."""

    def __init__(self) -> None:
        self._seen: dict[Partition, deque[tuple[float, int]]] = {}

    def look(self, lags: Iterable[Lag], now: float) -> dict[str, float]:
        """Return, by role, the seconds since the first observation of a record that a group of the role has not
        consumed by `now`; 0 if all is consumed. Observations that are not needed any more are dropped."""
        lags = list(lags)
        lowest: dict[Partition, int] = {}
        for one in lags:
            seen = self._seen.setdefault(one.place, deque(maxlen=LOOKS))
            if not seen or seen[-1][1] < one.end:
                seen.append((now, one.end))
            lowest[one.place] = min(lowest.get(one.place, one.taken), one.taken)
        for place, taken in lowest.items():
            seen = self._seen[place]
            while len(seen) > 1 and seen[0][1] <= taken:
                seen.popleft()
        ages: dict[str, float] = {}
        for one in lags:
            since = next((at for at, end in self._seen[one.place] if end > one.taken), now)
            ages[one.role] = max(ages.get(one.role, 0.0), now - since)
        return ages


class ConsumerStallTimes:
    """Observation of how long each consumer group has waited at the same offset. A queue that was empty at one
    observation starts again."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, Partition], tuple[int, float]] = {}

    def look(self, lags: Iterable[Lag], now: float) -> dict[str, tuple[float, Lag]]:
        """Return role -> (seconds, lag) of the partition that has waited longest. Roles without unread records are
        absent."""
        before, self._since = self._since, {}
        found: dict[str, tuple[float, Lag]] = {}
        for one in lags:
            if one.end <= one.taken:
                continue
            key, here = (one.group, one.place), (one.taken, now)
            known = before.get(key, here)
            self._since[key] = since = known if known[0] == one.taken else here
            if one.role not in found or now - since[1] > found[one.role][0]:
                found[one.role] = now - since[1], one
        return found


class Open:
    """Measures how long an open transaction has held back the last stable offset of each partition."""

    def __init__(self) -> None:
        self._since: dict[Partition, tuple[int, float]] = {}

    def look(self, stable: Mapping[Partition, int], ends: Mapping[Partition, int], now: float) -> dict[str, float]:
        """Return, by topic, the seconds for its worst partition; 0 if all records are readable. `stable` are last
        stable offsets."""
        seconds = {place.topic: 0.0 for place in stable}
        before, self._since = self._since, {}
        for place, offset in stable.items():
            if offset < ends[place]:
                known = before.get(place, (-1, now))
                self._since[place] = since = known if known[0] == offset else (offset, now)
                seconds[place.topic] = max(seconds[place.topic], now - since[1])
        return seconds


def tls_servers(settings: Settings) -> list[tuple[str, str, int, ssl.SSLContext]]:
    """Return (name, host, port, TLS context) of each server in the settings that uses TLS. Raises TlsFileUnusable,
    TlsFailed."""
    from turnlog.infra.kafka.security import Login

    urls = [("registry", settings.registry.url, settings.registry.ca_file),
            ("store", settings.store.endpoint, settings.store.ca_file),
            ("gateway", settings.gateway.url, settings.gateway.ca_file)]  # fmt: skip
    urls += [("engine", url, settings.engine.ca_file) for url in settings.engine.urls]
    found = []
    for name, url, ca_file in urls:
        if (context := trusting(url, ca_file, name)) is not None:
            address = urlsplit(url)
            found.append((name, address.hostname or "", address.port or 443, context))
    login = Login(settings.kafka)
    if login.is_tls:
        found += [("kafka", host, port, login.context()) for host, port in login.addresses]
    return found


async def expires(host: str, port: int, context: ssl.SSLContext) -> float | None:
    """Return the Unix time at which the server's certificate ends; 0 if it is not trusted; None if the server does not
    answer."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLCertVerificationError as error:
        log.warning("the certificate of %s:%d is not trusted: %s", host, port, error.verify_message)
        return 0.0
    except (OSError, TimeoutError):
        return None  # reported by the roles that use the server
    shown = writer.get_extra_info("peercert")
    writer.close()
    return float(ssl.cert_time_to_seconds(shown["notAfter"]))


class LagExporter:
    """Sets the gauges. They hold the last observation, or nothing."""

    def __init__(self, client: Log, settings: Settings, health: Health) -> None:
        self._log, self._settings, self._health = client, settings, health
        self._markers, self._ages, self._open = Markers(), Ages(), Open()
        self._certificates_due = 0.0

    async def run(self, stopping: asyncio.Event) -> None:
        """Observe every [lag] every_s until `stopping`. While the broker or its topics are unavailable, there are no
        gauges and /readyz says why."""
        while not stopping.is_set():
            self._health.beat()
            try:
                with LOOK_S.time():
                    await self.look()
            except (LogUnavailable, TopicMissing) as error:
                for gauge in (RECORDS, ROLE_RECORDS, ROLE_SECONDS, OPEN_SECONDS):
                    gauge.clear()
                self._health.unmet("log", str(error))
                log.warning("lag is not reported: %s", error)
            else:
                self._health.mark_ready("log")
                self._health.mark_started()
            await self._look_at_certificates()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.lag.every_s):
                    await stopping.wait()

    async def look(self) -> None:
        """Set every gauge. Raises TopicMissing, LogUnavailable."""
        lags = await lag_of(self._log, self._settings, self._markers)
        RECORDS.clear()
        for one in lags:
            RECORDS.labels(one.group, one.place.topic, str(one.place.number)).set(one.records)
        for role, records in by_role(lags).items():
            ROLE_RECORDS.labels(role).set(records)
        for role, seconds in self._ages.look(lags, time.monotonic()).items():
            ROLE_SECONDS.labels(role).set(seconds)
        stable = {one.place: one.end for one in lags}
        ends = await self._log.end_offsets(sorted(stable), committed=False)
        for topic, seconds in self._open.look(stable, ends, time.monotonic()).items():
            OPEN_SECONDS.labels(topic).set(seconds)

    async def _look_at_certificates(self) -> None:
        if time.monotonic() < self._certificates_due:
            return
        self._certificates_due = time.monotonic() + CERTIFICATES_S
        try:
            servers = tls_servers(self._settings)
        except (SettingsError, TlsFailed) as error:
            log.warning("certificates are not checked: %s", error)
            return
        for name, host, port, context in servers:
            if (found := await expires(host, port, context)) is not None:
                EXPIRES.labels(f"{name} {host}:{port}").set(found)


def serve_lag(settings: Settings) -> int:
    """Export until SIGTERM or SIGINT, and return 0. Raises NoEndpoints, CannotListen, SettingsError."""
    from turnlog.infra.kafka import KafkaLog  # clients of real machines are imported where they are opened

    async def run() -> None:
        stopping = stop_on_signals()
        health = Health("lag", work_s=settings.liveness.work_s)
        address = served_at("lag", settings, os.environ) or (settings.lag.host, 0)
        async with AsyncExitStack() as stack:
            listener = stack.enter_context(closing(listening(*address, "[lag] host or port")))
            client = KafkaLog.of(kafka_of(settings), role="lag")
            stack.push_async_callback(client.close)
            await stack.enter_async_context(QuietServer(uvicorn_config(application(health))).running(listener))
            log.info("lag of run %s on http://%s:%d/metrics", settings.run.id, *listener.getsockname()[:2])
            await LagExporter(client, settings, health).run(stopping)

    asyncio.run(run())
    return 0
