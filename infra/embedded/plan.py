"""Composition of a run: servers (embedded unless a setting names the user's own) and roles, with their addresses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import urllib.error
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from turnlog.infra.embedded import EngineDied, NotInstalled, RegistryDied, RoleDied
from turnlog.infra.embedded.broker_cluster import Brokers
from turnlog.infra.embedded.liveness import Liveness, answering, broker_answers, http_answers
from turnlog.infra.embedded.members import (
    ENGINE_DEATHS,
    LOG_AND_STORE,
    ON_LOG,
    PROBE_TIMEOUT_S,
    ROLE,
    STOP_S,
    RoleProcess,
    answers,
    engine_member,
    loaders_own,
    log_of,
    port_of,
    role_member,
    turnlog,
)
from turnlog.infra.embedded.ports import HOST, ONE_HOST, claim, free_ports
from turnlog.infra.embedded.process import Launch
from turnlog.infra.embedded.servers import ENGINE_REMEDY, ObjectStore, check_model
from turnlog.infra.embedded.supervisor import Member
from turnlog.infra.roles.http_clients import got
from turnlog.infra.roles.probe import client_url, health_host
from turnlog.infra.run_folder import KAFKA_KEY, LOGS, REGISTRY_KEY, STORE_KEY, Endpoints, kept_secret
from turnlog.settings import DashboardSettings, GatewaySettings, RegistrySettings, Settings, ViewsSettings

ROLES = (
    "gateway", "runner", "sandbox", "assembler", "batcher", "trainer", "loader", "views", "archive", "index",
    "dashboard", "alerts",
)  # fmt: skip
"""Roles that `turnlog up` runs. A name given twice means two processes; `loader` means one per engine. Those from
`views` on can be switched off in their settings (for alerts: urls), and a dashboard includes its indexer. `turnlog run`
feeds the tasks."""
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

    def join(self, engine_id: str, url: str) -> list[Member]:
        """Add an engine to a running run; return its members: its loader and, if `url` is empty, the engine itself. For
        an engine on Ray this is the local process that owns both. Raises NotInstalled, ModelMissing, PortTaken."""
        members = []
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
        for known in (self._urls, self._held):
            known.pop(engine_id, None)
        for name in (slot.name, engine_id):
            self.endpoints.health.pop(name, None)
        self._tell_engines()
        return slot.name, engine_id

    def has(self, engine_id: str) -> bool:
        """Whether the engine is part of the plan."""
        return engine_id in self._urls

    def on_ray(self, engine_id: str) -> bool:
        """Whether Ray has placed the engine: its loader runs beside it and reports its address."""
        return engine_id in self._held

    def _tell_engines(self) -> None:
        self.endpoints.health.update(self._held)
        self.endpoints = dataclasses.replace(self.endpoints, engines=tuple(filter(None, self._urls.values())))

    def _port(self, wanted: int, setting: str, host: str = HOST) -> int:
        return claim(wanted, setting, host) if wanted else next(self._ports)

    def _address(
        self, server: DashboardSettings | GatewaySettings | RegistrySettings | ViewsSettings, setting: str
    ) -> str:
        return client_url(server.host, self._port(server.port, setting, server.host))

    def _serve(self, launch: Launch, *, tier: int, after: tuple[str, ...] = (), deaths: int = SERVER_DEATHS) -> None:
        self.members.append(Member(launch=launch, after=after, essential=True, deaths=deaths, tier=tier))

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
            liveness = Liveness(look=look, within_s=self._live.broker_s)
            self._serve(dataclasses.replace(launch, liveness=liveness), tier=LOG_AND_STORE)
            self._brokers.append(launch.name)
        return brokers.bootstrap

    def _store(self) -> str:
        wanted = self._settings.store
        if wanted.endpoint:
            return wanted.endpoint
        chosen = dataclasses.replace(wanted, port=self._port(wanted.port, "[store] port"))
        server = ObjectStore(self._directory / STORE_KEY.parent, chosen, log=log_of(self._settings, "store"))
        liveness = Liveness(look=answering(lambda: http_answers(server.endpoint)), within_s=self._live.store_s)
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
            liveness=Liveness(look=answering(lambda: http_answers(f"{url}/")), within_s=self._live.registry_s),
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
        if slot.role == "views":
            env["TURNLOG_VIEWS_PORT"] = port_of(self.endpoints.views)
        if slot.role == "dashboard":
            env["TURNLOG_DASHBOARD_PORT"] = port_of(self.endpoints.dashboard)
        if slot.role == "loader":
            env |= loaders_own(slot.engine, self._urls[slot.engine])
        after = self._there(*self._brokers, "store", "registry", "topics")
        return role_member(self._settings, slot, self.endpoints.health[slot.name], env, after=after)


def waiting_for(health: str) -> str:
    """Return the failing readiness conditions of a role (/readyz); empty if it is ready."""
    try:
        with got(f"{health}/readyz", timeout_s=PROBE_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as refusal:
        with refusal:
            reasons: dict[str, str] = json.load(refusal).get("waiting", {})
        return "; ".join(reasons.values())
    except (OSError, ValueError):
        return "does not answer yet"
