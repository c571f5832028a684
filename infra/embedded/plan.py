"""Composition of a run: servers (embedded unless a setting names the user's own) and roles, with their addresses.

Engines and roles are members of a supervisor: that of the run, or that in an actor on a node of a Ray cluster.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from turnlog.infra.embedded import EngineDied, NotInstalled, RegistryDied, RoleDied
from turnlog.infra.embedded.broker_cluster import Brokers
from turnlog.infra.embedded.liveness import (
    Liveness,
    answering,
    broker_answers,
    generates,
    http_answers,
    is_well,
    role_loops,
    steps,
)
from turnlog.infra.embedded.ports import HOST, ONE_HOST, claim, free_ports
from turnlog.infra.embedded.process import Launch
from turnlog.infra.embedded.servers import ENGINE_REMEDY, EngineServer, ObjectStore, check_model, lora_rank_of
from turnlog.infra.embedded.supervisor import Member
from turnlog.infra.roles.ending import grace_s
from turnlog.infra.roles.http_clients import fetch_json
from turnlog.infra.roles.probe import client_url, health_host
from turnlog.infra.run_folder import KAFKA_KEY, LOGS, REGISTRY_KEY, SETTINGS, STORE_KEY, Endpoints, kept_secret
from turnlog.infra.tensors.served import ServedNote
from turnlog.names import OPTIONAL_ROLES
from turnlog.settings import (
    DashboardSettings,
    GatewaySettings,
    LivenessSettings,
    RegistrySettings,
    Settings,
    TinkerSettings,
    ViewsSettings,
)

THREADED = frozenset({"trainer", "tinker"})
"""Roles that compute; all others get OMP_NUM_THREADS=1."""
LOG_AND_STORE, ON_LOG, GATEWAY, ROLE = 0, 1, 2, 3
"""Tiers: the highest is stopped first, so that a role can drain into the servers that it writes to."""
ENGINE_DEATHS = 2
PROBE_TIMEOUT_S = 1.0
STOP_S = 15.0
"""Seconds to stop a role. Users who take down their own run do not wait for the end of a step or a turn, because the
next start repeats it."""
CLEANS_UP = frozenset({"sandbox"})
"""Roles that get their full grace period, since others would have to remove what they leave behind."""
ROLE_START_S = 300.0
"""Seconds without an answer after which a role that is not ready yet counts as hung at the earliest: imports, a restore
and a warm start take long."""


@dataclasses.dataclass(frozen=True, slots=True)
class RoleProcess:
    """A process of a role."""

    role: str
    label: str
    """Number of the process; for a loader, the distinguishing part of its engine's id."""
    engine: str = ""
    """Id of a loader's engine; else empty."""

    @property
    def name(self) -> str:
        """Name of the log file, TURNLOG_INSTANCE and key in endpoints.json."""
        return f"{self.role}-{self.label}"

    @classmethod
    def loader(cls, engine: str) -> RoleProcess:
        """Return the slot of the engine's loader."""
        return cls("loader", engine.removeprefix("engine-"), engine)


def engine_member(settings: Settings, name: str, port: int = 0) -> tuple[Member, str]:
    """Return an engine at [engine] host as a member, and its address; port 0 picks a free one. Raises PortTaken,
    ModelMissing, NotInstalled."""
    engine = EngineServer(
        Path(settings.model.path),
        settings.engine,
        log=log_of(settings, name),
        port=port,
        name=name,
        lora_rank=lora_rank_of(settings),
        lora_output=settings.tinker.enabled,
        served=ServedNote.of(settings.run.directory, settings.run.id, name),
    )
    launch = dataclasses.replace(engine.launch(), liveness=_generating(engine, settings))
    return Member(launch=launch, deaths=ENGINE_DEATHS, often=settings.liveness.deaths, tier=ON_LOG), engine.url


def _generating(engine: EngineServer, settings: Settings) -> Liveness:
    """Return the liveness check of an engine, which allows for a weight update, during which it generates nothing."""
    bound_s = settings.liveness.engine_s
    within_s = bound_s and bound_s + settings.loader.timeout_s
    return Liveness(
        look=answering(partial(steps if engine.kind == "vllm" else generates, engine.url)), within_s=within_s
    )


