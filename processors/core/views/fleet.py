"""The engines of a run: what was requested for each (engine-requests) and what was reported of it (engine-status).

Every report repeats url, state and version: the last one is the engine's status (FleetEngine), whatever its kind. What
depends on the kinds of reports is in EngineReports, where each field says which kinds change it.

The two topics can be folded in any order. An engine that nobody requested was announced by its own loader: a sidecar.
An engine that was requested without an address is hosted: the run's supervisor starts it under the name engine-N.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from turnlog.schemas.events import (
    EngineDraining,
    EngineGone,
    EngineRegistered,
    EngineRequested,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.topics import ENGINES, TOPIC_OF

STARTING: Final = "starting"
SERVING: Final = "serving"
RELEASED: Final = "released"
DRAINING: Final = "draining"
SILENT: Final = "silent"
GONE: Final = "gone"
SETTINGS: Final = "settings"
OPERATOR: Final = "operator"
AUTOSCALE: Final = "autoscale"
HOSTED = re.compile(r"engine-(\d+)")
NO_WEIGHTS: Final = -2
"""Acknowledged version of an engine that is gone: below every version, and below -1 (no version loaded yet)."""


@dataclass(frozen=True, slots=True)
class FleetEngine:
    """The state of one engine according to the log."""

    id: str
    url: str = ""
    """Address that its loader last reported, else the requested one; empty if it has no address yet."""
    wanted: str = ""
    """Requested state: serving | gone; empty if nobody requested one."""
    by: str = ""
    """Author of the last request."""
    wanted_kind: str = ""
    """Kind in the last request to serve: sglang | vllm; empty if the settings tell it by the engine's name."""
    hosted: bool = False
    """Whether the run's supervisor starts it."""
    state: str = ""
    """Reported state: starting | serving | released | draining | silent | gone; empty if its loader has reported
    nothing.
    """
    version: int = -1
    """Weight version that its loader last reported; -1 if none."""
    kind: str = ""
    """Kind that its loader last reported: sglang | vllm; empty if its loader has reported nothing."""
    cause: str = ""
    """Reason for which it is gone, in words."""
    requests: int = 0
    """Number of EngineRequested records for it."""

    @property
    def leaving(self) -> bool:
        """Whether it was requested to go."""
        return self.wanted == GONE

    @property
    def has_left(self) -> bool:
        """Whether it was requested to go and has gone."""
        return self.leaving and self.state in (GONE, "")


@dataclass(slots=True)
class EngineReports:
    """The part of an engine's state that depends on the kinds of its reports, not only on the last one."""

    takes_turns: bool = False
    """Whether the last report was of an engine that is there: neither EngineDraining, in any state, nor EngineGone."""
    acknowledged: int | None = None
    """Version of the last EngineRegistered or EngineWeightsLoaded; NO_WEIGHTS after EngineGone; None before any."""
    base_version: int | None = None
    """Base version of the last EngineRegistered or EngineWeightsLoaded."""
    lent_at: int | None = None
    """Newest published version when the engine released its memory; -1 while it holds its memory; None if it has none
    (it is gone, or has only reported that it drains or is silent, which changes nothing).
    """

    def apply(self, event: Event) -> None:
        """Fold one report of the engine."""
        self.takes_turns = not isinstance(event, EngineDraining | EngineGone)
        match event:
            case EngineRegistered() | EngineWeightsLoaded():
                self.acknowledged, self.base_version, self.lent_at = event.version, event.base_version, -1
            case EngineWeightsRefused():
                self.lent_at = -1
            case EngineDraining() if event.state == RELEASED:
                self.lent_at = event.published
            case EngineGone():
                self.acknowledged, self.lent_at = NO_WEIGHTS, None
            case _:
                pass


