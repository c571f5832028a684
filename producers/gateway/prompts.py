"""Prompts from the model's folder: its tokenizer, its chat template, and token-in token-out on top of both.

The prompt of a turn consists of its base's tokens, the text that closes that turn, and the new messages only: nothing
that an engine saw is tokenised again. Whether a template allows this is probed once for each kind of append (roles
appended; reasoning, tools, images present) on a built-in corpus; only a kind that fails falls back to a full render.
Ids beyond the tokenizer's own vocabulary are legal wherever the model's is larger; they decode to U+FFFD.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from tokenizers import Tokenizer, pre_tokenizers

from turnlog.producers.gateway.chat_template import ChatTemplate, read_json, tojson
from turnlog.producers.gateway.errors import BadRequest, PrefillNotServed
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


SENTINEL = "Zq7"
"""Content of a probe answer, which no template contains."""
OPEN = "Zq7-and-so-on"
"""Marks the point in a render where a prefill continues."""
HISTORY: tuple[dict[str, Any], ...] = ({"role": "user", "content": "d"},)
"""The dummy history. It does not end in an assistant message, because stock Qwen3 renders the last of those
differently."""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}]
KEPT_OPENINGS = 256


CHECKED = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"))
"""Roles of the messages that usually follow an answer."""


class MessageTraits(NamedTuple):
    """Properties of new messages that decide whether a template can append them."""

    roles: tuple[str, ...]
    reasoning: bool
    tools: bool
    images: bool = False


class AssistantTurnEnding(NamedTuple):
    """End of an assistant's turn as the template writes it: the text after its content, and that text's first id if it
    is an end-of-turn mark."""

    text: str
    mark: int | None
    mark_text: str


class Prompts:
    """Makes prompt ids of turns, for one tokenizer and one template."""

    def __init__(self, tokens: TextTokens, template: ChatTemplate) -> None:
        self.tokens = tokens
        self.template = template
        self._kinds: dict[MessageTraits, bool] = {}
        self._openings: dict[tuple[bytes, tuple[str, ...]], str] = {}
        """Renders of the dummy history, by the tools as sent and by the dates that the template prints."""
        self._system_anywhere = self._probe_system()
        self._arguments_as_text = self._probe_arguments()
        self._ending = self._probe_ending()
        self._markers = self._probe_markers()

    @property
    def end_of_turn(self) -> int | None:
        """Id by which the template ends an assistant's turn, or None."""
        return self._ending.mark if self._ending else None

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
        return self.template.render(self._fit_messages([one.template for one in messages]), tools, generate=False)

    @property
    def end_mark(self) -> str:
        """Text of `end_of_turn`; empty without one."""
        return self._ending.mark_text if self._ending else ""

    def _fit_messages(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return the messages in the form that the template accepts."""
        if self._arguments_as_text:
            messages = [_with_text(one) for one in messages]
        if not self._system_anywhere:
            # Harnesses put system messages between others, and repeat a refused request with other tools. If the
            # template has no place for such a message, it becomes the user's.
            messages = [{**one, "role": "user"} if at and one["role"] == "system" else one
                        for at, one in enumerate(messages)]  # fmt: skip
        return messages

    def _render_open(self, messages: Sequence[dict[str, Any]], tools: Any, now: datetime | None = None) -> str:
        """Render up to the end of the generation prompt, or of a last message of the assistant's: a prefill is left
        open, as with `continue_final_message` of transformers. Raises BadRequest, PrefillNotServed."""
        messages = self._fit_messages(messages)
        *before, last = messages
        if last["role"] != "assistant":
            return self.template.render(messages, tools, generate=True, now=now)
        opened = {**last, "content": f"{last['content']}{OPEN}"}
        whole = self.template.render([*before, opened], tools, generate=False, now=now)
        if whole.count(OPEN) != 1:
            raise PrefillNotServed(
                "the model's chat template does not write the assistant's last message once and to its end, so it "
                "cannot be continued: end the messages with another role",
                param="messages",
            )
        return whole[: whole.index(OPEN)]

    def continuation(
        self, last: int, new: Sequence[Message], tools: Any, now: datetime | None = None
    ) -> list[int] | None:
        """Return close + delta: the ids to append to a base whose last id is `last`. None if the template cannot append
        this kind, or if the base ends in another role's mark. `now`: see `text`. Raises BadRequest."""
        kind = MessageTraits(
            tuple(one.role for one in new),
            any(one.reasoning for one in new),
            bool(tools),
            any(one.pictures for one in new),
        )
        if not self._incremental(kind):
            return None
        delta = self._delta([one.template for one in new], tools, now)
        return None if delta is None else self._encode_after_end(last, delta)

    def check_appends(self) -> dict[str, bool]:
        """Return whether the template appends what agents most often send after an answer, or writes the whole
        conversation anew. Keys name the roles of the messages, and whether tools are offered."""
        kinds = [MessageTraits(roles, reasoning=False, tools=tools) for tools in (False, True) for roles in CHECKED]
        return {"+".join(one.roles) + " with tools" * one.tools: self._incremental(one) for one in kinds}

    def without_end(self, answer: str) -> str:
        """Return an answer as it was sampled, without the marks that end it; a mark that also ends its calls stays."""
        ends = [self.end_mark, *(self.tokens.special[one] for one in self.tokens.eos if one in self.tokens.special)]
        ends += [self._ending.text.strip()] if self._ending else []
        ends = [end for end in ends if end not in MARKS]
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
            return self.template.render(
                self._fit_messages(messages), tools, generate=messages[-1]["role"] != "assistant"
            )
        except BadRequest:
            return None

    def _incremental(self, kind: MessageTraits) -> bool:
        if kind not in self._kinds:
            self._kinds[kind] = self._probe(kind)
        return self._kinds[kind]

    def _encode_after_end(self, last: int, delta: str) -> list[int] | None:
        assert self._ending is not None
        text, mark, mark_text = self._ending
        if mark is not None:
            return self.tokens.encode((text[len(mark_text) :] if last == mark else text) + delta)
        ids = self.tokens.encode(text + delta)
        if not text and last in self._markers:  # the next role's mark is the end of the turn
            return ids[1:] if ids[:1] == [last] else None
        return ids

    def _delta(self, new: list[dict[str, Any]], tools: Any, now: datetime | None = None) -> str | None:
        """Return the text of new messages up to the point where the model continues: the difference of two renders over
        a dummy history. None if the second does not begin with the first."""
        now = now or datetime.now(UTC)
        written = orjson.dumps(tools)  # another order of keys is another text
        opening = self._openings.get((written, self.template.dates(now)))
        if opening is None:
            opening = self.template.render(HISTORY, tools, generate=False, now=now)
            if len(self._openings) >= KEPT_OPENINGS:
                self._openings.clear()
            self._openings[written, self.template.dates(now)] = opening
        whole = self._render_open([*HISTORY, *new], tools, now)
        return whole[len(opening) :] if whole.startswith(opening) else None

    def _probe_system(self) -> bool:
        """Return whether the template writes a system message that is not the first."""
        try:
            return SENTINEL in self.template.render(
                [*HISTORY, {"role": "system", "content": SENTINEL}], None, generate=True
            )
        except BadRequest:
            return False

    def _probe_arguments(self) -> bool:
        """Return whether the template needs call arguments as JSON text and refuses objects, as DeepSeek's templates
        do."""
        called = {"role": "assistant", "content": "", "tool_calls": probe_calls(1)}
        return not self._takes([*HISTORY, called]) and self._takes([*HISTORY, _with_text(called)])

    def _takes(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return bool(self.template.render(messages, TOOLS, generate=False))
        except BadRequest:
            return False

    def _probe_ending(self) -> AssistantTurnEnding | None:
        ask = {"role": "user", "content": "v"}
        try:
            delta = self._delta([ask], None)
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
            return AssistantTurnEnding(text, first[0], self.tokens.special[first[0]])
        return AssistantTurnEnding(text, None, "")

    def _probe_markers(self) -> frozenset[int]:
        """Return the first ids of each role's message if they are special tokens."""
        markers = set()
        for role in ("system", "user", "tool", "assistant"):
            try:
                delta = self._delta([{"role": role, "content": "x"}], None)
            except BadRequest:
                continue
            markers.update(self.tokens.encode(delta or "")[:1])
        return frozenset(markers & self.tokens.special.keys())

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
        if self._ending is None:
            return False
        tools = TOOLS if kind.tools else None
        asked = [{"type": "image"}, {"type": "text", "text": "u"}] if kind.images else "u"
        conversation = [{"role": "user", "content": asked}, answer, *new]
        now = datetime.now(UTC)
        try:
            whole = self._render_open(conversation, tools, now)
        except BadRequest:
            return None
        if SENTINEL not in whole:
            return None
        try:
            delta = self._delta(new, tools, now)
        except BadRequest:
            return False
        if delta is None or not self._appends(whole, self._ending.text + delta):
            return False
        try:
            whole = self._render_open([{"role": "system", "content": "s"}, *conversation], tools, now)
        except BadRequest:
            return True  # a template without system messages never meets one
        return self._appends(whole, self._ending.text + delta)

    def _appends(self, whole: str, tail: str) -> bool:
        if not whole.endswith(tail) or SENTINEL not in whole[: len(whole) - len(tail)]:
            return False
        head = whole[: len(whole) - len(tail)]
        return self.tokens.encode(head) + self.tokens.encode(tail) == self.tokens.encode(whole)


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else tojson(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def probe_calls(count: int) -> list[dict[str, Any]]:
    """Return calls as agents send them back. The sentinel is in the arguments as well, because some templates write no
    content beside calls."""
    function = {"name": "f", "arguments": {"a": SENTINEL}}
    return [{"type": "function", "id": f"call0000{at}", "function": function} for at in range(count)]


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
        answer: dict[str, Any] = {"role": "assistant", "content": SENTINEL}
        for count in sorted({min(1, _results(kind.roles)), _results(kind.roles)}):
            calls = {"tool_calls": probe_calls(count)} if count else {}
            yield {**answer, **calls}, new
            yield {**answer, **calls, "content": "" if calls else SENTINEL}, new


def _results(roles: Sequence[str]) -> int:
    """Return the number of leading tool messages."""
    return next((at for at, role in enumerate(roles) if role != "tool"), len(roles))
