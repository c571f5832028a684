"""Answers that need no sandbox, and the records that a worker writes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from turnlog.infra.log import Record
from turnlog.sandbox_workers.protocol import Execution
from turnlog.schemas.events import (
    DeadLetter,
    SandboxSpec,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    ToolStatus,
)
from turnlog.schemas.ids import dead_letter_id, digest
from turnlog.schemas.topics import INLINE_LIMIT_BYTES

SOURCE_ARGUMENT = {"python": "code", "shell": "command"}
"""tool -> the one argument that it takes, a string."""
BACKENDS = ("bubblewrap", "subprocess")
"""What a request may ask for: both are served by the worker's own backend."""


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


def dead_letter(record: Record, *, run_id: str, cause: str, message: str) -> DeadLetter:
    """A record parked with its cause; bytes beyond the inline limit stay where the record stands."""
    return DeadLetter(
        event_id=dead_letter_id(record.topic, record.partition, record.offset),
        run_id=run_id,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key,
        value=record.value[:INLINE_LIMIT_BYTES],
        role="sandbox",
        cause=cause,
        message=message,
    )
