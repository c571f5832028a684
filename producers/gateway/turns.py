"""One turn end to end: plan, sampling, parsing, both records with acks=all, then the conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
from prometheus_client import Counter, Histogram

from turnlog.infra.blobs import BlobError, Blobs, externalized
from turnlog.infra.engine import EngineImage
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import LogError
from turnlog.processors.core.experts import MEDIA_TYPE, packed
from turnlog.producers.gateway import BadRequest, ContextOverflow, NotRecorded, PrefillNotServed
from turnlog.producers.gateway.conversation import CUT_OFF, Place, Turn, above, continued
from turnlog.producers.gateway.dialects.dialect import TurnRequest
from turnlog.producers.gateway.engines import SECONDS, Draft, Routing, Sampler, TurnRows, Wanted
from turnlog.producers.gateway.images import Admitted, by_reference, placed
from turnlog.producers.gateway.messages import Message, split_calls, system_digest, tools_digest
from turnlog.producers.gateway.prompts import Prompts, TextStream
from turnlog.producers.gateway.requests import Claims
from turnlog.producers.gateway.sessions import Running, Session
from turnlog.schemas.events.turns import Boundary, ExpertsLayout, FinishReason, ImageRef, TokenSnapshot, TurnCompleted
from turnlog.schemas.ids import call_id, turn_event_id
from turnlog.schemas.types import BlobRef, TurnId, pack_float32s, pack_int32s

if TYPE_CHECKING:
    from hashlib import _Hash


TURNS = Counter("turnlog_gateway_turns", "Turns recorded", ("finish_reason", "boundary", "reason"))
TOKENS = Counter("turnlog_gateway_tokens", "Tokens of recorded turns", ("kind",))
RECORD_S = Histogram("turnlog_gateway_record_seconds", "A turn's records until acks=all", buckets=SECONDS)
WITHOUT_EXPERTS = Counter(
    "turnlog_gateway_turns_without_experts", "Turns of a mixture of experts whose engine gave no or not all rows"
)


class Prompt(NamedTuple):
    """Ids that are sampled on, and the images in them."""

    ids: list[int]
    images: tuple[ImageRef, ...]
    known: Place
    """What of them is known to be held: they are compared, checked and stored from there on."""
    reason: str
    """The boundary's, if the ids do not extend the base."""


