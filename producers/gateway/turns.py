"""A turn from end to end: plan, sample, parse, write both records with acks=all, then update the conversation."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
from prometheus_client import Counter, Histogram

from turnlog.infra.blobs import BlobError, Blobs, externalize_payloads
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import LogError
from turnlog.processors.core.experts import MEDIA_TYPE, pack_experts
from turnlog.producers.gateway.conversation import RecordedTurn, TurnAnswer, extend_hash
from turnlog.producers.gateway.dialects.dialect import TurnRequest
from turnlog.producers.gateway.engines import SECONDS, Draft, Sampler, WeightRequirement
from turnlog.producers.gateway.errors import ErasedSession, GatewayError, NotRecorded, TurnsSpent
from turnlog.producers.gateway.expert_rows import TurnRows
from turnlog.producers.gateway.images import by_reference
from turnlog.producers.gateway.messages import id_of_call, response_of, system_digest
from turnlog.producers.gateway.parsers.parser import OutputParser, Part, Reasoning, certain, cut_at_stop
from turnlog.producers.gateway.planner import Planner, TurnPlan
from turnlog.producers.gateway.prompts import Prompts, TextStream
from turnlog.producers.gateway.redaction import RequestRedactor, withhold_output, withhold_prompt
from turnlog.producers.gateway.requests import Claims
from turnlog.producers.gateway.sessions import GatewaySession, Running
from turnlog.schemas import SessionIsErased
from turnlog.schemas.events.turns import CUT_OFF, ExpertsLayout, FinishReason, TokenSnapshot, TurnCompleted
from turnlog.schemas.ids import turn_event_id
from turnlog.schemas.types import BlobRef, TurnId, float32s, pack_float32s, pack_int32s

if TYPE_CHECKING:
    from hashlib import _Hash


TURNS = Counter("turnlog_gateway_turns", "Turns recorded", ("finish_reason", "boundary", "reason"))
CHANGED = Counter("turnlog_gateway_changed_echoes", "Continued answers that came back changed", ("member",))
TOKENS = Counter("turnlog_gateway_tokens", "Tokens of recorded turns", ("kind",))
PROMPT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS = (TOKENS.labels(kind) for kind in ("prompt", "output", "cached"))
RECORD_S = Histogram("turnlog_gateway_record_seconds", "Time to record a turn, up to acks=all", buckets=SECONDS)
WITHOUT_EXPERTS = Counter(
    "turnlog_gateway_turns_without_experts", "Turns of a mixture of experts with missing expert rows from the engine"
)


class AdmittedTurn(NamedTuple):
    """A turn that may be sampled, and how."""

    session: GatewaySession
    request: TurnRequest
    plan: TurnPlan
    id: TurnId
    traceparent: str = ""
    """Value of TurnCompleted.traceparent."""
    redacted: bool = False
    """True if the records withhold tokens."""


class RenderedOutput(NamedTuple):
    """An output in the form that people and agents see."""

    response: dict[str, Any]
    """The assistant's message."""
    parts: list[Part]
    stopped_by: str | None
    """Stop sequence of the client's that ended the text, or None."""
    ill_formed: int
    """Number of blocks that look like calls but are malformed."""
    reasoning_tokens: int


class TurnStorage(NamedTuple):
    """Storage parent of a turn's tokens, and the turn's routed experts."""

    parent: RecordedTurn | None
    base_len: int
    prompt: _Hash
    """sha256 over the prompt as little-endian int32."""
    experts: BlobRef | None = None
    layout: ExpertsLayout | None = None


def build_records(
    turn: AdmittedTurn, draft: Draft, said: RenderedOutput, stored: TurnStorage, *, gone: bool, now: float
) -> tuple[TurnCompleted, TokenSnapshot, RecordedTurn]:
    """Return both records of a sampled turn, and the turn for the conversation. `gone`: every client has disconnected;
    `now`: event-loop time."""
    request, plan = turn.request.recorded, turn.plan
    raw = request.raw[plan.kept :]
    new_raw = [by_reference(one) for one in raw] if plan.images else raw
    completed = _build_completed(turn, draft, said, new_raw, gone=gone, now=now)
    snapshot = _snapshot(turn, draft, stored)
    kept = RecordedTurn.from_records(
        completed,
        snapshot,
        base=plan.base,
        parent=stored.parent,
        hashed=extend_hash(stored.prompt, draft.ids),
        new_raw=new_raw,
        new=request.messages[plan.kept :],
        response_raw=said.response,
    )
    return completed, snapshot, kept


