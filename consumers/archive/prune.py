"""Which records of topics may be deleted, because the archive has them and no role will read them again.

Of agent.turns, agent.token-snapshots and turn-trees: they are the bulk, and only the assembler and the gateway of a
session that is open read them. The other topics stay whole: feeder, batcher, trainer and loaders fold theirs from the
beginning.
"""

from __future__ import annotations

import json

from turnlog.infra.archive_index import ArchiveIndex
from turnlog.infra.log import Log, Partition
from turnlog.processors.core.unit_fold import assembler_group
from turnlog.schemas.topics import SNAPSHOTS, TREES, TURNS

PRUNED = (TURNS.name, SNAPSHOTS.name, TREES.name)
OUT_LOW = "trees"
"""In the assembler's commit metadata: the first tree that a restart reads."""


async def prunable(log: Log, index: ArchiveIndex, run_id: str, before_ms: int) -> dict[Partition, int]:
    """Partition -> first offset to keep: below it every record is archived, older than `before_ms`, and below the
    assembler's low-water mark. Partitions of which nothing goes are absent. Raises LogError, ArchiveDamaged."""
    places = [Partition(name, number) for name in PRUNED for number in range(index.topics.get(name, 0))]
    starts = await log.start_offsets(places)
    found: dict[Partition, int] = {}
    for place in places:
        limit = min(await _needed(log, run_id, place), await _old(index, place, before_ms))
        if limit > starts[place]:
            found[place] = limit
    return found


async def _needed(log: Log, run_id: str, place: Partition) -> int:
    """The first offset that a restarted assembler reads; 0 when it never committed."""
    commits = await log.commits(
        assembler_group(run_id), [Partition(name, place.number) for name in (TURNS.name, SNAPSHOTS.name)]
    )
    if place.topic == TREES.name:
        return min((int(json.loads(commit.metadata)[OUT_LOW]) for commit in commits.values()), default=0)
    return commits[place].offset if place in commits else 0


async def _old(index: ArchiveIndex, place: Partition, before_ms: int) -> int:
    """End of the archived files whose records are all older."""
    end = 0
    for span in index.spans.get(place, []):
        if (await index.range(place, span)).last_time >= before_ms:
            break
        end = span.end
    return end
