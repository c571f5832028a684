"""A session's tool calls on the log: requested, started, completed.

RerunError
├── NoSuchSession      no tool call on the log belongs to such a session
├── AmbiguousSession   several sessions begin like that: give more of the id
├── NoSuchCall         the session has no call of that call_seq
└── BadPattern         --ignore takes regular expressions
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.history import EVERY_RUN, events_of, partitions
from turnlog.infra.roles.role import Role
from turnlog.schemas.events import ToolCallCompleted, ToolCallRequested, ToolCallStarted, ToolStatus
from turnlog.schemas.topics import TOOL_CALLS, TOOL_RESULTS, Topic

RUN = (ToolStatus.ok, ToolStatus.tool_error, ToolStatus.timeout, ToolStatus.resource_limit)
"""Statuses of calls whose execution came to an end that can be compared."""


class RerunError(Exception):
    """Base class of the errors listed in the module docstring."""


class NoSuchSession(RerunError):
    """No session has that id, or it called no tool."""


class AmbiguousSession(RerunError):
    """Several sessions begin with that text; the message names the candidates."""


class NoSuchCall(RerunError):
    """The session has no such call; the message names those that exist."""


class BadPattern(RerunError):
    """The pattern is not a regular expression; the message tells why."""


@dataclass(slots=True)
class RecordedCall:
    """Records of one call_id on the log."""

    request: ToolCallRequested
    started: list[ToolCallStarted] = field(default_factory=list)
    completed: ToolCallCompleted | None = None
    """The first on the log, which is the effective one."""

    @property
    def answered_start(self) -> ToolCallStarted | None:
        """ToolCallStarted of the attempt that was answered, or None."""
        if self.completed is None:
            return None
        attempt = self.completed.attempt
        return next((event for event in self.started if event.attempt == attempt), None)

    @property
    def ran(self) -> bool:
        """True if it ran to an end that can be compared: it was started, and neither cancelled nor lost by us."""
        return self.answered_start is not None and self.completed is not None and self.completed.status in RUN

    @property
    def why_not(self) -> str:
        """Reason why the call did not run."""
        if self.completed is None:
            return "it was never answered"
        reason = f" ({self.completed.reason})" if self.completed.reason not in ("", self.completed.status) else ""
        return f"it was recorded as {self.completed.status.value}{reason}"


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """All calls of a session, by call_seq."""

    session_id: str
    calls: tuple[RecordedCall, ...]

    def upto(self, call_seq: int) -> tuple[RecordedCall, ...]:
        """Return the calls up to `call_seq`. Raises NoSuchCall."""
        if all(call.request.call_seq != call_seq for call in self.calls):
            there = ", ".join(str(call.request.call_seq) for call in self.calls)
            raise NoSuchCall(f"session {self.session_id} has no call {call_seq}; it has {there}")
        return tuple(call for call in self.calls if call.request.call_seq <= call_seq)


async def load_session(role: Role, beginning: str) -> RecordedSession:
    """Return the session whose id begins so, among the sessions of every run. Raises NoSuchSession, AmbiguousSession,
    LogError."""
    calls: dict[str, RecordedCall] = {}
    for event in await _of(role, TOOL_CALLS, (ToolCallRequested,), beginning):
        if event.caller:  # part of the program's own call
            continue
        calls.setdefault(event.call_id, RecordedCall(event))
    names = sorted({call.request.session_id for call in calls.values()})
    exact = [name for name in names if name == beginning]
    if len(names) > 1 and not exact:
        raise AmbiguousSession(f"{len(names)} sessions begin with {beginning!r}: {', '.join(names[:5])} ...")
    if not names:
        raise NoSuchSession(f"no tool call of a session {beginning!r} in {TOOL_CALLS.name}; see also --from archive")
    (name,) = exact or names
    for event in await _of(role, TOOL_RESULTS, (ToolCallStarted, ToolCallCompleted), name):
        call = calls.get(event.call_id)
        if call is not None and isinstance(event, ToolCallStarted):
            call.started.append(event)
        elif call is not None and call.completed is None:
            call.completed = event
    own = [call for call in calls.values() if call.request.session_id == name]
    return RecordedSession(name, tuple(sorted(own, key=lambda call: call.request.call_seq)))


async def _of(role: Role, topic: Topic, kinds: tuple[type, ...], beginning: str) -> list[Any]:
    """Return the events of these classes whose session begins so, by partition and offset."""
    wanted = partitions(role, topic)
    ends = await role.log.end_offsets(wanted)
    names = [kind.__name__ for kind in kinds]
    found: list[Any] = []
    for place in wanted:
        async for _, event in events_of(role, place, ends[place], names, runs=(EVERY_RUN,)):
            if event.session_id.startswith(beginning):
                found.append(event)
    return found


def session_body(session: RecordedSession) -> dict[str, Any]:
    """Return the session as JSON."""
    return {"session_id": session.session_id, "calls": [_call_body(call) for call in session.calls]}


def _call_body(call: RecordedCall) -> dict[str, Any]:
    request, done = call.request, call.completed
    return {
        "call_seq": request.call_seq,
        "call_id": request.call_id,
        "tool": request.tool,
        "arguments": request.arguments.decode(errors="backslashreplace"),
        "backend": request.sandbox.backend,
        "status": done.status.value if done else "unanswered",
        "reason": done.reason if done else "",
        "exit_code": done.exit_code if done else None,
        "output_bytes": (done.full_output.size if done.full_output else len(done.output)) if done else 0,
        "duration_s": done.duration_s if done else 0.0,
        "queue_s": done.queue_s if done else 0.0,
        "attempts": max((event.attempt for event in call.started), default=0),
        "worker": done.worker if done else "",
        "environment_sha256": call.answered_start.environment_sha256 if call.answered_start else "",
        "workspace": done.workspace.sha256 if done and done.workspace else None,
        "requests": [
            {
                "method": one.method,
                "url": one.url,
                "status": one.status,
                "source": one.source.value,
                "reason": one.reason,
            }
            for one in (done.requests if done else ())
        ],
    }
