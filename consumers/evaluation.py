"""Results of each weight version in the groups of purpose `eval`, from the log alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

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


def body(run_id: str, found: Evaluations, ks: Sequence[int]) -> dict[str, Any]:
    """Return the answer as JSON, versions oldest first."""
    best = found.best
    return {
        "run": run_id,
        "versions": [version.body(ks) for version in found.in_order()],
        "best": None if best is None else best.number,
        "groups": {"asked": found.asked, "scored": found.scored},
        "left_out": dict(found.left_out),
    }


def table(run_id: str, found: Evaluations, ks: Sequence[int]) -> Table:
    """Return a table of the versions, oldest first."""
    best = found.best
    left = ", ".join(f"{reason} {count:,}" for reason, count in sorted(found.left_out.items()))
    where = f" ({best.checkpoint})" if best and best.checkpoint else ""
    lines = [f"best: version {best.number}{where}" if best else "", f"left out: {left}" if left else ""]
    shown = Table("version", "step", "tasks", "sessions", "mean reward", *(f"pass@{k}" for k in ks),
                  title=f"evaluations of {run_id}", caption="; ".join(line for line in lines if line))  # fmt: skip
    for version in found.in_order():
        passing = [version.passing(k) for k in ks]
        shown.add_row(
            f"{version.number}{' *' if version is best else ''}", "-" if version.step is None else str(version.step),
            str(len(version.rewards)), str(version.sessions), str(version.reward),
            *("-" if told is None else str(told) for told in passing),
        )  # fmt: skip
    return shown
