"""A turn from end to end: plan, sample, parse, write both records with acks=all, then update the conversation."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson
from prometheus_client import Counter, Histogram

from turnlog.infra.blobs import BlobError, Blobs, externalize_payloads
from turnlog.infra.engine import EngineImage, Grammar
from turnlog.infra.event_log import EventLog
from turnlog.infra.log import LogError
from turnlog.infra.roles.event_loop import LARGE
from turnlog.processors.core.experts import MEDIA_TYPE, pack_experts
from turnlog.processors.core.turns import Ids
from turnlog.producers.gateway import (
    BadRequest,
    ConstraintRefused,
    ContextOverflow,
    GatewayError,
    NotRecorded,
    PrefillNotServed,
    ToolsNotServed,
    TurnsSpent,
)
from turnlog.producers.gateway.conversation import RecordedTurn, TokenCursor, above, extend_hash
from turnlog.producers.gateway.dialects.dialect import IGNORED, Constraint, TurnRequest
from turnlog.producers.gateway.engines import SECONDS, Draft, Routing, Sampler, TurnRows, WeightRequirement
from turnlog.producers.gateway.images import Admitted, by_reference, check_images_alone, place_images
from turnlog.producers.gateway.messages import Message, id_of_call, response_of, system_digest, tools_digest, with_ids
from turnlog.producers.gateway.parsers.formats import only_call, only_json
from turnlog.producers.gateway.parsers.parser import (
    CallFormat,
    Delimiters,
    OutputParser,
    Part,
    Reasoning,
    certain,
    cut_at_stop,
)
from turnlog.producers.gateway.prompts import Prompts, TextStream
from turnlog.producers.gateway.rendering.shown import TemplateFeatures
from turnlog.producers.gateway.requests import Claims
from turnlog.producers.gateway.sessions import GatewaySession, Running
from turnlog.schemas.events.tasks import Purpose
from turnlog.schemas.events.turns import (
    CUT_OFF,
    Boundary,
    ExpertsLayout,
    FinishReason,
    ImageRef,
    TokenSnapshot,
    TurnCompleted,
)
from turnlog.schemas.ids import turn_event_id
from turnlog.schemas.types import BlobRef, TurnId, pack_float32s, pack_int32s

if TYPE_CHECKING:
    from hashlib import _Hash


TURNS = Counter("turnlog_gateway_turns", "Turns recorded", ("finish_reason", "boundary", "reason"))
CHANGED = Counter("turnlog_gateway_changed_echoes", "Answers that came back changed and were continued", ("member",))
TOKENS = Counter("turnlog_gateway_tokens", "Tokens of recorded turns", ("kind",))
RECORD_S = Histogram("turnlog_gateway_record_seconds", "A turn's records until acks=all", buckets=SECONDS)
WITHOUT_EXPERTS = Counter(
    "turnlog_gateway_turns_without_experts", "Turns of a mixture of experts whose engine gave no or not all rows"
)


TAIL = 32
"""Number of ids at the end of a prompt among which the mark that opens reasoning is searched."""


class Prompt(NamedTuple):
    """Prompt ids to sample from, and the images in them."""

    ids: Ids
    images: tuple[ImageRef, ...]
    known: TokenCursor
    """Cursor up to which the session already stores these ids; they are compared, checked and stored only from there
    on."""
    reason: str
    """Boundary reason to record if the ids do not extend the base."""


class TurnPlan(NamedTuple):
    """Submission of a turn to an engine, and its prefix relation to the base."""

    base: RecordedTurn | None
    kept: int
    """Number of messages that the base covers."""
    prompt: Ids
    known: TokenCursor
    """Cursor up to which the session already stores the prompt."""
    images: tuple[ImageRef, ...]
    """All images in the prompt, ordered by position."""
    shown: tuple[EngineImage, ...]
    """The same images in the form that engines take."""
    boundary: Boundary
    reason: str
    tools_sha256: str
    max_new_tokens: int
    agent_path: str | None
    grammar: Grammar | None
    policy: bool
    """True if the policy samples this turn. False: an auxiliary model does, and its output is untrained context for
    later turns of the policy."""
    stored: tuple[RecordedTurn | None, int] | None
    """Storage parent and base_len if they must be known before sampling, because an engine returns the routed experts
    of the turn's own positions only; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans turns; shared by all sessions."""

    prompts: Prompts
    window: int
    """Number of tokens that both the model and the engines can attend to."""
    history: str
    """Setting [gateway] history."""
    constraints: str = "refuse"
    """Setting [gateway] constraints."""
    routing: Routing | None = None
    """Routing shape of a mixture of experts whose routed experts are recorded; else None."""
    image_token: int | None = None
    shown: TemplateFeatures
    """Tools, calls and results, as far as the chat template writes them."""
    unread: bool = False
    """True if no known format reads the calls that the template writes."""
    calls: CallFormat | None = None
    """Format of tool calls; None: all output stays text."""
    thinking: Delimiters | None = None
    """Marks of reasoning; None if the model does not mark it."""

    async def plan(
        self,
        session: GatewaySession,
        request: TurnRequest,
        claims: Claims,
        agent_path: str | None,
        *,
        policy: bool = True,
    ) -> TurnPlan:
        """Plan a turn. Raises BadRequest, ConstraintRefused, ImagesNotServed, ToolsNotServed, StrayImageToken,
        ContextOverflow, TooMany."""
        _check_prefill(request.messages[-1])
        self._check_tools(request, trains=policy and session.started.purpose is Purpose.train)
        window = self._window(claims)
        base, kept, tools_sha256, prompt = await self._prompt(session, request, window)
        ids, images, known, reason = prompt
        check_images_alone(ids, self.image_token, images)
        conversation = session.conversation
        if base is not None and conversation.extends(base, ids, images, known):
            boundary, reason = Boundary.append, "append"
        else:
            boundary = Boundary.root if base is None else Boundary.branch
        limit = self._limit(session, request, window, prompt)
        grammar = self._grammar(request, ids, trains=policy and session.started.purpose is Purpose.train)
        stored = None
        if self.routing is not None and policy:
            stored = conversation.stored_against(ids[known.depth :], known, images, covered=True)
        shown = tuple(EngineImage(request.images[one.image.sha256].url, one.position, one.tokens) for one in images)
        return TurnPlan(
            base, kept, ids, known, images, shown, boundary, reason, tools_sha256, limit, agent_path, grammar, policy,
            stored,
        )  # fmt: skip

    def _check_tools(self, request: TurnRequest, *, trains: bool) -> None:
        """Raise ToolsNotServed if the template omits tool results, or if a training turn offers tools whose calls
        nobody reads: the agent would end at its first call, and exactly that would be trained. A template that omits
        the tools is only counted, because a model may know them from training or from a system text."""
        if trains and self.unread and request.tools:
            raise ToolsNotServed(
                "no known format reads the calls that the model's chat template writes, so that every call would be "
                "the agent's last word: name the format by [gateway] tool_calls; `none` there gives calls as text to "
                "agents that read them themselves",
                param="tools",
            )
        if request.tools and self.shown.tools is False:
            IGNORED.labels("tools_not_written").inc()
        if self.shown.results is False and any(one.role == "tool" for one in request.messages):
            raise ToolsNotServed(
                "the model's chat template does not write the results of tools, so that the model would never see "
                "them: send them as the user's messages, or give the model's folder a template that writes them",
                param="messages",
            )

    def _grammar(self, request: TurnRequest, prompt: Ids, *, trains: bool) -> Grammar | None:
        """Return the grammar to which an engine must hold the output, or None. A turn that trains gets none, because
        log-probs of tokens that a grammar chose among are not the policy's. Raises ConstraintRefused."""
        grammar = None
        for one in request.constraints:
            said = None if trains else self._said_by(one, request.tools or (), prompt)
            if said is not None:
                grammar = grammar or said  # a required call comes first: its output has a shape of its own
            elif self.constraints == "refuse":
                why = (
                    "recorded log-probs are the policy's own"
                    if trains
                    else "no grammar of engines says it, of these tools and of calls as this model writes them"
                )
                raise ConstraintRefused(
                    f"{one.field} would constrain what is sampled, and {why}: leave it out"
                    f"{' or send `auto`' if one.field == 'tool_choice' else ''}, or have it ignored and "
                    'counted by [gateway] constraints = "ignore"',
                    param=one.field,
                )
            else:
                IGNORED.labels(one.field).inc()
        return grammar

    def _said_by(self, one: Constraint, tools: Sequence[Any], prompt: Ids) -> Grammar | None:
        if one.json_schema is not None:
            if self.thinking is None:
                return Grammar("json_schema", one.json_schema)
            return Grammar("structural_tag", only_json(one.json_schema, self.thinking, inside=self.inside(prompt)))
        if one.tool is None:
            return None
        tag = only_call(self.calls, tools, one.tool, self.thinking, inside=self.inside(prompt))
        return None if tag is None else Grammar("structural_tag", tag)

    def inside(self, prompt: Ids) -> bool:
        """Return whether the model is still reasoning at the end of a prompt."""
        if self.thinking is None:
            return False
        return self.prompts.tokens.literal(prompt[-TAIL:].tolist()).rstrip().endswith(self.thinking.opening)

    async def prompt_tokens(self, session: GatewaySession, request: TurnRequest, claims: Claims) -> int:
        """Return the length in tokens of the prompt that a turn would submit now. Raises BadRequest, TooMany, and
        ContextOverflow if a lower bound of the length already exceeds the window."""
        *_, prompt = await self._prompt(session, request, self._window(claims))
        return len(prompt.ids)

    def _window(self, claims: Claims) -> int:
        return min(self.window, claims.max_context_tokens or self.window)

    def _check_length(self, request: TurnRequest, window: int) -> None:
        """Raise ContextOverflow before anything is rendered if a lower bound of the prompt's length exceeds the window.
        No template writes a message or a tool in less than a token, and no token holds more than `longest` characters.
        The text of assistants does not count, because templates drop some of it."""
        least = max(len(request.messages), len(request.tools or ()))
        if most := self.prompts.tokens.longest:
            given = sum(one.characters for one in request.messages if one.role != "assistant")
            least = max(least, given // most)
        if least >= window:
            raise ContextOverflow(least, window, counted=False)

    def _limit(self, session: GatewaySession, request: TurnRequest, window: int, prompt: Prompt) -> int:
        """Return how many tokens may be sampled. Raises BadRequest, ContextOverflow."""
        vocabulary, new = self.prompts.tokens.vocabulary, prompt.ids[prompt.known.depth :]
        if len(new) and not 0 <= new.min() <= new.max() < vocabulary:
            raise BadRequest(
                f"the prompt has token {new.max()}, outside the model's vocabulary of {vocabulary}: tokenizer and "
                "model in [model] path do not belong together",
                param="messages",
            )
        room = window - len(prompt.ids) - 1
        if room < 1:
            raise ContextOverflow(len(prompt.ids), window)
        return min(request.max_new_tokens or room, session.started.sampling.max_new_tokens, room)

    async def _prompt(
        self, session: GatewaySession, request: TurnRequest, window: int
    ) -> tuple[RecordedTurn | None, int, str, Prompt]:
        """Return the base, the number of messages that it covers, the digest of the tools, and the prompt. Slow work
        runs off the event loop, and reads only what the loop never changes: known messages and turns."""
        conversation = session.conversation

        def find_base() -> tuple[RecordedTurn | None, int, str, str]:
            self._check_length(request, window)
            base, kept = conversation.base_of(request.messages, request.base)
            tools_sha256 = tools_digest(request.tools)
            reason = "" if base is not None else conversation.reason_of_root(request.messages)
            if base is not None and base.tools_sha256 != tools_sha256:
                reason = "tools_changed"
            return base, kept, tools_sha256, reason

        base, kept, tools_sha256, reason = await session.work(request.size, find_base)
        if reason or base is None:
            return base, kept, tools_sha256, await self._full(session, request, reason)
        if kept == len(request.messages):
            prompt = self._reopen_prompt(session, base)
        else:
            prompt = await self._extend_prompt(session, request, base, kept)
        if self.history == "template":
            whole, literal = await self._full(session, request, "history_rewritten"), self.prompts.tokens.literal
            texts = [one.ids.tolist() for one in (whole, prompt)]
            if await session.work(request.size, lambda: literal(texts[0]) != literal(texts[1])):
                prompt = whole
        return base, kept, tools_sha256, prompt

    def _reopen_prompt(self, session: GatewaySession, base: RecordedTurn) -> Prompt:
        """Return the prompt for a request whose last message is the base's answer: it continues where the base ended,
        before the id that ended it."""
        held, place = session.conversation.tokens(base), base.place
        stopped = base.finish_reason is FinishReason.stop and base.output_tokens
        if stopped and self.prompts.ends(base.last, session.started.sampling.stop_token_ids):
            held, place = held[:-1], next(above(place, base.total - 1))
        return Prompt(held, base.images, place, "reopened")

    async def _extend_prompt(
        self, session: GatewaySession, request: TurnRequest, base: RecordedTurn, kept: int
    ) -> Prompt:
        """Return the base's tokens followed by the new messages. Where the template cannot append these, render the
        whole conversation instead."""

        def render_new() -> tuple[Ids, tuple[ImageRef, ...]] | None:
            new = self._messages_with_ids(request)[kept:]
            more = self.prompts.continuation(base.last, new, request.tools, session.began)
            if more is None:
                return None
            more, images = place_images(more, base.total, self.image_token, _pictures(new, request.images))
            return np.array(more, dtype=np.int32), images

        found = await session.work(self._size(request), render_new)
        if found is None:
            return await self._full(session, request, "template_not_incremental")
        held = np.concatenate((session.conversation.tokens(base), found[0]))
        return Prompt(held, base.images + found[1], base.place, "append")

    def _size(self, request: TurnRequest) -> int:
        """Return the size that decides whether the request is rendered in a thread. A template that was slow before may
        be slow again, so it always counts as large."""
        return max(request.size, LARGE) if self.prompts.template.slow else request.size

    def _messages_with_ids(self, request: TurnRequest) -> Sequence[Message]:
        ids = self.calls.ids if self.calls is not None else None
        return with_ids(request.messages, ids) if ids else request.messages

    async def _full(self, session: GatewaySession, request: TurnRequest, reason: str) -> Prompt:
        if self.shown.calls is False and any("tool_calls" in one.template for one in request.messages):
            raise ToolsNotServed(
                "the model's chat template does not write the calls of the assistant's messages, and these have to be "
                f"written anew ({reason}): give the model's folder a template that writes them",
                param="messages",
            )

        def render_all() -> tuple[Ids, tuple[ImageRef, ...]]:
            ids = self.prompts.full(self._messages_with_ids(request), request.tools, session.began)
            ids, images = place_images(ids, 0, self.image_token, _pictures(request.messages, request.images))
            return np.array(ids, dtype=np.int32), images

        ids, images = await session.work(self._size(request), render_all)
        return Prompt(ids, images, session.conversation.strands.start, reason)


def _check_prefill(last: Message) -> None:
    """Raise PrefillNotServed if the last message is the assistant's and has tool calls or images."""
    if last.role == "assistant" and (last.pictures or last.template.get("tool_calls")):
        raise PrefillNotServed(
            "the last message is the assistant's and has tool calls or images: answer its calls with tool messages; "
            "only text is continued",
            param="messages",
        )


def _pictures(messages: Sequence[Message], admitted: Mapping[str, Admitted]) -> list[Admitted]:
    return [admitted[picture.ref.sha256] for one in messages for picture in one.pictures]


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
    session: GatewaySession,
    request: TurnRequest,
    plan: TurnPlan,
    draft: Draft,
    turn: TurnId,
    said: RenderedOutput,
    stored: TurnStorage,
    *,
    gone: bool,
    now: float,
) -> tuple[TurnCompleted, TokenSnapshot, RecordedTurn]:
    """Return both records of a sampled turn, and the turn for the conversation. `gone`: every client has disconnected;
    `now`: event-loop time."""
    raw = request.raw[plan.kept :]
    new_raw = [by_reference(one) for one in raw] if plan.images else raw
    completed = _build_completed(session, request, plan, draft, turn, said, new_raw, gone=gone, now=now)
    snapshot = _snapshot(session, plan, draft, turn, stored)
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
    session: GatewaySession,
    request: TurnRequest,
    plan: TurnPlan,
    draft: Draft,
    turn: TurnId,
    said: RenderedOutput,
    new_raw: list[Any],
    *,
    gone: bool,
    now: float,
) -> TurnCompleted:
    """Build the record that people and dashboards read."""
    started = session.started
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
        traceparent=request.traceparent,
    )


