"""What a run consists of: servers (embedded where no setting names the user's own) and roles, with their addresses."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from turnlog.infra.embedded import RegistryDied, RoleDied
from turnlog.infra.embedded.brokers import Brokers
from turnlog.infra.embedded.liveness import (
    Liveness,
    answering,
    broker_answers,
    generates,
    http_answers,
    is_well,
    role_loops,
)
from turnlog.infra.embedded.ports import HOST, ONE_HOST, claim, free_ports, reached
from turnlog.infra.embedded.process import Launch
from turnlog.infra.embedded.servers import Engine, ObjectStore, lora_rank_of
from turnlog.infra.embedded.supervisor import Member
from turnlog.infra.roles.ending import grace_s
from turnlog.infra.roles.probe import health_host
from turnlog.infra.run_folder import LOGS, SETTINGS, STORE_KEY, Endpoints
from turnlog.settings import (
    DashboardSettings,
    GatewaySettings,
    LivenessSettings,
    RegistrySettings,
    Settings,
    ViewsSettings,
)

ROLES = (
    "gateway", "runner", "sandbox", "assembler", "batcher", "trainer", "loader", "views", "archive", "index",
    "dashboard", "alerts",
)  # fmt: skip
"""What `turnlog up` runs; a name given twice is two processes, `loader` is one per engine, those from `views` on have a
switch in their settings (of alerts that is urls), and a dashboard has its indexer. Tasks are fed by `turnlog run`."""
THREADED = frozenset({"trainer"})
"""Roles that compute; all others get OMP_NUM_THREADS=1."""
LOG_AND_STORE, ON_LOG, GATEWAY, ROLE = 0, 1, 2, 3
"""Tiers: the highest is stopped first, so that a role can drain into what it writes to."""
ENGINE_DEATHS = 2
SERVER_DEATHS = 3
PROBE_TIMEOUT_S = 1.0
STOP_S = 15.0
"""Whoever takes down a run of his own does not wait for a step or a turn to end: what they were about is done again."""
CLEANS_UP = frozenset({"sandbox"})
"""Roles that are given their whole grace: what they leave behind, others must remove."""
ROLE_START_S = 300.0
"""A role that is not ready is hung after so long a silence at the earliest: imports, a restore, a warm start."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One process of a role."""

    role: str
    label: str
    """Number; of a loader what sets its engine apart."""
    engine: str = ""
    """Id of a loader's engine."""

    @property
    def name(self) -> str:
        """Log file, TURNLOG_INSTANCE and key in endpoints.json."""
        return f"{self.role}-{self.label}"

    @classmethod
    def loader(cls, engine: str) -> Slot:
        """Of the engine's loader."""
        return cls("loader", engine.removeprefix("engine-"), engine)


