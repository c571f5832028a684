"""Kill runners, gateways and engines while sessions are answered: `python benchmarks/chaos/answers.py [--kills 20]`.

Real `turnlog role runner` and `turnlog role gateway` processes and a scripted engine behind SGLang's HTTP contract, one
of each,
are killed by SIGKILL at random moments and started again, under rollouts that call a tool and give an answer that no
other turn gives. From the topics alone: wherever a verdict says what was judged, the fold of the run must train that
answer, and the finish must name its turn; every rollout must come to its end, every call have been run once.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from servers import TURNLOG, environment, say, servers, told

from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.plugins.recipes.calc import RECIPE
from turnlog.processors.core.errors import FoldError
from turnlog.processors.core.fold.unit import Fold
from turnlog.processors.runtime.assembler import assembler_plan
from turnlog.processors.runtime.unit import AssemblerPlan, records_between
from turnlog.schemas import ids
from turnlog.schemas.events import (
    EngineRegistered,
    Event,
    FinishReason,
    Limits,
    Purpose,
    RewardAssigned,
    RolloutRequested,
    Sampling,
    SegmentSample,
    SessionFinished,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
    TurnCompleted,
)
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TOOL_CALLS, TURNS
from turnlog.schemas.types import Payload
from turnlog.settings import Settings

OPEN = 24
"""Rollouts at once."""
GROUP_SIZE = 2
PATIENCE_S = 180.0
WEIGHTS = {"runner": 3, "gateway": 2, "engine": 1}
"""How often each is chosen."""


@dataclass(slots=True)
class Story:
    """What happened."""

    requested: set[str] = field(default_factory=set)
    over: set[str] = field(default_factory=set)
    """Rollouts with a final session."""
    executed: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)
    """Ends that nobody asked for."""
    enough: bool = False
    exits: dict[str, int | None] = field(default_factory=dict)


@dataclass(slots=True)
class Processes:
    """One runner, one gateway, one engine."""

    settings: Settings
    right: float = 0.0
    """Share of right answers, of the engine's."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those that every process has."""
    children: dict[str, Child] = field(default_factory=dict)

    def start(self, name: str) -> None:
        """Start it, or start it again."""
        settings, folder = self.settings, Path(self.settings.run.directory)
        argv: tuple[str, ...] = (*TURNLOG, "role", name)
        if name == "engine":
            script = Path(__file__).with_name("scripted_engine.py")
            port = settings.engine.urls[0].rpartition(":")[2]
            argv = (sys.executable, str(script), port, settings.model.path, "--right", str(self.right))
        variables = {
            "TURNLOG_MODEL_PATH": settings.model.path,
            "TURNLOG_GATEWAY_URL": settings.gateway.url,
            "TURNLOG_GATEWAY_PORT": str(settings.gateway.port),
            "TURNLOG_RUNNER_CONCURRENCY": str(OPEN),
        }
        env = {**environment(settings, f"{name}-0"), **variables, **self.more}
        self.children[name] = Child(Launch(name=name, argv=argv, log=folder / f"{name}.log", env=env)).start()


async def everything(role: Role, *topics: str) -> list[tuple[str, int, Event]]:
    """All records of these topics, one topic after the other."""
    found: list[tuple[str, int, Event]] = []
    for topic in topics:
        count = (await role.log.topics())[topic].partitions
        names = [Partition(topic, number) for number in range(count)]
        ends = await role.log.end_offsets(names)
        for name in names:
            async for record in records_between(role.log, name, 0, ends[name]):
                found.append((topic, record.offset, await role.events.decode(record)))
    return found


async def ask(role: Role, story: Story, *, deadline_s: float = PATIENCE_S) -> None:
    """Keep OPEN rollouts open until there is enough."""
    group = 0
    while not story.enough:
        if len(story.requested) - len(story.over) >= OPEN:
            await asyncio.sleep(0.05)
            continue
        for index in range(GROUP_SIZE):
            request = requested(role.settings, f"group-{group}", index, deadline_s=deadline_s)
            await role.events.append(request)
            story.requested.add(request.rollout_id)
        group += 1


def requested(settings: Settings, group: str, index: int, *, deadline_s: float) -> RolloutRequested:
    """A rollout of the calc recipe, as a feeder asks for it."""
    rollout = ids.rollout_id(group, index)
    return RolloutRequested(
        event_id=rollout, run_id=settings.run.id, group_id=group, floor=0, task_id=group, rollout_id=rollout,
        rollout_index=index, group_size=GROUP_SIZE, draw=0, dataset="chaos", dataset_epoch=0, index=0, recipe="calc",
        purpose=Purpose.train, task=json.dumps({"prompt": "3 + 5 = ?", "answer": "8"}).encode(),
        sampling=Sampling(max_new_tokens=128), min_weight_version=0,
        limits=Limits(max_turns=4, max_context_tokens=2048, deadline_s=deadline_s),
    )  # fmt: skip


