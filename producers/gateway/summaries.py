"""Summaries: recognise that a request goes on from a turn's summary of the history, whichever harness or loop sent it.

An agent that compacts its history requests a summary, drops the messages, and begins anew with a text that contains the
summary. That text tells which turn was the summary, without any mark of the agent's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from turnlog.producers.gateway.conversation import RecordedTurn
from turnlog.producers.gateway.messages import Message
from turnlog.producers.gateway.profiles import is_player
from turnlog.schemas.types import TurnId

TAGS = ("summary", "state_snapshot")
"""Tags around the part of an answer that Claude Code and Qwen Code keep."""
LEAST = 16
"""Length in characters of the shortest text that counts: a shorter one stands in other texts by chance."""
NEWEST = 32
"""Number of turns that are considered, so that a session of many conversations costs no more."""


def quoted_summary(
    turns: dict[TurnId, RecordedTurn], messages: Sequence[Message], path: str | None = None
) -> TurnId | None:
    """Return the newest turn whose whole answer, or the tagged part of it, stands in one of a root's messages; None if
    there is none.

    Answers that were cut off, that call tools, that another turn continues, or that are another player's than the agent
    `path` are no summaries: a game tells its players what the others said. Messages that the turn was itself shown,
    such as a common system text, quote nothing."""
    long = [one for one in messages if one.characters >= LEAST]
    ends = (turn for turn in reversed(turns.values()) if turn.whole and not turn.continued)
    for turn in islice(ends, NEWEST if long else 0):
        if turn.response_raw.get("tool_calls") or (is_player(turn.agent_path) and turn.agent_path != path):
            continue
        quoting = _quoting(turn.response.text, long)
        if quoting and {one.digest for one in quoting} - {one.digest for _, one in turn.messages()[:-1]}:
            return turn.id
    return None


def _quoting(answer: str, messages: Sequence[Message]) -> list[Message]:
    parts = [answer.strip()]
    for tag in TAGS:
        start, end = answer.find(f"<{tag}>"), answer.rfind(f"</{tag}>")
        if 0 <= start < end:
            parts.append(answer[start + len(tag) + 2 : end].strip())
    parts = [part for part in parts if len(part) >= LEAST]
    return [one for one in messages if any(part in one.text for part in parts)]
