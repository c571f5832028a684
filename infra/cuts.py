"""A cut through one unit of the assembler: how far its inputs are folded, and where its outputs end that came of them.

Both stand in one transaction, but a reader sees them one after the other, in any order: a cut is what held still while
it was read, and `Log.commits` waits for offsets that are on their way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turnlog.infra.log import Commit, Log, Partition
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold.low_water import committed_high, committed_version
from turnlog.processors.core.fold_versions import INPUTS, OUTPUTS, outputs_of


@dataclass(frozen=True, slots=True)
class Cut:
    """Offsets by topic: `high`, the first input that is not folded; `ends`, where the outputs of what is folded end."""

    group: str
    unit: int
    high: Mapping[str, int]
    ends: Mapping[str, int]
    commits: Mapping[str, tuple[int, str]]
    """Input topic -> (committed offset, metadata), as the assembler wrote them."""

    @property
    def order(self) -> int:
        """Grows with every later cut of the unit."""
        return sum(self.high.values()) + sum(self.ends.values())

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cut:
        """The inverse of `as_json`."""
        commits = {topic: (offset, metadata) for topic, (offset, metadata) in value["commits"].items()}
        return cls(**{**value, "commits": commits})


async def live_cut(log: Log, run_id: str, unit: int) -> Cut | None:
    """The unit's present cut; None while a transaction is under way. Raises LogError, BrokenMetadata."""
    group = ConsumerGroup.ASSEMBLER.format(run=run_id)
    inputs = [Partition(topic, unit) for topic in INPUTS]
    before = await log.commits(group, inputs)
    versions = {committed_version(commit.metadata) for commit in before.values()}
    outputs = [Partition(topic, unit) for topic in (outputs_of(versions.pop()) if versions else OUTPUTS)]
    ends = await log.end_offsets(outputs)
    if ends != await log.end_offsets(outputs, committed=False):
        return None
    if before != await log.commits(group, inputs):
        return None
    return _cut(group, unit, before, ends)


def _cut(group: str, unit: int, commits: Mapping[Partition, Commit], ends: Mapping[Partition, int]) -> Cut:
    return Cut(
        group=group,
        unit=unit,
        high=dict.fromkeys(INPUTS, 0) | {p.topic: committed_high(c.metadata) for p, c in commits.items()},
        ends={place.topic: end for place, end in ends.items()},
        commits={place.topic: (commit.offset, commit.metadata) for place, commit in commits.items()},
    )