async def work(role: Role, story: Story) -> None:
    """Stand in for sandbox workers, and note which rollouts are over: until cancelled."""
    topics = [name for name in await role.log.topics() if name in (TOOL_CALLS.name, SESSIONS.name)]
    counts = {name: (await role.log.topics())[name].partitions for name in topics}
    answers: dict[str, ToolCallCompleted] = {}
    async with role.log.reader() as reader:
        reader.assign({Partition(name, number): 0 for name in topics for number in range(counts[name])})
        while True:
            for record in await reader.poll(timeout_s=0.2):
                event = await role.events.decode(record)
                if isinstance(event, ToolCallRequested):
                    if event.call_id not in answers:
                        story.executed[event.call_id] += 1
                        answers[event.call_id] = answered(event)
                    await role.events.append(answers[event.call_id])
                elif isinstance(event, SessionFinished) and event.final:
                    rollouts = {ids.session_id(one, attempt): one for one in story.requested for attempt in range(9)}
                    story.over.add(rollouts[event.session_id])


def answered(event: ToolCallRequested) -> ToolCallCompleted:
    """The tool says 8."""
    return ToolCallCompleted(
        event_id=event.call_id, run_id=event.run_id, group_id=event.group_id, session_id=event.session_id,
        floor=event.floor, rollout_id=event.rollout_id, call_id=event.call_id, call_seq=event.call_seq,
        status=ToolStatus.ok, reason="", exit_code=0, output=b"8\n", full_output=None, duration_s=0.0, queue_s=0.0,
        workspace=None, attempt=0, worker="chaos", cached=False,
    )  # fmt: skip


async def kill(processes: Processes, story: Story, *, kills: int, rng: random.Random) -> None:
    """Kill one after the other, each when rollouts have come to their end since the last."""
    while story.kills.total() < kills:
        before, deadline = len(story.over), time.monotonic() + PATIENCE_S
        while len(story.over) < before + 4 and time.monotonic() < deadline:
            revive(processes, story)
            await asyncio.sleep(0.05)
        await asyncio.sleep(rng.uniform(0.0, 0.5))
        name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if processes.children[name].returncode is None:
            processes.children[name].kill()
            story.kills[name] += 1
            say(f"kill {story.kills.total()}: {name}, {len(story.over)} rollouts are over")
            processes.start(name)
    story.enough = True


def revive(processes: Processes, story: Story) -> None:
    """Start again what ended unasked, as a supervisor does."""
    for name, child in processes.children.items():
        if child.returncode is not None:
            story.deaths[name] += 1
            say(child.tail())
            processes.start(name)


def registered(settings: Settings) -> EngineRegistered:
    """What the scripted engine's loader would write."""
    return EngineRegistered(
        event_id="engine-0", run_id=settings.run.id, engine_id="engine-0", url=settings.engine.urls[0],
        state="serving", version=0, model="scripted",
    )  # fmt: skip


async def torture(settings: Settings, *, kills: int, seed: int) -> int:
    """The whole run; the exit status."""
    processes, story = Processes(settings), Story()
    async with open_role("chaos", settings) as role:
        plan = assembler_plan(await configure(role), settings.assembler)
        await role.events.append(registered(settings))
        for name in ("engine", "gateway", "runner"):
            processes.start(name)
        tasks = [asyncio.create_task(each) for each in (ask(role, story), work(role, story))]
        await kill(processes, story, kills=kills, rng=random.Random(seed))
        say(f"{story.kills.total()} kills; waiting for {len(story.requested) - len(story.over)} rollouts")
        deadline = time.monotonic() + PATIENCE_S
        while story.over != story.requested and time.monotonic() < deadline and not tasks[1].done():
            revive(processes, story)
            await asyncio.sleep(0.1)
        story.exits = {name: child.stop() for name, child in reversed(processes.children.items())}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return verdict(plan, story, await everything(role, SESSIONS.name, TURNS.name, SNAPSHOTS.name))


def inline(payload: Payload) -> dict[str, Any]:
    """A payload of JSON that is small enough to stand in its record."""
    assert isinstance(payload, bytes)
    value: dict[str, Any] = json.loads(payload)
    return value


