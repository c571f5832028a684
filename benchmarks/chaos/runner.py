"""Kill the runner in the middle of sessions: `python benchmarks/chaos/runner.py [--kills 20]`.

A real `turnlog role runner`, gateway and sandbox worker, and a scripted engine whose output is a function of the
prompt's
ids. The built-in loop acts out sessions of several turns, each with one or two calls that append a line to a file which
no sandbox and no log keeps, while the runner is killed by SIGKILL at random moments and started again. Then the same
tasks are done once more, undisturbed. From the topics and that file: every rollout has ended (skipped), once and in its
first session (twice); each call has taken effect (lost) once (twice); what trains of a rollout is, token by token, what
trains of the undisturbed one (identical); the turn that was judged trains (lost).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import noting
import numpy as np
from answers import everything, judged, registered, samples_of, with_model
from servers import TURNLOG, environment, offered, say, servers, told

from turnlog.infra.embedded.process import Child, Launch
from turnlog.infra.log import Partition
from turnlog.infra.roles.role import Role, open_role
from turnlog.infra.roles.runs import configure
from turnlog.processors.runtime.assembler import assembler_plan
from turnlog.producers.gateway.prompts import TextTokens
from turnlog.schemas import ids
from turnlog.schemas.events import (
    Event,
    Limits,
    Purpose,
    RewardAssigned,
    RolloutRequested,
    Sampling,
    SegmentSample,
    SessionFinished,
    SessionStarted,
    ToolCallCompleted,
    ToolCallRequested,
    TurnCompleted,
)
from turnlog.schemas.topics import SESSIONS, SNAPSHOTS, TOOL_CALLS, TOOL_RESULTS, TURNS
from turnlog.settings import Settings

OPEN = 8
"""Rollouts at once."""
GROUP_SIZE = 2
PATIENCE_S = 180.0
AFTER_S = 1.5
"""The longest time from a record that shows the runner at work to its death."""
SHOWN = 5
STRUCK, CALM = "struck", "calm"
"""What groups of the two passes are called."""
STAGES = {
    SessionStarted: "sampling", TurnCompleted: "between", ToolCallRequested: "calling", ToolCallCompleted: "sampling",
    RewardAssigned: "judged",
}  # fmt: skip
"""What a session is about once such a record of it is on the log."""


Recorded = tuple[str, int, Event]
"""(topic, offset, event)."""


@dataclass(slots=True)
class Story:
    """What happened."""

    requested: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Rollout -> its pass, and the number of its task."""
    over: set[str] = field(default_factory=set)
    """Sessions with a final end."""
    stages: dict[str, str] = field(default_factory=dict)
    """Open session -> what it is about."""
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """A turn was taken, or a call answered."""
    kills: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    """What open sessions were about when the runner was killed."""
    deaths: Counter[str] = field(default_factory=Counter)
    """Ends that nobody asked for."""
    exits: dict[str, int | None] = field(default_factory=dict)
    enough: bool = False
    lines: dict[str, Counter[str]] = field(default_factory=dict)
    """Pass -> the effects that it left."""

    @property
    def open(self) -> int:
        """Rollouts that are not over, as far as their first sessions tell."""
        return len(self.requested) - len(self.over)


@dataclass(slots=True)
class Processes:
    """One runner, one gateway, one sandbox worker, one engine."""

    settings: Settings
    path: str
    """PYTHONPATH that offers the recipe."""
    effects: Path
    children: dict[str, Child] = field(default_factory=dict)

    def argv(self, name: str) -> tuple[str, ...]:
        """Its command line."""
        if name != "engine":
            return (*TURNLOG, "role", name)
        script, port = Path(__file__).with_name("scripted_engine.py"), self.settings.engine.urls[0].rpartition(":")[2]
        return (sys.executable, str(script), port, self.settings.model.path, "--by-ids")

    def variables(self) -> dict[str, str]:
        """Variables of every process."""
        settings = self.settings
        return {
            "PYTHONPATH": self.path,
            noting.EFFECTS: str(self.effects),
            "TURNLOG_MODEL_PATH": settings.model.path,
            "TURNLOG_GATEWAY_URL": settings.gateway.url,
            "TURNLOG_GATEWAY_PORT": str(settings.gateway.port),
            "TURNLOG_RUNNER_CONCURRENCY": str(OPEN),
            "TURNLOG_SANDBOX_BACKEND": "subprocess",
            "TURNLOG_SANDBOX_SLOTS": str(OPEN),
        }

    def start(self, name: str) -> None:
        """Start it, or start it again."""
        env = {**environment(self.settings, f"{name}-0"), **self.variables()}
        file = Path(self.settings.run.directory) / f"{name}.log"
        self.children[name] = Child(Launch(name=name, argv=self.argv(name), log=file, env=env)).start()

    def revive(self, story: Story) -> None:
        """Start again what ended unasked, as a supervisor does."""
        for name, child in self.children.items():
            if child.returncode is not None:
                story.deaths[name] += 1
                say(f"{name} ended by itself: {child.tail()}")
                self.start(name)


