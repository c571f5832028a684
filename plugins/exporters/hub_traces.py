"""Sessions as traces that the Hugging Face Hub shows: the Session Trace Simple Format (STS), JSON lines, a header and
then a line per message.

The format: https://huggingface.co/docs/hub/session-traces-format
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from turnlog import __version__
from turnlog.infra.roles.terminal import printable_json
from turnlog.plugins.exporters.contexts import MAIN, Context, ExportedSession, RecordedMessage, file_name

HARNESS: Final = "turnlog"
"""Id of the program that wrote the trace, by which the Hub chooses a label."""
TITLE: Final = 100
"""Maximum length in characters of a session's title, the first line of its first question."""
NAMED: Final = (
    "group_id", "task_id", "recipe", "purpose", "agent", "model", "outcome", "reward", "version_min", "version_max",
)  # fmt: skip
"""Columns of the session that the header contains."""


def trace_files(session: ExportedSession, file: str) -> dict[str, bytes]:
    """Return the files of a session, by path: NAME.jsonl as in `file` for its main lineage, NAME.agent-1.jsonl and so
    on for its sub-agents and side calls. Each message is in one line, although several contexts may contain it."""
    lineages: dict[str, list[Context]] = {MAIN: []}
    for context in session.contexts():
        lineages.setdefault(context.lineage, []).append(context)
    files = {}
    for number, (lineage, contexts) in enumerate(lineages.items()):
        lines = "".join(f"{_line(body)}\n" for body in _bodies(session, lineage, contexts))
        files[file_name(file, "agent", number)] = lines.encode()
    return files


def _bodies(session: ExportedSession, lineage: str, contexts: list[Context]) -> Iterator[dict[str, Any]]:
    row = session.view.row
    messages = [message for context in contexts for message in context.messages if not message.copied]
    asked = next((message.text for message in messages if message.role == "user"), "")
    title = asked.partition("\n")[0][:TITLE] or row.task_id or row.session_id
    about = {"turnlog": __version__, "run_id": session.view.as_of.run_id}
    about |= {name: value for name in NAMED if (value := getattr(row, name)) is not None}
    identity = row.session_id
    if lineage != MAIN:
        identity, about["parent"] = f"{row.session_id}.{lineage}", row.session_id
    yield {"type": "session", "harness": HARNESS, "id": identity, "name": title, **about}
    for message in messages:
        yield {"type": "message", "message": _body(message, row.model)}


def _body(message: RecordedMessage, model: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning:
        body["reasoningContent"] = message.reasoning
    if message.calls:
        body["toolCalls"] = [_call(each) for each in message.calls]
    if message.role == "tool":
        body["toolCallId"] = message.call_id
    if message.sampled:
        body |= {"timestamp": message.turn.row["time_ms"], "model": model}
    return {name: value for name, value in body.items() if value is not None}


def _call(raw: Mapping[str, Any]) -> dict[str, Any]:
    function = raw.get("function")
    function = function if isinstance(function, dict) else {}
    given = function.get("arguments")
    arguments = given if isinstance(given, str) else orjson.dumps(given or {}).decode()
    return {
        "id": str(raw.get("id") or ""),
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
    }


def _line(body: Mapping[str, Any]) -> str:
    return printable_json(orjson.dumps(body).decode())
