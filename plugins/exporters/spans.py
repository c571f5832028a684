"""The spans of a run: sessions with their turns, engine requests, tool calls and sandboxes, their rewards and the
batches that train them; draws; optimizer steps; weight versions.

Ids are digests of event ids, and times are those of records, so that every process and every replay produces the same
spans. The trace id of a session is the digest of its session_id. Names and attributes follow OpenTelemetry's semantic
conventions for generative AI, where these define any, and the proposal for reinforcement learning (`rl.*`,
open-telemetry/semantic-conventions-genai issue 88). Spans contain nothing that an agent or a tool wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from turnlog.infra.log import Partition
from turnlog.processors.core.views.progress import ANNOUNCED
from turnlog.schemas.events import (
    BatchSkipped,
    EngineWeightsLoaded,
    EngineWeightsRefused,
    Event,
    GroupScored,
    Outcome,
    SampleBatchFormed,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    StepCompleted,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
    TurnCompleted,
    WeightVersionPublished,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.types import TurnId

Value = str | int | float | bool
WELL = (Outcome.completed, Outcome.truncated)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """A span; times are nanoseconds since 1970."""

    trace_id: str
    """32 hex digits."""
    span_id: str
    """16 hex digits."""
    parent_id: str = ""
    """Empty for a root span."""
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    """Description of the error; empty if there was none."""
    links: Sequence[tuple[str, str]] = ()
    """(trace id, span id) of related spans of other programs."""


def trace_of(*about: str | int) -> str:
    """Return the trace id of a session ("session", id), a step or a weight version."""
    return digest("trace", *about)


def span_of(event_id: str, part: str = "") -> str:
    """Return the id of the span of an event, or of a part of it."""
    return digest("span", event_id, part)[:16]


def is_sampled(trace_id: str, ratio: float) -> bool:
    """Return whether a trace is sampled. The lower 64 bits of its id decide, as in OpenTelemetry's TraceIdRatioBased,
    so that every program keeps the same traces."""
    return int(trace_id[16:], 16) < round(ratio * 2**64)


@dataclass(frozen=True, slots=True)
class _RequestedCall:
    at_ms: int
    event: ToolCallRequested


@dataclass(frozen=True, slots=True)
class _Answered:
    at_ms: int
    event: ToolCallCompleted


@dataclass(slots=True)
class _Session:
    """Records read of a session whose spans have not been emitted."""

    round: int
    """Round that read the session's first record."""
    since: dict[Partition, int] = field(default_factory=dict)
    """Offset of the session's first record in each partition."""
    started: tuple[int, SessionStarted] | None = None
    epoch: str = ""
    finished: tuple[int, SessionFinished, int] | None = None
    """(time, event, round that read it)."""
    turns: dict[TurnId, list[TraceSpan]] = field(default_factory=dict)
    caller: dict[str, TurnId] = field(default_factory=dict)
    """Tool call -> the turn whose answer requests it."""
    asked: dict[str, _RequestedCall] = field(default_factory=dict)
    answered: dict[str, _Answered] = field(default_factory=dict)

    def finished_turns(self) -> list[TurnId]:
        """Return the turns that the session's SessionFinished names."""
        return [] if self.finished is None else [*self.finished[1].turns, *self.finished[1].undelivered]

    def is_whole(self) -> bool:
        """Return whether all of these turns have been read."""
        return all(turn in self.turns for turn in self.finished_turns())


REMEMBERED = 1 << 16