def requested(settings: Settings, kind: str, number: int, recipe: str = noting.RECIPE.name) -> RolloutRequested:
    """The rollout of a task, as a feeder asks for it. Each of a group has a task of its own, so that an effect tells
    whose it is."""
    group, index = f"{kind}-{number // GROUP_SIZE}", number % GROUP_SIZE
    rollout = ids.rollout_id(group, index)
    return RolloutRequested(
        event_id=rollout, run_id=settings.run.id, group_id=group, floor=0, task_id=group, rollout_id=rollout,
        rollout_index=index, group_size=GROUP_SIZE, draw=0, dataset="chaos", dataset_epoch=0, index=0,
        recipe=recipe, purpose=Purpose.train, task=json.dumps({"prompt": f"task {number}"}).encode(),
        sampling=Sampling(max_new_tokens=160), min_weight_version=0,
        limits=Limits(max_turns=8, max_context_tokens=2048, deadline_s=PATIENCE_S),
    )  # fmt: skip


async def ask(role: Role, story: Story, recipe: str = noting.RECIPE.name) -> None:
    """Keep OPEN rollouts open until there is enough."""
    while not story.enough:
        if story.open < OPEN:
            for _ in range(GROUP_SIZE):
                await begin(role, story, STRUCK, len(story.requested), recipe)
        await asyncio.sleep(0.02)


async def begin(role: Role, story: Story, kind: str, number: int, recipe: str = noting.RECIPE.name) -> None:
    """One more rollout."""
    request = requested(role.settings, kind, number, recipe)
    story.requested[request.rollout_id] = kind, number
    await role.events.append(request)


async def follow(role: Role, story: Story) -> None:
    """Note what sessions are about, until cancelled."""
    followed = [topic.name for topic in (SESSIONS, TURNS, TOOL_CALLS, TOOL_RESULTS)]
    counts = {name: (await role.log.topics())[name].partitions for name in followed}
    async with role.log.reader() as reader:
        reader.assign({Partition(name, number): 0 for name in followed for number in range(counts[name])})
        while True:
            for record in await reader.poll(timeout_s=0.2):
                event: Any = await role.events.decode(record)
                if isinstance(event, SessionFinished) and event.final:
                    story.over.add(event.session_id)
                    story.stages.pop(event.session_id, None)
                elif type(event) in STAGES and event.session_id not in story.over:
                    story.stages[event.session_id] = STAGES[type(event)]
                if isinstance(event, TurnCompleted | ToolCallCompleted):
                    story.moved.set()


async def strike(processes: Processes, story: Story, *, kills: int, rng: random.Random) -> None:
    """Kill the runner again and again, each time some moments after it has gone on with something."""
    while story.kills < kills:
        story.moved.clear()
        deadline = time.monotonic() + PATIENCE_S
        while not story.moved.is_set() and time.monotonic() < deadline:
            processes.revive(story)
            await asyncio.sleep(0.01)
        if not story.moved.is_set():
            say(f"nothing has moved for {PATIENCE_S:g} s: no more kills")
            break
        await asyncio.sleep(rng.uniform(0.0, AFTER_S))
        if processes.children["runner"].returncode is None:
            story.struck.update(story.stages.values())
            processes.children["runner"].kill()
            story.kills += 1
            say(f"kill {story.kills}: {dict(Counter(story.stages.values()))}, {len(story.over)} sessions are over")
            processes.start("runner")
    story.enough = True


async def rest(processes: Processes, story: Story) -> None:
    """Until no rollout is open."""
    deadline = time.monotonic() + PATIENCE_S
    while story.open and time.monotonic() < deadline:
        processes.revive(story)
        await asyncio.sleep(0.1)


async def torture(settings: Settings, path: str, effects: Path, *, kills: int, seed: int) -> int:
    """The whole run; the exit status."""
    processes, story = Processes(settings, path, effects), Story()
    async with open_role("chaos", settings) as role:
        plan = assembler_plan(await configure(role), settings.assembler)
        await role.events.append(registered(settings))
        for name in ("engine", "gateway", "sandbox", "runner"):
            processes.start(name)
        following = asyncio.create_task(follow(role, story))
        asking = asyncio.create_task(ask(role, story))
        await strike(processes, story, kills=kills, rng=random.Random(seed))
        await asking
        say(f"{kills} kills; waiting for {story.open} rollouts")
        await rest(processes, story)
        story.lines[STRUCK] = taken(effects)
        for number in range(len(story.requested)):
            await begin(role, story, CALM, number)
        await rest(processes, story)
        story.lines[CALM] = taken(effects)
        story.exits = {name: child.stop() for name, child in reversed(processes.children.items())}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        records = await everything(role, SESSIONS.name, TURNS.name, SNAPSHOTS.name, TOOL_CALLS.name)
    return verdict(story, samples_of(plan, [one for one in records if one[0] != TOOL_CALLS.name]), records, settings,
                   kills=kills)  # fmt: skip


def taken(effects: Path) -> Counter[str]:
    """The lines so far, which the next pass shall not see."""
    lines = Counter(effects.read_text().split())
    effects.write_text("")
    return lines


