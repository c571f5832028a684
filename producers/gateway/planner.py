"""Plan a turn: find the recorded turn that it continues, render the prompt tokens, choose the engine's limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from turnlog.infra.engines.protocol import EngineImage, Grammar
from turnlog.infra.roles.event_loop import LARGE, LARGE_BODY
from turnlog.processors.core.turns import Ids
from turnlog.producers.gateway.conversation import RecordedTurn, TokenCursor, above
from turnlog.producers.gateway.dialects.dialect import IGNORED, Constraint, TurnRequest
from turnlog.producers.gateway.errors import (
    BadRequest,
    ConstraintRefused,
    ContextOverflow,
    PrefillNotServed,
    ToolsNotServed,
)
from turnlog.producers.gateway.expert_rows import Routing
from turnlog.producers.gateway.images import Admitted, check_images_alone, place_images
from turnlog.producers.gateway.messages import Message, call_ids, tools_digest, with_ids
from turnlog.producers.gateway.parsers.formats import only_call, only_json
from turnlog.producers.gateway.parsers.parser import CallFormat, Delimiters, OutputParser, ParsedCall
from turnlog.producers.gateway.prompts import Prompts
from turnlog.producers.gateway.requests import Claims
from turnlog.producers.gateway.sessions import GatewaySession
from turnlog.producers.gateway.summaries import quoted_summary
from turnlog.producers.gateway.template_features import TemplateFeatures
from turnlog.schemas.events.tasks import Purpose
from turnlog.schemas.events.turns import Boundary, FinishReason, ImageRef
from turnlog.schemas.types import TurnId

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
    summary: TurnId | None
    """Turn whose summary of the history the messages of a root begin with; None without one."""
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
        base, kept, tools_sha256, prompt = await self._prompt(session, request, window, agent_path)
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
            quoted_summary(conversation.turns, request.recorded.messages, agent_path) if base is None else None, stored,
        )  # fmt: skip

    def _check_tools(self, request: TurnRequest, *, trains: bool) -> None:
        """Raise ToolsNotServed if the template omits tool results, or if a training turn offers tools whose calls
        nobody reads: the agent would end at its first call, and exactly that would be trained. A template that omits
        the tools is only counted, because a model may know them from training or from a system text."""
        if trains and self.unread and request.tools:
            raise ToolsNotServed(
                "no known format reads the calls that the model's chat template writes, so that every call would "
                "end the conversation: name the format in [gateway] tool_calls; `none` there passes calls as text to "
                "agents that read them themselves",
                param="tools",
            )
        if request.tools and self.shown.tools is False:
            IGNORED.labels("tools_not_written").inc()
        if self.shown.results is False and any(one.role == "tool" for one in request.messages):
            raise ToolsNotServed(
                "the model's chat template does not write the results of tools, so the model would never see "
                "them: send them as user messages, or give the model's folder a template that writes them",
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
                    else "no engine grammar expresses it for these tools and the call format of this model"
                )
                raise ConstraintRefused(
                    f"{one.field} would constrain sampling, and {why}: omit it"
                    f"{' or send `auto`' if one.field == 'tool_choice' else ''}, or let it be ignored and "
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
        most = self.prompts.tokens.longest
        if most and request.size >= most * window:  # a character takes a byte or more, so a smaller body has fewer
            given = sum(one.characters for one in request.messages if one.role != "assistant")
            least = max(least, given // most)
        if least >= window:
            raise ContextOverflow(least, window, counted=False)

    def _limit(self, session: GatewaySession, request: TurnRequest, window: int, prompt: Prompt) -> int:
        """Return how many tokens may be sampled. Raises BadRequest, ContextOverflow."""
        vocabulary, new = self.prompts.tokens.vocabulary, prompt.ids[prompt.known.depth :]
        if len(new) and not 0 <= new.min() <= new.max() < vocabulary:
            raise BadRequest(
                f"the prompt has token {new.max()}, outside the model's vocabulary of {vocabulary}: the tokenizer and "
                "model in [model] path do not match",
                param="messages",
            )
        room = window - len(prompt.ids) - 1
        if room < 1:
            raise ContextOverflow(len(prompt.ids), window)
        return min(request.max_new_tokens or room, session.started.sampling.max_new_tokens, room)

    async def _prompt(
        self, session: GatewaySession, request: TurnRequest, window: int, path: str | None = None
    ) -> tuple[RecordedTurn | None, int, str, Prompt]:
        """Return the base, the number of messages that it covers, the digest of the tools, and the prompt. Slow work
        runs off the event loop, and reads only what the loop never changes: known messages and turns."""
        conversation = session.conversation

        def find_base() -> tuple[RecordedTurn | None, int, str, str]:
            self._check_length(request, window)
            known = request.recorded.messages
            base, kept = conversation.base_of(known, request.base, path)
            tools_sha256 = tools_digest(request.recorded.tools)
            reason = "" if base is not None else conversation.reason_of_root(known)
            if base is not None and base.redacted:
                reason = "redacted"
            elif base is not None and base.tools_sha256 != tools_sha256:
                reason = "tools_changed"
            return base, kept, tools_sha256, reason

        base, kept, tools_sha256, reason = await session.work(request.size, find_base, large=LARGE_BODY)
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
        if self._is_ended(session, base):
            held, place = held[:-1], next(above(place, base.total - 1))
        return Prompt(held, base.images, place, "reopened")

    def _is_ended(self, session: GatewaySession, base: RecordedTurn) -> bool:
        """Return whether the last id of a turn only ended it."""
        stopped = base.finish_reason in (FinishReason.stop, FinishReason.tool_calls) and base.output_tokens > 0
        return stopped and self.prompts.ends(base.last, session.started.sampling.stop_token_ids)

    async def _extend_prompt(
        self, session: GatewaySession, request: TurnRequest, base: RecordedTurn, kept: int
    ) -> Prompt:
        """Return the base's tokens followed by the new messages. Where the template cannot append these, render the
        whole conversation instead."""

        def render_new() -> tuple[Ids, tuple[ImageRef, ...]] | None:
            said = self._messages_with_ids(request, written)
            new = said[kept:]
            more = self.prompts.continuation(base.last, new, request.tools, session.began, said[kept - 1])
            if more is None:
                return None
            more, images = place_images(more, base.total, self.image_token, _pictures(new, request.images))
            return np.array(more, dtype=np.int32), images

        written = self._written_ids(session, base, request.tools)
        size = sum(one.characters for one in request.messages[kept:])
        found = await session.work(self._size(size), render_new)
        if found is None:
            return await self._full(session, request, "template_not_incremental")
        held = np.concatenate((session.conversation.tokens(base), found[0]))
        return Prompt(held, base.images + found[1], base.place, "append")

    def _size(self, written: int) -> int:
        """Return the size that decides whether a text of `written` bytes is rendered in a thread. A template that was
        slow before may be slow again, so it always counts as large."""
        return max(written, LARGE) if self.prompts.template.slow else written

    def _messages_with_ids(self, request: TurnRequest, written: Mapping[str, str] | None = None) -> Sequence[Message]:
        ids = self.calls.ids if self.calls is not None else None
        return with_ids(request.messages, ids, written or {}) if ids else request.messages

    def _written_ids(self, session: GatewaySession, base: RecordedTurn, tools: Any) -> dict[str, str]:
        """Return the ids that the model wrote in the calls of a turn, by the ids that the client knows. Results that
        are appended to that turn must name them."""
        known = call_ids(base.response)
        if self.calls is None or self.calls.ids is None or not known:
            return {}
        ids, end = session.conversation.tokens(base), base.total - self._is_ended(session, base)
        parser = OutputParser(self.calls, self.thinking, self.inside(ids[: base.prompt_tokens]), tools or ())
        parser.push(self.prompts.tokens.decode(ids[base.prompt_tokens : end].tolist()))
        parser.end()
        written = [part.id for part in parser.parts if isinstance(part, ParsedCall)]
        return dict(zip(known, written, strict=True)) if len(known) == len(written) else {}

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

        ids, images = await session.work(self._size(request.size), render_all)
        return Prompt(ids, images, session.conversation.strands.start, reason)


def _check_prefill(last: Message) -> None:
    """Raise PrefillNotServed if the last message is the assistant's and has tool calls or images."""
    if last.role == "assistant" and (last.pictures or last.template.get("tool_calls")):
        raise PrefillNotServed(
            "the last message is the assistant's and has tool calls or images: answer its calls with tool messages; "
            "only text can be continued",
            param="messages",
        )


def _pictures(messages: Sequence[Message], admitted: Mapping[str, Admitted]) -> list[Admitted]:
    return [admitted[picture.ref.sha256] for one in messages for picture in one.pictures]
