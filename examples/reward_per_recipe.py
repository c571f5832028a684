"""Mean reward per recipe, kept in SQLite: `python examples/reward_per_recipe.py [--once]` beside a running turnlog.

Killed and started again it goes on where it was; an event that comes twice replaces its own row.
"""

import asyncio
import sqlite3
import sys

from turnlog.consumers.follow import follow
from turnlog.schemas.events import SegmentSample


async def main() -> None:
    db = sqlite3.connect("rewards.db", isolation_level=None)
    db.execute("CREATE TABLE IF NOT EXISTS rewards (rollout_id PRIMARY KEY, recipe, reward)")
    async with follow("segment-samples", group="reward-per-recipe", until_end="--once" in sys.argv) as events:
        async for event in events:
            if isinstance(event, SegmentSample):
                row = (event.rollout_id, event.recipe, event.reward)
                db.execute("INSERT OR REPLACE INTO rewards VALUES (?, ?, ?)", row)
    for row in db.execute("SELECT recipe, count(*), round(avg(reward), 4) FROM rewards GROUP BY recipe"):
        print(*row)


asyncio.run(main())
