"""Records that a worker writes, and answers that need no sandbox.

Parked                  a record of agent.tool-calls that goes to the dead letters
├── AttemptsExhausted   the call took its sandbox down too often: look at its arguments
└── UnexpectedRecord    the record belongs into another topic: its producer is wrong
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from turnlog.sandbox_workers.inside.interpreter import ENDED
from turnlog.sandbox_workers.protocol import Execution, FileRefused, Verdict
from turnlog.schemas.events import EgressRequest, ToolCallCompleted, ToolCallRequested, ToolCallStarted, ToolStatus
from turnlog.schemas.ids import digest
from turnlog.schemas.types import BlobRef


class Parked(Exception):
    """Base class of the errors listed in the module docstring."""


class AttemptsExhausted(Parked):
    """The call took its sandbox down too often. It is answered with infra_error as well; it is not the agent's
    fault."""


class UnexpectedRecord(Parked):
    """The record does not belong into its topic. Remedy: its producer must append to the topic of the catalogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """The outcome of a call: its execution, the files after it, and its network requests."""

    execution: Execution
    workspace: BlobRef | None
    """Workspace from which the session's next call starts."""
    requests: tuple[EgressRequest, ...] = ()
    full_output: BlobRef | None = None


def make_started_event(
    request: ToolCallRequested, *, attempt: int, worker: str, environment_sha256: str
) -> ToolCallStarted:
    """Build the record that is written before execution."""
    return ToolCallStarted(
        event_id=digest("tool-call-started", request.call_id, attempt),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=request.session_id,
        floor=request.floor,
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        attempt=attempt,
        worker=worker,
        environment_sha256=environment_sha256,
    )


def make_completed_event(
    request: ToolCallRequested, outcome: CallOutcome, *, attempt: int, queue_s: float, worker: str, cached: bool = False
) -> ToolCallCompleted:
    """Build the record that is written after execution."""
    execution = outcome.execution
    return ToolCallCompleted(
        event_id=digest("tool-call-completed", request.call_id, attempt),
        run_id=request.run_id,
        group_id=request.group_id,
        session_id=request.session_id,
        floor=request.floor,
        rollout_id=request.rollout_id,
        call_id=request.call_id,
        call_seq=request.call_seq,
        status=execution.status,
        reason=execution.reason,
        exit_code=execution.exit_code,
        output=execution.output,
        full_output=outcome.full_output,
        duration_s=execution.duration_s,
        queue_s=queue_s,
        workspace=outcome.workspace,
        attempt=attempt,
        worker=worker,
        cached=cached,
        requests=outcome.requests,
    )


def unrun(status: ToolStatus, reason: str, text: str = "") -> Execution:
    """Return the execution of a call that was not run, or whose end nobody observed."""
    return Execution(status, reason, None, text.encode(errors="replace"), 0.0, 0.0)


def unkept(execution: Execution, error: FileRefused) -> Execution:
    """Return the execution of a call that ran but whose files cannot be stored. The session goes on with the files from
    before it."""
    return _apply_verdict(
        execution, (ToolStatus.resource_limit, "workspace"), f"the files of this call are not kept: {error}"
    )


def mark_sandbox_ended(execution: Execution, verdict: Verdict) -> Execution:
    """Return the execution of a call that took its sandbox down. The session goes on with the files from before it."""
    keeps = execution.status in (ToolStatus.ok, ToolStatus.tool_error) and not execution.reason
    verdict = verdict if keeps else (execution.status, execution.reason)
    return _apply_verdict(
        execution, verdict, "the call has ended its sandbox: its files and its interpreter are not kept"
    )


def without_interpreter(execution: Execution) -> Execution:
    """Return the execution of a call that ran again in a new sandbox; the session's interpreter was lost with the old
    one."""
    return dataclasses.replace(execution, output=execution.output + b"\n" + ENDED)


def _apply_verdict(execution: Execution, verdict: Verdict, said: str) -> Execution:
    status, reason = verdict
    output = execution.output + f"\n[{said}]\n".encode(errors="replace")
    return dataclasses.replace(execution, status=status, reason=reason, exit_code=None, output=output)
