"""An output's text read as it grows, into parts that only grow: what is unstreamed is the fold of the same stream.

Text and reasoning come out as soon as nothing that follows can change them, a call when it closes. What is no
well-formed call, or one that never closes, stays text: nothing that was sampled is lost, or a failure. White space
around reasoning and calls belongs to neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(slots=True)
class Text:
    """Content. The last part of a growing output may grow."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """What was thought. The last part of a growing output may grow."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """One call; `arguments` is compact JSON text."""

    name: str
    arguments: str


Part = Text | Reasoning | Call


class Marks(NamedTuple):
    """The texts between which something stands."""

    opening: str
    closing: str


JSON_STRING = Marks('"', '"')
IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""What of a JSON string comes before its end, or before a backslash of which more must come."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls: a block between marks, that `read` makes calls of."""

    marks: Marks
    """An empty closing mark is the end of the output."""
    read: Callable[[str, Sequence[Any]], Sequence[Call] | None]
    """(what stands between the marks, the schemas of the tools that were offered) -> its calls; None if it is none."""
    around: Marks | None = None
    """What may stand around blocks, and belongs to the text only where there is none."""
    bare: Callable[[Sequence[Any]], Sequence[str]] = lambda _: ()
    """The schemas of the tools -> how an answer may begin that is a block as a whole, without marks."""
    read_bare: Callable[[str, Sequence[Any]], Sequence[Call] | None] | None = None
    """As `read`, of such a block; None: `read` itself."""
    values: Marks | None = JSON_STRING
    """Between which a block's closing mark is part of a value. None: no value can hold it."""
    around_arguments: tuple[str, str] | None = None
    """What an answer says before and after the arguments of its only call, NAME for the tool's name, where these are
    JSON: a grammar holds answers to it."""
    ids: Callable[[str, int, str], str] | None = None
    """(tool, number of calls before, a client's id) -> the id that the chat template shows, where it takes no other or
    the model writes it itself; of a result that answers no call, the tool is empty. None: the client's."""
    whole: Callable[[str, Sequence[Any]], Sequence[Part] | None] | None = None
    """Takes a whole answer apart, at its end, where a family writes no block but messages; None: what it is given is
    no such answer."""


