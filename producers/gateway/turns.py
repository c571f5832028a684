"""One turn end to end: kinship and prompt, sampling, parsing, both records with acks=all, then the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from turnlog.infra.blobs import Blobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import LogError
from turnlog.infra.payloads import externalized
from turnlog.producers.gateway.conversation import Strand, Turn, prompt_sha256
from turnlog.producers.gateway.engines import Wanted
from turnlog.producers.gateway.errors import BadRequest, ContextOverflow, NotRecorded
from turnlog.producers.gateway.generation import Draft, Sampler
from turnlog.producers.gateway.messages import CHAIN_START, chained, message, system_digest, tools_digest
from turnlog.producers.gateway.metrics import RECORD_S, TOKENS, TURNS
from turnlog.producers.gateway.requests import ChatRequest
from turnlog.producers.gateway.session_tokens import Claims
from turnlog.producers.gateway.sessions import Session
from turnlog.producers.gateway.tokenizer import TextStream
from turnlog.producers.gateway.tokens import Prompts
from turnlog.producers.gateway.tool_calls import parse
from turnlog.schemas.events.turns import Boundary, FinishReason, TokenSnapshot, TurnCompleted
from turnlog.schemas.ids import call_id, turn_event_id
from turnlog.schemas.types import TurnId, pack_float32s, pack_int32s


class Plan(NamedTuple):
    """What is submitted, and how it relates to the base."""

    base: Turn | None
    kept: int
    """Messages that the base covers."""
    prompt: list[int]
    boundary: Boundary
    reason: str
    tools_sha256: str
    max_new_tokens: int


@dataclass(slots=True)
class Running:
    """A turn that is not on the log yet. Several clients may wait for it (repeats under one Idempotency-Key)."""

    id: TurnId
    task: asyncio.Task[Turn] = field(init=False)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Every client has left."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Replaced at each change of `text`, after it was set."""
    text: str = ""
    """Output so far, up to the last whole character."""
    clients: int = 0

    def wake(self) -> None:
        """Tell those who stream."""
        self.changed.set()
        self.changed = asyncio.Event()

    def leave(self) -> None:
        """A client disconnected; the last one takes the engine request with it."""
        self.clients -= 1
        if self.clients <= 0:
            self.gone.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Makes turns. Shared by all sessions."""

    prompts: Prompts
    sampler: Sampler
    events: EventLog
    blobs: Blobs
    window: int
    """Tokens that model and engines can attend to."""
    history: str
    """[gateway] history"""

    def start(self, session: Session, request: ChatRequest, claims: Claims) -> Running:
        """Admit a turn and begin it. Raises BadRequest, ContextOverflow, SessionEnded before anything is sampled."""
        plan = self._plan(session, request, claims)
        running = Running(session.admit())
        session.running[running.id.index] = running
        running.task = asyncio.create_task(self._run(session, request, claims, plan, running))
        running.task.add_done_callback(lambda task: _ended(session, running, task))
        return running

    async def _run(self, session: Session, request: ChatRequest, claims: Claims, plan: Plan, running: Running) -> Turn:
        shown = TextStream(self.prompts.tokens) if request.stream else None

        def progress(ids: list[int]) -> None:
            if shown is not None and ids:
                running.text = shown.push(ids)
                running.wake()

        draft = await self.sampler.sample(
            session.id,
            plan.prompt,
            session.started.sampling,
            max_new_tokens=plan.max_new_tokens,
            wanted=Wanted(claims.min_weight_version, claims.pin_weight_version),
            stream=request.stream,
            gone=running.gone,
            progress=progress,
        )
        turn = await self._record(session, request, plan, draft, running)
        if draft.failure is not None:
            raise draft.failure
        return turn

    def _plan(self, session: Session, request: ChatRequest, claims: Claims) -> Plan:
        base, kept = session.conversation.base_of(request.messages)
        tools_sha256 = tools_digest(request.tools)
        prompt, reason = self._prompt(session, request, base, kept, tools_sha256)
        extends = base is not None and len(prompt) >= base.total and prompt[: base.total] == base.tokens()
        if base is not None and extends:
            boundary, reason = Boundary.append, "append"
        else:
            boundary = Boundary.root if base is None else Boundary.branch
        if prompt and not 0 <= min(prompt) <= max(prompt) < self.prompts.tokens.vocabulary:
            raise BadRequest(
                f"the prompt has token {max(prompt)}, outside the model's vocabulary of "
                f"{self.prompts.tokens.vocabulary}: tokenizer and model in [model] path do not belong together",
                param="messages",
            )
        window = min(self.window, claims.max_context_tokens or self.window)
        room = window - len(prompt) - 1
        if room < 1:
            raise ContextOverflow(
                f"This model's maximum context length is {window} tokens; the messages take {len(prompt)} of them",
                param="messages",
            )
        asked = request.max_new_tokens or room
        limit = min(asked, session.started.sampling.max_new_tokens, room)
        return Plan(base, kept, prompt, boundary, reason, tools_sha256, limit)

    def _prompt(
        self, session: Session, request: ChatRequest, base: Turn | None, kept: int, tools_sha256: str
    ) -> tuple[list[int], str]:
        """Prompt ids, and the boundary's reason if they do not extend the base."""
        if base is None:
            reason = "first"
            if session.conversation.turns:
                known = session.conversation.knows_opening(request.messages)
                reason = "history_rewritten" if known else "new_conversation"
            return self.prompts.full(request.messages, request.tools), reason
        if base.tools_sha256 != tools_sha256:
            return self.prompts.full(request.messages, request.tools), "tools_changed"
        more = self.prompts.continuation(base.last, request.messages[kept:], request.tools, tools_sha256)
        if more is None:
            return self.prompts.full(request.messages, request.tools), "template_not_incremental"
        prompt = base.tokens() + more
        if self.history == "template":
            text = self.prompts.text(request.messages, request.tools)
            if text != self.prompts.tokens.literal(prompt):
                return self.prompts.tokens.encode(text), "history_rewritten"
        return prompt, "append"

    async def _record(self, session: Session, request: ChatRequest, plan: Plan, draft: Draft, running: Running) -> Turn:
        """Both records acknowledged, then the turn in the conversation. Raises NotRecorded."""
        response = self._response(session, running.id, draft)
        turn = _turn(request, plan, draft, running, response)
        parent, base_len = session.conversation.parent_of(
            plan.prompt, plan.base, appended := plan.boundary is Boundary.append
        )
        completed = _completed(session, request, plan, draft, turn)
        snapshot = _snapshot(session, plan, draft, turn, parent, base_len)
        with RECORD_S.time():
            try:
                waits = [
                    await self.events.submit(await externalized(event, self.blobs)) for event in (completed, snapshot)
                ]
                await asyncio.gather(*waits)
            except LogError as error:
                raise NotRecorded(f"the turn could not be recorded: {error}") from error
        session.conversation.record(turn, plan.prompt, draft.ids, appended)
        TURNS.labels(turn.finish_reason.value, plan.boundary.value, plan.reason).inc()
        TOKENS.labels("prompt").inc(len(plan.prompt))
        TOKENS.labels("output").inc(len(draft.ids))
        TOKENS.labels("cached").inc(draft.cached_tokens)
        return turn

    def _response(self, session: Session, turn: TurnId, draft: Draft) -> dict[str, Any]:
        """The assistant message: the text without the token that ended it, tool calls taken out."""
        ids = draft.ids
        stops = (*session.started.sampling.stop_token_ids, self.prompts.end_of_turn)
        if draft.finish == "stop" and ids and (ids[-1] in stops or ids[-1] in self.prompts.tokens.special):
            ids = ids[:-1]
        content, calls = parse(self.prompts.tokens.decode(ids))
        response: dict[str, Any] = {"role": "assistant", "content": content or ("" if not calls else None)}
        if calls:
            response["tool_calls"] = [
                {
                    "id": call_id(session.id, turn.epoch, turn.index, at, "agent"),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(calls)
            ]
        return response


def _ended(session: Session, running: Running, task: asyncio.Task[Turn]) -> None:
    session.running.pop(running.id.index, None)
    if not task.cancelled() and task.exception() is not None:  # retrieved here, for nobody may wait any more
        for key, (_, each) in list(session.by_key.items()):
            if each is running:
                del session.by_key[key]
    running.wake()


def _finish_reason(draft: Draft, response: dict[str, Any]) -> FinishReason:
    if draft.finish == "stop" and response.get("tool_calls"):
        return FinishReason.tool_calls
    return FinishReason(draft.finish)


def _turn(request: ChatRequest, plan: Plan, draft: Draft, running: Running, response: dict[str, Any]) -> Turn:
    new = request.messages[plan.kept :]
    answer = message(response, "response")
    start = plan.base.chain if plan.base else CHAIN_START
    return Turn(
        id=running.id,
        base=plan.base,
        request_sha256=request.sha256,
        tools_sha256=plan.tools_sha256,
        system_sha256=system_digest(request.messages),
        new_raw=request.raw[plan.kept :],
        new=new,
        response_raw=response,
        response=answer,
        chain=chained(start, (*new, answer))[-1],
        finish_reason=_finish_reason(draft, response),
        aborted=running.gone.is_set() or draft.finish == "error",
        cached_tokens=draft.cached_tokens,
        output_tokens=len(draft.ids),
        versions=draft.versions(),
        strand=Strand(),
        total=len(plan.prompt) + len(draft.ids),
    )


def _completed(session: Session, request: ChatRequest, plan: Plan, draft: Draft, turn: Turn) -> TurnCompleted:
    started = session.started
    changed = plan.base is None or plan.base.tools_sha256 != plan.tools_sha256
    return TurnCompleted(
        event_id=turn_event_id("TurnCompleted", session.id, turn.id.epoch, turn.id.index),
        run_id=started.run_id,
        group_id=started.group_id,
        session_id=session.id,
        floor=started.floor,
        turn=turn.id,
        request_sha256=turn.request_sha256,
        api="chat",
        base_turn=plan.base.id if plan.base else None,
        system_sha256=turn.system_sha256,
        tools_sha256=turn.tools_sha256,
        new_messages=orjson.dumps(turn.new_raw),
        tools=orjson.dumps(request.tools) if request.tools and changed else None,
        response=orjson.dumps(turn.response_raw),
        finish_reason=turn.finish_reason,
        aborted=turn.aborted,
        prompt_tokens=len(plan.prompt),
        output_tokens=turn.output_tokens,
        cached_tokens=turn.cached_tokens,
        weight_version_first=turn.versions[0],
        weight_version_last=turn.versions[1],
        queue_s=draft.queue_s,
        first_token_s=draft.first_token_s,
        total_s=asyncio.get_running_loop().time() - draft.started,
        engine_id=draft.engine_id,
    )


def _snapshot(
    session: Session, plan: Plan, draft: Draft, turn: Turn, parent: Turn | None, base_len: int
) -> TokenSnapshot:
    started = session.started
    delta: Sequence[int] = plan.prompt[base_len:]
    return TokenSnapshot(
        event_id=turn_event_id("TokenSnapshot", session.id, turn.id.epoch, turn.id.index),
        run_id=started.run_id,
        group_id=started.group_id,
        session_id=session.id,
        floor=started.floor,
        turn=turn.id,
        parent_turn=parent.id if parent else None,
        base_len=base_len,
        delta_ids=pack_int32s(delta),
        output_ids=pack_int32s(draft.ids),
        output_logprobs=pack_float32s(draft.logprobs),
        version_spans=tuple(draft.spans),
        boundary=plan.boundary,
        boundary_reason=plan.reason,
        prompt_sha256=prompt_sha256(plan.prompt),
        temperature=started.sampling.temperature,
        logprob_kind="at_temperature" if started.sampling.temperature else "raw",
    )
