"""Sessions in the Agent Trajectory Interchange Format (ATIF), version 1.8: a document per context of the main lineage,
which embeds the sub-agents and side calls that began in it (docs/dashboard.md has the mapping).

The format: https://github.com/harbor-framework/harbor/blob/main/rfcs/0001-trajectory-format.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from turnlog import __version__
from turnlog.consumers.index.reader import Row, where_of
from turnlog.infra.roles.terminal import printable_json
from turnlog.plugins.dashboard.conversation import TurnView
from turnlog.plugins.dashboard.records import runs
from turnlog.plugins.exporters.contexts import MAIN, Context, ExportedSession, RecordedImage, RecordedMessage, file_name

VERSION: Final = "ATIF-v1.8"
SOURCES: Final = {"system": "system", "user": "user", "assistant": "agent"}
"""Source of a step by the role of its message. Results of tools belong to the step of their call."""
ENDINGS: Final = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}
"""Media types of images that the format knows, each with the ending of its files."""
TRAINED: Final = "trained"
"""Name of the disposition of a token that was trained; others are named by the reason of their mask."""
OF_CALL: Final = ("status", "reason", "exit_code", "duration_s", "queue_s", "attempt", "worker", "full_output")
OF_TURN: Final = (
    "reasoning_tokens", "version_first", "version_last", "queue_s", "first_token_s", "total_s", "engine_id",
)  # fmt: skip
"""Columns of tool_calls, and of turns, that are copied into `extra`."""


def atif_files(session: ExportedSession, file: str) -> dict[str, bytes]:
    """Return the files of a session, by path: NAME.json as in `file`, NAME.cont-1.json for what follows a compaction,
    and images."""
    found = _Documents(session, file)
    files = {file_name(file, "cont", number): _encode(body) for number, body in enumerate(found.bodies())}
    return files | found.images


class _Documents:
    """Documents of one session, and the images that they reference."""

    def __init__(self, session: ExportedSession, file: str) -> None:
        self._session = session
        self._file = file
        self._calls: Mapping[str, Row] = {row["call_id"]: row for row in session.view.calls}
        self.images: dict[str, bytes] = {}

    def bodies(self) -> list[dict[str, Any]]:
        """Return the documents of the main lineage. A session without turns has one without steps."""
        contexts = self._session.contexts()
        main = [each for each in contexts if each.lineage == MAIN] or [Context(MAIN, MAIN, 0, None)]
        began: list[list[Context]] = [[] for _ in main]
        for each in contexts:
            if each.lineage != MAIN:
                inside = (number for number, context in enumerate(main) if each.after in context.turns)
                began[next(inside, 0)].append(each)
        bodies = [self._document(context, inner) for context, inner in zip(main, began, strict=True)]
        for number in range(1, len(bodies)):
            bodies[number - 1]["continued_trajectory_ref"] = file_name(self._file, "cont", number)
        return bodies

    def _document(self, context: Context, inner: Sequence[Context] = ()) -> dict[str, Any]:
        steps = self._steps(context)
        for each in inner:
            self._refer(steps, each)
        session = self._session
        extra: dict[str, Any] = {
            "turnlog": __version__, "lineage": context.kind,
            "continues": self._id_of(context, context.number - 1) if context.number else None,
        }  # fmt: skip
        if context.lineage == MAIN:
            extra["session"] = _without_none(dataclasses.asdict(session.view.row))
            extra["as_of"] = session.view.as_of.body()
        return _without_none({
            "schema_version": VERSION, "session_id": session.view.row.session_id,
            "trajectory_id": self._id_of(context, context.number), "agent": self._agent(context), "steps": steps,
            "final_metrics": _totals(steps), "extra": _without_none(extra),
            "subagent_trajectories": [self._document(each) for each in inner] or None,
        })  # fmt: skip

    def _id_of(self, context: Context, number: int) -> str:
        lineage = "" if context.lineage == MAIN else f".{context.lineage}"
        return f"{self._session.view.row.session_id}{lineage}{f'.cont-{number}' if number else ''}"

    def _agent(self, context: Context) -> dict[str, Any]:
        row, started = self._session.view.row, self._session.started
        extra: dict[str, Any] = {"agent_path": None if context.lineage == MAIN else context.lineage}
        if started is not None:
            extra["environment"] = _without_none(dataclasses.asdict(started.environment))
            extra["sampling"] = _without_none(dataclasses.asdict(started.sampling))
            extra["tokenizer_sha256"] = started.tokenizer_sha256
        return _without_none({
            "name": started.agent.name if started else row.agent or "unknown",
            "version": started.agent.version if started else "unknown", "model_name": row.model,
            "tool_definitions": context.tools or None, "extra": _without_none(extra) or None,
        })  # fmt: skip

    def _steps(self, context: Context) -> list[dict[str, Any]]:
        steps: list[dict[str, Any]] = []
        open_calls: dict[str, dict[str, Any]] = {}
        """Call id -> step of the call, until its result is found."""
        for message in context.messages:
            if message.role == "tool" and (step := open_calls.pop(message.call_id, None)) is not None:
                _observe(step, self._result(message.call_id, self._content(message.parts)))
                continue
            step = self._step(message)
            steps.append({"step_id": len(steps) + 1, **step})
            open_calls |= {call["tool_call_id"]: steps[-1] for call in step.get("tool_calls", ())}
        for call_id, step in open_calls.items():  # calls whose results no later request contains
            row = self._calls.get(call_id)
            if row is not None and row["output"] is not None:
                _observe(step, self._result(call_id, row["output"]))
        return steps

    def _step(self, message: RecordedMessage) -> dict[str, Any]:
        content, copied = self._content(message.parts), message.copied or None
        if message.role == "tool":  # the call is not in this context
            result = self._result("", content) | {"extra": {"tool_call_id": message.call_id}}
            return _without_none({
                "source": "system", "message": "", "observation": {"results": [result]}, "is_copied_context": copied,
            })  # fmt: skip
        step = {"source": SOURCES[message.role], "message": content, "is_copied_context": copied}
        if message.role == "assistant":
            step |= {
                "reasoning_content": message.reasoning or None,
                "tool_calls": [_call(each) for each in message.calls] or None,
            }
            if message.sampled:
                step["extra"] = _about(message.turn)
            if message.sampled and not message.copied:
                time = datetime.fromtimestamp(message.turn.row["time_ms"] / 1000, UTC)
                step |= {"timestamp": time.isoformat(timespec="milliseconds"), "llm_call_count": 1}
                step["metrics"] = self._metrics(message.turn)
            else:  # sampled in another document, or written by the client
                step["is_copied_context"] = True
        return _without_none(step)

    def _metrics(self, turn: TurnView) -> dict[str, Any]:
        row, key = turn.row, (turn.row["epoch"], turn.row["turn_index"])
        tokens, prompt = self._session.tokens.get(key), self._session.prompts.get(key)
        extra = {name: row[name] for name in OF_TURN}
        if tokens is not None:
            extra |= {
                "weight_versions": runs(tokens.versions.tolist()),
                "dispositions": runs([reason or TRAINED for reason in tokens.reasons]),
                "advantage": tokens.advantage, "segment": tokens.segment, "sample_id": tokens.sample_id,
                "batch": tokens.batch, "step": tokens.step, "temperature": tokens.temperature,
                "logprob_kind": tokens.logprob_kind,
            }  # fmt: skip
        return _without_none({
            "prompt_tokens": row["prompt_tokens"], "completion_tokens": row["output_tokens"],
            "cached_tokens": row["cached_tokens"], "prompt_token_ids": prompt,
            "completion_token_ids": None if tokens is None else tokens.ids,
            "logprobs": None if tokens is None else tokens.logprobs, "extra": _without_none(extra),
        })  # fmt: skip

    def _result(self, call_id: str, content: Any) -> dict[str, Any]:
        row = self._calls.get(call_id)
        extra = {} if row is None else _without_none({name: row[name] for name in OF_CALL})
        return _without_none({"source_call_id": call_id or None, "content": content, "extra": extra or None})

    def _refer(self, steps: Sequence[dict[str, Any]], inner: Context) -> None:
        """Refer to an embedded context in the step of the turn before it. The log does not record which call began
        it."""
        if inner.after is not None:
            place = where_of(inner.after.row["place"])
            step = next(each for each in steps if each.get("extra", {}).get("at") == place)
            _observe(step, {"subagent_trajectory_ref": [{"trajectory_id": self._id_of(inner, inner.number)}]})

    def _content(self, parts: Sequence[str | RecordedImage]) -> Any:
        """Return a text, or a list of parts if there are images."""
        if all(isinstance(part, str) or part.ref.media_type not in ENDINGS for part in parts):
            return "\n".join(part if isinstance(part, str) else "[image]" for part in parts)
        return list(self._parts(parts))

    def _parts(self, parts: Sequence[str | RecordedImage]) -> Iterator[dict[str, Any]]:
        for part in parts:
            if isinstance(part, str):
                yield {"type": "text", "text": part}
            elif part.ref.media_type in ENDINGS:
                path = f"images/{part.ref.sha256}.{ENDINGS[part.ref.media_type]}"
                self.images[path] = part.content
                yield {"type": "image", "source": {"media_type": part.ref.media_type, "path": path}}


def _about(turn: TurnView) -> dict[str, Any]:
    row = turn.row
    return _without_none({
        "at": where_of(row["place"]), "turn": [row["epoch"], row["turn_index"]], "kind": turn.kind,
        "boundary_reason": turn.why or None, "finish_reason": row["finish_reason"],
        "aborted": bool(row["aborted"]) or None,
    })  # fmt: skip


def _call(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call. Arguments that are not a JSON object are kept as text."""
    function = raw.get("function")
    function = function if isinstance(function, dict) else {}
    given = function.get("arguments")
    try:
        arguments = orjson.loads(given) if isinstance(given, str) else given
    except orjson.JSONDecodeError:
        arguments = None
    call = {"tool_call_id": str(raw.get("id") or ""), "function_name": str(function.get("name") or "")}
    if isinstance(arguments, dict):
        return call | {"arguments": arguments}
    return call | {"arguments": {}, "extra": {"arguments": given}}


def _observe(step: dict[str, Any], result: Mapping[str, Any]) -> None:
    step.setdefault("observation", {"results": []})["results"].append(result)


def _totals(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return sums over the steps that were sampled here. Copied steps have no metrics."""
    own = [step["metrics"] for step in steps if "metrics" in step]
    sums = {f"total_{name}": sum(each[name] for each in own) for name in TOTALS}
    return {**sums, "total_steps": len(steps)}


TOTALS: Final = ("prompt_tokens", "completion_tokens", "cached_tokens")


def _without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}


def _encode(body: Mapping[str, Any]) -> bytes:
    return printable_json(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY).decode()).encode() + b"\n"
