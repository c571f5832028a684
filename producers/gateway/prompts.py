"""Prompts from the model's folder: its tokenizer, its chat template, and token-in token-out on top of both.

The prompt of a turn consists of its base's tokens, the text that closes that turn, and the new messages only: nothing
that an engine saw is tokenised again. Whether a template allows this is probed once for each kind of append (roles
appended; reasoning, tools, images present) on a built-in corpus; only a kind that fails falls back to a full render.
Ids beyond the tokenizer's own vocabulary are legal wherever the model's is larger; they decode to U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, pre_tokenizers

from turnlog.producers.gateway.chat_template import ChatTemplate, read_json
from turnlog.producers.gateway.errors import BadRequest, PrefillNotServed
from turnlog.producers.gateway.message_forms import HISTORY, SENTINEL, TOOLS, MessageForms, probe_calls
from turnlog.producers.gateway.messages import Message
from turnlog.producers.gateway.parsers.formats import MARKS

UNKNOWN = "�"
BYTES = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""Characters that stand for the bytes in the vocabulary of a byte-level tokenizer."""
KEEPS = frozenset({"ByteLevel", "Digits", "NFC", "Punctuation", "Split"})
"""Steps before tokenisation that take no character away, except NFC, and Split if its behavior is Removed."""
PLAIN = MARKS | {"<tool_response>", "</tool_response>"}
"""Special tokens that are ordinary text; the others are control marks."""


class TokenizerMissing(Exception):
    """[model] path has no tokenizer.json or config.json."""