class Plan(NamedTuple):
    """What is submitted, and how it relates to the base."""

    base: Turn | None
    kept: int
    """Messages that the base covers."""
    prompt: list[int]
    known: Place
    """What of it the session is known to hold."""
    images: tuple[ImageRef, ...]
    """Every one in the prompt, by position."""
    shown: tuple[EngineImage, ...]
    """The same images for the engine."""
    boundary: Boundary
    reason: str
    tools_sha256: str
    max_new_tokens: int
    agent_path: str | None
    stored: tuple[Turn | None, int] | None
    """Storage parent and base_len, where they must be known before sampling: an engine is asked for the routed experts
    of the turn's own positions alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans turns. Shared by all sessions."""

    prompts: Prompts
    window: int
    """Tokens that model and engines can attend to."""
    history: str
    """[gateway] history"""
    routing: Routing | None = None
    """Of a mixture of experts whose routed experts are recorded."""
    image_token: int | None = None

    def plan(self, session: Session, request: TurnRequest, claims: Claims, agent_path: str | None) -> Plan:
        """Raises BadRequest, ImagesNotServed, ContextOverflow."""
        _check_prefill(request.messages[-1])
        base, kept = session.conversation.base_of(request.messages)
        tools_sha256 = tools_digest(request.tools)
        prompt = self._prompt(session, request, base, kept, tools_sha256)
        ids, images, known, reason = prompt
        conversation = session.conversation
        if base is not None and conversation.extends(base, ids, images, known):
            boundary, reason = Boundary.append, "append"
        else:
            boundary = Boundary.root if base is None else Boundary.branch
        limit = self._limit(session, request, claims, prompt)
        stored = None
        if self.routing is not None:
            stored = conversation.stored_against(ids[known.depth :], known, images, covered=True)
        shown = tuple(EngineImage(request.images[one.image.sha256].url, one.position, one.tokens) for one in images)
        return Plan(
            base, kept, ids, known, images, shown, boundary, reason, tools_sha256, limit, agent_path, stored
        )  # fmt: skip

    def _limit(self, session: Session, request: TurnRequest, claims: Claims, prompt: Prompt) -> int:
        """How many tokens may be sampled. Raises BadRequest, ContextOverflow."""
        vocabulary, new = self.prompts.tokens.vocabulary, prompt.ids[prompt.known.depth :]
        if new and not 0 <= min(new) <= max(new) < vocabulary:
            raise BadRequest(
                f"the prompt has token {max(new)}, outside the model's vocabulary of {vocabulary}: tokenizer and "
                "model in [model] path do not belong together",
                param="messages",
            )
        window = min(self.window, claims.max_context_tokens or self.window)
        room = window - len(prompt.ids) - 1
        if room < 1:
            raise ContextOverflow(
                f"This model's maximum context length is {window} tokens; the messages take {len(prompt.ids)} of them",
                param="messages",
            )
        return min(request.max_new_tokens or room, session.started.sampling.max_new_tokens, room)

    def _prompt(
        self, session: Session, request: TurnRequest, base: Turn | None, kept: int, tools_sha256: str
    ) -> Prompt:
        if base is None:
            return self._full(session, request, session.conversation.reason_of_root(request.messages))
        if base.tools_sha256 != tools_sha256:
            return self._full(session, request, "tools_changed")
        if kept == len(request.messages):
            prompt = self._reopened(session, base)
        else:
            prompt = self._continued(session, request, base, kept, tools_sha256)
        if self.history == "template":
            whole = self._full(session, request, "history_rewritten")
            if self.prompts.tokens.literal(whole.ids) != self.prompts.tokens.literal(prompt.ids):
                return whole
        return prompt

    def _reopened(self, session: Session, base: Turn) -> Prompt:
        """The last message is what the base said: it goes on where it ended, before the id that ended it."""
        held, place = session.conversation.tokens(base).tolist(), base.place
        stopped = base.finish_reason is FinishReason.stop and base.output_tokens
        if stopped and self.prompts.ends(base.last, session.started.sampling.stop_token_ids):
            held, place = held[:-1], next(above(place, base.total - 1))
        return Prompt(held, base.images, place, "reopened")

    def _continued(self, session: Session, request: TurnRequest, base: Turn, kept: int, tools_sha256: str) -> Prompt:
        """New messages behind the base; all of them rendered anew where the template cannot append these."""
        new = request.messages[kept:]
        more = self.prompts.continuation(base.last, new, request.tools, tools_sha256)
        if more is None:
            return self._full(session, request, "template_not_incremental")
        more, images = placed(more, base.total, self.image_token, _pictures(new, request.images))
        held = session.conversation.tokens(base).tolist()
        return Prompt(held + more, base.images + images, base.place, "append")

    def _full(self, session: Session, request: TurnRequest, reason: str) -> Prompt:
        ids = self.prompts.full(request.messages, request.tools)
        pictures = _pictures(request.messages, request.images)
        return Prompt(*placed(ids, 0, self.image_token, pictures), session.conversation.strands.start, reason)


def _check_prefill(last: Message) -> None:
    """Raises PrefillNotServed for an assistant's last message that is no text."""
    if last.role == "assistant" and (last.pictures or last.template.get("tool_calls")):
        raise PrefillNotServed(
            "the last message is the assistant's and has tool calls or images: answer its calls with tool messages; "
            "only text is continued",
            param="messages",
        )


def _pictures(messages: Sequence[Message], admitted: Mapping[str, Admitted]) -> list[Admitted]:
    return [admitted[picture.ref.sha256] for one in messages for picture in one.pictures]


class Stored(NamedTuple):
    """Where a turn's tokens are stored against, and its routed experts."""

    parent: Turn | None
    base_len: int
    prompt: _Hash
    """sha256 over the prompt as little-endian int32."""
    experts: BlobRef | None = None
    layout: ExpertsLayout | None = None


