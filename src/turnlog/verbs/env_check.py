"""`turnlog env check`: run every task's solution, and an agent that does nothing, by the runner's own code."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from rich import box
from rich.table import Table

from turnlog.infra.blobs import MemoryBlobs
from turnlog.infra.environments.agents import CommandAgent
from turnlog.infra.environments.episodes import Message, TaskRow
from turnlog.infra.environments.sources import BrokenRecipe, call_recipe, task_source
from turnlog.infra.environments.tasks import Recipe, Task, TaskSource
from turnlog.infra.environments.verifiers.judges import client
from turnlog.infra.roles.terminal import Terminal, aside, say, say_json
from turnlog.names import ExitStatus
from turnlog.producers.rollout import Rollout
from turnlog.producers.tasks import read_dataset
from turnlog.sandbox_workers.egress import Egress
from turnlog.sandbox_workers.pooling import SandboxPools
from turnlog.schemas.events import Limits, Purpose, RewardAssigned, RewardFailed, RolloutRequested, Sampling
from turnlog.settings import Settings
from turnlog.verbs.local_sessions import LocalEvents, Script, ScriptedGateway

SOLVED, NOTHING = "solution", "empty agent"
SAME: Final = 1e-6
"""Rewards that differ by at most this count as equal."""
IDLE: Final = CommandAgent(name="empty", version="1", argv=("true",))
"""Program that does nothing."""
WHY_CHARS: Final = 300
"""Characters of a cause that the table shows: its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """Options of the verb."""

    source: str
    dataset: Path | None
    tasks: int
    at_once: int
    empty_only: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Result of one try of a task."""

    reward: float | None
    """Reward, or None if there is none."""
    wanted: float
    why: str
    """Cause of a missing reward, or evidence for a wrong one."""
    seconds: float

    @property
    def ok(self) -> bool:
        """True if the reward is one that a sound task gives: 1 for its solution, 0 or less for doing nothing."""
        if self.reward is None:
            return False
        return self.reward <= SAME if self.wanted == 0.0 else abs(self.reward - self.wanted) <= SAME


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTask:
    """A task, and its results by who acted."""

    task_id: str
    results: Mapping[str, TrialResult]

    @property
    def ok(self) -> bool:
        """True if the task may be trained on."""
        return all(result.ok for result in self.results.values())

    def body(self) -> dict[str, Any]:
        """Return the task's results as JSON."""
        tries = {who: {**dataclasses.asdict(result), "ok": result.ok} for who, result in self.results.items()}
        return {"task": self.task_id, "ok": self.ok, **tries}


async def check(settings: Settings, options: CheckOptions) -> int:
    """Check the tasks, print the table, and return the exit status. Raises RecipeError, BackendUnavailable,
    EgressUnavailable, TaskDatasetError."""
    source = task_source(options.source)
    rows = _rows(source, options, settings.feeder.seed)
    found: list[CheckedTask] = []
    async with TaskChecker.open(settings, options) as checker:
        slots = asyncio.Semaphore(options.at_once)

        async def one(row: TaskRow) -> CheckedTask:
            async with slots:
                return await checker.check(source, row)

        for done in asyncio.as_completed([asyncio.create_task(one(row)) for row in rows]):
            found.append(await done)
            aside(f"{len(found)}/{len(rows)} {found[-1].task_id}: {'ok' if found[-1].ok else 'not ok'}")
    found.sort(key=lambda task: task.task_id)
    if options.as_json:
        say_json([task.body() for task in found])
    else:
        _show(options.source, found)
    return ExitStatus.DONE if all(task.ok for task in found) else ExitStatus.DIFFERS


def _rows(source: TaskSource, options: CheckOptions, seed: int) -> list[TaskRow]:
    """Return the first different rows of the file or the source. Raises TaskDatasetError, BrokenRecipe."""
    if options.dataset is not None:
        dataset = read_dataset(options.dataset, source)
        return [json.loads(dataset.task(number)) for number in range(min(options.tasks, len(dataset.rows)))]
    return call_recipe(source.name, _first_rows, source.tasks(seed), options.tasks)


def _first_rows(rows: Iterator[TaskRow], count: int) -> list[TaskRow]:
    """Return the first rows, without those that a source repeats because it has no more."""
    found: dict[str, TaskRow] = {}
    for row in itertools.islice(rows, 2 * count):
        found.setdefault(json.dumps(row, sort_keys=True), row)
        if len(found) == count:
            break
    return list(found.values())


