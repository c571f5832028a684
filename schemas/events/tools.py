"""Tool calls: requested by agent runners, run by sandbox workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from turnlog.schemas.types import BlobRef, Json


class ToolStatus(StrEnum):
    """How a call ended. `infra_error` is ours and never the agent's fault."""

    infra_error = "infra_error"
    ok = "ok"
    tool_error = "tool_error"
    timeout = "timeout"
    resource_limit = "resource_limit"
    refused = "refused"
    cancelled = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one call; each is enforced and reported as its own status."""

    cpu_s: float = 10.0
    wall_s: float = 30.0
    memory_bytes: int = 512 * 2**20
    pids: int = 64
    disk_bytes: int = 64 * 2**20
    output_bytes: int = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Where a call runs."""

    backend: str = "bubblewrap"
    """bubblewrap | subprocess | docker | e2b | wasm"""
    image: str | None = None
    network: str = "none"
    """none | allowlist"""
    limits: SandboxLimits = SandboxLimits()
    durable_workspace: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRequested:
    """One call; calls of one session run in call_seq order in that session's sandbox."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    rollout_id: str
    call_id: str
    call_seq: int
    tool: str
    arguments: Json
    sandbox: SandboxSpec
    workspace: BlobRef | None
    """Of the last result; None for an empty one."""
    deadline_s: float
    """Seconds from the request's timestamp after which nobody waits for the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallCancelled:
    """Nobody waits for this call any more."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    rollout_id: str
    call_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStarted:
    """On the log before execution: an unanswered call died with its sandbox."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    rollout_id: str
    call_id: str
    attempt: int
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallCompleted:
    """The first in the log for a call_id is the effective one."""

    event_id: str
    run_id: str
    group_id: str
    session_id: str
    floor: int
    rollout_id: str
    call_id: str
    call_seq: int
    status: ToolStatus
    reason: str
    """Empty for ok; else for example wall_s, memory_bytes, workspace_lost."""
    exit_code: int | None
    output: bytes
    """Cut to the limit: what the agent sees."""
    full_output: BlobRef | None
    duration_s: float
    queue_s: float
    workspace: BlobRef | None
    attempt: int
    worker: str
    cached: bool
