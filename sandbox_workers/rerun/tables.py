"""A session's calls and what came of a rerun, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from turnlog.infra.log_lines import escaped
from turnlog.infra.terminal import Terminal
from turnlog.sandbox_workers.rerun.recorded import RecordedCall, RecordedSession

SHOWN = 60
"""Characters of a call's arguments."""
COLUMNS = {
    "seq": 3, "call": 8, "tool": 6, "status": 6, "seconds": 7, "tries": 5, "files": 5, "arguments": 16, "requests": 8,
}  # fmt: skip
"""Heading -> characters that it needs at least: together they fit a terminal of 80."""
COLOURS = {"same": "green", "differs": "red", "cannot": "red", "not_run": "yellow"}


def session_body(session: RecordedSession) -> dict[str, Any]:
    """As JSON."""
    return {"session_id": session.session_id, "calls": [_call_body(call) for call in session.calls]}


def print_session(session: RecordedSession) -> None:
    """A row per call."""
    table = Table(title=f"tool calls of session {session.session_id}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading, width in COLUMNS.items():
        table.add_column(heading, overflow="fold", min_width=width)
    for body in map(_call_body, session.calls):
        status = body["status"] + (f" ({body['reason']})" if body["reason"] else "")
        asked = [f"{one['method']} {one['url']} {one['status']} {one['source']}" for one in body["requests"]]
        row = (
            str(body["call_seq"]), body["call_id"][:8], body["tool"], status, f"{body['duration_s']:.3f}",
            str(body["attempts"]), (body["workspace"] or "-")[:8], body["arguments"][:SHOWN],
        )  # fmt: skip
        table.add_row(*row, Text("\n".join(map(escaped, asked)) or "-"))
    Terminal().print(table)


def print_report(session_id: str, bodies: Sequence[Mapping[str, Any]]) -> None:
    """A line per call, and what differs below it."""
    console = Terminal(highlight=False)
    for body in bodies:
        console.print(f"call {body['call_seq']} {body['tool']}: {body['verdict']}", style=COLOURS[body["verdict"]])
        for one in body["differences"]:
            place = f" from byte {one['at']}" if "at" in one else ""
            console.print(f"  {one['what']}{place}")
            console.print(f"    recorded: {one['recorded']!r}")
            console.print(f"    now:      {one['now']!r}")
        for note in body["notes"]:
            console.print(f"  {note}")
    counts = {verdict: sum(body["verdict"] == verdict for body in bodies) for verdict in COLOURS}
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    console.print(f"session {session_id}: {said or 'no call'}")


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
        "environment_sha256": call.begun.environment_sha256 if call.begun else "",
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
