"""Lineages: turns that continue one conversation, classified as main, sub-agent or side call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from turnlog.processors.core.messages import Dialogue
from turnlog.processors.core.turns import Kinship, TurnTokenDelta, key_of
from turnlog.schemas.types import TurnId

MAIN = "main"
SUB_AGENT = "sub_agent"
SIDE_CALL = "side_call"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that the effective SessionFinished names, with both of its records."""

    id: TurnId
    tokens: TurnTokenDelta
    kinship: Kinship
    dialogue: Dialogue | None = None
    """The turn's messages; only for trajectory rules that route by messages."""


@dataclass(frozen=True, slots=True)
class Lineages:
    """The lineages of a session: `of[i]` is the lineage of turn i; ids count from 0 in order of their first turns."""

    of: tuple[int, ...]
    kinds: tuple[str, ...]
    """Kind of each lineage, by lineage id."""
    bases: tuple[int | None, ...]
    """`bases[i]`: the turn that turn i continues by its messages."""

    @property
    def main(self) -> int | None:
        """Id of the main lineage; None if the agent paths name no main lineage."""
        return self.kinds.index(MAIN) if MAIN in self.kinds else None

    @property
    def continued_turns(self) -> frozenset[int]:
        """Turns that another turn continues by its messages."""
        return frozenset(base for base in self.bases if base is not None)


def lineages(turns: Sequence[Turn]) -> Lineages:
    """Return the lineages of a session's named turns, in order of (epoch, index).

    A turn belongs to its base's lineage; a base that is not named, or not earlier, is ignored. Main is the first root
    that has tools or is continued, else the first root. Another root with main's system digest continues main. A root
    with tools or continued is a sub-agent; a single turn without tools is a side call. A harness profile's `agent_path`
    overrides this heuristic: one path is one lineage, `main` and "" are main, `side...` is a side call, any other is a
    sub-agent.
    """
    rank = {key_of(turn.id): order for order, turn in enumerate(turns)}
    bases: list[int | None] = []
    for order, turn in enumerate(turns):
        base = turn.kinship.base
        at = None if base is None else rank.get(key_of(base), order)
        bases.append(None if at is None or at >= order else at)
    lively = {base for base in bases if base is not None} | {o for o, t in enumerate(turns) if t.kinship.has_tools}
    keys = _keys(turns, bases, lively)
    ids: dict[Hashable, int] = {}
    of = tuple(ids.setdefault(key, len(ids)) for key in keys)
    return Lineages(of, tuple(_kind(key, lively) for key in ids), tuple(bases))


def _keys(turns: Sequence[Turn], bases: Sequence[int | None], lively: set[int]) -> list[Hashable]:
    """Return a key for each turn's lineage: MAIN, an agent path, or the order of its root."""
    roots = [o for o, turn in enumerate(turns) if bases[o] is None and turn.kinship.agent_path is None]
    paths_name_main = any(turn.kinship.agent_path in ("", MAIN) for turn in turns)
    first = roots[0] if roots else None
    main = None if paths_name_main else next((root for root in roots if root in lively), first)
    keys: list[Hashable] = []
    for order, turn in enumerate(turns):
        base, path = bases[order], turn.kinship.agent_path
        if path is not None:
            keys.append(path or MAIN)
        elif order == main:
            keys.append(MAIN)
        elif base is not None:
            keys.append(keys[base])
        elif main is not None and turn.kinship.system_sha256 == turns[main].kinship.system_sha256:
            keys.append(MAIN)
        else:
            keys.append(order)
    return keys


def _kind(key: Hashable, lively: set[int]) -> str:
    if key == MAIN:
        return MAIN
    if isinstance(key, str):
        return SIDE_CALL if key.startswith("side") else SUB_AGENT
    return SUB_AGENT if key in lively else SIDE_CALL