@dataclass(slots=True)
class Fleet:
    """Fold of engine-requests and engine-status."""

    engines: dict[str, FleetEngine] = field(default_factory=dict)
    reports: dict[str, EngineReports] = field(default_factory=dict)
    """Engine -> the rest of what was reported of it; engines that were only requested have no entry."""

    def apply(self, event: Event) -> None:
        """Fold one record of either topic; ignore any other record."""
        if isinstance(event, EngineRequested):
            known = self.engines.get(event.engine_id, FleetEngine(event.engine_id))
            self.engines[known.id] = dataclasses.replace(
                known, url=event.url or known.url, wanted=event.wanted, by=event.by, hosted=not event.url,
                requests=known.requests + 1,
                wanted_kind=known.wanted_kind if event.wanted == GONE else event.kind,
            )  # fmt: skip
        elif TOPIC_OF.get(type(event).__name__) is ENGINES:
            known = self.engines.get(event.engine_id, FleetEngine(event.engine_id))
            cause = event.cause if isinstance(event, EngineGone) else ""
            self.engines[known.id] = dataclasses.replace(
                known, url=event.url, kind=event.kind, state=event.state, version=event.version, cause=cause
            )
            self.reports.setdefault(known.id, EngineReports()).apply(event)

    def present(self) -> list[FleetEngine]:
        """Return the engines that were not requested to go."""
        return [engine for engine in self.engines.values() if not engine.leaving]

    def hosted_engines(self) -> list[FleetEngine]:
        """Return the present engines that the supervisor starts, ordered by number."""
        return sorted((engine for engine in self.present() if engine.hosted), key=number)

    def serving_versions(self) -> dict[str, int]:
        """Return engine -> version last reported, for the engines that take turns. A refusal is a report as well: the
        engine is there, with its old version.
        """
        return {name: self.engines[name].version for name, reports in self.reports.items() if reports.takes_turns}

    def acknowledged_versions(self) -> dict[str, int]:
        """Return engine -> version last acknowledged, NO_WEIGHTS for those that are gone. An engine that drains or is
        silent keeps its version.
        """
        found = ((name, reports.acknowledged) for name, reports in self.reports.items())
        return {name: version for name, version in found if version is not None}

    def engines_holding_memory(self, published: int) -> list[str]:
        """Return the names of engines that hold memory, or may have taken it back since: they did not release it with
        `published`, the newest version, or a later one. -1 before the first version.
        """
        found = ((name, reports.lent_at) for name, reports in self.reports.items())
        return sorted(name for name, lent_at in found if lent_at is not None and lent_at < published)

    def find_engine(self, name: str) -> FleetEngine | None:
        """Return the engine with this id or address; one that is not leaving is preferred. None if there is none."""
        address = name.rstrip("/")
        found = [engine for engine in self.engines.values() if address in (engine.id, engine.url.rstrip("/"))]
        return next((engine for engine in found if not engine.leaving), found[0] if found else None)

    def request(
        self, engine_id: str, wanted: str, *, run_id: str, by: str, url: str = "", reason: str = "", kind: str = ""
    ) -> Event:
        """Return the request record. Repeating the request before the first one has been read returns the same
        record.
        """
        known = self.engines.get(engine_id, FleetEngine(engine_id))
        return EngineRequested(
            event_id=digest("EngineRequested", run_id, engine_id, wanted, known.requests),
            run_id=run_id, engine_id=engine_id, url=url, wanted=wanted, by=by, reason=reason, kind=kind,
        )  # fmt: skip

    def plan_scaling(self, count: int) -> list[tuple[str, str]]:
        """Return (engine, requested state) pairs that bring the number of hosted engines to `count`.

        The highest numbers are removed and the lowest free numbers are added. A number is free once its previous engine
        has gone.
        """
        hosted = [engine.id for engine in self.hosted_engines()]
        if count <= len(hosted):
            return [(engine_id, GONE) for engine_id in reversed(hosted[count:])]
        taken = {engine.id for engine in self.engines.values() if not engine.has_left}
        names = (f"engine-{each}" for each in range(len(taken) + count))
        free = [name for name in names if name not in taken]
        return [(engine_id, SERVING) for engine_id in free[: count - len(hosted)]]

    def compare_settings(self, engines: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
        """Return (engine, address, requested state) where the settings differ from the log.

        `engines` holds the (id, address or empty) pairs that the settings name. A request by anybody else takes
        precedence over the settings.
        """
        named = dict(engines)
        asked = [(engine_id, url, SERVING) for engine_id, url in named.items() if self._news(engine_id, url)]
        stale = (one for one in self.present() if one.by == SETTINGS and one.id not in named)
        return asked + [(engine.id, "" if engine.hosted else engine.url, GONE) for engine in stale]

    def _news(self, engine_id: str, url: str) -> bool:
        """Whether settings that name the engine differ from the log."""
        known = self.engines.get(engine_id)
        if known is None or not known.wanted:
            return True
        if known.leaving:
            return known.by == SETTINGS
        return known.hosted != (not url) or (not known.hosted and known.url != url)


@dataclass(slots=True)
class AnsweredVersions:
    """Fold of the reports of one engine: what became of each weight version there."""

    registered: set[int] = field(default_factory=set)
    """Versions that the engine had when it was registered."""
    loaded: set[int] = field(default_factory=set)
    """Versions that its loader loaded."""
    refused: set[int] = field(default_factory=set)
    superseded: set[int] = field(default_factory=set)
    """Versions that were skipped for a newer one."""

    def apply(self, event: Event) -> None:
        """Fold one report; ignore other records."""
        match event:
            case EngineRegistered() if event.version >= 0:
                self.registered.add(event.version)
            case EngineWeightsLoaded():
                self.loaded.add(event.version)
                self.superseded.update(event.superseded)
            case EngineWeightsRefused():
                self.refused.add(event.refused_version)
            case _:
                pass

    def is_answered(self, version: int) -> bool:
        """Return whether the version was loaded, refused or superseded. A registered one may still be to load: the
        engine may have got it from another run.
        """
        return version in self.loaded or version in self.refused or version in self.superseded


def number(engine: FleetEngine) -> int:
    """Return N of engine-N; -1 for any other name."""
    found = HOSTED.fullmatch(engine.id)
    return int(found[1]) if found else -1


LOW_LOAD: Final = 0.5
PATIENCE: Final = 4.0
"""A load must stay low this many times longer than it must stay high, because starting an engine again is expensive."""


@dataclass(frozen=True, slots=True)
class AutoscaleRules:
    """Bounds and thresholds of the autoscaler."""

    least: int
    """Minimum number of hosted engines."""
    most: int
    """Maximum number of hosted engines."""
    requests: int
    """Requests per engine above which there are too few engines."""
    after_s: float
    """Seconds for which a load must stay high before engines are added."""


@dataclass(slots=True)
class Autoscale:
    """Autoscaler: the direction in which the load points, and since when. It scales up at once and down one by one.

    Load is the number of requests that run or wait at engines. Scale up while there are more than `requests` per
    engine; scale down while one engine less would have at most LOW_LOAD times that. Loads in between change nothing,
    so a steady load leads to one number of engines and stays there.
    """

    rules: AutoscaleRules
    _direction: int = 0
    _since: float = 0.0

    def look(self, now: float, *, hosted: int, serving: int, under_way: int) -> int:
        """Return how many engines to host.

        `now` is in seconds of any clock; `hosted` counts the engines requested so far, `serving` those of them that
        serve, and `under_way` the requests that run or wait at those. The number does not change while an engine is
        still starting.
        """
        rules = self.rules
        if not rules.least <= hosted <= rules.most:
            self._direction = 0
            return min(max(hosted, rules.least), rules.most)
        direction = self._wanted_change(hosted, under_way) if serving == hosted else 0
        if direction != self._direction:
            self._direction, self._since = direction, now
        lasts_s = rules.after_s * (PATIENCE if direction < 0 else 1.0)
        if not direction or now - self._since < lasts_s:
            return hosted
        self._direction = 0
        return hosted - 1 if direction < 0 else min(math.ceil(under_way / rules.requests), rules.most)

    def _wanted_change(self, hosted: int, under_way: int) -> int:
        if under_way > self.rules.requests * hosted and hosted < self.rules.most:
            return 1
        return -int(hosted > self.rules.least and under_way <= LOW_LOAD * self.rules.requests * (hosted - 1))
