"""Session control stream: agent.sessions in offset order decides ownership terms, finishes, rewards and group members.

Later facts change nothing: a session is frozen when it settles, and so is the group.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from turnlog.processors.core.errors import (
    MisplacedRecord,
    RewardNotFinite,
    SessionContradicted,
    UnknownEpoch,
    UnknownSession,
    UnknownTurn,
)
from turnlog.processors.core.fold_versions import FoldVersion
from turnlog.schemas.events import (
    Event,
    GroupClosed,
    RewardAssigned,
    RewardFailed,
    SessionAdopted,
    SessionErased,
    SessionFinished,
    SessionStarted,
    SkipRequested,
    StepRewardAssigned,
)
from turnlog.schemas.types import TurnId

OF_A_SESSION = frozenset(
    {SessionStarted, SessionAdopted, SessionFinished, RewardAssigned, RewardFailed, StepRewardAssigned, SessionErased}
)
REAPED = frozenset({"deadline", "orphan"})
"""Reasons of a GroupClosed that names every session whose turns are all on the log."""
MAX_REWARD = 1e100
"""Largest accepted magnitude of a reward; beyond it the variance of its group would overflow."""


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """The first result of the verifier: a finite value, or None for a failure; `refused` if the value was not a usable
    number.
    """

    value: float | None
    refused: bool = False


@dataclass(slots=True, kw_only=True)
class Tenure:
    """The current ownership term (`epoch`) of a session and its effective finish: who may end the session.

    Its records must come in offset order of agent.sessions.
    """

    epochs: list[str] = field(default_factory=list)
    """Terms, named by the event_id of the SessionStarted or SessionAdopted that opened them; the last one is
    current.
    """
    finish: SessionFinished | None = None
    """The effective finish: the first one written under the current term."""

    def open_epoch(self, event_id: str) -> None:
        """Open a term for a start or an adoption; a repeat of either opens nothing."""
        if event_id not in self.epochs:
            self.epochs.append(event_id)

    def counts(self, event: SessionFinished) -> bool:
        """Whether `event` ends the session: it is the first finish, and its term is the latest one. A zombie's finish
        does not.
        """
        return self.finish is None and bool(self.epochs) and event.epoch == self.epochs[-1]


@dataclass(slots=True)
class SessionFoldState(Tenure):
    """The state of one session in the control stream."""

    session_id: str
    started: SessionStarted | None = None
    verdict: VerifierResult | None = None
    verdicts: dict[str, VerifierResult] = field(default_factory=dict)
    """Player -> first result of its verifier. Only the players that the finish expects matter."""
    steps: dict[TurnId, float | None] = field(default_factory=dict)
    """Turn -> first step reward; None if it was rejected. Once there is an effective finish, only turns that it
    names.
    """
    refused: bool = False
    settled: bool = False
    erased: bool = False
    """Whether it was erased before its group settled."""
    erased_unsettled: bool = False
    """Whether it was erased before it settled: its tree then has no turns."""
    by_player: bool = True
    """Whether the fold version knows players."""
    _named: frozenset[TurnId] | None = field(default=None, init=False, repr=False, compare=False)
    """Turns of the effective finish; built on first use."""

    @property
    def reward(self) -> float | None:
        """The value of the verifier's reward, or None."""
        return self.verdict.value if self.verdict else None

    def due(self) -> bool:
        """Whether the finish and every reward that it expects are there."""
        if self.finish is None:
            return False
        expects = self.finish.expects
        return self.refused or (
            (self.verdict is not None or not expects.reward)
            and len(self.steps) >= expects.step_rewards
            and self.verdicts.keys() >= self.players
        )

    @property
    def players(self) -> frozenset[str]:
        """Players that have a reward of their own; empty before the finish, and if the session is judged as a whole."""
        return frozenset(self.finish.expects.players) if self.finish is not None and self.by_player else frozenset()

    def reward_of(self, player: str) -> float | None:
        """Return the value of a player's reward, or None; of the session's own reward for ""."""
        if not player:
            return self.reward
        verdict = self.verdicts.get(player)
        return verdict.value if verdict is not None else None

    def names(self, turn: TurnId) -> bool:
        """Whether the effective finish names `turn`. The set is built once, since every turn may be rewarded after the
        finish.
        """
        if self._named is None:
            assert self.finish is not None
            self._named = frozenset(self.finish.turns)
        return turn in self._named

    def key(self) -> object:
        """Return a canonical, comparable value."""
        return (
            self.session_id, self.started and self.started.event_id, tuple(self.epochs), self.finish,
            self.verdict, tuple(sorted(self.verdicts.items())),
            tuple(sorted((t.epoch, t.index, repr(v)) for t, v in self.steps.items())),
            self.refused, self.settled, self.erased, self.erased_unsettled,
        )  # fmt: skip


