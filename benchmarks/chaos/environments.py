"""Kill runner, gateway, sandbox worker and environment server in the middle of steps: `python
benchmarks/chaos/environments.py [--kills 20]`, so many times each.

Rollouts step through an OpenEnv server of upstream's package (noting_server.py), which writes every step to a file
outside of the log. Afterwards the same tasks run once more undisturbed. No rollout may be missing, no session may have
taken a step twice or have been answered a step that was not taken, the conversations of both passes must be equal to
the last checksum, and every session that failed must say why by name and have no reward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import stepping
from answers import everything, registered, with_model
from runner import PATIENCE_S, Processes, Story, ask, begin, follow, rest
from servers import offered, say, servers, told

from tests.environments.openenv_servers import upstream_python
from turnlog.infra.embedded.ports import HOST, free_ports
from turnlog.infra.roles.role import open_role
from turnlog.infra.roles.runs import configure
from turnlog.schemas.events import (
    Outcome,
    RewardAssigned,
    SessionFinished,
    SessionStarted,
    ToolCallCompleted,
    ToolCallRequested,
    ToolStatus,
)
from turnlog.schemas.topics import SESSIONS, TOOL_CALLS, TOOL_RESULTS
from turnlog.settings import Settings

SERVER = "environment"
TARGETS = ("runner", "gateway", "sandbox", SERVER)
AFTER_S = 1.5
"""The longest time from a record of a turn or an answer to the next kill."""
SHOWN = 5
NAMED = (
    "environment_lost", "environment_unreachable", "environment_silent", "Outage", "GatewayUnavailable", "NoWorker",
    "EnginesBusy",
)  # fmt: skip
"""Reasons that a session of this run may end by, other than completed."""


@dataclass(slots=True, kw_only=True)
class StepProcesses(Processes):
    """The processes of Processes, and one environment server."""

    port: int
    """Of the environment server."""

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def argv(self, name: str) -> tuple[str, ...]:
        """See Processes."""
        if name != SERVER:
            return Processes.argv(self, name)
        script = Path(__file__).with_name("noting_server.py")
        return (str(upstream_python()), str(script), str(self.port), str(self.effects))

    def variables(self) -> dict[str, str]:
        """See Processes."""
        return {
            **Processes.variables(self),
            stepping.SERVER: self.url,
            "TURNLOG_RUNNER_MAX_ATTEMPTS": "40",
            "TURNLOG_SANDBOX_SLOTS": "2",
            "TURNLOG_EGRESS_ALLOW": json.dumps([f"GET {self.url}/*"]),
            "TURNLOG_EGRESS_PRIVATE_HOSTS": json.dumps([f"{HOST}:{self.port}"]),
        }

    async def serves(self) -> None:
        """Wait until the environment server answers. There is no event to wait for."""
        async with httpx.AsyncClient() as http, asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if (await http.get(f"{self.url}/health")).is_success:
                        return
                except httpx.TransportError:
                    await asyncio.sleep(0.1)


async def strike(processes: StepProcesses, story: Story, *, kills: int, rng: random.Random) -> Counter[str]:
    """Kill each target `kills` times in a random order, each time some moments after a rollout has gone on."""
    order = [target for target in TARGETS for _ in range(kills)]
    rng.shuffle(order)
    struck: Counter[str] = Counter()
    for target in order:
        story.moved.clear()
        over, deadline = len(story.over), time.monotonic() + PATIENCE_S
        # Kills that end environments wait for a session that completes, or none ever would.
        while time.monotonic() < deadline and not (
            len(story.over) > over if target in (SERVER, "sandbox") else story.moved.is_set()
        ):
            processes.revive(story)
            await asyncio.sleep(0.01)
        if time.monotonic() >= deadline:
            say(f"nothing has moved for {PATIENCE_S:g} s: no more kills")
            break
        await asyncio.sleep(rng.uniform(0.0, AFTER_S))
        processes.children[target].kill()
        struck[target] += 1
        say(f"kill {struck.total()} ({target}): {len(story.over)} sessions are over")
        processes.start(target)
        if target == SERVER:
            await processes.serves()
    story.enough = True
    return struck


@dataclass(slots=True)
class StepHistory:
    """What the log holds of all sessions."""

    rollout: dict[str, str] = field(default_factory=dict)
    finals: dict[str, SessionFinished] = field(default_factory=dict)
    """Rollout -> its final end."""
    failed: list[SessionFinished] = field(default_factory=list)
    rewarded: Counter[str] = field(default_factory=Counter)
    """Session -> its rewards."""
    steps: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)
    """Session -> call -> its number and arguments."""
    answers: dict[str, ToolCallCompleted] = field(default_factory=dict)
    """Call -> its effective answer."""

    @classmethod
    def of(cls, records: list[Any]) -> StepHistory:
        """Read it from records in log order."""
        found = cls()
        for _, _, event in records:
            match event:
                case SessionStarted():
                    found.rollout[event.session_id] = event.rollout_id
                case SessionFinished():
                    if event.final:
                        found.finals.setdefault(found.rollout[event.session_id], event)
                    if event.outcome is not Outcome.completed:
                        found.failed.append(event)
                case RewardAssigned():
                    found.rewarded[event.session_id] += 1
                case ToolCallRequested():
                    about = (event.call_seq, event.arguments.decode())  # type: ignore[union-attr]
                    found.steps.setdefault(event.session_id, {})[event.call_id] = about
                case ToolCallCompleted():
                    found.answers.setdefault(event.call_id, event)
        return found

    def conversation(self, rollout: str) -> list[tuple[int, str, str]] | None:
        """What the rollout's final session asked of the environment and was answered; None if it has none."""
        finish = self.finals.get(rollout)
        if finish is None or finish.outcome is not Outcome.completed:
            return None
        calls = self.steps.get(finish.session_id, {})
        return [(number, arguments, self.answers[call].output.decode()) for call, (number, arguments) in calls.items()]

    def lines(self, rollout: str) -> Counter[str]:
        """How many sessions of a rollout asked for each line, and how many of those were told that it is written."""
        asked: Counter[str] = Counter()
        for session, calls in self.steps.items():
            if self.rollout.get(session) == rollout:
                asked.update(json.loads(arguments).get("action", {}).get("line", "") for _, arguments in calls.values())
        return asked