def _build_completed(
    admitted: AdmittedTurn, draft: Draft, said: RenderedOutput, new_raw: list[Any], *, gone: bool, now: float
) -> TurnCompleted:
    """Build the record that people and dashboards read."""
    session, plan, turn = admitted.session, admitted.plan, admitted.id
    request, started = admitted.request.recorded, session.started
    first, last = draft.versions()
    other_tools = plan.base is None or plan.base.tools_sha256 != plan.tools_sha256
    changed = request.messages[plan.kept - 1].changed if plan.base else None
    return TurnCompleted(
        event_id=turn_event_id("TurnCompleted", session.id, turn.epoch, turn.index),
        run_id=started.run_id,
        group_id=started.group_id,
        session_id=session.id,
        floor=started.floor,
        turn=turn,
        request_sha256=request.sha256,
        api=request.api,
        agent_path=plan.agent_path,
        base_turn=plan.base.id if plan.base else None,
        system_sha256=system_digest(request.messages),
        tools_sha256=plan.tools_sha256,
        base_echo=orjson.dumps(changed) if changed else None,
        new_messages=orjson.dumps(new_raw),
        tools=orjson.dumps(request.tools) if request.tools and other_tools else None,
        response=orjson.dumps(said.response),
        finish_reason=_finish_reason(draft, said),
        stopped_by=said.stopped_by,
        ill_formed_calls=said.ill_formed,
        aborted=gone or draft.finish == "error",
        prompt_tokens=len(plan.prompt),
        output_tokens=len(draft.ids),
        reasoning_tokens=said.reasoning_tokens,
        cached_tokens=draft.cached_tokens,
        weight_version_first=first,
        weight_version_last=last,
        queue_s=draft.queue_s,
        first_token_s=draft.first_token_s,
        total_s=now - draft.started,
        waited_s=max(0.0, now - draft.started - draft.served_s),
        engine_id=draft.engine_id,
        traceparent=admitted.traceparent,
        summary_turn=plan.summary,
    )


def _snapshot(admitted: AdmittedTurn, draft: Draft, stored: TurnStorage) -> TokenSnapshot:
    """Build the record that training reads: the delta to the storage parent, and what the policy sampled. The output of
    an auxiliary model is appended to the delta as context, so that it has no weight version and trains under no
    setting."""
    session, plan, turn = admitted.session, admitted.plan, admitted.id
    started, prompt = session.started, stored.prompt
    delta = plan.prompt[stored.base_len :]
    sampled = draft
    if not plan.policy:
        delta = np.concatenate((delta, np.array(draft.ids, dtype=np.int32)))
        prompt, sampled = extend_hash(prompt, draft.ids), Draft(draft.started)
    return TokenSnapshot(
        event_id=turn_event_id("TokenSnapshot", session.id, turn.epoch, turn.index),
        run_id=started.run_id,
        group_id=started.group_id,
        session_id=session.id,
        floor=started.floor,
        turn=turn,
        parent_turn=stored.parent.id if stored.parent else None,
        base_len=stored.base_len,
        delta_ids=pack_int32s(delta),
        output_ids=pack_int32s(sampled.ids),
        output_logprobs=pack_float32s(sampled.logprobs),
        version_spans=tuple(sampled.spans),
        boundary=plan.boundary,
        boundary_reason=plan.reason,
        prompt_sha256=prompt.hexdigest(),
        temperature=started.sampling.temperature,
        logprob_kind="at_temperature" if started.sampling.temperature else "raw",
        experts=stored.experts,
        experts_layout=stored.layout,
        images=tuple(image for image in plan.images if image.position + image.tokens > stored.base_len),
        constrained=plan.policy and plan.grammar is not None,
        redacted=admitted.redacted,
    )


