"""Rewarded sessions as detectors see them, folded from agent.sessions and agent.turns.

A session is complete when it is settled and the messages of every turn that its finish names are there, whatever the
order in which the two topics are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from turnlog.processors.core.cheating.actions import SessionTrace, TurnText, trace, turn_text
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.session import named_turns
from turnlog.processors.core.fold.spine import ControlStreamFold, SessionFoldState
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.schemas.events import EgressRequest, Event, RewardAssigned, StepRewardAssigned, TurnCompleted

if TYPE_CHECKING:
    from turnlog.processors.core.fold_versions import FoldVersion

Requests = Mapping[str, Sequence[tuple[str, EgressRequest]]]
"""Session -> (call_id, request) of each of its network requests."""


@dataclass(slots=True)
class _OpenGroup:
    spine: ControlStreamFold
    texts: dict[str, dict[TurnKey, TurnText]] = field(default_factory=dict)
    ended_ms: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


class RewardedSessions:
    """Fold of one partition. Memory holds the messages of sessions that are not complete."""

    def __init__(self, version: FoldVersion, requests: Requests) -> None:
        self._version = version
        self._requests = requests
        self._groups: dict[str, _OpenGroup] = {}
        self._over: set[str] = set()

    def apply(self, offset: int, time_ms: int, event: Event) -> Iterator[SessionTrace]:
        """Fold a record, whose payloads are inline, and yield the sessions that it completes. Records that the
        assembler would dead-letter are folded as rejected.
        """
        group_id: str = event.group_id
        if group_id in self._over:
            return
        group = self._groups.get(group_id)
        if group is None:
            group = self._groups[group_id] = _OpenGroup(ControlStreamFold(self._version))
        if isinstance(event, TurnCompleted):
            if event.session_id not in group.done:
                texts = group.texts.setdefault(event.session_id, {})
                texts.setdefault(key_of(event.turn), turn_text(event))
        else:
            if isinstance(event, RewardAssigned | StepRewardAssigned):
                group.ended_ms.setdefault(event.session_id, time_ms)
            with contextlib.suppress(FoldError):  # it is folded as rejected, and the assembler dead-letters it
                group.spine.fold(offset, event)
        for session_id in group.spine.settled:
            if session_id in group.done or not _has_turns(group, session_id):
                continue
            group.done.add(session_id)
            found = self._complete(group, session_id)
            group.texts.pop(session_id, None)
            if found is not None:
                yield found
        if group.spine.members is not None and group.done >= set(group.spine.settled):
            self._over.add(group_id)
            del self._groups[group_id]

    def _complete(self, group: _OpenGroup, session_id: str) -> SessionTrace | None:
        """Return a session; None if it has no reward."""
        session = group.spine.sessions[session_id]
        texts = group.texts.get(session_id, {})
        keys = [key_of(turn) for turn in named_turns(session)]
        assert session.started is not None
        reward = reward_of(session)
        if reward is None:
            return None
        return trace(
            [texts[key] for key in keys], session_id=session_id, task_id=session.started.task_id,
            recipe=session.started.recipe, hidden=session.started.environment.hidden,
            reward=reward, requests=self._requests.get(session_id, ()),
            ended_ms=group.ended_ms.get(session_id, 0),
        )  # fmt: skip


def _has_turns(group: _OpenGroup, session_id: str) -> bool:
    """Whether every turn that the session's finish names is there."""
    texts = group.texts.get(session_id, {})
    return all(key_of(turn) in texts for turn in named_turns(group.spine.sessions[session_id]))


def reward_of(session: SessionFoldState) -> float | None:
    """Return the highest reward of a session: its own, or one of its players'; else the sum of its step rewards; None
    without any.
    """
    values = [session.reward, *(session.reward_of(player) for player in session.players)]
    given = [value for value in values if value is not None]
    steps = [value for value in session.steps.values() if value is not None]
    return max(given) if given else sum(steps) if steps else None
