"""The messages of a session as a tree: what a request repeats is found again at the cost of a comparison.

A message's place is a link of the hash chain h_k = H(h_(k-1), message_k). One that comes in the very shape in which it
was seen last at its place is that message; only another one is normalised and hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orjson import dumps as _json

from turnlog.producers.gateway.messages import Message, listed, message

if TYPE_CHECKING:
    from turnlog.producers.gateway.conversation import Turn


@dataclass(slots=True, eq=False)
class Said:
    """A message at its place in a conversation."""

    above: Said | None
    chain: bytes
    raw: Any
    """As it was seen last."""
    message: Message | None
    """The same, normalised; None at the start, before the first."""
    next: Said | None = None
    """The message that was seen last after this one."""
    answers: list[Turn] = field(default_factory=list)
    """Turns whose messages and response end here."""
    root_reason: str = ""
    """Boundary reason of the first turn without a base that was asked exactly this."""


class MessageTree:
    """Messages of recorded turns; requests are read by it."""

    def __init__(self) -> None:
        self.start = Said(None, b"", None, None)
        self._said: dict[bytes, Said] = {}

    def read(self, raw: Any) -> tuple[Message, ...]:
        """The messages of a request. Raises BadRequest naming the message."""
        read: list[Message] = []
        said: Said | None = self.start
        for index, one in enumerate(listed(raw)):
            after = said.next if said is not None else None
            # Only calls hold values that are equal in Python and not in JSON, as 1 and true.
            if after is None or one != after.raw or ("tool_calls" in one and _json(one) != _json(after.raw)):
                this = message(one, f"messages[{index}]")
                after = self._said.get(_link(said, this)) if said is not None else None
                if said is not None and after is not None and not this.pictures:  # their bytes are kept in the store
                    said.next, after.raw, after.message = after, one, this
            else:
                assert after.message is not None
                this = after.message
            said = after
            read.append(this)
        return tuple(read)

    def passed(self, messages: Sequence[Message]) -> Iterator[Said]:
        """What is known of a conversation, message by message."""
        said = self.start
        for one in messages:
            after = said.next
            if after is None or after.message is not one:
                after = self._said.get(_link(said, one))
            if after is None:
                return
            yield after
            said = after

    def add(self, above: Said, raw: Any, one: Message) -> Said:
        """A message after another one."""
        link = _link(above, one)
        if link not in self._said:
            self._said[link] = Said(above, link, raw, one)
        above.next = self._said[link]
        return above.next

    def alias(self, above: Said, one: Message, known: Said) -> None:
        """Let a message after another one lead to where `known` is."""
        self._said.setdefault(_link(above, one), known)


def _link(above: Said, one: Message) -> bytes:
    return hashlib.blake2b(above.chain + one.digest, digest_size=16).digest()
