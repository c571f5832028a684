"""Lineages: turns that continue one conversation, classified as main, player, sub-agent, side call or compaction."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turnlog.processors.core.fold_versions import LATEST, FoldVersion
from turnlog.processors.core.messages import Dialogue
from turnlog.processors.core.turns import Kinship, TurnKey, TurnTokenDelta, key_of
from turnlog.schemas.types import TurnId

MAIN = "main"
PLAYER = "player"
SUB_AGENT = "sub_agent"
SIDE_CALL = "side_call"
COMPACTION = "compaction"
UNNAMED = "side/no-tools"
"""Path of a request of which a harness profile knows nothing but that it offers no tools."""
SIDE_PLAYER = f"side/{PLAYER}"
"""Path above players that never train, such as a simulated user."""
BESIDE = ("", "side", MAIN)
"""Agents of a path `AGENT/compaction` that stand for main. `side/compaction` is what the folds before version 5, which
know no compactions, mask as a side call.
"""


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
    players: tuple[str, ...]
    """Player to which each lineage belongs, by lineage id; "" for none."""
    agents: tuple[str, ...]
    """Kind of the agent that each lineage serves, by lineage id: that of the agent whose history a compaction
    summarises, else the lineage's own.
    """

    @property
    def main(self) -> int | None:
        """Id of the main lineage; None if the agent paths name no main lineage."""
        return self.kinds.index(MAIN) if MAIN in self.kinds else None

    @property
    def continued_turns(self) -> frozenset[int]:
        """Turns that another turn continues by its messages."""
        return frozenset(base for base in self.bases if base is not None)

    def player_of(self, order: int) -> str:
        """Return the player whose turn it is; "" for none."""
        return self.players[self.of[order]]

    def leads(self, order: int) -> bool:
        """Whether the turn is one of the main agent, or of a player itself, as opposed to those of its helpers."""
        return self.kinds[self.of[order]] in (MAIN, PLAYER)


class Compaction(NamedTuple):
    """Key of the lineage that holds every summary of one agent's history."""

    agent: Hashable
    """Key of the agent's own lineage."""


def lineages(turns: Sequence[Turn], version: FoldVersion = LATEST) -> Lineages:
    """Return the lineages of a session's named turns, in order of (epoch, index).

    A turn belongs to its base's lineage; a base that is not named, or not earlier, is ignored. Main is the first root
    that has tools or is continued, else the first root. Another root with main's system digest continues main. A root
    with tools or continued is a sub-agent; a single turn without tools is a side call. A harness profile's `agent_path`
    overrides this heuristic: one path is one lineage, `main` and "" are main, `side...` is a side call, any other is a
    sub-agent.

    From fold version 5 on, `AGENT/compaction` is a compaction of that agent, and so is a turn that nothing continues
    and whose answer a later root quotes (`summary_turn`): that root continues the agent. `player/NAME` is a player; its
    sub-agents and compactions have longer paths. `side/player/NAME` is a player that never trains, such as a simulated
    user.
    """
    rank = {key_of(turn.id): order for order, turn in enumerate(turns)}
    bases: list[int | None] = []
    for order, turn in enumerate(turns):
        base = turn.kinship.base
        at = None if base is None else rank.get(key_of(base), order)
        bases.append(None if at is None or at >= order else at)
    lively = {base for base in bases if base is not None} | {o for o, t in enumerate(turns) if t.kinship.has_tools}
    summaries = _summaries(turns, bases, rank) if version.compactions else {}
    keys = _keys(turns, bases, lively, summaries, version)
    ids: dict[Hashable, int] = {}
    of = tuple(ids.setdefault(key, len(ids)) for key in keys)
    agents = [key.agent if isinstance(key, Compaction) else key for key in ids]
    return Lineages(
        of,
        tuple(COMPACTION if isinstance(key, Compaction) else _kind(key, lively, version) for key in ids),
        tuple(bases),
        tuple(_player(agent) if version.players else "" for agent in agents),
        tuple(_kind(agent, lively, version) for agent in agents),
    )


