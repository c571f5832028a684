"""The reaper's view of a partition task's open groups. Pure: the time `at` of each record is an argument.

Silence is measured from the later of a session's last record and the time at which the partition task caught up with
the log: an outage of the assembler expires no session.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from turnlog.fold_settings import Stragglers
from turnlog.processors.core.fold.spine import Tenure
from turnlog.processors.core.fold.trajectories import VALID
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
    """A session of an open group."""

    last_at: float = 0.0
    started: SessionStarted | None = None
    judged: set[str] = field(default_factory=set)
    """Players that have a reward; "" for the session as a whole."""
    completed: set[TurnKey] = field(default_factory=set)
    snapshots: set[TurnKey] = field(default_factory=set)

    def saw(self, event: Event, *, refused: bool) -> None:
        """Observe one of its records, after the fold accepted or `refused` it."""
        match event:
            case TurnCompleted():
                self.completed.add(key_of(event.turn))
            case TokenSnapshot():
                self.snapshots.add(key_of(event.turn))
            case SessionStarted() | SessionAdopted():
                if not refused:
                    self.open_epoch(event.event_id)
                    self.started = event if isinstance(event, SessionStarted) else self.started
            case SessionFinished():
                if self.counts(event):
                    self.finish = replace(event, turns=()) if refused else event
            case RewardAssigned():
                self.judged |= set() if refused else {event.player}
            case RewardFailed() | StepRewardAssigned():
                pass  # only a sign of life

    def recorded_turns(self) -> tuple[TurnId, ...]:
        """Return the turns with both records, in order of (epoch, index)."""
        both = [turn for turn in self.completed & self.snapshots if turn[0] in self.epochs]
        ordered = sorted(both, key=lambda turn: (self.epochs.index(turn[0]), turn[1]))
        return tuple(TurnId(*turn) for turn in ordered)

    def whole(self) -> bool:
        """Whether it finished and both records of every turn that it names are there."""
        return self.finish is not None and set(map(key_of, self.finish.turns)) <= self.completed & self.snapshots

    def usable(self, *, truncated: bool) -> bool:
        """Whether it will train, as far as that is known before the fold: it ran to its end and has its reward.
        `truncated`: whether sessions that hit a limit train.
        """
        if self.finish is None or not self.finish.final or not self.whole():
            return False
        lived = self.finish.outcome in VALID and (truncated or self.finish.outcome is not Outcome.truncated)
        expects = self.finish.expects
        return lived and self.judged >= {*expects.players, *([""] if expects.reward else [])}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaperLimits:
    """Time limits and the treatment of stragglers."""

    silence_s: float
    """Seconds without a record after which a session or an orphan expires."""
    deadline_s: float
    """Seconds after a group's first record (under `wait`, its last) after which it is closed."""
    stragglers: Stragglers = "close"
    quorum: int = 0
    """Number of usable rollouts that, under `cut`, close a group that was requested with more."""
    truncated: bool = True
    """Whether a session that hit a limit is usable."""


@dataclass(slots=True)
class WatchedGroup:
    """An open group."""

    run_id: str
    floor: int
    opened_at: float
    last_at: float
    sessions: dict[str, WatchedSession] = field(default_factory=dict)
    closes: int = 0
    """Number of closes that came back from the log; all were void, since the group is open."""

    def has_quorum(self, limits: ReaperLimits) -> bool:
        """Whether, under `cut`, a group that was requested with more rollouts than needed has enough usable ones.

        False while a finished session lacks turns: the fold waits for them, and only the deadline decides that they are
        lost.
        """
        started = next((session.started for session in self.sessions.values() if session.started), None)
        if limits.stragglers != "cut" or started is None or started.group_size <= limits.quorum:
            return False
        if not all(session.whole() for session in self.sessions.values() if session.finish is not None):
            return False
        usable = {session.started.rollout_id for session in self.sessions.values()
                  if session.started is not None and session.usable(truncated=limits.truncated)}  # fmt: skip
        return len(usable) >= limits.quorum

    def in_flight(self, now: float) -> bool:
        """Whether some session finished after `now` and not all of its turns were folded yet."""
        return any(s.finish is not None and s.last_at > now and not s.whole() for s in self.sessions.values())


