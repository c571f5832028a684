"""`turnlog books`: the books of a run from its topics."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from turnlog.consumers.history import all_events, events
from turnlog.infra.role import Role, opened
from turnlog.processors.core.run_books import RunBooks, run_books
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored
from turnlog.settings import Settings


async def read(role: Role) -> RunBooks:
    """Fold snapshots, scores, manifests and steps into the books of the run. A repeated snapshot counts once."""
    sampled: Counter[str] = Counter()
    seen: set[str] = set()
    async for _, snapshot in events(role, topics.SNAPSHOTS):
        if snapshot.event_id not in seen:
            seen.add(snapshot.event_id)
            sampled[snapshot.group_id] += sum(span.length for span in snapshot.version_spans)
    scored = [event async for _, event in events(role, topics.SAMPLES) if isinstance(event, GroupScored)]
    manifests = await all_events(role, topics.BATCHES)
    return run_books(dict(sampled), scored, manifests, await all_events(role, topics.STEPS))


def table(books: RunBooks) -> Table:
    """The books as people read them."""
    shown = Table("tokens", "count", title="books")
    shown.add_row("sampled", f"{books.sampled:,}")
    shown.add_row("trained", f"{books.trained:,}")
    for reason, count in books.masked.items():
        shown.add_row(f"masked: {reason}", f"{count:,}")
    shown.add_row("balance", "yes" if books.balance else "NO")
    return shown


async def show(settings: Settings) -> int:
    """Print the books; 0 when they balance."""
    async with opened("books", settings) as role:
        books = await read(role)
    Console().print(table(books))
    return 0 if books.balance else 1
