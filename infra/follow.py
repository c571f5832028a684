"""Reads of partitions up to an end offset: how a role learns what the log already contains before it acts or follows.

The caller takes the end offsets before it reads (`Log.end_offsets`; `own_ends` if only it writes there), and decides
when it opens the reader whether records of open and of aborted transactions are delivered (`Log.reader`). The position
of a reader passes transaction markers, aborted records and other gaps, so a read ends even if no record lies before the
end. Polls may return nothing, as during an outage, which does not end a read either.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

from turnlog.infra.log import Log, Partition, Reader, Record


async def assign_from_start(log: Log, reader: Reader, places: Sequence[Partition]) -> dict[Partition, int]:
    """Assign `places` from their first retained records, and return their end offsets as of now. Raises TopicMissing,
    LogUnavailable."""
    reader.assign(await log.start_offsets(places))
    return await log.end_offsets(places)


def caught_up(reader: Reader, ends: Mapping[Partition, int]) -> bool:
    """Return whether every record below `ends` was delivered. An owner that goes on with the same reader polls until
    this is true and keeps the later records that those polls return."""
    return all(reader.position(place) >= end for place, end in ends.items())


async def read_range(
    reader: Reader, starts: Mapping[Partition, int], ends: Mapping[Partition, int], *, max_records: int = 500,
    timeout_s: float = 0.1,
) -> AsyncGenerator[Record, None]:  # fmt: skip
    """Assign `starts` and yield the records of [start, end) of each of these partitions, in offset order per partition.

    Records at or after the ends are dropped, and the position of the reader lies after them: assign or seek before it
    is used again. The read may be abandoned at any record; the reader belongs to the caller, who closes it. `ends` may
    contain more partitions. `max_records` and `timeout_s` are those of each poll. Raises OffsetOutOfRange if records
    after a start were pruned, and what `Reader.poll` raises.
    """
    ends = {place: ends[place] for place in starts}
    reader.assign(starts)
    while not caught_up(reader, ends):
        for record in await reader.poll(max_records=max_records, timeout_s=timeout_s):
            if record.offset < ends[Partition(record.topic, record.partition)]:
                yield record
