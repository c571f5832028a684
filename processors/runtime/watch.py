"""What the reaper must know of a unit's open groups. Pure: the moment `at` of each record is passed in.

Silence counts from the later of a session's last record and the moment when the unit caught up with the log: an outage
of ours expires nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from turnlog.processors.core.fold.spine import Tenure
from turnlog.processors.core.turns import TurnKey, key_of
from turnlog.schemas.events import (
    Event,
    Expects,
    GroupClosed,
    Outcome,
    RewardAssigned,
    RewardFailed,
    SessionAdopted,
    SessionFinished,
    SessionStarted,
    StepRewardAssigned,
    TokenSnapshot,
    TurnCompleted,
)
from turnlog.schemas.ids import digest
from turnlog.schemas.types import TurnId


@dataclass(slots=True)
class WatchedSession(Tenure):
    """One session of an open group."""

    last_at: float = 0.0
    completed: set[TurnKey] = field(default_factory=set)
    snapshots: set[TurnKey] = field(default_factory=set)

    def supplied(self) -> tuple[TurnId, ...]:
        """Turns with both records, in order of (epoch, index)."""
        both = [turn for turn in self.completed & self.snapshots if turn[0] in self.epochs]
        ordered = sorted(both, key=lambda turn: (self.epochs.index(turn[0]), turn[1]))
        return tuple(TurnId(*turn) for turn in ordered)

    def whole(self) -> bool:
        """It finished, and every turn that it names is there."""
        return self.finish is not None and set(map(key_of, self.finish.turns)) <= self.completed & self.snapshots


@dataclass(slots=True)
class WatchedGroup:
    """One open group."""

    run_id: str
    floor: int
    opened_at: float
    last_at: float
    sessions: dict[str, WatchedSession] = field(default_factory=dict)

    def in_flight(self, now: float) -> bool:
        """Some session finished after `now`, and not all of its turns were folded yet."""
        return any(s.finish is not None and s.last_at > now and not s.whole() for s in self.sessions.values())


class Watch:
    """The open groups of one unit."""

    def __init__(self) -> None:
        self.groups: dict[str, WatchedGroup] = {}

    def saw(self, event: Event, at: float, *, refused: bool = False) -> None:
        """One record of an agent topic, after the fold took or `refused` it. Epochs and finishes count as they do in
        the spine: a session that the fold can assemble is whole here, so a close names it."""
        if isinstance(event, GroupClosed):
            return  # our own voice breaks no silence
        group = self.groups.get(event.group_id)
        if group is None:
            group = self.groups[event.group_id] = WatchedGroup(event.run_id, event.floor, at, at)
        group.last_at = at
        if not hasattr(event, "session_id"):
            return
        session = group.sessions.get(event.session_id)
        if session is None:
            session = group.sessions[event.session_id] = WatchedSession()
        session.last_at = at
        match event:
            case TurnCompleted():
                session.completed.add(key_of(event.turn))
            case TokenSnapshot():
                session.snapshots.add(key_of(event.turn))
            case SessionStarted() | SessionAdopted():
                if not refused:
                    session.open_epoch(event.event_id)
            case SessionFinished():
                if session.counts(event):
                    session.finish = replace(event, turns=()) if refused else event
            case RewardAssigned() | RewardFailed() | StepRewardAssigned():
                pass  # a sign of life, no more

    def forget(self, group: str) -> None:
        """The group is complete."""
        self.groups.pop(group, None)

    def overdue(
        self, now: float, *, caught_up_at: float, silence_s: float, deadline_s: float, seen: int
    ) -> Iterator[SessionFinished | GroupClosed]:
        """What time has decided by `now`, as events to append; `seen` is the unit's position in agent.sessions.

        The unit has folded whatever was on the log at `now`. A finish stands on the log after the turns that it names:
        what a session that finished before `now` lacks, it lacks for ever, and a close leaves it out. For one that
        finished later the close waits.
        """
        for group_id, group in self.groups.items():
            started = False
            for session_id, session in group.sessions.items():
                started = started or bool(session.epochs)
                if session.epochs and session.finish is None and now - max(session.last_at, caught_up_at) > silence_s:
                    yield _expired(group_id, group, session_id, session)
            if not started and now - max(group.last_at, caught_up_at) > silence_s:
                yield _closed(group_id, group, "orphan", seen)
            elif started and now - max(group.opened_at, caught_up_at) > deadline_s and not group.in_flight(now):
                yield _closed(group_id, group, "deadline", seen)


def _expired(group_id: str, group: WatchedGroup, session_id: str, session: WatchedSession) -> SessionFinished:
    epoch = session.epochs[-1]
    return SessionFinished(
        event_id=digest("SessionFinished", session_id, epoch, "expired"),
        run_id=group.run_id,
        group_id=group_id,
        session_id=session_id,
        floor=group.floor,
        epoch=epoch,
        turns=session.supplied(),
        undelivered=(),
        outcome=Outcome.expired,
        reason="silent",
        final=True,
        expects=Expects(reward=False),
    )


def _closed(group_id: str, group: WatchedGroup, reason: str, seen: int) -> GroupClosed:
    """Members: every session that could be assembled; the fold keeps those of them that are settled."""
    return GroupClosed(
        event_id=digest("GroupClosed", group_id, reason, seen),
        run_id=group.run_id,
        group_id=group_id,
        floor=group.floor,
        members=tuple(sorted(name for name, session in group.sessions.items() if session.whole())),
        reason=reason,
        seen=seen,
    )
