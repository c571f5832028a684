"""Answers that need no sandbox, and the records that a worker writes.

Parked                  a record of agent.tool-calls that goes to the dead letters
├── AttemptsExhausted   the call took its sandbox down too often: look at its arguments
└── UnexpectedRecord    the record belongs into another topic: its producer is wrong
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from turnlog.sandbox_workers.protocol import Execution
from turnlog.schemas.events import (
    SandboxSpec,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.ids import digest

SOURCE_ARGUMENT = {"python": "code", "shell": "command"}
"""tool -> the one argument that it takes, a string."""
BACKENDS = ("bubblewrap", "subprocess")
"""What a request may ask for: both are served by the worker's own backend."""


class Parked(Exception):
    """Base of the tree above."""


class AttemptsExhausted(Parked):
    """Answered with infra_error as well; it is not the agent's fault."""


class UnexpectedRecord(Parked):
    """Remedy: its producer must append to the topic of the catalogue."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not run: reason for machines, text for the agent."""

    reason: str
    text: str


def source_of(request: ToolCallRequested) -> str | Refusal:
    """What to run, or why not."""
    name = SOURCE_ARGUMENT.get(request.tool)
    if name is None:
        return Refusal("tool", f"there is no tool {request.tool!r}; tools are {', '.join(SOURCE_ARGUMENT)}")
    if refusal := _unserved(request.sandbox):
        return refusal
    try:
        arguments = json.loads(request.arguments)
    except ValueError as error:
        return Refusal("arguments", f"the arguments are not JSON: {error}")
    source = arguments.get(name) if isinstance(arguments, dict) else None
    if not isinstance(source, str):
        return Refusal("arguments", f'{request.tool} takes {{"{name}": "..."}}, got {json.dumps(arguments)[:200]}')
    return source


def _unserved(spec: SandboxSpec) -> Refusal | None:
    if spec.backend not in BACKENDS:
        return Refusal(
            "backend", f"this worker does not serve backend {spec.backend!r}; it serves {', '.join(BACKENDS)}"
        )
    if spec.network != "none":
        return Refusal("network", f"this worker does not serve network {spec.network!r}; it serves none")
    if spec.image is not None:
        return Refusal("image", f"this worker does not serve images, got {spec.image!r}")
    return None


def started(request: ToolCallRequested, *, attempt: int, worker: str) -> ToolCallStarted:
    """The record that goes out before execution."""
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
    )


def completed(
    request: ToolCallRequested, execution: Execution, *, attempt: int, queue_s: float, worker: str
) -> ToolCallCompleted:
    """The record that goes out after it."""
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
        full_output=None,
        duration_s=execution.duration_s,
        queue_s=queue_s,
        workspace=None,
        attempt=attempt,
        worker=worker,
        cached=False,
    )


def unrun(status: ToolStatus, reason: str, text: str = "") -> Execution:
    """The outcome of a call that was not run, or whose run nobody saw end."""
    return Execution(status, reason, None, text.encode(errors="replace"), 0.0, 0.0)