def recorded(
    session: Session,
    request: TurnRequest,
    plan: Plan,
    draft: Draft,
    turn: TurnId,
    response: dict[str, Any],
    stored: Stored,
    *,
    gone: bool,
    now: float,
) -> tuple[TurnCompleted, TokenSnapshot, Turn]:
    """Both records of a sampled turn, and the turn as the conversation keeps it. `gone`: every client has left;
    `now`: event loop time."""
    raw = request.raw[plan.kept :]
    new_raw = [by_reference(one) for one in raw] if plan.images else raw
    completed = _completed(session, request, plan, draft, turn, response, new_raw, gone=gone, now=now)
    snapshot = _snapshot(session, plan, draft, turn, stored)
    kept = Turn.recorded(
        completed,
        snapshot,
        base=plan.base,
        parent=stored.parent,
        hashed=continued(stored.prompt, draft.ids),
        new_raw=new_raw,
        new=request.messages[plan.kept :],
        response_raw=response,
    )
    return completed, snapshot, kept


def _completed(
    session: Session,
    request: TurnRequest,
    plan: Plan,
    draft: Draft,
    turn: TurnId,
    response: dict[str, Any],
    new_raw: list[Any],
    *,
    gone: bool,
    now: float,
) -> TurnCompleted:
    """What people and dashboards read."""
    started = session.started
    first, last = draft.versions()
    changed = plan.base is None or plan.base.tools_sha256 != plan.tools_sha256
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
        new_messages=orjson.dumps(new_raw),
        tools=orjson.dumps(request.tools) if request.tools and changed else None,
        response=orjson.dumps(response),
        finish_reason=_finish_reason(draft, response),
        aborted=gone or draft.finish == "error",
        prompt_tokens=len(plan.prompt),
        output_tokens=len(draft.ids),
        cached_tokens=draft.cached_tokens,
        weight_version_first=first,
        weight_version_last=last,
        queue_s=draft.queue_s,
        first_token_s=draft.first_token_s,
        total_s=now - draft.started,
        engine_id=draft.engine_id,
    )


def _snapshot(session: Session, plan: Plan, draft: Draft, turn: TurnId, stored: Stored) -> TokenSnapshot:
    """What training reads: the delta to the storage parent, and what the engine sampled."""
    started = session.started
    delta: Sequence[int] = plan.prompt[stored.base_len :]
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
        output_ids=pack_int32s(draft.ids),
        output_logprobs=pack_float32s(draft.logprobs),
        version_spans=tuple(draft.spans),
        boundary=plan.boundary,
        boundary_reason=plan.reason,
        prompt_sha256=stored.prompt.hexdigest(),
        temperature=started.sampling.temperature,
        logprob_kind="at_temperature" if started.sampling.temperature else "raw",
        experts=stored.experts,
        experts_layout=stored.layout,
        images=tuple(image for image in plan.images if image.position + image.tokens > stored.base_len),
    )


def _finish_reason(draft: Draft, response: dict[str, Any]) -> FinishReason:
    if draft.finish == "stop" and response.get("tool_calls"):
        return FinishReason.tool_calls
    return FinishReason(draft.finish)


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

    def start(self, session: Session, request: TurnRequest, claims: Claims, agent_path: str | None = None) -> Running:
        """Admit a turn and begin it. Raises BadRequest, ImagesNotServed, ContextOverflow, SessionEnded before anything
        is sampled."""
        plan = self.planner.plan(session, request, claims, agent_path)
        running = Running(session.admit())
        session.running[running.id.index] = running
        running.task = asyncio.create_task(self._run(session, request, claims, plan, running))
        running.task.add_done_callback(lambda task: _ended(session, running, task))
        return running

    async def _run(self, session: Session, request: TurnRequest, claims: Claims, plan: Plan, running: Running) -> Turn:
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
        request: TurnRequest,
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
                gone, now = running.gone.is_set(), asyncio.get_running_loop().time()
                *records, turn = recorded(
                    session, request, plan, draft, running.id, response, stored, gone=gone, now=now
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
        content, calls = split_calls(self.prompts.tokens.decode(ids))
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