def _snapshot(
    session: GatewaySession, plan: TurnPlan, draft: Draft, turn: TurnId, stored: TurnStorage
) -> TokenSnapshot:
    """Build the record that training reads: the delta to the storage parent, and what the policy sampled. The output of
    an auxiliary model is appended to the delta as context, so that it has no weight version and trains under no
    setting."""
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

    def start(self, session: GatewaySession, request: TurnRequest, claims: Claims, plan: TurnPlan) -> Running:
        """Admit a turn and start it. Raises TurnsSpent, SessionEnded, TooMany before anything is sampled."""
        _check_turns(session, claims)  # others may have begun since it was planned
        side = self.side(request)
        wanted = (
            WeightRequirement() if side else WeightRequirement(claims.min_weight_version, claims.pin_weight_version)
        )
        running = Running(session.admit())
        session.running[running.id.index] = running
        running.task = asyncio.create_task(self._run(session, request, side or self.sampler, wanted, plan, running))
        running.task.add_done_callback(lambda task: _on_turn_end(session, running, task))
        return running

    async def _run(
        self,
        session: GatewaySession,
        request: TurnRequest,
        sampler: Sampler,
        wanted: WeightRequirement,
        plan: TurnPlan,
        running: Running,
    ) -> RecordedTurn:
        progress = self._follower(request, plan, running) if request.stream else lambda _: None
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
        turn = await self._record(session, request, plan, draft, running, experts)
        if draft.failure is not None:
            raise draft.failure
        return turn

    async def _record(
        self,
        session: GatewaySession,
        request: TurnRequest,
        plan: TurnPlan,
        draft: Draft,
        running: Running,
        experts: TurnRows | None,
    ) -> RecordedTurn:
        """Store blobs, write both records, and add the turn to the conversation once both are acknowledged. Raises
        NotRecorded."""
        said = self._parse_output(session, request, plan, running.id, draft)
        with RECORD_S.time():
            try:
                stored = await self._store_experts(session, plan, draft, experts)
                gone, now = running.gone.is_set(), asyncio.get_running_loop().time()
                *records, turn = build_records(
                    session, request, plan, draft, running.id, said, stored, gone=gone, now=now
                )
                kept = [await externalize_payloads(event, self.blobs) for event in records]
                await asyncio.gather(*map(self.events.append, kept))
            except (LogError, BlobError) as error:
                raise NotRecorded(f"the turn could not be recorded: {error}") from error
        running.parts = said.parts
        session.conversation.record(turn, plan.prompt[plan.known.depth :], draft.ids, plan.known)
        for member in (request.messages[plan.kept - 1].changed if plan.base else None) or ():
            CHANGED.labels(member).inc()
        TURNS.labels(turn.finish_reason.value, plan.boundary.value, plan.reason).inc()
        TOKENS.labels("prompt").inc(len(plan.prompt))
        TOKENS.labels("output").inc(len(draft.ids))
        TOKENS.labels("cached").inc(draft.cached_tokens)
        return turn

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

    def _follower(self, request: TurnRequest, plan: TurnPlan, running: Running) -> Callable[[list[int]], None]:
        """Return a callback that parses new ids for clients that stream."""
        text, parser, read = TextStream(self.prompts.tokens), self._parser(request, plan), 0
        running.parts = parser.parts

        def progress(ids: list[int]) -> None:
            nonlocal read
            if ids:
                sure = certain(text.push(ids), request.stop)
                parser.push(sure[read:])
                read = len(sure)
                running.wake()

        return progress

    def _parser(self, request: TurnRequest, plan: TurnPlan) -> OutputParser:
        tools = request.tools or () if request.calls else ()
        calls = self.planner.calls
        if calls is not None and calls.whole is None and not tools:
            calls = None
        return OutputParser(calls, self.planner.thinking, self.planner.inside(plan.prompt), tools)

    def _parse_output(
        self, session: GatewaySession, request: TurnRequest, plan: TurnPlan, turn: TurnId, draft: Draft
    ) -> RenderedOutput:
        """Parse the output's text, without whatever ended it."""
        ids, decode = draft.ids, self.prompts.tokens.decode
        text, stopped_by = cut_at_stop(decode(ids), request.stop) if request.stop else ("", None)
        if stopped_by is None:
            stops = session.started.sampling.stop_token_ids
            ended = draft.finish == "stop" and ids and self.prompts.ends(ids[-1], stops)
            text = decode(ids[:-1] if ended else ids)
        parser = self._parser(request, plan)
        parser.push(text)
        parser.end()
        response = response_of(
            parser.parts, lambda at: id_of_call(session.id, turn, at)
        )  # fmt: skip
        return RenderedOutput(
            response, parser.parts, stopped_by, parser.ill_formed, self._reasoning_tokens(parser, ids)
        )

    def _reasoning_tokens(self, parser: OutputParser, ids: list[int]) -> int:
        """Return the number of ids up to the end of reasoning: 0 without reasoning, all of them if it does not end."""
        if parser.thinking is None or not any(isinstance(part, Reasoning) for part in parser.parts):
            return 0
        closing, decode = parser.thinking.closing, self.prompts.tokens.decode
        return bisect_left(range(len(ids)), True, key=lambda count: closing in decode(ids[:count]))


def _check_turns(session: GatewaySession, claims: Claims) -> None:
    """Raise TurnsSpent if the session has used the turns that its token allows."""
    if claims.max_turns and session.turns >= claims.max_turns:
        raise TurnsSpent(f"session {session.id} has had its {claims.max_turns} turns: limits.max_turns")


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