class ControlStreamFold:
    """Fold of agent.sessions for one group. Nothing changes any more once `members` is set."""

    def __init__(self, version: FoldVersion) -> None:
        self._version = version
        self.sessions: dict[str, SessionFoldState] = {}
        """Every session that the stream mentions, in order of first mention."""
        self.task: SessionStarted | None = None
        """The first start: it names task, group size and purpose."""
        self.settled: list[str] = []
        """Sessions that settled before the group did, in that order."""
        self.rollouts: dict[str, str] = {}
        """Rollout id -> the session that settled it: the first settled `final` attempt."""
        self.members: tuple[str, ...] | None = None
        """Members of the settled group, one session per rollout; None before it settles."""
        self.named_by_reaper: frozenset[str] | None = None
        """Sessions named by the reaper's close. The group waits for no other session's records, since some will never
        come.
        """
        self.last = -1
        """Offset of the group's latest record."""

    def fold(self, offset: int, event: Event) -> None:
        """Fold one record. Raises SpineError or MisplacedRecord after folding it as rejected."""
        before, self.last = self.last, offset
        if isinstance(event, GroupClosed):
            if event.seen > before:
                self._close(event)
            return
        if self.members is not None:
            return
        kind = type(event)
        if kind is SkipRequested:
            return
        if kind not in OF_A_SESSION:
            raise MisplacedRecord(
                f"agent.sessions offset {offset}", f"holds a {kind.__name__}", "write it to its own topic"
            )
        session = self.sessions.get(event.session_id)
        if session is None:
            session = self.sessions[event.session_id] = SessionFoldState(
                event.session_id, by_player=self._version.players
            )
        try:
            self._apply(session, event)
        finally:
            self._settle(session)

    def key(self) -> object:
        """Return a canonical, comparable value."""
        return (
            tuple(session.key() for session in self.sessions.values()), self.task and self.task.event_id,
            tuple(self.settled), self.members, self.named_by_reaper, self.last,
        )  # fmt: skip

    def _apply(self, session: SessionFoldState, event: Any) -> None:
        kind = type(event)
        if kind is SessionErased:
            session.erased, session.erased_unsettled = True, session.erased_unsettled or not session.settled
            return
        if session.settled:
            return
        if kind is SessionStarted:
            self._start(session, event)
        elif kind is SessionAdopted:
            _adopt(session, event)
        elif kind is SessionFinished:
            self._finish(session, event)
        elif kind is RewardAssigned or kind is RewardFailed:
            _judge(session, event)
        elif kind is StepRewardAssigned and event.turn not in session.steps:
            self._step(session, event)

    def _start(self, session: SessionFoldState, event: SessionStarted) -> None:
        if event.event_id in session.epochs:
            return
        task = self.task or event
        told = (event.task_id, event.group_size, event.purpose)
        if session.started is not None or event.group_size < 1 or told != (task.task_id, task.group_size, task.purpose):
            raise SessionContradicted(
                session.session_id,
                f"a start with task {event.task_id}, group of {event.group_size}, purpose {event.purpose}, rollout "
                f"{event.rollout_id} contradicts an earlier one",
                "one group_id is one drawing of one task, one session_id one attempt of one rollout",
            )
        self.task = task
        session.started = event
        session.open_epoch(event.event_id)

    def _finish(self, session: SessionFoldState, event: SessionFinished) -> None:
        if not session.counts(event):
            return
        unknown = sorted({turn.epoch for turn in event.turns} - set(session.epochs))
        session.finish = replace(event, turns=()) if unknown else event
        if self._version.steps_need_named_turns and session.steps:
            session.steps = {turn: session.steps[turn] for turn in session.finish.turns if turn in session.steps}
            session.refused = session.refused or None in session.steps.values()
        if unknown:
            session.refused = True
            raise UnknownEpoch(
                session.session_id, f"is finished with turns of epochs {unknown}, it has {session.epochs}",
                "name turns by the event_id of the Started or Adopted that opened their epoch",
            )  # fmt: skip

    def _step(self, session: SessionFoldState, event: StepRewardAssigned) -> None:
        """Record a step reward. Before the effective finish nobody can tell whether the turn belongs to the session, so
        the reward waits.
        """
        waits = self._version.steps_need_named_turns and session.finish is None
        if self._version.steps_need_named_turns and not waits and not session.names(event.turn):
            raise UnknownTurn(
                session.session_id, f"turn {event.turn.index} of epoch {event.turn.epoch} is rewarded, its finish does "
                "not name it", "reward the turns that the agent acted on",
            )  # fmt: skip
        session.steps[event.turn] = None
        try:
            session.steps[event.turn] = _finite(session, event)
        except RewardNotFinite:
            session.refused = session.refused or not waits
            raise

    def _settle(self, session: SessionFoldState) -> None:
        if session.settled or session.started is None or not session.due():
            return
        assert session.finish is not None
        assert self.task is not None
        session.settled = True
        self.settled.append(session.session_id)
        if session.finish.final:
            self.rollouts.setdefault(session.started.rollout_id, session.session_id)
        if len(self.rollouts) >= self.task.group_size:
            self.members = tuple(self.rollouts.values())

    def _close(self, event: GroupClosed) -> None:
        """Settle the group unless it is settled. A close by the reaper also names the sessions whose turns are all on
        the log.
        """
        if self.members is None:
            self.members = self._select_members(event.members)
        if event.reason in REAPED and self.named_by_reaper is None:
            self.named_by_reaper = frozenset(event.members)
            self.members = tuple(member for member in self.members if member in self.named_by_reaper)

    def _select_members(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """Return the named sessions that are settled. If a rollout has several, its final session is chosen, else the
        latest.
        """
        members: dict[str, str] = {}
        final = self.rollouts
        for session_id in self.settled:
            if session_id in named:
                started = self.sessions[session_id].started
                assert started is not None
                if (
                    members.get(started.rollout_id) != final.get(started.rollout_id)
                    or started.rollout_id not in members
                ):
                    members[started.rollout_id] = session_id
        return tuple(members.values())


def _adopt(session: SessionFoldState, event: SessionAdopted) -> None:
    if session.started is None:
        raise UnknownSession(session.session_id, "is adopted but never started", "write SessionStarted first")
    session.open_epoch(event.event_id)


def _judge(session: SessionFoldState, event: RewardAssigned | RewardFailed) -> None:
    """Record the first verdict on the session, or on a player. Raises RewardNotFinite after rejecting it."""
    player = event.player if session.by_player else ""
    if player in session.verdicts or (not player and session.verdict is not None):
        return
    try:
        verdict = VerifierResult(None if isinstance(event, RewardFailed) else _finite(session, event))
    except RewardNotFinite:
        verdict, session.refused = VerifierResult(None, refused=True), True
        raise
    finally:
        if player:
            session.verdicts[player] = verdict
        else:
            session.verdict = verdict


def _finite(session: SessionFoldState, event: RewardAssigned | StepRewardAssigned) -> float:
    """Return the value. Components are checked too, because dashboards show them and they must be numbers as well."""
    for name, value in (("", event.value), *event.components.items()):
        if not abs(value) <= MAX_REWARD:
            raise RewardNotFinite(
                session.session_id,
                f"is rewarded with {value}" + (f" in component {name!r}" if name else ""),
                "a verifier that cannot judge writes RewardFailed",
            )
    return event.value
