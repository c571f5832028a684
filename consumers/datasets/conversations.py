"""The views `sft` and `preference`: conversations of agent.turns as rows, written once their last turn has been read.

The turns of a session are held in memory only until its last one. Messages have the chat format that is common for
training: OpenAI's, with every column present and null if absent. Text blocks are joined into one text; `developer`
becomes `system`; tool arguments are JSON text. If a message has content that these columns cannot represent (images,
audio), it is treated as unreadable, rather than written incorrectly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson

from turnlog.consumers.datasets import UnreadableMessage
from turnlog.consumers.datasets.query import Filters, Joined, Seen, TaskFacts
from turnlog.consumers.datasets.source import Candidate, DatasetInput, best_of_groups, candidates, pairs_of
from turnlog.consumers.datasets.writer import DatasetWriter, Row
from turnlog.infra.log import Partition
from turnlog.schemas import topics
from turnlog.schemas.canonical import canonical_json
from turnlog.schemas.events import TurnCompleted
from turnlog.schemas.json_depth import MAX_DEPTH, deeper_than
from turnlog.schemas.types import TurnId

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
Message = dict[str, Any]
"""Fields as in columns.MESSAGE."""


def messages_of(content: bytes, where: str) -> list[Message]:
    """Parse a JSON list of messages. Raises UnreadableMessage."""
    raw = _parse_content(content, where)
    if not isinstance(raw, list):
        raise UnreadableMessage(f"{where}: messages are not a list")
    return [message(each, f"{where}[{index}]") for index, each in enumerate(raw)]


def response_of(content: bytes, where: str) -> Message:
    """Parse the assistant message of a turn. Raises UnreadableMessage."""
    found = message({"role": "assistant", **_object(_parse_content(content, where), where)}, where)
    if found["role"] != "assistant":
        raise UnreadableMessage(f"{where}: the response is of role {found['role']}")
    return found


def message(raw: Any, where: str) -> Message:
    """Convert one message. Raises UnreadableMessage."""
    fields = _object(raw, where)
    role = ROLES.get(str(fields.get("role")))
    if role is None:
        raise UnreadableMessage(f"{where}: role {fields.get('role')!r} is none of {', '.join(ROLES)}")
    calls = fields.get("tool_calls") or None
    reasoning = fields.get("reasoning_content") or fields.get("reasoning")
    return {
        "role": role,
        "content": _text(fields.get("content"), where),
        "reasoning_content": None if not reasoning else str(reasoning),
        "name": None if not fields.get("name") else str(fields["name"]),
        "tool_call_id": None if not fields.get("tool_call_id") else str(fields["tool_call_id"]),
        "tool_calls": None if calls is None else [_call(each, where) for each in _list(calls, where)],
    }


def tools_json(content: bytes | None, where: str) -> str:
    """Return tool schemas as canonical JSON text; "[]" for none. Raises UnreadableMessage."""
    raw = _list(_parse_content(content, where) if content else [], where)
    return canonical_json(raw).decode()


def _text(content: Any, where: str) -> str:
    if not content:
        return ""
    if isinstance(content, str):
        return content
    texts = [each if isinstance(each, str) else _object(each, where).get("text") for each in _list(content, where)]
    if not all(isinstance(text, str) for text in texts):
        raise UnreadableMessage(f"{where}: content has a block that is not text")
    return "\n".join(texts)  # type: ignore[arg-type]


def _call(raw: Any, where: str) -> dict[str, Any]:
    function = _object(_object(raw, where).get("function"), where)
    if not isinstance(function.get("name"), str):
        raise UnreadableMessage(f"{where}: a tool call has no function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = canonical_json(arguments or {}).decode()
    identity = raw.get("id")
    return {
        "id": None if identity is None else str(identity),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parse_content(content: bytes, where: str) -> Any:
    if deeper_than(content):
        raise UnreadableMessage(f"{where}: JSON nested deeper than {MAX_DEPTH} levels")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise UnreadableMessage(f"{where}: not JSON: {error}") from error


def _object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise UnreadableMessage(f"{where}: {type(raw).__name__} where an object was expected")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise UnreadableMessage(f"{where}: {type(raw).__name__} where a list was expected")
    return raw


@dataclass(frozen=True, slots=True)
class ConversationRow:
    """All messages up to the last response, and the tools in the request of the last turn (JSON text)."""

    messages: list[Message]
    tools: str
    turns: int


async def conversations(
    source: DatasetInput, unit: int, wanted: dict[str, Candidate]
) -> AsyncIterator[tuple[str, ConversationRow | str]]:
    """Yield (session, conversation or reason why there is none) for each wanted session of a partition task, in the
    order in which they end on the log. The reason is `unreadable`, or `incomplete` if one of its turns is not on the
    log."""
    held: dict[str, dict[TurnId, TurnCompleted]] = {}
    left = set(wanted)
    async for record, event in source.read(Partition(topics.TURNS.name, unit), TurnCompleted):
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


async def whole_groups(
    source: DatasetInput, unit: int, wanted: dict[str, Candidate]
) -> AsyncIterator[dict[str, ConversationRow | str]]:
    """Yield what `conversations` yields, group by group: each group once the last of its wanted sessions is there."""
    sizes = Counter(each.group_id for each in wanted.values())
    held: dict[str, dict[str, ConversationRow | str]] = {}
    async for session, conversation in conversations(source, unit, wanted):
        group = wanted[session].group_id
        held.setdefault(group, {})[session] = conversation
        if len(held[group]) == sizes[group]:
            yield held.pop(group)


def _line(turns: dict[TurnId, TurnCompleted], last: TurnId | None) -> list[TurnCompleted] | None:
    """Return the turns from the root to `last`, or None while one is missing."""
    line: list[TurnCompleted] = []
    while last is not None and len(line) <= len(turns):
        turn = turns.get(last)
        if turn is None:
            return None
        line.append(turn)
        last = turn.base_turn
    return line[::-1] if last is None else None


async def _conversation(source: DatasetInput, line: list[TurnCompleted], where: str) -> ConversationRow | str:
    messages: list[Message] = []
    tools: bytes | None = None
    digest = None
    try:
        for each in line:
            about = f"{where}: turn {each.turn.index}"
            turn = await source.inline_payloads(each, about)
            assert isinstance(turn.new_messages, bytes)
            assert isinstance(turn.response, bytes)
            messages += [*messages_of(turn.new_messages, about), response_of(turn.response, about)]
            if turn.tools is not None or turn.tools_sha256 != digest:  # a turn without tools has no hash of any
                assert turn.tools is None or isinstance(turn.tools, bytes)
                tools = turn.tools
            digest = turn.tools_sha256
        return ConversationRow(messages, tools_json(tools, where), len(line))
    except UnreadableMessage:
        return "unreadable"


async def write_conversations(
    source: DatasetInput, unit: int, writer: DatasetWriter, filters: Filters, seen: Seen, joined: Joined
) -> None:
    """Write the rows of one partition task that the query admits. Raises MissingContent, Unwritable."""
    found = await candidates(source, unit, filters)
    if writer.view == "sft":
        best = 1 if source.query.best_of_group else source.query.best
        wanted = found if best is None else best_of_groups(found, best, filters)
        async for session, conversation in conversations(source, unit, wanted):
            if isinstance(conversation, str):
                filters.count_removal(conversation)
                continue
            row = _sft_row(wanted[session], conversation, joined)
            _write(row, ("messages", "tools"), writer, seen)
        return
    pairs = pairs_of(found, source.query, filters)
    paired = {name: found[name] for each in pairs.values() for pair in each for name in pair}
    async for members in whole_groups(source, unit, paired):
        for chosen, rejected in pairs[paired[next(iter(members))].group_id]:
            pair = preference(members[chosen], members[rejected])
            if isinstance(pair, str):
                filters.count_removal(pair)
                continue
            row = _preference_row(paired[chosen], paired[rejected], pair, joined)
            _write(row, ("prompt", "chosen", "rejected"), writer, seen)


def _write(row: Row, content: tuple[str, ...], writer: DatasetWriter, seen: Seen) -> None:
    said = canonical_json([row[name] for name in content]) if seen.compares_content else b""
    if seen.admits(row["task_id"], row["group_id"], said):
        writer.add_rows([row])


def preference(chosen: ConversationRow | str, rejected: ConversationRow | str) -> dict[str, Any] | str:
    """Return the columns prompt, chosen, rejected and tools of two conversations, or the reason why they are not a
    pair.

    The prompt is the longest common prefix of messages after which both continue with an assistant message. So chosen
    and rejected begin with a message of the policy, never with the result of a tool.
    """
    if isinstance(chosen, str) or isinstance(rejected, str):
        return chosen if isinstance(chosen, str) else str(rejected)
    if chosen.tools != rejected.tools:
        return "tools_differ"
    cut = 0
    for at, (one, other) in enumerate(zip(chosen.messages, rejected.messages, strict=False)):
        if one["role"] == "assistant" and other["role"] == "assistant":
            cut = at
        if _without_ids(one) != _without_ids(other):
            break
    else:
        return "same_conversation"  # one is a prefix of the other
    if not cut:
        return "no_common_prompt"
    return {
        "prompt": chosen.messages[:cut],
        "chosen": chosen.messages[cut:],
        "rejected": rejected.messages[cut:],
        "tools": chosen.tools,
    }


def _without_ids(message: Message) -> Message:
    """Return the message without call ids, which are generated per session."""
    calls = message["tool_calls"]
    bare = None if calls is None else [each["function"] for each in calls]
    return {**message, "tool_call_id": None, "tool_calls": bare}


SHARED = ("run_id", "group_id", "task_id", "recipe")
OF_SESSION = ("session_id", "rollout_id", "rollout_index", "reward", "agent", "model", "environment",
              "environment_version", "finish_reason", "tokens")  # fmt: skip
"""Columns that are attributes of the candidate."""


def _group(candidate: Candidate, joined: Joined) -> Row:
    task = joined.tasks.get(candidate.group_id, TaskFacts())
    return {name: getattr(candidate, name) for name in SHARED} | {
        "purpose": candidate.purpose.value, **task._asdict(),
    }  # fmt: skip


def _sft_row(candidate: Candidate, conversation: ConversationRow, joined: Joined) -> Row:
    return _group(candidate, joined) | {name: getattr(candidate, name) for name in OF_SESSION} | {
        "outcome": candidate.outcome.value, "weight_version_min": candidate.version_min,
        "weight_version_max": candidate.version_max, "turns": conversation.turns, "messages": conversation.messages,
        "tools": conversation.tools,
    }  # fmt: skip


def _preference_row(chosen: Candidate, rejected: Candidate, pair: Row, joined: Joined) -> Row:
    sides = {"chosen": chosen, "rejected": rejected}
    return {
        **_group(chosen, joined),
        **{f"{side}_session_id": each.session_id for side, each in sides.items()},
        **{f"{side}_outcome": each.outcome.value for side, each in sides.items()},
        **{f"{side}_reward": each.reward for side, each in sides.items()},
        "margin": chosen.reward - rejected.reward,
        "tokens": chosen.tokens + rejected.tokens,
        **pair,
    }
