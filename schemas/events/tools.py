"""Records of tool calls, which agent runners request and sandbox workers run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnlog.schemas.types import BlobRef, CallEvent, Json, content

UNISOLATED = "+subprocess"
"""Suffix of the name of a worker that should isolate calls but runs them as plain processes."""


MCP_PROXY = "mcp_proxy"
"""Caller of calls of MCP servers that an agent's program has made."""
SESSION_OVER = "session_over"
"""Reason of a ToolCallCancelled whose session has ended: it names an answered call, and cancels nothing."""


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
    """CPU seconds of all processes of the call."""
    wall_s: float = 30.0
    """Seconds from the start of the call."""
    memory_bytes: int = 512 * 2**20
    """Memory of all processes of the call, in bytes."""
    pids: int = 64
    """Maximum processes and threads at a time."""
    disk_bytes: int = 64 * 2**20
    """Bytes written below the workspace and the temporary folders."""
    output_bytes: int = 64 * 2**10
    """Bytes of output that the agent sees; the whole output is in full_output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Where a call runs."""

    backend: str = "bubblewrap"
    """bubblewrap, subprocess, docker, e2b or wasm."""
    image: str | None = None
    """Name of the root file system; null for the worker's own."""
    network: str = "none"
    """Network access: none, or allowlist for what the worker's [egress] allow permits, restricted to the rules in
    `allow` if there are any."""
    limits: SandboxLimits = SandboxLimits()
    """Limits of each call."""
    durable_workspace: bool = False
    """True if files persist from call to call, and every result names a snapshot of them."""
    fresh: bool = False
    """True if the call needs a sandbox that has never run anything."""
    allow: tuple[str, ...] = ()
    """Network rules of this task, in the form of [egress] allow."""
    env: dict[str, str] = field(default_factory=dict)
    """Variables added to the environment of every call. Never put secrets here, since the log stores them."""
    folders: tuple[str, ...] = ()
    """Absolute folders that make up the workspace in place of /workspace, with what the image has there; the first is
    the working directory, and `.` stands for the image's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRequested(CallEvent):
    """One call; calls of one session run in call_seq order in that session's sandbox."""

    call_seq: int
    """Number of the call in its session: 0, then +1 with each call."""
    tool: str
    """Name of the tool."""
    arguments: Json = field(metadata=content(b"{}"))
    """Arguments as a JSON object."""
    sandbox: SandboxSpec
    """Sandbox that the call needs."""
    workspace: BlobRef | None
    """Workspace of the last result; null for an empty one."""
    deadline_s: float
    """Seconds from the request's timestamp after which nobody waits for the answer."""
    caller: str = ""
    """Empty for a call that a runner requests; mcp_proxy for one that a program made in its sandbox, which the worker
    recorded and ran itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallCancelled(CallEvent):
    """Nobody waits for this call any more."""

    reason: str
    """Reason, in one word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallStarted(CallEvent):
    """On the log before execution: an unanswered call died with its sandbox."""

    attempt: int
    """Attempt at the call: 1, then +1 each time that its sandbox went away."""
    worker: str
    environment_sha256: str = ""
    """Hex sha256 of the execution environment: backend, root or image, init, network rules. Equal environments have
    equal hashes."""


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
    """HTTP method, such as GET."""
    url: str = field(metadata=content(b"[erased]"))
    """URL without user, password and fragment; for a tunnel only host and port."""
    status: int
    """Status of the answer that the sandbox received; 403 for a refused request."""
    source: EgressSource
    """Source of the answer."""
    reason: str
    """Empty unless refused; else rule, private_address, request_bytes, response_bytes, requests, not_recorded, tls,
    certificate, unreachable, timeout_s, malformed, upgrade or call_ended."""
    request_sha256: str
    """Key of the recording: hex sha256 of method, url, body and the headers that select an answer."""
    response: BlobRef | None
    """Body of the answer, if it was recorded or replayed."""
    request_bytes: int
    """Length of the request's body in bytes."""
    response_bytes: int
    """Length of the answer's body in bytes."""
    duration_s: float
    """Seconds until the last byte of the answer."""
    answer: BlobRef | None = None
    """Status and headers of the answer, as JSON. With it a re-run can give the same answer again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallCompleted(CallEvent):
    """The first in the log for a call_id is the effective one."""

    call_seq: int
    """Number of the call in its session, as in ToolCallRequested."""
    status: ToolStatus
    """Status of the call."""
    reason: str
    """Empty for ok; else for example wall_s, memory_bytes, sandbox_ended or workspace_lost."""
    exit_code: int | None
    """Exit code of the program; null if no program ended."""
    output: bytes = field(metadata=content(b"[erased]"))
    """Output that the agent sees, cut to the limit."""
    full_output: BlobRef | None
    """The whole output, if `output` was cut."""
    duration_s: float
    """Seconds for which the call ran."""
    queue_s: float
    """Seconds from the request's timestamp to the start."""
    workspace: BlobRef | None
    """Snapshot after the call, for durable workspaces."""
    attempt: int
    """Number of times that the call was started; 0 for a call that never ran."""
    worker: str
    """Name of the sandbox worker; it ends in `+subprocess` if a worker that should isolate calls does not."""
    cached: bool
    """True if the record repeats an answer that is on the log already; it is otherwise equal to it, including event_id.
    """
    requests: tuple[EgressRequest, ...] = ()
    """Network requests of the call, in order."""
    caller: str = ""
    """Caller, as in ToolCallRequested."""
