"""Tool calls: requested by agent runners, run by sandbox workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.types import BlobRef, Json

UNISOLATED = "+subprocess"
"""Ends the name of a worker that was to isolate calls and runs them as plain processes."""


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
    """Seconds of processor time of all its processes."""
    wall_s: float = 30.0
    """Seconds from its start."""
    memory_bytes: int = 512 * 2**20
    """Of all its processes."""
    pids: int = 64
    """Processes and threads at once."""
    disk_bytes: int = 64 * 2**20
    """Written below the workspace and the temporary folders."""
    output_bytes: int = 64 * 2**10
    """Of what the agent sees; the rest is in full_output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Where a call runs."""

    backend: str = "bubblewrap"
    """bubblewrap | subprocess | docker | e2b | wasm"""
    image: str | None = None
    """Name of the root; null for the worker's own."""
    network: str = "none"
    """none | allowlist: what [egress] allow of the worker grants, and only what `allow` names if it names anything."""
    limits: SandboxLimits = SandboxLimits()
    """Of each call."""
    durable_workspace: bool = False
    """Files stay from call to call, and every result names a snapshot of them."""
    fresh: bool = False
    """The call's sandbox has never run anything."""
    allow: tuple[str, ...] = ()
    """Rules of this task, as in [egress] allow."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the environment of every call; no place for secrets, since the log keeps it."""


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
    """Of the session: 0, then +1 with each call."""
    tool: str
    """Name of the tool."""
    arguments: Json
    """A JSON object."""
    sandbox: SandboxSpec
    """Where it runs."""
    workspace: BlobRef | None
    """Of the last result; null for an empty one."""
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
    """In a word."""


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
    """At the call: 1, then +1 each time that its sandbox went away."""
    worker: str
    environment_sha256: str = ""
    """Of what the call runs in: backend, root or image, init, network rules. Equal for equal surroundings."""


class EgressSource(StrEnum):
    """Where the answer to a request came from."""

    refused = "refused"
    live = "live"
    recorded = "recorded"
    replayed = "replayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRequest:
    """One request of a call to the network, through the worker's proxy."""

    method: str
    """GET and so on."""
    url: str
    """Without user, password and fragment; of a tunnel host and port alone."""
    status: int
    """Of the answer that the sandbox got; 403 for a refused one."""
    source: EgressSource
    """Where the answer came from."""
    reason: str
    """Empty unless refused: rule | private_address | request_bytes | response_bytes | requests | not_recorded | tls |
    certificate | unreachable | timeout_s | malformed | upgrade | call_ended"""
    request_sha256: str
    """Key of the recording: method, url, body and the headers that select an answer."""
    response: BlobRef | None
    """Body of the answer, when it was recorded or replayed."""
    request_bytes: int
    """Of the body."""
    response_bytes: int
    """Of the body."""
    duration_s: float
    """Until the last byte of the answer."""
    answer: BlobRef | None = None
    """Status and headers of that answer, as JSON: with it a re-run gives the answer again."""


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
    """As in ToolCallRequested."""
    status: ToolStatus
    """How it ended."""
    reason: str
    """Empty for ok; else for example wall_s, memory_bytes, sandbox_ended, workspace_lost."""
    exit_code: int | None
    """Of the program; null where none ended."""
    output: bytes
    """Cut to the limit: what the agent sees."""
    full_output: BlobRef | None
    """All of it, where it was cut."""
    duration_s: float
    """Seconds that it ran."""
    queue_s: float
    """Seconds from the request's timestamp to the start."""
    workspace: BlobRef | None
    """Snapshot after the call, for durable workspaces."""
    attempt: int
    """How often it was started; 0 of a call that never ran."""
    worker: str
    """Its name; with UNISOLATED behind it where that is so."""
    cached: bool
    """A repeat of an answer that is on the log already, otherwise equal to it, event_id included."""
    requests: tuple[EgressRequest, ...] = ()
    """What the call asked of the network, in order."""