class Traces:
    """Folds records into spans, in rounds. A round reads every partition to the end that it had when the round began.
    Therefore, if round N read a record, everything that was written before it has been read by the end of round N+1."""

    def __init__(self, ratio: float, *, content: bool = True) -> None:
        """`ratio`: share of traces that are kept. `content`: whether spans may hold what a session said."""
        self._ratio = ratio
        self._content = content
        self._round = 0
        self._sessions: dict[str, _Session] = {}
        self._told: dict[str, None] = {}
        """Sessions whose spans were emitted, at most REMEMBERED. A repeated record does not open one of them again."""

    def take(self, place: Partition, offset: int, at_ms: int, event: Event) -> list[TraceSpan]:
        """Fold one record, whose payloads must be inline. Return the spans that need no other record."""
        match event:
            case StepCompleted() | WeightVersionPublished() | EngineWeightsLoaded() | EngineWeightsRefused():
                return self._keep_sampled(_of_the_loop(at_ms, event))
            case GroupScored():
                return self._keep_sampled(_rewards(at_ms, event))
            case SampleBatchFormed() | BatchSkipped():
                return self._keep_sampled(_of_a_draw(at_ms, event))
        if event.session_id not in self._told and is_sampled(trace_of("session", event.session_id), self._ratio):
            session = self._sessions.setdefault(event.session_id, _Session(self._round))
            session.since.setdefault(place, offset)
            self._fold(session, at_ms, event)
        return []

    def settle(self) -> list[TraceSpan]:
        """End the round. Return the spans of each finished session, in the order of the sessions' first records.

        A session is not emitted while a turn that its end names is missing from the log. A session whose start is not
        among the records read began before them; it is dropped, because its spans were emitted earlier.
        """
        found: list[TraceSpan] = []
        for name, session in list(self._sessions.items()):
            if session.started is None and session.round < self._round:
                del self._sessions[name]
            elif session.started and session.finished and session.finished[2] < self._round and session.is_whole():
                found += _tree(session, content=self._content)
                del self._sessions[name]
                self._told[name] = None
        while len(self._told) > REMEMBERED:
            del self._told[next(iter(self._told))]
        self._round += 1
        return found

    def low_water(self, place: Partition, position: int) -> int:
        """Return the offset at which a restart must begin in order to read all records of every open session."""
        return min((session.since.get(place, position) for session in self._sessions.values()), default=position)

    @property
    def open(self) -> int:
        """Number of sessions whose spans have not been emitted."""
        return len(self._sessions)

    def _keep_sampled(self, spans: Iterator[TraceSpan]) -> list[TraceSpan]:
        return [span for span in spans if is_sampled(span.trace_id, self._ratio)]

    def _fold(self, session: _Session, at_ms: int, event: Event) -> None:
        match event:
            case SessionStarted() if session.started is None:
                session.started, session.epoch = (at_ms, event), event.event_id
            case SessionAdopted():
                session.epoch = event.event_id
            case SessionFinished() if session.finished is None and event.epoch == session.epoch:
                session.finished = (at_ms, event, self._round)
            case TurnCompleted() if event.turn not in session.turns:
                session.turns[event.turn] = list(_of_a_turn(at_ms, event))
                session.caller |= dict.fromkeys(_calls(event), event.turn)
            case ToolCallRequested():
                session.asked.setdefault(event.call_id, _RequestedCall(at_ms, event))
            case ToolCallCompleted():
                session.answered.setdefault(event.call_id, _Answered(at_ms, event))


def _of_the_loop(at_ms: int, event: Event) -> Iterator[TraceSpan]:
    """Yield the spans of steps and of weight versions. Each version is a trace: its publication, its copy in the store
    if that is a record of its own, and its load into each engine."""
    match event:
        case StepCompleted():
            yield _span(
                trace_of("step", event.event_id), span_of(event.event_id), "", "step", at_ms,
                sum(event.seconds.values()),
                {"turnlog.run": event.run_id, "turnlog.batch_index": event.batch_index, "turnlog.step": event.step,
                 "turnlog.incarnation": event.incarnation, "turnlog.trained_tokens": event.trained_tokens,
                 "turnlog.lag_max": event.lag_max, "rl.loop.iteration": event.step,
                 "rl.train.tokens": event.trained_tokens, "rl.train.loss": event.loss,
                 "rl.environment.reward.mean": event.reward_mean,
                 **{f"turnlog.seconds.{phase}": seconds for phase, seconds in sorted(event.seconds.items())}},
                "the gradient is not finite" if event.skipped else "",
            )  # fmt: skip
        case WeightVersionPublished():
            second = event.transport == "direct" and event.state != ANNOUNCED
            yield _span(
                trace_of("weights", event.run_id, event.version), span_of(event.event_id),
                _publication(event, event.version) if second else "", "store weights" if second else "publish weights",
                at_ms, 0.0,
                {"turnlog.run": event.run_id, "turnlog.weight_version": event.version, "turnlog.step": event.step,
                 "turnlog.batch_index": event.batch_index, "turnlog.incarnation": event.incarnation,
                 "turnlog.transport": event.transport, "rl.loop.iteration": event.step, "rl.sync.source": "trainer",
                 **({"rl.sync.bytes": sum(file.blob.size for file in event.files)} if event.files else {})},
            )  # fmt: skip
        case EngineWeightsLoaded():
            yield _swap(at_ms, event, event.version, event.seconds, "")
        case EngineWeightsRefused():
            yield _swap(at_ms, event, event.refused_version, {}, event.cause)


def _publication(event: Event, version: int) -> str:
    """Return the id of the span of a version's publication. The event id of its first record is derived from the
    version."""
    return span_of(digest("WeightVersionPublished", event.run_id, version))


