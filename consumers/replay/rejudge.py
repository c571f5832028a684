"""Judge recorded sessions again, and write the dataset that the run would have had with those rewards.

There are two passes. The first judges every session for which the log holds a reward and a conversation, and changes
nothing. The second folds the records again with the new rewards in place of the old ones, so that advantages, filters
and groups follow from them, and so do the selections of the other views. Nothing is written to the log. New rewards are
cached on disk until the dataset is complete, so that a rerun after a kill requests none of them twice.

RewardRerunError
├── NotRerunnable   the verifier needs something that no longer exists: a sandbox or a live environment
├── NoVerifier      --verifier, or a recipe of the run, names no verifier that is installed here
└── NoSuchRows      the options do not fit a rerun: OUT is missing, or a filter cannot be used
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from turnlog.consumers.datasets.conversations import ConversationRow, whole_groups
from turnlog.consumers.datasets.manifest import Provenance
from turnlog.consumers.datasets.query import Filters, Joined, Query
from turnlog.consumers.datasets.source import Candidate, DatasetInput, candidates
from turnlog.consumers.replay.progress import ReplayState
from turnlog.infra.environments import sources
from turnlog.infra.environments.episodes import Episode, Judged, TaskRow, Verdict
from turnlog.infra.environments.tasks import Task, TaskSource, acted_out
from turnlog.infra.environments.verifiers import EnvironmentVerifier, PatchVerifier, SandboxVerifier, WeightedSum
from turnlog.infra.environments.verifiers.judges import Cause, Means, NoVerdict, client, judge
from turnlog.infra.environments.verifiers.kinds import JudgedGroup
from turnlog.infra.history import partitions
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role
from turnlog.schemas import ids, topics
from turnlog.schemas.events import Event, RewardAssigned, RewardFailed, RolloutRequested, SessionFinished, Verifier

SAME = 1e-9
"""Rewards that differ by at most this count as unchanged."""
SHOWN = 10
"""Maximum number of changed sessions to list, largest change first."""


class RewardRerunError(Exception):
    """Base of the tree above."""


class NotRerunnable(RewardRerunError):
    """Remedy: use a function, a service or a judge model, or a sum of them: those can judge a recorded session."""


class NoVerifier(RewardRerunError):
    """Remedy: pass --verifier MODULE:NAME of a module that can be imported here, or install the recipe's package."""


class NoSuchRows(RewardRerunError):
    """Remedy: name OUT, or pass --dry-run. Filters and selections apply to the views sft and preference, of one run."""


@dataclass(frozen=True, slots=True)
class Rejudged:
    """A session with its recorded and its new reward."""

    session_id: str
    by: Judged
    before: float
    after: Verdict | NoVerdict

    @property
    def difference(self) -> float | None:
        """New reward minus the recorded one; None if the new verifier gave none."""
        return None if isinstance(self.after, NoVerdict) else self.after.value - self.before

    @property
    def is_changed(self) -> bool:
        """True if the new reward differs, or there is none."""
        return self.difference is None or abs(self.difference) > SAME


@dataclass(slots=True)
class Verdicts:
    """New rewards of all sessions that were judged again; replaces the recorded ones in events of the log."""

    found: dict[str, Rejudged] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)
    """Reason -> number of sessions that keep the recorded reward."""
    resumed: int = 0
    """Number of rewards in `found` that come from an earlier rerun that was killed."""

    def substitute_event(self, event: Event) -> Event:
        """Return the event, or the new reward in place of the recorded one if its session was judged again. Rewards of
        single players stay as they are."""
        if not isinstance(event, RewardAssigned) or event.player or event.session_id not in self.found:
            return event
        new = self.found[event.session_id]
        by, common = (
            Verifier(new.by.name, new.by.version),
            {name: getattr(event, name) for name in ("run_id", "group_id", "session_id", "floor")},
        )
        if isinstance(new.after, NoVerdict):
            name = ids.digest("RewardFailed", event.session_id, by.name, by.version)
            return RewardFailed(event_id=name, verifier=by, cause=str(new.after), **common)
        after = new.after
        return dataclasses.replace(event, value=after.value, components=after.components, verifier=by, evidence=b"{}")

    def summary(self) -> dict[str, Any]:
        """Summarize for the manifest which verifiers judged, and what changed."""
        scored = [each for each in self.found.values() if each.difference is not None]
        moved = [each.difference or 0.0 for each in scored if each.is_changed]
        count = max(len(scored), 1)
        return {
            "verifiers": sorted({f"{each.by.name}:{each.by.version}" for each in self.found.values()}),
            "judged": len(self.found),
            "changed": len(moved),
            "raised": sum(difference > 0 for difference in moved),
            "lowered": sum(difference < 0 for difference in moved),
            "failed": len(self.found) - len(scored),
            "mean_before": math.fsum(each.before for each in scored) / count,
            "mean_after": math.fsum(each.before + (each.difference or 0.0) for each in scored) / count,
            "kept": dict(sorted(self.left.items())),
        }

    def key(self) -> str:
        """Return a key that is equal for equal rewards."""
        rows = ((each.session_id, repr(each.difference)) for each in self.found.values())
        return ids.digest(*(part for row in sorted(rows) for part in row))

    def lines(self) -> Iterator[str]:
        """Yield the lines of the printed report."""
        told = self.summary()
        yield (
            f"{told['judged']:,} sessions judged by {', '.join(told['verifiers']) or 'nobody'}: {told['changed']:,} "
            f"rewards change ({told['raised']:,} up, {told['lowered']:,} down), {told['failed']:,} no longer have one; "
            f"mean {told['mean_before']:.4f} to {told['mean_after']:.4f}"
        )
        if self.resumed:
            yield f"  {self.resumed:,} of them were judged by an unfinished rerun (--fresh judges them again)"
        for why, count in told["kept"].items():
            yield f"  {count:,} keep what was recorded: {why}"
        changed = [each for each in self.found.values() if each.is_changed]
        for each in sorted(changed, key=lambda one: -abs(one.difference or 0.0))[:SHOWN]:
            now = each.after if isinstance(each.after, NoVerdict) else f"{each.after.value:g}"
            yield f"  {each.session_id}  {each.before:g} -> {now}"


