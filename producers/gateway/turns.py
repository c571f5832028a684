"""One turn end to end: plan, sampling, parsing, both records with acks=all, then the conversation."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from turnlog.infra.blobs import BlobError, Blobs
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import LogError
from turnlog.infra.payloads import externalized
from turnlog.processors.core.experts import MEDIA_TYPE, packed
from turnlog.producers.gateway.conversation import CUT_OFF, Turn, continued
from turnlog.producers.gateway.engines import Wanted
from turnlog.producers.gateway.errors import NotRecorded
from turnlog.producers.gateway.experts import TurnRows
from turnlog.producers.gateway.generation import Draft, Sampler
from turnlog.producers.gateway.metrics import RECORD_S, TOKENS, TURNS, WITHOUT_EXPERTS
from turnlog.producers.gateway.plans import Plan, Planner
from turnlog.producers.gateway.requests import ChatRequest
from turnlog.producers.gateway.session_tokens import Claims
from turnlog.producers.gateway.sessions import Session
from turnlog.producers.gateway.tokenizer import TextStream
from turnlog.producers.gateway.tokens import Prompts
from turnlog.producers.gateway.tool_calls import parse
from turnlog.producers.gateway.turn_records import Stored, completed, recorded_turn, snapshot
from turnlog.schemas.ids import call_id
from turnlog.schemas.types import TurnId


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
    cut_off: bool = False
    """What was sampled is being recorded as a part: who asks again is given another turn."""

    def wake(self) -> None:
        """Tell those who stream."""
        self.changed.set()
        self.changed = asyncio.Event()

    def join(self) -> None:
        """A client waits for the turn. One that returns before its end finds it going on: what the engine cut off
        meanwhile is continued."""
        self.clients += 1
        self.gone.clear()

    def leave(self) -> None:
        """A client disconnected; the last one takes the engine request with it."""
        self.clients -= 1
        if self.clients <= 0:
            self.gone.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Makes turns. Shared by all sessions."""

    planner: Planner
    sampler: Sampler
    events: EventLog
    blobs: Blobs

    @property
    def prompts(self) -> Prompts:
        """Tokenizer and template."""
        return self.planner.prompts

    def start(self, session: Session, request: ChatRequest, claims: Claims, agent_path: str | None = None) -> Running:
        """Admit a turn and begin it. Raises BadRequest, ImagesNotServed, ContextOverflow, SessionEnded before anything
        is sampled."""
        plan = self.planner.plan(session, request, claims, agent_path)
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

        routing = self.planner.routing
        experts = routing.turn(plan.stored[1]) if routing is not None and plan.stored is not None else None
        draft = await self.sampler.sample(
            session.id,
            plan.prompt,
            session.started.sampling,
            max_new_tokens=plan.max_new_tokens,
            wanted=Wanted(claims.min_weight_version, claims.pin_weight_version),
            stream=request.stream,
            gone=running.gone,
            progress=progress,
            experts=experts,
            images=plan.shown,
        )
        running.cut_off = draft.finish in CUT_OFF
        turn = await self._record(session, request, plan, draft, running, experts)
        if draft.failure is not None:
            raise draft.failure
        return turn

    async def _record(
        self,
        session: Session,
        request: ChatRequest,
        plan: Plan,
        draft: Draft,
        running: Running,
        experts: TurnRows | None,
    ) -> Turn:
        """Blobs and both records acknowledged, then the turn in the conversation. Raises NotRecorded."""
        response = self._response(session, running.id, draft)
        with RECORD_S.time():
            try:
                stored = await self._stored(session, plan, draft, experts)
                turn = recorded_turn(
                    request, plan, draft, running.id, response, gone=running.gone.is_set(), stored=stored
                )  # fmt: skip
                records = (
                    completed(session, request, plan, draft, turn),
                    snapshot(session, plan, draft, turn, stored),
                )  # fmt: skip
                kept = [await externalized(event, self.blobs) for event in records]
                await asyncio.gather(*map(self.events.append, kept))
            except (LogError, BlobError) as error:
                raise NotRecorded(f"the turn could not be recorded: {error}") from error
        session.conversation.record(turn, plan.prompt[plan.known.depth :], draft.ids, plan.known)
        TURNS.labels(turn.finish_reason.value, plan.boundary.value, plan.reason).inc()
        TOKENS.labels("prompt").inc(len(plan.prompt))
        TOKENS.labels("output").inc(len(draft.ids))
        TOKENS.labels("cached").inc(draft.cached_tokens)
        return turn

    async def _stored(self, session: Session, plan: Plan, draft: Draft, experts: TurnRows | None) -> Stored:
        """The storage parent, and the turn's routed experts in the store. Raises BlobError."""
        conversation, new = session.conversation, plan.prompt[plan.known.depth :]
        prompt = continued(conversation.hashed(plan.known), new)
        if plan.stored is None:
            return Stored(*conversation.stored_against(new, plan.known, plan.images), prompt)
        rows = None if experts is None else experts.rows(len(plan.prompt) + len(draft.ids))
        if rows is None:
            WITHOUT_EXPERTS.inc()
            return Stored(*plan.stored, prompt)
        content, layout = packed(rows)
        return Stored(*plan.stored, prompt, await self.blobs.put(content, media_type=MEDIA_TYPE), layout)

    def _response(self, session: Session, turn: TurnId, draft: Draft) -> dict[str, Any]:
        """The assistant message: the text without the token that ended it, tool calls taken out."""
        ids = draft.ids
        if draft.finish == "stop" and ids and self.prompts.ends(ids[-1], session.started.sampling.stop_token_ids):
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
