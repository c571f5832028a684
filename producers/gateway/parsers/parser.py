"""An output's text read as it grows, into parts that only grow: what is unstreamed is the fold of the same stream.

Text and reasoning come out as soon as nothing that follows can change them, a call when it closes. What is no
well-formed call, or one that never closes, stays text: nothing that was sampled is lost, or a failure. White space
around reasoning and calls belongs to neither.
"""

from __future__ import annotations

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
    around_arguments: tuple[str, str] | None = None
    """What an answer says before and after the arguments of its only call, NAME for the tool's name, where these are
    JSON: a grammar holds answers to it."""
    ids: Callable[[str, int, str], str] | None = None
    """(tool, number of calls before, a client's id) -> the id that the chat template shows, where it takes no other or
    the model writes it itself; of a result that answers no call, the tool is empty. None: the client's."""


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
    """How far no closing mark was found in a block that is pending."""
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
        left, self._pending = self._pending, ""
        if self.inside:
            self._grow(Reasoning, left)
            return
        calls, opened = self.calls, False
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

    def _step(self) -> bool:
        """Decide about the next piece of what is pending; whether there is another one to decide about."""
        if self.thinking is not None and self.inside:
            return self._reasoning(self.thinking)
        if self.thinking is not None and not self._begun:
            start = self._pending.lstrip()
            if start.startswith(self.thinking.opening):
                self._pending, self.inside, self._bare = start[len(self.thinking.opening) :], True, True
                return True
            if self.thinking.opening.startswith(start):
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
        end = self._pending.find(closing, max(len(opening), self._sought - len(closing)))
        self._sought = 0 if end >= 0 else len(self._pending)
        if end < 0:
            return False
        body, whole = self._pending[len(opening) : end], self._pending[: end + len(closing)]
        self._pending = self._pending[len(whole) :]
        self._block(calls, whole, body)
        return True

    def _block(self, calls: CallFormat, whole: str, body: str | None) -> None:
        """What looks like calls, and what `read` is to make calls of; None: it never closed."""
        found = None if body is None else calls.read(body, self.tools)
        if found is not None:
            self.parts += found
            self._space, self._bare = "", True
            return
        counted = calls.around is not None and calls.around.opening in self._space
        self.ill_formed += not counted and not self._bare_block
        self._grow(Text, whole)

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