def role_member(
    settings: Settings, slot: RoleProcess, health: str, env: Mapping[str, str], *, after: tuple[str, ...] = ()
) -> Member:
    """Return a role as a member; it serves its health at `health`, and `env` is added to its environment."""
    of_all = {"TURNLOG_INSTANCE": slot.name, "TURNLOG_HEALTH_PORT": port_of(health)}
    launch = Launch(
        name=slot.name,
        argv=turnlog(settings, "role", slot.role),
        log=log_of(settings, slot.name),
        env={**of_all, **({} if slot.role in THREADED else {"OMP_NUM_THREADS": "1"}), **env},
        ready=lambda: answers(f"{health}/readyz"),
        ready_timeout_s=ROLE_START_S,
        stop_timeout_s=grace_s(slot.role, settings) if slot.role in CLEANS_UP else STOP_S,
        died=RoleDied,
        remedy=f"`turnlog role {slot.role}` can be run by hand with the same settings",
        liveness=role_liveness(health, settings.liveness),
    )
    tier = GATEWAY if slot.role == "gateway" else ROLE
    return Member(
        launch=launch,
        after=after,
        often=settings.liveness.deaths,
        optional=slot.role in OPTIONAL_ROLES,
        tier=tier,
        must_be_ready=False,
    )


def loaders_own(engine: str, url: str, kind: str = "") -> dict[str, str]:
    """Return the environment by which a loader knows its engine; a `kind` replaces what the settings say of its
    name."""
    of_kind = {"TURNLOG_ENGINE_KIND": kind, "TURNLOG_ENGINE_KINDS": ""} if kind else {}
    return {"TURNLOG_ENGINE_ID": engine, "TURNLOG_ENGINE_URL": url} | of_kind


def role_liveness(health: str, bounds: LivenessSettings) -> Liveness:
    """Return the liveness check of a role that serves its health at `health`."""
    return Liveness(look=lambda: role_loops(health), within_s=bounds.role_s)


def answers(url: str) -> bool:
    """Whether GET answers 2xx, for polling during a start."""
    return is_well(url, timeout_s=PROBE_TIMEOUT_S)


def turnlog(settings: Settings, *verb: str) -> tuple[str, ...]:
    """Return the command line of a verb with the settings saved in the run's folder."""
    kept = Path(settings.run.directory) / SETTINGS
    return (sys.executable, "-m", "turnlog.cli", "--settings", str(kept), *verb)


def log_of(settings: Settings, name: str) -> Path:
    """Return the log file of a member."""
    return Path(settings.run.directory) / LOGS / f"{name}.log"


def port_of(url: str) -> str:
    """Return the port in http://host:port."""
    return url.rpartition(":")[2].rstrip("/")


ROLES = (
    "gateway", "runner", "sandbox", "assembler", "batcher", "trainer", "loader", "views", "archive", "index",
    "dashboard", "alerts", "tinker",
)  # fmt: skip
"""Roles that `turnlog up` runs. A name given twice means two processes; `loader` means one per engine. Those from
`views` on can be switched off in their settings (for alerts: urls), and a dashboard includes its indexer. With [tinker]
enabled, `tinker` runs in place of those that train by recipes. `turnlog run` feeds the tasks."""
WITHOUT_TINKER = ("gateway", "runner", "sandbox", "assembler", "batcher", "trainer", "loader", "views")
"""Roles that do not run beside the Tinker server."""
READING = ("reading",)
"""Value in place of ROLES for reading what a run has recorded: no role and no engine."""
SERVER_DEATHS = 3


