"""Results of each weight version in the groups of purpose `eval`, from the log alone."""

from __future__ import annotations

from turnlog.infra.history import events
from turnlog.infra.roles.ending import run_verb
from turnlog.infra.roles.role import Role, open_role
from turnlog.processors.core.evaluation import EvalGroups, Evaluations
from turnlog.schemas import topics
from turnlog.settings import Settings


class NothingEvaluated(Exception):
    """No session of purpose eval counts for a version yet. Remedy: set [eval] every, and wait."""


async def read(role: Role) -> Evaluations:
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
        found = await read(role)
    if not found.versions:
        raise NothingEvaluated(
            f"run {settings.run.id} has no evaluated session: {found.asked} groups of purpose eval were requested, "
            f"{found.scored} are scored; set [eval] every, or open sessions with purpose eval"
        )
    return found