def _summaries(turns: Sequence[Turn], bases: Sequence[int | None], rank: Mapping[TurnKey, int]) -> dict[int, int]:
    """Return the turns that summarise a history -> the first later root of the same agent that quotes them."""
    if all(turn.kinship.summary is None for turn in turns):
        return {}
    continued = {base for base in bases if base is not None}
    found: dict[int, int] = {}
    for order, turn in enumerate(turns):
        summary = turn.kinship.summary
        at = None if summary is None or bases[order] is not None else rank.get(key_of(summary))
        if at is None or at >= order or at in continued or at in found:
            continue
        path = turns[at].kinship.agent_path
        if path in (None, UNNAMED, turn.kinship.agent_path):
            found[at] = order
    return found


def _keys(
    turns: Sequence[Turn],
    bases: Sequence[int | None],
    lively: set[int],
    summaries: Mapping[int, int],
    version: FoldVersion,
) -> list[Hashable]:
    """Return a key for each turn's lineage: MAIN, an agent path, the order of its root, or a Compaction of one of
    these.
    """
    roots = [o for o, turn in enumerate(turns) if bases[o] is None and turn.kinship.agent_path is None]
    roots = [root for root in roots if root not in summaries] or roots
    paths_name_main = any(turn.kinship.agent_path in ("", MAIN) for turn in turns)
    first = roots[0] if roots else None
    main = None if paths_name_main else next((root for root in roots if root in lively), first)
    quoting = {quotes: summary for summary, quotes in summaries.items()}
    keys: list[Hashable] = []
    for order, turn in enumerate(turns):
        base, path = bases[order], turn.kinship.agent_path
        if order in summaries and order != main:
            keys.append(_of_summary(turns[summaries[order]], None if base is None else keys[base]))
        elif path is not None:
            keys.append(_of_path(path, version))
        elif order == main:
            keys.append(MAIN)
        elif base is not None:
            keys.append(keys[base])
        elif order in quoting and isinstance(summary := keys[quoting[order]], Compaction):
            keys.append(summary.agent)
        elif main is not None and turn.kinship.system_sha256 == turns[main].kinship.system_sha256:
            keys.append(MAIN)
        else:
            keys.append(order)
    return keys


def _of_path(path: str, version: FoldVersion) -> Hashable:
    """Return the key of a turn by the path of its agent."""
    agent, _, last = path.rpartition("/")
    if not version.compactions or last != COMPACTION:
        return path or MAIN
    beside = not agent.startswith(f"{SIDE_PLAYER}/")
    return Compaction(MAIN if agent in BESIDE else agent.removeprefix("side/") if beside else agent)


def kind_of_path(path: str) -> str:
    """Return the kind of the lineage that an agent path names under the latest fold version."""
    key = _of_path(path, LATEST)
    return COMPACTION if isinstance(key, Compaction) else _kind(key, set(), LATEST)


def _of_summary(quoting: Turn, base: Hashable | None) -> Compaction:
    """Return the key of a summary: that of the agent which goes on from it, else of the one whose turn it continues."""
    path = quoting.kinship.agent_path
    if path is not None:
        return Compaction(path or MAIN)
    return base if isinstance(base, Compaction) else Compaction(MAIN if base is None else base)


def _kind(key: Hashable, lively: set[int], version: FoldVersion) -> str:
    if key == MAIN:
        return MAIN
    if isinstance(key, str):
        if version.players and key.startswith(f"{PLAYER}/") and key.count("/") == 1:
            return PLAYER
        return SIDE_CALL if key.startswith("side") else SUB_AGENT
    return SUB_AGENT if key in lively else SIDE_CALL


def _player(key: Hashable) -> str:
    """Return the player of an agent path `player/NAME...` or `side/player/NAME...`; "" for any other lineage."""
    path = key.removeprefix("side/") if isinstance(key, str) else ""
    return path.split("/")[1] if path.startswith(f"{PLAYER}/") else ""
