"""`turnlog role alerts`: send the alerts that the dashboard shows, by any service that apprise supports.

While an alert lasts it is sent once, and again every [alerts] again_s. An alert that has ended may recur and is then
sent anew. The state of each address is stored in the run's directory, so that a restart sends nothing twice. Addresses
contain passwords and tokens. Therefore messages identify them by their position in the setting, and the loggers of
apprise and of its HTTP client are silenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import Counter

from turnlog.consumers.index import IndexFailure
from turnlog.consumers.index.reader import Index, path_of
from turnlog.consumers.lag import STANDS_S, ConsumerStallTimes, Markers, lag_of
from turnlog.infra.log import Partition, Reader
from turnlog.infra.roles.measures import STAGE_S
from turnlog.infra.roles.role import Role
from turnlog.infra.run_folder import present, private_folder
from turnlog.plugins.alarms import FAILED, STANDS, Alarm, alarms
from turnlog.plugins.exporters import BadOutlet, library
from turnlog.schemas.events import RoleFailed
from turnlog.schemas.topics import RUN_HEALTH
from turnlog.settings import Settings

log = logging.getLogger(__name__)
LOOK_S, TELL_S = (STAGE_S.labels("alerts", stage) for stage in ("look", "tell"))
ALERTS = Counter("turnlog_alerts", "Alerts by outcome: sent, or not accepted by an address", ("outcome",))
CHECK_S = 15.0
"""Seconds between two checks. Alerts last for minutes, so that a message may be this late."""
FILE = "alerts.json"
PLACE = Partition(RUN_HEALTH.name, 0)


@dataclass(slots=True)
class Told:
    """Alerts that were sent to one address: name of the alert -> Unix time."""

    again_s: float
    at: dict[str, float] = field(default_factory=dict)

    def news(self, alarms: Iterable[Alarm], now: float) -> list[Alarm]:
        """Return the alerts to send now, and forget those that have ended."""
        there = {alarm.name: alarm for alarm in alarms}
        self.at = {name: at for name, at in self.at.items() if name in there}
        return [alarm for name, alarm in there.items() if now - self.at.get(name, float("-inf")) >= self.again_s]


DONE = {
    "run_restarted": "the run was restarted",
    "retried": "it is retried, and the run trains without it",
}
"""Remedy of RoleFailed -> text that describes its result."""


class AlertCollector:
    """All alerts of a run, collected anew at each look."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._markers, self._standing = Markers(), ConsumerStallTimes()
        self._failures: dict[str, tuple[float, Alarm]] = {}
        """Role -> Unix time and alert of its last failure. It counts as current for again_s, so that it is sent
        once."""

    async def look(self, failures: Reader) -> list[Alarm]:
        """Return the present alerts. `failures` is a reader of run-health. Raises LogUnavailable."""
        async for record, event in self._role.run_events(await failures.poll(timeout_s=0.2)):
            if isinstance(event, RoleFailed):
                done = DONE.get(event.remedy, "it stays down")
                said = f"{event.role} on {event.host} failed, {done}: {event.cause}"
                alarm = Alarm(f"failed {event.event_id}", said, "/queues", FAILED)
                self._failures[event.role] = record.timestamp_ms / 1000, alarm
        since = time.time() - self._role.settings.alerts.again_s
        failed = [alarm for at, alarm in self._failures.values() if at > since]
        lags = await lag_of(self._role.log, self._role.settings, self._markers)
        stands = [
            Alarm(f"stands {name}", f"{name} took nothing for {seconds:.0f} s, and records wait", "/queues", STANDS)
            for name, (seconds, _) in self._standing.look(lags, time.monotonic()).items()
            if seconds > STANDS_S
        ]
        return [*failed, *stands, *await asyncio.to_thread(self._read_alerts)]

    def _read_alerts(self) -> list[Alarm]:
        """Return the alerts that the index shows; none if there is no index (`turnlog role index` creates one)."""
        with contextlib.suppress(IndexFailure), Index.open(path_of(self._role.settings)) as index, index.snapshot():
            (steps, _), (versions, _), (engines, _) = index.series(), index.versions(), index.engines()
            return list(alarms(index, steps, versions, engines))
        return []


@dataclass(slots=True)
class AlertAddress:
    """An address, and what was sent to it."""

    place: str
    """Position in the setting, which identifies the address in messages."""
    key: str
    """Hash that identifies the address in the file."""
    notifier: Any
    told: Told

    def tell(self, run_id: str, found: Sequence[Alarm], now: float) -> None:
        """Send new alerts. One that the address does not accept is tried again at the next look."""
        for alarm in self.told.news(found, now):
            title, (section, fault) = f"turnlog run {run_id}", alarm.line
            body = f"{alarm.said}\n\ndocs/operations.md: {section}, {fault}"
            if self.notifier.notify(title=title, body=body, notify_type="failure"):
                self.told.at[alarm.name] = now
                ALERTS.labels("told").inc()
            else:
                log.warning("%s did not accept an alert: is it reachable, and are its credentials valid?", self.place)
                ALERTS.labels("refused").inc()


def targets(settings: Settings) -> list[AlertAddress]:
    """Return a target for each address of [alerts] urls. Raises NoLibrary, BadOutlet."""
    apprise = library("apprise", "alerts")
    for name in ("apprise", "urllib3"):  # they log addresses with the tokens in them
        logging.getLogger(name).setLevel(logging.CRITICAL)
    kept, found = _read(settings), []
    for number, url in enumerate(present(settings.alerts.urls).split(), start=1):
        place, notifier = f"address {number} of [alerts] urls", apprise.Apprise.instantiate(url)
        if notifier is None:
            raise BadOutlet(f"{place} is not an address that apprise knows: see https://github.com/caronc/apprise")
        key = hashlib.sha256(url.encode()).hexdigest()[:16]
        found.append(AlertAddress(place, key, notifier, Told(settings.alerts.again_s, kept.get(key, {}))))
    if not found:
        raise BadOutlet("[alerts] urls is empty: set it, or TURNLOG_ALERTS_URLS_FILE, to the addresses for alerts")
    return found


async def tell(role: Role, found: Sequence[AlertAddress]) -> None:
    """Look for alerts and send them until the role stops. Raises LogUnavailable, OSError."""
    watch = AlertCollector(role)
    async with role.log.reader(patient=True) as failures:
        failures.assign(await role.log.start_offsets([PLACE]))
        role.health.mark_started()
        while not role.stopping.is_set():
            role.health.beat(within_s=role.settings.liveness.work_s + CHECK_S)
            with LOOK_S.time():
                seen = await watch.look(failures)
            with TELL_S.time():
                for target in found:
                    await asyncio.to_thread(target.tell, role.settings.run.id, seen, time.time())
            await asyncio.to_thread(_write, role.settings, found)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await role.stopping.wait()


def _read(settings: Settings) -> Mapping[str, dict[str, float]]:
    """Read the file: key of the address -> name of the alert -> Unix time."""
    try:
        kept: dict[str, dict[str, float]] = json.loads((Path(settings.run.directory) / FILE).read_text())
    except FileNotFoundError:
        return {}
    return kept


def _write(settings: Settings, found: Sequence[AlertAddress]) -> None:
    """Replace the file atomically."""
    folder = Path(settings.run.directory)
    private_folder(folder)
    part = folder / f"{FILE}.part"
    part.write_text(json.dumps({target.key: target.told.at for target in found}))
    part.replace(folder / FILE)
