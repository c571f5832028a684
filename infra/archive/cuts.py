"""Consistent positions of a partition task, at which an archive can be cut."""

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
    """Consistent position of a partition task. `high`: first input offset per topic that is not folded; `ends`: end
    offset per output topic of what has been folded."""

    group: str
    unit: int
    high: Mapping[str, int]
    ends: Mapping[str, int]
    commits: Mapping[str, tuple[int, str]]
    """Input topic -> (committed offset, metadata), as the assembler wrote them."""

    @property
    def order(self) -> int:
        """Number that increases with every later cut of the partition task."""
        return sum(self.high.values()) + sum(self.ends.values())

    def as_json(self) -> dict[str, Any]:
        """Return the cut as JSON, the inverse of `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cut:
        """Parse the result of `as_json`."""
        commits = {topic: (offset, metadata) for topic, (offset, metadata) in value["commits"].items()}
        return cls(**{**value, "commits": commits})


async def live_cut(log: Log, run_id: str, unit: int) -> Cut | None:
    """Return the present cut of a partition task, or None while a transaction is open. Raises LogError,
    BrokenMetadata."""
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
