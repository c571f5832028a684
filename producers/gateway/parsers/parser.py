"""Incremental parser of an output's text, into parts that only grow: an answer that is not streamed is the fold of the
same stream.

Text and reasoning are emitted as soon as nothing that follows can change them, a call when it closes. A malformed call,
or one that never closes, stays text: nothing that was sampled is lost or causes a failure. White space around reasoning
and calls belongs to neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(slots=True)
class Text:
    """Content. Only the last part of a running output grows."""

    text: str


@dataclass(slots=True)
class Reasoning:
    """Reasoning. Only the last part of a running output grows."""

    text: str


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call; `arguments` is compact JSON text."""

    name: str
    arguments: str


Part = Text | Reasoning | ParsedCall


class Delimiters(NamedTuple):
    """Opening and closing text around an element of the output."""

    opening: str
    closing: str


JSON_STRING = Delimiters('"', '"')
IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
"""Matches a JSON string up to its end, or up to a backslash whose escape is incomplete."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The way in which a family of models writes calls: a block between marks, which `read` turns into calls."""

    marks: Delimiters
    """Marks of a block. An empty closing mark stands for the end of the output."""
    read: Callable[[str, Sequence[Any]], Sequence[ParsedCall] | None]
    """(text between the marks, schemas of the offered tools) -> its calls; None if the text is malformed."""
    around: Delimiters | None = None
    """Optional marks around blocks, which belong to the text only if there is no block."""
    bare: Callable[[Sequence[Any]], Sequence[str]] = lambda _: ()
    """Schemas of the tools -> possible beginnings of an answer that as a whole is one block without marks."""
    read_bare: Callable[[str, Sequence[Any]], Sequence[ParsedCall] | None] | None = None
    """Reader of such a block, with the signature of `read`; None: `read` itself."""
    values: Delimiters | None = JSON_STRING
    """Delimiters of a value in which a block's closing mark is part of the value. None: no value can contain the
    mark."""
    around_arguments: tuple[str, str] | None = None
    """Text before and after the arguments of an answer's only call, with NAME for the tool's name, if the family writes
    arguments as JSON. A grammar holds answers to it."""
    ids: Callable[[str, int, str], str] | None = None
    """(tool, number of earlier calls, a client's id) -> the id that the chat template shows, if the template accepts no
    other or the model writes ids itself. The tool is empty for a result that answers no call. None: the client's id."""
    whole: Callable[[str, Sequence[Any]], Sequence[Part] | None] | None = None
    """Parses a whole answer at its end, for a family that writes messages instead of blocks. The result is None if the
    text is no such answer."""