def _swap(
    at_ms: int,
    event: EngineWeightsLoaded | EngineWeightsRefused,
    version: int,
    seconds: Mapping[str, float],
    error: str,
) -> TraceSpan:
    """Return the span of a weight update in an engine, with the seconds of each phase. Its parent is the
    publication."""
    return _span(
        trace_of("weights", event.run_id, version), span_of(event.event_id), _publication(event, version),
        "swap weights", at_ms, sum(seconds.values()),
        {"turnlog.run": event.run_id, "turnlog.weight_version": version, "turnlog.engine": event.engine_id,
         "rl.sync.source": "trainer", "rl.sync.destination": event.engine_id,
         **{f"turnlog.seconds.{phase}": took_s for phase, took_s in sorted(seconds.items())}}, error,
    )  # fmt: skip


def _rewards(at_ms: int, event: GroupScored) -> Iterator[TraceSpan]:
    """Yield a span for each rollout of a scored group, in the trace of its session: its reward and advantage, or why it
    has none, and whether its group is trained, or why not."""
    for rollout in event.rollouts:
        attributes: dict[str, Value] = {
            "turnlog.run": event.run_id, "turnlog.group": event.group_id, "turnlog.group.size": len(event.rollouts),
            "turnlog.group.status": event.status.value, "turnlog.estimator": event.estimator,
        }  # fmt: skip
        optional = {
            "rl.reward.score": rollout.reward, "turnlog.advantage": rollout.advantage,
            "turnlog.excluded_reason": rollout.excluded_reason, "turnlog.group.reason": event.reason or None,
        }  # fmt: skip
        attributes |= {name: value for name, value in optional.items() if value is not None}
        yield _span(
            trace_of("session", rollout.session_id), span_of(event.event_id, rollout.session_id),
            _root(rollout.session_id), "rl.reward", at_ms, 0.0, attributes,
        )  # fmt: skip


def _of_a_draw(at_ms: int, event: SampleBatchFormed | BatchSkipped) -> Iterator[TraceSpan]:
    """Yield the span of a batch or of a skipped draw, a trace of its own, and a span for each session that the batch
    trains, in the session's trace."""
    dropped = Counter(sample.reason for sample in event.dropped)
    common: dict[str, Value] = {
        "turnlog.run": event.run_id, "turnlog.batch_index": event.batch_index, "turnlog.draw_index": event.draw_index,
    }  # fmt: skip
    own: dict[str, Value] = {f"turnlog.dropped.{reason}": count for reason, count in sorted(dropped.items())}
    own |= {f"turnlog.masked.{reason}": count for reason, count in sorted(event.masked.items())}
    if isinstance(event, SampleBatchFormed):
        common |= {
            "rl.train.batch_size": len(event.samples), "turnlog.weight_version.trainer": event.trainer_version,
            "turnlog.lag_max": event.max_lag,
        }  # fmt: skip
        own |= {"turnlog.trained_tokens": event.trained_tokens, "turnlog.trajectories": event.trajectories}
        tokens: Counter[str] = Counter()
        for row in event.samples:
            tokens[row.session_id] += row.trained_tokens
        for session_id, trained in tokens.items():
            yield _span(
                trace_of("session", session_id), span_of(event.event_id, session_id), _root(session_id), "rl.train",
                at_ms, 0.0, {**common, "turnlog.trained_tokens": trained},
            )  # fmt: skip
    yield _span(trace_of("draw", event.event_id), span_of(event.event_id), "", "draw", at_ms, 0.0, common | own)


def _root(session_id: str) -> str:
    """Return the id of a session's root span. The event id of a SessionStarted is derived from the session's."""
    return span_of(digest("SessionStarted", session_id))


def _of_a_turn(at_ms: int, event: TurnCompleted) -> Iterator[TraceSpan]:
    """Yield the span of the turn as the gateway saw it, and within it that of the engine."""
    trace, own = trace_of("session", event.session_id), span_of(event.event_id)
    parent = _root(event.session_id)
    said = "" if not event.aborted else f"aborted: {event.finish_reason.value}"
    yield _span(
        trace, own, parent, "turn", at_ms, event.total_s,
        {"gen_ai.conversation.id": event.session_id, "turnlog.turn.epoch": event.turn.epoch,
         "turnlog.turn.index": event.turn.index, "turnlog.api": event.api, "turnlog.queue_s": event.queue_s}, said,
        [(event.traceparent[3:35], event.traceparent[36:52])] if event.traceparent else (),
    )  # fmt: skip
    yield _span(
        trace, span_of(event.event_id, "engine"), own, "chat", at_ms, max(0.0, event.total_s - event.queue_s),
        {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": event.prompt_tokens,
         "gen_ai.usage.output_tokens": event.output_tokens, "turnlog.cached_tokens": event.cached_tokens,
         "turnlog.finish_reason": event.finish_reason.value, "turnlog.first_token_s": event.first_token_s,
         "turnlog.engine": event.engine_id, "turnlog.weight_version.first": event.weight_version_first,
         "turnlog.weight_version.last": event.weight_version_last}, said,
    )  # fmt: skip