@dataclass(frozen=True, slots=True)
class Judged:
    """A session with a verdict, and what it was about."""

    session_id: str
    said: str
    finish: SessionFinished


def judged(records: list[tuple[str, int, Event]]) -> list[Judged]:
    """Sessions with a RewardAssigned and the finish that counts, with the text that their first verdict saw."""
    said: dict[str, str] = {}
    finishes: dict[str, SessionFinished] = {}
    for _, _, event in records:
        if isinstance(event, RewardAssigned):
            said.setdefault(event.session_id, inline(event.evidence)["said"])
        elif isinstance(event, SessionFinished):
            finishes.setdefault(event.session_id, event)  # every gateway is dead before the next one lives
    return [Judged(session, text, finishes[session]) for session, text in said.items()]


def samples_of(plan: AssemblerPlan, records: list[tuple[str, int, Event]]) -> list[SegmentSample]:
    """By the fold of the run."""
    groups: dict[str, Fold] = {}
    found: list[SegmentSample] = []
    for topic, offset, event in records:
        fold = groups.setdefault(event.group_id, plan.factory(event.group_id, event.floor))
        try:
            outputs = fold.apply(topic, offset, event)
        except FoldError as refusal:
            outputs = refusal.outputs
        found += [one for one in outputs if isinstance(one, SegmentSample)]
    return found


def trained(samples: list[SegmentSample]) -> dict[str, Counter[tuple[str, int]]]:
    """Session -> how often each of its turns trains."""
    found: dict[str, Counter[tuple[str, int]]] = {}
    for sample in samples:
        turns = {(span.turn.epoch, span.turn.index) for span in sample.spans if span.trained and span.length}
        found.setdefault(sample.session_id, Counter()).update(turns)
    return found


def verdict(plan: AssemblerPlan, story: Story, records: list[tuple[str, int, Event]]) -> int:
    """Compare, print the line."""
    turns = [event for _, _, event in records if isinstance(event, TurnCompleted)]
    content = {(turn.session_id, inline(turn.response)["content"]): turn for turn in turns}
    samples = trained(samples_of(plan, records))
    lost, twice, alone, misnamed = 0, 0, 0, 0
    sessions = judged(records)
    for each in sessions:
        turn = content.get((each.session_id, each.said))
        if turn is None:
            lost += 1
            say(f"session {each.session_id}: no turn said {each.said!r}, which was judged")
            continue
        times = samples.get(each.session_id, Counter[tuple[str, int]]())[turn.turn.epoch, turn.turn.index]
        lost += times == 0
        twice += times > 1
        alone += turn.aborted
        misnamed += turn.turn not in each.finish.turns or turn.turn in each.finish.undelivered
        if times != 1:
            say(f"session {each.session_id}: the answer of {turn.turn} trains {times} times")
    skipped = len(story.requested - story.over)
    repeated = sum(count - 1 for count in story.executed.values())
    ok = not (lost or twice or misnamed or skipped or repeated) and bool(sessions)
    ok = ok and all(status == 0 for name, status in story.exits.items() if name != "engine")
    return told(
        id="answers", kills=story.kills.total(), lost=lost, twice=twice, skipped=skipped, identical=not misnamed, ok=ok,
        detail={
            "kills_of": story.kills, "deaths": story.deaths, "rollouts": len(story.requested),
            "sessions": len(sessions), "turns": len(turns), "answers_whose_client_was_gone": alone,
            "not_named": misnamed, "fold_version": plan.fold.version,
            "turns_cut_off": sum(turn.finish_reason is FinishReason.abort for turn in turns),
            "calls_run_twice": repeated, "exits": story.exits,
        },
    )  # fmt: skip


def with_model(settings: Settings) -> Settings:
    """With a policy's folder without weights, and free addresses for a gateway and a scripted engine."""
    model, (gateway, engine) = Path(settings.run.directory) / "model", free_ports(2)
    model.mkdir()
    RECIPE.warm_start.write_tokenizer(model)
    config: Mapping[str, object] = RECIPE.warm_start.model.config()
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    replace = dataclasses.replace
    return replace(
        settings,
        model=replace(settings.model, path=str(model)),
        gateway=replace(settings.gateway, url=f"http://{HOST}:{gateway}", port=gateway),
        engine=replace(settings.engine, urls=(f"http://{HOST}:{engine}",)),
    )


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill what answers sessions.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with servers(f"chaos-{uuid4().hex[:8]}") as settings:
        settings = with_model(settings)
        return asyncio.run(torture(settings, kills=arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