@dataclass(slots=True)
class OutputParser:
    """Parser of one output. Without `calls` or `thinking`, the output has none of these: all is text."""

    calls: CallFormat | None
    thinking: Delimiters | None = None
    inside: bool = False
    """True while reasoning goes on; at the start, if the prompt ended in its opening mark."""
    tools: Sequence[Any] = ()
    """Schemas of the offered tools."""
    parts: list[Part] = field(default_factory=list)
    """Parts in the order of the output."""
    ill_formed: int = 0
    """Number of blocks that look like calls but are malformed."""
    _pending: str = ""
    """Text that is not assigned to a part yet."""
    _space: str = ""
    """White space after the emitted text; it belongs to the text if more text follows."""
    _bare: bool = False
    """True if white space that comes now belongs to no part."""
    _sought: int = 0
    """Position up to which a pending block was searched for its closing mark."""
    _in_value: bool = False
    """True if that position is inside a value of the block."""
    _first: int = -1
    """Position of the first closing mark in a pending block, if it is inside a value; -1 if there is none."""
    _begun: bool = False
    """True once reasoning can no longer begin."""
    _bare_block: bool | None = None
    """True if the whole answer may be a block without marks; None while undecided."""

    def push(self, text: str) -> None:
        """Parse more of the output."""
        self._pending += text
        while self._step():
            pass

    def end(self) -> None:
        """Parse what is pending; nothing follows."""
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
        if opened or (self._space and not any(isinstance(part, ParsedCall) for part in self.parts)):
            self._append(Text, self._space)

    def _messages(self, found: Sequence[Part] | None) -> None:
        assert self.calls is not None, "its format takes the answer apart"
        self.ill_formed += found is None and bool(self.tools) and self.calls.marks.opening in self._pending
        self.parts += [Text(self._pending)] if found is None and self._pending else found or ()
        self._pending = ""

    def _step(self) -> bool:
        """Assign the next piece of the pending text. Return whether there may be another."""
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

    def _reasoning(self, thinking: Delimiters) -> bool:
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
        self._add_calls(found)
        return True

    def _end_of_block(self, calls: CallFormat) -> int | None:
        """Return the position of the mark that closes the pending block: the first one outside values. None: not found
        yet. A negative result: the block never closed, and another follows."""
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
        """Turn the malformed block at the start of the pending text into text, up to its first closing mark."""
        closing = calls.marks.closing
        end = self._pending.index(closing, len(calls.marks.opening)) + len(closing)
        whole, self._pending = self._pending[:end], self._pending[end:]
        self._block(calls, whole, None)

    def _block(self, calls: CallFormat, whole: str, body: str | None) -> None:
        """Read a block `whole` whose inner text is `body`, or None if it never closed; keep a malformed block as
        text."""
        read = (calls.read_bare if self._bare_block else None) or calls.read
        found = None if body is None else read(body, self.tools)
        if found is not None:
            self._add_calls(found)
            return
        counted = calls.around is not None and calls.around.opening in self._space
        self.ill_formed += not counted and not self._bare_block
        self._sought, self._in_value, self._first = 0, False, -1
        self._grow(Text, whole)

    def _add_calls(self, found: Sequence[ParsedCall]) -> None:
        """Add the calls of a block, and reset the search state."""
        self.parts += found
        self._space, self._bare = "", True
        self._sought, self._in_value, self._first = 0, False, -1

    def _given_out(self, kind: type[Text | Reasoning], mark: str, around: Delimiters | None = None) -> None:
        """Emit the pending text before the mark, or before what may be its beginning."""
        at = beginning(self._pending, mark)
        if around is not None:
            at = min(
                at, find_partial_mark(self._pending, around.opening), find_partial_mark(self._pending, around.closing)
            )
        self._grow(kind, self._pending[:at])
        self._pending = self._pending[at:]

    def _grow(self, kind: type[Text | Reasoning], text: str) -> None:
        around = self.calls.around if self.calls is not None and kind is Text else None
        text = self._space + text
        if self._bare:
            text = text.lstrip()
            while around and self.parts and isinstance(self.parts[-1], ParsedCall) and text.startswith(around.closing):
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
    """Return the end of the JSON string that contains position `at`: its closing quote, or the end of the known
    text."""
    found = IN_STRING.match(text, at)
    assert found is not None, "it matches the empty text"
    return found.end()


def beginning(text: str, mark: str) -> int:
    """Return the position at which the mark begins, or may begin at the end of a growing text; the text's length if
    nowhere."""
    at = text.find(mark)
    return at if at >= 0 else find_partial_mark(text, mark)


def find_partial_mark(text: str, mark: str) -> int:
    """Return the position at which the mark may begin at the end of a growing text; the text's length if nowhere."""
    return next((len(text) - size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), len(text))


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return (the text before the first stop sequence, that sequence); the whole text and None if it contains none."""
    at, stop = min(((found, stop) for stop in stops if (found := text.find(stop)) >= 0), default=(len(text), None))
    return text[:at], stop


def certain(text: str, stops: Sequence[str]) -> str:
    """Return the beginning of a growing text that precedes every stop sequence, whatever follows."""
    return text[: min((beginning(text, stop) for stop in stops), default=len(text))]
