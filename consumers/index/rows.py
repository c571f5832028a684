"""Conversion of records to rows, by the names of the tables' columns: each row is of its record alone.

Anything that depends on several records is computed in indexer.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from turnlog.consumers.index import schema
from turnlog.consumers.index.schema import Table, place_of
from turnlog.infra.log import Record
from turnlog.names import CODE_HEADER
from turnlog.processors.core.views.progress import ANNOUNCED
from turnlog.schemas import topics
from turnlog.schemas.canonical import canonical_json
from turnlog.schemas.events import (
    BatchSkipped,
    DeadLetter,
    EgressSource,
    EngineWeightsLoaded,
    Event,
    GroupScored,
    PlayerScore,
    RolloutRequested,
    RunConfigured,
    RunPlanned,
    SampleBatchFormed,
    SampleScored,
    SegmentSample,
    SessionStarted,
    StepCompleted,
    TokenSnapshot,
    ToolCallCancelled,
    ToolCallCompleted,
    ToolCallRequested,
    ToolCallStarted,
    TurnCompleted,
    TurnTreeAssembled,
    WeightVersionPublished,
    sampled_tokens,
)
from turnlog.schemas.json_depth import deeper_than
from turnlog.schemas.types import BlobRef, Payload, TurnId

KEPT_BYTES: Final = 256 * 1024
"""Maximum size of a payload that is copied into a row, in bytes. Larger ones are read from the record."""
SEARCHED_CHARACTERS: Final = 65_536
"""Maximum number of characters of one record that can be searched, from its beginning."""
Values = tuple[Any, ...]


@dataclass(slots=True)
class IndexRows:
    """Rows that a sequence of records adds, in their order."""

    inserts: defaultdict[Table, list[Values]] = field(default_factory=lambda: defaultdict(list))
    words: list[tuple[int, str]] = field(default_factory=list)
    """(place, text) for the full-text search."""
    manifests: list[tuple[int, SampleBatchFormed | BatchSkipped]] = field(default_factory=list)
    unread: list[Values] = field(default_factory=list)
    sessions: dict[str, str] = field(default_factory=dict)
    """Session -> group, for sessions whose sums change."""
    heard: set[str] = field(default_factory=set)
    """Sessions with a new record that detectors of cheating read."""
    groups: set[str] = field(default_factory=set)
    """Groups of which every session changes."""
    steps: set[int] = field(default_factory=set)
    """Indexes of batches that a step trained on."""
    stored: set[int] = field(default_factory=set)
    """Weight versions whose record names files."""

    def take(self, record: Record, event: Event) -> None:
        """Add a record. Record types without a table add nothing."""
        rows_of = ROWS.get(type(event))
        if record.topic == topics.SESSIONS.name:
            rows_of = SESSION_EVENT
        elif record.topic == topics.ENGINES.name:
            rows_of = ENGINE_EVENT
        if rows_of is not None:
            self._add(record, event, rows_of)

    def _add(self, record: Record, event: Event, rows_of: RowsOf) -> None:
        place = place_of(record.topic, record.partition, record.offset)
        self.inserts[rows_of.table].append(rows_of.make(place, record, event))
        session_id, group_id = getattr(event, "session_id", None), getattr(event, "group_id", None)
        if session_id is not None and group_id is not None:
            self.sessions[session_id] = group_id
            if rows_of.table in (schema.SPINE, schema.TURNS, schema.RESULTS):
                self.heard.add(session_id)
        match event:
            case GroupScored():
                self.groups.add(event.group_id)
            case SampleBatchFormed() | BatchSkipped():
                self.manifests.append((place, event))
                self.groups.update(event.groups)
            case StepCompleted():
                self.steps.add(event.batch_index)
            case WeightVersionPublished() if event.state != ANNOUNCED:
                self.stored.add(event.version)
            case TurnCompleted():
                self._search(place, [*message_texts(event.new_messages), *message_texts(event.response)])
            case ToolCallCompleted():
                self._search(place, [_text(event.output)])

    def pass_over(self, record: Record, cause: Exception) -> None:
        """Note a record that cannot be read, or stands where it does not belong."""
        self.unread.append(
            (record.topic, record.partition, record.offset, record.timestamp_ms, type(cause).__name__, str(cause))
        )

    def _search(self, place: int, texts: Sequence[str]) -> None:
        text = "\n".join(texts)[:SEARCHED_CHARACTERS]
        if text:
            self.words.append((place, text))


def message_texts(payload: Payload) -> Iterator[str]:
    """Yield every text in a message or a list of messages; nothing for a payload that is stored elsewhere or is not
    JSON."""
    if isinstance(payload, BlobRef) or deeper_than(payload):
        return
    try:
        yield from _strings(orjson.loads(payload))
    except orjson.JSONDecodeError:
        return


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if not value.startswith("data:"):
            yield value
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        for name, each in value.items():
            if name not in WORDLESS:
                yield from _strings(each)


WORDLESS = frozenset({"role", "type", "id", "call_id", "tool_call_id", "tool_use_id", "signature", "cache_control"})
"""Keys of messages whose values are no spoken text."""


def inline(payload: Payload | None) -> str | None:
    """Return a JSON payload as text, or None if it is large or stored elsewhere."""
    if payload is None or isinstance(payload, BlobRef) or len(payload) > KEPT_BYTES:
        return None
    return _text(payload)


def as_json(value: object) -> str:
    """Encode as compact JSON with sorted keys. Numbers that JSON cannot express become null."""
    return canonical_json(value).decode()


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _turn(turn: TurnId | None) -> list[Any] | None:
    return None if turn is None else [turn.epoch, turn.index]


def _nodes(event: TurnTreeAssembled) -> str:
    return as_json([
        {"turn": _turn(node.turn), "base": _turn(node.base), "lineage": node.lineage, "prompt": node.prompt_tokens,
         "output": node.output_tokens}
        for node in event.nodes
    ])  # fmt: skip


def _segments(event: TurnTreeAssembled) -> str:
    return as_json([
        {"turns": [_turn(turn) for turn in segment.turns], "tokens": segment.tokens, "trained": segment.trained,
         "context": segment.context}
        for segment in event.segments
    ])  # fmt: skip


def mask_of(spans: Iterable[tuple[int, int, bool]]) -> str:
    """Return a name of the set of trained tokens: 16 hex digits, from (start, length, trained) of the spans in order.
    It does not depend on where weight versions changed between them."""
    runs: list[tuple[int, int]] = []
    for start, length, trained in spans:
        if trained and runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], start + length
        elif trained:
            runs.append((start, start + length))
    # The same bytes as of orjson, which refuses the end of a span that a foreign writer put near 2**63.
    return hashlib.sha256(json.dumps(runs, separators=(",", ":")).encode()).hexdigest()[:16]


def _player(score: PlayerScore) -> dict[str, Any]:
    return {"player": score.player, "reward": score.reward, "advantage": score.advantage,
            "excluded": score.excluded_reason}  # fmt: skip


def _members(event: GroupScored) -> str:
    return as_json([
        {"session_id": each.session_id, "outcome": each.outcome.value, "reward": each.reward,
         "advantage": each.advantage, "excluded": each.excluded_reason}
        | ({"players": [_player(one) for one in each.players]} if each.players else {})
        for each in event.rollouts
    ])  # fmt: skip


def origin_row(event: SessionStarted) -> Values:
    """Return the row of table `origins` for a session: its key, and what the session ran on and with."""
    env = event.environment
    facts = (
        event.recipe, f"{event.agent.name}/{event.agent.version}", f"{env.name}/{env.version}", env.image,
        env.root_sha256, env.policy_sha256, as_json(env.packages), as_json(env.tools), event.tokenizer_sha256,
        event.chat_template_sha256,
    )  # fmt: skip
    return hashlib.sha256(canonical_json(facts)).hexdigest()[:16], *facts


class RowsOf(NamedTuple):
    """The rows of one record type, or of the records of one topic."""

    table: Table
    make: Callable[[int, Record, Any], Values]
    """(place, record, event) -> place, event_id, time_ms and the columns of the table."""


def _code(record: Record) -> str | None:
    """Return the version of turnlog that wrote a record; None if the record does not name it."""
    found = next((value for name, value in record.headers if name == CODE_HEADER), None)
    return None if found is None else _text(found)


Source = str | tuple[Callable[[Any], Any], str] | Callable[[Any], Any] | int | None
"""Source of a column: the path of an attribute of the event, (function, path) for the function's result of that
attribute, a function of the event, or a constant."""


def row_of(table: Table, **sources: Source) -> RowsOf:
    """Return the rows of a record type. A column without a source is the event's attribute of its own name; the column
    `code` comes from the record's header.

    The function that makes them is generated, because rows are made for every record on the log.
    """
    values, names = ["place", "event.event_id", "record.timestamp_ms"], dict[str, Any](code_of=_code)
    for column in table.columns:
        match sources.pop(column.name, column.name):
            case "code":
                values.append("code_of(record)")
            case str(path):
                values.append(f"event.{path}")
            case (function, path):
                names[column.name] = function
                values.append(f"{column.name}(event.{path})")
            case int() | None as constant:
                values.append(repr(constant))
            case function:
                names[column.name] = function
                values.append(f"{column.name}(event)")
    if sources:
        raise ValueError(f"{table.name} has no column {', '.join(sources)}")
    return RowsOf(table, eval(f"lambda place, record, event: ({', '.join(values)})", names))


KIND = "__class__.__name__"
SESSION_EVENT = RowsOf(
    schema.SPINE,
    lambda place, record, event: (
        place, event.event_id, record.timestamp_ms, type(event).__name__, event.group_id,
        getattr(event, "session_id", None), record.value, _code(record),
    ),
)  # fmt: skip
ENGINE_EVENT = row_of(
    schema.ENGINES, kind=KIND, engine_kind="kind",
    refused_version=lambda event: getattr(event, "refused_version", None),
    cause=lambda event: getattr(event, "cause", None), message=lambda event: getattr(event, "message", None),
    seconds=lambda event: as_json(event.seconds) if isinstance(event, EngineWeightsLoaded) else None,
)  # fmt: skip
MASKED = (as_json, "masked")
BOOKS: dict[str, Source] = {
    "sampled": "books.sampled", "trained": "books.trained", "masked": (as_json, "books.masked"),
}  # fmt: skip
ROWS: Mapping[type, RowsOf] = {
    RunConfigured: row_of(
        schema.RUNS, kind=KIND, settings=(_text, "settings"), draws=None, publish_every=None, phase=None,
        parent=lambda event: event.parent and as_json(dataclasses.asdict(event.parent)),
    ),
    RunPlanned: row_of(schema.RUNS, kind=KIND, settings=None, fold_version=None, parent=None),
    RolloutRequested: row_of(
        schema.ROLLOUTS, dataset_row="index", purpose="purpose.value", task=(inline, "task")
    ),
    TurnCompleted: row_of(
        schema.TURNS, epoch="turn.epoch", turn_index="turn.index",
        base_epoch=lambda event: event.base_turn and event.base_turn.epoch,
        base_index=lambda event: event.base_turn and event.base_turn.index,
        redacted=lambda event: as_json(event.redacted) if event.redacted else None,
        messages=(inline, "new_messages"), response=(inline, "response"), tools=(inline, "tools"),
        finish_reason="finish_reason.value", version_first="weight_version_first", version_last="weight_version_last",
    ),
    TokenSnapshot: row_of(
        schema.SNAPSHOTS, epoch="turn.epoch", turn_index="turn.index", output_tokens=sampled_tokens,
        boundary="boundary.value",
        version_spans=lambda event: as_json([[span.version, span.length] for span in event.version_spans]),
    ),
    ToolCallRequested: row_of(schema.REQUESTS, arguments=(_text, "arguments"), backend="sandbox.backend"),
    ToolCallCancelled: row_of(schema.CANCELS),
    ToolCallStarted: row_of(schema.STARTS),
    ToolCallCompleted: row_of(
        schema.RESULTS, status="status.value", output=(_text, "output"), requests=(len, "requests"),
        output_bytes=lambda event: len(event.output) if event.full_output is None else event.full_output.size,
        full_output=lambda event: event.full_output and event.full_output.sha256,
        refused_requests=lambda event: sum(each.source is EgressSource.refused for each in event.requests),
        asked=lambda event: as_json(
            [[each.method, each.url, each.status, each.source.value] for each in event.requests[:100]]
        ),
    ),
    TurnTreeAssembled: row_of(
        schema.TREES, outcome="outcome.value", nodes=_nodes, segments=_segments,
        lineages=lambda event: as_json([lineage.kind for lineage in event.lineages]), **BOOKS,
    ),
    SegmentSample: row_of(
        schema.SAMPLES, version_min="weight_version_min", version_max="weight_version_max",
        tokens=(lambda ids: (ids.size if isinstance(ids, BlobRef) else len(ids)) // 4, "token_ids"),
        sampled=lambda event: sum(span.length for span in event.spans),
        trained=lambda event: sum(span.length for span in event.spans if span.trained),
        mask=lambda event: mask_of((span.start, span.length, span.trained) for span in event.spans),
    ),
    GroupScored: row_of(
        schema.SCORES, purpose="purpose.value", status="status.value", filters=(as_json, "group_filters"),
        transforms=(as_json, "reward_transforms"), rollouts=_members, **BOOKS,
    ),
    SampleScored: row_of(schema.SAMPLE_SCORES),
    SampleBatchFormed: row_of(
        schema.BATCHES, skipped=None, file_sha256="file.sha256", rows=(len, "samples"),
        tokens=lambda event: sum(row.tokens for row in event.samples), masked=MASKED, lags=(as_json, "lags"),
    ),
    BatchSkipped: row_of(
        schema.BATCHES, part=None, parts=None, skipped="reason", file_sha256=None, rows=0, prompts=0, trajectories=0,
        trained_tokens=0, tokens=0, masked=MASKED, trainer_version=None, max_lag=None, lags=None,
    ),
    StepCompleted: row_of(schema.STEPS, masked=MASKED, seconds=(as_json, "seconds"), metrics=(as_json, "metrics")),
    WeightVersionPublished: row_of(
        schema.VERSIONS, bytes=lambda event: sum(file.blob.size for file in event.files), files=(len, "files"),
        stored_ms=None,
    ),
    DeadLetter: row_of(
        schema.DEAD_LETTERS, of_topic="topic", of_partition="partition", of_offset="offset", of_key=(_text, "key")
    ),
}  # fmt: skip
"""Rows of each record type, except those of agent.sessions and engine-status, whose topics have a table for all."""