class TaskChecker:
    """Tries tasks in the sandboxes of this machine. `open` creates one."""

    def __init__(
        self,
        settings: Settings,
        options: CheckOptions,
        events: LocalEvents,
        gateway: ScriptedGateway,
        blobs: MemoryBlobs,
    ) -> None:
        self._settings = settings
        self._options = options
        self._events = events
        self._gateway = gateway
        self._blobs = blobs
        self._numbers = itertools.count()

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings, options: CheckOptions) -> AsyncIterator[TaskChecker]:
        """Open it with the sandboxes of [sandbox]. Raises BackendUnavailable, EgressUnavailable."""
        async with AsyncExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="turnlog-env-"))
            url = await stack.enter_async_context(_silent_endpoint())
            settings = dataclasses.replace(
                settings,
                run=dataclasses.replace(settings.run, id="env-check", directory=directory),
                gateway=dataclasses.replace(settings.gateway, url=url),
                runner=dataclasses.replace(settings.runner, max_attempts=1),
            )
            blobs, egress = MemoryBlobs(), None
            if settings.egress.allow:
                egress = await stack.enter_async_context(Egress.open_temporary(settings.egress, blobs))
            pools = await stack.enter_async_context(SandboxPools.open(settings, ca=egress.ca if egress else None))
            events = LocalEvents(settings, pools, blobs, egress)
            stack.push_async_callback(events.close)
            yield cls(settings, options, events, ScriptedGateway(settings, url), blobs)

    async def check(self, source: TaskSource, row: TaskRow) -> CheckedTask:
        """Try one task. Raises BrokenRecipe."""
        task = call_recipe(source.name, source.task, row)
        results = {} if self._options.empty_only else {SOLVED: await self._solve(source, task)}
        idle = dataclasses.replace(task, agent=IDLE) if isinstance(task.agent, CommandAgent) else task
        results[NOTHING] = await self._try(source, idle, (), 0.0)
        return CheckedTask(task_id=task.id, results=results)

    async def _solve(self, source: TaskSource, task: Task) -> TrialResult:
        try:
            solution = None if task.solution is None else call_recipe(source.name, task.solution)
        except BrokenRecipe as error:
            return TrialResult(reward=None, wanted=1.0, why=str(error), seconds=0.0)
        if solution is None:
            return TrialResult(
                reward=None, wanted=1.0, why="it has no solution: --empty-only leaves this out", seconds=0.0
            )
        if isinstance(solution, CommandAgent):
            return await self._try(source, dataclasses.replace(task, agent=solution), (), 1.0)
        return await self._try(source, dataclasses.replace(task, agent=None), solution, 1.0)

    async def _try(self, source: TaskSource, task: Task, script: Sequence[Message], wanted: float) -> TrialResult:
        feeder, name, began = self._settings.feeder, f"check-{next(self._numbers)}", time.monotonic()
        turns = self._gateway.scripts[name] = Script(script)
        request = RolloutRequested(
            event_id=name, run_id="env-check", group_id=name, floor=0, task_id=task.id, rollout_id=name,
            rollout_index=0, group_size=1, draw=0, dataset="", dataset_epoch=0, index=0, recipe=self._options.source,
            purpose=Purpose.eval, task=json.dumps(dict(task.row)).encode(),
            sampling=Sampling(max_new_tokens=feeder.max_new_tokens), min_weight_version=0,
            limits=Limits(
                max_turns=max(feeder.max_turns, len(script) + 1), max_context_tokens=feeder.max_context_tokens,
                deadline_s=feeder.deadline_s,
            ),
        )  # fmt: skip
        self._events.results.expect(name)
        async with client() as http:
            rollout = Rollout(
                request, _OneTask(source.name, task), self._settings.runner, self._gateway, self._events,
                self._events.results, self._blobs, http,
            )  # fmt: skip
            owed = await rollout.run(resume=False)
            if owed is not None:
                await rollout.settle(owed)
        self._events.results.forget(name)
        seconds = time.monotonic() - began
        match self._events.rewards.get(name):
            case RewardAssigned(value=value, evidence=evidence):
                return TrialResult(reward=value, wanted=wanted, why=_text(evidence), seconds=seconds)
            case RewardFailed(cause=cause):
                return TrialResult(reward=None, wanted=wanted, why=cause, seconds=seconds)
        outcome = turns.outcome.value if turns.outcome else "unfinished"
        return TrialResult(reward=None, wanted=wanted, why=f"{outcome}: {turns.reason}", seconds=seconds)


class _OneTask(Recipe):
    """A source with one task."""

    def __init__(self, name: str, task: Task) -> None:
        self.name, self._task = name, task

    def task(self, row: TaskRow) -> Task:
        return self._task


@asynccontextmanager
async def _silent_endpoint() -> AsyncIterator[str]:
    """Serve chat completions whose message is empty, for agents that request their turns themselves."""

    async def answer(request: web.Request) -> web.Response:
        message = {"role": "assistant", "content": ""}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        body = {"id": "0", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        return web.json_response({**body, "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _text(evidence: bytes | Any) -> str:
    return evidence.decode(errors="replace") if isinstance(evidence, bytes) else ""


def _show(source: str, found: Sequence[CheckedTask]) -> None:
    table = Table(box=box.SIMPLE, title=f"{source}: {len(found)} tasks", title_justify="left")
    for column in ("task", "solution", "empty agent", "seconds", "why"):
        table.add_column(column, overflow="fold")
    for task in found:
        shown = [_reward(task.results.get(who)) for who in (SOLVED, NOTHING)]
        wrong = [f"{who}: {result.why[-WHY_CHARS:]}" for who, result in task.results.items() if not result.ok]
        seconds = sum(result.seconds for result in task.results.values())
        table.add_row(task.task_id, *shown, f"{seconds:.1f}", "\n".join(wrong))
    Terminal().print(table)
    bad = sum(not task.ok for task in found)
    say(f"{len(found) - bad} of {len(found)} tasks are sound" + (f", {bad} are not" if bad else ""))


def _reward(result: TrialResult | None) -> str:
    if result is None:
        return "-"
    return ("none" if result.reward is None else f"{result.reward:g}") + ("" if result.ok else " !")
