"""Trajectory rules: how a session's turns become segments, by the name in [fold] policy.

A segment's tokens are always S = prompt + output of its last turn. A rule chooses the turns of each segment, and each
sampled token is in at most one segment. Every other turn is masked under a named reason, so that the token accounting
balances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from turnlog.processors.core.errors import SegmentsDoNotFit
from turnlog.processors.core.lineages import Lineages, Turn
from turnlog.processors.core.methods.segments import PolicyOptions, Segments, count_duplicates, cut, one_row, taken_out
from turnlog.processors.core.methods.slime import Slime
from turnlog.processors.core.turns import TurnKey, shared_prefix
from turnlog.settings import SettingsError


@runtime_checkable
class Policy(Protocol):
    """A trajectory rule: a pure function of one session's named turns. Users add their own by an entry point in group
    turnlog.policies.
    """

    @property
    def needs_messages(self) -> bool:
        """Whether turns must carry their `dialogue`, which is read and stored only for rules that need it."""

    def cut(
        self, turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey], rules: PolicyOptions
    ) -> Segments:
        """Cut turns into segments.

        `turns` are in order of (epoch, index), and `Segments` refers to them by that order. `undelivered` holds the
        turns that the finish names as such.
        """


class Prefix:
    """Rule `prefix`: turns whose tokens are one contiguous sequence form one segment (segments.py)."""

    needs_messages = False

    def cut(
        self, turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey], rules: PolicyOptions
    ) -> Segments:
        """Cut the turns that an agent acted on into runs."""
        return cut(turns, taken_out(turns, tree, undelivered, rules.version))


class LastTurn:
    """Rule `last-turn`: each turn is a segment of its own; its prompt is context, its output trains. For debugging."""

    needs_messages = False

    def cut(
        self, turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey], rules: PolicyOptions
    ) -> Segments:
        """Return a run of one for each turn that an agent acted on."""
        out = taken_out(turns, tree, undelivered, rules.version)
        runs = tuple((order,) for order in range(len(turns)) if order not in out)
        return Segments(runs, count_duplicates(turns, runs), out)


class Checked:
    """A user's rule whose result is checked against the invariants that samples and token accounting rely on."""

    def __init__(self, name: str, policy: Policy) -> None:
        self._name = name
        self._policy = policy

    @property
    def needs_messages(self) -> bool:
        """Whether the user's rule needs messages."""
        return self._policy.needs_messages

    def cut(
        self, turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey], rules: PolicyOptions
    ) -> Segments:
        """Cut turns into segments by the user's rule. Raises SegmentsDoNotFit if the result violates an invariant."""
        segments = self._policy.cut(turns, tree, undelivered, rules)
        check(self._name, turns, segments)
        return segments


@dataclass(frozen=True, slots=True, eq=False)
class Policies:
    """The available trajectory rules, by name."""

    named: Mapping[str, Policy] = field(
        default_factory=lambda: {"prefix": Prefix(), "slime": Slime(), "last-turn": LastTurn()}
    )

    def __getitem__(self, name: str) -> Policy:
        """Return the rule that [fold] policy names. Raises SettingsError if it is unknown."""
        if name not in self.named:
            raise SettingsError(
                f"fold.policy must be one of {', '.join(sorted(self.named))}, or offered under the entry point group "
                f"turnlog.policies, got {name!r}"
            )
        return self.named[name]

    def with_own(self, own: Mapping[str, Policy]) -> Policies:
        """Return these rules and a user's own, which are checked at every session. Raises SettingsError for a name that
        is taken.
        """
        taken = sorted(self.named.keys() & own.keys())
        if taken:
            raise SettingsError(f"entry point group turnlog.policies: {taken[0]!r} is taken; give yours another name")
        return Policies({**self.named, **{name: Checked(name, policy) for name, policy in own.items()}})


def check(name: str, turns: Sequence[Turn], segments: Segments) -> None:
    """Check that every turn occurs once, in ascending runs, each inside its last turn's tokens and at one temperature.

    Raises SegmentsDoNotFit if that is not so.
    """
    placed = [order for run in segments.runs for order in run]
    if sorted([*placed, *segments.masked]) != list(range(len(turns))):
        raise SegmentsDoNotFit(name, f"of {len(turns)} turns, {placed} are in segments, {list(segments.masked)} masked")
    for run in segments.runs:
        if not run or list(run) != sorted(run):
            raise SegmentsDoNotFit(name, f"segment {run} is empty or out of order")
        last = turns[run[-1]].tokens
        for order in run:
            held = turns[order].tokens
            if shared_prefix(held, held.length, last, last.length) < held.length or not one_row(held, last):
                raise SegmentsDoNotFit(name, f"turn {order} is no part of the row of turn {run[-1]}")
