"""Token accounting, read from the log: sampled = trained + masked by reason, for the run or for each session, group or
batch."""

from __future__ import annotations

from collections import Counter

from turnlog.infra.history import all_events, events
from turnlog.infra.roles.role import Role
from turnlog.infra.roles.runs import Configured, recorded_configuration
from turnlog.processors.core.audit import FIRST, Books, Ledgers
from turnlog.processors.core.books import TokenAccount, run_books
from turnlog.processors.core.fold_versions import fold_version
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored, sampled_tokens

READ = (FIRST, topics.SESSIONS, topics.SNAPSHOTS, topics.TREES, topics.SAMPLES, topics.BATCHES, topics.STEPS)
"""Topics from which the accounts are computed, in reading order."""


async def read(role: Role) -> TokenAccount:
    """Fold snapshots, scores, manifests and steps into the account of the run. A repeated snapshot counts once."""
    sampled: Counter[str] = Counter()
    seen: set[str] = set()
    async for _, snapshot in events(role, topics.SNAPSHOTS):
        if snapshot.event_id not in seen:
            seen.add(snapshot.event_id)
            sampled[snapshot.group_id] += sampled_tokens(snapshot)
    scored = [event async for _, event in events(role, topics.SAMPLES) if isinstance(event, GroupScored)]
    manifests = await all_events(role, topics.BATCHES)
    return run_books(dict(sampled), scored, manifests, await all_events(role, topics.STEPS))


async def read_levels(role: Role) -> Books:
    """Return the accounts of every session, group and batch, and the places where records disagree."""
    run = await recorded_configuration(role) or Configured.today(role.settings)
    ledgers = Ledgers(role.settings.run.id, run.batcher.max_tokens, fold_version(run.fold_version))
    for topic in READ:
        async for record, event in events(role, topic):
            ledgers.add(record.topic, record.partition, record.offset, event)
    return ledgers.close()
