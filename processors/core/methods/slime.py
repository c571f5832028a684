"""Policy `slime`: turns routed by their messages, for people who come from THUDM/slime (docs/folds.md, Policies).

Three steps, each as slime's trajectory builder takes it: a tree of messages into which each turn is routed greedily;
for each leaf, depth first, builders that its turns extend, realign or leave; a turn trains with the first leaf that
has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto

from turnlog.processors.core.lineages import Lineages, Turn
from turnlog.processors.core.messages import Dialogue, Message
from turnlog.processors.core.methods.segments import PolicyOptions, Segments, duplicated, one_row, taken_out
from turnlog.processors.core.token_tree import shared_prefix
from turnlog.processors.core.turns import TurnKey
from turnlog.schemas.events import MaskReason

ASSISTANT = "assistant"


@dataclass(slots=True, eq=False)
class Node:
    """A message in its place. `turn` is the order of the turn that generated it; None: it was only replayed."""

    message: Message | None
    turn: int | None = None
    below: list[Node] = field(default_factory=list)
    assistants: list[Node] = field(default_factory=list)
    """Those below that are an assistant's."""
    _said: dict[bytes, list[Node]] = field(default_factory=dict)
    """Those below by the digest of their message, each in order of insertion."""

    def add(self, message: Message, turn: int | None = None) -> Node:
        """A new last child."""
        child = Node(message, turn)
        self.below.append(child)
        self._said.setdefault(message.digest, []).append(child)
        if message.role == ASSISTANT:
            self.assistants.append(child)
        return child

    def echoed(self, said: Message) -> Node | None:
        """The first child that `said` echoes."""
        same = self._said.get(said.digest, ())
        return next((node for node in same if node.message is not None and said.echoes(node.message)), None)

    def rewrite(self, only: Node, message: Message) -> int | None:
        """Put `message` in the place of the only assistant below; the turn that had generated that one."""
        assert only.message is not None
        self._said[only.message.digest].remove(only)
        self._said.setdefault(message.digest, []).append(only)  # of one digest is one role: it is alone there
        turn, only.turn, only.message = only.turn, None, message
        return turn

    def lines(self) -> Iterator[list[int]]:
        """Per leaf, in order of insertion: the generated turns on the way down to it that no earlier line has."""
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
    """How a turn's prompt follows the tokens that a builder holds."""

    CLEAN = auto()
    """It extends them."""
    REALIGN = auto()
    """It parts from them inside the last output, and its own output is short: the prompt replaces that output."""
    FORK = auto()
    """Anything else: a builder of its own."""


@dataclass(slots=True)
class Builder:
    """Turns of one line whose tokens are one sequence, up to the S of the last one."""

    last: int
    own: list[int]
    """Turns that no earlier leaf holds and that no later turn realigned."""


class Routes:
    """The tree of messages. A turn is mounted from where its base's request ended, so it costs O(new messages).

    That is the place to which a walk from the root leads: below every message of that request stands another one, so
    none of them can give way, and children are only added behind those that a walk takes first.
    """

    def __init__(self) -> None:
        self.root = Node(None)
        self._ends: dict[Dialogue, Node] = {}
        """Dialogue -> the node of the last message of its request."""

    def mount(self, order: int, dialogue: Dialogue, outputs: Sequence[int], threshold: int) -> int | None:
        """Mount a turn's messages and its response; the turn whose response they rewrite, if any.

        The walk takes the first child that a message echoes and never goes back. Where it ends at an assistant message
        and exactly one assistant stands there, a childless turn of fewer than `threshold` output tokens, that turn
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
                found = node.echoed(message)  # below one that is added nothing stands yet: the walk ends there
                if found is None and message.role == ASSISTANT and _gives_way(node, outputs, threshold):
                    found = node.assistants[0]
                    rewritten = node.rewrite(found, message)
                node = node.add(message) if found is None else found
            self._ends[line[number]] = node
        node.add(dialogue.response, order)
        return rewritten


def _gives_way(above: Node, outputs: Sequence[int], threshold: int) -> bool:
    if len(above.assistants) != 1:
        return False
    (only,) = above.assistants
    return only.turn is not None and not only.below and outputs[only.turn] < threshold


def build(turns: Sequence[Turn], line: Sequence[int], threshold: int) -> tuple[list[Builder], set[int]]:
    """The builders of the turns that a leaf is the first to hold, and which of them were realigned away.

    What the builders of its whole line hold above those is an earlier leaf's, so they begin with nothing of their own.
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
    """Of a turn against the last one of a builder. Another temperature or kind of log-prob forks: a row has one."""
    held, mine = turns[last].tokens, turns[order].tokens
    if not one_row(held, mine):
        return Drift.FORK
    same = shared_prefix(held, held.length, mine, mine.prompt_len)
    if same == held.length:
        return Drift.CLEAN
    return Drift.REALIGN if same >= held.prompt_len and len(mine.output) < threshold else Drift.FORK


class Slime:
    """See the module. Segments come in slime's order, depth first."""

    needs_messages = True

    def cut(
        self, turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey], rules: PolicyOptions
    ) -> Segments:
        """Route, then build. What was named undelivered, or aborted, was never shown to an agent and is not routed."""
        masked = taken_out(turns, tree, undelivered, rules.version, guess_retries=False)
        threshold = rules.fork_threshold_tokens
        root = _routed(turns, masked, threshold)
        runs: list[tuple[int, ...]] = []
        for line in root.lines():
            builders, lost = build(turns, line, threshold)
            masked |= dict.fromkeys(lost, MaskReason.realigned)
            runs += [tuple(builder.own) for builder in builders]
        return Segments(tuple(runs), duplicated(turns, runs), masked)


def _routed(turns: Sequence[Turn], masked: dict[int, MaskReason], threshold: int) -> Node:
    """The tree of messages; adds to `masked` the turns that it has no place for."""
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