Shape = list[tuple[object, ...]]


def shapes(story: Story, samples: list[SegmentSample]) -> dict[str, dict[int, Shape]]:
    """Pass -> task -> what trains of its rollout, without the names of sessions."""
    found: dict[str, dict[int, Shape]] = {STRUCK: {}, CALM: {}}
    for sample in samples:
        kind, number = story.requested[sample.rollout_id]
        spans = tuple((span.start, span.length, span.trained, span.version) for span in sample.spans)
        row = (sample.segment_index, sample.token_ids, sample.logprobs, spans, sample.reward, sample.advantage)
        found[kind].setdefault(number, []).append(row)
    return found


def ends(records: list[Recorded]) -> dict[str, tuple[int, int]]:
    """Rollout -> how many sessions it had, and how many ends of them are final."""
    started = {event.session_id: event.rollout_id for _, _, event in records if isinstance(event, SessionStarted)}
    final = {(event.session_id, event.event_id) for _, _, event in records
             if isinstance(event, SessionFinished) and event.final}  # fmt: skip
    sessions, finals = Counter(started.values()), Counter(started[session] for session, _ in final)
    return {rollout: (sessions[rollout], finals[rollout]) for rollout in sessions}


def untrained(samples: list[SegmentSample], records: list[Recorded], tokens: TextTokens) -> list[str]:
    """Sessions of which what was judged is not what the last of its turns says that trains, once, by its tokens."""
    held: dict[str, list[SegmentSample]] = {}
    for sample in samples:
        held.setdefault(sample.session_id, []).append(sample)
    wrong = []
    for each in judged(records):
        last = each.finish.turns[-1]
        said = [tokens.decode(ids_of(sample)[span.start : span.start + span.length])
                for sample in held.get(each.session_id, []) for span in sample.spans
                if span.trained and span.turn == last]  # fmt: skip
        if said != [f"{each.said}<|im_end|>"] or last in each.finish.undelivered:
            wrong.append(f"session {each.session_id}: judged {each.said!r}, trained {said}")
    return wrong


def ids_of(sample: SegmentSample) -> list[int]:
    """Its token ids, which are few enough to stand in the record."""
    assert isinstance(sample.token_ids, bytes)
    return [int(token) for token in np.frombuffer(sample.token_ids, dtype="<i4")]


def verdict(
    story: Story, samples: list[SegmentSample], records: list[Recorded], settings: Settings, *, kills: int
) -> int:
    """Compare, print the line."""
    ended, found = ends(records), shapes(story, samples)
    skipped = [rollout for rollout in story.requested if ended.get(rollout, (0, 0))[1] == 0]
    anew = [rollout for rollout, (sessions, finals) in ended.items() if sessions > 1 or finals > 1]
    unlike = [number for number in found[CALM].keys() | found[STRUCK].keys()
              if found[CALM].get(number) != found[STRUCK].get(number)]  # fmt: skip
    calls = Counter({event.call_id: 1 for _, _, event in records if isinstance(event, ToolCallRequested)})
    struck, calm = story.lines[STRUCK], story.lines[CALM]
    twice = [line for line, times in (struck + calm).items() if times > 2 or struck[line] > 1]
    lost = [line for line in struck.keys() | calm.keys() if not (struck[line] and calm[line])]
    wrong = untrained(samples, records, TextTokens(Path(settings.model.path)))
    for what, which in (("SKIPPED", skipped), ("ANEW", anew), ("UNLIKE", unlike), ("TWICE", twice), ("LOST", lost),
                        ("UNTRAINED", wrong)):  # fmt: skip
        for one in which[:SHOWN]:
            say(f"{what}: {one}")
    known = (struck + calm).total() == len(calls) and len(samples) == len(story.requested)
    ok = known and not (skipped or anew or unlike or twice or lost or wrong) and story.kills == kills
    ok = ok and all(status == 0 for name, status in story.exits.items() if name != "engine")
    return told(
        id="runner", kills=story.kills, lost=len(lost) + len(wrong), twice=len(twice) + len(anew),
        skipped=len(skipped), identical=not unlike, ok=ok,
        detail={
            "struck_while": story.struck, "deaths": story.deaths, "rollouts": len(story.requested),
            "samples": len(samples), "calls": len(calls), "effects": (struck + calm).total(),
            "turns": sum(isinstance(event, TurnCompleted) for _, _, event in records),
            "trained_turns": sum(len(sample.spans) for sample in samples), "exits": story.exits,
        },
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill the runner in the middle of sessions.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with (
        servers(f"chaos-{uuid4().hex[:8]}") as settings,
        tempfile.TemporaryDirectory(prefix="turnlog-chaos-effects-") as outside,
    ):
        settings, effects = with_model(settings), Path(outside) / "lines"
        Path(outside).chmod(0o711)  # sandboxes have users of their own
        effects.touch()
        effects.chmod(0o666)
        path = offered(Path(settings.run.directory) / "packages", noting.RECIPE.name, Path(noting.__file__))
        return asyncio.run(torture(settings, path, effects, kills=arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