async def torture(settings: Settings, path: str, effects: Path, *, kills: int, seed: int) -> int:
    """The whole run; the exit status."""
    [port] = free_ports(1)
    processes, story = StepProcesses(settings=settings, path=path, effects=effects, port=port), Story()
    async with open_role("chaos", settings) as role:
        await configure(role)
        await role.events.append(registered(settings))
        for name in (SERVER, "engine", "gateway", "sandbox", "runner"):
            processes.start(name)
        await processes.serves()
        following = asyncio.create_task(follow(role, story))
        asking = asyncio.create_task(ask(role, story, recipe=stepping.RECIPE.name))
        struck = await strike(processes, story, kills=kills, rng=random.Random(seed))
        await asking
        say(f"{struck.total()} kills; waiting for {story.open} rollouts")
        await rest(processes, story)
        tasks = len(story.requested)
        for number in range(tasks):
            await begin(role, story, "calm", number, recipe=stepping.RECIPE.name)
        await rest(processes, story)
        exits = {name: child.stop() for name, child in reversed(processes.children.items())}
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        records = await everything(role, SESSIONS.name, TOOL_CALLS.name, TOOL_RESULTS.name)
    return verdict(story, StepHistory.of(records), effects, struck, exits, kills=kills)


def verdict(
    story: Story, history: StepHistory, effects: Path, struck: Counter[str], exits: dict[str, int | None], *, kills: int
) -> int:
    """Compare, print the line."""
    skipped = [rollout for rollout in story.requested if rollout not in history.finals]
    passes: dict[int, list[Any]] = {}
    for rollout, (_, number) in story.requested.items():
        passes.setdefault(number, []).append(history.conversation(rollout))
    ends: dict[int, list[str]] = {number: [] for number in passes}
    for rollout, (_, number) in story.requested.items():
        finish = history.finals.get(rollout)
        ends[number].append(f"{finish.outcome.value} {finish.reason}".strip() if finish else "no end")
    unlike = [
        f"task {number}, whose sessions ended as {ends[number]}: {both}"
        for number, both in passes.items()
        if len(both) != 2 or both[0] is None or both[0] != both[1]
    ]
    # Both passes of a task ask for the same lines: a session takes a step once at most.
    taken = Counter(effects.read_text().splitlines())
    asked: Counter[str] = Counter()
    for rollout, (_, number) in story.requested.items():
        for line, times in history.lines(rollout).items():
            asked[f"task-{number} {line}"] += times if line else 0
    twice = [line for line, times in taken.items() if times > asked[line]]
    told_ok: Counter[str] = Counter()
    for session, calls in history.steps.items():
        number = story.requested[history.rollout[session]][1]
        for call, (_, arguments) in calls.items():
            line = json.loads(arguments).get("action", {}).get("line")
            answer = history.answers.get(call)
            told_ok[f"task-{number} {line}"] += bool(line and answer and answer.status is ToolStatus.ok)
    lost = [line for line, times in told_ok.items() if times > taken[line]]
    nameless = [finish.reason for finish in history.failed if not any(name in finish.reason for name in NAMED)]
    rewarded = [finish.session_id for finish in history.failed if history.rewarded[finish.session_id]]
    for what, which in (("SKIPPED", skipped), ("UNLIKE", unlike), ("TWICE", twice), ("LOST", lost),
                        ("NAMELESS", nameless), ("REWARDED", rewarded)):  # fmt: skip
        for one in which[:SHOWN]:
            say(f"{what}: {one}")
    reasons = Counter(name for finish in history.failed for name in NAMED if name in finish.reason)
    ok = not (skipped or unlike or twice or lost or nameless or rewarded) and min(struck[t] for t in TARGETS) == kills
    ok = ok and all(status == 0 for name, status in exits.items() if name not in ("engine", SERVER))
    return told(
        id="environments", kills=struck.total(), lost=len(lost) + len(nameless), twice=len(twice) + len(rewarded),
        skipped=len(skipped), identical=not unlike, ok=ok,
        detail={
            "struck": struck, "deaths": story.deaths, "rollouts": len(story.requested), "exits": exits,
            "sessions": len(history.rollout), "failed_by": reasons, "steps": taken.total(),
            "calls": sum(len(calls) for calls in history.steps.values()),
        },
    )  # fmt: skip


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description="Kill whatever takes part in the steps of an environment.")
    parser.add_argument("--kills", type=int, default=20, help="of each of runner, gateway, sandbox worker and server")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with (
        servers(f"chaos-{uuid4().hex[:8]}") as settings,
        tempfile.TemporaryDirectory(prefix="turnlog-chaos-effects-") as outside,
    ):
        settings, effects = with_model(settings), Path(outside) / "lines"
        effects.touch()
        path = offered(Path(settings.run.directory) / "packages", stepping.RECIPE.name, Path(stepping.__file__))
        return asyncio.run(torture(settings, path, effects, kills=arguments.kills, seed=arguments.seed))


if __name__ == "__main__":
    raise SystemExit(main())
