"""Which engines a run has: what was asked of each (engine-requests), and what its loader said last (engine-status).

The two topics are folded in any order. An engine that nobody asked for came by itself, with its loader: a sidecar. One
that was asked for without an address is hosted: the run's supervisor starts it, under the name engine-N.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from turnlog.schemas.events import EngineGone, EngineRequested, Event
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


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine as the log knows it."""

    id: str
    url: str = ""
    """As its loader said last, else as it was asked for; empty of one that has no address yet."""
    wanted: str = ""
    """serving | gone; empty: nobody asked."""
    by: str = ""
    """Who asked last."""
    hosted: bool = False
    state: str = ""
    """starting | serving | released | draining | silent | gone; empty: its loader has said nothing."""
    version: int = -1
    cause: str = ""
    """Why it is gone, in words."""
    requests: int = 0

    @property
    def leaving(self) -> bool:
        """Whether it was asked to go."""
        return self.wanted == GONE

    @property
    def left(self) -> bool:
        """Whether it was asked to go and has gone."""
        return self.leaving and self.state in (GONE, "")


@dataclass(slots=True)
class Fleet:
    """The fold."""

    engines: dict[str, Engine] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """One record of either topic; others are passed over."""
        if isinstance(event, EngineRequested):
            known = self.engines.get(event.engine_id, Engine(event.engine_id))
            self.engines[known.id] = dataclasses.replace(
                known, url=event.url or known.url, wanted=event.wanted, by=event.by, hosted=not event.url,
                requests=known.requests + 1,
            )  # fmt: skip
        elif TOPIC_OF.get(type(event).__name__) is ENGINES:
            known = self.engines.get(event.engine_id, Engine(event.engine_id))
            cause = event.cause if isinstance(event, EngineGone) else ""
            self.engines[known.id] = dataclasses.replace(
                known, url=event.url, state=event.state, version=event.version, cause=cause
            )

    def present(self) -> list[Engine]:
        """Those that nobody has asked to go."""
        return [engine for engine in self.engines.values() if not engine.leaving]

    def hosted(self) -> list[Engine]:
        """Those among them that the supervisor starts, in the order of their numbers."""
        return sorted((engine for engine in self.present() if engine.hosted), key=number)

    def named(self, name: str) -> Engine | None:
        """The engine of an id or an address."""
        address = name.rstrip("/")
        found = [engine for engine in self.engines.values() if address in (engine.id, engine.url.rstrip("/"))]
        return next((engine for engine in found if not engine.leaving), found[0] if found else None)

    def request(self, engine_id: str, wanted: str, *, run_id: str, by: str, url: str = "", reason: str = "") -> Event:
        """The record that asks. Said again before anybody has read it, it is the same one."""
        known = self.engines.get(engine_id, Engine(engine_id))
        return EngineRequested(
            event_id=digest("EngineRequested", run_id, engine_id, wanted, known.requests),
            run_id=run_id, engine_id=engine_id, url=url, wanted=wanted, by=by, reason=reason,
        )  # fmt: skip

    def scaled(self, count: int) -> list[tuple[str, str]]:
        """(engine, what is to be asked of it), so that `count` are hosted: the highest numbers go, the lowest free ones
        come. A number is free once whoever had it has gone."""
        hosted = [engine.id for engine in self.hosted()]
        if count <= len(hosted):
            return [(engine_id, GONE) for engine_id in reversed(hosted[count:])]
        taken = {engine.id for engine in self.engines.values() if not engine.left}
        names = (f"engine-{each}" for each in range(len(taken) + count))
        free = [name for name in names if name not in taken]
        return [(engine_id, SERVING) for engine_id in free[: count - len(hosted)]]

    def declared(self, engines: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
        """(engine, address, what is to be asked of it) where settings that name `engines`, (id, address or empty), say
        otherwise than the log. What somebody else said of an engine counts above settings."""
        named = dict(engines)
        asked = [(engine_id, url, SERVING) for engine_id, url in named.items() if self._news(engine_id, url)]
        stale = (one for one in self.present() if one.by == SETTINGS and one.id not in named)
        return asked + [(engine.id, "" if engine.hosted else engine.url, GONE) for engine in stale]

    def _news(self, engine_id: str, url: str) -> bool:
        """Whether settings that name the engine say what the log does not."""
        known = self.engines.get(engine_id)
        if known is None or not known.wanted:
            return True
        if known.leaving:
            return known.by == SETTINGS
        return known.hosted != (not url) or (not known.hosted and known.url != url)


def number(engine: Engine) -> int:
    """N of engine-N; -1 of any other name."""
    found = HOSTED.fullmatch(engine.id)
    return int(found[1]) if found else -1
