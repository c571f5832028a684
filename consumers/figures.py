"""Figures of a run, computed from the log alone: the token accounting (sampled = trained + masked by reason), and the
results of each weight version in groups of purpose `eval`."""

from __future__ import annotations

from collections import Counter

from turnlog.infra.history import all_events, events
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import Configured, recorded_configuration
from turnlog.processors.core.audit import FIRST, Books, Ledgers
from turnlog.processors.core.books import TokenAccount, run_books
from turnlog.processors.core.evaluation import EvalGroups, Evaluations
from turnlog.processors.core.fold_versions import fold_version
from turnlog.schemas import topics
from turnlog.schemas.events import GroupScored, sampled_tokens
from turnlog.settings import Settings

READ = (FIRST, topics.SESSIONS, topics.SNAPSHOTS, topics.TREES, topics.SAMPLES, topics.BATCHES, topics.STEPS)
"""Topics from which the accounts are computed, in reading order."""


async def read_books(role: Role) -> TokenAccount:
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


class NothingEvaluated(Exception):
    """No session of purpose eval counts for a version yet. Remedy: set [eval] every, and wait."""


async def read_evaluations(role: Role) -> Evaluations:
    """Read the evaluations of the role's run."""
    found = EvalGroups()
    for topic in (topics.SAMPLES, topics.TREES, topics.GROUP_REQUESTS, topics.WEIGHTS):
        async for _, event in events(role, topic, names=EvalGroups.READS):
            found.apply(event)
    return found.evaluations()


def best_version(settings: Settings, *, archive: bool) -> int:
    """Return the number of the best version. Raises NothingEvaluated."""
    best = run_verb(evaluations(settings, archive=archive)).best
    assert best is not None  # else `evaluations` has raised
    return best.number


async def evaluations(settings: Settings, *, archive: bool) -> Evaluations:
    """Read the evaluations of a run. Raises NothingEvaluated, LogUnavailable, NoArchive."""
    async with open_role("eval", settings, archive=archive) as role:
        found = await read_evaluations(role)
    if not found.versions:
        raise NothingEvaluated(
            f"run {settings.run.id} has no evaluated session: {found.asked} groups of purpose eval were requested, "
            f"{found.scored} are scored; set [eval] every, or open sessions with purpose eval"
        )
    return found
