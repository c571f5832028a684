"""Mean reward per recipe, kept in SQLite: `python examples/reward_per_recipe.py [--once]` beside a running turnlog.

Killed and started again it goes on where it was; an event that comes twice replaces its own row.
"""

import asyncio
import sqlite3
import sys

from turnlog.consumers.follow import follow
from turnlog.schemas.events import SegmentSample

Row = tuple[str, str, float]


def keep(db: sqlite3.Connection, rows: list[Row]) -> None:
    with db:  # one transaction, and so one wait for the disk
        db.executemany("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?)", rows)


async def main() -> None:
    db = sqlite3.connect("rewards.db", check_same_thread=False)
    db.execute("CREATE TABLE IF NOT EXISTS rewards (rollout_id PRIMARY KEY, recipe, reward)")
    async with follow("segment-samples", group="reward-per-recipe", until_end="--once" in sys.argv) as events:
        async for batch in events.batches():
            samples = (event for event in batch if isinstance(event, SegmentSample))
            rows = [(sample.rollout_id, sample.recipe, sample.reward) for sample in samples]
            await asyncio.to_thread(keep, db, rows)  # the event loop keeps the group's heartbeats going
    for row in db.execute("SELECT recipe, count(*), round(avg(reward), 4) FROM rewards GROUP BY recipe"):
        print(*row)


asyncio.run(main())