class GroupWatch:
    """The open groups of one partition task."""

    def __init__(self) -> None:
        self.groups: dict[str, WatchedGroup] = {}

    def saw(self, event: Event, at: float, *, refused: bool = False) -> None:
        """Observe one record of an agent topic, after the fold accepted or `refused` it.

        Ownership terms and finishes follow the rules of the session fold: a session that the fold can assemble is whole
        here, so that a close names it.
        """
        group = self.groups.get(event.group_id)
        if isinstance(event, GroupClosed):  # the reaper's own records do not end a silence
            if group is not None:
                group.closes += 1
            return
        if group is None:
            group = self.groups[event.group_id] = WatchedGroup(event.run_id, event.floor, at, at)
        group.last_at = at
        if not hasattr(event, "session_id"):
            return
        session = group.sessions.get(event.session_id)
        if session is None:
            session = group.sessions[event.session_id] = WatchedSession()
        session.last_at = at
        session.saw(event, refused=refused)

    def find_start(self, group: str, session: str) -> SessionStarted | None:
        """Return the SessionStarted of a session of an open group, or None."""
        return self.groups[group].sessions[session].started if group in self.groups else None

    def forget(self, group: str) -> None:
        """Forget a group that is complete."""
        self.groups.pop(group, None)

    def overdue(
        self, now: float, *, caught_up_at: float, limits: ReaperLimits, seen: int
    ) -> Iterator[SessionFinished | GroupClosed]:
        """Yield the events to append for what is overdue at `now`; `seen` is the task's position in agent.sessions.

        The task has folded everything that was on the log at `now`. A finish is on the log after the turns that it
        names, so what a session that finished before `now` lacks, it lacks forever, and a close leaves it out. If a
        session finished later, the close waits for it.
        """
        for group_id, group in self.groups.items():
            started = False
            for session_id, session in group.sessions.items():
                started = started or bool(session.epochs)
                silent_s = now - max(session.last_at, caught_up_at)
                if session.epochs and session.finish is None and silent_s > limits.silence_s:
                    yield _expired_event(group_id, group, session_id, session)
            since = group.last_at if limits.stragglers == "wait" else group.opened_at
            if not started:
                if now - max(group.last_at, caught_up_at) > limits.silence_s:
                    yield _closed_event(group_id, group, "orphan", seen)
            elif group.in_flight(now):
                continue
            elif group.has_quorum(limits):
                yield _closed_event(group_id, group, "quorum", seen)
            elif now - max(since, caught_up_at) > limits.deadline_s:
                yield _closed_event(group_id, group, "deadline", seen)


def _expired_event(group_id: str, group: WatchedGroup, session_id: str, session: WatchedSession) -> SessionFinished:
    epoch = session.epochs[-1]
    return SessionFinished(
        event_id=digest("SessionFinished", session_id, epoch, "expired"),
        run_id=group.run_id,
        group_id=group_id,
        session_id=session_id,
        floor=group.floor,
        epoch=epoch,
        turns=session.recorded_turns(),
        undelivered=(),
        outcome=Outcome.expired,
        reason="silent",
        final=True,
        expects=Expects(reward=False),
    )


def _closed_event(group_id: str, group: WatchedGroup, reason: str, seen: int) -> GroupClosed:
    """Return a GroupClosed whose members are all sessions that could be assembled; the fold retains those of them that
    are settled.
    """
    return GroupClosed(
        event_id=digest("GroupClosed", group_id, reason, seen),
        run_id=group.run_id,
        group_id=group_id,
        floor=group.floor,
        members=tuple(sorted(name for name, session in group.sessions.items() if session.whole())),
        reason=reason,
        seen=seen,
    )