class LaunchPlan:
    """Members in no order, and where clients reach them. Ports are chosen, nothing runs. Engines may come and go."""

    def __init__(self, settings: Settings, roles: Sequence[str] = ROLES) -> None:
        """Formats Kafka's folder and fetches its jars when needed.
        Raises EmbeddedError (PortTaken, NoJava, JarError, ModelMissing, ...)."""
        self._settings, self._live = settings, settings.liveness
        self._directory = Path(settings.run.directory)
        self._ports = iter(free_ports(64))
        self.members: list[Member] = []
        self._brokers: list[str] = []
        self._with_loaders = "loader" in roles
        self._urls: dict[str, str] = {}
        """Engine -> address."""
        self._engines()  # first: what is wrong with a model shows before Kafka's folder is made
        kafka, store = self._kafka(), self._store()
        registry = self._registry()
        self._topics()
        slots = self._slots(roles)
        shown = any(slot.role == "dashboard" for slot in slots)
        self.endpoints = Endpoints(
            kafka=kafka,
            registry=registry,
            store=store,
            engines=tuple(self._urls.values()),
            gateway=settings.gateway.url or self._address(settings.gateway, "[gateway] port"),
            views=self._address(settings.views, "[views] port"),
            dashboard=self._address(settings.dashboard, "[dashboard] port") if shown else "",
            health={slot.name: reached(health_host(os.environ), next(self._ports)) for slot in slots},
        )
        if "views-0" in self.endpoints.health:  # Faust serves its pages and its health on one port
            self.endpoints.health["views-0"] = self.endpoints.views
        self.members += [self._role(slot) for slot in slots]

    def declared(self) -> list[tuple[str, str]]:
        """(engine, address) that the settings name; hosted ones have none."""
        urls = self._settings.engine.urls
        return [
            (f"engine-{each}", urls[each] if urls else "") for each in range(len(urls) or self._settings.engine.count)
        ]

    def join(self, engine_id: str, url: str) -> list[Member]:
        """Members of an engine that comes while the run is up: its loader, and where `url` is empty the engine itself.
        Raises NotInstalled, ModelMissing, PortTaken."""
        members = []
        if not url:
            member, url = self._engine(engine_id, free_ports(1)[0])
            members.append(member)
        self._urls[engine_id] = url
        if self._with_loaders:
            slot = Slot.loader(engine_id)
            self.endpoints.health[slot.name] = reached(health_host(os.environ), free_ports(1)[0])
            members.append(self._role(slot))
        self._tell_engines()
        return members

    def leave(self, engine_id: str) -> tuple[str, str]:
        """Names of the members of an engine that goes: its loader's and its own."""
        slot = Slot.loader(engine_id)
        self._urls.pop(engine_id, None)
        self.endpoints.health.pop(slot.name, None)
        self._tell_engines()
        return slot.name, engine_id

    def address(self, engine_id: str) -> str:
        """Where an engine of the plan is; empty: it is in none."""
        return self._urls.get(engine_id, "")

    def _tell_engines(self) -> None:
        self.endpoints = dataclasses.replace(self.endpoints, engines=tuple(self._urls.values()))

    def _port(self, wanted: int, setting: str, host: str = HOST) -> int:
        return claim(wanted, setting, host) if wanted else next(self._ports)

    def _address(
        self, server: DashboardSettings | GatewaySettings | RegistrySettings | ViewsSettings, setting: str
    ) -> str:
        return reached(server.host, self._port(server.port, setting, server.host))

    def _log(self, name: str) -> Path:
        return self._directory / LOGS / f"{name}.log"

    def _serve(self, launch: Launch, *, tier: int, after: tuple[str, ...] = (), deaths: int = SERVER_DEATHS) -> None:
        self.members.append(Member(launch=launch, after=after, essential=True, deaths=deaths, tier=tier))

    def _there(self, *names: str) -> tuple[str, ...]:
        """Those that this run starts itself; the user's own servers are there already."""
        mine = {member.launch.name for member in self.members}
        return tuple(name for name in names if name in mine)

    def _kafka(self) -> str:
        wanted = self._settings.kafka
        if wanted.bootstrap:
            return wanted.bootstrap
        brokers = Brokers(
            self._directory, count=wanted.brokers, port=wanted.port, heap_mb=wanted.heap_mb, logs=self._directory / LOGS
        )
        for broker, launch in zip(brokers.all, brokers.launches(), strict=True):
            look = answering(partial(broker_answers, broker.port))
            liveness = Liveness(look=look, within_s=self._live.broker_s)
            self._serve(dataclasses.replace(launch, liveness=liveness), tier=LOG_AND_STORE)
            self._brokers.append(launch.name)
        return brokers.bootstrap

    def _store(self) -> str:
        wanted = self._settings.store
        if wanted.endpoint:
            return wanted.endpoint
        chosen = dataclasses.replace(wanted, port=self._port(wanted.port, "[store] port"))
        server = ObjectStore(self._directory / STORE_KEY.parent, chosen, log=self._log("store"))
        liveness = Liveness(look=answering(lambda: http_answers(server.endpoint)), within_s=self._live.store_s)
        self._serve(dataclasses.replace(server.launch(), liveness=liveness), tier=LOG_AND_STORE)
        return server.endpoint

    def _engines(self) -> None:
        for engine_id, url in self.declared():
            if not url:
                member, url = self._engine(engine_id, next(self._ports))
                self.members.append(member)
            self._urls[engine_id] = url

    def _engine(self, name: str, port: int) -> tuple[Member, str]:
        engine = Engine(
            Path(self._settings.model.path),
            self._settings.engine,
            log=self._log(name),
            port=port,
            name=name,
            seed=int(name.rpartition("-")[2]) + 1,
            lora_rank=lora_rank_of(self._settings),
        )
        launch = dataclasses.replace(engine.launch(), liveness=self._generating(engine.url))
        return Member(launch=launch, deaths=ENGINE_DEATHS, often=self._live.deaths, tier=ON_LOG), engine.url

    def _generating(self, url: str) -> Liveness:
        """An engine generates nothing while its weights are swapped."""
        within_s = self._live.engine_s and self._live.engine_s + self._settings.loader.timeout_s
        return Liveness(look=answering(lambda: generates(url)), within_s=within_s)

    def _registry(self) -> str:
        wanted = self._settings.registry
        if wanted.url:
            return wanted.url
        url = self._address(wanted, "[registry] port")
        launch = Launch(
            name="registry",
            argv=self._turnlog("registry"),
            log=self._log("registry"),
            env={"TURNLOG_REGISTRY_PORT": _port_of(url), "OMP_NUM_THREADS": "1"},
            ready=lambda: answers(f"{url}/subjects"),
            died=RegistryDied,
            liveness=Liveness(look=answering(lambda: http_answers(f"{url}/subjects")), within_s=self._live.registry_s),
        )
        self._serve(launch, tier=ON_LOG, after=self._there(*self._brokers))
        return url

    def _topics(self) -> None:
        """A process that makes what is missing and ends; roles wait for it."""
        launch = Launch(
            name="topics",
            argv=self._turnlog("topics", "apply"),
            log=self._log("topics"),
            ready=lambda: False,
            died=RoleDied,
        )
        self._serve(launch, tier=ROLE, after=self._there(*self._brokers, "registry"))

    def _slots(self, roles: Sequence[str]) -> list[Slot]:
        counts = Counter(roles)
        shown = self._settings.dashboard.enabled and "dashboard" in counts
        for role in ("views", "archive", "index", "dashboard"):
            if not (getattr(self._settings, role).enabled or (role == "index" and shown)):
                counts.pop(role, None)
        if not self._settings.alerts.urls:
            counts.pop("alerts", None)
        found = []
        for role, count in counts.items():
            if role == "loader":
                found += [Slot.loader(engine_id) for engine_id in self._urls]
            else:
                found += [Slot(role, str(number)) for number in range(count)]
        return found

    def _role(self, slot: Slot) -> Member:
        health = self.endpoints.health[slot.name]
        env = {"TURNLOG_INSTANCE": slot.name, "TURNLOG_HEALTH_PORT": _port_of(health)}
        after = self._there(*self._brokers, "store", "registry", "topics")
        if slot.role not in THREADED:
            env["OMP_NUM_THREADS"] = "1"
        if slot.role == "trainer":
            env |= ONE_HOST
        if slot.role == "gateway":
            env["TURNLOG_GATEWAY_PORT"] = _port_of(self.endpoints.gateway)
        if slot.role == "views":
            env["TURNLOG_VIEWS_PORT"] = _port_of(self.endpoints.views)
        if slot.role == "dashboard":
            env["TURNLOG_DASHBOARD_PORT"] = _port_of(self.endpoints.dashboard)
        if slot.role == "loader":
            env |= {"TURNLOG_ENGINE_ID": slot.engine, "TURNLOG_ENGINE_URL": self._urls[slot.engine]}
        launch = Launch(
            name=slot.name,
            argv=self._turnlog(slot.role),
            log=self._log(slot.name),
            env=env,
            ready=lambda: answers(f"{health}/readyz"),
            ready_timeout_s=ROLE_START_S,
            stop_timeout_s=grace_s(slot.role, self._settings) if slot.role in CLEANS_UP else STOP_S,
            died=RoleDied,
            remedy=f"`turnlog {slot.role}` can be run by hand with the same settings",
            liveness=role_liveness(health, self._live),
        )
        tier = GATEWAY if slot.role == "gateway" else ROLE
        return Member(launch=launch, after=after, often=self._live.deaths, tier=tier, must_be_ready=False)

    def _turnlog(self, *verb: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "turnlog.cli", "--settings", str(self._directory / SETTINGS), *verb)


def role_liveness(health: str, bounds: LivenessSettings) -> Liveness:
    """Of the role that serves its health there."""
    return Liveness(look=lambda: role_loops(health), within_s=bounds.role_s)


def answers(url: str) -> bool:
    """Whether GET answers 2xx, while a start is waited for."""
    return is_well(url, timeout_s=PROBE_TIMEOUT_S)


def waiting_for(health: str) -> str:
    """What a role says that it waits for (/readyz); empty when it is ready or does not answer."""
    try:
        with urllib.request.urlopen(f"{health}/readyz", timeout=PROBE_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as refusal:
        with refusal:
            reasons: dict[str, str] = json.load(refusal).get("waiting", {})
        return "; ".join(reasons.values())
    except (OSError, ValueError):
        return "does not answer yet"


def _port_of(url: str) -> str:
    return url.rpartition(":")[2].rstrip("/")
