"""What a dialect is: an API that agents speak, read into one kind of request, and turns answered in its shape.

To add one, write its module here and enter it in DIALECTS of app.py. Inside the gateway, and on the log, messages have
the shape of OpenAI's chat: a dialect whose requests differ makes such messages of them before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnlog.producers.gateway import GatewayError
from turnlog.producers.gateway.conversation import Turn
from turnlog.producers.gateway.images import Admitted, Picture
from turnlog.producers.gateway.messages import Message, normalised
from turnlog.schemas.types import TurnId


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A request for a turn, in any dialect."""

    api: str
    """As TurnCompleted has it."""
    raw: list[Any]
    """messages as they came"""
    messages: tuple[Message, ...]
    tools: list[Any] | None
    max_new_tokens: int | None
    stream: bool
    include_usage: bool
    """In a stream."""
    sha256: str
    """Of the body's bytes."""
    images: Mapping[str, Admitted] = field(default_factory=dict)
    """By sha256, once they are in the store."""

    @property
    def pictures(self) -> list[Picture]:
        """Every image of the messages, in order."""
        return [picture for one in self.messages for picture in one.pictures]


class Answer(Protocol):
    """One turn in a dialect's shape, whole or as the data of server-sent events."""

    def whole(self, turn: Turn) -> bytes:
        """The body of an answer that is not streamed."""
        ...

    def beginning(self) -> bytes:
        """Sent at once, before anything is sampled."""
        ...

    def text(self, text: str) -> bytes:
        """More of the content."""
        ...

    def ending(self, turn: Turn, sent: str) -> bytes:
        """All that is missing of a turn of whose content `sent` has gone out."""
        ...

    def failed(self, error: GatewayError) -> bytes:
        """In place of the ending."""
        ...


class Dialect(Protocol):
    """One API."""

    path: str
    """Where turns are asked for."""

    def request(self, body: bytes, read: Callable[[Any], tuple[Message, ...]] = normalised) -> TurnRequest:
        """`read` makes messages of what came. Raises BadRequest naming the field."""
        ...

    def answer(self, request: TurnRequest, turn: TurnId, *, session_id: str, model: str) -> Answer:
        """The shape of the answer to a request."""
        ...

    def refusal(self, error: GatewayError) -> bytes:
        """The body of an answer without a turn."""
        ...
