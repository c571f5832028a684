"""What the turns of one session said, kept only for policies that route by messages: O(new messages) a turn."""

from __future__ import annotations

from dataclasses import dataclass

from turnlog.processors.core.errors import BaseUnknown, BrokenMessages, PayloadNotFetched
from turnlog.processors.core.messages import Message, NotMessages, messages, response
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.schemas.events import TurnCompleted
from turnlog.schemas.types import Payload


@dataclass(frozen=True, slots=True, eq=False)
class Dialogue:
    """A turn's request, as what it adds to its base's dialogue, and the response to it."""

    base: Dialogue | None
    new: tuple[Message, ...]
    response: Message

    @property
    def silent(self) -> bool:
        """The request has no message: neither its own nor a base's."""
        return self.base is None and not self.new


class Dialogues:
    """By turn. A base's record stands before its continuations' in agent.turns."""

    def __init__(self) -> None:
        self._of: dict[TurnKey, Dialogue] = {}

    def add(self, event: TurnCompleted) -> None:
        """Keep the first record of a turn. Raises BrokenMessages, BaseUnknown; PayloadNotFetched for a BlobRef."""
        base = None
        if event.base_turn is not None:
            base = self._of.get(key_of(event.base_turn))
            if base is None:
                raise BaseUnknown(
                    event.session_id, event.turn, f"base_turn {event.base_turn} has no readable record before it",
                    "a base's TurnCompleted stands before its continuation's in agent.turns",
                )  # fmt: skip
        try:
            new = messages(_inline(event, "new_messages", event.new_messages))
            said = response(_inline(event, "response", event.response))
        except NotMessages as error:
            raise BrokenMessages(
                event.session_id, event.turn, str(error), "new_messages is a JSON list, response a JSON object"
            ) from error
        self._of[key_of(event.turn)] = Dialogue(base, new, said)

    def __getitem__(self, turn: TurnKey) -> Dialogue:
        """Of a turn whose record was not refused."""
        return self._of[turn]


def _inline(event: TurnCompleted, field: str, payload: Payload) -> bytes:
    if not isinstance(payload, bytes):
        raise PayloadNotFetched(event.session_id, field)
    return payload
