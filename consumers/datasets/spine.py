"""Which conversations of a unit are wanted, decided without a message: scores, sessions and trees, ids and numbers."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from dataclasses import dataclass

from turnlog.consumers.datasets.filters import Facts, Filters
from turnlog.consumers.datasets.query import Query
from turnlog.consumers.datasets.source import Source
from turnlog.infra.log import Partition
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored, Outcome, Purpose, SessionStarted, TurnTreeAssembled
from turnlog.schemas.types import TurnId


@dataclass(slots=True)
class Candidate:
    """One judged session; its conversation ends at `last`, the last turn of its anchor."""

    run_id: str
    group_id: str
    session_id: str
    rollout_id: str
    task_id: str
    purpose: Purpose
    outcome: Outcome
    reward: float
    recipe: str = ""
    rollout_index: int = -1
    """-1 until its SessionStarted was read."""
    agent: str = ""
    model: str = ""
    environment: str = ""
    environment_version: str = ""
    last: TurnId | None = None
    version_min: int = -1
    version_max: int = -1
    tokens: int = 0
    """Prompt and output of the last turn."""
    finish_reason: str = ""


Pair = tuple[str, str]
"""(session chosen, session rejected)"""


async def candidates(source: Source, unit: int, filters: Filters) -> dict[str, Candidate]:
    """Session -> what the log says of it, for the sessions of one unit that the query admits."""
    found = await _scored(source, unit, filters)
    await _begun(source, unit, filters, found)
    await _assembled(source, unit, filters, found)
    for name in [name for name, each in found.items() if each.last is None or each.rollout_index < 0]:
        filters.counted("no_conversation")
        del found[name]
    return found


def best_of_groups(found: dict[str, Candidate], filters: Filters) -> dict[str, Candidate]:
    """The highest reward of each group, ties by rollout_index."""
    kept: dict[str, Candidate] = {}
    for members in _groups(found):
        best = min(members, key=lambda each: (-each.reward, each.rollout_index))
        kept[best.session_id] = best
        for _ in members[1:]:
            filters.counted("best_of_group")
    return kept


def pairs_of(found: dict[str, Candidate], query: Query, filters: Filters) -> dict[str, list[Pair]]:
    """Group -> its pairs of unequal reward, at least `min_margin` apart; counted where there are none."""
    pairs: dict[str, list[Pair]] = {}
    for members in _groups(found):
        ranked = sorted(members, key=lambda each: (-each.reward, each.rollout_index))
        worst_first = sorted(members, key=lambda each: (each.reward, each.rollout_index))
        proposed = list(itertools.combinations(ranked, 2)) if query.pairs == "all" else [(ranked[0], worst_first[0])]
        unequal = [(best, worst) for best, worst in proposed if best.reward > worst.reward]
        if not unequal:
            filters.counted("no_pair")
            continue
        for best, worst in unequal:
            if best.reward - worst.reward >= query.min_margin:
                pairs.setdefault(best.group_id, []).append((best.session_id, worst.session_id))
            else:
                filters.counted("min_margin")
    return pairs


def _groups(found: dict[str, Candidate]) -> list[list[Candidate]]:
    groups: dict[str, list[Candidate]] = defaultdict(list)
    for each in found.values():
        groups[each.group_id].append(each)
    return list(groups.values())


async def _scored(source: Source, unit: int, filters: Filters) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    place = Partition(topics.SAMPLES.name, unit)
    async for record, event in source.read(place, GroupScored.__name__):
        assert isinstance(event, GroupScored)
        source.provenance.settings_sha256.add(event.settings_sha256)
        source.provenance.fold_versions.add(event.fold_version)
        for each in event.rollouts:
            if each.reward is None or each.excluded_reason is not None:
                filters.counted("excluded")  # infrastructure failed, or nobody judged: no example of anything
                continue
            facts = Facts(
                event.group_id, event.task_id, event.purpose, each.outcome, each.reward, record.timestamp_ms,
                each.session_id,
            )  # fmt: skip
            if filters.admits(facts):
                found[each.session_id] = Candidate(
                    event.run_id, event.group_id, each.session_id, each.rollout_id, event.task_id, event.purpose,
                    each.outcome, each.reward,
                )  # fmt: skip
    return found


async def _begun(source: Source, unit: int, filters: Filters, found: dict[str, Candidate]) -> None:
    async for _, event in source.read(Partition(topics.SESSIONS.name, unit), SessionStarted.__name__):
        assert isinstance(event, SessionStarted)
        candidate = found.get(event.session_id)
        if candidate is None or candidate.rollout_index >= 0:
            continue
        candidate.rollout_index = event.rollout_index
        candidate.recipe, candidate.agent, candidate.model = map(
            sys.intern, (event.recipe, event.agent.name, event.model)
        )
        candidate.environment = sys.intern(event.environment.name)
        candidate.environment_version = sys.intern(event.environment.version)
        if not (filters.admits_recipe(event.recipe) and filters.admits_environment(filters.expired(event.environment))):
            del found[event.session_id]


async def _assembled(source: Source, unit: int, filters: Filters, found: dict[str, Candidate]) -> None:
    async for _, event in source.read(Partition(topics.TREES.name, unit), TurnTreeAssembled.__name__):
        assert isinstance(event, TurnTreeAssembled)
        candidate = found.get(event.session_id)
        if candidate is None or event.anchor_segment is None:
            continue
        nodes = {node.turn: node for node in event.nodes}
        last = nodes[event.segments[event.anchor_segment].turns[-1]]
        candidate.last, candidate.tokens = last.turn, last.prompt_tokens + last.output_tokens
        candidate.finish_reason = last.finish_reason.value
        line = [last]
        while (base := line[-1].base) is not None:
            line.append(nodes[base])
        candidate.version_min = min((each.version_min for each in line if each.version_min >= 0), default=-1)
        candidate.version_max = max(each.version_max for each in line)
        if not filters.admits_versions(candidate.version_min, candidate.version_max):
            del found[event.session_id]
