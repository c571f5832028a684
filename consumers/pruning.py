"""Records that `turnlog log archive prune` may delete: they are archived, and no role will read them again.

It covers every topic except the control topics, which roles read from the beginning. What roles still need is
determined from the log: the commits of consumer groups, the batcher's last manifest, and the requests of unfinished
rollouts. An index on this machine states its position in its own file; an index that does not exist yet can be built
from the archive.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from turnlog.consumers.index.reader import unread
from turnlog.infra.archive import ArchiveIndex
from turnlog.infra.history import all_events, partitions, records
from turnlog.infra.log import Commit, Partition, partition_of
from turnlog.infra.roles.role import Role
from turnlog.names import ConsumerGroup
from turnlog.processors.core.fold.unit import committed_version
from turnlog.processors.core.fold_versions import scores_topic
from turnlog.schemas import UndecodableRecord, topics
from turnlog.schemas.topics import CONTROL, SESSIONS, SNAPSHOTS, TURNS

OUT_LOW = "trees"
"""Key in the assembler's commit metadata: the first tree that a restart reads."""
RESULTS = "results"
"""Key in a sandbox worker's commit metadata: the first result that a restart reads."""


async def prunable(role: Role, index: ArchiveIndex, before_ms: int) -> dict[Partition, int]:
    """Return the first offset to keep of each partition. Below it every record is archived, older than `before_ms`, and
    needed by no role of the run. Partitions without anything to delete are absent. Raises LogError, ArchiveDamaged,
    DamagedIndex."""
    control = {topic.name for topic in CONTROL}
    places = [Partition(name, number) for name, count in sorted(index.topics.items()) if name not in control
              for number in range(count)]  # fmt: skip
    starts = await role.log.start_offsets(places)
    needed, indexed = await Needs.read(role), unread(role.settings, places)
    found: dict[Partition, int] = {}
    for place in places:
        limit = min(needed.first(place), await _old(index, place, before_ms), indexed.get(place, sys.maxsize))
        if limit > starts[place]:
            found[place] = limit
    return found


@dataclass(slots=True)
class Needs:
    """Offsets from which roles of the run read again after a restart; 0 (everything) for a role that never
    committed."""

    assembler: Mapping[Partition, Commit]
    runner: Mapping[Partition, Commit]
    sandbox: Mapping[Partition, Commit]
    views: Mapping[Partition, Commit]
    batcher: dict[int, int] = field(default_factory=dict)
    """Partition -> position in the last manifest."""
    floors: dict[int, int] = field(default_factory=dict)
    """Partition of agent.sessions -> start offset: for an unfinished rollout, a gateway reads the topic from there."""
    noted: bool = False
    """True if group-requests and group-scores hold the requested groups and their scores, so that a feeder reads
    neither tasks nor samples."""

    @classmethod
    async def read(cls, role: Role) -> Needs:
        """Read the present needs from the log."""
        run_id, commits = role.settings.run.id, role.log.commits
        unit = [place for topic in (SESSIONS, TURNS, SNAPSHOTS) for place in partitions(role, topic)]
        calls, tasks = partitions(role, topics.TOOL_CALLS), partitions(role, topics.TASKS)
        needs = cls(
            assembler=await commits(ConsumerGroup.ASSEMBLER.format(run=run_id), unit),
            runner=await commits(
                ConsumerGroup.RUNNER.format(run=run_id), [*tasks, *partitions(role, topics.TOOL_RESULTS)]
            ),
            sandbox=await commits(ConsumerGroup.SANDBOX.format(run=run_id), calls),
            views=await commits(ConsumerGroup.VIEWS.format(run=run_id), partitions(role, SESSIONS)),
        )
        for manifest in (await all_events(role, topics.BATCHES))[-1:]:
            needs.batcher = {position.partition: position.offset for position in manifest.positions}
        needs.floors = await _floors(role, {place: needs.of_runner(place) for place in tasks})
        needs.noted = bool(await all_events(role, topics.GROUP_REQUESTS)) and needs.has_group_scores
        return needs

    @property
    def has_group_scores(self) -> bool:
        """Whether scores are on group-scores, according to the fold versions in the assembler's commits."""
        versions = {committed_version(commit.metadata) for commit in self.assembler.values()}
        return bool(versions) and all(scores_topic(version) is topics.GROUP_SCORES for version in versions)

    def of_runner(self, place: Partition) -> int:
        """Return the offset of the oldest unfinished rollout."""
        return self.runner[place].offset if place in self.runner else 0

    def first(self, place: Partition) -> int:
        """Return the first offset that a role reads again."""
        number = place.number
        match place.topic:
            case "agent.turns" | "agent.token-snapshots":
                return _offset(self.assembler, place)
            case "agent.sessions":
                behind = self.views[place].offset if place in self.views else _offset(self.assembler, place)
                least = min(_offset(self.assembler, place), behind)
                return min(least, self.floors.get(number, least))
            case "turn-trees":
                return min(
                    _value(self.assembler.get(Partition(topic.name, number)), OUT_LOW) for topic in (TURNS, SNAPSHOTS)
                )
            case "segment-samples":
                return self.batcher.get(number, 0) if self.noted else 0
            case "tasks":
                return self.of_runner(place) if self.noted else 0
            case "agent.tool-calls":
                return _offset(self.sandbox, place)
            case "agent.tool-results":
                calls = self.sandbox.get(Partition(topics.TOOL_CALLS.name, number))
                return min(self.of_runner(place), _value(calls, RESULTS))
        return 0  # a topic that this release does not know


def _offset(commits: Mapping[Partition, Commit], place: Partition) -> int:
    return commits[place].offset if place in commits else 0


def _value(commit: Commit | None, what: str) -> int:
    return 0 if commit is None or not commit.metadata else int(json.loads(commit.metadata)[what])


async def _floors(role: Role, since: Mapping[Partition, int]) -> dict[int, int]:
    """Return the start offsets of the rollouts at or after the runner's low-water marks."""
    groups, found = role.settings.kafka.groups, dict[int, int]()
    async for record in records(role, list(since), await role.log.end_offsets(list(since)), since=since):
        try:
            request = await role.events.decode(record)
        except UndecodableRecord:
            continue
        number = partition_of(request.group_id.encode(), groups)
        found[number] = min(found.get(number, request.floor), request.floor)
    return found


async def _old(index: ArchiveIndex, place: Partition, before_ms: int) -> int:
    """Return the end of the leading archived files whose records are all older than `before_ms`."""
    end = 0
    for span in index.spans.get(place, []):
        if (await index.range(place, span)).last_time >= before_ms:
            break
        end = span.end
    return end
