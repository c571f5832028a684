"""Conversion of records to rows: one function per record type, of the record alone.

Anything that depends on several records is computed in indexer.py.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from turnlog.consumers.index import schema
from turnlog.consumers.index.schema import Table, place_of
from turnlog.infra.log import Record
from turnlog.schemas import topics
from turnlog.schemas.canonical import canonical_json
from turnlog.schemas.events import (
    BatchSkipped,
    DeadLetter,
    EgressSource,
    Event,
    GroupScored,
    RolloutRequested,
    RunConfigured,
    RunPlanned,
    SampleBatchFormed,
    SampleScored,
    SegmentSample,
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
    groups: set[str] = field(default_factory=set)
    """Groups of which every session changes."""
    steps: set[int] = field(default_factory=set)
    """Indexes of batches that a step trained on."""

    def take(self, record: Record, event: Event) -> None:
        """Add a record. Record types without a table add nothing."""
        rows_of = ROWS.get(type(event))
        if record.topic == topics.SESSIONS.name:
            rows_of = _session_event
        elif record.topic == topics.ENGINES.name:
            rows_of = _engine_event
        if rows_of is not None:
            self._add(record, event, rows_of)

    def _add(self, record: Record, event: Event, rows_of: RowsOf) -> None:
        place = place_of(record.topic, record.partition, record.offset)
        head = (place, event.event_id, record.timestamp_ms)
        table, values = rows_of(record, event)
        self.inserts[table].append(head + values)
        session_id, group_id = getattr(event, "session_id", None), getattr(event, "group_id", None)
        if session_id is not None and group_id is not None:
            self.sessions[session_id] = group_id
        match event:
            case GroupScored():
                self.groups.add(event.group_id)
            case SampleBatchFormed() | BatchSkipped():
                self.manifests.append((place, event))
                self.groups.update(event.groups)
            case StepCompleted():
                self.steps.add(event.batch_index)
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


Found = tuple[Table, Values]
RowsOf = Callable[[Record, Any], Found]


def _run_config(_: Record, event: RunConfigured) -> Found:
    return schema.RUNS, ("RunConfigured", event.run_id, _text(event.settings), event.fold_version, None, None, None)


def _run_plan(_: Record, event: RunPlanned) -> Found:
    return schema.RUNS, (
        "RunPlanned", event.run_id, None, None, event.draws, event.publish_every, event.phase,
    )  # fmt: skip


def _rollout(_: Record, event: RolloutRequested) -> Found:
    return schema.ROLLOUTS, (
        event.rollout_id, event.group_id, event.rollout_index, event.group_size, event.task_id, event.draw,
        event.dataset, event.dataset_epoch, event.index, event.recipe, event.purpose.value, inline(event.task),
        event.min_weight_version,
    )  # fmt: skip


def _session_event(record: Record, event: Event) -> Found:
    return schema.SPINE, (type(event).__name__, event.group_id, getattr(event, "session_id", None), record.value)


def _completed_turn(_: Record, event: TurnCompleted) -> Found:
    base = event.base_turn
    return schema.TURNS, (
        event.group_id, event.session_id, event.turn.epoch, event.turn.index, base and base.epoch, base and base.index,
        event.agent_path, event.api, inline(event.new_messages), inline(event.response), inline(event.tools),
        event.finish_reason.value, event.aborted, event.ill_formed_calls, event.prompt_tokens, event.output_tokens,
        event.reasoning_tokens, event.cached_tokens, event.weight_version_first, event.weight_version_last,
        event.queue_s, event.first_token_s, event.total_s, event.engine_id, event.traceparent,
    )  # fmt: skip


def _snapshot(_: Record, event: TokenSnapshot) -> Found:
    spans = [[span.version, span.length] for span in event.version_spans]
    return schema.SNAPSHOTS, (
        event.group_id, event.session_id, event.turn.epoch, event.turn.index, sampled_tokens(event), as_json(spans),
        event.boundary.value, event.boundary_reason, event.temperature, event.constrained,
    )  # fmt: skip


def _request(_: Record, event: ToolCallRequested) -> Found:
    return schema.REQUESTS, (
        event.call_id, event.group_id, event.session_id, event.rollout_id, event.call_seq, event.tool,
        _text(event.arguments), event.sandbox.backend,
    )  # fmt: skip


def _cancel(_: Record, event: ToolCallCancelled) -> Found:
    return schema.CANCELS, (event.call_id, event.session_id, event.reason)


def _start(_: Record, event: ToolCallStarted) -> Found:
    return schema.STARTS, (event.call_id, event.session_id, event.attempt, event.worker, event.environment_sha256)


def _result(_: Record, event: ToolCallCompleted) -> Found:
    full = event.full_output
    refused = sum(request.source is EgressSource.refused for request in event.requests)
    return schema.RESULTS, (
        event.call_id, event.session_id, event.call_seq, event.status.value, event.reason, event.exit_code,
        _text(event.output), len(event.output) if full is None else full.size, full and full.sha256, event.duration_s,
        event.queue_s, event.attempt, event.worker, event.cached, len(event.requests), refused,
    )  # fmt: skip


def _tree(_: Record, event: TurnTreeAssembled) -> Found:
    nodes = [
        {"turn": _turn(node.turn), "base": _turn(node.base), "lineage": node.lineage, "prompt": node.prompt_tokens,
         "output": node.output_tokens}
        for node in event.nodes
    ]  # fmt: skip
    segments = [
        {"turns": [_turn(turn) for turn in segment.turns], "tokens": segment.tokens, "trained": segment.trained,
         "context": segment.context}
        for segment in event.segments
    ]  # fmt: skip
    return schema.TREES, (
        event.group_id, event.session_id, event.rollout_id, event.outcome.value, event.reward, as_json(nodes),
        as_json([lineage.kind for lineage in event.lineages]), as_json(segments), event.anchor_segment,
        event.books.sampled, event.books.trained, as_json(event.books.masked), event.duplicated_prefix_tokens,
    )  # fmt: skip


def mask_of(spans: Iterable[tuple[int, int, bool]]) -> str:
    """Return a name of the set of trained tokens: 16 hex digits, from (start, length, trained) of the spans in order.
    It does not depend on where weight versions changed between them."""
    runs: list[tuple[int, int]] = []
    for start, length, trained in spans:
        if trained and runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], start + length
        elif trained:
            runs.append((start, start + length))
    return hashlib.sha256(as_json(runs).encode()).hexdigest()[:16]


def _sample(_: Record, event: SegmentSample) -> Found:
    ids = event.token_ids
    return schema.SAMPLES, (
        event.sample_id, event.group_id, event.session_id, event.segment_index, event.is_anchor,
        (ids.size if isinstance(ids, BlobRef) else len(ids)) // 4, sum(span.length for span in event.spans),
        sum(span.length for span in event.spans if span.trained), event.advantage, event.reward,
        event.weight_version_min, event.weight_version_max,
        mask_of((span.start, span.length, span.trained) for span in event.spans),
    )  # fmt: skip


def _group_score(_: Record, event: GroupScored) -> Found:
    rollouts = [
        {"session_id": each.session_id, "outcome": each.outcome.value, "reward": each.reward,
         "advantage": each.advantage, "excluded": each.excluded_reason}
        for each in event.rollouts
    ]  # fmt: skip
    return schema.SCORES, (
        event.group_id, event.task_id, event.purpose.value, event.status.value, event.reason, event.baseline, event.std,
        event.estimator, as_json(event.group_filters), as_json(event.reward_transforms), event.samples,
        event.books.sampled, event.books.trained, as_json(event.books.masked), as_json(rollouts),
    )  # fmt: skip


def _sample_scored(_: Record, event: SampleScored) -> Found:
    return schema.SAMPLE_SCORES, (event.sample_id, event.group_id, event.scorer)


def _formed_batch(_: Record, event: SampleBatchFormed) -> Found:
    return schema.BATCHES, (
        event.batch_index, event.draw_index, event.part, event.parts, None, event.file.sha256, len(event.samples),
        event.prompts, event.trajectories, event.trained_tokens, sum(row.tokens for row in event.samples),
        as_json(event.masked), event.trainer_version, event.max_lag, as_json(event.lags),
    )  # fmt: skip


def _skipped_batch(_: Record, event: BatchSkipped) -> Found:
    none = (None, None, event.reason, None, 0, 0, 0, 0, 0)
    return schema.BATCHES, (event.batch_index, event.draw_index, *none, as_json(event.masked), None, None, None)


def _trainer_step(_: Record, event: StepCompleted) -> Found:
    return schema.STEPS, (
        event.batch_index, event.draw_index, event.incarnation, event.step, event.loss, event.grad_norm,
        event.learning_rate, event.lag_max, event.tokens, event.trained_tokens, as_json(event.masked), event.skipped,
        event.reward_mean, event.logprob_gap_max, event.logprob_gap_mean, event.entropy, event.clip_fraction,
        as_json(event.seconds), as_json(event.metrics), event.world_size,
    )  # fmt: skip


def _weight_version(_: Record, event: WeightVersionPublished) -> Found:
    return schema.VERSIONS, (
        event.version, event.step, event.batch_index, event.incarnation, event.kind, event.base_version,
        sum(file.blob.size for file in event.files), len(event.files), event.checkpoint,
    )  # fmt: skip


def _engine_event(_: Record, event: Event) -> Found:
    seconds = getattr(event, "seconds", None)
    return schema.ENGINES, (
        type(event).__name__, event.engine_id, event.url, event.state, event.version,
        getattr(event, "refused_version", None), getattr(event, "cause", None), getattr(event, "message", None),
        None if seconds is None else as_json(seconds),
    )  # fmt: skip


def _letter(_: Record, event: DeadLetter) -> Found:
    return schema.DEAD_LETTERS, (
        event.topic, event.partition, event.offset, _text(event.key), event.role, event.cause, event.message,
    )  # fmt: skip


ROWS: Mapping[type, RowsOf] = {
    RunConfigured: _run_config,
    RunPlanned: _run_plan,
    RolloutRequested: _rollout,
    TurnCompleted: _completed_turn,
    TokenSnapshot: _snapshot,
    ToolCallRequested: _request,
    ToolCallCancelled: _cancel,
    ToolCallStarted: _start,
    ToolCallCompleted: _result,
    TurnTreeAssembled: _tree,
    SegmentSample: _sample,
    GroupScored: _group_score,
    SampleScored: _sample_scored,
    SampleBatchFormed: _formed_batch,
    BatchSkipped: _skipped_batch,
    StepCompleted: _trainer_step,
    WeightVersionPublished: _weight_version,
    DeadLetter: _letter,
}