def _finish_reason(draft: Draft, said: RenderedOutput) -> FinishReason:
    finish = "stop" if draft.finish == "length" and said.stopped_by is not None else draft.finish
    if finish == "stop" and said.response.get("tool_calls"):
        return FinishReason.tool_calls
    return FinishReason(finish)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Runs turns; shared by all sessions."""

    planner: Planner
    sampler: Sampler
    events: EventLog
    blobs: Blobs
    redaction: RequestRedactor | None = None
    """Masks what records must not show; None if redaction is off."""
    sides: Mapping[str, Sampler] = field(default_factory=dict)
    """Samplers of auxiliary models, by the pattern of the model names that they serve."""

    def side(self, request: TurnRequest) -> Sampler | None:
        """Return the sampler of the auxiliary model that a request names, or None for the policy."""
        return next((one for pattern, one in self.sides.items() if fnmatchcase(request.model, pattern)), None)

    @property
    def prompts(self) -> Prompts:
        """Tokenizer and chat template."""
        return self.planner.prompts

    async def plan(
        self, session: GatewaySession, request: TurnRequest, claims: Claims, agent_path: str | None = None
    ) -> TurnPlan:
        """Plan a turn that may begin, and note an error's code as `session.refused`. Raises BadRequest,
        ImagesNotServed, StrayImageToken, ContextOverflow, TurnsSpent, TooMany."""
        try:
            _check_turns(session, claims)
            plan = await self.planner.plan(session, request, claims, agent_path, policy=self.side(request) is None)
        except GatewayError as error:
            session.refused = error.code
            raise
        session.refused = ""
        return plan

    def start(
        self, session: GatewaySession, request: TurnRequest, claims: Claims, plan: TurnPlan, traceparent: str = ""
    ) -> Running:
        """Admit a turn and start it. `traceparent`: see AdmittedTurn. Raises TurnsSpent, SessionEnded, TooMany before
        anything is sampled."""
        _check_turns(session, claims)  # others may have begun since it was planned
        side = self.side(request)
        wanted = (
            WeightRequirement() if side else WeightRequirement(claims.min_weight_version, claims.pin_weight_version)
        )
        running = Running(session.admit())
        session.running[running.id.index] = running
        turn = AdmittedTurn(session, request, plan, running.id, traceparent)
        running.task = asyncio.create_task(self._run(turn, side or self.sampler, wanted, running))
        running.task.add_done_callback(lambda task: _on_turn_end(session, running, task))
        return running

    async def _run(
        self, admitted: AdmittedTurn, sampler: Sampler, wanted: WeightRequirement, running: Running
    ) -> RecordedTurn:
        session, request, plan = admitted.session, admitted.request, admitted.plan
        progress = self._follower(admitted, running) if request.stream else lambda _: None
        routing = self.planner.routing
        experts = routing.turn(plan.stored[1]) if routing is not None and plan.stored is not None else None
        draft = Draft(running.began)
        running.own_s = lambda: draft.own_s(sampler.engines.clock())
        await sampler.sample(
            session.id,
            plan.prompt,
            session.started.sampling,
            max_new_tokens=plan.max_new_tokens,
            wanted=wanted,
            stream=request.stream,
            gone=running.gone,
            progress=progress,
            experts=experts,
            images=plan.shown,
            stop=request.stop,
            grammar=plan.grammar,
            stopped=lambda ids: cut_at_stop(self.prompts.tokens.decode(ids), request.stop)[1] is not None,
            draft=draft,
        )
        running.cut_off = draft.finish in CUT_OFF
        turn = await self._record(admitted, draft, running, experts)
        if draft.failure is not None:
            raise draft.failure
        return turn

    async def _record(
        self, admitted: AdmittedTurn, draft: Draft, running: Running, experts: TurnRows | None
    ) -> RecordedTurn:
        """Store blobs, write both records, and add the turn to the conversation once both are acknowledged. Raises
        NotRecorded, ErasedSession."""
        told, sampled = self._parse_output(admitted, draft), draft
        admitted, draft, said = self._redact(admitted, draft, told)
        session, request, plan = admitted.session, admitted.request.recorded, admitted.plan
        with RECORD_S.time():
            try:
                stored = await self._store_experts(session, plan, draft, None if admitted.redacted else experts)
                gone, now = running.gone.is_set(), asyncio.get_running_loop().time()
                completed, snapshot, turn = build_records(admitted, draft, said, stored, gone=gone, now=now)
                records = [self._with_counts(completed), snapshot]
                for event in records:
                    self.events.check_not_erased(event)
                kept = [await externalize_payloads(event, self.blobs) for event in records]
                await asyncio.gather(*[await self.events.submit(event) for event in kept])
            except (LogError, BlobError) as error:
                raise NotRecorded(f"the turn could not be recorded: {error}") from error
            except SessionIsErased as error:
                raise ErasedSession(str(error)) from error
        running.parts = told.parts
        if admitted.redacted:
            turn.answer_told = TurnAnswer(
                told.response, sampled.ids, float32s(pack_float32s(sampled.logprobs)).tolist(), told.stopped_by
            )
        session.conversation.record(turn, plan.prompt[plan.known.depth :], draft.ids, plan.known)
        for member in (request.messages[plan.kept - 1].changed if plan.base else None) or ():
            CHANGED.labels(member).inc()
        TURNS.labels(turn.finish_reason.value, plan.boundary.value, plan.reason).inc()
        PROMPT_TOKENS.inc(len(plan.prompt))
        OUTPUT_TOKENS.inc(len(draft.ids))
        CACHED_TOKENS.inc(draft.cached_tokens)
        return turn

    def _redact(
        self, admitted: AdmittedTurn, draft: Draft, said: RenderedOutput
    ) -> tuple[AdmittedTurn, Draft, RenderedOutput]:
        """Return the turn as records may show it. Where they may not show a text, they show none of its tokens."""
        if self.redaction is None:
            return admitted, draft, said
        response = self.redaction.response(admitted.request, said.response)
        stopped_by = self.redaction.stop(admitted.request, said.stopped_by)
        plan, seen = admitted.plan, admitted.request.record is not None
        sampled = (response, stopped_by) != (said.response, said.stopped_by)
        if not seen and not sampled and not self.redaction.shows_secret(self.prompts.tokens.decode(draft.ids)):
            return admitted, draft, said
        shown = admitted._replace(plan=withhold_prompt(plan) if seen else plan, redacted=True)
        return shown, withhold_output(draft), said._replace(response=response, stopped_by=stopped_by)

    def _with_counts(self, completed: TurnCompleted) -> TurnCompleted:
        """Return the record with its number of masked places."""
        if self.redaction is None:
            return completed
        return replace(completed, redacted=self.redaction.counts(completed))

    async def _store_experts(
        self, session: GatewaySession, plan: TurnPlan, draft: Draft, experts: TurnRows | None
    ) -> TurnStorage:
        """Choose the storage parent, and put the turn's routed experts into the store. Raises BlobError."""
        conversation, new = session.conversation, plan.prompt[plan.known.depth :]
        prompt = extend_hash(conversation.hash_path(plan.known), new)
        if plan.stored is None:
            return TurnStorage(*conversation.stored_against(new, plan.known, plan.images), prompt)
        rows = None if experts is None else experts.rows(len(plan.prompt) + len(draft.ids))
        if rows is None:
            WITHOUT_EXPERTS.inc()
            return TurnStorage(*plan.stored, prompt)
        content, layout = pack_experts(rows)
        return TurnStorage(*plan.stored, prompt, await self.blobs.put(content, media_type=MEDIA_TYPE), layout)

    def _follower(self, admitted: AdmittedTurn, running: Running) -> Callable[[list[int]], None]:
        """Return a callback that parses new ids for clients that stream."""
        text, parser, read = TextStream(self.prompts.tokens), self._parser(admitted), 0
        running.parts = parser.parts

        def progress(ids: list[int]) -> None:
            nonlocal read
            if ids:
                sure = certain(text.push(ids), admitted.request.stop)
                parser.push(sure[read:])
                read = len(sure)
                running.wake()

        return progress

    def _parser(self, admitted: AdmittedTurn) -> OutputParser:
        tools = admitted.request.tools or () if admitted.request.calls else ()
        calls = self.planner.calls
        if calls is not None and calls.whole is None and not tools:
            calls = None
        return OutputParser(calls, self.planner.thinking, self.planner.inside(admitted.plan.prompt), tools)

    def _parse_output(self, admitted: AdmittedTurn, draft: Draft) -> RenderedOutput:
        """Parse the output's text, without whatever ended it."""
        session, request, turn = admitted.session, admitted.request, admitted.id
        ids, decode = draft.ids, self.prompts.tokens.decode
        text, stopped_by = cut_at_stop(decode(ids), request.stop) if request.stop else ("", None)
        if stopped_by is None:
            stops = session.started.sampling.stop_token_ids
            ended = draft.finish == "stop" and ids and self.prompts.ends(ids[-1], stops)
            text = decode(ids[:-1] if ended else ids)
        parser = self._parser(admitted)
        parser.push(text)
        parser.end()
        response = response_of(parser.parts, lambda at: id_of_call(session.id, turn, at))
        reasoning = self._reasoning_tokens(parser, ids)
        return RenderedOutput(response, parser.parts, stopped_by, parser.ill_formed, reasoning)

    def _reasoning_tokens(self, parser: OutputParser, ids: list[int]) -> int:
        """Return the number of ids up to the end of reasoning: 0 without reasoning, all of them if it does not end."""
        if parser.thinking is None or not any(isinstance(part, Reasoning) for part in parser.parts):
            return 0
        closing, decode = parser.thinking.closing, self.prompts.tokens.decode
        return bisect_left(range(len(ids)), True, key=lambda count: closing in decode(ids[:count]))


def _check_turns(session: GatewaySession, claims: Claims) -> None:
    """Raise TurnsSpent if the session has used the turns that its token allows."""
    if claims.max_turns and session.turns >= claims.max_turns:
        raise TurnsSpent(f"session {session.id} has used its {claims.max_turns} turns (limits.max_turns)")


def _on_turn_end(session: GatewaySession, running: Running, task: asyncio.Task[RecordedTurn]) -> None:
    session.running.pop(running.id.index, None)
    error = None if task.cancelled() else task.exception()  # retrieved here, because nobody may wait any more
    if not task.cancelled():
        session.failed = error.code if isinstance(error, GatewayError) else ""
    if error is not None:
        for key, (_, each) in list(session.by_key.items()):
            if each is running:
                del session.by_key[key]
    running.wake()