@dataclass(slots=True)
class Parser:
    """Reads one output. Without `calls` or `thinking` there is no such thing: all is text."""

    calls: CallFormat | None
    thinking: Marks | None = None
    inside: bool = False
    """Reasoning goes on: at first, where the prompt ended in its opening mark."""
    tools: Sequence[Any] = ()
    """Schemas of the tools that were offered."""
    parts: list[Part] = field(default_factory=list)
    """In the order in which they were said."""
    ill_formed: int = 0
    """Blocks that look like calls and are none."""
    _pending: str = ""
    """Not decided yet."""
    _space: str = ""
    """White space behind what was given out: of the text if text follows."""
    _bare: bool = False
    """The white space that comes now belongs to nothing."""
    _sought: int = 0
    """How far a pending block was searched for the mark that closes it."""
    _in_value: bool = False
    """That place is in a value of the block."""
    _first: int = -1
    """The first closing mark in a pending block, where it stands in a value."""
    _begun: bool = False
    """Reasoning does not begin any more."""
    _bare_block: bool | None = None
    """Whether the whole answer may be a block without marks; None: not decided."""

    def push(self, text: str) -> None:
        """More of the output."""
        self._pending += text
        while self._step():
            pass

    def end(self) -> None:
        """Nothing follows."""
        calls, opened = self.calls, False
        if calls is not None and calls.whole is not None:
            self._messages(calls.whole(self._pending, self.tools))
            return
        while calls is not None and self._first >= 0:
            self._break(calls)
            self.push("")
        left, self._pending = self._pending, ""
        if self.inside:
            self._grow(Reasoning, left)
            return
        if calls is not None and self._bare_block:
            self._block(calls, left, left.strip())
        elif calls is not None and left.startswith(calls.marks.opening):
            self._block(calls, left, None if calls.marks.closing else left[len(calls.marks.opening) :])
        else:
            self._grow(Text, left)
        if calls is not None and calls.around is not None:
            opened = calls.around.opening in self._space
        if opened or (self._space and not any(isinstance(part, Call) for part in self.parts)):
            self._append(Text, self._space)

    def _messages(self, found: Sequence[Part] | None) -> None:
        assert self.calls is not None, "its format takes the answer apart"
        self.ill_formed += found is None and bool(self.tools) and self.calls.marks.opening in self._pending
        self.parts += [Text(self._pending)] if found is None and self._pending else found or ()
        self._pending = ""

    def _step(self) -> bool:
        """Decide about the next piece of what is pending; whether there is another one to decide about."""
        if self.calls is not None and self.calls.whole is not None:
            return False
        if self.thinking is not None and self.inside:
            return self._reasoning(self.thinking)
        if self.thinking is not None and not self._begun:
            start = self._pending.lstrip()
            if start.startswith(self.thinking.opening):
                self._pending, self.inside, self._bare = start[len(self.thinking.opening) :], True, True
                return True
            if start.startswith(self.thinking.closing):  # an answer without reasoning may begin so (MiniMax M3)
                self._pending, self._bare, self._begun = start[len(self.thinking.closing) :], True, True
                return True
            if any(mark.startswith(start) for mark in self.thinking):
                return False
        self._begun = True
        if self.calls is not None:
            return self._content(self.calls)
        self._grow(Text, self._pending)
        self._pending = ""
        return False

    def _reasoning(self, thinking: Marks) -> bool:
        self._given_out(Reasoning, thinking.closing)
        if not self._pending.startswith(thinking.closing):
            return False
        self._pending = self._pending[len(thinking.closing) :]
        self._space, self._bare, self.inside, self._begun = "", True, False, True
        return True

    def _content(self, calls: CallFormat) -> bool:
        if self._bare_block is None:
            start, beginnings = self._pending.lstrip(), calls.bare(self.tools)
            if not start or any(len(start) < len(one) and one.startswith(start) for one in beginnings):
                return False
            self._bare_block = any(start.startswith(one) for one in beginnings)
        if self._bare_block:
            return False
        opening, closing = calls.marks.opening, calls.marks.closing
        self._given_out(Text, opening, calls.around)
        if not closing or not self._pending.startswith(opening):
            return False
        end = self._end_of_block(calls)
        if end is None:
            return False
        body = self._pending[len(opening) : end]
        if end < 0 or (found := calls.read(body, self.tools)) is None:
            self._break(calls)
            return True
        self._pending = self._pending[end + len(closing) :]
        self._called(found)
        return True

    def _end_of_block(self, calls: CallFormat) -> int | None:
        """Where the mark stands that closes the pending block: the first outside of values. None: nowhere yet; below 0:
        a block that never closed is followed by another."""
        text, (opening, closing), values = self._pending, calls.marks, calls.values
        overlap = max(map(len, (opening, closing, *(values or ()))))
        at = max(len(opening), self._sought)
        mark = text.find(closing, max(len(opening), at - overlap))
        while True:
            if not self._in_value:
                mark = text.find(closing, at) if 0 <= mark < at else mark
                value = -1 if values is None else text.find(values.opening, at)
                if mark >= 0 and not 0 <= value < mark:
                    return mark
                if value < 0 or values is None:
                    self._sought = max(at, len(text) - overlap)
                    return None
                self._in_value, at = True, value + len(values.opening)
                continue
            assert values is not None, "nothing is a value"
            end = text.find(values.closing, at)
            if values is JSON_STRING:
                at = _end_of_string(text, at)
                end = at if text.startswith(values.closing, at) else -1
            if mark >= 0 and not 0 <= end < mark and self._first < 0:
                self._first = mark
            if self._first >= 0 and values is not JSON_STRING:
                marks = {opening, values.opening} - {values.closing}
                others = (text.find(one, max(at, self._first)) for one in marks)
                if any(other >= 0 and not 0 <= end < other for other in others):
                    return -1
            if end < 0:
                self._sought = at if values is JSON_STRING else max(at, len(text) - overlap)
                return None
            self._in_value, at = False, end + len(values.closing)

    def _break(self, calls: CallFormat) -> None:
        """What is pending begins with a block that is none: text up to its first closing mark."""
        closing = calls.marks.closing
        end = self._pending.index(closing, len(calls.marks.opening)) + len(closing)
        whole, self._pending = self._pending[:end], self._pending[end:]
        self._block(calls, whole, None)

    def _block(self, calls: CallFormat, whole: str, body: str | None) -> None:
        """What looks like calls, and what `read` is to make calls of; None: it never closed."""
        read = (calls.read_bare if self._bare_block else None) or calls.read
        found = None if body is None else read(body, self.tools)
        if found is not None:
            self._called(found)
            return
        counted = calls.around is not None and calls.around.opening in self._space
        self.ill_formed += not counted and not self._bare_block
        self._sought, self._in_value, self._first = 0, False, -1
        self._grow(Text, whole)

    def _called(self, found: Sequence[Call]) -> None:
        """What was pending was a block of calls."""
        self.parts += found
        self._space, self._bare = "", True
        self._sought, self._in_value, self._first = 0, False, -1

    def _given_out(self, kind: type[Text | Reasoning], mark: str, around: Marks | None = None) -> None:
        """Give out what is pending before the mark, or before what may be its beginning."""
        at = beginning(self._pending, mark)
        if around is not None:
            at = min(at, unfinished(self._pending, around.opening), unfinished(self._pending, around.closing))
        self._grow(kind, self._pending[:at])
        self._pending = self._pending[at:]

    def _grow(self, kind: type[Text | Reasoning], text: str) -> None:
        around = self.calls.around if self.calls is not None and kind is Text else None
        text = self._space + text
        if self._bare:
            text = text.lstrip()
            while around and self.parts and isinstance(self.parts[-1], Call) and text.startswith(around.closing):
                text = text.removeprefix(around.closing).lstrip()
        said = text.rstrip()
        while around and said.endswith(around.opening):
            said = said.removesuffix(around.opening).rstrip()
        self._space = text[len(said) :]
        if said:
            self._bare = False
            self._append(kind, said)

    def _append(self, kind: type[Text | Reasoning], text: str) -> None:
        if kind is Text and self.calls is not None and self.calls.around is not None:
            self.ill_formed += text.count(self.calls.around.opening)
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            last.text += text
        else:
            self.parts.append(kind(text))


def _end_of_string(text: str, at: int) -> int:
    """How far the JSON string goes in which a place of a text stands: to its closing quote, as far as it is known."""
    found = IN_STRING.match(text, at)
    assert found is not None, "it matches the empty text"
    return found.end()


def beginning(text: str, mark: str) -> int:
    """Where the mark begins, or may be beginning at the end of a growing text; the text's length if nowhere."""
    at = text.find(mark)
    return at if at >= 0 else unfinished(text, mark)


def unfinished(text: str, mark: str) -> int:
    """Where the mark may be beginning at the end of a growing text; the text's length if nowhere."""
    return next((len(text) - size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), len(text))


def shortened(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """(the text before the first of the stop sequences, that one); of a text with none of them, all and None."""
    at, stop = min(((found, stop) for stop in stops if (found := text.find(stop)) >= 0), default=(len(text), None))
    return text[:at], stop


def certain(text: str, stops: Sequence[str]) -> str:
    """As much of a growing text as comes before every stop sequence, whatever follows."""
    return text[: min((beginning(text, stop) for stop in stops), default=len(text))]