def _calls(event: TurnCompleted) -> list[str]:
    """Return the ids of the tool calls that the turn requests."""
    assert isinstance(event.response, bytes)
    return [call["id"] for call in orjson.loads(event.response).get("tool_calls") or ()]


def _tree(session: _Session, *, content: bool) -> Iterator[TraceSpan]:
    """Yield the spans of a finished session: the turns that its end names, and the tool calls that were answered before
    its end. The reason of its end is content."""
    assert session.started is not None
    assert session.finished is not None
    (began_ms, started), (at_ms, finished, _) = session.started, session.finished
    trace, root = trace_of("session", started.session_id), span_of(started.event_id)
    turns = {turn: session.turns[turn] for turn in session.finished_turns()}
    yield _span(
        trace, root, "", f"invoke_agent {started.agent.name}", at_ms, (at_ms - began_ms) / 1000,
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": started.agent.name,
         "gen_ai.conversation.id": started.session_id, "turnlog.run": started.run_id, "turnlog.recipe": started.recipe,
         "turnlog.group": started.group_id, "turnlog.rollout": started.rollout_id, "turnlog.attempt": started.attempt,
         "turnlog.purpose": started.purpose.value, "turnlog.outcome": finished.outcome.value,
         "rl.environment.name": started.recipe, **_versions(turns.values())},
        "" if finished.outcome in WELL else (content and finished.reason) or finished.outcome.value,
    )  # fmt: skip
    for spans in turns.values():
        yield from spans
    for name, answer in session.answered.items():
        asked, turn = session.asked.get(name), session.caller.get(name)
        if asked is not None and answer.at_ms <= at_ms:
            yield from _of_a_call(asked, answer, turns[turn][0].span_id if turn in turns else root)


def _versions(turns: Collection[Sequence[TraceSpan]]) -> dict[str, Value]:
    """Return the oldest and the newest weight version that sampled the turns; nothing without turns."""
    first = [int(chat.attributes["turnlog.weight_version.first"]) for _, chat in turns]
    last = [int(chat.attributes["turnlog.weight_version.last"]) for _, chat in turns]
    return {"turnlog.weight_version.first": min(first), "turnlog.weight_version.last": max(last)} if first else {}


def _of_a_call(asked: _RequestedCall, answer: _Answered, parent: str) -> Iterator[TraceSpan]:
    """Yield the span of the tool call, from its request to its result, and within it that of the sandbox that ran
    it."""
    request, result = asked.event, answer.event
    trace, own = trace_of("session", request.session_id), span_of(request.event_id)
    said = "" if result.status is ToolStatus.ok else f"{result.status.value} {result.reason}".strip()
    yield _span(
        trace, own, parent, f"execute_tool {request.tool}", answer.at_ms, (answer.at_ms - asked.at_ms) / 1000,
        {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": request.tool,
         "gen_ai.tool.call.id": request.call_id, "turnlog.call_seq": request.call_seq,
         "turnlog.status": result.status.value}, said,
    )  # fmt: skip
    if result.attempt > 0:  # else it never ran
        ended_ms = asked.at_ms + round((result.queue_s + result.duration_s) * 1000)
        yield _span(
            trace, span_of(result.event_id, "sandbox"), own, "sandbox", ended_ms, result.duration_s,
            {"turnlog.backend": request.sandbox.backend, "turnlog.worker": result.worker,
             "turnlog.attempt": result.attempt, "turnlog.queue_s": result.queue_s}, said,
        )  # fmt: skip


def _span(
    trace_id: str, span_id: str, parent_id: str, name: str, end_ms: int, seconds: float,
    attributes: Mapping[str, Value], error: str = "", links: Sequence[tuple[str, str]] = (),
) -> TraceSpan:  # fmt: skip
    """Return a span that ends at the time of a record."""
    end = end_ms * 1_000_000
    return TraceSpan(
        trace_id=trace_id, span_id=span_id, parent_id=parent_id, name=name, start_ns=end - round(seconds * 1e9),
        end_ns=end, attributes=attributes, error=error, links=links,
    )  # fmt: skip
