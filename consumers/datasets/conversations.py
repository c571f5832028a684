"""Conversations from agent.turns: the turns of a session are held until the one that ends it, then let go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from turnlog.consumers.datasets.chat import Message, messages_of, response_of, tools_json
from turnlog.consumers.datasets.errors import UnreadableMessage
from turnlog.consumers.datasets.source import Source
from turnlog.consumers.datasets.spine import Candidate
from turnlog.infra.log import Partition
from turnlog.schemas import topics
from turnlog.schemas.events import TurnCompleted
from turnlog.schemas.types import TurnId


@dataclass(frozen=True, slots=True)
class Conversation:
    """All messages up to the last response, and the tools that the last turn was offered (JSON text)."""

    messages: list[Message]
    tools: str
    turns: int


async def conversations(
    source: Source, unit: int, wanted: dict[str, Candidate]
) -> AsyncIterator[tuple[str, Conversation | str]]:
    """(session, its conversation or why there is none) of each wanted session of a unit, in the order in which they
    end on the log. Why: `unreadable`, or `incomplete` when a turn of it is not on the log."""
    held: dict[str, dict[TurnId, TurnCompleted]] = {}
    left = set(wanted)
    async for record, event in source.read(Partition(topics.TURNS.name, unit), TurnCompleted.__name__):
        assert isinstance(event, TurnCompleted)
        if event.session_id not in left:
            continue
        turns = held.setdefault(event.session_id, {})
        turns.setdefault(event.turn, event)  # the first record of a turn decides
        line = _line(turns, wanted[event.session_id].last)
        if line is not None:
            left.discard(event.session_id)
            del held[event.session_id]
            yield (
                event.session_id,
                await _conversation(source, line, f"{record.topic}[{record.partition}]@{record.offset}"),
            )
    for session in sorted(left):
        yield session, "incomplete"


def _line(turns: dict[TurnId, TurnCompleted], last: TurnId | None) -> list[TurnCompleted] | None:
    """The turns from the root to `last`; None while one is missing."""
    line: list[TurnCompleted] = []
    while last is not None and len(line) <= len(turns):
        turn = turns.get(last)
        if turn is None:
            return None
        line.append(turn)
        last = turn.base_turn
    return line[::-1] if last is None else None


async def _conversation(source: Source, line: list[TurnCompleted], where: str) -> Conversation | str:
    messages: list[Message] = []
    tools: bytes | None = None
    digest = None
    try:
        for each in line:
            about = f"{where}: turn {each.turn.index}"
            turn = await source.inlined(each, about)
            assert isinstance(turn, TurnCompleted)
            assert isinstance(turn.new_messages, bytes)
            assert isinstance(turn.response, bytes)
            messages += [*messages_of(turn.new_messages, about), response_of(turn.response, about)]
            if turn.tools is not None or turn.tools_sha256 != digest:  # a turn without tools names none
                assert turn.tools is None or isinstance(turn.tools, bytes)
                tools = turn.tools
            digest = turn.tools_sha256
        return Conversation(messages, tools_json(tools, where), len(line))
    except UnreadableMessage:
        return "unreadable"