def verifier_at(path: str) -> Judged:
    """Load the verifier that `module:NAME` names, or that of the recipe that it names. Raises NoVerifier,
    NotRerunnable."""
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # a module may raise anything while it is imported
        raise NoVerifier(f"--verifier {path}: {type(error).__name__}: {error}; write MODULE:NAME") from error
    return rerunnable(getattr(found, "verifier", found))


def rerunnable(verifier: Judged) -> Judged:
    """Return the verifier if it can judge recorded sessions. Raises NotRerunnable, NoVerifier."""
    if isinstance(verifier, SandboxVerifier | PatchVerifier | EnvironmentVerifier):
        what = "what an environment answered" if isinstance(verifier, EnvironmentVerifier) else "sandboxes"
        raise NotRerunnable(
            f"{type(verifier).__name__} {verifier.name!r} judges by {what}, which a recorded session no longer has: "
            "rerun functions, services and judge models (`turnlog log session rerun` runs a session's calls again)"
        )
    if isinstance(verifier, WeightedSum):
        for part, _ in verifier.parts:
            rerunnable(part)
    if not isinstance(getattr(verifier, "name", None), str):
        raise NoVerifier(f"{type(verifier).__name__} is not a verifier: see docs/rewards.md")
    return verifier


class Rerun:
    """The first pass over the run that `role` reads."""

    def __init__(
        self, role: Role, verifier: Judged | None, *, at_once: int = 8, state: ReplayState | None = None
    ) -> None:
        """`verifier` None uses the verifier of each session's recipe, as installed here. `state` caches rewards."""
        self._state = state or ReplayState(None, {})
        self._role = role
        self._verifier = verifier
        self._slots = asyncio.Semaphore(max(at_once, 1))
        self.verdicts = Verdicts()

    async def run(self) -> Verdicts:
        """Judge all sessions again. Raises RewardRerunError, RecipeError, MissingContent, and what the log and the
        store raise."""
        query, provenance = Query(purposes=()), Provenance()
        plan = [topics.TASKS, topics.SAMPLES, topics.SESSIONS, topics.TREES, topics.SESSIONS, topics.TURNS]
        source = await DatasetInput.open(self._role, query, provenance, plan, None)
        rows = await self._tasks(source)
        async with client() as http:
            for unit in range(self._role.settings.kafka.groups):
                filters = Filters(query, Joined(tasks={}, trained=set()), self.verdicts.left)
                found = await candidates(source, unit, filters)
                reasons = await self._reasons(source, unit)
                judging: list[asyncio.Task[None]] = []
                try:
                    async for members in whole_groups(source, unit, found):
                        group = JudgedGroup(await self._episodes(members, found, rows, reasons))
                        for session, episode in group.episodes.items():
                            each, means = found[session], Means(http=http, session_id=session, group=group)
                            by = self._by(each, episode.task)
                            await self._slots.acquire()
                            judging.append(asyncio.create_task(self._judge(by, each, episode, means)))
                    await asyncio.gather(*judging)
                finally:
                    for task in judging:
                        task.cancel()
                    await asyncio.gather(*judging, return_exceptions=True)
        self._state.save()
        return self.verdicts

    async def _episodes(
        self, members: Mapping[str, ConversationRow | str], found: Mapping[str, Candidate],
        rows: Mapping[str, Mapping[str, Any]], reasons: Mapping[tuple[str, str], str],
    ) -> dict[str, Episode]:  # fmt: skip
        """Return the episodes of those sessions of a group that can be judged. Note the outcome of the others."""
        episodes: dict[str, Episode] = {}
        for session, said in members.items():
            if isinstance(said, str):
                self.verdicts.left[said] += 1
                continue
            each = found[session]
            episode = _episode(each, said, rows.get(each.group_id, {}), reasons)
            try:
                acted = await asyncio.to_thread(_acted_out, each.recipe, episode)
                if acted is None:
                    self.verdicts.left["it is a game of several players"] += 1
                else:
                    episodes[session] = acted
            except sources.BrokenRecipe as broken:
                self._note(each, self._by(each, episode.task), NoVerdict(Cause.crashed, str(broken)))
        return episodes

    async def _judge(self, by: Judged, each: Candidate, episode: Episode, means: Means) -> None:
        after: Verdict | NoVerdict | None = self._cached_reward(each.session_id, by)
        try:
            if after is None:
                found = await judge(by, episode, means)
                after = Verdict(found.value, found.components)  # without evidence: rows do not hold any
                self._keep(each.session_id, by, after)
        except NoVerdict as failed:
            after = failed
        finally:
            self._slots.release()
        self._note(each, by, after)

    def _by(self, each: Candidate, row: TaskRow) -> Judged:
        return self._verifier or rerunnable(_task(sources.task_source(each.recipe), row).verifier)

    def _note(self, each: Candidate, by: Judged, after: Verdict | NoVerdict) -> None:
        self.verdicts.found[each.session_id] = Rejudged(each.session_id, by, each.reward, after)

    def _cached_reward(self, session: str, by: Judged) -> Verdict | None:
        """Return the reward that a killed rerun cached for the same verifier version."""
        found = self._state.sections.get("verdicts", {}).get(session)
        if found is None or found["by"] != [by.name, by.version]:
            return None
        self.verdicts.resumed += 1
        return Verdict(found["value"], found["components"])

    def _keep(self, session: str, by: Judged, found: Verdict) -> None:
        """Cache a reward. Failures are not cached, because the verifier may succeed when it is asked again."""
        self._state.sections.setdefault("verdicts", {})[session] = {
            "by": [by.name, by.version], "value": found.value, "components": dict(found.components),
        }  # fmt: skip
        if self._state.due:
            self._state.save()

    async def _tasks(self, source: DatasetInput) -> dict[str, Mapping[str, Any]]:
        """Return the dataset row of each group by group id; {} for a row that is not a JSON object."""
        found: dict[str, Mapping[str, Any]] = {}
        for place in partitions(self._role, topics.TASKS):
            async for record, event in source.read(place, RolloutRequested):
                if event.group_id not in found:
                    whole = await source.inline_payloads(event, f"{record.topic}[{record.partition}]@{record.offset}")
                    assert isinstance(whole.task, bytes)
                    row = orjson.loads(whole.task)
                    found[event.group_id] = row if isinstance(row, dict) else {}
        return found

    async def _reasons(self, source: DatasetInput, unit: int) -> dict[tuple[str, str], str]:
        """Return (session, outcome) -> the reason of that outcome."""
        found: dict[tuple[str, str], str] = {}
        async for _, event in source.read(Partition(topics.SESSIONS.name, unit), SessionFinished):
            found.setdefault((event.session_id, event.outcome.value), event.reason)
        return found


def _episode(
    each: Candidate, said: ConversationRow, task: Mapping[str, Any], reasons: Mapping[tuple[str, str], str]
) -> Episode:
    """Build the episode as the live verifier saw it: without the None columns that the chat format adds."""
    messages = tuple({key: value for key, value in message.items() if value is not None} for message in said.messages)
    reason = reasons.get((each.session_id, each.outcome.value), "")
    return Episode(task=task, messages=messages, outcome=each.outcome, reason=reason)


def _acted_out(name: str, episode: Episode) -> Episode | None:
    """Append the answers of a simulation to the last turn's tool calls. Return None for a game of several players,
    because a row holds one conversation. Raises BrokenRecipe."""
    try:
        source = sources.task_source(name)
    except sources.UnknownRecipe:
        return episode  # a verifier given by --verifier can judge sessions of a recipe that is not installed here
    task = _task(source, episode.task)
    if task.game is not None:
        return None
    messages = sources.call_recipe(source.name, acted_out, task, episode.messages)
    return dataclasses.replace(episode, messages=tuple(messages))


def _task(source: TaskSource, row: TaskRow) -> Task:
    """Return the task of a row. Raises BrokenRecipe."""
    return sources.call_recipe(source.name, source.task, row)
