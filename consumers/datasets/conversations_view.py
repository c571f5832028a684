"""The views `sft` and `preference`: conversations as rows, each written when its last turn has been read."""

from __future__ import annotations

from typing import Any

from turnlog.consumers.datasets.chat import Message
from turnlog.consumers.datasets.conversations import Conversation, conversations
from turnlog.consumers.datasets.filters import Filters, Joined, Seen, Task
from turnlog.consumers.datasets.row_hash import canonical_json
from turnlog.consumers.datasets.source import Source
from turnlog.consumers.datasets.spine import Candidate, Pair, best_of_groups, candidates, pairs_of
from turnlog.consumers.datasets.writer import DatasetWriter, Row


async def write_conversations(
    source: Source, unit: int, writer: DatasetWriter, filters: Filters, seen: Seen, joined: Joined
) -> None:
    """Write the rows of one unit that the query admits. Raises MissingContent, Unwritable."""
    found = await candidates(source, unit, filters)
    if writer.view == "sft":
        wanted = best_of_groups(found, filters) if source.query.best_of_group else found
        async for session, conversation in conversations(source, unit, wanted):
            if isinstance(conversation, str):
                filters.counted(conversation)
                continue
            row = _sft_row(wanted[session], conversation, joined)
            _write(row, ("messages", "tools"), writer, seen)
        return
    pairs = pairs_of(found, source.query, filters)
    paired = {name: found[name] for each in pairs.values() for pair in each for name in pair}
    waiting = _Waiting(paired, pairs)
    async for session, conversation in conversations(source, unit, paired):
        for chosen, rejected in waiting.complete(session, conversation):
            pair = preference(waiting.of(chosen), waiting.of(rejected))
            if isinstance(pair, str):
                filters.counted(pair)
                continue
            row = _preference_row(paired[chosen], paired[rejected], pair, joined)
            _write(row, ("prompt", "chosen", "rejected"), writer, seen)


def _write(row: Row, content: tuple[str, ...], writer: DatasetWriter, seen: Seen) -> None:
    said = canonical_json([row[name] for name in content]) if seen.compares_content else b""
    if seen.admits(row["task_id"], row["group_id"], said):
        writer.add_rows([row])


def preference(chosen: Conversation | str, rejected: Conversation | str) -> dict[str, Any] | str:
    """The columns prompt, chosen, rejected and tools of two conversations; or why they are no pair.

    The prompt is the longest common prefix of messages after which both go on with an assistant message: chosen and
    rejected begin with what the policy said, never with what a tool answered."""
    if isinstance(chosen, str) or isinstance(rejected, str):
        return chosen if isinstance(chosen, str) else str(rejected)
    if chosen.tools != rejected.tools:
        return "tools_differ"
    cut = 0
    for at, (one, other) in enumerate(zip(chosen.messages, rejected.messages, strict=False)):
        if one["role"] == "assistant" and other["role"] == "assistant":
            cut = at
        if not _same(one, other):
            break
    else:
        return "same_conversation"  # one is the beginning of the other
    if not cut:
        return "no_common_prompt"
    return {
        "prompt": chosen.messages[:cut],
        "chosen": chosen.messages[cut:],
        "rejected": rejected.messages[cut:],
        "tools": chosen.tools,
    }


class _Waiting:
    """Conversations of groups that are not complete yet."""

    def __init__(self, paired: dict[str, Candidate], pairs: dict[str, list[Pair]]) -> None:
        self._group_of = {name: each.group_id for name, each in paired.items()}
        self._pairs = pairs
        self._open: dict[str, int] = {}
        for group in self._group_of.values():
            self._open[group] = self._open.get(group, 0) + 1
        self._held: dict[str, dict[str, Conversation | str]] = {}
        self._now: dict[str, Conversation | str] = {}

    def complete(self, session: str, conversation: Conversation | str) -> list[Pair]:
        """The pairs of the session's group, once its last conversation is there."""
        group = self._group_of[session]
        self._held.setdefault(group, {})[session] = conversation
        if len(self._held[group]) < self._open[group]:
            return []
        self._now = self._held.pop(group)
        return self._pairs[group]

    def of(self, session: str) -> Conversation | str:
        """A conversation of the group that `complete` named last."""
        return self._now[session]


def _same(one: Message, other: Message) -> bool:
    """Call ids are made per session and do not count."""
    return _without_ids(one) == _without_ids(other)


def _without_ids(message: Message) -> Message:
    calls = message["tool_calls"]
    bare = None if calls is None else [each["function"] for each in calls]
    return {**message, "tool_call_id": None, "tool_calls": bare}


def _group(candidate: Candidate, joined: Joined) -> Row:
    task = joined.tasks.get(candidate.group_id, Task())
    return {
        "run_id": candidate.run_id,
        "group_id": candidate.group_id,
        "task_id": candidate.task_id,
        "recipe": candidate.recipe,
        "purpose": candidate.purpose.value,
        "dataset": task.dataset,
        "task_type": task.task_type,
    }


def _sft_row(candidate: Candidate, conversation: Conversation, joined: Joined) -> Row:
    return {
        **_group(candidate, joined),
        "session_id": candidate.session_id,
        "rollout_id": candidate.rollout_id,
        "rollout_index": candidate.rollout_index,
        "outcome": candidate.outcome.value,
        "reward": candidate.reward,
        "agent": candidate.agent,
        "model": candidate.model,
        "environment": candidate.environment,
        "environment_version": candidate.environment_version,
        "finish_reason": candidate.finish_reason,
        "weight_version_min": candidate.version_min,
        "weight_version_max": candidate.version_max,
        "turns": conversation.turns,
        "tokens": candidate.tokens,
        "messages": conversation.messages,
        "tools": conversation.tools,
    }


def _preference_row(chosen: Candidate, rejected: Candidate, pair: Row, joined: Joined) -> Row:
    return {
        **_group(chosen, joined),
        "chosen_session_id": chosen.session_id,
        "rejected_session_id": rejected.session_id,
        "chosen_outcome": chosen.outcome.value,
        "rejected_outcome": rejected.outcome.value,
        "chosen_reward": chosen.reward,
        "rejected_reward": rejected.reward,
        "margin": chosen.reward - rejected.reward,
        "tokens": chosen.tokens + rejected.tokens,
        **pair,
    }
