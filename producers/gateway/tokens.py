"""Token-in token-out: the prompt of a turn is its base's tokens, what closes that turn, and the new messages alone.

What an engine saw is never tokenised again. Whether a template allows this is decided per append kind (roles appended,
reasoning, tools, images present) on a built-in probe corpus, once; a kind that fails falls back alone to a full render.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from turnlog.producers.gateway.errors import BadRequest, PrefillNotServed
from turnlog.producers.gateway.messages import Message
from turnlog.producers.gateway.template import ChatTemplate
from turnlog.producers.gateway.tokenizer import TextTokens

SENTINEL = "Zq7"
"""An answer that no template contains."""
OPEN = "Zq7-and-so-on"
"""Marks where a prefill is to go on."""
HISTORY: tuple[dict[str, Any], ...] = ({"role": "user", "content": "d"},)
"""The dummy history. It does not end in an assistant message: stock Qwen3 renders the last of those differently."""
CALLS = [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"a": 1}}}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


class Kind(NamedTuple):
    """What decides whether a template appends."""

    roles: tuple[str, ...]
    reasoning: bool
    tools: bool
    images: bool = False


class Ending(NamedTuple):
    """How the template ends an assistant's turn: the text after its content, and that text's first id if it is an
    end-of-turn mark."""

    text: str
    mark: int | None
    mark_text: str


class Prompts:
    """Prompt ids of turns, for one tokenizer and one template."""

    def __init__(self, tokens: TextTokens, template: ChatTemplate) -> None:
        self.tokens = tokens
        self.template = template
        self._kinds: dict[Kind, bool] = {}
        self._openings: dict[str, str] = {}
        self._ending = self._probe_ending()
        self._markers = self._probe_markers()

    @property
    def end_of_turn(self) -> int | None:
        """The id by which the template ends an assistant's turn."""
        return self._ending.mark if self._ending else None

    def ends(self, token: int, stops: Sequence[int]) -> bool:
        """Whether the last id of an output that was stopped is what stopped it, and no part of what was said."""
        return token in stops or token == self.end_of_turn or token in self.tokens.special

    def full(self, messages: Sequence[Message], tools: Any) -> list[int]:
        """Ids of the whole conversation up to where the model goes on. Raises BadRequest."""
        return self.tokens.encode(self.text(messages, tools))

    def text(self, messages: Sequence[Message], tools: Any) -> str:
        """The whole conversation as the template writes it, up to where the model goes on. Raises BadRequest."""
        return self._rendered([one.template for one in messages], tools)

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        """Up to the end of the generation prompt, or of a last message of the assistant's: a prefill is left open, as
        by `continue_final_message` of transformers. Raises BadRequest, PrefillNotServed."""
        *before, last = messages
        if last["role"] != "assistant":
            return self.template.render(messages, tools, generate=True)
        whole = self.template.render([*before, {**last, "content": f"{last['content']}{OPEN}"}], tools, generate=False)
        if whole.count(OPEN) != 1:
            raise PrefillNotServed(
                "the model's chat template does not write the assistant's last message once and to its end, so that it "
                "cannot be continued: end the messages with another role",
                param="messages",
            )
        return whole[: whole.index(OPEN)]

    def continuation(self, last: int, new: Sequence[Message], tools: Any, tools_sha256: str) -> list[int] | None:
        """close + delta: the ids to put after a base whose last id is `last`. None where the template cannot append
        this kind, or where the base ends in another role's mark. Raises BadRequest."""
        kind = Kind(
            tuple(one.role for one in new),
            any(one.reasoning for one in new),
            bool(tools),
            any(one.pictures for one in new),
        )
        if kind not in self._kinds:
            self._kinds[kind] = self._probe(kind)
        if not self._kinds[kind]:
            return None
        delta = self._delta([one.template for one in new], tools, tools_sha256)
        return None if delta is None else self._closed(last, delta)

    def _closed(self, last: int, delta: str) -> list[int] | None:
        assert self._ending is not None
        text, mark, mark_text = self._ending
        if mark is not None:
            return self.tokens.encode((text[len(mark_text) :] if last == mark else text) + delta)
        ids = self.tokens.encode(text + delta)
        if not text and last in self._markers:  # the next role's mark is the end of the turn
            return ids[1:] if ids[:1] == [last] else None
        return ids

    def _delta(self, new: list[dict[str, Any]], tools: Any, tools_key: str) -> str | None:
        """The text of new messages up to where the model goes on: the difference of two renders over a dummy
        history."""
        if tools_key not in self._openings:
            if len(self._openings) > 256:
                self._openings.clear()
            self._openings[tools_key] = self.template.render(HISTORY, tools, generate=False)
        opening = self._openings[tools_key]
        whole = self._rendered([*HISTORY, *new], tools)
        return whole[len(opening) :] if whole.startswith(opening) else None

    def _probe_ending(self) -> Ending | None:
        ask = {"role": "user", "content": "v"}
        try:
            delta = self._delta([ask], None, "")
            whole = self.template.render(
                [{"role": "user", "content": "u"}, {"role": "assistant", "content": SENTINEL}, ask], None, generate=True
            )
        except BadRequest:
            return None
        if delta is None or not whole.endswith(delta) or SENTINEL not in whole:
            return None
        text = whole[whole.rindex(SENTINEL) + len(SENTINEL) : len(whole) - len(delta)]
        first = self.tokens.encode(text)[:1]
        if first and first[0] in self.tokens.special and text.startswith(self.tokens.special[first[0]]):
            return Ending(text, first[0], self.tokens.special[first[0]])
        return Ending(text, None, "")

    def _probe_markers(self) -> frozenset[int]:
        """First ids of what each role's message begins with, where those are special tokens."""
        markers = set()
        for role in ("system", "user", "tool", "assistant"):
            try:
                delta = self._delta([{"role": role, "content": "x"}], None, "")
            except BadRequest:
                continue
            markers.update(self.tokens.encode(delta or "")[:1])
        return frozenset(markers & self.tokens.special.keys())

    def _probe(self, kind: Kind) -> bool:
        """Whether a full render of the probe conversations ends in what `continuation` would append, text and ids."""
        if self._ending is None:
            return False
        tools = TOOLS if kind.tools else None
        new = [_canned(role, at, kind) for at, role in enumerate(kind.roles)]
        answer: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
        if kind.roles[:1] == ("tool",):
            answer["tool_calls"] = CALLS
        asked = [{"type": "image"}, {"type": "text", "text": "u"}] if kind.images else "u"
        conversation = [{"role": "user", "content": asked}, answer, *new]
        try:
            delta = self._delta(new, tools, f"probe {kind.tools}")
            whole = self._rendered(conversation, tools)
        except BadRequest:
            return False
        if delta is None or not self._appends(whole, self._ending.text + delta):
            return False
        try:
            whole = self._rendered([{"role": "system", "content": "s"}, *conversation], tools)
        except BadRequest:
            return True  # a template without system messages never meets one
        return self._appends(whole, self._ending.text + delta)

    def _appends(self, whole: str, tail: str) -> bool:
        if not whole.endswith(tail) or SENTINEL not in whole[: len(whole) - len(tail)]:
            return False
        head = whole[: len(whole) - len(tail)]
        return self.tokens.encode(head) + self.tokens.encode(tail) == self.tokens.encode(whole)


def _canned(role: str, at: int, kind: Kind) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": f"w{at}"}
    if kind.images and role in ("user", "tool"):
        message["content"] = [{"type": "image"}, {"type": "text", "text": f"w{at}"}]
    if role == "assistant" and kind.roles[at + 1 : at + 2] == ("tool",):
        message["tool_calls"] = CALLS
    if role == "assistant" and kind.reasoning:
        message["reasoning_content"] = "because"
    return message
