"""Engines and roles as members of a supervisor: that of a run, or that in an actor on a node of a Ray cluster."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from turnlog.infra.embedded import RoleDied
from turnlog.infra.embedded.liveness import Liveness, answering, generates, is_well, role_loops
from turnlog.infra.embedded.process import Launch
from turnlog.infra.embedded.servers import EngineServer, lora_rank_of
from turnlog.infra.embedded.supervisor import Member
from turnlog.infra.roles.ending import grace_s
from turnlog.infra.run_folder import LOGS, SETTINGS
from turnlog.infra.tensors.served import ServedNote
from turnlog.names import OPTIONAL_ROLES
from turnlog.settings import LivenessSettings, Settings

THREADED = frozenset({"trainer"})
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
        seed=int(name.rpartition("-")[2]) + 1,
        lora_rank=lora_rank_of(settings),
        served=ServedNote.of(settings.run.directory, settings.run.id, name),
    )
    launch = dataclasses.replace(engine.launch(), liveness=_generating(engine.url, settings))
    return Member(launch=launch, deaths=ENGINE_DEATHS, often=settings.liveness.deaths, tier=ON_LOG), engine.url


def _generating(url: str, settings: Settings) -> Liveness:
    """Return the liveness check of an engine, which allows for a weight update, during which it generates nothing."""
    bound_s = settings.liveness.engine_s
    within_s = bound_s and bound_s + settings.loader.timeout_s
    return Liveness(look=answering(partial(generates, url)), within_s=within_s)


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


def loaders_own(engine: str, url: str) -> dict[str, str]:
    """Return the environment by which a loader knows its engine."""
    return {"TURNLOG_ENGINE_ID": engine, "TURNLOG_ENGINE_URL": url}


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