class LaunchPlan:
    """Members of a run, in no particular order, and their addresses. Ports are chosen, but nothing is started. Engines
    may be added and removed."""

    def __init__(self, settings: Settings, roles: Sequence[str] = ROLES) -> None:
        """Plan a run; formats Kafka's folder and fetches its jars if needed.

        Raises EmbeddedError (PortTaken, NoJava, JarError, ModelMissing, ...)."""
        self._settings, self._live = settings, settings.liveness
        self._directory = Path(settings.run.directory)
        self._ports = iter(free_ports(64))
        self.members: list[Member] = []
        self._brokers: list[str] = []
        self._with_loaders = "loader" in roles
        self._urls: dict[str, str] = {}
        """Engine -> address; empty if only its loader knows it."""
        self._kinds: dict[str, str] = {}
        """Engine -> the kind with which it was registered."""
        self._held: dict[str, str] = {}
        """Engine on Ray -> health address of the local process that owns it."""
        reads = tuple(roles) == READING
        if reads:
            roles = ()
        else:
            self._engines()  # first: a model error must show before Kafka's folder is created
        kafka, store = self._kafka(), self._store()
        registry = self._registry()
        self._topics()
        slots = self._slots(roles)
        shown = any(slot.role == "dashboard" for slot in slots)
        self.endpoints = Endpoints(
            kafka=kafka,
            registry=registry,
            store=store,
            gateway=settings.gateway.url or ("" if reads else self._address(settings.gateway, "[gateway] port")),
            views="" if reads else self._address(settings.views, "[views] port"),
            dashboard=self._address(settings.dashboard, "[dashboard] port") if shown else "",
            tinker=self._address(settings.tinker, "[tinker] port") if settings.tinker.enabled and not reads else "",
            health={slot.name: client_url(health_host(os.environ), next(self._ports)) for slot in slots},
        )
        self._tell_engines()
        if "views-0" in self.endpoints.health:  # Faust serves its pages and its health on one port
            self.endpoints.health["views-0"] = self.endpoints.views
        self.members += [self._role(slot) for slot in slots]

    def declared_engines(self) -> list[tuple[str, str]]:
        """Return (engine, address) of the engines in the settings; the address of hosted ones is empty."""
        urls = self._settings.engine.urls
        return [
            (f"engine-{each}", urls[each] if urls else "") for each in range(len(urls) or self._settings.engine.count)
        ]

    def join(self, engine_id: str, url: str, kind: str = "") -> list[Member]:
        """Add an engine to a running run; return its members: its loader and, if `url` is empty, the engine itself. For
        an engine on Ray this is the local process that owns both. `kind`: that with which it was registered. Raises
        NotInstalled, ModelMissing, PortTaken."""
        members = []
        if kind:
            self._kinds[engine_id] = kind
        if url:
            self._urls[engine_id] = url
        else:
            members.append(self._engine(engine_id, free_ports(1)[0]))
        if self._with_loaders and not self.on_ray(engine_id):
            slot = RoleProcess.loader(engine_id)
            self.endpoints.health[slot.name] = client_url(health_host(os.environ), free_ports(1)[0])
            members.append(self._role(slot))
        self._tell_engines()
        return members

    def leave(self, engine_id: str) -> tuple[str, str]:
        """Remove an engine; return the names of its loader's and its own member."""
        slot = RoleProcess.loader(engine_id)
        for known in (self._urls, self._held, self._kinds):
            known.pop(engine_id, None)
        for name in (slot.name, engine_id):
            self.endpoints.health.pop(name, None)
        self._tell_engines()
        return slot.name, engine_id

    def has(self, engine_id: str) -> bool:
        """Whether the engine is part of the plan."""
        return engine_id in self._urls

    def registered_kind(self, engine_id: str) -> str:
        """Return the kind with which the engine was registered; empty if the settings tell it."""
        return self._kinds.get(engine_id, "")

    def on_ray(self, engine_id: str) -> bool:
        """Whether Ray has placed the engine: its loader runs beside it and reports its address."""
        return engine_id in self._held

    def _tell_engines(self) -> None:
        self.endpoints.health.update(self._held)
        self.endpoints = dataclasses.replace(self.endpoints, engines=tuple(filter(None, self._urls.values())))

    def _port(self, wanted: int, setting: str, host: str = HOST) -> int:
        return claim(wanted, setting, host) if wanted else next(self._ports)

    def _address(
        self,
        server: DashboardSettings | GatewaySettings | RegistrySettings | TinkerSettings | ViewsSettings,
        setting: str,
    ) -> str:
        return client_url(server.host, self._port(server.port, setting, server.host))

    def _serve(self, launch: Launch, *, tier: int, after: tuple[str, ...] = ()) -> None:
        self.members.append(Member(launch=launch, after=after, essential=True, deaths=SERVER_DEATHS, tier=tier))

    def _there(self, *names: str) -> tuple[str, ...]:
        """Return those of the servers that this run starts itself; the user's own servers run already."""
        mine = {member.launch.name for member in self.members}
        return tuple(name for name in names if name in mine)

    def _kafka(self) -> str:
        wanted = self._settings.kafka
        if wanted.bootstrap:
            return wanted.bootstrap
        brokers = Brokers(
            self._directory,
            count=wanted.brokers,
            port=wanted.port,
            heap_mb=wanted.heap_mb,
            logs=self._directory / LOGS,
            password=kept_secret(self._directory / KAFKA_KEY),
        )
        for broker, launch in zip(brokers.all, brokers.launches(), strict=True):
            look = answering(partial(broker_answers, broker.port))
            liveness = Liveness(look=look, within_s=self._live.servers_s)
            self._serve(dataclasses.replace(launch, liveness=liveness), tier=LOG_AND_STORE)
            self._brokers.append(launch.name)
        return brokers.bootstrap

    def _store(self) -> str:
        wanted = self._settings.store
        if wanted.endpoint:
            return wanted.endpoint
        chosen = dataclasses.replace(wanted, port=self._port(wanted.port, "[store] port"))
        server = ObjectStore(self._directory / STORE_KEY.parent, chosen, log=log_of(self._settings, "store"))
        liveness = Liveness(look=answering(lambda: http_answers(server.endpoint)), within_s=self._live.servers_s)
        self._serve(dataclasses.replace(server.launch(), liveness=liveness), tier=LOG_AND_STORE)
        return server.endpoint

    def _engines(self) -> None:
        for engine_id, url in self.declared_engines():
            if url:
                self._urls[engine_id] = url
            else:
                self.members.append(self._engine(engine_id, next(self._ports)))

    def _engine(self, name: str, port: int) -> Member:
        """Return the engine's member; for an engine on Ray, that of the local process that owns it."""
        if self._settings.engine.launcher == "local":
            member, self._urls[name] = engine_member(self._settings, name, port)
            return member
        if importlib.util.find_spec("ray") is None:
            raise NotInstalled('engine.launcher = "ray" needs ray: pip install turnlog[ray]')
        check_model(Path(self._settings.model.path))
        self._urls[name] = ""
        self._held[name] = client_url(health_host(os.environ), port)
        slot = RoleProcess("engine", name.removeprefix("engine-"))
        member = role_member(self._settings, slot, self._held[name], {})
        launch = dataclasses.replace(member.launch, stop_timeout_s=2 * STOP_S, died=EngineDied, remedy=ENGINE_REMEDY)
        return dataclasses.replace(member, launch=launch, deaths=ENGINE_DEATHS, tier=ON_LOG)

    def _registry(self) -> str:
        wanted = self._settings.registry
        if wanted.url:
            return wanted.url
        kept_secret(self._directory / REGISTRY_KEY)  # password of the registry, with which its clients log in
        url = self._address(wanted, "[registry] port")
        launch = Launch(
            name="registry",
            argv=turnlog(self._settings, "role", "registry"),
            log=log_of(self._settings, "registry"),
            env={"TURNLOG_REGISTRY_PORT": port_of(url), "OMP_NUM_THREADS": "1"},
            ready=lambda: answers(f"{url}/"),  # the only path that requires no login
            died=RegistryDied,
            liveness=Liveness(look=answering(lambda: http_answers(f"{url}/")), within_s=self._live.servers_s),
        )
        self._serve(launch, tier=ON_LOG, after=self._there(*self._brokers))
        return url

    def _topics(self) -> None:
        """Add the process that creates missing topics and ends; roles wait for it."""
        launch = Launch(
            name="topics",
            argv=turnlog(self._settings, "topics", "apply"),
            log=log_of(self._settings, "topics"),
            ready=lambda: False,
            died=RoleDied,
        )
        self._serve(launch, tier=ROLE, after=self._there(*self._brokers, "registry"))

    def _slots(self, roles: Sequence[str]) -> list[RoleProcess]:
        counts = Counter(roles)
        shown = self._settings.dashboard.enabled and "dashboard" in counts
        for role in ("views", "archive", "index", "dashboard"):
            if not (getattr(self._settings, role).enabled or (role == "index" and shown)):
                counts.pop(role, None)
        if not self._settings.alerts.urls:
            counts.pop("alerts", None)
        for role in WITHOUT_TINKER if self._settings.tinker.enabled else ("tinker",):
            counts.pop(role, None)
        if self._settings.trainer.launcher == "torchrun" or self._settings.trainer.kind == "external":
            counts.pop("trainer", None)
        found = []
        for role, count in counts.items():
            if role == "loader":
                found += [RoleProcess.loader(engine_id) for engine_id in self._urls if not self.on_ray(engine_id)]
            else:
                found += [RoleProcess(role, str(number)) for number in range(count)]
        return found

    def _role(self, slot: RoleProcess) -> Member:
        env: dict[str, str] = {}
        if slot.role == "trainer":
            env |= ONE_HOST
        if slot.role == "gateway":
            env["TURNLOG_GATEWAY_PORT"] = port_of(self.endpoints.gateway)
        if slot.role == "tinker":
            env["TURNLOG_TINKER_PORT"] = port_of(self.endpoints.tinker)
        if slot.role == "views":
            env["TURNLOG_VIEWS_PORT"] = port_of(self.endpoints.views)
        if slot.role == "dashboard":
            env["TURNLOG_DASHBOARD_PORT"] = port_of(self.endpoints.dashboard)
        if slot.role == "loader":
            env |= loaders_own(slot.engine, self._urls[slot.engine], self.registered_kind(slot.engine))
        after = self._there(*self._brokers, "store", "registry", "topics")
        return role_member(self._settings, slot, self.endpoints.health[slot.name], env, after=after)


def waiting_for(health: str) -> str:
    """Return the failing readiness conditions of a role (/readyz); empty if it is ready."""
    try:
        ready, said = fetch_json(f"{health}/readyz", timeout_s=PROBE_TIMEOUT_S)
    except (OSError, ValueError):
        return "does not answer yet"
    return "" if ready else "; ".join(said.get("waiting", {}).values())
