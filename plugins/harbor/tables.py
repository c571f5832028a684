"""The tables of Harbor's task.toml, schema versions up to 1.4, and what follows from several of them together.

Source: the models of the package harbor 0.25.0, and its resolution of network rules and verifier environments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

MAIN: Final = "main"
"""Name of the compose service in which the agent runs."""
NetworkMode = Literal["no-network", "public", "allowlist"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicy:
    """Network access of one phase."""

    mode: NetworkMode = "public"
    hosts: tuple[str, ...] = ()
    """Hosts, addresses and networks that the mode `allowlist` grants, in lower case; `*.name` stands for all below
    `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthcheck:
    """A command that must succeed before the agent begins."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    """Seconds after the start in which failures do not count."""
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class McpServerTable:
    """An MCP server for the agent."""

    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tpu:
    """A slice of TPUs, which no backend of turnlog serves."""

    type: str
    topology: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTable:
    """[environment] or [verifier.environment]: a container."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: Tpu | None = None
    mcp_servers: list[McpServerTable] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Variables of the container; `${NAME}` and `${NAME:-default}` are replaced from the environment."""
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None
    """Older form of `network_mode`."""
    memory: str | None = None
    storage: str | None = None

    @property
    def policy(self) -> NetworkPolicy:
        """Network access of the container, unless a phase sets its own."""
        return NetworkPolicy(mode=self.network_mode or "public", hosts=tuple(self.allowed_hosts or ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTable:
    """[agent], or [steps.agent]."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    timeout_sec: float | None = None
    user: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect:
    """A command that is run after the agent's end, before artifacts are collected."""

    command: str
    service: str = MAIN
    timeout_sec: float = 60.0
    user: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierTable:
    """[verifier], or [steps.verifier]."""

    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    timeout_sec: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: list[Collect] = field(default_factory=list)

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The mode that this table sets, or None if it sets none."""
        return self.environment_mode or ("separate" if self.environment is not None else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file or folder of the container that is collected after the agent's end."""

    source: str
    destination: str | None = None
    exclude: list[str] = field(default_factory=list)
    service: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """A step of the task, from [[steps]]."""

    name: str
    agent: AgentTable = field(default_factory=AgentTable)
    verifier: VerifierTable = field(default_factory=VerifierTable)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | Artifact] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Author:
    """An author of the task."""

    name: str
    email: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageTable:
    """[task]: the task as a package of a registry."""

    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = field(default_factory=list)
    keywords: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionTable:
    """[solution]."""

    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The whole of task.toml."""

    schema_version: str = "1.4"
    task: PackageTable | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    verifier: VerifierTable = field(default_factory=VerifierTable)
    agent: AgentTable = field(default_factory=AgentTable)
    environment: EnvironmentTable = field(default_factory=EnvironmentTable)
    solution: SolutionTable = field(default_factory=SolutionTable)
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepTable] | None = None
    artifacts: list[str | Artifact] = field(default_factory=list)

    def agent_policy(self, step: StepTable | None = None) -> NetworkPolicy:
        """Return the network access of the agent."""
        return _phase(step.agent if step else None, self.agent) or self.environment.policy

    def verifier_policy(self, step: StepTable | None = None) -> NetworkPolicy:
        """Return the network access of the verifier."""
        container = self.verifier_environment(step)
        return _phase(step.verifier if step else None, self.verifier) or (container or self.environment).policy

    def verifier_environment(self, step: StepTable | None = None) -> EnvironmentTable | None:
        """Return the container of a separate verifier, or None if the verifier runs in the agent's."""
        mode = (step.verifier.mode if step else None) or self.verifier.mode or "shared"
        if mode == "shared":
            return None
        return (step.verifier.environment if step else None) or self.verifier.environment or self.environment

    def artifacts_of(self, step: StepTable | None = None) -> tuple[Artifact, ...]:
        """Return the artifacts that are collected, the folder /logs/artifacts first unless it is declared itself."""
        found = [
            Artifact(source=one) if isinstance(one, str) else one
            for one in (*self.artifacts, *(step.artifacts if step else ()))
        ]
        if not any(one.source.rstrip("/") == PUBLISHED and one.service in (None, MAIN) for one in found):
            found.insert(0, Artifact(source=PUBLISHED))
        return tuple(found)


PUBLISHED: Final = "/logs/artifacts"
"""Folder whose contents are artifacts without a declaration."""


def _phase(*tables: AgentTable | VerifierTable | None) -> NetworkPolicy | None:
    for table in tables:
        if table is not None and table.network_mode is not None:
            return NetworkPolicy(mode=table.network_mode, hosts=tuple(table.allowed_hosts or ()))
    return None
