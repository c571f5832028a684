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
from typing import TYPE_CHECKING

from turnlog.processors.core.lineages import Lineages, Turn
from turnlog.processors.core.messages import Message
from turnlog.processors.core.segments import Segments, duplicated, one_row, taken_out
from turnlog.processors.core.shared_prefix import shared_prefix
from turnlog.processors.core.turns import TurnKey
from turnlog.schemas.events import MaskReason

if TYPE_CHECKING:
    from turnlog.processors.core.fold_rules import FoldRules

ASSISTANT = "assistant"


@dataclass(slots=True, eq=False)
class Node:
    """A message in its place. `turn` is the order of the turn that generated it; None: it was only replayed."""

    message: Message | None
    turn: int | None = None
    below: list[Node] = field(default_factory=list)

    def add(self, message: Message, turn: int | None = None) -> Node:
        """A new last child."""
        child = Node(message, turn)
        self.below.append(child)
        return child

    def lines(self) -> Iterator[list[int]]:
        """Per leaf, in order of insertion: the generated turns from the root down to it."""
        stack: list[tuple[Node, tuple[int, ...]]] = [(self, ())]
        while stack:
            node, above = stack.pop()
            line = above if node.turn is None else (*above, node.turn)
            if not node.below:
                yield list(line)
            stack += [(child, line) for child in reversed(node.below)]


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

    turns: list[int]
    own: list[int]
    """Those that no earlier leaf holds, and that no later turn realigned."""


def route(root: Node, order: int, turn: Turn, outputs: Sequence[int], threshold: int) -> int | None:
    """Mount a turn's messages and its response; the turn whose response they rewrite, if any.

    The walk takes the first child that a message echoes and never goes back. Where it ends at an assistant message and
    exactly one assistant stands there, a childless turn of fewer than `threshold` output tokens, that turn gives way.
    """
    assert turn.dialogue is not None
    node, said, done = root, turn.dialogue.request(), 0
    while done < len(said):
        found = next((n for n in node.below if n.message is not None and said[done].echoes(n.message)), None)
        if found is None:
            break
        node, done = found, done + 1
    rewritten = None
    if done < len(said) and said[done].role == ASSISTANT:
        rivals = [n for n in node.below if n.message is not None and n.message.role == ASSISTANT]
        if len(rivals) == 1 and _gives_way(rivals[0], outputs, threshold):
            node, rewritten = rivals[0], rivals[0].turn
            node.turn, node.message = None, said[done]
            done += 1
    for message in said[done:]:
        node = node.add(message)
    node.add(turn.dialogue.response, order)
    return rewritten


def _gives_way(node: Node, outputs: Sequence[int], threshold: int) -> bool:
    return node.turn is not None and not node.below and outputs[node.turn] < threshold


def build(
    turns: Sequence[Turn], line: Sequence[int], claimed: set[int], threshold: int
) -> tuple[list[Builder], set[int]]:
    """The builders of one leaf, and which of its own turns were realigned away. Adds its turns to `claimed`."""
    builders: list[Builder] = []
    lost: set[int] = set()
    for order in line:
        own = [] if order in claimed else [order]
        claimed.add(order)
        drift = _drift(turns, builders[-1].turns[-1], order, threshold) if builders else Drift.FORK
        if drift is Drift.FORK:
            builders.append(Builder([order], own))
            continue
        builder = builders[-1]
        last = builder.turns[-1]
        if drift is Drift.REALIGN and last in builder.own:
            builder.own.remove(last)
            lost.add(last)
        builder.turns.append(order)
        builder.own += own
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
        self, turns: Sequence[Turn], tree: Lineages, undelivered: AbstractSet[TurnKey], rules: FoldRules
    ) -> Segments:
        """Route, then build. What was named undelivered, or aborted, was never shown to an agent and is not routed."""
        masked = taken_out(turns, tree, undelivered, guess_retries=False)
        threshold = rules.fork_threshold_tokens
        root = _routed(turns, masked, threshold)
        runs: list[tuple[int, ...]] = []
        claimed: set[int] = set()
        for line in root.lines():
            builders, lost = build(turns, line, claimed, threshold)
            masked |= dict.fromkeys(lost, MaskReason.realigned)
            runs += [tuple(builder.own) for builder in builders if builder.own]
        return Segments(tuple(runs), duplicated(turns, runs), masked)


def _routed(turns: Sequence[Turn], masked: dict[int, MaskReason], threshold: int) -> Node:
    """The tree of messages; adds to `masked` the turns that it has no place for."""
    root = Node(None)
    outputs = [len(turn.tokens.output) for turn in turns]
    for order, turn in enumerate(turns):
        if order in masked:
            continue
        if turn.dialogue is None or not turn.dialogue.request():
            masked[order] = MaskReason.unrouted
            continue
        rewritten = route(root, order, turn, outputs, threshold)
        if rewritten is not None:
            masked[rewritten] = MaskReason.rewritten
    return root
