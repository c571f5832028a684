"""What a turn will submit, and how it relates to the turns before it: kinship, prompt, images, storage parent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnlog.infra.engine import EngineImage
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.errors import BadRequest, ContextOverflow, PrefillNotServed
from turnlog.producers.gateway.experts import Routing
from turnlog.producers.gateway.images import Admitted, placed
from turnlog.producers.gateway.messages import Message, tools_digest
from turnlog.producers.gateway.requests import ChatRequest
from turnlog.producers.gateway.session_tokens import Claims
from turnlog.producers.gateway.sessions import Session
from turnlog.producers.gateway.strands import Place, above
from turnlog.producers.gateway.tokens import Prompts
from turnlog.schemas.events.turns import Boundary, FinishReason, ImageRef


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

    def plan(self, session: Session, request: ChatRequest, claims: Claims, agent_path: str | None) -> Plan:
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

    def _limit(self, session: Session, request: ChatRequest, claims: Claims, prompt: Prompt) -> int:
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
        self, session: Session, request: ChatRequest, base: Turn | None, kept: int, tools_sha256: str
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

    def _continued(self, session: Session, request: ChatRequest, base: Turn, kept: int, tools_sha256: str) -> Prompt:
        """New messages behind the base; all of them rendered anew where the template cannot append these."""
        new = request.messages[kept:]
        more = self.prompts.continuation(base.last, new, request.tools, tools_sha256)
        if more is None:
            return self._full(session, request, "template_not_incremental")
        more, images = placed(more, base.total, self.image_token, _pictures(new, request.images))
        held = session.conversation.tokens(base).tolist()
        return Prompt(held + more, base.images + images, base.place, "append")

    def _full(self, session: Session, request: ChatRequest, reason: str) -> Prompt:
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
