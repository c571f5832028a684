"""Trajectory rules: how a session's turns become segments, by the name in [fold] policy.

A segment's tokens are always S = prompt + output of its last turn. A rule chooses the turns of each segment, and each
sampled token is in at most one segment. Every other turn is masked under a named reason, so that the token accounting
balances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol, runtime_checkable

from turnlog.processors.core.errors import SegmentsDoNotFit
from turnlog.processors.core.lineages import Lineages, Turn
from turnlog.processors.core.messages import ComparableMessage, Dialogue
from turnlog.processors.core.methods.segments import PolicyOptions, Segments, count_duplicates, cut, one_row, taken_out
from turnlog.processors.core.turns import TurnKey, shared_prefix
from turnlog.schemas.events import MaskReason
from turnlog.settings import SettingsError

ASSISTANT = "assistant"


@dataclass(slots=True, eq=False)
class SlimeNode:
    """A message in the tree. `turn` is the order of the turn that generated it; None if it was only replayed."""

    message: ComparableMessage | None
    turn: int | None = None
    below: list[SlimeNode] = field(default_factory=list)
    assistants: list[SlimeNode] = field(default_factory=list)
    """Children with an assistant message."""
    _said: dict[bytes, list[SlimeNode]] = field(default_factory=dict)
    """Digest of a message -> the children with it, in order of insertion."""

    def add(self, message: ComparableMessage, turn: int | None = None) -> SlimeNode:
        """Add a child at the end and return it."""
        child = SlimeNode(message, turn)
        self.below.append(child)
        self._said.setdefault(message.digest, []).append(child)
        if message.role == ASSISTANT:
            self.assistants.append(child)
        return child

    def find_echo(self, said: ComparableMessage) -> SlimeNode | None:
        """Return the first child that the message `said` echoes."""
        same = self._said.get(said.digest, ())
        return next((node for node in same if node.message is not None and said.echoes(node.message)), None)

    def rewrite(self, only: SlimeNode, message: ComparableMessage) -> int | None:
        """Replace the only assistant message among the children by `message`; return the turn that had generated it."""
        assert only.message is not None
        self._said[only.message.digest].remove(only)
        self._said.setdefault(message.digest, []).append(only)  # one digest means one role, so it is the only entry
        turn, only.turn, only.message = only.turn, None, message
        return turn

    def lines(self) -> Iterator[list[int]]:
        """Yield per leaf, in order of insertion, the generated turns on the path to it that no earlier path
        contains.
        """
        stack, line = [self], list[int]()
        while stack:
            node = stack.pop()
            if node.turn is not None:
                line.append(node.turn)
            stack += reversed(node.below)
            if not node.below:
                yield line
                line = []


class Drift(Enum):
    """Relation of a turn's prompt to the tokens of a builder."""

    CLEAN = auto()
    """The prompt extends them."""
    REALIGN = auto()
    """The prompt diverges within the last output, and the turn's own output is short: the prompt replaces that
    output.
    """
    FORK = auto()
    """Anything else: the turn gets a builder of its own."""


@dataclass(slots=True)
class Builder:
    """Turns of one path whose tokens are one sequence, up to the S of the last one."""

    last: int
    own: list[int]
    """Turns that no earlier leaf contains and that no later turn realigned."""


class Routes:
    """The tree of messages. A turn is mounted where its base's request ended, so it costs O(new messages).

    A walk from the root leads to the same node: every message of that request has another one below it, so none of them
    can give way, and children are only added after those that a walk takes first.
    """

    def __init__(self) -> None:
        self.root = SlimeNode(None)
        self._ends: dict[Dialogue, SlimeNode] = {}
        """Dialogue -> the node of the last message of its request."""

    def mount(self, order: int, dialogue: Dialogue, outputs: Sequence[int], threshold: int) -> int | None:
        """Mount a turn's messages and its response; return the turn whose response they rewrite, or None.

        The walk takes the first child that a message echoes and never goes back. If it ends at an assistant message and
        exactly one assistant child exists there, a childless turn of fewer than `threshold` output tokens, that turn
        gives way.
        """
        line = [dialogue]
        while line[-1] not in self._ends and line[-1].base is not None:
            line.append(line[-1].base)
        node, rewritten = self._ends.get(line[-1], self.root), None
        for number in range(len(line) - 1, -1, -1):
            if line[number] in self._ends:
                continue
            said = line[number].new if number == len(line) - 1 else (line[number + 1].response, *line[number].new)
            for message in said:
                found = node.find_echo(message)  # a node that was just added has no children: the walk ends there
                if found is None and message.role == ASSISTANT and _gives_way(node, outputs, threshold):
                    found = node.assistants[0]
                    rewritten = node.rewrite(found, message)
                node = node.add(message) if found is None else found
            self._ends[line[number]] = node
        node.add(dialogue.response, order)
        return rewritten