class TextTokens:
    """The tokenizer, and the model configuration's facts about token ids."""

    def __init__(self, folder: Path) -> None:
        """Load both from a model's folder. Raises TokenizerMissing."""
        try:
            data = (folder / "tokenizer.json").read_bytes()
            config = json.loads((folder / "config.json").read_text())
        except FileNotFoundError as error:
            raise TokenizerMissing(
                f"{error.filename} is missing: [model] path must be a Hugging Face folder"
            ) from error
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._tokenizer: Any = Tokenizer.from_str(data.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config: dict[str, Any] = config
        """The model's config.json."""
        text = config | (config.get("text_config") or {})  # a vision model keeps these in its language part
        self.vocabulary = int(text["vocab_size"])
        """Size of the model's vocabulary: every id below it may be sampled."""
        self.eos = _eos(config) | _eos(read_json(folder / "generation_config.json"))
        """Ids at which engines end an output by themselves."""
        self.window = int(text.get("max_position_embeddings", 0)) or 2**31 - 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: dict[int, str] = {number: token.content for number, token in added.items()}
        """Every added token, whether control mark or not."""
        self._known = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.longest = _longest(json.loads(data), self._tokenizer.get_vocab(with_added_tokens=True))
        """Maximum number of characters that one id stands for; 0 if unbounded."""
        self._control = frozenset(
            number for number, token in added.items() if token.special and token.content not in PLAIN
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text; no special tokens are added."""
        # The fast variant computes no offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that agents and verifiers see: every id, control marks in full, unknown ids as U+FFFD."""
        if self._known.issuperset(ids):
            return self._run(list(ids))
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token in self._known:
                run.append(token)
            else:
                parts += [self._run(run), UNKNOWN]
                run = []
        return "".join(parts) + self._run(run)

    def is_control(self, token: int) -> bool:
        """Return whether the id is a control mark. As the last id of an output, it may be what ended the output."""
        return token in self._control

    def knows(self, token: int) -> bool:
        """Return whether the tokenizer has text for the id."""
        return token in self._known

    def literal(self, ids: Sequence[int]) -> str:
        """Return the text of every known id, control marks included."""
        return self._run([token for token in ids if token in self._known])

    def _run(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def _eos(config: dict[str, Any]) -> frozenset[int]:
    """Return the ids of eos_token_id, which holds one, several, or none."""
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else () if ids is None else (ids,))


def _longest(declared: dict[str, Any], vocabulary: Mapping[str, int]) -> int:
    """Compute `TextTokens.longest`. There is a bound if each byte has an id of its own and no earlier step removes
    characters. NFC composes at most four characters into one."""
    before = [*_steps(declared.get("normalizer")), *_steps(declared.get("pre_tokenizer"))]
    kinds = {step["type"] for step in before}
    if not vocabulary.keys() >= BYTES or "ByteLevel" not in kinds or kinds - KEEPS:
        return 0
    if any(step.get("behavior") == "Removed" for step in before):
        return 0
    return max(map(len, vocabulary)) * (4 if "NFC" in kinds else 1)


def _steps(declared: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of one part of a tokenizer, in order."""
    if declared is None:
        return
    inner = declared.get("normalizers") or declared.get("pretokenizers")
    if inner is None:
        yield declared
    for one in inner or ():
        yield from _steps(one)


class TextStream:
    """Decodes a growing id sequence, and returns text only where further ids cannot change it."""

    WINDOW = 8
    """Number of earlier ids that are decoded again with new ones; byte-level and word-piece decoders may look back on
    them."""

    def __init__(self, tokens: TextTokens) -> None:
        self._tokens = tokens
        self._ids: list[int] = []
        self._marks: list[int] = []
        """Control marks at the end, which are not decoded yet."""
        self._settled = 0
        self._text = ""

    def push(self, ids: Sequence[int]) -> str:
        """Add ids, and return all text so far except an unfinished character, or control marks, at its end."""
        self._ids += self._marks
        self._marks = []
        self._ids += ids
        while self._ids and self._tokens.is_control(self._ids[-1]):
            self._marks.insert(0, self._ids.pop())
        if not self._ids:
            return self._text
        start = max(0, self._settled - self.WINDOW)
        before = self._tokens.decode(self._ids[start : self._settled])
        after = self._tokens.decode(self._ids[start:])
        whole = not after.endswith(UNKNOWN) or not self._tokens.knows(self._ids[-1])
        if whole and after.startswith(before):
            self._text += after[len(before) :]
            self._settled = len(self._ids)
        return self._text


ANSWERED = "Zq7-what-it-said"
"""Stands for what an answer says, in the render that shows what follows the answer."""
OPEN = "Zq7-and-so-on"
"""Marks the point in a render where a prefill continues."""
ANSWER: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
CHECKED = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"))
"""Roles of the messages that usually follow an answer."""


class MessageTraits(NamedTuple):
    """Properties of new messages that decide whether a template can append them."""

    roles: tuple[str, ...]
    reasoning: bool
    tools: bool
    images: bool = False


class AnswerEnds(NamedTuple):
    """End of an assistant's message, as the template writes it."""

    marks: Mapping[str, int | None]
    """Texts at which an answer may end, with their ids: those of the model's configuration, and those by which the
    template ends an answer or begins the message after it. None: no special token."""
    written: frozenset[int]
    """Ids of the marks that the template writes."""
    closes: str
    """Text by which the template ends an answer that others follow; empty if only the mark of the next message does."""
    closing: str
    """All that the template writes behind the last text of a conversation."""


class AnswerTail(NamedTuple):
    """Text of the template behind an answer, up to the point where the model continues."""

    mark: str
    """Mark that ends the answer, or begins the next message."""
    text: str
    """The text behind it."""


class Prompts:
    """Makes prompt ids of turns, for one tokenizer and one template."""

    def __init__(self, tokens: TextTokens, template: ChatTemplate) -> None:
        self.tokens = tokens
        self.template = template
        self._forms = MessageForms(template)
        self._kinds: dict[MessageTraits, bool] = {}
        self._ends = self._probe_ends()

    @property
    def end_of_turn(self) -> int | None:
        """Id by which the template ends an assistant's turn, or None."""
        return self._ends.marks.get(self._ends.closes)

    @property
    def end_mark(self) -> str:
        """Text of `end_of_turn`; empty without one."""
        return "" if self.end_of_turn is None else self._ends.closes

    @property
    def ends_are_named(self) -> bool:
        """False if the model's configuration names ids that end answers, but none by which the template ends one."""
        return not self.tokens.eos or not self._ends.closes or not self.tokens.eos.isdisjoint(self._ends.written)

    def ends(self, token: int, stops: Sequence[int]) -> bool:
        """Return whether the last id of a stopped output only ended it, and is no part of the answer. A mark that
        closes calls may be both (Apertus)."""
        if self.tokens.special.get(token) in MARKS:
            return False
        return token in stops or token in (self.end_of_turn, *self.tokens.eos) or self.tokens.is_control(token)

    def full(self, messages: Sequence[Message], tools: Any, now: datetime | None = None) -> list[int]:
        """Return the ids of the whole conversation up to the point where the model continues. Raises BadRequest."""
        return self.tokens.encode(self.text(messages, tools, now))

    def text(self, messages: Sequence[Message], tools: Any, now: datetime | None = None) -> str:
        """Return the whole conversation as the template writes it, up to the point where the model continues. Dates are
        printed as of `now`. Raises BadRequest."""
        return self._render_open([one.template for one in messages], tools, now)

    def render_closed(self, messages: Sequence[Message], tools: Any) -> str:
        """Return the same text, but with the last message closed, as if it had been answered. Raises BadRequest."""
        return self.template.render(self._forms.fit([one.template for one in messages]), tools, generate=False)

    def _render_open(self, messages: Sequence[dict[str, Any]], tools: Any, now: datetime | None = None) -> str:
        """Render up to the end of the generation prompt, or of a last message of the assistant's: a prefill is left
        open, as with `continue_final_message` of transformers. Raises BadRequest, PrefillNotServed."""
        *before, last = messages
        if last["role"] != "assistant":
            return self.template.render(self._forms.fit(messages), tools, generate=True, now=now)
        opened = {**last, "content": f"{last['content']}{OPEN}"}
        whole = self.template.render(self._forms.fit([*before, opened]), tools, generate=False, now=now)
        if whole.count(OPEN) != 1:
            raise PrefillNotServed(
                "the model's chat template does not write the assistant's last message once and to its end, so it "
                "cannot be continued: end the messages with another role",
                param="messages",
            )
        return whole[: whole.index(OPEN)]

    def continuation(
        self,
        last: int,
        new: Sequence[Message],
        tools: Any,
        now: datetime | None = None,
        answer: Message | None = None,
    ) -> list[int] | None:
        """Return the ids to append to a base whose last id is `last`: what ends the answer, unless the base has it, and
        the new messages. None if the template cannot append this kind, or if the base ends in another role's mark.
        `now`: see `text`. `answer`: the base's answer, whose calls the template may look up; None for a text. Raises
        BadRequest."""
        kind = MessageTraits(
            tuple(one.role for one in new),
            any(one.reasoning for one in new),
            bool(tools),
            any(one.pictures for one in new),
        )
        if not self._incremental(kind):
            return None
        said = ANSWER if answer is None else answer.template
        tail = self._tail(said, [one.template for one in new], tools, now)
        return None if tail is None else self._encode_after(last, tail)

    def check_appends(self) -> dict[str, bool]:
        """Return whether the template appends what agents most often send after an answer, or writes the whole
        conversation anew. Keys name the roles of the messages, and whether tools are offered."""
        kinds = [MessageTraits(roles, reasoning=False, tools=tools) for tools in (False, True) for roles in CHECKED]
        return {"+".join(one.roles) + " with tools" * one.tools: self._incremental(one) for one in kinds}

    def place_of_end(self, answer: str) -> tuple[int, int]:
        """Return where the mark that ends an answer begins and ends, in the text of a closed answer; the text's length
        twice if it ends in none."""
        marks = [mark for mark, number in self._ends.marks.items() if number in self._ends.written]
        places = [(at, at + len(mark)) for mark in marks if (at := answer.rfind(mark)) >= 0]
        return max(places) if self._ends.closes and places else (len(answer), len(answer))

    def without_end(self, answer: str) -> str:
        """Return an answer as it was sampled, without the marks that end it; a mark that also ends its calls stays."""
        eos = [self.tokens.special[one] for one in self.tokens.eos if one in self.tokens.special]
        ends = [*self._ends.marks, *eos, self._ends.closing.strip()]
        ends = [end for end in ends if end and end not in MARKS]
        while True:
            shorter = answer.rstrip("\n")
            for end in ends:
                shorter = shorter.removesuffix(end)
            if shorter == answer:
                return answer
            answer = shorter

    def try_render(self, messages: list[dict[str, Any]], tools: Any) -> str | None:
        """Return a conversation as the template writes it, or None if it refuses. An answer at the end is closed."""
        try:
            return self.template.render(self._forms.fit(messages), tools, generate=messages[-1]["role"] != "assistant")
        except BadRequest:
            return None

    def _incremental(self, kind: MessageTraits) -> bool:
        if kind not in self._kinds:
            self._kinds[kind] = self._probe(kind)
        return self._kinds[kind]

    def _encode_after(self, last: int, tail: AnswerTail) -> list[int] | None:
        mark = self._ends.marks[tail.mark]
        if mark is not None and last == mark:
            return self.tokens.encode(tail.text)
        if mark is None or last not in self._ends.written:
            return self.tokens.encode(tail.mark + tail.text)
        if not self._ends.closes:  # the base ends in the mark of another message than the one that follows
            return None
        return self.tokens.encode(tail.text.removeprefix(self.tokens.special[last]))

    def _tail(
        self, answer: Mapping[str, Any], new: list[dict[str, Any]], tools: Any, now: datetime | None = None
    ) -> AnswerTail | None:
        """Return what the template writes behind an answer that calls the same tools; None if it cannot be found."""
        calls = [
            {**call, "function": {**call["function"], "arguments": {"a": ANSWERED}}}
            for call in answer.get("tool_calls") or ()
        ]
        said = {"role": "assistant", "content": ANSWERED} | ({"tool_calls": calls} if calls else {})
        whole = self._render_open([*HISTORY, said, *new], tools, now)
        if ANSWERED not in whole or ANSWERED in str(new):
            return None
        return _find_end(whole[whole.rindex(ANSWERED) + len(ANSWERED) :], self._ends.marks)

    def _probe_ends(self) -> AnswerEnds:
        """Find how the template ends texts and calls, at the end of a conversation and before other messages."""
        special = {mark: number for number, mark in self.tokens.special.items() if mark}
        others = special.keys() - PLAIN
        eos = {mark: special[mark] for mark in others if special[mark] in self.tokens.eos}
        result = {"role": "tool", "content": "v", "name": "f", "tool_call_id": "call00000"}
        found: list[tuple[str, str]] = []
        for answer, new, tools in (
            (ANSWER, [], None),
            (ANSWER, [{"role": "user", "content": "v"}], None),
            (ANSWER | {"tool_calls": probe_calls(1)}, [result], TOOLS),
        ):
            try:
                messages = self._forms.fit([*HISTORY, answer, *new])
                _, _, rest = self.template.render(messages, tools, generate=bool(new)).rpartition(SENTINEL)
            except BadRequest:
                rest = ""
            end = (_find_end(rest, eos) if tools else None) or _find_end(rest, others)
            found.append((rest, end.mark if end else ""))
        (closing, closed), (_, before), (_, called) = found
        marks: dict[str, int | None] = {mark: special[mark] for mark in (closed, before, called) if mark}
        if not closed and closing:  # the tokenizer need not have a special token for it
            closed = before = closing.strip() or closing
            marks = {closed: None}
        written = frozenset(number for number in marks.values() if number is not None)
        return AnswerEnds(eos | marks, written, before if closed else "", closing)

    def _probe(self, kind: MessageTraits) -> bool:
        """Return whether full renders of the probe conversations end in what `continuation` would append, as text and
        as ids."""
        verdicts = [self._probe_conversation(kind, answer, new) for answer, new in _probe_answers(kind)]
        return True in verdicts and False not in verdicts

    def _probe_conversation(
        self, kind: MessageTraits, answer: dict[str, Any], new: list[dict[str, Any]]
    ) -> bool | None:
        """Probe one conversation. None if the template refuses it, so that it never occurs, or if its answer cannot be
        found in the render."""
        tools = TOOLS if kind.tools else None
        asked = [{"type": "image"}, {"type": "text", "text": "u"}] if kind.images else "u"
        conversation = [{"role": "user", "content": asked}, answer, *new]
        now = datetime.now(UTC)
        try:
            whole = self._render_open(conversation, tools, now)
            opening = self.template.render(self._forms.fit(conversation[:1]), tools, generate=False, now=now)
        except BadRequest:
            return None
        if SENTINEL not in whole:
            return None
        try:
            tail = self._tail(answer, new, tools, now)
        except BadRequest:
            return False
        if tail is None or not whole.startswith(opening) or ("w0" in whole and "w0" not in tail.text):
            return False
        appended = tail.mark + tail.text
        if not self._appends(whole, appended):
            return False
        try:
            whole = self._render_open([{"role": "system", "content": "s"}, *conversation], tools, now)
        except BadRequest:
            return True  # a template without system messages never meets one
        return self._appends(whole, appended)

    def _appends(self, whole: str, tail: str) -> bool:
        if not whole.endswith(tail) or SENTINEL not in whole[: len(whole) - len(tail)]:
            return False
        head = whole[: len(whole) - len(tail)]
        return self.tokens.encode(head) + self.tokens.encode(tail) == self.tokens.encode(whole)


def _find_end(text: str, marks: Iterable[str]) -> AnswerTail | None:
    """Split a text at the first of some marks, the longest one that begins there."""
    places = [(at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0]
    if not places:
        return None
    at, _, mark = min(places)
    return AnswerTail(mark, text[at + len(mark) :])


def _probe_answers(kind: MessageTraits) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield answers, each with messages of a kind that follow it. A template may find a result's tool by the call that
    it answers, by the name that it carries, or not at all, and agents send results with and without either. Calls come
    alone and beside a text, both a single one and as many as there are results."""
    named: list[dict[str, str]] = [{}]
    if "tool" in kind.roles:
        named = [{"tool_call_id": "call0000{at}", "name": "f"}, {"tool_call_id": "call0000{at}"}, {}]
    for names in named:
        new: list[dict[str, Any]] = []
        of_run = 0
        for at, role in enumerate(kind.roles):
            of_run = of_run + 1 if role == "tool" and at and kind.roles[at - 1] == "tool" else 0
            message: dict[str, Any] = {"role": role, "content": f"w{at}"}
            if kind.images and role in ("user", "tool"):
                message["content"] = [{"type": "image"}, {"type": "text", "text": f"w{at}"}]
            if role == "tool":
                message |= {key: text.format(at=of_run) for key, text in names.items()}
            if role == "assistant" and (results := _results(kind.roles[at + 1 :])):
                message["tool_calls"] = probe_calls(results)
            if role == "assistant" and kind.reasoning:
                message["reasoning_content"] = "because"
            new.append(message)
        for count in sorted({min(1, _results(kind.roles)), _results(kind.roles)}):
            calls = {"tool_calls": probe_calls(count)} if count else {}
            yield {**ANSWER, **calls}, new
            yield {**ANSWER, **calls, "content": "" if calls else SENTINEL}, new


def _results(roles: Sequence[str]) -> int:
    """Return the number of leading tool messages."""
    return next((at for at, role in enumerate(roles) if role != "tool"), len(roles))
