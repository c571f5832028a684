"""Which incarnation of the trainer this is, and which weight version comes next: read from weight-versions.

Every incarnation publishes the weights that it starts from before its first step, so the highest incarnation and the
highest version of a run both stand in that topic. Read after the fence: by then the last owner's open transaction is
aborted and nothing of it can still appear.
"""

from __future__ import annotations

from turnlog.infra.event_log import EventLog
from turnlog.infra.log import Log, Partition
from turnlog.processors.core.batches.weight_chain import WeightChain
from turnlog.schemas.events import WeightVersionPublished
from turnlog.schemas.topics import WEIGHTS

PARTITION = Partition(WEIGHTS.name, 0)


async def read_past(log: Log, events: EventLog, run_id: str) -> WeightChain:
    """What the incarnations before published. Call after entering the transactor."""
    start = (await log.start_offsets([PARTITION]))[PARTITION]
    end = (await log.end_offsets([PARTITION]))[PARTITION]
    past = WeightChain()
    async with log.reader() as reader:
        reader.assign({PARTITION: start})
        while reader.position(PARTITION) < end:
            for record in await reader.poll():
                event = await events.decode(record)
                if isinstance(event, WeightVersionPublished) and event.run_id == run_id:
                    past.apply(event)
    return past