def _gives_way(above: SlimeNode, outputs: Sequence[int], threshold: int) -> bool:
    if len(above.assistants) != 1:
        return False
    (only,) = above.assistants
    return only.turn is not None and not only.below and outputs[only.turn] < threshold


def build(turns: Sequence[Turn], line: Sequence[int], threshold: int) -> tuple[list[Builder], set[int]]:
    """Return the builders of the turns that a leaf is the first to contain, and the turns among them that were
    realigned away.

    Turns further up its path belong to an earlier leaf, so the builders begin without turns of their own.
    """
    builders: list[Builder] = []
    lost: set[int] = set()
    for order in line:
        drift = _drift(turns, builders[-1].last, order, threshold) if builders else Drift.FORK
        if drift is Drift.FORK:
            builders.append(Builder(order, [order]))
            continue
        builder = builders[-1]
        if drift is Drift.REALIGN:
            builder.own.remove(builder.last)
            lost.add(builder.last)
        builder.last = order
        builder.own.append(order)
    return builders, lost


def _drift(turns: Sequence[Turn], last: int, order: int, threshold: int) -> Drift:
    """Return the drift of a turn against the last one of a builder. Another temperature or kind of log-prob forks,
    since a row has one of each.
    """
    held, mine = turns[last].tokens, turns[order].tokens
    if not one_row(held, mine):
        return Drift.FORK
    same = shared_prefix(held, held.length, mine, mine.prompt_len)
    if same == held.length:
        return Drift.CLEAN
    return Drift.REALIGN if same >= held.prompt_len and len(mine.output) < threshold else Drift.FORK


class Slime:
    """Rule `slime`: turns routed by their messages, for users who come from THUDM/slime (docs/folds.md, Policies).

    Three steps follow slime's trajectory builder. Each turn is routed greedily into a tree of messages. For each leaf,
    depth first, its turns extend, realign or leave builders. A turn trains with the first leaf that contains it.
    Segments come in slime's order, depth first.
    """

    needs_messages = True

    def cut(
        self, turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey], rules: PolicyOptions
    ) -> Segments:
        """Route, then build. Turns named undelivered, and aborted turns, were never shown to an agent and are not
        routed.
        """
        masked = taken_out(turns, tree, undelivered, rules.version, guess_retries=False)
        threshold = rules.fork_threshold_tokens
        root = _build_tree(turns, masked, threshold)
        runs: list[tuple[int, ...]] = []
        for line in root.lines():
            builders, lost = build(turns, line, threshold)
            masked |= dict.fromkeys(lost, MaskReason.realigned)
            runs += [tuple(builder.own) for builder in builders]
        return Segments(tuple(runs), count_duplicates(turns, runs), masked)


def _build_tree(turns: Sequence[Turn], masked: dict[int, MaskReason], threshold: int) -> SlimeNode:
    """Return the tree of messages; add unrouted and rewritten turns to `masked`."""
    routes = Routes()
    outputs = [len(turn.tokens.output) for turn in turns]
    for order, turn in enumerate(turns):
        if order in masked:
            continue
        if turn.dialogue is None or turn.dialogue.silent:
            masked[order] = MaskReason.unrouted
            continue
        rewritten = routes.mount(order, turn.dialogue, outputs, threshold)
        if rewritten is not None:
            masked[rewritten] = MaskReason.rewritten
    return routes.root


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
