"""Replaces secrets by placeholders: `[redacted:KIND:NUMBER]`, numbered in the order in which they first occur."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import orjson

from turnlog.infra.redaction.rules import NAMED, PLACEHOLDER, may_be_secret
from turnlog.infra.redaction.scanner import Scanner, Span

LAST = ("reasoning", "reasoning_content")
"""Members of a message that are numbered last, because clients leave them out of what they send back."""
KEPT = frozenset({"id", "tool_call_id", "call_id", "index", "role", "type", "image_url"})
"""Members of a message that are no text of anybody. Ids may look random, and images are not scanned."""
HIGHEST = 10**8
"""Numbers of placeholders in texts from which on they are taken for made up, so that ours keep at most nine digits."""


class Masker:
    """Masks the texts of one conversation, in order.

    The number of a secret depends on the texts that were masked before it and on nothing else, so that a conversation
    that is sent again, or continued on another machine, gets the same placeholders. It is never derived from the
    secret, which could be guessed from a hash. `scope` keeps numbers apart that were given in different places.
    """

    def __init__(self, scanner: Scanner, scope: str = "") -> None:
        self._scanner = scanner
        self._scope = f"{scope}." if scope else ""
        self._given: dict[tuple[str, str], int] = {}
        self._last: Counter[str] = Counter()

    def text(self, text: str) -> str:
        """Return a text without its secrets; the same object if it has none."""
        self._reserve(text)
        spans = self._scanner.find(text)
        return self._replace(text, spans) if spans else text

    def value(self, value: Any, kept: frozenset[str] = frozenset()) -> Any:
        """Return a JSON value whose texts and keys have no secrets; the same object if there are none. The text of a
        key that names a secret is one, and arguments of calls are read as the JSON that they are. Members named in
        `kept` stay as they are, but for those of arguments."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            items = [self.value(one, kept) for one in value]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if not isinstance(value, dict):
            return value
        masked = {name: self._member(name, value[name], kept) for name in sorted(value, key=_order)}
        names = {name: self.text(name) for name in masked}
        if all(names[name] == name and masked[name] is value[name] for name in value):
            return value
        return {names[name]: masked[name] for name in value}

    def message(self, raw: Any) -> Any:
        """Return a message in OpenAI's format without its secrets; the same object if it has none. Ids, roles and
        images stay as they are."""
        return self.value(raw, KEPT)

    def json(self, payload: bytes) -> bytes:
        """Return encoded JSON without its secrets; the same object if it has none. Bytes that are no JSON, as
        arguments that a model wrote, are masked as a text."""
        try:
            value = orjson.loads(payload)
        except orjson.JSONDecodeError:
            return self.content(payload)
        masked = self.value(value)
        return payload if masked is value else orjson.dumps(masked)

    def content(self, content: bytes) -> bytes:
        """Return the bytes of a text without its secrets; the same object if it has none. Bytes that are no UTF-8 stay
        as they are."""
        text = content.decode(errors="surrogateescape")
        masked = self.text(text)
        return content if masked is text else masked.encode(errors="surrogateescape")

    def _member(self, name: str, value: Any, kept: frozenset[str]) -> Any:
        if name in kept and name != "image_url" and isinstance(value, str):
            spans = [one for one in self._scanner.find(value) if one.kind != "random"]
            return self._replace(value, spans) if spans else value
        if name == "image_url" and name in kept:
            return value
        if not isinstance(value, str):
            return self.value(value, frozenset() if name == "arguments" else kept)
        if name == "arguments" and value.lstrip()[:1] in ("{", "["):
            try:
                parsed = orjson.loads(value)
            except orjson.JSONDecodeError:
                return self.text(value)
            masked = self.value(parsed)
            return value if masked is parsed else orjson.dumps(masked).decode()
        if NAMED.search(name) and may_be_secret(value, quoted=True) and not self._scanner.find(value):
            return self._replace(value, (Span(0, len(value), "password"),))
        return self.text(value)

    def _reserve(self, text: str) -> None:
        """Take the numbers of placeholders that the text has already."""
        if "[redacted:" not in text:
            return
        for kind, scope, number in PLACEHOLDER.findall(text):
            if scope == self._scope and int(number) < HIGHEST:
                self._last[kind] = max(self._last[kind], int(number))

    def _replace(self, text: str, spans: Iterable[Span]) -> str:
        parts: list[str] = []
        done = 0
        for start, end, kind in spans:
            parts += text[done:start], self._placeholder(kind, text[start:end])
            done = end
        return "".join([*parts, text[done:]])

    def _placeholder(self, kind: str, secret: str) -> str:
        number = self._given.get((kind, secret))
        if number is None:
            number = self._given[kind, secret] = self._last[kind] + 1
            self._last[kind] = number
        return f"[redacted:{kind}:{self._scope}{number}]"


def _order(name: str) -> tuple[bool, str]:
    return name in LAST, name


def count_placeholders(*texts: bytes | str | None) -> dict[str, int]:
    """Return the number of placeholders in texts by kind, sorted by kind."""
    counts: Counter[str] = Counter()
    for text in texts:
        shown = text.decode(errors="replace") if isinstance(text, bytes) else text or ""
        if "[redacted:" in shown:
            counts.update(kind for kind, _, _ in PLACEHOLDER.findall(shown))
    return dict(sorted(counts.items()))
