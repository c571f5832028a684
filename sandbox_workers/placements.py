"""Match requests with what this worker serves, and hash the environments of calls.

A request gets a placement, or a refusal that the model can read. The environment of a call has one hash, equal for
equal environments whatever the worker and the sandbox."""

from __future__ import annotations

import dataclasses
import math
import posixpath
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import PurePosixPath

from turnlog.infra.environments.tools import AGENT
from turnlog.sandbox_settings import EgressSettings, SandboxSettings
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.sandbox_workers.pooling.pool import Pool
from turnlog.sandbox_workers.protocol import Provider, Shape, at_most
from turnlog.sandbox_workers.tools import Prepared, Refusal, prepared, tools
from turnlog.schemas.events import SandboxLimits, SandboxSpec, ToolCallRequested
from turnlog.schemas.ids import environment_digest

LIMITS = tuple(field.name for field in dataclasses.fields(SandboxLimits))
MOST_ENV_BYTES = 64 << 10
"""Maximum size of SandboxSpec.env, names and values together."""

KEPT = 1024


@dataclass(frozen=True, slots=True)
class Placement:
    """A call that may run, and where."""

    tool: Prepared
    pool: Pool
    shape: Shape
    limits: SandboxLimits

    @property
    def interpreter(self) -> bool:
        """True if the call uses the sandbox's persistent interpreter."""
        return self.tool.interpreter


class Scheduler:
    """Compares requests with a worker's pools and settings."""

    def __init__(self, settings: SandboxSettings, pools: SandboxPools, *, egress: bool) -> None:
        """Create a scheduler. `egress`: whether the worker has a proxy for calls with network = "allowlist". Raises
        ToolOfferError."""
        tools()  # a broken tool of a package ends the worker here, not at a call
        self._pools = pools
        self._egress = egress
        self._argument_bytes = settings.argument_bytes
        self.most = SandboxLimits(**{name: getattr(settings, name) for name in LIMITS})
        """Upper limits of a call."""
        self._most_of_agents = dataclasses.replace(self.most, wall_s=settings.agent_s, cpu_s=settings.agent_s)

    def placement(self, request: ToolCallRequested) -> Placement | Refusal:
        """Return how the call is run, or why it is refused."""
        spec = request.sandbox
        if said := _limits_flaw(request) or _env_flaw(spec) or _folders_flaw(spec):
            return Refusal("sandbox", said)
        pool = self._pools.pool(spec.backend)
        if pool is None:
            served = ", ".join(self._pools.served_backends)
            return Refusal("backend", f"this worker does not serve backend {spec.backend[:80]!r}; it serves {served}")
        if spec.folders and not pool.provider.places:
            return Refusal("sandbox", f"backend {pool.provider.name} serves no `folders`, only /workspace")
        agent = request.tool == AGENT.name
        if said := self._network_flaw(spec, pool, agent=agent):
            return Refusal("network", said)
        limits = at_most(spec.limits, self._most_of_agents if agent else self.most)
        tool = prepared(request.tool, request.arguments, spec, limits, argument_bytes=self._argument_bytes)
        if isinstance(tool, Refusal):
            return tool
        shape = Shape(image=spec.image, network=spec.network, disk_bytes=limits.disk_bytes, folders=tuple(spec.folders))
        placement = Placement(tool, pool, shape, limits)
        if placement.interpreter and not pool.provider.sessions:
            return Refusal("tool", f"{request.tool} needs a persistent interpreter; {pool.provider.name} has none")
        return placement

    def _network_flaw(self, spec: SandboxSpec, pool: Pool, *, agent: bool) -> str:
        networks = sorted(pool.provider.networks)
        if spec.network not in networks:
            return (
                f"backend {pool.provider.name} does not serve network {spec.network[:80]!r}; "
                f"it serves {', '.join(networks)}"
            )
        if spec.network == "allowlist" and not self._egress and not agent:
            return "this worker does not serve network 'allowlist', since its [egress] allow names nothing"
        return _rules_flaw(spec) if spec.network == "allowlist" else ""


def _limits_flaw(request: ToolCallRequested) -> str:
    for name in LIMITS:
        value = getattr(request.sandbox.limits, name)
        if math.isnan(value) or value <= 0:
            return f"limit {name} must be above 0, got {value}"
    return "deadline_s must be a number, got nan" if math.isnan(request.deadline_s) else ""


def _rules_flaw(spec: SandboxSpec) -> str:
    from turnlog.sandbox_workers.egress.policy import RuleInvalid, rules

    try:
        rules(spec.allow)
    except RuleInvalid as error:
        return str(error)
    return ""


def _env_flaw(spec: SandboxSpec) -> str:
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            return f"env {name[:80]!r} is no name and value that an environment takes"
    size = sum(len(name) + len(value) for name, value in spec.env.items())
    return f"env has {size} characters, {MOST_ENV_BYTES} are allowed" if size > MOST_ENV_BYTES else ""


MOST_FOLDERS = 32


def _folders_flaw(spec: SandboxSpec) -> str:
    """Return why these folders cannot make up a workspace, or ""."""
    if len(spec.folders) > MOST_FOLDERS:
        return f"{len(spec.folders)} folders, {MOST_FOLDERS} are allowed"
    for number, folder in enumerate(spec.folders):
        if folder == "." and number == 0:
            continue
        if not folder.startswith("/") or folder == "/" or posixpath.normpath(folder) != folder or "\0" in folder:
            return f"folder {folder[:80]!r} is no absolute path below /, or the first and `.`"
        if any(PurePosixPath(folder).is_relative_to(top) for top in SYSTEM):
            return f"folder {folder[:80]!r} belongs to the sandbox itself"
    return ""


SYSTEM = ("/proc", "/sys", "/dev", "/etc/turnlog", "/opt/python", "/opt/init", "/opt/loader", "/opt/image")


class EnvironmentDigests:
    """Environment hashes; a backend is asked once per image and network."""

    def __init__(self, egress: EgressSettings) -> None:
        self._rules = {"allow": list(egress.allow), "mode": egress.mode, "tls": egress.tls, "cache": egress.cache}
        self._known: OrderedDict[tuple[str | tuple[str, ...] | None, ...], str] = OrderedDict()

    async def sha256(self, provider: Provider, shape: Shape, spec: SandboxSpec) -> str:
        """Return the environment's hash as hex sha256. Raises ImageMissing."""
        name = provider.name, shape.image, shape.network, spec.allow, shape.folders
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        about: dict[str, object] = {"backend": provider.name, "network": shape.network}
        about["made_of"] = dict(await provider.environment(shape))
        if shape.folders:
            about["folders"] = list(shape.folders)
        if shape.network == "allowlist":
            about["rules"] = {**self._rules, "of_the_task": list(spec.allow)}
        found = self._known[name] = environment_digest(about)
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found
