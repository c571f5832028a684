"""Prompts from the model's folder: its tokenizer, its chat template, and token-in token-out on top of both.

The prompt of a turn is its base's tokens, what closes that turn, and the new messages alone: nothing that an engine saw
is tokenised again. Whether a template allows this is decided per append kind (roles appended, reasoning, tools, images
present) on a built-in probe corpus, once; a kind that fails falls back alone to a full render. Ids beyond the
tokenizer's own vocabulary are legal wherever the model's is larger; they read as U+FFFD.
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

from turnlog.producers.gateway import BadRequest, PrefillNotServed
from turnlog.producers.gateway.messages import Message
from turnlog.producers.gateway.parsers.formats import MARKS
from turnlog.producers.gateway.rendering.template import ChatTemplate, read_json, tojson

UNKNOWN = "�"
BYTES = frozenset(pre_tokenizers.ByteLevel.alphabet())
"""What stands for each byte in the vocabulary of a byte-level tokenizer."""
KEEPS = frozenset({"ByteLevel", "Digits", "NFC", "Punctuation", "Split"})
"""Steps before the tokens that take no character away, but for NFC and for a Split that is told to."""
PLAIN = MARKS | {"<tool_response>", "</tool_response>"}
"""Special tokens that are text like any other; the others are control marks."""


class ModelMissing(Exception):
    """[model] path has no tokenizer.json or config.json."""


class TextTokens:
    """The tokenizer, and what the model's configuration says of its ids."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelMissing."""
        try:
            data = (folder / "tokenizer.json").read_bytes()
            config = json.loads((folder / "config.json").read_text())
        except FileNotFoundError as error:
            raise ModelMissing(f"{error.filename} is missing: [model] path must be a Hugging Face folder") from error
        self.sha256 = hashlib.sha256(data).hexdigest()
        self._tokenizer: Any = Tokenizer.from_str(data.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config: dict[str, Any] = config
        """The model's config.json."""
        text = config | (config.get("text_config") or {})  # a vision model says it of its language part
        self.vocabulary = int(text["vocab_size"])
        """Of the model: every id below may be sampled."""
        self.eos = _eos(config) | _eos(read_json(folder / "generation_config.json"))
        """Ids at which engines end an output unasked."""
        self.window = int(text.get("max_position_embeddings", 0)) or 2**31 - 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.special: dict[int, str] = {number: token.content for number, token in added.items()}
        """Every added token, whether control mark or not."""
        self._known = frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.longest = _longest(json.loads(data), self._tokenizer.get_vocab(with_added_tokens=True))
        """Characters that one id can stand for; 0: any number."""
        self._control = frozenset(
            number for number, token in added.items() if token.special and token.content not in PLAIN
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; nothing is added."""
        # the fast one keeps no offsets
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text that agents and verifiers see: every id, control marks in full, unknown ids as U+FFFD."""
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
        """Whether the id is a control mark: the last of an output may be what ended it."""
        return token in self._control

    def knows(self, token: int) -> bool:
        """Whether the tokenizer has text for the id."""
        return token in self._known

    def literal(self, ids: Sequence[int]) -> str:
        """The text of every known id, control marks included."""
        return self._run([token for token in ids if token in self._known])

    def _run(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""


def _eos(config: dict[str, Any]) -> frozenset[int]:
    """eos_token_id: one id, several, or none."""
    ids = config.get("eos_token_id")
    return frozenset(ids if isinstance(ids, list) else () if ids is None else (ids,))


def _longest(declared: dict[str, Any], vocabulary: Mapping[str, int]) -> int:
    """See TextTokens.longest. A bound is known where each byte has an id of its own, and nothing takes characters away
    before: NFC alone makes one character of at most four."""
    before = [*_steps(declared.get("normalizer")), *_steps(declared.get("pre_tokenizer"))]
    kinds = {step["type"] for step in before}
    if not vocabulary.keys() >= BYTES or "ByteLevel" not in kinds or kinds - KEEPS:
        return 0
    if any(step.get("behavior") == "Removed" for step in before):
        return 0
    return max(map(len, vocabulary)) * (4 if "NFC" in kinds else 1)


def _steps(declared: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """What a part of a tokenizer does, one after the other."""
    if declared is None:
        return
    inner = declared.get("normalizers") or declared.get("pretokenizers")
    if inner is None:
        yield declared
    for one in inner or ():
        yield from _steps(one)


class TextStream:
    """Text of a growing id sequence, given out only where further ids cannot change it."""

    WINDOW = 8
    """Ids decoded again before new ones: what a byte-level or a word-piece decoder may look back on."""

    def __init__(self, tokens: TextTokens) -> None:
        self._tokens = tokens
        self._ids: list[int] = []
        self._marks: list[int] = []
        """Control marks at the end."""
        self._settled = 0
        self._text = ""

    def push(self, ids: Sequence[int]) -> str:
        """All text so far but an unfinished character, or control marks, at its end."""
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
"""An answer that no template contains."""
OPEN = "Zq7-and-so-on"
"""Marks where a prefill is to go on."""
HISTORY: tuple[dict[str, Any], ...] = ({"role": "user", "content": "d"},)
"""The dummy history. It does not end in an assistant message: stock Qwen3 renders the last of those differently."""
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "description": "d"}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}]
KEPT_OPENINGS = 256


CHECKED = (("user",), ("tool",), ("tool", "tool"), ("tool", "user"))
"""Roles of the messages that come after an answer, as a rule."""


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
        self._openings: dict[tuple[bytes, tuple[str, ...]], str] = {}
        """Texts of the dummy history, by the tools as they came and by what the template prints of the date."""
        self._system_anywhere = self._probe_system()
        self._arguments_as_text = self._probe_arguments()
        self._ending = self._probe_ending()
        self._markers = self._probe_markers()

    @property
    def end_of_turn(self) -> int | None:
        """The id by which the template ends an assistant's turn."""
        return self._ending.mark if self._ending else None

    def ends(self, token: int, stops: Sequence[int]) -> bool:
        """Whether the last id of an output that was stopped is what stopped it, and no part of what was said: a mark
        that closes calls may be both (Apertus)."""
        if self.tokens.special.get(token) in MARKS:
            return False
        return token in stops or token in (self.end_of_turn, *self.tokens.eos) or self.tokens.is_control(token)

    def full(self, messages: Sequence[Message], tools: Any, now: datetime | None = None) -> list[int]:
        """Ids of the whole conversation up to where the model goes on. Raises BadRequest."""
        return self.tokens.encode(self.text(messages, tools, now))

    def text(self, messages: Sequence[Message], tools: Any, now: datetime | None = None) -> str:
        """The whole conversation as the template writes it, up to where the model goes on; `now`: what it prints of
        the date. Raises BadRequest."""
        return self._rendered([one.template for one in messages], tools, now)

    def ended(self, messages: Sequence[Message], tools: Any) -> str:
        """The same with its last message brought to its end, as one that was answered so. Raises BadRequest."""
        return self.template.render(self._fitted([one.template for one in messages]), tools, generate=False)

    @property
    def end_mark(self) -> str:
        """The text of `end_of_turn`; empty without one."""
        return self._ending.mark_text if self._ending else ""

    def _fitted(self, messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """As the template takes them."""
        if self._arguments_as_text:
            messages = [_with_text(one) for one in messages]
        if not self._system_anywhere:
            # Harnesses put system messages between others, and repeat a refused request with other tools: what such a
            # template has no place for is said by the user.
            messages = [{**one, "role": "user"} if at and one["role"] == "system" else one
                        for at, one in enumerate(messages)]  # fmt: skip
        return messages

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Any, now: datetime | None = None) -> str:
        """Up to the end of the generation prompt, or of a last message of the assistant's: a prefill is left open, as
        by `continue_final_message` of transformers. Raises BadRequest, PrefillNotServed."""
        messages = self._fitted(messages)
        *before, last = messages
        if last["role"] != "assistant":
            return self.template.render(messages, tools, generate=True, now=now)
        opened = {**last, "content": f"{last['content']}{OPEN}"}
        whole = self.template.render([*before, opened], tools, generate=False, now=now)
        if whole.count(OPEN) != 1:
            raise PrefillNotServed(
                "the model's chat template does not write the assistant's last message once and to its end, so that it "
                "cannot be continued: end the messages with another role",
                param="messages",
            )
        return whole[: whole.index(OPEN)]

    def continuation(
        self, last: int, new: Sequence[Message], tools: Any, now: datetime | None = None
    ) -> list[int] | None:
        """close + delta: the ids to put after a base whose last id is `last`. None where the template cannot append
        this kind, or where the base ends in another role's mark. `now`: see `text`. Raises BadRequest."""
        kind = Kind(
            tuple(one.role for one in new),
            any(one.reasoning for one in new),
            bool(tools),
            any(one.pictures for one in new),
        )
        if not self._incremental(kind):
            return None
        delta = self._delta([one.template for one in new], tools, now)
        return None if delta is None else self._closed(last, delta)

    def appended(self) -> dict[str, bool]:
        """Whether the template appends what agents most often send after an answer, or writes the whole conversation
        anew: by the roles of the messages, and whether tools are offered."""
        kinds = [Kind(roles, reasoning=False, tools=tools) for tools in (False, True) for roles in CHECKED]
        return {"+".join(one.roles) + " with tools" * one.tools: self._incremental(one) for one in kinds}

    def without_end(self, answer: str) -> str:
        """An answer as it was sampled: without the marks that end it, but for one that ends its calls, too."""
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

    def attempted(self, messages: list[dict[str, Any]], tools: Any) -> str | None:
        """A conversation as the template writes it, None if it refuses; an answer at its end is whole."""
        try:
            return self.template.render(self._fitted(messages), tools, generate=messages[-1]["role"] != "assistant")
        except BadRequest:
            return None

    def _incremental(self, kind: Kind) -> bool:
        if kind not in self._kinds:
            self._kinds[kind] = self._probe(kind)
        return self._kinds[kind]

    def _closed(self, last: int, delta: str) -> list[int] | None:
        assert self._ending is not None
        text, mark, mark_text = self._ending
        if mark is not None:
            return self.tokens.encode((text[len(mark_text) :] if last == mark else text) + delta)
        ids = self.tokens.encode(text + delta)
        if not text and last in self._markers:  # the next role's mark is the end of the turn
            return ids[1:] if ids[:1] == [last] else None
        return ids

    def _delta(self, new: list[dict[str, Any]], tools: Any, now: datetime | None = None) -> str | None:
        """The text of new messages up to where the model goes on: the difference of two renders over a dummy
        history."""
        now = now or datetime.now(UTC)
        written = orjson.dumps(tools)  # another order of keys is another text
        opening = self._openings.get((written, self.template.dates(now)))
        if opening is None:
            opening = self.template.render(HISTORY, tools, generate=False, now=now)
            if len(self._openings) >= KEPT_OPENINGS:
                self._openings.clear()
            self._openings[written, self.template.dates(now)] = opening
        whole = self._rendered([*HISTORY, *new], tools, now)
        return whole[len(opening) :] if whole.startswith(opening) else None

    def _probe_system(self) -> bool:
        """Whether the template writes a system message that is not the first."""
        try:
            return SENTINEL in self.template.render(
                [*HISTORY, {"role": "system", "content": SENTINEL}], None, generate=True
            )
        except BadRequest:
            return False

    def _probe_arguments(self) -> bool:
        """Whether the template writes calls whose arguments are JSON text, and refuses objects (DeepSeek's do)."""
        called = {"role": "assistant", "content": "", "tool_calls": probe_calls(1)}
        return not self._takes([*HISTORY, called]) and self._takes([*HISTORY, _with_text(called)])

    def _takes(self, messages: list[dict[str, Any]]) -> bool:
        try:
            return bool(self.template.render(messages, TOOLS, generate=False))
        except BadRequest:
            return False

    def _probe_ending(self) -> Ending | None:
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
            return Ending(text, first[0], self.tokens.special[first[0]])
        return Ending(text, None, "")

    def _probe_markers(self) -> frozenset[int]:
        """First ids of what each role's message begins with, where those are special tokens."""
        markers = set()
        for role in ("system", "user", "tool", "assistant"):
            try:
                delta = self._delta([{"role": role, "content": "x"}], None)
            except BadRequest:
                continue
            markers.update(self.tokens.encode(delta or "")[:1])
        return frozenset(markers & self.tokens.special.keys())

    def _probe(self, kind: Kind) -> bool:
        """Whether full renders of the probe conversations end in what `continuation` would append, text and ids."""
        verdicts = [self._probed(kind, answer, new) for answer, new in _canned(kind)]
        return True in verdicts and False not in verdicts

    def _probed(self, kind: Kind, answer: dict[str, Any], new: list[dict[str, Any]]) -> bool | None:
        """Of one conversation; None where the template refuses it, so that it never comes, and where nothing tells its
        answer."""
        if self._ending is None:
            return False
        tools = TOOLS if kind.tools else None
        asked = [{"type": "image"}, {"type": "text", "text": "u"}] if kind.images else "u"
        conversation = [{"role": "user", "content": asked}, answer, *new]
        now = datetime.now(UTC)
        try:
            whole = self._rendered(conversation, tools, now)
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
            whole = self._rendered([{"role": "system", "content": "s"}, *conversation], tools, now)
        except BadRequest:
            return True  # a template without system messages never meets one
        return self._appends(whole, self._ending.text + delta)

    def _appends(self, whole: str, tail: str) -> bool:
        if not whole.endswith(tail) or SENTINEL not in whole[: len(whole) - len(tail)]:
            return False
        head = whole[: len(whole) - len(tail)]
        return self.tokens.encode(head) + self.tokens.encode(tail) == self.tokens.encode(whole)


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as JSON text."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else tojson(arguments)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message


def probe_calls(count: int) -> list[dict[str, Any]]:
    """Calls as agents send them back. Some templates write no content beside them: the sentinel is in both."""
    function = {"name": "f", "arguments": {"a": SENTINEL}}
    return [{"type": "function", "id": f"call0000{at}", "function": function} for at in range(count)]


def _canned(kind: Kind) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Answers, and the messages of a kind that come after them. A template may tell a result's tool by the call that
    it answers, by the name that it brings, or not at all, and agents send results with and without either; calls come
    alone and beside a text, several at once unless the template takes one alone."""
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
    """How many of tools come first."""
    return next((at for at, role in enumerate(roles) if role != "tool"), len(roles))
